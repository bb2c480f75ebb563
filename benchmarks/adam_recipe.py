#!/usr/bin/env python3
"""Compares ways of giving AdamW sparse gradients, by the loss of a small language model.

    python benchmarks/adam_recipe.py                                    two ranks of this machine
    torchrun --nproc-per-node 4 benchmarks/adam_recipe.py --density 0.05 --seeds 1

A byte-level transformer learns the sources of Python's standard library, so that losses depend a
little on Python's release. For one seed every method begins with the same parameters and gets the
same batches. The figure is the loss on text that was held out, in nats per byte.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
from sparsecomm.cli.bench import at_least_1, share, write_json
from sparsecomm.cli.ranks import run_on_ranks
from sparsecomm.compression import CompressionOptions

CONTEXT, WIDTH, LAYERS, HEADS = 64, 128, 3, 4
HELD_OUT = 0.1  # of the text
TEST_BATCHES = 40
WARMUP = 50  # steps in which the learning rate rises
DECAY = 0.01
BETA1, BETA2 = 0.9, 0.999

# What the state is told, None for plain DDP, and AdamW's first beta.
METHODS: dict[str, tuple[CompressionOptions | None, float]] = {
    "dense": (None, BETA1),
    "plain": ({}, BETA1),
    "first_moment": ({"first_moment": BETA1}, BETA1),
    "momentum": ({"momentum": BETA1}, 0.0),
    "prepare": ({}, BETA1),
}


@dataclass(frozen=True)
class Settings:
    methods: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    steps: int
    batch: int
    density: float
    file: Path | None


@dataclass
class Row:
    method: str
    world_size: int
    density: float | None
    lr: float
    steps: int
    batch: int
    python: str
    seed: int
    loss: float


class Model(nn.Module):
    """A decoder of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text: Tensor) -> Tensor:
        """Returns the mean loss of each byte but the first, given those before it."""
        hidden = self.bytes(text[:, :-1]) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())


def read_text() -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)


def batches(text: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (size, 1), generator=generator)
        yield text[starts + torch.arange(CONTEXT + 1)].long()


def rate(step: int, steps: int) -> float:
    """The learning rate's factor: a linear rise, then half a cosine down to a tenth."""
    rise = min(1.0, (step + 1) / WARMUP)
    return rise * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


def train(settings: Settings, method: str, lr: float, seed: int, text: Tensor) -> float:
    """Returns the loss in the end, which is the same on every rank."""
    options, beta1 = METHODS[method]
    held_out = round(HELD_OUT * len(text))
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(Model())
    if options is not None and method != "prepare":
        sparsecomm.register_comm_hook(
            ddp, sparsecomm.OkTopkState(density=settings.density, **options)
        )
    optimizer = torch.optim.AdamW(ddp.parameters(), lr, (beta1, BETA2), weight_decay=DECAY)
    if method == "prepare":
        sparsecomm.prepare(ddp, optimizer, settings.density)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: rate(t, settings.steps))
    own = batches(text[:-held_out], settings.batch, 1000 * seed + dist.get_rank())
    for _ in range(settings.steps):
        optimizer.zero_grad()
        torch.autograd.backward(ddp(next(own)))
        optimizer.step()
        schedule.step()
    test = batches(text[-held_out:], 8, 0)
    with torch.no_grad():
        losses: list[float] = [ddp.module(next(test)).item() for _ in range(TEST_BATCHES)]
    return statistics.mean(losses)


def measure(settings: Settings) -> None:
    text = read_text()
    rows = []
    for seed, lr, method in product(settings.seeds, settings.rates, settings.methods):
        row = Row(
            method=method,
            world_size=dist.get_world_size(),
            density=None if METHODS[method][0] is None else settings.density,
            lr=lr,
            steps=settings.steps,
            batch=settings.batch,
            python=platform.python_version(),
            seed=seed,
            loss=train(settings, method, lr, seed, text),
        )
        rows.append(row)
        if dist.get_rank() == 0:
            print(f"{method:13} lr {lr:<6g} seed {seed}: {row.loss:.3f}", flush=True)
            if settings.file is not None:
                write_json(settings.file, [asdict(row) for row in rows])
    if dist.get_rank() == 0:
        print(table(rows))


def table(rows: Sequence[Row]) -> str:
    """The means over the seeds."""
    rates = list(dict.fromkeys(row.lr for row in rows))
    lines = [" ".join(["method       ", *(f"lr {lr:<7g}" for lr in rates)])]
    for method in dict.fromkeys(row.method for row in rows):
        losses = ([r.loss for r in rows if (r.method, r.lr) == (method, lr)] for lr in rates)
        lines.append(" ".join([f"{method:13}", *(f"{statistics.mean(x):<10.3f}" for x in losses)]))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=at_least_1, default=2, help="ranks to start; torchrun brings its own")
    add("--methods", nargs="+", choices=METHODS, default=[*METHODS], help="what to compare")
    add("--lr", type=float, nargs="+", default=[3e-3, 6e-3], help="learning rates")
    add("--seeds", type=at_least_1, nargs="+", default=[1, 2, 3], help="a run of each")
    add("--steps", type=at_least_1, default=600, help="steps of a run")
    add("--batch", type=at_least_1, default=8, help="sequences per rank")
    add("--density", type=share, default=0.02, help="of the sparse methods")
    add("--json", type=Path, help="file that the figures also go to")
    options = parser.parse_args(arguments)
    settings = Settings(
        tuple(options.methods),
        tuple(options.lr),
        tuple(options.seeds),
        options.steps,
        options.batch,
        options.density,
        options.json,
    )
    return run_on_ranks(partial(measure, settings), options.ranks)


if __name__ == "__main__":
    sys.exit(main())

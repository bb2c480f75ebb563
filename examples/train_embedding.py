#!/usr/bin/env python3
"""Trains word embeddings whose dense gradients are mostly blocks of zeros, without loss of any.

    torchrun --nproc-per-node 2 examples/train_embedding.py
    torchrun ... examples/train_embedding.py --aggregators 10.0.0.7:7000 10.0.0.8:7000

The same model trains twice with plain DistributedDataParallel, over gloo and over the backend
"sparsecomm" with aggregators, which sends only the blocks that a batch has touched. A table says
what each rank has sent and received. Without --aggregators every rank starts one of its own, for a
try on one machine.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from common.documents import add_data_option, read
from common.options import positive, positive_real
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import sparsecomm

WINDOW = 4  # words to either side
NEGATIVES = 5  # words drawn at random for each pair


class SkipGram(nn.Module):
    """Predicts which words stand near a word (Mikolov et al. 2013), by negative sampling."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.word = nn.Embedding(words, width)  # sparse=False: dense gradients
        self.near = nn.Embedding(words, width)
        nn.init.normal_(self.word.weight, std=width**-0.5)
        nn.init.zeros_(self.near.weight)

    def forward(self, words: Tensor, candidates: Tensor) -> Tensor:
        """The loss of words [n] and candidates [n, 1 + NEGATIVES], of which the first is right."""
        scores = (self.near(candidates) * self.word(words)[:, None]).sum(2)
        labels = torch.zeros_like(scores)
        labels[:, 0] = 1
        return functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum") / len(
            words
        )


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_data_option(parser)
    add("--aggregators", nargs="+", default=[], metavar="HOST:PORT", help="started by an operator")
    add("--steps", type=positive, default=100, help="of training, each time")
    add("--batch", type=positive, default=64, help="words of a rank and step")
    add("--vocabulary", type=positive, default=20_000, help="words that are embedded")
    add("--width", type=positive, default=64, help="of an embedding")
    add("--limit", type=positive, default=300_000, help="words that are read")
    add("--lr", type=positive_real, default=0.5)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    dist.init_process_group("gloo")
    text = words_of(options.data, options.limit, options.vocabulary)
    plain, plain_loss, plain_seconds = train(dist.group.WORLD, text, options)
    with given_or_own(options.aggregators) as addresses:
        group = dist.new_group(
            backend="sparsecomm", pg_options=sparsecomm.Options(aggregators=addresses)
        )
        blocks, loss, seconds = train(group, text, options)
        stats = sparsecomm.backend_stats(group)
        dist.destroy_process_group(group)
    pairs = zip(plain.parameters(), blocks.parameters(), strict=True)
    apart = max((a - b).abs().max().item() for a, b in pairs)
    if dist.get_rank() == 0:
        numel, ranks = sum(p.numel() for p in plain.parameters()), dist.get_world_size()
        ring = 2 * (ranks - 1) / ranks * numel * 4 / 1e6
        sent, received = (
            stats[key] / options.steps / 1e6 for key in ("sent_bytes", "received_bytes")
        )
        print(
            f"{numel:,} parameters, {ranks} ranks, {len(addresses)} aggregators, per rank and step:"
        )
        print(f"{'backend':<12}{'sent MB':>9}{'received MB':>13}{'s':>8}{'loss':>9}")
        print(f"{'gloo':<12}{ring:>9.3f}{ring:>13.3f}{plain_seconds:>8.3f}{plain_loss:>9.4f}")
        print(f"{'sparsecomm':<12}{sent:>9.3f}{received:>13.3f}{seconds:>8.3f}{loss:>9.4f}")
        print(f"gloo's by the formula of its ring; parameters differ by {apart:.1e} at most")
    dist.destroy_process_group()
    return 0


def words_of(data: str, limit: int, vocabulary: int) -> Tensor:
    """The text as numbers of words, the most frequent first; rarer words are left out."""
    found = (word for _, text in read(data) for word in re.findall(r"[a-z]+", text.lower()))
    words = list(islice(found, limit))
    numbers = {word: i for i, (word, _) in enumerate(Counter(words).most_common(vocabulary))}
    return torch.tensor([numbers[word] for word in words if word in numbers])


def batches(text: Tensor, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Words and candidates of each step, others on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        place = torch.randint(WINDOW, len(text) - WINDOW, (options.batch,), generator=generator)
        step = torch.randint(1, WINDOW + 1, (options.batch,), generator=generator)
        sign = 2 * torch.randint(2, (options.batch,), generator=generator) - 1
        drawn = torch.randint(options.vocabulary, (options.batch, NEGATIVES), generator=generator)
        yield text[place], torch.cat([text[place + sign * step][:, None], drawn], 1)


def train(
    group: dist.ProcessGroup | None, text: Tensor, options: argparse.Namespace
) -> tuple[nn.Module, float, float]:
    """Returns the model, the mean loss of the last tenth of the steps, and seconds per step."""
    torch.manual_seed(0)
    model = SkipGram(options.vocabulary, options.width)
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=options.lr)
    losses: list[float] = []
    start = time.perf_counter()
    for words, candidates in islice(batches(text, options), options.steps):
        optimizer.zero_grad()
        loss = ddp(words, candidates)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = (time.perf_counter() - start) / options.steps
    last = torch.tensor(losses[-max(1, options.steps // 10) :]).mean()
    dist.all_reduce(last)
    return model, last.item() / dist.get_world_size(), seconds


@contextmanager
def given_or_own(addresses: list[str]) -> Iterator[list[str]]:
    if addresses:
        yield addresses
        return
    program = Path(sparsecomm.__file__).with_name("sparsecomm-aggregator")
    command = [str(program), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            own = process.stdout.readline().removeprefix("listening at ").strip()
            everybodys: list[str] = [""] * dist.get_world_size()
            dist.all_gather_object(everybodys, own)
            yield everybodys
            dist.barrier()  # before any of them ends
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Trains a language model with AdamW, data-parallel, exchanging dense or sparse gradients.

    torchrun --nproc-per-node 2 examples/train_lm.py --hook ddp
    torchrun --nproc-per-node 2 examples/train_lm.py --hook prepare --recipe recommended
    torchrun --nproc-per-node 8 examples/train_lm.py --size base --data text:FOLDER
    python examples/report.py runs/lm-*

The model is a decoder of bytes, so that there is no vocabulary to make. The default data are
English prose from Python's standard library, and the default size fits them; a folder has a
document per file, or what WikiExtractor makes of a Wikipedia. Each run leaves summary.json,
TensorBoard events and, if asked for, checkpoints in its output folder, which is runs/lm-HOOK.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from common import training
from common.documents import add_data_option, fingerprint
from common.options import positive
from common.order import epoch_batches, steps_per_epoch
from common.seeds import mix_seed
from common.task import Batch, Task, decay_matrices
from lm.model import SIZES, Decoder
from lm.text import read_text
from torch import Tensor, nn
from torch.nn import functional

BETAS = (0.9, 0.999)
WEIGHT_DECAY = 0.01
WARMUP = 0.1  # of the steps
LAST_RATE = 0.1  # of the peak
EVALUATION_BATCH = 64

# With the momentum before the selection, AdamW does best here at twice dense training's rate.
RATE_OF_RECIPE = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    return training.run("train_lm", parse_options(arguments), LanguageTask)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = training.make_parser(
        "Train a language model with AdamW and dense or sparse gradient exchange.", "lm"
    )
    parser.set_defaults(epochs=2, lr=None)
    add = parser.add_argument
    add("--size", choices=SIZES, default="tiny", help="of the model")
    add_data_option(parser)
    add("--limit", type=positive, default=None, help="use only the first documents, this number")
    options = training.parse(parser, arguments, {"momentum_correction": True})
    if options.lr is None:
        options.lr = SIZES[options.size].learning_rate
        if options.recipe == "recommended":
            options.lr *= RATE_OF_RECIPE
    return options


class LanguageTask(Task):
    """The next byte by a decoder; AdamW."""

    name = "decoder of bytes"
    unit = "sequence"
    quality = "test_loss"
    higher_is_better = False

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        size = SIZES[options.size]
        self.train, self.test = read_text(options.data, size.context, options.limit)
        kind = options.data.partition(":")[0]
        self.data = f"{kind}-{fingerprint(options.data)[:12]}"
        self.batch, self.lr, self.seed = options.batch, options.lr, options.seed
        self.model = Decoder(size)
        self.steps_per_epoch = steps_per_epoch(len(self.train), self.batch, self.ranks)
        self.steps = options.epochs * self.steps_per_epoch

    def optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(decay_matrices(self.model, WEIGHT_DECAY), self.lr, BETAS)

    def learning_rate(self, step: int) -> float:
        return learning_rate(step, self.steps, self.lr)

    def batches(self, epoch: int) -> Iterator[Batch]:
        # Examples begin elsewhere in every epoch, at the same bytes on all ranks.
        start = mix_seed(self.seed, epoch) % self.train.context
        for indices in epoch_batches(
            len(self.train), self.batch, self.rank, self.ranks, self.seed, epoch
        ):
            yield self.train.take(indices, start)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        text, following = batch
        return functional.cross_entropy(model(text).flatten(0, 1), following.flatten())

    def evaluate(self) -> Tensor:
        """Sums the losses of this rank's share of the examples, and counts their bytes."""
        sums = torch.zeros(2, dtype=torch.float64)
        share_of_rank = torch.arange(self.rank, len(self.test), self.ranks)
        for first in range(0, len(share_of_rank), EVALUATION_BATCH):
            indices = share_of_rank[first : first + EVALUATION_BATCH]
            batch = self.to_device(self.test.take(indices))
            sums[0] += self.loss(self.model, batch).item() * batch[1].numel()
            sums[1] += batch[1].numel()
        return sums

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """The loss in nats per byte."""
        return {"test_loss": (sums[0] / sums[1]).item()}


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rises linearly over a tenth of the steps, then falls along a cosine to a tenth."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    fallen = 0.5 * (1 - math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    return peak * (1 - (1 - LAST_RATE) * fallen)


if __name__ == "__main__":
    sys.exit(main())

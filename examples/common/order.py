"""The order in which ranks go through examples."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from common.seeds import mix_seed


def epoch_batches(
    examples: int, batch: int, rank: int, ranks: int, seed: int, epoch: int
) -> Iterator[Tensor]:
    """This rank's batches of indices, in an order that depends on seed and epoch only.

    Every batch is full: the last ones repeat examples from the front of the order.
    """
    generator = torch.Generator().manual_seed(mix_seed(seed, epoch))
    order = torch.randperm(examples, generator=generator)
    for step in range(steps_per_epoch(examples, batch, ranks)):
        start = (step * ranks + rank) * batch
        yield order[torch.arange(start, start + batch) % examples]


def steps_per_epoch(examples: int, batch: int, ranks: int) -> int:
    return math.ceil(examples / (batch * ranks))

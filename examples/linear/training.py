"""Training by minibatches or by blocks of coordinates, an epoch at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from common.errors import DataError
from common.seeds import mix_seed
from torch import Tensor

from linear.exchange import Exchange
from linear.model import Gradient, Weights, gradient, losses, rounded, slopes, units
from linear.svmlight import LARGEST_INDEX, Rows, Share, ranges

BLOCK = 16  # batches that are read, and mixed, at a time


@dataclass(frozen=True)
class Survey:
    """What all ranks know about the data after a first pass over it."""

    features: int
    train: tuple[int, ...]  # examples of each rank
    test: int  # examples held out on all ranks
    majority: float  # share of the more frequent label among those held out
    longest: int  # entries of an example
    entries: Tensor  # int32, examples with an entry in a column
    largest: Tensor  # float32, magnitude of an entry in a column


def survey(share: Share, features: int | None, examples: int = 1024) -> Survey:
    """Reads and checks the whole file, each rank its share. Collective.

    Args:
        share: this rank's.
        features: number of columns; one more than the largest index if ``None``.
        examples: read at a time.

    Raises:
        DataError: on every rank, what is wrong on the first rank that found something.
    """
    counts = {-1: 0, 1: 0}
    held_out = {-1: 0, 1: 0}
    entries, largest = torch.zeros(0, dtype=torch.int32), torch.zeros(0)
    longest, widest, problem = 0, 0, None
    try:
        for total, kept in ((counts, False), (held_out, True)):
            for rows in share.blocks(examples, kept):
                for label in total:
                    total[label] += int((rows.labels == label).sum())
                longest = max(longest, int(rows.lengths.max()))
                width = int(rows.columns.max()) + 1 if rows.columns.numel() else 0
                widest = max(widest, width)
                if features is not None and width > features:
                    raise DataError(
                        f"{share.path}: index {width - 1} needs more than --features {features}"
                    )
                if width > entries.numel() and not kept:
                    grown = min(max(width, 2 * entries.numel()), features or LARGEST_INDEX + 1)
                    entries = _lengthened(entries, grown)
                    largest = _lengthened(largest, grown)
                if not kept:
                    ones = torch.ones(rows.columns.numel(), dtype=torch.int32)
                    entries.index_add_(0, rows.columns, ones)
                    largest.scatter_reduce_(0, rows.columns, rows.values.abs(), "amax")
    except DataError as error:
        problem = str(error)
    own = (problem, share.size, counts, held_out, longest, widest)
    every: list[tuple[str | None, int, dict[int, int], dict[int, int], int, int]]
    every = [own] * dist.get_world_size()
    dist.all_gather_object(every, own)
    for found, *_ in every:
        if found is not None:
            raise DataError(found)
    if len({size for _, size, *_ in every}) > 1:
        raise DataError(f"{share.path} differs between ranks, has {[e[1] for e in every]} bytes")
    train = tuple(sum(part[2].values()) for part in every)
    tested = [sum(part[3][label] for part in every) for label in (-1, 1)]
    for label in (-1, 1):
        if not sum(part[2][label] for part in every):
            raise DataError(f"{share.path}: of the examples to train on none has label {label}")
    if not sum(tested):
        raise DataError(f"{share.path}: too few examples to hold some out for a test")
    columns = features or max(1, *(part[5] for part in every))
    entries, largest = _lengthened(entries, columns), _lengthened(largest, columns)
    dist.all_reduce(entries)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return Survey(
        features=columns,
        train=train,
        test=sum(tested),
        majority=max(tested) / sum(tested),
        longest=max(part[4] for part in every),
        entries=entries,
        largest=largest,
    )


def _lengthened(vector: Tensor, length: int) -> Tensor:
    longer = torch.zeros(length, dtype=vector.dtype)
    kept = min(length, vector.numel())
    longer[:kept] = vector[:kept]
    return longer


class Method(Protocol):
    """A way of training, which changes the weights it was given."""

    steps: int  # per epoch

    def epoch(self, epoch: int) -> Iterator[None]:
        """Trains for an epoch, a step at a time."""
        ...

    def loss(self) -> float:
        """This rank's sum of losses over its examples, in the last epoch or at its end."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class GradientDescent:
    """Stochastic gradient descent: a minibatch of every rank in each step.

    The rate falls as lr / (1 + lr l2 t) (Bottou 2010, section 5.2).
    """

    def __init__(
        self,
        weights: Weights,
        exchange: Exchange,
        data: Survey,
        share: Share,
        *,
        loss: str,
        batch: int,
        lr: float,
        l2: float,
        seed: int,
    ) -> None:
        self.weights, self.exchange, self.data, self.share = weights, exchange, data, share
        self._loss, self.batch, self.lr, self.l2, self.seed = loss, batch, lr, l2, seed
        self.steps = math.ceil(max(data.train) / batch)
        self.unit = units(data.entries, data.largest, batch * len(data.train))
        self._total = 0.0

    def epoch(self, epoch: int) -> Iterator[None]:
        self._total = 0.0
        step = 0
        for rows in self.batches(epoch):
            self.step(gradient(self.weights, rows, self._loss), epoch, step)
            step += 1
            yield
        if step != math.ceil(self.data.train[dist.get_rank()] / self.batch):
            raise DataError(f"{self.share.path}: the file has changed since it was first read")
        nothing = Gradient(torch.empty(0, dtype=torch.int64), torch.empty(0), 0.0)
        for late in range(step, self.steps):  # other ranks have more examples
            self.step(nothing, epoch, late)
            yield

    def batches(self, epoch: int) -> Iterator[Rows]:
        """This rank's, read from the file, in an order mixed within some batches."""
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch, dist.get_rank()))
        for block in self.share.blocks(BLOCK * self.batch, held_out=False):
            for chosen in torch.split(torch.randperm(len(block), generator=generator), self.batch):
                yield block.take(chosen)

    def step(self, own: Gradient, epoch: int, step: int) -> None:
        self._total += own.loss
        total = self.exchange.sum(*rounded(own.columns, own.values, self.unit))
        self.apply(total, epoch, step)

    def apply(self, total: Tensor, epoch: int, step: int) -> None:
        """Takes the step that the sum of all ranks' gradients leads to."""
        rate = self.lr / (1 + self.lr * self.l2 * (epoch * self.steps + step))
        self.weights.shrink(1 - rate * self.l2)
        examples = sum(min(max(n - step * self.batch, 0), self.batch) for n in self.data.train)
        self.weights.subtract(total, rate / examples)

    def loss(self) -> float:
        return self._total

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class CoordinateDescent:
    """Stochastic block coordinate descent for a smooth loss (SparCML section 8.2, Wright 2015).

    Every step moves a random block of coordinates, the same on all ranks, each along its partial
    derivative. A rank holds its examples by column and contributes its part of the derivatives.
    A coordinate's step is 1 / (b L): L bounds the second derivative, and b makes up for moving the
    whole block at once (Richtarik and Takac 2016, Theorem 12: b = 1 + (w - 1)(t - 1)/(n - 1) for t
    of n coordinates and at most w entries in an example).
    """

    def __init__(
        self,
        weights: Weights,
        exchange: Exchange,
        data: Survey,
        share: Share,
        *,
        coordinates: int,
        l2: float,
        seed: int,
    ) -> None:
        self.weights, self.exchange, self.data = weights, exchange, data
        self.block, self.l2, self.seed = coordinates * dist.get_world_size(), l2, seed
        self.examples = sum(data.train)
        self.occurring = data.largest.nonzero().view(-1)
        self.steps = math.ceil(self.occurring.numel() / self.block)
        self.unit = units(data.entries, data.largest, self.examples)
        self._read(share)
        self.curvature = self._curvatures()
        at_once = min(self.block, self.occurring.numel()) - 1
        others = max(1, self.occurring.numel() - 1)
        self.caution = 1 + (data.longest - 1) * at_once / others

    def _read(self, share: Share) -> None:
        blocks = [*share.blocks(1024, held_out=False)]
        starts = [0]
        for block in blocks:
            starts.append(starts[-1] + len(block))
        if starts[-1] != self.data.train[dist.get_rank()]:
            raise DataError(f"{share.path}: the file has changed since it was first read")
        nothing = torch.empty(0)
        columns = torch.cat([*(block.columns for block in blocks), nothing.long()])
        rows = torch.cat(
            [*(block.rows + at for block, at in zip(blocks, starts, strict=False)), nothing.long()]
        )
        values = torch.cat([*(block.values for block in blocks), nothing])
        order = columns.argsort(stable=True)
        self.columns, self.rows, self.values = columns[order], rows[order], values[order]
        self.labels = torch.cat([*(block.labels for block in blocks), nothing])
        self.scores = torch.zeros(starts[-1])

    def _curvatures(self) -> Tensor:
        """Bounds of the second derivatives, for all columns; exact sums, as those of gradients."""
        unit = units(self.data.entries, self.data.largest.square(), self.examples)
        columns, places = torch.unique(self.columns, return_inverse=True)
        squares = torch.zeros(columns.numel()).index_add_(0, places, self.values.square())
        columns, squares = rounded(columns, squares, unit)
        total = torch.zeros(self.data.features)
        total[columns] = squares
        dist.all_reduce(total)
        bounds = total.div_(4 * self.examples).add_(self.l2)
        return bounds.clamp_(min=torch.finfo(bounds.dtype).tiny)

    def epoch(self, epoch: int) -> Iterator[None]:
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        order = torch.randperm(self.occurring.numel(), generator=generator)
        for chosen in torch.split(order, self.block):
            block = self.occurring[chosen].sort().values
            self.move(block, self.exchange.sum(*self.derivatives(block)))
            yield

    def derivatives(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """The part that this rank's examples have in the loss's derivatives: columns and values."""
        entries, places = self._entries(block)
        labels = self.labels[self.rows[entries]]
        slope = slopes("logistic", self.scores[self.rows[entries]] * labels) * labels
        sums = torch.zeros(block.numel()).index_add_(0, places, self.values[entries] * slope)
        return rounded(block, sums, self.unit)

    def _entries(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Where this rank's entries in the columns are, and each one's place in the block."""
        starts = torch.searchsorted(self.columns, block)
        lengths = torch.searchsorted(self.columns, block, right=True) - starts
        return ranges(starts, lengths), torch.repeat_interleave(lengths)

    def move(self, block: Tensor, total: Tensor) -> None:
        """Moves the block's coordinates, given the sum of all ranks' parts."""
        if total.layout == torch.sparse_coo:
            derivatives = torch.zeros(block.numel())
            derivatives[torch.searchsorted(block, total.indices()[0])] = total.values()
        else:
            derivatives = total[block]
        slope = derivatives / self.examples + self.l2 * self.weights.direction[block]
        moves = slope / (-self.caution * self.curvature[block])
        self.weights.direction[block] += moves
        entries, places = self._entries(block)
        self.scores.index_add_(0, self.rows[entries], self.values[entries] * moves[places])

    def loss(self) -> float:
        return losses("logistic", self.scores * self.labels).sum(dtype=torch.float64).item()

    def state_dict(self) -> dict[str, Any]:
        return {"scores": self.scores}  # summed up move by move: not to be had from the weights

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["scores"].shape != self.scores.shape:
            raise ValueError(
                f"scores of {state['scores'].numel()} examples, not {self.scores.numel()}"
            )
        self.scores = state["scores"]


def correct(weights: Weights, share: Share) -> int:
    """How many of this rank's held-out examples have a score of their label's sign."""
    return sum(
        int(((weights.scores(rows) > 0) == (rows.labels > 0)).sum())
        for rows in share.blocks(1024, held_out=True)
    )

"""Linear classifiers: logistic regression and support vector machines, with L2 regularisation.

The objective is the mean over the examples of loss(y w.x) plus l2/2 |w|^2. Gradients of the losses
are as sparse as the examples; see :class:`Weights` for what keeps the regularisation sparse too.

Sums of gradients are made exact: every entry is rounded to a multiple of a power of two, its
column's unit, such that the sums of all ranks fit into float32's 24 bits. An exact sum does not
depend on the order of its terms, so a sparse and a dense allreduce give the same bits, whatever
their algorithms and the number of ranks. The unit is 2^-23 of what a column's sum can be at most.
(Reproducible summation by pre-rounding: Demmel and Nguyen 2013.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from linear.svmlight import Rows

LOSSES = ("logistic", "hinge")
SMALLEST_SCALE = 1e-6
SMALLEST_EXPONENT = -100  # of a unit: float32 has normal numbers down to 2^-126


class Weights:
    """w = scale * direction, so that shrinking all of w costs one multiplication.

    (The representation of Shalev-Shwartz et al. 2007, Pegasos, section 3.)
    """

    def __init__(self, features: int) -> None:
        self.direction = torch.zeros(features)
        self.scale = 1.0

    def shrink(self, factor: float) -> None:
        """Multiplies w by a factor above 0 and up to 1."""
        self.scale *= factor
        if self.scale < SMALLEST_SCALE:
            self.direction *= self.scale
            self.scale = 1.0

    def subtract(self, vector: Tensor, factor: float) -> None:
        """Takes factor times a vector from w: of a coalesced COO one its entries, or a dense one.

        The bits are the same: both are two operations on each element that changes.
        """
        factor /= self.scale
        if vector.layout == torch.sparse_coo:
            self.direction[vector.indices()[0]] -= vector.values() * factor
        else:
            self.direction -= vector * factor

    def scores(self, rows: Rows) -> Tensor:
        """w.x of each example."""
        terms = rows.values * self.direction[rows.columns]
        return torch.zeros(len(rows)).index_add_(0, rows.rows, terms).mul_(self.scale)

    def dense(self) -> Tensor:
        return self.direction * self.scale


def losses(loss: str, margins: Tensor) -> Tensor:
    """Of each example, given its margin y w.x."""
    if loss == "logistic":
        return functional.softplus(-margins)
    return (1 - margins).clamp(min=0)


def slopes(loss: str, margins: Tensor) -> Tensor:
    """The losses' derivatives by the margins, from -1 to 0."""
    if loss == "logistic":
        return -torch.sigmoid(-margins)
    return -(margins < 1).to(margins.dtype)


@dataclass(frozen=True)
class Gradient:
    """Of the sum of some examples' losses."""

    columns: Tensor  # int64, ascending
    values: Tensor  # float32
    loss: float  # the sum itself


def gradient(weights: Weights, rows: Rows, loss: str) -> Gradient:
    """Computed from the examples' entries alone: whatever the number of features."""
    margins = weights.scores(rows) * rows.labels
    factors = slopes(loss, margins) * rows.labels
    columns, places = torch.unique(rows.columns, return_inverse=True)
    terms = rows.values * factors[rows.rows]
    values = torch.zeros(columns.numel()).index_add_(0, places, terms)
    total = losses(loss, margins).sum(dtype=torch.float64).item()
    return Gradient(columns, values, total)


def units(entries: Tensor, largest: Tensor, examples: int) -> Tensor:
    """What gradients are rounded to multiples of, a column each.

    Args:
        entries: examples of all ranks that have an entry in the column.
        largest: magnitude of an entry there.
        examples: the most that are summed in a step, on all ranks.
    """
    bound = entries.clamp(max=examples).to(torch.float64) * largest
    _, exponents = torch.frexp(bound)  # bound < 2^exponent
    exponents = (exponents - 23).clamp(min=SMALLEST_EXPONENT)
    return torch.ldexp(torch.ones_like(largest), exponents)


def rounded(columns: Tensor, values: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """The entries as multiples of their columns' units, without those that become zero."""
    own = unit[columns]
    values = (values / own).round_() * own
    kept = values != 0
    return columns[kept], values[kept]

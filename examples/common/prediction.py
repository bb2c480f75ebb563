"""What a step would take between hosts, predicted by sparsecomm's cost model."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import sparsecomm

HOSTS = 4
LINKS = ("1gbit", "10gbit")
# Share of a step's computing that is the backward pass, behind which DDP hides its allreduce.
BACKWARD = 2 / 3
# The algorithm that each hook runs, where it is one, and whether buckets go as they come.
ALGORITHMS = {
    "ddp": ("dense_ring", True),
    "dense": ("dense_ring", False),
    "dense_overlap": ("dense_overlap", True),
    "topk_a": ("topk_a", False),
    "topk_dsa": ("topk_dsa", False),
    "gtopk": ("gtopk", False),
    "gaussian_k": ("gaussian_k", False),
    "oktopk": ("oktopk", False),
    "prepare": ("oktopk", False),
}


@dataclass(frozen=True)
class Measured:
    """What a run has measured of its steps."""

    hook: str
    parameters: int
    density: float  # at the end of the run
    compute_seconds: float  # of a step without what its exchange adds
    select_seconds: float


@functools.cache
def step_seconds(measured: Measured, link: str) -> float | None:
    """Predicts a step between HOSTS hosts with ``link``, or None if no algorithm is known.

    Computing and selecting take what they took; messages, bytes and sums what the planner expects.
    Of an allreduce of buckets that go as they come, the backward pass hides what it can.
    """
    if measured.hook not in ALGORITHMS:
        return None
    algorithm, overlaps = ALGORITHMS[measured.hook]
    explanation = sparsecomm.explain(
        measured.parameters,
        measured.density,
        link=sparsecomm.Link.parse(link),
        ranks=HOSTS,
    )
    row = next(row for row in explanation.ranking if row.algorithm == algorithm)
    exchange = row.seconds - row.select
    if overlaps:
        hidden = min(exchange, BACKWARD * measured.compute_seconds)
        return measured.compute_seconds + exchange - hidden
    return measured.compute_seconds + measured.select_seconds + exchange

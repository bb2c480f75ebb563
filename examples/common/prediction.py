"""What a step would take between hosts, predicted by sparsecomm's cost model."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import sparsecomm

HOSTS = 4
LINKS = ("1gbit", "10gbit")
# The method whose step a hook makes, as sparsecomm.explain names it.
METHODS = {
    "ddp": "ddp",
    "dense": "dense_ring",
    "dense_overlap": "dense_overlap",
    "topk_a": "topk_a",
    "topk_dsa": "topk_dsa",
    "gtopk": "gtopk",
    "gaussian_k": "gaussian_k",
    "oktopk": "oktopk",
    "prepare": "oktopk",
}
MOMENTUM = frozenset({"prepare"})  # of METHODS: the exchange applies the optimizer's momentum


@dataclass(frozen=True)
class Measured:
    """What a run has measured of its steps."""

    hook: str
    parameters: int
    density: float  # at the end of the run
    compute_seconds: float  # of a step without what its exchange adds
    select_seconds: float


@functools.cache
def rates() -> dict[str, float]:
    """The rates of this machine's kernels, measured once, so that predictions compare."""
    return sparsecomm.explain(1 << 20, 0.01, link=sparsecomm.Link.parse("1gbit"), ranks=2).figures


@functools.cache
def step_seconds(measured: Measured, link: str, hosts: int = HOSTS) -> float | None:
    """Predicts a step between ``hosts`` with ``link``, or None if no algorithm is known.

    Computing and selecting take what they took; the rest what the planner expects.
    """
    if measured.hook not in METHODS:
        return None
    explanation = sparsecomm.explain(
        measured.parameters,
        measured.density,
        link=sparsecomm.Link.parse(link),
        ranks=hosts,
        step_seconds=measured.compute_seconds,
        rates=rates(),
        momentum=measured.hook in MOMENTUM,
    )
    step = next(step for step in explanation.steps if step.method == METHODS[measured.hook])
    if step.select > 0:
        step = replace(step, select=measured.select_seconds)
    return step.seconds

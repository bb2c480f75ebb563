"""Loss scales, joins, infinities and clipping: what is kept stays in one unit, as in plain DDP."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import checkpoint_of, flat, gathered
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
from sparsecomm import (
    AutoState,
    BlockTopkState,
    CompressionState,
    GaussianKState,
    GTopkState,
    OkTopkState,
    QuantizedTopkState,
    ThresholdSchedule,
    TopkDsaState,
    TopkState,
)

REUSED = ThresholdSchedule(between="reused", period=4, partition_period=3)
STATES: list[tuple[type[CompressionState], dict[str, Any]]] = [
    (OkTopkState, {"schedule": REUSED}),
    (OkTopkState, {"densities": {"other": 0.3}}),
    (TopkState, {"select": "exact"}),
    (TopkState, {"select": "bucket"}),
    (BlockTopkState, {"block": 16}),
    (TopkState, {"schedule": REUSED, "densities": {"other": 1.0}}),
    (QuantizedTopkState, {}),
    (GaussianKState, {}),
    (GTopkState, {}),
    (TopkDsaState, {"densities": {"other": 0.3}}),
    (AutoState, {}),
]


class Given(nn.Module):
    """A model whose gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(30, 20, dtype=torch.float64))
        self.other = nn.Parameter(torch.zeros(10, 8, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(7, dtype=torch.float64))

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        products = [(p * x).sum() for p, x in zip(self.parameters(), inputs, strict=True)]
        return torch.stack(products).sum()


NAMES = [name for name, _ in Given().named_parameters()]


class Scaler:
    """A loss scale that the test sets."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def get_scale(self) -> float:
        return self.scale


@dataclass
class Step:
    number: int
    scale: float
    poison: tuple[int, int, float] | None = None  # which rank's input of which parameter, and how

    def inputs(self, rank: int) -> list[torch.Tensor]:
        """Draws multiples of 6, so that what is divided by 2 or 3 ranks stays exact."""
        generator = torch.Generator().manual_seed(1000 * self.number + rank)
        drawn = [
            6.0 * torch.randint(-9, 10, p.shape, generator=generator).double()
            for p in Given().parameters()
        ]
        if self.poison is not None and self.poison[0] == rank:
            drawn[self.poison[1]].view(-1)[3] = self.poison[2]
        return drawn


@dataclass
class Epoch:
    """What runs in one join(): rank r has data for the first counts[r] of the steps."""

    counts: list[int]
    steps: list[Step]
    clears: list[bool]  # who calls zero_grad() last


def draw(generator: random.Random, powers: bool, plainly: bool = False) -> list[Epoch]:
    """Draws epochs in which rank 0 has data to the end.

    ``plainly``: without overflows, and each rank has some data, and gradients that are not None.
    """
    epochs = []
    number = 0
    ranks = range(dist.get_world_size())
    for _ in range(3):
        counts = [generator.randint(int(plainly), 5) for _ in ranks]
        counts[0] = max(*counts, 3)
        steps = []
        for index in range(counts[0]):
            scale = 2.0 ** generator.randint(-6, 16) if powers else generator.uniform(0.01, 3e4)
            step = Step(number, scale)
            if not plainly and generator.random() < 0.3:
                active = [rank for rank, count in enumerate(counts) if index < count]
                value = generator.choice([math.inf, -math.inf, math.nan])
                step.poison = (generator.choice(active), generator.randrange(3), value)
            steps.append(step)
            number += 1
        clears = [not plainly and generator.random() < 0.5 for _ in ranks]
        epochs.append(Epoch(counts, steps, clears))
    return epochs


def clip(inputs: list[torch.Tensor], most: float) -> list[torch.Tensor]:
    factor = min(1.0, most / (float(flat(inputs).norm()) + 1e-6))
    return [factor * x for x in inputs]


def gradients(ddp: DistributedDataParallel, scale: float) -> list[torch.Tensor]:
    """Returns this step's gradients without the loss scale."""
    found = [p.grad / scale for p in ddp.parameters() if p.grad is not None]
    assert len(found) == len(NAMES)
    return found


def backward(ddp: DistributedDataParallel, inputs: list[torch.Tensor], scale: float) -> None:
    ddp.zero_grad()
    (scale * ddp(inputs)).backward()


def run(
    ddp: DistributedDataParallel, epoch: Epoch, scaler: Scaler, most: float = math.inf
) -> Iterator[list[torch.Tensor]]:
    rank = dist.get_rank()
    with ddp.join():
        for step in epoch.steps[: epoch.counts[rank]]:
            scaler.scale = step.scale
            backward(ddp, clip(step.inputs(rank), most), step.scale)
            yield gradients(ddp, step.scale)
        if epoch.clears[rank]:
            ddp.zero_grad()


def residuals(state: CompressionState) -> list[torch.Tensor]:
    """Returns what this rank keeps of each parameter, without the loss scale."""
    entry = checkpoint_of(state)
    shapes = [p.shape for p in Given().parameters()]
    return [
        (entry["residuals"][name] / entry["loss_scale"]).reshape(shape)
        for name, shape in zip(NAMES, shapes, strict=True)
    ]


def average(tensor: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = sum(gathered(tensor), start=torch.zeros_like(tensor))
    return total / dist.get_world_size()


def wrap(
    state: CompressionState, scaler: Scaler | None = None, **ddp_options: Any
) -> DistributedDataParallel:
    ddp = DistributedDataParallel(Given(), **ddp_options)
    if scaler is not None:
        state.follow(scaler)
    sparsecomm.register_comm_hook(ddp, state)
    return ddp


# ---- against plain DDP


def check_run(kind: type[CompressionState], options: dict[str, Any], seed: int) -> None:
    """What plain DDP averages was delivered, or is kept, but for what contract 5 drops."""
    generator = random.Random(seed)
    powers = generator.random() < 0.5
    clip_norm = generator.choice([None, None, 200.0])
    several = generator.random() < 0.5
    case = (seed, kind, options, powers, clip_norm, several)
    epochs = draw(generator, powers)
    plain, scaler = DistributedDataParallel(Given()), Scaler()
    state = kind(density=0.1, clip_norm=clip_norm, **options)  # type: ignore[call-arg]
    many: dict[str, Any] = {"bucket_cap_mb": 1e-3, "find_unused_parameters": True}
    ddp = wrap(state, scaler, **(many if several else {}))
    most = math.inf if clip_norm is None else clip_norm / math.sqrt(dist.get_world_size())
    pending = [torch.zeros_like(p) for p in Given().parameters()]
    for epoch in epochs:
        expected = list(run(plain, epoch, Scaler(), most))
        for result, full, step in zip(run(ddp, epoch, scaler), expected, epoch.steps, strict=False):
            dropped = set(NAMES)
            if step.poison is not None:
                assert not all(x.isfinite().all() for x in result), case
                if clip_norm is None:
                    groups = [set(group["parameters"]) for group in checkpoint_of(state)["groups"]]
                    [dropped] = [g for g in groups if NAMES[step.poison[1]] in g]
            for index, name in enumerate(NAMES):
                if step.poison is None:
                    pending[index] += full[index] - result[index]
                elif name not in dropped:
                    pending[index] += full[index]
        assert checkpoint_of(state)["loss_scale"] == epoch.steps[-1].scale, case
        exact = powers and clip_norm is None and kind is not QuantizedTopkState
        for kept, wanted in zip(residuals(state), pending, strict=True):
            found = average(kept)
            if dist.get_rank() > 0:
                continue  # it has not seen all results
            if exact:
                assert torch.equal(found, wanted), (case, found - wanted)
            else:
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, msg=str(case))


def check_runs(seeds: range) -> None:
    for seed in seeds:
        for number, (kind, options) in enumerate(STATES):
            check_run(kind, options, 100 * seed + number)


def check_velocities(seeds: range) -> None:
    """At density 1 a state's momentum is that of plain DDP's averages."""
    for seed in seeds:
        epochs = draw(random.Random(seed), powers=True, plainly=True)
        plain, scaler = DistributedDataParallel(Given()), Scaler()
        ddp = wrap(OkTopkState(density=1.0, momentum=0.5), scaler)
        velocities = [torch.zeros_like(p) for p in Given().parameters()]
        for epoch in epochs:
            expected = list(run(plain, epoch, Scaler()))
            if dist.get_rank() > 0:
                list(run(ddp, epoch, scaler))
                continue
            for result, full in zip(run(ddp, epoch, scaler), expected, strict=True):
                velocities = [0.5 * v + x for v, x in zip(velocities, full, strict=True)]
                for found, wanted in zip(result, velocities, strict=True):
                    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_random_runs_against_plain_ddp(size: int) -> None:
    run_ranks(size, check_runs, range(2), timeout=100)


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_random_runs_against_plain_ddp(size: int) -> None:
    run_ranks(size, check_runs, range(2, 40), timeout=1200)


@pytest.mark.parametrize("size", [2, 3])
def test_velocities_against_plain_ddp(size: int) -> None:
    run_ranks(size, check_velocities, range(4))


# ---- scales that differ


def _differing_scales() -> str:
    """Two ranks in different units raise, keep the gradient, and go on once they agree."""
    rank = dist.get_rank()
    state, scaler = TopkState(density=0.1), Scaler(256.0)
    ddp = wrap(state, scaler)
    backward(ddp, Step(0, 256.0).inputs(rank), 256.0)
    before = residuals(state)
    scaler.scale = 1024.0 if rank == 0 else 512.0
    inputs = Step(1, scaler.scale).inputs(rank)
    with pytest.raises(RuntimeError) as raised:
        backward(ddp, inputs, scaler.scale)
    after = residuals(state)
    for was, is_now, added in zip(before, after, inputs, strict=True):
        assert torch.equal(is_now, was + added)

    del ddp
    gc.collect()
    fresh = TopkState(density=0.1)
    again = wrap(fresh, scaler)
    fresh.load_state_dict(state.state_dict())
    scaler.scale = 2048.0
    inputs = Step(2, 2048.0).inputs(rank)
    backward(again, inputs, 2048.0)
    for was, added, result, kept in zip(
        after, inputs, gradients(again, 2048.0), residuals(fresh), strict=True
    ):
        assert torch.equal(average(was + added), result + average(kept))
    return str(raised.value)


def test_scales_that_differ_are_named() -> None:
    first, second = run_ranks(2, _differing_scales)
    assert first == second
    assert "loss_scale: 1024 on rank 0 but 512 on rank 1" in first


def _follow_on_one_rank() -> str:
    state = TopkState(density=0.1)
    ddp = wrap(state, Scaler(1024.0) if dist.get_rank() == 1 else None)
    with pytest.raises(RuntimeError) as raised:
        backward(ddp, Step(0, 1024.0).inputs(dist.get_rank()), 1024.0)
    return str(raised.value)


def test_a_rank_that_follows_no_scaler_is_named() -> None:
    first, second = run_ranks(2, _follow_on_one_rank)
    assert first == second
    assert "loss_scale: 1 on rank 0 but 1024 on rank 1" in first


def _saved_with_a_scale() -> None:
    """What is resumed without a scaler is brought into the unit of the gradients as they are."""
    rank = dist.get_rank()
    saved = TopkState(density=0.1, clip_norm=200.0)
    backward(wrap(saved, Scaler(4096.0)), Step(0, 4096.0).inputs(rank), 4096.0)
    before = residuals(saved)
    state = TopkState(density=0.1, clip_norm=200.0)
    ddp = wrap(state)
    state.load_state_dict(saved.state_dict())
    inputs = Step(1, 1.0).inputs(rank)
    backward(ddp, inputs, 1.0)
    added = clip(inputs, 200 / math.sqrt(2))
    for was, new, result, kept in zip(
        before, added, gradients(ddp, 1.0), residuals(state), strict=True
    ):
        torch.testing.assert_close(average(was + new), result + average(kept))


def test_a_run_resumed_without_a_scaler() -> None:
    run_ranks(2, _saved_with_a_scale)


# ---- infinities


def _overflow(clip_norm: float | None) -> None:
    """Contract 5, on every rank: with clipping the whole step is one group's."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for value in (math.inf, -math.inf, math.nan):
        state = OkTopkState(density=0.1, clip_norm=clip_norm)
        ddp = wrap(state)
        backward(ddp, Step(0, 1.0).inputs(rank), 1.0)
        before = residuals(state)
        assert any(kept.any() for kept in before)
        step = Step(1, 1.0, (last, 2, value))  # the biases', a group of their own
        backward(ddp, step.inputs(rank), 1.0)
        assert flat(gradients(ddp, 1.0)).isnan().all()
        for name, was, is_now, added in zip(
            NAMES, before, residuals(state), step.inputs(rank), strict=True
        ):
            kept = was if clip_norm is not None or name == "bias" else was + added
            assert torch.equal(is_now, kept), (value, name)
        backward(ddp, Step(2, 1.0).inputs(rank), 1.0)
        assert flat(gradients(ddp, 1.0)).isfinite().all()


@pytest.mark.parametrize("clip_norm", [None, 50.0])
def test_an_overflow_leaves_residuals_alike_on_all_ranks(clip_norm: float | None) -> None:
    run_ranks(3, _overflow, clip_norm)

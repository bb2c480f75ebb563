"""That autotune tries what it may, alike on all ranks, and says what is best."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, flat, gathered, make_ddp, make_model
from patience import LONG
from ranks import run_ranks

import sparsecomm
from sparsecomm import Tuning, TuningTrial, autotune


def tuned_by_sleep(
    space: dict[str, Any], seconds: Callable[..., float], **options: Any
) -> tuple[Tuning, list[dict[str, Any]]]:
    """Tunes steps that take these seconds for their options."""
    tried: list[dict[str, Any]] = []

    def start(**chosen: Any) -> Callable[[], object]:
        tried.append(chosen)
        return lambda: time.sleep(seconds(**chosen))

    return autotune(start, space, steps=3, warmup=1, **options), tried


def check_small_spaces() -> None:
    """Each combination is tried once."""
    space = {"groups": ("model", "buckets"), "density": (0.01, 0.1)}
    cost = {("model", 0.01): 40, ("model", 0.1): 90, ("buckets", 0.01): 3, ("buckets", 0.1): 60}
    rank = dist.get_rank()

    def seconds(groups: str, density: float) -> float:
        return (1 if rank == 1 else 0.3) * cost[groups, density] / 1000

    tuning, tried = tuned_by_sleep(space, seconds, trials=9)
    assert len(tried) == 4
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (tried, tuning))
    assert all(other == everyone[0] for other in everyone)
    assert tuning.best == {"groups": "buckets", "density": 0.01}
    # Of the slowest rank.
    assert tuning.trials[0].options["groups"] == "buckets"
    assert tuning.trials[-1].seconds >= 0.09
    assert tuning.trials[0].seconds < 0.04
    assert str(tuning).count("\n") == 4
    assert "best" in str(tuning).splitlines()[1]


def check_large_spaces() -> None:
    """Of many combinations some are tried, the first rank's choice."""
    space = {"first": [*range(40)], "second": ["a", "b", "c", "d", "e"]}

    def seconds(first: int, second: str) -> float:
        return (2 + abs(first - 10) + 10 * (second != "b")) / 4000

    tuning, tried = tuned_by_sleep(space, seconds, trials=40, seed=dist.get_rank())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tried)
    assert all(other == everyone[0] for other in everyone)
    assert 10 < len(tried) <= 40
    assert len(tuning.trials) == len(tried)
    # What random choice finds in 40 of 200 is not much better; most are far off.
    assert tuning.best["second"] == "b"
    assert abs(tuning.best["first"] - 10) < 10


def check_training() -> None:
    """The default space, of a model in DDP."""
    made: list[weakref.ref[object]] = []

    def start(groups: Any, density: float) -> Callable[[], object]:
        assert all(old() is None for old in made), "what a trial made is still there"
        ddp = make_ddp(make_model())
        state = sparsecomm.OkTopkState(density, groups=groups)
        sparsecomm.register_comm_hook(ddp, state)
        made.append(weakref.ref(ddp))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            ddp(batch(0)).square().mean().backward()
            optimizer.step()
            everyone = gathered(flat(ddp.parameters()))
            assert all(torch.equal(other, everyone[0]) for other in everyone)

        return step

    space = {"groups": ("model", 2, "buckets"), "density": (0.05, 0.2)}
    tuning = autotune(start, space, trials=5, steps=2, warmup=2)
    gc.collect()
    assert len(made) == len(tuning.trials) <= 5
    assert set(tuning.best) == {"groups", "density"}
    with pytest.raises(ZeroDivisionError):
        autotune(lambda **_: lambda: 1 / 0, trials=1)

    def start_on_one(density: float) -> Callable[[], object]:
        if dist.get_rank() == 1:
            raise KeyError(density)
        return lambda: None

    kind = KeyError if dist.get_rank() == 1 else RuntimeError
    with pytest.raises(kind, match=r"0\.25") as error:
        autotune(start_on_one, {"density": (0.25,)})
    assert dist.get_rank() == 1 or "rank 1 raised KeyError" in str(error.value)


def check_fusion() -> None:
    """Of a communicator's collectives."""

    def start(fusion_bytes: int) -> Callable[[], object]:
        communicator = sparsecomm.Communicator.from_process_group(fusion_bytes=fusion_bytes)
        tensors = [torch.ones(100) for _ in range(4)]

        def step() -> None:
            works = [
                sparsecomm.allreduce(tensor, name=f"t{i}", communicator=communicator, async_op=True)
                for i, tensor in enumerate(tensors)
            ]
            for work in works:
                work.wait()

        return step

    tuning = autotune(start, {"fusion_bytes": (0, 1 << 10, 1 << 16)}, steps=3)
    assert len(tuning.trials) == 3


CHECKS = {
    "small spaces": check_small_spaces,
    "large spaces": check_large_spaces,
    "training": check_training,
    "fusion": check_fusion,
}


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(name: str) -> None:
    run_ranks(2, CHECKS[name], timeout=LONG)


def test_of_trials_that_take_about_as_long_the_one_that_sends_most_is_best() -> None:
    trials = tuple(
        TuningTrial({"density": density}, seconds)
        for density, seconds in ((0.001, 1.0), (0.02, 1.04), (0.01, 1.04), (0.1, 1.06))
    )
    assert Tuning(trials).best == {"density": 0.02}
    assert Tuning(trials, tolerance=0).best == {"density": 0.001}
    assert Tuning(trials, tolerance=0.1).best == {"density": 0.1}
    assert Tuning((TuningTrial({"groups": 2}, 1.0),)).best == {"groups": 2}


def test_what_cannot_be_tried() -> None:
    def start(**_: Any) -> Callable[[], object]:
        raise AssertionError

    bad: list[tuple[Any, type[Exception], str]] = [
        ({}, ValueError, "groups and density"),
        ([1], TypeError, "list"),
        ({"density": "0.1"}, TypeError, "density"),
        ({"density": ()}, ValueError, "density"),
    ]
    for space, kind, text in bad:
        with pytest.raises(kind, match=text):
            autotune(start, space)
    for options in ({"trials": 0}, {"steps": 0}, {"warmup": -1}, {"tolerance": -0.1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            autotune(start, **options)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="init_process_group"):
        autotune(start)


def without_optuna() -> None:
    sys.modules["optuna"] = None  # type: ignore[assignment]
    with pytest.raises(ImportError, match=r"sparsecomm\[tune\]"):
        autotune(lambda **_: lambda: None)  # of 30 combinations
    assert len(autotune(lambda **_: lambda: None, trials=30).trials) == 30


def test_without_optuna_it_says_what_to_install() -> None:
    run_ranks(1, without_optuna)

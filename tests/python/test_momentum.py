"""The warnings of momentum in the wrong place: when they come, and when not."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from logs import Collect
from models import make_ddp, make_model, train
from ranks import run_ranks
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

import sparsecomm
from sparsecomm import CompressionState, DenseOverlapState, OkTopkState, TopkState
from sparsecomm.momentum import _watched
from sparsecomm.optim import DistributedOptimizer, OkTopkAdamW

NO_MOMENTUM = (0.0, 0.99)


def logged(body: Callable[[], object]) -> list[str]:
    handler = Collect()
    logger = logging.getLogger("sparsecomm")
    logger.addHandler(handler)
    try:
        body()
    finally:
        logger.removeHandler(handler)
    return [text for text in handler.texts if "momentum" in text]


# A state, an optimizer, and what a warning says to set, if there is one.
Case = tuple[type[CompressionState], dict[str, Any], type[Optimizer], dict[str, Any], list[str]]
CASES: list[Case] = [
    (OkTopkState, {}, Adam, {}, ["momentum=0.9 where", "betas=(0.0, 0.999) in Adam"]),
    (
        TopkState,
        {"first_moment": 0.9},
        AdamW,
        {"betas": (0.8, 0.99)},
        ["momentum=0.8 where", "betas=(0.0, 0.99) in AdamW"],
    ),
    (OkTopkState, {}, AdamW, {"betas": NO_MOMENTUM}, ["set momentum=0.9"]),
    (OkTopkState, {"momentum": 0.9}, AdamW, {"betas": NO_MOMENTUM}, []),
    (OkTopkState, {"momentum": 0.9}, AdamW, {}, ["set betas=(0.0, 0.999) in AdamW"]),
    (OkTopkState, {"momentum": 0.9}, NAdam, {}, ["set betas=(0.0, 0.999) in NAdam"]),
    (OkTopkState, {"momentum": 0.8}, SGD, {"momentum": 0.9}, ["set momentum=0 in SGD"]),
    (OkTopkState, {"momentum": 0.9, "density": 1.0}, Adam, {}, ["set betas=(0.0, 0.999) in Adam"]),
    (OkTopkState, {"momentum": 0.9}, SGD, {}, []),
    (OkTopkState, {}, SGD, {"momentum": 0.9}, []),
    (OkTopkState, {"density": 1.0}, Adam, {}, []),
    (DenseOverlapState, {}, Adam, {}, []),
]


def _check_cases(native: bool) -> list[list[str]]:
    def body(case: Case) -> None:
        kind, arguments, optimizer, options, _ = case
        ddp = make_ddp(make_model())
        state = kind(**arguments)
        if native:
            sparsecomm.register_comm_hook(ddp, state)
        else:
            ddp.register_comm_hook(state, sparsecomm.compression_hook)
        train(ddp, optimizer(ddp.parameters(), **{"lr": 0.001, **options}), range(3))

    return [logged(partial(body, case)) for case in CASES]


@pytest.mark.parametrize("native", [True, False])
def test_optimizers_behind_a_hook(native: bool) -> None:
    first, second = run_ranks(2, _check_cases, native)
    assert [len(texts) for texts in first] == [int(bool(case[-1])) for case in CASES], first
    assert second == [[] for _ in CASES]
    for (*_, remedies), texts in zip(CASES, first, strict=True):
        for remedy in remedies:
            assert remedy in texts[0]
        if texts:
            assert "sparsecomm.prepare(ddp, optimizer, density) does so" in texts[0]


def _check_own_optimizers() -> list[int]:
    def step(make: Callable[[Any], Optimizer]) -> int:
        def body() -> None:
            model = make_model()
            optimizer = make(model)
            for _ in range(2):
                optimizer.zero_grad()
                torch.autograd.backward(model(torch.ones(2, 40)).sum())
                optimizer.step()

        return len(logged(body))

    return [
        step(lambda model: OkTopkAdamW(model.named_parameters(), density=0.05)),
        step(
            lambda model: OkTopkAdamW(
                model.named_parameters(), betas=NO_MOMENTUM, density=0.05, momentum=0.9
            )
        ),
        step(
            lambda model: DistributedOptimizer(
                AdamW(model.parameters()), compression=sparsecomm.Compression()
            )
        ),
        step(
            lambda model: DistributedOptimizer(
                AdamW(model.parameters(), betas=NO_MOMENTUM),
                compression=sparsecomm.Compression(momentum=0.9),
            )
        ),
    ]


def test_optimizers_that_exchange() -> None:
    assert run_ranks(2, _check_own_optimizers) == [[1, 0, 1, 0], [0, 0, 0, 0]]


def _check_two_models() -> None:
    first, second = make_ddp(make_model()), make_ddp(make_model(1))
    state = OkTopkState(0.05)
    sparsecomm.register_comm_hook(first, state)
    other, own = Adam(second.parameters()), Adam(first.parameters())
    assert logged(lambda: train(second, other, range(2))) == []
    assert len(logged(lambda: train(first, own, range(2)))) == 1 - dist.get_rank()
    assert state not in _watched()


def test_adam_of_another_model_is_not_meant() -> None:
    run_ranks(2, _check_two_models)


def _check_once() -> None:
    module = make_model()
    ddp, state = make_ddp(module), OkTopkState(density=1.0)
    sparsecomm.register_comm_hook(ddp, state)
    adam = Adam(module.parameters())
    assert logged(lambda: train(ddp, adam, range(2))) == []
    state.density = 0.05
    warnings = 1 - dist.get_rank()
    assert len(logged(lambda: train(ddp, adam, range(2)))) == warnings
    assert logged(lambda: train(ddp, adam, range(2))) == []
    state.reconnect()
    again = make_ddp(module)
    sparsecomm.register_comm_hook(again, state)
    assert logged(lambda: train(again, adam, range(2))) == []


def test_it_comes_once_for_a_state_when_that_is_no_longer_dense() -> None:
    run_ranks(2, _check_once)


def _check_lifetime() -> None:
    ddp = make_ddp(make_model())
    state = weakref.ref(sparsecomm.register_comm_hook(ddp, OkTopkState(0.05)))
    parameter = weakref.ref(next(ddp.parameters()))
    assert list(_watched()) == [state()]
    del ddp
    gc.collect()
    assert state() is None
    assert parameter() is None
    assert not _watched()


def test_it_keeps_nothing_alive() -> None:
    run_ranks(1, _check_lifetime)


def _check_compiled() -> None:
    ddp = make_ddp(make_model())
    sparsecomm.register_comm_hook(ddp, OkTopkState(0.05))
    optimizer = Adam(ddp.parameters(), foreach=True)
    ddp(torch.ones(2, 40)).sum().backward()
    assert logged(torch.compile(optimizer.step, backend="eager")) == []
    assert len(logged(optimizer.step)) == 1


def test_a_compiled_step_is_left_alone() -> None:
    run_ranks(1, _check_compiled, timeout=100)

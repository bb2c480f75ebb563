"""The survivors of a failure hold the same parameters, at the same step."""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from patience import LONG_TIME, PATIENCE
from ranks import run_ranks
from test_exchange import TRANSPORTS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
import sparsecomm.fsdp
from sparsecomm import _C, hooks
from sparsecomm.transports import connect

CULPRIT = 1
STATES: dict[str, Any] = {
    "oktopk": lambda: sparsecomm.OkTopkState(density=0.1, timeout=LONG_TIME),
    "topk": lambda: sparsecomm.TopkState(density=0.1, timeout=LONG_TIME),
    "dense": lambda: sparsecomm.DenseOverlapState(timeout=LONG_TIME),
}


def checksum(model: torch.nn.Module) -> str:
    values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(values).hexdigest()


def _train(kind: str, transport: str, message: int | None) -> tuple[int, str, str]:
    """Steps applied, the error that ended them, and the parameters then; ``message`` kills."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 5))
    ddp = DistributedDataParallel(model)
    state = STATES[kind]()

    def connect_badly(*args: Any, **options: Any) -> _C.Transport:
        made = connect(*args[:2], transport)
        if dist.get_rank() != CULPRIT or message is None:
            return made
        return made.with_fault(_C.FaultKind.die, message)

    with mock.patch.object(hooks, "connect", connect_badly):
        sparsecomm.register_comm_hook(ddp, state)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    error = ""
    applied = 0
    for _ in range(4 if message is None else 6):
        inputs = torch.randn(8, 40, generator=generator)
        optimizer.zero_grad()
        try:
            ddp(inputs).square().mean().backward()
        except RuntimeError as raised:
            error = str(raised)
            break
        optimizer.step()
        applied += 1
    if message is None:
        error = str(state.stats()["messages"])
    return applied, error, checksum(model)


def _train_and_fail(kind: str, transport: str, attempts: int) -> list[tuple[int, str, str]]:
    messages = int(_train(kind, transport, None)[1])
    ends = []
    for attempt in range(attempts):
        places = random.Random(f"{kind} {transport} {attempt}")
        # Not in the first two steps, between which DDP itself communicates.
        fault = torch.tensor(places.randrange(messages // 2, messages))
        dist.broadcast(fault, CULPRIT)
        ends.append(_train(kind, transport, int(fault)))
        dist.barrier()
    return ends


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", STATES)
def test_survivors_end_at_the_same_step(kind: str, transport: str) -> None:
    ends = run_ranks(3, _train_and_fail, kind, transport, 12, timeout=110)
    for first, second in zip(ends[0], ends[2], strict=True):
        assert f"rank {CULPRIT} left" in first[1]
        assert f"rank {CULPRIT} left" in second[1]
        assert (first[0], first[2]) == (second[0], second[2])


def _lose_a_rank_before_the_end(transport: str) -> tuple[str, list[float]]:
    """The error, and what the residual holds: the step's last bucket brings no gradient."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    with mock.patch.object(hooks, "connect", lambda *args, **_: connect(*args[:2], transport)):
        state = sparsecomm.OkTopkState(
            density=1, timeout=LONG_TIME, named_parameters=[("a", parameter)]
        )
        state._connect()
    gradient = torch.full((4,), 3.0 * (1 + dist.get_rank()))
    state._native.exchange(0, False, gradient, [parameter], [gradient]).wait()
    assert gradient.tolist() == [6.0] * 4
    if dist.get_rank() == CULPRIT:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as error:
        state._native.exchange(1, True, torch.empty(0), [], []).wait()
    assert not state._native.delivered
    [entry] = state.state_dict().values()
    return str(error.value), entry["residuals"]["a"].tolist()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_step_that_does_not_end_on_all_ranks_is_taken_back(transport: str) -> None:
    ends = run_ranks(3, _lose_a_rank_before_the_end, transport, timeout=60, may_die=(CULPRIT,))
    for rank in {0, 1, 2} - {CULPRIT}:
        error, residual = ends[rank]
        assert f"rank {CULPRIT} left" in error
        assert residual == [3.0 * (1 + rank)] * 4


def _train_until_killed(transport: str, seed: int) -> tuple[int, str, str]:
    """Steps applied, the error and the parameters; the culprit is killed at some time."""
    chance = random.Random(f"{transport} {seed}")
    kind = chance.choice(list(STATES))
    # The first steps make the connections.
    start, delay = chance.randrange(2, 6), chance.random() * 5e-3
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(300, 100), torch.nn.Linear(100, 10))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)  # several buckets
    with mock.patch.object(hooks, "connect", lambda *args, **_: connect(*args[:2], transport)):
        sparsecomm.register_comm_hook(ddp, STATES[kind]())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    applied = 0
    while True:
        inputs = torch.randn(8, 300, generator=generator)
        optimizer.zero_grad()
        if dist.get_rank() == CULPRIT and applied == start:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            ddp(inputs).square().mean().backward()
        except RuntimeError as raised:
            return applied, str(raised), checksum(model)
        optimizer.step()
        applied += 1


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kills", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_survivors_of_a_kill_end_at_the_same_step(kills: int, transport: str) -> None:
    for seed in range(kills):
        ends = run_ranks(3, _train_until_killed, transport, seed, timeout=60, may_die=(CULPRIT,))
        assert ends[0][0] == ends[2][0], (seed, ends)
        assert ends[0][2] == ends[2][2], (seed, ends)
        for end in (ends[0], ends[2]):
            assert f"rank {CULPRIT} left" in end[1], (seed, ends)


def _lose_and_go_on(transport: str, message: int) -> tuple[int, str, torch.Tensor | None]:
    """Steps applied, the parameters in the end, and what of the gradients is nowhere."""
    rank = dist.get_rank()
    left = [0, 2]
    module = torch.nn.Linear(60, 20, dtype=torch.float64)
    torch.nn.init.constant_(module.weight, 1.0)
    torch.nn.init.constant_(module.bias, 1.0)  # a group of its own, without a residual
    ddp = DistributedDataParallel(module)
    state = STATES["oktopk"]()

    def connect_badly(*args: Any, **options: Any) -> _C.Transport:
        made = connect(*args[:2], transport)
        return made.with_fault(_C.FaultKind.die, message) if rank == CULPRIT else made

    with mock.patch.object(hooks, "connect", connect_badly):
        sparsecomm.register_comm_hook(ddp, state)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(rank)
    applied = 0
    # Gradients and residuals of the survivors less what was applied. Sums of small integers, and
    # their halves, are exact.
    open_sum: torch.Tensor | None = None

    def residual() -> torch.Tensor:
        [entry] = state.state_dict().values()
        kept: torch.Tensor = entry["residuals"]["weight"]
        return kept.view_as(module.weight)

    kept = torch.zeros(20, 60, dtype=torch.float64)
    for _ in range(8):
        gradient = torch.randint(-8, 8, (20, 60), generator=generator).double()
        before = module.weight.detach().clone()
        optimizer.zero_grad()
        try:
            (ddp(torch.eye(60, dtype=torch.float64)).T * gradient).sum().backward()
        except RuntimeError:
            if rank == CULPRIT:
                return 0, "", None
            assert open_sum is None
            group = dist.new_group(left, use_local_synchronization=True)
            ddp = DistributedDataParallel(module, process_group=group)
            state.reconnect(group)
            assert sparsecomm.register_comm_hook(ddp, state) is state
            open_sum = kept + gradient
            continue
        optimizer.step()
        applied += 1
        kept = residual().clone()
        if open_sum is not None:
            open_sum += gradient - (before - module.weight.detach())
    assert open_sum is not None
    open_sum -= residual()
    dist.all_reduce(open_sum, group=group)
    return applied, checksum(module), open_sum


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("message", [9, 12])
def test_survivors_go_on_with_their_residuals(message: int, transport: str) -> None:
    ends = run_ranks(3, _lose_and_go_on, transport, message, timeout=110)
    for applied, parameters, nowhere in (ends[0], ends[2]):
        assert (applied, parameters) == ends[0][:2]
        assert torch.count_nonzero(nowhere) == 0


# ---- a step that fails before anything has been selected


def _kept(entry: dict[str, Any], what: str) -> torch.Tensor:
    kept: torch.Tensor = entry[what]["weight"]
    return kept.clone().view(20, 60)


def _fail_as_the_step_begins(kind: str, transport: str, end: str) -> tuple[torch.Tensor, ...]:
    """Residual and velocity before and after the step that fails, and the gradient of it."""
    rank = dist.get_rank()
    momentum = 0.5 if kind == "momentum" else 0.0
    limit = timedelta(seconds=5 * PATIENCE) if end == "late" else LONG_TIME
    module = torch.nn.Linear(60, 20, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(module.weight)
    optimizer: Any
    exchange: Any
    model: torch.nn.Module = module
    with mock.patch.object(hooks, "connect", lambda *args, **_: connect(*args[:2], transport)):
        if kind == "optimizer":
            optimizer = sparsecomm.optim.OkTopkSGD(
                module.named_parameters(), lr=1.0, density=0.1, timeout=limit
            )
            exchange = optimizer.exchange
        elif kind == "fsdp":
            mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("replicate", "shard"))
            fully_shard(module, mesh=mesh["shard"])
            compression = sparsecomm.Compression(density=0.1)
            exchange = sparsecomm.fsdp.apply(module, compression, mesh["replicate"], timeout=limit)
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        else:
            make = sparsecomm.OkTopkState if kind == "oktopk" else sparsecomm.TopkState
            exchange = make(density=0.1, momentum=momentum, timeout=limit)
            model = DistributedDataParallel(module)
            sparsecomm.register_comm_hook(model, exchange)
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    store = dist.distributed_c10d._get_default_store()
    generator = torch.Generator().manual_seed(rank)
    entry: dict[str, Any] = {}
    for step in range(4):
        gradient = torch.randint(-8, 8, (20, 60), generator=generator).double()
        optimizer.zero_grad()
        if rank == CULPRIT and step == 3:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            store.wait(["failed"], LONG_TIME)
        try:
            (model(torch.eye(60, dtype=torch.float64)).T * gradient).sum().backward()
            optimizer.step()
        except RuntimeError:
            assert step == 3
            store.set("failed", "")
            [after] = exchange.state_dict().values()
            moments = [_kept(e, "moments") for e in (entry, after)] if momentum else []
            return _kept(entry, "residuals"), _kept(after, "residuals"), gradient, *moments
        [entry] = exchange.state_dict().values()
        entry = copy.deepcopy(entry)
    raise AssertionError("the step did not fail")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("oktopk", "killed"),
        ("topk", "killed"),
        ("momentum", "killed"),
        ("optimizer", "killed"),
        ("fsdp", "killed"),
        ("topk", "late"),
        ("optimizer", "late"),
    ],
)
def test_a_gradient_is_kept_if_a_rank_is_missing_as_the_step_begins(
    kind: str, end: str, transport: str
) -> None:
    ends = run_ranks(
        3, _fail_as_the_step_begins, kind, transport, end, may_die=(CULPRIT,), timeout=110
    )
    for before, after, gradient, *moments in (ends[0], ends[2]):
        velocity = gradient
        if kind == "momentum":
            velocity = 0.5 * moments[0] + gradient
            assert torch.equal(moments[1], velocity)
        assert torch.equal(after, before + velocity)


# ---- reconnect()


def refused(call: Callable[[], object], words: str) -> None:
    """``call`` raises ValueError without waiting for other ranks, of which none calls the same."""
    with pytest.raises(ValueError, match=words):
        call()


def _reconnect_too_early() -> None:
    state = sparsecomm.OkTopkState(density=0.5)
    refused(state.reconnect, "not connected")
    module = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.0001, find_unused_parameters=True)
    sparsecomm.register_comm_hook(ddp, state)
    raised: list[str] = []

    def hook(gradient: torch.Tensor) -> None:
        try:
            state.reconnect()
        except ValueError as error:
            raised.append(str(error))

    handle = module[0].weight.register_hook(hook)
    ddp(torch.ones(2, 16)).sum().backward()
    assert len(raised) == 1
    assert "reconnect" in raised[0]
    handle.remove()
    before = [parameter.grad.clone() for parameter in module.parameters()]
    dist.barrier()
    state.reconnect()
    assert len(before) == 8
    state._native.close()
    refused(state.reconnect, "not connected")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    sharded = torch.nn.Linear(16, 16)
    fully_shard(sharded, mesh=mesh["shard"])
    of_fsdp = sparsecomm.fsdp.apply(sharded, sparsecomm.Compression(), mesh["replicate"])
    refused(of_fsdp.reconnect, "checkpoint")
    dist.barrier()


def test_reconnect_is_refused_before_it_connects() -> None:
    run_ranks(2, _reconnect_too_early)


def _register_with_another_group() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[dist.get_rank() // 2]
    module = torch.nn.Linear(8, 8)
    state = sparsecomm.OkTopkState(density=0.5)
    sparsecomm.register_comm_hook(DistributedDataParallel(module, process_group=pair), state)
    state.reconnect()  # with all four
    ddp = DistributedDataParallel(module, process_group=pair)
    refused(lambda: sparsecomm.register_comm_hook(ddp, state), "process group")
    state.reconnect(pair)
    sparsecomm.register_comm_hook(ddp, state)
    ddp(torch.full((1, 8), float(dist.get_rank()))).sum().backward()
    mean = sum(dist.get_process_group_ranks(pair)) / 2
    gradients = ddp.module.bias.grad, ddp.module.weight.grad
    assert torch.equal(gradients[0], torch.ones(8))
    assert set(gradients[1].flatten().tolist()) <= {0.0, mean}


def test_a_state_is_registered_on_the_group_that_it_is_connected_to() -> None:
    run_ranks(4, _register_with_another_group)


def _an_optimizer_goes_on() -> tuple[str, int]:
    rank = dist.get_rank()
    module = torch.nn.Linear(60, 20, dtype=torch.float64)
    torch.nn.init.constant_(module.weight, 1.0)
    torch.nn.init.constant_(module.bias, 1.0)
    optimizer = sparsecomm.optim.OkTopkSGD(
        module.parameters(), lr=0.1, density=0.1, timeout=LONG_TIME
    )
    applied = 0
    for step in range(8):
        inputs = torch.randn(8, 60, generator=torch.Generator().manual_seed(10 * step + rank))
        module(inputs.double()).square().mean().backward()
        if rank == CULPRIT and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            optimizer.step()
            applied += 1
        except RuntimeError:
            group = dist.new_group([0, 2], use_local_synchronization=True)
            optimizer.exchange.reconnect(group)
            with pytest.raises(TypeError, match="process group"):
                pickle.dumps(optimizer)
        optimizer.zero_grad()
    assert list(optimizer.exchange.state_dict()) == [f"rank_{rank // 2}_of_2_from_rank_0"]
    return checksum(module), applied


def test_an_optimizer_goes_on_with_the_survivors() -> None:
    first, _, second = run_ranks(3, _an_optimizer_goes_on, may_die=(CULPRIT,))
    assert first == second
    assert first[1] == 7

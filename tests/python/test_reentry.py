"""Calls from callbacks, log handlers, signal handlers and other threads: all of them end.

A blocking call that could only wait for itself raises at once and says what to do.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import LONG, wait_until
from ranks import run_ranks
from test_exchange import TRANSPORTS
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

import sparsecomm

SOON = 0.3  # until a signal comes; it may come before the call has begun to wait
PROMISED = 1.0  # seconds in which a signal ends a call, on a machine that is not busy


def outcome(call: Callable[[], object]) -> str:
    """Returns what ``call`` raised, or "works", which takes no waiting."""
    start = time.monotonic()
    try:
        call()
        return "works"
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        assert time.monotonic() - start < LONG / 2


def sparse() -> torch.Tensor:
    return torch.eye(4).to_sparse()


def late(what: str) -> None:
    """Has rank 1 wait until rank 0 has called let_come()."""
    if dist.get_rank() == 1:
        _get_default_store().wait([what])


def let_come(what: str) -> None:
    if dist.get_rank() == 0:
        _get_default_store().set(what, "")


@contextmanager
def signalled(number: signal.Signals) -> Iterator[None]:
    """Sends it to this process soon."""
    timer = threading.Timer(SOON, os.kill, (os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def calls_from_a_callback(transport: str) -> list[str]:
    made = sparsecomm.Communicator.from_process_group(transport=transport)
    group = dist.new_group(backend="sparsecomm")
    late("attached")
    work = sparsecomm.allreduce(torch.ones(8), communicator=made, async_op=True)
    of_group = dist.all_reduce(sparse(), group=group, async_op=True)
    found: list[str] = []

    def call(future: Any) -> None:
        second = sparsecomm.allreduce(torch.ones(8), communicator=made, async_op=True)
        found.append(outcome(lambda: sparsecomm.allreduce(torch.ones(8), communicator=made)))
        found.append(outcome(second.wait))
        found.append(outcome(lambda: sparsecomm.allgather_sparse(sparse(), communicator=made)))
        found.append(outcome(lambda: sparsecomm.reduce_scatter_sparse(sparse(), communicator=made)))

    def call_group(future: Any) -> None:
        second = dist.all_reduce(sparse(), group=group, async_op=True)
        assert second is not None
        found.append(outcome(second.wait))

    if dist.get_rank() == 0:
        # Attached while the other rank is late: on a future that is done, a callback runs here.
        assert of_group is not None
        called = [work.get_future().then(call), of_group.get_future().then(call_group)]
        let_come("attached")
        for future in called:
            future.wait()
    else:
        work.wait()
        sparsecomm.allreduce(torch.ones(8), communicator=made, async_op=True).wait()
        assert of_group is not None
        of_group.wait()
        dist.all_reduce(sparse(), group=group)
    dist.barrier()
    got = sparsecomm.allreduce(torch.ones(8), communicator=made)
    assert got.tolist() == [2.0] * 8
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_blocking_call_from_a_callback_says_what_to_do(transport: str) -> None:
    refusals, _ = run_ranks(2, calls_from_a_callback, transport)
    assert len(refusals) == 5
    assert all("async_op=True" in refusal for refusal in refusals), refusals


def closing_in_a_callback() -> None:
    made = sparsecomm.Communicator.from_process_group()
    late("attached")
    work = sparsecomm.allreduce(torch.ones(8), communicator=made, async_op=True)
    closed = work.get_future().then(lambda _: outcome(made.close))
    let_come("attached")
    assert closed.wait() == "works"
    with pytest.raises(ValueError, match="is closed"):
        sparsecomm.allreduce(torch.ones(8), communicator=made)
    group = dist.new_group(backend="sparsecomm")
    late("attached to the group")
    started = dist.all_reduce(sparse(), group=group, async_op=True)
    assert started is not None
    ended = started.get_future().then(
        lambda _: outcome(lambda: dist.destroy_process_group(group)),
    )
    let_come("attached to the group")
    assert ended.wait() == "works"


def test_closing_in_a_callback_works() -> None:
    run_ranks(2, closing_in_a_callback)


def calls_from_a_log_handler(transport: str) -> list[str]:
    made = sparsecomm.Communicator.from_process_group(
        transport=transport, stall_limit=timedelta(seconds=0.2)
    )
    found: list[str] = []

    class Calling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(outcome(lambda: sparsecomm.allreduce(torch.ones(8), communicator=made)))
            found.append(outcome(made.counters))
            let_come("called")

    late("called")
    logging.getLogger("sparsecomm").addHandler(Calling())
    got = sparsecomm.allreduce(torch.ones(8), communicator=made)
    assert got.tolist() == [2.0] * 8
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_blocking_call_from_a_log_handler_says_what_to_do(transport: str) -> None:
    found, _ = run_ranks(2, calls_from_a_log_handler, transport)
    assert len(found) >= 2
    assert all("async_op=True" in refusal for refusal in found[::2]), found
    assert set(found[1::2]) == {"works"}


def calls_from_a_signal_handler(transport: str) -> list[str]:
    made = sparsecomm.Communicator.from_process_group(transport=transport)
    sparsecomm.allreduce(torch.ones(8), communicator=made)
    found: list[str] = []

    def allreduce() -> None:
        got = sparsecomm.allreduce(torch.ones(8), communicator=made)
        assert got.tolist() == [2.0] * 8

    def handle(number: int, frame: object) -> None:
        if transport == "ucx":  # whose messages get on in the thread that is interrupted
            found.append(outcome(allreduce))
            let_come("called")
        else:
            let_come("called")
            allreduce()
        found.append(outcome(made.counters))

    signal.signal(signal.SIGUSR1, handle)
    late("called")
    if dist.get_rank() == 0:
        with signalled(signal.SIGUSR1):
            allreduce()
            assert found
    else:
        allreduce()
        if transport != "ucx":
            allreduce()
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_blocking_call_from_a_signal_handler_works_or_says_what_to_do(transport: str) -> None:
    found, _ = run_ranks(2, calls_from_a_signal_handler, transport)
    assert found.pop() == "works"
    assert all("async_op=True" in refusal for refusal in found), found
    assert len(found) == (transport == "ucx")


def interrupted(call: Callable[[], object], limit: float) -> None:
    """Ctrl-C ends ``call`` within ``limit`` seconds."""
    start = time.monotonic()
    with signalled(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        call()
    assert SOON <= time.monotonic() - start < SOON + limit


def ctrl_c(limit: float, transport: str) -> str:
    """Rank 1 does not come before rank 0 has been interrupted."""
    made = sparsecomm.Communicator.from_process_group(transport=transport)
    sparsecomm.allreduce(torch.ones(8), communicator=made)
    data = torch.ones(8)
    if dist.get_rank() == 0:
        interrupted(lambda: sparsecomm.allreduce(data, communicator=made), limit)
        let_come("interrupted")
        assert data.tolist() == [1.0] * 8
        with pytest.raises(dist.DistBackendError, match="make a new one"):
            sparsecomm.allreduce(data, communicator=made)
        dist.barrier()
        return ""
    late("interrupted")
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        sparsecomm.allreduce(data, communicator=made)
    assert time.monotonic() - start < LONG / 2
    dist.barrier()
    return str(error.value)


def ctrl_c_of_others(limit: float) -> None:
    rank = dist.get_rank()
    # The wait for what goes on.
    made = sparsecomm.Communicator.from_process_group()
    late("of a communicator")
    work = sparsecomm.allreduce(torch.ones(8), communicator=made, async_op=True)
    if rank == 0:
        interrupted(work.wait, limit)
        let_come("of a communicator")
    assert work.wait().tolist() == [2.0] * 8
    group = dist.new_group(backend="sparsecomm")
    late("of a group")
    tensor = sparse()
    if rank == 0:
        interrupted(lambda: dist.all_reduce(tensor, group=group), limit)
        let_come("of a group")
    else:
        dist.all_reduce(tensor, group=group)
    dist.all_reduce(sparse(), group=group)  # before it the first one has ended
    assert torch.equal(tensor.to_dense(), 2 * torch.eye(4))
    # Connecting: rank 1 does not come.
    if rank == 0:
        interrupted(sparsecomm.Communicator.from_process_group, limit)


def ctrl_c_of_an_optimizer(limit: float) -> None:
    model = nn.Linear(8, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer = sparsecomm.optim.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=sparsecomm.Compression(density=0.5)
    )
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    late("of an optimizer")
    model(torch.ones(2, 8)).sum().backward()
    if dist.get_rank() == 0:
        interrupted(optimizer.step, limit)
        let_come("of an optimizer")
    optimizer.step()


# The documentation promises a second, which a busy machine does not keep.
LIMITS = [LONG / 2, pytest.param(PROMISED, marks=pytest.mark.slow)]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ctrl_c_ends_a_blocking_collective(transport: str, limit: float) -> None:
    reason = run_ranks(2, ctrl_c, limit, transport)[1]
    assert "rank 0" in reason


@pytest.mark.parametrize("limit", LIMITS)
def test_ctrl_c_ends_other_waits(limit: float) -> None:
    run_ranks(2, ctrl_c_of_others, limit)


@pytest.mark.parametrize("limit", LIMITS)
def test_ctrl_c_ends_an_optimizers_step(limit: float) -> None:
    run_ranks(2, ctrl_c_of_an_optimizer, limit)


def beside_training(seconds: float) -> dict[str, int]:
    """Looks from other threads; a crash ends the process. Returns how often each call worked."""
    sys.setswitchinterval(1e-5)
    made = sparsecomm.Communicator.from_process_group()
    current: list[sparsecomm.CompressionState | None] = [None]
    calls: dict[str, Callable[[sparsecomm.CompressionState], object]] = {
        "stats": lambda state: state.stats(),
        "state_dict": lambda state: state.state_dict(),
        "algorithms": lambda state: state._native.algorithms(),
        "report": lambda state: sparsecomm.report(state),
        "counters": lambda _: made.counters(),
    }
    attempts, worked = dict.fromkeys(calls, 0), dict.fromkeys(calls, 0)
    problems: list[str] = []
    stop = threading.Event()

    def watch(name: str) -> None:
        while not stop.is_set():
            state = current[0]
            if state is None:
                continue
            attempts[name] += 1
            try:
                calls[name](state)
                worked[name] += 1
            except Exception as error:
                if not isinstance(error, ValueError) or "after backward()" not in str(error):
                    problems.append(f"{name}: {error!r}")

    threads = [threading.Thread(target=watch, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    models = 0
    while time.monotonic() < end or not all(attempts.values()):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(100)])
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
        state = sparsecomm.DenseOverlapState() if models % 2 else sparsecomm.OkTopkState(0.5)
        sparsecomm.register_comm_hook(ddp, state)
        current[0] = state
        for _ in range(3):
            ddp(torch.randn(2, 4)).sum().backward()
            sparsecomm.allreduce(torch.ones(8), communicator=made)
        current[0] = None
        models += 1
    # No more steps: every call has an answer by now or soon.
    current[0] = state
    wait_until(lambda: all(worked.values()) or problems)
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems, problems[:3]
    return worked


def test_other_threads_get_an_answer_or_an_error() -> None:
    worked = run_ranks(1, beside_training, 8.0)[0]
    assert min(worked.values()) > 0, worked


def amid_a_backward_pass() -> list[str]:
    """Another thread asks between two groups of a step, when nothing is being exchanged."""
    found: list[str] = []
    results = []
    for asks in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001, find_unused_parameters=True)
        state = sparsecomm.OkTopkState(0.25)
        sparsecomm.register_comm_hook(ddp, state)

        def look(state: sparsecomm.CompressionState = state) -> None:
            while "are being exchanged" in (said := outcome(state.stats)):
                pass
            assert said == "works"
            found.append(outcome(state.state_dict))

        def ask(gradient: torch.Tensor, look: Callable[[], None] = look) -> None:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()

        if asks:
            model[0].weight.register_hook(ask)
        for _ in range(3):
            ddp(torch.ones(2, 16)).sum().backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
        state.state_dict()
    for plain, asked in zip(*results, strict=True):
        assert torch.equal(plain, asked)
    return found


def test_a_state_is_not_saved_amid_another_threads_backward_pass() -> None:
    found = run_ranks(1, amid_a_backward_pass)[0]
    assert len(found) == 3
    assert all("in the middle of a backward pass" in text for text in found), found


class Asking:
    """A scaler that looks at the state it is asked by."""

    def __init__(self) -> None:
        self.state: sparsecomm.CompressionState | None = None
        self.found: list[str] = []

    def get_scale(self) -> float:
        assert self.state is not None
        self.found.append(outcome(self.state.stats))
        return 1.0


def asked_for_a_scale() -> list[str]:
    scaler = Asking()
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    scaler.state = sparsecomm.OkTopkState(0.5)
    scaler.state.follow(scaler)
    sparsecomm.register_comm_hook(ddp, scaler.state)
    for _ in range(2):
        ddp(torch.ones(2, 4)).sum().backward()
    return scaler.found


def test_a_scaler_may_look_at_the_state() -> None:
    assert run_ranks(1, asked_for_a_scale)[0] == ["works"] * 2


def never(transport: str) -> None:
    for timeout in (timedelta.max, timedelta(days=300 * 365)):
        made = sparsecomm.Communicator.from_process_group(
            transport=transport, timeout=timeout, stall_limit=timedelta.max
        )
        assert sparsecomm.allreduce(torch.ones(4), communicator=made).tolist() == [2.0] * 4
        made.close()
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    state = sparsecomm.OkTopkState(0.5, transport=transport, timeout=timedelta.max)
    sparsecomm.register_comm_hook(ddp, state)
    ddp(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_longest_timeout_means_never(transport: str) -> None:
    run_ranks(2, never, transport)


def short() -> None:
    for timeout in (timedelta(0), timedelta(microseconds=-1), timedelta.min):
        with pytest.raises(ValueError, match="is not positive"):
            sparsecomm.Communicator.from_process_group(timeout=timeout)
        with pytest.raises(ValueError, match="is not positive"):
            sparsecomm.OkTopkState(0.5, timeout=timeout)
        with pytest.raises(ValueError, match="is not positive"):
            sparsecomm.OkTopkState(0.5, stall_limit=timeout)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="within 1e-06 s"):
            sparsecomm.Communicator.from_process_group(timeout=timedelta(microseconds=1))


def test_a_timeout_is_positive_and_may_be_microseconds() -> None:
    run_ranks(2, short)

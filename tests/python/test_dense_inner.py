"""The allreduce of the transport's own engine: gloo's, where messages go over c10d."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import test_collectives
import torch
import torch.distributed as dist
from patience import LONG, LONG_TIME, PATIENCE, wait_until
from ranks import run_ranks
from test_exchange import make_options

import sparsecomm
from sparsecomm import _C
from sparsecomm.transports import connect, table

INNER = "dense_inner"
LARGE = 1 << 23  # elements that take a while


def _reduce(size: int) -> None:
    os.environ["SPARSECOMM_TRANSPORT"] = "c10d"
    test_collectives.EXACT = (INNER,)
    test_collectives.allreduce_matrix(size)
    test_collectives.dense_tensors_like_gloo(size)
    test_collectives.non_finite(size)
    if size == 3:
        test_collectives.rounding(size)
    with sparsecomm.Communicator.from_process_group(transport="c10d") as communicator:
        before = communicator.counters()
        tensor = torch.full((1 << 20,), float(dist.get_rank()))
        expected = tensor.clone()
        dist.all_reduce(expected)
        sparsecomm.allreduce(tensor, INNER, communicator=communicator)
        assert torch.equal(tensor, expected)
        # Only the agreement's messages are the transport's.
        sent = communicator.counters()["sent_bytes"] - before["sent_bytes"]
        assert sent < 1000


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reduces_every_type_and_op(size: int) -> None:
    run_ranks(size, _reduce, size)


def _refused() -> None:
    with sparsecomm.Communicator.from_process_group(transport="ucx") as communicator:
        tensor = torch.ones(10)
        with pytest.raises(RuntimeError, match='ucx has none; use transport "c10d"'):
            sparsecomm.allreduce(tensor, INNER, communicator=communicator)
        assert sparsecomm.allreduce(tensor, "dense", communicator=communicator)[0] == 2


@pytest.mark.skipif(
    any(row["name"] == "ucx" and row["problem"] for row in table()), reason="needs ucx"
)
def test_where_the_transport_has_none_all_ranks_say_so_and_go_on() -> None:
    run_ranks(2, _refused)


def _plan() -> tuple[bool, set[str]]:
    plan = sparsecomm.explain(LARGE, 0.01, transport="c10d")
    candidate = next(row.candidate for row in plan.ranking if row.algorithm == INNER)
    return candidate, {row.algorithm for row in plan.ranking if not row.candidate}


def test_auto_may_choose_it_where_there_is_one() -> None:
    for candidate, others in run_ranks(2, _plan):
        assert candidate
        assert others == {"gaussian_k", "ina", "ina_sparse"}
    link = sparsecomm.Link.parse("1gbit")
    by_hand = sparsecomm.explain(LARGE, 0.01, link=link, ranks=4)
    assert not next(row.candidate for row in by_hand.ranking if row.algorithm == INNER)


def _lose(signal_number: int, interfaces: str, deadline: float) -> tuple[str, float, bool]:
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    transport = connect(None, LONG_TIME, "c10d")
    communicator = _C.Communicator(transport, timedelta(seconds=deadline))
    exchange = _C.Exchange(communicator, LARGE, torch.float32, make_options(INNER, 1.0))
    gradient = torch.ones(LARGE)
    exchange.run(gradient)
    if dist.get_rank() == 1:
        # Most of the time that the exchanges take is gloo's.
        threading.Timer(0.3, os.kill, (os.getpid(), signal_number)).start()
    for step in range(10_000):
        gradient.fill_(step)
        start = time.monotonic()
        try:
            exchange.run(gradient)
        except dist.DistBackendError as error:
            waited = time.monotonic() - start
            with pytest.raises(RuntimeError, match="make a new one"):
                exchange.run(gradient)
            return str(error), waited, bool((gradient == step).all())
    raise AssertionError("the loss of rank 1 went unnoticed")


@pytest.mark.parametrize(
    ("number", "size", "interfaces", "text"),
    [
        (signal.SIGKILL, 2, "lo", "rank 1 left"),
        (signal.SIGKILL, 4, "lo", "rank 1 left"),
        (signal.SIGKILL, 3, "lo,lo", "rank 1 left"),
        (signal.SIGSTOP, 3, "lo", "rank 1 did not take part before the deadline ({deadline:g} s)"),
    ],
)
def test_survivors_name_the_lost_rank_and_keep_their_data(
    number: int, size: int, interfaces: str, text: str
) -> None:
    # One that is gone is noticed long before the deadline.
    deadline, longest = LONG, LONG / 2
    if number == signal.SIGSTOP:
        deadline = 3 * PATIENCE
        longest += deadline
    results = run_ranks(size, _lose, number, interfaces, deadline, may_die=(1,), timeout=80)
    for rank in range(size):
        if rank != 1:
            error, waited, kept = results[rank]
            assert text.format(deadline=deadline) in error, error
            assert waited < longest, error
            assert kept


def _close(interfaces: str) -> float:
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    communicator = sparsecomm.Communicator.from_process_group(transport="c10d", timeout=LONG_TIME)
    tensor = torch.ones(LARGE)
    process = torch.tensor(os.getpid())
    dist.broadcast(process, 1)
    if dist.get_rank() == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()

    def is_stopped() -> bool:
        return "\nState:\tT" in Path(f"/proc/{int(process)}/status").read_text()

    while True:
        work = sparsecomm.allreduce(tensor, INNER, "max", communicator=communicator, async_op=True)
        wait_until(lambda work=work: work.is_completed() or is_stopped())
        if work.is_completed():
            continue
        time.sleep(1)  # what it needs of rank 1 may have been sent already
        if work.is_completed():
            continue
        start = time.monotonic()
        communicator.close()
        with pytest.raises(RuntimeError, match="closed its communicator"):
            work.wait()
        return time.monotonic() - start


# Of several interfaces gloo takes one for each collective, in turn.
@pytest.mark.parametrize("interfaces", ["lo", "lo,lo", "lo,lo,lo"])
def test_closing_breaks_off_what_runs(interfaces: str) -> None:
    assert run_ranks(2, _close, interfaces, may_die=(1,), timeout=80)[0] < LONG / 2

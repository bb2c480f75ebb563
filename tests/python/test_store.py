"""A process group's store that stops or goes while ranks still need it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from patience import LONG, LONG_TIME
from ranks import CONTEXT, run_ranks
from test_exchange import TRANSPORTS
from torch.distributed.distributed_c10d import _get_default_store

import sparsecomm

GIVEN_UP = 30.0  # seconds after which a call to a store that does not answer ends


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """Its port and its process."""
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=serve, args=(there,), daemon=True)
    process.start()
    assert process.pid is not None
    yield here.recv(), process.pid
    process.kill()
    process.join()


def serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def hurt(pid: int, how: str, healed: threading.Event) -> None:
    """Kills a process, or stops it until ``healed``; if slow, it runs for 10 ms in 300."""
    while not healed.is_set():
        os.kill(pid, signal.SIGKILL if how == "gone" else signal.SIGSTOP)
        healed.wait(0.29 if how == "slow" else None)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)


def use_store(port: int) -> None:
    """Makes the default group of two ranks anew, over the server's store."""
    rank = dist.get_rank()
    dist.barrier()  # or the other rank has not finished making the group
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def _close(port: int, pid: int, how: str, transport: str) -> tuple[float, str]:
    """Seconds that closing took while an operation waited, and what became of that."""
    rank = dist.get_rank()
    use_store(port)
    communicator = sparsecomm.Communicator.from_process_group(
        transport=transport, timeout=10 * LONG_TIME
    )
    tensor = torch.eye(4).to_sparse()
    sparsecomm.allreduce(tensor, communicator=communicator)
    work = None
    healed = threading.Event()
    hurting = threading.Thread(target=hurt, args=(pid, how, healed), daemon=True)
    if rank == 0:
        work = sparsecomm.allreduce(tensor, communicator=communicator, async_op=True)
        hurting.start()
    dist.barrier()
    start = time.monotonic()
    communicator.close()
    took = time.monotonic() - start
    text = ""
    if work is not None:
        try:
            work.wait()
        except RuntimeError as error:
            text = str(error)
    dist.barrier()
    if rank == 0:
        healed.set()
        hurting.join()
    return took, text


def _raise_alarm(*_: object) -> None:
    raise RuntimeError("an alarm")


def _connect(
    port: int, pid: int, transport: str, limit: float, alarm: float, late: bool
) -> tuple[float, str]:
    """Seconds until connecting over a store that has stopped ended, and what it raised."""
    use_store(port)
    dist.barrier()
    signal.signal(signal.SIGALRM, _raise_alarm)
    if dist.get_rank() == 0:
        if late:  # the other rank waits in the store, where it has left this key
            _get_default_store().wait(["sparsecomm/join/1"], LONG_TIME)
        os.kill(pid, signal.SIGSTOP)
    if not late:
        dist.barrier()
    signal.setitimer(signal.ITIMER_REAL, alarm)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        sparsecomm.Communicator.from_process_group(
            transport=transport, timeout=timedelta(seconds=limit)
        )
    took = time.monotonic() - start
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(pid, signal.SIGCONT)
    again = sparsecomm.Communicator.from_process_group(transport=transport, timeout=LONG_TIME)
    sparsecomm.allreduce(torch.ones(3), communicator=again)
    return took, str(caught.value)


@pytest.mark.parametrize(
    ("limit", "alarm", "late", "text"),
    [
        pytest.param(3, 0, False, "store", id="limit"),
        pytest.param(3, 0, True, "store", id="limit in the meeting"),
        pytest.param(10 * LONG, 3, False, "an alarm", id="signal"),
        pytest.param(10 * LONG, 3, True, "an alarm", id="signal in the meeting"),
    ],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_connecting_does_not_wait_for_the_store(
    server: tuple[int, int], transport: str, limit: float, alarm: float, late: bool, text: str
) -> None:
    arguments = (*server, transport, limit, alarm, late)
    for took, error in run_ranks(2, _connect, *arguments, timeout=100):
        assert took < GIVEN_UP - 5
        assert text in error


@pytest.mark.parametrize("how", ["stopped", "slow", "gone"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_does_not_wait_for_the_store(
    server: tuple[int, int], transport: str, how: str
) -> None:
    ends = run_ranks(2, _close, *server, how, transport, timeout=60)
    assert max(took for took, _ in ends) < GIVEN_UP / 2
    assert "closed" in ends[0][1]

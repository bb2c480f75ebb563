"""What the ranks of test_mpi.py run: ``mpiexec -n P python mpi_program.py NAME [ARGUMENT ...]``.

Each function is one program; rank 0 prints what it returns, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import mpi4py

if len(sys.argv) > 1 and sys.argv[1] == "thread_level":
    mpi4py.rc.thread_level = sys.argv[2]

import pytest
import torch
from mpi4py import MPI
from patience import LONG_TIME, PATIENCE

import sparsecomm
from sparsecomm import _C

WORLD = MPI.COMM_WORLD


def contracts() -> tuple[int, int]:
    """The checks of test_exchange.py; returns the bytes that all ranks sent and received."""
    from test_exchange import check_matrix

    with sparsecomm.Communicator.from_mpi(WORLD, timeout=LONG_TIME) as communicator:
        assert (communicator.rank, communicator.size) == (WORLD.rank, WORLD.size)
        assert communicator.transport == "mpi"
        counted = check_matrix(
            communicator.engine,
            lambda tensor: torch.from_numpy(WORLD.allreduce(tensor.numpy())),
            lambda tensor: WORLD.bcast(tensor),
            (torch.float64, torch.bfloat16),
        )
    sent, received = zip(*WORLD.allgather(counted), strict=True)
    return sum(sent), sum(received)


def thread_level(level: str) -> str:
    """What a communicator says under a thread level: what it sums, or what it refuses."""
    try:
        communicator = sparsecomm.Communicator.from_mpi(WORLD)
    except ValueError as error:
        return str(error)
    return f"{level}: {_sum(communicator)}"


def two_communicators() -> list[float]:
    """Two at a time, one of them of half the ranks, and mpi4py beside them."""
    half = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    whole_ranks = sparsecomm.Communicator.from_mpi(WORLD, timeout=LONG_TIME)
    half_ranks = sparsecomm.Communicator.from_mpi(half, timeout=LONG_TIME)
    half.Free()
    sums = [_sum(whole_ranks), _sum(half_ranks), _sum(whole_ranks)]
    sums.append(WORLD.allreduce(1.0))
    half_ranks.close()
    half_ranks.close()
    with pytest.raises(ValueError, match="closed"):
        _sum(half_ranks)
    return sums


def mismatch() -> str:
    """Ranks that ask for different things raise the same text, and may go on."""
    communicator = sparsecomm.Communicator.from_mpi(WORLD, timeout=LONG_TIME)
    try:
        _exchange(communicator, 100 + WORLD.rank).run(torch.ones(100 + WORLD.rank))
    except RuntimeError as error:
        texts = set(WORLD.allgather(str(error)))
        assert len(texts) == 1, texts
        assert _sum(communicator) == WORLD.size
        return texts.pop()
    raise AssertionError("nobody noticed")


def lost_rank(how: str, seed: str) -> None:
    """The last rank is killed or stopped amid operations; each survivor prints what it says.

    The survivors then go on with a communicator of those that are left.
    """
    from ranks import end_soon
    from test_exchange import EVERYWHERE, exchange_ones

    victim, timeout, operations = WORLD.size - 1, 3 * PATIENCE, 50
    generator = random.Random(seed)
    last = generator.randrange(operations)
    communicator = sparsecomm.Communicator.from_mpi(WORLD, timeout=timedelta(seconds=timeout))
    start = time.monotonic()
    error = ""
    for step in range(operations + 1):  # the signal may come amid the one after
        if WORLD.rank == victim and step == last:
            print(f"victim {os.getpid()}", flush=True)
            end_soon(signal.SIGKILL if how == "kill" else signal.SIGSTOP, generator)
        start = time.monotonic()
        try:
            exchange_ones(communicator.engine, EVERYWHERE[step % len(EVERYWHERE)], 10_000)
        except RuntimeError as failure:
            error = str(failure)
            break
        if WORLD.rank == victim:
            time.sleep(0.005)
    waited = time.monotonic() - start
    with pytest.raises(RuntimeError, match="make a new one"):
        _sum(communicator)
    communicator.close()
    left = WORLD.Create_group(WORLD.group.Excl([victim]))
    total = _sum(sparsecomm.Communicator.from_mpi(left, timeout=LONG_TIME))
    said = {"rank": WORLD.rank, "error": error, "waited": waited, "timeout": timeout, "sum": total}
    print(json.dumps(said), flush=True)
    os._exit(0)  # MPI_Finalize would wait for the lost rank


def _exchange(
    communicator: sparsecomm.Communicator, numel: int, algorithm: str = "oktopk"
) -> _C.Exchange:
    from test_exchange import make_options

    options = make_options(algorithm, 0.1)
    return _C.Exchange(communicator.engine, numel, torch.float32, options)


def _sum(communicator: sparsecomm.Communicator) -> float:
    """What an allreduce of ones finds: the number of ranks."""
    gradient = torch.ones(10)
    _exchange(communicator, 10, "dense").run(gradient)
    assert (gradient == gradient[0]).all()
    return gradient[0].item()


def main() -> None:
    program: Callable[..., Any] = globals()[sys.argv[1]]
    try:
        result = program(*sys.argv[2:])
    except BaseException:
        traceback.print_exc()
        WORLD.Abort(1)
    if WORLD.rank == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

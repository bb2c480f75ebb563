"""What each host of test_links.py runs: ``python link_program.py TRANSPORT FOLDER``.

Operations without end, until the link of one host goes down; once it is up again, the same
processes make a communicator anew. FOLDER, which all hosts see, holds who has got how far.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from patience import LONG_TIME, PATIENCE
from test_exchange import EVERYWHERE, exchange_ones, make_options

from sparsecomm import _C, Communicator
from sparsecomm.transports import connect

OVER_MPI = "mpi"  # under mpiexec, without torch.distributed
DEADLINE = 2 * PATIENCE
NUMEL = 100_000


def communicator_of(transport: str, timeout: timedelta) -> Communicator:
    if transport == OVER_MPI:
        from mpi4py import MPI

        return Communicator.from_mpi(MPI.COMM_WORLD, timeout=timeout)
    return Communicator(_C.Communicator(connect(None, LONG_TIME, transport), timeout))


def main(transport: str, folder: Path) -> None:
    if transport != OVER_MPI:
        dist.init_process_group("gloo")
    communicator = communicator_of(transport, timedelta(seconds=DEADLINE))
    assert communicator.transport.startswith(transport)
    rank = communicator.rank
    completed = 0
    while True:
        if completed == len(EVERYWHERE):
            (folder / f"running-{rank}").touch()
        start = time.monotonic()
        try:
            exchange_ones(communicator.engine, EVERYWHERE[completed % len(EVERYWHERE)], NUMEL)
        except RuntimeError as error:
            took, text = time.monotonic() - start, str(error)
            break
        completed += 1
    with pytest.raises(RuntimeError, match="make a new one"):
        exchange_ones(communicator.engine, EVERYWHERE[0], NUMEL)
    start = time.monotonic()
    communicator.close()
    closing = time.monotonic() - start
    (folder / f"raised-{rank}").touch()

    again = communicator_of(transport, LONG_TIME)
    for algorithm in EVERYWHERE:
        exchange_ones(again.engine, algorithm, NUMEL)
    total = torch.full((10,), float(rank))
    _C.Exchange(again.engine, 10, torch.float32, make_options("dense", 1.0)).run(total)
    said = {"took": took, "text": text, "completed": completed, "closing": closing}
    said["sum"] = total[0].item()
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    again.close()
    if transport != OVER_MPI:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

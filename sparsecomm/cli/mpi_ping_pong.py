"""The transport over MPI beside plain MPI: ``mpiexec -n 2 python -m sparsecomm.cli.mpi_ping_pong``.

Arguments: rounds of a block, blocks. Rank 0 prints, as JSON, the median one-way time in
microseconds of each block, per engine and size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from mpi4py import MPI

from sparsecomm import _C
from sparsecomm.cli.ping_pong import SIZES, median_us
from sparsecomm.cli.ranks import TIMEOUT
from sparsecomm.transports import MPI_LIBRARY


def main(rounds: int, blocks: int) -> None:
    world = MPI.COMM_WORLD
    mpi = (str(MPI_LIBRARY), MPI.Get_library_version(), world.py2f())
    transport = _C.mpi_transport(*mpi)
    engines: dict[str, Callable[[int, int], list[float]]] = {
        "mpi": lambda size, count: transport.ping_pong(size, count, TIMEOUT),
        "MPI_Send/Recv": lambda size, count: _C.mpi_ping_pong(*mpi, size, count),
    }
    medians: dict[str, dict[int, list[float]]] = {name: {} for name in engines}
    for _ in range(blocks):
        for size in SIZES:
            for name, run in engines.items():
                world.Barrier()
                medians[name].setdefault(size, []).append(median_us(run, size, rounds))
    if world.rank == 0:
        print(json.dumps(medians))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

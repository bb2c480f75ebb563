"""One probe of ``sparsecomm doctor``, in processes of its own: the doctor outlives crash and hang.

``python -m sparsecomm.cli.probe NAME SECONDS``; ``mpi`` under mpiexec. It prints a line of JSON as
each step begins, and one with the figures; anything else is what went wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from sparsecomm import _C
from sparsecomm.build import CUDA_LIBRARY
from sparsecomm.cli.kernels import KERNELS
from sparsecomm.cli.measure import exchange_options
from sparsecomm.cli.ping_pong import SIZES, median_us
from sparsecomm.cli.ranks import run_on_ranks
from sparsecomm.transports import MPI_LIBRARY, connect

NUMEL = 4096
DENSITIES = (1.0, 0.05)
ROUNDS = 500

Total = Callable[[torch.Tensor], torch.Tensor]  # over all ranks


def main(name: str, seconds: float) -> int:
    """Returns the exit status, 1 after a failure that has been printed."""
    # A transport that names the culprit when its deadline passes says more than the doctor can.
    limit = timedelta(seconds=seconds / 2)
    try:
        if name == "kernels":
            compare_kernels()
        elif name == "cuda":
            try_cuda()
        elif name == "mpi":
            try_mpi(limit)
        else:
            return run_on_ranks(partial(try_transport, name, limit), 2)
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def compare_kernels() -> None:
    """Every instruction set against the scalar oracle, bit by bit."""
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for target in _C.kernel_targets():
        say(step=f"selecting with {target}")
        for dtype, kernels in KERNELS.items():
            packed = torch.float64 if dtype == torch.float64 else torch.float32
            chosen = []
            for each in (kernels(target, 1), kernels("scalar", 1)):
                gradient, residual = values.to(dtype, copy=True), values.flip(0).to(packed)
                indices = torch.zeros(NUMEL, dtype=torch.uint32)
                out = torch.zeros(NUMEL, dtype=packed)
                count = each.fused_error_feedback(gradient, residual, 1.5, indices, out)
                chosen.append((indices[:count].long(), out[:count], residual))
            if not all(torch.equal(ours, oracle) for ours, oracle in zip(*chosen, strict=True)):
                raise RuntimeError(f"{target} and scalar select different entries of {dtype}")


def try_cuda() -> None:
    """The k largest of a gradient on the device."""
    say(step="selecting on the device")
    k = NUMEL // 100
    gradient = torch.arange(float(NUMEL), device="cuda")
    selection = _C.CudaSelection(str(CUDA_LIBRARY), gradient, gradient[:0], NUMEL)
    selection.exact_threshold(k)
    selection.select()
    if selection.count() != k or int(selection.indices[0]) != NUMEL - k:
        raise RuntimeError(
            f"the device selected {selection.count()} entries from index "
            f"{int(selection.indices[0])} on, instead of {k} from {NUMEL - k} on"
        )


def try_transport(name: str, limit: timedelta) -> None:
    if dist.get_rank() == 0:
        say(step="connecting")

    def total(tensor: torch.Tensor) -> torch.Tensor:
        sums = tensor.clone()
        dist.all_reduce(sums)
        return sums

    examine(connect(None, limit, name), dist.get_rank(), total, limit)


def try_mpi(limit: timedelta) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != 2:
        raise RuntimeError(
            f"mpiexec -n 2 has started {world.size} of mpi4py's ranks: it belongs to another MPI "
            f"than mpi4py, which has loaded {MPI.Get_library_version().splitlines()[0]}"
        )
    if world.rank == 0:
        say(step="connecting")
    transport = _C.mpi_transport(str(MPI_LIBRARY), MPI.Get_library_version(), world.py2f())

    def total(tensor: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(world.allreduce(tensor.numpy()))

    examine(transport, world.rank, total, limit)


def examine(transport: _C.Transport, rank: int, total: Total, limit: timedelta) -> None:
    """Messages of two sizes, and a small allreduce with every algorithm."""

    def begin(step: str) -> None:
        if rank == 0:
            say(step=step)

    def ping_pong(size: int, rounds: int) -> list[float]:
        return transport.ping_pong(size, rounds, limit)

    begin(f"sending messages of {SIZES[0]} bytes")
    latency = median_us(ping_pong, SIZES[0], ROUNDS)
    begin(f"sending messages of {SIZES[-1]} bytes")
    bandwidth = SIZES[-1] / median_us(ping_pong, SIZES[-1], ROUNDS) / 1e3
    communicator = _C.Communicator(transport, limit)
    checked = []
    for row in _C.algorithms():
        if communicator.missing(row["name"]):
            continue
        begin(f"reducing with {row['name']}")
        for density in DENSITIES:
            check_allreduce(row["name"], density, communicator, total)
        checked.append(row["name"])
    if rank == 0:
        say(latency_us=latency, gigabytes_per_second=bandwidth, algorithms=checked)


def check_allreduce(
    algorithm: str, density: float, communicator: _C.Communicator, total: Total
) -> None:
    """Compares with the dense sum of integers, which is exact.

    Raises:
        RuntimeError: the ranks' results differ, or what they hold and what was kept for later do
            not add up to the sum.
    """
    generator = torch.Generator().manual_seed(communicator.rank)
    gradient = torch.randint(-8, 9, (NUMEL,), generator=generator).float()
    wanted = total(gradient)
    options = exchange_options(algorithm, density)
    exchange = _C.Exchange(communicator, NUMEL, gradient.dtype, options)
    exchange.run(gradient)  # becomes the mean
    delivered = communicator.size * gradient
    if not torch.equal(total(gradient), delivered):
        raise RuntimeError(f"{algorithm} at density {density:g}: the ranks' results differ")
    wrong = (delivered + total(exchange.residual) != wanted).sum().item()
    if wrong or not delivered.any():
        raise RuntimeError(
            f"{algorithm} at density {density:g}: {wrong} of {NUMEL} entries are not the dense "
            f"sum's, {int(delivered.count_nonzero())} arrived"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))

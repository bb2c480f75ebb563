"""The ranks that a launcher has started, told to torch.distributed as torchrun would."""

from __future__ import annotations

import os
import socket

from common.errors import UserError

LAUNCHERS = ("torchrun", "mpi")

# Where the usual launchers say which rank a process is, before MPI is initialised.
_RANK_VARIABLES = ("RANK", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


class LauncherError(UserError):
    """The launcher's ranks cannot be had."""


def is_first_rank() -> bool:
    """Whether this process is rank 0, as far as the environment says."""
    return next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0") == "0"


def take_ranks_from_mpi() -> None:
    """Sets the variables of torchrun from mpi4py's world communicator; collective over it."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LauncherError(
            f'--launcher mpi needs mpi4py and an MPI: {error}; pip install "sparsecomm[mpi]"'
        ) from error
    world = MPI.COMM_WORLD
    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    address = ("127.0.0.1" if host.size == world.size else socket.gethostname(), _free_port())
    name, port = world.bcast(address)
    os.environ.update(
        MASTER_ADDR=name,
        MASTER_PORT=str(port),
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(host.rank),
        LOCAL_WORLD_SIZE=str(host.size),
    )
    host.Free()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port

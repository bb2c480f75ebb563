"""What moves the bytes: the choice of a transport, and connecting the ranks of a group through it.

The environment says what calls leave open:

- ``SPARSECOMM_TRANSPORT``: what ``"auto"`` stands for, such as ``c10d``;
- ``SPARSECOMM_UCX_LIBRARY``: the ``libucp.so.0`` to open, instead of the system's or the wheel's;
- ``UCX_*``: UCX's own settings, which UCX reads, and which go before ours;
- ``GLOO_SOCKET_IFNAME``: the network interfaces that gloo may use; without ``UCX_NET_DEVICES`` UCX
  uses the same for TCP.

``sparsecomm doctor`` says which of them are set.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroupGloo, Store
from torch.distributed import distributed_c10d

from sparsecomm import _C

AUTO = "auto"
STALL_LIMIT = timedelta(seconds=60)
INTERFACES = "GLOO_SOCKET_IFNAME"
CHOICE = "SPARSECOMM_TRANSPORT"
UCX_LIBRARY = "SPARSECOMM_UCX_LIBRARY"
# Present where sparsecomm was built with an MPI.
MPI_LIBRARY = Path(_C.__file__).with_name("_mpi.so")
_INFINIBAND = Path("/sys/class/infiniband")


def settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that matter here and to what moves the bytes, those that are set.

    The only place that reads the environment, which is the process's if ``None``.
    """
    environment = os.environ if environment is None else environment
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(("SPARSECOMM_", "UCX_", "GLOO_")) or name == "OMP_NUM_THREADS"
    }


def connect_options(
    transport: str, timeout: timedelta, environment: Mapping[str, str] | None = None
) -> _C.ConnectOptions:
    """Returns how to connect.

    Args:
        transport: ``"auto"`` or the name of one.
        timeout: for all ranks to come.
        environment: the process's, if ``None``.
    """
    variables = settings(environment)
    if transport == AUTO:
        transport = variables.get(CHOICE, "") or AUTO
    devices = []
    interfaces = [name for name in variables.get(INTERFACES, "").split(",") if name]
    if interfaces:
        devices.append(("NET_DEVICES", ",".join([*interfaces, *_rdma_devices()])))
    ucx = _C.UcxOptions(
        library=variables.get(UCX_LIBRARY, ""),
        alternatives=_wheel_libraries(),
        settings=devices,
        reserved=[name.removeprefix("UCX_") for name in variables if name.startswith("UCX_")],
    )
    return _C.ConnectOptions(transport=transport, ucx=ucx, mpi=str(MPI_LIBRARY), timeout=timeout)


def table() -> list[dict[str, Any]]:
    """One row per transport; ``problem`` says why it cannot be used here, else it is empty."""
    return _C.transports(connect_options(AUTO, timedelta(0)))


def names() -> list[str]:
    """What a call may name: ``"auto"``, and those that connect processes."""
    return [AUTO, *(row["name"] for row in table() if row["connects_processes"])]


@functools.cache
def warn(text: str) -> None:
    """Logs a warning, once per process however many groups are connected."""
    logging.getLogger("sparsecomm").warning("%s", text)


def checked_stall_limit(limit: timedelta | None) -> timedelta | None:
    """Returns ``limit``; raises TypeError or ValueError where it is no positive timedelta."""
    if limit is None:
        return None
    if not isinstance(limit, timedelta):
        raise TypeError(f"stall_limit must be a timedelta or None, not {type(limit).__name__}")
    if limit <= timedelta(0):
        raise ValueError(f"stall_limit={limit} is not positive; None: no stall is logged")
    return limit


def log_stall(text: str) -> None:
    """Logs a warning of a rank that waits, every time."""
    logging.getLogger("sparsecomm").warning("%s", text)


def connect(
    process_group: dist.ProcessGroup | None, timeout: timedelta, transport: str = AUTO
) -> _C.Transport:
    """Connects the ranks of ``process_group`` a second time, for sparsecomm alone.

    Collective: every rank of the group calls it, in the same order.

    Args:
        process_group: the default group if ``None``.
        timeout: for all ranks to come, and of the connections.
        transport: ``"auto"``, which takes the first that works on all ranks, or the name of one.

    Raises:
        RuntimeError: torch.distributed is not initialised, this rank is not in the group, the ranks
            did not all connect within ``timeout``, or the transport cannot be used on some rank.
        ValueError: there is no transport of that name.
    """
    require_initialised()
    group = process_group if process_group is not None else distributed_c10d._get_default_group()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise RuntimeError(
            f"rank {dist.get_rank()} is not a member of the process group it was given"
        )
    shared: Any = distributed_c10d._world.pg_map[group][1]
    store = shared.clone()  # a connection of its own, missing from torch's type stubs
    number = store.add(f"sparsecomm/communicators/{rank}", 1)
    own = PrefixStore(f"sparsecomm/{number}", store)

    def make_gloo(store: Store) -> Backend:
        return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)

    options = connect_options(transport, timeout)
    try:
        return _C.connect(rank, size, own, make_gloo, warn, options)
    except _C.TransportError:
        raise  # the same text on every rank
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank}: the {size} ranks did not all connect within "
            f"{timeout.total_seconds():g} s; every rank of the process group must take part in "
            f"the first step ({error})"
        ) from error


def require_initialised() -> None:
    """Raises ``RuntimeError`` unless there is a default process group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )


def _wheel_libraries() -> list[str]:
    """The library of the package ``libucx-cu13``, or of another CUDA's, where it is installed."""
    spec = find_spec("libucx")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [Path(folder) / "lib" / "libucp.so.0" for folder in folders]
    return [str(file) for file in files if file.is_file()]


def _rdma_devices() -> list[str]:
    """The ports that an interface chosen for gloo says nothing about, as UCX names them."""
    return sorted(
        f"{port.parent.parent.name}:{port.name}" for port in _INFINIBAND.glob("*/ports/*")
    )

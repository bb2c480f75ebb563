"""The choice of a transport, and connecting the ranks of a group through it.

Environment variables set what calls leave open:

- ``SPARSECOMM_TRANSPORT``: what ``"auto"`` stands for, such as ``c10d``;
- ``SPARSECOMM_AGGREGATORS``: addresses of aggregators, with commas between them, for whatever can
  use some and was given none; the same on all ranks;
- ``SPARSECOMM_AGGREGATOR_TOKEN_FILE``: a file with the token that they ask for;
- ``SPARSECOMM_TIMELINE``: a file; each rank records what it does in one of its own, see
  :func:`sparsecomm.timeline`;
- ``SPARSECOMM_UCX_LIBRARY``: the ``libucp.so.0`` to open, instead of the system's or the wheel's;
- ``SPARSECOMM_CONNECT_TIMEOUT``: seconds that UCX's connections may take once all ranks have
  joined, instead of 10 and 0.05 more for each rank;
- ``UCX_*``: UCX's own settings, which UCX reads, and which go before ours;
- ``GLOO_SOCKET_IFNAME``: the network interfaces that gloo may use; without ``UCX_NET_DEVICES`` UCX
  uses the same for TCP.

If neither of the latter is set, a rank whose store is at ``localhost``, ``127.*`` or ``::1`` takes
all ranks to be on this host, and listens on the loopback interface alone. Each rank decides that by
the address that it was given, so all ranks of a job need the same ``MASTER_ADDR``.

``sparsecomm doctor`` says which of them are set.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore
from torch.distributed import distributed_c10d

from sparsecomm import _C, tracing

AUTO = "auto"
STALL_LIMIT = timedelta(seconds=60)
INTERFACES = "GLOO_SOCKET_IFNAME"
UCX_INTERFACES = "UCX_NET_DEVICES"
UCX_PORTS = "UCX_TCP_PORT_RANGE"
UCX_TRANSPORTS = "UCX_TLS"
LOOPBACK = "lo"
_LOOPBACK_ALONE = "the loopback interface"
CHOICE = "SPARSECOMM_TRANSPORT"
UCX_LIBRARY = "SPARSECOMM_UCX_LIBRARY"
AGGREGATORS = "SPARSECOMM_AGGREGATORS"
TOKEN_FILE = "SPARSECOMM_AGGREGATOR_TOKEN_FILE"
CONNECT_TIMEOUT = "SPARSECOMM_CONNECT_TIMEOUT"
OWN_VARIABLES = (
    CHOICE,
    AGGREGATORS,
    TOKEN_FILE,
    UCX_LIBRARY,
    CONNECT_TIMEOUT,
    tracing.VARIABLE,
)
# Present where sparsecomm was built with an MPI.
MPI_LIBRARY = Path(_C.__file__).with_name("_mpi.so")
_INFINIBAND = Path("/sys/class/infiniband")
_LOG = logging.getLogger("sparsecomm")


def settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the variables that matter here and to what moves the bytes, if they are set.

    The only place that reads the environment, which is the process's if ``None``.
    """
    environment = os.environ if environment is None else environment
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(("SPARSECOMM_", "UCX_", "GLOO_")) or name == "OMP_NUM_THREADS"
    }


def connect_options(
    transport: str,
    timeout: timedelta,
    environment: Mapping[str, str] | None = None,
    *,
    call: str = "the first operation",
    stall_limit: timedelta | None = None,
    loopback: bool = False,
    ranks: Sequence[int] = (),
    rank: int = 0,
    agreed: str = "",
) -> _C.ConnectOptions:
    """Returns how to connect.

    Args:
        transport: ``"auto"`` or the name of one.
        timeout: until all ranks have joined.
        environment: the process's, if ``None``.
        call: what every rank calls to connect, for messages.
        stall_limit: when to log which ranks have not joined.
        loopback: the store is on the loopback interface, and so all ranks are on this host.
        ranks: that are connected, as they are numbered among all processes; none: nothing of what
            they do is recorded.
        rank: of this process, its place in ``ranks``.
        agreed: what else must be the same on all ranks.

    Raises:
        ValueError: a variable has a value that it cannot have.
    """
    variables = settings(environment)
    return _options(
        variables,
        transport,
        timeout,
        call,
        stall_limit,
        loopback,
        checked_connect_timeout(variables.get(CONNECT_TIMEOUT, "")),
        tracing.recorded(call, ranks, rank, variables) if ranks else _C.TimelineOptions(),
        agreed,
    )


def aggregator_addresses(
    addresses: Sequence[str],
    transport: str,
    environment: Mapping[str, str] | None = None,
    token_file: str | None = None,
) -> _C.AggregatorAddresses:
    """Returns where aggregators are, what moves the messages to them, and how the token is shown.

    Args:
        addresses: if there are none, those in ``SPARSECOMM_AGGREGATORS``.
        environment: the variables to read; those of the process if ``None``.
        token_file: if ``None``, the one that ``SPARSECOMM_AGGREGATOR_TOKEN_FILE`` names, if any.

    Raises:
        ValueError: an address is not HOST:PORT or comes twice, there is no such transport, or there
            is no token in the file.
        OSError: the file cannot be read.
    """
    token_file = token_file or settings(environment).get(TOKEN_FILE) or None
    if token_file is not None:
        read_token(token_file)  # it is read again whenever it is asked for
    ucx = query_options(environment).ucx
    return _C.AggregatorAddresses(
        addresses=addresses or aggregators_of_environment(environment),
        transport=transport,
        ucx=ucx,
        log=log_trouble,
        prove=None if token_file is None else functools.partial(prove, token_file),
    )


def read_token(file: str) -> str:
    """Returns the token in a file: the last word of its first line that is not a comment."""
    for line in Path(file).read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            return line.split()[-1]
    raise ValueError(f"{file}: there is no token in it; write a line with a name and a token")


def prove(token_file: str, message: bytes) -> bytes:
    """Returns what shows an aggregator that sent ``message`` who has the token."""
    return hmac.digest(read_token(token_file).encode(), message, "sha256")


def aggregators_of_environment(environment: Mapping[str, str] | None = None) -> list[str]:
    """Returns the addresses in ``SPARSECOMM_AGGREGATORS``."""
    return [address.strip() for address in _items(settings(environment).get(AGGREGATORS, ""))]


def query_options(environment: Mapping[str, str] | None = None) -> _C.ConnectOptions:
    """Returns how to look for transports, for calls that connect nothing."""
    return _options(settings(environment), AUTO, timedelta(0))


def _options(
    variables: Mapping[str, str],
    transport: str,
    timeout: timedelta,
    call: str = "",
    stall_limit: timedelta | None = None,
    loopback: bool = False,
    connect_timeout: timedelta | None = None,
    timeline: _C.TimelineOptions | None = None,
    agreed: str = "",
) -> _C.ConnectOptions:
    if transport == AUTO:
        transport = variables.get(CHOICE, "") or AUTO
    devices = _own_devices(variables, loopback)
    ucx = _C.UcxOptions(
        library=variables.get(UCX_LIBRARY, ""),
        alternatives=_wheel_libraries(),
        settings=[("NET_DEVICES", ",".join(devices))] if devices else [],
        reserved=[name.removeprefix("UCX_") for name in variables if name.startswith("UCX_")],
        connect_timeout=connect_timeout,
    )
    return _C.ConnectOptions(
        transport=transport,
        ucx=ucx,
        mpi=str(MPI_LIBRARY),
        timeout=timeout,
        call=call,
        stall_limit=stall_limit,
        log_stall=log_trouble,
        timeline=timeline or _C.TimelineOptions(),
        agreed=agreed,
    )


def _own_devices(variables: Mapping[str, str], loopback: bool) -> list[str]:
    """Returns the network devices for UCX unless ``UCX_NET_DEVICES`` names some; empty: all."""
    if interfaces := _items(variables.get(INTERFACES, "")):
        return [*interfaces, *_rdma_devices()]
    return [LOOPBACK] if loopback else []


def _items(value: str) -> list[str]:
    return [item for item in value.split(",") if item]


def listening(loopback: bool, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Describes, by transport, the interfaces on which a rank accepts connections.

    Args:
        loopback: the store is on the loopback interface.
        environment: the process's, if ``None``.
    """
    variables = settings(environment)
    gloo = ", ".join(_items(variables.get(INTERFACES, "")))
    if not gloo:
        gloo = _LOOPBACK_ALONE if loopback else "the interface of this host's name"
    return {
        "ucx": _ucx_listening(variables, loopback),
        "c10d": f"TCP on {gloo}, ports chosen by the system",
    }


def _ucx_listening(variables: Mapping[str, str], loopback: bool) -> str:
    ports = variables.get(UCX_PORTS) or "chosen by the system"
    devices = _items(variables.get(UCX_INTERFACES, "")) or _own_devices(variables, loopback)
    if devices == [LOOPBACK]:
        ways = [f"TCP on {_LOOPBACK_ALONE}, ports {ports}"]
    elif not devices or devices == ["all"]:
        ways = [f"TCP on all interfaces, ports {ports}"]
        if ports_of_rdma := _rdma_devices():
            ways.append(f"RDMA on {', '.join(ports_of_rdma)}")
    else:
        # UCX writes the port of an RDMA device after a colon, and an interface as the system does.
        rdma = [device for device in devices if ":" in device]
        interfaces = [device for device in devices if ":" not in device]
        ways = [f"TCP on {', '.join(interfaces)}, ports {ports}"] if interfaces else []
        if rdma:
            ways.append(f"RDMA on {', '.join(rdma)}")
    if limit := variables.get(UCX_TRANSPORTS):
        ways.append(f"of these the ones that {UCX_TRANSPORTS}={limit} allows")
    return "; ".join(ways)


def table() -> list[dict[str, Any]]:
    """One row per transport; ``problem`` says why it cannot be used here, else it is empty."""
    return _C.transports(query_options())


def names() -> list[str]:
    """Returns the names that a call may give: ``"auto"``, and those that connect processes."""
    return [AUTO, *(row["name"] for row in table() if row["connects_processes"])]


def checked_connect_timeout(seconds: str) -> timedelta | None:
    """Returns the duration, ``None`` for ``""``; raises ValueError unless it is positive."""
    if not seconds:
        return None
    try:
        limit = timedelta(seconds=float(seconds))
    except (ValueError, OverflowError):
        limit = timedelta(0)
    if limit <= timedelta(0):
        raise ValueError(f"{CONNECT_TIMEOUT}={seconds!r} is not a positive number of seconds")
    return limit


@functools.cache
def warn(text: str) -> None:
    """Logs a warning, once per process however many groups are connected."""
    _LOG.warning("%s", text)


def log_trouble(text: str) -> None:
    """Logs a warning of a rank that waits, or of a lost aggregator, every time."""
    _LOG.warning("%s", text)


def connect(
    process_group: dist.ProcessGroup | None,
    timeout: timedelta,
    transport: str = AUTO,
    *,
    call: str = "the first operation",
    stall_limit: timedelta | None = None,
    agreed: str = "",
) -> _C.Transport:
    """Connects the ranks of ``process_group`` a second time, for sparsecomm alone.

    Collective: every rank of the group calls it, in the same order.

    Args:
        process_group: the default group if ``None``.
        timeout: until all ranks have joined, and of the connections.
        transport: ``"auto"``, which takes the first that works on all ranks, or the name of one.
        call: what every rank calls to connect, for messages.
        stall_limit: a rank that waits longer for others logs a warning that names them.
        agreed: what else must be the same on all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialised, this rank is not in the group, the ranks
            did not all connect within ``timeout``, the transport cannot be used on some rank, or
            ranks ask for different things; that with the same text on all.
        ValueError: ``transport`` is not the name of one.
    """
    require_initialised()
    group = process_group if process_group is not None else distributed_c10d._get_default_group()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise RuntimeError(
            f"rank {dist.get_rank()} is not a member of the process group it was given"
        )
    store = distributed_c10d._world.pg_map[group][1]
    host = store_host(store)
    options = connect_options(
        transport,
        timeout,
        call=call,
        stall_limit=stall_limit,
        loopback=is_loopback(host),
        ranks=dist.get_process_group_ranks(group),
        rank=rank,
        agreed=agreed,
    )

    def gloo(store: Store) -> ProcessGroupGloo:
        return make_gloo(store, rank, size, timeout, host)

    try:
        connected = _C.connect(rank, size, store, gloo, warn, options)
    except _C.TransportError:
        raise  # the same text on every rank
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank}: the {size} ranks did not all connect within "
            f"{timeout.total_seconds():g} s in {call}, which every rank of the process group must "
            f"call ({error})"
        ) from error
    log_connected(rank, size, connected.name, call, host)
    return connected


def make_gloo(
    store: Store, rank: int, size: int, timeout: timedelta, host: str
) -> ProcessGroupGloo:
    """Connects a gloo group, on the loopback interface alone if ``host``, the store's, is on it."""
    gloo: Any = ProcessGroupGloo  # whose options are missing from torch's type stubs
    limit = gloo_timeout(timeout)
    options = limit  # torch takes its default device
    if is_loopback(host) and not settings().get(INTERFACES):
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = limit
    made: ProcessGroupGloo = gloo(store, rank, size, options)
    return made


def log_connected(rank: int, size: int, name: str, call: str, host: str) -> None:
    """Logs that ``call`` connected the ranks, and on which interfaces this one listens."""
    _LOG.info(
        "rank %d of %d has connected over %s in %s: %s",
        *(rank, size, name, call, listening(is_loopback(host))[name.partition("/")[0]]),
    )


def store_host(store: Store) -> str:
    """Returns the store's host as this rank was given it, empty for a file or a store in memory."""
    store = innermost(store)
    return store.host if isinstance(store, TCPStore) else ""


def innermost(store: Store) -> Store:
    """Returns the store behind all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def is_loopback(host: str) -> bool:
    """Returns whether ``host`` is a loopback address, or the name that stands for one.

    Other ranks may have been given another address of the same store.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def gloo_timeout(timeout: timedelta) -> timedelta:
    """Returns ``timeout`` within the limits of torch's gloo, to which 0 ms would mean "never"."""
    return min(max(timeout, timedelta(milliseconds=1)), timedelta(days=36525))


def require_initialised() -> None:
    """Raises ``RuntimeError`` unless there is a default process group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )


def _wheel_libraries() -> list[str]:
    """Returns the library of the package ``libucx-cu13``, or of another CUDA's, if installed."""
    spec = find_spec("libucx")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [Path(folder) / "lib" / "libucp.so.0" for folder in folders]
    return [str(file) for file in files if file.is_file()]


def _rdma_devices() -> list[str]:
    """Returns this host's RDMA ports, as UCX names them: an interface of gloo does not name any."""
    return sorted(
        f"{port.parent.parent.name}:{port.name}" for port in _INFINIBAND.glob("*/ports/*")
    )

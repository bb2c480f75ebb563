"""The ranks of a measurement: torchrun's, or processes started here."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessExitedException, spawn

TIMEOUT = timedelta(minutes=5)


def world_size_of_launcher() -> int | None:
    """The number of ranks that torchrun or another launcher started, ``None`` without one."""
    size = os.environ.get("WORLD_SIZE")
    return None if size is None or "RANK" not in os.environ else int(size)


def address_of_this_host() -> str:
    """The address at which other ranks reach this host: of the interface towards rank 0's."""
    first = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, _, _, address = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        own = str(probe.getsockname()[0])
    return f"[{own}]" if family == socket.AF_INET6 else own


def run_on_ranks(body: Callable[[], None], ranks: int) -> int:
    """Calls ``body`` on every rank, with torch.distributed initialised over gloo.

    Under a launcher this process is one of the ranks; without, ``ranks`` processes are started
    and waited for, and ``body`` must be picklable.

    Returns:
        The exit status: 0, or 1 when a rank has failed and has said why.
    """
    if world_size_of_launcher() is not None:
        return _run_rank(body, None)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    # One thread per rank, as torchrun does: the ranks share this machine's cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        spawn(_run_started, (body, ranks, store.port), nprocs=ranks)  # type: ignore[no-untyped-call]
    except ProcessExitedException as error:
        if error.signal_name is not None:
            print(f"rank {error.error_index} was ended by {error.signal_name}", file=sys.stderr)
        return 1
    return 0


def _run_started(rank: int, body: Callable[[], None], ranks: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    status = _run_rank(body, port)
    if status != 0:
        sys.exit(status)


def _run_rank(body: Callable[[], None], port: int | None) -> int:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        if port is None:
            dist.init_process_group("gloo", timeout=TIMEOUT)
        else:
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT
            )
        body()
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        # An orderly shutdown could wait for ranks that will never answer.
        os._exit(1)
    return 0

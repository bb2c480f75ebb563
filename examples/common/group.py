"""A program's run on the ranks of a process group, and how it ends."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from common.errors import UserError
from common.launcher import take_ranks_from_mpi


class GroupError(UserError):
    """The ranks do not come together."""


def run_program(program: str, options: argparse.Namespace, work: Callable[[], None]) -> int:
    """Does the work on the ranks that `--launcher` has started; returns the exit status.

    0 where all went well, 2 where the user can set right what went wrong, 1 otherwise: among that
    is another rank that is gone.
    """
    try:
        if options.launcher == "mpi":
            take_ranks_from_mpi()
        work()
    except UserError as error:
        return fail(program, str(error), 2)
    except Exception as error:
        if not isinstance(error, RuntimeError | ValueError | OSError):
            traceback.print_exc()  # it was not foreseen
        return fail(program, f"{type(error).__name__}: {error}", 1)
    disconnect()
    return 0


def join(backend: str, timeout: timedelta) -> None:
    """Joins the process group of torchrun, or makes one of a single rank."""
    if "WORLD_SIZE" in os.environ:
        try:
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
                # A restart by torchrun finds the store as the ranks that are gone have left it. On
                # several hosts attempts are counted by each.
                store = PrefixStore(f"attempt-{attempt()}", store)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )
        except dist.DistNetworkError as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise GroupError(
                f"the ranks cannot meet at {address}: {error}; if the port is taken, choose "
                "another with torchrun's --master-port, or let --standalone find a free one"
            ) from error
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def attempt() -> int:
    """How often torchrun has started all ranks anew, since it lost one."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch() -> str:
    """Names the torchrun that has started this rank; a restart is by the same."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return f"process {os.getppid()}" if name == "none" else name  # "none": it was given none


def disconnect() -> None:
    """Leaves the process group, and ends its threads before the interpreter does.

    A model may be part of reference cycles and hold on to the group. A thread of the group that
    still has a tensor to drop while the interpreter shuts down would abort the process.
    """
    gc.collect()
    dist.destroy_process_group()


def fail(program: str, message: str, status: int) -> int:
    """Says what went wrong, leaves the group, and returns the exit status."""
    print(f"{program}: rank {os.environ.get('RANK', '0')}: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        # An orderly shutdown could wait for ranks that will never answer.
        os._exit(status)
    if dist.is_initialized():
        disconnect()
    return status

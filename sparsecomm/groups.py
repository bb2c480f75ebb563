"""Process groups and stores that belong to sparsecomm alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroupGloo, Store
from torch.distributed import distributed_c10d


def require_initialised() -> None:
    """Raises ``RuntimeError`` unless there is a default process group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )


def dedicated_gloo(
    process_group: dist.ProcessGroup | None, timeout: timedelta
) -> tuple[Backend, Store]:
    """Connects the ranks of ``process_group`` a second time, through a gloo group of our own.

    Collective: every rank of the group calls it, in the same order. The caller hands the only
    reference to the group on to a transport, which closes the connections by dropping it.

    Returns:
        The gloo group, and a store that only its ranks use.

    Raises:
        RuntimeError: torch.distributed is not initialised, this rank is not in the group, or the
            ranks did not all connect within ``timeout``.
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
    try:
        return ProcessGroupGloo(PrefixStore("gloo", own), rank, size, timeout), own
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank}: the {size} ranks did not all connect within "
            f"{timeout.total_seconds():g} s; every rank of the process group must take part in "
            f"the first step ({error})"
        ) from error

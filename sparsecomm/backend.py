"""The ``torch.distributed`` backend ``"sparsecomm"``.

It gives every collective and point-to-point call that gloo gives (on CUDA tensors: NCCL, where
torch has it), and runs the allreduce of sparse COO tensors on an engine of its own, and that of
dense ones where there are aggregators. Results are those of the dense operation.
"""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, Backend, Store
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from sparsecomm import _C, transports
from sparsecomm.announcement import announced_aggregators
from sparsecomm.options import Options

NAME = "sparsecomm"
# The communicators of all groups. torch.distributed may keep groups until the interpreter has
# ended, when a thread that drops a Python object would abort the process.
_open = _C.OpenCommunicators()
atexit.register(_open.close)


def register() -> None:
    """Makes ``init_process_group("sparsecomm")`` work; called by ``import sparsecomm``."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def own_backend(group: object) -> _C.ProcessGroup | None:
    """Returns the group's backend for CPU tensors if it is this one."""
    if not isinstance(group, dist.ProcessGroup):
        return None  # this rank is no member
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None  # it has none
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    return backend if isinstance(backend, _C.ProcessGroup) else None


def backend_stats(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Returns what a group of the backend ``"sparsecomm"`` has done on sparsecomm's engine.

    That is the allreduce of sparse tensors and, where there are aggregators, of dense ones; what
    gloo and NCCL do is not counted.

    Args:
        group: the default group if ``None``.

    Returns:
        ``sent_bytes``, ``received_bytes`` and ``messages`` (sent) of this rank, also to and from
        aggregators, and ``lost_aggregators``, which maps the address of each that is not used now
        to the reason; as of the last operation.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: the group has another backend.
    """
    transports.require_initialised()
    group = distributed_c10d._get_default_group() if group is None else group
    backend = own_backend(group)
    if backend is None:
        raise ValueError(f'the group has not the backend "{NAME}" for CPU tensors')
    engine = backend.communicator
    if engine is None:
        counted = dict.fromkeys(("sent_bytes", "received_bytes", "messages"), 0)
        return {**counted, "lost_aggregators": {}}
    return {**engine.counters(), "lost_aggregators": engine.lost_aggregators()}


def _create(options: Any, backend_options: Any) -> _C.ProcessGroup:
    """Makes the group of this rank; ``options`` is torch's ``_DistributedBackendOptions``."""
    if not dist.is_gloo_available():
        raise RuntimeError(f'the backend "{NAME}" needs gloo; install a torch that has it')
    rank, size = options.group_rank, options.group_size
    gloo_class: Any = dist.ProcessGroupGloo
    host, timeout = transports.store_host(options.store), _timeout_of(options)
    store = PrefixStore("gloo", options.store)
    gloo: Any = transports.make_gloo(store, rank, size, timeout, host)
    transports.log_connected(rank, size, "c10d/gloo", f"process group {options.group_id}", host)
    gloo_options = gloo.options
    gloo_options.global_ranks_in_group = list(options.global_ranks_in_group) or list(range(size))
    gloo_options.group_name = options.group_id
    gloo._set_sequence_number_for_group()

    def make_gloo_options() -> Any:
        made = gloo_class._Options()
        made._devices = gloo_options._devices
        made._threads = 1
        made.group_name = f"{options.group_id}:{NAME}"
        return made

    ours = _options_of(backend_options)
    aggregators = _aggregators_of(ours, options.store)
    _require_same_way(gloo, options.store, aggregators.addresses, ours.block_bytes)
    has_nccl = dist.is_nccl_available() and torch.cuda.is_available()
    make_nccl = _nccl_factory(options, ours.nccl) if has_nccl else None
    return _C.ProcessGroup(
        gloo,
        make_nccl,
        make_gloo_options,
        options.store,
        timeout,
        transports.connect_options(
            ours.communicator.transport,
            timeout,
            call="the first all_reduce on sparsecomm's engine",
            stall_limit=ours.communicator.stall_limit,
            loopback=transports.is_loopback(host),
            ranks=gloo_options.global_ranks_in_group,
            rank=rank,
        ),
        aggregators,
        ours.block_bytes,
        transports.warn,
        _open,
        ours.communicator.timeout,
    )


def _aggregators_of(ours: Options, store: Store) -> _C.AggregatorAddresses:
    if not ours.finds_aggregators:
        return ours.communicator.aggregator_addresses()
    options = ours.communicator
    return transports.aggregator_addresses(
        announced_aggregators(store),
        options.aggregator_transport,
        token_file=options.aggregator_token_file,
    )


def _require_same_way(gloo: Any, store: Store, addresses: list[str], block_bytes: int) -> None:
    """Raises, on all ranks alike, unless dense sums would go the same way on all of them."""
    own = f"aggregators {', '.join(addresses) or 'none'}, block_bytes {block_bytes}"
    number = int.from_bytes(hashlib.sha256(own.encode()).digest()[:7], "big")
    extremes = torch.tensor([number, -number])
    options: Any = AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    gloo.allreduce([extremes], options).wait()
    if extremes[0] == -extremes[1]:
        return
    keys = [f"{NAME}/way/{rank}" for rank in range(gloo.size())]
    store.set(keys[gloo.rank()], own)
    said = [text.decode() for text in store.multi_get(keys)]
    other = next(rank for rank, text in enumerate(said) if text != said[0])
    raise RuntimeError(
        f'backend "{NAME}": ranks disagree: {said[0]} on rank 0, but {said[other]} on rank '
        f"{other}; give all the same, by pg_options or by {transports.AGGREGATORS}"
    )


def _options_of(backend_options: Any) -> Options:
    """Returns what ``pg_options`` come to; NCCL's go to it, as with the backend ``"nccl"``."""
    if backend_options is None:
        return Options()
    if isinstance(backend_options, Options):
        return backend_options
    if isinstance(backend_options, Backend.Options) and backend_options.backend == "nccl":
        return Options(nccl=backend_options)
    raise TypeError(
        f'pg_options={backend_options!r} cannot be used with the backend "{NAME}"; '
        "use sparsecomm.Options(...)"
    )


def _timeout_of(options: Any) -> timedelta:
    """Returns the group's timeout within the limits of gloo."""
    # Torch rounds it to a float of seconds, and timedelta.max comes back below zero.
    overflown = options.timeout < timedelta(days=-1_000_000)
    return transports.gloo_timeout(timedelta.max if overflown else options.timeout)


def _nccl_factory(options: Any, nccl_given: Backend.Options | None) -> Callable[[], Backend]:
    def make() -> Backend:
        nccl: Any = dist.ProcessGroupNCCL
        nccl_options: Any = nccl.Options() if nccl_given is None else nccl_given
        nccl_options._timeout = _timeout_of(options)
        nccl_options.global_ranks_in_group = list(options.global_ranks_in_group)
        nccl_options.group_name = options.group_id
        store = PrefixStore("nccl", options.store)
        made: Backend = nccl(store, options.group_rank, options.group_size, nccl_options)
        return made

    return make

"""Lossless collectives that send only what is not zero.

Every rank of a process group, or of a :class:`~sparsecomm.Communicator`, calls them with tensors of
the same shape and dtype. A collective with a ``name`` runs with those of that name on the other
ranks, so ranks may call in any order, and from several threads. Those without a name run in the
order of the calls, which must be the same on every rank. Ranks remember 1,024 names, those that
were used last, which then take two bits of a message. Operations of one communicator run one after
another, in an order that is the same on all ranks. Whoever uses no ``communicator`` gets one per
process group, which connects at the first call (all ranks must take part in it) and lives as long
as the group. Of a group of the backend ``"sparsecomm"`` it has the aggregators.

Tensors are on the CPU and of dtype float32, float64, float16, bfloat16, int32 or int64, with at
most 2^32 - 2 entries, zeros included. Half precision is reduced in float32 and rounded once. The
layout is COO or CSR, for :func:`allreduce` dense too; what comes back is COO and coalesced. An
uncoalesced tensor is coalesced first, which adds up what it holds for one index, whatever the
``op``. Gradients do not flow through.

All ranks get the same bits. Where ranks disagree every rank raises the same ``RuntimeError``, and
the communicator stays usable. When a rank is lost or a deadline passes, every rank that is left
raises ``torch.distributed.DistBackendError``, which names the culprit; the communicator is done.
Ctrl-C does the same, and raises ``KeyboardInterrupt`` on its own rank. From a callback of the same
communicator only calls with ``async_op=True`` work; others raise ``RuntimeError``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Literal, TypeVar, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sparsecomm import _C
from sparsecomm._C import CancelledError
from sparsecomm.backend import own_backend
from sparsecomm.communicator import Communicator
from sparsecomm.options import CommunicatorOptions
from sparsecomm.transports import require_initialised

__all__ = [
    "CancelledError",
    "Work",
    "allgather_sparse",
    "allreduce",
    "grouped_allreduce",
    "join",
    "reduce_scatter_sparse",
]

T = TypeVar("T")

CancelledError.__doc__ = "A collective was cancelled, on this rank or another, before it began."

# An entry goes, and its connections close, when torch.distributed drops the group.
_of_group: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()
_lock_of_group: WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = WeakKeyDictionary()
_lock = threading.Lock()  # of the locks


class Work(Generic[T]):
    """A collective that was started with ``async_op=True``.

    Until it has ended the tensor that it was given must not be changed.
    """

    def __init__(self, native: _C.CollectiveWork) -> None:
        self._native = native

    def wait(self) -> T:
        """Blocks until the collective has ended, and returns its result.

        Ctrl-C ends the wait, and the collective goes on.

        Raises:
            CancelledError: a rank cancelled it.
            RuntimeError: it failed, as the blocking form would have; or this is a callback, or a
                handler of a signal or log message, that would wait for itself.
        """
        result: T = self._native.result()
        return result

    def is_completed(self) -> bool:
        """Whether it has ended, with a result or an error."""
        return self._native.ended()

    def cancel(self) -> bool:
        """Keeps the collective from running if it has not begun.

        Every rank, also those that did not cancel, then raises :class:`CancelledError` from
        :meth:`wait`, tensors are as they were, and later collectives run.

        Returns:
            False where it had begun already, or was about to if all ranks had called it: if so it
            runs to its end, unless another rank has cancelled it, else it is cancelled.
        """
        return self._native.cancel()

    def get_future(self) -> torch.futures.Future[T]:
        """A future of the result, or of the error, which is a plain ``RuntimeError`` there."""
        future: torch.futures.Future[T] = self._native.get_future()
        return future


@overload
def allreduce(
    tensor: torch.Tensor,
    algorithm: str = ...,
    op: str = ...,
    group: dist.ProcessGroup | None = ...,
    communicator: Communicator | None = ...,
    async_op: Literal[False] = ...,
    name: str | None = ...,
    priority: int = ...,
) -> torch.Tensor: ...
@overload
def allreduce(
    tensor: torch.Tensor,
    algorithm: str = ...,
    op: str = ...,
    group: dist.ProcessGroup | None = ...,
    communicator: Communicator | None = ...,
    *,
    async_op: Literal[True],
    name: str | None = ...,
    priority: int = ...,
) -> Work[torch.Tensor]: ...
def allreduce(
    tensor: torch.Tensor,
    algorithm: str = "auto",
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    communicator: Communicator | None = None,
    async_op: bool = False,
    name: str | None = None,
    priority: int = 0,
) -> torch.Tensor | Work[torch.Tensor]:
    """Reduces ``tensor`` over all ranks.

    An index that a rank does not hold takes no part, as if it held the neutral element: 0 for
    ``sum`` and ``avg``, 1 for ``product``, infinity (or the largest integer) for ``min``, its
    opposite for ``max``. So ``min`` of a sparse tensor is the least of the entries that are there,
    where torch.distributed and ``to_dense()`` would see zeros. Of a dense tensor every entry
    counts, and those that are not the neutral element travel.

    Args:
        tensor: dense of any strides, COO, hybrid COO or CSR, of any shape, the same on every rank.
            Dense on all ranks or sparse on all; the number of entries may differ, and be 0. A
            dense tensor is reduced in place; a sparse one stays as it is.
        algorithm: a line of ``sparsecomm info`` that is exact for this dtype and op, or ``"auto"``:
            the one that costs least for what the ranks hold; an allgather of rows, with one index
            each, for hybrid tensors and for COO tensors of more than 2^32 - 2 entries.
        op: ``"sum"``, ``"product"``, ``"min"``, ``"max"``; ``"avg"`` for floating types.
        group: the ranks; the default group if ``None``.
        communicator: the ranks, instead of a group.
        async_op: return at once. Until the work has ended the tensor must not be written to, nor
            its memory be given to another collective.
        name: of the collective, at most 1,024 bytes that do not begin with ``#``; ``None``: it is
            known by its place in the order of calls. One of a name may be pending at a time.
        priority: of collectives that have a name and are ready together the one of the highest runs
            first, once the ranks know it; the same on every rank.

    Returns:
        ``tensor`` itself where it is dense, otherwise a coalesced COO tensor of its shape, in which
        entries that equal the neutral element may be missing; a :class:`Work` of it with
        ``async_op``.

    Raises:
        TypeError: ``tensor`` is not a tensor, ``op`` or ``name`` not a string, or ``priority`` not
            an int.
        ValueError: an unknown or lossy algorithm, an unknown op, a tensor that cannot be exchanged,
            both a group and a communicator, a closed communicator, or a name that is empty, too
            long or begins with ``#``, or of which there is one that has not ended; or a priority
            without a name, or of more than 32 bits.
        RuntimeError: torch.distributed is not initialised, or the ranks disagree.
        torch.distributed.DistBackendError: a rank was lost, or the time ran out, as it does where
            some rank does not call with that name; then the communicator is done.

    Complexity: docs/algorithms.md says how many messages and words each algorithm takes for k
    entries a rank; a dense tensor is read once or twice besides.
    """
    _check(tensor, op)
    given = _given(name, priority)
    collectives = _collectives(group, communicator)
    if async_op:
        return Work(collectives.start_allreduce(tensor, algorithm, op, *given))
    return collectives.allreduce(tensor, algorithm, op, *given)


@overload
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    algorithm: str = ...,
    op: str = ...,
    group: dist.ProcessGroup | None = ...,
    communicator: Communicator | None = ...,
    async_op: Literal[False] = ...,
    name: str | None = ...,
    priority: int = ...,
) -> list[torch.Tensor]: ...
@overload
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    algorithm: str = ...,
    op: str = ...,
    group: dist.ProcessGroup | None = ...,
    communicator: Communicator | None = ...,
    *,
    async_op: Literal[True],
    name: str | None = ...,
    priority: int = ...,
) -> Work[list[torch.Tensor]]: ...
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    algorithm: str = "auto",
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    communicator: Communicator | None = None,
    async_op: bool = False,
    name: str | None = None,
    priority: int = 0,
) -> list[torch.Tensor] | Work[list[torch.Tensor]]:
    """Reduces ``tensors`` over all ranks as one operation: all of them, or none.

    If a rank lacks one or has it in another shape, or is lost before all ranks have all results,
    dense tensors are as they were. For that they are copied: until the operation has ended they
    must not be resized.

    Args:
        tensors: as in :func:`allreduce`, of any dtypes, dense and sparse ones mixed; as many, in
            the same order, on every rank.
        algorithm: as in :func:`allreduce`, for each.
        op: as in :func:`allreduce`.
        group: the ranks; the default group if ``None``.
        communicator: the ranks, instead of a group.
        async_op: return at once.
        name: of them together; as in :func:`allreduce`.
        priority: as in :func:`allreduce`.

    Returns:
        The results of :func:`allreduce`, in the order of the tensors; a :class:`Work` of that list
        with ``async_op``.

    Raises:
        TypeError, ValueError, RuntimeError, torch.distributed.DistBackendError: as
            :func:`allreduce`.

    Complexity: the messages and words of each, one agreement for all, and 2 ceil(log2 P) messages.
    """
    members = _members(tensors)
    _check_op(op)
    given = _given(name, priority)
    collectives = _collectives(group, communicator)
    if async_op:
        return Work(collectives.start_grouped_allreduce(members, algorithm, op, *given))
    return collectives.grouped_allreduce(members, algorithm, op, *given)


@overload
def allgather_sparse(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = ...,
    communicator: Communicator | None = ...,
    async_op: Literal[False] = ...,
    name: str | None = ...,
    priority: int = ...,
) -> list[torch.Tensor]: ...
@overload
def allgather_sparse(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = ...,
    communicator: Communicator | None = ...,
    *,
    async_op: Literal[True],
    name: str | None = ...,
    priority: int = ...,
) -> Work[list[torch.Tensor]]: ...
def allgather_sparse(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    communicator: Communicator | None = None,
    async_op: bool = False,
    name: str | None = None,
    priority: int = 0,
) -> Sequence[torch.Tensor] | Work[list[torch.Tensor]]:
    """Gives every rank the sparse tensors of all ranks, explicit zeros included.

    Args:
        tensor: COO, hybrid COO or CSR, of the same shape on every rank; the number of entries may
            differ.
        group: the ranks; the default group if ``None``.
        communicator: the ranks, instead of a group.
        async_op: return at once.
        name: as in :func:`allreduce`.
        priority: as in :func:`allreduce`.

    Returns:
        A coalesced COO tensor of the same shape from each rank, in rank order; a :class:`Work` of
        that list with ``async_op``.

    Raises:
        ValueError, RuntimeError, torch.distributed.DistBackendError: as :func:`allreduce`.

    Complexity: ceil(log2 P) messages; 2k(P-1) words received, with k entries a rank.
    """
    _check(tensor)
    given = _given(name, priority)
    collectives = _collectives(group, communicator)
    if async_op:
        return Work(collectives.start_allgather(tensor, *given))
    return collectives.allgather(tensor, *given)


@overload
def reduce_scatter_sparse(
    tensor: torch.Tensor,
    op: str = ...,
    group: dist.ProcessGroup | None = ...,
    communicator: Communicator | None = ...,
    async_op: Literal[False] = ...,
    name: str | None = ...,
    priority: int = ...,
) -> torch.Tensor: ...
@overload
def reduce_scatter_sparse(
    tensor: torch.Tensor,
    op: str = ...,
    group: dist.ProcessGroup | None = ...,
    communicator: Communicator | None = ...,
    *,
    async_op: Literal[True],
    name: str | None = ...,
    priority: int = ...,
) -> Work[torch.Tensor]: ...
def reduce_scatter_sparse(
    tensor: torch.Tensor,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    communicator: Communicator | None = None,
    async_op: bool = False,
    name: str | None = None,
    priority: int = 0,
) -> torch.Tensor | Work[torch.Tensor]:
    """Reduces ``tensor`` over all ranks and gives rank r the r-th of P parts of dimension 0.

    The parts are those of ``torch.distributed.reduce_scatter_tensor``: of a tensor of shape
    ``(n, ...)`` rank r gets rows ``r n/P`` to ``(r+1) n/P``. For what it means that a rank does
    not hold an index, see :func:`allreduce`.

    Args:
        tensor: COO, hybrid COO or CSR, of the same shape on every rank; dimension 0 is a multiple
            of the number of ranks.
        op: as in :func:`allreduce`.
        group: the ranks; the default group if ``None``.
        communicator: the ranks, instead of a group.
        async_op: return at once.
        name: as in :func:`allreduce`.
        priority: as in :func:`allreduce`.

    Returns:
        A coalesced COO tensor of shape ``(n/P, ...)``, in which entries that equal the neutral
        element may be missing; a :class:`Work` of it with ``async_op``.

    Raises:
        ValueError, RuntimeError, torch.distributed.DistBackendError: as :func:`allreduce`.

    Complexity: P-1 messages; 2k(P-1)/P words received where every rank holds as many entries in
    each part, 2k(P-1) at most.
    """
    _check(tensor, op)
    given = _given(name, priority)
    collectives = _collectives(group, communicator)
    if async_op:
        return Work(collectives.start_reduce_scatter(tensor, op, *given))
    return collectives.reduce_scatter(tensor, op, *given)


def join(group: dist.ProcessGroup | None = None, communicator: Communicator | None = None) -> int:
    """Waits until all ranks have joined, for a rank that has run out of data.

    Meanwhile the collectives that the others call go on, and this rank takes part in them with
    nothing: in :func:`allreduce` and :func:`grouped_allreduce` with neutral elements, which need
    the memory of the others' tensors, in :func:`allgather_sparse` with a tensor without entries.
    An average is over all ranks. :func:`reduce_scatter_sparse` fails on all ranks, since this one's
    part of the result would be lost. Collectives that this rank has started run first; its other
    threads and its callbacks can start none before this has ended.

    Exchanges of hooks and optimizers have communicators of their own: with a hook use
    ``DistributedDataParallel.join``, with an optimizer ``torch.distributed.algorithms.join.Join``.

    Args:
        group: the ranks; the default group if ``None``.
        communicator: the ranks, instead of a group.

    Returns:
        The rank that joined last, the same on every rank: it has seen the most data. The highest of
        several that joined at once.

    Raises:
        ValueError: both a group and a communicator, a closed communicator, or another thread of
            this rank has joined.
        CancelledError: Ctrl-C ended the wait of a rank before it took part.
        RuntimeError: torch.distributed is not initialised, or this is a callback.
        torch.distributed.DistBackendError: a rank was lost, or interrupted; or one has neither
            joined nor called anything before the deadline.

    Complexity: until all have joined, 3 ceil(log2 P) more messages for the collectives that run
    together, and from each rank some 24 bytes and the name of each; when it runs for the first time
    also what describes it, some 250 bytes for each tensor.
    """
    return _collectives(group, communicator).join()


def _check(tensor: torch.Tensor, op: str = "sum") -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"a tensor is needed, not {type(tensor).__name__}; grouped_allreduce takes a list"
        )
    _check_op(op)


def _check_op(op: str) -> None:
    if not isinstance(op, str):
        raise TypeError(
            f"op={op} is a {type(op).__name__}; give its name: sum, avg, product, min or max"
        )


def _members(tensors: Any) -> list[torch.Tensor]:
    if not isinstance(tensors, Sequence):
        raise TypeError(
            f"a list of tensors is needed, not {type(tensors).__name__}; give [tensor] for one"
        )
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensors[{i}] is a {type(tensor).__name__}, must be a tensor")
    return list(tensors)


def _given(name: str | None, priority: int) -> tuple[str, int]:
    """The name, empty where there is none, and the priority."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority={priority} is a {type(priority).__name__}; give an int")
    if not -(2**31) <= priority < 2**31:
        raise ValueError(f"priority={priority} takes more than 32 bits; give a smaller one")
    if name is None:
        if priority != 0:
            raise ValueError(
                f"priority={priority} is of a collective without a name, which runs in the order "
                "of calls; give it a name"
            )
        return "", 0
    if not isinstance(name, str):
        raise TypeError(f"name={name} is a {type(name).__name__}; give a string")
    if not name:
        raise ValueError("name is empty; give one, or leave it out")
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"name={name!r} is no text: it has half a surrogate pair")
    return name, priority


def _collectives(
    group: dist.ProcessGroup | None, communicator: Communicator | None
) -> _C.Collectives:
    if communicator is not None:
        if group is not None:
            raise ValueError("give either a group or a communicator, not both")
        # Raises if it is closed, also while another thread is still breaking off what runs.
        _ = communicator.engine
        return communicator._collectives
    if group is None:
        require_initialised()
        group = distributed_c10d._get_default_group()
    # One thread of a rank connects, whichever comes first: with several, each would make a
    # communicator, and meet another rank's other thread.
    with _connecting(group):
        found = _of_group.get(group) if isinstance(group, dist.ProcessGroup) else None
        if found is None:
            found = Communicator._connected_in(
                "the group's first sparse collective",
                group,
                CommunicatorOptions(),
                own_backend(group),
            )
            _of_group[group] = found
    return found._collectives


def _connecting(group: Any) -> AbstractContextManager[object]:
    if not isinstance(group, dist.ProcessGroup):
        return nullcontext()  # connecting says what is wrong
    with _lock:
        return _lock_of_group.setdefault(group, threading.Lock())

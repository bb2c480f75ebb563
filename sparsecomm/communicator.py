"""Ranks that exchange with one another: what sparsecomm's own collectives run on."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist
from typing_extensions import Unpack

from sparsecomm import _C
from sparsecomm.options import CommunicatorKeywords, CommunicatorOptions, communicator_options
from sparsecomm.tracing import recorded
from sparsecomm.transports import AUTO, MPI_LIBRARY, connect, log_trouble, settings, table

if TYPE_CHECKING:
    from mpi4py import MPI


class Communicator:
    """A group of ranks with connections and a progress thread of its own.

    Made by :meth:`from_process_group` or :meth:`from_mpi`. Operations run one after another, in an
    order that is the same on every rank; see :mod:`sparsecomm.collectives`. When a rank is lost
    or a deadline passes, every rank that is left raises an error that names the culprit, and the
    communicator is done: close it and make a new one of the ranks that are left.
    """

    def __init__(self, engine: _C.Communicator, backend: _C.ProcessGroup | None = None) -> None:
        self._engine: _C.Communicator | None = engine
        self._collectives = (
            _C.Collectives(engine)
            if backend is None
            else _C.Collectives(engine, block_bytes=backend.block_bytes)
        )
        # A thread that drops a Python object while the interpreter ends would abort the process.
        self._finalizer = weakref.finalize(self, engine.close)

    @classmethod
    def from_process_group(
        cls,
        process_group: dist.ProcessGroup | None = None,
        **keywords: Unpack[CommunicatorKeywords],
    ) -> Communicator:
        """Connects the ranks of ``process_group``, the default group if ``None``.

        Collective: every rank of the group calls it, in the same order.

        Args:
            process_group: of torch.distributed, over any backend.
            keywords: ``timeout``, ``transport``, ``stall_limit``, ``aggregators``,
                ``aggregator_transport``, ``aggregator_token_file``, ``fusion_bytes``: fields of
                :class:`CommunicatorOptions`; or ``communicator_options``, such an object, whose
                ``threads`` are not used: a communicator selects nothing.

        Raises:
            RuntimeError: torch.distributed is not initialised, this rank is not in the group, or
                the ranks did not all connect in time, or the transport cannot be used.
            ValueError: there is no such transport, or a duration is not positive.
        """
        options = communicator_options(cls.from_process_group, keywords)
        return cls._connected_in("Communicator.from_process_group", process_group, options)

    @classmethod
    def _connected_in(
        cls,
        call: str,
        process_group: dist.ProcessGroup | None,
        options: CommunicatorOptions,
        backend: _C.ProcessGroup | None = None,
    ) -> Communicator:
        """As :meth:`from_process_group`, for ``call``, which messages name.

        Aggregators are those of ``backend``, the group's, if it is ours.
        """
        made = connect(
            process_group,
            options.limit,
            options.transport,
            call=call,
            stall_limit=options.stall_limit,
        )
        return cls._over(made, options, backend)

    @classmethod
    def _over(
        cls,
        transport: _C.Transport,
        options: CommunicatorOptions,
        backend: _C.ProcessGroup | None = None,
    ) -> Communicator:
        addresses = options.aggregator_addresses() if backend is None else backend.aggregators
        return cls(
            _C.Communicator(
                transport,
                options.limit,
                1,
                options.stall_limit,
                log_trouble,
                addresses,
                options.fusion_bytes,
            ),
            backend,
        )

    @classmethod
    def from_mpi(
        cls,
        comm: MPI.Comm,
        **keywords: Unpack[CommunicatorKeywords],
    ) -> Communicator:
        """Uses the ranks of an mpi4py communicator; torch.distributed is not needed.

        Collective over ``comm``, which is duplicated and may be freed afterwards. Operations call
        MPI on a thread of their own. With mpi4py's default, ``MPI.THREAD_MULTIPLE``, the program
        may use MPI meanwhile; with ``MPI.THREAD_SERIALIZED`` it must not while an operation runs.

        MPI cannot always tell that a peer is gone: the ranks that wait for it raise, and name it,
        when ``timeout`` has passed. They can go on with a communicator of those that are left,
        where the launcher lets them: most end all ranks when one dies. ``MPI.Finalize`` may wait
        for a lost rank forever: end with ``MPI.COMM_WORLD.Abort()``.

        Args:
            comm: an intracommunicator.
            keywords: as in :meth:`from_process_group`, but for ``transport``, which is MPI. A
                warning of a stall names only the rank that is waited for.

        Raises:
            RuntimeError: sparsecomm was built without MPI.
            ValueError: it was built with another MPI than the one that is loaded, MPI was
                initialised with less than ``MPI.THREAD_SERIALIZED``, or ``comm`` is an
                intercommunicator or null.
        """
        from mpi4py import MPI

        options = communicator_options(cls.from_mpi, keywords)
        if options.transport not in (AUTO, "mpi"):
            raise ValueError(
                f"transport={options.transport!r}: from_mpi exchanges over MPI; for another one "
                "use from_process_group"
            )
        if not isinstance(comm, MPI.Comm) or comm == MPI.COMM_NULL:
            raise ValueError(f"{comm!r} is not a communicator of mpi4py with this rank in it")
        if problem := next(row["problem"] for row in table() if row["name"] == "mpi"):
            raise RuntimeError(f"sparsecomm has no MPI transport: {problem}")
        transport = _C.mpi_transport(
            str(MPI_LIBRARY),
            MPI.Get_library_version(),
            comm.py2f(),
            recorded(
                "Communicator.from_mpi",
                comm.allgather(MPI.COMM_WORLD.rank),
                comm.rank,
                settings(),
            ),
        )
        return cls._over(transport, options)

    @property
    def engine(self) -> _C.Communicator:
        """The compiled communicator.

        Raises:
            ValueError: the communicator is closed.
        """
        if self._engine is None:
            raise ValueError("this communicator is closed; make a new one")
        return self._engine

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self.engine.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.engine.size

    @property
    def transport(self) -> str:
        """What moves the bytes, such as ``"c10d/gloo"`` or ``"mpi"``."""
        return self.engine.transport

    def counters(self) -> dict[str, int]:
        """Bytes sent and received and messages sent by this rank, as of the last operation.

        Keys: ``sent_bytes``, ``received_bytes``, ``messages``. Bytes to and from aggregators are
        among them.
        """
        return self.engine.counters()

    def lost_aggregators(self) -> dict[str, str]:
        """The aggregators that are not used now, as of the last operation: address and reason."""
        return self.engine.lost_aggregators()

    def close(self) -> None:
        """Breaks off what runs and gives the connections back. Closing twice does nothing.

        A communicator that is not closed is closed when the program ends. From one of its callbacks
        this returns at once, and another thread does it.
        """
        self._engine = None
        self._finalizer()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a Communicator has connections to other ranks, and cannot be pickled or copied: make "
            "one in each process, by Communicator.from_process_group"
        )

    def __repr__(self) -> str:
        if self._engine is None:
            return "<sparsecomm.Communicator, closed>"
        return f"<sparsecomm.Communicator, rank {self.rank} of {self.size}, {self.transport}>"

"""Ranks that exchange with one another: what sparsecomm's own collectives run on."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from sparsecomm import _C
from sparsecomm.transports import AUTO, connect


class Communicator:
    """A group of ranks with connections and a progress thread of its own.

    Made by :meth:`from_process_group`. Operations run one after another, in the
    order in which they were submitted, which must be the same on every rank. When a rank is lost
    or a deadline passes, every rank that is left raises an error that names the culprit, and the
    communicator is done: close it and make a new one of the ranks that are left.
    """

    def __init__(self, engine: _C.Communicator) -> None:
        self._engine: _C.Communicator | None = engine
        self._collectives = _C.Collectives(engine)

    @classmethod
    def from_process_group(
        cls,
        process_group: dist.ProcessGroup | None = None,
        *,
        transport: str = AUTO,
        timeout: timedelta | None = None,
    ) -> Communicator:
        """Connects the ranks of ``process_group``, the default group if ``None``.

        Collective: every rank of the group calls it, in the same order.

        Args:
            process_group: of torch.distributed, over any backend.
            transport: ``"auto"`` takes the first that works on all ranks; ``"ucx"``, ``"c10d"``.
            timeout: of connecting, and of one operation; torch.distributed's default if ``None``.

        Raises:
            RuntimeError: torch.distributed is not initialised, this rank is not in the group, or
                the ranks did not all connect in time, or the transport cannot be used.
            ValueError: there is no such transport.
        """
        limit = _checked_timeout(timeout)
        return cls(_C.Communicator(connect(process_group, limit, transport), limit))

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

        Keys: ``sent_bytes``, ``received_bytes``, ``messages``.
        """
        return self.engine.counters()

    def close(self) -> None:
        """Breaks off what runs and gives the connections back. Closing twice does nothing."""
        self._engine = None

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._engine is None:
            return "<sparsecomm.Communicator, closed>"
        return f"<sparsecomm.Communicator, rank {self.rank} of {self.size}, {self.transport}>"


def _checked_timeout(timeout: timedelta | None) -> timedelta:
    timeout = default_pg_timeout if timeout is None else timeout
    if timeout <= timedelta(0):
        raise ValueError(f"timeout={timeout} is not positive")
    return timeout

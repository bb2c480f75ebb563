"""How the ranks of a state, an optimizer or a communicator are connected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypedDict

from torch._C._distributed_c10d import Backend
from torch.distributed.distributed_c10d import default_pg_timeout
from typing_extensions import Unpack

from sparsecomm import _C
from sparsecomm.compression import check_options
from sparsecomm.transports import (
    AUTO,
    STALL_LIMIT,
    aggregator_addresses,
    aggregators_of_environment,
    names,
)

STORE = "store"  # where aggregators are announced


@dataclass(frozen=True, kw_only=True)
class CommunicatorOptions:
    """What every state, optimizer and communicator can be told of its connections.

    All of them take these fields as keywords too, and ``communicator_options``, an object of this
    class; a keyword replaces the field of that object.

    Args:
        timeout: of one exchange, and of connecting; torch.distributed's default if ``None``, and
            ``timedelta.max`` for never.
        threads: how many of torch's threads find the threshold and select; ``None`` takes
            ``torch.get_num_threads()``. The result does not depend on it.
        transport: what moves the bytes: ``"ucx"``, ``"c10d"``, or ``"auto"``, which takes the first
            of them that works on all ranks and logs a warning if that is not UCX.
        stall_limit: a rank that waits longer for others, without any progress, logs a warning to
            the logger ``"sparsecomm"`` that names them and says where they are; again when it has
            waited twice as long, and so on until the timeout. ``None``: never.
        aggregators: addresses of aggregators, such as ``("10.0.0.7:7000",)``, for the algorithms
            ``"ina"`` and ``"ina_sparse"``; the same on all ranks, in the same order; if there are
            none, those in the variable ``SPARSECOMM_AGGREGATORS``, for what can use them. The ranks
            connect to them in their first operation, which raises on all of them if some rank
            cannot.
        aggregator_transport: what moves the messages to aggregators and back: ``"tcp"``, ``"ucx"``,
            or ``"auto"``, which takes UCX with each aggregator that has it too.
        aggregator_token_file: a file with the token that aggregators ask for: a name, blanks and
            the token on its first line. If ``None``, the one that the variable
            ``SPARSECOMM_AGGREGATOR_TOKEN_FILE`` names, if any.
        fusion_bytes: the allreduces of a communicator that have a name and are ready together, and
            those of one ``grouped_allreduce``, are exchanged as one if their ``op``, algorithm and
            dtype are the same (halves go with float32, in which they are summed), as long as no
            rank contributes more bytes to all of them; what is larger is exchanged alone, and with
            0 everything. The same on every rank; the results do not depend on it. Not used by
            states and optimizers, which have large exchanges of their own.

    Raises:
        OSError: the token's file cannot be read.
        TypeError: a duration that is not a ``timedelta``, or ``aggregators`` that are not a
            sequence of ``str``.
        ValueError: an argument outside its range.
    """

    timeout: timedelta | None = None
    threads: int | None = None
    transport: str = AUTO
    stall_limit: timedelta | None = STALL_LIMIT
    aggregators: Sequence[str] = ()
    aggregator_transport: str = AUTO
    aggregator_token_file: str | None = None
    fusion_bytes: int = _C.FUSION_BYTES

    def __post_init__(self) -> None:
        for name in ("timeout", "stall_limit"):
            duration = getattr(self, name)
            if duration is None:
                continue
            if not isinstance(duration, timedelta):
                seconds = isinstance(duration, (int, float)) and not isinstance(duration, bool)
                raise TypeError(
                    f"{name} must be a timedelta or None, not {type(duration).__name__}"
                    + (f": write timedelta(seconds={duration})" if seconds else "")
                )
            if duration <= timedelta(0):
                never = "; None: no stall is logged" if name == "stall_limit" else ""
                raise ValueError(f"{name}={duration} is not positive{never}")
        if self.threads is not None and (not isinstance(self.threads, int) or self.threads < 1):
            raise ValueError(f"threads={self.threads!r} is not a number of threads; use 1 or more")
        if not isinstance(self.fusion_bytes, int) or not 0 <= self.fusion_bytes < 2**32:
            raise ValueError(
                f"fusion_bytes={self.fusion_bytes!r} is not a number of bytes from 0 to 2^32 - 1"
            )
        if self.transport not in names():
            raise ValueError(f"transport={self.transport!r} is none of {', '.join(names())}")
        given = self.aggregators
        if isinstance(given, str):
            raise TypeError(f"aggregators={given!r} is one text; give a sequence: ({given!r},)")
        if not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
            raise TypeError(f"aggregators={given!r} is not a sequence of addresses, HOST:PORT")
        object.__setattr__(self, "aggregators", tuple(given))
        # Checks them; what the environment says is looked up when they are used.
        aggregator_addresses(
            self.aggregators, self.aggregator_transport, {}, self.aggregator_token_file
        )

    def aggregator_addresses(self, used: bool = True) -> _C.AggregatorAddresses:
        """Returns where aggregators are as the engine takes it; none if they are not ``used``."""
        if not used:
            return aggregator_addresses((), AUTO, environment={})
        return aggregator_addresses(
            self.aggregators, self.aggregator_transport, None, self.aggregator_token_file
        )

    @property
    def has_aggregators(self) -> bool:
        """Whether there are any, by ``aggregators`` or by the environment."""
        return bool(self.aggregators or aggregators_of_environment())

    @property
    def limit(self) -> timedelta:
        """The timeout, torch.distributed's default if none was given."""
        return default_pg_timeout if self.timeout is None else self.timeout


class CommunicatorKeywords(TypedDict, total=False):
    """:class:`CommunicatorOptions`, or its fields, as keywords."""

    communicator_options: CommunicatorOptions | None
    timeout: timedelta | None
    threads: int | None
    transport: str
    stall_limit: timedelta | None
    aggregators: Sequence[str]
    aggregator_transport: str
    aggregator_token_file: str | None
    fusion_bytes: int


COMMUNICATOR_KEYWORDS = tuple(CommunicatorKeywords.__annotations__)


def communicator_options(owner: Any, keywords: Mapping[str, Any]) -> CommunicatorOptions:
    """Returns the options that ``keywords`` of ``owner``, a class or function, come to.

    Raises:
        TypeError: an unknown keyword, or one of the wrong kind.
        ValueError: an argument outside its range.
    """
    check_options(owner, keywords, CommunicatorKeywords)
    fields = dict(keywords)
    options = fields.pop("communicator_options", None)
    if options is None:
        options = CommunicatorOptions()
    elif not isinstance(options, CommunicatorOptions):
        raise TypeError(
            f"communicator_options must be CommunicatorOptions, not {type(options).__name__}"
        )
    return replace(options, **fields)


class Options(Backend.Options):
    """The ``pg_options`` of a process group of the backend ``"sparsecomm"``.

    For ``init_process_group``, ``new_group`` and other calls of ``torch.distributed`` that make
    groups; a group that is split off has those of the group that is split. They are for what runs
    on sparsecomm's engine, with the group's ``timeout`` if none is given: the allreduce of sparse
    tensors and, where there are ``aggregators``, sums and averages of dense ones on the CPU. These
    go through the aggregators where that is predicted to be the quickest, by the blocks that hold
    anything, and else by another algorithm; the results differ by rounding alone. Under
    ``torch.use_deterministic_algorithms(True)`` they always do, and are added in the order of the
    ranks, so that every run gets the same bits::

        options = sparsecomm.Options(transport="ucx", stall_limit=timedelta(seconds=10))
        dist.init_process_group("sparsecomm", pg_options=options)

    Args:
        nccl: ``ProcessGroupNCCL.Options``, for CUDA tensors.
        block_bytes: of a block that aggregators add, a power of two from 64 to 65,536.
        keywords: as :class:`CommunicatorOptions`; ``threads`` and ``fusion_bytes`` are not used.
            With ``aggregators="store"`` the group waits, when it is made, until some have been
            announced by :func:`announce_aggregators`.

    Raises:
        TypeError: an unknown keyword, or one of the wrong kind.
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        *,
        nccl: Backend.Options | None = None,
        block_bytes: int = 1024,
        **keywords: Unpack[CommunicatorKeywords],
    ) -> None:
        super().__init__("sparsecomm")
        _C.require_block_bytes(block_bytes)
        self.block_bytes = block_bytes
        self.finds_aggregators = keywords.get("aggregators") == STORE
        if self.finds_aggregators:
            del keywords["aggregators"]
        self.communicator = communicator_options(Options, keywords)
        if self.finds_aggregators and self.communicator.aggregators:
            raise ValueError(
                f'aggregators="store" and aggregators={self.communicator.aggregators!r} exclude '
                "each other; give one of them"
            )
        if nccl is not None and (not isinstance(nccl, Backend.Options) or nccl.backend != "nccl"):
            raise TypeError(f"nccl={nccl!r} is no torch.distributed.ProcessGroupNCCL.Options")
        self.nccl = nccl

    def __repr__(self) -> str:
        found = ', aggregators="store"' if self.finds_aggregators else ""
        return (
            f"Options(nccl={self.nccl!r}, block_bytes={self.block_bytes}{found}, "
            f"communicator_options={self.communicator!r})"
        )

"""What the planner expects of each algorithm, and why."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sparsecomm import _C
from sparsecomm.schedule import ThresholdSchedule
from sparsecomm.transports import AUTO, connect
from sparsecomm.units import format_seconds, parse_bandwidth, parse_seconds

_TIMEOUT = timedelta(minutes=5)
_DENSE = "dense"
_ROUNDING = "oktopk"  # takes every value codec


@dataclass(frozen=True)
class Link:
    """A link as the cost model sees it; :func:`explain` measures one unless it is given.

    Args:
        latency: seconds until a message that is waited for has come.
        overhead: seconds that each message costs beside that.
        bandwidth: bits per second that each rank sends and receives while all do.
    """

    latency: float
    overhead: float
    bandwidth: float

    @classmethod
    def parse(cls, bandwidth: str, latency: str = "20us", overhead: str = "2us") -> Link:
        """Reads ``"25gbit"``, ``"20us"`` and the like.

        Raises:
            ValueError: a text is none of these.
        """
        return cls(parse_seconds(latency), parse_seconds(overhead), parse_bandwidth(bandwidth))


@dataclass(frozen=True)
class Prediction:
    """One algorithm's step, as one rank sees it.

    Attributes:
        algorithm: its name.
        candidate: whether ``"auto"`` chooses from it.
        index_codec: of what one rank sends, the smallest; ``"dense"``: all values are sent.
        value_codec: likewise.
        seconds: of the whole; the next five add up to it.
        select: seconds for the check for NaN, the threshold and the selection.
        latency: seconds of waiting for messages.
        transfer: seconds for the bytes.
        compute: seconds of encoding, decoding and summing.
        apply: seconds of writing the result.
        received_bytes: by one rank.
        messages: of one rank.
    """

    algorithm: str
    candidate: bool
    index_codec: str
    value_codec: str
    seconds: float
    select: float
    latency: float
    transfer: float
    compute: float
    apply: float
    received_bytes: float
    messages: float


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` returns; ``print`` shows it as a table.

    Attributes:
        numel: entries of the gradient.
        density: share of them that is selected.
        ranks: how many there are.
        union: entries of the union of all selections that was assumed.
        figures: seconds, of the link and, per entry, of the kernels.
        ranking: every algorithm, the quickest first.
    """

    numel: int
    density: float
    ranks: int
    union: int
    figures: dict[str, float]
    ranking: tuple[Prediction, ...]

    @property
    def best(self) -> Prediction:
        """What ``algorithm="auto"`` would begin with."""
        return next(prediction for prediction in self.ranking if prediction.candidate)

    def to_dict(self) -> dict[str, Any]:
        """Returns numbers, strings, lists and dicts only."""
        return {**asdict(self), "ranking": [asdict(row) for row in self.ranking]}

    def __str__(self) -> str:
        dense = next(row.seconds for row in self.ranking if row.algorithm == _DENSE)
        byte = self.figures["byte"]
        bandwidth = f"{8e-9 / byte:.3g} Gbit/s" if byte > 0 else "no limit"
        lines = [
            f"{self.numel} entries, density {self.density:g}, union {self.union}, {self.ranks} "
            f"{'rank' if self.ranks == 1 else 'ranks'}; link: {bandwidth}, latency "
            f"{format_seconds(self.figures['round'])}, overhead "
            f"{format_seconds(self.figures['message'])} per message"
        ]
        parts = ("select", "latency", "transfer", "compute", "apply")
        cells = [["algorithm", "step", "dense/step", *parts, "received", "messages", "codecs"]]
        for row in self.ranking:
            name = row.algorithm if row.candidate else f"({row.algorithm})"
            gain = dense / row.seconds if row.seconds > 0 else math.inf
            cells.append(
                [
                    name,
                    format_seconds(row.seconds),
                    f"{gain:.2f}" if math.isfinite(gain) else "-",
                    *(format_seconds(getattr(row, part)) for part in parts),
                    f"{row.received_bytes / 1e6:.3f} MB",
                    f"{row.messages:.0f}",
                    f"{row.index_codec}, {row.value_codec}",
                ]
            )
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for name, *rest in cells:
            padded = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), *padded]))
        lines.append(f"auto begins with {self.best.algorithm}")
        if not all(row.candidate for row in self.ranking):
            lines.append(
                "(in brackets: not chosen by auto, since its values are rounded, or the transport "
                "has no allreduce of its own)"
            )
        return "\n".join(lines)


def explain(
    numel: int,
    density: float,
    *,
    process_group: dist.ProcessGroup | None = None,
    link: Link | None = None,
    ranks: int | None = None,
    union: float | None = None,
    dtype: torch.dtype = torch.float32,
    schedule: ThresholdSchedule | None = None,
    index_codec: str = "smallest",
    value_codec: str = "raw",
    transport: str = AUTO,
) -> Explanation:
    """Predicts what a step takes with each algorithm: selection, exchange and writing the result.

    Without ``link`` it is collective: the ranks of ``process_group`` connect and measure their link
    and kernels. With ``link`` nothing is exchanged; the kernels are those of this machine, on a
    core of their own.

    Args:
        numel: entries of the gradient.
        density: share that is selected, in (0, 1].
        process_group: the ranks; the default group if ``None``.
        link: a link given by hand. Needs ``ranks``.
        ranks: how many there would be, with ``link``.
        union: entries of the union of all selections over those of one, from 1 (all the same) to
            the number of ranks; as if positions were random if ``None``.
        dtype: of the gradient: float32, float64, float16 or bfloat16.
        schedule: where thresholds come from.
        index_codec: as in :class:`OkTopkState`.
        value_codec: as in :class:`OkTopkState`; of the algorithms that round.
        transport: as in :class:`OkTopkState`; without ``link``.

    Raises:
        ValueError: an argument outside its range, or ``link`` without ``ranks`` or the reverse.
    """
    if (link is None) != (ranks is None):
        raise ValueError("link and ranks go together; omit both to measure a process group")
    if dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype={dtype} is none of float32, float64, float16, bfloat16")
    if math.isnan(density) or not 0 < density <= 1:
        raise ValueError(f"density={density!r} is not in (0, 1]; 0.01 sends one entry in a hundred")
    schedule = ThresholdSchedule() if schedule is None else schedule
    options = _C.ExchangeOptions(
        algorithm=_ROUNDING,
        density=density,
        between=schedule.between,
        threshold_period=schedule.period,
        partition_period=64,
        balance_factor=4.0,
        index_codec=index_codec,
        value_codec=value_codec,
        average=True,
    )
    inner = False  # a link by itself says nothing of a library that reduces over it
    k = _C.entries_at(density, numel)
    if link is None or ranks is None:
        communicator = _C.Communicator(connect(process_group, _TIMEOUT, transport), _TIMEOUT)
        figures, ranks, inner = communicator.figures(), communicator.size, communicator.reduces
    else:
        figures = _C.measure_rates() | {
            "round": link.latency,
            "message": link.overhead,
            "byte": 8 / link.bandwidth,
        }
    if union is None:
        union_nnz = _C.expected_union(numel, k, ranks)
    elif 1 <= union <= ranks:
        union_nnz = min(max(k, round(union * k)), numel)
    else:
        raise ValueError(f"union={union!r} is not from 1 to the number of ranks, {ranks}")
    workload = _C.Workload(
        ranks=ranks,
        numel=numel,
        k=k,
        union_nnz=union_nnz,
        element_bytes=dtype.itemsize,
        value_bytes=max(4, dtype.itemsize),
        selects=True,
        options=options,
        inner=inner,
    )
    rows = tuple(Prediction(**row) for row in _C.predictions(figures, workload))
    return Explanation(numel, density, ranks, union_nnz, figures, rows)

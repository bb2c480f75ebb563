"""What the planner expects of each algorithm, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sparsecomm import _C
from sparsecomm.overlap import BACKWARD_SHARE, bucket_numels, exposed_seconds
from sparsecomm.schedule import ThresholdSchedule
from sparsecomm.transports import AUTO, connect
from sparsecomm.units import format_seconds, parse_bandwidth, parse_seconds

_TIMEOUT = timedelta(minutes=5)
_DENSE = "dense"
_DDP = "ddp"
# The algorithms whose buckets are exchanged while the backward pass goes on, by method.
_OVERLAPPING = {_DDP: "dense_ring", "dense_overlap": "dense_overlap"}
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
class StepPrediction:
    """A whole training step with one method, as one rank sees it.

    Attributes:
        method: ``"ddp"``, plain DistributedDataParallel, whose own allreduce is taken to be a ring;
            or an algorithm as a state of the hooks runs it: ``"dense_overlap"`` by buckets during
            the backward pass, as DDP, every other one after it, on the whole gradient.
        compute: seconds of the step without any exchange, as given.
        select: seconds for the check for NaN, the threshold and the selection.
        exchange: seconds of everything else that the method adds, hidden or not.
        hidden: seconds of ``exchange`` during which the backward pass goes on.
    """

    method: str
    compute: float
    select: float
    exchange: float
    hidden: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step: computing, selection, and the exchange that is not hidden."""
        return self.compute + self.select + self.exchange - self.hidden


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
        step_seconds: seconds of a training step without any exchange, if they were given.
        steps: whole training steps with every method, the quickest first; empty without
            ``step_seconds``.
    """

    numel: int
    density: float
    ranks: int
    union: int
    figures: dict[str, float]
    ranking: tuple[Prediction, ...]
    step_seconds: float | None = None
    steps: tuple[StepPrediction, ...] = ()

    @property
    def best(self) -> Prediction:
        """What ``algorithm="auto"`` would begin with."""
        return next(prediction for prediction in self.ranking if prediction.candidate)

    @property
    def best_sparse(self) -> StepPrediction | None:
        """The quickest step with a sparse algorithm that ``"auto"`` may choose, if there is one."""
        sparse = {entry["name"] for entry in _C.algorithms() if entry["sparse"]}
        sparse &= {row.algorithm for row in self.ranking if row.candidate}
        return next((step for step in self.steps if step.method in sparse), None)

    def to_dict(self) -> dict[str, Any]:
        """Returns numbers, strings, lists and dicts only."""
        return {
            **asdict(self),
            "ranking": [asdict(row) for row in self.ranking],
            "steps": [{**asdict(step), "seconds": step.seconds} for step in self.steps],
        }

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
        lines += _aligned(cells)
        lines.append(f"auto begins with {self.best.algorithm}")
        if not all(row.candidate for row in self.ranking):
            lines.append(
                "(in brackets: not chosen by auto, since its values are rounded, or the transport "
                "has no allreduce of its own)"
            )
        return "\n".join([*lines, *self._step_lines()])

    def _step_lines(self) -> list[str]:
        """The whole steps as a table, and what they come to in a sentence."""
        if self.step_seconds is None:
            return []
        ddp = next(step for step in self.steps if step.method == _DDP)
        cells = [["method", "whole step", "ddp/step", "step time", "select", "exchange", "hidden"]]
        cells += [
            [
                step.method,
                format_seconds(step.seconds),
                f"{ddp.seconds / step.seconds:.2f}",
                *(map(format_seconds, (step.compute, step.select, step.exchange, step.hidden))),
            ]
            for step in self.steps
        ]
        return ["", *_aligned(cells), self._conclusion(ddp)]

    def _conclusion(self, ddp: StepPrediction) -> str:
        assert self.step_seconds is not None
        text = (
            f"with {format_seconds(self.step_seconds)} of computing in a step, DDP hides "
            f"{format_seconds(ddp.hidden)} of its {format_seconds(ddp.exchange)} of dense exchange"
        )
        sparse = self.best_sparse
        if sparse is None:
            return text
        saved = ddp.seconds - sparse.seconds
        verb = "saves" if saved > 0 else "loses"
        return (
            f"{text}: {sparse.method} {verb} {format_seconds(abs(saved))} of "
            f"{format_seconds(ddp.seconds)}"
        )


def _aligned(cells: list[list[str]]) -> list[str]:
    """The rows as lines of text, the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([name.ljust(widths[0]), *map(str.rjust, rest, widths[1:])])
        for name, *rest in cells
    ]


def explain(
    numel: int,
    density: float,
    *,
    process_group: dist.ProcessGroup | None = None,
    link: Link | None = None,
    ranks: int | None = None,
    aggregators: int = 0,
    union: float | None = None,
    dtype: torch.dtype = torch.float32,
    momentum: bool = False,
    schedule: ThresholdSchedule | None = None,
    index_codec: str = "smallest",
    value_codec: str = "raw",
    transport: str = AUTO,
    step_seconds: float | None = None,
    bucket_cap_mb: int | None = None,
    rates: Mapping[str, float] | None = None,
) -> Explanation:
    """Predicts what a step takes with each algorithm: selection, exchange and writing the result.

    With ``step_seconds`` it also predicts the whole training step, of plain DDP too. DDP exchanges
    a bucket of gradients as soon as it is complete, while the backward pass, two thirds of the
    computing, goes on; it cannot hide the last bucket, which is complete when the pass ends.

    Without ``link`` it is collective: the ranks of ``process_group`` connect and measure their link
    and kernels. With ``link`` nothing is exchanged; the kernels are those of this machine, on a
    core of their own.

    Args:
        numel: entries of the gradient.
        density: share that is selected, in (0, 1].
        process_group: the ranks; the default group if ``None``.
        link: a link given by hand. Needs ``ranks``.
        ranks: how many there would be, with ``link``.
        aggregators: how many there would be, for ``"ina"`` and ``"ina_sparse"``, each on a link
            like those of the ranks.
        union: entries of the union of all selections over those of one, from 1 (all the same) to
            the number of ranks; as if positions were random if ``None``.
        dtype: of the gradient: float32, float64, float16 or bfloat16.
        momentum: whether the state keeps a velocity or a first moment, as after
            :func:`sparsecomm.prepare`: more to read and write in every step. DDP and
            ``"dense_overlap"`` in ``steps`` have none.
        schedule: where thresholds come from.
        index_codec: as in :class:`OkTopkState`.
        value_codec: as in :class:`OkTopkState`; of the algorithms that round.
        transport: as in :class:`OkTopkState`; without ``link``.
        step_seconds: seconds of a training step without any exchange: what one process takes that
            trains by itself on the batch of one rank, or DDP within ``no_sync()``.
        bucket_cap_mb: as in DistributedDataParallel, whole; with ``step_seconds``. ``None``: 25
            after a first bucket of 1.
        rates: the ``figures`` of an earlier explanation, whose kernels' rates are taken instead of
            being measured, so that links are compared with the same ones; with ``link``.

    Raises:
        ValueError: an argument outside its range, ``link`` without ``ranks`` or the reverse,
            ``bucket_cap_mb`` without ``step_seconds``, or ``rates`` without ``link``.
    """
    if (link is None) != (ranks is None):
        raise ValueError("link and ranks go together; omit both to measure a process group")
    if dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype={dtype} is none of float32, float64, float16, bfloat16")
    if math.isnan(density) or not 0 < density <= 1:
        raise ValueError(f"density={density!r} is not in (0, 1]; 0.01 sends one entry in a hundred")
    if isinstance(step_seconds, str):
        raise TypeError(f"step_seconds={step_seconds!r} is text; give seconds: 0.15 is 150 ms")
    if step_seconds is not None and not 0 < step_seconds < math.inf:
        raise ValueError(f"step_seconds={step_seconds!r} is not a time; 0.15 is 150 ms")
    if bucket_cap_mb is not None:
        if type(bucket_cap_mb) is not int or bucket_cap_mb < 1:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r} is not a whole number of 1 or more")
        if step_seconds is None:
            raise ValueError(
                f"bucket_cap_mb={bucket_cap_mb!r} is of the step that step_seconds gives, and "
                "there is none: give both, or neither"
            )
    if rates is not None and link is None:
        raise ValueError("rates are for a given link; a process group measures its own: omit them")
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
    native_allreduce = False  # a link by itself says nothing of a library that reduces over it
    k = _C.entries_at(density, numel)
    if link is None or ranks is None:
        communicator = _C.Communicator(connect(process_group, _TIMEOUT, transport), _TIMEOUT)
        figures, ranks = communicator.figures(), communicator.size
        native_allreduce = "native_allreduce" in communicator.services()
    else:
        figures = dict(_C.measure_rates() if rates is None else rates) | {
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

    def rows_of(
        entries: int, k: int, union_nnz: int, commits: bool = True, has_moment: bool = False
    ) -> tuple[Prediction, ...]:
        workload = _C.Workload(
            ranks=ranks,
            numel=entries,
            k=k,
            union_nnz=union_nnz,
            element_bytes=dtype.itemsize,
            value_bytes=max(4, dtype.itemsize),
            selects=True,
            options=options,
            native_allreduce=native_allreduce,
            aggregators=aggregators,
            commits=commits,
            has_moment=has_moment,
        )
        return tuple(Prediction(**row) for row in _C.predictions(figures, workload))

    ranking = rows_of(numel, k, union_nnz, has_moment=momentum)
    steps: tuple[StepPrediction, ...] = ()
    if step_seconds is not None:
        numels = bucket_numels(numel, dtype.itemsize, bucket_cap_mb)
        by_numel = {
            entries: {row.algorithm: row for row in rows_of(entries, entries, entries, False)}
            for entries in set(numels)
        }
        buckets = [(entries, by_numel[entries]) for entries in numels]
        last = {row.algorithm: row for row in rows_of(numels[-1], numels[-1], numels[-1])}
        steps = _steps(step_seconds, ranking, buckets, last)
    return Explanation(numel, density, ranks, union_nnz, figures, ranking, step_seconds, steps)


def _steps(
    compute: float,
    ranking: tuple[Prediction, ...],
    buckets: list[tuple[int, dict[str, Prediction]]],
    last: dict[str, Prediction],
) -> tuple[StepPrediction, ...]:
    """The whole steps, the quickest first.

    Args:
        compute: seconds of the step without any exchange.
        ranking: of the whole gradient.
        buckets: of DDP: the entries of each, and the predictions of its exchange by algorithm.
        last: the same of the last bucket where it ends a step, which all ranks confirm.
    """
    steps = [
        StepPrediction(row.algorithm, compute, row.select, row.seconds - row.select, 0.0)
        for row in ranking
        if row.algorithm not in _OVERLAPPING
    ]
    for method, algorithm in _OVERLAPPING.items():
        rows = [by_algorithm[algorithm] for _, by_algorithm in buckets]
        # Plain DDP neither looks for NaN nor confirms a step. Its rows have our agreement before
        # each bucket, which is a few messages too many.
        if method == _DDP:
            seconds = [row.seconds - row.select for row in rows]
        else:
            seconds = [row.seconds for row in (*rows[:-1], last[algorithm])]
        exchange = math.fsum(seconds)
        exposed = exposed_seconds([n for n, _ in buckets], seconds, BACKWARD_SHARE * compute)
        hidden = max(0.0, exchange - exposed)
        steps.append(StepPrediction(method, compute, 0.0, exchange, hidden))
    return tuple(sorted(steps, key=lambda step: step.seconds))

"""What one rank does to measure allreduces, interleaved: in an iteration each has its turn.

The order is drawn anew for every iteration, alike on all ranks, since what runs before leaves its
traces in caches and queues. A slow algorithm has few iterations in the time there is; so quick ones
have several turns in each, together no longer than the slowest takes.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Protocol

import torch
import torch.distributed as dist

from sparsecomm import _C
from sparsecomm.cli.gradients import Pattern, make_gradient
from sparsecomm.cli.ranks import TIMEOUT
from sparsecomm.schedule import ThresholdSchedule
from sparsecomm.transports import connect

GLOO_DENSE = "gloo_dense"
PLANNED = "auto"
# Before the first iteration a plan tries algorithms, until it has stayed with one for STAYING
# exchanges after that one's trial, but for no more than SETTLING exchanges.
SETTLING = 300
STAYING = 100
GRADIENTS = 3  # prepared per rank; iterations take them in turn
PARTS = ("select", "exchange", "apply")
GAP = 2.0  # between quick algorithms and slow ones, at least
TURNS = 8  # of a quick one in an iteration, at most
COUNTED = ("sent_bytes", "received_bytes", "messages", "selected", "result_nnz")
LARGE_NUMEL = 1 << 25  # from here on a single gradient is prepared
DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True)
class Settings:
    """What is measured; the same on every rank."""

    algorithms: tuple[str, ...]
    numel: int
    density: float
    dtype: str
    pattern: Pattern
    index_codec: str
    value_codec: str
    transport: str
    iters: int
    warmup: int
    seconds: float | None  # after which no further iteration begins
    seed: int
    exchange_alone: bool = False  # also measured without selection and residual
    batch: int = 0  # of the algorithms that were asked for

    @property
    def k(self) -> int:
        return _C.entries_at(self.density, self.numel)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    def options(self, algorithm: str) -> _C.ExchangeOptions:
        return exchange_options(algorithm, self.density, self.index_codec, self.value_codec)


@dataclass
class Spread:
    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values))


@dataclass
class Row:
    """One algorithm's figures: times in microseconds, bytes and messages per turn."""

    algorithm: str
    transport: str
    world_size: int
    numel: int
    k: int
    density: float
    dtype: str
    pattern: str
    index_codec: str | None
    value_codec: str | None
    iters: int
    turns: int  # in an iteration
    warmup: int
    seed: int
    batch: int  # rows of one batch were measured in turn
    time_us: Spread  # over all turns, each that of the slowest rank
    turns_us: list[float]  # in the order they had: iteration by iteration
    select_us: float | None  # these three: medians over the turns of the means over the ranks
    exchange_us: float | None
    apply_us: float | None
    exchange_alone_us: Spread | None  # of a selection that is at hand, on the slowest rank
    sent_bytes: list[float]  # one per rank, and so on
    received_bytes: list[float]
    bytes_source: str
    messages: list[float] | None
    selected: list[float] | None
    result_nnz: float
    chosen: str | None  # what auto used in the end
    predicted_us: float | None  # by the planner, with figures measured in this run
    model_bytes: float
    model_messages: float | None


@dataclass
class Sample:
    """One turn of one rank; what cannot be known is NaN."""

    seconds: float
    select_seconds: float = math.nan
    exchange_seconds: float = math.nan
    apply_seconds: float = math.nan
    exchange_alone_seconds: float = math.nan
    sent_bytes: float = math.nan
    received_bytes: float = math.nan
    messages: float = math.nan
    selected: float = math.nan
    result_nnz: float = math.nan


Selection = tuple[torch.Tensor, torch.Tensor]  # sorted int32 indices, float32 values


def largest(gradient: torch.Tensor, k: int) -> Selection:
    places = gradient.abs().topk(k, sorted=False).indices.sort().values
    return places.int(), gradient[places].float()


def is_sparse(algorithm: str) -> bool:
    return any(entry["name"] == algorithm and entry["sparse"] for entry in _C.algorithms())


def may_round(algorithm: str) -> bool:
    return any(entry["name"] == algorithm and entry["rounds"] for entry in _C.algorithms())


def uses_other_engine(algorithm: str) -> bool:
    """Whether another library's allreduce moves the bytes; they are not counted then."""
    return any(
        entry["name"] == algorithm and entry["needs"] == "native_allreduce"
        for entry in _C.algorithms()
    )


class Case(Protocol):
    """An algorithm that is ready to run."""

    def run(self, gradient: torch.Tensor) -> Sample: ...


class GlooDense:
    """torch.distributed's own allreduce."""

    def run(self, gradient: torch.Tensor) -> Sample:
        start = time.perf_counter()
        dist.all_reduce(gradient)
        return Sample(time.perf_counter() - start)


def exchange_options(
    algorithm: str,
    density: float,
    index_codec: str = "smallest",
    value_codec: str = "raw",
    *,
    block_bytes: int = 1024,
    average: bool = True,
) -> _C.ExchangeOptions:
    """The hooks' defaults; the value codec is for the algorithms that can round."""
    schedule = ThresholdSchedule()
    return _C.ExchangeOptions(
        algorithm=algorithm,
        density=density,
        between=schedule.between,
        threshold_period=schedule.period,
        partition_period=64,
        balance_factor=4.0,
        index_codec=index_codec,
        value_codec=value_codec if may_round(algorithm) else "raw",
        average=average,
        block_bytes=block_bytes,
    )


class Sparsecomm:
    """One of our algorithms: selection with a residual, exchange, and writing the result."""

    def __init__(self, algorithm: str, communicator: _C.Communicator, settings: Settings) -> None:
        options = settings.options(algorithm)
        self._name = algorithm
        self._communicator = communicator
        self._exchange = _C.Exchange(communicator, settings.numel, DTYPES[settings.dtype], options)
        self._alone: _C.SelectionExchange | None = None
        if settings.exchange_alone and is_sparse(algorithm):
            self._alone = _C.SelectionExchange(communicator, settings.numel, settings.k, options)

    @property
    def algorithm(self) -> str:
        return self._exchange.algorithm

    def settle(self, gradient: torch.Tensor, given: torch.Tensor, seconds: float | None) -> None:
        """Lets a plan try algorithms, as it does in the first steps of a training."""
        if self._name != PLANNED:
            return
        start = time.perf_counter()
        former, stayed = "", 0
        for _ in range(SETTLING):
            stays = self._exchange.settled and self.algorithm == former
            former, stayed = self.algorithm, stayed + 1 if stays else 0
            if stayed == STAYING or is_late(seconds, start):
                return
            gradient.copy_(given)
            self._exchange.run(gradient)

    def run(self, gradient: torch.Tensor) -> Sample:
        before = {**self._exchange.stats(), **self._communicator.counters()}
        start = time.perf_counter()
        self._exchange.run(gradient)
        seconds = time.perf_counter() - start
        after = {**self._exchange.stats(), **self._communicator.counters()}
        change = {name: float(after[name] - before[name]) for name in after}
        return Sample(
            seconds,
            **{f"{part}_seconds": change[f"{part}_seconds"] for part in PARTS},
            **{name: change[name] for name in COUNTED},
        )

    @property
    def runs_alone(self) -> bool:
        return self._alone is not None

    def run_alone(self, selection: Selection) -> float:
        assert self._alone is not None
        start = time.perf_counter()
        self._alone.run(*selection)
        return time.perf_counter() - start


def measure(settings: Settings) -> list[Row]:
    """Measures on every rank of the default process group; all return the same rows.

    Raises:
        RuntimeError: an exchange failed, or ranks ended up with different results.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = DTYPES[settings.dtype]
    gradients = [
        make_gradient(
            settings.pattern, settings.numel, settings.k, dtype, settings.seed, number, rank
        )
        for number in range(
            min(GRADIENTS if settings.numel < LARGE_NUMEL else 1, settings.warmup + settings.iters)
        )
    ]
    nothing = (torch.empty(0, dtype=torch.int32), torch.empty(0))
    selections = [
        largest(gradient, settings.k) if settings.exchange_alone else nothing
        for gradient in gradients
    ]
    cases: dict[str, Case] = {}
    communicator: _C.Communicator | None = None
    for algorithm in settings.algorithms:
        if algorithm == GLOO_DENSE:
            cases[algorithm] = GlooDense()
            continue
        if communicator is None:
            communicator = _C.Communicator(connect(None, TIMEOUT, settings.transport), TIMEOUT)
        cases[algorithm] = Sparsecomm(algorithm, communicator, settings)

    samples: dict[str, list[Sample]] = {algorithm: [] for algorithm in cases}
    gradient = torch.empty_like(gradients[0])
    for case in cases.values():
        if isinstance(case, Sparsecomm):
            case.settle(gradient, gradients[0], settings.seconds)
    turns = dict.fromkeys(cases, 1)
    seconds_of: dict[str, list[float]] = {algorithm: [] for algorithm in cases}
    alone = {
        name: case
        for name, case in cases.items()
        if isinstance(case, Sparsecomm) and case.runs_alone
    }
    draw = f"{settings.seed} {settings.numel} {settings.density} {settings.batch} {ranks}"
    start = time.perf_counter()
    for iteration in range(settings.warmup + settings.iters):
        warms_up = iteration < settings.warmup
        if iteration == settings.warmup and iteration > 0:
            medians = {name: statistics.median(each) for name, each in seconds_of.items()}
            turns = turns_of(of_rank_0(medians))
        for turn, algorithm in drawn_order(turns, cases, draw, iteration):
            number = (iteration + turn) % len(gradients)
            gradient.copy_(gradients[number])
            dist.barrier()
            sample = cases[algorithm].run(gradient)
            if warms_up:
                seconds_of[algorithm].append(sample.seconds)
            else:
                samples[algorithm].append(sample)
            # The last may not be reached.
            if turn == 0 and iteration in (
                0,
                settings.warmup,
                settings.warmup + settings.iters - 1,
            ):
                check_replicas(algorithm, gradient)
        # Apart from the turns: right after its own, it made an algorithm's next turn quicker.
        for _, algorithm in drawn_order({}, alone, draw, iteration):
            dist.barrier()
            seconds = alone[algorithm].run_alone(selections[iteration % len(gradients)])
            if not warms_up:
                samples[algorithm][-1].exchange_alone_seconds = seconds
        if is_late(settings.seconds, start):
            if iteration >= settings.warmup:
                break
            # Too slow for a warm-up: the next iteration is the first and last that counts.
            settings = replace(settings, warmup=iteration + 1, iters=1)

    predicted = {} if communicator is None else predictions(communicator, settings)
    rows = []
    for algorithm, case in cases.items():
        own = torch.tensor([astuple(sample) for sample in samples[algorithm]], dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(every, own)
        used = case.algorithm if isinstance(case, Sparsecomm) else None
        transport = transport_of(algorithm, communicator)
        row = make_row(settings, transport, algorithm, used, predicted, every, turns[algorithm])
        rows.append(row)
    return rows


def drawn_order(
    turns: Mapping[str, int], algorithms: Iterable[str], seed: str, iteration: int
) -> list[tuple[int, str]]:
    """All turns of one iteration, (number, algorithm), the same on every rank.

    In each of its passes those that have a turn left stand in an order of its own.
    """
    generator = random.Random(f"{seed}/{iteration}")
    names = list(algorithms)
    order = []
    for turn in range(max(turns.values(), default=1)):
        left = [name for name in names if turns.get(name, 1) > turn]
        order += [(turn, name) for name in generator.sample(left, len(left))]
    return order


def turns_of(seconds: Mapping[str, float]) -> dict[str, int]:
    """How many turns each has in an iteration, by how long one of each takes.

    The quick ones are those below the widest gap, so that two that are alike have as many.
    """
    names = sorted(seconds, key=lambda name: seconds[name])
    gaps = [
        seconds[above] / seconds[below] if seconds[below] > 0 else 1.0
        for below, above in itertools.pairwise(names)
    ]
    widest = max(gaps, default=1.0)
    quick = names[: gaps.index(widest) + 1] if widest >= GAP else []
    together = math.fsum(seconds[name] for name in quick)
    turns = max(1, min(TURNS, int(seconds[names[-1]] / together))) if quick else 1
    return {name: turns if name in quick else 1 for name in seconds}


def of_rank_0(figures: Mapping[str, float]) -> dict[str, float]:
    agreed = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.broadcast(agreed, 0)
    return dict(zip(figures, agreed.tolist(), strict=True))


def predictions(communicator: _C.Communicator, settings: Settings) -> dict[str, float]:
    """Seconds that the planner expects of each algorithm, for positions spread evenly."""
    workload = _C.Workload(
        ranks=communicator.size,
        numel=settings.numel,
        k=settings.k,
        union_nnz=0,
        element_bytes=settings.itemsize,
        value_bytes=max(4, settings.itemsize),
        selects=True,
        options=settings.options("oktopk"),
    )
    return {
        row["algorithm"]: row["seconds"] for row in _C.predictions(communicator.figures(), workload)
    }


def is_late(seconds: float | None, start: float) -> bool:
    """Whether the time is over on rank 0, the same answer on every rank."""
    if seconds is None:
        return False
    late = torch.tensor([time.perf_counter() - start > seconds])
    dist.broadcast(late, 0)
    return bool(late)


def check_replicas(algorithm: str, result: torch.Tensor) -> None:
    """Compares the results' bits between ranks, by two sums that also depend on the places."""
    words = result.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[result.element_size()])
    half = words[: len(words) // 2].sum(dtype=torch.int64)
    own = torch.stack([words.sum(dtype=torch.int64), half])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    different = [rank for rank, other in enumerate(every) if not torch.equal(other, every[0])]
    if different:
        raise RuntimeError(f"{algorithm}: the results of ranks {different} differ from rank 0's")


def transport_of(algorithm: str, communicator: _C.Communicator | None) -> str:
    if algorithm == GLOO_DENSE:
        return "torch gloo"
    assert communicator is not None
    return communicator.transport


def make_row(
    settings: Settings,
    transport: str,
    algorithm: str,
    used: str | None,
    predicted: dict[str, float],
    samples: list[torch.Tensor],
    turns: int,
) -> Row:
    """The figures of one algorithm from every rank's samples: one row each, in Sample's order."""
    ranks = len(samples)
    names = [field.name for field in fields(Sample)]
    columns = dict(zip(names, torch.stack(samples).unbind(-1), strict=True))
    turns_us: list[float] = (columns["seconds"].amax(0) * 1e6).round(decimals=1).tolist()

    def per_rank(name: str) -> list[float]:
        values: list[float] = columns[name].mean(1).tolist()
        return values

    def part_us(name: str) -> float:
        values: list[float] = (columns[name].mean(0) * 1e6).tolist()
        return round(statistics.median(values), 1)

    alone_us = [
        each * 1e6
        for each in columns["exchange_alone_seconds"].amax(0).tolist()
        if not math.isnan(each)
    ]
    ours = used is not None
    counted = used is not None and not uses_other_engine(used)
    if used is not None:
        # Selections of half-precision gradients travel as the f32 that they are summed in.
        value_bytes = max(4, settings.itemsize) if is_sparse(used) else settings.itemsize
        model_messages, model_bytes = _C.cost(used, ranks, settings.numel, settings.k, value_bytes)
    if not counted:
        model_bytes = 2 * (ranks - 1) / ranks * settings.numel * settings.itemsize
    return Row(
        algorithm=algorithm,
        transport=transport,
        world_size=ranks,
        numel=settings.numel,
        k=settings.k,
        density=settings.density,
        dtype=settings.dtype,
        pattern=settings.pattern.name,
        index_codec=settings.index_codec if ours else None,
        value_codec=None if not ours else settings.value_codec if may_round(algorithm) else "raw",
        iters=len(turns_us) // turns,
        turns=turns,
        warmup=settings.warmup,
        seed=settings.seed,
        batch=settings.batch,
        time_us=Spread.of(turns_us),
        turns_us=turns_us,
        select_us=part_us("select_seconds") if ours else None,
        exchange_us=part_us("exchange_seconds") if ours else part_us("seconds"),
        apply_us=part_us("apply_seconds") if ours else None,
        exchange_alone_us=Spread.of(alone_us) if alone_us else None,
        sent_bytes=per_rank("sent_bytes") if counted else [model_bytes] * ranks,
        received_bytes=per_rank("received_bytes") if counted else [model_bytes] * ranks,
        bytes_source="counted" if counted else "computed: 2 (P-1)/P * numel * itemsize",
        messages=per_rank("messages") if counted else None,
        selected=per_rank("selected") if ours else None,
        result_nnz=per_rank("result_nnz")[0] if ours else settings.numel,
        chosen=used if algorithm == PLANNED else None,
        predicted_us=round(predicted[used] * 1e6, 1) if used is not None else None,
        model_bytes=model_bytes,
        model_messages=model_messages if counted else None,
    )

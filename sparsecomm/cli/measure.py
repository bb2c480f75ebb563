"""What one rank does to measure allreduces, interleaved: one iteration of each in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from sparsecomm import _C
from sparsecomm.cli.gradients import Pattern, make_gradient
from sparsecomm.cli.ranks import TIMEOUT
from sparsecomm.schedule import ThresholdSchedule
from sparsecomm.transports import connect

GLOO_DENSE = "gloo_dense"
GRADIENTS = 3  # prepared per rank; iterations take them in turn
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
    transport: str
    iters: int
    warmup: int
    seed: int

    @property
    def k(self) -> int:
        return min(max(1, math.floor(self.density * self.numel + 0.5)), self.numel)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize


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
    """One algorithm's figures: times in microseconds, bytes and messages per iteration."""

    algorithm: str
    transport: str
    world_size: int
    numel: int
    k: int
    density: float
    dtype: str
    pattern: str
    index_codec: str | None
    iters: int
    warmup: int
    seed: int
    time_us: Spread  # over the iterations, each that of the slowest rank
    iterations_us: list[float]
    select_us: float | None  # these three: medians over the iterations of the means over the ranks
    exchange_us: float | None
    apply_us: float | None
    sent_bytes: list[float]  # one per rank, and so on
    received_bytes: list[float]
    bytes_source: str
    messages: list[float] | None
    selected: list[float] | None
    result_nnz: float
    model_bytes: float
    model_messages: float | None


@dataclass
class Sample:
    """One iteration of one rank; what cannot be known is NaN."""

    seconds: float
    select_seconds: float = math.nan
    exchange_seconds: float = math.nan
    apply_seconds: float = math.nan
    sent_bytes: float = math.nan
    received_bytes: float = math.nan
    messages: float = math.nan
    selected: float = math.nan
    result_nnz: float = math.nan


class Case(Protocol):
    """An algorithm that is ready to run."""

    def run(self, gradient: torch.Tensor) -> Sample: ...


class GlooDense:
    """torch.distributed's own allreduce."""

    def run(self, gradient: torch.Tensor) -> Sample:
        start = time.perf_counter()
        dist.all_reduce(gradient)
        return Sample(time.perf_counter() - start)


class Sparsecomm:
    """One of our algorithms: selection with a residual, exchange, and writing the result."""

    def __init__(self, algorithm: str, communicator: _C.Communicator, settings: Settings) -> None:
        schedule = ThresholdSchedule()
        self._communicator = communicator
        self._exchange = _C.Exchange(
            communicator,
            settings.numel,
            DTYPES[settings.dtype],
            _C.ExchangeOptions(
                algorithm=algorithm,
                density=settings.density,
                between=schedule.between,
                threshold_period=schedule.period,
                partition_period=64,
                balance_factor=4.0,
                index_codec=settings.index_codec,
                average=True,
            ),
        )

    def run(self, gradient: torch.Tensor) -> Sample:
        before = {**self._exchange.stats(), **self._communicator.counters()}
        start = time.perf_counter()
        self._exchange.run(gradient)
        seconds = time.perf_counter() - start
        after = {**self._exchange.stats(), **self._communicator.counters()}
        change = {name: float(after[name] - before[name]) for name in after}
        return Sample(
            seconds,
            *(change[f"{part}_seconds"] for part in ("select", "exchange", "apply")),
            *(change[name] for name in ("sent_bytes", "received_bytes", "messages")),
            *(change[name] for name in ("selected", "result_nnz")),
        )


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
        for number in range(min(GRADIENTS, settings.warmup + settings.iters))
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
    for iteration in range(settings.warmup + settings.iters):
        for algorithm, case in cases.items():
            gradient.copy_(gradients[iteration % len(gradients)])
            dist.barrier()
            sample = case.run(gradient)
            if iteration >= settings.warmup:
                samples[algorithm].append(sample)
            if iteration == settings.warmup + settings.iters - 1:
                check_replicas(algorithm, gradient)

    own = torch.tensor(
        [[list(vars(sample).values()) for sample in samples[name]] for name in cases],
        dtype=torch.float64,
    )
    every = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(every, own)
    return [
        make_row(
            settings,
            transport_of(algorithm, communicator),
            algorithm,
            [part[index] for part in every],
        )
        for index, algorithm in enumerate(cases)
    ]


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
    settings: Settings, transport: str, algorithm: str, samples: list[torch.Tensor]
) -> Row:
    """The figures of one algorithm from every rank's samples: one row each, in Sample's order."""
    ranks = len(samples)
    columns = dict(zip(Sample.__dataclass_fields__, torch.stack(samples).unbind(-1), strict=True))
    microseconds = (columns["seconds"].amax(0) * 1e6).round(decimals=1)
    iterations_us: list[float] = microseconds.tolist()

    def per_rank(name: str) -> list[float]:
        values: list[float] = columns[name].mean(1).tolist()
        return values

    def part_us(name: str) -> float:
        values: list[float] = (columns[name].mean(0) * 1e6).tolist()
        return round(statistics.median(values), 1)

    counted = algorithm != GLOO_DENSE
    if counted:
        entry = next(entry for entry in _C.algorithms() if entry["name"] == algorithm)
        # Selections of half-precision gradients travel as the f32 that they are summed in.
        value_bytes = max(4, settings.itemsize) if entry["sparse"] else settings.itemsize
        model_messages, model_bytes = _C.cost(
            algorithm, ranks, settings.numel, settings.k, value_bytes
        )
    else:
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
        index_codec=settings.index_codec if counted else None,
        iters=settings.iters,
        warmup=settings.warmup,
        seed=settings.seed,
        time_us=Spread.of(iterations_us),
        iterations_us=iterations_us,
        select_us=part_us("select_seconds") if counted else None,
        exchange_us=part_us("exchange_seconds") if counted else part_us("seconds"),
        apply_us=part_us("apply_seconds") if counted else None,
        sent_bytes=per_rank("sent_bytes") if counted else [model_bytes] * ranks,
        received_bytes=per_rank("received_bytes") if counted else [model_bytes] * ranks,
        bytes_source="counted" if counted else "computed: 2 (P-1)/P * numel * itemsize",
        messages=per_rank("messages") if counted else None,
        selected=per_rank("selected") if counted else None,
        result_nnz=per_rank("result_nnz")[0] if counted else settings.numel,
        model_bytes=model_bytes,
        model_messages=model_messages if counted else None,
    )

#!/usr/bin/env python3
"""Measures whole training steps between hosts, and compares them with what is predicted.

    python benchmarks/step.py --hosts 4 --link 1gbit --json steps.json   as root
    python benchmarks/step.py --hosts 2 --numel 1000000                  ranks of this machine

A step is the forward and the backward pass of a model whose computing is emulated: it takes the
time asked for, without using a core, and gradients become ready one after another (emulation.py).
What it takes beyond that is due to the exchange: DDP's copies into buckets are part of the time
asked for, and with gradient_as_bucket_view, which all models have, it makes none back.

All methods are measured in one run: block by block in turn, beginning with another one every round.
The first step of a block is not counted. A step takes as long as on the slowest rank.

There are two predictions: that of the examples' report, for a link of that rate between hosts with
cores of their own, and in "explained" that of sparsecomm.explain between these very ranks, which
measures their link, and their kernels while all of them compute. prepare's count its momentum.

Bytes are those that a host's interface has sent: headers and acknowledgements count. Without --link
there is no interface that carries them alone, and they are not recorded.

The optimizer's step is not part of the time: it belongs to the computing that is emulated. prepare
has SGD with momentum, whose momentum the exchange applies.

auto tries algorithms and groups first, until it has stayed with one for some steps. These are not
counted.

A method of ours takes groups of parameters behind an @, as its option groups: oktopk@5, topk@25MB,
oktopk@buckets. Nothing is predicted of it.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from command_line import make_parser
from hosts import INTERFACE, parse_rate, run_benchmark
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
from sparsecomm import grouping
from sparsecomm.cli.bench import at_least_0, at_least_1, numel, positive, share, write_json
from sparsecomm.cli.measure import Spread
from sparsecomm.grouping import Groups

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from common.prediction import METHODS as HOOKS
from common.prediction import MOMENTUM, Measured, step_seconds
from ddp_overhead import POWERSGD_START, bf16, powersgd
from emulation import EmulatedModel, Gradients, shapes_of
from vgg16.model import PARAMETERS as VGG16_NUMEL

BASELINE = "ddp"
SETTLED = 8  # steps with one algorithm, after which auto counts as settled
MOST_TRIAL_STEPS = 150
PREDICTED_WITHIN = 0.15
AUTO_WITHIN = 0.03
COUNTER = Path("/proc/self/net/dev")

Optimizer = torch.optim.Optimizer
# Gives the model its hook; returns our state, if it is one of ours, and the optimizer to step.
Install = Callable[
    [DistributedDataParallel, float],
    tuple[sparsecomm.CompressionState | None, Optimizer | None],
]
MakeInstall = Callable[[Groups], Install]


def theirs(install: Callable[[DistributedDataParallel, float], object]) -> Install:
    def installed(ddp: DistributedDataParallel, density: float) -> tuple[None, None]:
        install(ddp, density)
        return None, None

    return installed


def ours(kind: type[sparsecomm.CompressionState]) -> MakeInstall:
    def grouped(groups: Groups) -> Install:
        state: Any = kind
        options = {} if groups is None else {"groups": groups}
        return lambda ddp, density: (
            sparsecomm.register_comm_hook(ddp, state(density, **options)),
            None,
        )

    return grouped


def prepared(groups: Groups) -> Install:
    def installed(
        ddp: DistributedDataParallel, density: float
    ) -> tuple[sparsecomm.CompressionState, Optimizer]:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        return sparsecomm.prepare(ddp, optimizer, density, groups=groups), optimizer

    return installed


THEIRS: dict[str, Install] = {
    BASELINE: theirs(lambda ddp, density: None),
    "bf16": theirs(bf16),
    "powersgd": theirs(powersgd(1)),
}
OURS: dict[str, MakeInstall] = {
    "oktopk": ours(sparsecomm.OkTopkState),
    "topk": ours(sparsecomm.TopkState),
    "prepare": prepared,
    "auto": ours(sparsecomm.AutoState),
}
METHODS = (*THEIRS, *OURS)


def install_of(method: str) -> Install:
    """Raises ValueError if there is no such method."""
    name, separator, groups = method.partition("@")
    if name in THEIRS and not separator:
        return THEIRS[name]
    if name not in OURS:
        raise ValueError(f"{method!r} is none of {', '.join(METHODS)}")
    if not separator:
        return OURS[name](None)
    return OURS[name](grouping.checked(int(groups) if groups.isdecimal() else groups))


@dataclass(frozen=True)
class Settings:
    methods: tuple[str, ...]
    link: str | None
    compute_ms: tuple[float, ...]
    numel: int
    density: float
    rounds: int
    block: int
    warmup: int
    file: Path | None


@dataclass(frozen=True)
class Sample:
    seconds: float
    computed: float  # seconds that the emulation took
    sent_bytes: float


@dataclass
class Record:
    """One method's steps at one time of computing."""

    method: str
    hosts: int
    link: str | None
    latency_ms: float  # of a message that is waited for, as measured between the ranks
    compute_ms: float  # asked for
    computed_ms: float  # taken by the emulation, median
    numel: int
    density: float | None  # None: nothing is selected
    steps: int  # counted
    trial_steps: int  # of auto, before the others
    algorithm: str | None  # that ours ran in the last step
    step_us: Spread
    sent_bytes: float | None  # by a rank in a step, median of the rank that sent the most
    select_us: float | None  # these three of a step, means over the ranks
    exchange_us: float | None
    apply_us: float | None
    predicted_us: float | None  # by the rule that examples/report.py predicts with
    explained_us: float | None  # by sparsecomm.explain between these ranks


class Training:
    """A model, its hook, and the optimizer that the hook needs."""

    def __init__(self, method: str, settings: Settings, gradients: Gradients, seconds: float):
        self._gradients = gradients
        self.model = EmulatedModel(shapes_of(settings.numel), gradients, seconds)
        # See ddp_overhead.py on PowerSGD with several buckets.
        cap = settings.numel * 4 // 2**20 + 1 if method == "powersgd" else None
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=cap, gradient_as_bucket_view=True
        )
        self.state, self._optimizer = install_of(method)(self.ddp, settings.density)
        self._reads_bytes = settings.link is not None

    def step(self) -> Sample:
        self._gradients.advance()
        dist.barrier()
        before = sent_bytes() if self._reads_bytes else 0
        start = time.perf_counter()
        torch.autograd.backward(self.ddp(torch.zeros(())))
        seconds = time.perf_counter() - start
        sent = sent_bytes() - before if self._reads_bytes else 0
        if self._optimizer is not None:
            self._optimizer.step()
        self.ddp.zero_grad(set_to_none=True)
        return Sample(seconds, self.model.clock.passed, sent)

    def settle(self) -> int:
        """Steps until groups, and algorithms for a while, stay; returns how many that took."""
        state = self.state
        if state is None or "auto" not in (state.algorithm, state.compression.groups):
            return 0
        stayed = 0
        for steps in range(1, MOST_TRIAL_STEPS + 1):
            previous = state._native.algorithms()
            self.step()
            stayed = stayed + 1 if state._native.algorithms() == previous else 0
            grouping = state.stats()["grouping"]
            if stayed >= SETTLED and (grouping is None or grouping["decided"]):
                return steps
        return MOST_TRIAL_STEPS


def sent_bytes() -> int:
    """Bytes that this host's interface has sent."""
    for line in COUNTER.read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise RuntimeError(f"{COUNTER} has no line for {INTERFACE}, the interface of a host of the lab")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--hosts", type=at_least_1, default=2, help="ranks; torchrun brings its own")
    add("--link", help="put every rank on a host of its own, on a link of this rate, such as 1gbit")
    add("--compute-ms", type=milliseconds, default=(50.0, 200.0, 1000.0), metavar="MS,...",
        help="forward and backward pass")  # fmt: skip
    add("--numel", type=numel, default=VGG16_NUMEL, help="parameters")
    add("--density", type=share, default=0.02, help="of the methods that select")
    add("--method", type=methods, default=METHODS, metavar="NAME,...",
        help=f"some of {', '.join(METHODS)}; {BASELINE} is measured in any case")  # fmt: skip
    add("--rounds", type=at_least_1, default=6, help="blocks of each method")
    add(
        "--block",
        type=at_least_1,
        default=3,
        help="steps counted in a block, after one that is not",
    )
    add(
        "--warmup", type=at_least_0, default=POWERSGD_START + 2, help="steps before the first block"
    )
    add("--json", type=Path, help="file that the records also go to")
    options = parser.parse_args(arguments)
    if "powersgd" in options.method and options.warmup <= POWERSGD_START:
        parser.error(f"--warmup {options.warmup}: PowerSGD starts after {POWERSGD_START} steps")
    try:
        shapes_of(options.numel)
        if options.link is not None:
            parse_rate(options.link)
    except ValueError as error:
        parser.error(str(error))
    settings = Settings(
        methods=tuple(dict.fromkeys((BASELINE, *options.method))),
        link=options.link,
        compute_ms=options.compute_ms,
        numel=options.numel,
        density=options.density,
        rounds=options.rounds,
        block=options.block,
        warmup=options.warmup,
        file=options.json,
    )
    own = sys.argv[1:] if arguments is None else arguments
    command = [sys.executable, str(Path(__file__).resolve()), *own]
    return run_benchmark(parser, partial(measure, settings), options.hosts, options.link, command)


def milliseconds(text: str) -> tuple[float, ...]:
    try:
        return tuple(positive(part) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of milliseconds above 0, such as 50,200"
        ) from None


def methods(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        try:
            install_of(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def measure(settings: Settings) -> None:
    """Measures on every rank; rank 0 prints, and writes the file after each time of computing."""
    gradients = Gradients(settings.numel, dist.get_rank())
    records: list[Record] = []
    for compute_ms in settings.compute_ms:
        records += measure_at(settings, compute_ms, gradients)
        if dist.get_rank() == 0:
            own = records[-len(settings.methods) :]
            print("\n".join([table(own), *checks(own)]), flush=True)
            if settings.file is not None:
                write_json(settings.file, [asdict(record) for record in records])


def measure_at(settings: Settings, compute_ms: float, gradients: Gradients) -> list[Record]:
    explained = explain(settings, compute_ms)
    trainings = {
        method: Training(method, settings, gradients, compute_ms / 1e3)
        for method in settings.methods
    }
    trials = {method: training.settle() for method, training in trainings.items()}
    for training in trainings.values():
        for _ in range(settings.warmup):
            training.step()
    samples: dict[str, list[Sample]] = {method: [] for method in trainings}
    parts: dict[str, dict[str, float]] = {method: dict.fromkeys(PARTS, 0.0) for method in trainings}
    order = list(trainings)
    for _ in range(settings.rounds):
        for method in order:
            training = trainings[method]
            training.step()
            before = part_seconds(training)
            samples[method] += [training.step() for _ in range(settings.block)]
            after = part_seconds(training)
            for part in before:
                parts[method][part] += after[part] - before[part]
        order = order[1:] + order[:1]
    return [
        make_record(
            settings,
            compute_ms,
            method,
            training,
            samples[method],
            parts[method],
            trials[method],
            explained[method.partition("@")[0] in MOMENTUM],
        )
        for method, training in trainings.items()
    ]


def explain(settings: Settings, compute_ms: float) -> dict[bool, sparsecomm.Explanation]:
    """Explains a step without and with momentum, by the same figures; collective."""
    seconds = 1e-3 * compute_ms
    plain = sparsecomm.explain(settings.numel, settings.density, step_seconds=seconds)
    figures = plain.figures
    bandwidth = 8 / figures["byte"] if figures["byte"] > 0 else math.inf
    with_momentum = sparsecomm.explain(
        settings.numel,
        settings.density,
        link=sparsecomm.Link(figures["round"], figures["message"], bandwidth),
        ranks=dist.get_world_size(),
        rates=figures,
        momentum=True,
        step_seconds=seconds,
    )
    return {False: plain, True: with_momentum}


PARTS = ("select", "exchange", "apply")


def part_seconds(training: Training) -> Mapping[str, float]:
    if training.state is None:
        return {}
    stats = training.state.stats()
    return {part: stats[f"{part}_seconds"] for part in PARTS}


def make_record(
    settings: Settings,
    compute_ms: float,
    method: str,
    training: Training,
    samples: Sequence[Sample],
    parts: Mapping[str, float],
    trial_steps: int,
    explanation: sparsecomm.Explanation,
) -> Record:
    """The figures of one method; collective, the same on all ranks."""
    own = torch.tensor(
        [[each.seconds, each.computed, each.sent_bytes] for each in samples], dtype=torch.float64
    )
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    seconds, computed, sent = torch.stack(every).unbind(-1)
    mean = torch.tensor([parts[part] for part in PARTS], dtype=torch.float64) / len(samples)
    dist.all_reduce(mean)
    select, exchange, apply = (1e6 * mean / dist.get_world_size()).tolist()
    state = training.state
    hook = algorithm_of(state) or method
    known = "" if "@" in method else method if method in MOMENTUM else hook
    return Record(
        method=method,
        hosts=dist.get_world_size(),
        link=settings.link,
        latency_ms=1e3 * explanation.figures["round"],
        compute_ms=compute_ms,
        computed_ms=1e3 * float(computed.median()),
        numel=settings.numel,
        density=settings.density if state is not None else None,
        steps=len(samples),
        trial_steps=trial_steps,
        algorithm=algorithm_of(state),
        step_us=Spread.of((1e6 * seconds.amax(0)).tolist()),
        sent_bytes=float(sent.median(1).values.max()) if settings.link is not None else None,
        select_us=select if state is not None else None,
        exchange_us=exchange if state is not None else None,
        apply_us=apply if state is not None else None,
        predicted_us=predicted_us(settings, compute_ms, known, select),
        explained_us=None if "@" in method else explained_us(explanation, hook),
    )


def predicted_us(
    settings: Settings, compute_ms: float, hook: str, select_us: float
) -> float | None:
    """Predicts as the examples' report does; None without a link, or for what it does not know.

    Collective: rank 0 measures its kernels while the others wait.
    """
    if settings.link is None or hook not in HOOKS:
        return None
    predicted = 0.0
    if dist.get_rank() == 0:
        measured = Measured(
            hook, settings.numel, settings.density, 1e-3 * compute_ms, 1e-6 * select_us
        )
        predicted = step_seconds(measured, settings.link, dist.get_world_size()) or 0.0
    shared = torch.tensor(1e6 * predicted, dtype=torch.float64)
    dist.broadcast(shared, 0)
    return float(shared)


def explained_us(explanation: sparsecomm.Explanation, hook: str) -> float | None:
    return next((1e6 * step.seconds for step in explanation.steps if step.method == hook), None)


def algorithm_of(state: sparsecomm.CompressionState | None) -> str | None:
    """Returns what the largest group of parameters ran in the last step."""
    if state is None:
        return None
    largest = max(state.stats()["groups"], key=lambda group: group["numel"])
    algorithm: str = largest["algorithm"]
    return algorithm


def table(records: Sequence[Record]) -> str:
    first = records[0]
    dense = next(record for record in records if record.method == BASELINE)
    lines = [
        f"# {first.numel} parameters, {first.hosts} hosts, link {first.link or 'of this machine'}, "
        f"latency {first.latency_ms:.3f} ms, {first.compute_ms:g} ms of computing, "
        f"{first.steps} steps each; times in ms",
        f"# {'method':15} {'median':>8} {'min':>8} {'max':>8} {'sent MB':>8} {'predicted':>9} "
        f"{'off by':>8} {'explained':>9} {'off by':>8} {'/ ddp':>6}  algorithm",
    ]
    for record in records:
        step = record.step_us
        sent = "-" if record.sent_bytes is None else f"{record.sent_bytes / 1e6:.3f}"
        lines.append(
            f"  {record.method:15} {step.median / 1e3:8.1f} {step.min / 1e3:8.1f} "
            f"{step.max / 1e3:8.1f} {sent:>8} {prediction(record, record.predicted_us)} "
            f"{prediction(record, record.explained_us)} "
            f"{step.median / dense.step_us.median:6.3f}  {record.algorithm or ''}"
        )
    return "\n".join(lines)


def prediction(record: Record, predicted: float | None) -> str:
    """Two columns: the prediction, and its difference from the median step."""
    if predicted is None:
        return f"{'-':>9} {'-':>8}"
    return f"{predicted / 1e3:9.1f} {100 * difference(record, predicted):+6.1f} %"


def difference(record: Record, predicted: float) -> float:
    """Returns the distance of a prediction from the median step, as a share of that."""
    return predicted / record.step_us.median - 1


def checks(records: Sequence[Record]) -> list[str]:
    """A line for each of the goals, that says whether it is met."""
    lines = []
    for name in ("predicted", "explained"):
        known = [
            (difference(record, value), record.method)
            for record in records
            if (value := getattr(record, f"{name}_us")) is not None
        ]
        if known:
            off, method = max(known, key=lambda each: abs(each[0]))
            lines.append(
                f"all steps {name} are within {100 * PREDICTED_WITHIN:g} %: {method} is off by the "
                f"most, {100 * off:+.1f} %: {met(abs(off) <= PREDICTED_WITHIN)}"
            )
    auto = next((record for record in records if record.method == "auto"), None)
    if auto is not None:
        best = min(records, key=lambda record: record.step_us.median)
        behind = auto.step_us.median / best.step_us.median - 1
        lines.append(
            f"auto is within {100 * AUTO_WITHIN:g} % of the best, {best.method}: it takes "
            f"{100 * behind:.1f} % more: {met(behind <= AUTO_WITHIN)}"
        )
    return lines


def met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


if __name__ == "__main__":
    sys.exit(main())

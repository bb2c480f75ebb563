#!/usr/bin/env python3
"""Measures what groups of parameters hide of an exchange, in steps of real models.

    python benchmarks/overlap.py --link 1gbit --model vgg16 bert         two hosts, as root
    python benchmarks/overlap.py --model vgg16                           ranks of this machine

Methods are measured in one run, a block of steps of each in turn. Every rank has a core of its own,
if there are as many, and computes on it: what is exchanged meanwhile takes part of it. A step is a
forward and a backward pass with the exchange, on the slowest rank, without the optimizer's step.
What it takes beyond a pass without an exchange is exposed. "auto" is measured once it has decided.

oktopk@5 has five groups, oktopk@each one for each parameter of which a share is sent. Of the time
of a rank, which may overlap with its computing, "agree" is what it waits for the others and
compares with them.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from command_line import make_parser
from hosts import run_benchmark
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from turns import of_slowest_rank, publish

import sparsecomm
from sparsecomm.cli.bench import at_least_0, at_least_1, share
from sparsecomm.cli.measure import Spread
from sparsecomm.cli.ranks import world_size_of_launcher

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from bert.model import SIZES, Bert
from vgg16.model import VGG16

BASELINE = "ddp"
EACH = "each"  # parameter a group
METHODS = (BASELINE, "oktopk@model", "oktopk@buckets", "oktopk@auto", "auto")
PARTS = ("agree", "select", "exchange", "apply")
MOST_TRIAL_STEPS = 130  # of a trial of groups whose algorithms are tried, too
AUTO_WITHIN = 0.03


@dataclass(frozen=True)
class Settings:
    link: str | None
    models: tuple[str, ...]
    methods: tuple[str, ...]
    batch: int
    density: float
    rounds: int
    block: int
    warmup: int
    file: Path | None


@dataclass
class Row:
    model: str
    parameters: int
    world_size: int
    link: str | None
    batch: int  # of a rank
    method: str
    groups: str | None  # that a trial has chosen
    group_count: int | None
    # Of a group in the last step, on rank 0.
    group_sent_bytes: Spread | None
    algorithm: str | None  # of the largest group
    density: float | None
    steps: int
    step_ms: Spread
    compute_ms: float  # of a step without an exchange, median
    exposed_ms: float  # what the median step takes beyond that
    parts_ms: dict[str, float]  # of a step, means over the ranks
    messages: float | None  # that a rank sends in a step, on the mean
    trial_steps: int


def vgg16(batch: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(batch, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (batch,), generator=generator)
    return VGG16(), lambda model: functional.cross_entropy(model(images), labels)


def bert(batch: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], Tensor]]:
    size, length = SIZES["base"], 64
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(size.vocabulary, (batch, length), generator=generator)
    segments = (torch.arange(length) >= length // 2).long().expand(batch, length)
    masked = torch.randperm(batch * length, generator=generator)[: batch * length // 7]
    follows = torch.randint(2, (batch,), generator=generator)
    padding = torch.zeros(batch, length, dtype=torch.bool)

    def loss(model: torch.nn.Module) -> Tensor:
        scores, answers = model(tokens, segments, padding, masked)
        return functional.cross_entropy(
            scores, tokens.flatten()[masked]
        ) + functional.cross_entropy(answers, follows)

    return Bert(size, size.vocabulary), loss


MODELS = {"vgg16": vgg16, "bert": bert}


def checked(method: str) -> str:
    if method not in METHODS and method != f"oktopk@{EACH}":
        name, _, groups = method.partition("@")
        try:
            if name != "oktopk":
                raise ValueError(f"{method!r} is none of {', '.join(METHODS)}, oktopk@GROUPS")
            sparsecomm.Compression(groups=int(groups) if groups.isdecimal() else groups)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return method


def state_of(method: str, density: float, module: torch.nn.Module) -> sparsecomm.CompressionState:
    groups = method.partition("@")[2]
    if not groups:
        return sparsecomm.AutoState(density)
    if groups == EACH:
        count = sum(parameter.dim() > 1 for parameter in module.parameters())
        return sparsecomm.OkTopkState(density, groups=count)
    return sparsecomm.OkTopkState(density, groups=int(groups) if groups.isdecimal() else groups)


class Training:
    def __init__(self, model: str, method: str, settings: Settings) -> None:
        torch.manual_seed(1)
        module, self._loss = MODELS[model](settings.batch)
        self.ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
        self.state: sparsecomm.CompressionState | None = None
        if method != BASELINE:
            self.state = state_of(method, settings.density, module)
            sparsecomm.register_comm_hook(self.ddp, self.state)

    def step(self) -> float:
        seconds = self._pass()
        # Without a change of the parameters the gradients, and so the selections, would repeat.
        with torch.no_grad():
            for parameter in self.ddp.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=1e-3)
                parameter.grad.zero_()
        return seconds

    def computes(self) -> float:
        with self.ddp.no_sync():
            seconds = self._pass()
        self.ddp.zero_grad(set_to_none=False)
        return seconds

    def _pass(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        torch.autograd.backward(self._loss(self.ddp))
        return time.perf_counter() - start

    def settle(self) -> int:
        """Steps until groups have been chosen; returns how many that took."""
        for steps in range(MOST_TRIAL_STEPS):
            grouping = self.state.stats()["grouping"] if self.state is not None else None
            if grouping is None or grouping["decided"]:
                return steps
            self.step()
        return MOST_TRIAL_STEPS

    def totals(self) -> dict[str, float]:
        if self.state is None:
            return {}
        stats = self.state.stats()
        return {
            **{part: 1e3 * stats[f"{part}_seconds"] for part in PARTS},
            "messages": stats["messages"],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--hosts", type=at_least_1, default=2, help="ranks; torchrun brings its own")
    add("--link", help="put every rank on a host of its own, on a link of this rate, such as 1gbit")
    add("--model", nargs="+", choices=[*MODELS], default=["vgg16"], help="what is trained")
    add("--method", nargs="+", type=checked, default=METHODS, metavar="NAME",
        help=f"of {', '.join(METHODS)}, oktopk@GROUPS")  # fmt: skip
    add("--batch", type=at_least_1, default=4, help="examples of a rank's step")
    add("--density", type=share, default=0.02, help="of the methods that select")
    add("--rounds", type=at_least_1, default=4, help="blocks of each method")
    add(
        "--block",
        type=at_least_1,
        default=3,
        help="steps counted in a block, after one that is not",
    )
    add("--warmup", type=at_least_0, default=3, help="steps before the first block")
    add("--json", type=Path, help="file that the rows also go to")
    options = parser.parse_args(arguments)
    settings = Settings(
        options.link,
        tuple(options.model),
        tuple(options.method),
        options.batch,
        options.density,
        options.rounds,
        options.block,
        options.warmup,
        options.json,
    )
    own = sys.argv[1:] if arguments is None else arguments
    command = [sys.executable, str(Path(__file__).resolve()), *own]
    return run_benchmark(parser, partial(measure, settings), options.hosts, options.link, command)


def measure(settings: Settings) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= dist.get_world_size() and world_size_of_launcher() is not None:
        os.sched_setaffinity(0, {cores[dist.get_rank()]})
    torch.set_num_threads(1)
    rows = [row for model in settings.models for row in measure_model(model, settings)]
    publish(rows, "\n".join([table(rows), *checks(rows)]), settings.file)


def measure_model(model: str, settings: Settings) -> list[Row]:
    trainings = {method: Training(model, method, settings) for method in settings.methods}
    trials = {}
    for method, training in trainings.items():
        trials[method] = training.settle()
        for _ in range(settings.warmup):
            training.step()
    times: dict[str, list[float]] = {method: [] for method in ("compute", *trainings)}
    totals = {method: dict.fromkeys(t.totals(), 0.0) for method, t in trainings.items()}
    order = [*trainings]
    for _ in range(settings.rounds):
        for method in order:
            training = trainings[method]
            training.step()
            before = training.totals()
            times[method] += [1e3 * training.step() for _ in range(settings.block)]
            for name, value in training.totals().items():
                totals[method][name] += value - before[name]
        times["compute"] += [1e3 * trainings[order[0]].computes() for _ in range(settings.block)]
        order = order[1:] + order[:1]
    times = of_slowest_rank(times)
    compute = Spread.of(times.pop("compute")).median
    rows = []
    for method, training in trainings.items():
        spread = Spread.of(times[method])
        steps = len(times[method])
        means = mean_over_ranks({name: value / steps for name, value in totals[method].items()})
        stats = training.state.stats() if training.state is not None else None
        groups = stats["groups"] if stats is not None else []
        grouping = stats["grouping"] if stats is not None else None
        rows.append(
            Row(
                model,
                sum(parameter.numel() for parameter in training.ddp.parameters()),
                dist.get_world_size(),
                settings.link,
                settings.batch,
                method,
                grouping["groups"] if grouping is not None else None,
                len(groups) or None,
                Spread.of([float(group["sent_bytes"]) for group in groups]) if groups else None,
                max(groups, key=lambda group: group["numel"])["algorithm"] if groups else None,
                settings.density if stats is not None else None,
                steps,
                spread,
                compute,
                spread.median - compute,
                {part: means[part] for part in PARTS if part in means},
                means.get("messages"),
                trials[method],
            )
        )
    return rows


def mean_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Collective."""
    own = torch.tensor([*values.values()], dtype=torch.float64)
    dist.all_reduce(own)
    return dict(zip(values, (own / dist.get_world_size()).tolist(), strict=True))


def table(rows: Sequence[Row]) -> str:
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        first = own[0]
        dense = next((row for row in own if row.method == BASELINE), first)
        lines += [
            f"# {model}, {first.parameters} parameters, {first.world_size} ranks, link "
            f"{first.link or 'of this machine'}, batch {first.batch}, {first.compute_ms:.0f} ms of "
            f"computing, {first.steps} steps each; times in ms",
            f"# {'method':15} {'median':>9} {'min':>9} {'max':>9} {'exposed':>9} "
            f"{'/ ' + dense.method:>7} {'groups':>6} {'messages':>8} "
            + " ".join(f"{part:>8}" for part in PARTS)
            + "  tried  chosen",
        ]
        for row in own:
            step = row.step_ms
            chosen = ", ".join(filter(None, (row.groups, row.algorithm)))
            messages = "" if row.messages is None else f"{row.messages:.1f}"
            lines.append(
                f"  {row.method:15} {step.median:9.1f} {step.min:9.1f} {step.max:9.1f} "
                f"{row.exposed_ms:9.1f} {step.median / dense.step_ms.median:7.3f} "
                f"{row.group_count or '':>6} {messages:>8} "
                + " ".join(f"{row.parts_ms.get(part, math.nan):8.1f}" for part in PARTS)
                + f"  {row.trial_steps:5}  {chosen}"
            )
    return "\n".join(lines)


def checks(rows: Sequence[Row]) -> list[str]:
    """A line for each model, that says whether auto takes at most 3 % more than the better one."""
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        own = {row.method: row.step_ms.median for row in rows if row.model == model}
        auto, one, buckets = (own.get(f"oktopk@{way}") for way in ("auto", "model", "buckets"))
        if auto is None or one is None or buckets is None:
            continue
        behind = auto / min(one, buckets) - 1
        verdict = "met" if behind <= AUTO_WITHIN else "MISSED"
        lines.append(
            f"{model}: oktopk@auto takes {100 * behind:+.1f} % of the better one, at most "
            f"{100 * AUTO_WITHIN:g} %: {verdict}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())

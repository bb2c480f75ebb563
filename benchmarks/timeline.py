#!/usr/bin/env python3
"""Measures what a timeline costs: steps of an exchange with a recording and without, in turn.

    python benchmarks/timeline.py                            two ranks on this machine
    python benchmarks/timeline.py --ranks 4 --link 1gbit     a host per rank, as root

A step is one exchange of each of the tensors, as a model's groups of parameters. A time is that of
the slowest rank, from a barrier to the last result.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from command_line import make_parser
from hosts import run_benchmark
from turns import add_arguments, of_slowest_rank, publish, ratio

import sparsecomm
from sparsecomm.cli.bench import at_least_1, share
from sparsecomm.cli.measure import Spread


@dataclass(frozen=True)
class Settings:
    link: str | None
    groups: int
    entries: tuple[int, ...]
    density: float
    steps: int
    iters: int
    warmup: int
    file: Path | None


@dataclass
class Row:
    world_size: int
    link: str | None
    groups: int
    entries: int  # of all groups
    density: float
    iters: int
    step_us: Spread  # without a recording
    ratio: Spread  # with one, of the same turn
    bytes_per_step: float  # of a rank's file


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add_arguments(parser, iters=40, warmup=5)
    add = parser.add_argument
    add("--groups", type=at_least_1, default=10, help="of parameters")
    add(
        "--entries",
        type=at_least_1,
        nargs="+",
        default=[100_000, 1_000_000, 10_000_000],
        help="of all groups together",
    )
    add("--density", type=share, default=0.01, help="of the exchange")
    add("--steps", type=at_least_1, default=10, help="in a turn")
    options = parser.parse_args(arguments)
    settings = Settings(
        options.link,
        options.groups,
        tuple(options.entries),
        options.density,
        options.steps,
        options.iters,
        options.warmup,
        options.json,
    )
    own = sys.argv[1:] if arguments is None else arguments
    command = [sys.executable, str(Path(__file__).resolve()), *own]
    return run_benchmark(parser, partial(measure, settings), options.ranks, options.link, command)


def measure(settings: Settings) -> None:
    rows = [measure_size(settings, entries) for entries in settings.entries]
    publish(rows, table(rows), settings.file)


def measure_size(settings: Settings, entries: int) -> Row:
    generator = torch.Generator().manual_seed(dist.get_rank())
    parameters = [
        torch.nn.Parameter(torch.zeros(entries // settings.groups)) for _ in range(settings.groups)
    ]
    gradients = [torch.randn(p.numel(), generator=generator) for p in parameters]
    state = sparsecomm.OkTopkState(
        settings.density, named_parameters=[(f"{i}", p) for i, p in enumerate(parameters)]
    )
    state._connect("the benchmark")
    times: dict[bool, list[float]] = {False: [], True: []}
    size = 0
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(settings.warmup + settings.iters):
            for records in (True, False) if turn % 2 else (False, True):
                recording = sparsecomm.timeline(Path(folder, "run.json"))
                with recording if records else nullcontext():
                    dist.barrier()
                    start = time.perf_counter()
                    for _ in range(settings.steps):
                        step(state, parameters, gradients)
                    elapsed = time.perf_counter() - start
                if records and recording.path is not None:
                    size = recording.path.stat().st_size
                if turn >= settings.warmup:
                    times[records].append(1e6 * elapsed / settings.steps)
    times = of_slowest_rank(times)
    return Row(
        dist.get_world_size(),
        settings.link,
        settings.groups,
        entries,
        settings.density,
        settings.iters,
        Spread.of(times[False]),
        ratio(times[True], times[False]),
        size / settings.steps,
    )


def step(
    state: sparsecomm.OkTopkState,
    parameters: Sequence[torch.nn.Parameter],
    gradients: Sequence[torch.Tensor],
) -> None:
    works = []
    for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        own = gradient.clone()
        last = i + 1 == len(parameters)
        works.append(state._native.exchange(i, last, own, [parameter], [own]))
    for work in works:
        work.wait()


def table(rows: Sequence[Row]) -> str:
    first = rows[0]
    lines = [
        f"# {first.groups} groups, {first.world_size} ranks, link {first.link or 'without limit'}, "
        f"density {first.density:g}, {first.iters} turns",
        f"# {'entries':>10} {'step, us':>10} {'recording, median (min to max)':>38} "
        f"{'bytes a step':>13}",
    ]
    for row in rows:
        spread = f"{row.ratio.median:.4f} ({row.ratio.min:.3f} to {row.ratio.max:.3f})"
        lines.append(
            f"  {row.entries:10} {row.step_us.median:10.0f} {spread:>38} {row.bytes_per_step:13.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

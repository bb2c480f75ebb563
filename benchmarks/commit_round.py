#!/usr/bin/env python3
"""Measures the round of messages that makes a step stand on all survivors of a failure or on none.

    python benchmarks/commit_round.py                            two ranks on this machine
    python benchmarks/commit_round.py --ranks 4 --link 1gbit     a host per rank, as root

Exchanges the same gradient with the round and without, in turn, beginning with the other one every
time. A time is that of the slowest rank, from a barrier to the result.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from command_line import make_parser
from hosts import run_benchmark
from turns import add_arguments, of_slowest_rank, publish, ratio

from sparsecomm import _C, Compression
from sparsecomm.cli.bench import at_least_1, share
from sparsecomm.cli.measure import Spread
from sparsecomm.transports import connect

WITH, WITHOUT = "with", "without"


@dataclass(frozen=True)
class Settings:
    algorithms: tuple[str, ...]
    link: str | None
    numel: int
    density: float
    iters: int
    warmup: int
    file: Path | None


@dataclass
class Row:
    algorithm: str
    world_size: int
    link: str | None
    numel: int
    density: float
    iters: int
    with_us: Spread
    without_us: Spread
    ratio: Spread  # with to without, of the same turn
    median_difference_us: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add_arguments(parser, iters=40, warmup=5)
    add = parser.add_argument
    add(
        "--algorithms", nargs="+", default=["oktopk", "topk_a", "dense_ring"], help="to exchange by"
    )
    add("--numel", type=at_least_1, default=14_728_266, help="entries of the gradient")
    add("--density", type=share, default=0.01, help="of the sparse algorithms")
    options = parser.parse_args(arguments)
    settings = Settings(
        tuple(options.algorithms),
        options.link,
        options.numel,
        options.density,
        options.iters,
        options.warmup,
        options.json,
    )
    own = sys.argv[1:] if arguments is None else arguments
    command = [sys.executable, str(Path(__file__).resolve()), *own]
    return run_benchmark(parser, partial(measure, settings), options.ranks, options.link, command)


def measure(settings: Settings) -> None:
    timeout = timedelta(minutes=5)
    communicator = _C.Communicator(connect(None, timeout), timeout)
    rows = [measure_algorithm(settings, name, communicator) for name in settings.algorithms]
    publish(rows, table(rows), settings.file)


def measure_algorithm(settings: Settings, algorithm: str, communicator: _C.Communicator) -> Row:
    sparse = next(row["sparse"] for row in _C.algorithms() if row["name"] == algorithm)
    compression = Compression(algorithm=algorithm, density=settings.density if sparse else 1)
    exchange = _C.Exchange(
        communicator, settings.numel, torch.float32, compression.native(average=True)
    )
    noise = torch.randn(settings.numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    gradient = torch.empty_like(noise)
    times: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    for turn in range(settings.warmup + settings.iters):
        for kind in (WITH, WITHOUT) if turn % 2 == 0 else (WITHOUT, WITH):
            gradient.copy_(noise)
            dist.barrier()
            start = time.perf_counter()
            exchange.run(gradient, ends_step=kind == WITH)
            elapsed = time.perf_counter() - start
            if turn >= settings.warmup:
                times[kind].append(1e6 * elapsed)
    times = of_slowest_rank(times)
    with_us, without_us = Spread.of(times[WITH]), Spread.of(times[WITHOUT])
    return Row(
        algorithm,
        dist.get_world_size(),
        settings.link,
        settings.numel,
        settings.density,
        settings.iters,
        with_us,
        without_us,
        ratio(times[WITH], times[WITHOUT]),
        with_us.median - without_us.median,
    )


def table(rows: Sequence[Row]) -> str:
    first = rows[0]
    lines = [
        f"# {first.numel} entries, {first.world_size} ranks, link {first.link or 'without limit'}, "
        f"density {first.density:g}, {first.iters} turns",
        f"# {'algorithm':20} {'with, us':>10} {'without, us':>12} {'difference':>11} "
        f"{'ratio, median (min to max)':>30}",
    ]
    for row in rows:
        spread = f"{row.ratio.median:.3f} ({row.ratio.min:.3f} to {row.ratio.max:.3f})"
        lines.append(
            f"  {row.algorithm:20} {row.with_us.median:10.0f} {row.without_us.median:12.0f} "
            f"{row.median_difference_us:11.0f} {spread:>30}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Measures tensor fusion: many small allreduces, exchanged as one up to a limit in bytes.

    python benchmarks/fusion.py                            two ranks on this machine
    python benchmarks/fusion.py --ranks 4 --link 1gbit     a host per rank, as root

Starts the same named allreduces under every limit in turn, beginning with another one every time,
and waits for all. A time is that of the slowest rank, from a barrier to the last result. Each limit
is compared with 0, where each tensor is exchanged alone.
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

import sparsecomm
from sparsecomm.cli.bench import at_least_1, share
from sparsecomm.cli.measure import Spread

ALONE = 0


@dataclass(frozen=True)
class Settings:
    limits: tuple[int, ...]
    link: str | None
    tensors: int
    entries: tuple[int, ...]
    density: float
    iters: int
    warmup: int
    file: Path | None


@dataclass
class Row:
    world_size: int
    link: str | None
    tensors: int
    entries: int  # of each
    density: float
    iters: int
    fusion_bytes: int
    us: Spread
    ratio: Spread  # to each alone, of the same turn


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add_arguments(parser, iters=40, warmup=5)
    add = parser.add_argument
    add(
        "--limits",
        type=at_least_1,
        nargs="+",
        default=[1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20],
        help="in bytes",
    )
    add("--tensors", type=at_least_1, default=64, help="that are started at once")
    add(
        "--entries",
        type=at_least_1,
        nargs="+",
        default=[1_000, 30_000, 1_000_000],
        help="of each tensor",
    )
    add("--density", type=share, default=0.01, help="of the tensors")
    options = parser.parse_args(arguments)
    settings = Settings(
        (ALONE, *options.limits),
        options.link,
        options.tensors,
        tuple(options.entries),
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
    communicators = {
        limit: sparsecomm.Communicator.from_process_group(timeout=timeout, fusion_bytes=limit)
        for limit in settings.limits
    }
    rows: list[Row] = []
    for entries in settings.entries:
        rows += measure_size(settings, entries, communicators)
    publish(rows, table(rows), settings.file)


def measure_size(
    settings: Settings, entries: int, communicators: dict[int, sparsecomm.Communicator]
) -> list[Row]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    k = max(1, round(settings.density * entries))
    tensors = []
    for _ in range(settings.tensors):
        indices = torch.randperm(entries, generator=generator)[:k].sort().values
        values = torch.randn(k, generator=generator)
        tensors.append(
            torch.sparse_coo_tensor(
                indices[None], values, (entries,), is_coalesced=True, check_invariants=False
            )
        )
    times: dict[int, list[float]] = {limit: [] for limit in settings.limits}
    for turn in range(settings.warmup + settings.iters):
        first = turn % len(settings.limits)
        for limit in (*settings.limits[first:], *settings.limits[:first]):
            dist.barrier()
            start = time.perf_counter()
            works = [
                sparsecomm.allreduce(
                    tensor, communicator=communicators[limit], async_op=True, name=f"tensor {i}"
                )
                for i, tensor in enumerate(tensors)
            ]
            for work in works:
                work.wait()
            elapsed = time.perf_counter() - start
            if turn >= settings.warmup:
                times[limit].append(1e6 * elapsed)
    times = of_slowest_rank(times)
    return [
        Row(
            dist.get_world_size(),
            settings.link,
            settings.tensors,
            entries,
            settings.density,
            settings.iters,
            limit,
            Spread.of(own),
            ratio(own, times[ALONE]),
        )
        for limit, own in times.items()
    ]


def table(rows: Sequence[Row]) -> str:
    first = rows[0]
    lines = [
        f"# {first.tensors} tensors, {first.world_size} ranks, link "
        f"{first.link or 'without limit'}, density {first.density:g}, {first.iters} turns",
        f"# {'entries of each':>16} {'limit, bytes':>13} {'us':>10} "
        f"{'ratio to alone, median (min to max)':>38}",
    ]
    for row in rows:
        spread = f"{row.ratio.median:.3f} ({row.ratio.min:.3f} to {row.ratio.max:.3f})"
        lines.append(f"  {row.entries:16} {row.fusion_bytes:13} {row.us.median:10.0f} {spread:>38}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""What benchmarks that measure several ways in turn have in common."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sparsecomm.cli.bench import at_least_1, write_json
from sparsecomm.cli.measure import Spread

Way = TypeVar("Way")


def add_arguments(parser: argparse.ArgumentParser, *, iters: int, warmup: int) -> None:
    """Adds what says where, and how often, is measured; the defaults are given."""
    add = parser.add_argument
    add("--ranks", type=at_least_1, default=2, help="ranks to start; torchrun brings its own")
    add("--link", help="put every rank on a host of its own, on a link of this rate, such as 1gbit")
    add("--iters", type=at_least_1, default=iters, help="turns measured")
    add("--warmup", type=at_least_1, default=warmup, help="turns before them")
    add("--json", type=Path, help="file that the figures also go to")


def publish(rows: Sequence[Any], text: str, file: Path | None) -> None:
    """Has rank 0 print the text, and write the rows, which are dataclasses, to the file."""
    if dist.get_rank() == 0:
        print(text, flush=True)
        if file is not None:
            write_json(file, [asdict(row) for row in rows])


def of_slowest_rank(times: Mapping[Way, Sequence[float]]) -> dict[Way, list[float]]:
    """Returns the times of each way, as many on every rank, of the rank that took longest."""
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def ratio(times: Sequence[float], others: Sequence[float]) -> Spread:
    """Returns that of the times to the others of the same turn."""
    return Spread.of([one / other for one, other in zip(times, others, strict=True)])

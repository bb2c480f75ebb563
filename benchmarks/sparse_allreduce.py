#!/usr/bin/env python3
"""Measures the allreduce of sparse COO tensors by the backend "sparsecomm" and by gloo.

    python benchmarks/sparse_allreduce.py                          2 ranks on this machine
    python benchmarks/sparse_allreduce.py --ranks 4 --link 1gbit   a host per rank, as root
    torchrun --nproc-per-node 2 benchmarks/sparse_allreduce.py

Both backends reduce the same tensors in one run, in turn; the first of a round changes. The indices
are random and differ between ranks. A time is that of the slowest rank.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from command_line import make_parser
from hosts import run_benchmark
from turns import add_arguments, of_slowest_rank, ratio

from sparsecomm.cli.bench import write_json
from sparsecomm.cli.measure import Spread

BACKENDS = ("gloo", "sparsecomm")
TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Case:
    """A tensor of ``size`` rows, of which ``rows`` are held, with ``width`` values each."""

    size: int
    rows: int
    width: int  # 0: scalars

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        indices = torch.randperm(self.size, generator=generator)[: self.rows].sort().values
        dense = (self.width,) if self.width else ()
        values = torch.randn(self.rows, *dense, generator=generator)
        return torch.sparse_coo_tensor(
            indices[None], values, (self.size, *dense), is_coalesced=True, check_invariants=False
        )


CASES = {
    "rows of 64": Case(20_000, 2_000, 64),
    "rows of 16": Case(1_000_000, 50_000, 16),
    "scalars, 1 %": Case(10_000_000, 100_000, 0),
}


@dataclass
class Row:
    case: str
    world_size: int
    link: str | None
    iters: int
    gloo: Spread  # seconds
    sparsecomm: Spread
    ratio: Spread  # sparsecomm to gloo, of the same round


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add_arguments(parser, iters=20, warmup=3)
    options = parser.parse_args(arguments)
    own = sys.argv[1:] if arguments is None else arguments
    command = [sys.executable, str(Path(__file__).resolve()), *own]
    body = partial(measure, options.link, options.iters, options.warmup, options.json)
    return run_benchmark(parser, body, options.ranks, options.link, command)


def measure(link: str | None, iters: int, warmup: int, file: Path | None) -> None:
    groups = {name: dist.new_group(backend=name, timeout=TIMEOUT) for name in BACKENDS}
    rows = [measure_case(name, groups, link, iters, warmup) for name in CASES]
    if dist.get_rank() == 0:
        print(table(rows), flush=True)
        if file is not None:
            write_json(file, [asdict(row) for row in rows])


def measure_case(
    name: str, groups: dict[str, dist.ProcessGroup], link: str | None, iters: int, warmup: int
) -> Row:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for iteration in range(warmup + iters):
        tensor = CASES[name].draw(generator)
        results = {}
        for backend in BACKENDS if iteration % 2 else BACKENDS[::-1]:
            result = results[backend] = tensor.clone()
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(result, group=groups[backend])
            if iteration >= warmup:
                seconds[backend].append(time.perf_counter() - start)
        if iteration == 0:
            check(results)
    seconds = of_slowest_rank(seconds)
    gloo, ours = (seconds[backend] for backend in BACKENDS)
    return Row(
        name,
        dist.get_world_size(),
        link,
        iters,
        gloo=Spread.of(gloo),
        sparsecomm=Spread.of(ours),
        ratio=ratio(ours, gloo),
    )


def check(results: dict[str, torch.Tensor]) -> None:
    difference = (results["gloo"] - results["sparsecomm"]).coalesce().values()
    if difference.numel() and float(difference.abs().max()) > 1e-4:
        raise RuntimeError("the two backends' sums differ")


def table(rows: Sequence[Row]) -> str:
    first = rows[0]
    lines = [
        f"# allreduce of sparse f32 tensors, {first.world_size} ranks, link "
        f"{first.link or 'without limit'}, {first.iters} rounds, milliseconds",
        f"# {'':13} {'gloo':^23} {'sparsecomm':^23} {'ratio to gloo, by round':^23}",
        f"# {'case':13}" + f" {'min':>7} {'median':>7} {'max':>7}" * 3,
    ]
    for row in rows:
        figures = "".join(
            f" {1e3 * one.min:7.2f} {1e3 * one.median:7.2f} {1e3 * one.max:7.2f}"
            for one in (row.gloo, row.sparsecomm)
        )
        ratios = f" {row.ratio.min:7.2f} {row.ratio.median:7.2f} {row.ratio.max:7.2f}"
        lines.append(f"  {row.case:13}{figures}{ratios}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

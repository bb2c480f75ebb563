#!/usr/bin/env python3
"""Measures the exchange of a linear classifier's gradients: sparse against dense, in one run.

    python benchmarks/linear_models.py --hosts 8 --link 1gbit            a host per rank, as root
    python benchmarks/linear_models.py --hosts 8 --link 1gbit --method scd
    torchrun --nproc-per-node 2 benchmarks/linear_models.py

Trains as examples/train_linear.py does. Every step's gradient is exchanged twice, sparsely and by
torch.distributed's dense allreduce, beginning with the other one each time; the sums must be the
same bits, and the training goes on with them. A time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from command_line import make_parser
from hosts import run_benchmark
from torch import Tensor

from sparsecomm.cli.bench import at_least_0, at_least_1, write_json
from sparsecomm.cli.measure import Spread
from sparsecomm.cli.ranks import world_size_of_launcher

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_linear
from linear.exchange import DenseExchange, Exchange, SparseExchange
from linear.model import Weights
from linear.training import Survey, survey

FEATURES = 1 << 24  # as many as Webspam has
BATCH = 1000  # SparCML's


@dataclass
class Figures:
    seconds: Spread  # of a step's exchange
    total_seconds: float
    sent_bytes: float  # by a rank in a step, mean; of the dense one computed, 2 (P-1)/P of all
    iterations: list[float]


@dataclass
class Result:
    method: str
    loss: str
    algorithm: str
    data: str
    world_size: int
    link: str | None
    features: int
    examples_per_step: int | None
    iters: int
    warmup: int
    entries_per_rank: float
    entries_of_sum: float
    sparse: Figures
    dense: Figures
    ratio: float  # of the total seconds
    ratio_by_step: Spread


class Both:
    """Exchanges both ways, compares, and keeps what each took."""

    def __init__(self, sparse: Exchange, dense: Exchange) -> None:
        self.exchanges = {"sparse": sparse, "dense": dense}
        self.times: dict[str, list[float]] = {name: [] for name in self.exchanges}
        self.entries: list[tuple[int, int]] = []  # of this rank's vector and of the sum
        self.sent_bytes = self.seconds = 0.0

    def sum(self, columns: Tensor, values: Tensor) -> Tensor:
        totals = {}
        names = [*self.exchanges]
        for name in names if len(self.entries) % 2 else names[::-1]:
            exchange = self.exchanges[name]
            dist.barrier()
            before = exchange.seconds
            totals[name] = exchange.sum(columns, values)
            self.times[name].append(exchange.seconds - before)
        sparse, dense = totals["sparse"], totals["dense"]
        places = sparse.indices()[0]
        same = torch.equal(dense[places], sparse.values())
        if not same or dense.count_nonzero() != sparse.values().count_nonzero():
            raise RuntimeError("the sparse and the dense sum differ")
        self.entries.append((columns.numel(), places.numel()))
        return sparse


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    train_linear.add_training_options(parser)
    parser.set_defaults(features=FEATURES, batch=BATCH)
    add = parser.add_argument
    add("--hosts", "--ranks", type=at_least_1, default=2, help="ranks; torchrun brings its own")
    add("--link", help="put every rank on a host of its own, on a link of this rate, such as 1gbit")
    add("--iters", type=at_least_1, default=20, help="steps measured")
    add("--warmup", type=at_least_0, default=3, help="steps before them")
    add("--folder", type=Path, help="where the text's features are kept (a temporary folder)")
    add("--json", type=Path, help="file that the figures also go to")
    options = parser.parse_args(arguments)
    train_linear.check_training_options(parser, options)
    if options.folder is not None:
        return run(parser, options, sys.argv[1:] if arguments is None else [*arguments])
    if world_size_of_launcher() is not None:
        parser.error("--folder is needed where another launcher starts the ranks")
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        own = sys.argv[1:] if arguments is None else [*arguments]
        return run(parser, options, [*own, "--folder", folder])


def run(
    parser: argparse.ArgumentParser, options: argparse.Namespace, arguments: Sequence[str]
) -> int:
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    return run_benchmark(parser, partial(measure, options), options.hosts, options.link, command)


def measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    share, features = train_linear.open_data(options, options.folder)
    data = survey(share, features)
    timeout = timedelta(seconds=options.timeout)
    both = Both(
        SparseExchange(data.features, options.algorithm, timeout), DenseExchange(data.features)
    )
    method = train_linear.make_method(options, Weights(data.features), both, data, share)
    steps = options.warmup + options.iters
    for epoch in itertools.count():
        for _ in method.epoch(epoch):
            if len(both.entries) == options.warmup:
                for exchange in both.exchanges.values():
                    exchange.sent_bytes = 0.0
            if len(both.entries) == steps:
                break
        if len(both.entries) == steps:
            break
    slowest = torch.tensor([*both.times.values()], dtype=torch.float64)[:, options.warmup :]
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    sizes = torch.tensor(both.entries[options.warmup :], dtype=torch.float64).mean(0)
    sent = [exchange.sent_bytes / options.iters for exchange in both.exchanges.values()]
    means = torch.tensor([*sizes.tolist(), *sent], dtype=torch.float64)
    dist.all_reduce(means)
    means /= dist.get_world_size()
    if dist.get_rank() == 0:
        result = make_result(options, data, slowest, means.tolist())
        print(shown(result), flush=True)
        if options.json is not None:
            write_json(options.json, asdict(result))


def make_result(
    options: argparse.Namespace, data: Survey, seconds: Tensor, means: Sequence[float]
) -> Result:
    sparse, dense = seconds.tolist()
    return Result(
        method=options.method,
        loss=options.loss,
        algorithm=options.algorithm,
        data=options.data,
        world_size=len(data.train),
        link=options.link,
        features=data.features,
        examples_per_step=len(data.train) * options.batch if options.method == "sgd" else None,
        iters=options.iters,
        warmup=options.warmup,
        entries_per_rank=means[0],
        entries_of_sum=means[1],
        sparse=Figures(Spread.of(sparse), sum(sparse), means[2], sparse),
        dense=Figures(Spread.of(dense), sum(dense), means[3], dense),
        ratio=sum(dense) / sum(sparse),
        ratio_by_step=Spread.of([one / other for one, other in zip(dense, sparse, strict=True)]),
    )


def shown(result: Result) -> str:
    step = f", {result.examples_per_step} examples" if result.examples_per_step else ""
    lines = [
        f"# {result.loss} loss by {result.method}, {result.data}: {result.features} features"
        f"{step}, {result.world_size} ranks, link {result.link or 'without limit'}, "
        f"{result.iters} steps after {result.warmup} of warm-up, exchanged in turn",
        f"# {result.entries_per_rank:.0f} entries of a rank, {result.entries_of_sum:.0f} of all",
        f"# {'':8}  {'milliseconds':^29}  {'MB sent':>8}",
        f"# {'exchange':8}  {'min':>9} {'median':>9} {'max':>9}  {'per rank':>8}",
    ]
    for name in ("sparse", "dense"):
        figures: Figures = getattr(result, name)
        ms = " ".join(f"{1e3 * value:9.2f}" for value in asdict(figures.seconds).values())
        lines.append(f"  {name:8}  {ms}  {figures.sent_bytes / 1e6:8.3f}")
    by_step = result.ratio_by_step
    lines.append(
        f"dense takes {result.ratio:.1f} times as long in all; step by step {by_step.min:.1f} / "
        f"{by_step.median:.1f} / {by_step.max:.1f} (min, median, max); the sums are the same bits"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

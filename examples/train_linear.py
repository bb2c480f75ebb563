#!/usr/bin/env python3
"""Trains a linear classifier, data-parallel, whose gradients are sparse as its examples are.

    torchrun --nproc-per-node 2 examples/train_linear.py
    torchrun --nproc-per-node 2 examples/train_linear.py --exchange dense
    torchrun --nproc-per-node 2 examples/train_linear.py --loss hinge --data svmlight:FILE
    torchrun --nproc-per-node 2 examples/train_linear.py --method scd
    mpiexec -n 4 python examples/train_linear.py --launcher mpi

These are the tasks of SparCML's MPI-OPT (section 8.2): logistic regression and support vector
machines by stochastic gradient descent, and stochastic block coordinate descent. The exchange is
lossless, and the result has the same bits with either. The default data are prose and code of
Python's standard library, hashed to 2^20 features. Every tenth example is held out for the test.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import checkpoint, summary
from common.checkpoint import CheckpointError
from common.errors import TrainingError
from common.group import join, run_program
from common.options import Parser, add_run_options, natural, positive, positive_real
from linear import text
from linear.exchange import EXCHANGES, Exchange, make_exchange
from linear.model import LOSSES, Weights
from linear.svmlight import LARGEST_INDEX, Share
from linear.training import (
    CoordinateDescent,
    GradientDescent,
    Method,
    Survey,
    correct,
    survey,
)

METHODS = ("sgd", "scd")
SVMLIGHT = "svmlight:"


@dataclass
class History:
    """What the run has measured, per epoch; the same on every rank."""

    loss: list[float] = field(default_factory=list)
    test_accuracy: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)  # of a rank, mean
    exchange_seconds: list[float] = field(default_factory=list)  # of the slowest rank
    seconds: list[float] = field(default_factory=list)  # likewise, without the test


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)

    def work() -> None:
        join("gloo", timedelta(seconds=options.timeout))
        Training(options).run()

    return run_program("train_linear", options, work)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Train a linear classifier with sparse or dense exchange of gradients.",
        epilog="Start it with: torchrun --nproc-per-node 2 examples/train_linear.py [options]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_run_options(parser, "examples, or coordinates", "runs/linear-EXCHANGE")
    add_training_options(parser)
    parser.add_argument(
        "--exchange", choices=EXCHANGES, default="sparse", help="how vectors are summed"
    )
    options = parser.parse_args(arguments)
    check_training_options(parser, options)
    if options.output is None:
        options.output = Path("runs") / f"linear-{options.exchange}"
    return options


def add_training_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--method", choices=METHODS, default="sgd", help="gradient or coordinate descent")
    add("--loss", choices=LOSSES, default="logistic", help="hinge: a support vector machine")
    add("--algorithm", default="auto", help="of the sparse exchange, see sparsecomm info")
    add("--data", default="text", help="text, or svmlight:FILE")
    add(
        "--features",
        type=positive,
        default=None,
        help="columns, from 0 on: that text is hashed to (2^20), or that the file may have (one "
        "more than its largest index)",
    )
    add("--limit", type=positive, default=None, help="use only so many documents of the text")
    add("--batch", type=positive, default=128, help="sgd: examples per rank and step")
    add("--coordinates", type=positive, default=100, help="scd: moved at a time, times the ranks")
    add("--lr", type=positive_real, default=4.0, help="sgd: learning rate at the beginning")
    add("--l2", type=weight, default=1e-6, help="weight of the regularisation")
    add("--seed", type=natural, default=1, help="of the order of examples and coordinates")
    add("--timeout", type=positive, default=120, help="seconds to wait for another rank")


def check_training_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.method == "scd" and options.loss != "logistic":
        parser.error(f"--method scd takes a smooth loss, --loss logistic, not {options.loss}")
    if options.method == "sgd" and options.lr * options.l2 >= 1:
        parser.error(f"--lr {options.lr:g} times --l2 {options.l2:g} is not below 1")
    if options.features is not None and options.features > LARGEST_INDEX + 1:
        parser.error(f"--features {options.features} is above {LARGEST_INDEX + 1}")
    is_file = options.data.startswith(SVMLIGHT) and options.data != SVMLIGHT
    if options.data != "text" and not is_file:
        parser.error(f"--data: {options.data!r} is neither text nor svmlight:FILE")
    if is_file and options.limit is not None:
        parser.error("--limit is for --data text")


def weight(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value


def open_data(options: argparse.Namespace, folder: Path) -> tuple[Share, int | None]:
    """This rank's share of the data, and the number of columns if it is given. Collective.

    The text is written to the folder, which the ranks share, by the first of them.
    """
    path, features = Path(options.data.removeprefix(SVMLIGHT)), options.features
    if options.data == "text":
        features = features or text.FEATURES
        limit = f"-{options.limit}" if options.limit else ""
        path = folder / f"text-{features}{limit}.svm"
        if dist.get_rank() == 0 and not path.exists():
            print(f"hashing the standard library's text into {path}", flush=True)
            text.write(path, features, options.limit)
        dist.barrier()
    return Share(path, dist.get_rank(), dist.get_world_size()), features


def make_method(
    options: argparse.Namespace, weights: Weights, exchange: Exchange, data: Survey, share: Share
) -> Method:
    common = (weights, exchange, data, share)
    if options.method == "scd":
        return CoordinateDescent(
            *common, coordinates=options.coordinates, l2=options.l2, seed=options.seed
        )
    return GradientDescent(
        *common,
        loss=options.loss,
        batch=options.batch,
        lr=options.lr,
        l2=options.l2,
        seed=options.seed,
    )


class Training:
    """One run: its data, weights and exchange, and what it has measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.folder = options.output / "checkpoints"
        self.share, features = open_data(options, options.output)
        self.data = survey(self.share, features)
        self.weights = Weights(self.data.features)
        self.exchange = make_exchange(
            options.exchange,
            self.data.features,
            options.algorithm,
            timedelta(seconds=options.timeout),
        )
        self.method = make_method(options, self.weights, self.exchange, self.data, self.share)
        self.history = History()

    def run(self) -> None:
        self.resume()
        self.announce()
        every, epochs = self.options.checkpoint_every, self.options.epochs
        for epoch in range(len(self.history.loss), epochs):
            self.train_epoch(epoch)
            if every and ((epoch + 1) % every == 0 or epoch + 1 == epochs):
                self.save(epoch + 1)
        self.summarise()

    def train_epoch(self, epoch: int) -> None:
        exchange, history = self.exchange, self.history
        exchange.sent_bytes = exchange.seconds = 0.0
        start = time.perf_counter()
        for _ in self.method.epoch(epoch):
            pass
        slowest = torch.tensor([time.perf_counter() - start, exchange.seconds], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        sums = torch.tensor(
            [self.method.loss(), correct(self.weights, self.share), exchange.sent_bytes],
            dtype=torch.float64,
        )
        dist.all_reduce(sums)
        history.loss.append(sums[0].item() / sum(self.data.train))
        history.test_accuracy.append(sums[1].item() / self.data.test)
        history.sent_bytes.append(sums[2].item() / self.ranks)
        history.seconds.append(slowest[0].item())
        history.exchange_seconds.append(slowest[1].item())
        if not math.isfinite(history.loss[-1]):
            raise TrainingError(f"the loss is {history.loss[-1]}: try a lower --lr")
        if self.rank == 0:
            steps = self.method.steps
            print(
                f"epoch {epoch + 1}/{self.options.epochs}: loss {history.loss[-1]:.4f}, "
                f"test accuracy {100 * history.test_accuracy[-1]:.2f} %, "
                f"{history.seconds[-1]:.2f} s, of which exchange {history.exchange_seconds[-1]:.2f}"
                f" s, {history.sent_bytes[-1] / steps / 1e6:.3f} MB sent per rank and step",
                flush=True,
            )

    def announce(self) -> None:
        if self.rank == 0:
            options, data = self.options, self.data
            task = f"{options.loss} loss by {options.method}"
            print(
                f"{task}, {options.exchange} exchange, {options.data}: {data.features:,} features, "
                f"{sum(data.train):,} examples with {data.entries.sum() / sum(data.train):.0f} "
                f"entries, {data.test:,} held out of which {100 * data.majority:.2f} % have the "
                f"same label; {self.ranks} ranks, {self.method.steps} steps per epoch",
                flush=True,
            )

    # Checkpoints

    def settings(self) -> dict[str, Any]:
        """What a resumed run must share with the one it goes on from; the exchange may differ."""
        options, data = self.options, self.data
        names = ("method", "loss", "data", "limit", "batch", "coordinates", "lr", "l2", "seed")
        chosen = {name: getattr(options, name) for name in names}
        sizes = {"bytes": self.share.size, "features": data.features, "examples": [*data.train]}
        return {**chosen, **sizes, "ranks": self.ranks}

    def save(self, epoch: int) -> None:
        shared = {
            "settings": self.settings(),
            "direction": self.weights.direction,
            "scale": self.weights.scale,
        }
        own = {"method": self.method.state_dict(), "history": asdict(self.history)}
        checkpoint.save(self.folder, epoch, shared, own)

    def resume(self) -> None:
        """Goes on from the newest checkpoint, if --resume or a restart asks for it."""
        found = checkpoint.find(self.folder, self.options.resume, self.settings())
        if found is None:
            return
        epoch, shared = found
        own = checkpoint.load_own(self.folder, epoch, self.rank)
        try:
            if shared["direction"].shape != self.weights.direction.shape:
                raise ValueError(f"{shared['direction'].numel()} weights")
            self.weights.direction, self.weights.scale = shared["direction"], shared["scale"]
            self.method.load_state_dict(own["method"])
            self.history = History(**own["history"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.folder}: epoch {epoch} does not fit: {error}") from error
        if self.rank == 0:
            print(f"going on after epoch {epoch}", flush=True)

    # Results

    def summarise(self) -> None:
        """Writes summary.json on rank 0, once all ranks are found to hold the same weights."""
        digest = summary.common_digest([self.weights.dense()])
        if self.rank != 0:
            return
        history = self.history
        result = {
            **self.settings(),
            "exchange": self.options.exchange,
            "epochs": len(history.loss),
            "steps_per_epoch": self.method.steps,
            "held_out": self.data.test,
            "majority": self.data.majority,
            "weights_sha256": digest,
            "curves": asdict(history),
        }
        summary.write(self.options.output, result)


if __name__ == "__main__":
    sys.exit(main())

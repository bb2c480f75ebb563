#!/usr/bin/env python3
"""Trains VGG16 on 32x32 images, data-parallel, exchanging dense or sparse gradients.

    torchrun --nproc-per-node 2 examples/train_vgg16.py --hook dense
    torchrun --nproc-per-node 2 examples/train_vgg16.py --hook oktopk --density 0.02
    python examples/report_vgg16.py

or, where an MPI launches programs,

    mpiexec -n 4 python examples/train_vgg16.py --launcher mpi

Each run leaves summary.json, TensorBoard events and, if asked for, checkpoints in its output
folder, runs/vgg16-HOOK. Without a launcher it trains on a single rank.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# DDP would import this later, and its functions' defaults would then keep the group alive.
import torch.distributed.nn.functional
from common import checkpoint
from common.checkpoint import CheckpointError
from common.group import GroupError, attempt, disconnect, fail, join
from common.launcher import LAUNCHERS, LauncherError, take_ranks_from_mpi
from common.options import Parser, natural, positive, positive_real, share
from common.seeds import mix_seed
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm  # type: ignore[import-untyped]
from vgg16.data import DataError, Dataset, epoch_batches, load, steps_per_epoch
from vgg16.exchange import HOOKS, HookError, make_exchange
from vgg16.model import VGG16, count_parameters

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
WARMUP_EPOCHS = 1
EVALUATION_BATCH = 64


class TrainingError(RuntimeError):
    """Training cannot go on."""


@dataclass
class History:
    """What the run has measured so far, the same on every rank except for its seconds."""

    loss: list[float] = field(default_factory=list)
    test_accuracy: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)  # up to each epoch's end, mean of ranks
    exchange_seconds: list[float] = field(default_factory=list)  # likewise
    selected: list[float] = field(default_factory=list)  # likewise, entries of the gradient
    iteration_seconds: list[float] = field(default_factory=list)  # one per step, of this rank


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        if options.launcher == "mpi":
            take_ranks_from_mpi()
    except LauncherError as error:
        return fail("train_vgg16", str(error), 2)
    rank = int(os.environ.get("RANK", "0"))
    try:
        data = load(options.data)
        if options.limit is not None:
            data = data.limited(options.limit)
        connect(options)
        Training(options, data).run()
    except (DataError, HookError, CheckpointError, GroupError, TrainingError) as error:
        return fail("train_vgg16", f"rank {rank}: {error}", 2)
    except (RuntimeError, OSError) as error:  # among them: another rank is gone
        return fail("train_vgg16", f"rank {rank}: {type(error).__name__}: {error}", 1)
    disconnect()
    return 0


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Train VGG16 on 32x32 images with dense or sparse gradient exchange.",
        epilog="Start it with: torchrun --nproc-per-node 2 examples/train_vgg16.py [options]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--launcher", choices=LAUNCHERS, default="torchrun", help="what has started the ranks")
    add("--hook", choices=HOOKS, default="oktopk", help="how gradients are exchanged")
    add("--density", type=share, default=0.02, help="share of the gradient a sparse hook sends")
    add(
        "--density-warmup",
        type=shares,
        default=[],
        metavar="D1,D2,...",
        help="densities of the first epochs, such as 0.25,0.0625,0.04",
    )
    add("--python-hook", action="store_true", help="use the sparse hook's Python entry, not C++")
    add("--backend", choices=("gloo", "sparsecomm"), default="gloo", help="of torch.distributed")
    add("--data", default="digits", help="digits, or cifar10:FOLDER (python version)")
    add("--epochs", type=positive, default=5, help="passes over the training images")
    add("--batch", type=positive, default=16, help="images per rank and step")
    add("--lr", type=positive_real, default=0.01, help="peak learning rate")
    add("--seed", type=natural, default=1, help="of initialisation, order and augmentation")
    add("--output", type=Path, default=None, help="folder of the results (runs/vgg16-HOOK)")
    add("--checkpoint-every", type=natural, default=0, metavar="EPOCHS", help="0: never")
    add("--resume", action="store_true", help="go on from the checkpoint in the output folder")
    add("--timeout", type=positive, default=120, help="seconds to wait for another rank")
    add("--limit", type=positive, default=None, help="use only so many images, for a quick try")
    add("--max-steps", type=positive, default=None, help="stop after so many steps of this run")
    options = parser.parse_args(arguments)
    if options.output is None:
        options.output = Path("runs") / f"vgg16-{options.hook}"
    return options


def shares(text: str) -> list[float]:
    return [share(part) for part in text.split(",") if part]


def connect(options: argparse.Namespace) -> None:
    if options.backend == "sparsecomm":
        try:
            import sparsecomm  # noqa: F401 - registers the backend
        except ImportError as error:
            raise HookError(f"--backend sparsecomm needs sparsecomm: {error}") from error
    join(options.backend, timedelta(seconds=options.timeout))


def learning_rate(step: int, per_epoch: int, epochs: int, peak: float) -> float:
    """Rises linearly over the first epoch, then falls along a cosine to zero."""
    warmup = WARMUP_EPOCHS * per_epoch
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (epochs * per_epoch - warmup)))


class Training:
    """One run: its model, optimizer and exchange, and what it has measured."""

    def __init__(self, options: argparse.Namespace, data: Dataset) -> None:
        self.options = options
        self.data = data
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.per_epoch = steps_per_epoch(len(data.train), options.batch, self.ranks)
        self.step = 0
        self.first_epoch = 0
        self.history = History()

        torch.manual_seed(options.seed)
        self.model = VGG16()
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), options.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        )
        self.exchange = make_exchange(
            options.hook,
            options.density,
            timedelta(seconds=options.timeout),
            options.python_hook,
        )
        sample, _ = data.train.take(torch.zeros(options.batch, dtype=torch.int64), None)
        self.exchange.attach(self.ddp, sample)

    def run(self) -> None:
        """Trains to the end or to the step limit, and writes the summary."""
        options = self.options
        self.resume()
        self.announce()
        writer = self.open_events()
        first_step = self.step
        for epoch in range(self.first_epoch, options.epochs):
            left = None if options.max_steps is None else first_step + options.max_steps - self.step
            if left == 0:
                break
            loss, steps = self.train_epoch(epoch, left)
            self.finish_epoch(loss, steps, self.evaluate(), writer)
            whole = steps == self.per_epoch
            every = options.checkpoint_every
            if whole and every and ((epoch + 1) % every == 0 or epoch + 1 == options.epochs):
                self.save(epoch + 1)
        self.summarise()
        if writer is not None:
            writer.close()

    def train_epoch(self, epoch: int, limit: int | None) -> tuple[float, int]:
        """The sum of this rank's losses over the epoch's steps, and the number of steps."""
        options = self.options
        warmup = options.density_warmup
        self.exchange.set_density(warmup[epoch] if epoch < len(warmup) else options.density)
        batches = epoch_batches(
            len(self.data.train), options.batch, self.rank, self.ranks, options.seed, epoch
        )
        # Augmentation, like the order, starts anew from the seed in every epoch.
        generator = torch.Generator().manual_seed(mix_seed(options.seed, epoch, self.rank + 1))
        self.model.train()
        total, steps = 0.0, 0
        images = options.batch * self.ranks
        steps_here = self.per_epoch if limit is None else min(limit, self.per_epoch)
        with tqdm(
            total=steps_here * images,
            desc=f"epoch {epoch + 1}/{options.epochs}",
            unit="image",
            disable=self.rank != 0,
            mininterval=0.2 if sys.stderr.isatty() else 10,
            leave=False,
        ) as bar:
            for indices in batches:
                if steps == steps_here:
                    break
                start = time.perf_counter()
                loss = self.train_step(*self.data.train.take(indices, generator))
                self.history.iteration_seconds.append(time.perf_counter() - start)
                total += loss
                steps += 1
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update(images)
        return total, steps

    def train_step(self, images: Tensor, labels: Tensor) -> float:
        options = self.options
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.per_epoch, options.epochs, options.lr)
        self.optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(self.ddp(images), labels)
        torch.autograd.backward(loss)  # the hook exchanges the gradients meanwhile
        self.exchange.after_step()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> int:
        """How many of this rank's share of the test images the model classifies correctly."""
        for buffer in self.model.buffers():  # batch norm's statistics differ between ranks
            dist.broadcast(buffer, src=0)
        self.model.eval()
        correct = 0
        share_of_rank = torch.arange(self.rank, len(self.data.test), self.ranks)
        for indices in torch.split(share_of_rank, EVALUATION_BATCH):
            images, labels = self.data.test.take(indices, None)
            correct += int((self.model(images).argmax(dim=1) == labels).sum().item())
        return correct

    def finish_epoch(
        self, loss: float, steps: int, correct: int, writer: SummaryWriter | None
    ) -> None:
        """Adds up what the ranks have measured in an epoch."""
        totals, history = self.exchange.totals, self.history
        sums = torch.tensor(
            [loss, correct, totals.sent_bytes, totals.exchange_seconds, totals.selected],
            dtype=torch.float64,
        )
        dist.all_reduce(sums)
        history.loss.append(sums[0].item() / (steps * self.ranks))
        history.test_accuracy.append(sums[1].item() / len(self.data.test))
        for series, value in zip(
            (history.sent_bytes, history.exchange_seconds, history.selected),
            (sums[2:] / self.ranks).tolist(),
            strict=True,
        ):
            series.append(value)
        if not math.isfinite(history.loss[-1]):
            raise TrainingError(f"the loss is {history.loss[-1]}: try a lower --lr")
        if self.rank != 0:
            return
        epoch = len(history.loss)
        print(
            f"epoch {epoch}/{self.options.epochs}: loss {history.loss[-1]:.4f}, "
            f"test accuracy {100 * history.test_accuracy[-1]:.2f} %, "
            f"{statistics.median(history.iteration_seconds):.3f} s per step, "
            f"{history.sent_bytes[-1] / totals.steps / 1e6:.3f} MB sent per rank and step",
            flush=True,
        )
        if writer is not None:
            for name, value in (
                ("loss/train", history.loss[-1]),
                ("accuracy/test", history.test_accuracy[-1]),
                ("bytes/sent per rank", history.sent_bytes[-1]),
                ("density/realised", self.realised_density()),
                ("seconds/exchange per step", history.exchange_seconds[-1] / totals.steps),
                ("learning rate", self.optimizer.param_groups[0]["lr"]),
            ):
                writer.add_scalar(name, value, self.step)

    def realised_density(self) -> float:
        """The share of the gradient that was selected, mean over steps and ranks."""
        entries = self.exchange.totals.steps * count_parameters(self.model)
        return self.history.selected[-1] / entries

    def announce(self) -> None:
        if self.rank == 0:
            options = self.options
            sparse = "" if options.hook == "dense" else f" at density {options.density:g}"
            print(
                f"VGG16, {count_parameters(self.model):,} parameters, on {self.data.name}: "
                f"{options.hook}{sparse}, {options.backend}, {self.ranks} ranks x "
                f"{options.batch} images, {self.per_epoch} steps per epoch",
                flush=True,
            )

    def open_events(self) -> SummaryWriter | None:
        """A writer of TensorBoard events on rank 0; what an earlier run left there is dropped."""
        if self.rank != 0:
            return None
        folder = self.options.output / "tensorboard"
        if self.step == 0:
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            print("tensorboard is not installed: no events are written", file=sys.stderr)
            return None
        return SummaryWriter(str(folder), purge_step=self.step + 1 if self.step else None)

    # Checkpoints

    def settings(self) -> dict[str, Any]:
        """The options that a resumed run must share with the one it goes on from."""
        options = self.options
        names = ("hook", "density", "density_warmup", "backend", "epochs", "batch", "lr", "seed")
        chosen = {name: getattr(options, name) for name in names}
        return {**chosen, "data": self.data.name, "limit": options.limit, "ranks": self.ranks}

    def save(self, epoch: int) -> None:
        shared = {
            "settings": self.settings(),
            "epoch": epoch,
            "step": self.step,  # the position in the learning rate's schedule
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        own = {
            "exchange": self.exchange.state_dict(),
            "history": asdict(self.history),
            "random": torch.get_rng_state(),
        }
        checkpoint.save(self.options.output / "checkpoints", epoch, shared, own)

    def resume(self) -> None:
        """Goes on from the newest checkpoint, if --resume or a restart asks for it."""
        folder = self.options.output / "checkpoints"
        found = checkpoint.find(folder, self.options.resume or attempt() > 0, self.settings())
        if found is None:
            return
        epoch, shared, own = found
        try:
            self.model.load_state_dict(shared["model"])
            self.optimizer.load_state_dict(shared["optimizer"])
            self.exchange.load_state_dict(own["exchange"])
            self.history = History(**own["history"])
            torch.set_rng_state(own["random"])
            self.first_epoch, self.step = shared["epoch"], shared["step"]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{folder}: epoch {epoch} does not fit: {error}") from error
        if self.rank == 0:
            print(f"going on after epoch {epoch}, step {self.step}", flush=True)

    # Results

    def summarise(self) -> None:
        """Writes summary.json on rank 0, once all ranks are found to hold the same model."""
        digest = self.common_digest()
        if self.rank != 0:
            return
        options, history, steps = self.options, self.history, self.exchange.totals.steps
        sparse = options.hook != "dense"
        summary = {
            "hook": options.hook,
            "backend": options.backend,
            "data": self.data.name,
            "world_size": self.ranks,
            "batch": options.batch,
            "epochs": len(history.loss),
            "steps": steps,
            "parameters": count_parameters(self.model),
            "density": options.density if sparse else 1.0,
            "density_warmup": options.density_warmup if sparse else [],
            "lr": options.lr,
            "seed": options.seed,
            "complete": self.step == options.epochs * self.per_epoch,
            "test_accuracy": history.test_accuracy[-1],
            "iteration_seconds": statistics.median(history.iteration_seconds),
            "exchange_seconds": history.exchange_seconds[-1] / steps,
            "sent_bytes_per_iteration": history.sent_bytes[-1] / steps,
            "sent_bytes_source": self.exchange.bytes_source,
            "realised_density": self.realised_density(),
            "parameters_sha256": digest,
            "curves": {
                "loss": history.loss,
                "test_accuracy": history.test_accuracy,
                "cumulative_sent_bytes": history.sent_bytes,
            },
        }
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / "summary.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(summary, indent=2) + "\n")
        partial.replace(path)
        print(f"wrote {path}", flush=True)

    def common_digest(self) -> str:
        """The SHA-256 of the parameters, which every rank must agree on."""
        digest = parameters_digest(self.model)
        own = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(every, own)
        different = [rank for rank, other in enumerate(every) if not torch.equal(other, every[0])]
        if different:
            raise TrainingError(f"the parameters of ranks {different} differ from those of rank 0")
        return digest


def parameters_digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())

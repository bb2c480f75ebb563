"""A run of a task on the ranks of a process group: options, loop, checkpoints and results."""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# DDP would import this later, and its functions' defaults would then keep the group alive.
import torch.distributed.nn.functional
from tqdm import tqdm  # type: ignore[import-untyped]

from common import checkpoint, summary
from common.checkpoint import CheckpointError
from common.errors import TrainingError, UserError
from common.exchange import (
    PREPARE,
    SEND_ALL,
    HookError,
    SparseExchange,
    add_exchange_options,
    make_exchange,
)
from common.group import join, run_program
from common.options import (
    Parser,
    add_run_options,
    natural,
    positive,
    positive_real,
)
from common.seeds import mix_seed
from common.task import Batch, Task, count_parameters

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

BACKENDS = ("auto", "gloo", "sparsecomm")
# Options that a resumed run need not share with the one it goes on from.
FREE_OPTIONS = {
    *("launcher", "device", "output", "checkpoint_every", "resume", "timeout", "steps"),
    *("cache", "recipe", "transport", "python_hook"),
}

MakeTask = Callable[[argparse.Namespace], Task]


@dataclass
class History:
    """What the run has measured so far, the same on every rank except for its seconds."""

    loss: list[float] = field(default_factory=list)  # a value for each epoch
    metrics: dict[str, list[float]] = field(default_factory=dict)  # likewise
    # Up to each epoch's end, mean of ranks, by the names of Totals.
    totals: dict[str, list[float]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # of all steps up to each epoch's end
    iteration_seconds: list[float] = field(default_factory=list)  # one per step, of this rank
    compute_seconds: list[float] = field(default_factory=list)  # what of it no exchange exposed


def make_parser(description: str, name: str) -> Parser:
    """A parser with the options of every task; `name` begins the default output folder's."""
    parser = Parser(
        description=description,
        epilog=f"Start it with: torchrun --nproc-per-node 2 {sys.argv[0]} [options]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(name=name)
    add_run_options(parser, "training data", f"runs/{name}-HOOK")
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if any")
    add(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="of torch.distributed; auto: nccl for a GPU, gloo for the CPU",
    )
    add("--batch", type=positive, default=16, help="examples per rank and step")
    add("--lr", type=positive_real, default=0.01, help="peak learning rate")
    add("--seed", type=natural, default=1, help="of initialisation, order and augmentation")
    add("--timeout", type=positive, default=120, help="seconds to wait for another rank")
    add("--steps", type=positive, default=None, help="stop after so many steps of this run")
    add(
        "--recipe",
        choices=("plain", "recommended"),
        default="plain",
        help="recommended: defaults of other options that keep the dense quality",
    )
    add_exchange_options(parser)
    return parser


def parse(
    parser: Parser, arguments: Sequence[str] | None, recommended: dict[str, Any]
) -> argparse.Namespace:
    """The options; those of the recommended recipe where it is asked for and not overridden."""
    options, _ = parser.parse_known_args(arguments)
    if options.recipe == "recommended":
        chosen = dict(recommended)
        if options.hook == PREPARE:
            chosen.pop("momentum_correction", None)  # it moves the momentum itself
        parser.set_defaults(**chosen)
    options = parser.parse_args(arguments)
    if options.output is None:
        options.output = Path("runs") / f"{options.name}-{options.hook}"
    return options


def run(program: str, options: argparse.Namespace, make_task: MakeTask) -> int:
    """Joins the other ranks, trains, and leaves them; returns the exit status."""

    def work() -> None:
        connect(options)
        Training(options, make_task).run()

    return run_program(program, options, work)


def connect(options: argparse.Namespace) -> None:
    """Joins the process group; `options.device` and `options.backend` become what is used."""
    options.device = choose_device(options.device)
    if options.backend == "sparsecomm":
        try:
            import sparsecomm  # noqa: F401 - registers the backend
        except ImportError as error:
            raise HookError(f"--backend sparsecomm needs sparsecomm: {error}") from error
    elif options.backend == "auto":
        options.backend = "gloo" if options.device == "cpu" else "nccl"
    # What the ranks tell each other beside gradients is on the CPU.
    backend = "cpu:gloo,cuda:nccl" if options.backend == "nccl" else options.backend
    join(backend, timedelta(seconds=options.timeout))


def choose_device(wanted: str) -> str:
    """ "cpu", or the GPU of this rank, which becomes torch's current one.

    Raises:
        UserError: there is none.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here; use --device cpu")
    rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= gpus:
        raise UserError(
            f"local rank {rank} has no GPU, there are {gpus}: start no more ranks on a host, or "
            "use --device cpu"
        )
    torch.cuda.set_device(rank)
    return f"cuda:{rank}"


class Training:
    """One run: its task, optimizer and exchange, and what it has measured."""

    def __init__(self, options: argparse.Namespace, make_task: MakeTask) -> None:
        self.options = options
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.step = 0
        self.first_epoch = 0
        self.history = History()

        torch.manual_seed(options.seed)
        self.task = make_task(options)
        self.model = self.task.model.to(options.device)
        self.optimizer = self.task.optimizer()
        self.exchange = make_exchange(options, self.task, self.optimizer)
        self.ddp = self.exchange.wrap(self.task)
        # Ranks have initialised the same model; what they drop out differs.
        torch.manual_seed(mix_seed(options.seed, self.rank))

    def run(self) -> None:
        """Trains to the end or to the step limit, and writes the summary."""
        options, per_epoch = self.options, self.task.steps_per_epoch
        self.resume()
        self.announce()
        writer = self.open_events()
        first_step = self.step
        for epoch in range(self.first_epoch, options.epochs):
            left = None if options.steps is None else first_step + options.steps - self.step
            if left == 0:
                break
            loss, steps = self.train_epoch(epoch, left)
            self.finish_epoch(loss, steps, writer)
            every = options.checkpoint_every
            if (
                steps == per_epoch
                and every
                and ((epoch + 1) % every == 0 or epoch + 1 == options.epochs)
            ):
                self.save(epoch + 1)
        self.summarise()
        if writer is not None:
            writer.close()

    def train_epoch(self, epoch: int, limit: int | None) -> tuple[float, int]:
        """The sum of this rank's losses over the epoch's steps, and the number of steps."""
        task = self.task
        self.model.train()
        total, steps = 0.0, 0
        units = task.batch * self.ranks
        steps_here = min(limit or task.steps_per_epoch, task.steps_per_epoch)
        with tqdm(
            total=steps_here * units,
            desc=f"epoch {epoch + 1}/{self.options.epochs}",
            unit=task.unit,
            disable=self.rank != 0,
            mininterval=0.2 if sys.stderr.isatty() else 10,
            leave=False,
        ) as bar:
            for batch in task.batches(epoch):
                if steps == steps_here:
                    break
                exposed = self.exchange.totals.exposed_seconds
                start = time.perf_counter()
                loss = self.train_step(batch)
                seconds = time.perf_counter() - start
                exposed = self.exchange.totals.exposed_seconds - exposed
                self.history.iteration_seconds.append(seconds)
                self.history.compute_seconds.append(seconds - exposed)
                total += loss
                steps += 1
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update(units)
        return total, steps

    def train_step(self, batch: Batch) -> float:
        task = self.task
        for group in self.optimizer.param_groups:
            group["lr"] = task.learning_rate(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        loss = task.loss(self.ddp, task.to_device(batch))
        torch.autograd.backward(loss)  # the hook exchanges the gradients meanwhile
        if task.clip_norm is not None and not self.exchange.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), task.clip_norm)
        self.optimizer.step()
        self.step += 1
        value = loss.item()  # on a GPU: when all of the above is done
        self.exchange.after_step()
        return value

    @torch.no_grad()
    def evaluate(self) -> torch.Tensor:
        for buffer in self.model.buffers():  # batch norm's statistics differ between ranks
            dist.broadcast(buffer, src=0)
        self.model.eval()
        return self.task.evaluate()

    def finish_epoch(self, loss: float, steps: int, writer: SummaryWriter | None) -> None:
        """Evaluates, and adds up what the ranks have measured in an epoch."""
        task, totals, history = self.task, self.exchange.totals, self.history
        own = [loss, sum(history.iteration_seconds), *astuple(totals)]
        measured = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(measured)
        loss, seconds, *means = (measured / self.ranks).tolist()
        history.loss.append(loss / steps)
        history.seconds.append(seconds)
        if not math.isfinite(history.loss[-1]):
            raise TrainingError(f"the loss is {history.loss[-1]}: try a lower --lr")
        sums = self.evaluate().cpu()
        dist.all_reduce(sums)
        metrics = task.metrics(sums)
        for series, values in (
            (history.totals, dict(zip(asdict(totals), means, strict=True))),
            (history.metrics, metrics),
        ):
            for name, value in values.items():
                series.setdefault(name, []).append(value)
        if self.rank != 0:
            return
        print(
            f"epoch {len(history.loss)}/{self.options.epochs}: loss {history.loss[-1]:.4f}, "
            + "".join(f"{name.replace('_', ' ')} {value:.4f}, " for name, value in metrics.items())
            + f"{statistics.median(history.iteration_seconds):.3f} s per step, "
            f"{self.per_step('sent_bytes') / 1e6:.3f} MB sent per rank and step",
            flush=True,
        )
        if writer is not None:
            for name, value in (
                ("loss/train", history.loss[-1]),
                *((f"quality/{name}", value) for name, value in metrics.items()),
                ("bytes/sent per rank", history.totals["sent_bytes"][-1]),
                ("density/realised", self.realised_density()),
                ("seconds/exchange per step", self.per_step("exchange_seconds")),
                ("learning rate", self.optimizer.param_groups[0]["lr"]),
            ):
                writer.add_scalar(name, value, self.step)
            if isinstance(self.exchange, SparseExchange):
                self.exchange.write_stats(writer, self.step)

    def per_step(self, name: str) -> float:
        """One of the totals, mean over steps and ranks."""
        totals = self.history.totals
        return totals[name][-1] / totals["steps"][-1]

    def realised_density(self) -> float:
        """The share of the gradient that was selected, mean over steps and ranks."""
        return self.per_step("selected") / count_parameters(self.model)

    def announce(self) -> None:
        if self.rank == 0:
            options, task = self.options, self.task
            sparse = "" if options.hook in SEND_ALL else f" at density {options.density:g}"
            print(
                f"{task.name}, {count_parameters(self.model):,} parameters, on {task.data}: "
                f"{options.hook}{sparse}, {options.backend}, {self.ranks} ranks x "
                f"{task.batch} {task.unit}s, {task.steps_per_epoch} steps per epoch",
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
        """What a resumed run must share with the one it goes on from."""
        options = {k: v for k, v in vars(self.options).items() if k not in FREE_OPTIONS}
        return {**options, "data": self.task.data}

    def save(self, epoch: int) -> None:
        shared = {
            "settings": self.settings(),
            "epoch": epoch,
            "ranks": self.ranks,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        own = {
            "exchange": self.exchange.state_dict(),
            "history": asdict(self.history),
            "random": random_state(),
        }
        checkpoint.save(self.options.output / "checkpoints", epoch, shared, own)

    def resume(self) -> None:
        """Goes on from the newest checkpoint, if --resume or a restart asks for it.

        With another number of ranks all of their files are read, as residuals are shared out anew.
        """
        folder = self.options.output / "checkpoints"
        found = checkpoint.find(folder, self.options.resume, self.settings())
        if found is None:
            return
        epoch, shared = found
        try:
            former = int(shared["ranks"])
            ranks = [self.rank] if former == self.ranks else range(former)
            every = [checkpoint.load_own(folder, epoch, rank) for rank in ranks]
            self.model.load_state_dict(shared["model"])
            self.optimizer.load_state_dict(shared["optimizer"])
            self.first_epoch = epoch
            self.step = epoch * self.task.steps_per_epoch
            self.exchange.load_state_dicts([own["exchange"] for own in every], self.step)
            self.history = History(**every[0]["history"])
            if former == self.ranks:
                set_random_state(every[0]["random"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{folder}: epoch {epoch} does not fit: {error}") from error
        if self.rank == 0:
            ranks_then = "" if former == self.ranks else f", which {former} ranks have saved"
            print(f"going on after epoch {epoch}{ranks_then}", flush=True)

    # Results

    def summarise(self) -> None:
        """Writes summary.json on rank 0, once all ranks are found to hold the same model."""
        digest = summary.common_digest(self.model.parameters())
        memory = [0] * self.ranks
        dist.all_gather_object(memory, peak_memory(self.options.device))
        if self.rank != 0:
            return
        options, task, history = self.options, self.task, self.history
        selects = options.hook not in SEND_ALL
        seconds = [name for name in vars(self.exchange.totals) if name.endswith("_seconds")]
        result = {
            **self.settings(),
            "task": task.name,
            "device": torch.device(options.device).type,
            "world_size": self.ranks,
            "batch": task.batch,
            "epochs": len(history.loss),
            "steps": int(history.totals["steps"][-1]),
            "parameters": count_parameters(self.model),
            "density": options.density if selects else 1.0,
            "density_warmup": self.exchange.density_warmup(task.steps_per_epoch),
            "complete": self.step == options.epochs * task.steps_per_epoch,
            "quality": task.quality,
            "higher_is_better": task.higher_is_better,
            **{name: values[-1] for name, values in history.metrics.items()},
            "iteration_seconds": statistics.median(history.iteration_seconds),
            "compute_seconds": statistics.median(history.compute_seconds),
            **{name: self.per_step(name) for name in seconds},
            "sent_bytes_per_iteration": self.per_step("sent_bytes"),
            "sent_bytes_source": self.exchange.bytes_source,
            "realised_density": self.realised_density(),
            "peak_memory_bytes": memory,
            "parameters_sha256": digest,
            "curves": {
                "loss": history.loss,
                **history.metrics,
                "cumulative_sent_bytes": history.totals["sent_bytes"],
            },
            "cumulative_seconds": history.seconds,
        }
        print(
            "peak memory of each rank: " + ", ".join(f"{size / 1e6:,.0f} MB" for size in memory),
            flush=True,
        )
        summary.write(options.output, result)


def peak_memory(device: str) -> int:
    """Bytes: of the GPU's memory that tensors had at most, or of the process's own."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])

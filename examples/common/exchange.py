"""How gradients are exchanged: by a hook of sparsecomm, or by torch's dense allreduce.

All measure themselves, so that reports compare like with like.
"""

import argparse
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common.errors import UserError
from common.options import natural, positive, share, shares
from common.task import Task, count_parameters

if TYPE_CHECKING:
    import sparsecomm

# Of torch, by what they do.
DENSE_HOOKS = {
    "ddp": "torch's allreduce of every bucket as soon as it is there, as DDP does without a hook",
    "dense": "torch's allreduce of the whole gradient when the backward pass has ended",
}
# Of sparsecomm: the state and the hook.
SPARSE_HOOKS = {
    "dense_overlap": ("DenseOverlapState", "dense_overlap_hook"),
    "topk_a": ("TopkState", "topk_hook"),
    "topk_dsa": ("TopkDsaState", "topk_dsa_hook"),
    "block_topk": ("BlockTopkState", "block_topk_hook"),
    "gtopk": ("GTopkState", "gtopk_hook"),
    "gaussian_k": ("GaussianKState", "gaussian_k_hook"),
    "oktopk": ("OkTopkState", "oktopk_hook"),
    "quantized_topk": ("QuantizedTopkState", "quantized_topk_hook"),
    "auto": ("AutoState", "auto_hook"),
}
PREPARE = "prepare"  # sparsecomm.prepare: Ok-Topk with the optimizer's momentum
HOOKS = (*DENSE_HOOKS, *SPARSE_HOOKS, PREPARE)
# They send every entry, and so take none of the options of selection.
SEND_ALL = (*DENSE_HOOKS, "dense_overlap")

WHOLE_GRADIENT_MB = 1 << 20  # of DDP's bucket: more than any gradient has


class HookError(UserError):
    """The hook cannot be used here."""


@dataclass
class Totals:
    """What this rank has exchanged since training began, resumed runs included.

    Seconds are those of :meth:`sparsecomm.CompressionState.stats`; a dense allreduce of torch has
    no other than `exchange_seconds`, in which at least one bucket is under way, and
    `exposed_seconds`, those of them after the last bucket has come.
    """

    steps: float = 0
    sent_bytes: float = 0
    selected: float = 0  # entries of the gradient
    delivered: float = 0  # entries of the results
    agree_seconds: float = 0
    select_seconds: float = 0
    exchange_seconds: float = 0
    apply_seconds: float = 0
    exposed_seconds: float = 0


class Exchange(ABC):
    """A communication hook on a DDP model, with its measurements and its state."""

    # Where the number of sent bytes comes from, as the summary says it.
    bytes_source: str
    # Whether the hook clips gradients to the task's norm.
    clips: bool

    def __init__(self) -> None:
        self.totals = Totals()

    @abstractmethod
    def wrap(self, task: Task) -> DistributedDataParallel:
        """The task's model, with the hook."""

    def density_warmup(self, steps_per_epoch: int) -> list[float]:
        """The densities with which the first epochs begin, where these are greater."""
        return []

    @abstractmethod
    def after_step(self) -> None:
        """Adds the step whose backward pass has just ended to the totals."""

    def state_dict(self) -> dict[str, Any]:
        return {"totals": vars(self.totals).copy()}

    def load_state_dicts(self, states: Sequence[dict[str, Any]], step: int) -> None:
        """Goes on from this rank's own state, or from those of all ranks of another number.

        Args:
            states: what each has saved.
            step: that of the run from now on, which may have other steps than theirs.
        """
        totals = [state["totals"] for state in states]
        self.totals = Totals(**{k: sum(t[k] for t in totals) / len(totals) for k in totals[0]})


class DenseExchange(Exchange):
    """DDP's ordinary allreduce with a clock around it.

    Bytes follow from the ring allreduce: each rank sends 2 (P-1)/P of the 4 N bytes of the
    gradient.
    """

    bytes_source = "formula of the ring allreduce: 2 (P-1)/P * 4 N"
    clips = False

    def __init__(self, overlap: bool) -> None:
        super().__init__()
        self._overlap = overlap
        # From when to when each was under way.
        self._buckets: list[tuple[float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def wrap(self, task: Task) -> DistributedDataParallel:
        ddp = make_ddp(task, bucket_cap_mb=None if self._overlap else WHOLE_GRADIENT_MB)
        ranks = dist.get_world_size()
        self._zero = record_event() if next(ddp.parameters()).is_cuda else None
        self._group = ddp.process_group
        self._entries = count_parameters(ddp)
        self._step_bytes = 2 * (ranks - 1) / ranks * 4 * self._entries
        ddp.register_comm_hook(None, self._hook)
        settle_buckets(ddp, task)
        self._buckets.clear()
        return ddp

    # DDP inspects these annotations, so this module does without postponed ones.
    def _hook(
        self,
        _: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        start = self._now()
        if bucket.index() == 0 and not isinstance(start, float):
            self._zero = start  # times since then are 32-bit floats
        reduced = default_hooks.allreduce_hook(self._group, bucket)

        def complete(reduced: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            self._buckets.append((start, self._now()))
            return reduced.value()

        return reduced.then(complete)

    def _now(self) -> float | torch.cuda.Event:
        """On a device the work is only enqueued: an event tells when it is done."""
        return time.perf_counter() if self._zero is None else record_event()

    def _seconds(self, moment: float | torch.cuda.Event) -> float:
        if isinstance(moment, float):
            return moment
        assert self._zero is not None
        return float(self._zero.elapsed_time(moment)) / 1e3

    def after_step(self) -> None:
        self.totals.steps += 1
        self.totals.sent_bytes += self._step_bytes
        self.totals.selected += self._entries
        self.totals.delivered += self._entries
        buckets = sorted((self._seconds(start), self._seconds(end)) for start, end in self._buckets)
        self._buckets.clear()
        done = buckets[0][0]
        for start, end in buckets:
            self.totals.exchange_seconds += max(0.0, end - max(start, done))
            done = max(done, end)
        self.totals.exposed_seconds += done - buckets[-1][0]


class SparseExchange(Exchange):
    """A hook of sparsecomm, which counts what it sends."""

    bytes_source = "counted by the transport"
    state: "sparsecomm.CompressionState"

    def __init__(self, hook: str) -> None:
        super().__init__()
        try:
            import sparsecomm
        except ImportError as error:
            raise HookError(f"the hook {hook} needs sparsecomm: {error}") from error
        self._module = sparsecomm
        self._seen: dict[str, float] = {}

    @abstractmethod
    def _register(self, ddp: DistributedDataParallel, task: Task) -> None:
        """Has the state serve the model."""

    def wrap(self, task: Task) -> DistributedDataParallel:
        ddp = make_ddp(task)
        self._entries = count_parameters(ddp)
        self._register(ddp, task)
        self._seen = self._stats()
        return ddp

    def density_warmup(self, steps_per_epoch: int) -> list[float]:
        warmup = self.state.compression.warmup
        if warmup is None:
            return []
        begins = range(0, warmup.steps * len(warmup.densities), steps_per_epoch)
        return [warmup.densities[step // warmup.steps] for step in begins]

    def after_step(self) -> None:
        seen, self._seen = self._seen, self._stats()
        for name, value in self._seen.items():
            setattr(self.totals, name, getattr(self.totals, name) + value - seen[name])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "hook": self.state.state_dict()}

    def load_state_dicts(self, states: Sequence[dict[str, Any]], step: int) -> None:
        super().load_state_dicts(states, step)
        together = {key: entry for state in states for key, entry in state["hook"].items()}
        for entry in together.values():
            for group in entry["groups"]:
                group["step"] = step  # so that a density warm-up goes on in its epoch
        self.state.load_state_dict(together)
        self._seen = self._stats()

    def write_stats(self, writer: Any, step: int) -> None:
        """The figures of the last step, for TensorBoard."""
        self._module.write_stats(writer, self.state, step)

    def _stats(self) -> dict[str, float]:
        """The state's totals, by the names of :class:`Totals`."""
        stats = self.state.stats()
        seen = stats["steps"] * self._entries
        stats["selected"] = round(stats["realised_density"] * seen)
        stats["delivered"] = round(stats["result_density"] * seen)
        return {name: float(stats[name]) for name in vars(self.totals)}


class HookExchange(SparseExchange):
    """A state by its name."""

    def __init__(
        self,
        options: argparse.Namespace,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        compression: dict[str, Any],
    ) -> None:
        super().__init__(options.hook)
        self._in_python = options.python_hook
        state, self._hook = (getattr(self._module, name) for name in SPARSE_HOOKS[options.hook])
        self.clips = options.hook not in SEND_ALL
        try:
            self.state = state(
                timeout=timedelta(seconds=options.timeout),
                transport=options.transport,
                named_parameters=named_parameters,
                **compression,
            )
        except ValueError as error:
            raise HookError(f"--hook {options.hook}: {error}") from error

    def _register(self, ddp: DistributedDataParallel, task: Task) -> None:
        if self._in_python:
            ddp.register_comm_hook(self.state, self._hook)
        else:
            self._module.register_comm_hook(ddp, self.state)
        if not self.clips:  # an allreduce, as torch's
            settle_buckets(ddp, task)


class PreparedExchange(SparseExchange):
    """What ``sparsecomm.prepare`` makes of a model and its optimizer."""

    clips = True

    def __init__(
        self,
        options: argparse.Namespace,
        optimizer: Optimizer,
        total_steps: int,
        compression: dict[str, Any],
    ) -> None:
        super().__init__(options.hook)
        self._optimizer = optimizer
        self._arguments = {
            "total_steps": total_steps,
            "timeout": timedelta(seconds=options.timeout),
            "transport": options.transport,
            **compression,
        }

    def _register(self, ddp: DistributedDataParallel, task: Task) -> None:
        try:
            self.state = self._module.prepare(ddp, self._optimizer, **self._arguments)
        except (TypeError, ValueError) as error:
            raise HookError(f"--hook {PREPARE}: {error}") from error


def add_exchange_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = "; ".join(f"{name}: {text}" for name, text in DENSE_HOOKS.items())
    add(
        "--hook",
        choices=HOOKS,
        default="oktopk",
        help=f"how gradients are exchanged. {what}; the others are sparsecomm's, of which "
        f"dense_overlap sends every entry, and {PREPARE} is oktopk with the optimizer's momentum",
    )
    add = parser.add_argument_group(
        "what hooks send that select (the others ignore it)"
    ).add_argument
    add("--density", type=share, default=0.02, help="share of the gradient that is sent")
    add(
        "--density-warmup",
        type=shares,
        default=[],
        metavar="D1,D2,...",
        help="densities of the first epochs, such as 0.25,0.0625,0.04",
    )
    add("--warm-start", type=natural, default=0, metavar="STEPS", help="first send everything")
    add(
        "--momentum-correction",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="select from velocities, with the momentum in the hook instead of the optimizer",
    )
    add(
        "--first-moment",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="for Adam: select by the magnitude of the local first moment; worse than "
        "--momentum-correction",
    )
    add("--select", choices=("threshold", "exact", "bucket", "block"), default=None, help="by what")
    add("--bits", type=int, choices=(2, 4, 8), default=None, help="of a value that is sent")
    add(
        "--threshold",
        choices=("sampled", "reused", "exact", "gaussian"),
        default=None,
        help="where thresholds come from between exact ones",
    )
    add("--threshold-period", type=positive, default=None, metavar="STEPS", help="tau'")
    add("--partition-period", type=positive, default=None, metavar="STEPS", help="oktopk's tau")
    add = parser.add_argument_group("how sparsecomm's hooks run").add_argument
    add("--transport", default="auto", help="see sparsecomm info")
    add("--python-hook", action="store_true", help="use the hook's Python entry, not C++")


def make_exchange(options: argparse.Namespace, task: Task, optimizer: Optimizer) -> Exchange:
    """The exchange that the options ask for; with momentum correction the optimizer loses its own.

    Raises:
        HookError: options that do not go with the hook or the optimizer.
    """
    if options.hook in DENSE_HOOKS:
        if options.python_hook:
            raise HookError(f"--python-hook is for sparsecomm's hooks, not {options.hook}")
        return DenseExchange(overlap=options.hook == "ddp")
    named = task.model.named_parameters()
    if options.hook == PREPARE:
        for name in ("momentum_correction", "first_moment", "python_hook"):
            if getattr(options, name):
                raise HookError(
                    f"--{name.replace('_', '-')} does not go with --hook {PREPARE}, which moves "
                    "the momentum itself, and registers its hook in C++"
                )
        total_steps = options.epochs * task.steps_per_epoch
        chosen = compression(options, task, optimizer)
        return PreparedExchange(options, optimizer, total_steps, chosen)
    if options.hook in SEND_ALL:
        return HookExchange(options, named, {})
    return HookExchange(options, named, compression(options, task, optimizer))


def compression(options: argparse.Namespace, task: Task, optimizer: Optimizer) -> dict[str, Any]:
    """The options as keywords of a state of sparsecomm."""
    from sparsecomm import DensityWarmup, ThresholdSchedule

    chosen: dict[str, Any] = {
        "density": options.density,
        "dense_steps": options.warm_start,
        "clip_norm": task.clip_norm,
        "seed": options.seed,
    }
    if options.density_warmup:
        chosen["warmup"] = DensityWarmup(task.steps_per_epoch, tuple(options.density_warmup))
    if options.bits is not None:
        chosen["quantize"] = options.bits
    if options.select is not None:
        chosen["select"] = options.select
    schedule = {
        "between": options.threshold,
        "period": options.threshold_period,
        "partition_period": options.partition_period,
    }
    schedule = {name: value for name, value in schedule.items() if value is not None}
    if schedule:
        chosen["schedule"] = ThresholdSchedule(**schedule)
    if options.momentum_correction:
        chosen["momentum"] = take_momentum(optimizer)
    if options.first_moment:
        if "betas" not in optimizer.defaults:
            raise HookError(f"--first-moment is for Adam, not {type(optimizer).__name__}")
        chosen["first_moment"] = optimizer.defaults["betas"][0]
    return chosen


def take_momentum(optimizer: Optimizer) -> float:
    """Takes SGD's momentum, or Adam's first beta, from the optimizer, and returns it."""
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        beta1: float = optimizer.defaults["betas"][0]
        for group in optimizer.param_groups:
            group["betas"] = (0.0, group["betas"][1])
        return beta1
    momentum: float = optimizer.defaults.get("momentum", 0.0)
    if not isinstance(optimizer, torch.optim.SGD) or momentum == 0:
        raise HookError(
            "--momentum-correction is for Adam, or SGD with momentum, not "
            f"{type(optimizer).__name__}"
        )
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
        # Momentum multiplied the decay too, which is not exchanged.
        group["weight_decay"] /= 1 - momentum
    return momentum


def make_ddp(task: Task, bucket_cap_mb: int | None = None) -> DistributedDataParallel:
    device = next(task.model.parameters()).device
    return DistributedDataParallel(
        task.model,
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_cap_mb,
    )


def record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def settle_buckets(ddp: DistributedDataParallel, task: Task) -> None:
    """Makes DDP lay out its buckets for good, with a backward pass that leaves no other trace.

    DDP lays them out anew after the first backward pass, and from three ranks on a ring adds
    in an order that depends on the layout. A resumed run would so round its first step
    differently from a run never stopped, unless both get past that pass before they train.
    """
    if dist.get_world_size() < 3:
        return
    buffers = [(buffer, buffer.clone()) for buffer in ddp.buffers()]
    device = next(ddp.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.autograd.backward(task.loss(ddp, task.to_device(next(task.batches(0)))))
    ddp.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)

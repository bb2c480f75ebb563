"""The two ways the example exchanges gradients: all of them, or sparsely through sparsecomm.

Both measure themselves, so that the report compares like with like.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from vgg16.model import count_parameters

HOOKS = ("dense", "oktopk", "topk")


class HookError(ValueError):
    """The hook cannot be used here."""


@dataclass
class Totals:
    """What this rank has exchanged since training began, resumed runs included."""

    steps: int = 0
    sent_bytes: float = 0
    exchange_seconds: float = 0
    selected: float = 0  # entries of the gradient


class Exchange(ABC):
    """A communication hook on a DDP model, with its measurements and its state."""

    # Where the number of sent bytes comes from, as the summary says it.
    bytes_source: str

    def __init__(self) -> None:
        self.totals = Totals()

    @abstractmethod
    def attach(self, ddp: DistributedDataParallel, sample: Tensor) -> None:
        """Registers the hook; `sample` is a batch of the shape that training uses."""

    @abstractmethod
    def after_step(self) -> None:
        """Adds the step whose backward pass has just ended to the totals."""

    def set_density(self, density: float) -> None:  # noqa: B027 - dense has no density
        """Sends this share of the gradient from the next step on."""

    def state_dict(self) -> dict[str, Any]:
        return {"totals": vars(self.totals).copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.totals = Totals(**state["totals"])


class DenseExchange(Exchange):
    """DDP's ordinary allreduce of every bucket, with a clock around it.

    Exchange seconds are those in which at least one bucket is under way, from the call of the
    hook to the completion of its allreduce. Bytes follow from the ring allreduce: each rank
    sends 2 (P-1)/P of the 4 N bytes of the gradient.
    """

    bytes_source = "formula of the ring allreduce: 2 (P-1)/P * 4 N"

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._seconds = 0.0
        self._step_bytes = 0.0

    def attach(self, ddp: DistributedDataParallel, sample: Tensor) -> None:
        ranks = dist.get_world_size()
        self._group = ddp.process_group
        self._entries = count_parameters(ddp)
        self._step_bytes = 2 * (ranks - 1) / ranks * 4 * self._entries
        ddp.register_comm_hook(None, self._hook)
        if ranks > 2:
            settle_buckets(ddp, sample)
        self._seconds = 0.0

    # DDP inspects these annotations, so this module does without postponed ones.
    def _hook(
        self,
        _: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        with self._lock:
            if self._under_way == 0:
                self._since = time.perf_counter()
            self._under_way += 1
        reduced = default_hooks.allreduce_hook(self._group, bucket)
        return reduced.then(self._complete)

    def _complete(self, reduced: torch.futures.Future[Tensor]) -> Tensor:
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._seconds += time.perf_counter() - self._since
        return reduced.value()

    def after_step(self) -> None:
        self.totals.steps += 1
        self.totals.sent_bytes += self._step_bytes
        self.totals.exchange_seconds += self._seconds
        self.totals.selected += self._entries
        self._seconds = 0.0


class SparseExchange(Exchange):
    """A hook of sparsecomm: each rank sends its largest gradients and keeps the rest for later."""

    bytes_source = "counted by the transport"

    def __init__(self, hook: str, density: float, timeout: timedelta, in_python: bool) -> None:
        super().__init__()
        try:
            import sparsecomm
        except ImportError as error:
            raise HookError(f"the hook {hook} needs sparsecomm: {error}") from error
        self._module = sparsecomm
        self._in_python = in_python
        self._hook: Callable[[Any, Any], Any]
        self.state: sparsecomm.OkTopkState | sparsecomm.TopkState
        if hook == "oktopk":
            self.state = sparsecomm.OkTopkState(density=density, timeout=timeout)
            self._hook = sparsecomm.oktopk_hook
        else:
            self.state = sparsecomm.TopkState(density=density, timeout=timeout)
            self._hook = sparsecomm.topk_hook
        self._seen: dict[str, float] = {}

    def attach(self, ddp: DistributedDataParallel, sample: Tensor) -> None:
        self._entries = count_parameters(ddp)
        if self._in_python:
            ddp.register_comm_hook(self.state, self._hook)
        else:
            self._module.register_comm_hook(ddp, self.state)
        self._seen = self._stats()

    def set_density(self, density: float) -> None:
        self.state.density = density

    def after_step(self) -> None:
        seen, stats = self._seen, self._stats()
        self.totals.steps += 1
        self.totals.sent_bytes += stats["sent_bytes"] - seen["sent_bytes"]
        self.totals.exchange_seconds += stats["exchange_seconds"] - seen["exchange_seconds"]
        self.totals.selected += self._selected(stats) - self._selected(seen)
        self._seen = stats

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "hook": self.state.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.state.load_state_dict(state["hook"])
        self._seen = self._stats()

    def _selected(self, stats: dict[str, float]) -> int:
        return round(stats["realised_density"] * stats["steps"] * self._entries)

    def _stats(self) -> dict[str, float]:
        totals = self.state.stats()
        return {name: float(value) for name, value in totals.items() if name != "groups"}


def make_exchange(
    hook: str, density: float, timeout: timedelta, in_python: bool = False
) -> Exchange:
    """The hook of that name; the sparse ones wait for another rank no longer than `timeout`."""
    if hook == "dense":
        return DenseExchange()
    if hook in HOOKS:
        return SparseExchange(hook, density, timeout, in_python)
    raise HookError(f"unknown hook {hook!r}: expected one of {', '.join(HOOKS)}")


def settle_buckets(ddp: DistributedDataParallel, sample: Tensor) -> None:
    """Makes DDP lay out its buckets for good, with a backward pass that leaves no other trace.

    DDP lays them out anew after the first backward pass, and from three ranks on a ring adds
    in an order that depends on the layout. A resumed run would so round its first step
    differently from a run never stopped, unless both get past that pass before they train.
    """
    buffers = [(buffer, buffer.clone()) for buffer in ddp.buffers()]
    torch.autograd.backward(ddp(sample).sum())
    ddp.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)

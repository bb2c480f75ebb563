"""Gradients on their way: flat buffers that are exchanged while the backward pass goes on."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from sparsecomm import _C
from sparsecomm.optim.exchange import (
    OptimizerExchange,
    described_values,
    require_alone,
    require_own_type,
)
from sparsecomm.optim.owners import Owners
from sparsecomm.optim.travelling import TravellingGradient

# What each parameter's gradient is multiplied by, and the parameter itself, before they are added
# up.
Rates = Mapping[Tensor, tuple[float, float]]


@dataclass(eq=False)
class _Slot:
    name: str
    parameter: Tensor
    bucket: _Bucket
    flat: Tensor  # the part of the bucket's buffer
    arrived: bool = False
    frozen: bool = False  # as its gradient was taken

    def __post_init__(self) -> None:
        self.shape = self.parameter.shape
        self._address = self.flat.data_ptr()
        self.lay_out()

    def lay_out(self) -> None:
        """Makes a view as the parameter lies now, and a placeholder for its grad."""
        self.require_unconverted()
        self.strides = self.parameter.stride()
        # These strides unless they have gaps.
        self._view_strides = _C.gradient_strides(self.parameter)
        self.renew_view()
        # The parameter's grad during the exchange.
        self.travelling = TravellingGradient(self.name, self.parameter, self.bucket.optimizer)

    def renew_view(self) -> None:
        """Makes the view of the buffer: who converts a model points the grad it finds elsewhere."""
        self.view = self.flat.as_strided(self.shape, self._view_strides)

    def has_view(self) -> bool:
        return self.view.data_ptr() == self._address

    def is_laid_out(self) -> bool:
        return self.parameter.stride() == self.strides and self.has_view()

    def set_grad(self, grad: Tensor) -> None:
        """Makes it the parameter's grad; raises TypeError, by name, where torch refuses it."""
        try:
            self.parameter.grad = grad
        except RuntimeError:  # torch compares type, device and shape as it is
            self.require_unconverted()
            require_own_type(self.name, self.parameter)
            raise

    def require_unconverted(self) -> None:
        """Raises TypeError if the parameter is no longer of the type, device or shape it was of."""
        parameter, flat = self.parameter, self.flat
        now = parameter.dtype, parameter.device, parameter.shape
        if now != (flat.dtype, flat.device, self.shape):
            raise TypeError(
                f"{self.name} is {parameter.dtype} {list(parameter.shape)} on {parameter.device} "
                f"now, and was {flat.dtype} {list(self.shape)} on {flat.device} when the optimizer "
                "was made: make the optimizer anew for the converted model, or convert it back"
            )

    def give_up(self) -> None:
        """Leaves no placeholder in the parameter's ``grad``."""
        if self.parameter.grad is self.travelling:
            self.parameter.grad = None


@dataclass(eq=False)
class _Bucket:
    buffer: Tensor
    optimizer: str  # its class
    slots: list[_Slot] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)  # of the slots
    missing: int = 0
    version: int = -1  # of the buffer when its result had come, or had been used
    work: Work | None = None

    def was_added_to(self) -> bool:
        """Whether autograd has added one gradient to the result, and nothing else was done to it.

        Whoever has filled it with zeros before has changed it too.
        """
        return self.missing == len(self.slots) and self.buffer._version == self.version + 1


class GradientBuckets:
    """Takes gradients as autograd accumulates them, and exchanges buckets that are complete.

    The first time buckets go off in the same order on every rank, from then on each as soon as it
    is complete, in whatever order that is on other ranks.
    While a gradient is being exchanged the parameter's ``grad`` is a placeholder that raises when
    it is read or changed; afterwards it is a view of the buffer.

    Args:
        optimizer: the name of its class.
        state: what exchanges.
        capacity: bytes of a bucket, at most, but for parameters that are larger.
        compare_every: steps after which the ranks compare their parameters; 0: never.
        rates: makes the table of a step; of a parameter that is not in it nothing is sent.
        announce: is called before each exchange of all buckets; returns whether ranks that have no
            data take part in it, within torch's ``Join``.
    """

    def __init__(
        self,
        optimizer: str,
        state: OptimizerExchange,
        capacity: float,
        compare_every: int,
        rates: Callable[[], Rates] | None = None,
        announce: Callable[[], bool] = lambda: False,
    ) -> None:
        self._optimizer = optimizer
        self._state = state
        self._capacity = capacity
        self._compare_every = compare_every
        self._make_rates = rates
        self._announce = announce
        self._begun = False  # the exchange of all buckets
        self._is_joint = False  # with ranks that have no data
        self._rates: Rates = {}
        compression = state.compression
        self._has_moment = compression.momentum > 0 or compression.first_moment > 0
        self._buckets: list[_Bucket] = []
        self._slots: dict[Tensor, _Slot] = {}
        self._owners = Owners()
        self._frozen: list[tuple[str, Tensor]] = []
        self._launched = 0
        self._known = 0  # buckets that all ranks have exchanged before
        self._pausing = False
        self._shadowing = False  # this rank makes no step, and the others make one
        self._has_warned = False
        self._delivered = False  # what was exchanged waits to become the grads
        self._synchronized = False  # it is
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles, self._buckets)

    def add(self, named: list[tuple[str, Tensor]]) -> None:
        """Makes buckets of more parameters, whose gradients come in about the opposite order."""
        hook = _hook(weakref.ref(self))
        self._frozen += [pair for pair in named if not pair[1].requires_grad]
        trained = [pair for pair in named if pair[1].requires_grad]
        self._owners.add(parameter for _, parameter in trained)
        for members in self._split(trained):
            first = members[0][1]
            numel = sum(parameter.numel() for _, parameter in members)
            buffer = torch.zeros(numel, dtype=first.dtype, device=first.device)
            bucket = _Bucket(buffer, self._optimizer)
            bucket.missing = len(members)
            self._buckets.append(bucket)
            offset = 0
            for name, parameter in members:
                flat = bucket.buffer.narrow(0, offset, parameter.numel())
                slot = _Slot(name, parameter, bucket, flat)
                offset += parameter.numel()
                bucket.slots.append(slot)
                bucket.parameters.append(parameter)
                self._slots[parameter] = slot
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def _split(self, named: list[tuple[str, Tensor]]) -> list[list[tuple[str, Tensor]]]:
        compression = self._state.compression
        whole = compression.dense_below if compression.selects else 0
        full: list[list[tuple[str, Tensor]]] = []
        filling: dict[tuple[bool, torch.dtype, int | None], list[tuple[str, Tensor]]] = {}
        for name, parameter in reversed(named):
            # Those that are sent whole, which are small, share a bucket.
            number = self._state._group_numbers.get(parameter)
            key = (number is None and parameter.dim() < whole, parameter.dtype, number)
            members = filling.setdefault(key, [])
            size = sum(p.nbytes for _, p in members) + parameter.nbytes
            if number is None and members and size > self._capacity:
                full.append(members)
                members = filling[key] = []
            members.append((name, parameter))
        return full + [filling[key] for key in sorted(filling, key=str)]

    def arrive(self, parameter: Tensor) -> None:
        """The hook: the gradient of this backward pass is there."""
        slot = self._slots[parameter]
        require_alone(slot.name, parameter)  # of a DDP that was made after the optimizer
        # Without a moment, sending a result again gives the same result.
        if self._has_moment and slot.bucket.was_added_to() and parameter.grad is slot.view:
            raise RuntimeError(
                f"a backward pass has added to the grad of {slot.name}, which held what was "
                "exchanged before, and with momentum beside the density that would count again: "
                "call zero_grad() before backward(); to accumulate over several passes, run all "
                "but the last of a step within no_sync()"
            )
        if self._pausing:
            return
        if slot.arrived:
            raise RuntimeError(
                f"the gradient of {slot.name} came a second time before step(): a backward pass "
                "exchanges what it computes; run all but the last one of a step within no_sync(), "
                "and call the optimizer's zero_grad() after one that was broken off"
            )
        self._delivered = self._synchronized = False
        self._begin()
        self._take(slot)
        if slot.bucket.missing == 0:
            self._launch(slot.bucket)

    def _take(self, slot: _Slot) -> None:
        parameter, gradient = slot.parameter, slot.parameter.grad
        slot.frozen = not parameter.requires_grad
        if slot.frozen:
            gradient = None
        if gradient is not None:
            if isinstance(gradient, TravellingGradient):
                raise RuntimeError(
                    f"two optimizers, {gradient.optimizer} and {self._optimizer}, exchange the "
                    f"gradient of {slot.name}: give each parameter to one of them, and drop an "
                    "optimizer that is no longer used"
                )
            if gradient.dtype != parameter.dtype:
                slot.require_unconverted()
                require_own_type(slot.name, parameter, gradient)
            if gradient.layout != torch.strided:
                raise TypeError(
                    f"{slot.name} has a sparse gradient; only dense ones are compressed: use "
                    "torch.nn.Embedding(sparse=False)"
                )
            if gradient.requires_grad:  # of create_graph=True
                gradient = gradient.detach()
        if not slot.is_laid_out():
            # It may be the slot's former view, of the same memory.
            gradient = None if gradient is None else gradient.clone()
            slot.lay_out()
        slot.set_grad(slot.travelling)
        view = slot.view
        factor, share = 1.0, 0.0
        if self._make_rates is not None:
            if not self._has_arrivals():
                self._rates = self._make_rates()
            factor, share = self._rates.get(parameter, (0.0, 0.0))
        if gradient is None:
            view.zero_()
        elif factor != 1:
            torch.mul(gradient, factor, out=view)
        elif gradient is not view:
            view.copy_(gradient)
        if share != 0 and not slot.frozen and not self._shadowing:
            view.add_(parameter.detach(), alpha=share)
        slot.arrived = True
        slot.bucket.missing -= 1

    def _launch(self, complete: _Bucket) -> None:
        if self._known == len(self._buckets):
            self._exchange(complete)
            return
        # Those that are new get their place among the groups of all ranks.
        for bucket in self._buckets:
            if bucket.missing > 0:
                return
            if bucket.work is None:
                self._exchange(bucket)

    def _exchange(self, bucket: _Bucket) -> None:
        bucket.work = self._state.exchange(
            self._launched,
            self._launched == len(self._buckets) - 1,
            bucket.buffer,
            bucket.parameters,
            [slot.view for slot in bucket.slots],
            # What is kept of them waits, as with the hooks.
            [slot.frozen for slot in bucket.slots],
        )
        self._launched += 1

    def synchronize(self) -> None:
        """Waits until every ``grad`` is what was exchanged; what has not come counts as zero.

        Afterwards gradients may be changed, but not through ``.data`` or numpy, which torch's
        version counter does not see.

        Does nothing where that is so already.
        """
        if self._synchronized:
            return
        if self._pausing:
            raise RuntimeError("gradients are not exchanged within no_sync(); leave it before")
        if not self._delivered:
            self._complete()
            self._delivered = True
            if not self._state.unfinished and self._state.compression.selects:
                # Some rank has seen a NaN or Inf, and the residuals have taken back the rest.
                for bucket in self._buckets:
                    bucket.buffer.fill_(torch.nan)
            self._count_step()
        for slot in self._slots.values():
            if not slot.has_view():
                slot.renew_view()
            if slot.frozen:
                slot.parameter.grad = None
            else:
                slot.set_grad(slot.view)
        for bucket in self._buckets:
            bucket.version = bucket.buffer._version
        self._delivered, self._synchronized = False, True

    def _begin(self) -> None:
        if not self._begun:
            self._is_joint = self._announce()
            self._begun = True

    def shadow(self) -> None:
        """Takes part in a step of the other ranks with zeros, whose result is dropped."""
        self.discard()
        self._drop()
        self._shadowing = self._begun = True
        try:
            self._complete()
            self._count_step()
        finally:
            self._shadowing = False
            self.finished()
            self._drop()

    def _drop(self) -> None:
        for slot in self._slots.values():
            slot.parameter.grad = None

    def _count_step(self) -> None:
        self._state.steps += 1
        asked = self._state._native.take_requested()
        if self._compare_every and (asked or self._state.steps % self._compare_every == 0):
            self.compare_parameters()

    def _complete(self) -> None:
        """Exchanges what has not been exchanged, and waits for all of it."""
        for name, parameter in self._frozen:
            if parameter.requires_grad and parameter.grad is not None:
                raise RuntimeError(
                    f"{name} required no gradient when the optimizer was made, and has one now: "
                    "make the optimizer anew, or leave the parameter out and use "
                    "add_param_group() when it is to be trained"
                )
        self._begin()
        for slot in self._slots.values():
            if not slot.arrived:
                self._require_in_model(slot)
                self._take(slot)
            elif slot.parameter.grad is not slot.travelling:
                raise RuntimeError(
                    f"the grad of {slot.name} was replaced or taken away after backward(), while "
                    "it was being exchanged: call the optimizer's synchronize() before changing "
                    "gradients, and its zero_grad(), not the model's, to drop them"
                )
        for bucket in self._buckets:
            if bucket.work is None:
                self._launch(bucket)
        self._wait()
        self._known = len(self._buckets)

    def _require_in_model(self, slot: _Slot) -> None:
        if self._owners.successor(slot.parameter) is not None:
            raise RuntimeError(
                f"{slot.name} was replaced in the model by another parameter, which this optimizer "
                "does not have: load_state_dict(assign=True) does so, moves to meta devices, and "
                "conversions under torch.__future__.set_overwrite_module_params_on_conversion(); "
                "make the optimizer anew afterwards"
            )

    def compare_parameters(self) -> None:
        """Raises the same error on every rank unless all have the same values."""
        named = [(slot.name, slot.parameter) for slot in self._slots.values()]
        self._state.compares = False
        self._state.compare(None if self._shadowing else described_values(named))

    def only_zeros_were_given(self) -> bool:
        """Whether every ``grad`` is zeros that no backward pass has brought."""
        if self._delivered or self._synchronized or self._has_arrivals():
            return False
        gradients = [slot.parameter.grad for slot in self._slots.values()]
        return all(g is not None and not g.any() for g in gradients)

    def _wait(self) -> None:
        """Ends the exchange of all buckets, or of none if a signal handler raises meanwhile."""
        error: Exception | None = None
        for bucket in self._buckets:
            try:
                if bucket.work is not None:
                    bucket.work.wait()
            except Exception as failure:
                if not _has_failed(bucket.work):
                    raise
                error = error or failure
        self._reset()
        self._state.waited(error is not None)
        if error is not None:
            raise error

    def _reset(self) -> None:
        for bucket in self._buckets:
            bucket.work = None
            bucket.missing = len(bucket.slots)
            for slot in bucket.slots:
                slot.arrived = False
                slot.give_up()
        self._launched = 0
        self._begun = self._is_joint = False

    def discard(self) -> None:
        """The gradients are not wanted: what is on its way is waited for, and dropped."""
        if self._state.unfinished:
            self._warn_of_residuals()
        self._delivered = self._synchronized = False
        together = self._state.compression.clip_norm is not None
        if self._is_joint:
            self._complete()  # ranks without data take part in all of it
            self._count_step()
        elif together and self._launched < len(self._buckets):
            self._reset()  # what is clipped together waits for the last one: nothing is on its way
        elif self._has_arrivals():
            self._state._native.release_waiting()  # of groups that lack gradients
            self._wait()
        self._state.unfinished = False

    def _warn_of_residuals(self) -> None:
        keeps = self._has_moment or self._state.density < 1
        if self._has_warned or not keeps or self._state._place()[0] != 0:
            return
        self._has_warned = True
        logging.getLogger("sparsecomm").warning(
            "zero_grad() drops gradients that were exchanged and that no step() has used; what was "
            "not sent of them is in the residuals, and comes in later steps: run a backward pass "
            "whose gradients are not wanted within no_sync(), or with requires_grad_(False)"
        )

    def _has_arrivals(self) -> bool:
        return any(bucket.missing < len(bucket.slots) for bucket in self._buckets)

    def finished(self) -> None:
        """A step has used the gradients."""
        self._synchronized = self._state.unfinished = False
        for bucket in self._buckets:
            bucket.version = bucket.buffer._version

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Lets gradients accumulate without being exchanged."""
        before, self._pausing = self._pausing, True
        try:
            yield
        finally:
            self._pausing = before

    def add_received(self, parameters: list[Tensor], factor: float) -> list[tuple[Tensor, Tensor]]:
        """Adds ``factor`` times its gradient to each parameter, where entries have come.

        Gradients that somebody has changed since are added everywhere. Returns the parameters, and
        their gradients, whose ``grad`` is what was exchanged: to all others nothing is added.
        """
        received, views = [], []
        for parameter in parameters:
            slot = self._slots.get(parameter)
            if slot is not None and parameter.grad is slot.view and slot.has_view():
                received.append(parameter)
                views.append(slot.view)
        changed = any(bucket.buffer._version != bucket.version for bucket in self._buckets)
        self._state._native.add_received(received, views, factor, changed)
        return list(zip(received, views, strict=True))


def _has_failed(work: Work | None) -> bool:
    """Whether the exchange itself failed, and not only the wait for it."""
    if work is None or not work.get_future().done():
        return False
    try:
        work.get_future().value()
    except Exception:
        return True
    return False


def _hook(reference: weakref.ref[GradientBuckets]) -> Callable[[Tensor], None]:
    def accumulated(parameter: Tensor) -> None:
        buckets = reference()
        if buckets is not None:
            buckets.arrive(parameter)

    return accumulated


def _remove(handles: list[torch.utils.hooks.RemovableHandle], buckets: list[_Bucket]) -> None:
    for handle in handles:
        handle.remove()
    for bucket in buckets:
        for slot in bucket.slots:
            slot.give_up()

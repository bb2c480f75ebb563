"""Keeps an optimizer of torch and a state that has its momentum in step with each other."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo  # torch.compiler.disable() imports Dynamo at once
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from sparsecomm.hooks import CompressionState

Group = dict[str, Any]
Terms = tuple[float, float, bool]  # of _C.HookState.set_momenta


class Split(Protocol):
    """How the momentum of one kind of optimizer is taken out of it.

    The state has ``u = momentum * u + gain * gradient`` and delivers ``u``, or with Nesterov
    ``gain * gradient + momentum * u``, for which the optimizer takes its step without momentum.
    """

    buffer: str  # where the optimizer would keep u

    def check(self, group: Group, place: str) -> None:
        """Raises TypeError or ValueError if the momentum of this group cannot be taken out."""

    def terms(self, group: Group) -> Terms:
        """Momentum, gain and whether it is Nesterov's."""

    def within_step(self, group: Group) -> Group:
        """What the group's entries are replaced by while the optimizer makes its step."""

    def left(self, momentum: float, age: int) -> float:
        """How much of the sum of weights is still to come at the step ``age``, from 1."""

    def decay(self, group: Group, age: int) -> float:
        """How much of the parameter its weight decay has put into the optimizer's own buffer."""


class SgdSplit:
    """SGD: ``u`` is its buffer.

    Its weight decay goes into the buffer as well, where it comes to 1 / (1 - momentum) as much:
    within the step the decay is as large as that.
    """

    buffer = "momentum_buffer"

    def check(self, group: Group, place: str) -> None:
        _check_momentum(group["momentum"], f"momentum={group['momentum']!r}{place}")
        if group["momentum"] and group["dampening"]:
            raise ValueError(
                f"dampening={group['dampening']:g}{place} cannot be taken over: set dampening=0, "
                f"and multiply the learning rate by {1 - group['dampening']:g} instead"
            )

    def terms(self, group: Group) -> Terms:
        return float(group["momentum"]), 1.0, bool(group["nesterov"])

    def within_step(self, group: Group) -> Group:
        momentum = group["momentum"]
        if not momentum:
            return {}
        decay = group["weight_decay"] / (1 - momentum)
        return {"momentum": 0, "nesterov": False, "weight_decay": decay}

    def left(self, momentum: float, age: int) -> float:
        return 0.0  # no bias is corrected

    def decay(self, group: Group, age: int) -> float:
        return float(group["weight_decay"] / (1 - group["momentum"]))


class AdamSplit:
    """Adam and AdamW: ``u`` is the first moment, as it is before its bias is corrected."""

    buffer = "exp_avg"
    nesterov = False

    def check(self, group: Group, place: str) -> None:
        beta1 = group["betas"][0]
        _check_momentum(beta1, f"betas[0]={beta1!r}{place}")
        for name in ("capturable", "differentiable"):
            if group[name]:
                raise ValueError(
                    f"{name}=True{place} fixes what a step computes, and the momentum is taken out "
                    f"of it anew at every step: set {name}=False"
                )

    def terms(self, group: Group) -> Terms:
        beta1 = float(group["betas"][0])
        return beta1, 1 - beta1, self.nesterov and beta1 > 0

    def within_step(self, group: Group) -> Group:
        return {"betas": (0.0, group["betas"][1])}

    def left(self, momentum: float, age: int) -> float:
        return float(momentum**age)

    def decay(self, group: Group, age: int) -> float:
        if group.get("decoupled_weight_decay", False):
            return 0.0
        return float(group["weight_decay"]) * (1 - float(group["betas"][0]) ** age)


class NAdamSplit(AdamSplit):
    """NAdam, with its first beta for momentum from the first step on: ``momentum_decay`` is not
    there.
    """

    nesterov = True

    def left(self, momentum: float, age: int) -> float:
        return float(momentum ** (age + 1))


SPLITS: dict[type[Optimizer], Split] = {
    SGD: SgdSplit(),
    Adam: AdamSplit(),
    AdamW: AdamSplit(),
    NAdam: NAdamSplit(),
}


class Joint:
    """What :func:`sparsecomm.prepare` leaves on an optimizer, and in the state.

    The optimizer's groups show its user's momentum but for the duration of a step. The optimizer
    keeps this, and this keeps the state, which does not keep this; nothing here keeps the model or
    the optimizer. Once the model is gone the optimizer makes steps of its own.
    """

    def __init__(
        self,
        state: CompressionState,
        ddp: torch.nn.Module,
        optimizer: Optimizer,
        names: Mapping[torch.Tensor, str],
        splits: bool,
    ) -> None:
        self._kind = type(optimizer).__name__
        self._state = state
        self._ddp = weakref.ref(ddp)
        self._optimizer = weakref.ref(optimizer)
        self._names = dict(names)  # of the parameters that are exchanged
        # What the state takes for them, of the same shape, or larger where shards are padded.
        self._known_as = {p: state._stand_ins.get(name, p) for p, name in names.items()}
        self._splits = splits
        self._agreed: list[tuple[Terms, int]] = []
        self._replaced: list[tuple[Group, Group, Group]] = []  # group, the user's, the step's
        # Parameters whose bias is still corrected, by group, those of one age together.
        self._young: list[tuple[int, list[torch.Tensor]]] | None = None
        self._largest = 0.0  # momentum so far
        self._loaded_at: int | None = None  # steps of the state when that was loaded
        self._split: Split = SPLITS.get(type(optimizer), SgdSplit())
        self._handles: list[RemovableHandle] = []
        # What the state had exchanged at the last step of the optimizer, and at the one under way.
        self._used: object = None
        self._in_use: object = None
        self._has_warned = False

    def __repr__(self) -> str:
        if not self._splits:
            return f"of {self._kind}, which keeps its momentum since everything is sent"
        momenta = [f"{of[0]:g}" for of, _ in self._agreed]
        if not any(of[0] for of, _ in self._agreed):
            return f"of {self._kind}, which has no momentum to move"
        if len(set(momenta)) == 1:
            return f"with the momentum of {self._kind}, {momenta[0]}"
        return f"with the momenta of {self._kind}'s {len(momenta)} groups, {', '.join(momenta)}"

    def serves(self, ddp: torch.nn.Module) -> bool:
        """Whether it is of this very model."""
        return self._ddp() is ddp

    def move_to(self, ddp: torch.nn.Module) -> None:
        """Goes on with the model of a state that was connected again."""
        self._ddp = weakref.ref(ddp)

    def begin(self, former: Joint | None, kept: Mapping[str, Any] | None) -> None:
        """Sets the momenta, and what is kept: the entry of a former state, or the buffers.

        Then it joins the optimizer, which is as it was if anything raises before.
        """
        optimizer, state = self._optimizer(), self._state
        assert optimizer is not None
        if self._splits:
            self._agree(optimizer)
            if former is None or kept is None:
                self._take_over(optimizer, only_buffers=True)
            else:
                [(key, empty)] = state.state_dict().items()
                state._load({key: self._entry_of(former, kept, empty)})
            self._used = self._exchanged()
        step_ends = optimizer.register_step_post_hook(self._after_step)
        # Before those of the user, which then find the groups and the momentum as they show.
        after_steps: Any = optimizer._optimizer_step_post_hooks
        after_steps.move_to_end(step_ends.id, last=False)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            step_ends,
            optimizer.register_state_dict_pre_hook(self._before_saving, prepend=True),
            optimizer.register_state_dict_post_hook(self._after_saving, prepend=True),
            optimizer.register_load_state_dict_post_hook(self._after_loading, prepend=True),
        ]

    def _entry_of(
        self, former: Joint, kept: Mapping[str, Any], empty: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What a former state kept, by the names that the same parameters have now."""
        names = {name: self._names.get(p, name) for p, name in former._names.items()}
        tensors = {
            what: {names.get(name, name): tensor for name, tensor in kept[what].items()}
            for what in ("residuals", "moments")
        }
        for p, name in self._names.items():
            for what, theirs in tensors.items():
                if name in empty[what] and name not in theirs:
                    theirs[name] = _zeros_like(self._known_as[p]).view(-1)
        entry = {**kept, "density": self._state.density, "algorithm": self._state._saved_algorithm}
        for what, theirs in tensors.items():
            entry[what] = {name: theirs[name] for name in empty[what] if name in theirs}
        groups = []
        if kept["algorithm"] == self._state._saved_algorithm:
            for group in kept["groups"]:
                members = [names.get(name, name) for name in group["parameters"]]
                if not entry["residuals"].keys() >= {*members}:
                    members = []  # which some have left: of such only the step goes on
                groups.append({**group, "parameters": members})
        entry["groups"] = tuple(groups)
        return entry

    def kept(self) -> Mapping[str, Any] | None:
        """What the state keeps, if it splits."""
        self._restore()
        if not self._splits:
            return None
        entry: Mapping[str, Any]
        [entry] = self._state.state_dict().values()
        return entry

    def retire(self, gives_back: bool) -> None:
        """Leaves the optimizer, on every rank.

        ``gives_back``: the optimizer gets the velocities, averaged over the ranks.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        if self._splits and gives_back:
            saved = optimizer.state_dict()
            self._splits = False
            optimizer.load_state_dict(saved)
            self._average(optimizer)
        for handle in self._handles:
            handle.remove()

    def _average(self, optimizer: Optimizer) -> None:
        group = self._state._process_group
        for parameter in self._names:
            buffer = optimizer.state.get(parameter, {}).get(self._split.buffer)
            if buffer is not None:
                local = _local(buffer)
                dist.all_reduce(local, group=group)
                local /= dist.get_world_size(group)

    @_disable_dynamo
    def before_forward(self) -> None:
        """Tells the state of momenta that a scheduler, say, has changed since the last step."""
        optimizer = self._optimizer()
        if optimizer is not None and self._splits and torch.is_grad_enabled():
            self._agree(optimizer)

    def state_was_loaded(self) -> None:
        """Notes that the state's velocities are exact ones, before which an optimizer's yield."""
        self._loaded_at = self._state.stats()["steps"]

    def _take_over(self, optimizer: Optimizer, only_buffers: bool) -> None:
        """Makes velocities of the buffers that the optimizer has.

        ``only_buffers``: of nothing else; or the velocity is zero where there is no buffer.
        """
        moments = []
        for group in optimizer.param_groups:
            sign = -1.0 if group.get("maximize") else 1.0
            for parameter in group["params"]:
                kept = optimizer.state.get(parameter, {})
                buffer = kept.get(self._split.buffer)
                if parameter not in self._names or not self._split.terms(group)[0]:
                    continue
                if buffer is None and only_buffers:
                    continue
                velocity = _zeros_like(self._known_as[parameter])
                if buffer is not None:
                    local = _local(buffer)
                    decay = self._split.decay(group, _age_of(kept))
                    if decay:
                        local = local - decay * _local(parameter.detach())
                    _part(velocity, local).copy_(local).mul_(sign)
                moments.append((self._known_as[parameter], velocity))
        if moments:
            self._state._native.set_moments(moments)
        self._drop_buffers(optimizer)

    def _drop_buffers(self, optimizer: Optimizer) -> None:
        """Takes those of SGD out of it, which a step without momentum would leave as they are."""
        if self._split.buffer == SgdSplit.buffer:
            for parameter in self._names:
                if parameter in optimizer.state:
                    optimizer.state[parameter].pop(self._split.buffer, None)

    def _agree(self, optimizer: Optimizer) -> None:
        self._restore()
        groups = optimizer.param_groups
        now = [(self._split.terms(group), len(group["params"])) for group in groups]
        if now == self._agreed:
            return
        check_groups(optimizer)
        terms = {p: of for group, (of, _) in zip(groups, now, strict=True) for p in group["params"]}
        for parameter in terms:
            if parameter not in self._names and parameter.requires_grad:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} that {type(optimizer).__name__}"
                    " was given after sparsecomm.prepare is not exchanged by the state: give it to "
                    "an optimizer of its own, or make DistributedDataParallel anew and prepare that"
                )
        # What the optimizer may be given later begins with the first group's.
        entries = [(known, *terms.get(p, now[0][0])) for p, known in self._known_as.items()]
        try:
            self._state._native.set_momenta(entries)
        except ValueError as error:
            self._state._native.checkpoint()  # which raises what is wrong amid a backward pass
            had, have = (
                ", ".join(f"{of[0]:g}" for of, _ in terms) for terms in (self._agreed, now)
            )
            raise ValueError(
                f"{self._kind}'s groups, which had momenta of {had or 'none'}, now have {have}: "
                f"{error}. Give the groups different momenta when sparsecomm.prepare is called, or "
                "make DistributedDataParallel anew and prepare that"
            ) from error
        sizes = [size for _, size in self._agreed]
        largest = max(of[0] for of, _ in now)
        if sizes != [size for _, size in now] or largest > self._largest:
            self._largest = max(largest, self._largest)
            self._young = None
        self._agreed = now

    def _restore(self) -> None:
        for group, own, replaced in self._replaced:
            for key, value in own.items():
                if group[key] is replaced[key]:  # else it has been set meanwhile
                    group[key] = value
        self._replaced.clear()

    @_disable_dynamo
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._in_use = None
        if not self._splits or self._ddp() is None:
            self._restore()
            return None
        self._agree(optimizer)
        # A closure makes the gradients, which have to be there before their bias is corrected.
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        changed = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            changed = args[:1], {**kwargs, "closure": lambda: loss}
        self._in_use = self._exchanged()
        if self._in_use is not None and self._in_use == self._used and _moves(optimizer):
            self._warn_of_own_momentum()
            return changed
        self._correct_bias(optimizer)
        for group in optimizer.param_groups:
            replaced = self._split.within_step(group)
            self._replaced.append((group, {key: group[key] for key in replaced}, replaced))
            group.update(replaced)
        return changed

    @_disable_dynamo
    def _after_step(self, *_: Any) -> None:
        self._restore()
        if self._in_use is not None:
            self._used = self._in_use

    def _exchanged(self) -> object:
        """What is another once the state has exchanged something; None if that cannot be said."""
        try:
            stats = self._state._native.stats()
        except ValueError:
            return None
        # Of groups that are formed anew the steps begin anew.
        return stats["steps"], [(group["name"], group["step"]) for group in stats["groups"]]

    def _warn_of_own_momentum(self) -> None:
        if self._has_warned or self._state._native.rank or not self._largest:
            return
        self._has_warned = True
        logging.getLogger("sparsecomm").warning(
            f"a step of {self._kind} without an exchange since the one before: its gradients have "
            f"not passed through {type(self._state).__name__}, so it is made with {self._kind}'s "
            "own momentum, which starts from its buffer and not from the state's velocity. Run the "
            "pass by the model that sparsecomm.prepare was given, and the last one before a step "
            "outside no_sync() (docs/training.md, Momentum)"
        )

    def _correct_bias(self, optimizer: Optimizer) -> None:
        if self._young is None:
            self._young = self._find_young(optimizer)
        young = []
        for index, parameters in self._young:
            present = [p for p in parameters if p.grad is not None]
            if len(present) < len(parameters):
                young.append((index, [p for p in parameters if p.grad is None]))
            if not present:
                continue
            age = _age_of(optimizer.state.get(present[0], {})) + 1
            momentum = self._split.terms(optimizer.param_groups[index])[0]
            left = self._split.left(momentum, age)
            if left:
                gradients = [p.grad for p in present if p.grad is not None]
                torch._foreach_mul_(gradients, 1 / (1 - left))
            if not self._is_old(present[0], age):
                young.append((index, present))
        self._young = young

    def _find_young(self, optimizer: Optimizer) -> list[tuple[int, list[torch.Tensor]]]:
        alike: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                age = _age_of(optimizer.state.get(parameter, {}))
                if not self._is_old(parameter, age):
                    alike.setdefault((index, age, parameter.dtype), []).append(parameter)
        return [(index, parameters) for (index, *_), parameters in alike.items()]

    def _is_old(self, parameter: torch.Tensor, age: int) -> bool:
        return self._split.left(self._largest, age) < torch.finfo(parameter.dtype).eps / 2

    def _before_saving(self, _optimizer: Optimizer) -> None:
        self._restore()

    def _after_saving(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if not self._splits:
            return
        saved = self._state._native.checkpoint()
        for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            sign = -1.0 if group.get("maximize") else 1.0
            for parameter, key in zip(group["params"], packed["params"], strict=True):
                velocity = saved["moments"].get(self._names.get(parameter))
                kept = state_dict["state"].get(key, {})
                if velocity is None or (not kept and self._split.buffer != SgdSplit.buffer):
                    continue
                age = _age_of(kept)
                local = _local(parameter.detach())
                known = self._known_as[parameter]
                velocity = velocity.to(local.device).view(known.shape)
                buffer = _part(velocity, local) * (sign / saved["loss_scale"])
                decay = self._split.decay(group, age)
                if decay:
                    buffer += decay * local
                buffer = _like(parameter, buffer.to(parameter.dtype))
                changed = {**kept, self._split.buffer: buffer}
                if "mu_product" in kept:
                    product = _nadam_product(group["betas"][0], group["momentum_decay"], age)
                    changed["mu_product"] = torch.full_like(kept["mu_product"], product)
                state_dict["state"][key] = changed

    def _after_loading(self, optimizer: Optimizer) -> None:
        self._replaced.clear()
        self._young = None
        if not self._splits or self._ddp() is None:
            return
        self._agree(optimizer)
        if self._loaded_at is None or self._state.stats()["steps"] > self._loaded_at:
            self._take_over(optimizer, only_buffers=False)
        else:
            self._drop_buffers(optimizer)


def joint_of(optimizer: Optimizer) -> Joint | None:
    """The one that an earlier call of :func:`sparsecomm.prepare` has left."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Joint):
            return owner
    return None


def check_groups(optimizer: Optimizer) -> None:
    """Raises TypeError or ValueError if the momentum of a group cannot be taken out."""
    groups = optimizer.param_groups
    for index, group in enumerate(groups):
        place = f" in group {index}" if len(groups) > 1 else ""
        SPLITS[type(optimizer)].check(group, f"{place} of {type(optimizer).__name__}")


def _check_momentum(momentum: Any, text: str) -> None:
    if isinstance(momentum, torch.Tensor):
        raise TypeError(f"{text} is a tensor; give it as a number")
    if not 0 <= momentum < 1:
        raise ValueError(f"{text} is not in [0, 1); 0.9 is usual, 0 is none")


def _age_of(kept: Mapping[str, Any]) -> int:
    return int(kept["step"]) if "step" in kept else 0


def _moves(optimizer: Optimizer) -> bool:
    """Whether a step changes parameters, or only makes the state, as torch's checkpoints have it.

    At a learning rate of 0, that is, or without gradients.
    """
    return any(
        p.grad is not None
        for group in optimizer.param_groups
        if group["lr"]
        for p in group["params"]
    )


def _zeros_like(known: torch.Tensor) -> torch.Tensor:
    """A velocity, as the state keeps it."""
    kept = torch.float64 if known.dtype == torch.float64 else torch.float32
    return torch.zeros(known.shape, dtype=kept, device=known.device)


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _part(padded: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """What of a padded tensor is no padding."""
    return padded[tuple(slice(size) for size in local.shape)]


def _like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """This rank's part of what is of the parameter's kind and shape."""
    if not hasattr(parameter, "to_local"):
        return local
    shape, stride = parameter.shape, parameter.stride()
    whole: torch.Tensor = type(parameter.detach()).from_local(
        local, parameter.device_mesh, parameter.placements, shape=shape, stride=stride
    )
    return whole


@functools.lru_cache
def _nadam_product(beta1: float, decay: float, age: int) -> float:
    """The product of NAdam's momenta, as its ``mu_product``."""
    product = 1.0
    for step in range(1, age + 1):
        product *= beta1 * (1 - 0.5 * 0.96 ** (step * decay))
        if product < 1e-30:
            return 0.0
    return product

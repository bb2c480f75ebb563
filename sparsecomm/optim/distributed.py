"""An optimizer that exchanges gradients with the other ranks before it uses them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from typing_extensions import Self, Unpack

from sparsecomm.compression import Compression
from sparsecomm.hooks import CompressionState
from sparsecomm.momentum import watch_momentum
from sparsecomm.optim.buckets import GradientBuckets, Rates
from sparsecomm.optim.exchange import (
    OptimizerExchange,
    check_parameters,
    coordination_device,
    described_group,
    described_groups,
    described_parameters,
    names_of,
)
from sparsecomm.optim.uneven import Shadow
from sparsecomm.options import CommunicatorKeywords, CommunicatorOptions, communicator_options
from sparsecomm.rank_entries import is_called_by

if TYPE_CHECKING:
    _Joinable = Joinable
else:
    _Joinable = object  # what is joined needs no base, whose metaclass optimizers' would have to be

_SAVED = "sparsecomm"  # the key in state_dict()
_MEBIBYTE = 1 << 20


class _Adopted(torch.optim.Optimizer):
    # Apart from __init__, whose arguments help() is to show.
    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls is not DistributedOptimizer:
            return super().__new__(cls)
        optimizer = args[0] if args else kwargs.get("optimizer")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError(f"this {type(optimizer).__name__} exchanges its gradients already")
        base: Any = type(optimizer)
        optimizer.__class__ = _distributed(base)
        return optimizer  # type: ignore[return-value]


class DistributedOptimizer(_Adopted, _Joinable):
    """Makes a torch optimizer average its gradients over the ranks, without DDP.

    The optimizer itself is changed, and returned: its class becomes one that derives from this and
    from what it was, so that schedulers and whoever else holds it keep what they have. The
    exchange of a gradient starts while the backward pass goes on, as soon as a bucket of them is
    complete; ``step()`` waits for it. Until then ``grad`` raises when it is read or changed: to
    clip gradients, or with a ``GradScaler``, call :meth:`synchronize` before. Gradients are
    accumulated over several backward passes within :meth:`no_sync`, but for the last one. Hooks of
    ``register_post_accumulate_grad_hook`` are registered before the optimizer is made, since later
    ones find the gradient on its way. The model must not be in ``DistributedDataParallel`` too,
    which would exchange the same gradients.

    A parameter without a gradient takes part with zeros: its ``grad`` is what the others have.
    Every rank makes the same steps, except within ``torch.distributed.algorithms.join.Join``: see
    :meth:`join_hook`. ``state_dict()`` holds the residuals of this rank too, so every rank saves
    its own.

    With ``torch.optim.SGD`` without momentum and weight decay the update touches only the entries
    that were received. The loss that a closure returns to ``torch.optim.LBFGS`` is averaged.

    Args:
        optimizer: any optimizer of dense gradients.
        named_parameters: as ``model.named_parameters()`` gives them: the names for error messages
            and checkpoints, of all of the optimizer's parameters. ``None``: the names that the
            optimizer was made with, else numbers.
        compression: what is sent, and how; ``Compression()`` if ``None``.
        process_group: the ranks that exchange; the default group if ``None``.
        average: ``False``: gradients are summed.
        bucket_cap_mb: MiB of a bucket, whose entries are selected together; more than 0.
            ``math.inf``: of all of the gradient, as in the papers, exchanged once it is complete.
            Parameters that are sent whole have one of their own.
        compare_every: steps after which the ranks compare the values of their parameters by
            checksum, since ranks that drifted apart train no model, as they do in the step after a
            ``state_dict()`` on any rank; 0: never, see :meth:`compare_parameters`.
        keywords: as in :class:`sparsecomm.CompressionState`.

    Raises:
        TypeError: an argument of the wrong kind, or a parameter that cannot be compressed.
        ValueError: an argument outside its range, names that do not fit, or an optimizer that
            exchanges already.
        RuntimeError: there is no process group; a parameter is in a ``DistributedDataParallel``
            model; or the ranks disagree: in the options, or in names, shapes, types or values of
            parameters. The same text on every rank.
    """

    _base: type[torch.optim.Optimizer]
    _join_config: Any = None  # what Join sets, from when it is made until it has ended

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        *,
        compression: Compression | None = None,
        process_group: dist.ProcessGroup | None = None,
        average: bool = True,
        bucket_cap_mb: float = 25.0,
        compare_every: int = 1000,
        **keywords: Unpack[CommunicatorKeywords],
    ) -> None:
        try:
            self._attach(
                Compression() if compression is None else compression,
                process_group,
                named_parameters,
                average=average,
                bucket_cap_mb=bucket_cap_mb,
                compare_every=compare_every,
                options=communicator_options(DistributedOptimizer, keywords),
            )
        except BaseException:
            self.__class__ = self._base  # type: ignore[assignment]
            raise

    def _attach(
        self,
        compression: Compression,
        process_group: dist.ProcessGroup | None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        *,
        average: bool = True,
        bucket_cap_mb: float = 25.0,
        compare_every: int = 1000,
        lr_in_accumulator: bool = False,
        options: CommunicatorOptions,
        saved: dict[str, Any] | None = None,
        join: bool = True,
    ) -> None:
        """Begins to exchange; all of torch's part of the optimizer is there.

        Args:
            saved: what the state begins with.
            join: ``False``: the ranks connect in the first step.
        """
        for name, flag in [("average", average), ("lr_in_accumulator", lr_in_accumulator)]:
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be True or False, not {type(flag).__name__}")
        if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)):
            raise TypeError(f"bucket_cap_mb must be a number, not {type(bucket_cap_mb).__name__}")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb} is not a size; use more than 0 MiB")
        if isinstance(compare_every, bool) or not isinstance(compare_every, int):
            raise TypeError(f"compare_every must be an int, not {type(compare_every).__name__}")
        if compare_every < 0:
            raise ValueError(
                f"compare_every={compare_every} is no number of steps; use 1 or more, 0 for never"
            )
        exchange = OptimizerExchange(
            compression,
            process_group,
            average=average,
            options=options,
        )
        self._lr_in_accumulator = lr_in_accumulator
        for group in self.param_groups:
            self._check_rates(group)
        if lr_in_accumulator and compression.clip_norm is not None:
            raise ValueError(
                f"lr_in_accumulator=True and clip_norm={compression.clip_norm} exclude each other: "
                "a norm is of gradients, and what is accumulated is lr times that"
            )
        named = self._named(named_parameters)
        check_parameters(named)
        exchange._name([(name, p) for name, p in named if p.requires_grad])
        exchange._pending = saved
        if join:
            # First, since this says which ranks it waits for.
            exchange._connect(f"{type(self).__name__}()")
            exchange.compare(self._agreed(named, bucket_cap_mb, compare_every))
        rates = _rates(weakref.ref(self)) if lr_in_accumulator else None
        self._exchange = exchange
        self._names = {parameter: name for name, parameter in named}
        self._members = self._identities()
        capacity = bucket_cap_mb * _MEBIBYTE
        self._buckets = GradientBuckets(
            type(self).__name__,
            exchange,
            capacity,
            compare_every,
            rates,
            _announcement(weakref.ref(self)),
        )
        self._buckets.add(named)
        # Without the tensors: what an unpickled optimizer is attached with.
        self._exchange_arguments = {
            "compression": exchange.compression,
            "process_group": process_group,
            "average": average,
            "bucket_cap_mb": bucket_cap_mb,
            "compare_every": compare_every,
            "lr_in_accumulator": lr_in_accumulator,
            "options": options,
        }
        self._hidden: list[tuple[Tensor, Tensor]] = []  # parameters and their grads
        watch_momentum(exchange, [parameter for _, parameter in named])
        _patch_again(self)

    @property
    def exchange(self) -> CompressionState:
        """What exchanges: ``density``, ``stats()``, ``follow(scaler)``, and the residuals."""
        return self._exchange

    def synchronize(self) -> None:
        """Waits until every ``grad`` is the average over the ranks; ``step()`` does so itself.

        In between they may be looked at, clipped, or unscaled by a ``GradScaler``; what has been
        changed is applied as it is then. Gradients of parameters that were not used count as zeros.

        Raises:
            RuntimeError: within :meth:`no_sync`, or the exchange failed; what was to be sent
                is in the residuals then, and every ``grad`` is ``None``. Or a parameter was
                replaced in its module, or put into a group in another way than by
                :meth:`add_param_group`; or ranks drifted apart: see :meth:`compare_parameters`.
            TypeError: a parameter was converted to another type or device and not back; raised by
                the backward pass that brings its gradient, too.
        """
        self._require_known()
        self._buckets.synchronize()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Lets ranks make different numbers of steps, within torch's ``Join([optimizer])``.

        A rank that leaves it has no more data. It takes part in the steps of the others with zeros,
        and goes on delivering its residual; averages are over all ranks, and with
        ``lr_in_accumulator=True`` so is the weight decay of those that have data. When all have
        left, every rank gets the parameters and the optimizer's state of one that made the most
        steps, a broadcast of each tensor; ``param_groups`` are compared. So step a scheduler after
        ``Join``. Each loop has a ``Join`` of its own. One with several optimizers has them in the
        order of their steps, of which each makes as many.

        Args:
            kwargs: what ``Join`` was given for all that it joins.

        Raises:
            ValueError: the optimizer is ``torch.optim.LBFGS`` or follows a ``GradScaler``, or
                ``divide_by_initial_world_size=False``.
        """
        if issubclass(self._base, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS evaluates its closure as often as it likes, which ranks without data cannot "
                "do: give every rank as many batches"
            )
        if self._exchange.follows_scaler:
            raise ValueError(
                "the exchange follows a GradScaler, whose steps a rank without data does not hear "
                "of: use bfloat16, which needs none, or give every rank as many batches"
            )
        if not kwargs.get("divide_by_initial_world_size", True):
            raise ValueError(
                "divide_by_initial_world_size=False: gradients are averaged over all ranks, those "
                "without data included; leave it True"
            )
        return Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """For ``Join``: where the process group's collectives have their tensors."""
        return coordination_device(self._exchange._process_group)

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """For ``Join``: the ranks that exchange."""
        return self._exchange._process_group or distributed_c10d._get_default_group()

    def compare_parameters(self) -> None:
        """Checks that every rank has the same values in the parameters that are trained.

        Collective: every rank calls it, between two steps; before a checkpoint, say. It happens by
        itself every ``compare_every`` steps, and in the step after a checkpoint.

        Raises:
            RuntimeError: they differ; the same text on every rank, which names what and where. Or
                this is within ``Join``, where ranks without data would not take part.
        """
        self._require_all_ranks("compare_parameters()")
        self._buckets.compare_parameters()

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward passes only accumulate, as DDP's."""
        return self._buckets.pause()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch's, with what the ranks exchanged; waits for it, see :meth:`synchronize`.

        A closure is called as often as the optimizer likes, and what it computed is exchanged each
        time.
        """
        if closure is not None:
            return _step(self, closure)
        if not self._only_makes_state():
            self.synchronize()  # before hooks of torch's, which see what was exchanged
        return _step(self)

    step.hooked = True  # type: ignore[attr-defined]  # that is, _step() is

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that are being exchanged are waited for, and dropped.

        What was not sent of them is in the residuals, and comes in later steps.
        """
        self._buckets.discard()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; on every rank alike, between two steps, and not within ``Join``.

        It compares what the ranks add.
        """
        if "_buckets" in self.__dict__:
            self._require_all_ranks("add_param_group()")
        super().add_param_group(param_group)
        if "_buckets" not in self.__dict__:
            return  # torch's constructor
        try:
            self._extend(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def _require_all_ranks(self, call: str) -> None:
        if self._join_config is not None and self._join_config.enable:
            raise RuntimeError(
                f"{call} is for all ranks, and within Join some may have left: call it before or "
                "after"
            )

    def _extend(self, group: dict[str, Any]) -> None:
        self._check_rates(group)
        given = group.get("param_names")
        added = [
            (given[i] if given else f"parameter.{len(self._names) + i}", parameter)
            for i, parameter in enumerate(group["params"])
        ]
        every = [(name, parameter) for parameter, name in self._names.items()] + added
        _require_distinct([name for name, _ in every])
        check_parameters(added)
        self._exchange.compare(
            described_group(len(self.param_groups) - 1, group) | described_parameters(added)
        )
        trained = [(name, parameter) for name, parameter in added if parameter.requires_grad]
        densities = self._exchange.compression.densities_of(every)
        own = {parameter for _, parameter in trained}
        self._exchange._native.add_parameters(
            trained, [(parameter, density) for parameter, density in densities if parameter in own]
        )
        self._buckets.add(added)
        self._names |= {parameter: name for name, parameter in added}
        self._members = self._identities()

    def _identities(self) -> list[int]:
        return [id(p) for group in self.param_groups for p in group["params"]]

    def _require_known(self) -> None:
        """Raises RuntimeError if a group has a trained parameter that is not exchanged."""
        members = self._identities()
        if members == self._members:
            return
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._names:
                    raise RuntimeError(
                        f"parameter group {number} has a parameter of shape "
                        f"{list(parameter.shape)} that was put there by hand, and so is not "
                        "exchanged: use add_param_group() on every rank, or make the optimizer anew"
                    )
        self._members = members

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's, and under ``"sparsecomm"`` what the exchange keeps on this rank."""
        return {**super().state_dict(), _SAVED: self._exchange.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned on this rank, or on all of another number.

        With another number of ranks ``state_dict["sparsecomm"]`` is what all of them saved there,
        in one dict; see :class:`sparsecomm.CompressionState`. Without ``"sparsecomm"``, as what
        ``torch.distributed.checkpoint.state_dict`` makes of it is, once :attr:`exchange` has been
        loaded itself.

        Raises:
            ValueError: it is of another kind of optimizer, rank, number of ranks or model, and
                nothing was loaded. Where there are no residuals to load,
                ``torch.optim.Optimizer.load_state_dict(self, state_dict)`` takes the state of a
                plain optimizer.
        """
        torchs = {k: v for k, v in state_dict.items() if k != _SAVED}
        if _SAVED not in state_dict and not self._exchange.loaded:
            raise ValueError(
                f"the state_dict has no {_SAVED!r}: it is of an optimizer that exchanged nothing, "
                "or of torch.distributed.checkpoint.state_dict, beside which optimizer.exchange is "
                "to be saved, and loaded before; "
                "torch.optim.Optimizer.load_state_dict(optimizer, state_dict) leaves the residuals "
                "as they are"
            )
        before = super().state_dict()  # of the same tensors
        try:
            super().load_state_dict(torchs)
            for number, group in enumerate(self.param_groups):
                if missing := self.defaults.keys() - group.keys():
                    raise KeyError(f"{', '.join(sorted(missing))} of parameter group {number}")
            if _SAVED in state_dict:
                self._exchange.load_state_dict(state_dict[_SAVED])
        except BaseException as error:
            super().load_state_dict(before)
            if isinstance(error, KeyError):
                raise ValueError(
                    f"the state_dict is not of {self._base.__name__}: it lacks {error.args[0]}"
                ) from error
            raise
        self._exchange.loaded = False

    def __repr__(self) -> str:
        compression = self._exchange.compression
        return (
            super().__repr__().removesuffix(")")
            + f"Exchange\n    algorithm: {compression.algorithm}\n"
            + f"    density: {compression.density:g}\n)"
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._exchange._process_group is not None:
            raise TypeError(
                f"this {type(self).__name__} has a process group of its own, which cannot be "
                "pickled or copied; save state_dict() instead, or use the default group"
            )
        return {
            **super().__getstate__(),
            "_exchange_arguments": self._exchange_arguments,
            "_exchange_names": [self._names[p] for g in self.param_groups for p in g["params"]],
            "_exchange_saved": self._exchange.state_dict(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = {key: value for key, value in state.items() if key.startswith("_exchange_")}
        super().__setstate__({key: value for key, value in state.items() if key not in own})
        if not own:
            return  # torch's load_state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._attach(
            **own["_exchange_arguments"],
            named_parameters=list(zip(own["_exchange_names"], parameters, strict=True)),
            saved=own["_exchange_saved"],
            join=False,
        )

    def _named(
        self, named_parameters: Iterable[tuple[str, Tensor]] | None
    ) -> list[tuple[str, Tensor]]:
        """All parameters with their names."""
        parameters: list[Tensor] = []
        names: list[str] = []
        for group in self.param_groups:
            given = group.get("param_names")
            for i, parameter in enumerate(group["params"]):
                parameters.append(parameter)
                names.append(given[i] if given else f"parameter.{len(names)}")
        if named_parameters is not None:
            names = names_of(named_parameters, parameters)
        _require_distinct(names)
        return list(zip(names, parameters, strict=True))

    def _check_rates(self, group: dict[str, Any]) -> None:
        if self._lr_in_accumulator and group["momentum"] != 0:
            raise ValueError(
                f"lr_in_accumulator=True and momentum={group['momentum']} exclude each other: what "
                "arrives is the update itself; use momentum=0, or "
                "DistributedOptimizer(torch.optim.SGD(...), compression=Compression(momentum=...))"
            )

    def _agreed(
        self, named: list[tuple[str, Tensor]], bucket_cap_mb: float, compare_every: int
    ) -> dict[str, str]:
        """What the ranks must agree on, by name."""
        entries = {
            "optimizer": type(self).__name__,
            "bucket_cap_mb": f"{bucket_cap_mb:g}",
            "compare_every": str(compare_every),
            "lr_in_accumulator": str(self._lr_in_accumulator),
        }
        return entries | described_groups(self.param_groups) | described_parameters(named)

    def _only_makes_state(self) -> bool:
        """Whether this is torch.distributed.checkpoint's step, which is to change nothing.

        It sets gradients and learning rates to zero, for an optimizer to make what it keeps. Who
        calls is asked last, of steps that would change little.
        """
        return (
            self._buckets.only_zeros_were_given()
            and all(float(group["lr"]) == 0 for group in self.param_groups if "lr" in group)
            and is_called_by("torch.distributed.checkpoint.state_dict")
        )

    @torch.no_grad()
    def _add_received(self) -> None:
        """Makes the updates that are not dense, and hides their gradients from torch's step."""
        for group in self.param_groups:
            self._check_rates(group)
            if not self._adds(group):
                continue
            factor = -1.0 if self._lr_in_accumulator else -float(group["lr"])
            if group["maximize"] and not self._lr_in_accumulator:
                factor = -factor
            self._hide(self._buckets.add_received(group["params"], factor))
            if self._lr_in_accumulator:  # what somebody put in an update's place is one
                others = [(p, p.grad) for p in group["params"] if p.grad is not None]
                for parameter, gradient in others:
                    parameter.add_(gradient, alpha=factor)
                self._hide(others)

    def _hide(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        self._hidden += gradients
        for parameter, _ in gradients:
            parameter.grad = None

    def _conclude(self) -> None:
        for parameter, gradient in self._hidden:
            try:
                parameter.grad = gradient
            except RuntimeError:  # of one that was converted since: the next step says so
                continue
        self._hidden.clear()
        self._buckets.finished()

    def _adds(self, group: dict[str, Any]) -> bool:
        """Whether the update is no more than a multiple of the gradient."""
        if self._lr_in_accumulator:
            return True
        if self._base is not torch.optim.SGD:
            return False
        return not (
            group["momentum"] or group["weight_decay"] or group["fused"] or group["differentiable"]
        )


@functools.cache
def _distributed(base: Any) -> type[DistributedOptimizer]:
    def reduce(self: DistributedOptimizer, _: object) -> tuple[Any, ...]:
        return _made_again, (base,), self.__getstate__()

    attributes = {"_base": base, "__reduce_ex__": reduce, "__doc__": base.__doc__}
    return type(f"Distributed{base.__name__}", (DistributedOptimizer, base), attributes)


def _made_again(base: Any) -> DistributedOptimizer:
    cls = _distributed(base)
    return cls.__new__(cls)


@torch.optim.Optimizer.profile_hook_step
def _step(optimizer: DistributedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
    base: Any = optimizer._base.step
    if getattr(base, "hooked", False):
        base = base.__wrapped__  # the hooks have been called

    def exchanged() -> Any:
        assert closure is not None
        loss = closure()
        optimizer.synchronize()
        optimizer._add_received()
        if isinstance(optimizer, torch.optim.LBFGS):
            return _mean(loss, optimizer.exchange._process_group)
        return loss

    try:
        if closure is not None:
            return base(optimizer, exchanged)
        optimizer._add_received()
        return base(optimizer)
    finally:
        optimizer._conclude()


def _patch_again(optimizer: DistributedOptimizer) -> None:
    """A scheduler notes calls of the step that the optimizer had when it was made; see torch's."""
    if "step" not in vars(optimizer):
        return
    reference = weakref.ref(optimizer)
    step: Any = type(optimizer).step

    @functools.wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        self: Any = reference()
        self._opt_called = True
        return step(self, *args, **kwargs)

    noted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = noted  # type: ignore[method-assign]


def _mean(loss: Any, group: dist.ProcessGroup | None) -> Tensor:
    total = torch.as_tensor(loss).detach().clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def _rates(reference: weakref.ref[DistributedOptimizer]) -> Callable[[], Rates]:
    """Returns what makes, for a step, a table of what the accumulator takes of each parameter."""

    def of_step() -> Rates:
        optimizer = reference()
        assert optimizer is not None
        # Gradients carry the loss scale, and the weights that decay do not.
        scale = optimizer._exchange.loss_scale()
        rates = {}
        for group in optimizer.param_groups:
            rate = float(group["lr"])
            entry = (
                -rate if group["maximize"] else rate,
                rate * float(group["weight_decay"]) * scale,
            )
            rates.update(dict.fromkeys(group["params"], entry))
        return rates

    return of_step


def _announcement(reference: weakref.ref[DistributedOptimizer]) -> Callable[[], bool]:
    """Returns what tells ranks without data, within Join, that they are to take part."""

    def announce() -> bool:
        optimizer = reference()
        if optimizer is None or optimizer._join_config is None:
            return False
        Join.notify_join_context(optimizer)
        return bool(optimizer._join_config.enable)

    return announce


def _require_distinct(names: list[str]) -> None:
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"{', '.join(twice)} names more than one parameter of the optimizer, or one that it "
            "has twice"
        )

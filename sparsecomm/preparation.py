"""Joins a state of the DDP hooks and an optimizer, whose momentum goes into the state."""

from __future__ import annotations

import logging
import weakref
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack

from sparsecomm import _C, grouping
from sparsecomm.compression import AUTO, Compression, SelectionOptions, check_options
from sparsecomm.hooks import (
    AutoState,
    CompressionState,
    GaussianKState,
    GTopkState,
    LossScaler,
    OkTopkState,
    TopkDsaState,
    TopkState,
    _remedy,
    register_comm_hook,
)
from sparsecomm.joint import SPLITS, Joint, check_groups, joint_of
from sparsecomm.momentum import never_watch
from sparsecomm.options import COMMUNICATOR_KEYWORDS, CommunicatorKeywords
from sparsecomm.schedule import DensityWarmup, check_density, check_steps

_STATES: dict[str, type[Any]] = {
    kind._algorithm: kind
    for kind in (OkTopkState, TopkState, GaussianKState, GTopkState, TopkDsaState, AutoState)
}
_STAGES = (0.25, 0.0625, 0.04)  # densities of a warm-up: those of the recipes in docs/results.md
_STAGE_SHARE = 5  # a stage is a fifth of a short training,
_LONG_STAGE_SHARE = 20  # a twentieth of a long one,
_STAGE_STEPS = 100  # and so many steps between
_WRAPPERS = ("accelerate", "lightning", "pytorch_lightning")
_SAID_ELSEWHERE = {
    "momentum": "the optimizer's is taken: give it to {optimizer}",
    "nesterov": "the optimizer's is taken: give it to {optimizer}",
    "first_moment": "the optimizer's first moment moves into the state, which does better",
    "process_group": "the model's is used: give it to DistributedDataParallel",
    "named_parameters": "the model's are used",
}


class PrepareOptions(SelectionOptions, CommunicatorKeywords, total=False):
    """What :func:`prepare` takes by keyword: fields of :class:`Compression`, and some more."""

    algorithm: str
    scaler: LossScaler | None
    mesh: DeviceMesh | None


def prepare(
    ddp: nn.Module,
    optimizer: Optimizer,
    density: float = 0.02,
    total_steps: int | None = None,
    **options: Unpack[PrepareOptions],
) -> CompressionState:
    """Has a DDP model exchange gradients sparsely, with the momentum of ``optimizer``.

    Registers a hook with ``ddp``, and moves the momentum of ``optimizer`` to where it belongs with
    a sparse exchange, before the selection; biases and parameters of norms are sent whole. Call it
    where both are ready, on every rank, in place of :func:`register_comm_hook`::

        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=6e-3)
        state = sparsecomm.prepare(ddp, optimizer, density=0.02, total_steps=10_000)

    The rest of the program stays as it is. The groups of the optimizer show the momentum that they
    were given, and a scheduler may change it; only while ``optimizer.step()`` runs the momentum is
    out of them. For the bias of the first moment, which Adam corrects, the step multiplies
    ``.grad``. ``optimizer.state_dict()`` holds this rank's velocity where the optimizer has its
    buffer, and such a buffer that is loaded, or that the optimizer has already, becomes the
    velocity: so a run goes on with sparsecomm that began without, and the other way round. Load
    ``state.state_dict()`` beside it and the run is bit-identical to one that never stopped.

    SGD (with Nesterov's momentum too), Adam, AdamW and NAdam can be split, with parameter groups of
    momenta of their own. At density 1 nothing is: the optimizer does as without sparsecomm. An
    optimizer serves one model; for a model in a new DistributedDataParallel, as after layers were
    unfrozen, call this again with the same optimizer: the former state's residuals and velocities
    go on.

    Args:
        ddp: the model, in DistributedDataParallel, before its first backward pass. Or one that
            ``fully_shard`` shards, with ``mesh``, as :func:`sparsecomm.fsdp.apply` takes it.
        optimizer: of all parameters of the model that are trained, and no others.
        density: share of the entries that is sent, in (0, 1].
        total_steps: steps of the training, which begins denser then: at densities of 25 %, 6.25 %
            and 4 %, as far as they exceed ``density``, for a fifth of the steps each; for 100
            steps if that is less, or a twentieth if that is more than 100. ``None``: no warm-up.
        options: fields of :class:`Compression`, such as ``algorithm`` (``"oktopk"``; ``"auto"``
            has a plan choose), ``clip_norm``, ``densities``, ``dense_below``, and ``warmup``, which
            is taken in place of one by ``total_steps``; of :class:`CommunicatorOptions`;
            ``scaler``, a ``GradScaler``, which the state then follows; and for a sharded model
            ``mesh``, the ranks that have the same shard.

    Returns:
        The state, as :func:`register_comm_hook` does. Its ``repr`` says what was done, and so does
        a line in the log ``"sparsecomm"``.

    Raises:
        TypeError: an argument of the wrong kind, or an optimizer whose momentum cannot be taken
            out.
        ValueError: an argument outside its range; ``total_steps`` that leaves no room for the
            warm-up; an optimizer of other parameters, or not of all; one without a first beta.
        RuntimeError: as :func:`register_comm_hook`.
    """
    optimizer = _unwrapped(optimizer)
    model: nn.Module = getattr(ddp, "_orig_mod", ddp)  # of torch.compile(ddp)
    kind = type(optimizer).__name__
    for name, text in _SAID_ELSEWHERE.items():
        if name in options:
            raise TypeError(f"prepare() takes no {name}: " + text.format(optimizer=kind))
    check_options(prepare, options, PrepareOptions)
    chosen: dict[str, Any] = dict(options)
    mesh, scaler = chosen.pop("mesh", None), chosen.pop("scaler", None)
    _check_model(model, mesh)
    density = check_density(density)
    if total_steps is not None:
        chosen["warmup"] = _warmup(total_steps, density, chosen)
    keywords: Any = {k: chosen.pop(k) for k in COMMUNICATOR_KEYWORDS if k in chosen}
    if chosen.get("algorithm") == AUTO:
        chosen.setdefault("groups", grouping.AUTO)  # as of AutoState
    compression = Compression(density=density, **chosen)  # which checks the options
    splits = density < 1 or any(own != 1 for own in compression.densities.values())
    former = joint_of(optimizer)
    _check_unprepared(model, kind, former is not None and former.serves(model))
    names = _parameters_of(model, optimizer)
    if splits:
        compression = replace(compression, **_momentum_of(model, optimizer))
    kept = former.kept() if former is not None else None
    state: CompressionState
    if isinstance(model, DistributedDataParallel):
        state = _state_of(compression, keywords)
    else:
        from sparsecomm.fsdp import apply  # which takes long

        state = apply(model, compression, mesh, **keywords)
        names = {p: name for p, name in names.items() if name in state._stand_ins}
    if scaler is not None:
        state.follow(scaler)
    if splits:
        never_watch(state)
    if isinstance(model, DistributedDataParallel):
        register_comm_hook(model, state)
    joint = Joint(state, model, optimizer, names, splits)
    joint.begin(former, kept)
    if former is not None:
        former.retire(gives_back=not splits)
    state._joint_ref = weakref.ref(joint)
    if not isinstance(model, DistributedDataParallel):
        model.register_forward_pre_hook(lambda *_: joint.before_forward())
    if dist.get_rank(None if state._stand_ins else state._process_group) == 0:
        logging.getLogger("sparsecomm").info("sparsecomm.prepare: %r", state)
    return state


def _state_of(compression: Compression, keywords: Any) -> CompressionState:
    chosen = {option.name: getattr(compression, option.name) for option in fields(compression)}
    kind = _STATES.get(chosen.pop("algorithm"))
    if kind is None:
        return CompressionState(compression, **keywords)
    state: CompressionState = kind(**chosen, **keywords)
    return state


def _check_model(model: Any, mesh: DeviceMesh | None) -> None:
    if isinstance(model, DistributedDataParallel):
        if mesh is not None:
            raise TypeError(
                "mesh is of a model that fully_shard shards: DistributedDataParallel has its "
                "process group already"
            )
    elif not hasattr(model, "set_all_reduce_hook"):
        raise TypeError(
            f"prepare needs a DistributedDataParallel model, not {_given(model)}: " + _remedy(model)
        )
    elif mesh is None:
        raise TypeError(
            f"{type(model).__name__} is sharded: give the ranks that have the same shard, as in "
            'mesh=mesh["replicate"]; a model without replicas has sparsecomm.fsdp.'
            "apply_reduce_scatter, whose optimizer keeps its momentum"
        )


def _check_unprepared(model: nn.Module, kind: str, is_same: bool) -> None:
    if isinstance(model, DistributedDataParallel) and model._comm_hooks:
        [(_, other)] = model._comm_hooks
        again = f"with this {kind}; call it once" if is_same else "with another optimizer perhaps"
        raise RuntimeError(
            f"this model has a communication hook already, of {other!r}: it was prepared before, "
            f"{again}. A model takes one state and one optimizer, of all its trained parameters"
        )


def _given(thing: object) -> str:
    """Names what was given for a model or an optimizer."""
    if isinstance(thing, type):
        return f"the class {thing.__name__} itself"
    return type(thing).__name__


def _unwrapped(optimizer: Any) -> Optimizer:
    """Returns the optimizer that a trainer's wrapper holds; raises TypeError for what is none."""
    if type(optimizer).__module__.partition(".")[0] in _WRAPPERS:
        optimizer = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, not {_given(optimizer)}; "
            "prepare(ddp, optimizer) takes the model first"
        )
    return optimizer


def _warmup(total_steps: int, density: float, chosen: dict[str, Any]) -> Any:
    check_steps("total_steps", total_steps)
    dense_steps = chosen.get("dense_steps", 0)
    check_steps("dense_steps", dense_steps, 0)
    warmup: Any = chosen.get("warmup")
    if warmup is not None and not isinstance(warmup, DensityWarmup):
        return warmup  # which Compression refuses
    stages = tuple(stage for stage in _STAGES if stage > density)
    if warmup is None and stages:
        own = total_steps - dense_steps
        steps = min(own // _STAGE_SHARE, max(_STAGE_STEPS, own // _LONG_STAGE_SHARE))
        if steps == 0:
            raise ValueError(
                f"total_steps={total_steps} leave {max(own, 0)} steps after "
                f"dense_steps={dense_steps}, too few for a warm-up, which needs {_STAGE_SHARE}: "
                f"give total_steps={dense_steps + _STAGE_SHARE} or more, or leave it out"
            )
        return DensityWarmup(steps, stages)
    needed = dense_steps + (warmup.steps * len(warmup.densities) if warmup else 0)
    if total_steps < needed:
        raise ValueError(
            f"total_steps={total_steps} end before the warm-up, which with "
            f"dense_steps={dense_steps} takes {needed} steps: shorten it, or leave total_steps out"
        )
    return warmup


def _parameters_of(model: nn.Module, optimizer: Optimizer) -> dict[torch.Tensor, str]:
    """The parameters that are exchanged, by name; raises unless all are the optimizer's."""
    kind = type(optimizer).__name__
    is_ddp = isinstance(model, DistributedDataParallel)
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    named = {parameter: name for name, parameter in inner.named_parameters()}
    if is_ddp:
        wrapper, remedy = "DistributedDataParallel", ", or make DistributedDataParallel anew"
        exchanged = {p for p in named if _C.has_reducer(p)}
    else:
        from sparsecomm.fsdp.modules import groups_of  # which takes long

        wrapper, remedy = "fully_shard", ""
        exchanged = {p.sharded_param for _, group in groups_of(inner) for p in group.fsdp_params}
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in named]
    if foreign:
        raise ValueError(
            f"{len(foreign)} of the {len(owned)} parameters of {kind}, the first of shape "
            f"{tuple(foreign[0].shape)}, are not the model's, so that no state would have their "
            "momentum: give prepare the model's own optimizer, made of ddp.parameters(), and other "
            "parameters an optimizer of their own"
        )
    names: dict[torch.Tensor, str] = {}
    for parameter, name in named.items():
        if parameter in exchanged:
            names[parameter] = name
            if parameter.requires_grad and parameter not in owned:
                raise ValueError(
                    f"{name} is trained, and is not a parameter of {kind}: an optimizer has all "
                    "parameters of the model that prepare is given; add it, or freeze it by "
                    "requires_grad_(False)"
                )
        elif parameter.requires_grad and parameter in owned:
            raise ValueError(
                f"{name} is a parameter of {kind}, and {wrapper} does not reduce its gradient, "
                "which it was told to ignore or which was frozen when it was made: give the "
                f"parameter an optimizer of its own{remedy}"
            )
    return names


def _momentum_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What the state is told; raises unless the momentum there is can be taken out."""
    kind = type(optimizer).__name__
    if type(optimizer) not in SPLITS:
        raise TypeError(
            f"the momentum of {type(optimizer).__module__}.{kind} cannot be taken out of it; "
            f"prepare does that for {', '.join(known.__name__ for known in SPLITS)} of torch.optim "
            "themselves. Use one of these, or sparsecomm.register_comm_hook(ddp, "
            "sparsecomm.OkTopkState(density)) with this optimizer as it is"
        )
    check_groups(optimizer)
    split = SPLITS[type(optimizer)]
    terms = [split.terms(group) for group in optimizer.param_groups]
    momenta = [momentum for momentum, *_ in terms]
    if not any(momenta) and "betas" in optimizer.defaults:
        beta2 = optimizer.param_groups[0]["betas"][1]
        raise ValueError(
            f"{kind} with betas=(0, {beta2:g}) has no momentum that prepare could move: give it "
            f"its usual ones, betas=(0.9, {beta2:g}); they are taken out of its steps"
        )
    _check_buffers(model, optimizer, split.buffer)
    with_momentum = {
        p
        for group, momentum in zip(optimizer.param_groups, momenta, strict=True)
        for p in group["params"]
        if momentum > 0
    }
    for path, module in model.named_modules():
        sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if sparse and module.weight in with_momentum:
            raise ValueError(
                f"{path.removeprefix('module.')}.weight has sparse gradients, of which a state "
                "keeps nothing, so that its momentum would be lost: give it a parameter group of "
                f"{kind} with momentum=0, or sparse=False"
            )
    chosen: dict[str, Any] = {"momentum": max(momenta)}
    if any(nesterov for *_, nesterov in terms):
        chosen["nesterov"] = True
    return chosen


def _check_buffers(model: nn.Module, optimizer: Optimizer, key: str) -> None:
    for name, parameter in model.named_parameters():
        buffer = optimizer.state.get(parameter, {}).get(key)
        if buffer is not None and buffer.shape != parameter.shape:
            raise ValueError(
                f"the {key} that {type(optimizer).__name__} has for {name.removeprefix('module.')} "
                f"is of shape {tuple(buffer.shape)}, and the parameter of {tuple(parameter.shape)}"
                ": load what fits, or delete optimizer.state[parameter]"
            )

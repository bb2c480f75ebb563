"""Notices an optimizer whose momentum does not go with the state's, and says what does better."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparsecomm.joint import SPLITS

if TYPE_CHECKING:
    from sparsecomm.hooks import CompressionState


def watch_momentum(state: CompressionState, parameters: Iterable[torch.Tensor]) -> None:
    """Logs a warning if the optimizer of ``parameters`` has momentum that does not suit ``state``.

    That is momentum in both; and if the state has none, Adam with or without a first moment, unless
    the state sends every entry. (SGD's own momentum behind a compressed exchange works well
    enough.) Once for a state, also if it is registered again, by rank 0 of its process group. The
    state has no reference to an optimizer, so the first step of one that holds any of the
    parameters decides, if the state has no momentum the first below density 1.
    """
    compression = state.compression
    if not (compression.momentum > 0 or compression.selects) or state in _settled():
        return
    if dist.is_initialized() and dist.get_rank(state._process_group) == 0:
        _watched()[state] = frozenset(map(id, parameters))


def never_watch(state: CompressionState) -> None:
    """Keeps :func:`watch_momentum` from warning, since an optimizer's momentum is in the state."""
    _settled().add(state)
    _watched().pop(state, None)


@functools.cache
def _settled() -> WeakSet[CompressionState]:
    """The states whose optimizer has been seen."""
    return WeakSet()


@functools.cache
def _watched() -> WeakKeyDictionary[CompressionState, frozenset[int]]:
    """The states whose optimizer has not been seen, with the ids of their parameters."""
    watched: WeakKeyDictionary[CompressionState, frozenset[int]] = WeakKeyDictionary()

    def before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # In a compiled step this is nothing at all.
        if torch.compiler.is_compiling() or not watched:
            return
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for state in [state for state, theirs in watched.items() if theirs & own]:
            if state.density == 1 and state.compression.momentum == 0:
                continue  # it may be set lower
            if watched.pop(state, None):  # else another thread's optimizer was first
                _settled().add(state)
                _warn(state, optimizer)

    # Never removed: torch iterates over these hooks while it calls them.
    register_optimizer_step_pre_hook(before_step)
    return watched


def _warn(state: CompressionState, optimizer: Optimizer) -> None:
    kind, own = type(optimizer).__name__, state.compression.momentum
    # As torch's optimizers name them; of others, only what is of the same kind.
    pairs = [group.get("betas") for group in optimizer.param_groups]
    beta1, beta2 = max(
        (
            tuple(map(float, pair))
            for pair in pairs
            if isinstance(pair, (tuple, list)) and len(pair) == 2
        ),
        default=(0.0, 0.0),
    )
    momenta = [group.get("momentum") for group in optimizer.param_groups]
    momentum = max((m for m in momenta if isinstance(m, (int, float))), default=0.0)
    is_adam = isinstance(optimizer, (Adam, AdamW))
    if own > 0 and beta1 > 0:
        text = (
            f"{kind} with betas=({beta1:g}, {beta2:g}) averages what momentum={own:g} beside the "
            f"density has averaged before: set betas=(0.0, {beta2:g}) in {kind}"
        )
    elif own > 0 and momentum > 0:
        text = (
            f"{kind} with momentum={momentum:g} accumulates what momentum={own:g} beside the "
            f"density has accumulated before: set momentum=0 in {kind}"
        )
    elif own == 0 and is_adam and beta1 > 0:
        text = (
            f"{kind} with betas=({beta1:g}, {beta2:g}) averages gradients of which a density of "
            f"{state.density:g} delays most, which costs quality: set momentum={beta1:g} where the "
            f"density is set, betas=(0.0, {beta2:g}) in {kind}, and try up to twice the learning "
            "rate"
        )
    elif own == 0 and is_adam:
        text = (
            f"{kind} with betas=(0.0, {beta2:g}) has no momentum, and none is set beside the "
            "density: if that is not what you mean, set momentum=0.9 there"
        )
    else:
        return
    if type(optimizer) in SPLITS:
        text += ". sparsecomm.prepare(ddp, optimizer, density) does so by itself"
    logging.getLogger("sparsecomm").warning(f"{text} (docs/training.md, Momentum)")

"""Notices Adam with a first moment behind a compressed exchange, and says what does better."""

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

if TYPE_CHECKING:
    from sparsecomm.hooks import CompressionState


def watch_for_adam(state: CompressionState, parameters: Iterable[torch.Tensor]) -> None:
    """Logs a warning if Adam with ``beta1 > 0`` steps on ``parameters`` while ``state`` lives.

    Once for a state, also if it is registered again, by rank 0 of its process group; never if the
    state has the momentum itself or sends every entry. The state has no reference to an optimizer,
    so the first step below density 1 of one that holds any of the parameters decides.
    """
    compression = state.compression
    if compression.momentum > 0 or not compression.selects or state in _settled():
        return
    if dist.is_initialized() and dist.get_rank(state._process_group) == 0:
        _watched()[state] = frozenset(map(id, parameters))


@functools.cache
def _settled() -> WeakSet[CompressionState]:
    """The states whose Adam has been seen."""
    return WeakSet()


@functools.cache
def _watched() -> WeakKeyDictionary[CompressionState, frozenset[int]]:
    """The states whose Adam has not been seen, with the ids of the parameters that they keep."""
    watched: WeakKeyDictionary[CompressionState, frozenset[int]] = WeakKeyDictionary()

    def before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # In a compiled step this is nothing at all.
        if torch.compiler.is_compiling() or not watched or not isinstance(optimizer, (Adam, AdamW)):
            return
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for state in [state for state, theirs in watched.items() if theirs & own]:
            if state.density == 1:
                continue  # it may be set lower
            if watched.pop(state, None):  # else another thread's optimizer was first
                _settled().add(state)
                _warn(state, optimizer)

    # Never removed: torch iterates over these hooks while it calls them.
    register_optimizer_step_pre_hook(before_step)
    return watched


def _warn(state: CompressionState, optimizer: Optimizer) -> None:
    beta1, beta2 = max(tuple(map(float, group["betas"])) for group in optimizer.param_groups)
    if beta1 == 0:
        return
    kind = type(optimizer).__name__
    logging.getLogger("sparsecomm").warning(
        f"{kind} with betas=({beta1:g}, {beta2:g}) averages gradients of which a density of "
        f"{state.density:g} delays most, which costs quality: set momentum={beta1:g} where the "
        f"density is set, betas=(0.0, {beta2:g}) in {kind}, and try up to twice the learning rate "
        "(docs/training.md, Momentum)"
    )

"""Sparse averages of FSDP2's gradient shards over replicas."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from typing_extensions import Unpack

from sparsecomm.compression import Compression
from sparsecomm.fsdp.modules import check_entries, groups_of, poison_grads, reduced_dtype, shard_of
from sparsecomm.grouping import AUTO
from sparsecomm.hooks import CompressionState
from sparsecomm.momentum import watch_momentum
from sparsecomm.options import CommunicatorKeywords, communicator_options
from sparsecomm.rank_entries import part_of_group


def apply(
    model: nn.Module,
    compression: Compression,
    mesh: DeviceMesh,
    **keywords: Unpack[CommunicatorKeywords],
) -> CompressionState:
    """Averages the gradient shards of ``model`` over its replicas, sparsely.

    Call it after ``fully_shard`` and before the first backward pass, on every rank: it connects the
    ranks, and installs a hook on every ``FSDPModule`` in ``model``. The hook is called when FSDP
    has reduced the gradients of a module; it exchanges them with the ranks that have the same
    shard, and returns once the average is there. Replicas must begin with the same parameters.

    Every parameter's shard has its residual, of float32 (float64 for float64 gradients), on every
    rank. Parameters that are frozen now may be trained later, from the same step on on all ranks.
    ``densities`` and ``dense_below`` of ``compression`` go by the names and dimensions of
    ``model``'s parameters. In ``state_dict()`` of the returned state a rank's entry names its
    place among the replicas and its shard, as in ``"rank_0_of_4_shard_1_of_8"``; it can be loaded
    by another number of replicas, but not of shards.

    FSDP's own average over the shards comes first. Do not count the replicas in a factor that
    you give ``set_gradient_divide_factor``: they are averaged over in any case.

    Args:
        model: with ``fully_shard`` applied to it, to modules in it, or both, on a mesh of one
            dimension; with two, FSDP sums over the replicas itself.
        compression: what is sent, and how. No ``clip_norm``: the norm of all gradients is not
            known when the first of them are exchanged.
        mesh: of one dimension: the ranks that have the same shard as this one.
        keywords: as in :class:`sparsecomm.CompressionState`.

    Returns:
        The state, for ``stats()``, ``follow()``, ``density`` and checkpoints.

    Raises:
        TypeError: an argument of the wrong kind; no module of ``model`` is an ``FSDPModule``.
        ValueError: ``mesh`` has several dimensions; ``compression`` clips; FSDP replicates the
            model itself, or shards its modules over different numbers of ranks.
        RuntimeError: the model has an all-reduce hook already, or modules that are gathered, as
            after a forward pass without a backward pass.
    """
    options = communicator_options(apply, keywords)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, not {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions; give the one of the replicas, as in "
            'mesh["replicate"]'
        )
    if not isinstance(compression, Compression):
        raise TypeError(f"compression must be a Compression, not {type(compression).__name__}")
    if compression.clip_norm is not None:
        raise ValueError(
            f"clip_norm={compression.clip_norm} needs the gradients of all parameters at once, and "
            "FSDP has those of a module at a time; clip after the backward pass, with "
            "torch.nn.utils.clip_grad_norm_"
        )
    if compression.groups not in (None, AUTO):
        raise ValueError(
            "FSDP brings the gradients of a module at a time, which are the groups: leave groups "
            "out, and shard the modules that are to be exchanged together as one"
        )
    compression = replace(compression, groups=None)
    groups = list(groups_of(model))
    if any(group._all_reduce_hook is not None for _, group in groups):
        raise RuntimeError("this model has an all-reduce hook already; FSDP takes one")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = CompressionState(
        compression,
        mesh.get_group(),
        communicator_options=options,
    )
    shards = {shard_of(group) for _, group in groups}
    if len(shards) != 1:
        raise ValueError(
            "modules are sharded over different numbers of ranks; call apply for each of the "
            "parts that are sharded alike"
        )
    [(shard, size)] = shards
    state._part = f"_shard_{shard}_of_{size}{part_of_group(mesh.get_group(), size)}"
    steps = _Steps(state)
    hooks = [(module, _Hook(group, names, steps)) for module, group in groups]
    state._name(pair for _, hook in hooks for pair in hook.parameters.items())
    state._stand_ins = {name: p for _, hook in hooks for name, p in hook.parameters.items()}
    state._connect("sparsecomm.fsdp.apply")
    for module, hook in hooks:
        module.set_all_reduce_hook(hook)
    state._registered = True
    watch_momentum(state, model.parameters())
    return state


class _Steps:
    """Tells the state where a backward pass begins and ends."""

    def __init__(self, state: CompressionState) -> None:
        self._state = state  # which lives as long as the model has the hooks
        self._seen: list[_Hook] = []

    def exchange(
        self,
        hook: _Hook,
        reduced: torch.Tensor,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
    ) -> None:
        if hook in self._seen:
            self._seen.clear()  # the last backward pass was broken off
        if not self._seen:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._seen.append(hook)
        index = len(self._seen) - 1
        work = self._state._native.exchange(
            index, False, reduced, parameters, gradients, hook.continues()
        )
        work.wait()

    def _end(self) -> None:
        if not self._seen:
            return  # of a pass that was broken off
        seen, self._seen = self._seen, []
        nothing = torch.empty(0, device=seen[-1].device)
        self._state._native.exchange(len(seen), True, nothing, [], []).wait()
        if not self._state._native.delivered:
            for hook in seen:
                poison_grads(hook.exchanged.values())


class _Hook:
    """What FSDP calls with the reduced gradients of a module, which is changed in place."""

    def __init__(self, group: FSDPParamGroup, names: dict[int, str], steps: _Steps) -> None:
        self._steps = steps
        self.device = group.device
        self._members = {names[id(p.sharded_param)]: p for p in group.fsdp_params}
        self.exchanged: dict[str, FSDPParam] = {}  # in the last exchange
        self._versions: list[int] = []  # of their shards then
        # They stand for the parameters, which FSDP may exchange: of their sizes, without memory.
        self.parameters = {
            name: torch.empty(1, dtype=reduced_dtype(p), device=self.device)
            .expand(p.padded_sharded_param_size)
            .requires_grad_(p.sharded_param.requires_grad)
            for name, p in self._members.items()
        }

    def continues(self) -> bool:
        """Whether the last exchange's result is in the grads, and no optimizer has used it."""
        shards = [p.sharded_param for p in self.exchanged.values()]
        former, self._versions = self._versions, [shard._version for shard in shards]
        return former == self._versions and any(
            isinstance(shard.grad, DTensor) and bool(shard.grad.to_local().any())
            for shard in shards
        )

    def __call__(self, reduced: torch.Tensor) -> None:
        # Parameters may be unfrozen at any time. The state then exchanges them in a group of their
        # own, and each of its groups as a whole.
        trained = {n: p for n, p in self._members.items() if p.unsharded_param.requires_grad}
        frozen = [name for name in self.exchanged if name not in trained]
        if frozen:
            raise ValueError(
                f"frozen since the last exchange: {', '.join(frozen)}, and not frozen in the same "
                f"FSDP module: {', '.join(trained)}; freeze all of a module or none, and leave "
                "other parameters that are not to be trained out of the optimizer instead"
            )
        sizes = [p.padded_sharded_param_size.numel() for p in trained.values()]
        check_entries(reduced.numel(), sum(sizes), trained)
        self.exchanged = trained
        parameters = [self.parameters[name] for name in trained]
        self._steps.exchange(self, reduced, parameters, list(torch.split(reduced, sizes)))

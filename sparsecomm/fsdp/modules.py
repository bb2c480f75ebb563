"""FSDP2's record of the modules it shards, much of it under private names of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor


def groups_of(model: nn.Module) -> Iterator[tuple[FSDPModule, FSDPParamGroup]]:
    """The FSDP modules of ``model`` that have parameters of their own, with these."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise TypeError(
            f"no module of this {type(model).__name__} is an FSDPModule; apply "
            "torch.distributed.fsdp.fully_shard to it first"
        )
    for module in modules:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if group._is_hsdp:
                raise ValueError(
                    "this model was sharded on a mesh of two dimensions, so that FSDP sums over "
                    "the replicas itself; give fully_shard the dimension of the shards alone, as "
                    'in mesh["shard"]'
                )
            if not isinstance(group.mesh_info, FSDPMeshInfo):
                raise ValueError(
                    "this model was replicated by torch.distributed._composable's replicate(), "
                    "which sums over the replicas itself; use DistributedDataParallel with "
                    "sparsecomm.register_comm_hook, or fully_shard on a mesh dimension of size 1"
                )
            if not group.is_sharded:
                raise RuntimeError(
                    f"the parameters of a module, {type(module).__name__}, are gathered, as after "
                    "a forward pass without a backward pass; call its reshard() before this, and "
                    "before requires_grad_(), which would change the gathered ones alone"
                )
            yield module, group


def shard_of(group: FSDPParamGroup) -> tuple[int, int]:
    """The number of this rank's shard, and how many there are."""
    info = group.mesh_info
    assert isinstance(info, FSDPMeshInfo)
    return info.shard_mesh_rank, info.shard_mesh_size


def reduced_dtype(parameter: FSDPParam) -> torch.dtype:
    """Returns the dtype of the parameter's gradient once FSDP has reduced it."""
    policy = parameter.mp_policy  # torch 2.15 has none in the group
    return policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype


def spoil(parameters: Iterable[FSDPParam]) -> None:
    """Makes their gradients NaN: what was delivered in a step that overflowed is taken back."""
    for parameter in parameters:
        gradient = parameter.sharded_param.grad
        if isinstance(gradient, DTensor):
            gradient.to_local().fill_(torch.nan)


def check_entries(reduced: int, expected: int, names: Iterable[str]) -> None:
    """Raises ValueError unless FSDP reduces the gradients of these parameters, and no others."""
    if reduced == expected:
        return
    remedy = (
        "some took no part in the backward pass; call model.set_reduce_scatter_unused_params(True)"
        if reduced < expected
        else "there are more, of parameters that were frozen after a backward pass under "
        "set_requires_gradient_sync(False); freeze them after a pass that synchronises"
    )
    raise ValueError(
        f"FSDP reduces {reduced} gradient entries of {', '.join(names)}, which have {expected}, "
        f"padded: {remedy}"
    )

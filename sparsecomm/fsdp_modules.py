"""What FSDP2 knows of the modules it shards, much of it in names that torch keeps for itself."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def groups_of(model: nn.Module) -> Iterator[tuple[FSDPModule, FSDPParamGroup]]:
    """The FSDP modules of ``model`` that have trainable parameters of their own, with these."""
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
            if any(p.sharded_param.requires_grad for p in group.fsdp_params):
                yield module, group


def part_of(group: FSDPParamGroup) -> str:
    info = group.mesh_info
    assert isinstance(info, FSDPMeshInfo)
    return f"_shard_{info.shard_mesh_rank}_of_{info.shard_mesh_size}"

"""The model that the tests of DDP hooks train, and what they compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel


def make_model(seed: int = 0, width: int = 40, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 3)).to(dtype)


def make_ddp(model: nn.Module, several_groups: bool = False) -> DistributedDataParallel:
    # DDP begins with one bucket and rebuilds several after the first step, but where it looks for
    # unused parameters: then it has several from the start, and never rebuilds them.
    return DistributedDataParallel(model, bucket_cap_mb=0.01, find_unused_parameters=several_groups)


def batch(step: int, width: int = 40, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(8, width, generator=generator).to(dtype)


def train(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: Iterable[int]
) -> None:
    width = next(ddp.parameters()).shape[1]
    for step in steps:
        optimizer.zero_grad()
        ddp(batch(step, width, next(ddp.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return everyone


def checkpoint_of(state: Stateful) -> dict[str, Any]:
    """This rank's entry of the state_dict."""
    [entry] = state.state_dict().values()
    return entry  # type: ignore[no-any-return]

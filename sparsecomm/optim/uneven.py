"""Ranks that make different numbers of steps: an optimizer's part in torch's Join."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Joinable, JoinHook

from sparsecomm.optim.exchange import all_gather

if TYPE_CHECKING:
    from sparsecomm.optim.distributed import DistributedOptimizer

_NONE = -1  # no rank


class Shadow(JoinHook):
    """Of a rank that has made its last step.

    It takes part in the steps of the others with zeros, which delivers its residual. What they came
    to, it gets at the end: by then they may have clipped, scaled or scheduled what it knows nothing
    of.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer._buckets.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        optimizer = self._optimizer
        Joinable.__init__(optimizer)  # torch leaves it switched on
        group = optimizer.join_process_group
        device = optimizer.join_device
        # The last rank of the last ones to join, and whether any joined before.
        own = [dist.get_rank(group) if is_last_joiner else _NONE, int(not is_last_joiner)]
        found = torch.tensor(own, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
        source, uneven = found.tolist()
        if uneven:
            _broadcast_all(optimizer, source)


@torch.no_grad()
def _broadcast_all(optimizer: DistributedOptimizer, source: int) -> None:
    """Gives all ranks the parameters and the state of that one."""
    group, device = optimizer.join_process_group, optimizer.join_device
    parameters = [p for entries in optimizer.param_groups for p in entries["params"]]
    mine = {
        f"{i} {key}": _described(value)
        for i, parameter in enumerate(parameters)
        for key, value in optimizer.state[parameter].items()
    }
    described = all_gather(mine, group)[source]
    kept: list[dict[str, Any]] = [{} for _ in parameters]
    for place, text in described.items():
        number, key = place.split(" ", 1)
        parameter = parameters[int(number)]
        kept[int(number)][key] = _received(optimizer.state[parameter].get(key), text, parameter)
    tensors = list(parameters)
    for parameter, entries in zip(parameters, kept, strict=True):
        optimizer.state[parameter] = entries
        tensors += [value for value in entries.values() if isinstance(value, Tensor)]
    global_source = dist.get_global_rank(group, source)
    for tensor in tensors:
        values = tensor.detach().to(device).contiguous()
        dist.broadcast(values, global_source, group)
        tensor.copy_(values)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        return json.dumps(kind | {"on_cpu": value.device.type == "cpu"})
    try:
        return json.dumps({"value": value})
    except TypeError:
        raise TypeError(
            f"the optimizer's state has a {type(value).__name__}, which ranks that have joined "
            "cannot be given; give every rank as many batches"
        ) from None


def _received(mine: Any, text: str, parameter: Tensor) -> Any:
    """The value, or a tensor that is to get it."""
    described = json.loads(text)
    if "value" in described:
        return described["value"]
    if isinstance(mine, Tensor) and _described(mine) == text:
        return mine
    dtype = getattr(torch, described["dtype"])
    device = torch.device("cpu") if described["on_cpu"] else parameter.device
    if described["shape"] == list(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    return torch.empty(described["shape"], dtype=dtype, device=device)


def coordination_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's own collectives have their tensors."""
    return torch.device(distributed_c10d._get_object_coll_device(group))

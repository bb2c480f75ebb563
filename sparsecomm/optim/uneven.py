"""Ranks that make different numbers of steps: an optimizer's part in torch's Join."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from sparsecomm.optim.exchange import described_groups

if TYPE_CHECKING:
    from sparsecomm.optim.distributed import DistributedOptimizer

_NONE = -1  # no rank


class Shadow(JoinHook):
    """Takes a rank that has made its last step through the steps of the others.

    It exchanges gradients of zero. At the end the rank receives the parameters and the state of one
    that has made all steps, since it does not know how gradients were clipped or scaled there.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer._buckets.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        optimizer = self._optimizer
        optimizer._join_config = None
        group = optimizer.join_process_group
        # The last rank of the last ones to join, and whether any joined before.
        own = [dist.get_rank(group) if is_last_joiner else _NONE, int(not is_last_joiner)]
        found = torch.tensor(own, device=optimizer.join_device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
        source, uneven = found.tolist()
        if not uneven:
            return
        _broadcast_state(optimizer, source)
        optimizer._exchange.compare(described_groups(optimizer.param_groups))


@torch.no_grad()
def _broadcast_state(optimizer: DistributedOptimizer, source: int) -> None:
    """Gives all ranks the parameters and the state of that one."""
    group, device = optimizer.join_process_group, optimizer.join_device
    parameters = [p for entries in optimizer.param_groups for p in entries["params"]]
    text = ""
    if dist.get_rank(group) == source:
        text = _described([optimizer.state.get(parameter, {}) for parameter in parameters])
    described = json.loads(_broadcast_text(text, source, group, device))
    if "error" in described:
        raise TypeError(described["error"])
    tensors = list(parameters)
    for parameter, entries in zip(parameters, described["entries"], strict=True):
        if dist.get_rank(group) != source:
            before = optimizer.state.pop(parameter, {})
            if entries:
                optimizer.state[parameter] = {
                    key: _received(before.get(key), entry, parameter)
                    for key, entry in entries.items()
                }
        kept = optimizer.state.get(parameter, {}).values()
        tensors += [value for value in kept if isinstance(value, Tensor)]
    for tensor in tensors:
        values = tensor.detach().to(device).contiguous()
        dist.broadcast(values, dist.get_global_rank(group, source), group)
        tensor.copy_(values)


def _described(states: list[dict[Any, Any]]) -> str:
    """The states of the parameters without the values of tensors, or what cannot be sent."""
    for state in states:
        for key, value in state.items():
            plain = value is None or type(value) in (bool, int, float, str, Tensor)
            if not (isinstance(key, str) and plain):
                error = (
                    f"the optimizer's state has {key!r}, a {type(value).__name__}, which ranks "
                    "that have joined cannot be given; give every rank as many batches"
                )
                return json.dumps({"error": error})
    entries = [{key: _entry(value) for key, value in state.items()} for state in states]
    return json.dumps({"entries": entries})


def _entry(value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {"value": value}
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "on_cpu": value.device.type == "cpu",
    }


def _received(before: Any, entry: dict[str, Any], parameter: Tensor) -> Any:
    """The value, or a tensor that is to get it."""
    if "value" in entry:
        return entry["value"]
    if isinstance(before, Tensor) and _entry(before) == entry:
        return before
    dtype = getattr(torch, entry["dtype"])
    device = torch.device("cpu") if entry["on_cpu"] else parameter.device
    if entry["shape"] == list(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    return torch.empty(entry["shape"], dtype=dtype, device=device)


def _broadcast_text(
    text: str, source: int, group: dist.ProcessGroup, device: torch.device
) -> bytes:
    global_source = dist.get_global_rank(group, source)
    length = torch.tensor([len(text.encode())], device=device)
    dist.broadcast(length, global_source, group)
    sent = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if text:
        sent.copy_(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
    dist.broadcast(sent, global_source, group)
    return sent.cpu().numpy().tobytes()

"""The exchange of an optimizer's gradients, and the comparison of ranks before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d

from sparsecomm import _C
from sparsecomm.compression import Compression, check_dtype
from sparsecomm.hooks import CompressionState, LossScaler
from sparsecomm.options import CommunicatorOptions

_SHOWN = 8  # differences between ranks


class OptimizerExchange(CompressionState):
    """The state of an optimizer's exchange."""

    def __init__(
        self,
        compression: Compression,
        process_group: dist.ProcessGroup | None,
        *,
        average: bool,
        options: CommunicatorOptions,
    ) -> None:
        self._average = average
        self._pending: dict[str, Any] | None = None
        self.loss_scale: Callable[[], float] = lambda: 1.0  # of the gradients
        self.steps = 0  # since the ranks connected, so the same on all
        # What was exchanged is neither in the residuals nor in the parameters.
        self.unfinished = False
        self.loaded = False  # and the optimizer not yet
        self.compares = False  # this rank has saved, so the next step is to compare parameters
        self.follows_scaler = False
        super().__init__(compression, process_group, communicator_options=options)

    def follow(self, scaler: LossScaler) -> None:
        super().follow(scaler)
        self.loss_scale = scaler.get_scale
        self.follows_scaler = True

    def state_dict(self) -> dict[str, Any]:
        self._require_finished("save")
        saved = super().state_dict() if self._pending is None else self._pending
        self.compares = True
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._require_finished("load")
        super().load_state_dict(state_dict)
        self._pending = None
        self.loaded = True

    def reconnect(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().reconnect(process_group)
        self.steps = 0

    def _require_finished(self, what: str) -> None:
        if self.unfinished:
            raise ValueError(
                f"cannot {what} the state between backward() and step(), when what was exchanged "
                "is in the gradients alone; do it after step(), or after zero_grad(), which drops "
                "it"
            )

    def _connect(self, call: str = "the first step") -> None:
        super()._connect(call)
        if self._pending is not None:
            super().load_state_dict(self._pending)
            self._pending = None

    def exchange(
        self,
        index: int,
        last: bool,
        buffer: Tensor,
        parameters: list[Tensor],
        views: list[Tensor],
        unused: list[bool],
    ) -> Work:
        self._connect()
        if self.compares:
            self.compares = False
            self._native.request()
        self.unfinished = True
        return self._native.exchange(index, last, buffer, parameters, views, unused=unused)

    def waited(self, failed: bool) -> None:
        """The exchange has ended; where it failed or was not finite, nothing was delivered."""
        self.unfinished = not failed and self._native.delivered

    def compare(self, mine: dict[str, str] | None) -> None:
        """Raises the same error on every rank of the group unless all have the same.

        Those that have nothing to compare are left out.
        """
        self._place()  # which says if there is no process group
        options = {name: repr(value) for name, value in vars(self._compression).items()}
        options["average"] = str(self._average)
        given = _all_gather({} if mine is None else options | mine, self._process_group)
        every = {rank: entries for rank, entries in enumerate(given) if entries}
        differing = []
        for key in dict.fromkeys(key for entries in every.values() for key in entries):
            ranks: dict[str, list[int]] = {}
            for rank, entries in every.items():
                ranks.setdefault(entries.get(key, "nothing"), []).append(rank)
            if len(ranks) > 1:
                values = (f"{value} on rank{_join(who)}" for value, who in ranks.items())
                differing.append(f"{key}: {' but '.join(values)}")
        if differing:
            more = len(differing) - _SHOWN
            raise RuntimeError(
                "ranks disagree: "
                + "; ".join(differing[:_SHOWN])
                + (f"; and {more} more" if more > 0 else "")
                + ". Make the same optimizer on every rank, of a model with the same parameters: "
                "seed all ranks alike, or broadcast the parameters from one"
            )


def coordination_device(group: dist.ProcessGroup | None) -> torch.device:
    """The device of tensors in collectives of the group itself."""
    return torch.device(distributed_c10d._get_object_coll_device(group))


def _all_gather(mine: dict[str, str], group: dist.ProcessGroup | None) -> list[dict[str, str]]:
    """Returns ``mine`` of every rank, sent as JSON: all_gather_object would unpickle it."""
    device = coordination_device(group)
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    ranks = range(dist.get_world_size(group))
    lengths = [torch.empty(1, dtype=torch.int64, device=device) for _ in ranks]
    dist.all_gather(lengths, torch.tensor([len(text)], device=device), group=group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded, group=group)
    every = zip(texts, lengths, strict=True)
    return [json.loads(bytes(text[: int(length)].tolist())) for text, length in every]


def check_parameters(named: list[tuple[str, Tensor]]) -> None:
    """Raises TypeError unless all that are trained can be compressed, by one device.

    RuntimeError: DDP reduces one of them.
    """
    for name, parameter in named:
        if parameter.layout == torch.strided and not _C.has_memory(parameter):
            raise TypeError(
                f"{name}, a {type(parameter).__name__} of shape {list(parameter.shape)}, has no "
                "memory of its own: use sparsecomm.fsdp.apply for a model that fully_shard has "
                "sharded, and make the optimizer of plain parameters otherwise, such as to_local() "
                "of a DTensor"
            )
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    for name, parameter in trained:
        require_alone(name, parameter)
        check_dtype(name, parameter)
        require_own_type(name, parameter)
        if parameter.layout != torch.strided:
            raise TypeError(
                f"{name} is a parameter of layout {parameter.layout}, whose gradient cannot be "
                "exchanged; it must be dense"
            )
        if parameter.device != trained[0][1].device:
            raise TypeError(
                f"{name} is on {parameter.device}, but {trained[0][0]} on {trained[0][1].device}; "
                "put all parameters of an optimizer on one device"
            )


def require_alone(name: str, parameter: Tensor) -> None:
    """Raises RuntimeError if DDP reduces the parameter's gradient too."""
    if _C.has_reducer(parameter):
        raise RuntimeError(
            f"DistributedDataParallel reduces the gradient of {name}, and this optimizer would "
            "exchange it again: leave the model out of DDP (with accelerate, out of prepare()), or "
            "keep DDP, with a torch.optim optimizer and sparsecomm.register_comm_hook(ddp, state)"
        )


def require_own_type(name: str, parameter: Tensor, gradient: Tensor | None = None) -> None:
    """Raises TypeError if the gradient is, or is to be, of another type than the parameter."""
    # Which torch has since 2.11; None: of any type.
    dtype = getattr(parameter, "grad_dtype", None) if gradient is None else gradient.dtype
    if dtype not in (None, parameter.dtype):
        raise TypeError(
            f"{name} is {parameter.dtype} and its gradient {dtype}, but gradients are exchanged in "
            "the type of their parameter: leave its grad_dtype as torch sets it"
        )


def names_of(named_parameters: Iterable[tuple[str, Tensor]], parameters: list[Tensor]) -> list[str]:
    """The parameters' names."""
    names: dict[Tensor, str] = {}
    for pair in named_parameters:
        if not (
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], Tensor)
        ):
            raise TypeError(
                "named_parameters must hold pairs of a name and a tensor, as "
                f"model.named_parameters() does, not {type(pair).__name__}"
            )
        names[pair[1]] = pair[0]
    missing = [parameter for parameter in parameters if parameter not in names]
    if missing:
        raise ValueError(
            f"{len(missing)} of the optimizer's {len(parameters)} parameters are not among "
            f"named_parameters, the first of shape {list(missing[0].shape)}; give it the "
            "named_parameters() of all models that the optimizer trains"
        )
    return [names[parameter] for parameter in parameters]


def described_group(number: int, group: dict[str, Any]) -> dict[str, str]:
    """The options of a parameter group that ranks must agree on: numbers, words, and pairs of them.

    What else a program keeps there need not print alike in two processes.
    """
    return {
        f"{key} of parameter group {number}": f"{value.item() if _is_number(value) else value}"
        for key, value in group.items()
        if key not in ("params", "param_names") and _is_plain(value)
    }


def described_groups(groups: list[dict[str, Any]]) -> dict[str, str]:
    """:func:`described_group` of each."""
    entries: dict[str, str] = {}
    for number, group in enumerate(groups):
        entries |= described_group(number, group)
    return entries


def described_parameters(named: list[tuple[str, Tensor]]) -> dict[str, str]:
    """Parameters, which ranks must agree on, their values included."""
    entries = {}
    for name, parameter in named:
        kind = f"{parameter.dtype} {list(parameter.shape)} of strides {list(parameter.stride())}"
        entries[name] = kind if parameter.requires_grad else f"{kind}, without a gradient"
    return entries | described_values(named)


def described_values(named: list[tuple[str, Tensor]]) -> dict[str, str]:
    """Checksums of the parameters' values, which ranks must agree on."""
    entries = {}
    for name, parameter in named:
        values = parameter.detach().cpu().contiguous()
        entries[f"the values of {name}"] = f"{_C.checksum(values):016x}"
    return entries


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str)) or _is_number(value)


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _join(ranks: list[int]) -> str:
    return (" " if len(ranks) == 1 else "s ") + ", ".join(map(str, ranks))

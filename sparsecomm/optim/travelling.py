"""The placeholder in ``grad`` while a gradient is being exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import Self


class TravellingGradient(Tensor):
    """Looks like the gradient of a parameter, and refuses to be read or changed.

    ``None`` in its place would be skipped by ``clip_grad_norm_`` and the like without a word, and
    the values are not known yet. It has no memory: its shape, dtype and device may be asked for,
    and any operation on it, of torch's gradient accumulation too, raises RuntimeError.
    """

    parameter_name: str
    optimizer: str  # that exchanges it

    @staticmethod
    def __new__(cls, name: str, parameter: Tensor, optimizer: str) -> Self:
        make: Callable[..., Self] = torch.Tensor._make_wrapper_subclass
        gradient = make(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        gradient.parameter_name = name
        gradient.optimizer = optimizer
        return gradient

    # Attributes such as shape are answered by torch as ever.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        operation: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        raise RuntimeError(_problem(_first_name([*args, *(kwargs or {}).values()])))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{_problem(self.parameter_name)}>"

    def __deepcopy__(self, memo: object) -> None:
        """A copied parameter begins without a gradient, as one that is copied after zero_grad()."""


def _first_name(values: Sequence[Any]) -> str:
    for value in values:
        if isinstance(value, TravellingGradient):
            return value.parameter_name
        if isinstance(value, (list, tuple)) and (name := _first_name(value)):
            return name
    return ""


def _problem(name: str) -> str:
    return (
        f"the gradient of {name} is being exchanged with the other ranks: call the optimizer's "
        "synchronize() after backward(), before anything reads or changes gradients (clipping, "
        "norms, GradScaler), and register post-accumulate-grad hooks before the optimizer is made. "
        "Before another backward pass call step(), or zero_grad() if the last one was broken off; "
        "all passes of a step but its last one go within no_sync()"
    )

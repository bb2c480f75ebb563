"""The shapes and dtypes that come out of ``torch.ops.sparsecomm``.

What ``torch.compile``, ``torch.export`` and tensors on the device ``meta`` see. Arguments are
checked where the operators run. Registered on import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsecomm import _C  # noqa: F401  defines the operators

__all__ = ["packed_dtype"]

Pair = tuple[Tensor, Tensor]


def packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of residuals and packed values of a gradient of this dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _register(name: str, fake: Callable[..., Any]) -> None:
    torch.library.register_fake(f"sparsecomm::{name}", fake)


def _packed(like: Tensor, sizes: Sequence[int | torch.SymInt], dtype: torch.dtype) -> Pair:
    return like.new_empty(sizes, dtype=torch.int32), like.new_empty(sizes, dtype=dtype)


def _some(like: Tensor, dtype: torch.dtype) -> Pair:
    """As many entries as there happen to be."""
    count = torch.library.get_ctx().new_dynamic_size()
    return _packed(like, [count], dtype)


def _selection(input: Tensor, *args: Any, **kwargs: Any) -> Pair:
    return _some(input, packed_dtype(input.dtype))


def _threshold(gradient: Tensor, k: int, **kwargs: Any) -> Pair:
    return (
        gradient.new_empty((), dtype=packed_dtype(gradient.dtype)),
        gradient.new_empty((), dtype=torch.int64),
    )


def _top_k(input: Tensor, k: int, *, bucket: int | None = None) -> Pair:
    row = input.shape[-1]
    count = min(k, row)
    if bucket is not None:
        count = row // bucket * min(k, bucket) + min(k, row % bucket)
    return _packed(input, [*input.shape[:-1], count], packed_dtype(input.dtype))


def _blocks(size: int, block: int) -> int:
    return (size + block - 1) // block


def _qsgd_quantize(
    input: Tensor,
    bits: int,
    *,
    seed: int,
    operation: int = 0,
    stream: int = 0,
    bucket: int = 1024,
) -> Tensor:
    scales = _blocks(input.numel(), bucket) * input.element_size()
    return input.new_empty([scales + _blocks(input.numel() * bits, 8)], dtype=torch.uint8)


def _qsgd_dequantize(
    codes: Tensor,
    size: int,
    bits: int,
    *,
    dtype: torch.dtype = torch.float32,
    bucket: int = 1024,
) -> Tensor:
    return codes.new_empty([size], dtype=dtype)


def _in_place(*args: Any, **kwargs: Any) -> None:
    return None


def _block_scan(input: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    words = _blocks(_blocks(input.numel(), block), 64)
    return (
        input.new_empty([words], dtype=torch.int64),
        input.new_empty([count], dtype=torch.int32),
        input.new_empty([count, block]),
    )


def _block_gather(input: Tensor, numbers: Tensor, block: int) -> Tensor:
    return input.new_empty([numbers.shape[0], block])


def _block_top_k(input: Tensor, k: int, block: int) -> Pair:
    count = min(k, _blocks(input.numel(), block))
    return input.new_empty([count], dtype=torch.int32), input.new_empty([count, block])


def _sparse_sum(indices: list[Tensor], values: list[Tensor], size: int) -> Pair:
    return _some(values[0], values[0].dtype)


def _sparse_intersection(
    indices: Tensor, values: Tensor, other_indices: Tensor, other_values: Tensor | None, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    shared_indices, shared_values = _some(values, values.dtype)
    count = 0 if other_values is None else shared_values.shape[0]
    return shared_indices, shared_values, values.new_empty([count])


_register("fused_error_feedback", _selection)
_register("select", _selection)
_register("top_k", _top_k)
_register("threshold_exact", _threshold)
_register("threshold_sampled", _threshold)
_register("threshold_gaussian", _threshold)
_register("qsgd_quantize", _qsgd_quantize)
_register("qsgd_dequantize", _qsgd_dequantize)
_register("qsgd_dequantize_add", _in_place)
_register("block_scan", _block_scan)
_register("block_gather", _block_gather)
_register("block_scatter", _in_place)
_register("block_top_k", _block_top_k)
_register("sparse_sum", _sparse_sum)
_register("sparse_intersection", _sparse_intersection)
_register("scatter", _in_place)

"""Selection and compression as functions on tensors, over the operators ``torch.ops.sparsecomm``.

They work under ``torch.compile(fullgraph=True)`` and ``torch.export``. Tensors are dense, and all
on the CPU or on one CUDA device; others raise ``NotImplementedError``, as CUDA tensors do where
sparsecomm was built without CUDA kernels. On a device the current stream is used, the caller waits
for it where a size or a check depends on values, and results have the CPU's bits (a gaussian
threshold but for rounding). Gradients are of float32, float64, float16 or bfloat16, of any shape
and strides; an entry's index is its position in row-major order, an int32, so that there may be up
to 2^31 entries. What is kept or packed of an entry is of the *packed dtype*:
float64 for float64, float32 for all others. Arguments outside of what is said here raise
``ValueError``.

The threads are those of ``torch.set_num_threads``; no result depends on their number. None of these
functions has a derivative: a backward pass that comes to one raises ``RuntimeError``. N is the
number of entries, k what is selected of them.

What torch does as well is left to it: to add entries to a dense tensor there is
``Tensor.index_add_``, to split sorted indices at boundaries ``torch.searchsorted``, to count
magnitudes ``torch.histc``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from sparsecomm import fake_kernels  # noqa: F401

__all__ = [
    "BlockScan",
    "Blocks",
    "Intersection",
    "SparseVector",
    "Threshold",
    "block_gather",
    "block_scan",
    "block_scatter_",
    "block_top_k",
    "fused_error_feedback",
    "qsgd_dequantize",
    "qsgd_dequantize_add_",
    "qsgd_quantize",
    "scatter_",
    "select",
    "sparse_intersection",
    "sparse_sum",
    "threshold_exact",
    "threshold_gaussian",
    "threshold_sampled",
    "top_k",
]

_ops = torch.ops.sparsecomm


class SparseVector(NamedTuple):
    """Entries in the order of their indices.

    Attributes:
        indices: int32.
        values: as many.
    """

    indices: Tensor
    values: Tensor


class Threshold(NamedTuple):
    """Chosen is what exceeds ``magnitude`` in magnitude, and ``ties`` of what equals it.

    Of equals those with the lowest indices are taken; zeros are never chosen.

    Attributes:
        magnitude: one number, of the packed dtype.
        ties: one number, of int64.
    """

    magnitude: Tensor
    ties: Tensor


class BlockScan(NamedTuple):
    """The blocks that hold a bit that is set.

    Attributes:
        bitmap: int64; bit ``i % 64`` of word ``i // 64`` stands for block ``i``.
        numbers: int32, the blocks' numbers in order.
        blocks: ``[len(numbers), block]``; a last block that is short is filled up with zeros.
    """

    bitmap: Tensor
    numbers: Tensor
    blocks: Tensor


class Blocks(NamedTuple):
    """Blocks in the order of their numbers.

    Attributes:
        numbers: int32.
        blocks: ``[len(numbers), block]``; a last block that is short is filled up with zeros.
    """

    numbers: Tensor
    blocks: Tensor


class Intersection(NamedTuple):
    """The entries of two sparse vectors at the indices that both have, in their order.

    Attributes:
        indices: int32.
        values: the first vector's, one for each.
        other_values: the second's.
    """

    indices: Tensor
    values: Tensor
    other_values: Tensor


def _cut(threshold: float | Threshold) -> tuple[Tensor, Tensor | None]:
    if isinstance(threshold, Threshold):
        return threshold
    return torch.tensor(threshold, dtype=torch.float64), None


def fused_error_feedback(
    gradient: Tensor,
    residual: Tensor,
    *,
    threshold: float | Threshold | None = None,
    k: int | None = None,
    limit: int | None = None,
    scale: float = 1.0,
    momentum: Tensor | None = None,
    factor: float = 0.0,
    mask_momentum: bool = True,
) -> SparseVector:
    """Takes out of ``a = residual + scale * gradient`` what is to be sent, in one pass over memory.

    In place: ``residual`` becomes a, with +0 where an entry was taken; ``gradient`` becomes 0. With
    ``momentum`` (Lin et al. 2018, sections 3.1 and 3.2), u, it is ``u = factor * u + scale *
    gradient`` and ``a = residual + u``, and u too becomes 0 where an entry was taken, unless
    ``mask_momentum`` is false.

    Args:
        gradient: [...], modified.
        residual: of the same shape and the packed dtype, modified.
        threshold: take every entry with ``|a| >= threshold`` but zeros; or what a
            :class:`Threshold` says. NaN and infinities are always taken.
        k: instead of a threshold, take the k entries of largest magnitude, ties by lowest index;
            fewer where fewer are not zero.
        limit: the most entries taken, lowest indices first; what is left stays in the residual.
        momentum: of the same shape and the packed dtype, modified.

    Returns:
        What was taken: indices, and a there, of the packed dtype.

    Reads 2N and writes 2N entries; 3N with momentum; with ``k`` it reads 2N entries once more, and
    where there is a scale or momentum 2N again. Source: Li and Hoefler 2022 (Ok-Topk), Algorithm 2.
    """
    magnitude, ties = (None, None) if threshold is None else _cut(threshold)
    return SparseVector(
        *_ops.fused_error_feedback(
            gradient,
            residual,
            threshold=magnitude,
            ties=ties,
            k=k,
            limit=limit,
            scale=scale,
            momentum=momentum,
            factor=factor,
            mask_momentum=mask_momentum,
        )
    )


def select(
    input: Tensor, threshold: float | Threshold, *, limit: int | None = None
) -> SparseVector:
    """The entries with ``|input| >= threshold`` but zeros, or those a :class:`Threshold` chooses.

    NaN and infinities are always among them. At most ``limit``, lowest indices first. Values are of
    the packed dtype. Reads N.
    """
    magnitude, ties = _cut(threshold)
    return SparseVector(*_ops.select(input, magnitude, ties, limit=limit))


def top_k(input: Tensor, k: int, *, bucket: int | None = None) -> SparseVector:
    """The k entries of largest magnitude of each row, or of each bucket of each row.

    What is not finite comes first, all alike; among equals the lowest index comes first. They stand
    in the order of their indices, which count from the start of the row. Zeros count, so that there
    are always as many as asked for.

    Args:
        input: [..., row].
        k: how many; all, where there are fewer.
        bucket: with it, the k largest of every ``bucket`` consecutive entries, 1 to 4,096, of which
            the last may be fewer (Renggli et al. 2019 (SparCML), section 8).

    Returns:
        Indices and values of shape [..., min(k, row)], with buckets
        [..., row // bucket * min(k, bucket) + min(k, row % bucket)].

    Reads N once, as a rule: a sample tells what is surely not among them.
    """
    return SparseVector(*_ops.top_k(input, k, bucket=bucket))


def threshold_exact(gradient: Tensor, k: int, *, residual: Tensor | None = None) -> Threshold:
    """The threshold that chooses exactly k entries of ``gradient + residual``.

    All that are not zero, where those are fewer; k is at least 1. Reads 2N once, as a rule.
    """
    return Threshold(*_ops.threshold_exact(gradient, k, residual=residual))


def threshold_sampled(
    gradient: Tensor, k: int, *, residual: Tensor | None = None, stride: int = 64, phase: int = 0
) -> Threshold:
    """An estimate of :func:`threshold_exact` from one of every ``stride`` runs of 16 entries.

    Another ``phase`` takes other runs. The stride is reduced so that the count it leads to is
    within 10% of k in 98 of 100 cases; where that takes a stride under 4, the exact threshold is
    found. Reads 2N / stride.
    """
    return Threshold(
        *_ops.threshold_sampled(gradient, k, residual=residual, stride=stride, phase=phase)
    )


def threshold_gaussian(gradient: Tensor, k: int, *, residual: Tensor | None = None) -> Threshold:
    """The threshold that k entries of ``gradient + residual`` exceed if they are normal.

    Lowered until more than 3/4 k pass. Reads 2N twice. Source: Shi et al. 2019 (Gaussian-k),
    Ok-Topk section 5.4.
    """
    return Threshold(*_ops.threshold_gaussian(gradient, k, residual=residual))


def qsgd_quantize(
    input: Tensor,
    bits: Literal[2, 4, 8],
    *,
    seed: int,
    operation: int = 0,
    stream: int = 0,
    bucket: Literal[512, 1024] = 1024,
) -> Tensor:
    """QSGD of buckets of 512 or 1,024 entries, in the format that travels on the wire.

    An entry becomes one of 2^(bits-1) - 1 levels of either sign of the largest magnitude in its
    bucket, at random, so that its expectation is the entry itself.

    Args:
        input: [...] of float32 or float64, all finite.
        bits: of an entry.
        seed: what the random numbers depend on, with the next two; the same ones give the same
            bytes.
        operation: such as a step's number.
        stream: such as a rank; 32 bits.
        bucket: how many consecutive entries share a scale.

    Returns:
        uint8, one scale a bucket and ``bits`` an entry: ceil(N / bucket) * itemsize +
        ceil(N * bits / 8) bytes.

    O(N), one pass over memory. Source: Alistarh et al. 2017, as in SparCML section 6.
    """
    codes: Tensor = _ops.qsgd_quantize(
        input, bits, seed=seed, operation=operation, stream=stream, bucket=bucket
    )
    return codes


def qsgd_dequantize(
    codes: Tensor,
    size: int,
    bits: Literal[2, 4, 8],
    *,
    dtype: torch.dtype = torch.float32,
    bucket: Literal[512, 1024] = 1024,
) -> Tensor:
    """The ``size`` values, of the dtype that was quantised, that ``codes`` stand for. O(size).

    Bytes that :func:`qsgd_quantize` cannot have made raise ``ValueError``.
    """
    values: Tensor = _ops.qsgd_dequantize(codes, size, bits, dtype=dtype, bucket=bucket)
    return values


def qsgd_dequantize_add_(
    dense: Tensor, codes: Tensor, bits: Literal[2, 4, 8], *, bucket: Literal[512, 1024] = 1024
) -> Tensor:
    """Adds what ``codes`` stand for to ``dense``, of the dtype that was quantised; returns it.

    Bytes that :func:`qsgd_quantize` cannot have made raise ``ValueError`` and change nothing.
    """
    _ops.qsgd_dequantize_add(dense, codes, bits, bucket=bucket)
    return dense


def block_scan(input: Tensor, block: int) -> BlockScan:
    """Which blocks of ``block`` consecutive entries are not all zero bits, and those blocks.

    NaN and -0.0 have bits that are set, so that they survive.

    Args:
        input: [...] of any dense dtype; a block must take a multiple of 4 bytes.

    Reads N once. Source: Fei et al. 2021 (OmniReduce).
    """
    return BlockScan(*_ops.block_scan(input, block))


def block_gather(input: Tensor, numbers: Tensor, block: int) -> Tensor:
    """The blocks of ``block`` consecutive entries that have these numbers.

    Args:
        input: [...] of any dense dtype.
        numbers: int32 vector, in any order; block i holds entries ``block * i`` and on.

    Returns:
        ``[len(numbers), block]``; zeros stand behind the end of a last block that is short.

    Reads and writes ``len(numbers) * block`` entries.
    """
    blocks: Tensor = _ops.block_gather(input, numbers, block)
    return blocks


def block_scatter_(dense: Tensor, numbers: Tensor, blocks: Tensor) -> Tensor:
    """Writes blocks to the places of their numbers in ``dense``, in place; returns it.

    Args:
        dense: [...] of any dense dtype, modified.
        numbers: int32 vector, strictly increasing.
        blocks: ``[len(numbers), block]`` of the same dtype; what lies behind the end of ``dense``
            is left out.
    """
    _ops.block_scatter(dense, numbers, blocks)
    return dense


def block_top_k(input: Tensor, k: int, block: int) -> Blocks:
    """The k blocks of ``block`` consecutive entries whose norms are the largest; all, if fewer.

    Sums of squares, in float64, are compared; among equals the lowest number comes first, and sums
    that are not finite come before all others.

    Args:
        input: [...] of float32, float64, float16 or bfloat16.

    Reads N once. Source: Gu et al. 2024 (OmNICCL).
    """
    return Blocks(*_ops.block_top_k(input, k, block))


def sparse_sum(vectors: Sequence[tuple[Tensor, Tensor]], size: int) -> SparseVector:
    """The sum of sparse vectors of ``size`` entries.

    Args:
        vectors: (indices, values) of each, at least one; indices of int32, strictly increasing;
            values of float32, float64, int32 or int64, the same in all.

    Returns:
        Every index that a vector has, sums that are 0 too. At an index values are added in the
        order of the vectors, whatever the number of threads.

    O(entries + size / 64), or O(entries log vectors) where that is less.
    """
    indices = [vector[0] for vector in vectors]
    values = [vector[1] for vector in vectors]
    return SparseVector(*_ops.sparse_sum(indices, values, size))


@overload
def sparse_intersection(
    vector: tuple[Tensor, Tensor], other: Tensor, size: int
) -> SparseVector: ...
@overload
def sparse_intersection(
    vector: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], size: int
) -> Intersection: ...
def sparse_intersection(
    vector: tuple[Tensor, Tensor], other: Tensor | tuple[Tensor, Tensor], size: int
) -> SparseVector | Intersection:
    """The entries of a sparse vector of ``size`` entries at the indices that another one has too.

    Args:
        vector: (indices, values); indices of int32, strictly increasing; values of float32,
            float64, int32 or int64.
        other: such a vector with values of the same dtype, or indices alone.

    Returns:
        With indices alone, what ``vector`` has there; otherwise also what ``other`` has.

    O(entries of both), or O(fewer log(more / fewer)) where one has far fewer than the other.
    """
    indices, values = (other, None) if isinstance(other, Tensor) else other
    shared = _ops.sparse_intersection(*vector, indices, values, size)
    return SparseVector(*shared[:2]) if values is None else Intersection(*shared)


def scatter_(dense: Tensor, indices: Tensor, values: Tensor, *, divisor: float = 1.0) -> Tensor:
    """``dense.view(-1)[indices] = values / divisor``, rounded once; returns ``dense``.

    Args:
        dense: [...], modified; of a gradient's dtype.
        indices: int32, in [0, N), no two the same.
        values: one for each, of the packed dtype.

    O(len(indices)), or O(N) where ``dense`` is not contiguous. An error leaves ``dense`` as it was.
    """
    _ops.scatter(dense, indices, values, divisor=divisor)
    return dense

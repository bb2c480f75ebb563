"""sparsecomm.functional against torch and numpy, and as torch wants operators to be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from sparsecomm import _C
from sparsecomm import functional as sf
from sparsecomm.fake_kernels import packed_dtype

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [0, 1, 15, 16, 17, 5_000, 2**17 + 3]
ops = torch.ops.sparsecomm


def randn(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, dtype=torch.float64, generator=generator).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Of one dtype and shape, and equal, NaN to NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def indices_of(mask: Tensor) -> Tensor:
    return mask.flatten().nonzero().flatten().to(torch.int32)


def largest(x: Tensor, k: int) -> Tensor:
    """The indices of the k largest magnitudes, ties by lowest index, in index order."""
    order = np.argsort(-x.abs().double().numpy(), kind="stable")
    return torch.from_numpy(np.sort(order[:k]).astype(np.int32))


# ---- selection


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_select_takes_what_reaches_the_threshold(size: int, dtype: torch.dtype) -> None:
    x = (randn(size, dtype=dtype) * 8).round() / 8  # with many ties and zeros
    for threshold in (0.0, 0.3, 1.0, math.inf):
        mask = (x.double().abs() >= threshold) & (x != 0)
        got = sf.select(x, threshold)
        assert same(got.indices, indices_of(mask))
        assert same(got.values, x[mask].to(packed_dtype(dtype)))
        few = sf.select(x, threshold, limit=7)
        assert same(few.indices, got.indices[:7])


def test_a_threshold_that_float32_cannot_hold_is_not_rounded() -> None:
    x = torch.tensor([0.1, -0.1, 0.2])  # 0.1f > 0.1
    assert sf.select(x, 0.1).indices.tolist() == [0, 1, 2]
    assert sf.select(x, float(x[0]) + 1e-12).indices.tolist() == [2]
    assert sf.select(torch.tensor([3e38, math.inf]), 1e300).indices.tolist() == [1]


def test_select_always_takes_what_is_not_finite() -> None:
    x = torch.tensor([1.0, math.nan, -math.inf, 0.0, -0.0, 3.0])
    assert sf.select(x, 2.0).indices.tolist() == [1, 2, 5]
    assert sf.select(x, 0.0).indices.tolist() == [0, 1, 2, 5]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "arguments", [{"threshold": 1.0}, {"k": 100}, {"threshold": 0.5, "limit": 9}]
)
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("mask", [None, False, True])
def test_fused_error_feedback(
    size: int, dtype: torch.dtype, arguments: dict[str, Any], scale: float, mask: bool | None
) -> None:
    kept = packed_dtype(dtype)
    gradient, residual = randn(size, dtype=dtype), randn(size, dtype=kept, seed=1)
    momentum = None if mask is None else randn(size, dtype=kept, seed=2)
    expected = residual + scale * gradient.to(kept)
    velocity = None
    if momentum is not None:
        velocity = 0.9 * momentum + scale * gradient.to(kept)
        expected = residual + velocity
    if "k" in arguments:
        taken = largest(expected, arguments["k"])
    else:
        taken = indices_of(expected.abs() >= arguments["threshold"])[: arguments.get("limit")]

    got = sf.fused_error_feedback(
        gradient,
        residual,
        scale=scale,
        momentum=momentum,
        factor=0.9,
        mask_momentum=bool(mask),
        **arguments,
    )
    assert same(got.indices, taken)
    assert same(got.values, expected[taken.long()])
    assert same(gradient, torch.zeros(size, dtype=dtype))
    expected[taken.long()] = 0
    assert same(residual, expected)
    if velocity is not None and momentum is not None:
        if mask:
            velocity[taken.long()] = 0
        assert same(momentum, velocity)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_error_feedback_hands_on_what_is_not_finite(scale: float) -> None:
    cases: list[dict[str, Any]] = [{"k": 2}, {"threshold": math.inf}]
    for arguments in cases:
        gradient, residual = randn(100), randn(100, seed=1)
        gradient[7], gradient[90] = math.nan, -math.inf
        got = sf.fused_error_feedback(gradient, residual, scale=scale, **arguments)
        assert got.indices.tolist() == [7, 90]
        assert got.values[0].isnan()
        assert got.values[1] == -math.inf
        assert residual.isfinite().all()
        assert torch.equal(gradient, torch.zeros(100))


def test_strides_do_not_matter() -> None:
    gradient, residual = randn(60, 50), randn(60, 50, seed=1)
    whole = torch.zeros(120, 50), torch.zeros(50, 60)
    views = whole[0][::2], whole[1].T
    views[0].copy_(gradient)
    views[1].copy_(residual)
    expected = sf.fused_error_feedback(gradient, residual, k=30)
    got = sf.fused_error_feedback(*views, k=30)
    assert same(got.indices, expected.indices)
    assert same(got.values, expected.values)
    assert same(views[1], residual)
    assert same(whole[0], torch.zeros(120, 50))

    x = randn(50, 60).T
    for call in (
        lambda x: sf.select(x, 1.0),
        lambda x: sf.top_k(x, 3),
        lambda x: sf.threshold_exact(x, 3),
        lambda x: sf.block_scan(x, 4),
        lambda x: sf.block_top_k(x, 9, 16),
        lambda x: [sf.block_gather(x, torch.tensor([7, 2], dtype=torch.int32), 64)],
        lambda x: [sf.qsgd_quantize(x, 4, seed=1)],
    ):
        assert all(map(same, call(x), call(x.contiguous())))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (17,), (3, 4_096), (2, 3, 100), (2, 70_001)])
@pytest.mark.parametrize("k", [0, 1, 16, 100, 10**6])
def test_top_k_of_rows(shape: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    x = randn(*shape, dtype=dtype)
    got = sf.top_k(x, k)
    count = min(k, shape[-1])
    assert got.indices.shape == (*shape[:-1], count)
    rows = math.prod(shape[:-1])
    parts = (x.view(rows, shape[-1]), *(part.view(rows, count) for part in got))
    for row, indices, values in zip(*parts, strict=True):
        assert same(indices, largest(row, k))
        assert same(values, row[indices.long()].to(packed_dtype(dtype)))
    if x.numel():
        magnitudes = torch.topk(x.abs().to(packed_dtype(dtype)), count).values
        assert same(got.values.abs().sort(descending=True).values, magnitudes)


def test_top_k_of_buckets() -> None:
    x = randn(3, 1_300)
    got = sf.top_k(x, 8, bucket=512)
    for row in range(3):
        parts = [x[row, first : first + 512] for first in (0, 512, 1_024)]
        expected = torch.cat([largest(part, 8) + 512 * i for i, part in enumerate(parts)])
        assert same(got.indices[row], expected)
        assert same(got.values[row], x[row][expected.long()])


def test_top_k_on_hard_input() -> None:
    assert sf.top_k(torch.ones(10_000), 3).indices.tolist() == [0, 1, 2]
    assert sf.top_k(torch.zeros(10_000), 3).indices.tolist() == [0, 1, 2]
    x = torch.tensor([5.0, math.nan, 0.0, math.inf, 7.0, -math.inf])
    assert sf.top_k(x, 2).indices.tolist() == [1, 3]
    assert sf.top_k(x, 4).indices.tolist() == [1, 3, 4, 5]


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor has no such mode")
def test_top_k_where_subnormals_count_as_zeros() -> None:
    x = torch.zeros(5_000)
    x[10] = 1e-40
    torch.set_flush_denormal(True)
    try:
        assert sf.top_k(x, 10).indices.tolist() == [*range(9), 10]
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_thresholds(dtype: torch.dtype) -> None:
    size, k = 2**20 + 3, 20_000
    gradient, residual = randn(size, dtype=dtype), randn(size, dtype=packed_dtype(dtype), seed=1)
    both = gradient.to(packed_dtype(dtype)) + residual
    exact = sf.threshold_exact(gradient, k, residual=residual)
    assert exact.magnitude.dtype == packed_dtype(dtype)
    assert exact.magnitude == torch.topk(both.abs(), k).values[-1]
    assert same(sf.select(both, exact).indices, largest(both, k))
    sampled = sf.threshold_sampled(gradient, k, residual=residual, stride=32, phase=5)
    assert len(sf.select(both, sampled).indices) == pytest.approx(k, rel=0.1)
    gaussian = sf.threshold_gaussian(gradient, k, residual=residual)
    assert len(sf.select(both, gaussian).indices) == pytest.approx(k, rel=0.1)
    assert sf.threshold_exact(torch.ones(10), 3) == (1.0, 3)
    assert len(sf.select(torch.ones(10), sf.threshold_exact(torch.ones(10), 3)).indices) == 3


def test_threads_do_not_matter() -> None:
    def results() -> list[Tensor]:
        gradient, residual = randn(300_000), randn(300_000, seed=1)
        momentum = randn(300_000, seed=2)
        threshold = sf.threshold_exact(gradient, 1_000)
        parts = [
            *sf.fused_error_feedback(gradient, residual, k=900, momentum=momentum, factor=0.5),
            *sf.select(residual, threshold, limit=500),
            *sf.top_k(residual, 77),
            *sf.block_scan(residual * (residual > 2), 8),
            *sf.block_top_k(residual, 100, 64),
        ]
        return [*parts, *threshold, gradient, residual, momentum]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results()
        torch.set_num_threads(3)
        assert all(map(same, results(), alone))
    finally:
        torch.set_num_threads(before)


# ---- what becomes of it


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("size", [0, 1, 1_023, 1_024, 5_001])
@pytest.mark.parametrize("bucket", [512, 1_024])
def test_qsgd(size: int, bits: Any, dtype: torch.dtype, bucket: Any) -> None:
    x = randn(size, dtype=dtype)
    codes = sf.qsgd_quantize(x, bits, seed=3, bucket=bucket)
    assert same(codes, sf.qsgd_quantize(x, bits, seed=3, bucket=bucket))
    values = sf.qsgd_dequantize(codes, size, bits, dtype=dtype, bucket=bucket)
    levels = 2 ** (bits - 1) - 1
    for part, rounded in zip(x.split(bucket), values.split(bucket), strict=True):
        scale = part.abs().max() if len(part) else 1.0
        assert torch.all((part - rounded).abs() <= scale / levels * (1 + 1e-5))
        position = rounded.abs() / scale * levels
        assert torch.all((position - position.round()).abs() < 1e-3)
    dense = randn(size, dtype=dtype, seed=1)
    expected = dense + values
    assert sf.qsgd_dequantize_add_(dense, codes, bits, bucket=bucket) is dense
    assert same(dense, expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_is_what_the_wire_carries(bits: Any) -> None:
    x = randn(5_001)
    for bucket, codec in ((512, f"qsgd{bits}_512"), (1_024, f"qsgd{bits}")):
        rounded = x.clone()
        _C.round_values(codec, rounded, 3, 4, 5)
        codes = sf.qsgd_quantize(x, bits, seed=3, operation=4, stream=5, bucket=bucket)
        sent = torch.empty_like(codes)
        assert _C.encode_values(codec, rounded, sent) == len(codes)
        assert same(sent, codes)
        assert same(sf.qsgd_dequantize(codes, len(x), bits, bucket=bucket), rounded)


def test_malformed_codes_change_nothing() -> None:
    dense = randn(5_000)
    before = dense.clone()
    codes = sf.qsgd_quantize(dense, 4, seed=1)
    codes[-1] = 0xFF
    with pytest.raises(ValueError, match="code of a level is 15, must be at most 14"):
        sf.qsgd_dequantize_add_(dense, codes, 4)
    assert same(dense, before)


def test_qsgd_is_unbiased() -> None:
    x = randn(1_024)
    rounds = 400
    total = torch.zeros_like(x)
    for seed in range(rounds):
        sf.qsgd_dequantize_add_(total, sf.qsgd_quantize(x, 4, seed=seed), 4)
    deviation = x.abs().max() / 7 / 2 / math.sqrt(rounds)  # at most, of an entry's mean
    assert (total / rounds - x).abs().max() < 5 * deviation
    assert not torch.equal(total / rounds, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("size", [0, 8, 1_001, 70_000])
def test_block_scan(size: int, dtype: torch.dtype) -> None:
    x = torch.zeros(size, dtype=dtype)
    x[5::137] = 3
    if dtype.is_floating_point and size > 1_000:
        x[600] = math.nan
        x[700] = -0.0
    if size:
        x[-1] = 1
    padded = torch.cat([x, x.new_zeros(-size % 8)]).view(-1, 8)
    bits_set = padded.view(torch.uint8).view(len(padded), 8 * x.element_size()) != 0
    holds = bits_set.any(1)
    got = sf.block_scan(x, 8)
    assert same(got.numbers, indices_of(holds))
    assert torch.equal(got.blocks.view(torch.uint8), padded[holds].view(torch.uint8))
    bits = np.unpackbits(got.bitmap.numpy().view(np.uint8), bitorder="little")
    assert np.array_equal(bits[: len(holds)], holds.numpy())


def padded_blocks(x: Tensor, block: int) -> Tensor:
    return torch.cat([x, x.new_zeros(-len(x) % block)]).view(-1, block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize(("size", "block"), [(1, 1), (1_001, 7), (70_000, 256), (5, 100)])
def test_blocks_are_copied_out_and_back(size: int, block: int, dtype: torch.dtype) -> None:
    x = (randn(size).abs() * 50).to(dtype)
    blocks = padded_blocks(x, block)
    numbers = torch.randperm(len(blocks)).to(torch.int32)
    assert torch.equal(sf.block_gather(x, numbers, block), blocks[numbers.long()])
    some = indices_of(torch.arange(len(blocks)) % 3 != 1)
    got = sf.block_gather(x, some, block)
    target = torch.full((size,), 7).to(dtype)
    expected = padded_blocks(target, block).index_copy(0, some.long(), got).flatten()[:size]
    assert sf.block_scatter_(target, some, got) is target
    assert torch.equal(target, expected)
    strided = torch.zeros(2 * size, dtype=dtype)
    sf.block_scatter_(strided[::2], some, got)
    assert torch.equal(strided[1::2], torch.zeros(size, dtype=dtype))
    none = some[:0]
    assert sf.block_gather(x, none, block).shape == (0, block)
    assert torch.equal(sf.block_scatter_(target, none, got[:0]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "block"), [(0, 4), (1, 1), (1_001, 7), (70_000, 64), (5, 100)])
def test_block_top_k(size: int, block: int, dtype: torch.dtype) -> None:
    x = randn(size, dtype=dtype)
    blocks = padded_blocks(x, block)
    squares = blocks.double().square().sum(1)
    for k in (0, 1, len(blocks) // 3, len(blocks), len(blocks) + 1):
        got = sf.block_top_k(x, k, block)
        expected = squares.topk(min(k, len(blocks))).indices.sort().values
        assert same(got.numbers, expected.to(torch.int32))
        assert same(got.blocks, blocks[expected])


def test_block_top_k_on_hard_input() -> None:
    x = torch.zeros(40)
    assert sf.block_top_k(x, 2, 8).numbers.tolist() == [0, 1]
    x[30], x[17] = math.nan, 1e30
    assert sf.block_top_k(x, 2, 8).numbers.tolist() == [2, 3]
    assert sf.block_top_k(x, 1, 8).numbers.tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_sparse_sum(parts: int, dtype: torch.dtype) -> None:
    size = 10_000
    vectors = []
    for seed in range(parts):
        generator = torch.Generator().manual_seed(seed)
        indices = indices_of(torch.rand(size, generator=generator) < 0.05 * seed)
        vectors.append((indices, (randn(len(indices), seed=seed) * 100).to(dtype)))
    got = sf.sparse_sum(vectors, size)
    total = torch.zeros(size, dtype=dtype)
    present = torch.zeros(size, dtype=torch.bool)
    for indices, values in vectors:
        total.index_add_(0, indices, values)
        present[indices.long()] = True
    assert same(got.indices, indices_of(present))
    assert same(got.values, total[present])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
@pytest.mark.parametrize(("density", "other_density"), [(0.3, 0.4), (0.5, 0.001), (0, 0.5), (1, 1)])
def test_sparse_intersection(density: float, other_density: float, dtype: torch.dtype) -> None:
    size = 10_000
    drawn = torch.rand(2, size, generator=torch.Generator().manual_seed(3))
    present = drawn < torch.tensor([[density], [other_density]])
    dense = (randn(2, size) * 100).to(dtype)
    one, other = ((indices_of(p), d[p]) for p, d in zip(present, dense, strict=True))
    both = present[0] & present[1]
    got = sf.sparse_intersection(one, other, size)
    assert same(got.indices, indices_of(both))
    assert same(got.values, dense[0][both])
    assert same(got.other_values, dense[1][both])
    alone = sf.sparse_intersection(other, one[0], size)
    assert same(alone.indices, got.indices)
    assert same(alone.values, got.other_values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter(dtype: torch.dtype) -> None:
    dense = randn(30, 20, dtype=dtype).T
    indices = torch.tensor([3, 7, 599, 100], dtype=torch.int32)
    values = randn(4, dtype=packed_dtype(dtype), seed=1)
    expected = dense.flatten()
    expected[indices.long()] = (values / 3).to(dtype)
    assert sf.scatter_(dense, indices, values, divisor=3) is dense
    assert same(dense.flatten(), expected)


# ---- errors


def without_memory() -> torch.Tensor:
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    return freed


I32 = torch.int32
VECTOR = torch.ones(8)
BIG = torch.ones(1).expand(2**31 + 1)
ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "integers": (lambda: sf.select(VECTOR.int(), 1.0), "is of Int; convert it to float32"),
    "negative threshold": (lambda: sf.select(VECTOR, -1.0), "-1 is not 0 or more"),
    "no threshold": (lambda: sf.select(VECTOR, math.nan), "nan is not 0 or more"),
    "negative limit": (lambda: sf.select(VECTOR, 1.0, limit=-1), "limit = -1 is negative"),
    "too large to select": (lambda: sf.select(BIG, 1.0), "has 2147483649 entries"),
    "too large to feed back": (
        lambda: sf.fused_error_feedback(BIG, BIG, k=1),
        "has 2147483649 entries",
    ),
    "too large a row": (lambda: sf.top_k(BIG, 1), "has 2147483649 entries"),
    "too large a sum": (lambda: sf.sparse_sum([(VECTOR.int(), VECTOR)], 2**31 + 1), "size = "),
    "threshold and k": (
        lambda: sf.fused_error_feedback(VECTOR, VECTOR.clone(), threshold=1.0, k=1),
        "or k",
    ),
    "neither": (lambda: sf.fused_error_feedback(VECTOR, VECTOR.clone()), "or k"),
    "k below 1": (lambda: sf.fused_error_feedback(VECTOR, VECTOR.clone(), k=0), "k = 0 is below 1"),
    "residual's dtype": (
        lambda: sf.fused_error_feedback(VECTOR, VECTOR.double(), k=1),
        "residual is of Double, must be of Float",
    ),
    "residual's shape": (
        lambda: sf.fused_error_feedback(VECTOR, torch.ones(9), k=1),
        "residual has the shape",
    ),
    "shared memory": (
        lambda: sf.fused_error_feedback(VECTOR, VECTOR, k=1),
        "gradient and residual share memory",
    ),
    "shared entries": (
        lambda: sf.fused_error_feedback(torch.ones(1).expand(8), VECTOR.clone(), k=1),
        "gradient has entries that share memory",
    ),
    "shared memory of strided views": (
        lambda: sf.fused_error_feedback(VECTOR[::2], VECTOR[::2], k=1),
        "gradient and residual share memory",
    ),
    "overlapping rows": (
        lambda: sf.fused_error_feedback(
            VECTOR.clone().as_strided((3, 3), (2, 1)), torch.zeros(3, 3), k=1
        ),
        "gradient has entries that share memory",
    ),
    "top-k of a scalar": (lambda: sf.top_k(torch.tensor(1.0), 1), "no dimension"),
    "negative k": (lambda: sf.top_k(VECTOR, -1), "k = -1 is negative"),
    "bucket": (lambda: sf.top_k(VECTOR, 1, bucket=5_000), "bucket = 5000 is not in [1, 4096]"),
    "threshold's k": (lambda: sf.threshold_exact(VECTOR, 0), "k = 0 is below 1"),
    "stride": (lambda: sf.threshold_sampled(VECTOR, 1, stride=0), "stride = 0 is below 1"),
    "bits": (lambda: sf.qsgd_quantize(VECTOR, 3, seed=0), "bits = 3 is none of 2, 4, 8"),  # type: ignore[arg-type]
    "QSGD's bucket": (
        lambda: sf.qsgd_quantize(VECTOR, 4, seed=0, bucket=100),  # type: ignore[arg-type]
        "bucket = 100 is none of 512, 1024",
    ),
    "QSGD of half": (lambda: sf.qsgd_quantize(VECTOR.half(), 4, seed=0), "is of Half"),
    "QSGD of NaN": (lambda: sf.qsgd_quantize(VECTOR * math.nan, 4, seed=0), "value 0 of 8 is nan"),
    "too few codes": (
        lambda: sf.qsgd_dequantize(torch.zeros(7, dtype=torch.uint8), 8, 4),
        "take 8 bytes, not 7",
    ),
    "no codes": (
        lambda: sf.qsgd_dequantize(torch.full((8,), 255, dtype=torch.uint8), 8, 4),
        "must be finite",
    ),
    "block": (lambda: sf.block_scan(VECTOR, 0), "block = 0 is not in"),
    "block's bytes": (lambda: sf.block_scan(VECTOR.half(), 1), "blocks of 2 bytes"),
    "a block out of the input": (
        lambda: sf.block_gather(VECTOR, torch.tensor([2], dtype=I32), 4),
        "number 2 is not in [0, 2)",
    ),
    "numbers among the blocks' places": (
        lambda: sf.block_scatter_(
            numbers := torch.arange(8, dtype=I32), numbers[:2], torch.ones(2, 4, dtype=I32)
        ),
        "dense and numbers share memory",
    ),
    "numbers of int64": (
        lambda: sf.block_gather(VECTOR, torch.tensor([0]), 4),
        "must be a vector of int32",
    ),
    "a number twice": (
        lambda: sf.block_scatter_(VECTOR, torch.tensor([1, 1], dtype=I32), torch.ones(2, 4)),
        "not strictly increasing",
    ),
    "blocks in a row": (
        lambda: sf.block_scatter_(VECTOR, torch.tensor([1], dtype=I32), torch.ones(4)),
        "must be of shape [numbers, block]",
    ),
    "blocks of another dtype": (
        lambda: sf.block_scatter_(VECTOR, torch.tensor([1], dtype=I32), torch.ones(1, 4).half()),
        "blocks is of Half, must be of Float as dense",
    ),
    "too few blocks": (
        lambda: sf.block_scatter_(VECTOR, torch.tensor([0, 1], dtype=I32), torch.ones(1, 4)),
        "2 numbers but 1 blocks",
    ),
    "norms of integers": (lambda: sf.block_top_k(torch.ones(8, dtype=I32), 1, 4), "is of Int"),
    "no vectors": (lambda: sf.sparse_sum([], 8), "at least one tensor"),
    "unsorted": (
        lambda: sf.sparse_sum([(torch.tensor([2, 1], dtype=I32), torch.ones(2))], 8),
        "not strictly increasing",
    ),
    "an unsorted index set": (
        lambda: sf.sparse_intersection(
            (torch.tensor([1], dtype=I32), torch.ones(1)), torch.tensor([2, 2], dtype=I32), 8
        ),
        "the indices of the other are not strictly increasing",
    ),
    "vectors of two dtypes": (
        lambda: sf.sparse_intersection(
            (torch.zeros(1, dtype=I32), torch.ones(1)),
            (torch.zeros(1, dtype=I32), torch.ones(1, dtype=I32)),
            8,
        ),
        "the other's values is of Int, must be of Float",
    ),
    "index out of the sum": (
        lambda: sf.sparse_sum([(torch.tensor([8], dtype=I32), torch.ones(1))], 8),
        "index 8 is not in [0, 8)",
    ),
    "values of two dtypes": (
        lambda: sf.sparse_sum(
            [(torch.zeros(1, dtype=I32), torch.ones(1, dtype=d)) for d in (torch.float, I32)], 8
        ),
        "is of Int, must be of Float",
    ),
    "negative index": (
        lambda: sf.scatter_(VECTOR, torch.tensor([-1], dtype=I32), torch.ones(1)),
        "index -1 is not in [0, 8)",
    ),
    "int64 indices": (
        lambda: sf.scatter_(VECTOR, torch.tensor([1]), torch.ones(1)),
        "must be a vector of int32",
    ),
    "an operand without memory": (
        lambda: sf.select(without_memory(), 1.0),
        "shape [8] has no memory of its own",
    ),
    "an optional operand without memory": (
        lambda: sf.threshold_exact(VECTOR, 1, residual=without_memory()),
        "shape [8] has no memory of its own",
    ),
    "a vector without memory": (
        lambda: sf.sparse_sum([(torch.arange(8, dtype=I32), without_memory())], 8),
        "shape [8] has no memory of its own",
    ),
    "values missing": (
        lambda: sf.scatter_(VECTOR, torch.tensor([1, 2], dtype=I32), torch.ones(1)),
        "2 indices but 1 values",
    ),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    assert message in str(caught.value)
    assert torch.equal(VECTOR, torch.ones(8))


def test_other_layouts_are_refused() -> None:
    # As every backend's tensors are that is not the CPU's.
    with pytest.raises(NotImplementedError, match=r"not Sparse tensors on cpu; .*to_dense"):
        sf.select(VECTOR.to_sparse(), 1.0)
    for name in CASES:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(
            f"sparsecomm::{name}", "CompositeExplicitAutograd"
        )


def test_there_are_no_derivatives() -> None:
    weights = torch.ones(8, requires_grad=True)
    with pytest.raises(RuntimeError, match="sparsecomm::top_k is not implemented"):
        sf.top_k(weights * 2, 3).values.sum().backward()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        sf.scatter_(weights, torch.zeros(1, dtype=I32), torch.ones(1))


# ---- as operators


def vector(seed: int) -> tuple[Tensor, Tensor]:
    indices = indices_of(randn(100, seed=seed) > 0)
    return indices, randn(len(indices), seed=seed)


def cases() -> dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    x, y, z = (randn(3, 700, seed=seed) for seed in range(3))
    one = torch.tensor(1.0)
    (i, v), (j, w) = vector(1), vector(2)
    return {
        "fused_error_feedback": [
            ((x.half(), y), {"k": 10}),
            ((x, y), {"threshold": one, "ties": torch.tensor(2), "limit": 99, "scale": 2.0}),
            ((x, y), {"threshold": one, "momentum": z, "factor": 0.9}),
        ],
        "select": [((x, one), {}), ((x.bfloat16(), one, torch.tensor(2)), {"limit": 9})],
        "top_k": [((x, 10), {}), ((x.half(), 10**4), {}), ((x, 4), {"bucket": 512})],
        "threshold_exact": [((x, 10), {}), ((x.half(), 10), {"residual": y})],
        "threshold_sampled": [((x, 10), {"stride": 5, "phase": 1, "residual": y})],
        "threshold_gaussian": [((x.double(), 10), {})],
        "qsgd_quantize": [
            ((x, bits), {"seed": 1, "bucket": bucket})
            for bits in (2, 4, 8)
            for bucket in (512, 1024)
        ],
        "qsgd_dequantize": [((sf.qsgd_quantize(x, 4, seed=1), 2_100, 4), {})],
        "qsgd_dequantize_add": [((y, sf.qsgd_quantize(x, 4, seed=1), 4), {})],
        "block_scan": [((x * (x > 2), 8), {}), ((torch.zeros(100).half(), 8), {})],
        "block_gather": [((x, torch.tensor([3, 0], dtype=torch.int32), 64), {})],
        "block_scatter": [((x, torch.tensor([0, 3], dtype=torch.int32), y[:2, :64]), {})],
        "block_top_k": [((x, 5, 64), {}), ((x.half(), 10**4, 7), {})],
        "sparse_sum": [(([i, j], [v, w], 100), {})],
        "sparse_intersection": [((i, v, j, w, 100), {}), ((i, v, j, None, 100), {})],
        "scatter": [((x, i, v), {"divisor": 2.0}), ((x.half(), i, v), {})],
    }


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str) -> None:
    for positional, named in CASES[name]:
        result = torch.library.opcheck(getattr(ops, name).default, positional, named)
        assert set(result.values()) == {"SUCCESS"}


SIZED_BY_DATA = {
    "fused_error_feedback",
    "select",
    "block_scan",
    "sparse_sum",
    "sparse_intersection",
}


@pytest.mark.parametrize("name", sorted(CASES.keys() - SIZED_BY_DATA))
def test_shapes_on_the_device_meta(name: str) -> None:
    for positional, named in CASES[name]:
        meta = tree_map_only(Tensor, lambda t: t.to("meta"), (positional, named))
        got = getattr(ops, name)(*meta[0], **meta[1])
        expected = getattr(ops, name)(*positional, **named)
        for a, b in zip(*map(tree_leaves, (got, expected)), strict=True):
            assert a is b is None or (a.shape == b.shape and a.dtype == b.dtype)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_as_a_whole(backend: str, dynamic: bool) -> None:
    def step(gradient: Tensor, residual: Tensor, momentum: Tensor) -> list[Tensor]:
        scanned = sf.block_scan(gradient * (gradient > 1), 4)
        threshold = sf.threshold_exact(gradient, 40, residual=residual)
        sent = sf.fused_error_feedback(gradient, residual, threshold=threshold, limit=30)
        more = sf.fused_error_feedback(gradient, residual, threshold=0.5, momentum=momentum)
        total = sf.sparse_sum([sent, more], gradient.numel())
        sf.scatter_(gradient, total.indices, total.values, divisor=2.0)
        largest = sf.block_top_k(residual, 3, 64)
        sf.block_scatter_(momentum, largest.numbers, largest.blocks)
        codes = sf.qsgd_quantize(residual, 4, seed=7)
        sf.qsgd_dequantize_add_(momentum, codes, 4)
        chosen = sf.select(gradient, sf.threshold_sampled(gradient, 20))
        return [
            *(part + 1 for part in sf.top_k(residual, 5)),
            *(part * 2 for part in total),
            *largest,
            sf.block_gather(residual, largest.numbers, 64),
            *scanned,
            *chosen,
            sf.threshold_gaussian(residual, 9).magnitude,
            sf.qsgd_dequantize(codes, residual.numel(), 4).sum(),
        ]

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    for size in (3_000, 4_096):
        eager_in = [randn(size, seed=seed) for seed in range(3)]
        compiled_in = [tensor.clone() for tensor in eager_in]
        expected = [*step(*eager_in), *eager_in]
        assert all(map(same, [*compiled(*compiled_in), *compiled_in], expected))

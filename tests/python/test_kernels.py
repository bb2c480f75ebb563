"""The kernels on tensors against torch, and what `bench kernels` reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsecomm import _C
from sparsecomm.cli import main
from sparsecomm.cli.kernel_inputs import STREAMS, make_blocks, make_streams
from sparsecomm.cli.kernels import DTYPES, KERNELS

NUMEL = 10_007


def room(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.zeros(count, dtype=torch.uint32), torch.zeros(count, dtype=wide)


@pytest.mark.parametrize("target", _C.kernel_targets())
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_kernels_against_torch(target: str, dtype: torch.dtype) -> None:
    kernels = KERNELS[dtype](target, 2)
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(4)).to(dtype)
    indices, values = room(NUMEL, dtype)
    above = (x.abs().double() > 1.0).nonzero().flatten()

    count = kernels.select(x, 1.0, indices, values)
    assert torch.equal(indices[:count].long(), above)
    assert torch.equal(values[:count], x[above].to(values.dtype))

    gradient, residual = x.clone(), torch.zeros(NUMEL, dtype=values.dtype)
    count = kernels.fused_error_feedback(gradient, residual, 1.0, indices, values)
    assert torch.equal(indices[:count].long(), above)
    assert not gradient.any()
    assert torch.equal(residual, x.to(values.dtype).index_fill(0, above, 0))

    count = kernels.exact_top_k(x, 100, indices, values)
    order = torch.argsort(x.abs().double(), descending=True, stable=True)[:100]
    assert torch.equal(indices[:count].long(), order.sort().values)

    least = x.abs().double()[order[-1]]
    assert kernels.exact_threshold(x, torch.zeros_like(residual), 100) == least

    exact = x.to(values.dtype)
    codes, expected = (torch.zeros(2 * NUMEL, dtype=torch.uint8) for _ in range(2))
    for bits, codec in ((2, "qsgd2"), (4, "qsgd4"), (8, "qsgd8_512")):
        bucket = 512 if codec.endswith("_512") else 1024
        rounded = exact.clone()
        _C.round_values(codec, rounded, 7, 0, 0)
        size = _C.encode_values(codec, rounded, expected)
        assert kernels.qsgd_quantize(exact, bits, bucket, 7, codes) == size
        assert torch.equal(codes[:size], expected[:size])
        total = exact.clone()
        kernels.qsgd_add(codes, bits, bucket, total)
        assert torch.equal(total, exact + rounded)

    blocks = make_blocks(x, 64, 0.3, 4)
    size = 64 * x.element_size()
    padded = torch.nn.functional.pad(blocks, (0, -NUMEL % 64)).view(-1, 64)
    held = padded.any(1).nonzero().flatten()
    slots = torch.empty_like(padded).flatten()
    numbers = torch.empty(len(padded), dtype=torch.uint32)
    count = kernels.copy_nonzero_blocks(blocks, size, numbers, slots)
    assert torch.equal(numbers[:count].long(), held)
    assert torch.equal(slots.view(-1, 64)[:count], padded[held])
    assert kernels.copy_nonzero_blocks(blocks, size, numbers[:3], slots[: 3 * 64]) == count
    kernels.copy_through(padded.flatten(), slots)
    assert torch.equal(slots, padded.flatten())
    sums = torch.zeros(2 * 64, dtype=values.dtype)
    kernels.combine_blocks(sums, padded[:6].flatten(), size)
    first, second, third = padded[:6].to(values.dtype).view(3, 2 * 64)
    assert torch.equal(sums, first + second + third)

    x[5] = torch.nan
    assert not kernels.all_finite(x)


def test_sum_against_torch() -> None:
    streams = make_streams(NUMEL, 2_000, 3)
    assert len(streams) == STREAMS
    union = np.unique(np.concatenate([indices.numpy() for indices, _ in streams]))
    assert _C.SparseSum().sum(NUMEL, streams) == len(union)


@pytest.mark.parametrize("target", _C.kernel_targets())
def test_intersection_against_numpy(target: str) -> None:
    one, other = make_streams(NUMEL, 2_000, 3)[:2]
    shared = np.intersect1d(one[0].numpy(), other[0].numpy())
    assert _C.SparseIntersection(target).run(one, other) == len(shared)


def test_threads_are_torchs() -> None:
    # In a process of its own, where nothing has started a thread yet.
    program = """
import os, torch
from sparsecomm import _C

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(1)
x = torch.ones(1 << 22)
torch.set_num_threads(2)
indices, values = torch.empty(64, dtype=torch.uint32), torch.empty(64)
before = threads()
_C.KernelsF32("scalar", 1).select(x, 2.0, indices, values)
assert threads() == before, "one thread has a companion"
_C.KernelsF32("scalar", 2).select(x, 2.0, indices, values)
assert threads() == before + 1, "two threads are one"
torch.add(x, x)
assert threads() == before + 1, "torch has threads of its own"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="target 'AVX9' is none of scalar"):
        _C.KernelsF32("AVX9", 1)
    with pytest.raises(ValueError, match="threads = 0"):
        _C.KernelsF32("scalar", 0)
    kernels = _C.KernelsF32("scalar", 1)
    with pytest.raises(ValueError, match="x must be a contiguous CPU tensor of Float"):
        kernels.all_finite(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="3 indices but 2 values"):
        kernels.select(torch.zeros(3), 1.0, torch.zeros(3, dtype=torch.uint32), torch.zeros(2))
    numbers = torch.zeros(1, dtype=torch.uint32)
    with pytest.raises(ValueError, match="blocks of 6 bytes"):
        kernels.copy_nonzero_blocks(torch.zeros(3), 6, numbers, torch.zeros(16))
    with pytest.raises(ValueError, match="numbers is empty"):
        kernels.copy_nonzero_blocks(torch.zeros(3), 64, numbers[:0], torch.zeros(0))
    with pytest.raises(ValueError, match="slots is empty"):
        kernels.copy_through(torch.zeros(3), torch.zeros(0))
    with pytest.raises(ValueError, match="blocks of 4 bytes, must be of a positive multiple of 64"):
        kernels.combine_blocks(torch.zeros(16), torch.zeros(16), 4)
    with pytest.raises(ValueError, match="sums has 17 entries, must be some blocks of 16"):
        kernels.combine_blocks(torch.zeros(17), torch.zeros(16), 64)
    with pytest.raises(ValueError, match="3 values take 6 bytes, codes have 5"):
        kernels.qsgd_quantize(torch.zeros(3), 4, 512, 0, torch.zeros(5, dtype=torch.uint8))


def test_bench_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernels.json"
    command = ["bench", "kernels", "--numel", "20000", "--iters", "2", "--json", str(file)]
    command += ["--dtype", "bfloat16", "--target", "scalar", "--threads", "1", "2"]
    assert main(command) == 0
    rows = json.loads(file.read_text())
    assert "# 20000 bfloat16, density 0.01, 2 calls of each" in capsys.readouterr().out
    on_two = {row["kernel"]: row["baseline"] for row in rows if row["threads"] == 2}
    assert on_two.keys() >= {"select", "fused", "exact_top_k", "block_scan"}
    assert all(kernel == baseline for kernel, baseline in on_two.items())
    assert {"select", "fused", "exact_top_k", "block_scan", "qsgd4", "qsgd4_add", "sum"} <= {
        row["kernel"] for row in rows
    }
    against = {(row["kernel"], row["baseline"]) for row in rows}
    assert {("walk_10", "read_10"), ("walk_100", "through"), ("walk_keep", "copy_keep")} <= against
    for row in rows:
        assert 0 < row["time_us"]["min"] <= row["time_us"]["median"] <= row["time_us"]["max"]
        assert (row["ratio"] is None) == (row["baseline"] is None)

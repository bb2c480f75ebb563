"""Gradients on a CUDA device. What needs a GPU is marked `cuda`: `make test-cuda` runs it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
from sparsecomm import _C, OkTopkState, ThresholdSchedule, TopkState
from sparsecomm.build import CUDA_LIBRARY, build_info

BUILD = Path(__file__).resolve().parents[2] / "build" / "tests"
PROBLEM = (
    "this torch has no CUDA, or no device"
    if not torch.cuda.is_available()
    else _C.cuda_problem(str(CUDA_LIBRARY))
)


def needs_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    skip = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM or "none")
    return pytest.mark.cuda(skip(function))


# ---- without a GPU


def test_the_build_says_what_it_has() -> None:
    info = build_info()
    assert info["cuda"] == CUDA_LIBRARY.exists()
    if not info["cuda"]:
        assert "nvcc" in info["cuda_problem"]
    elif not torch.cuda.is_available():
        assert info["cuda_problem"] == "there is no CUDA device"


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    problem = _C.cuda_problem(str(tmp_path / "_cuda.so"))
    assert str(tmp_path / "_cuda.so") in problem
    assert "nvcc on PATH" in problem


def test_a_library_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "_cuda.so").write_text("no shared object")
    assert "cannot be loaded" in _C.cuda_problem(str(tmp_path / "_cuda.so"))
    # One that is not ours.
    problem = _C.cuda_problem(str(Path(_C.__file__)))
    assert "does not hold sparsecomm's CUDA kernels" in problem


# ---- the kernels: the C++ tests, which the emulator runs too


def device_test(name: str) -> str:
    program = BUILD / f"{name}_device_test"
    if not program.exists():
        pytest.skip(f"{program.name} is not built; make test-cuda builds it")
    return str(program)


@needs_gpu
@pytest.mark.parametrize("name", ["cuda_logic", "cuda_packing", "cuda_exchange"])
def test_kernels_equal_the_scalar_ones(name: str) -> None:
    subprocess.run([device_test(name)], check=True, timeout=110)


@needs_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("name", ["cuda_logic", "cuda_packing"])
def test_compute_sanitizer(name: str, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "1", device_test(name)]
    subprocess.run([*command, "--gtest_brief=1"], check=True, timeout=580)


# ---- the hook: 2 ranks that share the GPU


class Inputs(nn.Module):
    """A model whose gradients are its inputs, and so have the same bits on every device."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), device=inputs[0].device, dtype=torch.float64)
        for weight, values in zip(self.weights, inputs, strict=True):
            total = total + (weight * values).sum().double()
        return total


SIZES = [30000, 7, 1, 12000, 500]


def run_hook(
    device: str, state: sparsecomm.CompressionState, native: bool, dtype: torch.dtype, steps: int
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    model = Inputs(SIZES).to(device=device, dtype=dtype)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
    if native:
        sparsecomm.register_comm_hook(ddp, state)
    else:
        hook = sparsecomm.oktopk_hook if isinstance(state, OkTopkState) else sparsecomm.topk_hook
        ddp.register_comm_hook(state, hook)
    results = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        inputs = [torch.randn(size, generator=generator, dtype=torch.float64) for size in SIZES]
        if step == 2 and dist.get_rank() == 1:
            inputs[0][5] = float("inf")
        model.zero_grad()
        ddp([values.to(device=device, dtype=dtype) for values in inputs]).backward()
        # No synchronisation of ours: reading waits for the stream that the reducer waited on.
        results.append(torch.cat([p.grad.reshape(-1).cpu() for p in model.parameters()]))
    return results, state.state_dict()


def check_hook_equals_the_processor(native: bool) -> None:
    torch.cuda.set_device(0)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for kind in (OkTopkState, TopkState):
            outcomes = []
            for device in ("cpu", "cuda"):
                state = kind(density=0.02, schedule=ThresholdSchedule(between="sampled", period=3))
                outcomes.append(run_hook(device, state, native, dtype, steps=5))
            (expected, saved), (actual, saved_on_device) = outcomes
            for step, (a, b) in enumerate(zip(actual, expected, strict=True)):
                assert torch.equal(a.nan_to_num(), b.nan_to_num()), (dtype, kind, step)
                assert torch.equal(a.isnan(), b.isnan()), (dtype, kind, step)
            for key, residual in saved["residuals"].items():
                assert torch.equal(saved_on_device["residuals"][key].cpu(), residual), key


@needs_gpu
@pytest.mark.parametrize("native", [False, True])
def test_hook_equals_the_processor(native: bool) -> None:
    run_ranks(2, check_hook_equals_the_processor, native, timeout=110)


def check_state_moves_between_devices() -> None:
    torch.cuda.set_device(0)
    for first, second in (("cuda", "cpu"), ("cpu", "cuda")):
        _, saved = run_hook(first, OkTopkState(density=0.02), True, torch.float32, steps=2)
        resumed = OkTopkState(density=0.02)
        resumed.load_state_dict(saved)
        actual, _ = run_hook(second, resumed, True, torch.float32, steps=2)
        resumed = OkTopkState(density=0.02)
        resumed.load_state_dict(saved)
        expected, _ = run_hook(first, resumed, True, torch.float32, steps=2)
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)


@needs_gpu
def test_state_moves_between_devices() -> None:
    run_ranks(2, check_state_moves_between_devices, timeout=110)


def check_the_autograd_thread_does_not_wait() -> None:
    torch.cuda.set_device(0)
    model = Inputs(SIZES).cuda()
    ddp = DistributedDataParallel(model)
    pending = []

    def hook(state: OkTopkState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        torch.cuda._sleep(200_000_000)  # a tenth of a second and more
        future = sparsecomm.oktopk_hook(state, bucket)
        pending.append(not torch.cuda.current_stream().query())
        return future

    ddp.register_comm_hook(OkTopkState(density=0.02), hook)
    for step in range(3):
        model.zero_grad()
        ddp([torch.full((size,), float(step + 1), device="cuda") for size in SIZES]).backward()
        # The bucket was read after the sleep, not before.
        for parameter in model.parameters():
            assert torch.isfinite(parameter.grad).all()
    # The first step makes streams and memory.
    assert all(pending[1:])


@needs_gpu
def test_the_autograd_thread_does_not_wait() -> None:
    run_ranks(2, check_the_autograd_thread_does_not_wait, timeout=110)


def check_other_streams() -> None:
    torch.cuda.set_device(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        on_stream, _ = run_hook("cuda", OkTopkState(density=0.02), True, torch.float32, steps=4)
    plain, _ = run_hook("cuda", OkTopkState(density=0.02), True, torch.float32, steps=4)
    for a, b in zip(on_stream, plain, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@needs_gpu
def test_backward_on_another_stream() -> None:
    run_ranks(2, check_other_streams, timeout=110)

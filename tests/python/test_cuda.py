"""Gradients on a CUDA device. What needs a GPU is marked `cuda`: `make test-cuda` runs it."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from ranks import run_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

import sparsecomm
from sparsecomm import _C, OkTopkState, ThresholdSchedule, TopkState
from sparsecomm import functional as sf
from sparsecomm.build import CUDA_LIBRARY, build_info
from sparsecomm.cli import doctor
from sparsecomm.fake_kernels import packed_dtype

BUILD = Path(__file__).resolve().parents[2] / "build" / "python" / "tests"
# `make cuda` compiles them also where the package leaves them out, as torch has no CUDA.
KERNELS = BUILD.parent / "_cuda.so"
PROBLEM = (
    "this torch has no CUDA, or no device"
    if not torch.cuda.is_available()
    else _C.cuda_problem(str(CUDA_LIBRARY))
)


skip_without_gpu = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM or "none")


def needs_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    return pytest.mark.cuda(skip_without_gpu(function))


# ---- without a GPU


def test_the_build_says_what_it_has() -> None:
    info = build_info()
    assert info["cuda"] == CUDA_LIBRARY.exists()
    if not info["cuda"]:
        assert "nvcc" in info["cuda_problem"]
    elif not torch.cuda.is_available():
        assert info["cuda_problem"] == "there is no CUDA device"


@pytest.mark.skipif(not KERNELS.exists(), reason="no nvcc has compiled the CUDA kernels")
def test_the_compiled_kernels_can_be_opened() -> None:
    assert _C.cuda_problem(str(KERNELS)) in ("", "there is no CUDA device")


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
    subprocess.run([device_test(name)], check=True, timeout=110 * PATIENCE)


@needs_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("name", ["cuda_logic", "cuda_packing"])
def test_compute_sanitizer(name: str, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "1", device_test(name)]
    subprocess.run([*command, "--gtest_brief=1"], check=True, timeout=580 * PATIENCE)


# ---- the operators: the same results as on the processor

EMULATOR = BUILD / "libcuda_emulated_module.so"
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def on_the_gpu(call: Callable[..., Any], arguments: Any) -> Any:
    moved = tree_map_only(torch.Tensor, lambda x: x.cuda(), arguments)
    result = call(*moved)
    for before, after in zip(tree_leaves(arguments), tree_leaves(moved), strict=True):
        if isinstance(before, torch.Tensor):
            before.copy_(after)
    assert all(leaf.is_cuda for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return tree_map_only(torch.Tensor, lambda x: x.cpu(), result)


def on_the_emulator(call: Callable[..., Any], arguments: Any) -> Any:
    """The CUDA implementation and its kernels, but on the processor and its tensors."""
    _C.use_cuda_library(str(EMULATOR), emulated=True)
    try:
        return call(*arguments)
    finally:
        _C.use_cuda_library(str(CUDA_LIBRARY))


needs_emulator = pytest.mark.skipif(
    not EMULATOR.exists(), reason="the emulator is not built; make test-cpp builds it"
)
devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param(on_the_emulator, marks=needs_emulator, id="emulator"),
        pytest.param(on_the_gpu, marks=[pytest.mark.cuda, skip_without_gpu], id="gpu"),
    ],
)


def check_equal(device: Callable[..., Any], call: Callable[..., Any], *arguments: Any) -> None:
    """Of results and of what is changed in place: the same bits, a NaN's payload aside."""
    copies = tree_map_only(torch.Tensor, lambda x: x.clone(), arguments)
    expected, actual = call(*arguments), device(call, copies)
    before, after = tree_leaves((expected, arguments)), tree_leaves((actual, copies))
    for a, b in zip(after, before, strict=True):
        if not isinstance(a, torch.Tensor):
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
        assert torch.equal(a.signbit(), b.signbit()) or a.isnan().any()


def inputs(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for size in (0, 1, 17, 700, 9_001):
        x = torch.randn(size, dtype=torch.float64, generator=generator)
        yield x.to(dtype)
        yield (2 * x).round().to(dtype)  # zeros and ties
    yield torch.zeros(300, dtype=dtype)
    x = torch.randn(5_000, dtype=torch.float64, generator=generator)
    x[7], x[4_999], x[:100] = math.nan, -math.inf, -0.0
    yield x.to(dtype)
    yield x.to(dtype).reshape(50, 100).T


@devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_selections_equal_the_processors(device: Callable[..., Any], dtype: torch.dtype) -> None:
    for x in inputs(dtype):
        residual = x.to(packed_dtype(dtype)).flip(0).contiguous()
        check_equal(device, lambda x: sf.select(x, 1.0), x)
        check_equal(device, lambda x: sf.select(x, 0.5, limit=9), x)
        for k in (1, 40, 10_000):
            check_equal(device, lambda x, r, k=k: sf.threshold_exact(x, k, residual=r), x, residual)
            check_equal(device, lambda x, k=k: sf.threshold_exact(x, k), x)
            check_equal(device, lambda x, k=k: sf.threshold_sampled(x, k, phase=3), x)
            check_equal(device, lambda x, k=k: sf.top_k(x, k), x)
            check_equal(device, lambda x, k=k: sf.top_k(x, k, bucket=100), x)
            check_equal(
                device, lambda g, r, k=k: sf.fused_error_feedback(g, r, k=k), x.clone(), residual
            )
        for mask in (False, True):
            for cut in ({"k": 20}, {"threshold": 1.0}, {"threshold": 0.5, "limit": 7}):
                check_equal(
                    device,
                    lambda g, r, u, cut=cut, mask=mask: sf.fused_error_feedback(
                        g, r, momentum=u, scale=0.5, factor=0.9, mask_momentum=mask, **cut
                    ),
                    x.clone(),
                    residual.clone(),
                    residual / 3,
                )


@devices
def test_gaussian_thresholds_are_near_the_processors(device: Callable[..., Any]) -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(4))
    expected = sf.threshold_gaussian(x, 200)
    actual = device(lambda x: sf.threshold_gaussian(x, 200), [x])
    torch.testing.assert_close(actual.magnitude, expected.magnitude)
    assert torch.equal(actual.ties, expected.ties)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("bucket", [512, 1024])
def test_qsgd_equals_the_processors(
    device: Callable[..., Any], bucket: Any, bits: Any, dtype: torch.dtype
) -> None:
    quantize = partial(sf.qsgd_quantize, bits=bits, bucket=bucket)
    dequantize = partial(sf.qsgd_dequantize, bits=bits, dtype=dtype, bucket=bucket)
    add = partial(sf.qsgd_dequantize_add_, bits=bits, bucket=bucket)
    for x in inputs(dtype):
        if not x.isfinite().all():
            with pytest.raises(ValueError, match="finite"):
                device(lambda x: quantize(x, seed=1), [x])
            continue
        check_equal(device, lambda x: quantize(x, seed=1, operation=2, stream=3), x)
        codes, size = quantize(x, seed=5), x.numel()
        check_equal(device, lambda c, n=size: dequantize(c, n), codes)
        check_equal(device, add, x.clone(), codes)
    codes = quantize(torch.ones(2, dtype=dtype), seed=5)
    codes[dtype.itemsize - 1] = 0xFF  # of the scale
    with pytest.raises(ValueError, match="codes are none that qsgd_quantize makes"):
        device(lambda c: dequantize(c, 2), [codes])


@devices
def test_block_scans_equal_the_processors(device: Callable[..., Any]) -> None:
    for dtype in (*DTYPES, torch.int64):
        for size in (0, 1, 63, 6_400, 7_777):
            x = torch.zeros(size, dtype=dtype)
            x[size // 3 : size // 2] = -1
            if size:
                x[-1] = 1
            for block in (2, 12, 64, 10_000):
                check_equal(device, lambda x, b=block: sf.block_scan(x, b), x)
    with pytest.raises(ValueError, match="multiple of 4"):
        device(lambda x: sf.block_scan(x, 3), [torch.ones(9, dtype=torch.float16)])


@devices
def test_copies_of_blocks_equal_the_processors(device: Callable[..., Any]) -> None:
    for dtype in (*DTYPES, torch.int64, torch.uint8):
        for size in (1, 63, 6_400, 7_777):
            drawn = torch.randn(size, generator=torch.Generator().manual_seed(6))
            x = (drawn.abs() * 50).to(dtype)
            for block in (1, 12, 64, 10_000):
                blocks = -(-size // block)
                numbers = torch.arange(0, blocks, 2, dtype=torch.int32)
                gather = partial(sf.block_gather, block=block)
                check_equal(device, gather, x, numbers.flip(0))
                check_equal(device, sf.block_scatter_, x.clone(), numbers, gather(x, numbers) + 1)


@devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_blocks_are_the_processors(
    device: Callable[..., Any], dtype: torch.dtype
) -> None:
    for x in inputs(dtype):
        for block in (1, 16, 100, 5_000):
            for k in (0, 1, 7, 10**6):
                check_equal(device, lambda x, k=k, b=block: sf.block_top_k(x, k, b), x)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_sums_and_scatters_equal_the_processors(
    device: Callable[..., Any], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(5)
    for size in (1, 100, 20_000):
        vectors = []
        for density in (0.0, 0.01, 0.5, 1.0):
            chosen = torch.rand(size, generator=generator) < density
            values = torch.randn(int(chosen.sum()), generator=generator) * 100
            vectors.append((chosen.nonzero().flatten().to(torch.int32), values.to(dtype)))
        check_equal(device, lambda v, n=size: sf.sparse_sum(v, n), vectors)
        if dtype.is_floating_point:
            dense = torch.randn(size, generator=generator).to(dtype)
            check_equal(device, lambda d, v: sf.scatter_(d, *v, divisor=3.0), dense, vectors[2])
    one = torch.ones(1, dtype=dtype)
    two = torch.ones(2, dtype=dtype)
    increasing, inside = "not strictly increasing", r"index 5 is not in \[0, 5"
    for wrong, match in (([4, 4], increasing), ([0, 5], inside)):
        vector = (torch.tensor(wrong, dtype=torch.int32), two)
        with pytest.raises(ValueError, match=match):
            device(lambda v: sf.sparse_sum([v], 5), [vector])
    if dtype.is_floating_point:
        arguments = [torch.ones(5, dtype=dtype), torch.tensor([-1], dtype=torch.int32), one]
        with pytest.raises(ValueError, match=r"index -1 is not in \[0, 5"):
            device(sf.scatter_, arguments)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_intersections_equal_the_processors(device: Callable[..., Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)

    def vector(size: int, density: float) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.rand(size, generator=generator) < density
        values = torch.randn(int(chosen.sum()), generator=generator) * 100
        return chosen.nonzero().flatten().to(torch.int32), values.to(dtype)

    for size in (1, 100, 20_000):
        for densities in ((0.0, 0.5), (0.5, 0.0), (0.01, 0.5), (0.9, 0.02), (1.0, 1.0)):
            one, two = (vector(size, density) for density in densities)
            check_equal(device, lambda a, b, n=size: sf.sparse_intersection(a, b, n), one, two)
            check_equal(device, lambda a, b, n=size: sf.sparse_intersection(a, b, n), one, two[0])
    two_values = torch.ones(2, dtype=dtype)
    good = (torch.tensor([0, 4], dtype=torch.int32), two_values)
    increasing, inside = "not strictly increasing", r"index 5 is not in \[0, 5"
    for wrong, match in (([4, 4], increasing), ([0, 5], inside)):
        bad = (torch.tensor(wrong, dtype=torch.int32), two_values)
        for pair in ([bad, good], [good, bad], [good, bad[0]]):
            with pytest.raises(ValueError, match=match):
                device(lambda a, b: sf.sparse_intersection(a, b, 5), pair)


def test_every_operator_has_a_cuda_implementation() -> None:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("sparsecomm::")]
    assert len(names) >= 13
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"), name


def test_without_the_library_an_operator_says_what_to_do(tmp_path: Path) -> None:
    _C.use_cuda_library(str(tmp_path / "_cuda.so"), emulated=True)
    try:
        with pytest.raises(NotImplementedError, match="nvcc on PATH") as caught:
            sf.select(torch.ones(3), 1.0)
    finally:
        _C.use_cuda_library(str(CUDA_LIBRARY))
    assert str(tmp_path / "_cuda.so") in str(caught.value)
    sf.select(torch.ones(3), 1.0)


def test_shapes_on_a_device_are_known_without_one() -> None:
    with FakeTensorMode():
        x = torch.empty(100, device="cuda")
        for result in (
            sf.top_k(x, 3),
            sf.threshold_exact(x, 3),
            sf.qsgd_quantize(x, 4, seed=1),
        ):
            assert all(leaf.device.type == "cuda" for leaf in tree_leaves(result))


@needs_gpu
def test_operators_on_the_gpu_compile() -> None:
    def step(gradient: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        packed = sf.fused_error_feedback(gradient, residual, k=10)
        return sf.scatter_(torch.zeros_like(residual), *packed)

    gradient, residual = torch.randn(1_000, device="cuda"), torch.zeros(1_000, device="cuda")
    torch.library.opcheck(torch.ops.sparsecomm.select, (gradient, torch.tensor(1.0)))
    torch.library.opcheck(torch.ops.sparsecomm.top_k, (gradient, 10))
    expected = step(gradient.clone(), residual.clone())
    assert torch.equal(torch.compile(step, fullgraph=True)(gradient, residual), expected)


@needs_gpu
def test_operators_refuse_tensors_of_two_devices() -> None:
    with pytest.raises(ValueError, match="residual is on cpu, not on cuda:0"):
        sf.fused_error_feedback(torch.ones(3, device="cuda"), torch.ones(3), k=1)
    here = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="a vector is on cuda:0, not on cpu"):
        sf.sparse_sum([(here, torch.ones(1)), (here.cuda(), torch.ones(1, device="cuda"))], 3)


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
            [entry], [on_device] = saved.values(), saved_on_device.values()
            for key, residual in entry["residuals"].items():
                assert torch.equal(on_device["residuals"][key].cpu(), residual), key


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

    def hook(state, bucket):  # DDP refuses annotations that are texts, as they are in this file
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


@needs_gpu
def test_the_doctor_tries_the_device() -> None:
    outcome = doctor.probe("cuda", 100)
    assert outcome.status == 0, outcome.output

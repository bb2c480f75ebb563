"""The options that all states share: what each does to the exchange, and what is refused."""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, checkpoint_of, flat, gathered, make_ddp, make_model, train
from ranks import run_ranks, thinned
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
from sparsecomm import (
    AutoState,
    BlockTopkState,
    CommunicatorOptions,
    Compression,
    CompressionState,
    DenseOverlapState,
    DensityWarmup,
    GaussianKState,
    GTopkState,
    OkTopkState,
    QuantizedTopkState,
    ThresholdSchedule,
    TopkDsaState,
    TopkState,
)
from sparsecomm.compression import CompressionOptions

METHODS = (
    OkTopkState,
    TopkState,
    GaussianKState,
    GTopkState,
    TopkDsaState,
    BlockTopkState,
    AutoState,
)

# What must not change the result where everything is sent.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"select": "exact"},
    {"select": "bucket"},
    {"select": "bucket", "bucket": 7},
    {"select": "block"},
    {"select": "block", "block": 16, "first_moment": 0.9},
    {"schedule": ThresholdSchedule.oktopk(tau_prime=3, tau=2)},
    {"schedule": ThresholdSchedule.gaussian()},
    {"warmup": DensityWarmup(2, (0.5,)), "dense_steps": 1},
    {"densities": {"0": 1.0, "2.weight": 1}},
    {"dense_below": 0},
    {"first_moment": 0.9},
    {"first_moment": 0.9, "select": "bucket"},
    {"clip_norm": 1e6},
)


def hooked(kind: type[CompressionState], **options: Any) -> DistributedDataParallel:
    return with_state(kind(**options))[0]


def with_state(
    state: CompressionState, model: nn.Module | None = None, several_groups: bool = False
) -> tuple[DistributedDataParallel, CompressionState]:
    ddp = make_ddp(make_model() if model is None else model, several_groups)
    sparsecomm.register_comm_hook(ddp, state)
    return ddp, state


def sgd(ddp: DistributedDataParallel, **options: float) -> torch.optim.SGD:
    return torch.optim.SGD(ddp.parameters(), lr=0.1, **options)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def expect_equal(result: torch.Tensor, expected: torch.Tensor, about: object) -> None:
    if dist.get_world_size() <= 2:
        assert torch.equal(result, expected), about
    else:
        torch.testing.assert_close(result, expected, msg=str(about))


# ---- where everything is sent


def check_density_one() -> None:
    plain = make_ddp(make_model())
    train(plain, sgd(plain, momentum=0.9), range(5))
    expected = flat(plain.parameters())
    for kind, options in thinned(itertools.product(METHODS, OPTIONS)):
        if kind is GaussianKState and "select" in options:
            continue
        if kind is BlockTopkState and "schedule" in options:
            options = {"select": "threshold", **options}
        ddp = hooked(kind, density=1.0, **options)
        train(ddp, sgd(ddp, momentum=0.9), range(5))
        expect_equal(flat(ddp.parameters()), expected, (kind, options))


def check_momentum_at_density_one() -> None:
    """SGD without momentum, whose velocity the state keeps, is SGD with momentum."""
    plain = make_ddp(make_model())
    train(plain, sgd(plain, momentum=0.9), range(6))
    expected = flat(plain.parameters())
    also: tuple[dict[str, Any], ...] = ({}, {"dense_steps": 3}, {"dense_below": 0})
    both = (True, False)
    for kind, options, mask, several in thinned(itertools.product(METHODS, also, both, both), 5):
        state = kind(density=1.0, momentum=0.9, mask_momentum=mask, **options)
        ddp, _ = with_state(state, several_groups=several)
        train(ddp, sgd(ddp), range(6))
        torch.testing.assert_close(flat(ddp.parameters()), expected)


def _check_density_one() -> None:
    check_density_one()
    check_momentum_at_density_one()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_density_one_is_plain_ddp(size: int) -> None:
    run_ranks(size, _check_density_one, timeout=110)


# ---- what an option does


def check_dense_parameters() -> None:
    """Biases have plain DDP's gradient, bit for bit, whatever the density."""
    for options, is_dense in [
        ({}, lambda name: name.endswith("bias")),
        ({"densities": {"2": 1.0}}, lambda name: name.endswith("bias") or name == "2.weight"),
        ({"densities": {"2": 1.0, "2.weight": 0.1}}, lambda name: name.endswith("bias")),
        ({"densities": {"2": 0.1}}, lambda name: name.endswith("bias") and name != "2.bias"),
        ({"dense_below": 0}, lambda name: False),
    ]:
        for several in (False, True):
            plain = make_ddp(make_model())
            ddp, state = with_state(
                OkTopkState(density=0.05, **options),  # type: ignore[arg-type]
                several_groups=several,
            )
            for step in range(3):
                for model in (plain, ddp):
                    model.zero_grad()
                    model(batch(step)).square().mean().backward()
                expected, found = gradients(plain.module), gradients(ddp.module)
                for name in expected:
                    if is_dense(name):
                        expect_equal(found[name], expected[name], name)
                    elif name.endswith("weight"):
                        assert (found[name] == 0).any(), name
            assert checkpoint_of(state)["residuals"].keys() == expected.keys()


def check_densities() -> None:
    """Of each group exactly its share is selected."""
    kept = {"4.weight": 0.5, "0": 0.25}
    ddp, state = with_state(TopkState(density=0.1, select="exact", densities=kept))
    shares = {"4.weight": 0.5, "0.weight": 0.25, "2.weight": 0.1}
    for step in range(2):
        before = checkpoint_of(state)["residuals"] if step else {}
        model = make_model()
        model(batch(step)).square().mean().backward()
        ddp.zero_grad()
        ddp(batch(step)).square().mean().backward()
        after = checkpoint_of(state)["residuals"]
        for name, gradient in gradients(model).items():
            accumulated = gradient.reshape(-1) + before.get(name, 0)
            selected = int((after[name] != accumulated).sum())
            if name in ("4.weight", "0.weight"):
                # 0.bias, which is dense by itself, belongs to the module's group of 1,640.
                group = 1600 if name == "4.weight" else 1640
                assert abs(selected - shares[name] * group) <= 40, (name, selected)
        assert torch.equal(after["2.bias"], torch.zeros(40))


def check_clipping() -> None:
    """Each rank's gradient is what torch's clipping makes of it, then as ever."""
    size = dist.get_world_size()
    for several, clip_norm in itertools.product((False, True), (0.05, 1e3)):
        ddp, _ = with_state(OkTopkState(density=1.0, clip_norm=clip_norm), several_groups=several)
        for step in range(3):
            model = make_model()
            model(batch(step)).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm / math.sqrt(size))
            assert (norm > clip_norm / math.sqrt(size)) == (clip_norm < 1)
            expected = sum(gathered(flat(gradients(model).values()))) / size
            ddp.zero_grad()
            ddp(batch(step)).square().mean().backward()
            torch.testing.assert_close(flat(gradients(ddp.module).values()), expected)


def backward_with_and_without(ddp: DistributedDataParallel, step: int) -> torch.Tensor:
    """Runs the step's backward pass of a model with one parameter; returns the local gradient."""
    local = copy.deepcopy(ddp.module)
    for model in (local, ddp):
        model.zero_grad()
        model(batch(step)).square().mean().backward()
    [gradient] = gradients(local).values()
    return gradient.reshape(-1)


def check_momentum() -> None:
    """With a rank alone: v = v + u, u = m u + g, and what is sent is cleared of both.

    With Nesterov's, v = v + (g + m u).
    """
    for mask, select, nesterov in itertools.product(
        (True, False), ("exact", "bucket"), (False, True)
    ):
        state = TopkState(
            density=0.05, momentum=0.5, nesterov=nesterov, mask_momentum=mask, select=select
        )
        ddp, _ = with_state(state, nn.Linear(40, 60, bias=False))
        velocity = torch.zeros(2400)
        residual = torch.zeros(2400)
        for step in range(4):
            gradient = backward_with_and_without(ddp, step)
            velocity = 0.5 * velocity + gradient
            residual = residual + (gradient + 0.5 * velocity if nesterov else velocity)
            if select == "exact":
                chosen = residual.abs().topk(120).indices
            else:
                rows = torch.arange(2400).split(512)
                k = round(0.05 * 512)
                chosen = torch.cat(
                    [rows[i][r.abs().topk(k).indices] for i, r in enumerate(residual.split(512))]
                )
            expected = torch.zeros(2400)
            expected[chosen] = residual[chosen]
            residual[chosen] = 0
            if mask:
                velocity[chosen] = 0
            [result] = gradients(ddp.module).values()
            assert torch.equal(result.reshape(-1), expected), (mask, select, nesterov, step)
            saved = checkpoint_of(state)
            assert torch.equal(saved["residuals"]["weight"], residual)
            assert torch.equal(saved["moments"]["weight"], velocity)


def check_first_moment() -> None:
    state = TopkState(density=0.05, first_moment=0.9, select="exact")
    ddp, _ = with_state(state, nn.Linear(40, 60, bias=False))
    moment = torch.zeros(2400)
    residual = torch.zeros(2400)
    for step in range(4):
        gradient = backward_with_and_without(ddp, step)
        moment = 0.9 * moment + gradient
        residual = residual + gradient
        chosen = moment.abs().topk(120).indices
        expected = torch.zeros(2400)
        expected[chosen] = residual[chosen]
        residual[chosen] = 0
        [result] = gradients(ddp.module).values()
        assert torch.equal(result.reshape(-1), expected), step
        assert torch.equal(checkpoint_of(state)["residuals"]["weight"], residual)


def check_warmup() -> None:
    warmup = DensityWarmup(2, (0.5, 0.1))
    state = TopkState(density=0.01, select="exact", warmup=warmup, dense_steps=2, dense_below=0)
    ddp, _ = with_state(state)
    total = sum(p.numel() for p in ddp.parameters())
    seen = 0.0
    for step in range(8):
        train(ddp, sgd(ddp), [step])
        stats = state.stats()
        selected = stats["realised_density"] * stats["steps"] * total
        density = 1 if step < 2 else warmup.density(step - 2, 0.01)
        assert density == (1, 1, 0.5, 0.5, 0.1, 0.1, 0.01, 0.01)[step]
        assert round(selected - seen) == round(density * total), step
        seen = selected


def check_quantized() -> None:
    """Fewer bits, fewer bytes; the same entries on average."""
    bytes_sent = {}
    for bits in (2, 4, 8):
        ddp, state = with_state(QuantizedTopkState(density=0.05, quantize=bits))
        train(ddp, sgd(ddp), range(8))
        bytes_sent[bits] = state.stats()["sent_bytes"]
    assert bytes_sent[2] < bytes_sent[4] < bytes_sent[8]
    # The dense half's codec.
    state = CompressionState(
        Compression(algorithm="dsar_split_allgather", density=0.3, quantize=8, dense_below=0)
    )
    ddp, _ = with_state(state)
    train(ddp, sgd(ddp), range(2))
    assert any(r.any() for r in checkpoint_of(state)["residuals"].values())


def _check_options() -> None:
    check_dense_parameters()
    check_clipping()
    check_warmup()
    if dist.get_world_size() == 1:
        check_densities()
        check_momentum()
        check_first_moment()
    else:
        check_quantized()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_options(size: int) -> None:
    run_ranks(size, _check_options)


def test_a_schedule_says_its_sources() -> None:
    schedule = ThresholdSchedule.oktopk(tau_prime=4, tau=8)
    assert schedule == ThresholdSchedule("reused", 4, 8)
    assert [schedule.source(step) for step in range(5)] == ["exact", *["reused"] * 3, "exact"]
    assert ThresholdSchedule.gaussian().source(0) == "gaussian"
    assert {ThresholdSchedule.exact().source(step) for step in range(70)} == {"exact"}
    assert ThresholdSchedule().source(33) == "sampled"


def test_compressions_compare_and_hash() -> None:
    options = {"densities": {"0": 0.5}, "warmup": DensityWarmup(3)}
    assert Compression(**options) == Compression(**options)  # type: ignore[arg-type]
    assert len({Compression(**options), Compression(**options)}) == 1  # type: ignore[arg-type]
    names = {field.name for field in fields(Compression)}
    assert CompressionOptions.__annotations__.keys() == names - {"algorithm", "density"}
    state = TopkState(density=0.5, select="exact")
    assert state.compression == Compression(algorithm="topk_a", density=0.5, select="exact")


# ---- resuming


def _check_resume() -> None:
    states: list[dict[str, Any]] = [
        {"momentum": 0.9, "schedule": ThresholdSchedule.oktopk(tau_prime=4, tau=3)},
        {"momentum": 0.9, "select": "bucket", "warmup": DensityWarmup(4, (0.5, 0.2))},
        {"first_moment": 0.9, "dense_steps": 8, "quantize": 8},
        {"clip_norm": 0.05, "densities": {"0": 0.3, "4": 1.0}, "warmup": DensityWarmup(9)},
    ]
    for kind, options, several in itertools.product(
        (OkTopkState, TopkState), states, (False, True)
    ):

        def start(
            kind: type[CompressionState] = kind,
            options: dict[str, Any] = options,
            several: bool = several,
        ) -> tuple[DistributedDataParallel, torch.optim.Optimizer, CompressionState]:
            ddp, state = with_state(kind(density=0.05, **options), several_groups=several)  # type: ignore[call-arg]
            return ddp, sgd(ddp), state

        ddp, optimizer, state = start()
        train(ddp, optimizer, range(7))
        file = io.BytesIO()
        torch.save([ddp.state_dict(), optimizer.state_dict(), state.state_dict()], file)
        train(ddp, optimizer, range(7, 14))
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        resumed, resumed_optimizer, resumed_state = start()
        for target, content in zip((resumed, resumed_optimizer, resumed_state), saved, strict=True):
            target.load_state_dict(content)
        train(resumed, resumed_optimizer, range(7, 14))
        assert torch.equal(flat(resumed.parameters()), flat(ddp.parameters())), (kind, options)
        expected, found = checkpoint_of(state), checkpoint_of(resumed_state)
        for key in ("residuals", "moments"):
            assert expected[key].keys() == found[key].keys()
            for name, tensor in expected[key].items():
                assert torch.equal(tensor, found[key][name]), (key, name)
        assert expected["groups"] == found["groups"]

    [(key, entry)] = state.state_dict().items()
    with pytest.raises(ValueError, match="lacks loss_scale"):
        state.load_state_dict({key: {k: v for k, v in entry.items() if k != "loss_scale"}})
    with pytest.raises(ValueError, match="loss scale of 0"):
        state.load_state_dict({key: {**entry, "loss_scale": 0.0}})
    with pytest.raises(ValueError, match=r"a moment for .* keeps none"):
        state.load_state_dict({key: {**entry, "moments": entry["residuals"]}})


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_with_options_is_bit_identical(size: int) -> None:
    run_ranks(size, _check_resume)


# ---- mixed precision


def scaled_steps(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    steps: range,
    dtype: torch.dtype | None = None,
    overflow: int = -1,
) -> Iterator[int]:
    """Trains with a scaled loss; in the step ``overflow`` the last rank's gradient overflows."""
    for step in steps:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype) if dtype else nullcontext():
            loss = ddp(batch(step)).float().square().mean()
        if step == overflow and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield step


def check_scale_changes() -> None:
    """Scaled by powers of 2, a run has the bits of one that is not scaled."""
    several_options: tuple[dict[str, Any], ...] = (
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"clip_norm": 0.05},
        {"select": "bucket"},
        {"select": "block", "block": 16},
    )
    for options in several_options:
        for between, several in thinned(itertools.product(("reused", "sampled"), (False, True))):
            arguments: dict[str, Any] = {"density": 0.05, **options}
            if "select" not in options:
                arguments["schedule"] = ThresholdSchedule(between, 5)
            plain, _ = with_state(OkTopkState(**arguments), several_groups=several)
            train(plain, sgd(plain), range(9))
            ddp, state = with_state(OkTopkState(**arguments), several_groups=several)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
            state.follow(scaler)
            saved = {}
            for step in scaled_steps(ddp, sgd(ddp), scaler, range(9)):
                if step == 4:
                    saved = {
                        "model": ddp.module.state_dict(),
                        "state": state.state_dict(),
                        "scaler": scaler.state_dict(),
                    }
                    saved["model"] = {k: v.clone() for k, v in saved["model"].items()}
            assert torch.equal(flat(ddp.parameters()), flat(plain.parameters())), options
            # Resumed, just where the scale has changed since the last step.
            resumed, other = with_state(OkTopkState(**arguments), several_groups=several)
            resumed.module.load_state_dict(saved["model"])
            other.load_state_dict(saved["state"])
            scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=2)
            scaler.load_state_dict(saved["scaler"])
            other.follow(scaler)
            list(scaled_steps(resumed, sgd(resumed), scaler, range(5, 9)))
            assert torch.equal(flat(resumed.parameters()), flat(ddp.parameters())), options


def check_overflow() -> None:
    """Every rank skips the step, and only the scale changes."""
    for kind in METHODS:
        ddp, state = with_state(kind(density=0.05, momentum=0.9))
        optimizer = sgd(ddp)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        state.follow(scaler)
        parameters, saved = torch.empty(0), checkpoint_of(state)
        for step in scaled_steps(ddp, optimizer, scaler, range(6), overflow=4):
            if step == 3:
                parameters, saved = flat(ddp.parameters()).clone(), checkpoint_of(state)
            if step == 4:
                assert scaler.get_scale() == 512
                assert torch.equal(flat(ddp.parameters()), parameters), kind
                after = checkpoint_of(state)
                for key in ("residuals", "moments"):
                    for name, tensor in saved[key].items():
                        assert torch.equal(after[key][name], tensor), (kind, key, name)
        assert not torch.equal(flat(ddp.parameters()), parameters)
        assert checkpoint_of(state)["loss_scale"] == 512
        assert all(
            torch.equal(other, flat(ddp.parameters())) for other in gathered(flat(ddp.parameters()))
        )


def check_autocast() -> None:
    """At density 1, in both types of reduced precision, plain DDP."""
    both = (torch.bfloat16, torch.float16)
    cases = [(kind, both[number % 2]) for number, kind in enumerate(METHODS)]
    if dist.get_world_size() == 2:
        cases = [*itertools.product(METHODS, both)]
    for kind, dtype in cases:
        results = []
        for state in (None, kind(density=1.0)):
            ddp = make_ddp(make_model())
            scaler = torch.amp.GradScaler(
                "cpu", init_scale=1024.0, growth_interval=2, enabled=dtype == torch.float16
            )
            if state is not None:
                sparsecomm.register_comm_hook(ddp, state)
                state.follow(scaler)
            list(scaled_steps(ddp, sgd(ddp, momentum=0.9), scaler, range(5), dtype))
            results.append(flat(ddp.parameters()))
        expect_equal(results[1], results[0], (dtype, kind))


def _check_mixed_precision() -> None:
    check_scale_changes()
    check_overflow()
    check_autocast()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_mixed_precision(size: int) -> None:
    run_ranks(size, _check_mixed_precision, timeout=100)


# ---- mistakes


@pytest.mark.parametrize("density", [0, -0.1, 1.5, math.nan, math.inf])
def test_density_outside_its_range(density: float) -> None:
    with pytest.raises(ValueError, match=r"density=.* is not in \(0, 1\]"):
        OkTopkState(density=density)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"density": "much"}, TypeError, "density must be a number, not str"),
        ({"density": True}, TypeError, "density must be a number, not bool"),
        ({"select": "some"}, ValueError, "select='some' is none of threshold, exact, bucket"),
        ({"bucket": 0}, ValueError, "bucket=0 is out of range: choose 1 to 4096"),
        ({"bucket": 5000}, ValueError, "bucket=5000 is out of range: choose 1 to 4096"),
        ({"bucket": 5.0}, TypeError, "bucket must be an integer, not float"),
        ({"block": 0}, ValueError, "block=0 is out of range: choose 1 or more"),
        ({"select": "block", "block": 100}, ValueError, "block = 100 entries: choose a power of"),
        ({"select": "block", "block": 1 << 15}, ValueError, "a power of two from 16 to 16384"),
        ({"quantize": 3}, ValueError, "quantize=3 bits: choose 2, 4 or 8"),
        ({"quantize": 4, "value_codec": "bf16"}, ValueError, "both say how values travel"),
        ({"schedule": 32}, TypeError, "schedule must be a ThresholdSchedule, not int"),
        (
            {"schedule": ThresholdSchedule(), "select": "exact"},
            ValueError,
            "select='exact' has none",
        ),
        ({"warmup": (0.25,)}, TypeError, "warmup must be a DensityWarmup, not tuple"),
        ({"dense_steps": -1}, ValueError, "dense_steps=-1 is not a number of steps"),
        ({"dense_steps": 1.5}, TypeError, "dense_steps must be an integer, not float"),
        ({"densities": [("0", 1)]}, TypeError, "densities must map names to densities"),
        ({"densities": {"0": 2}}, ValueError, r"densities\['0'\]=2 is not in \(0, 1\]"),
        ({"densities": {0: 0.5}}, TypeError, "densities has the key 0, which is no name"),
        ({"dense_below": -1}, ValueError, "dense_below=-1 is out of range: choose 0 or more"),
        ({"dense_below": "bias"}, TypeError, "dense_below must be an integer, not str"),
        ({"momentum": 1.0}, ValueError, r"momentum = 1 is not in \[0, 1\)"),
        ({"momentum": -0.1}, ValueError, r"momentum = -0.1 is not in \[0, 1\)"),
        ({"momentum": math.nan}, ValueError, r"momentum = nan is not in \[0, 1\)"),
        ({"momentum": None}, TypeError, "momentum must be a number, not NoneType"),
        ({"mask_momentum": 1}, TypeError, "mask_momentum must be True or False, not int"),
        ({"nesterov": 1}, TypeError, "nesterov must be True or False, not int"),
        ({"nesterov": True}, ValueError, "nesterov=True is of a momentum"),
        ({"first_moment": 1}, ValueError, r"first_moment = 1 is not in \[0, 1\)"),
        ({"momentum": 0.9, "first_moment": 0.9}, ValueError, "exclude each other"),
        ({"clip_norm": 0}, ValueError, "clip_norm=0 is not a positive norm"),
        ({"clip_norm": math.nan}, ValueError, "clip_norm=nan is not a positive norm"),
        ({"clip_norm": "1"}, TypeError, "clip_norm must be a number, not str"),
        ({"balance_factor": 0.5}, ValueError, "balance_factor = 0.5 is below 1"),
        ({"index_codec": "zip"}, ValueError, "index codec 'zip'"),
        ({"index_codec": 7}, TypeError, "index_codec must be a name, not int"),
        ({"value_codec": "zip"}, ValueError, "value codec 'zip'"),
        ({"seed": -1}, ValueError, "seed=-1 is out of range"),
        ({"threads": 0}, ValueError, "threads=0 is not a number of threads"),
        ({"timeout": timedelta(0)}, ValueError, "timeout=0:00:00 is not positive"),
        ({"timeout": 30}, TypeError, r"timeout must be .* timedelta\(seconds=30\)"),
        ({"transport": "post"}, ValueError, "transport='post' is none of"),
        ({"process_group": "world"}, TypeError, "process_group must be .*ProcessGroup"),
        ({"partition_period": 3}, TypeError, "partition_period"),
        ({"densty": 0.1}, TypeError, r"OkTopkState\(\) .*'densty'; did you mean 'density'"),
    ],
)
def test_arguments_out_of_range(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        OkTopkState(**arguments)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ThresholdSchedule(between="guessed"), ValueError, "between='guessed' is none of"),
        (lambda: ThresholdSchedule(period=0), ValueError, "period=0 is not a number of steps"),
        (lambda: ThresholdSchedule(period=2.5), TypeError, "period must be an integer, not float"),
        (lambda: ThresholdSchedule.oktopk(tau=0), ValueError, "partition_period=0"),
        (lambda: ThresholdSchedule().source(-1), ValueError, "step=-1 is negative"),
        (lambda: DensityWarmup(0), ValueError, "steps=0 is not a number of steps"),
        (lambda: DensityWarmup(1, 0.5), TypeError, "densities=0.5 is no sequence"),
        (lambda: DensityWarmup(1, (2,)), ValueError, r"a warm-up's density=2 is not in \(0, 1\]"),
        (lambda: Compression(algorithm="best"), ValueError, "algorithm 'best' is unknown"),
        (lambda: Compression(algorithm="topk"), ValueError, "choose one of auto, .*topk_a"),
        (lambda: Compression(algorithm=3), TypeError, "algorithm must be a name, not int"),
        (lambda: Compression(algorithm="dense"), ValueError, "give it density=1, not 0.01"),
        (
            lambda: Compression(algorithm="dense", density=1, momentum=0.9),
            ValueError,
            "sends every entry and keeps nothing",
        ),
        (
            lambda: Compression(algorithm="gtopk", quantize=4),
            ValueError,
            "does not round values to qsgd4; these do: topk_a, gaussian_k, oktopk",
        ),
        (lambda: GaussianKState(select="bucket"), ValueError, "finds its own thresholds"),
        (lambda: CommunicatorOptions(threads=0), ValueError, "threads=0"),
        (lambda: CommunicatorOptions(fusion_bytes=-1), ValueError, "fusion_bytes=-1"),
        (lambda: CommunicatorOptions(fusion_bytes=2**32), ValueError, "fusion_bytes=4294967296"),
        (lambda: CommunicatorOptions(fusion_bytes=1.5), ValueError, "fusion_bytes=1.5"),
        (
            lambda: OkTopkState(communicator_options=timedelta(seconds=5)),
            TypeError,
            "must be CommunicatorOptions, not timedelta",
        ),
        (lambda: DenseOverlapState(stal_limit=None), TypeError, "did you mean 'stall_limit'"),
        (lambda: CompressionState(0.01), TypeError, "must be a Compression, not float"),
        (lambda: OkTopkState().follow(1024.0), TypeError, "float has no get_scale()"),
        (
            lambda: OkTopkState(
                densities={"heads": 1.0}, named_parameters=nn.Linear(2, 2).named_parameters()
            ),
            ValueError,
            "densities names heads, which no parameter",
        ),
    ],
)
def test_what_does_not_fit(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("make", [OkTopkState, DenseOverlapState])
def test_a_keyword_replaces_a_field_of_communicator_options(make: Any) -> None:
    options = CommunicatorOptions(timeout=timedelta(seconds=7), threads=2, transport="c10d")
    state = make(communicator_options=options, threads=1)
    assert state._communicator_options == replace(options, threads=1)
    assert options.threads == 2
    assert make()._communicator_options == CommunicatorOptions()


def _check_late_mistakes() -> None:
    ddp = make_ddp(make_model())
    ddp.register_comm_hook(OkTopkState(densities={"0": 1.0}), sparsecomm.oktopk_hook)
    with pytest.raises((ValueError, RuntimeError), match="give it named_parameters"):
        ddp(batch(0)).sum().backward()
    with pytest.raises(ValueError, match="densities names heads"):
        sparsecomm.register_comm_hook(make_ddp(make_model()), OkTopkState(densities={"heads": 1}))

    class Broken:
        def get_scale(self) -> float:
            return math.nan

    ddp, state = with_state(OkTopkState())
    state.follow(Broken())
    with pytest.raises((ValueError, RuntimeError), match="the loss scale is nan"):
        ddp(batch(0)).sum().backward()

    with pytest.raises(ValueError, match="DenseOverlapState sends every entry"):
        DenseOverlapState().density = 0.5


def test_mistakes_that_only_a_model_shows() -> None:
    run_ranks(1, _check_late_mistakes)


def _check_disagreement() -> str:
    ddp, _ = with_state(OkTopkState(momentum=0.1 * dist.get_rank()))
    with pytest.raises(RuntimeError) as raised:
        ddp(batch(0)).sum().backward()
    return str(raised.value)


def test_ranks_that_disagree_on_an_option() -> None:
    first, second = run_ranks(2, _check_disagreement)
    assert first == second
    assert "momentum: 0 on rank 0 but 0.1 on rank 1" in first

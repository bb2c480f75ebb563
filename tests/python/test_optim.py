"""The optimizers: what they exchange and apply, keep, save and refuse."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import itertools
import math
import os
import pickle
import signal
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import batch, checkpoint_of, flat, gathered, make_model
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from sparsecomm import Compression, ThresholdSchedule, functional
from sparsecomm.optim import (
    DistributedOptimizer,
    OkTopkAdam,
    OkTopkAdamW,
    OkTopkSGD,
    QuantizedTopkSGD,
    TopkSGD,
)
from sparsecomm.optim.travelling import TravellingGradient

SMALL = 0.005  # MiB of a bucket: several for the model of the tests


def backward(model: nn.Module, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    loss: Tensor = model(batch(step, dtype=dtype)).square().mean()
    loss.backward()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(model, step)
        optimizer.step()


def averaged(model: nn.Module) -> None:
    """What a dense exchange would do."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def train_averaged(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]
) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        averaged(model)
        optimizer.step()


def assert_same(result: nn.Module, expected: nn.Module, what: object) -> None:
    """Bit for bit where P divides exactly."""
    found, wanted = flat(result.parameters()), flat(expected.parameters())
    assert all(torch.equal(other, found) for other in gathered(found)), what
    if dist.get_world_size() <= 2:
        assert torch.equal(found, wanted), what
    else:
        torch.testing.assert_close(found, wanted)


# ---- what is exchanged and applied


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [{"params": named[:3], "lr": 0.02}, {"params": named[3:]}]


def check_density_one_is_torch() -> None:
    sgd, adam, adamw = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
    momentum = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (TopkSGD, sgd, {}),
        (OkTopkSGD, sgd, {"maximize": True}),
        (OkTopkSGD, sgd, {**momentum, "foreach": True}),
        (TopkSGD, sgd, {"momentum": 0.9, "dampening": 0.1, "maximize": True, "foreach": False}),
        (OkTopkAdam, adam, {"amsgrad": True, "foreach": True}),
        (OkTopkAdamW, adamw, {"weight_decay": 0.1}),
        (None, torch.optim.RMSprop, {"momentum": 0.9}),
        (None, torch.optim.Adagrad, {}),
        (None, sgd, {}),
    ]
    # Where sums are rounded in another order, adaptive rates make much of it.
    dtype = torch.float32 if dist.get_world_size() <= 2 else torch.float64
    for kind, base, arguments in cases:
        plain, model = make_model(dtype=dtype), make_model(dtype=dtype)
        expected = base(groups_of(plain), lr=0.1, **arguments)
        if kind is None:
            optimizer = base(groups_of(model), lr=0.1, **arguments)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)  # before and after
            same = DistributedOptimizer(
                optimizer, compression=Compression(density=1.0), bucket_cap_mb=SMALL
            )
            assert same is optimizer
        else:
            optimizer = kind(
                groups_of(model), lr=0.1, density=1.0, bucket_cap_mb=SMALL, **arguments
            )
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        assert isinstance(optimizer, base)
        assert isinstance(optimizer, DistributedOptimizer)
        assert optimizer.defaults == expected.defaults
        expected_schedule = torch.optim.lr_scheduler.StepLR(expected, 2)
        for step in range(4):
            train(model, optimizer, [step])
            train_averaged(plain, expected, [step])
            schedule.step()
            expected_schedule.step()
        assert_same(model, plain, (kind, base, arguments))
        assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"]


def check_dtypes() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        plain, model = make_model(dtype=dtype), make_model(dtype=dtype)
        train(model, OkTopkSGD(model.named_parameters(), lr=0.1, density=1.0), range(3))
        train_averaged(plain, torch.optim.SGD(plain.parameters(), lr=0.1), range(3))
        if dtype == torch.float64:
            assert_same(model, plain, dtype)
        else:  # all_reduce rounds sums
            torch.testing.assert_close(
                flat(model.parameters()), flat(plain.parameters()), rtol=2e-2, atol=2e-2
            )


class Weights(nn.Module):
    """Whose gradients are what the test says, whatever the weights are."""

    def __init__(self, *values: Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(value.clone()) for value in values])

    def backward(self, gradients: Iterable[Tensor]) -> None:
        total: Any = 0
        for weight, gradient in zip(self.weights, gradients, strict=True):
            total = total + (weight * gradient).sum()
        total.backward()


def check_only_what_was_received_is_touched() -> None:
    """A dense pass would make a signalling NaN a quiet one."""
    torch.manual_seed(0)
    signalling = torch.full((64, 33), 0x7FA00001, dtype=torch.int32)
    transposed = torch.empty(6, 8, 3, 5).to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for arguments, dense in [
        ({"lr": 0.5}, False),
        ({"lr": 0.5, "maximize": True}, False),
        ({"lr": 0.5, "lr_in_accumulator": True}, False),
        ({"lr": 0.5, "momentum": 0.9}, True),
    ]:
        start = [torch.randn(64, 33), transposed.normal_()]
        model = Weights(*start)
        optimizer = OkTopkSGD(
            model.named_parameters(), density=0.05, select="exact", dense_below=0, **arguments
        )
        for _ in range(3):
            before = [weight.detach().clone() for weight in model.weights]
            model.backward(
                [
                    torch.randn(64, 33, generator=generator),
                    torch.randn(6, 8, 3, 5, generator=generator),
                ]
            )
            optimizer.synchronize()
            gradients = [weight.grad for weight in model.weights]
            masks = [gradient != 0 for gradient in gradients]
            assert 0 < sum(int(mask.sum()) for mask in masks) < 0.2 * 2832
            # What has come is not in these places.
            hole = model.weights[0].data.view(torch.int32)
            hole[~masks[0]] = signalling[~masks[0]]
            optimizer.step()
            assert all(
                weight.grad is gradient
                for weight, gradient in zip(model.weights, gradients, strict=True)
            )
            after = model.weights[0].data.view(torch.int32)[~masks[0]]
            assert torch.equal(after, signalling[~masks[0]]) != dense, arguments
            if not dense:
                factor = -0.5 if "maximize" not in arguments else 0.5
                factor = -1.0 if "lr_in_accumulator" in arguments else factor
                for weight, old, gradient, mask in zip(
                    model.weights, before, gradients, masks, strict=True
                ):
                    expected = old.add(gradient, alpha=factor)
                    assert torch.equal(weight.data[mask], expected[mask])
            model.weights[0].data.copy_(before[0])
            optimizer.zero_grad()
    # What somebody changed in between is applied where it stands.
    model = Weights(torch.zeros(4, 4))
    optimizer = OkTopkSGD(model.parameters(), lr=1.0, density=0.1)
    model.backward([torch.eye(4)])
    optimizer.synchronize()
    model.weights[0].grad += 1
    expected = -model.weights[0].grad
    optimizer.step()
    assert torch.equal(model.weights[0].data, expected)


def top(x: Tensor, k: int) -> Tensor:
    """All but the k largest are zero."""
    chosen = torch.zeros_like(x)
    chosen[x.abs().topk(k).indices] = 1
    return x * chosen


def rounded(x: Tensor, step: int) -> Tensor:
    """What is not zero, as 4 bits of QSGD carry it."""
    chosen = x.nonzero().flatten()
    codes = functional.qsgd_quantize(x[chosen], 4, seed=dist.get_rank(), operation=step)
    result = torch.zeros_like(x)
    result[chosen] = functional.qsgd_dequantize(codes, len(chosen), 4)
    return result


def check_the_papers_algorithms() -> None:
    """001's Algorithm 1, 003's Algorithm 2, and both with the rate outside, in lines of torch."""
    size, rank, n, k = dist.get_world_size(), dist.get_rank(), 1024, 16

    def gradient(step: int) -> Tensor:
        return torch.randn(n, generator=torch.Generator().manual_seed(100 * step + rank))

    def split(x: Tensor) -> list[Tensor]:
        return [x[:512], x[512:]]

    for kind, inside, decay, sign in [
        (TopkSGD, True, 0.0, 1),
        (TopkSGD, False, 0.0, 1),
        (QuantizedTopkSGD, True, 0.0, 1),
        (OkTopkSGD, True, 0.0, 1),
        (OkTopkSGD, True, 0.01, -1),
        (OkTopkSGD, False, 0.0, 1),
    ]:
        average = kind is OkTopkSGD
        weights = torch.linspace(-1, 1, n)
        model = Weights(*split(weights))
        options = {
            TopkSGD: {"select": "bucket"},
            QuantizedTopkSGD: {},
            OkTopkSGD: {"schedule": ThresholdSchedule.exact()},
        }[kind]
        optimizer = kind(
            model.named_parameters(),
            lr=0.1,
            weight_decay=decay,
            maximize=sign < 0,
            density=k / n,
            dense_below=0,
            bucket_cap_mb=math.inf,
            average=average,
            lr_in_accumulator=inside,
            **options,
        )
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        residual = torch.zeros(n)
        for step in range(6):
            rate = 0.1 * 0.7**step
            optimizer.zero_grad()
            model.backward(split(gradient(step)))
            optimizer.step()
            schedule.step()
            fresh = sign * gradient(step) + decay * weights
            accumulator = residual + (rate if inside else 1) * fresh
            if kind is OkTopkSGD:
                selected = top(accumulator, k)
            else:
                # Buckets begin with the parameter whose gradient comes first, the last one.
                selected = torch.cat([top(part, k // 2) for part in split(accumulator)])
            if kind is QuantizedTopkSGD:
                selected = torch.cat(split(rounded(torch.cat(split(selected)[::-1]), step))[::-1])
            total = sum(gathered(selected))
            if kind is OkTopkSGD:
                total = top(total, k)
                selected = torch.where(total != 0, selected, 0)
            residual = accumulator - selected
            weights = weights - (1 if inside else rate) * total / (size if average else 1)
            torch.testing.assert_close(
                flat(model.parameters()), weights, rtol=1e-5, atol=1e-6, msg=f"{kind} {inside}"
            )


def check_conservation() -> None:
    """What arrives, and what every rank keeps, is all that there was."""
    size = dist.get_world_size()
    for make in (
        lambda model: QuantizedTopkSGD(model.named_parameters(), lr=0.1, bucket_cap_mb=SMALL),
        lambda model: OkTopkAdam(model.named_parameters(), density=0.05, first_moment=0.9),
        lambda model: DistributedOptimizer(
            torch.optim.Adagrad(model.parameters()), model.named_parameters()
        ),
    ):
        model = make_model()
        optimizer = make(model)
        carried = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        for step in range(4):
            optimizer.zero_grad()
            reference = copy.deepcopy(model)
            backward(model, step)
            assert all(isinstance(p.grad, TravellingGradient) for p in model.parameters())
            backward(reference, step)
            optimizer.step()
            carried += sum(gathered(flat([p.grad for p in reference.parameters()]).double()))
            carried -= size * flat([p.grad for p in model.parameters()]).double()
        residuals = checkpoint_of(optimizer.exchange)["residuals"]
        kept = flat([residuals[name] for name, _ in model.named_parameters()]).double()
        torch.testing.assert_close(sum(gathered(kept)), carried, rtol=1e-5, atol=1e-5)
        assert optimizer.exchange.stats()["steps"] == 4


# ---- steps of other kinds


def check_overlap_accumulation_and_unused() -> None:
    plain, model = make_model(), make_model()
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    optimizer = OkTopkSGD(
        model.named_parameters(), lr=0.1, momentum=0.9, density=1.0, bucket_cap_mb=SMALL
    )
    # The exchange of the last layers begins before the first one's gradient is there.
    launched = []
    first = next(model.parameters())
    handle = first.register_hook(lambda _: launched.append(optimizer._buckets._launched))
    train(model, optimizer, range(1))
    train_averaged(plain, expected, range(1))
    handle.remove()
    assert 0 < launched[0] < len(optimizer._buckets._buckets)

    # Accumulated, with and without a gradient there before.
    for keep in (False, True):
        optimizer.zero_grad(set_to_none=keep)
        expected.zero_grad()
        with optimizer.no_sync():
            backward(model, 1)
            backward(model, 2)
            with pytest.raises(RuntimeError, match="within no_sync"):
                optimizer.step()
        for step in (1, 2, 3):
            backward(plain, step)
        backward(model, 3)
        averaged(plain)
        expected.step()
        optimizer.step()
        assert_same(model, plain, keep)

    # Rank 0 uses only the first layers, and then no layer at all: zeros.
    for used in (4, 0):
        optimizer.zero_grad()
        expected.zero_grad()
        for one in (model, plain):
            layers: Any = one[:used] if dist.get_rank() == 0 else one
            if used or dist.get_rank() > 0:
                layers(batch(9)).square().mean().backward()
        for parameter in plain.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        averaged(plain)
        expected.step()
        optimizer.step()
        assert_same(model, plain, used)

    optimizer.zero_grad()
    backward(model, 5)
    with pytest.raises(RuntimeError, match=r"8\.bias is being exchanged.*zero_grad\(\)"):
        backward(model, 5)
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"8\.bias came a second time before step"):
        backward(model, 5)
    # Forgotten on every rank alike.
    optimizer.zero_grad()
    expected.zero_grad()
    train(model, optimizer, [7])
    train_averaged(plain, expected, [7])
    assert_same(model, plain, "after a discarded step")

    # A gradient that has a graph of its own leaves it behind.
    optimizer.zero_grad()
    model(batch(8)).square().mean().backward(create_graph=True)
    optimizer.step()
    train_averaged(plain, expected, [8])
    assert_same(model, plain, "a graph")
    assert not any(parameter.grad.requires_grad for parameter in model.parameters())


class Branches(nn.Module):
    """Gradients come in the opposite order of the branches that are taken."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.branches = nn.ModuleList(nn.Linear(30, 20) for _ in range(5))

    def forward(self, x: Tensor, taken: list[int]) -> Tensor:
        return torch.stack([self.branches[i](x) for i in taken]).square().mean()


def check_gradients_in_any_order() -> None:
    model, expected = Branches(), Branches()
    options: dict[str, Any] = {"lr": 0.1, "density": 0.1, "dense_below": 0, "bucket_cap_mb": 1e-3}
    optimizer = OkTopkSGD(model.named_parameters(), **options)
    same = OkTopkSGD(expected.named_parameters(), **options)
    went: list[list[int]] = []
    exchange = optimizer._exchange.exchange

    def note(index: int, last: bool, buffer: Tensor, *rest: Any) -> Any:
        buffers = [bucket.buffer.data_ptr() for bucket in optimizer._buckets._buckets]
        went[-1].append(buffers.index(buffer.data_ptr()))
        return exchange(index, last, buffer, *rest)

    optimizer._exchange.exchange = note  # type: ignore[method-assign]
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        some = int(torch.randint(1, 6, (), generator=random))
        taken = torch.randperm(5, generator=random)[:some]
        optimizer.zero_grad()
        same.zero_grad()
        went.append([])
        loss = model(torch.randn(8, 30, generator=random), taken.tolist())
        gradients = torch.autograd.grad(
            loss, list(model.parameters()), retain_graph=True, materialize_grads=True
        )
        loss.backward()
        before_step = len(went[-1])
        # The same gradients, in the order of the buckets.
        pairs = zip(expected.parameters(), gradients, strict=True)
        torch.stack([(parameter * g).sum() for parameter, g in pairs]).sum().backward()
        optimizer.step()
        same.step()
        assert_same(model, expected, taken)
        assert sorted(went[-1]) == list(range(len(optimizer._buckets._buckets)))
        # From the second step on nothing that is complete waits for another bucket.
        assert len(went) == 1 or before_step == 2 * len(taken)
    assert went[0] == sorted(went[0])
    orders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(orders, went)
    assert all(one == orders[0] for one in orders) == (len(orders) == 1)


def check_parameters_that_are_added_when_a_part_has_been_sent() -> None:
    model, more = Branches(), nn.Linear(3, 3)
    optimizer = OkTopkSGD(
        model.named_parameters(), lr=0.1, density=0.1, dense_below=0, bucket_cap_mb=1e-3
    )
    x = torch.ones(8, 30)
    model(x, [0, 1, 2, 3, 4]).backward()
    optimizer.step()
    optimizer.zero_grad()
    went: list[int] = []
    exchange = optimizer._exchange.exchange

    def note(index: int, last: bool, buffer: Tensor, *rest: Any) -> Any:
        went.append(buffer.data_ptr())
        return exchange(index, last, buffer, *rest)

    optimizer._exchange.exchange = note  # type: ignore[method-assign]
    model(x, [0]).backward()  # the last buckets
    for bucket in optimizer._buckets._buckets:
        if bucket.work is not None:
            bucket.work.wait()
    assert len(went) == 2
    optimizer.add_param_group({"params": list(more.named_parameters("more"))})
    optimizer.step()
    assert sorted(went) == sorted(b.buffer.data_ptr() for b in optimizer._buckets._buckets)
    del optimizer._exchange.exchange


def check_a_part_of_a_step_that_is_dropped_before_it_is_clipped() -> None:
    model, expected = Branches(), Branches()
    options: dict[str, Any] = {"lr": 0.1, "density": 0.1, "clip_norm": 1.0, "bucket_cap_mb": 1e-3}
    optimizer = OkTopkSGD(model.named_parameters(), **options)
    same = OkTopkSGD(expected.named_parameters(), **options)
    for step in range(4):
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        same.zero_grad()
        model(x, [(step + dist.get_rank()) % 5]).backward()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        for each, by in ((model, optimizer), (expected, same)):
            each(x, [0, 1, 2, 3, 4]).backward()
            by.step()
        assert_same(model, expected, step)


def check_closures_and_hooks() -> None:
    def closure_of(
        model: nn.Module, optimizer: torch.optim.Optimizer, dense: bool
    ) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = backward(model, 0)
            if dense:
                averaged(model)
                dist.all_reduce(loss := loss.detach())
                loss /= dist.get_world_size()
            return loss

        return closure

    plain, model = make_model(), make_model()
    expected = torch.optim.LBFGS(plain.parameters(), lr=0.5, max_iter=5)
    optimizer: Any = DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5),
        compression=Compression(density=1.0),
    )
    for _ in range(2):
        expected.step(closure_of(plain, expected, True))
        optimizer.step(closure_of(model, optimizer, False))
    assert_same(model, plain, "LBFGS")

    # Hooks, torch's, see what was exchanged; a closure's own loss is returned.
    model = make_model()
    optimizer = TopkSGD(model.named_parameters(), lr=0.1, density=0.05)
    seen: list[str] = []

    def before(_: Any, *__: Any) -> None:
        assert all(p.grad is not None for p in model.parameters())
        seen.append("before")

    def after(_: Any, *__: Any) -> None:
        assert all(p.grad is not None for p in model.parameters())
        seen.append("after")

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    everywhere = register_optimizer_step_pre_hook(before)
    train(model, optimizer, range(2))
    everywhere.remove()
    assert seen == ["before", "before", "after"] * 2
    loss = optimizer.step(closure=closure_of(model, optimizer, False))
    assert loss.requires_grad, "the closure's own"

    # Clipped, or unscaled, in between; a second synchronize() exchanges nothing.
    optimizer.zero_grad()
    backward(model, 3)
    optimizer.synchronize()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm > 1e-3
    assert all(torch.equal(other, norm) for other in gathered(norm))
    old = flat(model.parameters())
    optimizer.step()
    assert math.isclose((flat(model.parameters()) - old).norm(), 1e-4, rel_tol=1e-2)
    assert optimizer.exchange.stats()["steps"] == 4

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.exchange.follow(scaler)
    for poison in (False, True):
        optimizer.zero_grad()
        old = flat(model.parameters())
        loss = model(batch(4)).square().mean()
        scaler.scale(loss * (math.inf if poison and dist.get_rank() == 0 else 1)).backward()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(flat(model.parameters()), old) == poison


# ---- state


def check_resume_and_copies() -> None:
    for make in (
        lambda model: OkTopkSGD(
            model.named_parameters(), lr=0.1, momentum=0.9, density=0.05, bucket_cap_mb=SMALL
        ),
        lambda model: DistributedOptimizer(
            torch.optim.Adam(model.parameters()), compression=Compression(density=0.05)
        ),
    ):
        model = make_model()
        optimizer: Any = make(model)
        train(model, optimizer, range(4))
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        pickled = pickle.dumps([model, optimizer])
        copies = [pickle.loads(pickled), copy.deepcopy([model, optimizer])]
        train(model, optimizer, range(4, 8))

        file.seek(0)
        saved_model, saved = torch.load(file, weights_only=True)
        resumed = make_model()
        resumed_optimizer: Any = make(resumed)
        resumed.load_state_dict(saved_model)
        resumed_optimizer.load_state_dict(saved)
        blank = make_model()
        copied, copied_optimizer = copy.deepcopy([blank, make(blank)])
        copied.load_state_dict(saved_model)
        copied_optimizer.load_state_dict(copy.deepcopy(saved))  # torch keeps the tensors
        copies.append([copied, copied_optimizer])
        for other, other_optimizer in [(resumed, resumed_optimizer), *copies]:
            assert type(other_optimizer) is type(optimizer)
            train(other, other_optimizer, range(4, 8))
            assert torch.equal(flat(other.parameters()), flat(model.parameters()))
            text = repr(other_optimizer)
            assert text == repr(optimizer)
            assert "density: 0.05" in text
            assert "lr: " in text
            with pytest.raises(ValueError, match="has no 'sparsecomm'"):
                other_optimizer.load_state_dict({k: saved[k] for k in ("state", "param_groups")})

        # Of all ranks of another number, in one dict.
        if dist.get_world_size() == 1:
            [entry] = saved["sparsecomm"].values()
            both = {"rank_0_of_2": entry, "rank_1_of_2": entry}
            resumed_optimizer.load_state_dict({**saved, "sparsecomm": both})
            [loaded] = resumed_optimizer.state_dict()["sparsecomm"].values()
            for name, residual in entry["residuals"].items():
                assert torch.equal(loaded["residuals"][name], residual)

        # Dropped, it no longer exchanges.
        reference = weakref.ref(resumed_optimizer._buckets)
        del resumed_optimizer, other_optimizer, other, copies
        assert reference() is None
        assert not any(parameter._post_accumulate_grad_hooks for parameter in resumed.parameters())
        backward(resumed, 0)
        assert all(parameter.grad is not None for parameter in resumed.parameters())


def check_distributed_checkpoints(folder: Path) -> None:
    """As torch.distributed.checkpoint.state_dict has them, beside the exchange."""

    def start(method: Any, options: dict[str, Any]) -> tuple[nn.Module, Any]:
        model = make_model()
        return model, method(model.named_parameters(), lr=0.01, density=0.05, **options)

    methods: list[tuple[Any, dict[str, Any]]] = [
        (TopkSGD, {"momentum": 0.9}),
        (OkTopkSGD, {}),
        (OkTopkSGD, {"lr_in_accumulator": True}),
        (OkTopkAdam, {}),
    ]
    for number, (method, options) in enumerate(methods):
        model, optimizer = start(method, options)
        train(model, optimizer, range(4))
        optimizer.zero_grad()  # so that torch makes a step of zeros, which must exchange nothing
        saved: dict[str, Any] = {
            "exchange": optimizer.exchange,
            "model": model,
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        path = folder / str(number)
        dcp.save(saved, checkpoint_id=path)
        train(model, optimizer, range(4, 8))

        resumed, resumed_optimizer = start(method, options)
        with pytest.raises(ValueError, match=r"optimizer\.exchange is to be saved"):
            set_optimizer_state_dict(resumed, resumed_optimizer, saved["optimizer"])
        found: dict[str, Any] = {
            "exchange": resumed_optimizer.exchange,
            "model": resumed,
            "optimizer": get_optimizer_state_dict(resumed, resumed_optimizer),
        }
        dcp.load(found, checkpoint_id=path)
        set_optimizer_state_dict(resumed, resumed_optimizer, found["optimizer"])
        train(resumed, resumed_optimizer, range(4, 8))
        assert torch.equal(flat(resumed.parameters()), flat(model.parameters())), method


def check_a_failed_load_changes_nothing() -> None:
    model = make_model()
    optimizer: Any = TopkSGD(model.named_parameters(), lr=0.01, momentum=0.9, density=0.05)
    train(model, optimizer, range(3))
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["lr"] = 7.0
    for state in wrong["state"].values():
        state["momentum_buffer"].zero_()
    [entry] = wrong["sparsecomm"].values()
    entry["residuals"]["0.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match="belongs to another model"):
        optimizer.load_state_dict(wrong)
    now = optimizer.state_dict()
    assert now["param_groups"] == before["param_groups"]
    for key in ("state", "sparsecomm"):
        for value, expected in zip(tree_leaves(now[key]), tree_leaves(before[key]), strict=True):
            assert torch.equal(value, expected) if torch.is_tensor(value) else value == expected


def check_added_groups() -> None:
    plain, model = make_model(), make_model()
    named = list(model.named_parameters())
    optimizer: Any = OkTopkSGD(named[:4], lr=0.1, density=1.0)
    expected = torch.optim.SGD(list(plain.parameters())[:4], lr=0.1)
    for step in range(2):
        train(model, optimizer, [step])
        train_averaged(plain, expected, [step])
    optimizer.add_param_group({"params": named[4:], "lr": 0.3})
    expected.add_param_group({"params": list(plain.parameters())[4:], "lr": 0.3})
    model.zero_grad()
    plain.zero_grad()
    for step in range(2, 4):
        train(model, optimizer, [step])
        train_averaged(plain, expected, [step])
    assert_same(model, plain, "an added group")
    assert len(checkpoint_of(optimizer.exchange)["residuals"]) == len(named)
    groups = len(optimizer.param_groups)
    with pytest.raises(TypeError, match=r"extra is a parameter of torch\.complex64"):
        optimizer.add_param_group(
            {"params": [("extra", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))]}
        )
    assert len(optimizer.param_groups) == groups


def check_gradients_cannot_be_used_before_they_have_come() -> None:
    """Reading or changing them raises: what looks at ``None`` would go on and do nothing."""
    model = make_model()
    optimizer = OkTopkSGD(model.named_parameters(), lr=1.0, density=1.0, bucket_cap_mb=SMALL)
    first = next(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))

    def accumulate() -> None:
        with optimizer.no_sync():
            backward(model, 1)

    def gradient() -> Tensor:
        assert first.grad is not None
        return first.grad

    uses: list[Callable[[], object]] = [
        lambda: clip_grad_norm_(model.parameters(), 1.0),
        lambda: clip_grad_norm_(model.parameters(), 1.0, foreach=False),
        lambda: clip_grad_value_(model.parameters(), 1.0),
        lambda: scaler.unscale_(optimizer),
        lambda: gradient().norm(),
        lambda: gradient().data.norm(),
        lambda: gradient().mul_(0.5),
        lambda: gradient()[0, 0].item(),
        lambda: torch.stack([gradient(), gradient()]),
        lambda: model.zero_grad(set_to_none=False),
        accumulate,
        lambda: backward(model, 1),
    ]
    backward(model, 0)
    for use in uses:
        with pytest.raises(
            RuntimeError, match=r"gradient of \d\.\w+ is being exchanged.*synchronize\(\)"
        ):
            use()
    # What asks no more than whether there is one, or copies the model, goes on.
    assert gradient().shape == first.shape
    assert gradient().dtype == first.dtype
    assert "synchronize()" in repr(gradient())
    assert copy.deepcopy(model)[0].weight.grad is None  # type: ignore[index]
    leaf = torch.zeros(3, requires_grad=True)
    other = OkTopkSGD([leaf], lr=1.0, density=1.0)
    leaf.sum().backward()
    assert copy.deepcopy(leaf).grad is None
    assert leaf.grad is not None
    del other  # leaves nothing behind
    assert leaf.grad is None
    torch.save(model, io.BytesIO())

    optimizer.synchronize()
    assert clip_grad_norm_(model.parameters(), 1e-3) > 1e-3
    before = flat(model.parameters())
    optimizer.step()
    assert (flat(model.parameters()) - before).norm() <= 1.001e-3
    optimizer.zero_grad()

    for keep in (False, True):
        backward(model, 2)
        optimizer.zero_grad(set_to_none=keep)
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    backward(model, 3)
    first.grad = None
    with pytest.raises(RuntimeError, match=r"0\.weight was replaced or taken away"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(4, 6))


def check_what_was_exchanged_is_not_exchanged_again() -> None:
    """A pass that adds to a result raises, before a velocity could grow by what it delivered."""

    def pass_on(model: nn.Module, optimizer: DistributedOptimizer, step: int) -> None:
        backward(model, step)

    def accumulate(model: nn.Module, optimizer: DistributedOptimizer, step: int) -> None:
        with optimizer.no_sync():
            backward(model, step)

    def make(model: nn.Module, momentum: float) -> DistributedOptimizer:
        return DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            compression=Compression(density=1.0, momentum=momentum),
            bucket_cap_mb=SMALL,
        )

    for used, add in itertools.product((False, True), (pass_on, accumulate)):
        plain, model = make_model(), make_model()
        optimizer = make(model, 0.9)
        expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        train_averaged(plain, expected, [0])
        backward(model, 0)
        optimizer.synchronize()
        if used:
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"exchanged before.*zero_grad\(\)"):
            add(model, optimizer, 1)
        if not used:
            optimizer.zero_grad()
            continue
        # By which of the ways they are cleared does not matter.
        for step, clear in enumerate(
            (
                optimizer.zero_grad,
                model.zero_grad,
                lambda o=optimizer: o.zero_grad(set_to_none=False),
                lambda m=model: m.zero_grad(set_to_none=False),
            )
        ):
            clear()
            plain.zero_grad()
            train_averaged(plain, expected, [step + 1])
            backward(model, step + 1)
            optimizer.step()
        assert_same(model, plain, "momentum")

    # Without momentum what was exchanged and kept is averaged again, as by hand.
    plain, model = make_model(), make_model()
    optimizer, expected = make(model, 0.0), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        backward(plain, step)
        averaged(plain)
        expected.step()
        backward(model, step)
        optimizer.step()
    assert_same(model, plain, "kept")


def check_ddp_does_not_reduce_too() -> None:
    model = make_model()
    ddp = DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel.*register_comm_hook"):
        OkTopkSGD(ddp.named_parameters())
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel.*register_comm_hook"):
        DistributedOptimizer(torch.optim.SGD(ddp.parameters()))
    del ddp
    gc.collect()
    optimizer = OkTopkSGD(model.named_parameters(), lr=0.1, density=1.0)
    train(model, optimizer, range(2))
    late = DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match=r"reduces the gradient of 8\.bias"):
        backward(late, 2)
    optimizer.zero_grad()


def check_all(folder: Path) -> None:
    check_density_one_is_torch()
    check_what_was_exchanged_is_not_exchanged_again()
    check_dtypes()
    check_only_what_was_received_is_touched()
    check_the_papers_algorithms()
    check_conservation()
    check_gradients_cannot_be_used_before_they_have_come()
    check_ddp_does_not_reduce_too()
    check_overlap_accumulation_and_unused()
    check_gradients_in_any_order()
    check_parameters_that_are_added_when_a_part_has_been_sent()
    check_a_part_of_a_step_that_is_dropped_before_it_is_clipped()
    check_closures_and_hooks()
    check_resume_and_copies()
    check_distributed_checkpoints(folder)
    check_a_failed_load_changes_nothing()
    check_saving_in_the_middle_of_a_step()
    check_groups_changed_by_hand()
    check_frozen_in_between()
    check_a_step_at_no_rate()
    check_decay_under_a_loss_scale()
    check_what_else_groups_hold()
    check_loading_another_kind()
    check_added_groups()
    check_what_f16_cannot_hold()
    check_an_overflow_that_is_replaced()
    check_gradients_of_another_type()
    check_hooks_that_come_later()
    check_two_optimizers_of_a_parameter()


def check_saving_in_the_middle_of_a_step() -> None:
    """What was exchanged and not yet used is neither saved nor taken back."""
    model, unused = make_model(), nn.Linear(40, 40)
    named = [*unused.named_parameters("unused"), *model.named_parameters()]
    optimizer = OkTopkSGD(named, lr=0.0, density=0.05, bucket_cap_mb=SMALL)
    backward(model, 0)
    with pytest.raises(ValueError, match=r"between backward\(\) and step\(\)"):
        optimizer.state_dict()
    with pytest.raises(ValueError, match=r"between backward\(\) and step\(\)"):
        copy.deepcopy(optimizer)
    local = {name: parameter.grad for name, parameter in make_gradients(0).items()}
    optimizer.synchronize()
    with pytest.raises(ValueError, match=r"between backward\(\) and step\(\)"):
        optimizer.state_dict()
    optimizer.step()
    first = checkpoint_of(optimizer.exchange)["residuals"]
    size = dist.get_world_size()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient = local[name]
        assert gradient is not None
        kept = sum(gathered(first[name])) / size
        whole = sum(gathered(gradient.reshape(-1))) / size
        torch.testing.assert_close(parameter.grad.reshape(-1) + kept, whole)

    # All of it has come, and nobody has waited: the same on every rank, whenever it is asked.
    whole_model = make_model()
    everything = OkTopkSGD(whole_model.named_parameters(), lr=0.0, density=0.05)
    backward(whole_model, 0)
    with pytest.raises(ValueError, match=r"between backward\(\) and step\(\)"):
        everything.state_dict()
    everything.step()
    everything.state_dict()

    optimizer.zero_grad()
    backward(model, 1)
    optimizer.zero_grad()
    again = checkpoint_of(optimizer.exchange)["residuals"]
    taken_back = []
    for name, parameter in make_gradients(1).items():
        assert parameter.grad is not None
        taken_back.append(torch.equal(again[name], first[name] + parameter.grad.reshape(-1)))
        assert taken_back[-1] or torch.equal(again[name], first[name]), name
    assert any(taken_back), "the model must have several groups for this test"


def check_groups_changed_by_hand() -> None:
    """What is not exchanged raises; names and rates follow a parameter from group to group."""

    def make(
        lr_in_accumulator: bool = False,
    ) -> tuple[list[nn.Parameter], OkTopkSGD]:
        first, second = (nn.Parameter(torch.ones(4)) for _ in range(2))
        groups = [{"params": [first]}, {"params": [second], "lr": 0.125}]
        optimizer = OkTopkSGD(
            groups, lr=1.0, density=1.0, lr_in_accumulator=lr_in_accumulator, transport="c10d"
        )
        return [first, second], optimizer

    def step(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        torch.stack([p.sum() * (dist.get_rank() + 1) for p in parameters]).sum().backward()
        optimizer.step()

    size = dist.get_world_size()
    average = (size + 1) / 2
    head = nn.Parameter(torch.ones(4))

    def replace(groups: list[dict[str, Any]]) -> None:
        groups[1]["params"][0] = head

    def append(groups: list[dict[str, Any]]) -> None:
        groups[0]["params"].append(head)

    def append_group(groups: list[dict[str, Any]]) -> None:
        groups.append({**groups[0], "params": [head]})

    for change in (replace, append, append_group):
        parameters, optimizer = make()
        step(parameters, optimizer)
        change(optimizer.param_groups)
        with pytest.raises(RuntimeError, match=r"shape \[4\].*add_param_group"):
            step([*parameters, head], optimizer)
        optimizer.zero_grad()

    # An old head goes, a new one comes.
    (first, _), optimizer = make()
    del optimizer.param_groups[1]
    head = nn.Parameter(torch.ones(4))
    optimizer.add_param_group({"params": [head], "lr": 0.5})
    step([first, head], optimizer)
    assert torch.equal(head, torch.full((4,), 1 - 0.5 * average))

    for lr_in_accumulator in (False, True):
        (first, second), optimizer = make(lr_in_accumulator)
        optimizer.param_groups[0]["params"].remove(first)
        optimizer.param_groups[1]["params"].append(first)
        step([first, second], optimizer)
        assert torch.equal(first, torch.full((4,), 1 - 0.125 * average))
        del optimizer.param_groups[0]
        step([first, second], optimizer)
        assert torch.equal(first, torch.full((4,), 1 - 0.25 * average))

    (first, second), optimizer = make()
    optimizer.param_groups.reverse()
    copied = copy.deepcopy(optimizer)
    names = dict(zip(copied._names.values(), copied._names, strict=True))
    assert torch.equal(names["parameter.1"], copied.param_groups[0]["params"][0])
    assert copied.param_groups[0]["params"][0] is names["parameter.1"]


def check_frozen_in_between() -> None:
    """What is kept of a frozen parameter waits until it is trained again."""
    for momentum, decay in ((0.0, 0.0), (0.9, 0.1)):
        first, second = (nn.Parameter(torch.zeros(10)) for _ in range(2))
        optimizer = TopkSGD(
            [("first", first), ("second", second)],
            lr=1.0,
            density=0.1,
            select="exact",
            dense_below=0,
            momentum=momentum,
            weight_decay=decay,
        )

        def step(
            optimizer: TopkSGD = optimizer, both: tuple[nn.Parameter, ...] = (first, second)
        ) -> None:
            optimizer.zero_grad()
            torch.stack([(torch.arange(1.0, 11.0) * p).sum() for p in both]).sum().backward()
            optimizer.step()

        step()
        second.requires_grad_(False)
        before = second.detach().clone()
        kept = checkpoint_of(optimizer.exchange)["residuals"]["second"]
        assert kept.any()
        for _ in range(3):
            step()
            assert second.grad is None
        assert torch.equal(second, before)
        assert torch.equal(checkpoint_of(optimizer.exchange)["residuals"]["second"], kept)
        second.requires_grad_(True)
        for _ in range(9):
            step()
        assert not torch.equal(second, before)
        if momentum == 0:
            missing = checkpoint_of(optimizer.exchange)["residuals"]
            for parameter, steps, name in ((first, 13, "first"), (second, 10, "second")):
                whole = -steps * torch.arange(1.0, 11.0)
                mean = sum(gathered(missing[name])) / dist.get_world_size()
                torch.testing.assert_close(parameter.detach() - mean, whole)


def check_a_step_at_no_rate() -> None:
    """A rank without a batch takes part, whatever the learning rate is."""
    model = make_model()
    optimizer = OkTopkSGD(model.named_parameters(), lr=0.5, density=1.0)
    train(model, optimizer, range(1))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.zero_grad(set_to_none=False)
    if dist.get_rank() == 0:
        backward(model, 1)
    optimizer.step()
    gradients = flat(p.grad for p in model.parameters() if p.grad is not None)
    assert gradients.any()
    assert all(torch.equal(other, gradients) for other in gathered(gradients))


def check_decay_under_a_loss_scale() -> None:
    class Scaler:
        def get_scale(self) -> float:
            return 1024.0

    weight = nn.Parameter(torch.ones(4))
    optimizer = OkTopkSGD(
        [("weight", weight)], lr=0.5, weight_decay=0.5, density=1.0, lr_in_accumulator=True
    )
    optimizer.exchange.follow(Scaler())
    (1024.0 * weight * 0.0).sum().backward()
    optimizer.synchronize()
    assert weight.grad is not None
    weight.grad /= 1024
    optimizer.step()
    assert torch.equal(weight, torch.full((4,), 0.75))


def check_what_else_groups_hold() -> None:
    """Options that print differently on each rank, as sets of words do, are not compared."""
    weight = nn.Parameter(torch.ones(4))
    OkTopkSGD([{"params": [weight], "tag": {f"rank {dist.get_rank()}"}, "of": object()}], lr=1.0)


def check_loading_another_kind() -> None:
    for steps in (0, 1):
        weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
        sgd, other = OkTopkSGD(weights[:1], lr=1.0, momentum=0.9), OkTopkAdamW(weights[1:])
        for _ in range(steps):
            weights[0].sum().backward()
            sgd.step()
        with pytest.raises(ValueError, match=r"not of AdamW: it lacks \w"):
            other.load_state_dict(sgd.state_dict())
        assert "betas" in other.param_groups[0]


def check_what_f16_cannot_hold() -> None:
    """Contract 1: residuals, of float32, are delivered in steps that are finite."""
    weight = nn.Parameter(torch.zeros(10, 10, dtype=torch.float16))
    optimizer = TopkSGD([("weight", weight)], lr=0.0, density=0.01)
    gradient, delivered = torch.zeros(10, 10), torch.zeros(10, 10)
    gradient[0, :4] = 60000.0
    largest = 0.0
    for step in range(1, 8):
        optimizer.zero_grad()
        (weight * gradient.half()).sum().backward()
        optimizer.step()
        assert weight.grad is not None
        delivered += weight.grad.float()
        largest = max(largest, weight.grad.max().item())
        kept = sum(gathered(checkpoint_of(optimizer.exchange)["residuals"]["weight"]))
        mean = kept / dist.get_world_size()
        torch.testing.assert_close(delivered.reshape(-1) + mean, step * gradient.reshape(-1))
    assert largest == 65504.0


def check_an_overflow_that_is_replaced() -> None:
    """Contract 5: of what is taken back nothing may be applied, once NaN are made numbers."""
    model, reference = make_model(), make_model()
    optimizer = OkTopkSGD(model.named_parameters(), lr=0.1, density=0.1, bucket_cap_mb=SMALL)
    assert len(optimizer._buckets._buckets) > 2
    train(model, optimizer, range(2))
    first = next(model.parameters())
    handle = first.register_hook(lambda gradient: gradient * math.inf)  # the last to come
    reference.load_state_dict(model.state_dict())
    before = checkpoint_of(optimizer.exchange)["residuals"]
    optimizer.zero_grad()
    backward(model, 2)
    handle.remove()
    optimizer.synchronize()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isnan().all()
        parameter.grad.nan_to_num_()
    optimizer.step()
    assert_same(model, reference, "a step without a gradient")
    backward(reference, 2)
    after = checkpoint_of(optimizer.exchange)["residuals"]
    kept = [
        name
        for name, parameter in reference.named_parameters()
        if parameter.grad is not None
        and torch.equal(after[name], before[name] + parameter.grad.reshape(-1))
    ]
    assert len(kept) >= 3  # the weights of other buckets
    assert torch.equal(after["0.weight"], before["0.weight"])


def check_gradients_of_another_type() -> None:
    def parameter() -> nn.Parameter:
        return nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    message = r"weight is torch\.bfloat16 and its gradient torch\.float32, .*leave its grad_dtype"
    if not hasattr(Tensor, "grad_dtype"):
        return
    weight = parameter()
    weight.grad_dtype = torch.float32
    with pytest.raises(TypeError, match=message):
        OkTopkSGD([("weight", weight)])
    for used in (True, False):
        weight = parameter()
        optimizer = OkTopkSGD([("weight", weight)])
        weight.grad_dtype = torch.float32
        bring = weight.sum().backward if used else optimizer.step
        with pytest.raises(TypeError, match=message):
            bring()


def check_hooks_that_come_later() -> None:
    """A hook that is registered too late cannot do anything without a word."""

    def replace(parameter: Tensor) -> None:
        parameter.grad = None

    for hook, place in [
        (lambda parameter: parameter.grad.mul_(0.5), "backward"),
        (lambda parameter: parameter.grad.data.mul_(0.5), "backward"),
        (replace, "step"),
    ]:
        weight = nn.Parameter(torch.ones(4))
        optimizer = OkTopkSGD([("weight", weight)])
        weight.register_post_accumulate_grad_hook(hook)
        if place == "backward":
            with pytest.raises(RuntimeError, match=r"of weight .*register post-acc.* before the"):
                weight.sum().backward()
        else:
            weight.sum().backward()
            with pytest.raises(RuntimeError, match="the grad of weight was replaced"):
                optimizer.step()


def check_two_optimizers_of_a_parameter() -> None:
    shared, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    first = OkTopkSGD([("shared", shared)], lr=1.0)
    second = OkTopkAdamW([("other", other), ("shared", shared)])
    both = r"two optimizers, .*SGD and .*AdamW, exchange the gradient of shared: "
    with pytest.raises(RuntimeError, match=both):
        (shared + other).sum().backward()
    del first, second
    gc.collect()
    shared.grad = other.grad = None
    optimizer = OkTopkSGD([("shared", shared)], lr=1.0)
    optimizer = OkTopkSGD([("shared", shared)], lr=1.0)  # in the place of the former
    shared.sum().backward()
    optimizer.step()
    assert torch.equal(shared, torch.zeros(4))


def make_gradients(step: int) -> dict[str, nn.Parameter]:
    model = make_model()
    backward(model, step)
    return dict(model.named_parameters())


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_optimizers(size: int, tmp_path: Path) -> None:
    run_ranks(size, check_all, tmp_path, timeout=110)


# ---- mistakes


def some_parameters() -> list[tuple[str, Tensor]]:
    return list(make_model().named_parameters())


def sgd(**arguments: Any) -> Any:
    return OkTopkSGD(some_parameters(), **arguments)


def wrapped(**arguments: Any) -> Any:
    optimizer = arguments.pop("optimizer", None)
    if optimizer is None:
        optimizer = torch.optim.SGD([parameter for _, parameter in some_parameters()])
    return DistributedOptimizer(optimizer, **arguments)


@pytest.mark.parametrize(
    ("make", "arguments", "kind", "message"),
    [
        (sgd, {"density": 0}, ValueError, r"density=0 .*\(0, 1\]"),
        (sgd, {"density": "1%"}, TypeError, "density must be a number, not str"),
        (sgd, {"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb=0 .* more than 0 MiB"),
        (sgd, {"bucket_cap_mb": math.nan}, ValueError, "bucket_cap_mb=nan"),
        (sgd, {"bucket_cap_mb": True}, TypeError, "bucket_cap_mb must be a number, not bool"),
        (sgd, {"compare_every": 2.0}, TypeError, "compare_every must be an int, not float"),
        (wrapped, {"compare_every": -1}, ValueError, "compare_every=-1 .* 1 or more"),
        (sgd, {"average": 1}, TypeError, "average must be True or False, not int"),
        (sgd, {"lr_in_accumulator": 1}, TypeError, "lr_in_accumulator must be True or False"),
        (
            sgd,
            {"lr_in_accumulator": True, "momentum": 0.9},
            ValueError,
            "lr_in_accumulator=True and momentum=0.9 exclude each other",
        ),
        (
            sgd,
            {"lr_in_accumulator": True, "clip_norm": 1.0},
            ValueError,
            "lr_in_accumulator=True and clip_norm=1.0 exclude each other",
        ),
        (sgd, {"threads": 0}, ValueError, "threads=0 .* 1 or more"),
        (sgd, {"timeout": 3}, TypeError, "timeout must be a timedelta or None, not int"),
        (sgd, {"transport": "pigeon"}, ValueError, "transport='pigeon' is none of auto"),
        (sgd, {"process_group": "all"}, TypeError, "process_group must be .* not str"),
        (sgd, {"quantize": 3}, ValueError, "quantize=3 bits: choose 2, 4 or 8"),
        (sgd, {"lr": -1}, ValueError, "Invalid learning rate: -1"),
        (sgd, {}, RuntimeError, "init_process_group"),
        (wrapped, {}, RuntimeError, "init_process_group"),
        (wrapped, {"optimizer": 3}, TypeError, "optimizer must be a torch.optim.Optimizer"),
        (wrapped, {"compression": 0.01}, TypeError, "compression must be a Compression"),
        (wrapped, {"named_parameters": [1]}, TypeError, "pairs of a name and a tensor"),
        (
            wrapped,
            {"named_parameters": some_parameters()},
            ValueError,
            r"10 of the optimizer's 10 parameters .* first of shape \[40, 40\]",
        ),
    ],
)
def test_a_wrong_argument_is_named(
    make: Callable[..., Any], arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make(**arguments)


def test_help_shows_the_arguments() -> None:
    assert "named_parameters" in inspect.signature(DistributedOptimizer).parameters
    for kind, base in [(OkTopkSGD, torch.optim.SGD), (OkTopkAdamW, torch.optim.AdamW)]:
        arguments = inspect.signature(kind).parameters
        missing = inspect.signature(base).parameters.keys() - arguments.keys()
        assert missing == {"differentiable"}, kind
        assert "options" in arguments


def test_what_cannot_be_wrapped_stays_as_it_was() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for arguments in ({"bucket_cap_mb": -1}, {"named_parameters": some_parameters()}, {}):
        with pytest.raises((ValueError, RuntimeError)):
            DistributedOptimizer(optimizer, **arguments)  # type: ignore[arg-type]
    assert type(optimizer) is torch.optim.SGD
    assert not optimizer._optimizer_step_pre_hooks


def check_mistakes() -> list[str]:
    """Messages of every rank, of mistakes that are made on some."""
    rank = dist.get_rank()
    messages = []
    model = make_model()
    first, second, *_ = model.named_parameters()
    other = nn.Parameter(torch.zeros(3))
    changed = nn.Parameter(first[1].detach() + (rank == 1))
    frozen = nn.Parameter(torch.zeros(3), requires_grad=rank != 1)
    for parameters, arguments in [
        ([first], {"density": 0.1 if rank == 1 else 0.2}),
        ([first], {"lr": 0.1 if rank == 1 else 0.2}),
        ([first], {"lr_in_accumulator": rank == 1}),
        ([first, second, ("extra", other)] if rank == 1 else [first, second], {}),
        ([("weight", changed)], {}),
        ([("weight", frozen)], {}),
    ]:
        with pytest.raises(RuntimeError, match="ranks disagree") as raised:
            OkTopkSGD(parameters, **arguments)
        messages.append(str(raised.value))
    # What the others send is not unpickled.
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("torch.distributed.distributed_c10d._unpickler")
        optimizer = OkTopkSGD(model.named_parameters(), density=0.1)
    with pytest.raises(ValueError, match="exchanges its gradients already"):
        DistributedOptimizer(optimizer)
    with pytest.raises(RuntimeError, match="ranks disagree") as raised:
        optimizer.add_param_group({"params": [("more", nn.Parameter(torch.zeros(2 + rank)))]})
    messages.append(str(raised.value))
    # Found in a step, and survived.
    optimizer.exchange.density = 0.125 * (1 + rank)
    with pytest.raises(RuntimeError, match=r"density: 0\.125 on rank 0 but 0\.25 on rank 1"):
        train(model, optimizer, range(1))
    optimizer.exchange.density = 0.1
    train(model, optimizer, range(2))

    sharded, freed = nn.Linear(4, 4), nn.Parameter(torch.ones(3), requires_grad=False)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    freed.untyped_storage().resize_(0)
    for without_memory, error in [
        ([*sharded.named_parameters()], r"weight, a DTensor of shape \[4, 4\].*fsdp\.apply"),
        ([first, ("freed", freed)], r"freed, a Parameter of shape \[3\], has no memory"),
    ]:
        with pytest.raises(TypeError, match=error):
            OkTopkSGD(without_memory)

    embedding = nn.Embedding(10, 4, sparse=True)
    sparse = TopkSGD(embedding.named_parameters())
    with pytest.raises(TypeError, match="weight has a sparse gradient"):
        embedding(torch.tensor([1])).sum().backward()
    del sparse
    late = nn.Linear(4, 4)
    late.bias.requires_grad_(False)
    optimizer = TopkSGD(late.named_parameters())
    late.bias.requires_grad_(True)
    late(torch.ones(4)).sum().backward()
    with pytest.raises(RuntimeError, match="bias required no gradient"):
        optimizer.step()
    grouped = TopkSGD(late.named_parameters(), process_group=dist.new_group())
    with pytest.raises(TypeError, match="process group of its own"):
        pickle.dumps(grouped)
    return messages


def test_mistakes_are_found_on_every_rank_by_name() -> None:
    of_ranks = run_ranks(2, check_mistakes)
    assert of_ranks[0] == of_ranks[1]
    for message, part in zip(
        of_ranks[0],
        [
            "density: 0.2 on rank 0 but 0.1 on rank 1",
            "lr of parameter group 0: 0.2 on rank 0 but 0.1 on rank 1",
            "lr_in_accumulator: False on rank 0 but True on rank 1",
            "extra: nothing on rank 0 but torch.float32 [3]",
            "the values of weight: ",
            "on rank 0 but torch.float32 [3] of strides [1], without a gradient on rank 1",
            "more: torch.float32 [2] of strides [1] on rank 0 but torch.float32 [3]",
        ],
        strict=True,
    ):
        assert part in message


class OnceInterrupted:
    """Work whose first wait ends with what a signal handler has raised."""

    def __init__(self, work: Any, interrupt: BaseException) -> None:
        self.work = work
        self.interrupt: BaseException | None = interrupt

    def wait(self) -> bool:
        if self.interrupt is not None:
            interrupt, self.interrupt = self.interrupt, None
            raise interrupt
        return bool(self.work.wait())

    def get_future(self) -> Any:
        return self.work.get_future()


def check_an_interrupted_step_loses_nothing(interrupt: BaseException | None) -> list[Tensor]:
    """Rank 0 is interrupted as it waits for its second bucket, and repeats the call."""
    model = make_model()
    optimizer = TopkSGD(model.parameters(), lr=0.1, density=0.2, bucket_cap_mb=SMALL)
    for step in range(3):
        backward(model, step)
        buckets = optimizer._buckets._buckets
        assert len(buckets) > 2
        if step == 1 and dist.get_rank() == 0 and interrupt is not None:
            work: Any = OnceInterrupted(buckets[1].work, interrupt)
            buckets[1].work = work
            work.work.wait()
            with pytest.raises(type(interrupt)):
                optimizer.step()
            for bucket in buckets:
                assert all(slot.arrived for slot in bucket.slots)
        optimizer.step()
        optimizer.zero_grad()
    [entry] = optimizer.exchange.state_dict().values()
    return [*model.parameters(), *entry["residuals"].values()]


def check_interrupted_steps() -> None:
    expected = check_an_interrupted_step_loses_nothing(None)
    for interrupt in (KeyboardInterrupt(), RuntimeError("of a signal's handler")):
        result = check_an_interrupted_step_loses_nothing(interrupt)
        for got, want in zip(result, expected, strict=True):
            assert torch.equal(got, want), interrupt


def test_an_interrupted_step_loses_nothing() -> None:
    run_ranks(2, check_interrupted_steps)


def check_a_rank_that_dies() -> str:
    model = make_model()
    optimizer = OkTopkSGD(model.named_parameters(), lr=0.1, bucket_cap_mb=SMALL)
    train(model, optimizer, range(2))
    if dist.get_rank() == 1:
        # When some buckets are on their way.
        next(model.parameters()).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    before = flat(model.parameters())
    with pytest.raises(dist.DistBackendError) as raised:
        train(model, optimizer, [2])
    assert torch.equal(flat(model.parameters()), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="make a new one"):
        train(model, optimizer, [3])
    return str(raised.value)


def test_survivors_name_a_rank_that_died() -> None:
    for message in run_ranks(3, check_a_rank_that_dies, may_die=(1,))[::2]:
        assert "rank 1 left" in message

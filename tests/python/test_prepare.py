"""sparsecomm.prepare: an optimizer of torch, with its momentum in the state."""

from __future__ import annotations

import copy
import gc
import io
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from logs import Collect
from models import batch, checkpoint_of, flat, make_ddp, make_model, train
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import OneCycleLR

import sparsecomm
from sparsecomm import DensityWarmup, OkTopkState
from sparsecomm.joint import Joint

F64 = torch.float64
WHOLE = {"dense_below": 9}  # every parameter is sent whole, with its velocity
Make = Callable[[Any], Optimizer]
MAKERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: SGD(p, 0.1, momentum=0.8, nesterov=True),
    "adam": lambda p: Adam(p, 0.01, weight_decay=0.01, amsgrad=True),
    "adamw": lambda p: AdamW(p, 0.01),
    "nadam": lambda p: NAdam(p, 0.01),
}


def double(width: int = 40) -> DistributedDataParallel:
    return make_ddp(make_model(width=width, dtype=F64))


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def backward(ddp: nn.Module, step: int) -> None:
    ddp(batch(step, 40, next(ddp.parameters()).dtype)).square().mean().backward()


def trained(
    make: Make, steps: int, prepared: bool, width: int = 40, **options: Any
) -> torch.Tensor:
    ddp = double(width)
    optimizer = make(ddp.parameters())
    if prepared:
        sparsecomm.prepare(ddp, optimizer, **options)
    train(ddp, optimizer, range(steps))
    return flat(ddp.parameters())


def check_density_1() -> None:
    for make in (*MAKERS.values(), RMSprop):
        close(trained(make, 50, True, 12, density=1), trained(make, 50, False, 12))


def check_sgd_as_torch() -> None:
    """With the velocity in the state, and everything sent, it is what torch's SGD does."""
    for options in ({}, {"nesterov": True}, {"maximize": True, "foreach": False}):
        make = partial(SGD, lr=0.01, momentum=0.9, **options)
        close(trained(make, 20, True, **WHOLE), trained(make, 20, False))

    def two_groups(parameters: Iterable[Any]) -> Optimizer:
        first, *others = parameters
        last = others.pop()
        groups = [
            {"params": [first], "momentum": 0.5},
            {"params": others},
            {"params": [last], "momentum": 0.0},
        ]
        return SGD(groups, 0.05, momentum=0.9)

    close(trained(two_groups, 20, True, **WHOLE), trained(two_groups, 20, False))


def by_hand(make: Make, step: Callable[[Any, int], None], steps: int = 12) -> torch.Tensor:
    """What an optimizer makes of gradients that a function replaces."""
    ddp = double()
    optimizer = make(ddp.parameters())
    for number in range(steps):
        optimizer.zero_grad()
        backward(ddp, number)
        for parameter in ddp.parameters():
            step(parameter, number + 1)
        optimizer.step()
    return flat(ddp.parameters())


def averages(beta1: float, nesterov: bool) -> Callable[[Any, int], None]:
    kept: dict[Any, torch.Tensor] = {}

    def replace(p: Any, step: int) -> None:
        u = kept[p] = beta1 * kept.get(p, 0) + (1 - beta1) * p.grad
        if nesterov:
            p.grad = ((1 - beta1) * p.grad + beta1 * u) / (1 - beta1 ** (step + 1))
        else:
            p.grad = u / (1 - beta1**step)

    return replace


def check_steps_by_hand() -> None:
    for kind, nesterov in ((Adam, False), (AdamW, False), (NAdam, True)):
        options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.01}
        ours = trained(partial(kind, betas=(0.8, 0.99), **options), 12, True, **WHOLE)
        close(ours, by_hand(partial(kind, betas=(0.0, 0.99), **options), averages(0.8, nesterov)))
    for fused in (True, False):
        ours = trained(partial(AdamW, lr=0.01, fused=fused), 12, True, **WHOLE)
        theirs = by_hand(partial(AdamW, lr=0.01, betas=(0.0, 0.999)), averages(0.9, False))
        close(ours, theirs, 1e-8)

    kept: dict[Any, torch.Tensor] = {}

    def decay(p: Any, step: int) -> None:
        u = kept[p] = 0.9 * kept.get(p, 0) + p.grad
        p.grad = u + 0.01 / (1 - 0.9) * p.detach()

    make = partial(SGD, lr=0.01)
    close(
        trained(partial(make, momentum=0.9, weight_decay=0.01), 12, True, **WHOLE),
        by_hand(make, decay),
    )


def check_clipping() -> None:
    """Each rank's gradient is clipped before the momentum, at the norm over the root of P."""
    ranks, limit = dist.get_world_size(), 0.01
    make = partial(SGD, lr=0.1, momentum=0.9)
    ddp = double()
    optimizer = make(ddp.parameters())
    norms = []
    for step in range(12):
        optimizer.zero_grad()
        with ddp.no_sync():
            backward(ddp, step)
        norms.append(nn.utils.clip_grad_norm_(ddp.parameters(), limit / ranks**0.5))
        for p in ddp.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= ranks
        optimizer.step()
    assert min(norms) > limit
    # torch adds 1e-6 to the norm that it divides by.
    close(trained(make, 12, True, clip_norm=limit, **WHOLE), flat(ddp.parameters()), 1e-4)


def check_cycled_momentum() -> None:
    def run(prepared: bool) -> torch.Tensor:
        ddp = double()
        optimizer = SGD(ddp.parameters(), 0.01, momentum=0.9)
        if prepared:
            sparsecomm.prepare(ddp, optimizer, **WHOLE)
        scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
        seen = []
        for step in range(20):
            train(ddp, optimizer, [step])
            seen.append(optimizer.param_groups[0]["momentum"])
            if step < 19:
                scheduler.step()
        return torch.cat([flat(ddp.parameters()), torch.tensor(seen, dtype=F64)])

    close(run(True), run(False))
    ddp = double()
    optimizer = AdamW(ddp.parameters())
    state = sparsecomm.prepare(ddp, optimizer)
    scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
    for step in range(20):
        train(ddp, optimizer, [step])
        assert 0.85 <= optimizer.param_groups[0]["betas"][0] <= 0.95
        if step == 9:
            beta1 = optimizer.param_groups[0]["betas"][0]
            assert f"the momentum of AdamW, {beta1:g}" in repr(state)
        if step < 19:
            scheduler.step()


def check_bits_of_resumed_runs() -> None:
    for number, (name, make) in enumerate(MAKERS.items()):
        ddp = make_ddp(make_model())
        optimizer = make(ddp.parameters())
        state = sparsecomm.prepare(ddp, optimizer, 0.05, warmup=DensityWarmup(2))
        train(ddp, optimizer, range(6))
        saved = copy.deepcopy([ddp.module.state_dict(), optimizer.state_dict(), state.state_dict()])
        train(ddp, optimizer, range(6, 11))
        again = make_ddp(make_model(1))
        again.module.load_state_dict(saved[0])
        other = make(again.parameters())
        resumed = sparsecomm.prepare(again, other, 0.05, warmup=DensityWarmup(2))
        loads = [
            lambda to=resumed, what=saved[2]: to.load_state_dict(what),
            lambda to=other, what=saved[1]: to.load_state_dict(what),
        ]
        for load in loads if number % 2 else reversed(loads):
            load()
        train(again, other, range(6, 11))
        assert torch.equal(flat(again.parameters()), flat(ddp.parameters())), name


def check_going_on_without() -> None:
    """A run begun with torch alone goes on prepared, and the other way round."""

    def steps(ddp: nn.Module, optimizer: Optimizer, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            # The same on all ranks, so that this rank's velocity is the average.
            inputs = torch.full((4, 12), 0.1 * number, dtype=F64)
            ddp(inputs).square().mean().backward()
            optimizer.step()

    for options in ({"maximize": True}, {"nesterov": True}):
        make = partial(SGD, lr=1e-3, momentum=0.9, **options)
        plain = double(12)
        steps(plain, make(plain.parameters()), range(12))
        for prepared_first in (True, False):
            ddp = double(12)
            optimizer = make(ddp.parameters())
            if prepared_first:
                sparsecomm.prepare(ddp, optimizer, **WHOLE)
            steps(ddp, optimizer, range(6))
            saved = io.BytesIO()
            torch.save([ddp.module.state_dict(), optimizer.state_dict()], saved)
            saved.seek(0)
            model, of_optimizer = torch.load(saved)
            ddp = double(12)
            ddp.module.load_state_dict(model)
            optimizer = make(ddp.parameters())
            if not prepared_first:
                sparsecomm.prepare(ddp, optimizer, **WHOLE)
            optimizer.load_state_dict(of_optimizer)
            steps(ddp, optimizer, range(6, 12))
            close(flat(ddp.parameters()), flat(plain.parameters()))

    # Buffers that hold an averaged moment, in its units, and decay where it goes into them.
    sgd = partial(SGD, momentum=0.9)
    for kind in (AdamW, Adam, NAdam, sgd):
        found = []
        for prepared in (True, False):
            ddp = double(12)
            optimizer = kind(ddp.parameters(), lr=1e-9, weight_decay=0.02)
            if prepared:
                sparsecomm.prepare(ddp, optimizer, **WHOLE)
            # So many that the decay has settled in SGD's buffer.
            steps(ddp, optimizer, range(150 if kind is sgd else 5))
            found.append(optimizer.state_dict())
        for one, other in zip(found[0]["state"].values(), found[1]["state"].values(), strict=True):
            for key in ("exp_avg", "momentum_buffer", "mu_product", "step"):
                if key in other:
                    tolerance = 1e-4 if key != "step" else 0.0
                    torch.testing.assert_close(one[key], other[key], rtol=tolerance, atol=1e-8)
        assert found[0]["param_groups"] == found[1]["param_groups"]


def check_an_optimizer_that_has_stepped() -> None:
    for nesterov in (False, True):
        make = partial(SGD, lr=0.01, momentum=0.9, nesterov=nesterov)
        ddp = double()
        optimizer = make(ddp.parameters())
        train(ddp, optimizer, range(5))
        again = DistributedDataParallel(ddp.module)
        sparsecomm.prepare(again, optimizer, **WHOLE)
        assert not optimizer.state[next(again.parameters())]
        train(again, optimizer, range(5, 10))
        close(flat(again.parameters()), trained(make, 10, False))
    ddp = double()
    adam = AdamW(ddp.parameters(), 0.01)
    train(ddp, adam, range(5))
    moments = [adam.state[p]["exp_avg"].clone() for p in ddp.parameters()]
    state = sparsecomm.prepare(DistributedDataParallel(ddp.module), adam)
    velocities = checkpoint_of(state)["moments"]
    for (name, _), moment in zip(ddp.module.named_parameters(), moments, strict=True):
        assert torch.equal(velocities[name].view_as(moment), moment)


def check_accumulation_and_scaler() -> None:
    def run(prepared: bool) -> torch.Tensor:
        ddp = double()
        optimizer = SGD(ddp.parameters(), 0.01, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        if prepared:
            sparsecomm.prepare(ddp, optimizer, scaler=scaler, **WHOLE)
        for step in range(12):
            optimizer.zero_grad()
            with ddp.no_sync():
                scaler.scale(ddp(batch(step, 40, F64)).square().mean()).backward()
            loss = ddp(batch(step + 100, 40, F64)).square().mean()
            scaler.scale(loss * (torch.inf if step == 5 else 1)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
        return torch.cat([flat(ddp.parameters()), torch.tensor([scaler.get_scale()], dtype=F64)])

    close(run(True), run(False))


def check_overflow() -> None:
    """A step that a scaler skips is none for the bias of the first moment."""

    def run(prepared: bool) -> torch.Tensor:
        ddp = double()
        betas = (0.8 if prepared else 0.0, 0.99)
        optimizer = AdamW(ddp.parameters(), 0.01, betas)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        if prepared:
            sparsecomm.prepare(ddp, optimizer, scaler=scaler, **WHOLE)
        replace = averages(0.8, nesterov=False)
        ages = 0
        for step in range(8):
            optimizer.zero_grad()
            overflows = step == 3
            loss = ddp(batch(step, 40, F64)).square().mean()
            scaler.scale(loss * (torch.inf if overflows else 1)).backward()
            scaler.unscale_(optimizer)
            ages += not overflows
            for parameter in ddp.parameters() if not prepared and not overflows else ():
                replace(parameter, ages)
            scaler.step(optimizer)
            scaler.update()
        return flat(ddp.parameters())

    close(run(True), run(False))


def check_steps_without_exchange() -> None:
    """They are torch's own, and the next one with an exchange is made as ever."""
    handler, logger = Collect(), logging.getLogger("sparsecomm")
    logger.addHandler(handler)

    def local(ddp: DistributedDataParallel, step: int) -> None:
        ddp.module(batch(step, 40, F64)).square().mean().backward()

    def unsynchronised(ddp: DistributedDataParallel, step: int) -> None:
        for number in (step, step + 100):
            with ddp.no_sync():
                backward(ddp, number)

    def of_another(ddp: DistributedDataParallel, step: int) -> None:
        backward(DistributedDataParallel(ddp.module), step)

    def run(
        make: Make, passes: Callable[[DistributedDataParallel, int], None], prepared: bool
    ) -> torch.Tensor:
        ddp = double()
        optimizer = make(ddp.parameters())
        if prepared:
            sparsecomm.prepare(ddp, optimizer, **WHOLE)
        for step in range(4):
            optimizer.zero_grad()
            passes(ddp, step)
            before = flat(p.grad for p in ddp.parameters() if p.grad is not None)
            optimizer.step()
            assert torch.equal(before, flat(p.grad for p in ddp.parameters() if p.grad is not None))
        return flat(ddp.parameters())

    for make in (MAKERS["sgd"], MAKERS["adamw"], MAKERS["nadam"]):
        for passes in (local, unsynchronised, of_another):
            handler.texts.clear()
            assert torch.equal(run(make, passes, True), run(make, passes, False))
            found = [text for text in handler.texts if "without an exchange" in text]
            assert len(found) == (dist.get_rank() == 0), found

    handler.texts.clear()
    ddp = double()
    optimizer = AdamW(ddp.parameters(), 0.01)
    sparsecomm.prepare(ddp, optimizer, **WHOLE)
    optimizer.step()  # without gradients, of no consequence
    # As torch.distributed.checkpoint makes the state of an optimizer.
    for parameter in ddp.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.01
    assert not any("without an exchange" in text for text in handler.texts)
    weight = next(ddp.parameters())
    for step in range(6):
        optimizer.zero_grad()
        (backward if step % 2 == 0 else local)(ddp, step)
        assert weight.grad is not None
        optimizer.step()
        # With a first beta of 0 it is the gradient.
        assert torch.equal(optimizer.state[weight]["exp_avg"], weight.grad) == (step % 2 == 0)
    logger.removeHandler(handler)


def check_hooks_of_users() -> None:
    """Those that were there before find what those find that come after."""
    ddp = double(12)
    optimizer = SGD(ddp.parameters(), 0.01, momentum=0.9, weight_decay=0.1)
    [group] = optimizer.param_groups
    seen: list[Any] = []

    def after_step(*_: Any) -> None:
        seen.append((group["momentum"], group["weight_decay"]))
        group["weight_decay"] *= 0.5

    def after_saving(_: Optimizer, saved: dict[str, Any]) -> None:
        seen.append(["momentum_buffer" in kept for kept in saved["state"].values()])

    def after_loading(of: Optimizer) -> None:
        seen.append(["momentum_buffer" in kept for kept in of.state.values()])

    optimizer.register_step_post_hook(after_step)
    optimizer.register_state_dict_post_hook(after_saving)
    optimizer.register_load_state_dict_post_hook(after_loading)
    state = sparsecomm.prepare(ddp, optimizer, **WHOLE)
    train(ddp, optimizer, range(2))
    assert seen == [(0.9, 0.1), (0.9, 0.05)]
    assert group["weight_decay"] == 0.025
    seen.clear()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert seen == [[True] * 10, [False] * 10], seen
    # Nothing stays in the optimizer either when the state's own velocities count.
    state.load_state_dict(state.state_dict())
    optimizer.load_state_dict(saved)
    assert not any("momentum_buffer" in kept for kept in optimizer.state.values())

    # What is loaded may have momentum where there was none.
    plain = double(12)
    sgd = SGD(plain.parameters(), 0.01, momentum=0.9)
    train(plain, sgd, range(4))
    ddp = double(12)
    ddp.module.load_state_dict(plain.module.state_dict())
    optimizer = SGD(ddp.parameters(), 0.01)
    sparsecomm.prepare(ddp, optimizer, **WHOLE)
    optimizer.load_state_dict(sgd.state_dict())
    for model, of in ((plain, sgd), (ddp, optimizer)):
        train(model, of, range(4, 8))
    close(flat(ddp.parameters()), flat(plain.parameters()))


def check_closure() -> None:
    def run(prepared: bool, closure: bool) -> torch.Tensor:
        ddp = double()
        optimizer = AdamW(ddp.parameters(), 0.01)
        if prepared:
            sparsecomm.prepare(ddp, optimizer, **WHOLE)
        for step in range(5):

            def make_gradients(step: int = step) -> float:
                optimizer.zero_grad()
                backward(ddp, step)
                return 3.0

            if closure:
                assert optimizer.step(make_gradients) == 3.0
            else:
                make_gradients()
                optimizer.step()
        return flat(ddp.parameters())

    close(run(True, True), run(True, False))


def check_freezing() -> None:
    def run(prepared: bool) -> torch.Tensor:
        ddp = make_ddp(make_model(dtype=F64), several_groups=True)
        layers: Any = ddp.module
        first = layers[0].requires_grad_(False)
        later = [*layers[2].requires_grad_(False).parameters()]
        optimizer = SGD([p for p in ddp.parameters() if all(p is not q for q in later)], 0.01, 0.9)
        if prepared:
            sparsecomm.prepare(ddp, optimizer, **WHOLE)
        train(ddp, optimizer, range(3))
        first.requires_grad_(True)
        train(ddp, optimizer, range(3, 6))
        first.requires_grad_(False)
        layers[2].requires_grad_(True)
        optimizer.add_param_group({"params": later})
        train(ddp, optimizer, range(6, 9))
        first.requires_grad_(True)
        train(ddp, optimizer, range(9, 12))
        return flat(ddp.parameters())

    close(run(True), run(False))


def check_ages() -> None:
    """The bias of a parameter that is trained later is corrected from its own first step on."""

    def run(prepared: bool) -> torch.Tensor:
        ddp = make_ddp(make_model(dtype=F64), several_groups=True)
        layers: Any = ddp.module
        later = [*layers[2].requires_grad_(False).parameters()]
        layers[0].requires_grad_(False)
        parameters = [p for p in ddp.parameters() if all(p is not q for q in later)]
        beta1 = 0.5
        betas = (beta1 if prepared else 0.0, 0.99)
        optimizer = AdamW(parameters, 0.01, betas)
        if prepared:
            sparsecomm.prepare(ddp, optimizer, **WHOLE)
        ages: dict[Any, int] = {}
        replace = averages(beta1, nesterov=False)
        for step in range(70):
            if step == 3:
                layers[0].requires_grad_(True)
            if step == 60:  # when the others' bias is too small to be seen
                layers[2].requires_grad_(True)
                optimizer.add_param_group({"params": later, "betas": betas})
            optimizer.zero_grad()
            backward(ddp, step)
            for parameter in ddp.parameters() if not prepared else ():
                if parameter.grad is not None:
                    ages[parameter] = ages.get(parameter, 0) + 1
                    replace(parameter, ages[parameter])
            optimizer.step()
        return flat(ddp.parameters())

    close(run(True), run(False))


def check_a_new_model_for_unfrozen_layers() -> None:
    def run(prepared: bool, density: float, **options: Any) -> torch.Tensor:
        model: Any = make_model(dtype=F64)
        model[0].requires_grad_(False)
        ddp = make_ddp(model)
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.01, 0.9)
        state = sparsecomm.prepare(ddp, optimizer, density, **options) if prepared else None
        train(ddp, optimizer, range(4))
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters()})
        if state is not None:
            with pytest.raises(ValueError, match=r"shape \(40, 40\).*make DistributedDataParallel"):
                backward(ddp, 0)
        ddp = make_ddp(model)
        if state is not None:
            before = checkpoint_of(state)
            state = sparsecomm.prepare(ddp, optimizer, density, **options)
            after = checkpoint_of(state)
            for key in ("residuals", "moments"):
                for name, tensor in before[key].items():
                    assert torch.equal(after[key][name], tensor)
                assert not after[key]["0.weight"].any()
        train(ddp, optimizer, range(4, 8))
        return flat(model.parameters())

    close(run(True, 0.02, **WHOLE), run(False, 1))
    run(True, 0.02)

    # The same parameters by other names, and without the last layer.
    ddp = make_ddp(make_model())
    optimizer = AdamW(ddp.parameters())
    before = sparsecomm.prepare(ddp, optimizer)
    train(ddp, optimizer, range(4))
    kept = checkpoint_of(before)
    layers: Any = ddp.module
    layers[8].requires_grad_(False)
    ddp = make_ddp(nn.ModuleDict({"layers": layers}).requires_grad_(True))
    again = checkpoint_of(sparsecomm.prepare(ddp, optimizer))
    for key in ("residuals", "moments"):
        assert kept[key]["0.weight"].any()
        for name, tensor in kept[key].items():
            assert torch.equal(again[key][f"layers.{name}"], tensor)
    layers[8].requires_grad_(False)
    ddp = make_ddp(layers)
    state = sparsecomm.prepare(ddp, optimizer)
    train(ddp, optimizer, range(4, 6))
    assert checkpoint_of(state)["groups"][0]["step"] == 6

    # To an exchange that is dense, with the average of the velocities in the optimizer again.
    ddp = double()
    optimizer = SGD(ddp.parameters(), 0.01, 0.9)
    sparsecomm.prepare(ddp, optimizer, **WHOLE)
    train(ddp, optimizer, range(4))
    ddp = make_ddp(ddp.module)
    sparsecomm.prepare(ddp, optimizer, 1)
    train(ddp, optimizer, range(4, 8))
    close(flat(ddp.parameters()), trained(partial(SGD, lr=0.01, momentum=0.9), 8, False))


def check_a_state_that_is_connected_again() -> None:
    ddp = double()
    optimizer = SGD(ddp.parameters(), 0.01, 0.9)
    state = sparsecomm.prepare(ddp, optimizer, **WHOLE)
    train(ddp, optimizer, range(4))
    state.reconnect()
    ddp = make_ddp(ddp.module)
    sparsecomm.register_comm_hook(ddp, state)
    train(ddp, optimizer, range(4, 8))
    close(flat(ddp.parameters()), trained(partial(SGD, lr=0.01, momentum=0.9), 8, False))


def check_groups_show_what_they_were_given() -> None:
    ddp = make_ddp(make_model())
    optimizer = Adam(ddp.parameters(), 0.01, betas=(0.8, 0.99))
    state = sparsecomm.prepare(ddp, optimizer)
    train(ddp, optimizer, range(2))
    group = optimizer.param_groups[0]
    assert group["betas"] == (0.8, 0.99)
    within = []
    optimizer.register_step_pre_hook(lambda *_: within.append(group["betas"]))
    train(ddp, optimizer, [2])
    assert within == [(0.0, 0.99)]
    # A step that raises.
    weight = next(ddp.parameters())
    kept = optimizer.state[weight].pop("exp_avg_sq")
    for restore in (lambda: optimizer.state_dict(), lambda: backward(ddp, 3)):
        optimizer.zero_grad()
        backward(ddp, 3)
        with pytest.raises(KeyError):
            optimizer.step()
        restore()
        assert group["betas"] == (0.8, 0.99)
    optimizer.state[weight]["exp_avg_sq"] = kept
    train(ddp, optimizer, [4])
    assert "momentum of Adam, 0.8" in repr(state)
    optimizer.state[weight].pop("exp_avg_sq")
    backward(ddp, 5)
    with pytest.raises(KeyError):
        optimizer.step()
    assert group["betas"] == (0.0, 0.99)
    optimizer.state[weight]["exp_avg_sq"] = kept
    ddp = DistributedDataParallel(ddp.module)  # in place of the prepared one
    gc.collect()
    optimizer.step()  # torch's own, since the model is gone
    assert within[-1] == group["betas"] == (0.8, 0.99)
    assert copy.deepcopy(optimizer).param_groups[0]["betas"] == (0.8, 0.99)


def check_loss() -> None:
    """AdamW at 2 % is closer to dense training than with the momentum in the optimizer."""

    def run(register: Callable[[DistributedDataParallel, Optimizer], object]) -> float:
        ddp = make_ddp(make_model())
        teacher = make_model(7)
        optimizer = AdamW(ddp.parameters(), 0.003)
        register(ddp, optimizer)
        losses = []
        for step in range(200):
            optimizer.zero_grad()
            inputs = batch(step)
            loss = (ddp(inputs) - 3 * teacher(inputs).detach()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return sum(losses[-100:]) / 100

    dense = run(lambda *_: None)
    ours = run(lambda ddp, optimizer: sparsecomm.prepare(ddp, optimizer, 0.02))
    theirs = run(lambda ddp, _: sparsecomm.register_comm_hook(ddp, OkTopkState(0.02)))
    # About 1.3 and 2.1 times the loss of dense training.
    assert ours < 1.6 * dense, (dense, ours, theirs)
    assert ours < 0.85 * theirs, (dense, ours, theirs)


def check_what_is_said() -> None:
    handler, logger = Collect(), logging.getLogger("sparsecomm")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    found = []
    groups = [{"betas": (0.9, 0.99)}, {"betas": (0.8, 0.99)}]
    for density, steps, options, expected in (
        (1, None, {}, "OkTopkState(density=1) of AdamW, which keeps its momentum since"),
        (0.02, 1000, {}, "AdamW, 0.9, after 100 steps each at 0.25, 0.0625, 0.04"),
        (0.05, 225, {}, "AdamW, 0.9, after 45 steps each at 0.25, 0.0625"),
        (0.02, 10_000, {"algorithm": "auto"}, "AutoState(density=0.02) with the momentum of AdamW"),
        (0.02, 1000, {"warmup": DensityWarmup(7, (0.5,))}, "AdamW, 0.9, after 7 steps each at 0.5"),
        (0.3, 5, {"algorithm": "dsar_split_allgather"}, "CompressionState(density=0.3) with"),
        (0.02, None, {"groups": groups}, "the momenta of AdamW's 2 groups, 0.9, 0.8"),
        (0.02, None, {"sgd": True}, "OkTopkState(density=0.02) of SGD, which has no momentum to"),
    ):
        ddp = make_ddp(make_model())
        first, *others = ddp.parameters()
        optimizer: Optimizer = AdamW(ddp.parameters())
        if own := options.pop("groups", None):
            optimizer = AdamW([{"params": first, **own[0]}, {"params": others, **own[1]}])
        if options.pop("sgd", False):
            optimizer = SGD(ddp.parameters(), 0.1)
        state = sparsecomm.prepare(ddp, optimizer, density, steps, **options)
        found.append(repr(state))
        assert expected in repr(state), repr(state)
        train(ddp, optimizer, range(2))
    logger.removeHandler(handler)
    logger.setLevel(level)
    texts = [text for text in handler.texts if "connected over" not in text]
    expected_texts = [f"sparsecomm.prepare: {text}" for text in found]
    assert texts == (expected_texts if dist.get_rank() == 0 else []), texts


def check_lifetime() -> None:
    ddp = make_ddp(make_model())
    optimizer = AdamW(ddp.parameters())
    state = weakref.ref(sparsecomm.prepare(ddp, optimizer))
    train(ddp, optimizer, range(2))
    model = weakref.ref(ddp.module)
    own = [*optimizer.param_groups[0]["params"]]
    del ddp
    gc.collect()
    assert model() is None
    # As without sparsecomm.
    moments = flat(optimizer.state[p]["exp_avg"] for p in own)
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = flat(optimizer.state[p]["exp_avg"] for p in own)
    torch.testing.assert_close(found, 0.9 * moments + 0.1)
    assert state() is not None  # with velocities and residuals for another model
    of_optimizer = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert of_optimizer() is None
    assert state() is None


class Own(AdamW):
    """Has a step of its own, for all anybody knows."""


def refused(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=text):
        call()


def check_bad_input() -> None:
    def prepare(make: Make, density: Any = 0.02, **options: Any) -> Callable[[], object]:
        ddp = make_ddp(make_model())
        return lambda: sparsecomm.prepare(ddp, make(ddp.parameters()), density, **options)

    prepare_any: Any = sparsecomm.prepare
    ddp = make_ddp(make_model())
    of_other = SGD(make_model().parameters(), 0.1, 0.9)
    refused(
        TypeError,
        "not Sequential: wrap it in DistributedDataParallel",
        lambda: prepare_any(make_model(), of_other),
    )
    refused(
        TypeError,
        "must be a torch.optim.Optimizer, not OkTopkState",
        lambda: prepare_any(ddp, OkTopkState()),
    )
    refused(TypeError, "not the class SGD itself", lambda: prepare_any(ddp, SGD))
    refused(
        TypeError,
        "not the class Sequential itself",
        lambda: prepare_any(torch.nn.Sequential, of_other),
    )
    refused(
        ValueError,
        r"10 of the 10 parameters of SGD, the first of shape \(40, 40\), are not",
        lambda: prepare_any(ddp, of_other),
    )
    refused(
        ValueError,
        "8.bias is trained, and is not a parameter of AdamW",
        prepare(lambda p: AdamW([*p][:-1])),
    )
    refused(
        ValueError,
        r"AdamW with betas=\(0, 0.99\) has no momentum.*betas=\(0.9, 0.99\)",
        prepare(lambda p: AdamW(p, betas=(0.0, 0.99))),
    )
    for density in (0, -1, 1.5):
        refused(ValueError, rf"density={density} is not in \(0, 1\]", prepare(AdamW, density))
    refused(TypeError, "density must be a number, not OkTopkState", prepare(AdamW, OkTopkState()))
    refused(
        ValueError, "total_steps=3 leave 3 steps.*give total_steps=5", prepare(AdamW, total_steps=3)
    )
    refused(
        ValueError,
        "total_steps=12 leave 2 steps.*give total_steps=15",
        prepare(AdamW, total_steps=12, dense_steps=10),
    )
    refused(
        ValueError,
        "total_steps=20 end before the warm-up.*takes 30 steps",
        prepare(AdamW, total_steps=20, warmup=DensityWarmup(10)),
    )
    refused(TypeError, "total_steps must be an integer, not float", prepare(AdamW, total_steps=1e3))
    refused(ValueError, "total_steps=0 is not a number", prepare(AdamW, total_steps=0))
    refused(
        TypeError,
        "no momentum: the optimizer's is taken: give it to AdamW",
        prepare(AdamW, momentum=0.9),
    )
    refused(TypeError, "no first_moment", prepare(AdamW, first_moment=0.9))
    refused(TypeError, "no process_group: the model's", prepare(AdamW, process_group=None))
    refused(
        TypeError,
        r"prepare\(\) got an unexpected.*'clipnorm'.*mean 'clip_norm'",
        prepare(AdamW, clipnorm=1.0),
    )
    refused(TypeError, "keyword argument 'state'", prepare(AdamW, state=OkTopkState()))
    refused(
        ValueError,
        "dampening=0.5 of SGD cannot be taken over.*learning rate by 0.5",
        prepare(lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.5)),
    )
    refused(
        ValueError,
        r"momentum=1.1 of SGD is not in \[0, 1\); 0.9",
        prepare(lambda p: SGD(p, 0.1, momentum=1.1)),
    )
    refused(
        ValueError,
        "capturable=True of AdamW.*set capturable=False",
        prepare(lambda p: AdamW(p, capturable=True)),
    )
    refused(
        ValueError, "differentiable=True of NAdam", prepare(lambda p: NAdam(p, differentiable=True))
    )
    for kind in (Adamax, RMSprop, Own, RAdam, Adagrad):
        refused(
            TypeError,
            rf"{kind.__name__} cannot be taken out.*SGD, Adam, AdamW, NAdam.*"
            "register_comm_hook",
            prepare(kind),
        )
    refused(TypeError, "mesh is of a model that fully_shard shards", prepare(AdamW, mesh=3))

    optimizer = AdamW(ddp.parameters())
    sparsecomm.prepare(ddp, optimizer)
    refused(
        RuntimeError,
        "hook already, of OkTopkState.*with this AdamW; call it once",
        lambda: sparsecomm.prepare(ddp, optimizer),
    )
    refused(
        RuntimeError,
        "hook already.*one optimizer",
        lambda: sparsecomm.prepare(ddp, SGD(ddp.parameters(), 0.1)),
    )
    model = make_ddp(make_model())
    first, *others = model.parameters()
    grouped = AdamW([{"params": first}, {"params": others}])
    sparsecomm.prepare(model, grouped)
    train(model, grouped, range(1))
    grouped.param_groups[1]["betas"] = (0.8, 0.999)
    remedy = "different momenta when sparsecomm.prepare is called, or make DistributedDataParallel"
    refused(
        ValueError,
        f"AdamW's groups, which had momenta of 0.9, 0.9, now have 0.9, 0.8: .*{remedy}",
        lambda: backward(model, 1),
    )

    # The optimizer, and the model as far as it can be, stay as they were.
    model = make_ddp(make_model())
    stepped = AdamW(model.parameters())
    stepped.state[next(model.parameters())] = {"exp_avg": torch.zeros(3)}
    refused(
        ValueError,
        r"exp_avg that AdamW has for 0.weight is of shape \(3,\)",
        lambda: sparsecomm.prepare(model, stepped),
    )
    stepped.state.clear()
    with patch.object(Joint, "_take_over", side_effect=ValueError("no")):
        other = make_ddp(make_model())
        of_it = AdamW(other.parameters())
        refused(ValueError, "no", lambda: sparsecomm.prepare(other, of_it))
        assert not of_it._optimizer_step_pre_hooks
        assert not of_it._optimizer_step_post_hooks
    sparsecomm.prepare(model, stepped)

    group = optimizer.param_groups[0]
    group["betas"] = (1.0, 0.9)
    refused(ValueError, "betas.0.=1.0 of AdamW", lambda: backward(ddp, 0))
    group["betas"] = (0.9, 0.999)
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(3))})
    refused(ValueError, r"shape \(3,\) that AdamW", lambda: backward(ddp, 0))

    embedding = nn.Sequential(nn.EmbeddingBag(9, 3, sparse=True), nn.Linear(3, 3))
    sparse = DistributedDataParallel(embedding)
    refused(
        ValueError,
        "0.weight has sparse gradients.*momentum=0",
        lambda: sparsecomm.prepare(sparse, SGD(sparse.parameters(), 0.1, 0.9)),
    )
    words, others = [*embedding[0].parameters()], [*embedding[1].parameters()]
    two = SGD([{"params": words, "momentum": 0}, {"params": others}], 0.1, 0.9)
    sparsecomm.prepare(sparse, two)
    sparse(torch.ones(2, 3, dtype=torch.long)).sum().backward()
    two.step()


def check_compiled() -> None:
    def run(compiles: bool, make: Make) -> torch.Tensor:
        ddp = DistributedDataParallel(make_model(dtype=F64))
        optimizer = make(ddp.parameters())
        model: Any = ddp
        step: Callable[[], object] = optimizer.step
        if compiles:
            model = torch.compile(ddp, backend="eager")
            step = torch.compile(optimizer.step, backend="eager")
        state = sparsecomm.prepare(model, optimizer, **WHOLE)
        for number in range(4):
            optimizer.zero_grad()
            backward(model, number)
            step()
            # As a scheduler does.
            momentum = 0.9 - 0.1 * (number + 1)
            for group in optimizer.param_groups:
                if "betas" in group:
                    assert group["betas"][0] > 0
                    group["betas"] = (momentum, 0.999)
                else:
                    assert group["momentum"] > 0
                    group["momentum"] = momentum
        assert "0.6" in repr(state)
        return flat(ddp.parameters())

    sgd = partial(SGD, lr=0.01, momentum=0.9)
    close(run(True, sgd), run(False, sgd))
    # In a compiled step torch has Adam's numbers in float32.
    close(run(True, AdamW), run(False, AdamW), 1e-5)


def check_accelerate() -> None:
    import accelerate

    os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="1")

    def run(prepared: bool) -> torch.Tensor:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = make_model(dtype=F64)
        optimizer = SGD(model.parameters(), 0.01, momentum=0.9)
        scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=30)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        if prepared:
            sparsecomm.prepare(model, optimizer, **WHOLE)  # type: ignore[arg-type]
        for step in range(12):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch(step, 40, F64)).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return flat(model.parameters())

    close(run(True), run(False))


def check_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def make(make_optimizer: Make, seed: int = 0) -> tuple[Any, Optimizer]:
        model = make_model(seed, dtype=F64)
        fully_shard(model[0], mesh=mesh["shard"])  # type: ignore[index]
        fully_shard(model, mesh=mesh["shard"])
        return model, make_optimizer(model.parameters())

    def local(model: nn.Module) -> torch.Tensor:
        parameters: Iterator[Any] = model.parameters()
        return flat(p.to_local() for p in parameters)

    def steps(model: Any, optimizer: Optimizer, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            backward(model, number)
            optimizer.step()

    model, optimizer = make(AdamW)
    refused(
        TypeError,
        r'sharded: give the ranks.*mesh=mesh\["replicate"\]',
        lambda: sparsecomm.prepare(model, optimizer),
    )
    ignoring: Any = make_model(dtype=F64)
    ignored = [*ignoring[8].parameters()]
    fully_shard(ignoring, mesh=mesh["shard"], ignored_params={*ignored})
    refused(
        ValueError,
        "8.weight is a parameter of AdamW, and fully_shard does not reduce",
        lambda: sparsecomm.prepare(ignoring, AdamW(ignoring.parameters()), mesh=mesh["replicate"]),
    )
    others = [p for p in ignoring.parameters() if all(p is not q for q in ignored)]
    sparsecomm.prepare(ignoring, AdamW(others), mesh=mesh["replicate"])
    sgd = partial(SGD, lr=0.01, momentum=0.9)
    plain = double()
    train(plain, (own := sgd(plain.parameters())), range(5))
    own.param_groups[0]["momentum"] = 0.7
    train(plain, own, range(5, 10))
    model, optimizer = make(sgd)
    sparsecomm.prepare(model, optimizer, mesh=mesh["replicate"], **WHOLE)
    steps(model, optimizer, range(5))
    optimizer.param_groups[0]["momentum"] = 0.7
    steps(model, optimizer, range(5, 10))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        close(ours.full_tensor(), theirs)

    # Resumed to the bit; and without the state, with this rank's velocity.
    model, optimizer = make(AdamW)
    state = sparsecomm.prepare(model, optimizer, mesh=mesh["replicate"])
    steps(model, optimizer, range(4))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), state.state_dict()])
    velocities = checkpoint_of(state)["moments"]
    steps(model, optimizer, range(4, 8))
    again, other = make(AdamW, 1)
    again.load_state_dict(saved[0])
    resumed = sparsecomm.prepare(again, other, mesh=mesh["replicate"])
    other.load_state_dict(saved[1])
    loaded = checkpoint_of(resumed)["moments"]
    for name, velocity in velocities.items():
        close(loaded[name], velocity)
    resumed.load_state_dict(saved[2])
    steps(again, other, range(4, 8))
    assert torch.equal(local(again), local(model))


def check_all(checks: Iterable[Callable[[], None]]) -> None:
    for check in checks:
        check()


def test_density_1_is_the_optimizer_alone() -> None:
    run_ranks(2, check_density_1, timeout=110)


def test_steps() -> None:
    checks = (
        check_sgd_as_torch,
        check_steps_by_hand,
        check_clipping,
        check_cycled_momentum,
        check_closure,
    )
    run_ranks(2, check_all, checks, timeout=110)


def test_going_on() -> None:
    checks = (
        check_bits_of_resumed_runs,
        check_going_on_without,
        check_an_optimizer_that_has_stepped,
    )
    run_ranks(2, check_all, checks, timeout=110)


def test_programs_of_users() -> None:
    checks = (
        check_accumulation_and_scaler,
        check_overflow,
        check_steps_without_exchange,
        check_hooks_of_users,
        check_freezing,
        check_ages,
        check_a_new_model_for_unfrozen_layers,
        check_a_state_that_is_connected_again,
        check_groups_show_what_they_were_given,
        check_what_is_said,
        check_lifetime,
        check_bad_input,
        check_loss,
    )
    run_ranks(2, check_all, checks, timeout=110)


def test_compiled() -> None:
    run_ranks(2, check_compiled, timeout=110)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
def test_accelerate() -> None:
    run_ranks(2, check_accelerate, timeout=110)


def test_sharded_models() -> None:
    run_ranks(4, check_sharded, timeout=110)

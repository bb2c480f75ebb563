"""Momentum that a state takes over from an optimizer, against torch's own.

By parameter, of Nesterov, with a gain, cycled by a scheduler, and with velocities that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, checkpoint_of, flat, gathered, make_ddp, make_model, train
from ranks import run_ranks
from test_hooks import fail_in_backward
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import sparsecomm
from sparsecomm import (
    AutoState,
    CompressionState,
    DenseOverlapState,
    OkTopkState,
    TopkState,
)

# Everything is sent: by a dense algorithm, or by a sparse one that selects all.
WHOLE: dict[str, Callable[..., CompressionState]] = {
    "whole": lambda **options: OkTopkState(
        density=0.05, densities={str(i): 1 for i in range(0, 10, 2)}, **options
    ),
    "oktopk": lambda **options: OkTopkState(density=1.0, **options),
    "topk": lambda **options: TopkState(density=1.0, dense_below=0, select="bucket", **options),
    "auto": lambda **options: AutoState(density=1.0, **options),
}
EXACTLY = {"rtol": 1e-12, "atol": 1e-12}
STEPS = range(30)


def hooked(
    state: CompressionState, several_groups: bool = False, dtype: torch.dtype = torch.float64
) -> DistributedDataParallel:
    ddp = make_ddp(make_model(dtype=dtype), several_groups)
    sparsecomm.register_comm_hook(ddp, state)
    return ddp


def plain() -> DistributedDataParallel:
    return make_ddp(make_model(dtype=torch.float64))


def halves(ddp: DistributedDataParallel) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(ddp.parameters())
    return parameters[:4], parameters[4:]


def set_momenta(
    state: CompressionState,
    parameters: Iterable[nn.Parameter],
    momentum: float,
    gain: float = 1.0,
    nesterov: bool = False,
) -> None:
    state._native.set_momenta([(p, momentum, gain, nesterov) for p in parameters])


def expect_equal(result: DistributedDataParallel, expected: DistributedDataParallel) -> None:
    torch.testing.assert_close(flat(result.parameters()), flat(expected.parameters()), **EXACTLY)
    assert not torch.equal(flat(result.parameters()), flat(plain().parameters()))


# ---- where everything is sent


def check_nesterov() -> None:
    reference = plain()
    train(reference, SGD(reference.parameters(), lr=0.1, momentum=0.9, nesterov=True), STEPS)
    for number, make in enumerate(WHOLE.values()):
        for several in (False, True):
            ddp = hooked(make(momentum=0.9, nesterov=True), several_groups=several)
            train(ddp, SGD(ddp.parameters(), lr=0.1), STEPS)
            expect_equal(ddp, reference)
        state = make()
        ddp = hooked(state)
        set_momenta(state, ddp.parameters(), 0.9, nesterov=True)
        if number % 2 == 0:
            train(ddp, SGD(ddp.parameters(), lr=0.1), STEPS)
        else:
            optimizer = SGD(ddp.parameters(), lr=0.1)
            for step in STEPS:
                train(ddp, optimizer, [step])
                set_momenta(state, ddp.parameters(), 0.9, nesterov=True)
        expect_equal(ddp, reference)


def check_groups_of_their_own() -> None:
    """Two groups of an optimizer, of which one is Nesterov's, and a third without momentum."""
    reference = plain()
    first, second = halves(reference)
    groups = [
        {"params": first, "momentum": 0.9, "nesterov": True},
        {"params": second[:2], "momentum": 0.5},
        {"params": second[2:]},
    ]
    train(reference, SGD(groups, lr=0.1), STEPS)
    for make in WHOLE.values():
        state = make()
        ddp = hooked(state)
        first, second = halves(ddp)
        set_momenta(state, first, 0.9, nesterov=True)
        set_momenta(state, second[:2], 0.5)
        train(ddp, SGD(ddp.parameters(), lr=0.1), STEPS)
        expect_equal(ddp, reference)
        names = dict(zip(ddp.parameters(), dict(ddp.module.named_parameters()), strict=True))
        moments = checkpoint_of(state)["moments"]
        assert moments.keys() == {names[p] for p in [*first, *second[:2]]}


def check_cycle() -> None:
    """A scheduler that gives each step another momentum."""
    for nesterov in (False, True):
        reference = plain()
        optimizer = SGD(reference.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=len(STEPS) + 1
        )
        momenta = []
        for step in STEPS:
            [group] = optimizer.param_groups
            momenta.append((group["lr"], group["momentum"]))
            train(reference, optimizer, [step])
            scheduler.step()
        assert len({momentum for _, momentum in momenta}) == len(STEPS)
        for make in WHOLE.values():
            state = make()
            ddp = hooked(state)
            own = SGD(ddp.parameters(), lr=0.1)
            for step, (lr, momentum) in enumerate(momenta):
                set_momenta(state, ddp.parameters(), momentum, nesterov=nesterov)
                own.param_groups[0]["lr"] = lr
                train(ddp, own, [step])
            expect_equal(ddp, reference)


def check_average() -> None:
    """With a gain of 1 - beta, a velocity is Adam's average of the gradients."""
    for make in WHOLE.values():
        reference, state = plain(), make()
        ddp = hooked(state)
        adam = Adam(reference.parameters(), lr=0.0, betas=(0.8, 0.9))
        set_momenta(state, ddp.parameters(), 0.8, gain=1 - 0.8)
        optimizer = SGD(ddp.parameters(), lr=0.0)
        for step in STEPS:
            train(reference, adam, [step])
            train(ddp, optimizer, [step])
            for parameter, own in zip(ddp.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, adam.state[own]["exp_avg"], **EXACTLY)


def check_gain_alone() -> None:
    """Without momentum it is a factor of the gradient, also where little is sent."""
    reference = plain()
    train(reference, SGD(reference.parameters(), lr=0.03), STEPS)
    for make in WHOLE.values():
        state = make()
        ddp = hooked(state)
        set_momenta(state, ddp.parameters(), 0.0, gain=0.3)
        train(ddp, SGD(ddp.parameters(), lr=0.1), STEPS)
        expect_equal(ddp, reference)
        assert not checkpoint_of(state)["moments"]
    twice = OkTopkState(0.05), OkTopkState(0.05)
    for state, factor in zip(twice, (1.0, 4.0), strict=True):
        ddp = hooked(state)
        set_momenta(state, ddp.parameters(), 0.0, gain=factor)
        train(ddp, SGD(ddp.parameters(), lr=0.0), range(3))
    once, fourfold = (checkpoint_of(state)["residuals"] for state in twice)
    assert all(torch.equal(4 * once[name], fourfold[name]) for name in once)


def check_velocities_of_an_optimizer() -> None:
    """An optimizer's momentum buffers are handed over, before the first step or later."""
    reference = plain()
    optimizer = SGD(reference.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    train(reference, optimizer, range(5))
    parameters = [p.detach().clone() for p in reference.parameters()]
    buffers = [optimizer.state[p]["momentum_buffer"].clone() for p in reference.parameters()]
    train(reference, optimizer, range(5, 10))
    for make in WHOLE.values():
        for later in (False, True):
            state = make()
            ddp = hooked(state)
            set_momenta(state, ddp.parameters(), 0.9, nesterov=True)
            own = SGD(ddp.parameters(), lr=0.1)
            if later:
                train(ddp, own, range(20, 23))
            with torch.no_grad():
                for parameter, value in zip(ddp.parameters(), parameters, strict=True):
                    parameter.copy_(value)
            # Of other strides than the parameters.
            velocities = [b.clone().t().contiguous().t() for b in buffers]
            state._native.set_moments(list(zip(ddp.parameters(), velocities, strict=True)))
            for velocity in velocities:
                velocity.zero_()  # which is the caller's
            if later:
                moments = checkpoint_of(state)["moments"]
                assert torch.equal(flat(moments.values()), flat(in_order(ddp, moments, buffers)))
            train(ddp, own, range(5, 10))
            expect_equal(ddp, reference)


def in_order(
    ddp: DistributedDataParallel, named: dict[str, torch.Tensor], values: list[torch.Tensor]
) -> list[torch.Tensor]:
    by_name = dict(zip(dict(ddp.module.named_parameters()), values, strict=True))
    return [by_name[name] for name in named]


@pytest.mark.parametrize(
    "check",
    [
        check_nesterov,
        check_groups_of_their_own,
        check_cycle,
        check_average,
        check_gain_alone,
        check_velocities_of_an_optimizer,
    ],
)
def test_where_everything_is_sent(check: Callable[[], None]) -> None:
    run_ranks(2, check, timeout=110)


# ---- where little is


def kept(state: CompressionState) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    saved = checkpoint_of(state)
    return saved["residuals"], saved["moments"]


def check_broken_off() -> None:
    """What was delivered in a pass that fails goes back, and its velocity with it."""
    for state in (
        OkTopkState(density=0.05, momentum=0.9, nesterov=True),
        TopkState(density=0.05, momentum=0.9, nesterov=True, select="exact"),
        AutoState(density=0.05, momentum=0.9, nesterov=True, groups=None),
    ):
        ddp, local = hooked(state, True, torch.float32), make_model()
        train(ddp, SGD(ddp.parameters(), lr=0.0), range(3))
        residuals, moments = kept(state)
        fail_in_backward(ddp, state)
        local(batch(3)).square().mean().backward()
        after, velocities = kept(state)
        taken_back = []
        for name, parameter in local.named_parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.reshape(-1)
            velocity = 0.9 * moments[name] + gradient
            taken_back.append(torch.equal(velocities[name], velocity))
            if taken_back[-1]:
                residual = residuals[name] + (gradient + 0.9 * velocity)
                assert torch.equal(after[name], residual), name
            else:
                assert torch.equal(velocities[name], moments[name]), name
                assert torch.equal(after[name], residuals[name]), name
        assert any(taken_back), "the model must have several groups for this test"


def check_conservation() -> None:
    """By a cycle of Nesterov's momenta: nothing is lost, whatever is delivered when."""
    for make in (OkTopkState, TopkState, AutoState):
        state = make(density=0.1, mask_momentum=False)
        ddp, reference = hooked(state), plain()
        sgd = SGD(reference.parameters(), lr=0.0, momentum=0.9, nesterov=True)
        delivered = torch.zeros_like(flat(ddp.parameters()))
        wanted = torch.zeros_like(delivered)
        optimizer = SGD(ddp.parameters(), lr=0.0)
        for step in range(8):
            momentum = 0.5 + 0.05 * step
            set_momenta(state, ddp.parameters(), momentum, nesterov=True)
            train(ddp, optimizer, [step])
            delivered += flat(p.grad for p in ddp.parameters() if p.grad is not None)
            sgd.param_groups[0]["momentum"] = momentum
            train(reference, sgd, [step])
            wanted += flat(
                p.grad + momentum * sgd.state[p]["momentum_buffer"]
                for p in reference.parameters()
                if p.grad is not None
            )
            residuals, moments = kept(state)
            names = dict(ddp.module.named_parameters())
            left = sum(gathered(flat(residuals[name] for name in names)))
            torch.testing.assert_close(delivered + left / dist.get_world_size(), wanted, **EXACTLY)
            mean = sum(gathered(flat(moments[name] for name in names))) / dist.get_world_size()
            buffers = flat(sgd.state[p]["momentum_buffer"] for p in reference.parameters())
            torch.testing.assert_close(mean, buffers, **EXACTLY)


def check_checkpoints() -> None:
    """A resumed run has the bits of one that was not stopped."""
    options: dict[str, Any] = {"density": 0.05, "dense_below": 0}
    first, second = OkTopkState(**options), OkTopkState(**options)
    ddp = hooked(first)
    own = halves(ddp)
    set_momenta(first, own[0], 0.9, gain=0.5, nesterov=True)
    set_momenta(first, own[1], 0.5)
    train(ddp, SGD(ddp.parameters(), lr=0.1), range(4))
    saved = [{k: v.clone() for k, v in ddp.module.state_dict().items()}, first.state_dict()]
    train(ddp, SGD(ddp.parameters(), lr=0.1), range(4, 8))
    resumed = hooked(second)
    own = halves(resumed)
    set_momenta(second, own[0], 0.9, gain=0.5, nesterov=True)
    set_momenta(second, own[1], 0.5)
    # These are replaced, as all that a state keeps.
    second._native.set_moments([(p, torch.ones_like(p)) for p in own[0]])
    name = next(name for name, _ in ddp.module.named_parameters())
    assert torch.equal(checkpoint_of(second)["moments"][name], torch.ones(1600).double())
    resumed.module.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    train(resumed, SGD(resumed.parameters(), lr=0.1), range(4, 8))
    assert torch.equal(flat(resumed.parameters()), flat(ddp.parameters()))


def check_momenta_that_have_met() -> None:
    """Those that were apart at first are apart in a resumed run, if equal by then."""
    options: dict[str, Any] = {"density": 0.05, "dense_below": 0}
    ddp, state = hooked(first := OkTopkState(**options)), first
    own = halves(ddp)
    set_momenta(state, own[0], 0.85)
    set_momenta(state, own[1], 0.95)
    train(ddp, SGD(ddp.parameters(), lr=0.1), range(3))
    set_momenta(state, own[0], 0.95)
    train(ddp, SGD(ddp.parameters(), lr=0.1), range(3, 6))
    saved = [{k: v.clone() for k, v in ddp.module.state_dict().items()}, state.state_dict()]
    train(ddp, SGD(ddp.parameters(), lr=0.1), range(6, 9))
    resumed = hooked(again := OkTopkState(**options))
    resumed.module.load_state_dict(saved[0])
    for half, momentum in zip(halves(resumed), (0.85, 0.95), strict=True):
        set_momenta(again, half, momentum)
    again.load_state_dict(saved[1])
    set_momenta(again, resumed.parameters(), 0.95)
    train(resumed, SGD(resumed.parameters(), lr=0.1), range(6, 9))
    assert torch.equal(flat(resumed.parameters()), flat(ddp.parameters()))
    set_momenta(again, halves(resumed)[0], 0.9)  # and may differ again


def check_scaled() -> None:
    """Velocities that are handed over are in units of a loss that is not scaled."""
    results = []
    for scale in (1.0, 256.0):
        state = OkTopkState(density=0.05)
        ddp = hooked(state)
        set_momenta(state, ddp.parameters(), 0.9, nesterov=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        state.follow(scaler)
        optimizer = SGD(ddp.parameters(), lr=0.1)
        for step in range(6):
            if step in (0, 3):
                handed = [(p, torch.full_like(p, 0.01 + step)) for p in ddp.parameters()]
                state._native.set_moments(handed)
            optimizer.zero_grad()
            scaler.scale(ddp(batch(step).double()).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(flat(ddp.parameters()))
    assert torch.equal(*results)


def check_other_ranks() -> None:
    """Ranks compare the rule that they have when they meet again, not the first one."""
    state, reference = OkTopkState(density=1.0), plain()
    ddp = hooked(state)
    sgd, own = SGD(reference.parameters(), lr=0.1, momentum=0.9), SGD(ddp.parameters(), lr=0.1)
    for step, momentum in enumerate((0.9, 0.8, 0.7)):
        set_momenta(state, ddp.parameters(), momentum)
        sgd.param_groups[0]["momentum"] = momentum
        train(ddp, own, [step])
        train(reference, sgd, [step])
        if step == 1:
            state.reconnect()
    expect_equal(ddp, reference)
    state.reconnect()
    set_momenta(state, ddp.parameters(), 0.6 + 0.1 * dist.get_rank())
    train(ddp, own, [3])  # compared when reconnecting, and then no more
    state.reconnect()
    with pytest.raises(RuntimeError, match=r"momentum: 0.6 on rank 0 but 0.7 on rank 1"):
        ddp(batch(4).double()).square().mean().backward()


@pytest.mark.parametrize(
    "check",
    [
        check_broken_off,
        check_conservation,
        check_checkpoints,
        check_momenta_that_have_met,
        check_scaled,
        check_other_ranks,
    ],
)
def test_where_little_is_sent(check: Callable[[], None]) -> None:
    run_ranks(2, check, timeout=110)


# ---- what is refused


def _check_mistakes() -> None:
    state = OkTopkState(density=0.05)
    ddp = hooked(state)
    first, _, third, *_ = ddp.parameters()
    for entry, message in [
        ((first, 1.0, 1.0, False), r"momentum = 1 is not in \[0, 1\)"),
        ((first, 0.9, 0.0, False), "gain = 0 is no positive finite float32"),
        ((first, 0.9, float("inf"), False), "gain = inf is no positive finite float32"),
        # What f32 rounds to 1, to 0 or to infinity.
        ((first, 0.99999999, 1.0, False), r"momentum = 0.99999999 is not in \[0, 1\) as a float32"),
        ((first, 1e-46, 1.0, False), r"momentum = 1e-46 is not in \[0, 1\)"),
        ((first, 0.9, 1e-46, False), "gain = 1e-46 is no positive finite float32"),
        ((first, 0.9, 1e39, False), r"gain = 1e\+39 is no positive finite float32"),
        ((first, 0.0, 1.0, True), "nesterov has no place where momentum = 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            state._native.set_momenta([entry])
    with pytest.raises(ValueError, match="which has no momentum: set its momentum first"):
        state._native.set_moments([(first, torch.zeros_like(first))])
    set_momenta(state, [first, third], 0.9)
    for velocity in (torch.zeros(3).double(), torch.zeros_like(first).float()):
        with pytest.raises(ValueError, match="must be a dense Double of that shape"):
            state._native.set_moments([(first, velocity)])
    with pytest.raises(ValueError, match="has a NaN or an infinity"):
        state._native.set_moments([(first, torch.full_like(first, float("nan")))])
    train(ddp, SGD(ddp.parameters(), lr=0.1), range(2))
    with pytest.raises(
        ValueError,
        match=r"parameters 0.weight \(momentum = 0.8, gain = 1, .*\) and 2.weight "
        r"\(momentum = 0.9, .*exchanged together|"
        r"parameters 2.weight \(momentum = 0.9, gain = 1, .*\) and 0.weight \(momentum = 0.8, .*",
    ):
        set_momenta(state, [first], 0.8)
    for entry in ((0.0, 1.0, False), (0.9, 1.0, True)):
        with pytest.raises(ValueError, match="numbers above 0 may change"):
            state._native.set_momenta([(p, *entry) for p in (first, third)])
    with pytest.raises(ValueError, match="numbers above 0 may change"):
        set_momenta(state, [p for p in ddp.parameters() if p.dim() == 1], 0.5)
    with pytest.raises(ValueError, match="was not in this state's first step"):
        set_momenta(state, [nn.Parameter(torch.zeros(2))], 0.5)
    # What was refused has changed nothing.
    set_momenta(state, [first, third], 0.9, gain=2.0)
    train(ddp, SGD(ddp.parameters(), lr=0.1), [2])

    def change(_: torch.Tensor) -> None:
        set_momenta(state, [first, third], 0.9)

    handle = first.register_hook(change)
    with pytest.raises(ValueError, match="cannot change the momentum"):
        ddp(batch(3).double()).square().mean().backward()
    handle.remove()
    for other in (DenseOverlapState(), OkTopkState(first_moment=0.9)):
        set_momenta(other, [first], 0.0)
        with pytest.raises(ValueError, match=r"a parameter with momentum = 0.9, gain = 1"):
            set_momenta(other, [first], 0.9)


def _check_sparse_gradients() -> None:
    """A state keeps no velocity of them."""
    for momentum in (0.0, 0.9):
        model = nn.Sequential(nn.EmbeddingBag(20, 4, mode="sum", sparse=True), nn.Linear(4, 4))
        ddp = DistributedDataParallel(model)
        state = OkTopkState(density=0.5)
        sparsecomm.register_comm_hook(ddp, state)
        set_momenta(state, ddp.parameters(), momentum)
        words = torch.arange(6).reshape(2, 3)
        if momentum == 0:
            ddp(words).sum().backward()
            continue
        with pytest.raises(RuntimeError, match=r"shape \[20, 4\] has a sparse.*momentum 0.9"):
            ddp(words).sum().backward()


def _check_disagreement() -> list[str]:
    texts = []
    for momentum, gain, nesterov in ((0.1, 1.0, 0), (0.1, 0.5, 0), (0.1, 0.5, 1)):
        second = dist.get_rank() == 1
        state = OkTopkState()
        ddp = hooked(state)
        if second:
            set_momenta(state, ddp.parameters(), momentum, gain, bool(nesterov))
        else:
            set_momenta(state, ddp.parameters(), 0.1, 1.0, gain == 1)
        with pytest.raises(RuntimeError) as raised:
            ddp(batch(0).double()).sum().backward()
        texts.append(str(raised.value))
    return texts


def test_what_no_momentum_can_be() -> None:
    run_ranks(2, _check_mistakes)
    run_ranks(2, _check_sparse_gradients)


def test_ranks_that_disagree() -> None:
    first, second = run_ranks(2, _check_disagreement)
    assert first == second
    for text, name in zip(first, ("nesterov", "gain", "nesterov"), strict=True):
        assert f"ranks disagree about 'gradients 0': {name}: " in text or f"; {name}: " in text, (
            text
        )

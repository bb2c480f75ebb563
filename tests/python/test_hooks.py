"""The DDP hooks: what they exchange, keep, save and refuse."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math
import os
import pickle
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, checkpoint_of, flat, gathered, make_ddp, make_model, train
from patience import LONG, LONG_TIME, PATIENCE, wait_until
from ranks import run_ranks, thinned
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
from sparsecomm import (
    AutoState,
    BlockTopkState,
    CompressionState,
    GaussianKState,
    GTopkState,
    OkTopkState,
    QuantizedTopkState,
    ThresholdSchedule,
    TopkDsaState,
    TopkState,
)
from sparsecomm.fsdp import apply_reduce_scatter

SLOW = pytest.mark.slow
HOOKS: dict[type[CompressionState], Callable[..., Any]] = {
    BlockTopkState: sparsecomm.block_topk_hook,
    GTopkState: sparsecomm.gtopk_hook,
    GaussianKState: sparsecomm.gaussian_k_hook,
    OkTopkState: sparsecomm.oktopk_hook,
    QuantizedTopkState: sparsecomm.quantized_topk_hook,
    TopkDsaState: sparsecomm.topk_dsa_hook,
    TopkState: sparsecomm.topk_hook,
}


def register(ddp: DistributedDataParallel, state: CompressionState, native: bool) -> None:
    if native:
        sparsecomm.register_comm_hook(ddp, state)
    else:
        ddp.register_comm_hook(state, HOOKS[type(state)])


def made(kind: type[CompressionState]) -> CompressionState:
    """With so many blocks that 5 % is a number of them."""
    options: dict[str, Any] = {"block": 16} if kind is BlockTopkState else {}
    if kind is AutoState:
        options["groups"] = None  # as the others: each of DDP's first buckets is a group
    return kind(density=0.05, **options)


# ---- what is exchanged


def check_density_one_equals_dense() -> None:
    """At density 1 every method is plain DDP: bit for bit, where P divides exactly."""
    for number, dtype in enumerate((torch.float32, torch.float64)):
        plain = make_ddp(make_model(dtype=dtype))
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), range(4))
        expected = flat(plain.parameters())
        kinds = [kind for kind in HOOKS if kind is not QuantizedTopkState]
        for kind, native in thinned(itertools.product(kinds, (False, True)), first=number):
            hooked = make_ddp(make_model(dtype=dtype), several_groups=native)
            register(hooked, kind(density=1.0), native)
            train(hooked, torch.optim.SGD(hooked.parameters(), lr=0.1, momentum=0.9), range(4))
            result = flat(hooked.parameters())
            if dist.get_world_size() <= 2:
                assert torch.equal(result, expected), (kind, native, dtype)
            else:
                torch.testing.assert_close(result, expected)


def check_conservation_and_replicas() -> None:
    """Contracts 1 and 2, through DDP: nothing is lost, and replicas have the same bits."""
    size = dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for kind in HOOKS:
            model = make_model(dtype=dtype)
            reference = make_model(dtype=dtype)
            ddp = make_ddp(model, several_groups=dtype == torch.float64)
            state = made(kind)
            register(ddp, state, native=True)
            carried = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
            for step in range(5):
                model.zero_grad()
                reference.zero_grad()
                ddp(batch(step, dtype=dtype)).square().mean().backward()
                reference(batch(step, dtype=dtype)).square().mean().backward()
                local = flat([p.grad for p in reference.parameters() if p.grad is not None])
                carried += sum(gathered(local.double()))
                result = flat([p.grad for p in model.parameters() if p.grad is not None])
                assert all(torch.equal(other, result) for other in gathered(result)), (kind, dtype)
                carried -= size * result.double()
                residuals = checkpoint_of(state)["residuals"]
                kept = flat([residuals[name] for name, _ in model.named_parameters()])
                tolerance = 1e-12 if dtype == torch.float64 else 1e-5
                if dtype in (torch.float16, torch.bfloat16):
                    tolerance = 2e-2  # the result is rounded to the gradient's dtype
                torch.testing.assert_close(
                    sum(gathered(kept.double())), carried, rtol=tolerance, atol=tolerance
                )
            stats = state.stats()
            assert stats["steps"] == 5
            # The biases are sent whole.
            share = sum(p.numel() for p in model.parameters() if p.dim() < 2) / carried.numel()
            selected = (stats["realised_density"] - share) / (1 - share) / 0.05
            least, most = (0.7, 4) if kind is GaussianKState else (0.8, 1.2)
            if kind is QuantizedTopkState:
                most = 1.5  # as many of a last bucket of 120 entries as of one of 512
            assert least < selected < most, (kind, dtype, selected)
            assert stats["sent_bytes"] > 0 or size == 1
            assert stats["select_seconds"] > 0


def check_python_and_native_hook_agree() -> None:
    for kind in HOOKS:
        results = []
        for native in (False, True):
            ddp = make_ddp(make_model())
            register(ddp, made(kind), native)
            train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(6))
            results.append(flat(ddp.parameters()))
        assert torch.equal(results[0], results[1]), kind


def check_non_finite() -> None:
    """Contract 5: one rank's overflow reaches every rank and touches no residual."""
    last = dist.get_world_size() - 1
    for kind in HOOKS:
        ddp = make_ddp(make_model())
        state = made(kind)
        register(ddp, state, native=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        train(ddp, optimizer, range(2))
        before = checkpoint_of(state)["residuals"]
        optimizer.zero_grad()
        factor = math.inf if dist.get_rank() == last else 1.0
        (factor * ddp(batch(2)).square().mean()).backward()
        for parameter in ddp.parameters():
            assert parameter.grad is not None
            assert not parameter.grad.isfinite().all()
        after = checkpoint_of(state)["residuals"]
        assert all(torch.equal(before[key], after[key]) for key in before)
        train(ddp, optimizer, range(3, 5))
        assert all(p.grad is not None and p.grad.isfinite().all() for p in ddp.parameters())


def check_partly_non_finite() -> None:
    """A step that one group of parameters makes unusable loses nothing of the other groups."""
    last = dist.get_world_size() - 1
    for kind in HOOKS:
        ddp, reference = make_ddp(make_model(), several_groups=True), make_model()
        state = made(kind)
        register(ddp, state, native=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        train(ddp, optimizer, range(2))
        before = checkpoint_of(state)
        handle = next(ddp.module.parameters()).register_hook(
            lambda gradient: gradient * (math.inf if dist.get_rank() == last else 1.0)
        )
        optimizer.zero_grad()
        ddp(batch(2)).square().mean().backward()
        handle.remove()
        assert all(p.grad is not None and p.grad.isnan().all() for p in ddp.parameters()), kind
        reference(batch(2)).square().mean().backward()
        after = checkpoint_of(state)
        first = next(name for name, _ in ddp.module.named_parameters())
        [poisoned] = [group for group in after["groups"] if first in group["parameters"]]
        others = [group for group in after["groups"] if group is not poisoned]
        assert len(others) > 1, "the model must have several groups for this test"
        for key in poisoned["parameters"]:
            assert torch.equal(before["residuals"][key], after["residuals"][key])
        gradients = dict(reference.named_parameters())
        for group in others:
            for key in group["parameters"]:
                gradient = gradients[key].grad
                assert gradient is not None
                expected = before["residuals"][key] + gradient.reshape(-1)
                assert torch.equal(after["residuals"][key], expected), (kind, key)


def check_overflow_under_reentrant_checkpointing() -> None:
    """Buckets come in passes of their own, and the step is over when the whole one is."""
    for native in (True, False):
        model = make_model()
        forwards = [layer.forward for layer in model]

        def through(forward: Any) -> Any:
            return lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=True)

        ddp = make_ddp(model)
        register(ddp, OkTopkState(density=0.05), native)
        # But for the first and the last, whose gradients come in the pass itself.
        for layer, forward in zip([*model][1:-1], forwards[1:-1], strict=True):
            layer.forward = through(forward)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        train(ddp, optimizer, range(3))
        first = dist.get_rank() == 0
        handle = model[0].bias.register_hook(  # type: ignore[union-attr]
            lambda gradient, first=first: gradient * (math.inf if first else 1.0)
        )
        optimizer.zero_grad()
        ddp(batch(3)).square().mean().backward()
        handle.remove()
        assert all(p.grad is not None and p.grad.isnan().all() for p in model.parameters())


def check_broken_off() -> None:
    """What a failing backward pass delivered goes back before a state is saved or loaded."""
    for kind in [*HOOKS, AutoState]:
        model, reference, other = make_model(), make_model(), make_model()
        state, fresh = made(kind), made(kind)
        ddp = make_ddp(model, several_groups=True)
        sparsecomm.register_comm_hook(ddp, state)
        train(ddp, torch.optim.SGD(model.parameters(), lr=0.0), range(3))
        saved, before = state.state_dict(), checkpoint_of(state)["residuals"]

        fail_in_backward(ddp, state)
        reference(batch(3)).square().mean().backward()
        after = checkpoint_of(state)["residuals"]
        taken_back = []
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            taken_back.append(torch.equal(after[name], before[name] + parameter.grad.reshape(-1)))
            assert taken_back[-1] or torch.equal(after[name], before[name]), (kind, name)
        assert any(taken_back), "the model must have several groups for this test"

        # Loaded after such a step, a state is as one that knows nothing else.
        del ddp
        ddp = wrap_again(model, state)
        fail_in_backward(ddp, state)
        state.load_state_dict(saved)
        del ddp
        ddp = wrap_again(model, state)
        ddp_of_other = make_ddp(other, several_groups=True)
        sparsecomm.register_comm_hook(ddp_of_other, fresh)
        fresh.load_state_dict(saved)
        for wrapped in (ddp, ddp_of_other):
            train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.0), [4])
        expected, result = (checkpoint_of(one)["residuals"] for one in (fresh, state))
        assert all(torch.equal(result[name], expected[name]) for name in expected), kind


def check_saving_in_a_backward_pass() -> None:
    ddp = make_ddp(make_model(), several_groups=True)
    state = OkTopkState(density=0.05)
    sparsecomm.register_comm_hook(ddp, state)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.0), range(2))

    def save(_: torch.Tensor) -> None:
        wait_until_idle(state)
        state.state_dict()

    next(ddp.parameters()).register_hook(save)  # whose gradient comes last
    with pytest.raises(ValueError, match="cannot save the state in the middle of a backward pass"):
        ddp(batch(2)).square().mean().backward()


def check_sparse_in_flight() -> None:
    """A sparse gradient on its way counts as an exchange in progress."""
    parameter = nn.Parameter(torch.zeros(10, 2))
    state = OkTopkState(named_parameters=[("words", parameter)])
    state._connect()
    gradient = torch.eye(10)[:, :2].to_sparse(1)
    dist.barrier()
    first = dist.get_rank() == 0
    if not first:
        dist.barrier()
    future = state._native.exchange(0, True, gradient, [parameter], [gradient]).get_future()
    if first:
        if dist.get_world_size() > 1:
            with pytest.raises(ValueError, match="while gradients are being exchanged"):
                state.stats()
        dist.barrier()
    future.wait()
    state.stats()


def check_ends_that_come_late() -> None:
    """A step whose last bucket brings no gradients stands, whenever each rank brings it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parameters = [nn.Parameter(torch.zeros(12)), nn.Parameter(torch.zeros(6, 2))]
    state = OkTopkState(density=1, named_parameters=zip("ab", parameters, strict=True))
    state._connect()
    chance = random.Random(rank)
    for step in range(30):
        dense = torch.full((12,), float(size * (rank + step)))
        sparse = torch.full((6, 2), float(size * rank)).to_sparse(1)
        buckets = [sparse, dense, torch.empty(0)]
        if step % 3 == 0:
            buckets = [dense, sparse]  # which ends no step
        works = []
        for i, bucket in enumerate(buckets):
            time.sleep(chance.choice([0, 0, 1e-3, 5e-3]))
            owners = [parameters[bucket.is_sparse]] if bucket.numel() > 0 else []
            gradients = [bucket] if owners else []
            last = i == len(buckets) - 1
            works.append(state._native.exchange(i, last, bucket, owners, gradients))
        for work in works:
            work.wait()
        assert state._native.delivered
        mean = size * (size - 1) / 2
        assert torch.equal(dense, torch.full((12,), mean + size * step))
        assert torch.equal(sparse.to_dense(), torch.full((6, 2), mean))


def check_who_ends_a_step() -> None:
    """The exchange that is last on all ranks, or else an operation of its own."""
    size = dist.get_world_size()
    parameter = nn.Parameter(torch.zeros(12))
    state = OkTopkState(density=1, named_parameters=[("a", parameter)])
    state._connect()

    def messages(*, closes: bool, late: bool) -> int:
        before = state.stats()["messages"]
        gradient = torch.ones(12)
        works = [state._native.exchange(0, closes, gradient, [parameter], [gradient])]
        if late:
            works[0].wait()
            dist.barrier()
        if not closes:
            works.append(state._native.exchange(1, True, torch.empty(0), [], []))
        for work in works:
            work.wait()
        assert state._native.delivered
        return state.stats()["messages"] - before

    for _ in range(3):
        by_itself = messages(closes=True, late=False)
        messages(closes=False, late=True)  # so that ranks know the end of a step, too
    own_agreement = (size - 1).bit_length()
    assert messages(closes=False, late=True) == by_itself + own_agreement
    # Some ranks know that it is the last, and some do not.
    for _ in range(10):
        dist.barrier()
        more = messages(closes=False, late=False) - by_itself
        assert more in (0, own_agreement)
        everywhere = [0] * size
        dist.all_gather_object(everywhere, more)
        assert everywhere == [more] * size


def check_a_failure_before_the_last_bucket() -> None:
    """It is not waited for again at the end of the step."""
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.zeros(12 + (rank == 0))), nn.Parameter(torch.zeros(3))]
    state = OkTopkState(density=1, named_parameters=zip("ab", parameters, strict=True))
    state._connect()
    for gradient in (torch.ones(12 + (rank == 0)), torch.ones(3)):
        parameter = parameters[gradient.numel() == 3]
        work = state._native.exchange(0, False, gradient, [parameter], [gradient])
        if gradient.numel() == 3 or dist.get_world_size() == 1:
            work.wait()
        else:
            with pytest.raises(RuntimeError, match="ranks disagree"):
                work.wait()
        state._native.exchange(1, True, torch.empty(0), [], []).wait()
        assert state._native.delivered == (gradient.numel() == 3 or dist.get_world_size() == 1)


def check_ranks_that_are_not_at_the_same_step() -> None:
    """They learn of it at once, and go on."""
    if dist.get_world_size() == 1:
        return
    odd = dist.get_rank() == 0
    parameters = [nn.Parameter(torch.zeros(12)), nn.Parameter(torch.zeros(7, 2))]
    named = zip("ab", parameters, strict=True)
    state = TopkState(density=0.5, dense_below=2, named_parameters=named)
    state._connect()

    def exchange(place: int, *, last: bool) -> Any:
        gradient = torch.ones_like(parameters[place])
        own = [parameters[place]]
        return state._native.exchange(place, last, gradient, own, [gradient])

    def step() -> None:
        for work in (exchange(0, last=False), exchange(1, last=True)):
            work.wait()

    step()
    # One breaks off a step, of which all have exchanged a part, and begins another one.
    exchange(0, last=False).wait()
    for place in (0, 1) if odd else (1, 0):
        with pytest.raises(RuntimeError, match=r"steps_broken_off: 0 on .* but 1 on rank 0"):
            exchange(place, last=place == 1).wait()
    state.load_state_dict(state.state_dict())
    step()
    # All break one off.
    exchange(0, last=False).wait()
    step()
    # One has something more in a step.
    works = [exchange(0, last=not odd)]
    if odd:
        works.append(exchange(1, last=True))
    with pytest.raises(RuntimeError, match=r"ranks disagree: .*name: "):
        works[-1].wait()
    step()


def fail_in_backward(ddp: DistributedDataParallel, state: CompressionState) -> None:
    """Ends a backward pass by an exception before its last bucket, and waits for the others."""
    handle = next(ddp.parameters()).register_hook(_fail)
    ddp.zero_grad()
    with pytest.raises(RuntimeError, match="on purpose"):
        ddp(batch(3)).square().mean().backward()
    handle.remove()
    wait_until_idle(state)


def wait_until_idle(state: CompressionState) -> None:
    def is_idle() -> bool:
        try:
            state.stats()
        except ValueError:  # a group is being exchanged
            return False
        return True

    wait_until(is_idle)


def wrap_again(model: nn.Module, state: CompressionState) -> DistributedDataParallel:
    """DDP does not go on after an exception in a backward pass."""
    gc.collect()
    ddp = make_ddp(model, several_groups=True)
    ddp.register_comm_hook(state, sparsecomm.compression_hook)
    return ddp


def check_accumulation_and_density() -> None:
    ddp = make_ddp(make_model())
    state = OkTopkState(density=0.5, dense_below=0)
    register(ddp, state, native=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.no_sync():
        ddp(batch(0)).square().mean().backward()
    train(ddp, optimizer, range(2))
    assert state.stats()["steps"] == 2
    state.density = 0.01
    train(ddp, optimizer, range(2, 12))
    assert 0.5 * 2 / 12 < state.stats()["realised_density"] < 1.3 * (0.5 * 2 + 0.01 * 10) / 12


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=SLOW), 3, pytest.param(4, marks=SLOW)])
def test_exchange(size: int) -> None:
    run_ranks(size, _check_exchange, timeout=100)


def _check_exchange() -> None:
    check_density_one_equals_dense()
    check_conservation_and_replicas()
    check_python_and_native_hook_agree()
    check_non_finite()
    check_partly_non_finite()
    check_overflow_under_reentrant_checkpointing()
    check_broken_off()
    check_saving_in_a_backward_pass()
    check_sparse_in_flight()
    check_ends_that_come_late()
    check_who_ends_a_step()
    check_a_failure_before_the_last_bucket()
    check_ranks_that_are_not_at_the_same_step()
    check_accumulation_and_density()


# ---- checkpoints


def _check_resume() -> None:
    for kind, native, schedule in [
        (OkTopkState, True, None),
        (OkTopkState, False, ThresholdSchedule.oktopk(tau_prime=4, tau=3)),
        (TopkState, True, None),
        (OkTopkState, True, ThresholdSchedule(period=5, partition_period=3)),
    ]:

        def start(
            kind: type[CompressionState] = kind,
            native: bool = native,
            schedule: ThresholdSchedule | None = schedule,
        ) -> tuple[DistributedDataParallel, torch.optim.Optimizer, CompressionState]:
            several_groups = schedule == ThresholdSchedule(period=5, partition_period=3)
            ddp = make_ddp(make_model(), several_groups)
            state = kind(density=0.05, schedule=schedule)
            register(ddp, state, native)
            return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), state

        ddp, optimizer, state = start()
        train(ddp, optimizer, range(7))
        file = io.BytesIO()
        torch.save([ddp.state_dict(), optimizer.state_dict(), state.state_dict()], file)
        train(ddp, optimizer, range(7, 14))

        file.seek(0)
        saved_model, saved_optimizer, saved_state = torch.load(file, weights_only=True)
        resumed, resumed_optimizer, resumed_state = start()
        resumed.load_state_dict(saved_model)
        resumed_optimizer.load_state_dict(saved_optimizer)
        resumed_state.load_state_dict(saved_state)
        # Saving again before the first step gives the same back.
        [(place, entry)] = saved_state.items()
        assert place == f"rank_{dist.get_rank()}_of_{dist.get_world_size()}"
        again = checkpoint_of(resumed_state)
        assert again.keys() == entry.keys()
        assert again["groups"] == entry["groups"]
        train(resumed, resumed_optimizer, range(7, 14))
        assert torch.equal(flat(resumed.parameters()), flat(ddp.parameters())), (kind, native)
        expected, found = checkpoint_of(state), checkpoint_of(resumed_state)
        assert expected["groups"] == found["groups"]
        for key, residual in expected["residuals"].items():
            assert torch.equal(residual, found["residuals"][key]), key

        # What belongs to another model, method or rank is refused.
        for change, message in [({"format": 2}, "format"), ({"algorithm": "dense"}, "algorithm")]:
            with pytest.raises(ValueError, match=message):
                resumed_state.load_state_dict({place: {**entry, **change}})
        with pytest.raises(ValueError, match="lacks groups"):
            resumed_state.load_state_dict(
                {place: {k: v for k, v in entry.items() if k != "groups"}}
            )
        with pytest.raises(ValueError, match="has rank_98_of_99, and neither rank_"):
            resumed_state.load_state_dict({"rank_98_of_99": entry})
        name = next(iter(entry["residuals"]))
        without = {k: v for k, v in entry["residuals"].items() if k != name}
        with pytest.raises(ValueError, match=f"no residual of {name}.*another model"):
            resumed_state.load_state_dict({place: {**entry, "residuals": without}})
        for residuals in (
            {**entry["residuals"], name: torch.zeros(1)},
            {**entry["residuals"], "one too many": torch.zeros(1)},
        ):
            other, other_optimizer, other_state = start()
            wrong = {place: {**entry, "residuals": residuals}}
            if native:  # knows names and shapes
                with pytest.raises(ValueError, match="another model"):
                    other_state.load_state_dict(wrong)
            else:
                other_state.load_state_dict(wrong)
                for _ in range(2):  # and DDP is ready for another step
                    with pytest.raises((ValueError, RuntimeError), match="another model"):
                        train(other, other_optimizer, range(1))
            before = checkpoint_of(resumed_state)
            with pytest.raises(ValueError, match="another model"):
                resumed_state.load_state_dict({place: {**entry, "residuals": residuals}})
            after = checkpoint_of(resumed_state)
            assert all(
                torch.equal(v, after["residuals"][k]) for k, v in before["residuals"].items()
            )


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_is_bit_identical(size: int) -> None:
    run_ranks(size, _check_resume)


# ---- mistakes


def _check_copies() -> None:
    communicator = sparsecomm.Communicator.from_process_group()
    things: list[Any] = [OkTopkState(), sparsecomm.AutoState(), sparsecomm.DenseOverlapState()]
    state = OkTopkState()
    ddp = make_ddp(make_model())
    sparsecomm.register_comm_hook(ddp, state)
    optimizer = sparsecomm.optim.OkTopkSGD(make_model().named_parameters())
    sharded = nn.Linear(8, 8)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    things += [state, optimizer.exchange, communicator, apply_reduce_scatter(sharded)]
    for thing in things:
        remedy = "from_process_group" if thing is communicator else r"state_dict\(\) on every rank"
        for use in (
            copy.copy,
            copy.deepcopy,
            pickle.dumps,
            lambda thing: torch.save(thing, io.BytesIO()),
            lambda thing: copy.deepcopy({"state": thing}),  # as trainers do with arguments
        ):
            with pytest.raises(TypeError, match=f"{type(thing).__name__} has .*{remedy}"):
                use(thing)
    with pytest.raises(TypeError, match=r"copy, average or save ddp\.module"):
        torch.optim.swa_utils.AveragedModel(ddp)
    torch.optim.swa_utils.AveragedModel(ddp.module)


def test_copying_a_state_says_what_to_do_instead() -> None:
    run_ranks(1, _check_copies)


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        OkTopkState().state_dict()


def _check_misuse() -> None:
    def loss(ddp: DistributedDataParallel) -> torch.Tensor:
        return ddp(batch(0)).square().mean()  # type: ignore[no-any-return]

    ddp = make_ddp(make_model())
    state = OkTopkState()
    sparsecomm.register_comm_hook(ddp, state)
    with pytest.raises(RuntimeError, match="has a communication hook already"):
        sparsecomm.register_comm_hook(ddp, TopkState())
    with pytest.raises(RuntimeError, match=r"serves another model.*state\.reconnect\("):
        sparsecomm.register_comm_hook(make_ddp(make_model()), state)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for model, remedy in [
        (make_model(), "DistributedDataParallel model, not Sequential: wrap it"),
        (fully_shard(make_model(), mesh=mesh), "sparsecomm.fsdp.apply"),
        (replicate(make_model()), r"model.register_comm_hook\(state, sparsecomm.oktopk_hook\)"),
        ("model", "DistributedDataParallel"),
    ]:
        with pytest.raises(TypeError, match=remedy):
            sparsecomm.register_comm_hook(model, OkTopkState())

    class Own(OkTopkState):
        pass

    for other in (object(), Own()):
        with pytest.raises(TypeError, match=r"OkTopkState, Quant.* ddp\.register_comm_hook\(state"):
            sparsecomm.register_comm_hook(make_ddp(make_model()), other)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"class OkTopkState itself: call it"):
        sparsecomm.register_comm_hook(make_ddp(make_model()), OkTopkState)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NoneType"):
        state.load_state_dict(None)  # type: ignore[arg-type]

    late = make_ddp(make_model())
    loss(late).backward()
    with pytest.raises(RuntimeError, match="before the first backward"):
        sparsecomm.register_comm_hook(late, OkTopkState())

    wrong = make_ddp(make_model())
    wrong.register_comm_hook(TopkState(), sparsecomm.oktopk_hook)
    for _ in range(2):  # not an internal assertion of torch's in the second
        with pytest.raises(TypeError, match=r"oktopk_hook needs .* OkTopkState, not TopkState"):
            loss(wrong).backward()

    shared = OkTopkState()
    first, second = make_ddp(make_model()), make_ddp(make_model(seed=1))
    first.register_comm_hook(shared, sparsecomm.oktopk_hook)
    second.register_comm_hook(shared, sparsecomm.oktopk_hook)
    for _ in range(2):
        loss(first).backward()
        with pytest.raises((ValueError, RuntimeError), match="a state belongs to one model"):
            loss(second).backward()

    everyone = dist.new_group()
    with pytest.raises(ValueError, match="process group is not the model's"):
        sparsecomm.register_comm_hook(make_ddp(make_model()), OkTopkState(process_group=everyone))


def _check_complex_dtype() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).abs().sum()

    ddp = DistributedDataParallel(Complex())
    with pytest.raises(TypeError, match=r"weight is a parameter of torch\.complex64.*view_as_real"):
        sparsecomm.register_comm_hook(ddp, OkTopkState())
    # A state that knows no parameters yet sees them in the first step.
    ddp.register_comm_hook(OkTopkState(), sparsecomm.oktopk_hook)
    for _ in range(3):
        with pytest.raises(
            (ValueError, RuntimeError), match="ComplexFloat cannot be exchanged sparsely"
        ):
            ddp(torch.ones(4)).backward()


def test_misuse() -> None:
    run_ranks(1, _check_misuse)
    run_ranks(1, _check_complex_dtype)


def _check_disagreement() -> list[str]:
    rank = dist.get_rank()
    messages = []
    for density, width in [(0.05 * (1 + rank), 40), (0.01, 40 if rank == 0 else 41)]:
        ddp = DistributedDataParallel(nn.Linear(40, 40), init_sync=False)
        if width != 40:
            ddp = DistributedDataParallel(nn.Linear(40, width), init_sync=False)
        sparsecomm.register_comm_hook(ddp, OkTopkState(density=density))
        with pytest.raises(RuntimeError) as raised:
            ddp(batch(0)).sum().backward()
        messages.append(str(raised.value))
        del ddp
    return messages


def test_ranks_that_disagree_raise_the_same_text() -> None:
    first, second, third = run_ranks(3, _check_disagreement)
    assert first == second == third
    assert "density: 0.05 on rank 0 but 0.1 on rank 1" in first[0]
    assert "numel: 1600 on rank 0 but 1640 on ranks 1, 2" in first[1]


# ---- every entry, by bucket


def check_dense_overlap_is_plain_ddp() -> None:
    """Bit for bit where P is a power of two and divides exactly; else sums differ in the last."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for native in (False, True):
            plain = make_ddp(make_model(dtype=dtype))
            hooked = make_ddp(make_model(dtype=dtype), several_groups=native)
            state = sparsecomm.DenseOverlapState()
            if native:
                sparsecomm.register_comm_hook(hooked, state)
            else:
                hooked.register_comm_hook(state, sparsecomm.dense_overlap_hook)
            for ddp in (plain, hooked):
                train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), range(5))
            expected, result = flat(plain.parameters()), flat(hooked.parameters())
            assert all(torch.equal(other, result) for other in gathered(result))
            if dist.get_world_size() <= 2:
                assert torch.equal(result, expected), (native, dtype)
            else:
                # Plain DDP rounds before the sum and at each hop, we once.
                tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
            stats = state.stats()
            assert (stats["steps"], stats["realised_density"]) == (5, 1)
            assert not checkpoint_of(state)["residuals"]
            other = sparsecomm.DenseOverlapState()
            other.load_state_dict(state.state_dict())
            with pytest.raises(ValueError, match="sends every entry; its density is 1"):
                other.density = 0.5


def check_buckets_do_not_wait_for_one_another() -> None:
    ddp = make_ddp(make_model())
    state = sparsecomm.DenseOverlapState()
    counts: list[int] = []

    # DDP inspects annotations, and postponed ones are text.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        counts[-1] += 1
        future = sparsecomm.dense_overlap_hook(state, bucket)
        future.wait()  # before the backward pass goes on
        return future

    ddp.register_comm_hook(state, hook)
    for step in range(3):
        counts.append(0)
        ddp(batch(step)).square().mean().backward()
    assert counts[0] == 1
    assert counts[1] == counts[2] > 1, counts  # DDP has rebuilt its buckets
    # And the first step's group, of one bucket, is gone, but not what it has counted.
    assert len(state._native.algorithms()) == counts[2]
    assert (state.stats()["steps"], state.stats()["realised_density"]) == (3, 1)


def check_dense_overlap() -> None:
    check_dense_overlap_is_plain_ddp()
    check_buckets_do_not_wait_for_one_another()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_dense_overlap(size: int) -> None:
    run_ranks(size, check_dense_overlap)


# ---- failures

DEADLINE = timedelta(seconds=5 * PATIENCE)  # of what stops


def _lose_a_rank(how: str) -> tuple[str, float]:
    ddp = make_ddp(make_model(width=200))
    # One that is gone is noticed long before the deadline.
    timeout = DEADLINE if how == "stop" else LONG_TIME
    sparsecomm.register_comm_hook(ddp, OkTopkState(timeout=timeout))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train(ddp, optimizer, range(3))
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raise":
            # In the middle of the backward pass, when some buckets are on their way.
            next(ddp.module.parameters()).register_hook(_fail)
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
    try:
        train(ddp, optimizer, range(3, 5))
    except RuntimeError as error:
        if "on purpose" in str(error):
            os._exit(1)  # as a script without a handler would, but at once
        message, seconds = str(error), time.monotonic() - start
        if not isinstance(error, dist.DistBackendError):
            raise
        with pytest.raises(RuntimeError, match="make a new one"):
            train(ddp, optimizer, range(1))
        return message, seconds
    raise AssertionError("the loss of rank 1 went unnoticed")


def _fail(_: torch.Tensor) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.timeout(330)
@pytest.mark.parametrize(("how", "size"), [("kill", 2), ("raise", 3), ("kill", 6)])
def test_survivors_name_a_rank_that_died(how: str, size: int) -> None:
    results = run_ranks(size, _lose_a_rank, how, may_die=(1,), timeout=300)
    for rank in range(size):
        if rank != 1:
            message, seconds = results[rank]
            assert "rank 1 left" in message, message
            assert seconds < LONG / 2, "the failing path is as quick as the good one"


@pytest.mark.timeout(330)
def test_survivors_name_a_rank_that_hangs() -> None:
    results = run_ranks(3, _lose_a_rank, "stop", may_die=(1,), timeout=300)
    for rank in (0, 2):
        message, seconds = results[rank]
        text = f"rank 1 did not take part before the deadline ({DEADLINE.total_seconds():g} s)"
        assert text in message, message
        assert seconds < DEADLINE.total_seconds() + LONG / 2, seconds

"""That groups="auto" tries one group and DDP's buckets, and keeps the quicker."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, checkpoint_of, flat, gathered, make_ddp, make_model, train
from patience import LONG
from ranks import run_ranks
from test_hooks import fail_in_backward, wrap_again
from test_optim import Branches
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
from sparsecomm import AutoState, Compression, CompressionState, OkTopkState
from sparsecomm.optim import OkTopkSGD, TopkSGD

STEPS = 10  # that are observed with each


def grouping(state: CompressionState) -> dict[str, Any]:
    found = state.stats()["grouping"]
    assert isinstance(found, dict)
    return found


def start(**options: Any) -> tuple[DistributedDataParallel, OkTopkState]:
    ddp = make_ddp(make_model())
    state = OkTopkState(groups="auto", **{"density": 0.05, **options})
    sparsecomm.register_comm_hook(ddp, state)
    return ddp, state


def slow_down(parameter: nn.Parameter, is_slow: Callable[[], bool]) -> None:
    """Makes backward passes longer that bring this gradient last."""

    def sleep(_gradient: torch.Tensor) -> None:
        if is_slow():
            time.sleep(0.03)

    parameter.register_hook(sleep)


def check_agreement(ddp: DistributedDataParallel, state: CompressionState) -> None:
    everyone = gathered(flat(ddp.parameters()))
    assert all(torch.equal(other, everyone[0]) for other in everyone)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, grouping(state))
    assert all(other == found[0] for other in found)


def check_decision(momentum: float, slow: str) -> None:
    """With one of the two slowed down; of what is selected nothing gets lost meanwhile."""
    ddp, state = start(momentum=momentum, mask_momentum=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    now = "model"
    slow_down(next(ddp.parameters()), lambda: now == slow)
    local = copy.deepcopy(ddp.module)
    kept = {name: torch.zeros(p.numel()) for name, p in local.named_parameters()}
    velocity = {name: torch.zeros(p.numel()) for name, p in local.named_parameters()}
    ways = []
    for step in range(3 * STEPS):
        if step > 0:
            now = grouping(state)["groups"]
        local.load_state_dict(ddp.module.state_dict())
        local.zero_grad()
        local(batch(step)).square().mean().backward()
        optimizer.zero_grad()
        ddp(batch(step)).square().mean().backward()
        after = checkpoint_of(state)["residuals"]
        for (name, mine), shared in zip(local.named_parameters(), ddp.parameters(), strict=True):
            assert mine.grad is not None
            assert shared.grad is not None
            velocity[name] = momentum * velocity[name] + mine.grad.reshape(-1)
            brought = kept[name] + velocity[name] - after[name].reshape(-1)
            delivered = torch.stack(gathered(brought)).mean(0)
            torch.testing.assert_close(shared.grad.reshape(-1), delivered, rtol=1e-4, atol=1e-6)
            kept[name] = after[name].reshape(-1).clone()
        optimizer.step()
        ways.append(len(checkpoint_of(state)["groups"]))
        assert {group["step"] for group in checkpoint_of(state)["groups"]} == {step + 1}
    found = grouping(state)
    other = "buckets" if slow == "model" else "model"
    assert found["decided"]
    assert found["groups"] == other
    assert found[f"{slow}_seconds"] > max(0.03, found[f"{other}_seconds"])
    # Weights, and what is sent whole; then these of each bucket.
    assert ways[:STEPS] == [2] * STEPS
    assert min(ways[STEPS : 2 * STEPS]) > 2
    assert (ways[-1] == 2) == (other == "model")
    assert state.stats()["steps"] == 3 * STEPS
    check_agreement(ddp, state)
    [line] = [line for line in sparsecomm.report(state).splitlines() if "groups:" in line]
    assert "chosen" in line
    assert ("one group, chosen" in line) == (other == "model")
    assert ("buckets, chosen" in line) == (other == "buckets")


def check_decisions() -> None:
    for momentum in (0.0, 0.5):
        for slow in ("model", "buckets"):
            check_decision(momentum, slow)


def check_results() -> None:
    """Everything is sent, so it is plain DDP, whatever goes with what."""
    plain = make_ddp(make_model())
    ddp, state = start(density=1.0)
    for model in (plain, ddp):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(3 * STEPS))
    torch.testing.assert_close(
        flat(ddp.parameters()), flat(plain.parameters()), rtol=1e-4, atol=1e-5
    )
    assert grouping(state)["decided"]
    check_agreement(ddp, state)


def check_uneven_data() -> None:
    """Rank 0 has run out of data in both parts of the trial."""
    for batches in (4, STEPS + 4, 2 * STEPS):
        ddp, state = start(density=1.0)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        with ddp.join():
            train(ddp, optimizer, range(batches if dist.get_rank() == 0 else 3 * STEPS))
        check_agreement(ddp, state)
        assert grouping(state)["decided"]
        train(ddp, optimizer, range(3))
        check_agreement(ddp, state)


def check_passes_that_break_off() -> None:
    """Before a step with other groups, in its middle, and in that of the agreement."""
    for broken in (0, 1, STEPS, STEPS + 1, 2 * STEPS, 2 * STEPS + 1):
        model = make_model()
        state = OkTopkState(1.0, groups="auto", named_parameters=model.named_parameters())
        ddp = wrap_again(model, state)
        train(ddp, torch.optim.SGD(model.parameters(), lr=0.1), range(broken))
        fail_in_backward(ddp, state)
        del ddp
        ddp = wrap_again(model, state)
        train(ddp, torch.optim.SGD(model.parameters(), lr=0.1), range(3 * STEPS - broken))
        check_agreement(ddp, state)
        assert grouping(state)["decided"]


def check_checkpoints() -> None:
    for saved_at in (0, 3, STEPS + 3, 3 * STEPS):
        ddp, state = start(momentum=0.5)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        train(ddp, optimizer, range(saved_at))
        saved, parameters = state.state_dict(), copy.deepcopy(ddp.module.state_dict())
        was = grouping(state)
        train(ddp, optimizer, range(2))  # which it forgets
        for loads_into in ("itself", "another"):
            if loads_into == "another":
                ddp, state = start(momentum=0.5)
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            ddp.module.load_state_dict(parameters)
            state.load_state_dict(copy.deepcopy(saved))
            loaded = checkpoint_of(state)
            for kept in ("residuals", "moments"):
                for name, tensor in saved[next(iter(saved))][kept].items():
                    assert torch.equal(loaded[kept][name], tensor)
            if was["decided"]:
                assert grouping(state) == was
            else:
                assert not grouping(state)["decided"]
                assert grouping(state)["model_seconds"] is None
            train(ddp, optimizer, range(3 * STEPS))
            assert grouping(state)["decided"]
            check_agreement(ddp, state)
            steps = {group["step"] for group in checkpoint_of(state)["groups"]}
            assert steps == {saved_at + 3 * STEPS}
        # Of any other state.
        other = make_ddp(make_model())
        its_state = OkTopkState(0.05, momentum=0.5)
        sparsecomm.register_comm_hook(other, its_state)
        its_state.load_state_dict(copy.deepcopy(saved))
        train(other, torch.optim.SGD(other.parameters(), lr=0.05), range(2))
        assert its_state.stats()["grouping"] is None
    entry = checkpoint_of(state)
    for bad in ((float("nan"), 1.0), (1.0, -1.0), ("a", 1.0), (1.0,)):
        entry["groups"][0]["grouping"] = bad
        with pytest.raises(ValueError, match="state_dict to load"):
            start(momentum=0.5)[1].load_state_dict({next(iter(saved)): entry})


def check_resuming_bit_by_bit() -> None:
    """The group of all is, after the trial, what it was before, and in a new process."""
    ddp, state = start(momentum=0.5)
    now = "model"
    slow_down(next(ddp.parameters()), lambda: now == "buckets")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    first = None
    for step in range(3 * STEPS):
        train(ddp, optimizer, [step])
        now = grouping(state)["groups"]
        first = first or [group["parameters"] for group in checkpoint_of(state)["groups"]]
    assert grouping(state)["decided"]
    assert now == "model"
    assert [group["parameters"] for group in checkpoint_of(state)["groups"]] == first
    saved, parameters = state.state_dict(), copy.deepcopy(ddp.module.state_dict())
    train(ddp, optimizer, range(5))
    other, its_state = start(momentum=0.5)
    other.module.load_state_dict(parameters)
    its_state.load_state_dict(copy.deepcopy(saved))
    train(other, torch.optim.SGD(other.parameters(), lr=0.05), range(5))
    assert torch.equal(flat(other.parameters()), flat(ddp.parameters()))


def check_reconnecting() -> None:
    for steps in (3, STEPS + 3, 3 * STEPS):
        ddp, state = start()
        model = ddp.module
        train(ddp, torch.optim.SGD(model.parameters(), lr=0.05), range(steps))
        was = grouping(state)
        state.reconnect()
        again = was if was["decided"] else {**was, "groups": "model", "model_seconds": None}
        assert grouping(state) == again
        del ddp
        ddp = make_ddp(model)
        sparsecomm.register_comm_hook(ddp, state)
        train(ddp, torch.optim.SGD(model.parameters(), lr=0.05), range(3 * STEPS))
        assert grouping(state)["decided"]
        check_agreement(ddp, state)


def check_no_choice() -> None:
    single = DistributedDataParallel(make_model())
    state = OkTopkState(0.05, groups="auto")
    sparsecomm.register_comm_hook(single, state)
    train(single, torch.optim.SGD(single.parameters(), lr=0.05), range(STEPS + 2))
    expected = {
        "groups": "model",
        "decided": True,
        "model_seconds": None,
        "buckets_seconds": None,
    }
    assert grouping(state) == expected
    ddp, state = start(clip_norm=1.0)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), range(STEPS + 2))
    assert state.stats()["grouping"] is None
    assert len(checkpoint_of(state)["groups"]) == 2
    # What is sent in whole buckets anyway.
    ddp = make_ddp(make_model())
    dense = CompressionState(Compression(algorithm="dense_ring", density=1, groups="auto"))
    sparsecomm.register_comm_hook(ddp, dense)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), range(3))
    assert dense.stats()["grouping"] is None


def check_plans() -> None:
    """The default of AutoState, and of prepare() with it: algorithms are tried, too."""
    ddp = make_ddp(make_model())
    state = AutoState(0.05)
    sparsecomm.register_comm_hook(ddp, state)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(2 * 64 + 2):
        train(ddp, optimizer, [step])
        if grouping(state)["decided"]:
            break
    assert grouping(state)["decided"]
    assert grouping(state)["model_seconds"] > 0
    if grouping(state)["groups"] == "model":
        assert "auto" not in state.algorithms  # which had been found before the other was tried
    train(ddp, optimizer, range(3))
    check_agreement(ddp, state)
    ddp = make_ddp(make_model())
    prepared = sparsecomm.prepare(
        ddp, torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9), algorithm="auto"
    )
    assert isinstance(prepared, AutoState)
    assert prepared.compression.groups == "auto"


def check_warmup() -> None:
    """It is not before the final density that anything is observed."""
    warmup = sparsecomm.DensityWarmup(3, (0.5, 0.25))
    ddp, state = start(warmup=warmup, dense_steps=2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    train(ddp, optimizer, range(8 + STEPS - 1))
    train(ddp, optimizer, [0])
    assert grouping(state)["groups"] == "model"
    train(ddp, optimizer, [1])
    assert grouping(state)["groups"] == "buckets"


def check_optimizers() -> None:
    model = make_model()
    plain = make_ddp(make_model())
    optimizer = TopkSGD(
        model.named_parameters(), lr=0.1, density=1.0, groups="auto", bucket_cap_mb=0.005
    )
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    train(plain, reference, range(3 * STEPS))
    for step in range(3 * STEPS):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(
        flat(model.parameters()), flat(plain.parameters()), rtol=1e-4, atol=1e-5
    )
    assert optimizer.exchange.stats()["grouping"]["decided"]


def check_buckets_in_any_order() -> None:
    """Of an optimizer, whose buckets go in the order of each rank's gradients."""
    for slow in ("model", "buckets"):
        model, plain = Branches(), Branches()
        now = "model"
        for branch in model.branches:
            assert isinstance(branch, nn.Linear)
            slow_down(branch.weight, lambda: now == slow)  # noqa: B023
        options: dict[str, Any] = {"dense_below": 0, "bucket_cap_mb": 1e-3, "groups": "auto"}
        optimizer = OkTopkSGD(model.named_parameters(), lr=0.1, density=1.0, **options)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        random = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3 * STEPS):
            taken = torch.randperm(5, generator=random)[:3].tolist()
            data = torch.randn(8, 30, generator=random)
            for one, its_optimizer in ((model, optimizer), (plain, reference)):
                its_optimizer.zero_grad()
                one(data, taken).backward()
            for parameter in plain.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
            reference.step()
            now = optimizer.exchange.stats()["grouping"]["groups"]
            torch.testing.assert_close(
                flat(model.parameters()), flat(plain.parameters()), rtol=1e-4, atol=1e-5
            )
        found = optimizer.exchange.stats()["grouping"]
        assert found["decided"]
        assert found["groups"] == ("buckets" if slow == "model" else "model")


CHECKS = {
    "buckets in any order": check_buckets_in_any_order,
    "resuming": check_resuming_bit_by_bit,
    "decisions": check_decisions,
    "results": check_results,
    "uneven data": check_uneven_data,
    "passes that break off": check_passes_that_break_off,
    "checkpoints": check_checkpoints,
    "reconnecting": check_reconnecting,
    "no choice": check_no_choice,
    "plans": check_plans,
    "warm-up": check_warmup,
    "optimizers": check_optimizers,
}


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(name: str) -> None:
    run_ranks(2, CHECKS[name], timeout=LONG)


def test_on_three_ranks() -> None:
    run_ranks(3, check_results, timeout=LONG)

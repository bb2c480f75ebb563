"""Optimizers on ranks that make different numbers of steps, within torch's Join."""

from __future__ import annotations

import abc
import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import checkpoint_of
from ranks import run_ranks
from torch import Tensor
from torch.distributed.algorithms.join import Join

import sparsecomm
from sparsecomm.optim import DistributedOptimizer, OkTopkSGD, TopkSGD


def steps_of(rank: int) -> int:
    """How many batches a rank has; rank 1 has none."""
    return (3, 0, 5, 4)[rank]


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def loss_of(model: torch.nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    inputs = torch.randn(4, 6, generator=generator)
    loss: Tensor = model(inputs).square().mean()
    return loss


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int]
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.0, 0.9)),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
}


def reference(size: int, kind: str, clip: float) -> list[Tensor]:
    """What one process computes: the mean over all ranks of gradients, or zeros."""
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(max(map(steps_of, range(size)))):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(size):
            if step >= steps_of(rank):
                continue
            model.zero_grad()
            loss_of(model, rank, step).backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total / size
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def as_one(size: int, kind: str) -> None:
    """At density 1 the result is that of one process; the state is the same on every rank."""
    rank = dist.get_rank()
    clip = 0.05
    model = make_model()
    optimizer = DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()),
        compression=sparsecomm.Compression(algorithm="topk_a", density=1.0),
        compare_every=1,
    )
    with Join([optimizer]):
        for step in range(steps_of(rank)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    expected = reference(size, kind, clip)
    for mine, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=1e-5, atol=1e-7)
    # All go on alike, which the comparison of every step sees.
    train(model, optimizer, rank, range(50, 53))
    states = [optimizer.state[p] for p in model.parameters()]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, [{k: v.clone() for k, v in s.items()} for s in states])
    for other in gathered:
        torch.testing.assert_close(other, gathered[0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_at_density_1_it_is_as_in_one_process(kind: str) -> None:
    run_ranks(4, as_one, 4, kind)


def conserving(size: int) -> None:
    """What a rank that has joined has kept back arrives in the steps of the others."""
    rank = dist.get_rank()
    parameter = torch.nn.Parameter(torch.zeros(100))
    optimizer = TopkSGD(
        [parameter], lr=1.0, density=0.1, select="exact", average=False, dense_below=0
    )
    given = torch.zeros(100)
    with Join([optimizer]):
        for step in range((1, 2, 12)[rank]):
            optimizer.zero_grad()
            gradient = (torch.arange(100) % 7 + 1.0) * (rank + 1) if step < 2 else torch.zeros(100)
            parameter.backward(gradient)
            given += gradient
            optimizer.step()
    dist.all_reduce(given)
    # In ten more steps each rank sends the rest of its residual.
    torch.testing.assert_close(parameter.detach(), -given, rtol=0, atol=0)
    residuals = checkpoint_of(optimizer.exchange)["residuals"]
    assert all(not entry.any() for entry in residuals.values())


def test_residuals_of_ranks_that_have_joined_arrive() -> None:
    run_ranks(3, conserving, 3)


def with_rates(size: int) -> None:
    """Rates that are a part of what is added up; ranks without data add nothing of their own."""
    rank = dist.get_rank()
    model = make_model()
    optimizer = OkTopkSGD(
        model.named_parameters(),
        lr=0.1,
        weight_decay=0.1,
        lr_in_accumulator=True,
        density=0.5,
        compare_every=2,
    )
    for epoch in range(2):
        with Join([optimizer]):
            for step in range(steps_of(rank)):
                optimizer.zero_grad()
                with optimizer.no_sync():
                    loss_of(model, rank, 10 * epoch + step).backward()
                loss_of(model, rank, 10 * epoch + step + 5).backward()
                optimizer.step()
        optimizer.compare_parameters()


def test_ranks_stay_alike_over_epochs() -> None:
    run_ranks(4, with_rates, 4)


def decaying(size: int) -> None:
    """Weights decay as on the ranks that have data, averaged over all; see join_hook()."""
    rank = dist.get_rank()
    parameter = torch.nn.Parameter(torch.full((20,), 8.0))
    optimizer = TopkSGD(
        [parameter], lr=0.5, weight_decay=0.5, density=1.0, dense_below=0, lr_in_accumulator=True
    )
    with Join([optimizer]):
        for _ in range(1 + rank):
            optimizer.zero_grad()
            (2 * parameter).sum().backward()
            optimizer.step()
    expected = 8.0
    for step in range(size):
        expected -= 0.5 * (2 + 0.5 * expected) * (size - step) / size
    assert parameter.tolist() == [expected] * 20


def test_weights_decay_on_ranks_that_have_data() -> None:
    run_ranks(2, decaying, 2)


def refusing(size: int) -> None:
    rank = dist.get_rank()
    model = make_model()
    adapted = DistributedOptimizer(torch.optim.LBFGS(copy.deepcopy(model).parameters()))
    with pytest.raises(ValueError, match="LBFGS"):
        Join([adapted])
    scaled = TopkSGD(copy.deepcopy(model).parameters(), lr=0.1)
    scaled.exchange.follow(torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="GradScaler"):
        Join([scaled])
    plain = TopkSGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="divide_by_initial_world_size"):
        Join([plain], divide_by_initial_world_size=False)
    with Join([plain]):
        for call in (plain.compare_parameters, partial(plain.add_param_group, {"params": []})):
            with pytest.raises(RuntimeError, match="within Join"):
                call()
        loss_of(model, rank, 0).backward()
        plain.step()
    plain.compare_parameters()

    def end_early() -> None:
        with Join([plain], throw_on_early_termination=True):
            train(model, plain, rank, range(1 + rank))

    with pytest.raises(RuntimeError, match="exhausted"):
        end_early()
    # No exchange was begun that one rank has not ended.
    with Join([plain]):
        train(model, plain, rank, range(1 + rank))
    plain.compare_parameters()


def test_what_cannot_join_is_refused() -> None:
    run_ranks(2, refusing, 2)


def skipping(size: int) -> None:
    """Steps whose gradients are dropped, by one rank or by all that have data; in a copy, too."""
    rank = dist.get_rank()
    model = make_model()
    # Several buckets.
    original = TopkSGD(model.parameters(), lr=0.1, density=0.2, bucket_cap_mb=1e-4, compare_every=3)
    twin, copied = copy.deepcopy((model, original))
    for one, optimizer in ((model, original), (twin, copied)):
        with Join([optimizer]):
            for step in range(steps_of(rank)):
                optimizer.zero_grad()
                loss = loss_of(one, rank, step)
                if step == 2:
                    torch.autograd.backward(loss, inputs=[next(one.parameters())])
                    optimizer.zero_grad()  # only a part of the buckets has gone
                    continue
                loss.backward()
                optimizer.step()
        optimizer.compare_parameters()


def test_gradients_of_a_step_may_be_dropped() -> None:
    run_ranks(4, skipping, 4)


class OfTwoBases(torch.optim.Optimizer, abc.ABC):
    """As other libraries have them; keeps what nobody can send."""

    def __init__(self, parameters: Any, kept: object) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kept = kept

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"kept": self.kept}
                parameter.data -= group["lr"] * parameter.grad


def keeping(size: int) -> list[str]:
    """What an optimizer keeps, and a learning rate that is not the same in the end."""
    rank = dist.get_rank()
    errors = []
    for kept in (None, 3, 0.5, "words", (1, 2)):
        model = make_model()
        optimizer = DistributedOptimizer(OfTwoBases(model.parameters(), kept))
        assert isinstance(optimizer, OfTwoBases)

        def run(
            optimizer: Any = optimizer, model: torch.nn.Module = model, kept: object = kept
        ) -> None:
            with Join([optimizer]):
                for step in range(steps_of(rank)):
                    optimizer.zero_grad()
                    loss_of(model, rank, step).backward()
                    optimizer.step()
                    optimizer.param_groups[0]["lr"] *= 0.5 if kept == "words" else 1

        if kept in ("words", (1, 2)):
            with pytest.raises((TypeError, RuntimeError)) as error:
                run()
            errors.append(str(error.value))
            continue
        run()
        assert all(optimizer.state[p]["kept"] == kept for p in model.parameters())
        optimizer.compare_parameters()
    return errors


def test_ranks_get_what_an_optimizer_keeps_or_say_what_differs() -> None:
    first, *others = run_ranks(3, keeping, 3)
    assert others == [first] * 2
    assert "lr of parameter group 0" in first[0]
    assert "a tuple" in first[1]


def adversaries(size: int, group_ranks: list[int]) -> None:
    """Two optimizers in one Join, on a part of the ranks."""
    group = dist.new_group(group_ranks)
    if dist.get_rank() not in group_ranks:
        return
    rank = dist.get_rank(group)
    models = [make_model(), make_model()]
    optimizers = [
        DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), process_group=group
        )
        for model in models
    ]
    with Join(optimizers):
        for step in range(2 + 2 * rank):
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, rank, [step])
        before = [parameter.detach().clone() for parameter in models[0].parameters()]
    for optimizer in optimizers:
        optimizer.compare_parameters()
    if rank == 1:
        torch.testing.assert_close(before, [p.detach() for p in models[0].parameters()])


def test_several_optimizers_join_on_a_part_of_the_ranks() -> None:
    run_ranks(3, adversaries, 3, [2, 1])

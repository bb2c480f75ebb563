"""The hooks under everything that DDP does, against plain DDP.

Gradients are whole numbers, multiples of the number of ranks, and do not depend on the parameters.
So every sum and average is exact in any order, and at any density, after any number of steps,

    parameters with a hook - (sum of the ranks' residuals) / P == parameters of plain DDP

holds bit for bit: what a hook has not delivered yet is in the residuals, and nowhere else. At
density 1 the parameters are the same without that.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from models import checkpoint_of, gathered
from ranks import run_ranks, thinned
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
from sparsecomm import CompressionState, OkTopkState

# All that selects, and the two that need not.
STATES: dict[str, Callable[..., CompressionState]] = {
    "oktopk": OkTopkState,
    "topk, exact": lambda **options: sparsecomm.TopkState(select="exact", **options),
    "topk, bucket": lambda **options: sparsecomm.TopkState(select="bucket", bucket=16, **options),
    "block_topk": lambda **options: sparsecomm.BlockTopkState(block=16, **options),
    "gaussian_k": sparsecomm.GaussianKState,
    "gtopk": sparsecomm.GTopkState,
    "topk_dsa": sparsecomm.TopkDsaState,
    "quantized_topk": sparsecomm.QuantizedTopkState,
    "auto": sparsecomm.AutoState,
    "dense_overlap": lambda density, **options: sparsecomm.DenseOverlapState(**options),
}
WIDTH = 16
HEADS = 4
TURN = itertools.count()  # of the calls of check(), the same on all ranks

Train = Callable[[DistributedDataParallel, torch.optim.Optimizer], None]


class Heads(nn.Module):
    """Linear layers side by side, those of them that a call names."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(HEADS))

    def forward(self, x: torch.Tensor, used: tuple[int, ...] = tuple(range(HEADS))) -> torch.Tensor:
        return torch.stack([self.heads[head](x) for head in used]).sum(dim=0)


class Words(nn.Module):
    """Embeddings with sparse gradients, between layers without."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.words = nn.Embedding(50, WIDTH, sparse=sparse)
        self.bags = nn.EmbeddingBag(30, WIDTH, mode="sum", sparse=sparse)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = x.abs().to(torch.int64)[:, :3]  # many of them twice
        return self.first(x) + self.words(words).sum(dim=1) + self.bags(words) + self.last(x)


def whole(module: nn.Module) -> nn.Module:
    """The module with parameters that are whole numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-9, 10, parameter.shape, generator=generator))
    return module


def numbers(seed: int, group: dist.ProcessGroup | None = None, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank(group))
    return torch.randint(-9, 10, (4, width), generator=generator).float()


def backward(
    forward: Callable[..., torch.Tensor],
    seed: int,
    *arguments: Any,
    group: dist.ProcessGroup | None = None,
    width: int = WIDTH,
) -> None:
    result = forward(numbers(seed, group, width), *arguments)
    (dist.get_world_size(group) * result * numbers(seed + 500, group, width)).sum().backward()


def register(
    ddp: DistributedDataParallel,
    kind: str,
    native: bool,
    density: float,
    **options: Any,
) -> CompressionState:
    group = ddp.process_group
    if native:
        state = STATES[kind](density=density, **options)
        sparsecomm.register_comm_hook(ddp, state)
    else:
        names = ddp.module.named_parameters()
        state = STATES[kind](
            density=density, process_group=group, named_parameters=names, **options
        )
        ddp.register_comm_hook(state, sparsecomm.compression_hook)
    return state


def delivers_all(kind: str | None, density: float) -> bool:
    return density == 1 and kind != "quantized_topk"  # which rounds


def with_residuals(
    ddp: DistributedDataParallel, state: CompressionState | None
) -> dict[str, torch.Tensor]:
    """The parameters as they were if all that the residuals hold had been delivered."""
    kept = {} if state is None else checkpoint_of(state)["residuals"]
    result = {}
    for name, parameter in ddp.module.named_parameters():
        result[name] = parameter.detach().clone()
        if name in kept:
            missing = kept[name].clone()
            dist.all_reduce(missing, group=ddp.process_group)
            missing /= dist.get_world_size(ddp.process_group)
            result[name] -= missing.reshape(parameter.shape)
    return result


def assert_nothing_is_lost(
    expected: dict[str, torch.Tensor], result: dict[str, torch.Tensor], kind: str
) -> None:
    for name, parameter in expected.items():
        if kind == "quantized_topk":
            torch.testing.assert_close(result[name], parameter, rtol=0, atol=1e-2)
        else:
            difference = result[name] - parameter
            assert not difference.any(), (kind, name, difference[difference != 0])


def check(
    make: Callable[[], nn.Module],
    train: Train,
    densities: tuple[float, ...] = (1, 0.2),
    parameters: Callable[[nn.Module], list[nn.Parameter]] = lambda module: [*module.parameters()],
    kinds: Iterable[str] = STATES,
    bucket_cap_mb: float = 0.002,
    make_plain: Callable[[], nn.Module] | None = None,
    **options: Any,
) -> None:
    """Trains with plain DDP and with each hook, by both routes, and compares.

    ``make_plain`` makes the model for plain DDP, if that cannot train the one that ``make`` makes.
    """

    def run(kind: str | None, native: bool = False, density: float = 1) -> dict[str, torch.Tensor]:
        module = make_plain() if kind is None and make_plain is not None else make()
        ddp = DistributedDataParallel(whole(module), bucket_cap_mb=bucket_cap_mb, **options)
        state = None if kind is None else register(ddp, kind, native, density)
        train(ddp, torch.optim.SGD(parameters(ddp.module), lr=1.0))
        return with_residuals(ddp, None if delivers_all(kind, density) else state)

    expected = run(None)
    # Ok-Topk every time, and others in turn.
    chosen = thinned((kind for kind in kinds if kind != "oktopk"), first=next(TURN))
    for (i, kind), (j, density) in itertools.product(
        enumerate(["oktopk", *chosen]), enumerate(densities)
    ):
        assert_nothing_is_lost(expected, run(kind, (i + j) % 2 == 0, density), kind)


# ---- steps


def accumulate(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Three micro-batches a step, of which the last is exchanged."""
    for step in range(4):
        optimizer.zero_grad()
        for part in range(3):
            with ddp.no_sync() if part < 2 else nullcontext():
                backward(ddp, 10 * step + part)
        optimizer.step()


def use_some(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Head 0 always, head 1 on some ranks, head 2 in some steps, head 3 never."""
    for step in range(6):
        optimizer.zero_grad()
        used = [0]
        if (step + dist.get_rank()) % 2 == 0:
            used.append(1)
        if step in (0, 1, 4):
            used.append(2)
        backward(ddp, step, tuple(used))
        assert ddp.module.heads[3].weight.grad is None
        assert (ddp.module.heads[2].weight.grad is None) == (2 not in used)
        optimizer.step()


def use_one_twice(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Head 1 twice, head 3 never: the same in every step, as a static graph must be."""
    for step in range(4):
        optimizer.zero_grad()
        backward(ddp, step, (0, 1, 1, 2))
        optimizer.step()


def see_views(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(ddp, step)
        for parameter in ddp.parameters():
            assert parameter.grad is not None
            bucket = parameter.grad.untyped_storage()
            assert bucket.nbytes() > parameter.grad.nbytes, "the gradient must be in the bucket"
        optimizer.step()


def join(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Each rank has two batches less than the one before, so the last may have none."""
    left = 2 * (dist.get_world_size() - 1 - dist.get_rank())
    with ddp.join():
        for step in range(left):
            optimizer.zero_grad()
            backward(ddp, step)
            optimizer.step()
    # And together again, with the residuals that are left.
    for step in range(10, 12):
        optimizer.zero_grad()
        backward(ddp, step)
        optimizer.step()


def check_residuals_of_joined_ranks() -> None:
    """They are delivered, whatever grads hold, but for those whose result DDP would drop."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    def run(
        native: bool | None, finds_unused: bool, zeroes_last: bool
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The parameters, and the residuals as this rank joins and after all have."""
        ddp = DistributedDataParallel(
            whole(Heads()), bucket_cap_mb=0.002, find_unused_parameters=finds_unused
        )
        state = None if native is None else register(ddp, "topk, exact", native, 0.25)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        before: dict[str, torch.Tensor] = {}
        with ddp.join():
            for step in range(2 if rank == last else 12):
                # Head 2 not in the step before the last rank joins, nor in the next ones.
                used = (0, 1, 2, 3) if step in (0, 6) or not finds_unused else (0, 1, 3)
                if not zeroes_last:
                    optimizer.zero_grad()
                backward(ddp, step, used)
                optimizer.step()
                if zeroes_last:
                    optimizer.zero_grad()
                if step == 1 and state is not None:
                    before = checkpoint_of(state)["residuals"]
        after = checkpoint_of(state)["residuals"] if state is not None else {}
        return with_residuals(ddp, state), before, after

    for finds_unused in (False, True):
        for zeroes_last in (True, False):
            expected, _, _ = run(None, finds_unused, zeroes_last)
            for native in (True, False):
                result, before, after = run(native, finds_unused, zeroes_last)
                assert_nothing_is_lost(expected, result, "topk, exact")
                if rank < last:
                    continue
                # Four exchanges of a quarter each; those of head 2 begin once a rank has used it.
                for head in range(HEADS):
                    name = f"heads.{head}.weight"
                    assert before[name].any(), name
                    assert not after[name].any(), name


def freeze(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Head 1 is frozen for some steps, in the midst of training."""
    for step in range(6):
        ddp.module.heads[1].requires_grad_(step not in (2, 3))
        optimizer.zero_grad()
        backward(ddp, step)
        optimizer.step()


def add_later(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Heads 2 and 3 have gradients from the start, and an optimizer from the third step on."""
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": [*ddp.module.heads[2:].parameters()], "lr": 2.0})
        ddp.zero_grad()
        backward(ddp, step)
        optimizer.step()


def frozen_heads() -> nn.Module:
    model = Heads()
    model.heads[2].requires_grad_(False)
    return model


def check_velocity_of_unused_parameters() -> None:
    """Momentum in the state is the optimizer's, which leaves alone what no rank has used."""

    def use(ddp: DistributedDataParallel, momentum: float) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0, momentum=momentum)
        for step in range(6):
            optimizer.zero_grad()
            backward(ddp, step, (0, 1, 2) if step in (0, 1, 4) else (0, 1))
            optimizer.step()
        return with_residuals(ddp, None)

    models = [DistributedDataParallel(whole(Heads()), find_unused_parameters=True) for _ in "1234"]
    expected = use(models.pop(), 0.5)
    for ddp, kind in zip(models, ("oktopk", "topk, bucket", "auto"), strict=True):
        register(ddp, kind, True, density=1.0, momentum=0.5)
        assert_nothing_is_lost(expected, use(ddp, 0), kind)


def check_residuals_of_unused_parameters() -> None:
    """A residual that waited out a dense step goes with the next one."""
    ddp = DistributedDataParallel(whole(Heads()), find_unused_parameters=True)
    state = register(ddp, "oktopk", True, density=0.2, dense_steps=4)
    backward(ddp, 0)
    saved = state.state_dict()
    name = "heads.2.weight"
    kept = checkpoint_of(state)["residuals"][name]
    assert not kept.any()
    [entry] = saved.values()
    entry["residuals"][name].fill_(3.0)
    state.load_state_dict(saved)
    for step, used in ((1, (0, 1)), (2, (0, 1, 2))):
        ddp.zero_grad()
        backward(ddp, step, used)
        assert bool(checkpoint_of(state)["residuals"][name].any()) == (used == (0, 1))


def use_some_over_zeros(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """As above, where grads are zeros, not None, of parameters that are not used."""
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        backward(ddp, step, (0, 1) if (step + dist.get_rank()) % 2 == 0 else (0,))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        backward(ddp, 10 + step, (0, 2))
        optimizer.step()


def exchange_thrice(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Passes of a step that are all exchanged, with parameters that only some of them use."""

    def multiple(*arguments: Any) -> torch.Tensor:
        # Plain DDP divides the average of a former pass by the number of ranks again.
        return cast(torch.Tensor, dist.get_world_size() ** 2 * ddp(*arguments))

    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(multiple, 10 * step, (0, 1))
        # DDP does not average a gradient that came within no_sync() alone.
        some = 3 if step > 1 else 2
        with ddp.no_sync() if step > 1 else nullcontext():
            backward(multiple, 10 * step + 1, (0, some) if dist.get_rank() == 0 else (0,))
        backward(multiple, 10 * step + 2, (0, 3))
        optimizer.step()


def put_by_hand(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Gradients that differ between ranks, and come before a pass in another way."""
    for step in range(4):
        optimizer.zero_grad()
        for parameter in ddp.parameters():
            if step % 2 == 0:
                size = dist.get_world_size()
                parameter.grad = torch.full_like(parameter, size * (dist.get_rank() + step))
        backward(ddp, step)
        optimizer.step()


def freeze_first(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    ddp.module.heads[1].requires_grad_(False)
    for step in range(5):
        optimizer.zero_grad()
        ddp.module.heads[1].requires_grad_(step > 2)
        backward(ddp, step)
        optimizer.step()


def check_gradients_that_were_changed_on_one_rank() -> None:
    """What a pass adds to would be added to the result on one rank only."""
    for native, momentum in ((True, 0.0), (False, 0.9)):
        ddp = DistributedDataParallel(whole(Heads()))
        register(ddp, "oktopk", native, 0.2, momentum=momentum)
        backward(ddp, 0)
        gradient = ddp.module.heads[0].weight.grad
        assert gradient is not None
        gradient.add_(dist.get_rank())
        if dist.get_world_size() == 1:
            backward(ddp, 1)
            continue
        with pytest.raises((ValueError, RuntimeError), match="gradients_of_earlier_passes"):
            backward(ddp, 1)


def check_momentum_over_several_passes() -> None:
    """SGD's velocity, whichever of a step's passes are exchanged."""
    patterns = ((True, True, True), (False, True, True), (True, False, True))

    def run(
        kind: str | None,
        native: bool,
        density: float,
        exchanged: tuple[bool, ...],
        zeros: bool,
        views: bool,
        nesterov: bool,
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        ddp = DistributedDataParallel(
            whole(Heads()).double(), bucket_cap_mb=0.004, gradient_as_bucket_view=views
        )
        state, own = None, 0.9
        if kind is not None:
            options = {"momentum": own, "mask_momentum": False, "nesterov": nesterov}
            state, own = register(ddp, kind, native, density, **options), 0.0
        optimizer = torch.optim.SGD(
            ddp.parameters(), lr=1.0, momentum=own, nesterov=nesterov and kind is None
        )
        biases = []
        for step in range(4):
            for part, exchange in enumerate(exchanged):
                with nullcontext() if exchange else ddp.no_sync():
                    backward(lambda x: ddp(x.double()), 10 * step + part)
            optimizer.step()
            bias = ddp.module.heads[0].bias
            biases.append(bias.detach().clone())
            optimizer.zero_grad(set_to_none=not zeros)
        return with_residuals(ddp, state), biases

    kinds = [(kind, False) for kind in STATES if kind != "dense_overlap"]
    kinds += [(kind, True) for kind in ("oktopk", "topk, bucket", "auto")]
    cases = [*enumerate(itertools.product(kinds, (1, 0.2)))]
    for number, exchanged in enumerate(patterns):
        plain = {
            nesterov: run(None, False, 1, exchanged, False, False, nesterov)
            for nesterov in (False, True)
        }
        for turn, ((kind, nesterov), density) in thinned(cases, first=number):
            expected, biases = plain[nesterov]
            result, sent_whole = run(
                kind,
                turn % 2 == 0,
                density,
                exchanged,
                zeros=number == 1,
                views=density == 1,
                nesterov=nesterov,
            )
            torch.testing.assert_close(sent_whole, biases, rtol=1e-12, atol=1e-9)
            if kind != "quantized_topk":
                torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-9)


def check_overflow_in_a_further_pass() -> None:
    """An overflow leaves a state with momentum as it was."""
    ddp = DistributedDataParallel(whole(Heads()).double())
    state = register(ddp, "oktopk", True, 0.2, momentum=0.9)
    backward(lambda x: ddp(x.double()), 0)
    before = checkpoint_of(state)
    if dist.get_rank() == 0:
        for head in ddp.module.heads:
            head.weight.register_hook(lambda gradient: gradient * float("inf"))
    backward(lambda x: ddp(x.double()), 1)
    assert not ddp.module.heads[0].weight.grad.isfinite().any()  # type: ignore[union-attr]
    after = checkpoint_of(state)
    for kept in ("residuals", "moments"):
        weights = {name: t for name, t in before[kept].items() if "weight" in name}
        assert any(t.any() for t in weights.values())
        for name, tensor in weights.items():
            torch.testing.assert_close(after[kept][name], tensor, rtol=1e-14, atol=1e-12)


def check_overflow_of_unused_parameters() -> None:
    """What is taken back leaves alone the residual that took no part, whoever rejected entries."""
    for kind in ("oktopk", "gtopk"):
        # Two groups: of the weights, and of the biases, which overflow.
        ddp = DistributedDataParallel(whole(Heads()), find_unused_parameters=True)
        state = register(ddp, kind, True, density=0.2)
        for step in range(2):
            ddp.zero_grad()
            backward(ddp, step)
        before = checkpoint_of(state)["residuals"]
        ddp.zero_grad()
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        if rank == last:
            ddp.module.heads[0].bias.register_hook(lambda gradient: gradient * float("inf"))
        # gtopk's rank 0 rejects entries of others, where it has not used the parameter itself.
        backward(ddp, 2, (0, 1, 2) if rank == last else (0, 1))
        after = checkpoint_of(state)["residuals"]
        if rank != last:
            assert torch.equal(after["heads.2.weight"], before["heads.2.weight"]), kind


def check_steps() -> None:
    check(Heads, accumulate)
    check_residuals_of_unused_parameters()
    check_overflow_of_unused_parameters()
    check(Heads, see_views, gradient_as_bucket_view=True)
    check(Heads, use_some, find_unused_parameters=True)
    check(Heads, use_some, (0.2,), find_unused_parameters=True, gradient_as_bucket_view=True)
    check_velocity_of_unused_parameters()
    check(Heads, use_one_twice, static_graph=True)
    check(Heads, join)
    check_residuals_of_joined_ranks()
    check(Heads, freeze, find_unused_parameters=True)
    check(Heads, freeze_first, (0.2,), find_unused_parameters=True)
    check(frozen_heads, accumulate, (0.2,), gradient_as_bucket_view=True)
    # What is delivered to a parameter without an optimizer is in no parameter.
    check(
        Heads,
        add_later,
        densities=(1,),
        kinds=[kind for kind in STATES if kind != "quantized_topk"],
        parameters=lambda module: [*module.heads[:2].parameters()],
    )


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_steps(size: int) -> None:
    run_ranks(size, check_steps, timeout=100)


def check_several_passes() -> None:
    check(Heads, exchange_thrice, find_unused_parameters=True)
    check(Heads, exchange_thrice, (0.2,), find_unused_parameters=True, gradient_as_bucket_view=True)
    check(Heads, use_some_over_zeros, (0.2,), find_unused_parameters=True)
    check(Heads, put_by_hand)
    check(Heads, put_by_hand, (0.2,), gradient_as_bucket_view=True)
    check_gradients_that_were_changed_on_one_rank()
    check_momentum_over_several_passes()
    check_overflow_in_a_further_pass()


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_several_passes(size: int) -> None:
    run_ranks(size, check_several_passes, timeout=100)


# ---- parameters that DDP does not reduce


def call_with_others(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Passes with what was computed of the parameters, and with others in their place."""

    def called(x: torch.Tensor) -> torch.Tensor:
        named = ddp.module.named_parameters()
        return functional_call(ddp, {f"module.{name}": 2 * p for name, p in named}, x)

    for step in range(3):
        optimizer.zero_grad()
        backward(called, step)
        named = ddp.module.named_parameters()
        others = {f"module.{name}": p.detach().clone().requires_grad_() for name, p in named}
        functional_call(ddp, others, numbers(step))
        optimizer.step()


def check_unfrozen() -> None:
    """What was frozen when DDP was made has no part in it, but where DDP was told to ignore it."""
    for ignored in (False, True):
        model = whole(frozen_heads())
        if ignored:
            frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
        ddp = DistributedDataParallel(model)
        register(ddp, "oktopk", True, 0.2)
        backward(ddp, 0)
        model.heads[2].requires_grad_(True)
        with torch.no_grad():
            ddp(numbers(1))
        if ignored:
            backward(ddp, 1)
        else:
            with pytest.raises(RuntimeError, match=r"gradient of heads\.2\.weight, .*frozen.*anew"):
                ddp(numbers(1))


def check_unreduced() -> None:
    check(Heads, call_with_others, (1, 0.2, 0.2), kinds=("oktopk", "topk, exact"))
    check_unfrozen()


def test_parameters_that_ddp_does_not_reduce() -> None:
    run_ranks(2, check_unreduced)


# ---- sparse gradients


def words(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        with ddp.no_sync():
            backward(ddp, 100 + step)
        backward(ddp, step)
        for embedding in (ddp.module.words, ddp.module.bags):
            assert embedding.weight.grad is not None
            assert embedding.weight.grad.is_sparse == embedding.sparse
        optimizer.step()


def join_words(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    with ddp.join():
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            backward(ddp, step)
            optimizer.step()


def check_clipping_of_sparse_gradients() -> None:
    """Each rank's gradient is clipped as a whole, as if none of it were sparse."""
    ddp, alone = DistributedDataParallel(whole(Words())), whole(Words(sparse=False))
    register(ddp, "oktopk", True, density=1.0, clip_norm=5.0)
    backward(ddp, 0)
    backward(alone, 0)
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 5.0 / dist.get_world_size() ** 0.5)
    assert norm > 5
    for clipped, parameter in zip(alone.parameters(), ddp.parameters(), strict=True):
        assert clipped.grad is not None
        assert parameter.grad is not None
        expected = sum(gathered(clipped.grad)) / dist.get_world_size()
        torch.testing.assert_close(parameter.grad.to_dense(), expected)


def check_overflow_of_sparse_gradients() -> None:
    """Contract 5: what the others of the step delivered goes back into the residuals."""
    for native in (False, True):
        ddp = DistributedDataParallel(
            whole(Words()), bucket_cap_mb=0.002, find_unused_parameters=True
        )
        state = register(ddp, "oktopk", native, density=0.2)
        backward(ddp, 0)
        before = checkpoint_of(state)["residuals"]
        ddp.zero_grad()
        if dist.get_rank() == 0:
            ddp.module.bags.weight.register_hook(lambda gradient: gradient * float("inf"))
        backward(ddp, 1)
        gradient = ddp.module.bags.weight.grad
        assert gradient is not None
        assert not gradient.to_dense().isfinite().all()
        alone = whole(Words())
        backward(alone, 1)
        after = checkpoint_of(state)["residuals"]
        for name in ("first.weight", "last.weight"):
            gradient = alone.get_parameter(name).grad
            assert gradient is not None
            assert torch.equal(after[name], before[name] + gradient.reshape(-1)), name


def check_checkpoints_of_sparse_gradients() -> None:
    """torch.distributed.checkpoint loads by key, so that these must not depend on the step."""
    states = []
    for _ in range(2):
        ddp = DistributedDataParallel(whole(Words()))
        states.append((ddp, register(ddp, "oktopk", True, density=0.2)))
    (ddp, state), (fresh_ddp, fresh) = states
    before = state.state_dict()
    backward(ddp, 0)
    after = checkpoint_of(state)["residuals"]
    assert after.keys() == checkpoint_of(fresh)["residuals"].keys()
    assert not after["words.weight"].any()
    fresh.load_state_dict(before)
    backward(fresh_ddp, 0)
    for name, residual in checkpoint_of(fresh)["residuals"].items():
        assert torch.equal(residual, after[name]), name


def check_sparse_gradients() -> None:
    check_checkpoints_of_sparse_gradients()
    # Two sparse allreduces at once damage the heap in torch's gloo (docs/troubleshooting.md).
    plain = functools.partial(Words, sparse=False)
    check(Words, words, make_plain=plain)
    check(Words, words, (0.2,), gradient_as_bucket_view=True, make_plain=plain)
    check(Words, join_words, (0.2,), make_plain=plain)
    check_clipping_of_sparse_gradients()
    check_overflow_of_sparse_gradients()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_sparse_gradients(size: int) -> None:
    run_ranks(size, check_sparse_gradients, timeout=100)


# ---- several models and groups


def check_several() -> None:
    """Two models in one backward pass, and one for each part of the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [dist.new_group([*range(size - 1)]), dist.new_group([size - 1])]
    part = parts[rank == size - 1]

    def run(kinds: list[str] | None, native: bool, density: float) -> list[dict[str, torch.Tensor]]:
        models = [
            DistributedDataParallel(whole(Heads()), bucket_cap_mb=0.002, process_group=group)
            for group in (None, None, part)
        ]
        states: list[CompressionState | None] = [None] * 3
        if kinds is not None:
            states = [
                register(ddp, kind, native, density)
                for ddp, kind in zip(models, kinds, strict=True)
            ]
        optimizers = [torch.optim.SGD(ddp.parameters(), lr=1.0) for ddp in models]
        first, second, own = models
        for step in range(4 if rank < size - 1 else 6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            # Those of the last rank make more steps of their own in the meantime.
            backward(own, step, group=part)
            optimizers[2].step()
            if step < 4:
                backward(lambda x, step=step: first(x) + second(x + step), step)
                optimizers[0].step()
                optimizers[1].step()
        return [
            with_residuals(ddp, None if state and delivers_all(kind, density) else state)
            for ddp, state, kind in zip(models, states, kinds or [None] * 3, strict=True)
        ]

    expected = run(None, False, 1)
    kinds = list(STATES)
    for number in range(len(kinds)):
        chosen = [kinds[(number + shift) % len(kinds)] for shift in range(3)]
        found = run(chosen, number % 2 == 0, (1, 0.2)[number % 2])
        for kind, plain, result in zip(chosen, expected, found, strict=True):
            assert_nothing_is_lost(plain, result, kind)


@pytest.mark.parametrize("size", [2, 3])
def test_several_models_and_groups(size: int) -> None:
    run_ranks(size, check_several, timeout=100)


def check_group_that_changes() -> None:
    """Those who exchange are DDP's ranks, or it is an error."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([each]) for each in range(2)][rank]

    def run(native: bool | None) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(whole(Heads()), process_group=pair)
        state = None if native is None else register(ddp, "topk, exact", native, 1.0)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        for step in range(4):
            if step == 2:
                if state is None:
                    ddp = DistributedDataParallel(ddp.module, process_group=alone)
                else:
                    ddp._update_process_group(alone)
                    with pytest.raises(
                        (ValueError, RuntimeError),
                        match=rf"ranks \[0, 1\].*ranks \[{rank}\].*state\.reconnect",
                    ):
                        backward(ddp, step)
                    state.reconnect(alone)
            optimizer.zero_grad()
            backward(ddp, step)
            optimizer.step()
        return [*ddp.parameters()]

    expected = run(None)
    for native in (True, False):
        for parameter, plain in zip(run(native), expected, strict=True):
            assert torch.equal(parameter, plain), native

    ddp = DistributedDataParallel(whole(Heads()), process_group=alone)
    ddp.register_comm_hook(OkTopkState(), sparsecomm.oktopk_hook)
    for _ in range(2):
        with pytest.raises(
            (ValueError, RuntimeError), match=rf"ranks \[0, 1\].*ranks \[{rank}\].*process_group="
        ):
            backward(ddp, 0)


def test_a_group_that_is_not_the_models() -> None:
    run_ranks(2, check_group_that_changes)


# ---- torch.compile


def check_compiled() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(ddp, backend=counter)
        for step in range(4):
            optimizer.zero_grad()
            backward(compiled, step, width=wide)
            optimizer.step()
        assert counter.frame_count > 1, "the graph must have been split by buckets"

    wide = 300  # DDPOptimizer splits no buckets below 1 MiB
    kinds = ("oktopk", "topk, bucket")
    check(lambda: Heads(wide), train, kinds=kinds, bucket_cap_mb=1)

    def python_reducer(native: bool) -> None:
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
            ddp = DistributedDataParallel(Heads())
            register(ddp, "oktopk", native, 0.2)
            backward(ddp, 0)

    for native in (False, True):
        with pytest.raises(RuntimeError, match='optimize_ddp = "ddp_optimizer"'):
            python_reducer(native)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_compiled(size: int) -> None:
    run_ranks(size, check_compiled, timeout=100)

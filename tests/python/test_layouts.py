"""An entry belongs to a position of its parameter, in whatever order that lies in memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import checkpoint_of, gathered
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
from sparsecomm import (
    BlockTopkState,
    CompressionState,
    DenseOverlapState,
    OkTopkState,
    QuantizedTopkState,
    TopkState,
)
from sparsecomm.optim import OkTopkAdam, OkTopkSGD, TopkSGD

# Of images, volumes and matrices, and one without a choice.
SHAPES = [(3, 4, 2, 5), (2, 3, 2, 1, 4), (7, 6), (5,), (4, 5, 1, 1)]
HOOKS: dict[type[CompressionState], Callable[..., Any]] = {
    BlockTopkState: sparsecomm.block_topk_hook,
    DenseOverlapState: sparsecomm.dense_overlap_hook,
    OkTopkState: sparsecomm.oktopk_hook,
    QuantizedTopkState: sparsecomm.quantized_topk_hook,
    TopkState: sparsecomm.topk_hook,
}
# Whose results do not depend on the order of the entries.
STATES: dict[str, Callable[[], CompressionState]] = {
    "oktopk": lambda: OkTopkState(0.2, select="exact", dense_below=0),
    "topk": lambda: TopkState(0.2, select="exact"),
    "momentum": lambda: TopkState(0.2, select="exact", momentum=0.5, mask_momentum=True),
    "unmasked": lambda: OkTopkState(0.2, select="exact", momentum=0.5, mask_momentum=False),
    "first moment": lambda: TopkState(0.2, select="exact", first_moment=0.5),
    # One bucket; of several, each has other entries in another order.
    "bucket": lambda: TopkState(0.2, select="bucket", dense_below=0),
    "dense": DenseOverlapState,
}
# Whose samples, buckets, blocks or random numbers go by memory.
ORDERED: dict[str, Callable[[], CompressionState]] = {
    "sampled": lambda: OkTopkState(0.2, momentum=0.5),
    "buckets": lambda: TopkState(0.2, select="bucket", dense_below=0),
    "blocks": lambda: BlockTopkState(0.2, block=16, dense_below=0),
    "quantized": lambda: QuantizedTopkState(0.2, dense_below=0),
}


class Weights(nn.Module):
    """Whose gradients are what the test says, whatever the weights are."""

    def __init__(self, shapes: list[tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(s)) for s in shapes])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


def drawn_gradients(step: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [torch.randn(shape, generator=generator) for shape in shapes]


def laid_out(tensor: Tensor, order: list[int], gaps: bool = False) -> Tensor:
    """A copy whose outermost dimension in memory is ``order[0]``, and so on."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    copy = tensor.permute(order).contiguous()
    if gaps:
        copy = torch.stack([copy, copy], -1)[..., 0]
    return copy.permute(inverse)


def expanded(tensor: Tensor) -> Tensor:
    """A copy with the strides that a clone of an expanded tensor has."""
    return torch.empty(1, *tensor.shape[1:]).expand(tensor.shape).clone().copy_(tensor)


def in_channels_last(tensor: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats.get(tensor.dim(), torch.contiguous_format))


def channels_last(model: nn.Module) -> None:
    model._apply(in_channels_last)


def convert(model: nn.Module, draw: random.Random) -> None:
    """Changes how parameters lie in memory, and gradients along with them, as Module.to() does."""
    kind = draw.choice(["channels_last", "contiguous", "any", "any", "gaps", "expanded"])
    orders = [draw.sample(range(dims), dims) for dims in range(6)]

    def change(tensor: Tensor) -> Tensor:
        if kind == "expanded":
            return expanded(tensor)
        if kind == "contiguous":
            return tensor.contiguous()
        if kind == "channels_last":
            return in_channels_last(tensor)
        return laid_out(tensor, orders[tensor.dim()], gaps=kind == "gaps")

    model._apply(change)


def make(
    state: CompressionState, model: nn.Module, native: bool, **arguments: Any
) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **arguments)
    if native:
        sparsecomm.register_comm_hook(ddp, state)
    else:
        ddp.register_comm_hook(state, HOOKS[type(state)])
    return ddp


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [weight.grad.clone() for weight in model.parameters()]  # type: ignore[union-attr]


def kept(state: CompressionState) -> list[Tensor]:
    """Residuals and moments, by parameter."""
    entry = checkpoint_of(state)
    return [tensor for key in ("residuals", "moments") for _, tensor in sorted(entry[key].items())]


def equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def conserved(step: int, before: list[Tensor], result: list[Tensor], after: list[Tensor]) -> bool:
    """Contract 1, by place."""
    size = dist.get_world_size()
    return all(
        torch.allclose(sum(gathered(g + b.view(g.shape) - a.view(g.shape))), size * r, atol=1e-5)
        for g, b, r, a in zip(drawn_gradients(step), before, result, after, strict=True)
    )


def drawn_arguments(draw: random.Random) -> dict[str, Any]:
    return {
        "gradient_as_bucket_view": draw.random() < 0.5,
        "find_unused_parameters": draw.random() < 0.3,
    }


# ---- hooks


def check_hooks(seed: int) -> None:
    draw = random.Random(seed)
    for name, kind in STATES.items():
        native, arguments = draw.random() < 0.5, drawn_arguments(draw)
        to_none, before = draw.random() < 0.5, draw.random() < 0.3
        states = kind(), kind()
        models = Weights(), Weights()
        if before:
            convert(models[1], draw)
        ddps = [
            make(state, model, native, **arguments)
            for state, model in zip(states, models, strict=True)
        ]
        said = (seed, name, native, arguments, to_none, before)
        for step in range(7):
            for ddp in ddps:
                ddp.zero_grad(set_to_none=to_none)
            if draw.random() < 0.5 or step == 0:
                convert(models[1], draw)
            for ddp in ddps:
                ddp(drawn_gradients(step)).backward()
            assert equal(gradients_of(models[1]), gradients_of(models[0])), (step, *said)
            if not isinstance(states[0], DenseOverlapState) and draw.random() < 0.5:
                if draw.random() < 0.5:
                    convert(models[1], draw)
                assert equal(kept(states[1]), kept(states[0])), (step, *said)


def check_orders(seed: int) -> None:
    """Nothing gets lost or displaced where the order in memory decides what is sent."""
    draw = random.Random(seed)
    for name, kind in ORDERED.items():
        native, arguments = draw.random() < 0.5, drawn_arguments(draw)
        state, model = kind(), Weights()
        ddp = make(state, model, native, **arguments)
        before = [torch.zeros(shape) for shape in SHAPES]
        for step in range(6):
            ddp.zero_grad()
            if draw.random() < 0.5 or step == 0:
                convert(model, draw)
            ddp(drawn_gradients(step)).backward()
            if state.compression.momentum == 0:
                after = [t for _, t in sorted(checkpoint_of(state)["residuals"].items())]
                assert conserved(step, before, gradients_of(model), after), (seed, name, step)
                before = after


def run(
    kind: Callable[[], CompressionState],
    native: bool,
    arguments: dict[str, Any],
    steps: range,
    order: int,
    saved: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], list[list[Tensor]]]:
    """Trains a model whose layout changes before step 3, and is set after it was wrapped."""
    state, model = kind(), Weights()
    ddp = make(state, model, native, **arguments)
    results = []
    if saved is not None:
        state.load_state_dict(saved)
    for step in steps:
        if step in (0, 3, steps[0]):
            convert(model, random.Random(order + (step >= 3)))
        ddp.zero_grad()
        ddp(drawn_gradients(step)).backward()
        results.append(gradients_of(model))
    return state.state_dict(), results


def check_resumed(seed: int) -> None:
    """Contract 8: bit for bit, though DDP's buckets may be of another layout again."""
    draw = random.Random(seed)
    for name, kind in (STATES | ORDERED).items():
        native, arguments = draw.random() < 0.5, drawn_arguments(draw)
        order, stop = draw.randrange(1 << 30), draw.randrange(1, 6)
        whole, expected = run(kind, native, arguments, range(7), order)
        saved, _ = run(kind, native, arguments, range(stop), order)
        after, results = run(kind, native, arguments, range(stop, 7), order, saved)
        said = (seed, name, native, arguments, stop)
        assert all(map(equal, results, expected[stop:])), said
        [one], [other] = whole.values(), after.values()
        for key in ("residuals", "moments"):
            assert one[key].keys() == other[key].keys()
            assert all(torch.equal(t, other[key][n]) for n, t in one[key].items()), said
        assert one["groups"] == other["groups"], said


def _check_many(check: Callable[[int], None], seeds: list[int]) -> None:
    for seed in seeds:
        check(seed)


@pytest.mark.parametrize("check", [check_hooks, check_orders, check_resumed])
def test_hooks(check: Callable[[int], None]) -> None:
    seeds = [random.randrange(1 << 30) for _ in range(2)]
    print(f"seeds {seeds}")
    run_ranks(2, _check_many, check, seeds, timeout=110)


def _first_steps(native: bool, view: bool, when: int) -> list[Any]:
    state, model = TopkState(density=0.25, select="exact"), Weights([(1, 2, 1, 2)])
    ddp = make(state, model, native, gradient_as_bucket_view=view)
    total, [gradient] = torch.zeros(1, 2, 1, 2), [torch.tensor([1.0, 2, 3, 4]).view(1, 2, 1, 2)]
    for step in range(4):
        if step == when:
            ddp.to(memory_format=torch.channels_last)
        ddp.zero_grad()
        ddp([gradient if step == 0 else 0 * gradient]).backward()
        total += gradients_of(model)[0]
    return total.flatten().tolist()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_entries_arrive_where_they_belong(native: bool, view: bool, when: int) -> None:
    results = run_ranks(2, _first_steps, native, view, when)
    assert results == [[1, 2, 3, 4]] * 2


# ---- optimizers


def check_optimizers(seed: int) -> None:
    draw = random.Random(seed)
    options = {"density": 0.2, "select": "exact", "dense_below": 0}
    for make_one in (
        lambda p: OkTopkSGD(p, lr=0.5, **options),
        lambda p: TopkSGD(p, lr=0.5, momentum=0.9, weight_decay=0.1, **options),
        lambda p: TopkSGD(p, lr=0.5, lr_in_accumulator=True, weight_decay=0.1, **options),
        lambda p: OkTopkAdam(p, betas=(0.0, 0.99), momentum=0.5, **options),
    ):
        models = Weights(), Weights()
        optimizers = [make_one(model.named_parameters()) for model in models]
        for step in range(7):
            early = draw.random() < 0.5
            if early:
                for optimizer in optimizers:
                    optimizer.zero_grad()
            if draw.random() < 0.5:
                convert(models[1], draw)
            if not early:
                for optimizer in optimizers:
                    optimizer.zero_grad()
            for model, optimizer in zip(models, optimizers, strict=True):
                model(drawn_gradients(step)).backward()
                optimizer.synchronize()
            if draw.random() < 0.3:
                convert(models[1], draw)
            for optimizer in optimizers:
                optimizer.step()
            parameters = [list(model.parameters()) for model in models]
            assert equal(*parameters), (seed, optimizers[0], step)
            exchanges = [optimizer.exchange for optimizer in optimizers]
            assert equal(kept(exchanges[1]), kept(exchanges[0])), (seed, optimizers[0], step)
            if draw.random() < 0.2:
                saved = optimizers[1].state_dict()
                convert(models[1], draw)
                optimizers[1] = make_one(models[1].named_parameters())
                optimizers[1].load_state_dict(saved)


def test_optimizers() -> None:
    seeds = [random.randrange(1 << 30) for _ in range(3)]
    print(f"seeds {seeds}")
    run_ranks(2, _check_many, check_optimizers, seeds, timeout=110)


# ---- checkpoints


def _check_formats() -> None:
    def make_one(native: bool) -> tuple[CompressionState, Weights, DistributedDataParallel]:
        state, model = TopkState(0.2, select="exact", momentum=0.5), Weights()
        return state, model, make(state, model, native)

    for native in (True, False):
        state, model, ddp = make_one(native)
        for step in range(3):
            ddp.zero_grad()
            ddp(drawn_gradients(step)).backward()
        [(place, entry)] = state.state_dict().items()
        assert entry["format"] == 4
        channels_last(model)
        assert equal(kept(state), [*entry["residuals"].values(), *entry["moments"].values()])
        expected = kept(state)
        ddp.zero_grad()
        ddp(drawn_gradients(3)).backward()
        results = gradients_of(model)

        # Of the new format the layouts do not matter, of the old one the parameter's has to be
        # known.
        old = {place: {**entry, "format": 3}}
        for saved, before, after in [
            ({place: entry}, True, False),
            ({place: entry}, False, True),
            (old, False, native),
        ]:
            state, model, ddp = make_one(native)
            if before:
                channels_last(model)
            state.load_state_dict(saved)
            again = checkpoint_of(state)
            assert again["format"] == (3 if saved is old and not native else 4)
            if after:
                channels_last(model)
            assert equal(kept(state), expected)
            ddp(drawn_gradients(3)).backward()
            assert equal(gradients_of(model), results)
            assert checkpoint_of(state)["format"] == 4

        state, model, ddp = make_one(native)
        channels_last(model)
        if native:
            with pytest.raises(ValueError, match=r"weights\.0 .*\[40, 1, 20, 4\].*contiguous"):
                state.load_state_dict(old)
            assert not any(map(torch.any, kept(state)))
        else:  # known with the first step
            state.load_state_dict(old)
            for _ in range(2):
                with pytest.raises(ValueError, match=r"weights\.\d .*strides.*contiguous"):
                    ddp(drawn_gradients(3)).backward()


def test_formats() -> None:
    run_ranks(2, _check_formats)


def _check_ranks_that_differ() -> str:
    state, model = OkTopkState(0.2, dense_below=0), Weights()
    ddp = make(state, model, native=True)
    ddp(drawn_gradients(0)).backward()
    if dist.get_rank() == 1:
        channels_last(model)
    with pytest.raises(RuntimeError) as raised:
        ddp(drawn_gradients(1)).backward()
    channels_last(model)
    ddp.zero_grad()
    ddp(drawn_gradients(1)).backward()
    return str(raised.value)


def test_ranks_convert_alike() -> None:
    texts = run_ranks(2, _check_ranks_that_differ)
    assert texts[0] == texts[1]
    assert "layout: row-major on rank 0 but weights.0 0 2 3 1" in texts[0]


# ---- parameters without entries


def _check_empty() -> None:
    for name, kind in (STATES | ORDERED).items():
        results = []
        for shapes in (SHAPES, [(8, 0), *SHAPES[:2], (0,), (0, 3), *SHAPES[2:], (2, 0, 2)]):
            state, model = kind(), Weights(shapes)
            ddp = make(state, model, native=True)
            for step in range(4):
                ddp.zero_grad()
                ddp(drawn_gradients(step, shapes)).backward()
            whole = [g for g in gradients_of(model) if g.numel()]
            results.append(whole + [t for t in kept(state) if t.numel()])
        assert equal(*results), name
        ddp = make(kind(), Weights([(8, 0), (0,)]), native=True)
        for _ in range(3):
            ddp(drawn_gradients(0, [(8, 0), (0,)])).backward()


def test_parameters_without_entries() -> None:
    run_ranks(2, _check_empty)

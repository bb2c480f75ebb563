"""Models that are converted, and gradients that are swapped, under an optimizer or a hook."""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from models import checkpoint_of, flat, gathered
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune

import sparsecomm
from sparsecomm import Compression
from sparsecomm.optim import DistributedOptimizer, OkTopkAdam, OkTopkSGD, TopkSGD

CHANNELS_LAST = torch.channels_last


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))


def random(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * step + dist.get_rank())


def forward(model: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(5, 3, 3, 3, generator=random(step))
    loss: Tensor = model(inputs.to(next(model.parameters()).dtype)).square().mean()
    return loss


def linear(model: nn.Module, step: int) -> Tensor:
    """Gives gradients that are the same, to the bit, however parameters lie in memory."""
    generator = random(step)
    losses = [(p * torch.randn(p.shape, generator=generator)).sum() for p in model.parameters()]
    return torch.stack(losses).sum()


def average(parameters: list[Tensor]) -> None:
    """What a dense exchange would do, in float64."""
    for parameter in parameters:
        if parameter.grad is not None:
            total = parameter.grad.double()
            dist.all_reduce(total)
            parameter.grad.copy_(total / dist.get_world_size())


# ---- what is done to a model


def of_parameters(change: Callable[[Tensor], None]) -> Callable[[nn.Module, Any], None]:
    def convert(model: nn.Module, _: Any) -> None:
        for parameter in model.parameters():
            change(parameter)

    return convert


def of_gradients(change: Callable[[Tensor, Tensor], None]) -> Callable[[nn.Module, Any], None]:
    def convert(model: nn.Module, _: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                change(parameter, parameter.grad)

    return convert


def of_model(change: Callable[[nn.Module], Any]) -> Callable[[nn.Module, Any], None]:
    return lambda model, _: change(model)


def of_optimizer(change: Callable[[Any], Any]) -> Callable[[nn.Module, Any], None]:
    return lambda _, optimizer: change(optimizer)


@contextmanager
def converting(overwrite: bool = False, swap: bool = False) -> Iterator[None]:
    """As torch does it one day."""
    torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        torch.__future__.set_swap_module_params_on_conversion(False)


def overwritten(change: Callable[[nn.Module], Any]) -> Callable[[nn.Module, Any], None]:
    def convert(model: nn.Module, _: Any) -> None:
        with converting(overwrite=True):
            change(model)

    return convert


def swapped(change: Callable[[nn.Module], Any]) -> Callable[[nn.Module, Any], None]:
    def convert(model: nn.Module, _: Any) -> None:
        with converting(swap=True):
            change(model)

    return convert


def saved(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def emptied(model: nn.Module) -> None:
    before = saved(model)
    try:
        model.to_empty(device="cpu")
    finally:
        model.load_state_dict(before)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()  # what was there is nobody's


def through_meta(model: nn.Module) -> None:
    before = saved(model)
    model.to("meta").to_empty(device="cpu").load_state_dict(before)


def transposed(tensor: Tensor) -> Tensor:
    """The same values in another order in memory."""
    order = list(range(tensor.dim()))[::-1]
    return tensor.permute(order).contiguous().permute(order)


def set_data(parameter: Tensor, data: Tensor) -> None:
    parameter.data = data


def set_grad(parameter: Tensor, gradient: Tensor | None) -> None:
    parameter.grad = gradient


def swap_grad(parameter: Tensor, gradient: Tensor) -> None:
    other = gradient.clone()
    parameter.grad = None  # else torch does not swap
    torch.utils.swap_tensors(gradient, other)
    parameter.grad = gradient


class Kind(NamedTuple):
    convert: Callable[[nn.Module, Any], None]
    # Where it is an error, and not the same as with torch's own optimizer.
    errors: Mapping[str, tuple[type[Exception], str]] = MappingProxyType({})
    # Whether values stay as they are, so that nothing at all may change.
    keeps: bool = False


# The moments, in the order of a step; the first one is before the first step.
FIRST = "before the first step"
KEPT = "between steps"
NONE = "after zero_grad(set_to_none=True)"
ZEROS = "after zero_grad(set_to_none=False)"
BEFORE_ZEROS = "before zero_grad(set_to_none=False)"
FORWARD = "between forward and backward"
BACKWARD = "between backward and step"
SYNCHRONIZED = "between synchronize and step"
MOMENTS = (FIRST, KEPT, NONE, ZEROS, BEFORE_ZEROS, FORWARD, BACKWARD, SYNCHRONIZED)

TRAVELS = (RuntimeError, r"gradient of .* is being exchanged.*synchronize\(\)")
TAKEN = (RuntimeError, r"grad of .* was replaced or taken away")
CONVERTED = (TypeError, r"\d\.\w+ is torch\.\w+ .* now, and was torch\.float32 .* make the opt")
REPLACED = (RuntimeError, r"\d\.\w+ was replaced in the model .* make the optimizer anew")
# Torch's own:
SWAP = (RuntimeError, "swap|use_count")
ON_META = (RuntimeError, "meta")
IN_PLACE = (RuntimeError, "modified by an inplace operation")

always = dict.fromkeys

KINDS: dict[str, Kind] = {
    "nothing": Kind(lambda *_: None, keeps=True),
    "half().float()": Kind(of_model(lambda m: m.half().float()), {BACKWARD: TRAVELS}),
    "bfloat16().float()": Kind(of_model(lambda m: m.bfloat16().float()), {BACKWARD: TRAVELS}),
    "double().float()": Kind(
        of_model(lambda m: m.double().float()), {BACKWARD: TRAVELS}, keeps=True
    ),
    "half()": Kind(of_model(lambda m: m.half()), {**always(MOMENTS, CONVERTED), BACKWARD: TRAVELS}),
    "channels last": Kind(
        of_model(lambda m: m.to(memory_format=CHANNELS_LAST)), {BACKWARD: TRAVELS}, keeps=True
    ),
    "channels last and back": Kind(
        of_model(
            lambda m: m.to(memory_format=CHANNELS_LAST).to(memory_format=torch.contiguous_format)
        ),
        {BACKWARD: TRAVELS},
        keeps=True,
    ),
    "to() where it is": Kind(of_model(lambda m: m.to("cpu", torch.float32)), keeps=True),
    "to_empty()": Kind(of_model(emptied), {FORWARD: IN_PLACE, BACKWARD: TRAVELS}),
    "to meta": Kind(
        of_model(lambda m: m.to("meta")), {**always(MOMENTS, ON_META), BACKWARD: TRAVELS}
    ),
    "to meta and back": Kind(
        of_model(through_meta), {**always(MOMENTS, REPLACED), BACKWARD: TRAVELS}
    ),
    "load_state_dict()": Kind(
        of_model(lambda m: m.load_state_dict(saved(m))), {FORWARD: IN_PLACE}, keeps=True
    ),
    "load_state_dict(assign=True)": Kind(
        of_model(lambda m: m.load_state_dict(saved(m), assign=True)), always(MOMENTS, REPLACED)
    ),
    "overwritten by double().float()": Kind(
        overwritten(lambda m: m.double().float()),
        {**always(MOMENTS, REPLACED), BACKWARD: TRAVELS},
    ),
    "overwritten by float()": Kind(
        overwritten(lambda m: m.float()), {**always(MOMENTS, REPLACED), BACKWARD: TRAVELS}
    ),
    "swapped by double().float()": Kind(
        swapped(lambda m: m.double().float()), always(MOMENTS, SWAP)
    ),
    "swap_tensors(p, other)": Kind(
        of_parameters(lambda p: torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone()))),
        always(MOMENTS, SWAP),
    ),
    "p.data =": Kind(of_parameters(lambda p: set_data(p, p.data.clone())), keeps=True),
    "p.data = transposed": Kind(
        of_parameters(lambda p: set_data(p, transposed(p.data))), keeps=True
    ),
    "p.data = half": Kind(
        of_parameters(lambda p: set_data(p, p.data.half())), always(MOMENTS, CONVERTED)
    ),
    "p.grad.data =": Kind(
        of_gradients(lambda _, g: set_data(g, g.data.clone())), {BACKWARD: TRAVELS}, keeps=True
    ),
    "p.grad.data = transposed": Kind(
        of_gradients(lambda _, g: set_data(g, transposed(g.data))), {BACKWARD: TRAVELS}, keeps=True
    ),
    "p.grad = a clone": Kind(
        of_gradients(lambda p, g: set_grad(p, g.clone())), {BACKWARD: TRAVELS}, keeps=True
    ),
    "p.grad = ones": Kind(
        of_parameters(lambda p: set_grad(p, torch.ones_like(p))), {BACKWARD: TAKEN}
    ),
    "p.grad = None": Kind(of_parameters(lambda p: set_grad(p, None)), {BACKWARD: TAKEN}),
    "swap_tensors(p.grad, other)": Kind(of_gradients(swap_grad), {BACKWARD: TRAVELS}, keeps=True),
    "model.zero_grad()": Kind(of_model(lambda m: m.zero_grad()), {BACKWARD: TAKEN}),
    "model.zero_grad(False)": Kind(
        of_model(lambda m: m.zero_grad(set_to_none=False)), {BACKWARD: TRAVELS}
    ),
    "optimizer.zero_grad()": Kind(of_optimizer(lambda o: o.zero_grad())),
    "optimizer.zero_grad(False)": Kind(of_optimizer(lambda o: o.zero_grad(set_to_none=False))),
}


def one_step(
    model: nn.Module,
    optimizer: Any,
    step: int,
    convert: Callable[[nn.Module, Any], None],
    moment: str,
    forward: Callable[[nn.Module, int], Tensor] = forward,
) -> None:
    """A step with the conversion in it; a plain optimizer's gradients are averaged by hand."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def at(*moments: str) -> None:
        if moment in moments:
            convert(model, optimizer)

    if moment in (NONE, ZEROS, FORWARD, BACKWARD, SYNCHRONIZED):
        optimizer.zero_grad(set_to_none=moment not in (ZEROS, FORWARD))
    at(FIRST, KEPT, NONE, ZEROS, BEFORE_ZEROS)
    if moment == BEFORE_ZEROS:
        optimizer.zero_grad(set_to_none=False)
    loss = forward(model, step)
    at(FORWARD)
    loss.backward()
    at(BACKWARD)
    if not isinstance(optimizer, DistributedOptimizer):
        average(parameters)
    elif moment == SYNCHRONIZED:
        optimizer.synchronize()
    at(SYNCHRONIZED)
    optimizer.step()


RATE = {"lr": 0.125}  # multiplied by it, nothing is rounded
# All of it is sent, by the transport that connects soonest.
ALL: dict[str, Any] = {"density": 1.0, "transport": "c10d"}
METHODS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "SGD": (
        lambda named: OkTopkSGD(named, **RATE, **ALL),
        lambda named: torch.optim.SGD(named, **RATE),
    ),
    "momentum": (
        lambda named: TopkSGD(named, **RATE, momentum=0.5, **ALL, bucket_cap_mb=1e-4),
        lambda named: torch.optim.SGD(named, **RATE, momentum=0.5),
    ),
    "lr_in_accumulator": (
        lambda named: OkTopkSGD(named, **RATE, **ALL, lr_in_accumulator=True),
        lambda named: torch.optim.SGD(named, **RATE),
    ),
    "Adam": (
        lambda named: OkTopkAdam(named, **RATE, **ALL),
        lambda named: torch.optim.Adam(named, **RATE),
    ),
    "RMSprop": (
        lambda named: DistributedOptimizer(
            torch.optim.RMSprop(named, **RATE),
            compression=Compression(density=1.0),
            transport="c10d",
        ),
        lambda named: torch.optim.RMSprop(named, **RATE),
    ),
}


def is_like(error: Exception, kind: type[Exception], text: str) -> bool:
    return isinstance(error, kind) and re.search(text, str(error)) is not None


def outcome(method: str, kind: Kind, moment: str) -> str:
    """Trains, converts once, and returns what is wrong with it; "" is right."""
    ours, torchs = METHODS[method]
    model, plain = make_model(), make_model()
    optimizer, expected = ours(model.named_parameters()), torchs(plain.named_parameters())
    before = [list(model.parameters()), list(plain.parameters())]
    converted = 0 if moment == FIRST else 1
    for step in range(4):
        now = moment if step == converted else ("" if moment == KEPT else NONE)
        convert = kind.convert if step == converted else KINDS["nothing"].convert
        try:
            one_step(model, optimizer, step, convert, now)
        except Exception as error:
            wanted = kind.errors.get(moment)
            if step < converted or wanted is None or not is_like(error, *wanted):
                return f"step {step}: {type(error).__name__}: {error}"
            replicas = gathered(flat(p.float() for p in before[0]))
            return "" if torch.equal(*replicas) else "the error came too late"
        one_step(plain, expected, step, convert, now)
        # Those the optimizer has, whatever the model has now.
        found, wanted_values = (flat(p.float() for p in one) for one in before)
        if not torch.equal(*gathered(found)):
            return f"step {step}: replicas differ"
        if not torch.equal(found, wanted_values):
            return f"step {step}: off by {(found - wanted_values).abs().max():g}"
    return f"no {kind.errors[moment][1]}" if moment in kind.errors else ""


def check_conversions(method: str, names: list[str]) -> None:
    gc.freeze()  # so that looking for modules is quick
    wrong = {}
    for name, moment in itertools.product(names, MOMENTS):
        if method == "lr_in_accumulator" and moment == KEPT:
            continue  # what is kept is no gradient
        if problem := outcome(method, KINDS[name], moment):
            wrong[f"{name}, {moment}"] = problem
    assert not wrong, "\n".join(f"{case}: {problem}" for case, problem in wrong.items())


# What the others do beyond SGD is torch's.
SOME = ["half().float()", "channels last", "p.grad.data =", "p.grad = a clone"]
PARTS = [
    *(("SGD", list(KINDS)[part::3]) for part in range(3)),
    *(
        pytest.param(method, SOME, marks=pytest.mark.slow)
        for method in METHODS
        if method not in ("SGD", "Adam")
    ),
    ("Adam", SOME),
]


@pytest.mark.parametrize(("method", "names"), PARTS)
def test_a_conversion_is_followed_or_refused(method: str, names: list[str]) -> None:
    run_ranks(2, check_conversions, method, names, timeout=110)


def trained(kind: Kind, moment: str) -> list[Tensor]:
    """Parameters and residuals after a few steps of little density, converted in each but one."""
    model = make_model()
    optimizer = OkTopkSGD(
        model.named_parameters(), **RATE, **{**ALL, "density": 0.2}, select="exact", dense_below=0
    )
    parameters = list(model.parameters())
    for step in range(5):
        one_step(model, optimizer, step, kind.convert, "" if step == 2 else moment, linear)
    residuals = checkpoint_of(optimizer.exchange)["residuals"]
    kept = [residuals[name].reshape(-1) for name, _ in model.named_parameters()]
    return [*(parameter.detach() for parameter in parameters), *kept]


def check_nothing_changes_at_low_density() -> None:
    gc.freeze()
    for moment in MOMENTS:
        wanted = trained(KINDS["nothing"], moment)
        for name, kind in KINDS.items():
            if not kind.keeps or moment in kind.errors:
                continue
            for found, value in zip(trained(kind, moment), wanted, strict=True):
                assert torch.equal(found, value), (name, moment)


def test_what_keeps_values_keeps_residuals_in_place() -> None:
    run_ranks(2, check_nothing_changes_at_low_density, timeout=110)


def check_a_step_goes_on_when_converted_back() -> None:
    plain, model = make_model(), make_model()
    expected = torch.optim.SGD(plain.parameters(), **RATE)
    optimizer = OkTopkSGD(model.named_parameters(), **RATE, **ALL)
    weight = model[3].weight  # type: ignore[index]
    for step in range(3):
        optimizer.zero_grad()
        forward(model, step).backward()
        before = weight.data
        weight.data = before.half()
        for _ in range(2):
            with pytest.raises(TypeError, match=CONVERTED[1]):
                optimizer.step()
        weight.data = before
        optimizer.step()
        one_step(plain, expected, step, KINDS["nothing"].convert, NONE)
        assert torch.equal(flat(model.parameters()), flat(plain.parameters()))
    assert optimizer.exchange.stats()["steps"] == 3


def test_a_step_goes_on_when_converted_back() -> None:
    run_ranks(2, check_a_step_goes_on_when_converted_back)


# ---- parameters that are no longer where they were


def check_modules_that_are_changed() -> None:
    """What trains nothing beside the optimizer is no mistake: the parameter counts as unused."""

    def frozen(model: Any) -> None:
        model[3].weight = nn.Parameter(torch.zeros(3, 16), requires_grad=False)

    def tied(model: Any) -> None:
        model[3].weight = model[0].weight

    def gone(model: Any) -> None:
        model[3] = nn.Flatten()

    def pruned(model: Any) -> None:
        prune.l1_unstructured(model[3], "weight", 0.5)

    def parametrized(model: Any) -> None:
        parametrize.register_parametrization(model[3], "weight", nn.Identity())

    for change in (frozen, tied, gone, pruned, parametrized):
        model: Any = make_model()
        optimizer = OkTopkSGD(model.named_parameters(), **RATE, **ALL)
        change(model)
        model[0](torch.ones(1, 3, 3, 3)).sum().backward()
        optimizer.step()
    # Tied from the start, and replaced in one place.
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    optimizer = OkTopkSGD(model.named_parameters(), **RATE, **ALL)
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    model[0].bias.sum().backward()
    optimizer.step()
    model[1].weight = model[0].weight
    model[0].bias.sum().backward()
    with pytest.raises(RuntimeError, match=r"0\.weight was replaced"):
        optimizer.step()


def test_a_parameter_that_has_no_successor_counts_as_unused() -> None:
    run_ranks(2, check_modules_that_are_changed)


# ---- replicas that drift apart


def check_drift() -> list[str]:
    messages = []
    rank = dist.get_rank()
    model = make_model()
    optimizer = OkTopkSGD(model.named_parameters(), **RATE, **ALL, compare_every=3)
    for step in range(4):
        optimizer.zero_grad()
        forward(model, step).backward()
        optimizer.step()
    optimizer.compare_parameters()
    drifted = model[3].bias  # type: ignore[index]
    kept = drifted.detach().clone()
    with torch.no_grad():
        drifted[1] += rank
    if rank == 0:
        optimizer.state_dict()  # waits for nobody
    with pytest.raises(RuntimeError, match="ranks disagree") as raised:
        optimizer.compare_parameters()
    messages.append(str(raised.value))
    optimizer.zero_grad()
    forward(model, 4).backward()
    optimizer.step()
    optimizer.zero_grad()
    forward(model, 5).backward()
    before = flat(model.parameters())
    with pytest.raises(RuntimeError, match="ranks disagree") as raised:
        optimizer.step()
    messages.append(str(raised.value))
    assert torch.equal(flat(model.parameters()), before)
    with torch.no_grad():
        drifted.copy_(kept)
        for parameter in model.parameters():
            dist.broadcast(parameter, 0)
    optimizer.step()  # with what had been exchanged
    optimizer.compare_parameters()
    with pytest.raises(RuntimeError, match="compare_every: 5 on rank 0 but 6 on rank 1"):
        OkTopkSGD(model.named_parameters(), compare_every=5 + rank, **ALL)
    return messages


def test_replicas_that_drift_apart_are_noticed() -> None:
    first, second = run_ranks(2, check_drift)
    assert first == second
    assert all("the values of 3.bias: " in message for message in first)


def check_drift_after_a_checkpoint() -> list[str]:
    """One rank saves, and waits for nobody; all ranks compare in the step after it."""
    rank = dist.get_rank()
    messages = []
    for saves in (0, 1):
        model = make_model()
        optimizer = OkTopkSGD(model.named_parameters(), **RATE, **ALL, bucket_cap_mb=0.005)
        for step in range(3):
            optimizer.zero_grad()
            forward(model, step).backward()
            optimizer.step()
            if step == 1 and rank == saves:
                optimizer.state_dict()  # the parameters agree, and training goes on
        with torch.no_grad():
            model[3].bias[1] += rank  # type: ignore[index]
        if rank == saves:
            optimizer.state_dict()
        optimizer.zero_grad()
        forward(model, 3).backward()
        before = flat(model.parameters())
        with pytest.raises(RuntimeError, match="ranks disagree") as raised:
            optimizer.step()
        messages.append(str(raised.value))
        assert torch.equal(flat(model.parameters()), before)
        optimizer.step()  # nothing more was asked for
    return messages


def test_replicas_that_drift_apart_are_noticed_after_a_checkpoint() -> None:
    first, second = run_ranks(2, check_drift_after_a_checkpoint)
    assert first == second
    assert all("the values of 3.bias: " in message for message in first)


# ---- under DistributedDataParallel


# A type that changed, and changed back, takes DDP's hooks from the parameter.
LOST_BY_DDP = {
    *("half().float()", "bfloat16().float()", "double().float()", "half()", "p.data = half"),
    *(name for name, kind in KINDS.items() if kind.errors.get(NONE) in (REPLACED, ON_META)),
}


def check_hooks(names: list[str]) -> None:
    for name in names:
        if "channels last" in name or "transposed" in name:
            continue  # torch 2.13's own DDP misplaces such gradients
        kind = KINDS[name]
        model, plain = make_model(), make_model()
        ddp = DistributedDataParallel(model)
        sparsecomm.register_comm_hook(ddp, sparsecomm.OkTopkState(**ALL))
        held = [list(model.parameters()), list(plain.parameters())]
        optimizer, expected = (torch.optim.SGD(parameters, **RATE) for parameters in held)
        problem = ""
        for step in range(3):
            try:
                optimizer.zero_grad()
                expected.zero_grad()
                if step == 1:
                    kind.convert(model, optimizer)
                forward(ddp, step).backward()
            except RuntimeError as error:
                problem = str(error)
                break
            if step == 1:
                kind.convert(plain, expected)
            forward(plain, step).backward()
            average(held[1])
            optimizer.step()
            expected.step()
            found, wanted = (flat(one) for one in held)
            assert torch.equal(*gathered(found)), name
            assert torch.equal(found, wanted), name
        if name in LOST_BY_DDP:
            assert "no longer reduces the gradient of 0.weight" in problem, name
        elif kind.errors.get(NONE) == SWAP:
            assert re.search(SWAP[1], problem), (name, problem)
        else:
            assert not problem, (name, problem)


@pytest.mark.parametrize("part", range(3))
def test_ddp_that_lost_its_parameters_raises(part: int) -> None:
    run_ranks(2, check_hooks, list(KINDS)[part::3], timeout=110)

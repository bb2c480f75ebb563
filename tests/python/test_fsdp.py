"""FSDP2 with replicas (HSDP): gradient shards exchanged sparsely between them."""

from __future__ import annotations

import gc
import io
import math
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import batch, checkpoint_of, make_model
from ranks import run_ranks
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import sparsecomm
import sparsecomm.fsdp
from sparsecomm import Compression, CompressionState, ThresholdSchedule
from sparsecomm.checkpoint import ReshardingLoadPlanner
from sparsecomm.fsdp.modules import reduced_dtype


def grid() -> DeviceMesh:
    shape = (2, dist.get_world_size() // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def shard(mesh: DeviceMesh, **options: Any) -> Any:
    """The model, with two layers for themselves and the others with the root.

    Over two ranks the last layer's three rows do not divide.
    """
    model = make_model()
    assert isinstance(model, nn.Sequential)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def start(mesh: DeviceMesh, **options: Any) -> tuple[Any, torch.optim.Optimizer, CompressionState]:
    model = shard(mesh["shard"])
    state = sparsecomm.fsdp.apply(model, Compression(**options), mesh["replicate"])
    return model, sgd(model), state


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def local(tensors: Iterable[Any]) -> torch.Tensor:
    return torch.cat([tensor.to_local().detach().reshape(-1) for tensor in tensors])


def gradients(model: nn.Module) -> torch.Tensor:
    return local(p.grad for p in model.parameters())


def replicas(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    everyone = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(everyone, tensor.contiguous(), group=mesh.get_group("replicate"))
    return torch.stack(everyone)


def residuals(model: nn.Module, state: CompressionState) -> torch.Tensor:
    """Without what pads shards that do not divide."""
    saved = checkpoint_of(state)["residuals"]
    return torch.cat(
        [saved[name][: p.to_local().numel()] for name, p in model.named_parameters()]  # type: ignore[operator]
    )


def check_density_one_equals_dense(mesh: DeviceMesh) -> None:
    """At density 1 it is FSDP's own hybrid sharding, bit for bit, and accumulates as that does."""
    for algorithm in ("oktopk", "dense_overlap"):
        plain = shard(mesh)
        hooked, _, state = start(mesh, algorithm=algorithm, density=1)
        for model in (plain, hooked):
            optimizer = sgd(model)
            train(model, optimizer, range(2))
            model.set_requires_gradient_sync(False)
            model(batch(10)).square().mean().backward()
            model.set_requires_gradient_sync(True)
            model(batch(11)).square().mean().backward()
            optimizer.step()
        assert torch.equal(local(hooked.parameters()), local(plain.parameters())), algorithm
        assert state.stats()["steps"] == 3


def check_momentum_over_several_passes(mesh: DeviceMesh) -> None:
    """The velocities are those of dense training, though every pass of a step is exchanged."""
    for clear_by_none in (True, False):
        plain = shard(mesh)
        hooked = shard(mesh["shard"])
        compression = Compression(density=1, momentum=0.9)
        sparsecomm.fsdp.apply(hooked, compression, mesh["replicate"])
        for model, momentum in ((plain, 0.9), (hooked, 0.0)):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
            for step in range(4):
                for part in range(2):
                    model(batch(10 * step + part)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=clear_by_none)
        found, expected = local(hooked.parameters()), local(plain.parameters())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def check_conservation(mesh: DeviceMesh) -> None:
    """Contracts 1 and 2: nothing is lost, and replicas have the same bits."""
    for dtype in (None, torch.bfloat16, torch.float16):
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        plain = shard(mesh["shard"], mp_policy=policy)
        model = shard(mesh["shard"], mp_policy=policy)
        state = sparsecomm.fsdp.apply(model, Compression(density=0.02), mesh["replicate"])
        carried = torch.zeros(())
        for step in range(3):
            for each in (plain, model):
                each.zero_grad()
                each(batch(step)).square().mean().backward()
            result = replicas(gradients(model), mesh)
            assert torch.equal(result[0], result[1])
            carried = carried + replicas(gradients(plain), mesh).mean(0) - result[0]
            # FSDP divides fp16 by half of the two shards before it reduces, and by the rest after.
            kept = replicas(residuals(model, state), mesh).mean(0)
            tolerance = 1e-6 if dtype is None else 1e-3
            torch.testing.assert_close(kept, carried, rtol=tolerance, atol=tolerance)
        assert {name for name, _ in model.named_parameters()} == set(
            checkpoint_of(state)["residuals"]
        )
        whole = sum(p.to_local().numel() for p in model.parameters() if p.dim() < 2)
        share = whole / sum(p.to_local().numel() for p in model.parameters())
        assert share < state.stats()["realised_density"] < share + 0.03


def check_training(mesh: DeviceMesh) -> None:
    """With 1% of the weights it gets as far as with all of them."""
    losses = []
    for model in (shard(mesh), start(mesh, density=0.01)[0]):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            optimizer.zero_grad()
            loss = (model(batch(0)) - 1).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        if len(losses) == 1:
            losses.append((shard(mesh)(batch(0)) - 1).square().mean().item())
    dense, before, sparse = losses
    assert dense < 0.2 * before, losses
    assert sparse < 0.25 * before, losses


def check_non_finite(mesh: DeviceMesh) -> None:
    """Contract 5, also where other modules' gradients have been exchanged already."""
    plain = shard(mesh["shard"])
    model, _, state = start(mesh, density=0.05)
    model(batch(0)).square().mean().backward()
    before = checkpoint_of(state)["residuals"]
    model.zero_grad()
    factor = math.inf if dist.get_rank() == 0 else 1.0
    # The first layer's gradients are the last to come.
    handle = model[0].register_forward_hook(
        lambda _, __, output: output.register_hook(lambda gradient: gradient * factor) and None
    )
    model(batch(1)).square().mean().backward()
    handle.remove()
    plain(batch(1)).square().mean().backward()
    after = checkpoint_of(state)["residuals"]
    for (name, parameter), (_, poisoned) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        gradient = parameter.grad.to_local().reshape(-1)
        assert poisoned.grad.to_local().isnan().all(), name
        if name.startswith("0."):
            assert torch.equal(after[name], before[name]), name
        else:
            expected = before[name][: gradient.numel()] + gradient
            assert torch.equal(after[name][: gradient.numel()], expected), name


def check_the_model_keeps_its_state(mesh: DeviceMesh) -> None:
    model = shard(mesh["shard"])
    sparsecomm.fsdp.apply(model, Compression(density=0.05), mesh["replicate"])
    gc.collect()
    train(model, sgd(model), range(2))


def check_skipped_and_unused(mesh: DeviceMesh) -> None:
    """A module may sit out a step; a part of one may not, unless FSDP fills it up."""

    class Part(nn.Sequential):
        def forward(self, x: torch.Tensor, layers: int = 2) -> torch.Tensor:
            for layer in list(self)[:layers]:
                x = layer(x)
            return x

    parts = nn.Sequential(*(Part(nn.Linear(40, 40), nn.Linear(40, 40)) for _ in range(2)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
            for part, count in zip(self.parts, layers, strict=True):
                x = part(x, count) if count else x
            return x

    model: Any = Model()
    for part in parts:
        fully_shard(part, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    state = sparsecomm.fsdp.apply(model, Compression(density=0.05), mesh["replicate"])
    model(batch(0), (2, 2)).square().mean().backward()
    result = model.parts[1][0].weight.grad.to_local().clone()
    model.zero_grad()
    model(batch(1), (2, 0)).square().mean().backward()
    assert model.parts[1][0].weight.grad is None
    model(batch(0), (2, 2)).square().mean().backward()
    assert result.any()
    assert state.stats()["steps"] == 3
    model.zero_grad()
    with pytest.raises(ValueError, match=r"parts\.1.*set_reduce_scatter_unused_params"):
        model(batch(2), (2, 1)).square().mean().backward()
    model.reset_iter_state()
    model.zero_grad()
    model.set_reduce_scatter_unused_params(True)
    model(batch(2), (2, 1)).square().mean().backward()
    assert state.stats()["steps"] == 4


def freeze(model: nn.Module, names: Iterable[str], frozen: bool = True) -> None:
    for name in names:
        model.get_parameter(name).requires_grad_(not frozen)


def check_unfreezing(mesh: DeviceMesh) -> None:
    """Density 1 is dense for what was frozen at ``apply`` too: all, whole modules or parts."""
    everything = [name for name, _ in make_model().named_parameters()]
    some = ["0.weight", "0.bias", "2.bias", "4.weight"]
    for late, algorithm in ((some, "oktopk"), (some, "dense_overlap"), (everything, "oktopk")):
        plain, hooked = shard(mesh), shard(mesh["shard"])
        freeze(plain, late)
        freeze(hooked, late)
        compression = Compression(algorithm=algorithm, density=1)
        sparsecomm.fsdp.apply(hooked, compression, mesh["replicate"])
        for model in (plain, hooked):
            optimizer = sgd(model)
            if late != everything:
                train(model, optimizer, range(2))
            freeze(model, late, False)
            train(model, optimizer, range(2, 4))
        assert torch.equal(local(hooked.parameters()), local(plain.parameters())), algorithm


def check_residuals_of_the_unfrozen(mesh: DeviceMesh) -> None:
    """They begin with zeros, beside those of what was trained before."""
    late = {"0.weight", "0.bias", "2.weight"}
    model, plain = shard(mesh["shard"]), shard(mesh["shard"])
    freeze(model, late)
    compression = Compression(density=0.05, densities={"2.weight": 0.5})
    state = sparsecomm.fsdp.apply(model, compression, mesh["replicate"])
    model(batch(0)).square().mean().backward()
    before = checkpoint_of(state)["residuals"]
    assert set(before) == {name for name, _ in model.named_parameters()} - late
    state.load_state_dict(state.state_dict())
    model.zero_grad()
    freeze(model, late, False)
    for each in (model, plain):
        each(batch(1)).square().mean().backward()
    after = checkpoint_of(state)["residuals"]
    for (name, p), (_, dense) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        gradient, size = dense.grad.to_local().reshape(-1), p.to_local().numel()
        came = gradient if name in late else gradient + before[name][:size]
        kept = replicas(came - after[name][:size], mesh).mean(0)
        torch.testing.assert_close(kept, p.grad.to_local().reshape(-1), rtol=1e-5, atol=1e-7)
    delivered = model[2].weight.grad.to_local() != 0
    assert 0.5 <= delivered.float().mean() < 1


def check_freezing(mesh: DeviceMesh) -> None:
    """A module may be frozen amid training, a part of one may not, whatever takes its place."""
    model, optimizer, state = start(mesh, density=0.05)
    train(model, optimizer, range(1))
    for frozen in (False, True, False):
        freeze(model, ["2.weight", "2.bias"], frozen)
        train(model, optimizer, range(1, 3))
        assert (model[2].weight.grad is None) == frozen
    assert state.stats()["steps"] == 7
    freeze(model, ["2.weight"])
    with pytest.raises(ValueError, match=r"last exchange: 2\.weight,.*2\.bias.*optimizer"):
        model(batch(3)).square().mean().backward()
    model = shard(mesh["shard"])
    freeze(model, ["6.weight"])
    sparsecomm.fsdp.apply(model, Compression(density=0.05), mesh["replicate"])
    model(batch(0)).square().mean().backward()
    freeze(model, ["6.weight"], False)
    freeze(model, ["4.weight"])
    with pytest.raises(ValueError, match=r"last exchange: 4\.weight,"):
        model(batch(1)).square().mean().backward()


def check_frozen_after_accumulating(mesh: DeviceMesh) -> None:
    """FSDP then reduces more entries than are trained."""
    model, _, _ = start(mesh)
    model.set_requires_gradient_sync(False)
    model(batch(0)).square().mean().backward()
    model.set_requires_gradient_sync(True)
    freeze(model, ["2.weight"])
    with pytest.raises(ValueError, match=r"1640 .*2\.bias, which have 40,.*more"):
        model(batch(1)).square().mean().backward()


def check_resuming(mesh: DeviceMesh, folder: Path) -> None:
    """Bit-identical in the middle of a threshold's period."""
    options = {"density": 0.05, "schedule": ThresholdSchedule("reused", 5, 3), "momentum": 0.9}

    def begin() -> tuple[Any, torch.optim.Optimizer, CompressionState]:
        model, _, state = start(mesh, **options)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), state

    model, optimizer, state = begin()
    train(model, optimizer, range(4))
    parameters = [p.to_local().clone() for p in model.parameters()]
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    dcp.save({"state": state}, checkpoint_id=folder)
    train(model, optimizer, range(4, 7))
    for distributed in (False, True):
        resumed, resumed_optimizer, resumed_state = begin()
        with torch.no_grad():
            for p, value in zip(resumed.parameters(), parameters, strict=True):
                p.to_local().copy_(value)
        if distributed:
            dcp.load({"state": resumed_state}, checkpoint_id=folder)
        else:
            file.seek(0)
            resumed_state.load_state_dict(torch.load(file, weights_only=True))
        train(resumed, resumed_optimizer, range(4, 7))
        assert torch.equal(local(resumed.parameters()), local(model.parameters()))
        expected, found = checkpoint_of(state), checkpoint_of(resumed_state)
        assert found["groups"] == expected["groups"]
        assert all(torch.equal(r, found["residuals"][k]) for k, r in expected["residuals"].items())
    [key] = state.state_dict()
    assert key == f"rank_{dist.get_rank() // 2}_of_2_shard_{dist.get_rank() % 2}_of_2"
    entry = state.state_dict()[key]
    with pytest.raises(ValueError, match="and neither rank_"):
        state.load_state_dict({key.replace("_of_2_shard", "_of_3_shard"): entry})


def check_mistakes(mesh: DeviceMesh) -> None:
    compression = Compression()
    apply, apply_reduce_scatter = sparsecomm.fsdp.apply, sparsecomm.fsdp.apply_reduce_scatter
    replicas = mesh["replicate"]
    with pytest.raises(TypeError, match="no module of this Sequential is an FSDPModule"):
        apply(make_model(), compression, replicas)
    model = shard(mesh["shard"])
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, not ProcessGroup"):
        apply(model, compression, replicas.get_group())
    with pytest.raises(ValueError, match="mesh has 2 dimensions"):
        apply(model, compression, mesh)
    with pytest.raises(TypeError, match="must be a Compression, not float"):
        apply(model, 0.1, replicas)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"clip_norm=1\.0 needs the gradients"):
        apply(model, Compression(clip_norm=1.0), replicas)
    with pytest.raises(ValueError, match="stall_limit=0:00:00 is not positive"):
        apply(model, compression, replicas, stall_limit=timedelta(0))
    with pytest.raises(ValueError, match="FSDP sums over the replicas itself"):
        apply(shard(mesh), compression, replicas)
    with torch.no_grad():
        model(batch(0))  # after which the root stays gathered
    with pytest.raises(RuntimeError, match=r"gathered.*reshard"):
        apply(model, compression, replicas)
    model.reshard()
    whole: Any = replicate(make_model(), mesh=replicas)
    for use in (lambda: apply(whole, compression, replicas), lambda: apply_reduce_scatter(whole)):
        with pytest.raises(ValueError, match=r"replicate\(\).*register_comm_hook"):
            use()
    apply(model, compression, replicas)
    with pytest.raises(RuntimeError, match="has an all-reduce hook already"):
        apply(model, compression, replicas)


def test_the_dtype_that_fsdp_reduces_in() -> None:
    """From what a parameter says: of torch 2.15 on, its group knows no policy."""
    half, full = torch.bfloat16, torch.float32
    for policy, expected in [
        (MixedPrecisionPolicy(), full),
        (MixedPrecisionPolicy(param_dtype=half), half),
        (MixedPrecisionPolicy(param_dtype=half, reduce_dtype=full), full),
    ]:
        parameter: Any = SimpleNamespace(mp_policy=policy, sharded_param=torch.zeros(1))
        assert reduced_dtype(parameter) == expected


def _check(folder: Path) -> None:
    mesh = grid()
    check_mistakes(mesh)
    check_density_one_equals_dense(mesh)
    check_momentum_over_several_passes(mesh)
    check_conservation(mesh)
    check_training(mesh)
    check_non_finite(mesh)
    check_the_model_keeps_its_state(mesh)
    check_skipped_and_unused(mesh)
    check_resuming(mesh, folder / "hsdp")
    check_sharded_without_replicas(mesh["shard"])
    check_sharded_non_finite(mesh["shard"])
    check_sharded_broken_off(mesh["shard"])
    check_sharded_passes_of_one_module(mesh["shard"])
    check_sharded_resuming(mesh, folder / "fsdp")
    check_sharded_mistakes(mesh)


def test_fsdp(tmp_path: Path) -> None:
    run_ranks(4, _check, tmp_path, timeout=110)


def _check_freezing() -> None:
    mesh = grid()
    check_unfreezing(mesh)
    check_residuals_of_the_unfrozen(mesh)
    check_freezing(mesh)
    check_frozen_after_accumulating(mesh)


def test_freezing() -> None:
    run_ranks(2, _check_freezing, timeout=110)


# ---- without replicas


def whole(model: Any, gradients: bool = True) -> dict[str, torch.Tensor]:
    return {
        name: (p.grad if gradients else p).full_tensor().detach().reshape(-1).clone()
        for name, p in model.named_parameters()
    }


def summed(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total


def check_sharded_without_replicas(mesh: DeviceMesh) -> None:
    """Density 1 is FSDP; at 5% nothing is lost (contract 1), and it learns."""
    plain, dense, sparse = (shard(mesh) for _ in range(3))
    sparsecomm.fsdp.apply_reduce_scatter(dense, 1)
    state = sparsecomm.fsdp.apply_reduce_scatter(sparse, 0.05)
    reference = make_model()
    carried = {name: torch.zeros(p.numel()) for name, p in reference.named_parameters()}
    for step in range(3):
        for model in (plain, dense, sparse, reference):
            model.zero_grad()
            model(batch(step)).square().mean().backward()
        expected, found, few = (whole(model) for model in (plain, dense, sparse))
        kept = checkpoint_of(state)["residuals"]
        for name, p in reference.named_parameters():
            torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-9)
            carried[name] += summed(p.grad.reshape(-1), mesh) - 2 * few[name]
            torch.testing.assert_close(summed(kept[name], mesh), carried[name], atol=1e-7, rtol=0)
            if p.dim() < 2:
                torch.testing.assert_close(few[name], expected[name], rtol=1e-6, atol=1e-9)
        weights = torch.cat([few[name] for name, p in reference.named_parameters() if p.dim() > 1])
        assert 0.04 < (weights != 0).float().mean() < 2 * 0.05
    losses = []
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        loss = (sparse(batch(0)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def check_sharded_non_finite(mesh: DeviceMesh) -> None:
    model, reference = shard(mesh), make_model()
    state = sparsecomm.fsdp.apply_reduce_scatter(model, 0.05)
    model(batch(0)).square().mean().backward()
    before = checkpoint_of(state)["residuals"]
    model.zero_grad()
    factor = math.inf if mesh.get_local_rank() == 0 else 1.0
    handle = model[0].register_forward_hook(
        lambda _, __, output: output.register_hook(lambda gradient: gradient * factor) and None
    )
    model(batch(1)).square().mean().backward()
    handle.remove()
    reference(batch(1)).square().mean().backward()
    after = checkpoint_of(state)["residuals"]
    for name, p in reference.named_parameters():
        assert whole(model)[name].isnan().all()
        if name.startswith("0."):
            assert torch.equal(after[name], before[name])
        else:
            torch.testing.assert_close(after[name], before[name] + p.grad.reshape(-1))
    # The step after it is as any other.
    model.zero_grad()
    model(batch(2)).square().mean().backward()
    assert all(gradient.isfinite().all() for gradient in whole(model).values())


class BrokenOffError(Exception):
    """Raised amid a backward pass."""


def break_off(model: Any, step: int, state: Any) -> None:
    """A backward pass that ends before the first layer's, when the next one has been exchanged.

    Meanwhile nothing can be saved or loaded.
    """
    saved = state.state_dict()
    found = []

    def give_up(_: torch.Tensor) -> None:
        for use in (state.state_dict, lambda: state.load_state_dict(saved)):
            with pytest.raises(ValueError, match="in the middle of a backward pass") as error:
                use()
            found.append(error.value)
        raise BrokenOffError

    handle = model[0].register_forward_hook(
        lambda _, __, output: output.register_hook(give_up) and None
    )
    with pytest.raises(BrokenOffError):
        model(batch(step)).square().mean().backward()
    handle.remove()
    assert len(found) == 2
    model.zero_grad()
    model.reset_iter_state()  # what is gathered


def check_sharded_broken_off(mesh: DeviceMesh) -> None:
    """What a broken pass delivered is in the residuals that are saved (contract 1)."""
    model, reference = shard(mesh), make_model()
    state = sparsecomm.fsdp.apply_reduce_scatter(model, 0.05)
    model(batch(0)).square().mean().backward()
    model.zero_grad()
    saved = state.state_dict()
    [before] = saved.values()
    break_off(model, 1, state)
    reference(batch(1)).square().mean().backward()
    after = checkpoint_of(state)["residuals"]
    for name, p in reference.named_parameters():
        came = p.grad.reshape(-1) if name.startswith("2.") else torch.zeros(p.numel())
        torch.testing.assert_close(after[name], before["residuals"][name] + came)
        assert name[0] != "2" or came.any(), "the pass ended before anything was exchanged"
    assert same_residuals(state, after), "taken back twice"

    # A state that is loaded after a broken pass owes it nothing.
    break_off(model, 2, state)
    state.load_state_dict(saved)
    assert same_residuals(state, before["residuals"])
    results = []
    for _ in range(2):
        state.load_state_dict(saved)
        model.zero_grad()
        model(batch(3)).square().mean().backward()
        results.append((whole(model), checkpoint_of(state)["residuals"]))
        break_off(model, 4, state)
    for one, other in zip(*results, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def check_sharded_passes_of_one_module(mesh: DeviceMesh) -> None:
    """Those that end well after a broken one keep what they delivered."""
    model, reference = shard(mesh), make_model()
    state = sparsecomm.fsdp.apply_reduce_scatter(model, 0.05)
    break_off(model, 0, state)
    came = {f"0.{name}": torch.zeros(p.numel()) for name, p in reference[0].named_parameters()}
    for step in (1, 2):
        for layer in (model[0], reference[0]):
            layer.zero_grad()
            layer(batch(step)).square().mean().backward()
        for name, p in reference[0].named_parameters():
            delivered = model[0].get_parameter(name).grad.full_tensor().reshape(-1)
            came[f"0.{name}"] += summed(p.grad.reshape(-1), mesh) - 2 * delivered
    kept = checkpoint_of(state)["residuals"]
    for name, expected in came.items():
        torch.testing.assert_close(summed(kept[name], mesh), expected, atol=1e-7, rtol=0)


def same_residuals(state: Any, expected: dict[str, torch.Tensor]) -> bool:
    found = checkpoint_of(state)["residuals"]
    return all(torch.equal(found[name], expected[name]) for name in expected)


def check_sharded_resuming(mesh: DeviceMesh, folder: Path) -> None:
    """On the same ranks bit-identical, and on another number of them without loss."""
    model = shard(mesh["shard"])
    state = sparsecomm.fsdp.apply_reduce_scatter(model, 0.05)
    train(model, sgd(model), range(3))
    before, kept = whole(model, gradients=False), checkpoint_of(state)["residuals"]
    mine = folder / str(mesh["replicate"].get_local_rank())
    group = mesh.get_group("shard")
    [key] = state.state_dict()
    first, _ = dist.get_process_group_ranks(group)
    assert key == f"rank_{dist.get_rank() - first}_of_2_from_rank_{first}"
    dcp.save({"state": state}, checkpoint_id=mine, process_group=group)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(3, 6))
    resumed = shard(mesh["shard"])
    other = sparsecomm.fsdp.apply_reduce_scatter(resumed, 0.05)
    dcp.load({"state": other}, checkpoint_id=mine, process_group=group)
    with torch.no_grad():
        for name, p in resumed.named_parameters():
            rows = before[name].reshape(p.shape).chunk(2)
            p.to_local().copy_(rows[mesh["shard"].get_local_rank()])
    train(resumed, torch.optim.SGD(resumed.parameters(), lr=0.1), range(3, 6))
    for name, value in whole(model, gradients=False).items():
        assert torch.equal(whole(resumed, gradients=False)[name], value), name

    # Four shards go on from two: what is to come is the sum over the number of ranks.
    four = init_device_mesh("cpu", (4,))
    every = shard(four)
    more = sparsecomm.fsdp.apply_reduce_scatter(every, 0.05)
    planner = ReshardingLoadPlanner()
    dcp.load({"state": more}, checkpoint_id=folder / "0", planner=planner)
    for name, residual in checkpoint_of(more)["residuals"].items():
        expected = summed(kept[name], mesh["shard"]) / 2
        dist.broadcast(expected, 0)
        assert torch.equal(residual, expected), name


def _check_sharded_freezing() -> None:
    """Of a part of a module it takes a new state, which goes on with the residuals."""
    mesh = init_device_mesh("cpu", (2,))
    for late, other in (("2.weight", None), ("6.weight", "4.weight")):
        model = shard(mesh)
        freeze(model, [late])
        state = sparsecomm.fsdp.apply_reduce_scatter(model, 0.05)
        train(model, sgd(model), range(2))
        freeze(model, [late], False)
        freeze(model, [other] if other else [])
        model.zero_grad()
        changed = rf"{other or ''}.*{late} is unfrozen now"
        with pytest.raises(ValueError, match=changed + ".*call apply_reduce_scatter"):
            model(batch(2)).square().mean().backward()

        model.zero_grad()  # of what is still gathered, which would be added to
        model.reset_iter_state()
        saved = state.state_dict()
        [own] = saved.values()
        own["residuals"][late] = torch.zeros(model.get_parameter(late).numel())
        own["residuals"].pop(other, None)
        before = own["residuals"]
        state = sparsecomm.fsdp.apply_reduce_scatter(model, 0.05)
        state.load_state_dict(saved)
        plain = shard(mesh)
        with torch.no_grad():
            for to, of in zip(plain.parameters(), model.parameters(), strict=True):
                to.to_local().copy_(of.to_local())
        for each in (model, plain):
            each.zero_grad()
            each(batch(2)).square().mean().backward()
        after = checkpoint_of(state)["residuals"]
        for (name, p), dense in zip(model.named_parameters(), plain.parameters(), strict=True):
            if name != other:
                came = dense.grad.full_tensor().reshape(-1)
                kept = summed(after[name] - before[name], mesh) / 2
                found = p.grad.full_tensor().reshape(-1)
                torch.testing.assert_close(found, came - kept, rtol=1e-5, atol=1e-7)

    # A module that is frozen as a whole is FSDP's alone, also if a former state had it.
    model, plain = shard(mesh), shard(mesh)
    sparsecomm.fsdp.apply_reduce_scatter(model, 0.05)
    freeze(model, ["0.weight", "0.bias"])
    sparsecomm.fsdp.apply_reduce_scatter(model, 0.05)
    freeze(model, ["0.weight", "0.bias"], False)
    for each in (model, plain):
        each(batch(0)).square().mean().backward()
    assert torch.equal(whole(model)["0.weight"], whole(plain)["0.weight"])
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="is frozen"):
        sparsecomm.fsdp.apply_reduce_scatter(model)


def test_sharded_freezing() -> None:
    run_ranks(2, _check_sharded_freezing, timeout=110)


def check_sharded_mistakes(mesh: DeviceMesh) -> None:
    apply = sparsecomm.fsdp.apply_reduce_scatter
    with pytest.raises(TypeError, match="no module of this Sequential is an FSDPModule"):
        apply(make_model())
    with pytest.raises(ValueError, match="density"):
        apply(shard(mesh["shard"]), 0.0)
    with pytest.raises(ValueError, match="dense_below=-1"):
        apply(shard(mesh["shard"]), dense_below=-1)
    with pytest.raises(ValueError, match="stall_limit=0:00:00 is not positive"):
        apply(shard(mesh["shard"]), stall_limit=timedelta(0))
    with pytest.raises(ValueError, match="FSDP sums over the replicas itself"):
        apply(shard(mesh))
    columns = shard(mesh["shard"], shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None)
    with pytest.raises(ValueError, match=r"0\.weight is placed as Shard\(dim=1\)|S\(1\)"):
        apply(columns)
    divided = shard(mesh["shard"])
    apply(divided)
    divided.set_gradient_divide_factor(3.0)
    with pytest.raises(ValueError, match="leave out set_gradient_divide_factor"):
        divided(batch(0)).square().mean().backward()

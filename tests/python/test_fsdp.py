"""FSDP2 with replicas (HSDP): gradient shards exchanged sparsely between them."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import batch, checkpoint_of, make_model
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sparsecomm
import sparsecomm.fsdp
from sparsecomm import Compression, CompressionState, ThresholdSchedule


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
        if name.startswith("0."):
            assert not poisoned.grad.to_local().isfinite().any(), name
            assert torch.equal(after[name], before[name]), name
        else:
            expected = before[name][: gradient.numel()] + gradient
            assert torch.equal(after[name][: gradient.numel()], expected), name


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
    apply = sparsecomm.fsdp.apply
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
    with pytest.raises(ValueError, match="FSDP sums over the replicas itself"):
        apply(shard(mesh), compression, replicas)
    apply(model, compression, replicas)
    with pytest.raises(RuntimeError, match="has an all-reduce hook already"):
        apply(model, compression, replicas)


def _check(folder: Path) -> None:
    mesh = grid()
    check_mistakes(mesh)
    check_density_one_equals_dense(mesh)
    check_conservation(mesh)
    check_training(mesh)
    check_non_finite(mesh)
    check_skipped_and_unused(mesh)
    check_resuming(mesh, folder)


def test_between_replicas(tmp_path: Path) -> None:
    run_ranks(4, _check, tmp_path, timeout=110)

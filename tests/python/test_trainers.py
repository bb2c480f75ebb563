"""The examples for accelerate and Lightning, beside the same trainers without sparsecomm."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import flat
from patience import PATIENCE
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import sparsecomm

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


def check_like_ddp(train: Any) -> None:
    """At density 1 the bits are DDP's; at 2% most digits are recognised too."""
    import digits

    plain, whole, sparse = (train(density) for density in (None, 1.0, 0.02))
    assert torch.equal(flat(plain.parameters()), flat(whole.parameters()))
    assert not torch.equal(flat(plain.parameters()), flat(sparse.parameters()))
    assert digits.accuracy(plain) > 0.8
    assert digits.accuracy(sparse) > 0.8


def _accelerate() -> None:
    import accelerate_digits

    os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")  # as torchrun does
    check_like_ddp(lambda density: accelerate_digits.train(3, density, cpu=True))


@needs("accelerate")
def test_accelerate() -> None:
    run_ranks(2, _accelerate, timeout=110)


def _alone() -> int:
    import accelerate_digits

    os.environ.update(LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="1")
    states = []

    def prepare(*arguments: Any, **options: Any) -> sparsecomm.CompressionState:
        states.append(original(*arguments, **options))
        return states[-1]

    original = sparsecomm.prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparsecomm, "prepare", prepare)
        accelerate_digits.train(1, 0.02, cpu=True)
    (state,) = states
    steps: int = state.stats()["steps"]
    return steps


@needs("accelerate")
def test_accelerate_exchanges_with_one_process_under_torchrun() -> None:
    assert run_ranks(1, _alone, timeout=110) == [1437 // 32]


@needs("accelerate")
def test_accelerate_says_that_one_process_alone_exchanges_nothing() -> None:
    program = EXAMPLES / "accelerate_digits.py"
    done = subprocess.run(
        [sys.executable, str(program), "--cpu", "--epochs", "1"],
        capture_output=True,
        text=True,
        timeout=110 * PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "one process" in done.stdout


@needs("accelerate")
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--nproc-per-node", "1")])
def test_the_page_saves_and_loads_with_one_process(
    tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    page = (EXAMPLES.parent / "docs" / "tutorials" / "trainers.md").read_text()
    (text,) = (part.split("```")[0] for part in page.split("```python\n")[1:])
    script = tmp_path / "program.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110 * PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    saved = {file.name for file in (tmp_path / "checkpoint").glob("residuals-*")}
    assert saved == ({"residuals-0.pt"} if launcher else set())


def _accumulate() -> None:
    import accelerate

    # With one process accelerate exchanges every pass of a step, with several the last one.
    size = str(dist.get_world_size())
    os.environ.update(LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="1")

    def train(momentum_in_state: bool, density: float) -> list[torch.Tensor]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = torch.nn.Linear(12, 9).double()
        momentum = 0.0 if momentum_in_state else 0.9
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
        model, optimizer = accelerator.prepare(model, optimizer)
        if not isinstance(model, DistributedDataParallel):
            model = DistributedDataParallel(model)
        if momentum_in_state:
            sparsecomm.register_comm_hook(model, sparsecomm.OkTopkState(density, momentum=0.9))
        weights, biases = model.module.parameters()
        found = []
        for step in range(60):
            inputs = torch.randn(4, 12, dtype=torch.float64)
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs + dist.get_rank()).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if step % 2:
                found += [weights.detach().clone(), biases.detach().clone()]
        return found

    plain = train(False, 1)
    torch.testing.assert_close(train(True, 1), plain, rtol=1e-11, atol=1e-12)
    # What is compressed comes later, and does not grow.
    sparse = train(True, 0.3)
    assert sparse[-2].norm() < 2 * plain[0].norm()


@needs("accelerate")
@pytest.mark.parametrize("size", [1, 2])
def test_accelerate_accumulates(size: int) -> None:
    run_ranks(size, _accumulate, timeout=110)


def _register_for_checkpointing(folder: Path) -> None:
    import accelerate

    os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(40, 40))
    state = sparsecomm.register_comm_hook(model)
    model(torch.randn(4, 40)).sum().backward()
    accelerator.register_for_checkpointing(state)
    with pytest.raises(ValueError, match=r"rank 0 alone.*state_dict\(\) on every rank"):
        accelerator.save_state(str(folder))
    # As an argument of DDP, which accelerate copies.
    handler = accelerate.DistributedDataParallelKwargs(comm_state_option={"state": state})
    with pytest.raises(TypeError, match=r"sparsecomm\.register_comm_hook\(model, state\)"):
        handler.to_dict()


class _Subclass(sparsecomm.OkTopkState):
    def state_dict(self) -> dict[str, Any]:
        return {key: dict(entry) for key, entry in super().state_dict().items()}


class _Several:
    """Registered by a program to have several states saved."""

    def __init__(self, *states: Any) -> None:
        self.states = states

    def state_dict(self) -> dict[int, Any]:
        return {number: state.state_dict() for number, state in enumerate(self.states)}

    def load_state_dict(self, state_dict: Any) -> None: ...


def _save_by_ways(folder: Path) -> None:
    import accelerate

    os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    torch.manual_seed(0)
    optimizer = sparsecomm.optim.OkTopkSGD(torch.nn.Linear(40, 40).parameters(), lr=0.1)
    subclass = _Subclass(0.1)
    ways = {
        "exchange": lambda a: a.register_for_checkpointing(optimizer.exchange),
        "subclass": lambda a: a.register_for_checkpointing(subclass),
        "several": lambda a: a.register_for_checkpointing(_Several(subclass)),
        "optimizer": lambda a: a.prepare(optimizer),
    }
    for way, register in ways.items():
        accelerator = accelerate.Accelerator(cpu=True)
        prepared = register(accelerator)
        with pytest.raises(ValueError, match=r"rank 0 alone.*state_dict\(\) on every rank"):
            accelerator.save_state(str(folder / way))
        if prepared is not None:
            assert prepared.state_dict()["sparsecomm"], "every rank may save what it asks for"
    assert subclass.state_dict()
    assert optimizer.exchange.state_dict()


@needs("accelerate")
def test_accelerate_does_not_save_it_by_another_way(tmp_path: Path) -> None:
    run_ranks(2, _save_by_ways, tmp_path)


@needs("accelerate")
def test_accelerate_does_not_save_what_cannot_be_loaded(tmp_path: Path) -> None:
    run_ranks(2, _register_for_checkpointing, tmp_path)


def _lightning(folder: Path) -> None:
    import lightning_digits

    # What torchrun sets, by which Lightning knows that it need not start processes.
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}

    def train(epochs: int, density: float | None, **options: Any) -> torch.nn.Module:
        return lightning_digits.train(epochs, density, 2, **quiet, **options)

    check_like_ddp(lambda density: train(3, density))
    # A checkpoint of Lightning's holds the residuals of all ranks.
    file = str(folder / "half.ckpt")
    train(1, 0.02, save=file)
    saved = torch.load(file, weights_only=True)["residuals"]
    assert list(saved) == ["rank_0_of_2", "rank_1_of_2"]
    resumed, never_stopped = train(2, 0.02, checkpoint=file), train(2, 0.02)
    assert torch.equal(flat(resumed.parameters()), flat(never_stopped.parameters()))
    dist.barrier()


@needs("pytorch_lightning")
def test_lightning(tmp_path: Path) -> None:
    run_ranks(2, _lightning, tmp_path, timeout=110)

"""The examples for accelerate and Lightning, beside the same trainers without sparsecomm."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import flat
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


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

"""The wire codecs: what `bench codecs` reports, and how real selections are encoded."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_vgg16
from common import training
from common.group import disconnect
from common.task import Batch

from sparsecomm import _C, build_info
from sparsecomm.cli import main
from sparsecomm.cli.codecs import DENSITIES, FRAME, SETS, make_set

DENSITY = 0.02
STEPS = 12


class Recording(training.Training):
    """Trains on one rank, where the exchanged gradient is what the rank has selected."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.selections: list[torch.Tensor] = []

    def train_step(self, batch: Batch) -> float:
        loss = super().train_step(batch)
        gradients = [parameter.grad for parameter in self.model.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
        self.selections.append(flat.nonzero().flatten())
        return loss


def bits_per_index(codec: str, indices: torch.Tensor, extent: int) -> float:
    """Of indices that survive the codec."""
    positions = indices.to(torch.uint32)
    out = torch.empty(5 * len(indices) + 64, dtype=torch.uint8)
    size = _C.encode_indices(codec, positions, 0, extent, out)
    assert size is not None
    decoded = torch.empty_like(positions)
    _C.decode_indices(codec, out[:size], 0, extent, decoded)
    assert torch.equal(decoded.view(torch.int32), positions.view(torch.int32))
    return 8 * size / len(indices)


def test_delta_takes_less_than_7_bits_on_selections_of_vgg16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    options = train_vgg16.parse_options(
        ["--hook", "topk_a", "--density", str(DENSITY), "--output", str(tmp_path)]
    )
    training.connect(options)
    try:
        run = Recording(options, train_vgg16.ImageTask)
        run.train_epoch(0, STEPS)
        selections = run.selections
        numel = sum(parameter.numel() for parameter in run.model.parameters())
        del run
    finally:
        disconnect()
    assert not dist.is_initialized()
    assert len(selections) == STEPS
    bits = [bits_per_index("delta", indices, numel) for indices in selections]
    densities = [len(indices) / numel for indices in selections]
    entropies = [math.log2(math.e / density) for density in densities]
    print(
        f"delta on VGG16: {min(bits):.2f} to {max(bits):.2f} bits per index, mean "
        f"{np.mean(bits):.2f}; log2(e / density) is {np.mean(entropies):.2f}"
    )
    # What the sampled threshold is for: within 10% in 99% of steps.
    assert sum(abs(density / DENSITY - 1) > 0.1 for density in densities) <= 1
    assert max(bits) <= 6.8
    assert all(b < entropy for b, entropy in zip(bits, entropies, strict=True))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("density", DENSITIES)
def test_delta_stays_near_the_entropy(name: str, density: float) -> None:
    indices, extent = make_set(name, density, 50_000, seed=3)
    assert len(indices) / extent == pytest.approx(density, rel=0.05)
    entropy = math.log2(math.e * extent / len(indices))
    bits = bits_per_index("delta", indices, extent)
    assert bits <= (1.03 * entropy if name == "random" else entropy)


def test_bench_codecs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "codecs.json"
    assert main(["bench", "codecs", "--count", "3000", "--iters", "2", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    rows = json.loads(file.read_text())
    assert {row["codec"] for row in rows["indices"]} == {FRAME, *build_info()["index_codecs"]}
    for name in SETS:
        of_set = [row for row in rows["indices"] if row["set"] == name]
        for density in {row["density"] for row in of_set}:
            best = min(
                row["bits"] for row in of_set if row["density"] == density and row["codec"] != FRAME
            )
            (frame,) = (
                row for row in of_set if row["density"] == density and row["codec"] == FRAME
            )
            assert frame["bits"] == best
    assert {row["codec"] for row in rows["values"]} == set(build_info()["value_codecs"])
    sizes = {row["codec"]: row["bits"] for row in rows["values"] if row["type"] == "float32"}
    assert sizes["raw"] == 32
    assert sizes["f16"] == sizes["bf16"] == 16
    assert sizes["qsgd4"] == pytest.approx(4 + 32 * 3 / 3000)
    for row in (*rows["indices"], *rows["values"]):
        assert all(value > 0 for value in row.values() if isinstance(value, float))
        assert row["codec"] in text


def test_a_codec_is_asked_for_by_its_name() -> None:
    with pytest.raises(ValueError, match="index codec 'zip' is unknown; choose one of smallest"):
        _C.encode_indices(
            "zip", torch.zeros(1, dtype=torch.uint32), 0, 1, torch.zeros(9, dtype=torch.uint8)
        )
    with pytest.raises(ValueError, match="value codec 'f12' is unknown; choose one of raw"):
        _C.round_values("f12", torch.zeros(1), 0, 0, 0)
    with pytest.raises(ValueError, match="strictly increasing"):
        _C.encode_indices(
            "delta",
            torch.tensor([3, 3], dtype=torch.uint32),
            0,
            9,
            torch.zeros(99, dtype=torch.uint8),
        )

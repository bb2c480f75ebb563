"""The examples under mpiexec; the other tests of examples start their ranks as torchrun does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from sparsecomm.cli.ping_pong import find_mpiexec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MPIEXEC = find_mpiexec()

pytestmark = pytest.mark.skipif(MPIEXEC is None, reason="no mpi4py or no mpiexec")

# A few steps each, and what else the task takes.
QUICK: dict[str, tuple[list[str], str | None]] = {
    "vgg16": (["--limit", "12", "--batch", "2"], None),
    "lstm": (["--limit", "24", "--batch", "2", "--beam", "2"], "soundfile"),
    "bert": (["--vocabulary", "100", "--batch", "2"], "tokenizers"),
    "linear": (["--features", "4096", "--limit", "400"], None),
}


def run(ranks: int, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(MPIEXEC), "-n", str(ranks), sys.executable, str(EXAMPLES / program), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110 * PATIENCE,
    )


@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=() if t == "linear" else pytest.mark.slow) for t in QUICK]
)
def test_ranks_of_mpi_train_together(task: str, tmp_path: Path) -> None:
    arguments, package = QUICK[task]
    if package is not None:
        pytest.importorskip(package)
    options = [*arguments, "--epochs", "1", "--launcher", "mpi"]
    if task == "bert":
        prose = tmp_path / "prose"
        prose.mkdir()
        for number in range(30):
            (prose / str(number)).write_text(f"The cat of house {number} sees the dog. " * 24)
        options += ["--data", f"text:{prose}", "--cache", str(tmp_path / "cache")]
    made = run(3, f"train_{task}.py", *options, "--output", str(tmp_path / "output"))
    assert made.returncode == 0, made.stderr
    summary = json.loads((tmp_path / "output" / "summary.json").read_text())
    if task == "linear":
        assert summary["ranks"] == 3
        assert summary["curves"]["sent_bytes"][0] > 0
        return
    assert summary["world_size"] == 3
    assert summary["complete"]
    assert 0 < summary["sent_bytes_per_iteration"] < 4 * summary["parameters"] / 15


def test_bad_options_are_refused_once_under_mpi() -> None:
    refused = run(2, "train_vgg16.py", "--epochs", "0")
    assert refused.returncode == 2
    assert refused.stderr.count("--epochs: 0 is below 1") == 1

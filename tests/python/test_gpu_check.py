"""scripts/gpu_check.sh where there is no GPU: each of its steps fails, and the next one runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.sh"
STEPS = ["environment", "memcheck", "counters"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("budget", "status"), [("60", {"1", "127"}), ("0", {"skipped"})])
def test_steps_that_fail_do_not_keep_others_from_running(
    tmp_path: Path, budget: str, status: set[str]
) -> None:
    result = subprocess.run(
        [SCRIPT, tmp_path, *STEPS],
        env={**os.environ, "SPARSECOMM_GPU_BUDGET": budget},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    rows = json.loads((tmp_path / "summary.json").read_text())
    assert [row["step"] for row in rows] == STEPS
    assert {row["status"] for row in rows} <= status
    assert [line.split()[0] for line in result.stdout.splitlines()] == STEPS

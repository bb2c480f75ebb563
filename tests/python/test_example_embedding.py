"""The example of embeddings: plain DDP over the backend with aggregators loses nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from patience import LONG

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "train_embedding.py"


def test_it_trains_as_over_gloo_and_sends_less() -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(PROGRAM), "--steps", "10", "--batch", "16", "--limit", "20000"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)
    assert run.returncode == 0, run.stderr
    rows = {
        words[0]: [float(word) for word in words[1:]]
        for words in map(str.split, run.stdout.splitlines())
        if words and words[0] in ("gloo", "sparsecomm")
    }
    plain, blocks = rows["gloo"], rows["sparsecomm"]
    assert 0 < blocks[0] < plain[0] / 2
    assert 0 < blocks[1] < plain[1] / 2
    assert blocks[3] == plain[3]  # the loss
    [apart] = re.findall(r"parameters differ by (\S+) at most", run.stdout)
    assert float(apart) < 1e-6

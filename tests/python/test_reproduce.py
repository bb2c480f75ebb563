"""The comparison of all methods: which runs are made, what is observed, and what is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import comparison
import observe
import reproduce
import train_vgg16
from common import training
from common.group import disconnect

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        disconnect()


def test_runs_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "assert sys.argv[1] != 'fail', 'as it was told'\n"
        "if os.environ['RANK'] == '0':\n"
        "    open(sys.argv[-1] + '/summary.json', 'x').write(sys.argv[1])\n"
    )
    runs = {
        name: reproduce.Run(tmp_path / name, [str(program), argument])
        for name, argument in (("good", "1"), ("bad", "fail"))
    }
    assert reproduce.make_all([*runs.values()]) == [runs["bad"]]
    assert "as it was told" in (tmp_path / "bad" / "log.txt").read_text()
    assert (tmp_path / "good" / "summary.json").read_text() == "1"

    assert reproduce.make_all([runs["good"]]) == []
    assert "1 runs, of which 1 are there" in capsys.readouterr().out
    assert not reproduce.Run(tmp_path / "good", [str(program), "2"]).is_done()


def test_a_run_that_takes_too_long_leaves_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "open(os.path.join(sys.argv[-1], os.environ['RANK']), 'w').write(str(os.getpid()))\n"
        "time.sleep(100)\n"
    )
    monkeypatch.setattr(reproduce, "LONGEST_RUN", 12)
    run = reproduce.Run(tmp_path / "run", [str(program)])
    assert reproduce.make_all([run]) == [run]
    for rank in range(reproduce.RANKS):
        process = int((tmp_path / "run" / str(rank)).read_text())
        assert not Path(f"/proc/{process}").exists()


def test_every_method_is_run_with_every_seed(tmp_path: Path) -> None:
    runs = reproduce.plan(tmp_path, [*reproduce.TASKS.values()], [*reproduce.METHODS], False, True)
    assert len({run.folder for run in runs}) == len(runs)
    on_hosts = [run for run in runs if run.on_hosts]
    observed = [run for run in runs if run.result != "summary.json"]
    pairs = len(reproduce.TASKS) * len(reproduce.METHODS)
    assert len(on_hosts) == pairs
    assert len(runs) - len(on_hosts) - len(observed) == 3 * pairs
    for run in runs:
        assert (ROOT / run.command[0]).is_file()


@pytest.mark.parametrize("select", ["threshold", "exact"])
def test_what_is_observed_is_what_the_hook_saw(tmp_path: Path, select: str) -> None:
    options = train_vgg16.parse_options(
        [
            *("--limit", "4", "--batch", "2", "--steps", "3", "--epochs", "2"),
            *("--select", select, "--output", str(tmp_path)),
        ]
    )
    training.connect(options)
    observe.Observed.every = 1
    observe.Observed(options, train_vgg16.ImageTask).run()
    first, *rows = json.loads((tmp_path / "observations.json").read_text())
    assert first["xi"] is None
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        weights = row["k"] / 0.02
        assert row["passing"] == pytest.approx(row["selected_density"] * weights, abs=2)
        assert row["threshold"] == pytest.approx(row["exact_threshold"], rel=0.2)
        if select == "exact":  # and alone: what is sent is the top k of all
            assert row["threshold"] == row["exact_threshold"]
            assert row["xi"] == 0
        else:
            assert 0 < row["xi"] < 1


def summary(curve: list[float], seconds: float) -> dict[str, Any]:
    parts = dict.fromkeys((*comparison.WAITING, "select_seconds"), seconds / 10)
    return {
        "task": "VGG16",
        "data": "digits",
        "parameters": 1000,
        "batch": 16,
        "world_size": 2,
        "quality": "test_accuracy",
        "higher_is_better": True,
        "test_accuracy": curve[-1],
        "epochs": len(curve),
        "steps": 10 * len(curve),
        "realised_density": 0.02,
        "iteration_seconds": seconds,
        "compute_seconds": seconds / 2,
        **parts,
        "sent_bytes_per_iteration": 4e6,
        "curves": {"test_accuracy": curve},
    }


def test_the_page_has_a_row_for_each_method(tmp_path: Path) -> None:
    task = comparison.Task("vgg16", (), ())
    curves = {"dense": [0.5, 0.8, 0.9], "oktopk": [0.6, 0.885, 0.89], "gtopk": [0.1, 0.1, 0.2]}
    for name, curve in curves.items():
        for run, seconds in (("seed-1", 0.5), ("seed-2", 0.5), ("1gbit", 2.0)):
            folder = tmp_path / "vgg16" / name / run
            folder.mkdir(parents=True)
            (folder / "summary.json").write_text(json.dumps(summary(curve, seconds)))
    row = {"asked_density": 0.02, "selected_density": 0.02, "result_density": 0.03}
    rows = [
        {**row, "step": 0, "threshold": 1.0, "exact_threshold": None, "xi": None},
        {**row, "step": 1, "threshold": 1.0, "exact_threshold": 1.1, "xi": 0.25},
    ]
    for name in reproduce.OBSERVED:
        folder = tmp_path / "vgg16" / "observed" / name
        folder.mkdir(parents=True)
        (folder / "observations.json").write_text(json.dumps(rows))

    results = comparison.Results.read(tmp_path, [task], [*curves], [*reproduce.OBSERVED], "1gbit")
    comparison.write_results(results, tmp_path / "results.md", "1gbit")
    page = (tmp_path / "results.md").read_text()
    # 0.5 + 0.95 (0.9 - 0.5) = 0.88 is reached after 3 and after 2 epochs of 10 steps of 2 s.
    assert "| s to 0.880 |" in page
    dense, oktopk, gtopk = [line for line in page.splitlines() if "2.000" in line]
    assert dense.startswith("| dense allreduce | 0.9000 (0.9000 to 0.9000) | 4.000 | 2.00 % |")
    assert [line.split("|")[-2].strip() for line in (dense, oktopk, gtopk)] == ["60", "40", "–"]
    assert "selections of 2 % make a result of\n3.00 %" in page
    for name in ("vgg16.png", "vgg16-observed.png"):
        assert (tmp_path / "results" / name).read_bytes().startswith(b"\x89PNG")

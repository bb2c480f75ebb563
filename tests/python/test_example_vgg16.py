"""The VGG16 example: a run that was stopped and resumed, its refusals, and the report."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import report
import train_vgg16
from common import prediction, training
from common.exchange import DENSE_HOOKS, HOOKS, SparseExchange, make_exchange
from common.task import count_parameters
from patience import LONG
from ranks import run_ranks
from vgg16 import model

import sparsecomm

# Six images in batches of two: three steps an epoch on one rank.
SMALL = ["--limit", "6", "--batch", "2", "--epochs", "2"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each run in this process starts alone, with one thread, and leaves no large files."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()
    for folder in list(tmp_path.rglob("checkpoints")):
        shutil.rmtree(folder)


def train(output: Path, *options: str) -> dict[str, Any]:
    assert train_vgg16.main([*SMALL, "--output", str(output), *options]) == 0
    return read(output)


def read(output: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return summary


def launch(arguments: list[str], ranks: int, port: int) -> list[subprocess.Popen[str]]:
    """Starts the ranks directly, so that no launcher kills those that another one leaves."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, train_vgg16.__file__, *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# The model and its schedule


def test_the_model_has_the_parameters_of_the_literature() -> None:
    vgg = model.VGG16()
    assert count_parameters(vgg) == model.PARAMETERS == 14_728_266
    assert vgg(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    rates = [train_vgg16.learning_rate(step, 10, 50, 0.5) for step in range(50)]
    assert rates[:10] == pytest.approx([0.05 * step for step in range(1, 11)])
    assert rates[10] == pytest.approx(0.5)
    assert rates[30] == pytest.approx(0.25)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.001


def test_the_warm_up_of_the_learning_rate_may_be_part_of_an_epoch() -> None:
    options = train_vgg16.parse_options(["--lr-warmup", "0.25", "--lr", "0.5", "--epochs", "2"])
    task = object.__new__(train_vgg16.ImageTask)
    task.lr, task.lr_warmup, task.epochs = options.lr, options.lr_warmup, options.epochs
    task.steps_per_epoch = 8
    assert [task.learning_rate(step) for step in range(3)] == [0.25, 0.5, 0.5]


# Whole runs


HOOKS_OF_RUNS = [pytest.param("ddp", marks=pytest.mark.slow), "oktopk"]


@pytest.mark.parametrize("hook", HOOKS_OF_RUNS)
def test_a_resumed_run_is_bit_identical(tmp_path: Path, hook: str) -> None:
    whole = train(tmp_path / "whole", "--hook", hook)
    assert whole["complete"]
    assert whole["steps"] == 6

    parts = ["--hook", hook, "--checkpoint-every", "1"]
    stopped = train(tmp_path / "parts", *parts, "--steps", "5")
    assert not stopped["complete"]
    assert stopped["steps"] == 5
    resumed = train(tmp_path / "parts", *parts, "--resume")

    measured = [name for name in whole if name.endswith("_seconds") or name.startswith("peak_")]
    for summary in (whole, resumed):
        assert summary["iteration_seconds"] > summary["exchange_seconds"] > 0
        assert summary["peak_memory_bytes"][0] > 4 * 4 * model.PARAMETERS
        for name in measured:
            del summary[name]
    assert resumed == whole


def train_and_resume(output: Path) -> None:
    for hook in ("ddp", "dense_overlap", "oktopk"):
        for folder, options in (
            ("whole", []),
            ("parts", ["--checkpoint-every", "1", "--steps", "3"]),
            ("parts", ["--checkpoint-every", "1", "--resume"]),
        ):
            if "--resume" in options:
                assert (output / hook / folder / "checkpoints" / "epoch-0001").is_dir()
            kept = ["--hook", hook, "--output", str(output / hook / folder)]
            chosen = train_vgg16.parse_options([*SMALL, "--limit", "12", *kept, *options])
            chosen.device, chosen.backend = "cpu", "gloo"
            training.Training(chosen, train_vgg16.ImageTask).run()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_three_ranks_resume_to_the_bit(tmp_path: Path) -> None:
    """From three on, what a sum rounds to depends on how DDP has laid out its buckets."""
    run_ranks(3, train_and_resume, tmp_path, timeout=200)
    for folder in tmp_path.iterdir():
        whole, parts = read(folder / "whole"), read(folder / "parts")
        assert whole["complete"]
        assert parts["complete"]
        assert parts["parameters_sha256"] == whole["parameters_sha256"], folder.name


def train_with_each_hook(output: Path) -> None:
    for hook in HOOKS:
        folder = ["--output", str(output / hook), "--checkpoint-every", str(int(hook == "oktopk"))]
        options = train_vgg16.parse_options([*SMALL, "--steps", "2", "--hook", hook, *folder])
        options.device, options.backend = "cpu", "gloo"
        training.Training(options, train_vgg16.ImageTask).run()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ranks_train_together_with_each_hook(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, train_with_each_hook, tmp_path, timeout=200)
    for hook in HOOKS:
        summary = read(tmp_path / hook)
        assert (summary["hook"], summary["world_size"], summary["steps"]) == (hook, 2, 2)
        assert not summary["complete"]
        assert summary["exchange_seconds"] > 0
        assert 0 < summary["compute_seconds"] < summary["iteration_seconds"]
        assert len(summary["peak_memory_bytes"]) == 2
        sent = summary["sent_bytes_per_iteration"] / (4 * model.PARAMETERS)
        if hook in DENSE_HOOKS:
            assert sent == summary["realised_density"] == 1
        elif hook == "dense_overlap":
            assert 1 < sent < 1.01
        elif hook == "gaussian_k":  # more than k pass where the tails are heavy
            assert 0.015 < summary["realised_density"] < 0.08
        elif hook != "auto":
            assert summary["realised_density"] == pytest.approx(0.02, rel=0.15)
            assert 0.002 < sent < 1 / 15
        assert list((tmp_path / hook).glob("tensorboard/events.out.tfevents.*"))
    read_back = read(tmp_path / "oktopk")
    saved = sorted(path.name for path in tmp_path.glob("*/checkpoints/**/*"))
    assert saved == ["epoch-0001", "rank-0.pt", "rank-1.pt", "shared.pt"]

    alone = train(tmp_path / "oktopk", "--hook", "oktopk", "--checkpoint-every", "1", "--resume")
    assert "epoch 1, which 2 ranks have saved" in capsys.readouterr().out
    assert (alone["world_size"], alone["steps"], alone["complete"]) == (1, 2 + 3, True)
    assert alone["curves"]["loss"][:1] == read_back["curves"]["loss"]


@pytest.mark.parametrize("hook", HOOKS_OF_RUNS)
def test_a_lost_rank_ends_the_others(tmp_path: Path, hook: str) -> None:
    arguments = ["--hook", hook, "--batch", "1", "--output", str(tmp_path)]
    survivor, victim = launch(arguments, ranks=2, port=free_port())
    assert survivor.stdout is not None
    assert "steps per epoch" in survivor.stdout.readline()  # both are connected
    victim.send_signal(signal.SIGKILL)
    _, errors = survivor.communicate(timeout=LONG)
    victim.communicate()
    assert survivor.returncode == 1
    assert "train_vgg16: rank 0: " in errors


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_restarts_from_the_last_checkpoint(tmp_path: Path) -> None:
    """One rank is killed in the midst of training, and the run ends as if none had been."""

    def start(*options: str) -> subprocess.Popen[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", "2", "--max-restarts", "1", train_vgg16.__file__, *SMALL]
        return subprocess.Popen(
            [*torchrun, "--epochs", "3", *options],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def process_of_rank(rank: int, launcher: int) -> int:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        [found] = [
            int(child)
            for child in children
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ]
        return found

    outputs = {}
    for name, checkpoints in (("whole", "0"), ("killed", "1")):
        run = start("--output", str(tmp_path / name), "--checkpoint-every", checkpoints)
        try:
            if name == "killed":
                first = tmp_path / name / "checkpoints" / "epoch-0001"
                while not first.exists():
                    assert run.poll() is None, run.communicate()[0]
                    time.sleep(0.01)
                os.kill(process_of_rank(1, run.pid), signal.SIGKILL)
            outputs[name], _ = run.communicate(timeout=2.3 * LONG)
        finally:
            run.send_signal(signal.SIGTERM)  # upon which it ends its ranks
            run.wait()
        assert run.returncode == 0, outputs[name]
    assert "going on after epoch" not in outputs["whole"]
    assert "going on after epoch" in outputs["killed"], outputs["killed"]
    whole, killed = read(tmp_path / "whole"), read(tmp_path / "killed")
    assert killed["complete"]
    assert killed["curves"] == whole["curves"]
    assert killed["parameters_sha256"] == whole["parameters_sha256"]


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (rank,) = launch(["--output", str(tmp_path)], ranks=1, port=port)
        _, errors = rank.communicate(timeout=LONG)
    assert rank.returncode == 2
    assert f"the ranks cannot meet at 127.0.0.1:{port}" in errors
    assert "--master-port" in errors


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--density", "0"], "--density: 0 is not a share above 0 and up to 1"),
        (["--density", "1.5"], "--density: 1.5 is not a share"),
        (["--density", "nan"], "--density: nan is not a share"),
        (["--density-warmup", "0.5,2"], "--density-warmup: 2 is not a share"),
        (["--hook", "magic"], "--hook: invalid choice: 'magic'"),
        (["--backend", "magic"], "--backend: invalid choice: 'magic'"),
        (["--epochs", "0"], "--epochs: 0 is below 1"),
        (["--lr", "inf"], "--lr: inf is not a number above 0"),
        (["--batch", "many"], "--batch: invalid positive value: 'many'"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        train_vgg16.main(options)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "message"),
    [("cifar10:nowhere", "nowhere: no such folder"), ("mnist", "unknown data 'mnist'")],
)
def test_bad_data_are_refused(spec: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_vgg16.main(["--data", spec]) == 2
    assert f"train_vgg16: rank 0: {message}" in capsys.readouterr().err


def test_checkpoints_are_not_mixed_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    one = ["--hook", "dense", "--limit", "2", "--batch", "2", "--output", str(tmp_path)]
    assert train_vgg16.main([*one, "--epochs", "1", "--checkpoint-every", "1"]) == 0

    assert train_vgg16.main([*one, "--epochs", "1"]) == 2
    assert "holds a checkpoint of epoch 1: go on from it with --resume" in capsys.readouterr().err

    # A restart goes on from what its own torchrun has left.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train_vgg16.main([*one, "--epochs", "1", "--checkpoint-every", "1"]) == 0
    assert "going on after epoch 1" in capsys.readouterr().out
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    assert train_vgg16.main([*one, "--epochs", "1", "--checkpoint-every", "1"]) == 2
    assert "holds a checkpoint of epoch 1: go on from it with --resume" in capsys.readouterr().err
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")

    assert train_vgg16.main([*one, "--epochs", "1", "--seed", "7", "--resume"]) == 2
    assert "of another run: seed was 1, is 7" in capsys.readouterr().err

    (tmp_path / "checkpoints" / "epoch-0001" / "rank-0.pt").write_bytes(b"damaged")
    assert train_vgg16.main([*one, "--epochs", "1", "--resume"]) == 2
    assert "rank-0.pt: not a readable checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "4", "--hook", "gtopk"], "--hook gtopk: "),
        (["--first-moment"], "--first-moment is for Adam, not SGD"),
        (["--python-hook", "--hook", "ddp"], "--python-hook is for sparsecomm's hooks, not ddp"),
        (["--device", "cuda"], "--device cuda: torch finds no GPU here; use --device cpu"),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert train_vgg16.main([*options, "--output", str(tmp_path)]) == 2
    assert f"train_vgg16: rank 0: {message}" in capsys.readouterr().err


def test_the_recipe_goes_with_prepare() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for recipe in ("recommended", "plain"):
        options = train_vgg16.parse_options([*SMALL, "--hook", "prepare", "--recipe", recipe])
        options.epochs = 5
        task = train_vgg16.ImageTask(options)
        exchange = make_exchange(options, task, task.optimizer())
        exchange.wrap(task)
        # Without the recipe that of prepare, in steps: three stages of a fifth of them.
        assert exchange.density_warmup(task.steps_per_epoch) == [0.25, 0.0625, 0.04]
        assert exchange.density_warmup(2 * task.steps_per_epoch) == [0.25, 0.04]


def test_the_options_reach_the_state() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    options = train_vgg16.parse_options(
        [
            *("--recipe", "recommended", "--lr", "0.5", "--bits", "8", "--warm-start", "3"),
            *("--threshold", "reused", "--threshold-period", "7", "--partition-period", "9"),
        ]
    )
    assert options.lr == 0.5  # what is given counts more than the recipe
    task = train_vgg16.ImageTask(options)
    task.clip_norm = 400.0
    optimizer = task.optimizer()
    exchange = make_exchange(options, task, optimizer)
    assert isinstance(exchange, SparseExchange)
    assert exchange.state.compression == sparsecomm.Compression(
        density=0.02,
        quantize=8,
        schedule=sparsecomm.ThresholdSchedule.oktopk(7, 9),
        warmup=sparsecomm.DensityWarmup(task.steps_per_epoch, (0.25, 0.0625, 0.04)),
        dense_steps=3,
        momentum=0.9,
        clip_norm=400.0,
        seed=1,
    )
    [group] = optimizer.param_groups
    assert group["momentum"] == 0
    assert group["weight_decay"] == pytest.approx(10 * train_vgg16.WEIGHT_DECAY)


# The report


def write_summary(
    folder: Path, hook: str, sent: float, changes: dict[str, object] | None = None
) -> Path:
    summary = {
        "hook": hook,
        "data": "digits",
        "world_size": 2,
        "batch": 16,
        "epochs": 3,
        "density": 1.0 if hook == "dense" else 0.02,
        "task": "VGG16",
        "quality": "test_accuracy",
        "parameters": 14_728_266,
        "steps": 135,
        "iteration_seconds": 0.25,
        "compute_seconds": 0.2,
        "select_seconds": 0.0 if hook == "dense" else 0.01,
        "exchange_seconds": 0.0625,
        "sent_bytes_per_iteration": sent,
        "realised_density": 0.0195,
        "curves": {
            "loss": [1.5, 0.5, 0.125],
            "test_accuracy": [0.5, 0.75, 0.9875],
            "cumulative_sent_bytes": [45 * sent, 90 * sent, 135 * sent],
        },
    }
    folder.mkdir()
    path = folder / "summary.json"
    path.write_text(json.dumps(summary | (changes or {})))
    return path


def test_the_report_compares_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sparse = write_summary(tmp_path / "sparse", "oktopk", 2e6)
    dense = write_summary(tmp_path / "dense", "dense", 50e6)
    picture = tmp_path / "pictures" / "vgg16.png"
    assert report.main([str(sparse), str(dense.parent), "--picture", str(picture)]) == 0
    heading, _, first, second, meaning, *_ = capsys.readouterr().out.splitlines()
    assert [part for part in heading.split("  ") if part] == [
        "method",
        *(" test accuracy", "s/iteration", "exchange ms", "MB sent/rank/iter"),
        *("realised density", "bytes vs dense"),
        *("predicted s, 4 hosts, 1gbit", "predicted s, 4 hosts, 10gbit"),
    ]
    *whole, dense_slow, dense_quick = first.split()
    assert " ".join(whole) == "dense allreduce 0.9875 0.250 62.5 50.000 1.95 % 1"
    *whole, sparse_slow, sparse_quick = second.split()
    assert " ".join(whole) == "Ok-Topk 2 % 0.9875 0.250 62.5 2.000 1.95 % 1/25.0"
    # 3/2 of 59 MB at 1 Gbit/s take 0.71 s, of which nothing is hidden.
    assert 0.9 < float(dense_slow) < 1.2
    assert 0.27 < float(dense_quick) < 0.45
    assert 0.23 < float(sparse_slow) < 0.35
    assert 0.21 < float(sparse_quick) < float(sparse_slow)
    said = f"takes {sparse_slow} s instead of {dense_slow} s, "
    assert said in meaning
    # All three are rounded.
    ratio = float(meaning.split(said)[1].split(" times")[0])
    assert ratio == pytest.approx(float(dense_slow) / float(sparse_slow), abs=0.07)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("hook", ["dense", "ddp"])
@pytest.mark.parametrize(("exchange", "iteration"), [(0.012, 0.26), (0.012, 0.251), (0.07, 0.26)])
def test_the_report_explains_a_shorter_exchange_in_a_longer_step(
    exchange: float, iteration: float, hook: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"exchange_seconds": exchange, "iteration_seconds": iteration}
    sparse = write_summary(tmp_path / "sparse", "oktopk", 2e6, changes)
    dense = write_summary(tmp_path / "dense", hook, 50e6)
    assert report.main([str(sparse), str(dense), "--picture", str(tmp_path / "x.png")]) == 0
    below = capsys.readouterr().out.splitlines()[4]
    operands = ("62.5", "12.0", "0.250", "0.260", "10.0 ms", "Ok-Topk 2 %")
    explained = all(operand in below for operand in operands)
    assert explained == ((exchange, iteration) == (0.012, 0.26)), below
    assert ("hides" in below) == (explained and hook == "ddp"), below


def test_the_backward_pass_hides_an_allreduce_by_buckets() -> None:
    def seconds(hook: str, link: str) -> float:
        found = prediction.step_seconds(prediction.Measured(hook, 14_728_266, 1.0, 0.3, 0.0), link)
        assert found is not None
        return found

    hidden = seconds("dense", "1gbit") - seconds("ddp", "1gbit")
    # Of a backward pass of 0.2 s nearly half is over when the second bucket is complete.
    assert hidden == pytest.approx(0.12, abs=0.05)
    # All but the last two buckets, which are complete when the pass has ended or nearly so.
    assert 0.3 < seconds("ddp", "10gbit") < 0.3 + 0.6 * (seconds("dense", "10gbit") - 0.3)


def test_prepare_is_predicted_with_its_momentum() -> None:
    def seconds(hook: str) -> float:
        measured = prediction.Measured(hook, 14_728_266, 0.02, 0.05, 0.03)
        found = prediction.step_seconds(measured, "1gbit")
        assert found is not None
        return found

    # Selecting takes what it took; beyond it the velocity of what was delivered is cleared.
    assert seconds("oktopk") < seconds("prepare") < seconds("oktopk") + 0.05


def test_the_report_needs_no_dense_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write_summary(tmp_path / name, "topk", 0) for name in ("a", "b")]
    assert report.main([*map(str, paths), "--picture", str(tmp_path / "x.png")]) == 0
    rows = capsys.readouterr().out.splitlines()[2:4]
    assert [row.split("%")[1].split()[0] for row in rows] == ["(a)", "(b)"]
    assert all(row.endswith(" -") for row in rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hook": None}, "'hook' is missing or of another kind: None"),
        ({"density": "high"}, "'density' is missing or of another kind: 'high'"),
        ({"quality": "error"}, "the curve 'error' does not have 3 points"),
        ({"epochs": True}, "'epochs' is missing or of another kind: True"),
        ({"epochs": 2}, "the curve 'loss' does not have 2 points"),
        ({"curves": {}}, "the curve 'loss' does not have 3 points"),
        ({"curves": {"loss": [1, 2, "x"]}}, "the curve 'loss' holds something else than numbers"),
    ],
)
def test_the_report_refuses_a_bad_summary(
    tmp_path: Path,
    changes: dict[str, object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = write_summary(tmp_path / "good", "dense", 50e6)
    bad = write_summary(tmp_path / "bad", "oktopk", 2e6, changes)
    assert report.main([str(good), str(bad)]) == 2
    assert f"report: {bad}: {message}" in capsys.readouterr().err


def test_the_report_refuses_what_is_no_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = str(write_summary(tmp_path / "good", "dense", 50e6))
    for content, message in ((b"{", "not a JSON file"), (b"[]", "holds a list"), (None, "no such")):
        path = tmp_path / "summary.json"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        assert report.main([good, str(path)]) == 2
        assert message in capsys.readouterr().err
    other = write_summary(tmp_path / "other", "oktopk", 2e6, {"data": "cifar10"})
    assert report.main([good, str(other)]) == 2
    assert "not of one data: cifar10, digits" in capsys.readouterr().err
    assert report.main([good]) == 2
    assert "two or more summaries make a comparison, found 1" in capsys.readouterr().err


def test_a_single_rank_sends_nothing(tmp_path: Path) -> None:
    summary = train(tmp_path, "--hook", "dense", "--steps", "1")
    assert summary["sent_bytes_per_iteration"] == 0
    assert math.isfinite(summary["curves"]["loss"][0])

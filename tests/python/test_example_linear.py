"""The example of linear models: its data, exact sums, both exchanges, and a run that was killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_linear
from common.errors import DataError
from linear import text
from linear.model import Weights, gradient, rounded, units
from linear.svmlight import Rows, Share
from patience import LONG
from ranks import run_ranks

SMALL = ["--features", "4096", "--limit", "400", "--batch", "16"]

GOOD = "+1 1:0.5 7:-2e-1 # comment\n\n# nothing else\n-1 2:3\n1 4:.25\n-1\n"


def read_all(share: Share) -> list[Rows]:
    return [rows for held_out in (False, True) for rows in share.blocks(3, held_out)]


# The data


def test_every_line_is_in_one_share_as_scikit_learn_reads_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    path = tmp_path / "data.svm"
    path.write_text(GOOD * 3)
    expected, labels = datasets.load_svmlight_file(str(path), n_features=8, zero_based=True)
    for ranks in (1, 2, 3, 7, 50):
        found: list[list[float]] = []
        for rank in range(ranks):
            for rows in read_all(Share(path, rank, ranks)):
                dense = torch.zeros(len(rows), 8)
                dense[rows.rows, rows.columns] = rows.values
                found += torch.cat([rows.labels[:, None], dense], 1).tolist()
        wanted = torch.cat([torch.tensor(labels)[:, None], torch.tensor(expected.toarray())], 1)
        assert sorted(found) == sorted(wanted.float().tolist())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + "yes 1:2\n", ":7: 'yes' is not a label"),
        (GOOD + "nan 1:2\n", ":7: 'nan' is not a label"),
        (GOOD + "3 1:2\n", ":7: the label is 3, expected 1, or for the other class -1 or 0"),
        (GOOD + "1 1:2 5\n" + GOOD, ":7: '5' is not index:value"),
        (GOOD + "1 1:2:3 5\n", ":7: '1:2:3' is not index:value"),
        (GOOD + "1 qid:2 5:1\n", ":7: 'qid:2' is not index:value"),
        (GOOD + "1 -1:2\n", ":7: '-1:2' is not index:value"),
        (GOOD + "1 1:inf\n", ":7: '1:inf' is not index:value with a finite"),
        (GOOD + "1 1:1e999\n", ":7: 1:inf is beyond 1e+15"),
        (GOOD + "1 2:1 2:1\n", ":7: index 2 follows 2: they must ascend"),
        (GOOD + "1 3:1 2:1\n", ":7: index 2 follows 3: they must ascend"),
        (GOOD + "1 4294967295:1\n", ":7: index 4294967295 is above 4294967292"),
        (GOOD + "1 5:0.", ": cut off: its last line has no end"),
        ("", ": the file is empty"),
        (None, ": No such file or directory"),
    ],
)
def test_malformed_data(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "data.svm"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError) as error:
        _ = [read_all(Share(path, rank, 3)) for rank in range(3)]
    assert str(error.value).startswith(f"{path}{message}")


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "data.svm"
    path.write_text(GOOD)
    share = Share(path, 0, 1)
    path.write_text(GOOD[:-2])
    with pytest.raises(DataError, match=r"data.svm:6: the file has become shorter than"):
        read_all(share)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "scd", "--loss", "hinge"], "--method scd takes a smooth loss"),
        (["--lr", "10", "--l2", "0.1"], "--lr 10 times --l2 0.1 is not below 1"),
        (["--l2", "-1"], "--l2: -1 is not a number from 0 on"),
        (["--features", "0"], "--features: 0 is below 1"),
        (["--features", "4294967294"], "--features 4294967294 is above 4294967293"),
        (["--data", "url"], "--data: 'url' is neither text nor svmlight:FILE"),
        (["--data", "svmlight:x", "--limit", "3"], "--limit is for --data text"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        train_linear.main(options)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_what_a_run_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "data.svm"
    common = ["--data", f"svmlight:{path}", "--output", str(tmp_path / "run")]
    for content, options, message in (
        (GOOD * 9, ["--features", "7"], "data.svm: index 7 needs more than --features 7"),
        ("1 3:1\n" * 20, [], "data.svm: of the examples to train on none has label -1"),
        (GOOD, [], "data.svm: too few examples to hold some out"),
        (GOOD * 9 + "1 :2\n", [], "data.svm:55: ':2' is not index:value"),
        (GOOD * 9, ["--algorithm", "oktopk"], "ValueError: "),
    ):
        path.write_text(content)
        assert train_linear.main([*common, *options]) != 0
        assert f"train_linear: rank 0: {message}" in (
            capsys.readouterr().err.replace(str(path), "data.svm")
        )


# The mathematics


@pytest.mark.parametrize("loss", ["logistic", "hinge"])
def test_gradients_are_those_of_autograd(loss: str) -> None:
    torch.manual_seed(1)
    dense = torch.randn(20, 30) * (torch.rand(20, 30) < 0.2)
    labels = torch.randn(20).sign()
    columns = dense.nonzero()[:, 1]
    rows = Rows((dense != 0).sum(1), columns, dense[dense != 0], labels)
    weights = Weights(30)
    weights.direction, weights.scale = torch.randn(30), 0.5
    own = gradient(weights, rows, loss)

    w = weights.dense().requires_grad_()
    margins = labels * (dense @ w)
    value = functional.softplus(-margins) if loss == "logistic" else functional.relu(1 - margins)
    value.sum().backward()  # type: ignore[no-untyped-call]
    found = torch.zeros(30).index_add_(0, own.columns, own.values)
    assert w.grad is not None
    torch.testing.assert_close(found, w.grad)
    assert own.loss == pytest.approx(value.sum().item(), rel=1e-6)


def test_shrinking_keeps_the_weights_within_float32() -> None:
    weights, reference = Weights(3), torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64)
    step = torch.tensor([1.0, 0.0, -3.0]).to_sparse()
    for _ in range(400):
        weights.shrink(0.9)
        weights.subtract(step, 0.25)
        reference = reference * 0.9 - step.to_dense().double() * 0.25
    torch.testing.assert_close(weights.dense().double(), reference, rtol=1e-5, atol=0)


def test_rounded_sums_do_not_depend_on_their_order() -> None:
    torch.manual_seed(2)
    ranks, examples, features = 9, 64, 500
    values = torch.randn(ranks, examples, features) * 10 ** torch.empty(features).uniform_(-6, 6)
    entries = torch.full((features,), ranks * examples, dtype=torch.int32)
    unit = units(entries, values.abs().amax((0, 1)), ranks * examples)
    every = torch.arange(features)
    parts = []
    for part in values.sum(1):
        columns, kept = rounded(every, part, unit)
        assert (kept - part[columns]).abs().le(unit[columns] / 2).all()
        parts.append(torch.zeros(features).index_add_(0, columns, kept))
    forwards, backwards = torch.zeros(features), torch.zeros(features)
    for part in parts:
        forwards += part
    for part in parts[::-1]:
        backwards += part
    assert torch.equal(forwards, backwards)
    assert torch.equal(forwards.double(), torch.stack(parts).double().sum(0))
    assert not torch.equal(values.sum(1).sum(0), values.sum(1).flip(0).cumsum(0)[-1])


# Whole runs


def summary_of(output: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return summary


def train_each(output: Path, runs: dict[str, list[str]]) -> None:
    for name, options in runs.items():
        arguments = train_linear.parse_options([*SMALL, "--output", str(output / name), *options])
        train_linear.Training(arguments).run()


RUNS = {
    f"{name}-{exchange}": [*options, "--exchange", exchange]
    for name, options in {
        "logistic": ["--epochs", "4"],
        "hinge": ["--loss", "hinge", "--l2", "1e-3"],
        "scd": ["--method", "scd", "--coordinates", "50", "--epochs", "2"],
    }.items()
    for exchange in ("sparse", "dense")
}


def test_sparse_and_dense_exchange_train_the_same_model(tmp_path: Path) -> None:
    run_ranks(3, train_each, tmp_path, RUNS, timeout=100)
    for name in ("logistic", "hinge", "scd"):
        sparse, dense = (summary_of(tmp_path / f"{name}-{e}") for e in ("sparse", "dense"))
        assert sparse["weights_sha256"] == dense["weights_sha256"]
        for curve in ("loss", "test_accuracy"):
            assert sparse["curves"][curve] == dense["curves"][curve]
        assert sparse["curves"]["loss"][-1] < 0.8 * sparse["curves"]["loss"][0]
        assert sparse["curves"]["test_accuracy"][-1] > sparse["majority"] + 0.1
        assert 0 < sparse["curves"]["sent_bytes"][0] < dense["curves"]["sent_bytes"][0]


def launch(arguments: list[str], port: int) -> list[subprocess.Popen[str]]:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, train_linear.__file__, *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("method", ["sgd", pytest.param("scd", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_to_the_same_curve(tmp_path: Path, method: str) -> None:
    options = ["--method", method, "--epochs", "8"]
    run_ranks(2, train_each, tmp_path, {"whole": options}, timeout=100)
    whole = summary_of(tmp_path / "whole")

    arguments = [*SMALL, *options, "--output", str(tmp_path / "parts"), "--checkpoint-every", "1"]
    ranks = launch(arguments, free_port())
    try:
        assert ranks[0].stdout is not None
        assert any(line.startswith("epoch 3/8") for line in ranks[0].stdout)
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        for rank in ranks:
            rank.communicate()
    assert not (tmp_path / "parts" / "summary.json").exists()

    run_ranks(
        2,
        train_each,
        tmp_path,
        {"parts": [*arguments, "--resume", "--exchange", "dense"]},
        timeout=1.5 * LONG,
    )
    resumed = summary_of(tmp_path / "parts")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    for curve in ("loss", "test_accuracy"):
        assert resumed["curves"][curve] == whole["curves"][curve]
        assert len(resumed["curves"][curve]) == 8
    saved = [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()]
    assert saved == ["epoch-0008"]


def test_the_text_is_hashed_as_it_says() -> None:
    vector = text.hashed("To be, or not to be: that is it", 1 << 20)
    assert vector is not None
    entries = [entry.split(":") for entry in vector.split()]
    columns = [int(column) for column, _ in entries]
    assert columns == sorted(set(columns))
    assert sum(float(value) ** 2 for _, value in entries) == pytest.approx(1, abs=1e-5)
    assert text.hashed("Too few words here", 1 << 20) is None


def test_the_benchmark_compares_in_one_run(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    file = tmp_path / "figures.json"
    run = subprocess.run(
        [
            *(sys.executable, str(root / "benchmarks" / "linear_models.py"), *SMALL),
            *("--ranks", "2", "--iters", "3", "--warmup", "1", "--json", str(file)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1.5 * LONG,
    )
    assert run.returncode == 0, run.stderr
    assert "the sums are the same bits" in run.stdout
    result = json.loads(file.read_text())
    assert result["world_size"] == 2
    assert result["dense"]["sent_bytes"] == 4 * 4096
    assert 0 < result["sparse"]["sent_bytes"] < 4 * 4096
    for name in ("sparse", "dense"):
        assert len(result[name]["iterations"]) == 3
        assert min(result[name]["iterations"]) > 0
    assert result["ratio"] == pytest.approx(
        sum(result["dense"]["iterations"]) / sum(result["sparse"]["iterations"])
    )

"""The language model's example: its model, text, and a run that goes on from a checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_lm
from common.errors import DataError
from common.training import Training
from curves import assert_same_curves
from lm.model import SIZES, Decoder
from lm.text import BETWEEN_DOCUMENTS, HELD_OUT, Text, read_text
from ranks import run_ranks


def test_a_byte_is_told_from_those_before_it() -> None:
    torch.manual_seed(1)
    model = Decoder(SIZES["tiny"]).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == 669_056
    text = torch.randint(256, (2, 40))
    other = text.clone()
    other[1, 25] = (other[1, 25] + 1) % 256
    scores, others = model(text), model(other)
    assert scores.shape == (2, 40, 256)
    torch.testing.assert_close(scores[0], others[0])
    torch.testing.assert_close(scores[1, :25], others[1, :25])
    changed = (scores[1, 25:] - others[1, 25:]).abs().amax(1)
    assert (changed > 1e-4).all()


@pytest.mark.parametrize("start", [0, 3, 6])
def test_examples_are_all_bytes_once(start: int) -> None:
    text = Text(torch.arange(50, dtype=torch.uint8), context=7)
    assert len(text) == 6
    inputs, following = text.take(torch.arange(6), start)
    assert inputs.flatten().tolist() == [*range(start, start + 42)]
    assert torch.equal(following, inputs + 1)


def write(folder: Path, documents: int) -> str:
    for number in range(documents):
        (folder / f"{number:02}").write_text(f"Document {number}.\n\nIts end.")
    return f"text:{folder}"


def test_documents_are_kept_apart(tmp_path: Path) -> None:
    spec = write(tmp_path, 25)
    parts = [bytes(part.data.tolist()) for part in read_text(spec, 8, None)]
    train, test = ([*part.split(BETWEEN_DOCUMENTS)] for part in parts)
    assert test == [f"Document {number}.\n\nIts end.".encode() for number in (9, 19)]
    assert len(train) == 23
    assert not {*train} & {*test}
    with pytest.raises(DataError, match=f"every {HELD_OUT}th document"):
        read_text(spec, 8, 9)  # of which none is held out


# Whole runs


@pytest.fixture
def sentences(tmp_path: Path) -> list[str]:
    """Options for a few documents of simple sentences."""
    folder = tmp_path / "documents"
    folder.mkdir()
    random = np.random.default_rng(6)
    for number in range(20):
        animals = random.choice(["cat", "dog", "bird", "fish"], (48, 2)).tolist()
        text = " ".join(f"The {one} sees the {two}." for one, two in animals)
        (folder / f"{number:02}").write_text(text)
    return ["--data", f"text:{folder}", "--batch", "8", "--device", "cpu", "--backend", "gloo"]


def train(output: Path, runs: dict[str, list[str]]) -> None:
    for name, options in runs.items():
        arguments = ["--output", str(output / name), *options]
        Training(train_lm.parse_options(arguments), train_lm.LanguageTask).run()


def test_a_resumed_run_learns_the_same(sentences: list[str], tmp_path: Path) -> None:
    options = [*sentences, "--hook", "prepare", "--recipe", "recommended", "--epochs", "3"]
    parts = [*options, "--checkpoint-every", "1"]
    run_ranks(2, train, tmp_path, {"whole": options, "parts": [*parts, "--steps", "25"]})
    found: dict[str, dict[str, Any]] = {}
    stopped = json.loads((tmp_path / "parts" / "summary.json").read_text())
    assert not stopped["complete"]
    run_ranks(2, train, tmp_path, {"parts": [*parts, "--resume"]})
    for name in ("whole", "parts"):
        found[name] = json.loads((tmp_path / name / "summary.json").read_text())
    whole, resumed = found["whole"], found["parts"]
    assert whole["complete"]
    assert whole["lr"] == 2 * SIZES["tiny"].learning_rate
    assert_same_curves(resumed["curves"], whole["curves"])
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]
    losses = whole["curves"]["test_loss"]
    assert losses[-1] < 0.7 * losses[0]
    sent = whole["curves"]["cumulative_sent_bytes"]
    assert sent[2] - sent[1] < 4 * whole["parameters"] * whole["steps"] / 3 / 20


def evaluate(options: list[str]) -> list[float]:
    torch.manual_seed(1)
    task = train_lm.LanguageTask(train_lm.parse_options(options))
    task.model.eval()
    with torch.no_grad():
        sums = task.evaluate()
    dist.all_reduce(sums)
    return [*sums.tolist(), task.metrics(sums)["test_loss"]]


def test_evaluation_does_not_depend_on_the_number_of_ranks(sentences: list[str]) -> None:
    [alone] = run_ranks(1, evaluate, sentences)
    for sums in run_ranks(3, evaluate, sentences):
        assert sums == pytest.approx(alone, rel=1e-5)
    assert alone[2] == pytest.approx(np.log(256), rel=0.1)  # guessing at random


def test_ranks_may_have_nothing_to_evaluate(tmp_path: Path) -> None:
    for number in range(HELD_OUT):
        (tmp_path / f"{number:02}").write_text("A cat. " * 20)
    [alone] = run_ranks(1, evaluate, ["--data", f"text:{tmp_path}"])
    assert alone[1] == 64  # one example
    for sums in run_ranks(2, evaluate, ["--data", f"text:{tmp_path}"]):
        assert sums == pytest.approx(alone, rel=1e-5)


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [train_lm.learning_rate(step, 100, 0.5) for step in range(100)]
    assert rates[:10] == pytest.approx([0.05 * step for step in range(1, 11)])
    assert rates[55] == pytest.approx(0.5 * (0.1 + 0.9 / 2))
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.05 < rates[-1] < 0.051
    assert train_lm.learning_rate(0, 1, 0.5) == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "huge"], "--size: invalid choice: 'huge'"),
        (["--data", "wikipedia"], "--data: 'wikipedia' is neither prose nor text:FOLDER"),
        (["--limit", "0"], "--limit: 0 is below 1"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        train_lm.main(options)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err

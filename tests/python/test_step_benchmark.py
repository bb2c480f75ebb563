"""The benchmark of whole steps: computing that uses no core, and records of every method."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import step as benchmark  # noqa: E402
from emulation import Clock, EmulatedModel, Gradients, shapes_of  # noqa: E402
from hosts import missing  # noqa: E402

from sparsecomm.overlap import BACKWARD_SHARE  # noqa: E402

RESULTS = BENCHMARKS / "results" / "step-1gbit.json"
METHODS = ("ddp", "bf16", "powersgd", "oktopk", "topk", "prepare", "auto")
NUMEL = 400_000
DENSITY = 0.02
SECONDS = 0.12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """The records of one short run, between hosts where they can be made, and what it printed."""
    file = tmp_path_factory.mktemp("step") / "steps.json"
    command = [
        *(sys.executable, str(BENCHMARKS / "step.py"), "--json", str(file), "--hosts", "2"),
        *("--numel", str(NUMEL), "--compute-ms", "3,6", "--method", ",".join(METHODS)),
        *("--rounds", "1", "--block", "2", "--density", str(DENSITY)),
        *(() if missing() else ("--link", "10gbit")),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


def model_of(shapes: list[tuple[int, ...]], seconds: float = SECONDS) -> EmulatedModel:
    gradients = Gradients(sum(torch.Size(shape).numel() for shape in shapes), rank=0)
    gradients.advance()
    return EmulatedModel(shapes, gradients, seconds)


def test_shapes_are_those_of_vgg16_or_of_equal_matrices() -> None:
    shapes = shapes_of(14_728_266)
    assert sum(torch.Size(shape).numel() for shape in shapes) == 14_728_266
    assert shapes[0] == (64, 3, 3, 3)
    assert shapes[-2:] == [(10, 512), (10,)]
    assert shapes_of(1607) == [(10, 10)] * 16 + [(7,)]
    assert shapes_of(1600) == [(10, 10)] * 16
    with pytest.raises(ValueError, match="15 parameters are fewer than"):
        shapes_of(15)


def test_computing_takes_what_was_asked_for_and_no_core() -> None:
    model = model_of([(40, 40)] * 30)
    for _ in range(2):
        start, used = time.perf_counter(), time.process_time()
        torch.autograd.backward(model(torch.zeros(())))
        used = time.process_time() - used
        assert time.perf_counter() - start >= SECONDS
        assert model.clock.asked == pytest.approx(SECONDS)
        assert model.clock.passed >= SECONDS
        assert used < SECONDS / 3


def test_what_is_late_shortens_the_next_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 7.0
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds + 0.25

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock()
    clock.compute(1.0)
    now += 0.5  # DDP's work
    clock.compute(1.0)
    clock.compute(0.125)  # less than the last sleep was late by
    clock.compute(1.0)
    assert slept == [1.0, 0.25, 0.875]
    assert (clock.asked, clock.passed) == (3.125, 3.375)
    clock.reset()
    clock.compute(1.0)
    assert slept[-1] == 1.0


def test_gradients_become_ready_one_after_another() -> None:
    shapes = [(10, 10), (10, 30), (30, 20), (7,)]
    model = model_of(shapes)
    ready: list[tuple[int, float]] = []
    for index, layer in enumerate(model.layers):

        def note(_: nn.Parameter, index: int = index) -> None:
            ready.append((index, time.perf_counter()))

        layer.register_post_accumulate_grad_hook(note)
    start = time.perf_counter()
    torch.autograd.backward(model(torch.zeros(())))
    assert [index for index, _ in ready] == [3, 2, 1, 0]
    numels = [layer.numel() for layer in model.layers]
    for index, moment in ready:
        share = sum(numels[index:]) / sum(numels)
        assert moment - start >= SECONDS * (1 - BACKWARD_SHARE + BACKWARD_SHARE * share)


def test_the_gradient_is_handed_over_without_a_copy() -> None:
    gradients = Gradients(400, rank=0)
    gradients.advance()
    model = EmulatedModel([(10, 10), (300,)], gradients, 1e-3)
    torch.autograd.backward(model(torch.zeros(())))
    grads = [layer.grad for layer in model.layers]
    assert all(grad is not None for grad in grads)
    assert torch.equal(torch.cat([grad.flatten() for grad in grads]), gradients.current)
    assert grads[0].data_ptr() == gradients.current.data_ptr()
    gradients.advance()
    assert torch.equal(grads[0].flatten(), gradients.current[:100])


def test_gradients_change_and_have_heavy_tails() -> None:
    first, other = Gradients(100_000, rank=0), Gradients(100_000, rank=1)
    for gradients in (first, other):
        gradients.advance()
    before = first.current.clone()
    first.advance()
    for different in (first.current, other.current):
        assert (before == different).float().mean() < 0.01
    squares = before.square().sort(descending=True).values
    # The largest hundredth of normal entries would hold 0.08 of the sum.
    assert squares[:1000].sum() / squares.sum() > 0.2
    # Large entries tend to be at the same places on all ranks.
    assert before.abs().log().dot(other.current.abs().log()) > 0
    largest = [set(each.abs().topk(1000).indices.tolist()) for each in (before, other.current)]
    assert len(largest[0] & largest[1]) > 5 * 1000 * 1000 / 100_000


def test_records_are_complete(run: tuple[list[dict[str, Any]], str]) -> None:
    records, printed = run
    assert [(record["compute_ms"], record["method"]) for record in records] == [
        (compute_ms, method) for compute_ms in (3, 6) for method in METHODS
    ]
    for record in records:
        assert (record["hosts"], record["numel"], record["steps"]) == (2, NUMEL, 2)
        assert record["latency_ms"] >= 0
        assert record["computed_ms"] >= record["compute_ms"]
        step = record["step_us"]
        assert 1e3 * record["compute_ms"] <= step["min"] <= step["median"] <= step["max"]
        known = record["method"] not in ("bf16", "powersgd")
        assert (record["explained_us"] is not None) == known
        selects = known and record["method"] != "ddp"
        assert record["density"] == (DENSITY if selects else None)
        assert (record["algorithm"] is not None) == selects
        assert (record["trial_steps"] >= benchmark.SETTLED) == (record["method"] == "auto")
        if record["link"] is None:
            # There is no interface of its own, and no rate.
            assert record["sent_bytes"] is record["predicted_us"] is None
    assert [record["algorithm"] for record in records[3:6]] == ["oktopk", "topk_a", "oktopk"]
    for part in (records[:7], records[7:]):
        explained = {record["method"]: record["explained_us"] for record in part}
        assert explained["prepare"] > explained["oktopk"]  # it has a momentum
    assert printed.count("auto is within 3 % of the best") == 2


@pytest.mark.lab
def test_sparse_methods_send_less(run: tuple[list[dict[str, Any]], str]) -> None:
    if reason := missing():
        pytest.skip(reason)
    records, _ = run
    for part in (records[:7], records[7:]):
        sent = {record["method"]: record["sent_bytes"] for record in part}
        # Two ranks send half of the sum each, then the other half; with headers.
        assert 4 * NUMEL <= sent["ddp"] < 1.1 * 4 * NUMEL
        assert 2 * NUMEL <= sent["bf16"] < 1.1 * 2 * NUMEL
        for method in ("powersgd", "oktopk", "topk", "prepare"):
            assert 0 < sent[method] < sent["ddp"] / 8
        predicted = {record["method"]: record["predicted_us"] for record in part}
        assert predicted["bf16"] is predicted["powersgd"] is None
        compute_us = 1e3 * part[0]["compute_ms"]
        for method in ("ddp", "oktopk", "topk", "prepare"):
            assert predicted[method] > compute_us


def record_of(method: str, median_us: float, predicted_us: float | None) -> benchmark.Record:
    return benchmark.Record(
        method=method,
        hosts=4,
        link="1gbit",
        latency_ms=0.1,
        compute_ms=50.0,
        computed_ms=50.1,
        numel=1000,
        density=None,
        steps=3,
        trial_steps=0,
        algorithm=None,
        step_us=benchmark.Spread(median_us - 1, median_us, median_us + 1),
        sent_bytes=1e6,
        select_us=None,
        exchange_us=None,
        apply_us=None,
        predicted_us=predicted_us,
        explained_us=None,
    )


@pytest.mark.parametrize(
    ("predicted", "auto", "expected"),
    [
        (
            1140.0,
            720.0,
            ["ddp is off by the most, +14.0 %: met", "oktopk: it takes 2.9 % more: met"],
        ),
        (
            860.0,
            700.0,
            ["ddp is off by the most, -14.0 %: met", "oktopk: it takes 0.0 % more: met"],
        ),
        (
            1160.0,
            722.0,
            ["ddp is off by the most, +16.0 %: MISSED", "oktopk: it takes 3.1 % more: MISSED"],
        ),
    ],
)
def test_goals_are_checked(predicted: float, auto: float, expected: list[str]) -> None:
    records = [
        record_of("ddp", 1000, predicted),
        record_of("powersgd", 800, None),
        record_of("oktopk", 700, 710),
        record_of("auto", auto, None),
    ]
    lines = benchmark.checks(records)
    assert len(lines) == len(expected)
    for line, end in zip(lines, expected, strict=True):
        assert line.endswith(end)


def documented_rows(records: list[dict[str, Any]]) -> list[str]:
    """The rows of the table in docs/performance.md: by method, a pair of cells per computing."""
    rows: dict[str, list[str]] = {}
    for record in records:
        step = {name: f"{us / 1e3:.0f}" for name, us in record["step_us"].items()}
        predicted = record["predicted_us"]
        cells = rows.setdefault(record["method"], [f"{record['sent_bytes'] / 1e6:.1f}"])
        cells += [
            f"{step['median']} ({step['min']} to {step['max']})",
            "" if predicted is None else f"{predicted / 1e3:.0f}",
        ]
    return [" | ".join([f"| {method}", *cells]) + " |" for method, cells in rows.items()]


def test_the_readme_has_the_medians() -> None:
    names = {
        "plain DDP": "ddp",
        "torch's hook for bf16": "bf16",
        "PowerSGD, rank 1": "powersgd",
        "Ok-Topk, 2 %": "oktopk",
        "`sparsecomm.prepare`, 2 %": "prepare",
    }
    records = json.loads(RESULTS.read_text())
    readme = (BENCHMARKS.parent / "README.md").read_text()
    for name, method in names.items():
        steps = [each for each in records if each["method"] == method]
        assert [each["compute_ms"] for each in steps] == [50, 200, 1000]
        assert {each["density"] for each in steps} <= {None, 0.02}
        cells = (f"{each['step_us']['median'] / 1e3:.0f}" for each in steps)
        assert " | ".join([f"| {name}", *cells]) in readme


def test_the_documented_table_is_what_was_measured() -> None:
    root = BENCHMARKS.parent
    records = json.loads(RESULTS.read_text())
    rows = documented_rows(records)
    assert {record["hosts"] for record in records} == {4}
    assert {record["link"] for record in records} == {"1gbit"}
    assert [row.split()[1] for row in rows] == list(benchmark.METHODS)
    section = (root / "docs" / "performance.md").read_text().partition("## Whole steps\n")[2]
    assert "\n".join(rows) in section

"""The share of DDP's exchange that the backward pass hides, and whole steps made of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
from sparsecomm.cli import main
from sparsecomm.overlap import BACKWARD_SHARE, bucket_numels, exposed_seconds
from sparsecomm.planning import Explanation
from sparsecomm.units import format_seconds

MIB = 1 << 20


def test_buckets_have_the_default_sizes_of_ddp() -> None:
    numels = bucket_numels(14_728_266, 4, None)
    assert [4 * numel for numel in numels[:-1]] == [MIB, 25 * MIB, 25 * MIB]
    assert sum(numels) == 14_728_266
    assert bucket_numels(10, 4, None) == [10]
    assert bucket_numels(MIB, 2, 1) == [MIB // 2, MIB // 2]
    assert bucket_numels(MIB // 4 + 1, 4, None) == [MIB // 4, 1]


def _bucket_bytes(bucket_cap_mb: int | None) -> list[int]:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(120)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)  # type: ignore[arg-type]
    found: list[int] = []

    # DDP inspects annotations, and postponed ones are text.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        found.append(4 * bucket.buffer().numel())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    for _ in range(2):  # the first step has a single bucket
        found.clear()
        ddp(torch.randn(2, 256)).sum().backward()
    return found


@pytest.mark.parametrize("bucket_cap_mb", [None, 4])
def test_buckets_are_those_that_ddp_makes(bucket_cap_mb: int | None) -> None:
    expected = [4 * numel for numel in bucket_numels(120 * 256 * 256, 4, bucket_cap_mb)]
    assert run_ranks(1, _bucket_bytes, bucket_cap_mb) == [expected]


@pytest.mark.parametrize(
    ("seconds", "exposed"),
    [
        ([0, 0, 0], 0),
        ([1, 1, 1], 1),  # each ends before the next bucket is ready; the last is left over
        ([3, 3, 3], 6),  # one after another from the first second on
        ([0, 0, 2], 2),
        ([9, 0, 0], 6),
    ],
)
def test_an_exchange_waits_for_its_bucket_and_the_previous_one(
    seconds: list[float], exposed: float
) -> None:
    # Ready after 1, 2 and 4 of 4 seconds.
    assert exposed_seconds([1, 1, 2], seconds, 4) == exposed


def test_without_a_backward_pass_all_is_exposed() -> None:
    assert exposed_seconds([5, 7], [1, 2], 0) == 3


def explain(numel: int, bandwidth: str, **options: Any) -> Explanation:
    return sparsecomm.explain(
        numel, 0.02, link=sparsecomm.Link.parse(bandwidth), ranks=4, **options
    )


@pytest.mark.parametrize("step_seconds", [0.001, 0.15, 5.0])
@pytest.mark.parametrize("numel", [1000, 1_340_000, 14_728_266])
def test_a_step_is_computing_selection_and_exposed_exchange(
    numel: int, step_seconds: float
) -> None:
    plan = explain(numel, "1gbit", step_seconds=step_seconds)
    assert plan.step_seconds == step_seconds
    rows = {row.algorithm: row for row in plan.ranking}
    assert {step.method for step in plan.steps} == {"ddp", *rows}
    assert [step.seconds for step in plan.steps] == sorted(step.seconds for step in plan.steps)
    for step in plan.steps:
        assert step.compute == step_seconds
        assert step.seconds == step.compute + step.select + step.exchange - step.hidden
        if step.method in ("ddp", "dense_overlap"):
            assert step.hidden <= BACKWARD_SHARE * step_seconds + 1e-12
            assert 0 <= step.hidden < step.exchange  # the last bucket is never hidden
        else:
            row = rows[step.method]
            assert step.hidden == 0
            assert step.select == row.select
            assert step.exchange == pytest.approx(row.seconds - row.select)


def step_of(plan: Explanation, method: str) -> sparsecomm.StepPrediction:
    return next(step for step in plan.steps if step.method == method)


def test_ddp_hides_what_its_buckets_allow() -> None:
    # One bucket is ready when the backward pass ends.
    for numel in (1000, 7777, 200_000):
        assert step_of(explain(numel, "10gbit", step_seconds=0.15), "ddp").hidden == 0
    # The second of two buckets holds four fifths of the bytes.
    small = step_of(explain(1_340_000, "1gbit", step_seconds=0.15), "ddp")
    assert small.hidden / small.exchange == pytest.approx(MIB / (4 * 1_340_000), rel=0.1)
    # Smaller buckets hide more.
    finer = step_of(explain(1_340_000, "1gbit", step_seconds=0.15, bucket_cap_mb=1), "ddp")
    assert finer.hidden > 3 * small.hidden
    # A slow link is busy from the first bucket to the end of the backward pass.
    slow = step_of(explain(14_728_266, "100mbit", step_seconds=0.15), "ddp")
    assert slow.hidden == pytest.approx(BACKWARD_SHARE * 0.15, rel=0.05)


def test_one_rank_has_nothing_to_hide() -> None:
    link = sparsecomm.Link.parse("1gbit")
    plan = sparsecomm.explain(1_000_000, 0.02, link=link, ranks=1, step_seconds=0.1)
    assert step_of(plan, "ddp").seconds == pytest.approx(0.1, rel=0.1)
    assert plan.best_sparse is not None


def test_without_a_step_there_are_no_steps() -> None:
    plan = explain(1000, "1gbit")
    assert (plan.step_seconds, plan.steps) == (None, ())


@pytest.mark.parametrize(
    ("options", "operand"),
    [
        ({"step_seconds": -1.0}, "step_seconds=-1.0"),
        ({"step_seconds": float("nan")}, "step_seconds=nan"),
        ({"step_seconds": float("inf")}, "step_seconds=inf"),
        ({"step_seconds": 1.0, "bucket_cap_mb": 0}, "bucket_cap_mb=0"),
        ({"step_seconds": 1.0, "bucket_cap_mb": 1.5}, "bucket_cap_mb=1.5"),
        ({"step_seconds": 1.0, "bucket_cap_mb": True}, "bucket_cap_mb=True"),
        ({"bucket_cap_mb": 25}, "bucket_cap_mb=25.*step_seconds"),
    ],
)
def test_a_step_that_cannot_be_is_refused(options: dict[str, Any], operand: str) -> None:
    with pytest.raises(ValueError, match=operand):
        explain(1000, "1gbit", **options)
    with pytest.raises(TypeError, match="step_seconds='150ms'"):
        explain(1000, "1gbit", step_seconds="150ms")


PLAN = ["plan", "--numel", "1.34M", "--density", "0.02", "--ranks", "4", "--bandwidth", "1gbit"]


@pytest.mark.parametrize("given", ["150ms", "0.15"])
def test_plan_says_what_a_whole_step_takes(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--step-time", given, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["step_seconds"] == 0.15
    steps = {step["method"]: step for step in plan["steps"]}
    ddp, oktopk = steps["ddp"], steps["oktopk"]
    for step in (ddp, oktopk):
        assert step["seconds"] == pytest.approx(
            step["compute"] + step["select"] + step["exchange"] - step["hidden"]
        )
    assert ddp["hidden"] > 0 == oktopk["hidden"]
    assert oktopk["seconds"] < ddp["seconds"]


def test_help_explains_every_word_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    explained = {
        name for line in text.splitlines() for name in re.split("  +|, ", line.strip())[:3]
    }
    lines = str(explain(1000, "1gbit", step_seconds=1)).splitlines()
    headers = [line for line in lines if line.startswith(("algorithm", "method"))]
    assert len(headers) == 2
    words = {word for line in headers for word in re.split("  +", line)}
    assert words | {"entries", "density", "union", "link", "overhead"} <= explained


@pytest.mark.parametrize("bandwidth", ["1gbit", "1000gbit"])
def test_the_plan_ends_with_what_sparse_saves(bandwidth: str) -> None:
    plan = explain(14_728_266, bandwidth, step_seconds=3)
    ddp = step_of(plan, "ddp")
    sparse = plan.best_sparse
    assert sparse is not None
    last = str(plan).splitlines()[-1]
    for seconds in (3, ddp.hidden, ddp.exchange, ddp.seconds, abs(ddp.seconds - sparse.seconds)):
        assert format_seconds(seconds) in last, last
    assert sparse.method in last
    assert ("saves" in last) == (sparse.seconds < ddp.seconds)


def _measured() -> tuple[list[str], float]:
    plan = sparsecomm.explain(10_000, 0.02, step_seconds=0.01)
    assert dist.get_world_size() == plan.ranks
    return [step.method for step in plan.steps], step_of(plan, "ddp").seconds


def test_steps_on_a_measured_link_are_alike_on_all_ranks() -> None:
    first, second = run_ranks(2, _measured)
    assert first == second

"""What a state says of itself: figures of each group and step, traces, reports, stalls."""

from __future__ import annotations

import gc
import io
import json
import logging
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from logs import Collect
from models import batch, flat, gathered, make_ddp, make_model, train
from patience import LONG, LONG_TIME, PATIENCE
from ranks import run_ranks
from test_exchange import TRANSPORTS
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import sparsecomm
from sparsecomm import (
    AutoState,
    Communicator,
    CompressionState,
    DenseOverlapState,
    OkTopkState,
    ThresholdSchedule,
    TopkState,
)
from sparsecomm.optim import OkTopkSGD

TRAFFIC = ("sent_bytes", "received_bytes", "messages")
STAGES = ("agree", "select", "exchange", "apply")


def start(state: CompressionState, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    ddp = make_ddp(make_model(), **options)
    sparsecomm.register_comm_hook(ddp, state)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


# ---- figures of each group


def check_the_groups_add_up_to_the_totals() -> None:
    state = TopkState(density=0.05, schedule=ThresholdSchedule("reused", period=4))
    ddp, optimizer = start(state)
    assert state.stats()["groups"] == []
    assert state.stats()["last_step"] == {}
    before = state.stats()
    for step in range(6):
        train(ddp, optimizer, [step])
        stats = state.stats()
        groups = stats["groups"]
        weights, biases = sorted(groups, key=lambda group: -group["numel"])
        numel = sum(parameter.numel() for parameter in ddp.parameters())
        assert weights["numel"] + biases["numel"] == numel
        assert (weights["parameters"], biases["parameters"]) == (5, 5)
        assert weights["name"].endswith(".weight")
        assert [group["step"] for group in groups] == [step, step]
        for name in TRAFFIC:
            assert sum(group[name] for group in groups) == stats[name] - before[name] > 0, name
            assert stats["last_step"][name] == stats[name] - before[name], name
        for name in ("realised_density", "result_density"):
            last = stats[name] * stats["steps"] - before[name] * before["steps"]
            assert stats["last_step"][name] == pytest.approx(last), name
        for name in (f"{stage}_seconds" for stage in STAGES):
            total = sum(group[name] for group in groups)
            assert total == pytest.approx(stats[name] - before[name], abs=1e-7), name
        # The last group to end is what the step waits for.
        exposed = max(group["exposed_seconds"] for group in groups)
        assert exposed == pytest.approx(stats["exposed_seconds"] - before["exposed_seconds"])
        assert exposed > 0
        assert (weights["algorithm"], biases["algorithm"]) == ("topk_a", "dense_rabenseifner")
        # The schedule: exact at every fourth step, used again between.
        assert (weights["threshold_age"], biases["threshold_age"]) == (step % 4, None)
        assert biases["threshold"] is None
        assert (biases["realised_density"], biases["result_density"]) == (1, 1)
        if step % 4 == 0:
            k = round(0.05 * weights["numel"])
            assert weights["realised_density"] * weights["numel"] == pytest.approx(k)
        assert weights["result_density"] >= weights["realised_density"] > 0
        for group in groups:
            assert group["finite"] is True
            assert group["predicted_seconds"] is None
            assert group["observed_seconds"] > group["exchange_seconds"] > 0
        before = stats

    # A checkpoint has the threshold, but not its age.
    other = TopkState(density=0.05, schedule=ThresholdSchedule("reused", period=4))
    resumed, optimizer = start(other)
    other.load_state_dict(state.state_dict())
    train(resumed, optimizer, [6])
    weights = max(other.stats()["groups"], key=lambda group: group["numel"])
    assert weights["threshold"] > 0
    assert weights["threshold_age"] is None

    # An overflow on one rank is no exchange on any.
    optimizer.zero_grad()
    factor = torch.inf if dist.get_rank() == 0 else 1.0
    (factor * resumed(batch(7)).square().mean()).backward()
    for group in other.stats()["groups"]:
        assert (group["finite"], group["realised_density"]) == (False, 0)


def check_a_threshold_is_the_kth_magnitude() -> None:
    """By torch.topk, on the first step, when there is no residual yet."""
    state = OkTopkState(density=0.03, dense_below=0, schedule=ThresholdSchedule.exact())
    ddp, optimizer = start(state)
    reference = make_model()
    reference(batch(0)).square().mean().backward()
    gradient = flat([p.grad for p in reference.parameters() if p.grad is not None])
    train(ddp, optimizer, [0])
    (group,) = state.stats()["groups"]
    k = round(0.03 * gradient.numel())
    assert group["threshold"] == gradient.abs().topk(k).values[-1].item()
    assert group["realised_density"] == k / gradient.numel()
    delivered = flat([p.grad for p in ddp.parameters() if p.grad is not None])
    assert group["result_density"] == delivered.count_nonzero().item() / delivered.numel()


def check_what_is_exposed() -> None:
    """Buckets that were exchanged before the last one came delay nothing."""
    state = DenseOverlapState()
    ddp = make_ddp(make_model(), several_groups=True)

    # DDP inspects annotations, and postponed ones are text.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        future = sparsecomm.dense_overlap_hook(state, bucket)
        future.wait()
        return future

    ddp.register_comm_hook(state, hook)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(2))
    exposed = [group["exposed_seconds"] for group in state.stats()["groups"]]
    assert len(exposed) > 2
    assert exposed[:-1] == [0] * (len(exposed) - 1)
    assert exposed[-1] > 0


def check_a_plan_predicts() -> None:
    state = AutoState(density=0.05)
    ddp, optimizer = start(state)
    train(ddp, optimizer, range(3))
    weights = max(state.stats()["groups"], key=lambda group: group["numel"])
    assert weights["predicted_seconds"] > 0
    everyone = gathered(torch.tensor(weights["predicted_seconds"], dtype=torch.float64))
    assert len({float(seconds) for seconds in everyone}) == 1, "ranks predict alike"


# ---- traces


def check_a_trace_shows_each_stage(folder: str) -> None:
    state = OkTopkState(density=0.05)
    ddp, optimizer = start(state)
    train(ddp, optimizer, range(2))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(ddp, optimizer, range(2, 5))
    train(ddp, optimizer, range(5, 6))  # nobody looks any more
    file = Path(folder) / f"trace-{dist.get_rank()}.json"
    profiler.export_chrome_trace(str(file))
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("ph") == "X"]
    names = [group["name"] for group in state.stats()["groups"]]
    wholes = [event for event in events if event["name"].startswith("sparsecomm: ")]
    backward = {event["tid"] for event in events if event["name"].startswith("autograd::")}
    before, runs = [], []
    for whole in wholes:
        inside = {
            event["name"].removeprefix("sparsecomm::")
            for event in events
            if event["name"].startswith("sparsecomm::")
            and event["tid"] == whole["tid"]
            and whole["ts"] <= event["ts"] <= whole["ts"] + whole["dur"]
        }
        assert inside <= set(STAGES), inside
        assert whole["tid"] not in backward, "on the progress thread"
        if "exchange" in inside:
            runs.append(whole["name"])
            assert ("apply" in inside) == ("weight" in whole["name"]), "dense results need none"
        else:  # until it has its turn, of several groups together
            before.append(whole["name"])
            assert inside <= {"select", "agree"}, inside
    assert sorted(runs) == sorted(f"sparsecomm: {name}" for name in 3 * names)
    assert set(before) == set(runs)
    counts = {row.key: row.count for row in profiler.key_averages()}
    assert counts["sparsecomm::exchange"] == 3 * len(names)
    assert 3 <= counts["sparsecomm::agree"] <= 3 * len(names)


# ---- reports


class Recorder:
    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}
        self.texts: dict[str, str] = {}
        self.steps: set[int] = set()

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag] = scalar_value
        self.steps.add(global_step)

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        self.texts[tag] = text_string


def check_a_report_has_the_last_step_beside_the_mean() -> None:
    state = TopkState(density=0.02, warmup=sparsecomm.DensityWarmup(2, (0.5,)))
    ddp, optimizer = start(state)
    train(ddp, optimizer, range(4))
    stats = state.stats()
    last = stats["last_step"]
    assert last["realised_density"] < stats["realised_density"] / 2
    mean_line, last_line = sparsecomm.report(state).splitlines()[1:3]
    for line, figures, steps in ((mean_line, stats, 4), (last_line, last, 1)):
        assert f"{figures['realised_density']:.3%}" in line
        assert f"{figures['result_density']:.3%}" in line
        assert f"{figures['sent_bytes'] / steps / 1024:.1f} KiB" in line
        assert f"{figures['received_bytes'] / steps / 1024:.1f} KiB" in line


def check_reports(folder: str) -> None:
    state, idle = AutoState(density=0.05), OkTopkState()
    ddp, optimizer = start(state)
    train(ddp, optimizer, range(3))
    stats = state.stats()
    text = sparsecomm.report(state, idle)
    first, last = text.splitlines()[0], text.splitlines()[-1]
    for operand in ("AutoState", f"rank {dist.get_rank()}", "3 steps"):
        assert operand in first
    assert last.startswith("OkTopkState")
    for group in stats["groups"]:
        (line,) = (line for line in text.splitlines() if line.strip().startswith(group["name"]))
        assert group["algorithm"] in line
        assert f"{group['realised_density']:.3%}" in line
    assert sparsecomm.report() == ""

    recorder = Recorder()
    sparsecomm.write_stats(recorder, idle)
    assert not recorder.scalars
    sparsecomm.write_stats(recorder, state, tag="exchange")
    assert recorder.steps == {3}
    groups = stats["groups"]
    for name in TRAFFIC:
        assert recorder.scalars[f"exchange/{name}"] == sum(group[name] for group in groups)
    entries = sum(group["numel"] for group in groups)
    selected = sum(group["numel"] * group["realised_density"] for group in groups)
    assert recorder.scalars["exchange/realised_density"] == pytest.approx(selected / entries)
    for group in groups:
        tag = f"exchange/{group['name'].replace(' ', '_')}"
        assert recorder.texts[f"{tag}/algorithm"] == group["algorithm"]
        no_figures = ("name", "parameters", "numel", "step", "algorithm", "finite")
        expected = {
            f"{tag}/{name}": value
            for name, value in group.items()
            if name not in no_figures and value is not None
        }
        found = {name: v for name, v in recorder.scalars.items() if name.startswith(tag + "/")}
        assert found == expected

    # The summary comes when the state goes, on rank 0 alone.
    file = io.StringIO()
    sparsecomm.report_at_exit(state, idle, file=file)
    del ddp, optimizer, state, idle
    gc.collect()
    summary = file.getvalue()
    assert bool(summary) == (dist.get_rank() == 0)
    assert not summary or ("AutoState" in summary and "rank 0" in summary)

    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    written = OkTopkState(density=0.05)
    ddp, optimizer = start(written)
    log = Path(folder) / f"tensorboard-{dist.get_rank()}"
    writer = SummaryWriter(str(log))
    for step in (10, 20):
        train(ddp, optimizer, [step])
        sparsecomm.write_stats(writer, written, step)
    writer.close()
    read = EventAccumulator(str(log))
    read.Reload()
    for group in written.stats()["groups"]:
        events = read.Scalars(f"sparsecomm/{group['name'].replace(' ', '_')}/sent_bytes")
        assert [event.step for event in events] == [10, 20]
        assert events[-1].value == group["sent_bytes"]


def _check_figures(folder: str) -> None:
    check_the_groups_add_up_to_the_totals()
    check_a_threshold_is_the_kth_magnitude()
    check_what_is_exposed()
    check_a_plan_predicts()
    check_a_trace_shows_each_stage(folder)
    check_a_report_has_the_last_step_beside_the_mean()
    check_reports(folder)


def test_figures(tmp_path: Path) -> None:
    run_ranks(2, _check_figures, str(tmp_path))


AT_EXIT = """
import torch, torch.distributed as dist, sparsecomm
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = DistributedDataParallel(torch.nn.Linear(40, 40))
state = sparsecomm.OkTopkState(0.1)
sparsecomm.report_at_exit(state)
sparsecomm.register_comm_hook(ddp, state)
ddp(torch.randn(4, 40)).square().mean().backward()
dist.destroy_process_group()
raise RuntimeError("on purpose")
"""


def test_a_summary_at_exit_also_after_an_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(AT_EXIT))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=110 * PATIENCE,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    error, summary = (
        done.stderr.index("on purpose"),
        done.stderr.index("OkTopkState"),
    )
    assert error < summary
    assert done.stdout == ""


def test_reports_are_of_states() -> None:
    for report in (sparsecomm.report, sparsecomm.report_at_exit):
        with pytest.raises(TypeError, match="not str"):
            report("state")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"not list.*one by one"):
            report([])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"the class OkTopkState.*OkTopkState\("):
            report(OkTopkState)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not Recorder"):
        sparsecomm.write_stats(Recorder(), Recorder())  # type: ignore[arg-type]


# ---- stalls

PARAMETER = torch.nn.Parameter(torch.zeros(100))


class _Tell(Collect):
    """Lets other ranks know that something was logged, if it concerns them."""

    about = ""

    def __init__(self, concerns: Callable[[str], bool]) -> None:
        super().__init__()
        self._concerns = concerns

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if self._concerns(self.texts[-1]):
            _get_default_store().set(f"logged {self.about} {dist.get_rank()}", "")

    def wait(self, *ranks: int) -> None:
        _get_default_store().wait([f"logged {self.about} {rank}" for rank in ranks])


LIMIT = timedelta(seconds=0.5)


def _let_rank_2_be_late(transports: list[str]) -> dict[str, list[str]]:
    log = _Tell(lambda text: "no operation" in text)
    logging.getLogger("sparsecomm").addHandler(log)
    found = {}
    for transport in transports:
        states = [
            OkTopkState(transport=transport, stall_limit=LIMIT, timeout=10 * LONG_TIME),
            OkTopkState(transport=transport, stall_limit=None),
        ]
        for state in states:
            ddp, optimizer = start(state)
            train(ddp, optimizer, range(2))
            dist.barrier()
            log.texts.clear()
            log.about = transport
            if dist.get_rank() == 2 and state is states[0]:
                log.wait(0, 1)
            elif dist.get_rank() == 2:
                time.sleep(3 * LIMIT.total_seconds())  # in which nothing is said
            key = f"{transport} {state is states[0]}"
            found[key] = list(log.texts)
            train(ddp, optimizer, range(2, 3))
            if dist.get_rank() != 2:  # which may wait for the others in turn
                found[key] = list(log.texts)
            dist.barrier()
    model = make_model()
    own = OkTopkSGD(model.parameters(), density=0.05, stall_limit=LIMIT)

    def step() -> None:
        model(batch(0)).square().mean().backward()
        own.step()

    with Communicator.from_process_group(stall_limit=LIMIT) as communicator:
        for what, exchange in (
            (
                "communicator",
                lambda: sparsecomm.allreduce(torch.ones(10), communicator=communicator),
            ),
            ("optimizer", step),
        ):
            exchange()
            dist.barrier()
            log.texts.clear()
            log.about = what
            if dist.get_rank() == 2:
                log.wait(0, 1)
            exchange()
            found[what] = list(log.texts)
            dist.barrier()
    return found


def test_who_waits_says_for_whom_and_where_they_are() -> None:
    found = run_ranks(3, _let_rank_2_be_late, TRANSPORTS)
    for transport in TRANSPORTS:
        for rank in (0, 1):
            texts = found[rank][f"{transport} True"]
            for text in texts:
                assert text.startswith(f"rank {rank} "), text
                for operand in ("gradient exchange", "step 2", f"{10 * LONG:g} s"):
                    assert operand in text, text
            # On a loaded machine one of the others may be late as well.
            of_rank_2 = [text[text.rindex("rank 2") :] for text in texts if "rank 2" in text]
            assert any("no operation" in said and "step 1" in said for said in of_rank_2), texts
        assert found[2][f"{transport} True"] == []
        assert [found[rank][f"{transport} False"] for rank in range(3)] == [[]] * 3
    for rank in (0, 1):
        for what, operation in (("communicator", "allreduce"), ("optimizer", "gradient exchange")):
            texts = found[rank][what]
            assert any(operation in text and "rank 2" in text for text in texts), (what, texts)


def _waited_for(text: str) -> set[int]:
    """The ranks that a connecting rank says are missing; on a loaded machine it may be any."""
    missing = text.rpartition(" for rank")[2].partition(";")[0]
    return {int(rank) for rank in re.findall(r"\d+", missing)}


def _connect_late() -> dict[str, list[str]]:
    """Rank 1 makes everything when the others have said that they wait for it."""
    log = _Tell(lambda text: 1 in _waited_for(text))
    logging.getLogger("sparsecomm").addHandler(log)
    limit = timedelta(seconds=0.2)

    def register() -> object:
        return sparsecomm.register_comm_hook(
            DistributedDataParallel(make_model(), init_sync=False), OkTopkState(stall_limit=limit)
        )

    calls: dict[str, Callable[[], object]] = {
        "sparsecomm.register_comm_hook": register,
        "Communicator.from_process_group": lambda: Communicator.from_process_group(
            stall_limit=limit
        ),
        "OkTopkSGD()": lambda: OkTopkSGD(make_model().parameters(), stall_limit=limit),
    }
    found = {}
    for name, call in calls.items():
        log.texts.clear()
        log.about = name
        if dist.get_rank() == 1:
            log.wait(0, 2)
        call()
        found[name] = list(log.texts)
        dist.barrier()
    return found


def test_who_waits_for_ranks_to_connect_says_for_whom_and_in_which_call() -> None:
    first, late, other = run_ranks(3, _connect_late)
    for call in first:
        for rank, texts in enumerate((first[call], late[call], other[call])):
            assert rank == 1 or any(1 in _waited_for(text) for text in texts), texts
            for text in texts:
                assert text.startswith(f"rank {rank} ")
                assert call in text
                assert rank not in _waited_for(text)


def _register_alone() -> str:
    state = OkTopkState(timeout=timedelta(seconds=1), stall_limit=None)
    ddp = DistributedDataParallel(make_model())
    if dist.get_rank() == 1:
        _get_default_store().wait(["raised"])
        return ""
    with pytest.raises(RuntimeError) as error:
        sparsecomm.register_comm_hook(ddp, state)
    _get_default_store().set("raised", "")
    return str(error.value)


def test_who_waited_in_vain_names_the_call() -> None:
    text, _ = run_ranks(2, _register_alone)
    assert "sparsecomm.register_comm_hook" in text
    assert "rank 1" in text


class _Drop(logging.Handler):
    """Drops what it holds as a message comes, on the thread that logs it."""

    def __init__(self, *held: Any) -> None:
        super().__init__()
        self.held = held
        self.threads: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.threads.append(threading.get_ident())
        self.held = ()
        gc.collect()


def _drop_while_it_stalls(what: str) -> None:
    limit = timedelta(seconds=0.1)
    options: dict[str, Any] = {"stall_limit": limit, "timeout": LONG_TIME}
    waiting: Any
    held: Any
    if what == "communicator":
        held = Communicator.from_process_group(**options)
    else:
        held = OkTopkState(named_parameters=[("weight", PARAMETER)], **options)
        held._connect()
    dist.barrier()
    if dist.get_rank() == 1:
        dist.barrier()
        return
    if what == "communicator":
        waiting = sparsecomm.allreduce(torch.ones(10), communicator=held, async_op=True)
    else:
        gradient = torch.ones(100)
        waiting = held._native.exchange(0, True, gradient, [PARAMETER], [gradient]).get_future()
    drop = _Drop(held)
    del held
    logging.getLogger("sparsecomm").addHandler(drop)
    with pytest.raises(RuntimeError, match="closed"):
        waiting.wait()
    assert drop.threads
    assert threading.get_ident() not in drop.threads
    dist.barrier()


@pytest.mark.parametrize("what", ["state", "communicator"])
def test_what_stalls_may_be_dropped_on_the_thread_that_says_so(what: str) -> None:
    run_ranks(2, _drop_while_it_stalls, what)


def _drop_as_it_completes() -> None:
    held = [OkTopkState(named_parameters=[("weight", PARAMETER)])]
    held[0]._connect()
    gradient = torch.ones(100)
    threads = []

    def drop(_: Any) -> None:
        threads.append(threading.get_ident())
        held.clear()
        gc.collect()

    dist.barrier()
    if dist.get_rank() == 1:
        dist.barrier()
    waiting = held[0]._native.exchange(0, True, gradient, [PARAMETER], [gradient]).get_future()
    if dist.get_rank() == 0:
        dropped = waiting.then(drop)
        dist.barrier()
        dropped.wait()
        assert threads
        assert threads != [threading.get_ident()]
    waiting.wait()
    dist.barrier()


def test_a_state_may_be_dropped_on_its_progress_thread() -> None:
    run_ranks(2, _drop_as_it_completes)


@pytest.mark.parametrize("limit", [timedelta(0), timedelta(seconds=-1)])
def test_a_stall_limit_is_a_positive_time(limit: timedelta) -> None:
    for make in (OkTopkState, DenseOverlapState, Communicator.from_process_group):
        with pytest.raises(ValueError, match=rf"stall_limit={limit}.*None"):
            make(stall_limit=limit)
        with pytest.raises(TypeError, match=r"stall_limit.*timedelta.*int"):
            make(stall_limit=60)  # type: ignore[arg-type]

"""Timelines: what ranks record, and one of them all."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import make_ddp, make_model, train
from patience import LONG
from ranks import run_ranks

import sparsecomm
from sparsecomm import OkTopkState
from sparsecomm.cli import main
from sparsecomm.tracing import merge

SLICES = {
    "round": {"number", "pending", "run"},
    "negotiate": set(),
    "prepare": set(),
    "queue": set(),
    "fused": {"row"},
    "run": {"sent_bytes", "received_bytes"},
    "compare": set(),
    "select": set(),
    "exchange": set(),
    "apply": set(),
}
Event = dict[str, Any]


def events_of(path: Path) -> list[Event]:
    """Reads a trace and holds it to Chrome's Trace Event Format and to what we promise of it."""
    text = path.read_bytes()
    events: list[Event] = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)
    named: dict[str, set[tuple[int, int]]] = {"process_name": set(), "thread_name": set()}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            if event["name"] in named:
                assert isinstance(event["args"]["name"], str)
                place = event["pid"], event["tid"]
                assert place not in named[event["name"]]
                named[event["name"]].add(place)
            continue
        assert event["ph"] == "X"
        assert set(event["args"]) - {"failed"} == SLICES[event["name"]]
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert (event["pid"], 0) in named["process_name"]
        assert (event["pid"], event["tid"]) in named["thread_name"]
    check_nesting(events)
    return events


def nanoseconds(microseconds: float) -> int:
    return round(1000 * microseconds)


def check_nesting(events: list[Event]) -> None:
    """Slices of a row lie inside one another or beside one another, or Perfetto drops some."""
    for slices in rows_of(events).values():
        open_until: list[int] = []
        for event in slices:
            begin = nanoseconds(event["ts"])
            end = begin + nanoseconds(event["dur"])
            while open_until and begin >= open_until[-1]:
                open_until.pop()
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)


def rows_of(events: list[Event]) -> dict[tuple[str, str], list[Event]]:
    """The slices of each row, by the names of its process and its own, as they begin."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows = {
        (e["pid"], e["tid"]): (processes[e["pid"]], e["args"]["name"])
        for e in events
        if e["name"] == "thread_name"
    }
    found: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[rows[event["pid"], event["tid"]]].append(event)
    for slices in found.values():
        slices.sort(key=lambda event: (event["ts"], -event["dur"]))
    return found


def names(slices: list[Event]) -> list[str]:
    return [event["name"] for event in slices]


def record_training(folder: Path) -> Path | None:
    rank = dist.get_rank()
    state = OkTopkState(density=0.05, dense_below=2)
    ddp = make_ddp(make_model())
    sparsecomm.register_comm_hook(ddp, state)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train(ddp, optimizer, range(1))
    communicator = sparsecomm.Communicator.from_process_group()
    with sparsecomm.timeline(folder / "run.json") as recording:
        assert recording.path is not None
        train(ddp, optimizer, range(1, 4))
        tensors = [torch.full((20,), 1.0 + rank) for _ in range(3)]
        for _ in range(2):
            sparsecomm.grouped_allreduce(
                [t.clone() for t in tensors], name="three", communicator=communicator
            )
    train(ddp, optimizer, range(4, 5))
    assert not dist.get_rank() or recording.path == folder / "run.rank1.json"
    return recording.path


def test_a_timeline_of_all_ranks(tmp_path: Path) -> None:
    paths = [path for path in run_ranks(2, record_training, tmp_path) if path]
    for rank, path in enumerate(paths):
        rows = rows_of(events_of(path))
        hook = f"rank {rank}: sparsecomm.register_comm_hook"
        for group in ("gradients 0", "gradients 1"):
            assert names(rows[hook, group]).count("run") == 3
            assert {"negotiate", "prepare", "queue"} < set(names(rows[hook, group]))
        assert {"select", "exchange", "apply"} < set(names(rows[hook, "gradients 0"]))
        ran = sum(e["args"]["run"] for e in rows[hook, "rounds"])
        assert ran == sum(names(row).count("run") for (of, _), row in rows.items() if of == hook)
        collectives = f"rank {rank}: Communicator.from_process_group"
        assert names(rows[collectives, "three"]).count("run") == 2
        assert "compare" in names(rows[collectives, "three"])
    for output in (tmp_path / "all.json", tmp_path / "all.json.gz"):
        assert main(["timeline", "merge", *map(str, paths), "--output", str(output)]) == 0
        events = events_of(output)
        assert len(rows_of(events)) == sum(len(rows_of(events_of(path))) for path in paths)
        rounds = {name: row for (name, kind), row in rows_of(events).items() if kind == "rounds"}
        ends = [
            {
                e["args"]["number"]: e["ts"] + e["dur"]
                for e in rounds[f"rank {rank}: sparsecomm.register_comm_hook"]
            }
            for rank in range(2)
        ]
        assert ends[0].keys() == ends[1].keys()
        assert len(ends[0]) >= 3
        # Threads of a busy machine may be late, some of the time.
        assert min(abs(end - ends[1][number]) for number, end in ends[0].items()) < 1e4


PROGRAM = """
import sys
import torch
import torch.distributed as dist
import sparsecomm

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
for _ in range(2):
    sparsecomm.allreduce(torch.ones(5), name="ones")
store.add("done", 1)
store.wait(["left"]) if sys.argv[2] == "0" else store.set("left", "")
"""


def test_a_variable_records_a_program(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(store.port), str(rank)],
            env={
                "PATH": "",
                "PYTHONPATH": ":".join(sys.path),
                "SPARSECOMM_TIMELINE": str(tmp_path / "whole.json"),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for program in running:
        _, errors = program.communicate(timeout=LONG)
        assert program.returncode == 0, errors
    for rank in range(2):
        rows = rows_of(events_of(tmp_path / f"whole.rank{rank}.json"))
        assert [names(row).count("run") for (_, name), row in rows.items() if name == "ones"] == [2]


def record_badly(folder: Path) -> None:
    nowhere = sparsecomm.timeline(folder / "no folder" / "run.json")
    with pytest.raises(RuntimeError, match=r"no folder.*rank\d"):
        nowhere.__enter__()
    with sparsecomm.timeline(folder / "one.json"):
        other = sparsecomm.timeline(folder / "two.json")
        with pytest.raises(RuntimeError, match="one"):
            other.__enter__()
        sparsecomm.allreduce(torch.ones(5), name="ones")
    # Another one may follow, and one that ends by an error is whole.
    with pytest.raises(KeyError), sparsecomm.timeline(folder / "three.json") as recording:
        raise KeyError
    assert recording.path is not None
    events_of(recording.path)
    with pytest.raises(ValueError, match="gz"):
        sparsecomm.timeline("run.json.gz")


def test_bad_recordings(tmp_path: Path) -> None:
    run_ranks(2, record_badly, tmp_path)


TROUBLE = """
import logging, os, sys, torch, sparsecomm, torch.distributed as dist

logging.basicConfig(format="%(message)s")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with sparsecomm.timeline(sys.argv[1]) as recording:
    sparsecomm.allreduce(torch.ones(5), name="ones")
    child = os.fork()
    if child == 0:
        with sparsecomm.timeline(sys.argv[1] + ".child") as own:
            pass
        sparsecomm.tracing._of_parents.clear()
        os._exit(own.path is None)
    assert os.waitpid(child, 0)[1] == 0
print(recording.path)
"""


def run_trouble(tmp_path: Path, block: Path, variable: Path | None) -> tuple[str, str]:
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    if variable is not None:
        environment["SPARSECOMM_TIMELINE"] = str(variable)
    done = subprocess.run(
        [sys.executable, "-c", TROUBLE, str(block)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_forked_child_leaves_the_recording_alone(tmp_path: Path) -> None:
    written, _ = run_trouble(tmp_path, Path("run"), None)
    assert written == str(tmp_path / "run.rank0.json")
    assert any(name == "ones" for _, name in rows_of(events_of(Path(written))))


def test_a_block_gives_way_to_the_variable(tmp_path: Path) -> None:
    # The block is entered before anything is connected, so it was there first.
    written, log = run_trouble(tmp_path, tmp_path / "run.json", tmp_path / "whole.json")
    assert written == str(tmp_path / "run.rank0.json")
    assert "whole.json" in log
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run.json.child.rank0.json",
        "run.rank0.json",
    ]


def test_a_file_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    program = TROUBLE.replace(
        "with sparsecomm.timeline(sys.argv[1]) as", "recording = None\nif 1: #"
    )
    program = program.replace("print(recording.path)", "print('done'); sys.exit()")
    program = program.replace("sys.argv[1]", "'here'")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={
            "PATH": "",
            "PYTHONPATH": ":".join(sys.path),
            "SPARSECOMM_TIMELINE": str(tmp_path / "no folder" / "run.json"),
        },
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr
    assert "no folder" in done.stderr


def test_a_recording_begins_when_its_rank_is_known(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys, torch, sparsecomm, torch.distributed as dist
        with sparsecomm.timeline(sys.argv[1] + "/early.json") as recording:
            assert recording.path is None
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            sparsecomm.allreduce(torch.ones(5), name="ones")
            assert recording.path is not None
        with sparsecomm.timeline(sys.argv[1] + "/again.json") as again:
            assert again.path is not None
        """
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=LONG)
    events = events_of(tmp_path / "early.rank0.json")
    assert any(name == "ones" for _, name in rows_of(events))


def test_nothing_was_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not dist.is_initialized()
    with sparsecomm.timeline(tmp_path / "run.json"):
        pass
    assert str(tmp_path / "run.json") in caplog.text
    assert not [*tmp_path.iterdir()]


# ---- merging


def recorded(
    path: Path, rank: int, groups: Mapping[int, tuple[list[int], list[float]]], began: int = 0
) -> Path:
    """Writes a recording of rounds that end at these times of its own clock, in microseconds."""
    lines: list[Event] = []

    def metadata(process: int, name: str, arguments: dict[str, Any]) -> None:
        lines.append({"ph": "M", "pid": process, "tid": 0, "name": name, "args": arguments})

    metadata(0, "sparsecomm_recording", {"rank": rank, "unix_ns": 1000 * began})
    for process, (ranks, ends) in groups.items():
        metadata(process, "process_name", {"name": f"rank {rank}: a test"})
        ranks_before = [other for number, (other, _) in groups.items() if number < process]
        place = {"ranks": ranks, "number": ranks_before.count(ranks)}
        metadata(process, "sparsecomm_communicator", place)
        metadata(process, "thread_name", {"name": "rounds"})
        for number, end in enumerate(ends):
            arguments = {"number": number, "pending": 1, "run": 1}
            slice_of = {"ph": "X", "pid": process, "tid": 0, "name": "round", "cat": "sparsecomm"}
            lines.append({**slice_of, "ts": end - 1, "dur": 1, "args": arguments})
    lines.append({"ph": "M", "pid": 0, "tid": 0, "name": "end", "args": {}})
    path.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")
    return path


def ends_by_rank(path: Path) -> dict[str, list[float]]:
    return {
        process: [event["ts"] + event["dur"] for event in slices]
        for (process, _), slices in rows_of(events_of(path)).items()
    }


def test_clocks_are_compared_by_rounds(tmp_path: Path) -> None:
    # An hour of rounds: the other clock is wrong by 5 s, and slow by 20 parts in a million.
    moments = [1e6 * second for second in range(1, 3600)]
    generator = torch.Generator().manual_seed(1)
    late = (200 * torch.rand(len(moments), generator=generator)).tolist()
    first = recorded(tmp_path / "0", 0, {1: ([0, 1], moments)})
    own = [(moment + 5e6) * (1 + 2e-5) + delay for moment, delay in zip(moments, late, strict=True)]
    second = recorded(tmp_path / "1", 1, {4: ([0, 1], own)}, began=9 * 10**9)
    assert merge([second, first], tmp_path / "both.json") == []
    ends = ends_by_rank(tmp_path / "both.json")
    differences = [
        abs(one - other)
        for one, other in zip(ends["rank 0: a test"], ends["rank 1: a test"], strict=True)
    ]
    assert max(differences) < 250


def test_clocks_do_not_run_backwards(tmp_path: Path) -> None:
    # One round that is late, just before clocks are compared anew, and another just after.
    first = recorded(tmp_path / "0", 0, {1: ([0, 1], [10_003_000.0, 10_001_500.0])})
    own = [9_998_000.0, 10_001_000.0, 9_999_999.0]
    second = recorded(tmp_path / "1", 1, {1: ([0, 1], own)})
    merge([first, second], tmp_path / "both.json")
    ends = ends_by_rank(tmp_path / "both.json")["rank 1: a test"]  # which holds slices to last
    assert ends == sorted(ends)


def test_ranks_meet_over_others(tmp_path: Path) -> None:
    # Ranks 0 and 3 share no communicator; ranks 1 and 2 have one of the same members twice.
    pairs = {(0, 1): 100.0, (1, 2): 200.0, (2, 3): 300.0}
    offsets = {0: 0.0, 1: 1e6, 2: 5e6, 3: 2e6}
    files = []
    for rank, offset in offsets.items():
        groups = {}
        for pair, moment in pairs.items():
            if rank in pair:
                times = [offset + 1000 * i + moment for i in range(20)]
                groups[1 + len(groups)] = ([*pair], times)
                groups[9 + len(groups)] = ([*pair], [time + 7 for time in times])
        files.append(recorded(tmp_path / str(rank), rank, groups, began=rank * 10**10))
    assert merge(files, tmp_path / "all.json") == []
    # Rank 2 began first, 5 s before rank 0.
    found = ends_by_rank(tmp_path / "all.json")
    for rank in offsets:
        own = [moment + later for pair, moment in pairs.items() if rank in pair for later in (0, 7)]
        expected = sorted(5e6 + moment + 1000 * i for moment in own for i in range(20))
        assert found[f"rank {rank}: a test"] == pytest.approx(expected)


def test_ranks_that_never_meet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = recorded(tmp_path / "0", 0, {1: ([0], [50.0])}, began=10**15)
    second = recorded(tmp_path / "5", 5, {1: ([5], [50.0])}, began=10**15 + 3000)
    output = tmp_path / "all.json"
    assert main(["timeline", "merge", str(first), str(second), "--output", str(output)]) == 0
    assert "5" in capsys.readouterr().err
    assert ends_by_rank(output) == {"rank 0: a test": [50.0], "rank 5: a test": [3050.0]}


def test_a_recording_that_was_cut_off(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "0", 0, {1: ([0], [50.0, 60.0, 70.0])})
    lines = whole.read_text().splitlines()
    for left in range(5, len(lines)):
        text = "\n".join(lines[:left])
        for cut, kept in ((text + "\n", lines[:left]), (text[:-20], lines[: left - 1])):
            whole.write_text(cut)
            merge([whole], tmp_path / "merged.json")
            slices = [e for e in events_of(tmp_path / "merged.json") if e["ph"] == "X"]
            assert len(slices) == sum('"X"' in line for line in kept)


def test_what_cannot_be_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = recorded(tmp_path / "good", 0, {1: ([0], [50.0])})
    same = recorded(tmp_path / "same", 0, {1: ([0], [50.0])})
    damaged = tmp_path / "damaged"
    damaged.write_text(good.read_text().replace('"ts"', '"ts', 1))
    other = tmp_path / "other"
    other.write_text('{"traceEvents": []}\n')
    strange = tmp_path / "strange"
    strange.write_text("[\n1,\n2\n]\n")
    nobody = tmp_path / "nobody"
    nobody.write_text('[\n{"ph":"M","pid":0,"tid":0,"name":"end","args":{}}\n]\n')
    foreign = tmp_path / "foreign"
    foreign.write_text('[\n{"ph":"X","pid":1,"tid":0,"name":"work","args":{}},\n{}\n]\n')
    output = tmp_path / "merged.json"
    cases: list[tuple[list[Path], Path, Path]] = [
        ([good, same], output, same),
        ([good, damaged], output, damaged),
        ([other], output, other),
        ([strange], output, strange),
        ([nobody], output, nobody),
        ([foreign], output, foreign),
        ([good, tmp_path / "missing"], output, tmp_path / "missing"),
        ([good], good, good),
    ]
    for files, written, named in cases:
        command = ["timeline", "merge", *map(str, files), "--output", str(written)]
        assert main(command) == 1
        assert str(named) in capsys.readouterr().err
    assert good.read_text() == same.read_text()

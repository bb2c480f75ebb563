"""The lab: hosts that see each other over limited links, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import LONG, PATIENCE

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import hosts  # noqa: E402
import ina  # noqa: E402
import lab  # noqa: E402
from hosts import Hosts, HostsError, missing, parse_rate  # noqa: E402


def needs_namespaces() -> None:
    if reason := missing():
        pytest.skip(reason)


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if line.startswith(f"sparsecomm-{pid}-")]


@pytest.mark.parametrize(
    ("text", "bits"), [("1gbit", 1e9), ("2.5gbit", 2.5e9), ("100mbit", 1e8), ("64kbit", 64e3)]
)
def test_rates(text: str, bits: float) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "1", "gbit", "1 gbit", "1gbps", "0gbit", "-1gbit"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate such as 1gbit"):
        parse_rate(text)


@pytest.mark.parametrize("count", [0, 201])
def test_number_of_hosts(count: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 200 can"):
        Hosts(count, None)


@pytest.mark.lab
def test_allreduces_between_hosts(tmp_path: Path) -> None:
    needs_namespaces()
    file = tmp_path / "lab.json"
    with subprocess.Popen(
        [
            *(sys.executable, str(BENCHMARKS / "lab.py"), "--hosts", "2", "--numel", "20000"),
            *("--rate", "1gbit", "--density", "0.05", "0.1", "--algorithm", "oktopk", "topk_a"),
            *("--iters", "2", "--parts", "allreduce", "--report-only", "--json", str(file)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        output, _ = process.communicate()
    assert process.returncode == 0
    assert namespaces(process.pid) == []
    (result,) = json.loads(file.read_text())["results"]
    assert (result["hosts"], result["rate"]) == (2, "1gbit")
    measured = [(row["density"], row["algorithm"]) for row in result["rows"]]
    algorithms = ("gloo_dense", "oktopk", "topk_a")
    assert measured == [(density, name) for density in (0.05, 0.1) for name in algorithms]
    assert all(row["world_size"] == 2 for row in result["rows"])
    assert output.count("oktopk sends and receives") == 2
    assert "MISSED" not in output
    assert "times as long as topk_a by the median times" in output


@pytest.mark.lab
def test_aggregation_between_hosts(tmp_path: Path) -> None:
    needs_namespaces()
    file = tmp_path / "ina.json"
    command = [
        *(sys.executable, str(BENCHMARKS / "ina.py"), "--workers", "2", "--rate", "1gbit"),
        *("--numel", "20000", "--zero", "0", "0.75", "--iters", "2", "--report-only"),
        *("--json", str(file)),
    ]
    first = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert "2 workers and aggregators, 20000 f32" in first.stdout
    measured = file.read_text()
    (result,) = json.loads(measured)["results"]
    assert {record["aggregators"] for record in result["records"]} == {0, 2}
    assert all(record["exact"] for record in result["records"])
    assert is_picture(file.with_suffix(".png"))
    # What the file has is not measured again.
    again = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert "2 workers and aggregators" not in again.stdout
    assert file.read_text() == measured


def is_picture(file: Path) -> bool:
    return file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10000


def test_figures_of_aggregation(tmp_path: Path) -> None:
    def result_of(workers: int, rate: str, numel: int) -> dict[str, object]:
        records = [
            record_of(name, time / (workers * (1 + zero)), zero)
            for zero in (0.5, 0.9)
            for name, time in (("gloo_dense", 4e5), ("ina", 2e5), ("omnireduce", 3e5))
        ]
        return {"workers": workers, "rate": rate, "numel": numel, "records": records}

    results = [
        result_of(workers, rate, numel)
        for numel in (2 << 20, 8 << 20)
        for rate in ("10gbit", "1gbit")
        for workers in (2, 4, 6)
    ]
    ina.draw(results, tmp_path / "ina.png")
    assert is_picture(tmp_path / "ina.png")


def record_of(algorithm: str, median: float, zero: float) -> dict[str, object]:
    """Of an allreduce of 32 MiB."""
    received = (1 - zero) * 33.5e6 if algorithm != "gloo_dense" else 50e6
    return {
        "algorithm": algorithm,
        "zero_fraction": zero,
        "supports": "identical",
        "time_us": {"median": median},
        "sent_bytes": [received] * 4,
        "received_bytes": [received] * 4,
        "aggregator_sent_bytes": [received] * 4,
        "aggregator_received_bytes": [received] * 4,
        "exact": True,
    }


def test_goals_of_aggregation() -> None:
    def result_of(dense: float, sparse: float, omnireduce: float) -> dict[str, object]:
        times = {
            0.0: {"gloo_dense": 420e3, "ina": dense, "omnireduce": dense},
            0.75: {"gloo_dense": 420e3, "ina": sparse, "omnireduce": omnireduce},
        }
        records = [
            record_of(name, time, zero)
            for zero, each in times.items()
            for name, time in each.items()
        ]
        return {"workers": 4, "rate": "1gbit", "numel": 8 << 20, "records": records}

    good = result_of(280e3, 70e3, 130e3)
    assert [met for _, met in ina.check_goals(good)] == [True] * 5
    assert [met for _, met in ina.check_omnireduce([good])] == [True, True]
    slow = result_of(320e3, 100e3, 90e3)
    assert [met for _, met in ina.check_goals(slow)] == [False, False, False, False, False]
    assert [met for _, met in ina.check_omnireduce([slow])] == [False, False]
    assert ina.check_goals({**good, "rate": "10gbit"}) == []
    assert len(ina.check_goals({**good, "workers": 2})) == 4


def row_of(algorithm: str, median: float, **other: object) -> dict[str, object]:
    figures = {"numel": lab.VGG16_NUMEL, "density": 0.01, "batch": 0, "k": 147_283}
    times = {"time_us": {"median": median}, "exchange_alone_us": {"median": median / 2}}
    counted = {"sent_bytes": [1e6], "received_bytes": [1e6]}
    return {"algorithm": algorithm, **figures, **times, **counted, **other}


def test_goals_are_checked_where_they_apply() -> None:
    dense = row_of("gloo_dense", 900e3)
    fast = {"hosts": 8, "rate": "1gbit", "rows": [dense, row_of("oktopk", 70e3)]}
    assert [met for _, met in lab.check_goals(fast)] == [True] * 4
    slow = {**fast, "rows": [dense, row_of("oktopk", 76e3, sent_bytes=[1.7e6])]}
    assert [met for _, met in lab.check_goals(slow)] == [True, False, False, False]
    assert len(lab.check_goals({**fast, "rate": "100mbit"})) == 1
    assert lab.check_goals({**fast, "rows": [dense, row_of("topk_a", 1)]}) == []


def test_turns_are_compared_with_those_of_dense_in_the_same_iteration() -> None:
    dense = row_of("gloo_dense", 20.0, turns=2, turns_us=[10.0, 11.0, 20.0, 21.0])
    quick = row_of("topk_a", 5.0, turns=3, turns_us=[1.0, 2.0, 5.0, 4.0, 10.0, 2.0])
    # 10, 5 and 2 in the first iteration, 5, 2 and 10 in the second.
    assert "pair by pair 2.00 / 5.00 / 10.00" in lab.ratios_text([dense, quick])


def test_the_grid_is_every_combination() -> None:
    assert len(lab.set_ups(lab.parse_options([]))) == 27
    goals = lab.set_ups(lab.parse_options(["--grid", "goals"]))
    assert [(each.hosts, each.rate) for each in goals] == [
        (goal.hosts, goal.rate) for goal in lab.GOALS
    ]
    some = lab.set_ups(lab.parse_options(["--rate", "none", "--numel", "10", "--hosts", "3"]))
    algorithms = (lab.GLOO_DENSE, *lab.EVERY)
    assert some == [lab.SetUp(3, None, 10, lab.DENSITIES, algorithms)]


@pytest.mark.lab
def test_a_link_carries_its_rate_and_no_more() -> None:
    needs_namespaces()
    seconds = 0.5
    code = """
import socket, sys, time
size = int(sys.argv[1])
if socket.gethostname() == "host1":
    with socket.create_server(("", 4000)) as server, server.accept()[0] as peer:
        start = time.perf_counter()
        while size > 0:
            received = len(peer.recv(1 << 20))
            assert received > 0
            size -= received
        print(time.perf_counter() - start, file=open(sys.argv[2], "w"))
else:
    while True:  # until it listens
        try:
            peer = socket.create_connection(("host1", 4000))
            break
        except OSError:
            time.sleep(0.02)
    peer.sendall(bytes(size))
    peer.recv(1)
"""
    rate = 80e6
    with Hosts(2, "80mbit") as pair:
        file = Path(f"/tmp/sparsecomm-{os.getpid()}-seconds")
        command = [sys.executable, "-c", code, str(int(rate / 8 * seconds)), str(file)]
        try:
            pair.run([command] * 2, [{}] * 2)
            took = float(file.read_text())
        finally:
            file.unlink(missing_ok=True)
    # A machine that is busy keeps a link from its rate.
    assert seconds * 0.8 < took < seconds * 10 * PATIENCE


@pytest.mark.lab
def test_a_command_that_fails_ends_the_others() -> None:
    needs_namespaces()
    start = time.monotonic()
    with (
        Hosts(2, None) as pair,
        pytest.raises(HostsError, match=r"failed on host2 \(status 3\)$"),
    ):
        pair.run([["sleep", f"{10 * LONG}"], ["sh", "-c", "exit 3"]], [{}] * 2)
    assert time.monotonic() - start < LONG
    assert namespaces(os.getpid()) == []


@pytest.mark.lab
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    needs_namespaces()
    script = tmp_path / "wait.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from hosts import Hosts\n"
        "with Hosts(2, '1gbit') as hosts:\n"
        "    shell = 'echo up; setsid sleep 1000 & sleep 1000'\n"
        "    hosts.run([['sh', '-c', shell]] * 2, [{}] * 2)\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        running = namespaces(process.pid)
        assert len(running) == 3
        process.send_signal(number)
        # The sleeps hold the other end of the pipe: it ends when they have.
        process.communicate(timeout=LONG)
    assert process.returncode == 128 + number
    assert namespaces(process.pid) == []


def test_without_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert lab.main([]) == 1
    assert capsys.readouterr().err.startswith("lab: needs root")


def test_without_iproute2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts, "_path", lambda: "/nonexistent")
    assert lab.main([]) == 1
    assert capsys.readouterr().err.startswith("lab: needs ip and tc: install iproute2")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--hosts", "1"], "--hosts 1: it takes 2 or more"),
        (["--rate", "fast"], "'fast' is not a rate such as 1gbit"),
        (["--algorithm", "best"], "--algorithm: 'best' is none of dense"),
        (["--parts", "all"], "invalid choice: 'all'"),
    ],
)
def test_bad_arguments(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        lab.main(arguments)
    assert status.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_full_grid_goes_on_with_what_its_file_lacks() -> None:
    options = lab.parse_options([])
    set_ups = lab.set_ups(options)
    assert sum(len(set_up.densities) for set_up in set_ups) == 108
    algorithms = lab.algorithms_of(options)
    assert "auto" in algorithms

    def rows(set_up: lab.SetUp, densities: tuple[float, ...], names: tuple[str, ...]) -> lab.Row:
        return {
            "hosts": set_up.hosts,
            "rate": set_up.rate,
            "transport": "auto",
            "rows": [
                {"numel": set_up.numel, "density": d, "algorithm": name, "pattern": "uniform"}
                for d in densities
                for name in names
            ],
        }

    assert lab.remaining(set_ups, [], options) == set_ups
    whole = rows(set_ups[0], set_ups[0].densities, algorithms)
    in_part = rows(set_ups[1], set_ups[1].densities[:3], algorithms)
    broken_off = rows(set_ups[1], set_ups[1].densities[3:], algorithms[:2])
    more = rows(set_ups[2], set_ups[2].densities[1:2], ("gloo_dense", "another"))
    results = [whole, in_part, broken_off, more]
    first, second, *rest = lab.remaining(set_ups, results, options)
    assert first == lab.replace(set_ups[1], densities=set_ups[1].densities[3:])
    assert second == lab.replace(set_ups[2], algorithms=(*algorithms, "another"))
    assert rest == set_ups[3:]
    assert lab.without(results, first, options) == [whole, in_part, more]
    assert lab.without(results, second, options) == [whole, in_part, broken_off]
    for other in (["--pattern", "clustered"], ["--transport", "c10d"]):
        assert lab.remaining(set_ups, [whole], lab.parse_options(other)) == set_ups


def test_a_second_call_measures_nothing_twice_and_none_begins_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    measured = []

    def measure(set_up: lab.SetUp, options: object) -> list[dict[str, object]]:
        clock[0] += 50.0
        measured.append((set_up.hosts, set_up.rate))
        return [
            row_of(name, 100.0, numel=set_up.numel, density=density, pattern="uniform")
            for name in set_up.algorithms
            for density in set_up.densities
        ]

    monkeypatch.setattr(lab, "measure", measure)
    monkeypatch.setattr(lab.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(lab, "ratios_text", lambda rows: "")
    arguments = ["--rate", "1gbit", "none", "--hosts", "2", "4", "--numel", "1000"]
    arguments += ["--algorithm", "topk_a", "--minutes", "1", "--json", str(tmp_path / "grid.json")]
    for left in ("2 set-ups are left", "wrote", "lacks 0 of the set-ups"):
        lab.measure_allreduces(lab.parse_options(arguments))
        assert left in capsys.readouterr().out
    assert measured == [(2, "1gbit"), (4, "1gbit"), (2, None), (4, None)]
    results = json.loads((tmp_path / "grid.json").read_text())["results"]
    assert [(result["hosts"], result["rate"]) for result in results] == measured

    # One more algorithm: all are measured again, and what was there goes.
    arguments += ["--algorithm", "oktopk", "--minutes", "60"]
    lab.measure_allreduces(lab.parse_options(arguments))
    results = json.loads((tmp_path / "grid.json").read_text())["results"]
    assert len(measured) == 8
    names = [[row["algorithm"] for row in result["rows"]] for result in results]
    assert names == [4 * ["gloo_dense"] + 4 * ["oktopk"] + 4 * ["topk_a"]] * 4

"""sparsecomm-aggregator as a service: metrics, health, logs, settings, control, and its end."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import stat
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aggregators
import pytest
import torch
import torch.distributed as dist
from aggregators import PROGRAM
from patience import LONG, LONG_TIME, wait_until
from prometheus_client.parser import text_string_to_metric_families
from ranks import run_ranks
from test_aggregator import GREETING, MAGIC, greet

import sparsecomm
from sparsecomm import Communicator
from sparsecomm.cli import main

PREFIX = "sparsecomm_aggregator_"
AT_FREE_PORTS = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")


@dataclass
class Service:
    process: subprocess.Popen[str]
    address: tuple[str, int]
    http: str
    control: Path
    log: Path

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.http + path, timeout=LONG) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """By name and labels, without the prefix: ``closed{cause="idle"}``."""
        status, text = self.get("/metrics")
        assert status == 200
        found = {}
        for family in text_string_to_metric_families(text):
            assert family.documentation
            for sample in family.samples:
                labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
                name = sample.name.removeprefix(PREFIX)
                assert name != sample.name
                found[f"{name}{{{labels}}}" if labels else name] = sample.value
        return found

    def ctl(self, *arguments: str) -> int:
        return main(["aggregator", "ctl", "--control", str(self.control), *arguments])

    def ends(self) -> int:
        return self.process.wait(timeout=LONG)


@contextmanager
def service(folder: Path, *arguments: str, settings: str | None = None) -> Iterator[Service]:
    control, log = folder / "control", folder / "log"
    if settings is not None:
        (folder / "settings.toml").write_text(settings)
        arguments = ("--config", str(folder / "settings.toml"), *arguments)
    arguments = ("--http", "127.0.0.1:0", "--control", str(control), *arguments)
    with log.open("w") as stderr, aggregators.aggregator(*arguments, log=stderr) as (process, at):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("http at 127.0.0.1:"), (line, log.read_text())
        host, port = at.rsplit(":", 1)
        http = line.removeprefix("http at ").strip()
        yield Service(process, (host, int(port)), f"http://{http}", control, log)


def other_job(address: tuple[str, int]) -> tuple[socket.socket, bytes]:
    """Greets as a worker of another job than greet() does; returns what is answered."""
    connection = socket.create_connection(address, timeout=LONG)
    connection.sendall(GREETING.pack(MAGIC, 1, 1, 0, 0, 99, 99, 0))
    return connection, connection.recv(1024)


def _reduce(address: str, killed: Any, ready: Any) -> None:
    with Communicator.from_process_group(aggregators=(address,), timeout=LONG_TIME) as communicator:
        for _ in range(3):
            tensor = torch.zeros(64 * 256)  # blocks of 1 KiB
            tensor[: 16 * 256] = 1
            sparsecomm.allreduce(tensor, "ina", communicator=communicator)
            assert tensor.sum() == 2 * 16 * 256
        assert not communicator.lost_aggregators()
        dist.barrier()
        if dist.get_rank() == 0:
            ready.touch()
        wait_until(killed.exists)
        tensor = torch.ones(64 * 256)
        sparsecomm.allreduce(tensor, "ina", communicator=communicator)
        assert tensor.sum() == 2 * 64 * 256
        assert communicator.lost_aggregators()


def test_what_ranks_do_is_counted_and_they_go_on_when_their_job_is_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed, ready = tmp_path / "killed", tmp_path / "ready"
    with service(tmp_path) as aggregator:
        address = "{}:{}".format(*aggregator.address)
        seen: dict[str, Any] = {}

        def operate() -> None:
            try:
                wait_until(ready.exists)
                seen["metrics"] = aggregator.metrics()
                assert aggregator.ctl("jobs", "--json") == 0
                seen["jobs"] = json.loads(capsys.readouterr().out)["jobs"]
                assert aggregator.ctl("jobs") == 0
                seen["table"] = capsys.readouterr().out
                assert aggregator.ctl("kill", seen["jobs"][0]["id"][:6]) == 0
            finally:
                killed.touch()

        operator = threading.Thread(target=operate)
        operator.start()
        run_ranks(2, _reduce, address, killed, ready)
        operator.join(LONG)
        metrics, (job,) = seen["metrics"], seen["jobs"]
        assert metrics["operations_total"] == job["operations"]
        assert job["operations"] >= 3
        # Of three tensors on two ranks; what joining exchanges does not come here.
        assert metrics["blocks_received_total"] == 3 * 2 * 16
        assert metrics["blocks_zero_total"] == 3 * 2 * 48
        assert metrics["received_bytes_total"] == job["received_bytes"] > 3 * 2 * 16 * 1024
        assert metrics["sent_bytes_total"] == job["sent_bytes"]
        assert metrics["round_seconds_count"] == job["rounds"]
        assert metrics["round_seconds_count"] == metrics['round_seconds_bucket{le="+Inf"}']
        assert metrics["memory_bytes"] == job["memory_bytes"] > 0
        assert metrics["jobs"] == metrics["jobs_total"] == 1
        assert metrics["connections"] == job["connected"] == job["workers"] == 2
        assert re.fullmatch("[0-9a-f]{32}", job["id"])
        assert job["id"] in seen["table"]
        after = aggregator.metrics()
        assert after["jobs"] == 0
        assert after['connections_closed_total{cause="ended"}'] == 2
        assert after["operations_total"] == metrics["operations_total"]
        wait_until(lambda: f"job {job['id']} has ended" in aggregator.log.read_text())


def test_health_and_routes(tmp_path: Path) -> None:
    with service(tmp_path, "--connections", "1") as aggregator:
        assert aggregator.get("/healthz") == (200, "ok\n")
        assert aggregator.get("/readyz") == (200, "ready\n")
        assert aggregator.get("/nothing")[0] == 404
        assert aggregator.get("/jobs")[0] == 403  # over the control socket alone
        request = urllib.request.Request(aggregator.http + "/metrics", method="POST", data=b"")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=LONG)
        assert refused.value.code == 405
        assert stat.S_IMODE(aggregator.control.stat().st_mode) == 0o600
        metrics = aggregator.metrics()
        assert metrics[f'build_info{{version="{sparsecomm.__version__}"}}'] == 1
        assert metrics["connections_limit"] == 1
        with greet(aggregator.address, 0, 1):
            assert aggregator.get("/readyz") == (503, "all connections are taken\n")
        aggregator.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(aggregator.http + "/healthz", timeout=0.5)
        aggregator.process.send_signal(signal.SIGCONT)
        assert aggregator.get("/healthz") == (200, "ok\n")


def test_http_that_says_nothing_too_much_or_nonsense_harms_nobody(tmp_path: Path) -> None:
    with service(tmp_path) as aggregator, ExitStack() as opened:
        host, port = aggregator.http.removeprefix("http://").split(":")
        for said in [b"", b"GET", b"\x16\x03\x01" * 100, b"GET /" + b"x" * 100_000] * 20:
            connection = opened.enter_context(
                socket.create_connection((host, int(port)), timeout=LONG)
            )
            with suppress(OSError):  # closed already
                connection.sendall(said)
        begin = time.monotonic()
        assert aggregator.get("/healthz") == (200, "ok\n")  # once those have been closed
        assert time.monotonic() - begin < LONG
        with greet(aggregator.address, 0, 1):
            assert aggregator.metrics()["jobs"] == 1


def test_drains_after_a_signal_and_ends_with_its_last_job(tmp_path: Path) -> None:
    with service(tmp_path, "--drain", "600") as aggregator:
        with greet(aggregator.address, 0, 2), greet(aggregator.address, 1, 2):
            aggregator.process.send_signal(signal.SIGTERM)
            wait_until(lambda: aggregator.get("/readyz") == (503, "draining\n"))
            assert aggregator.get("/healthz") == (200, "ok\n")
            assert aggregator.metrics()["draining"] == 1
            connection, answer = other_job(aggregator.address)
            connection.close()
            assert b"draining" in answer
        assert aggregator.ends() == 0
        assert not aggregator.control.exists()


@pytest.mark.parametrize("how", ["limit", "second signal", "ctl"])
def test_a_drain_has_an_end(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    limit = "0.5" if how == "limit" else "600"
    with service(tmp_path, "--drain", limit) as aggregator, greet(aggregator.address, 0, 1):
        if how == "ctl":
            assert aggregator.ctl("drain", "--limit", "0.5") == 0
            assert capsys.readouterr().out == "draining: 1 jobs, at most 0.5 s\n"
        else:
            aggregator.process.send_signal(signal.SIGTERM)
        if how == "second signal":
            wait_until(lambda: aggregator.metrics()["draining"] == 1)
            aggregator.process.send_signal(signal.SIGINT)
        assert aggregator.ends() == 0


def test_idle_jobs_are_ended(tmp_path: Path) -> None:
    with service(tmp_path, "--idle", "0.5") as aggregator:
        with greet(aggregator.address, 0, 1) as connection:
            assert connection.recv(1) == b""
        wait_until(lambda: aggregator.metrics()['connections_closed_total{cause="idle"}'] == 1)
        wait_until(lambda: "has sent nothing for 0.5 s" in aggregator.log.read_text())


def test_logs_are_json_where_they_are_to_be(tmp_path: Path) -> None:
    file = tmp_path / "own.log"
    with service(tmp_path, "--log-format", "json", "--log-file", str(file)) as aggregator:
        greet(aggregator.address, 0, 1).close()

        def read() -> list[Any]:
            return [
                json.loads(line) for line in file.read_text().splitlines(True) if line[-1] == "\n"
            ]

        # Lines are written by a thread of their own, some time after what they tell of is counted.
        wait_until(lambda: any("cause" in entry for entry in read()))
        wait_until(lambda: sum("job" in entry for entry in read()) == 2)
        entries = read()
        by_job = [entry for entry in entries if "job" in entry]
        assert [entry["message"].split()[-1] for entry in by_job] == ["begun", "s"]
        assert {entry["level"] for entry in entries} == {"info"}
        closed = next(entry for entry in entries if "cause" in entry)
        assert closed["cause"] == "left"
        assert closed["peer"].startswith("127.0.0.1:")
        for entry in entries:
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["time"])
        assert aggregator.log.read_text() == ""


def test_the_least_level_is_obeyed(tmp_path: Path) -> None:
    with service(tmp_path, "--log-level", "warning") as aggregator:
        greet(aggregator.address, 0, 1).close()
        wait_until(lambda: aggregator.metrics()['connections_closed_total{cause="left"}'] == 1)
        assert aggregator.log.read_text() == ""
        connection, _ = other_job(aggregator.address)
        connection.sendall(b"\xff" * 256)
        wait_until(lambda: "warning" in aggregator.log.read_text())
        connection.close()


def test_a_full_disk_loses_the_log_alone(tmp_path: Path) -> None:
    with service(tmp_path, "--log-file", "/dev/full") as aggregator:
        for _ in range(3):
            greet(aggregator.address, 0, 1).close()
        wait_until(lambda: aggregator.metrics()["jobs_total"] >= 1)
        assert aggregator.get("/healthz") == (200, "ok\n")


def test_a_flood_of_lines_is_cut(tmp_path: Path) -> None:
    with service(tmp_path) as aggregator:

        def is_cut() -> bool:
            for _ in range(300):
                socket.create_connection(aggregator.address).close()
            return "lines were left out" in aggregator.log.read_text()

        wait_until(is_cut)


def test_who_does_not_read_the_log_holds_up_nobody(tmp_path: Path) -> None:
    command = [PROGRAM, *AT_FREE_PORTS, "--control", str(tmp_path / "control")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
            ports = [int(process.stdout.readline().rsplit(":", 1)[1]) for _ in range(2)]
            for _ in range(150):  # lines of more than 40 bytes
                socket.create_connection(("127.0.0.1", ports[0])).close()
            url = f"http://127.0.0.1:{ports[1]}/healthz"
            with urllib.request.urlopen(url, timeout=LONG) as response:
                assert response.read() == b"ok\n"
        finally:
            process.kill()


def test_a_drain_without_jobs_is_answered(tmp_path: Path) -> None:
    for _ in range(5):
        with service(tmp_path) as aggregator:
            assert aggregator.ctl("drain") == 0
            assert aggregator.ends() == 0


def test_settings_come_from_a_file_and_the_command_line_goes_before(tmp_path: Path) -> None:
    settings = 'memory = "3MiB"\nconnections = 7\nlimit = 1.5  # s\nlog-level = "error"\n'
    with service(tmp_path, "--connections", "9", settings=settings) as aggregator:
        metrics = aggregator.metrics()
        assert metrics["memory_limit_bytes"] == 3 << 20
        assert metrics["connections_limit"] == 9


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ('memory = "1MiB"\nspeed = 9\n', (":2", "speed")),
        ('memory = "much"\n', (":1", "much")),
        ("\nlimit = [1]\n", (":2", "limit")),
        ("[log]\nformat = 'json'\n", (":1", "log")),
        ("memory = \n", (":1",)),
        ("limit = true\n", (":1", "limit")),
        (None, ("No such file",)),
        ("folder", ("Is a directory",)),
    ],
)
def test_bad_settings_are_named_with_their_line(
    tmp_path: Path, settings: str | None, named: tuple[str, ...]
) -> None:
    file = tmp_path / "settings.toml"
    if settings == "folder":
        file.mkdir()
    elif settings is not None:
        file.write_text(settings)
    command = [PROGRAM, "--listen", "127.0.0.1:0", "--config", file, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 2
    for text in (f"--config {file}", *named):
        assert text in done.stderr


def test_good_settings_pass_the_check(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    for text in ("", 'memory = "1MiB"\nlimit = 0.123456789\n'):
        file.write_text(text)
        command = [PROGRAM, "--listen", "127.0.0.1:0", "--config", file, "--check"]
        assert subprocess.run(command, timeout=LONG, check=False).returncode == 0


def test_the_socket_of_control_is_taken_over_and_never_stolen(tmp_path: Path) -> None:
    with service(tmp_path) as aggregator:
        command = [PROGRAM, "--listen", "127.0.0.1:0", "--control", aggregator.control]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)
        assert done.returncode == 2
        assert str(aggregator.control) in done.stderr
        aggregator.process.kill()
        aggregator.ends()
    assert aggregator.control.exists()
    with service(tmp_path) as again:
        assert again.ctl("jobs") == 0
    file = tmp_path / "file"
    file.write_text("mine")
    command[-1] = file
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 2
    assert file.read_text() == "mine"
    command[-1] = tmp_path / ("x" * 200)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 2


def test_the_command_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none"
    assert main(["aggregator", "ctl", "--control", str(missing), "jobs"]) == 1
    assert str(missing) in capsys.readouterr().err
    with service(tmp_path) as aggregator:
        assert aggregator.ctl("kill", "abcd") == 1
        assert "0 jobs begin with abcd" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            aggregator.ctl("kill", "")
        assert aggregator.ctl("jobs") == 0
        assert capsys.readouterr().out.startswith("job ")
    with pytest.raises(SystemExit):
        main(["aggregator", "ctl", "--control", str(missing), "drain", "--limit", "soon"])


def test_one_job_that_fails_is_not_noticed_by_another(tmp_path: Path) -> None:
    with service(tmp_path) as aggregator, greet(aggregator.address, 0, 1) as quiet:
        connection, _ = other_job(aggregator.address)
        connection.sendall(os.urandom(4096))
        assert connection.recv(1) in (b"", None)
        connection.close()
        wait_until(lambda: aggregator.metrics()['connections_closed_total{cause="protocol"}'] == 1)
        metrics = aggregator.metrics()
        assert metrics["jobs"] == 1
        assert metrics["connections"] == 1
        quiet.setblocking(False)
        with pytest.raises(BlockingIOError):
            quiet.recv(1)


def test_jobs_share_an_aggregator_and_take_the_memory_that_was_admitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    given = ["--jobs", "1,3", "--workers", "2", "--numel", "20000", "--seconds", "1"]
    assert main(["bench", "aggregator", *given, "--json", str(file)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    one, three = json.loads(file.read_text())
    assert (one["jobs"], three["jobs"]) == (1, 3)
    assert three["admitted_bytes"] == 3 * one["admitted_bytes"] > 0
    assert three["resident_bytes"] > three["admitted_bytes"]
    for row in (one, three):
        assert 0 < row["job_least"] <= row["job_median"] <= row["job_most"]
    assert three["spread"] < 1  # of the mean; `sparsecomm bench aggregator` measures it


def test_a_load_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with service(tmp_path, "--connections", "3") as aggregator:
        address = "{}:{}".format(*aggregator.address)
        given = ["--aggregators", address, "--workers", "4", "--jobs", "1", "--seconds", "1"]
        assert main(["bench", "aggregator", *given]) == 1
        assert address in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "aggregator", "--aggregators", "nowhere"])
    assert "nowhere" in capsys.readouterr().err

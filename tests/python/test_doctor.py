"""``sparsecomm doctor``: a healthy machine, and each way of being broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import LONG, PATIENCE, wait_until
from test_exchange import EVERYWHERE, OVER_C10D

import sparsecomm
from sparsecomm import _C, torch_release
from sparsecomm.cli import doctor, main, probe
from sparsecomm.cli.doctor import ABSENT, ADVICE, BROKEN, OK, Finding, Outcome
from sparsecomm.cli.ping_pong import find_mpiexec
from sparsecomm.transports import connect_options, table

LIMIT = 1.5 * LONG
UCX_PROBLEM = next(row["problem"] for row in table() if row["name"] == "ucx")
GOOD = Outcome(
    0, "", {"latency_us": 1.0, "gigabytes_per_second": 2.0, "algorithms": EVERYWHERE}, ""
)


def of(findings: Iterator[Finding]) -> dict[str, tuple[str, str]]:
    return {finding.subject: (finding.status, finding.remedy) for finding in findings}


@pytest.mark.timeout(400)
def test_what_works_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "doctor.json"
    status = main(["doctor", "--seconds", f"{LIMIT}", "--json", str(file)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert printed.endswith("Nothing is broken.\n")
    result = json.loads(file.read_text())
    assert result["broken"] == []
    assert result["build"] == sparsecomm.build_info()
    findings = {finding["subject"]: finding for finding in result["findings"]}
    assert findings["torch"]["status"] == findings["kernels"]["status"] == OK
    assert findings["kernels"]["figures"]["targets"] == _C.kernel_targets()
    usable = [name for name in result["build"]["transports"] if name != "inproc"]
    for name in usable:
        if name == "mpi" and find_mpiexec() is None:
            assert findings[name]["status"] == ABSENT
            continue
        assert findings[name]["status"] == OK
        figures = findings[name]["figures"]
        assert figures["latency_us"] > 0
        assert figures["gigabytes_per_second"] > 0
        there = set(OVER_C10D if name == "c10d" else EVERYWHERE)
        assert set(figures["algorithms"]) == there
    for name in result["build"]["transport_problems"]:
        assert findings[name]["status"] == ABSENT


def test_a_library_that_was_named_and_does_not_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "probe", lambda *_: GOOD)
    assert main(["doctor"]) == 0
    monkeypatch.setenv("SPARSECOMM_UCX_LIBRARY", "/nowhere/libucp.so.0")
    capsys.readouterr()
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "BROKEN  ucx: libucp cannot be opened (/nowhere/libucp.so.0" in printed
    assert "pip install libucx-cu13" in printed
    assert printed.endswith("Broken: ucx.\n")


def test_a_transport_that_is_not_there_is_no_failure() -> None:
    assert doctor.check_transport("ucx", "why", {}, 1).status == ABSENT
    chosen = doctor.check_transport("ucx", "why", {"SPARSECOMM_TRANSPORT": "ucx"}, 1)
    assert (chosen.status, chosen.text) == (BROKEN, "why")


@pytest.mark.skipif(bool(UCX_PROBLEM), reason=UCX_PROBLEM or "ucx")
def test_a_transport_that_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "nonsense")
    found = doctor.check_transport("ucx", "", {}, LIMIT)
    assert found.status == BROKEN
    assert found.text.startswith("failed while connecting\n")
    assert "rank 0: " in found.text
    assert "SPARSECOMM_TRANSPORT=c10d" in found.remedy


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense0")
    found = doctor.check_transport("c10d", "", {}, LIMIT)
    assert found.status == BROKEN
    assert found.text.startswith("failed while starting\n")
    assert "GLOO_SOCKET_IFNAME" in found.remedy
    of_ucx = doctor.failure("ucx", Outcome(1, "starting", {}, ""), 1)
    assert of_ucx is not None
    assert of_ucx.remedy == found.remedy
    variables = {"GLOO_SOCKET_IFNAME": "lo,nonsense0"}
    (again,) = doctor.check_interfaces(variables, ["lo", "eth0"])
    assert again.status == BROKEN
    assert again.text == "this machine has no network interface nonsense0"
    assert "lo, eth0" in again.remedy


def processes_with(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if mark.encode() in line and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize("launcher", [[], ["mpiexec", "-n", "2"]], ids=["alone", "mpiexec"])
def test_what_hangs_is_ended(launcher: list[str], tmp_path: Path) -> None:
    if launcher:
        launcher[0] = find_mpiexec() or pytest.skip("no mpi4py or no mpiexec")
    mark = str(tmp_path / "mark")
    program = (
        "import subprocess, sys\n"
        'print(\'{"step": "waiting"}\', flush=True)\n'
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)', sys.argv[1]])\n"
    )
    limit = 10 * PATIENCE
    outcome = doctor.run([*launcher, sys.executable, "-c", program, mark], limit)
    assert outcome.status is None
    found = doctor.failure("ucx", outcome, limit)
    assert found is not None
    assert found.text == f"did not end within {limit:g} s, while waiting"
    assert "SPARSECOMM_TRANSPORT=c10d" in found.remedy
    wait_until(lambda: processes_with(mark) == [])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"step": "a"}', [{"step": "a"}]),
        (' {"step": "a"} ', [{"step": "a"}]),
        ('{"step": "a"}{"latency_us": 1}', [{"step": "a"}, {"latency_us": 1}]),
        ("", []),
        ("12", []),
        ('{"step": "a"} and more', []),
        ('{"step": ', []),
    ],
)
def test_lines_that_a_launcher_has_joined_are_read(line: str, said: list[dict[str, Any]]) -> None:
    assert doctor.said(line) == said


def test_what_crashes_is_named() -> None:
    program = "import os; print('last words', flush=True); os.kill(os.getpid(), 11)"
    found = doctor.failure("kernels", doctor.run([sys.executable, "-c", program], LIMIT), 1)
    assert found is not None
    assert found.status == BROKEN
    assert found.text == "ended by SIGSEGV while starting\nlast words"


class WrongExchange:
    """Delivers more than there was."""

    def __init__(self, *_: Any) -> None:
        self.residual = torch.zeros(probe.NUMEL)

    def run(self, gradient: torch.Tensor) -> None:
        gradient[0] += 1


def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: Any = SimpleNamespace(rank=0, size=1)
    monkeypatch.setattr(_C, "Exchange", WrongExchange)
    with pytest.raises(RuntimeError, match="oktopk at density 1: 1 of 4096 entries are not"):
        probe.check_allreduce("oktopk", 1.0, alone, torch.clone)
    both: Any = SimpleNamespace(rank=0, size=2)
    with pytest.raises(RuntimeError, match="oktopk at density 1: the ranks' results differ"):
        probe.check_allreduce("oktopk", 1.0, both, lambda tensor: 3 * tensor)


def test_torch_of_another_release() -> None:
    requirements = ["numpy>=1.26", "torch==2.13.*", 'pytest; extra == "test"']
    fitting = torch_release.compiled_for(requirements)
    assert fitting == "2.13.*"
    assert torch_release.compiled_for(["torch>=2.11"]) == ""
    assert torch_release.problem_with("2.15.0", "") == ""
    assert doctor.check_torch("2.13.0+cpu", fitting).status == OK
    found = doctor.check_torch("2.14.1", fitting)
    assert found.status == BROKEN
    assert found.text == "torch 2.14.1 is installed, and sparsecomm was compiled for 2.13.*"
    assert "--no-build-isolation" in found.remedy
    info = sparsecomm.build_info()
    assert info["torch"].startswith(info["compiled_for_torch"].removesuffix("*"))


def run_with_torch(release: str, program: str) -> subprocess.CompletedProcess[str]:
    """A program in a process whose torch says that it is of that release."""
    prefix = f"import sys, torch; torch.__version__ = {release!r}\n"
    return subprocess.run(
        [sys.executable, "-c", prefix + program], capture_output=True, text=True, timeout=LIMIT
    )


def test_import_under_another_torch_says_so_before_anything_compiled_is_loaded() -> None:
    done = run_with_torch(
        "9.99.1+cpu",
        "try:\n"
        "    import sparsecomm\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "print([name for name in sys.modules if name.startswith('sparsecomm._')])\n",
    )
    text, loaded = done.stdout.splitlines()
    assert "9.99.1+cpu" in text
    assert torch_release.compiled_for() in text
    assert "pip install --no-build-isolation" in text
    assert loaded == "[]"


@pytest.mark.parametrize("command", ["doctor", "info"])
def test_the_command_works_although_the_package_does_not_load(command: str) -> None:
    done = run_with_torch(
        "9.99.1", f"import sparsecomm_command; sys.exit(sparsecomm_command.main([{command!r}]))"
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "BROKEN" in done.stdout
    assert "9.99.1" in done.stdout
    assert torch_release.compiled_for() in done.stdout


@pytest.mark.parametrize("arguments", [[], ["--version"], ["plan", "--numel", "1M"]])
def test_other_commands_say_so_on_stderr(arguments: list[str]) -> None:
    done = run_with_torch(
        "9.99.1", f"import sparsecomm_command; sys.exit(sparsecomm_command.main({arguments!r}))"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    assert "9.99.1" in done.stderr


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_a_defect_of_an_import_keeps_its_traceback(command: str) -> None:
    program = (
        "import sys\n"
        "sys.modules['sparsecomm.cli'] = None\n"
        "import sparsecomm_command\n"
        f"sparsecomm_command.main([{command!r}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "sparsecomm.cli" in done.stderr
    assert "BROKEN" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("built", "problem", "torch_has", "status"),
    [
        (False, "not built", False, ABSENT),
        (False, "not built", True, ADVICE),
        (True, "there is no CUDA device", False, ABSENT),
        (True, "", False, ADVICE),
        (True, "the driver is too old", True, BROKEN),
        (True, "", True, OK),
    ],
)
def test_cuda(
    built: bool, problem: str, torch_has: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe", lambda *_: GOOD)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    found = doctor.check_cuda({"cuda": built, "cuda_problem": problem}, torch_has, 1)
    assert found.status == status
    assert bool(found.remedy) == (status in (ADVICE, BROKEN))


def test_advice_on_the_environment() -> None:
    def check(cores: int, ranks: int, **variables: str) -> dict[str, tuple[str, str]]:
        return of(doctor.check_environment(variables, ["auto", "ucx", "c10d"], cores, ranks))

    assert check(8, 2, OMP_NUM_THREADS="4", SPARSECOMM_TRANSPORT="c10d") == {}
    assert check(8, 2) == {
        "OMP_NUM_THREADS": (ADVICE, "OMP_NUM_THREADS=4, for 2 ranks on this machine")
    }
    assert check(8, 2, OMP_NUM_THREADS="5") == {"OMP_NUM_THREADS": (ADVICE, "OMP_NUM_THREADS=4")}
    assert check(8, 2, OMP_NUM_THREADS="many")["OMP_NUM_THREADS"][0] == BROKEN
    assert check(2, 4, OMP_NUM_THREADS="1")["cores"][0] == ADVICE
    set_to_one = {"OMP_NUM_THREADS": "1"}
    typo = check(2, 2, SPARSECOMM_TRANPORT="c10d", **set_to_one)
    assert typo.keys() == {"SPARSECOMM_TRANPORT"}
    assert typo["SPARSECOMM_TRANPORT"][0] == ADVICE
    nowhere = check(2, 2, SPARSECOMM_AGGREGATORS="10.0.0.7", **set_to_one)
    assert nowhere["SPARSECOMM_AGGREGATORS"][0] == BROKEN
    assert check(2, 2, SPARSECOMM_AGGREGATORS="10.0.0.7:7000, b:7000", **set_to_one) == {}
    unknown = check(2, 2, SPARSECOMM_TRANSPORT="verbs", **set_to_one)
    assert unknown == {"SPARSECOMM_TRANSPORT": (BROKEN, "unset it, or name one of auto, ucx, c10d")}


@pytest.mark.parametrize("seconds", ["soon", "0", "nan"])
def test_a_wrong_time_for_connecting_is_a_finding(
    seconds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "probe", lambda *_: GOOD)
    monkeypatch.setenv("SPARSECOMM_CONNECT_TIMEOUT", seconds)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert f"BROKEN  SPARSECOMM_CONNECT_TIMEOUT: SPARSECOMM_CONNECT_TIMEOUT={seconds!r}" in printed
    assert "Broken: SPARSECOMM_CONNECT_TIMEOUT." in printed
    assert main(["info"]) == 0
    with pytest.raises(ValueError, match="SPARSECOMM_CONNECT_TIMEOUT"):
        connect_options("ucx", timedelta(seconds=1))


def test_it_is_not_run_under_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as status:
        main(["doctor"])
    assert status.value.code == 2
    assert "run it without a launcher" in capsys.readouterr().err

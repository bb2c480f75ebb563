"""``sparsecomm doctor``: what works on this machine, tried, and what to do about the rest."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparsecomm.build import build_info
from sparsecomm.cli.bench import UsageError, at_least_1, check_folder, positive, write_json
from sparsecomm.cli.ping_pong import SIZES, find_mpiexec
from sparsecomm.cli.ranks import world_size_of_launcher
from sparsecomm.torch_release import REMEDY, problem_with
from sparsecomm.transports import (
    AGGREGATORS,
    AUTO,
    CHOICE,
    CONNECT_TIMEOUT,
    INTERFACES,
    OWN_VARIABLES,
    UCX_LIBRARY,
    aggregator_addresses,
    checked_connect_timeout,
    names,
    settings,
    table,
)

OK, ABSENT, ADVICE, BROKEN = "ok", "absent", "advice", "BROKEN"
THREADS = "OMP_NUM_THREADS"
STARTING = "starting"  # before a probe says anything
OUTPUT_LINES = 12  # of a failed probe, the last

DESCRIPTION = """\
Tries what sparsecomm needs on this machine: the kernels of every instruction set, the CUDA kernels,
and every transport, between two ranks that it starts: messages, then a small allreduce with every
algorithm, compared with the dense sum. It also looks at the environment.

Each line says ok, absent (not there, and not needed), advice, or BROKEN, and what to do.
"""

EPILOG = """\
exit status:
  0  nothing is broken
  1  something is
"""

REMEDIES = {
    "kernels": "please report this, with the output of sparsecomm info",
    "cuda": "see that the driver serves this device (nvidia-smi), or build sparsecomm anew with "
    "this machine's CUDA",
    "ucx": f"do without: {CHOICE}=c10d; or name what UCX may use, such as UCX_TLS=tcp",
    "c10d": f"name a network interface that works in {INTERFACES}, and see that no firewall keeps "
    "this machine's processes apart",
    "mpi": "see that mpiexec, mpi4py and the MPI that sparsecomm was built with are the same: "
    'pip install --force-reinstall --no-binary mpi4py "sparsecomm[mpi]"',
}


@dataclass(frozen=True)
class Finding:
    """What is known about one part."""

    subject: str
    status: str
    text: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a probe ended."""

    status: int | None  # None: it did not, within its time
    step: str  # the last that it began
    figures: dict[str, Any]
    output: str  # what it printed besides


def add_doctor(parsers: argparse._SubParsersAction[Any]) -> None:
    parser = parsers.add_parser(
        "doctor",
        help="try what is installed, and say what to do about what does not work",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_doctor, parser=parser)
    add = parser.add_argument
    add(
        "--ranks",
        type=at_least_1,
        default=2,
        metavar="P",
        help="that are to run on this machine, for the advice on cores and threads (2)",
    )
    add(
        "--seconds",
        type=positive,
        default=60.0,
        metavar="S",
        help="that each part may take; what takes longer is broken (60)",
    )
    add("--json", type=Path, metavar="FILE", help="also write what was found to FILE, as JSON")


def run_doctor(options: argparse.Namespace) -> int:
    if world_size_of_launcher() is not None:
        raise UsageError("the doctor starts ranks of its own; run it without a launcher")
    check_folder(options.json)
    info, variables, cores = build_info(), settings(), len(os.sched_getaffinity(0))
    python = platform.python_version()
    print(
        f"sparsecomm {info['version']}, torch {info['torch']}, Python {python}, "
        f"{platform.system()} {platform.machine()}, {cores} {'core' if cores == 1 else 'cores'}"
    )
    for name, value in variables.items():
        print(f"{name}={value}")
    findings = []
    for finding in examine(info, variables, cores, options.ranks, options.seconds):
        findings.append(finding)
        print(shown(finding), flush=True)
    broken = [finding.subject for finding in findings if finding.status == BROKEN]
    print(f"Broken: {', '.join(broken)}." if broken else "Nothing is broken.")
    if options.json is not None:
        content = {
            "python": python,
            "cores": cores,
            "build": info,
            "environment": variables,
            "findings": [asdict(finding) for finding in findings],
            "broken": broken,
        }
        write_json(options.json, content)
    return 1 if broken else 0


def examine(
    info: dict[str, Any], variables: dict[str, str], cores: int, ranks: int, seconds: float
) -> Iterator[Finding]:
    """Tries one part after another; probes are given ``seconds`` each."""
    yield check_torch(info["torch"], info["compiled_for_torch"])
    yield check_kernels(info, seconds)
    yield check_cuda(info, torch.cuda.is_available(), seconds)
    for row in table():
        if row["connects_processes"] or row["name"] == "mpi":
            yield check_transport(row["name"], row["problem"], variables, seconds)
    yield from check_environment(variables, names(), cores, ranks)
    yield from check_interfaces(variables, [name for _, name in socket.if_nameindex()])


def check_torch(release: str, fitting: str) -> Finding:
    """``fitting`` are the releases that sparsecomm was compiled for."""
    if problem := problem_with(release, fitting):
        return Finding("torch", BROKEN, problem, REMEDY)
    return Finding("torch", OK, f"{release}; sparsecomm was compiled for {fitting or 'unknown'}")


def check_kernels(info: dict[str, Any], seconds: float) -> Finding:
    taken, others = info["simd_target"], ", ".join(info["simd_targets"])
    if failed := failure("kernels", probe("kernels", seconds), seconds):
        return failed
    figures = {"taken": taken, "targets": info["simd_targets"]}
    if taken == "scalar":
        return Finding(
            "kernels",
            ADVICE,
            "scalar is taken; this processor has no instruction set that the others are for",
            "expect selection to take several times as long as elsewhere",
            figures,
        )
    return Finding("kernels", OK, f"{taken} is taken; {others} select the same bits", "", figures)


def check_cuda(info: dict[str, Any], torch_has_device: bool, seconds: float) -> Finding:
    if not info["cuda"]:
        without = "sparsecomm was built without the CUDA kernels (no nvcc, or a torch without CUDA)"
        if not torch_has_device:
            return Finding("cuda", ABSENT, without)
        remedy = "gradients on a device need them: build it anew with nvcc on PATH"
        return Finding("cuda", ADVICE, without, remedy)
    if not info["cuda_problem"] and not torch_has_device:
        remedy = "install a torch with CUDA if gradients are to be on the device"
        return Finding("cuda", ADVICE, "there is a device, but this torch cannot use it", remedy)
    if not torch_has_device:
        return Finding("cuda", ABSENT, info["cuda_problem"])
    if info["cuda_problem"]:
        return Finding("cuda", BROKEN, info["cuda_problem"], REMEDIES["cuda"])
    return failure("cuda", probe("cuda", seconds), seconds) or Finding(
        "cuda", OK, f"{torch.cuda.get_device_name()} selects the k largest"
    )


def check_transport(name: str, problem: str, variables: dict[str, str], seconds: float) -> Finding:
    """``problem`` says why it cannot be used, and is empty where it can."""
    launcher: tuple[str, ...] = ()
    if name == "mpi" and not problem:
        mpiexec = find_mpiexec()
        if mpiexec is None:
            problem = "there is no mpi4py, or no mpiexec; pip install mpi4py mpich"
        else:
            launcher = (mpiexec, "-n", "2")
    if problem:
        asked = name == "ucx" and UCX_LIBRARY in variables
        asked = asked or variables.get(CHOICE) == name
        return Finding(name, BROKEN if asked else ABSENT, problem)
    outcome = probe(name, seconds, *launcher)
    if failed := failure(name, outcome, seconds):
        return failed
    latency, bandwidth = outcome.figures["latency_us"], outcome.figures["gigabytes_per_second"]
    return Finding(
        name,
        OK,
        f"{SIZES[0]} B one way in {latency:.2f} us, {SIZES[-1] >> 20} MiB at {bandwidth:.2f} GB/s; "
        f"{len(outcome.figures['algorithms'])} algorithms agree with the dense sum",
        "",
        outcome.figures,
    )


def check_environment(
    variables: dict[str, str], transports: Sequence[str], cores: int, ranks: int
) -> Iterator[Finding]:
    """``ranks`` are to run on the machine's ``cores``."""
    for name in variables:
        if name.startswith("SPARSECOMM_") and name not in OWN_VARIABLES:
            remedy = f"there are {', '.join(OWN_VARIABLES)}"
            yield Finding(name, ADVICE, "nothing reads this variable", remedy)
    if (choice := variables.get(CHOICE, "")) not in ("", *transports):
        remedy = f"unset it, or name one of {', '.join(transports)}"
        yield Finding(CHOICE, BROKEN, f"there is no transport {choice!r}", remedy)
    try:
        checked_connect_timeout(variables.get(CONNECT_TIMEOUT, ""))
    except ValueError as error:
        remedy = f"unset it, or name seconds, as in {CONNECT_TIMEOUT}=30"
        yield Finding(CONNECT_TIMEOUT, BROKEN, str(error), remedy)
    try:
        aggregator_addresses((), AUTO, variables)
    except ValueError as error:
        remedy = f"unset it, or name some, as in {AGGREGATORS}=10.0.0.7:7000,10.0.0.8:7000"
        yield Finding(AGGREGATORS, BROKEN, str(error), remedy)
    if ranks > cores:
        yield Finding(
            "cores",
            ADVICE,
            f"{ranks} ranks would share {cores}; whoever waits for a message takes a core from "
            "whoever computes",
            f"run {cores} or fewer on this machine, or allow the process more cores (taskset, "
            "the container's or the scheduler's limit)",
        )
    per_rank = max(1, cores // ranks)
    threads = variables.get(THREADS)
    if threads is None:
        yield Finding(
            THREADS,
            ADVICE,
            "not set: torchrun makes it 1, and under other launchers every rank takes as many "
            f"threads as there are cores ({cores})",
            f"{THREADS}={per_rank}, for {ranks} ranks on this machine",
        )
    elif not threads.isdigit() or int(threads) == 0:
        yield Finding(
            THREADS, BROKEN, f"{threads!r} is no number of threads", f"{THREADS}={per_rank}"
        )
    elif int(threads) > per_rank:
        yield Finding(
            THREADS,
            ADVICE,
            f"{ranks} ranks with {threads} threads each share {cores} cores",
            f"{THREADS}={per_rank}",
        )


def check_interfaces(variables: dict[str, str], there: Sequence[str]) -> Iterator[Finding]:
    """``there`` are the machine's network interfaces."""
    chosen = [name for name in variables.get(INTERFACES, "").split(",") if name]
    if missing := [name for name in chosen if name not in there]:
        text = f"this machine has no network interface {', '.join(missing)}"
        remedy = f"name some of {', '.join(there)}, or unset it"
        yield Finding(INTERFACES, BROKEN, text, remedy)
    if chosen:
        return
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = ""
    if not address or address.startswith("127."):
        text = f"this machine's name, {host}, stands for {address or 'no address'}"
        remedy = f"between hosts, name the network interface in {INTERFACES}"
        yield Finding("host name", ADVICE, text, remedy)


def probe(name: str, seconds: float, *launcher: str) -> Outcome:
    """Runs ``python -m sparsecomm.cli.probe``, and ends all its processes after ``seconds``."""
    command = [*launcher, sys.executable, "-m", "sparsecomm.cli.probe", name, str(seconds)]
    return run(command, seconds)


def run(command: Sequence[str], seconds: float) -> Outcome:
    """Runs a program in a session of its own, so that all it starts can be ended."""
    # A file: a pipe would stay open as long as any of its processes lived.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        status: int | None = None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        printed = output.read().decode(errors="replace")
    step, figures, others = STARTING, {}, []
    for line in printed.splitlines():
        messages = said(line)
        if not messages:
            others.append(line)
        for fields in messages:
            if "step" in fields:
                step = fields["step"]
            else:
                figures = fields
    return Outcome(status, step, figures, "\n".join(others[-OUTPUT_LINES:]))


def said(line: str) -> list[dict[str, Any]]:
    """What a probe said in a line: once, or several ranks whose lines a launcher has joined."""
    decoder, found = json.JSONDecoder(), []
    while line := line.lstrip():
        try:
            fields, end = decoder.raw_decode(line)
        except ValueError:
            return []
        if not isinstance(fields, dict):
            return []
        found.append(fields)
        line = line[end:]
    return found


def failure(subject: str, outcome: Outcome, seconds: float) -> Finding | None:
    """What is broken, ``None`` after a success."""
    if outcome.status == 0:
        return None
    if outcome.status is None:
        text = f"did not end within {seconds:g} s, while {outcome.step}"
    elif outcome.status < 0:
        text = f"ended by {signal.Signals(-outcome.status).name} while {outcome.step}"
    else:
        text = f"failed while {outcome.step}"
    # The ranks of every transport but MPI meet over gloo.
    meeting = subject == "ucx" and outcome.step == STARTING
    remedy = REMEDIES["c10d" if meeting else subject]
    if outcome.status is None:
        remedy += "; on a busy machine, allow it more --seconds"
    return Finding(subject, BROKEN, "\n".join(filter(None, [text, outcome.output])), remedy)


def shown(finding: Finding) -> str:
    """A line, and the remedy on one of its own."""
    indent = "\n" + " " * 8
    lines = [f"{finding.status:6}  {finding.subject}: {finding.text}"]
    if finding.remedy:
        lines.append(f"-> {finding.remedy}")
    return "\n".join(lines).replace("\n", indent)

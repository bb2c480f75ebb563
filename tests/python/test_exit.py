"""Programs that end without closing anything, whatever is pending: their status is 0."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

PROGRAM = Path(__file__).with_name("exit_program.py")
NAMES = ("communicator", "collectives", "backend", "hook", "optimizer", "shards")
HOWS = ("", "callback", "pending", "pending callback")
KINDS = [
    " ".join(filter(None, (name, how, last)))
    for name, how, last in itertools.product(NAMES, HOWS, ("", "destroy"))
    # These have no futures of their own.
    if not (name in ("optimizer", "shards") and "callback" in how)
]
KINDS += ["hook monitor", "daemon", "daemon destroy"]
# In the ordinary run: each program that leaves something pending, and what died most often.
FEW = [
    "communicator",
    "communicator pending callback",
    "collectives pending callback",
    "backend pending callback",
    "backend callback destroy",
    "hook pending callback",
    "hook monitor",
    "optimizer pending",
    "shards pending",
    "daemon",
]


def run(kinds: list[str], rounds: int) -> tuple[dict[str, dict[str, int]], str]:
    """How often ranks ended with which status, by kind, and what they wrote to stderr."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, str(PROGRAM), str(store.port), str(rounds), *kinds]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), ended.stderr


def statuses(kinds: list[str], rounds: int) -> dict[str, dict[str, int]]:
    found, said = run(kinds, rounds)
    bad = {
        kind: counts
        for kind, counts in found.items()
        if counts != {"0 on rank 0": rounds, "0 on rank 1": rounds}
    }
    assert not bad, f"{bad}\n{said[-8000:]}"
    return found


@pytest.mark.timeout(600)  # many processes, one after the other
def test_programs_end_with_status_0_whatever_is_pending() -> None:
    assert statuses(FEW, 1).keys() == set(FEW) <= set(KINDS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*NAMES, "daemon"])
def test_twenty_programs_of_each_kind_end_with_status_0(name: str) -> None:
    statuses([kind for kind in KINDS if kind.startswith(name)], 20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_torch_alone_ends_with_is_no_better() -> None:
    """Torch's own gloo may abort as Python ends; with sparsecomm the status is 0 all the same."""
    hows = [" ".join(filter(None, parts)) for parts in itertools.product(HOWS, ("", "destroy"))]
    alone, said = run([f"control {how}".strip() for how in hows], 20)
    for kind, counts in alone.items():
        for status in counts:
            number, _, _ = status.partition(" ")
            assert number in ("0", str(-signal.SIGABRT)), f"{kind}: {counts}\n{said[-8000:]}"
    ours = statuses([f"communicator {how}".strip() for how in hows], 20)
    assert _failures(ours) <= _failures(alone), (ours, alone)


def _failures(found: dict[str, dict[str, int]]) -> int:
    return sum(
        count
        for counts in found.values()
        for status, count in counts.items()
        if not status.startswith("0 ")
    )

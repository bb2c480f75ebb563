"""sparsecomm over MPI, without torch.distributed: mpi_program.py under mpiexec."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from patience import LONG

import sparsecomm
from sparsecomm.transports import MPI_LIBRARY

PROGRAM = Path(__file__).with_name("mpi_program.py")
MPIEXEC = shutil.which(
    "mpiexec", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
)

try:
    import mpi4py  # noqa: F401
except ImportError:
    HAS_MPI = False
else:
    HAS_MPI = MPIEXEC is not None and MPI_LIBRARY.exists()

SLOW = pytest.mark.slow
needs_mpi = pytest.mark.skipif(not HAS_MPI, reason="no mpi4py, no mpiexec, or built without MPI")


def start(ranks: int, *arguments: str, wrapper: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    assert MPIEXEC is not None
    return subprocess.Popen(
        [MPIEXEC, "-n", str(ranks), *wrapper, sys.executable, str(PROGRAM), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(ranks: int, *arguments: str) -> Any:
    process = start(ranks, *arguments)
    output, errors = process.communicate(timeout=1.5 * LONG)
    assert process.returncode == 0, errors
    return json.loads(output)


@needs_mpi
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=SLOW), 3, pytest.param(4, marks=SLOW)])
def test_contracts(ranks: int) -> None:
    sent, received = run(ranks, "contracts")
    assert sent == received
    assert (sent > 0) == (ranks > 1)


@needs_mpi
def test_two_communicators_and_mpi4py_side_by_side() -> None:
    assert run(3, "two_communicators") == [3, 2, 3, 3]


@needs_mpi
def test_ranks_that_disagree_raise_the_same_and_go_on() -> None:
    text = "numel: 100 on rank 0 but 101 on rank 1 but 102 on rank 2"
    assert text in run(3, "mismatch")


@needs_mpi
@pytest.mark.parametrize("level", ["multiple", "serialized", "funneled", "single"])
def test_thread_levels(level: str) -> None:
    said = run(2, "thread_level", level)
    if level in ("multiple", "serialized"):
        assert said == f"{level}: 2.0"
    else:
        assert f"MPI_THREAD_{level.upper()}" in said
        assert "mpi4py.rc.thread_level" in said


@needs_mpi
@pytest.mark.parametrize("seed", ["a", pytest.param("b", marks=SLOW)])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_survivors_name_the_rank_that_is_lost(how: str, seed: str) -> None:
    # A shell outlives the rank, or mpiexec would end the others.
    process = start(3, "lost_rank", how, seed, wrapper=("sh", "-c", '"$@"; exec sleep 600', "sh"))
    assert process.stdout is not None
    victim = None
    said = []
    for line in process.stdout:
        if match := re.match(r"victim (\d+)", line):
            victim = int(match[1])
        # Two ranks may write into one line.
        said += [json.loads(text) for text in re.findall(r"\{[^{}]*\}", line)]
        if len(said) == 2:
            break
    if victim is not None and how == "stop":
        os.kill(victim, signal.SIGKILL)
    process.terminate()
    _, errors = process.communicate(timeout=LONG)
    assert sorted(survivor["rank"] for survivor in said) == [0, 1], errors
    for survivor in said:
        assert survivor["error"].startswith("rank 2 "), survivor
        assert survivor["waited"] < survivor["timeout"] + LONG / 2, survivor
        assert survivor["sum"] == 2, survivor


@needs_mpi
def test_another_library_is_refused(tmp_path: Path) -> None:
    from sparsecomm import _C

    with pytest.raises(ValueError, match=r"built with MPICH .* is Open MPI v4\.1\.4; install"):
        _C.mpi_transport(str(MPI_LIBRARY), "Open MPI v4.1.4", 0)
    with pytest.raises(ValueError, match=r"bound to MPICH Version: .* is MPICH Version: 3\.2"):
        _C.mpi_transport(str(MPI_LIBRARY), "MPICH Version: 3.2", 0)
    missing = tmp_path / "_mpi.so"
    with pytest.raises(ValueError, match=r"cannot be loaded: .*No such file"):
        _C.mpi_transport(str(missing), "MPICH Version: 3.2", 0)


@needs_mpi
def test_importing_sparsecomm_loads_no_mpi() -> None:
    check = "import sparsecomm; assert 'libmpi' not in open('/proc/self/maps').read()"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=LONG)


def test_what_is_no_communicator_is_refused() -> None:
    pytest.importorskip("mpi4py")
    check = (
        "import sparsecomm\n"
        "from mpi4py import MPI\n"
        "for comm in (None, MPI.COMM_NULL):\n"
        "    try: sparsecomm.Communicator.from_mpi(comm)\n"
        "    except ValueError as error: assert 'not a communicator' in str(error)\n"
        "    else: raise AssertionError(comm)\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=LONG)


# Without MPI


def test_a_communicator_of_a_process_group() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with sparsecomm.Communicator.from_process_group(transport="c10d") as communicator:
            assert (communicator.rank, communicator.size) == (0, 1)
            assert communicator.transport == "c10d/gloo"
            assert communicator.counters() == {"sent_bytes": 0, "received_bytes": 0, "messages": 0}
            assert "rank 0 of 1, c10d/gloo" in repr(communicator)
        assert "closed" in repr(communicator)
        with pytest.raises(ValueError, match="closed; make a new one"):
            communicator.counters()
    finally:
        dist.destroy_process_group()


def test_a_communicator_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        sparsecomm.Communicator.from_process_group()

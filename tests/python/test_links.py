"""A link that goes down: hosts of their own, and link_program.py on each."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from link_program import DEADLINE, OVER_MPI
from patience import LONG, wait_until

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from hosts import Hosts, missing  # noqa: E402
from test_exchange import TRANSPORTS  # noqa: E402
from test_mpi import MPIEXEC, needs_mpi  # noqa: E402

PROGRAM = Path(__file__).with_name("link_program.py")
RANKS = 3
# What mpiexec prints instead of starting anything: a command for each host, in their order.
JOIN = (
    'until grep -qs HYDRA_LAUNCH_END "$0"; do sleep 0.05; done; '
    'eval "exec $(sed -n "s/^HYDRA_LAUNCH: //p" "$0" | sed -n "$1p")"'
)
LAUNCH = f'launch="$0"; "$@" > "$launch" & sh -c \'{JOIN}\' "$launch" 1 && wait $!'


def commands_of(transport: str, folder: Path, hosts: Hosts) -> list[list[str]]:
    """One for each host."""
    program = [sys.executable, str(PROGRAM), transport, str(folder)]
    if transport != OVER_MPI:
        return [program] * RANKS
    assert MPIEXEC is not None
    launch = str(folder / "launch")
    names = ("-hosts", ",".join(hosts.names), "-ppn", "1", "-n", str(RANKS))
    first = ["sh", "-c", LAUNCH, launch, MPIEXEC, "-launcher", "manual", *names, *program]
    return [first, *(["sh", "-c", JOIN, launch, str(rank + 1)] for rank in range(1, RANKS))]


@pytest.mark.lab
@pytest.mark.timeout(400)
@pytest.mark.parametrize("cut", [0, 2])  # the first holds the store as well
@pytest.mark.parametrize("transport", [*TRANSPORTS, pytest.param(OVER_MPI, marks=needs_mpi)])
def test_a_link_goes_down_and_comes_up_again(transport: str, cut: int, tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    # The hosts are left first, which ends what runs on them.
    with ThreadPoolExecutor() as pool, Hosts(RANKS, None) as hosts:
        commands = commands_of(transport, tmp_path, hosts)
        environments = hosts.rank_environments(PYTHONPATH=str(ROOT))
        running = pool.submit(hosts.run, commands, environments)

        def until_all(mark: str) -> None:
            def all_have_come() -> bool:
                if running.done():
                    running.result()
                return all((tmp_path / f"{mark}-{rank}").exists() for rank in range(RANKS))

            wait_until(all_have_come)

        until_all("running")
        time.sleep(random.Random(f"{transport} {cut}").random() * 0.2)
        hosts.set_link(cut, up=False)
        until_all("raised")
        hosts.set_link(cut, up=True)
        # TCP tries again after as long as it has tried in vain, or after two minutes.
        running.result(timeout=5 * LONG)
    for rank in range(RANKS):
        said = json.loads((tmp_path / f"said-{rank}.json").read_text())
        # The kernel, without the deadline, and a store that does not answer take longer.
        assert said["took"] < DEADLINE + 20, said
        assert said["closing"] < 20, said
        assert said["sum"] == sum(range(RANKS)), said
        # Without the store, which the first holds, a rank names the one that it waited for.
        named = cut if cut != 0 and rank != cut else r"\d"
        assert re.match(f"rank {named} ", said["text"]), said

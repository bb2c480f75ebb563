"""A rank that is killed while children of it live on, on a host of its own."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from orphan_program import DEADLINE
from patience import LONG, wait_until
from test_exchange import TRANSPORTS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from hosts import Hosts, missing  # noqa: E402

PROGRAM = Path(__file__).with_name("orphan_program.py")
RANKS = 2
# A host's processes end with the first of its process ids, which therefore is not the rank.
HOST = 'folder="$0"; "$@"; until [ -e "$folder/over" ]; do sleep 0.1; done'


@pytest.mark.lab
@pytest.mark.parametrize("child", ["forked", "executed", "loader"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_rank_is_noticed_though_its_children_live_on(
    transport: str, child: str, tmp_path: Path
) -> None:
    if reason := missing():
        pytest.skip(reason)
    # Process ids of their own: ranks that see each other's processes need no connections for this.
    own_ids = ["unshare", "--pid", "--fork", "--mount-proc"]
    program = [sys.executable, str(PROGRAM), transport, child, str(tmp_path)]
    command = [*own_ids, "sh", "-c", HOST, str(tmp_path), *program]
    with ThreadPoolExecutor() as pool, Hosts(RANKS, None) as hosts:
        environments = hosts.rank_environments(PYTHONPATH=str(ROOT))
        running = pool.submit(hosts.run, [command] * RANKS, environments)

        def all_have_said() -> bool:
            if running.done():
                running.result()
            return all((tmp_path / f"said-{rank}.json").exists() for rank in range(RANKS - 1))

        wait_until(all_have_said)
        (tmp_path / "over").touch()
        running.result(timeout=LONG)
    for rank in range(RANKS - 1):
        said = json.loads((tmp_path / f"said-{rank}.json").read_text())
        assert f"rank {RANKS - 1} " in said["text"], said
        assert said["seconds"] < DEADLINE.total_seconds() / 2, said

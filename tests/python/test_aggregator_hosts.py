"""Two jobs and two aggregators on hosts of their own: links that are cut or slow, an aggregator
that is killed and comes back, tokens that change, and a job that fails."""

from __future__ import annotations

import json
import os
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aggregator_program import PORT
from patience import LONG, wait_until

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from hosts import Hosts, missing  # noqa: E402

PROGRAM = Path(__file__).with_name("aggregator_program.py")
JOBS = ("one", "two")
RANKS = 2  # of a job
TOKEN = "team {}\n".format("1" * 32)
OTHER_TOKEN = "team {}\n".format("2" * 32)
STEPS = 5


class Scene:
    """The hosts: those of job one's ranks, of job two's, and of the aggregators."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.turns = [0, 0]
        self.running: Future[None] | None = None

    def commands(self) -> list[list[str]]:
        program = [sys.executable, str(PROGRAM)]
        addresses = [f"{address}:{PORT}" for address in self.hosts.addresses[-2:]]
        ranks = [[*program, "host", str(self.folder), job, *addresses] for job in JOBS]
        ranks = [command for command in ranks for _ in range(RANKS)]
        return [*ranks, *([*program, "aggregator", str(self.folder), str(i)] for i in range(2))]

    def environments(self) -> list[dict[str, str]]:
        own = {
            "PYTHONPATH": f"{ROOT}:{PROGRAM.parent}",
            "SPARSECOMM_AGGREGATOR_TOKEN_FILE": str(self.folder / "token"),
        }
        found = self.hosts.rank_environments(**own)
        for index, environment in enumerate(found):
            first = index // RANKS * RANKS  # of the job
            environment["MASTER_ADDR"] = self.hosts.addresses[first]
            environment["WORLD_SIZE"] = str(RANKS)
            environment["RANK"] = str(index - first)
        return found

    def said(self, job: str) -> list[dict[str, Any]]:
        """What each rank of it has said last."""
        files = [self.folder / f"{job}-{rank}.json" for rank in range(RANKS)]
        return [json.loads(file.read_text()) for file in files if file.exists()]

    def wait_until(self, holds: Any) -> None:
        def holds_while_all_run() -> bool:
            if self.running is not None and self.running.done():
                self.running.result()
            return bool(holds())

        wait_until(holds_while_all_run)

    def wait_until_all(self, lost: list[int], jobs: tuple[str, ...] = JOBS) -> None:
        """Until all ranks have made some more steps, and do without these aggregators."""
        addresses = [f"{self.hosts.addresses[2 * RANKS + i]}:{PORT}" for i in lost]
        before = {job: [said["steps"] for said in self.said(job)] for job in jobs}

        def holds() -> bool:
            for job in jobs:
                found = self.said(job)
                if len(found) < RANKS:
                    return False
                before[job] = before[job] or [0] * RANKS
                for said, steps in zip(found, before[job], strict=True):
                    assert said["error"] == ""
                    if said["steps"] < steps + STEPS or sorted(said["lost"]) != sorted(addresses):
                        return False
            return True

        self.wait_until(holds)

    def kill(self, aggregator: int) -> None:
        (self.folder / f"kill-{aggregator}-{self.turns[aggregator]}").touch()

    def start(self, aggregator: int) -> None:
        (self.folder / f"start-{aggregator}-{self.turns[aggregator]}").touch()
        self.turns[aggregator] += 1

    def set_tokens(self, tokens: str) -> None:
        partial = self.folder / "tokens.partial"
        partial.write_text(tokens)
        partial.replace(self.folder / "tokens")

    def log(self, aggregator: int) -> str:
        return (self.folder / f"log-{aggregator}").read_text()


@pytest.mark.lab
@pytest.mark.timeout(600)
def test_jobs_outlast_what_happens_to_aggregators(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    (tmp_path / "token").write_text(TOKEN)
    with ThreadPoolExecutor() as pool, Hosts(2 * RANKS + 2, "1gbit") as hosts:
        scene = Scene(hosts, tmp_path)
        scene.set_tokens(TOKEN)
        scene.running = pool.submit(hosts.run, scene.commands(), scene.environments())
        scene.wait_until_all(lost=[])

        # A link is cut, and mended.
        hosts.set_link(2 * RANKS, up=False)
        scene.wait_until_all(lost=[0])
        hosts.set_link(2 * RANKS, up=True)
        scene.wait_until_all(lost=[])

        # A link is slow: nobody is lost.
        hosts.set_rate(2 * RANKS + 1, "5mbit")
        scene.wait_until_all(lost=[])
        hosts.set_rate(2 * RANKS + 1, "1gbit")

        # The tokens change: who is in stays in, and nobody comes in by the former.
        scene.set_tokens(OTHER_TOKEN)
        scene.wait_until_all(lost=[])
        scene.kill(1)
        scene.wait_until_all(lost=[1])
        scene.start(1)
        scene.wait_until(lambda: "token is none" in scene.log(1))
        scene.wait_until_all(lost=[1])
        scene.set_tokens(OTHER_TOKEN.replace("team", "others") + TOKEN)
        scene.wait_until_all(lost=[])

        # A job fails: its survivor names who is gone, and the other job does not notice.
        os.kill(scene.said("two")[1]["pid"], signal.SIGKILL)
        scene.wait_until(lambda: scene.said("two")[0]["error"])
        assert "rank 1" in scene.said("two")[0]["error"]
        scene.wait_until_all(lost=[], jobs=("one",))
        (tmp_path / "over").touch()
        scene.running.result(timeout=LONG)

"""What each host of test_aggregator_hosts.py runs.

``python aggregator_program.py host FOLDER JOB ADDRESS...`` makes allreduces without end, and
``python aggregator_program.py aggregator FOLDER NUMBER`` an aggregator that dies and comes back as
it is told. FOLDER, which all hosts see, holds what they are told and who has got how far.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from aggregators import PROGRAM
from patience import PATIENCE

import sparsecomm
from sparsecomm import Communicator
from sparsecomm.cli.bench import write_json

NUMEL = 64 * 256  # 64 blocks
PORT = 7000
DEADLINE = 8 * PATIENCE  # s, of an operation, half of which aggregators may take
PAUSE = 0.01  # s


def rank(folder: Path, job: str, addresses: list[str]) -> None:
    dist.init_process_group("gloo")
    own = dist.get_rank()
    mine = folder / f"{job}-{own}.json"
    said = {"pid": os.getpid(), "steps": 0, "lost": [], "error": ""}
    with Communicator.from_process_group(
        aggregators=addresses, timeout=timedelta(seconds=DEADLINE)
    ) as communicator:
        while not (folder / "over").exists():
            tensor = torch.zeros(NUMEL)
            tensor[: NUMEL // 4] = own + 1
            try:
                sparsecomm.allreduce(tensor, "ina", communicator=communicator)
            except RuntimeError as error:
                write_json(mine, {**said, "error": str(error)})
                break
            assert (tensor[: NUMEL // 4] == 3).all()
            assert not tensor[NUMEL // 4 :].any()
            said["steps"] = int(said["steps"]) + 1
            said["lost"] = [*communicator.lost_aggregators()]
            write_json(mine, said)
            time.sleep(PAUSE)
    os._exit(0)  # without a word to those who are gone


def aggregator(folder: Path, number: int) -> None:
    command = [str(PROGRAM), "--listen", f":{PORT}", "--tokens", str(folder / "tokens")]
    log_file = ["--log-file", str(folder / f"log-{number}")]
    with ExitStack() as stack:
        for turn in range(1000):
            with subprocess.Popen([*command, *log_file, "--drain", "0"]) as process:
                stack.callback(process.kill)
                while not (folder / f"kill-{number}-{turn}").exists():
                    if (folder / "over").exists():
                        process.send_signal(signal.SIGTERM)
                        assert process.wait() == 0
                        return
                    assert process.poll() is None
                    time.sleep(PAUSE)
                process.kill()
            while not (folder / f"start-{number}-{turn}").exists():
                time.sleep(PAUSE)


def host(folder: Path, job: str, addresses: list[str]) -> None:
    """Runs a rank, and outlives it, as a host does."""
    subprocess.run([sys.executable, __file__, "rank", folder, job, *addresses], check=False)
    while not (folder / "over").exists():
        time.sleep(PAUSE)


def main(role: str, folder: str, *rest: str) -> None:
    if role in ("host", "rank"):
        run = host if role == "host" else rank
        run(Path(folder), rest[0], list(rest[1:]))
    else:
        aggregator(Path(folder), int(rest[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])

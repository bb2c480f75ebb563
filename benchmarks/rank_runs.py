"""Runs of programs on ranks, each made once: what was broken off goes on where it stopped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts import Hosts, HostsError

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
LINK = "1gbit"
LONGEST_RUN = 3600  # seconds


@dataclass(frozen=True)
class Run:
    """A command that leaves `result` in `folder`."""

    folder: Path
    command: list[str]
    result: str = "summary.json"
    hosts: int = 0  # 0: ranks of this machine, with nothing between them

    def is_done(self) -> bool:
        """Whether it has been made, by the same command."""
        made = self.record().get("command")
        return bool(made == self.command) and (self.folder / self.result).is_file()

    def seconds(self) -> float:
        """Returns what it took, once it is done."""
        return float(self.record()["seconds"])

    def record(self) -> dict[str, Any]:
        """Its command and its seconds, if it has been made."""
        try:
            found = json.loads((self.folder / "command.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def make(self) -> None:
        """Runs it anew.

        Raises:
            subprocess.SubprocessError, HostsError: it has failed; log.txt in its folder says why.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        log = self.folder / "log.txt"
        output = ["--output", str(self.folder)]
        begin = time.monotonic()
        if self.hosts > 0:
            command = [sys.executable, *self.command, *output]
            # Every host adds to the log.
            logged = ["sh", "-c", f'exec "$0" "$@" >> "{log}" 2>&1', *command]
            with Hosts(self.hosts, LINK) as hosts:
                hosts.run_ranks(logged)
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, "--nproc-per-node", str(RANKS), *self.command, *output]
            with (
                log.open("w") as file,
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                ) as process,
            ):
                try:
                    status = process.wait(LONGEST_RUN)
                except BaseException:
                    process.terminate()  # upon which it ends its ranks, as it could not if killed
                    raise
            if status != 0:
                raise subprocess.CalledProcessError(status, command)
        record = {"command": self.command, "seconds": time.monotonic() - begin}
        (self.folder / "command.json").write_text(json.dumps(record))


def make_all(runs: Sequence[Run]) -> list[Run]:
    """Makes those that are not made yet; returns those that have failed."""
    left = [run for run in runs if not run.is_done()]
    print(f"{len(runs)} runs, of which {len(runs) - len(left)} are there", flush=True)
    failed = []
    begin = time.monotonic()
    for number, run in enumerate(left, 1):
        try:
            run.make()
        except (subprocess.SubprocessError, HostsError) as error:
            failed.append(run)
            print(f"{run.folder}: {error}", file=sys.stderr, flush=True)
            continue
        minutes = (time.monotonic() - begin) / 60
        print(
            f"{number}/{len(left)} {os.path.relpath(run.folder)}: {minutes:.1f} minutes so far, "
            f"about {minutes / number * (len(left) - number):.0f} to go",
            flush=True,
        )
    return failed

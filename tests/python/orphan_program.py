"""What each host of test_orphans.py runs: ``python orphan_program.py TRANSPORT CHILD FOLDER``.

The last rank starts a child, of the kind CHILD, that outlives it, and is killed; the others wait
for it. FOLDER, which all hosts see, holds what each has seen.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from patience import LONG, LONG_TIME, wait_until
from torch.utils.data import DataLoader, Dataset

import sparsecomm
from sparsecomm import Communicator

DEADLINE = LONG_TIME
OUTLIVES = 10 * LONG


class LongRead(Dataset[int]):
    """One that a worker cannot finish reading."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        self.mark.touch()
        time.sleep(OUTLIVES)
        return index


def start_child(kind: str, folder: Path) -> Iterator[int] | None:
    """Returns once it runs. A loader's workers live as long as what is returned."""
    mark = folder / "child"
    batches: Iterator[int] | None = None
    if kind == "forked":
        if os.fork() == 0:
            mark.touch()
            time.sleep(OUTLIVES)
            os._exit(0)
    elif kind == "executed":
        # Without closing what it inherits.
        subprocess.Popen(
            ["sh", "-c", 'touch "$0"; exec sleep "$1"', str(mark), str(OUTLIVES)], close_fds=False
        )
    else:
        loader = DataLoader(LongRead(mark), num_workers=1, multiprocessing_context="fork")
        batches = iter(loader)
    wait_until(mark.exists)
    return batches


def main(transport: str, child: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    communicator = Communicator.from_process_group(transport=transport, timeout=DEADLINE)
    assert communicator.transport.startswith(transport)
    rank, last = communicator.rank, communicator.size - 1
    ones = torch.ones(1000)
    sparsecomm.allreduce(ones, communicator=communicator)
    if rank == last:
        batches = start_child(child, folder)
        sparsecomm.allreduce(ones, communicator=communicator)  # the child has changed nothing
        (folder / "ended").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
        del batches
    text = ""
    sparsecomm.allreduce(ones, communicator=communicator)
    try:
        sparsecomm.allreduce(ones, communicator=communicator)
    except RuntimeError as error:
        text = str(error)
    noticed = time.monotonic()
    said = {"seconds": noticed - float((folder / "ended").read_text()), "text": text}
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))

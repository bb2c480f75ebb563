"""How long many ranks take to connect, and what that costs the store: ``python bootstrap.py``.

The ranks are processes of this machine that connect through UCX over TCP, exchange by a pattern of
log P rounds, and disagree; with ``--kill`` one of them is killed then, and the others say how long
they took to know. They share memory with one that has imported torch, so that hundreds fit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, Store, TCPStore

from sparsecomm import _C
from sparsecomm.transports import connect_options, warn

PATIENCE = timedelta(seconds=300)
# Ranks fail in the midst of training: their boards have long been connected.
SETTLING = 5.0


def sockets() -> int:
    """How many this process has open."""
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(file).startswith("socket:")
        except OSError:
            continue
    return found


def no_gloo(store: Store) -> Backend:
    raise AssertionError("UCX makes no gloo group")


def bytes_of_port(port: int) -> int:
    """What the open connections to the store's port have carried, both ways."""
    command = ["ss", "--no-header", "--tcp", "--info", "state", "established", f"sport = :{port}"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sum(int(number) for number in re.findall(r"bytes_(?:sent|received):(\d+)", text))


def rank_main(rank: int, size: int, kill: bool, pipe: Connection) -> None:
    """One rank; what it measured goes into ``pipe``."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", pipe.recv(), is_master=False, timeout=PATIENCE)
    pipe.send("ready")
    pipe.recv()
    said: dict[str, Any] = {}
    before, start = sockets(), time.monotonic()
    transport = _C.connect(rank, size, store, no_gloo, warn, connect_options("ucx", PATIENCE))
    said["connected"] = time.monotonic() - start
    communicator = _C.Communicator(transport, PATIENCE)
    collectives = _C.Collectives(communicator)
    start = time.monotonic()
    try:
        collectives.allreduce(torch.ones(10 + (rank == size - 1)), "dense", "sum")
    except RuntimeError as error:
        if f"rank {size - 1}" in str(error):
            said["disagreed"] = time.monotonic() - start
    said["sockets"] = sockets() - before
    pipe.send("through")
    pipe.recv()
    if kill and rank == size // 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if kill:
        start = time.monotonic()
        try:
            collectives.allreduce(torch.ones(10), "dense", "sum")
        except RuntimeError as error:
            said["known"] = time.monotonic() - start
            said["named"] = f"rank {size // 2} " in str(error)
    pipe.send(said)
    os._exit(0)


def measure(size: int, kill: bool) -> dict[str, Any]:
    """Starts the ranks and returns what they found."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    try:
        for rank in range(size):
            pipe, other = context.Pipe()
            args = (rank, size, kill, other)
            processes.append(context.Process(target=rank_main, args=args))
            processes[-1].start()
            other.close()
            pipes.append(pipe)

        def hear(count: int) -> list[Any]:
            heard: list[Any] = []
            waiting = list(pipes)
            while len(heard) < count:
                ready = wait(waiting, timeout=PATIENCE.total_seconds())
                if not ready:
                    raise TimeoutError(f"{count - len(heard)} of {size} ranks do not answer")
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    waiting.remove(pipe)
                    try:
                        heard.append(pipe.recv())
                    except EOFError:
                        if not kill:
                            raise
            return heard

        # Not before the ranks are forked: the store's thread holds locks now and then.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        for pipe in pipes:
            pipe.send(store.port)
        hear(size)
        keys = store.num_keys()
        for pipe in pipes:
            pipe.send("connect")
        hear(size)
        keys = store.num_keys() - keys
        traffic = bytes_of_port(store.port)
        if kill:
            time.sleep(SETTLING)
        for pipe in pipes:
            pipe.send("go on")
        said = hear(size - kill)
    finally:
        for process in processes:
            process.kill()
            process.join()
    result: dict[str, Any] = {"ranks": size, "keys_left": keys, "store_bytes": traffic}
    for name in ("connected", "disagreed", "sockets", "known"):
        values = sorted(one[name] for one in said if name in one)
        if values:
            result[name] = {"median": values[len(values) // 2], "most": values[-1]}
    if kill:
        result["named_by"] = sum(one.get("named", False) for one in said)
    return result


def main() -> int:
    """Prints one line of JSON for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--kill", action="store_true", help="one rank, to see who names it")
    arguments = parser.parse_args()
    os.environ.setdefault("UCX_TLS", "tcp")
    # Torch asks the name service about each connection to its store, and hundreds may overload it.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    for size in arguments.ranks:
        print(json.dumps(measure(size, arguments.kill)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

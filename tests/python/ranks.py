"""Runs a function on several ranks, a process each, and never longer than asked."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# Forked from a process that has imported what takes long, and has started no thread.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed.checkpoint", "torch.nn.parallel", "torch.optim", "sparsecomm"]
)


class RankError(AssertionError):
    """One or more ranks raised; the message holds their tracebacks."""


def _main(
    rank: int,
    size: int,
    port: int,
    backend: str,
    timeout: float,
    pipe: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # Where it hangs, before it is killed.
    faulthandler.dump_traceback_later(0.9 * timeout)
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        pipe.send(("result", function(*args)))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def end_soon(number: signal.Signals, generator: random.Random) -> None:
    """Sends this process a signal that it cannot catch, at once or amid what it does next."""
    if generator.random() < 0.3:
        os.kill(os.getpid(), number)
    delay = generator.random() * 2e-3
    threading.Timer(delay, os.kill, (os.getpid(), number)).start()


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    timeout: float = 60,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Calls ``function(*args)`` on every rank of an initialised process group of ``size`` ranks.

    The store lives in this process, as it lives in torchrun's agent. Whatever still runs after
    ``timeout`` seconds is killed.

    Returns:
        What each rank returned; ``None`` for ranks of ``may_die`` that ended, or hung, without a
        result. Those are not waited for once all others have ended.

    Raises:
        RankError: a rank raised, ended without a result, or was killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(size):
        here, there = _CONTEXT.Pipe()
        environment = dict(os.environ)
        arguments = (rank, size, store.port, backend, timeout, there, environment, function, args)
        process = _CONTEXT.Process(target=_main, args=arguments, daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    results: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + timeout
    try:
        needed = set(range(size)) - set(may_die)
        while not needed <= results.keys() and (left := deadline - time.monotonic()) > 0:
            open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            for pipe in wait(open_pipes, left):
                assert isinstance(pipe, Connection)
                try:
                    results[pipes.index(pipe)] = pipe.recv()
                except EOFError:
                    results[pipes.index(pipe)] = ("died", "ended without a result")
        for rank in needed:
            processes[rank].join(max(0.0, min(10.0, deadline - time.monotonic())))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    problems = []
    for rank in range(size):
        kind, value = results.get(rank, ("killed", f"still running after {timeout:g} s"))
        if kind != "result" and not (kind in ("died", "killed") and rank in may_die):
            problems.append(f"rank {rank}: {value}")
    if problems:
        raise RankError("\n".join(problems))
    kept = [results.get(rank, ("killed", None)) for rank in range(size)]
    return [value if kind == "result" else None for kind, value in kept]

"""Runs a function on several ranks, a process each, and never longer than asked."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import random
import resource
import shlex
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from patience import LONG, LONG_TIME, PATIENCE

# Forked from a process that has imported what takes long, and has started no thread.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",  # which DistributedDataParallel imports when it is made
        "torch.distributed.checkpoint",
        "torch.nn.parallel",
        "torch.optim",
        "sparsecomm",
    ]
)


BUILD = Path(__file__).resolve().parents[2] / "build"

_T = TypeVar("_T")


class RankError(AssertionError):
    """One or more ranks raised; the message holds their tracebacks."""


@functools.cache
def _crash_tracer() -> str:
    """The shared object made of crash_trace.cc."""
    source = Path(__file__).with_name("crash_trace.cc")
    library = BUILD / "crash_trace.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        BUILD.mkdir(exist_ok=True)
        environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            made = Path(folder, library.name)
            command = [*compiler, "-std=c++20", "-shared", "-fPIC", source, "-o", made]
            subprocess.run(command, check=True, env=environment)
            made.replace(library)  # whole, whatever other run of the tests makes it now
    return str(library)


def _trace_crashes(trace: str, tracer: str) -> int:
    """Has a fatal signal write the frames of Python and C to a file, and leave a core file.

    The core file lies in ``build/cores/<pid>``, unless /proc/sys/kernel/core_pattern sends it
    elsewhere. Returns the descriptor of the open file ``trace``.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    cores = BUILD / "cores"
    cores.mkdir(exist_ok=True)
    file = os.open(trace, os.O_WRONLY | os.O_APPEND)
    ctypes.CDLL(tracer).sparsecomm_trace_crashes(file, os.fsencode(cores / str(os.getpid())))
    faulthandler.enable(file)
    return file


def _main(
    rank: int,
    size: int,
    port: int,
    backend: str,
    timeout: float,
    pipe: Connection,
    crashes: tuple[str, str],
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # What was imported before stays: a collection that looks at it would copy its pages.
    gc.freeze()
    file = _trace_crashes(*crashes)
    # Shows where it hangs, before it is killed.
    faulthandler.dump_traceback_later(0.9 * timeout, file=file)
    torch.set_num_threads(1)
    # A shell has what it runs in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LONG_TIME)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        # One that left before another has connected to it would fail that one.
        store.set(f"connected {rank}", "")
        store.wait([f"connected {other}" for other in range(size)], LONG_TIME)
        result = "result", function(*args)
        # By value: torch's own pickling has the parent fetch tensors from this process, which ends.
        pipe.send_bytes(pickle.dumps(result))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))


def _describe(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"by {signal.Signals(-exit_code).name}"
    return f"with status {exit_code}"


def end_soon(number: signal.Signals, generator: random.Random) -> None:
    """Sends this process a signal that it cannot catch, at once or amid what it does next."""
    if generator.random() < 0.3:
        os.kill(os.getpid(), number)
    delay = generator.random() * 2e-3
    threading.Timer(delay, os.kill, (os.getpid(), number)).start()


def thinned(cases: Iterable[_T], step: int = 3, first: int = 0) -> list[_T]:
    """Every ``step``-th case; among two ranks, whose tests ``make test-all`` runs, every one.

    In a product, ``step`` should share no factor with the number of cases that vary fastest: then
    every value of each of its parts comes in turn.
    """
    return list(cases) if dist.get_world_size() == 2 else [*cases][first % step :: step]


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
    ``timeout`` seconds, times PATIENCE, is killed.

    Returns:
        What each rank returned; ``None`` for ranks of ``may_die`` that ended, or hung, without a
        result. Those are not waited for once all others have ended.

    Raises:
        RankError: a rank raised, ended without a result, or was killed. Of one that crashed or hung
            it holds where its threads were.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout *= PATIENCE
    tracer = _crash_tracer()
    traces = [os.memfd_create(f"rank {rank}") for rank in range(size)]
    processes, pipes = [], []
    for rank in range(size):
        here, there = CONTEXT.Pipe()
        crashes = (f"/proc/{os.getpid()}/fd/{traces[rank]}", tracer)
        environment = dict(os.environ)
        arguments = (rank, size, store.port, backend, timeout, there, crashes, environment)
        process = CONTEXT.Process(target=_main, args=(*arguments, function, args), daemon=True)
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
                    results[pipes.index(pipe)] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    rank = pipes.index(pipe)
                    processes[rank].join(LONG)
                    code = processes[rank].exitcode
                    results[rank] = ("died", f"ended without a result, {_describe(code)}")
        for rank in needed:
            processes[rank].join(max(0.0, min(LONG / 2, deadline - time.monotonic())))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    problems = []
    # Crashes first, and C frames first: the end of a long failure is cut off where CI shows it.
    for rank in sorted(range(size), key=lambda rank: results.get(rank, ("killed",))[0] == "error"):
        kind, value = results.get(rank, ("killed", f"still running after {timeout:g} s"))
        if kind != "result" and not (kind in ("died", "killed") and rank in may_die):
            text = os.pread(traces[rank], os.fstat(traces[rank]).st_size, 0).decode(
                errors="replace"
            )
            python_frames, title, c_frames = text.partition("C frames:\n")
            problems.append(f"rank {rank}: {value}\n{title}{c_frames}{python_frames}".rstrip())
    for trace in traces:
        os.close(trace)
    if problems:
        raise RankError("\n".join(problems))
    kept = [results.get(rank, ("killed", None)) for rank in range(size)]
    return [value if kind == "result" else None for kind, value in kept]

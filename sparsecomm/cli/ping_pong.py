"""``sparsecomm bench transport``: each transport beside the bare engine below it."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from sparsecomm import _C
from sparsecomm.cli.ranks import TIMEOUT
from sparsecomm.transports import connect, connect_options, table

SIZES = (8, 1024, 16384, 4 << 20)
# Of a thousand messages of up to 16 KiB; the largest costs as much as hundreds of them.
SHARES = {8: 1.0, 1024: 1.0, 16384: 1.0, 4 << 20: 0.02}
WARM_UP = 0.2  # the first of every block, which do not count
ALLREDUCE_ENTRIES = 16


@dataclass
class PingPongRow:
    """One size through one transport or bare engine: medians over all blocks."""

    name: str
    transport: str  # the transport that it is, or below which it stands
    bytes: int
    one_way_us: float
    gigabytes_per_second: float
    blocks_us: list[float]  # the median of each block
    ratio: float | None = None  # of a transport's time to the quickest bare engine's


@dataclass
class AllreduceRow:
    """An allreduce of few non-zeros, back to back: the median of the slowest rank."""

    transport: str
    algorithm: str
    entries: int
    time_us: float
    blocks_us: list[float]


@dataclass
class Engine:
    """Something that sends messages there and back; ``run`` returns one-way seconds."""

    name: str
    transport: str
    share: float  # of the rounds of the quickest
    run: Callable[[int, int], list[float]]


def measure(rounds: int, blocks: int) -> dict[str, Any]:
    """Measures on both ranks of the default group, alternating block by block."""
    transports = {
        row["name"]: connect(None, TIMEOUT, row["name"])
        for row in table()
        if row["connects_processes"] and not row["problem"]
    }
    engines = [engine for name, made in transports.items() for engine in engines_of(name, made)]
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(blocks):
        for size in SIZES:
            for engine in engines:
                dist.barrier()
                median = median_us(engine.run, size, rounds * engine.share)
                times.setdefault((engine.name, size), []).append(median)
    measured = [(engine.name, engine.transport) for engine in engines]
    if dist.get_rank() == 0 and (mpiexec := find_mpiexec()):
        of_mpi = run_mpi(mpiexec, rounds, blocks)
        measured += [(name, "mpi") for name in of_mpi]
        for name, medians in of_mpi.items():
            times.update(((name, int(size)), values) for size, values in medians.items())
    dist.barrier()
    rows = [
        PingPongRow(
            name,
            transport,
            size,
            statistics.median(times[name, size]),
            size / statistics.median(times[name, size]) / 1e3,
            [round(value, 3) for value in times[name, size]],
        )
        for name, transport in measured
        for size in SIZES
    ]
    for row in rows:
        bare = [
            other.one_way_us
            for other in rows
            if (other.transport, other.bytes) == (row.transport, row.bytes)
            and other.name != row.transport
        ]
        if bare and row.name == row.transport:
            row.ratio = row.one_way_us / min(bare)
    small = [measure_allreduce(name, rounds, blocks) for name in transports]
    return {
        "cores": os.cpu_count(),
        "rounds": rounds,
        "blocks": blocks,
        "ping_pong": [asdict(row) for row in rows],
        "allreduce": [asdict(row) for row in small],
    }


def median_us(run: Callable[[int, int], list[float]], size: int, rounds: float) -> float:
    """Of the one-way times of messages of ``size`` bytes, of which large ones run fewer rounds."""
    seconds = run(size, max(10, round(rounds * SHARES[size])))
    return statistics.median(seconds[int(len(seconds) * WARM_UP) :]) * 1e6


def engines_of(name: str, transport: _C.Transport) -> list[Engine]:
    """The transport and what it stands on."""

    def run(size: int, rounds: int) -> list[float]:
        return transport.ping_pong(size, rounds, TIMEOUT)

    share = 0.05 if name == "c10d" else 1.0
    bare = [Engine(label, name, share, function) for label, function in BARE.get(name, [])]
    if name == "ucx" and (program := find_perftest()):
        bare.append(Engine("ucx_perftest", name, share, partial(run_perftest, program)))
    return [Engine(name, name, share, run), *bare]


def run_torch(size: int, rounds: int) -> list[float]:
    """torch.distributed.send and recv of the default group, which is gloo."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    peer = 1 - dist.get_rank()
    steps = (dist.send, dist.recv) if dist.get_rank() == 0 else (dist.recv, dist.send)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for step in steps:
            step(tensor, peer)
        seconds.append((time.perf_counter() - start) / 2)
    return seconds


def run_libucp(size: int, rounds: int) -> list[float]:
    """Bare libucp with the transport's settings."""
    store: Any = distributed_c10d._world.pg_map[distributed_c10d._get_default_group()][1]
    number = store.add(f"sparsecomm/ping_pong/{dist.get_rank()}", 1)
    meeting = PrefixStore(f"sparsecomm/ping_pong/run{number}", store.clone())
    return _C.ucx_ping_pong(dist.get_rank(), meeting, connect_options("ucx", TIMEOUT), size, rounds)


def find_perftest() -> Path | None:
    """UCX's own benchmark: the system's, or that of the wheel which the transport may use."""
    if found := shutil.which("ucx_perftest"):
        return Path(found)
    spec = find_spec("libucx")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [Path(folder) / "bin" / "ucx_perftest" for folder in folders]
    return next((file for file in files if os.access(file, os.X_OK)), None)


def run_perftest(program: Path, size: int, rounds: int) -> list[float]:
    """The median that UCX's benchmark prints; the process of rank 0 is its server."""
    rank = dist.get_rank()
    port: list[Any] = [None]
    if rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            port = [free.getsockname()[1]]
    dist.broadcast_object_list(port, 0)
    warm_up = max(1, round(rounds * WARM_UP))
    command = [str(program), "-p", str(port[0]), "-t", "tag_lat", "-s", str(size)]
    command += ["-n", str(rounds), "-w", str(warm_up)]
    libraries = program.parent.parent / "lib"
    environment = {**os.environ}
    if (libraries / "libucp.so.0").exists():
        environment["LD_LIBRARY_PATH"] = str(libraries)
    if rank == 1:
        time.sleep(0.5)  # it does not try again where the server is not there yet
        command.append(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    last = [line.split() for line in done.stdout.splitlines() if line.startswith("Final:")]
    figure = torch.tensor(float(last[-1][2]) if last else math.nan, dtype=torch.float64)
    dist.broadcast(figure, 1)
    if math.isnan(figure.item()):
        raise RuntimeError(f"{shlex.join(command)}: {done.stdout}{done.stderr}")
    return [figure.item() * 1e-6]


def find_mpiexec() -> str | None:
    """MPI's launcher, the environment's before the system's, where the transport can be used."""
    problem = next(row["problem"] for row in table() if row["name"] == "mpi")
    if problem or find_spec("mpi4py") is None:
        return None
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    return shutil.which("mpiexec", path=path)


def run_mpi(mpiexec: str, rounds: int, blocks: int) -> dict[str, dict[str, list[float]]]:
    """Medians in us per engine, size and block, of two ranks that MPI starts on this machine."""
    program = ["-m", "sparsecomm.cli.mpi_ping_pong", str(rounds), str(blocks)]
    # They are no ranks of this group.
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    command = [mpiexec, "-n", "2", sys.executable, *program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}: {done.stdout}{done.stderr}")
    medians: dict[str, dict[str, list[float]]] = json.loads(done.stdout)
    return medians


# What each transport stands on.
BARE: dict[str, list[tuple[str, Callable[[int, int], list[float]]]]] = {
    "c10d": [("torch.distributed.send/recv", run_torch)],
    "ucx": [("libucp", run_libucp)],
}


def measure_allreduce(name: str, rounds: int, blocks: int) -> AllreduceRow:
    """Without barriers between, which would end at different times on the two ranks."""
    communicator = _C.Communicator(connect(None, TIMEOUT, name), TIMEOUT)
    options = _C.ExchangeOptions(
        algorithm="topk_a",
        density=1.0,
        between="reused",
        threshold_period=1,
        partition_period=1,
        balance_factor=4.0,
        index_codec="raw32",
        average=False,
    )
    exchange = _C.Exchange(communicator, ALLREDUCE_ENTRIES, torch.float32, options)
    gradient = torch.ones(ALLREDUCE_ENTRIES)
    medians = []
    for _ in range(blocks):
        dist.barrier()
        seconds = []
        for _ in range(max(10, rounds // (20 if name == "c10d" else 1))):
            start = time.perf_counter()
            exchange.run(gradient)
            seconds.append(time.perf_counter() - start)
        median = torch.tensor(statistics.median(seconds[int(len(seconds) * WARM_UP) :]))
        dist.all_reduce(median, dist.ReduceOp.MAX)
        medians.append(round(median.item() * 1e6, 3))
    return AllreduceRow(name, "topk_a", ALLREDUCE_ENTRIES, statistics.median(medians), medians)


def text(result: dict[str, Any]) -> str:
    """The figures as a table, one line per transport or engine."""
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for row in result["ping_pong"]:
        by_name.setdefault(row["name"], {})[row["bytes"]] = row
    header = ["engine", *(f"{size} B" for size in SIZES[:-1]), f"{SIZES[-1] >> 20} MiB", "to bare"]
    units = ["", *("(us)" for _ in SIZES[:-1]), "(GB/s)", "(ratios)"]
    lines = [header, units]
    for name, rows in by_name.items():
        cells = [
            f"{rows[size]['one_way_us']:.2f} {_range_of(rows[size]['blocks_us'])}"
            for size in SIZES[:-1]
        ]
        cells.append(f"{rows[SIZES[-1]]['gigabytes_per_second']:.2f}")
        ratios = [rows[size]["ratio"] for size in SIZES]
        cells.append(" ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
        lines.append([name, *cells])
    shown = [
        f"# one-way times of messages between 2 ranks, bandwidth at {SIZES[-1] >> 20} MiB; medians "
        f"of {result['blocks']} alternating blocks of up to {result['rounds']} rounds, and the "
        "least and the largest block",
        *columns(lines),
        f"# allreduce of {ALLREDUCE_ENTRIES} non-zeros, back to back, median of the slowest rank",
        *(
            f"  {row['transport']}: {row['time_us']:.2f} us {_range_of(row['blocks_us'])}"
            for row in result["allreduce"]
        ),
    ]
    return "\n".join(shown)


def _range_of(blocks_us: Sequence[float]) -> str:
    return f"[{min(blocks_us):.2f}, {max(blocks_us):.2f}]"


def columns(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        ("# " if index < 2 else "  ")
        + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for index, line in enumerate(lines)
    ]

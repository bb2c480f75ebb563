"""Simulates every allreduce of sparsecomm on up to 1,024 ranks, with SimGrid's SMPI.

    make scale                # 4 to 256 ranks
    make scale SCALE=full     # also 1,024

Weak scaling: each rank's gradient and density stay, the ranks grow (Ok-Topk, Figures 8, 10, 12).
The network is a fat tree of two levels with full bisection; times are the network's alone, for
computation takes none. Bytes and messages are counted by the transport and stand beside the cost
formula of each algorithm, which bounds them. What does not fit into memory is left out: only its
formulas are written. Writes NAME.json, NAME.md and NAME.png.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsecomm import _C

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "scale"
RATES = (10, 100)  # Gbit/s
RANKS = {"short": (4, 16, 64, 256), "full": (4, 16, 64, 256, 1024)}
# Of one hop; four lie between hosts that share no switch.
HOP_SECONDS = 5e-7
LOOPBACK_SECONDS = 5e-7  # between ranks that share a host
# Finer than the least difference of interest, and half again as quick as SimGrid's 1e-9: messages
# that end so close to one another are settled together.
PRECISION_SECONDS = 1e-8
MEMORY_SHARE = 0.75  # of what is available, for all simulations at a time


@dataclass
class Setup:
    """One algorithm on one network: what its cost formula says, per rank and step."""

    algorithm: str
    ranks: int
    gbit: float
    numel: int
    k: int
    memory_bytes: float  # estimate, of all ranks together
    formula_words: float  # received, 4 bytes each; an upper bound where it is not exact
    formula_messages: float  # sent


@dataclass
class Row(Setup):
    """What was counted beside it. Words are of 4 bytes, and means over ranks unless they say."""

    seconds: float  # simulated, from when the last rank begins until the last one ends
    words_max: float
    words_mean: float  # the sum of the next three
    entry_words: float  # indices and values of the gradient
    header_words: float  # 40 bytes for each frame
    figure_words: float  # sizes, histograms, counts
    messages_max: float
    messages_mean: float


def build(name: str = "ranks") -> Path:
    """Compiles the programs that are simulated; returns the file of one.

    Raises:
        RuntimeError: SimGrid is missing, or the compilation failed.
    """
    if shutil.which("smpirun") is None or shutil.which("smpicxx") is None:
        raise RuntimeError("SimGrid is missing: apt-get install libsimgrid-dev")
    folder = ROOT / "build" / "python"
    configure = ["cmake", "-S", str(ROOT / "csrc"), "-B", str(folder)]
    if not (folder / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "scale.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # CMake replaces what another process's Ninja reads
        for command in (
            [*configure, "-DSPARSECOMM_BUILD_TESTS=ON"],
            ["cmake", "--build", str(folder), "--target", "scale_programs", "--parallel"],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return folder / f"scale_{name}"


def platform(ranks: int, gbit: float, hop: float = HOP_SECONDS) -> str:
    """A fat tree of SimGrid's for at least ``ranks`` hosts: two levels, full bisection."""
    down = math.isqrt(ranks - 1) + 1  # hosts of a leaf switch, and leaf switches
    return f"""<?xml version="1.0"?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <zone id="world" routing="Full">
    <cluster id="hosts" prefix="host-" suffix="" radical="0-{down * down - 1}" speed="1Gf"
      bw="{gbit * 1e9 / 8:.0f}Bps" lat="{hop * 1e9:.0f}ns" sharing_policy="SPLITDUPLEX"
      topology="FAT_TREE" topo_parameters="2;{down},{down};1,{down};1,1"
      loopback_bw="100GBps" loopback_lat="{LOOPBACK_SECONDS * 1e9:.0f}ns"/>
  </zone>
</platform>
"""


def available_bytes() -> float:
    """The memory that may be used without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value, *_ = line.split()
        if name == "MemAvailable:":
            return 1024.0 * int(value)
    raise RuntimeError("/proc/meminfo has no line MemAvailable; give the bytes with --memory")


def simulated() -> list[dict[str, Any]]:
    """The table's algorithms but for the allreduce of an engine, which MPI's transport lacks."""
    return [row for row in _C.algorithms() if row["needs"] == "nothing"]


def simulate(
    program: Path,
    ranks: int,
    gbit: float,
    numel: int,
    density: float,
    steps: int,
    memory: float = math.inf,
    jobs: int = 1,
) -> list[Setup]:
    """One element per algorithm of the table: a Row, or a Setup where it needs over ``memory``.

    A simulation each, ``jobs`` at a time: SimGrid keeps what has been sent, and slows down with it.

    Raises:
        RuntimeError: a simulation failed.
    """

    def run(name: str) -> Setup:
        arguments = [name, str(numel), str(density), str(steps), str(memory / jobs)]
        found = run_smpi([str(program), *arguments], ranks, gbit)
        return (Row if "seconds" in found else Setup)(gbit=gbit, **found)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run, [row["name"] for row in simulated()]))


def run_smpi(
    command: Sequence[str],
    ranks: int,
    gbit: float,
    eager_bytes: int = 0,
    at_once: int = 0,
    hop: float = HOP_SECONDS,
    per_host: int = 1,
) -> dict[str, Any]:
    """Runs ``command`` on simulated ranks; returns the JSON object that it prints.

    Messages below ``eager_bytes`` are on their way before they are received. Without, a send waits
    for its receive: cautious, and many times as quick to simulate. A link carries ``at_once``
    messages at a time, which share it; 0: any number of them. ``per_host`` ranks share a host, and
    are numbered host by host.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "platform.xml").write_text(platform(math.ceil(ranks / per_host), gbit, hop))
        (folder / "hosts").write_text(
            "".join(f"host-{rank // per_host}\n" for rank in range(ranks))
        )
        done = subprocess.run(
            [
                *("smpirun", "-np", str(ranks)),
                *("-hostfile", str(folder / "hosts"), "-platform", str(folder / "platform.xml")),
                "--cfg=smpi/coll-selector:ompi",
                "--cfg=smpi/simulate-computation:no",
                f"--cfg=smpi/send-is-detached-thresh:{eager_bytes}",
                f"--cfg=smpi/async-small-thresh:{eager_bytes}",
                "--cfg=smpi/privatization:no",  # nothing of ours is global and changes
                "--cfg=network/crosstraffic:0",
                f"--cfg=surf/precision:{PRECISION_SECONDS}",
                *([f"--cfg=maxmin/concurrency-limit:{at_once}"] if at_once else []),
                "--log=root.thresh:warning",
                *command,
            ],
            capture_output=True,
            text=True,
            cwd=folder,
        )
    if done.returncode != 0:
        raise RuntimeError(f"smpirun ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def markdown(setups: Sequence[Setup], command: str) -> str:
    first = setups[0]
    lines = [
        "# Weak scaling, simulated",
        "",
        f"`{command}`: {first.numel:,} f32 per rank, k = {first.k:,}, raw32 indices; a fat tree of "
        "two levels with full bisection. Time is the network's alone, the ranks' agreement "
        "included. Words (4 bytes) received and messages sent are counted, per rank and step. "
        "Entries are the indices and values of the gradient; headers are 40 bytes for each frame, "
        "of which algorithms with P - 1 messages have as many; figures are sizes, histograms and "
        "counts. The bound is the cost formula of everything together, for any selections.",
    ]
    if any(not isinstance(setup, Row) for setup in setups):
        lines[-1] += (
            f" Left out is what would need more memory than {MEMORY_SHARE:.0%} of what was "
            "available, estimated as the words of the bound and two vectors, times the ranks."
        )
    lines += ["", "| algorithm | words of entries received, leading term |", "|---|---|"]
    lines += [f"| `{row['name']}` | {row['words']} |" for row in simulated()]
    for gbit in sorted({setup.gbit for setup in setups}):
        lines += [
            "",
            f"## {gbit:g} Gbit/s",
            "",
            "| algorithm | ranks | time (ms) | words: entries | headers | figures | all | all, max "
            "| bound | messages, max | bound |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for setup in sorted(setups, key=lambda setup: (setup.algorithm, setup.ranks)):
            if setup.gbit != gbit:
                continue
            counted = [f"left out: {setup.memory_bytes / 1e9:.0f} GB", *[""] * 5]
            messages = ""
            if isinstance(setup, Row):
                words = [setup.entry_words, setup.header_words, setup.figure_words]
                words += [setup.words_mean, setup.words_max]
                counted = [f"{1e3 * setup.seconds:.3f}", *[f"{count:,.0f}" for count in words]]
                messages = f"{setup.messages_max:,.1f}"
            cells = [f"`{setup.algorithm}`", f"{setup.ranks:,}", *counted]
            cells += [f"{setup.formula_words:,.0f}", messages, f"{setup.formula_messages:,.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_results(file: Path, found: Sequence[dict[str, Any]], text: str) -> None:
    """Prints ``text``, and writes it beside ``file``, in which it puts ``found``."""
    print(text)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")
    file.with_suffix(".md").write_text(text)


def draw(rows: Sequence[Row], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = sorted({row.gbit for row in rows})
    panels = [(rate, "seconds", f"simulated time (s), {rate:g} Gbit/s") for rate in rates]
    panels += [(rates[0], "entry_words", "words of entries received per rank")]
    panels += [(rates[0], "words_mean", "words received per rank, headers and figures too")]
    panels += [(rates[0], "messages_mean", "messages sent per rank")]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4.5))
    for axis, (rate, quantity, title) in zip(axes, panels, strict=True):
        for number, algorithm in enumerate(dict.fromkeys(row.algorithm for row in rows)):
            chosen = [row for row in rows if (row.algorithm, row.gbit) == (algorithm, rate)]
            chosen.sort(key=lambda row: row.ranks)
            axis.plot(
                [row.ranks for row in chosen],
                [getattr(row, quantity) for row in chosen],
                marker="os^Dv"[number % 5],
                color=pyplot.get_cmap("tab20")(number % 20),
                label=algorithm,
            )
        axis.set(title=title, xlabel="ranks", xscale="log", yscale="log")
        ranks = sorted({row.ranks for row in rows})
        axis.set_xticks(ranks, [str(count) for count in ranks], minor=False)
        axis.grid(alpha=0.3)
    axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--scale", choices=RANKS, default=os.environ.get("SCALE") or "short")
    add("--numel", type=int, default=1 << 18, help="elements per rank (262144)")
    add("--density", type=float, default=0.02, help="share selected (0.02)")
    add("--steps", type=int, default=1, help="measured, after one that is not (1)")
    add("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="simulations at a time")
    add("--memory", type=float, help=f"bytes for all of them ({MEMORY_SHARE:.0%} of what is free)")
    add("--json", type=Path, default=RESULTS.with_suffix(".json"), help="and .md and .png beside")
    options = parser.parse_args(arguments)
    setups: list[Setup] = []
    try:
        program = build()
        memory = options.memory or MEMORY_SHARE * available_bytes()
        for gbit in RATES:
            for ranks in RANKS[options.scale]:
                size = (options.numel, options.density, options.steps)
                setups += simulate(program, ranks, gbit, *size, memory, options.jobs)
                print(f"{ranks} ranks at {gbit} Gbit/s: done", file=sys.stderr, flush=True)
    except RuntimeError as error:
        print(f"scale: {error}", file=sys.stderr)
        return 1
    rows = [setup for setup in setups if isinstance(setup, Row)]
    text = markdown(setups, "make scale" + (" SCALE=full" if options.scale == "full" else ""))
    write_results(options.json, [asdict(setup) for setup in setups], text)
    draw(rows, options.json.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

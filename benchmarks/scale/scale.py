"""Simulates every allreduce of sparsecomm on up to 1,024 ranks, with SimGrid's SMPI.

    make scale                # 4 to 256 ranks
    make scale SCALE=full     # also 1,024

Weak scaling: each rank's gradient and density stay, the ranks grow (Ok-Topk, Figures 8, 10, 12).
The network is a fat tree of two levels with full bisection; times are the network's alone, for
computation takes none. Bytes and messages are counted by the transport and stand beside the cost
formula of each algorithm, which bounds them. Writes NAME.json, NAME.md and NAME.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
MAX_BYTES = 16e9  # of memory; more than that is left out


@dataclass
class Row:
    """One algorithm on one network, per rank and step."""

    algorithm: str
    ranks: int
    gbit: float
    numel: int
    k: int
    seconds: float  # simulated, of the slowest rank
    words_max: float  # received, 4 bytes each, headers included
    words_mean: float
    messages_max: float  # sent
    messages_mean: float
    formula_words: float
    formula_messages: float


def build() -> Path:
    """Compiles the program that is simulated; returns its file.

    Raises:
        RuntimeError: SimGrid is missing, or the compilation failed.
    """
    if shutil.which("smpirun") is None or shutil.which("smpicxx") is None:
        raise RuntimeError("SimGrid is missing: apt-get install libsimgrid-dev")
    folder = ROOT / "build"
    generator = [] if (folder / "CMakeCache.txt").exists() else ["-G", "Ninja"]
    for command in (
        ["cmake", "-S", str(ROOT / "csrc"), "-B", str(folder), *generator],
        ["cmake", "--build", str(folder), "--target", "scale_ranks", "--parallel"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return folder / "scale_ranks"


def platform(ranks: int, gbit: float) -> str:
    """A fat tree of SimGrid's for at least ``ranks`` hosts: two levels, full bisection."""
    down = math.isqrt(ranks - 1) + 1  # hosts of a leaf switch, and leaf switches
    return f"""<?xml version="1.0"?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <zone id="world" routing="Full">
    <cluster id="hosts" prefix="host-" suffix="" radical="0-{down * down - 1}" speed="1Gf"
      bw="{gbit * 1e9 / 8:.0f}Bps" lat="{HOP_SECONDS * 1e9:.0f}ns" sharing_policy="SPLITDUPLEX"
      topology="FAT_TREE" topo_parameters="2;{down},{down};1,{down};1,1"
      loopback_bw="100GBps" loopback_lat="0"/>
  </zone>
</platform>
"""


def simulate(
    program: Path, ranks: int, gbit: float, numel: int, density: float, steps: int
) -> list[Row]:
    """One row per algorithm of the table, those that take too much memory left out.

    A simulation each: SimGrid keeps what has been sent, and slows down with it.

    Raises:
        RuntimeError: a simulation failed.
    """
    names = [row["name"] for row in _C.algorithms()]
    arguments = [str(numel), str(density), str(steps), str(MAX_BYTES)]
    rows = [
        row for name in names for row in run_smpi([str(program), name, *arguments], ranks, gbit)
    ]
    return [Row(gbit=gbit, **row) for row in rows]


def run_smpi(command: Sequence[str], ranks: int, gbit: float) -> list[dict[str, Any]]:
    """Runs ``command`` on simulated ranks; returns the JSON objects that it prints."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "platform.xml").write_text(platform(ranks, gbit))
        (folder / "hosts").write_text("".join(f"host-{rank}\n" for rank in range(ranks)))
        done = subprocess.run(
            [
                *("smpirun", "-np", str(ranks)),
                *("-hostfile", str(folder / "hosts"), "-platform", str(folder / "platform.xml")),
                "--cfg=smpi/coll-selector:ompi",
                "--cfg=smpi/simulate-computation:no",
                # A send waits for its receive: cautious, and many times as quick to simulate.
                "--cfg=smpi/send-is-detached-thresh:0",
                "--cfg=smpi/privatization:no",  # nothing of ours is global and changes
                "--cfg=network/crosstraffic:0",
                "--log=root.thresh:warning",
                *command,
            ],
            capture_output=True,
            text=True,
            cwd=folder,
        )
    if done.returncode != 0:
        raise RuntimeError(f"smpirun ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def markdown(rows: Sequence[Row], command: str) -> str:
    first = rows[0]
    lines = [
        "# Weak scaling, simulated",
        "",
        f"`{command}`: {first.numel:,} f32 per rank, k = {first.k:,}, raw32 indices; a fat tree of "
        "two levels with full bisection. Time is the network's alone. Words (4 bytes) received "
        "and messages sent are counted, per rank and step; the formula bounds them.",
    ]
    for gbit in sorted({row.gbit for row in rows}):
        lines += [
            "",
            f"## {gbit:g} Gbit/s",
            "",
            "| algorithm | ranks | time (ms) | words, mean | words, max | formula | messages, max "
            "| formula |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| `{row.algorithm}` | {row.ranks:,} | {1e3 * row.seconds:.3f} "
            f"| {row.words_mean:,.0f} | {row.words_max:,.0f} | {row.formula_words:,.0f} "
            f"| {row.messages_max:,.1f} | {row.formula_messages:,.0f} |"
            for row in sorted(rows, key=lambda row: (row.algorithm, row.ranks))
            if row.gbit == gbit
        ]
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Row], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = sorted({row.gbit for row in rows})
    figure, axes = pyplot.subplots(1, len(rates) + 2, figsize=(5 * (len(rates) + 2), 4.5))
    panels = [(rate, "seconds", f"simulated time (s), {rate:g} Gbit/s") for rate in rates]
    panels += [(rates[0], "words_mean", "words received per rank")]
    panels += [(rates[0], "messages_mean", "messages sent per rank")]
    for axis, (rate, quantity, title) in zip(axes, panels, strict=True):
        for algorithm in dict.fromkeys(row.algorithm for row in rows):
            chosen = [row for row in rows if (row.algorithm, row.gbit) == (algorithm, rate)]
            chosen.sort(key=lambda row: row.ranks)
            axis.plot(
                [row.ranks for row in chosen],
                [getattr(row, quantity) for row in chosen],
                marker="o",
                label=algorithm,
            )
        axis.set(title=title, xlabel="ranks", xscale="log", yscale="log")
        ranks = sorted({row.ranks for row in rows})
        axis.set_xticks(ranks, [str(count) for count in ranks], minor=False)
        axis.grid(alpha=0.3)
    axes[-1].legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--scale", choices=RANKS, default=os.environ.get("SCALE") or "short")
    add("--numel", type=int, default=1 << 18, help="elements per rank (262144)")
    add("--density", type=float, default=0.01, help="share selected (0.01)")
    add("--steps", type=int, default=1, help="measured, after one that is not (1)")
    add("--json", type=Path, default=RESULTS.with_suffix(".json"), help="and .md and .png beside")
    options = parser.parse_args(arguments)
    rows = []
    try:
        program = build()
        for gbit in RATES:
            for ranks in RANKS[options.scale]:
                size = (options.numel, options.density, options.steps)
                rows += simulate(program, ranks, gbit, *size)
                print(f"{ranks} ranks at {gbit} Gbit/s: done", file=sys.stderr, flush=True)
    except RuntimeError as error:
        print(f"scale: {error}", file=sys.stderr)
        return 1
    text = markdown(rows, "make scale" + (" SCALE=full" if options.scale == "full" else ""))
    print(text)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    options.json.with_suffix(".md").write_text(text)
    draw(rows, options.json.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

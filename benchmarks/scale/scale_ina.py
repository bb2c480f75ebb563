"""Simulates an allreduce through aggregators, and others, on up to 256 ranks, with SMPI.

    python benchmarks/scale/scale_ina.py

There are as many aggregators as ranks, up to 64. All algorithms have the same selections: runs of
entries that fill blocks, of which 30 % are at the same places on all ranks. Network and figures are
those of scale.py, whose ranks this simulates. Writes NAME.json and NAME.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scale import ROOT, build, run_smpi, write_results

from sparsecomm.cli.ina import MOST_AGGREGATORS

RESULTS = ROOT / "benchmarks" / "results" / "scale-ina"
ALGORITHMS = ("dense_ring", "topk_a", "oktopk", "ina")
RANKS = (4, 16, 64, 256)
DENSITIES = (0.01, 0.1, 1.0)
BLOCK_NUMEL = 256  # of 1 KiB
# An aggregator takes one message after another: those that wait have arrived.
EAGER_BYTES = 1 << 16
# Others wait in the host, as behind a network card. 64 ranks take .6 % less time than if all
# messages share the link, and a quarter of the time to simulate.
AT_ONCE = 4
MAX_BYTES = 16e9  # of all ranks; a simulation that would need more is left out

Found = dict[str, Any]


def simulate(
    program: Path, algorithm: str, ranks: int, gbit: float, numel: int, density: float
) -> Found:
    """Returns what scale_ranks prints, with the density, rate and number of aggregators."""
    aggregators = min(ranks, MOST_AGGREGATORS) if algorithm == "ina" else 0
    arguments = [algorithm, numel, density, 1, MAX_BYTES, aggregators, BLOCK_NUMEL]
    command = [str(program), *map(str, arguments)]
    found = run_smpi(command, ranks + aggregators, gbit, EAGER_BYTES, AT_ONCE)
    return {**found, "density": density, "gbit": gbit, "aggregators": aggregators}


def markdown(rows: Sequence[Found]) -> str:
    first = rows[0]
    lines = [
        "# Through aggregators, simulated",
        "",
        f"`python benchmarks/scale/scale_ina.py`: {first['numel']:,} f32 per rank, links of "
        f"{first['gbit']:g} Gbit/s, selections of whole blocks of {BLOCK_NUMEL} entries, as many "
        f"aggregators as ranks, up to {MOST_AGGREGATORS}. Milliseconds of the network, and in "
        "brackets words of 4 bytes that a rank receives, everything included.",
    ]
    for density in dict.fromkeys(row["density"] for row in rows):
        lines += ["", f"## Density {density:g}", ""]
        ranks = list(dict.fromkeys(row["ranks"] for row in rows))
        lines += ["| algorithm | " + " | ".join(f"{count} ranks" for count in ranks) + " |"]
        lines += ["|---|" + "---|" * len(ranks)]
        for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
            cells = []
            for row in rows:
                if (row["algorithm"], row["density"]) != (algorithm, density):
                    continue
                if "seconds" in row:
                    cells.append(f"{1e3 * row['seconds']:.3f} ({row['words_mean']:,.0f})")
                else:
                    cells.append(f"left out: {row['memory_bytes'] / 1e9:.0f} GB")
            lines.append(f"| `{algorithm}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=RANKS, help="4 16 64 256")
    add("--density", type=float, nargs="+", default=DENSITIES, help="0.01 0.1 1")
    add("--numel", type=int, default=1 << 20, help="elements per rank (1048576)")
    add("--gbit", type=float, default=10.0, help="of each link, Gbit/s (10)")
    add("--json", type=Path, default=RESULTS.with_suffix(".json"), help="and .md beside")
    options = parser.parse_args(arguments)
    rows = []
    try:
        program = build()
        for density in options.density:
            for ranks in options.ranks:
                for algorithm in ALGORITHMS:
                    rows.append(
                        simulate(program, algorithm, ranks, options.gbit, options.numel, density)
                    )
                print(f"{ranks} ranks, density {density:g}: done", file=sys.stderr, flush=True)
    except RuntimeError as error:
        print(f"scale_ina: {error}", file=sys.stderr)
        return 1
    write_results(options.json, rows, markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

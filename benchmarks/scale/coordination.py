"""Simulates how ranks agree on a step of many groups, on up to 1,024 ranks, with SimGrid's SMPI.

    python benchmarks/scale/coordination.py

Beside the coordinator's round stands what ranks would do if they remembered nothing, an allgather
of fingerprints for each group; an allreduce of 64 bytes; and the messages of Horovod's coordinator
by its formulas. The network is that of scale.py, with 20 us between hosts: time is its alone, for
computation takes none. Writes NAME.json and NAME.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scale import LOOPBACK_SECONDS, ROOT, build, run_smpi, write_results

RESULTS = ROOT / "benchmarks" / "results" / "coordination"
RANKS = (4, 16, 64, 256, 1024)
GROUPS = (1, 5, 10, 161)  # the last: tensors of BERT that are trained, about
GBIT = 10
HOP_SECONDS = 5e-6  # four of them between hosts that share no switch
MOST_COMPARED = 1 << 16  # ranks times groups; more take an hour to simulate
STATUS_BITS = 3  # in Horovod's bit vector, beside one for each name

PER_HOST = (8, 161)  # ranks of a host, and groups, of the second table

Found = dict[str, Any]
Case = tuple[str, int, int, int]  # kind, ranks, groups, ranks of a host


def simulate(program: Path, case: Case, steps: int) -> Found:
    """Returns what scale_coordination prints of a case."""
    kind, ranks, groups, per_host = case
    command = [str(program), kind, str(groups), str(steps)]
    found = run_smpi(command, ranks, GBIT, hop=HOP_SECONDS, per_host=per_host)
    return {**found, "per_host": per_host}


def markdown(rows: Sequence[Found]) -> str:
    """A line for each number of ranks and of groups."""
    found = {(row["ranks"], row["groups"], row["kind"], row["per_host"]): row for row in rows}
    lines = [
        "# Coordination, simulated",
        "",
        "`python benchmarks/scale/coordination.py`: ranks agree on a step of G groups that are "
        "all pending and have changed in nothing but what follows from former steps; links of "
        f"{GBIT} Gbit/s, {4e6 * HOP_SECONDS:.0f} us between hosts. By name: a round of the "
        "coordinator. By comparison: an allgather of fingerprints for each group, as in the first "
        "step. Messages sent by a rank, and the bytes of each, headers of 40 bytes included; those "
        "of an allgather are as large together as P - 1 fingerprints. Horovod's are "
        "formulas (Romero et al. 2022, section 3): with its cache an allreduce of a bit for each "
        f"name and {STATUS_BITS} more in every cycle, as here in log2 P messages, whose headers "
        "are not counted; without it rank 0 gathers all requests and broadcasts the answer: so "
        "many messages arrive there.",
        "",
        "| ranks | groups | by name (us) | messages | bytes of one | by comparison (us) | messages "
        "| bytes of one | ratio of times | allreduce of 64 bytes (us) | ratio | Horovod: messages "
        "| bytes of one | without cache, at rank 0 |",
        f"|{'---|' * 14}",
    ]
    for ranks, groups in dict.fromkeys((row["ranks"], row["groups"]) for row in rows):
        named, allreduce = found[ranks, groups, "by_name", 1], found[ranks, 1, "allreduce", 1]
        compared = found.get((ranks, groups, "by_comparison", 1))
        rounds = math.ceil(math.log2(ranks))
        cells = [f"{ranks:,}", f"{groups}"]
        for row in (named, compared):
            if row is None:
                cells += ["left out", "", ""]
                continue
            cells += [f"{1e6 * row['seconds']:,.1f}", f"{row['messages']:,.0f}"]
            cells.append(f"{row['bytes'] / row['messages']:,.0f}")
        cells.append(f"{named['seconds'] / compared['seconds']:.4f}" if compared else "")
        cells.append(f"{1e6 * allreduce['seconds']:,.1f}")
        cells.append(f"{named['seconds'] / allreduce['seconds']:.3f}")
        cells += [f"{rounds}", f"{8 * math.ceil((STATUS_BITS + groups) / 64)}"]
        cells.append(f"{2 * (ranks - 1):,}")
        lines.append(f"| {' | '.join(cells)} |")
    per_host, groups = PER_HOST
    lines += [
        "",
        f"{per_host} ranks a host, numbered host by host, which reach each other in "
        f"{1e6 * LOOPBACK_SECONDS:g} us; {groups} groups. If the ranks are a power of two, log2 "
        "hosts of a rank's messages cross hosts. A message between hosts takes SimGrid twice the "
        "latency.",
        "",
        "| ranks | hosts | by name (us) | a host for each rank (us) | ratio |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row["per_host"] == 1:
            continue
        ranks = row["ranks"]
        apart = found[ranks, groups, "by_name", 1]["seconds"]
        cells = [f"{ranks:,}", f"{math.ceil(ranks / per_host)}", f"{1e6 * row['seconds']:,.1f}"]
        cells += [f"{1e6 * apart:,.1f}", f"{row['seconds'] / apart:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=RANKS, help=f"{RANKS}")
    add("--groups", type=int, nargs="+", default=GROUPS, help=f"{GROUPS}")
    add("--steps", type=int, default=1, help="measured, after one that is not (1)")
    add("--jobs", type=int, default=2, help="simulations at a time (2)")
    add("--json", type=Path, default=RESULTS.with_suffix(".json"), help="and .md beside")
    options = parser.parse_args(arguments)
    cases = [("allreduce", ranks, 1, 1) for ranks in options.ranks]
    cases += [
        (kind, ranks, groups, 1)
        for kind in ("by_name", "by_comparison")
        for ranks in options.ranks
        for groups in options.groups
        if kind == "by_name" or ranks * groups <= MOST_COMPARED
    ]
    per_host, groups = PER_HOST
    cases += [
        ("by_name", ranks, groups, per_host)
        for ranks in options.ranks
        if ranks > per_host and groups in options.groups
    ]
    try:
        program = build("coordination")
        with ThreadPoolExecutor(options.jobs) as pool:
            rows = list(pool.map(lambda case: simulate(program, case, options.steps), cases))
    except RuntimeError as error:
        print(f"coordination: {error}", file=sys.stderr)
        return 1
    rows.sort(key=lambda row: (row["ranks"], row["groups"]))
    write_results(options.json, rows, markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

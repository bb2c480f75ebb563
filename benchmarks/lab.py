#!/usr/bin/env python3
"""Measures allreduces between hosts on rate-limited links, and trains over such links.

    make lab                                    the whole grid, hours
    make lab ARGS="--minutes 60"                a part of it, with which the next call goes on
    make lab ARGS="--grid goals"                the set-ups that have a goal, minutes
    make lab ARGS="--rate 10gbit --hosts 8 --numel 1048576 --density 0.01"

The hosts are network namespaces on this machine (see hosts.py), so this needs root and iproute2.
Of the whole grid, what its file already has is not measured again; remove the file to begin anew.
The hosts share the machine's cores: what the link limits is measured truly, what the processor
limits is slower than on as many machines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hosts import ENVIRONMENT, PORT, Hosts, HostsError, missing, parse_rate

from sparsecomm import _C
from sparsecomm.cli.bench import algorithm_names, write_json
from sparsecomm.cli.measure import GLOO_DENSE

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FILES = {"full": RESULTS / "lab-grid.json", "goals": RESULTS / "lab-allreduce.json"}
ALGORITHMS = tuple(name for name in algorithm_names() if name != GLOO_DENSE)
# Gloo's allreduce is in every run.
NEEDING = {row["name"] for row in _C.algorithms() if row["needs"] != "nothing"}
EVERY = tuple(name for name in ALGORITHMS if name not in NEEDING)
VGG16_NUMEL = 14_728_266
# The grid, the quick ones first.
HOSTS = (2, 4, 8)
RATES = ("10gbit", "1gbit", "100mbit")
NUMELS = (1 << 20, VGG16_NUMEL, 1 << 26)
DENSITIES = (0.001, 0.01, 0.02, 0.1)
# For the algorithms that are measured in turn.
MEMORY_BYTES = 16 << 30


@dataclass(frozen=True)
class Goal:
    """What oktopk must reach in one set-up, against gloo's dense allreduce of the same run."""

    hosts: int
    rate: str
    whole: float  # selection and residual included
    exchange: float | None = None  # of a selection that is at hand
    bytes_per_k: float | None = None  # sent by a rank


GOALS = (
    Goal(4, "1gbit", whole=10),
    Goal(8, "1gbit", whole=12, exchange=25, bytes_per_k=11),
    Goal(4, "10gbit", whole=3),
)
GOAL_DENSITY = 0.01

Row = dict[str, Any]


@dataclass(frozen=True)
class SetUp:
    hosts: int
    rate: str | None
    numel: int
    densities: tuple[float, ...]
    algorithms: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    if reason := missing():
        print(f"lab: {reason}", file=sys.stderr)
        return 1
    met = True
    try:
        if "allreduce" in options.parts:
            met = measure_allreduces(options)
        if "training" in options.parts:
            train(options)
    except HostsError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0 if met or options.report_only else 1


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures allreduces, and trains, between hosts on rate-limited links.",
        epilog="Exit status 1: a goal is missed, or something failed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--grid",
        choices=("full", "goals"),
        default="full",
        help="what is measured where the next four do not say otherwise: every combination, or "
        "those with a goal and their algorithms",
    )
    add("--hosts", type=int, nargs="+", help="hosts of the allreduce, a rank in each (2 4 8)")
    add("--rate", nargs="+", help="of each link and direction, or none (100mbit 1gbit 10gbit)")
    add("--numel", type=int, nargs="+", help=f"elements ({1 << 20} {VGG16_NUMEL} {1 << 26})")
    add("--density", type=float, nargs="+", help="shares selected (0.001 0.01 0.02 0.1)")
    add("--algorithm", nargs="+", help="beside gloo's dense allreduce (all there are)")
    add("--iters", type=int, default=10, help="iterations measured at most")
    add("--warmup", type=int, default=3, help="iterations before them")
    add("--seconds", type=float, default=20.0, help="after which no further iteration begins")
    add("--pattern", default="uniform", help="of the gradients, see sparsecomm bench allreduce")
    add("--transport", default="auto", help="what moves the bytes of our algorithms")
    add("--steps", type=int, default=4, help="training steps")
    add(
        "--minutes",
        type=float,
        default=math.inf,
        help="after which no further set-up is begun; one that has begun ends",
    )
    add(
        "--json",
        type=Path,
        help="where the allreduces' figures go (lab-grid.json or, for goals, lab-allreduce.json in "
        "benchmarks/results)",
    )
    add(
        "--parts",
        nargs="+",
        choices=("allreduce", "training"),
        default=("allreduce", "training"),
        help="what to run",
    )
    add("--report-only", action="store_true", help="a goal that is missed is no failure")
    options = parser.parse_args(arguments)
    options.json = options.json or FILES[options.grid]
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: it takes more than 0")
    for hosts in options.hosts or ():
        if hosts < 2:
            parser.error(f"--hosts {hosts}: it takes 2 or more")
    for rate in options.rate or ():
        try:
            if rate != "none":
                parse_rate(rate)
        except ValueError as error:
            parser.error(f"--rate: {error}, and not none")
    for name in options.algorithm or ():
        if name not in ALGORITHMS:
            parser.error(f"--algorithm: {name!r} is none of {', '.join(ALGORITHMS)}")
    return options


def set_ups(options: argparse.Namespace) -> list[SetUp]:
    if options.grid == "goals" and options.hosts is None and options.rate is None:
        pairs = [(goal.hosts, goal.rate) for goal in GOALS]
    else:
        pairs = [
            (hosts, rate) for rate in options.rate or RATES for hosts in options.hosts or HOSTS
        ]
    goals_only = options.grid == "goals"
    numels = options.numel or ((VGG16_NUMEL,) if goals_only else NUMELS)
    densities = options.density or ((GOAL_DENSITY,) if goals_only else DENSITIES)
    return [
        SetUp(
            hosts,
            None if rate == "none" else rate,
            numel,
            tuple(densities),
            algorithms_of(options),
        )
        for numel in numels
        for hosts, rate in pairs
    ]


def algorithms_of(options: argparse.Namespace) -> tuple[str, ...]:
    chosen = options.algorithm or (
        ("oktopk", "topk_a", "auto") if options.grid == "goals" else EVERY
    )
    return (GLOO_DENSE, *chosen)


def belongs(result: dict[str, Any], row: Row, set_up: SetUp, options: argparse.Namespace) -> bool:
    """Whether the row is a measurement of the set-up as the options ask for it."""
    transport = result.get("transport", "auto")  # what it was before it was recorded
    measured = (result["hosts"], result["rate"], transport, row["pattern"], row["numel"])
    asked = (set_up.hosts, set_up.rate, options.transport, options.pattern, set_up.numel)
    return measured == asked and row["density"] in set_up.densities


def remaining(
    set_ups: Sequence[SetUp], results: Sequence[dict[str, Any]], options: argparse.Namespace
) -> list[SetUp]:
    """The set-ups, and of each the densities, that lack a row of one of the algorithms.

    They are measured anew with whatever there are rows of, since algorithms are compared within a
    run.
    """
    left = []
    for set_up in set_ups:
        have: dict[float, list[str]] = {density: [] for density in set_up.densities}
        for result in results:
            for row in result["rows"]:
                if belongs(result, row, set_up, options):
                    have[row["density"]].append(row["algorithm"])
        lacking = tuple(
            density for density, names in have.items() if not {*set_up.algorithms} <= {*names}
        )
        if lacking:
            names = (name for density in lacking for name in have[density])
            every = tuple(dict.fromkeys((*set_up.algorithms, *names)))
            left.append(replace(set_up, densities=lacking, algorithms=every))
    return left


def without(
    results: Sequence[dict[str, Any]], set_up: SetUp, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The results but the rows that a measurement of the set-up replaces."""
    kept = []
    for result in results:
        rows = [row for row in result["rows"] if not belongs(result, row, set_up, options)]
        if rows:
            kept.append({**result, "rows": rows})
    return kept


def measure_allreduces(options: argparse.Namespace) -> bool:
    """Prints and writes the figures; returns whether the goals of what was measured are met."""
    start = time.monotonic()
    results: list[dict[str, Any]] = []
    left = set_ups(options)
    if options.grid == "full" and options.json.exists():
        results = json.loads(options.json.read_text())["results"]
        left = remaining(left, results, options)
        print(f"{os.path.relpath(options.json)} lacks {len(left)} of the set-ups asked for")
    while left and time.monotonic() - start < 60 * options.minutes:
        set_up = left.pop(0)
        print(
            f"allreduce of {set_up.numel} f32 between {set_up.hosts} hosts, links of "
            f"{set_up.rate or 'no limited rate'}",
            flush=True,
        )
        rows = measure(set_up, options)
        results = without(results, set_up, options)
        results.append(
            {
                "hosts": set_up.hosts,
                "rate": set_up.rate,
                "transport": options.transport,
                "rows": rows if options.grid == "goals" else list(map(without_turns, rows)),
            }
        )
        print(ratios_text(rows), flush=True)
        # After each, so that a run that is broken off leaves what it has.
        write_json(options.json, {"cores": os.cpu_count(), "results": results})
    if left:
        print(f"{len(left)} set-ups are left; the same command goes on with them")
    checks = [check for result in results for check in check_goals(result)]
    for text, met in checks:
        print(f"{text}: {'met' if met else 'MISSED'}")
    print(f"wrote {os.path.relpath(options.json)}\n", flush=True)
    return all(met for _, met in checks)


def without_turns(row: Row) -> Row:
    """What is kept of a row: of the grid's there are thousands of turns."""
    return {name: value for name, value in row.items() if name != "turns_us"}


def memory_of_an_algorithm(set_up: SetUp) -> int:
    """In bytes, of all ranks: residual, dense scratch, and the selections that a rank gathers."""
    vectors = 3 + 3 * set_up.hosts * max(set_up.densities)
    return int(set_up.hosts * set_up.numel * 4 * vectors)


def measure(set_up: SetUp, options: argparse.Namespace) -> list[Row]:
    together = max(1, MEMORY_BYTES // memory_of_an_algorithm(set_up) - 1)
    with tempfile.TemporaryDirectory() as folder, Hosts(set_up.hosts, set_up.rate) as hosts:
        file = Path(folder) / "rows.json"
        command = [
            *(sys.executable, "-m", "sparsecomm.cli", "bench", "allreduce"),
            *("--algorithm", ",".join(set_up.algorithms), "--pattern", options.pattern),
            *("--numel", str(set_up.numel), "--density", ",".join(map(str, set_up.densities))),
            *("--iters", str(options.iters), "--warmup", str(options.warmup)),
            *("--seconds", str(options.seconds), "--together", str(together)),
            *("--transport", options.transport, "--exchange-alone", "--json", str(file)),
        ]
        hosts.run_ranks(command)
        rows: list[Row] = json.loads(file.read_text())
    return rows


def against_dense(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Every other row with the dense allreduce it was measured in turn with."""
    dense = {
        (row["numel"], row["density"], row["batch"]): row
        for row in rows
        if row["algorithm"] == GLOO_DENSE
    }
    return [
        (row, dense[row["numel"], row["density"], row["batch"]])
        for row in rows
        if row["algorithm"] != GLOO_DENSE
    ]


def ratio(dense: Row, row: Row) -> float:
    return float(dense["time_us"]["median"] / row["time_us"]["median"])


def ratios_text(rows: Sequence[Row]) -> str:
    lines = []
    for row, dense in against_dense(rows):
        pairs = sorted(
            dense["turns_us"][turn // row["turns"] * dense["turns"]] / time
            for turn, time in enumerate(row["turns_us"])
        )
        lines.append(
            f"  density {row['density']:g}: dense takes {ratio(dense, row):.2f} times as long as "
            f"{row['algorithm']} by the median times; pair by pair {pairs[0]:.2f} / "
            f"{statistics.median(pairs):.2f} / {pairs[-1]:.2f} (min, median, max)"
        )
        if row["algorithm"] != "oktopk":
            continue
        parts = {part: row[f"{part}_us"] for part in ("select", "exchange", "apply")}
        parts["agreement and waiting"] = row["time_us"]["median"] - math.fsum(parts.values())
        shown = ", ".join(f"{part} {value / 1e3:.2f} ms" for part, value in parts.items())
        lines.append(f"    {shown}; {max(row['sent_bytes']):.0f} bytes sent by a rank at most")
    return "\n".join(lines)


def check_goals(result: dict[str, Any]) -> list[tuple[str, bool]]:
    """Each line of a goal that applies to the set-up, and whether it is met."""
    checks = []
    for row, dense in against_dense(result["rows"]):
        if row["algorithm"] != "oktopk":
            continue
        where = f"{result['hosts']} hosts, {result['rate']}, numel {row['numel']}, density " + (
            f"{row['density']:g}"
        )
        most = max(row["sent_bytes"] + row["received_bytes"])
        bound = 6 * row["k"] * (result["hosts"] - 1) / result["hosts"] * 4
        checks.append(
            (f"{where}: oktopk sends and receives {most:.0f} of {bound:.0f} bytes", most <= bound)
        )
        for goal in GOALS:
            measured = (result["hosts"], result["rate"], row["numel"], row["density"])
            if measured != (goal.hosts, goal.rate, VGG16_NUMEL, GOAL_DENSITY):
                continue
            whole = ratio(dense, row)
            checks.append(
                (
                    f"{where}: oktopk {whole:.1f} of {goal.whole:g} times faster than dense, "
                    "selection and residual included",
                    whole >= goal.whole,
                )
            )
            if goal.bytes_per_k is not None:
                sent = max(row["sent_bytes"]) / row["k"]
                checks.append(
                    (
                        f"{where}: oktopk sends {sent:.2f} of {goal.bytes_per_k:g} bytes per k",
                        sent <= goal.bytes_per_k,
                    )
                )
            if goal.exchange is not None and row["exchange_alone_us"] is not None:
                alone = dense["time_us"]["median"] / row["exchange_alone_us"]["median"]
                checks.append(
                    (
                        f"{where}: oktopk's exchange alone {alone:.1f} of {goal.exchange:g} times "
                        "faster than dense",
                        alone >= goal.exchange,
                    )
                )
    return checks


def train(options: argparse.Namespace) -> None:
    """Trains the example for a few steps on two hosts with two ranks each."""
    rate = next((rate for rate in options.rate or () if rate != "none"), "1gbit")
    with tempfile.TemporaryDirectory() as folder, Hosts(2, rate) as hosts:
        commands = [
            [
                *("torchrun", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"),
                *("--master-addr", hosts.names[0], "--master-port", str(PORT)),
                *("examples/train_vgg16.py", "--hook", "oktopk", "--epochs", "1"),
                *("--steps", str(options.steps), "--limit", "256", "--output", folder),
            ]
            for node in range(2)
        ]
        print(f"training on 2 hosts, links of {rate}:")
        for name, command in zip(hosts.names, commands, strict=True):
            variables = " ".join(f"{key}={value}" for key, value in ENVIRONMENT.items())
            print(f"  {name}: {variables} {shlex.join(command)}", flush=True)
        hosts.run(
            [[sys.executable, "-m", "torch.distributed.run", *command[1:]] for command in commands],
            [ENVIRONMENT] * 2,
            folder=ROOT,
        )
        summary = json.loads((Path(folder) / "summary.json").read_text())
    print(
        f"{summary['steps']} steps on {summary['world_size']} ranks, the same parameters on all: "
        f"{summary['iteration_seconds']:.3f} s per step, "
        f"{summary['sent_bytes_per_iteration'] / 1e6:.3f} MB sent per rank and step",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Measures allreduces between hosts on rate-limited links, and trains over such links.

    make lab
    make lab ARGS="--rate 10gbit --hosts 8"

The hosts are network namespaces on this machine (see hosts.py), so this needs root and iproute2.
They share its cores: what the link limits is measured truly, what the processor limits is slower
than on as many machines.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hosts import INTERFACE, Hosts, HostsError, missing, parse_rate

from sparsecomm.cli.bench import write_json

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "lab-allreduce.json"
PORT = 29500  # free: a namespace has all ports to itself
SPEEDUP = 10  # goal: the dense allreduce takes so many times as long as oktopk
VGG16_NUMEL = 14_728_266


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    if reason := missing():
        print(f"lab: {reason}", file=sys.stderr)
        return 1
    met = True
    try:
        if "allreduce" in options.parts:
            met = measure_allreduce(options)
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
    add("--hosts", type=int, default=4, help="hosts of the allreduce, a rank in each")
    add("--rate", default="1gbit", help="of each link and direction, or none for no limit")
    add("--numel", type=int, default=VGG16_NUMEL, help="elements, by default VGG16's")
    add("--density", type=float, default=0.01, help="share of the elements selected")
    add("--iters", type=int, default=10, help="iterations measured")
    add("--warmup", type=int, default=3, help="iterations before them")
    add("--pattern", default="uniform", help="of the gradients, see sparsecomm bench allreduce")
    add("--steps", type=int, default=4, help="training steps")
    add("--json", type=Path, default=RESULT, help="where the allreduce's figures go")
    add(
        "--parts",
        nargs="+",
        choices=("allreduce", "training"),
        default=("allreduce", "training"),
        help="what to run",
    )
    add("--report-only", action="store_true", help="a goal that is missed is no failure")
    options = parser.parse_args(arguments)
    if options.hosts < 2:
        parser.error(f"--hosts {options.hosts}: it takes 2 or more")
    if options.rate == "none":
        options.rate = None
    else:
        try:
            parse_rate(options.rate)
        except ValueError as error:
            parser.error(f"--rate: {error}, and not none")
    return options


def measure_allreduce(options: argparse.Namespace) -> bool:
    """Prints and writes the figures; returns whether the goals are met."""
    size = options.hosts
    print(
        f"allreduce between {size} hosts, links of {options.rate or 'no limited rate'}", flush=True
    )
    with tempfile.TemporaryDirectory() as folder, Hosts(size, options.rate) as hosts:
        file = Path(folder) / "rows.json"
        command = [
            *(sys.executable, "-m", "sparsecomm.cli", "bench", "allreduce"),
            *("--algorithm", "gloo_dense,oktopk,topk_a", "--pattern", options.pattern),
            *("--numel", str(options.numel), "--density", str(options.density)),
            *("--iters", str(options.iters), "--warmup", str(options.warmup)),
            *("--json", str(file)),
        ]
        environments = [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": hosts.addresses[0],
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": "1",
            }
            for rank in range(size)
        ]
        hosts.run([command] * size, environments)
        rows: list[dict[str, Any]] = json.loads(file.read_text())
    summary = summarise(rows)
    print(summary_text(summary, rows), flush=True)
    write_json(
        options.json,
        {"hosts": size, "rate": options.rate, "cores": os.cpu_count(), **summary, "rows": rows},
    )
    print(f"wrote {os.path.relpath(options.json)}\n", flush=True)
    return bool(summary["speedup_goal_met"] and summary["bytes_goal_met"])


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How oktopk stands against the dense allreduce of the same run, and against its bound."""
    by_name = {row["algorithm"]: row for row in rows}
    dense, oktopk = by_name["gloo_dense"], by_name["oktopk"]
    ranks = oktopk["world_size"]
    bound = 6 * oktopk["k"] * (ranks - 1) / ranks * 4
    most = max(oktopk["sent_bytes"] + oktopk["received_bytes"])
    pairs = zip(dense["iterations_us"], oktopk["iterations_us"], strict=True)
    ratios = [one / other for one, other in pairs]
    speedup = dense["time_us"]["median"] / oktopk["time_us"]["median"]
    return {
        "speedup": round(speedup, 3),
        "speedup_of_pairs": {
            "min": round(min(ratios), 3),
            "median": round(statistics.median(ratios), 3),
            "max": round(max(ratios), 3),
        },
        "speedup_goal": SPEEDUP,
        "speedup_goal_met": speedup >= SPEEDUP,
        "bytes_of_a_rank": most,
        "bytes_goal": bound,
        "bytes_goal_met": most < bound,
    }


def summary_text(summary: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    verdict = {True: "met", False: "MISSED"}
    pairs = summary["speedup_of_pairs"]
    lines = [
        f"dense/oktopk, selection and residual included: {summary['speedup']:.2f} of the median "
        f"times; pair by pair {pairs['min']:.2f} / {pairs['median']:.2f} / {pairs['max']:.2f} "
        f"(min, median, max); goal {SPEEDUP} or more: {verdict[summary['speedup_goal_met']]}",
        f"oktopk, bytes sent or received by a rank per iteration: {summary['bytes_of_a_rank']:.0f} "
        f"at most; goal below 6k(P-1)/P words, {summary['bytes_goal']:.0f} bytes: "
        f"{verdict[summary['bytes_goal_met']]}",
    ]
    for row in rows:
        if row["select_us"] is None:
            continue
        parts = {part: row[f"{part}_us"] for part in ("select", "exchange", "apply")}
        parts["agreement and waiting"] = row["time_us"]["median"] - math.fsum(parts.values())
        shown = ", ".join(f"{part} {value / 1e3:.2f} ms" for part, value in parts.items())
        lines.append(f"{row['algorithm']}: {shown}")
    return "\n".join(lines)


def train(options: argparse.Namespace) -> None:
    """Trains the example for a few steps on two hosts with two ranks each."""
    with tempfile.TemporaryDirectory() as folder, Hosts(2, options.rate) as hosts:
        commands = [
            [
                *("torchrun", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"),
                *("--master-addr", hosts.names[0], "--master-port", str(PORT)),
                *("examples/train_vgg16.py", "--hook", "oktopk", "--epochs", "1"),
                *("--max-steps", str(options.steps), "--limit", "256", "--output", folder),
            ]
            for node in range(2)
        ]
        print(f"training on 2 hosts, links of {options.rate or 'no limited rate'}:")
        for name, command in zip(hosts.names, commands, strict=True):
            print(f"  {name}: GLOO_SOCKET_IFNAME={INTERFACE} {shlex.join(command)}", flush=True)
        environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        hosts.run(
            [[sys.executable, "-m", "torch.distributed.run", *command[1:]] for command in commands],
            [environment] * 2,
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

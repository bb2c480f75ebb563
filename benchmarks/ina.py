#!/usr/bin/env python3
"""Measures allreduces through aggregators between hosts on rate-limited links.

    python benchmarks/ina.py                                   the whole grid, an hour
    python benchmarks/ina.py --workers 4 --rate 1gbit --numel 8388608     a part of it

There are as many aggregators as workers, each on a host of its own. The hosts are network
namespaces on this machine (see hosts.py), so this needs root and iproute2. What the file already
has is not measured again; remove the file to begin anew. Beside it goes a picture of the same name:
arrays without zero blocks by their size, then the largest by its share of zero blocks. The hosts
share the machine's cores: what the link limits is measured truly, what the processor limits is
slower than on as many machines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hosts import Hosts, HostsError, missing, parse_rate

from sparsecomm.cli.bench import write_json
from sparsecomm.cli.measure import GLOO_DENSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = Path(__file__).resolve().parent / "results" / "ina.json"
# The quick ones first.
NUMELS = (2 << 20, 8 << 20, 32 << 20)  # 8, 32 and 128 MiB of f32
ZEROS = (0.0, 0.5, 0.75, 0.9, 0.99)

# At 1 Gbit/s: the time over that of the counted bytes on the busiest link, from this size on.
MOST_OVER_LINK = 1.15
LARGE_NUMEL = 8 << 20
# How many times as quick, in the median times of one run.
DENSE_TO_GLOO = 1.35  # four workers, no zero blocks
ZERO_TO_DENSE = 3.3  # three quarters zero, identical on all workers: to ours without zero blocks
ZERO_TO_GLOO = 5.0
TO_OMNIREDUCE = 1.76  # somewhere

Record = dict[str, Any]
Check = tuple[str, bool]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    if reason := missing():
        print(f"ina: {reason}", file=sys.stderr)
        return 1
    results: list[dict[str, Any]] = []
    chosen: list[dict[str, Any]] = []  # those of this call's set-ups
    if options.json.exists():
        results = json.loads(options.json.read_text())["results"]
    try:
        for numel, rate, workers in itertools.product(options.numel, options.rate, options.workers):
            set_up = {
                "workers": workers,
                "rate": rate,
                "numel": numel,
                "zero": list(options.zero),
                "block_bytes": options.block_bytes,
                "iters": options.iters,
                "warmup": options.warmup,
            }
            known = [result for result in results if {**result, **set_up} == result]
            if not known:
                where = f"{workers} workers and aggregators, {numel} f32, links of {rate}"
                print(where, flush=True)
                known = [{**set_up, "records": measure(workers, rate, numel, options)}]
                results += known
                # After each, so that a run that is broken off leaves what it has.
                write_json(options.json, {"cores": os.cpu_count(), "results": results})
            chosen += known
    except HostsError as error:
        print(f"ina: {error}", file=sys.stderr)
        return 1
    checks = [check for result in chosen for check in check_goals(result)]
    checks += check_omnireduce(chosen)
    for text, met in checks:
        print(f"{text}: {'met' if met else 'MISSED'}")
    if chosen:
        draw(chosen, options.json.with_suffix(".png"))
    return 0 if options.report_only or all(met for _, met in checks) else 1


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures allreduces through aggregators between hosts on rate-limited links.",
        epilog="Exit status 1: a goal is missed, or something failed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=(2, 4, 6), help="and as many aggregators")
    add("--rate", nargs="+", default=("1gbit", "10gbit"), help="of each link and direction")
    add("--numel", type=int, nargs="+", default=NUMELS, help="elements, f32")
    add("--zero", type=float, nargs="+", default=ZEROS, help="shares of blocks that are zero")
    add("--block-bytes", type=int, default=1024, help="of a block")
    add("--iters", type=int, default=5, help="iterations measured")
    add("--warmup", type=int, default=2, help="iterations before them")
    add("--json", type=Path, default=FILE, help="where the figures go")
    add("--report-only", action="store_true", help="a goal that is missed is no failure")
    options = parser.parse_args(arguments)
    for rate in options.rate:
        try:
            parse_rate(rate)
        except ValueError as error:
            parser.error(f"--rate: {error}")
    for workers in options.workers:
        if not 2 <= workers <= 64:
            parser.error(f"--workers {workers}: it takes from 2 to 64")
    if not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    return options


def measure(workers: int, rate: str, numel: int, options: argparse.Namespace) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder, Hosts(2 * workers, rate) as hosts:
        file = Path(folder) / "records.json"
        hosts.run_ranks(
            [
                *(sys.executable, "-m", "sparsecomm.cli", "bench", "ina"),
                *("--aggregators", str(workers), "--numel", str(numel)),
                *("--zero", ",".join(map(str, options.zero))),
                *("--block-bytes", str(options.block_bytes)),
                *("--iters", str(options.iters), "--warmup", str(options.warmup)),
                *("--json", str(file)),
            ]
        )
        records: list[Record] = json.loads(file.read_text())
    return records


def cases(records: Sequence[Record]) -> Iterator[tuple[tuple[float, str], dict[str, Record]]]:
    """The records of each fraction and kind of support, by algorithm."""

    def case_of(record: Record) -> tuple[float, str]:
        return record["zero_fraction"], record["supports"]

    for case, group in itertools.groupby(records, case_of):
        yield case, {record["algorithm"]: record for record in group}


def median(record: Record) -> float:
    """In seconds."""
    return float(record["time_us"]["median"]) / 1e6


def link_seconds(record: Record, rate: str) -> float:
    """The time that the busiest link needs for the bytes that were counted."""
    counts = ("sent_bytes", "received_bytes", "aggregator_sent_bytes", "aggregator_received_bytes")
    return max(max(record[name], default=0.0) for name in counts) * 8 / parse_rate(rate)


def at_least(what: str, value: float, goal: float) -> Check:
    return f"{what} {value:.2f} of {goal:g} times as quick", value >= goal


def check_goals(result: dict[str, Any]) -> list[Check]:
    """Each line of a goal that applies to the set-up, and whether it is met."""
    where = f"{result['workers']} workers, {result['rate']}, {result['numel']} f32"
    groups = dict(cases(result["records"]))
    checks = [
        (f"{where}: {record['algorithm']} is exact", bool(record["exact"]))
        for record in result["records"]
        if not record["exact"]
    ]
    if result["rate"] != "1gbit" or result["numel"] < LARGE_NUMEL:
        return checks
    for (zero, supports), group in groups.items():
        over = median(group["ina"]) / link_seconds(group["ina"], result["rate"])
        text = f"{where}, {zero:g} zero, {supports}: {over:.2f} of {MOST_OVER_LINK:g} times as long"
        checks.append((f"{text} as the bytes take", over <= MOST_OVER_LINK))
    dense = groups.get((0.0, "identical"))
    sparse = groups.get((0.75, "identical"))
    if dense and result["workers"] == 4:
        ratio = median(dense[GLOO_DENSE]) / median(dense["ina"])
        checks.append(at_least(f"{where}, no zero blocks, to gloo:", ratio, DENSE_TO_GLOO))
    if dense and sparse:
        own = median(dense["ina"]) / median(sparse["ina"])
        gloo = median(sparse[GLOO_DENSE]) / median(sparse["ina"])
        checks.append(at_least(f"{where}, 0.75 zero, identical, to dense:", own, ZERO_TO_DENSE))
        checks.append(at_least(f"{where}, 0.75 zero, identical, to gloo:", gloo, ZERO_TO_GLOO))
    return checks


def check_omnireduce(results: Sequence[dict[str, Any]]) -> list[Check]:
    ratios = [
        (median(group["omnireduce"]) / median(group["ina"]), result, case)
        for result in results
        for case, group in cases(result["records"])
    ]
    if not ratios:
        return []
    checks = []
    for (ratio, result, case), goal in (
        (max(ratios, key=lambda each: each[0]), TO_OMNIREDUCE),
        (min(ratios, key=lambda each: each[0]), 1.0),
    ):
        where = f"{result['workers']} workers, {result['rate']}, {result['numel']} f32"
        what = f"{where}, {case[0]:g} zero, {case[1]}, to OmniReduce's policy:"
        checks.append(at_least(what, ratio, goal))
    return checks


def draw(results: Sequence[dict[str, Any]], picture: Path) -> None:
    """A row for each rate: OmNICCL's Figures 5, 6 and 7. Each set-up is there once."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rates = sorted({result["rate"] for result in results}, key=parse_rate)
    figure = Figure(figsize=(15, 4.5 * len(rates)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for row, rate in zip(figure.subplots(len(rates), 3, squeeze=False), rates, strict=True):
        chosen = sorted(
            (result for result in results if result["rate"] == rate),
            key=lambda result: (result["workers"], result["numel"]),
        )
        draw_dense(row[0], chosen)
        draw_zero(row[1], chosen, rate)
        draw_policies(row[2], chosen)
        for axis in row:
            axis.set(ylabel="time (ms)", ylim=(0, None))
            axis.grid(alpha=0.3)
            axis.legend(fontsize="small")
    figure.savefig(picture)


def mebibytes(result: dict[str, Any]) -> float:
    return float(result["numel"]) * 4 / 2**20


def color_of(workers: int) -> str:
    return f"C{workers % 10}"


def draw_dense(axis: Axes, results: Sequence[dict[str, Any]]) -> None:
    """No zero blocks, over the size of the array."""
    sizes = sorted({mebibytes(result) for result in results})
    for workers in dict.fromkeys(result["workers"] for result in results):
        groups = {
            mebibytes(result): dict(cases(result["records"])).get((0.0, "identical"))
            for result in results
            if result["workers"] == workers
        }
        points = {size: group for size, group in groups.items() if group}
        for name, style in ((GLOO_DENSE, "--"), ("ina", "-")):
            times = [1e3 * median(group[name]) for group in points.values()]
            label = f"{name}, {workers} workers"
            axis.plot(list(points), times, style, color=color_of(workers), marker="o", label=label)
    axis.set(title=f"{results[0]['rate']}, no zero blocks", xlabel="array (MiB)")
    axis.set(xscale="log", xticks=sizes, xticklabels=[f"{size:g}" for size in sizes])


def draw_zero(axis: Axes, results: Sequence[dict[str, Any]], rate: str) -> None:
    """The largest array, the same blocks on all workers, over the share of zero blocks."""
    size = max(mebibytes(result) for result in results)
    for result in (each for each in results if mebibytes(each) == size):
        shares, times, bounds = [], [], []
        for (zero, supports), group in cases(result["records"]):
            if supports == "identical":
                shares.append(zero)
                times.append(1e3 * median(group["ina"]))
                bounds.append(1e3 * link_seconds(group["ina"], rate))
        color = color_of(result["workers"])
        label = f"ina, {result['workers']} workers"
        axis.plot(shares, times, color=color, marker="o", label=label)
        axis.plot(shares, bounds, ":", color=color, label=f"{label}: its bytes on the link")
    title = f"{rate}, {size:g} MiB, identical supports"
    axis.set(title=title, xlabel="share of zero blocks")


def draw_policies(axis: Axes, results: Sequence[dict[str, Any]]) -> None:
    """The largest array, the middle number of workers: policies over the share of zero blocks."""
    counts = sorted({result["workers"] for result in results})
    workers = counts[len(counts) // 2]
    result = next(each for each in reversed(results) if each["workers"] == workers)
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for (zero, supports), group in cases(result["records"]):
        for name, record in group.items():
            # Those that send zeros do not depend on where they are.
            if name in ("ina", "omnireduce") or supports == "identical":
                curves.setdefault((name, supports), []).append((zero, 1e3 * median(record)))
    names = list(dict.fromkeys(name for name, _ in curves))
    for (name, supports), points in sorted(curves.items()):
        alone = (name, "independent") not in curves
        style = "-" if supports == "identical" else "--"
        label = name if alone else f"{name}, {supports}"
        color = f"C{names.index(name)}"
        axis.plot(*zip(*points, strict=True), style, color=color, marker="o", label=label)
    title = f"{result['rate']}, {mebibytes(result):g} MiB, {workers} workers and aggregators"
    axis.set(title=title, xlabel="share of zero blocks")


if __name__ == "__main__":
    sys.exit(main())

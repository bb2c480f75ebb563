#!/usr/bin/env python3
"""Compares runs of one task: a table on the terminal and a picture of their curves.

python examples/report.py runs/vgg16-*
python examples/report.py runs/vgg16-ddp/summary.json runs/vgg16-oktopk/summary.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.exchange import SEND_ALL
from common.prediction import HOSTS, LINKS, Measured, step_seconds
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

LABELS = {
    "ddp": "plain DDP",
    "dense": "dense allreduce",
    "dense_overlap": "DenseOvlp",
    "topk_a": "TopkA",
    "topk_dsa": "TopkDSA",
    "block_topk": "block Top-k",
    "gtopk": "gTopk",
    "gaussian_k": "Gaussiank",
    "oktopk": "Ok-Topk",
    "quantized_topk": "quantized Top-k",
    "prepare": "prepare()",
}
# Told apart by colour-blind readers, and by shape in a print without colour.
STYLES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#56B4E9", "v", "-"),
    ("#E69F00", "P", "--"),
    ("#000000", "X", "-."),
)
RISE = 0.01  # of a step's time, above which it is explained
NUMBERS = (
    "density",
    "parameters",
    "steps",
    "iteration_seconds",
    "compute_seconds",
    "select_seconds",
    "exchange_seconds",
    "sent_bytes_per_iteration",
    "realised_density",
)


class ReportError(ValueError):
    """A summary cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Run:
    """What the report needs from one summary.json."""

    label: str
    hook: str
    task: str
    data: str
    world_size: int
    batch: int
    epochs: int
    density: float
    quality: str  # the metric's name
    parameters: float
    steps: float
    iteration_seconds: float
    compute_seconds: float
    select_seconds: float
    exchange_seconds: float
    sent_bytes_per_iteration: float
    realised_density: float
    loss: list[float]
    metric: list[float]
    sent_bytes: list[float]

    def predicted_step(self, link: str, density: float | None = None) -> float | None:
        """Seconds between several hosts, at the run's final density if none is given."""
        measured = Measured(
            self.hook,
            round(self.parameters),
            self.density if density is None else density,
            self.compute_seconds,
            self.select_seconds,
        )
        return step_seconds(measured, link)

    def predicted_seconds(self, link: str) -> list[float] | None:
        """From the start to the end of each epoch; one that sent more had a higher density."""
        sent = [after - before for before, after in pairwise([0, *self.sent_bytes])]
        total, ends = 0.0, []
        for of_epoch in sent:
            more = of_epoch / sent[-1] if sent[-1] > 0 else 1.0
            step = self.predicted_step(link, min(1.0, more * self.density))
            if step is None:
                return None
            total += step * self.steps / self.epochs
            ends.append(total)
        return ends


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Compare runs of one task in a table and a picture.",
    )
    parser.add_argument(
        "summaries",
        nargs="+",
        type=Path,
        metavar="SUMMARY",
        help="summary.json files, or folders with one",
    )
    parser.add_argument(
        "--picture", type=Path, default=Path("runs/report.png"), help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    paths = options.summaries
    try:
        if len(paths) < 2:
            raise ReportError(f"two or more summaries make a comparison, found {len(paths)}")
        runs = arrange([(path, read_run(path)) for path in paths])
        for name in ("task", "data", "quality"):
            found = sorted({getattr(run, name) for run in runs})
            if len(found) > 1:
                raise ReportError(f"not of one {name}: {', '.join(found)}; report on each alone")
        print(table(runs))
        for text in (contrast(runs), meaning(runs)):
            if text:
                print(text)
        draw(runs, options.picture)
    except (ReportError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(f"\nwrote {options.picture}")
    return 0


def read_run(path: Path) -> Run:
    """Reads one summary and checks every entry that the report uses."""
    if path.is_dir():
        path = path / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(f"{path}: no such file") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ReportError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(summary, dict):
        raise ReportError(f"{path}: holds a {type(summary).__name__}, not an object")

    def entry(name: str, kind: type | tuple[type, ...]) -> Any:
        value = summary.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ReportError(f"{path}: {name!r} is missing or of another kind: {value!r}")
        return value

    numbers = {name: float(entry(name, (int, float))) for name in NUMBERS}
    if numbers["compute_seconds"] <= 0:
        raise ReportError(f"{path}: 'compute_seconds' is {numbers['compute_seconds']}, not above 0")
    epochs = entry("epochs", int)
    curves = entry("curves", dict)
    quality = entry("quality", str)
    for name in ("loss", quality, "cumulative_sent_bytes"):
        curve = curves.get(name)
        if not isinstance(curve, list) or len(curve) != epochs:
            raise ReportError(f"{path}: the curve {name!r} does not have {epochs} points")
        if not all(isinstance(point, int | float) for point in curve):
            raise ReportError(f"{path}: the curve {name!r} holds something else than numbers")
    hook = entry("hook", str)
    label = LABELS.get(hook, hook)
    if hook not in SEND_ALL:
        label = f"{label} {100 * numbers['density']:g} %"
    return Run(
        label=label,
        hook=hook,
        task=entry("task", str),
        data=entry("data", str),
        world_size=entry("world_size", int),
        batch=entry("batch", int),
        epochs=epochs,
        loss=curves["loss"],
        quality=quality,
        metric=curves[quality],
        sent_bytes=curves["cumulative_sent_bytes"],
        **numbers,
    )


def arrange(read: Sequence[tuple[Path, Run]]) -> list[Run]:
    """Dense first, what the others are measured against; the folder told where labels agree."""
    labels = [run.label for _, run in read]
    runs = [
        replace(run, label=f"{run.label} ({(path if path.is_dir() else path.parent).name})")
        if labels.count(run.label) > 1
        else run
        for path, run in read
    ]
    return sorted(runs, key=lambda run: run.hook not in SEND_ALL)


def byte_ratio(run: Run, runs: Sequence[Run]) -> float | None:
    """How many times fewer bytes a run sends than the first dense one of as many ranks."""
    for dense in runs:
        if dense.hook in SEND_ALL and dense.world_size == run.world_size:
            sent = run.sent_bytes_per_iteration
            return dense.sent_bytes_per_iteration / sent if sent > 0 else None
    return None


def table(runs: Sequence[Run]) -> str:
    """The runs as rows of text under a line of headings."""
    rows = [
        (
            "method",
            words(runs[0].quality),
            "s/iteration",
            "exchange ms",
            "MB sent/rank/iter",
            "realised density",
            "bytes vs dense",
            *(f"predicted s, {HOSTS} hosts, {link}" for link in LINKS),
        )
    ]
    for run in runs:
        ratio = byte_ratio(run, runs)
        rows.append(
            (
                run.label,
                f"{run.metric[-1]:.4f}",
                f"{run.iteration_seconds:.3f}",
                f"{1e3 * run.exchange_seconds:.1f}",
                f"{run.sent_bytes_per_iteration / 1e6:.3f}",
                f"{100 * run.realised_density:.2f} %",
                "-" if ratio is None else "1" if run.hook in SEND_ALL else f"1/{ratio:.1f}",
                *("-" if s is None else f"{s:.3f}" for s in map(run.predicted_step, LINKS)),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def meaning(runs: Sequence[Run]) -> str:
    """Says which of the runs would step the quickest between hosts, and by how much."""
    dense = next((run for run in runs if run.hook in SEND_ALL), None)
    sentences: list[str] = []
    if dense is None:
        return ""
    for link in LINKS:
        found = [(seconds, run) for run in runs if (seconds := run.predicted_step(link))]
        before = dense.predicted_step(link)
        if before is None:
            continue
        seconds, best = min(found, key=lambda pair: pair[0])
        if before < 1.05 * seconds:
            sentences.append(f"on {link} {dense.label} is as quick as the best")
        else:
            sentences.append(
                f"on {link} a step of {best.label} takes {seconds:.3f} s instead of "
                f"{before:.3f} s, {before / seconds:.1f} times as quick"
            )
    return f"Predicted between {HOSTS} hosts: {'; '.join(sentences)}."


def contrast(runs: Sequence[Run]) -> str:
    """Says why steps are longer although the exchange is shorter, of each run that has both."""
    dense = next((run for run in runs if run.hook in SEND_ALL), None)
    if dense is None:
        return ""
    overlaps = dense.hook in ("ddp", "dense_overlap")
    hidden = f", and has all of {dense.label}, also what the backward pass hides" * overlaps
    lines = [
        f"{run.label}: exchange ms falls from {1e3 * dense.exchange_seconds:.1f} to "
        f"{1e3 * run.exchange_seconds:.1f} while s/iteration rises from "
        f"{dense.iteration_seconds:.3f} to {run.iteration_seconds:.3f}: exchange ms leaves out the "
        f"selection, {1e3 * run.select_seconds:.1f} ms{hidden}. If all ranks are on one machine, "
        "there is no link to save"
        for run in runs
        if run.hook not in SEND_ALL
        and run.exchange_seconds < dense.exchange_seconds
        and run.iteration_seconds > (1 + RISE) * dense.iteration_seconds
    ]
    return "\n".join(lines)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draws loss, quality and bytes over the epochs, and loss over time, into a PNG file.

    That time is the predicted one on the slowest link.
    """
    figure = Figure(figsize=(11.5, 9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    (loss, quality), (over_time, bytes_) = figure.subplots(2, 2)
    first = runs[0]
    figure.suptitle(
        f"{first.task} on {first.data}: {first.world_size} ranks x {first.batch}", fontsize=13
    )
    for position, run in enumerate(runs):
        colour, marker, line = STYLES[position % len(STYLES)]
        epochs = list(range(1, run.epochs + 1))
        sent_gigabytes = [0.0, *(sent / 1e9 for sent in run.sent_bytes)]
        ratio = byte_ratio(run, runs)
        share = "" if run.hook in SEND_ALL or ratio is None else f", 1/{ratio:.1f} of dense"
        seconds = run.predicted_seconds(LINKS[0]) or []
        for panel, x, y, label in (
            (loss, epochs, run.loss, run.label),
            (quality, epochs, run.metric, run.label),
            (bytes_, [0, *epochs], sent_gigabytes, f"{sent_gigabytes[-1]:.2f} GB{share}"),
            (over_time, seconds, run.loss[: len(seconds)], run.label),
        ):
            panel.plot(
                x,
                y,
                color=colour,
                marker=marker,
                linestyle=line,
                linewidth=2,
                markersize=6,
                label=label,
            )
    decorate(over_time, f"Training loss over time, {HOSTS} hosts, {LINKS[0]}", "mean of the epoch")
    over_time.set_xlabel("predicted seconds since the start", fontsize=11)
    decorate(loss, "Training loss", "mean of the epoch")
    decorate(quality, words(first.quality).capitalize(), "")
    decorate(bytes_, "Bytes sent per rank since the start", "GB")
    losses = [value for run in runs for value in run.loss]
    if min(losses) > 0:
        log_scale(loss, losses)
        log_scale(over_time, losses)
    bytes_.set_ylim(bottom=0)
    bytes_.set_xlim(left=0)
    quality.legend(fontsize=10)
    bytes_.legend(loc="upper left", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def words(name: str) -> str:
    return name.replace("_", " ")


def decorate(panel: Axes, title: str, unit: str) -> None:
    panel.set_title(title, fontsize=12)
    panel.set_xlabel("epoch", fontsize=11)
    panel.set_ylabel(unit, fontsize=11)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(visible=True, color="#dddddd")
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def log_scale(panel: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis whose ticks are plain numbers in steps of 1, 3, 10."""
    low, high = min(values) / 1.6, max(values) * 1.4
    panel.set_yscale("log")
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 3)]
    panel.yaxis.set_major_locator(FixedLocator(ticks))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_ylim(low, high)


if __name__ == "__main__":
    sys.exit(main())

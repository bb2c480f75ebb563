"""Tables and pictures of the runs that reproduce.py has made, from the files that they left."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from report import LABELS, STYLES, decorate, log_scale, words

BASELINE = "dense"
NAMES = {**LABELS, "auto": "auto", "recommended": "Ok-Topk, recommended recipe"}
# The quality that methods are timed to: so much of the way that dense training goes from its first
# epoch to its last.
SHARE_OF_WAY = 0.95
# Runs that are observed, at ascending densities.
XI = ("sparser", "sampled", "denser")
WAITING = ("agree_seconds", "exchange_seconds", "apply_seconds")

Summary = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A program, examples/train_NAME.py, with its options for a full and for a fast comparison."""

    name: str
    full: tuple[str, ...]
    fast: tuple[str, ...]


@dataclass(frozen=True)
class Method:
    """The runs of a method on a task: one for each seed, and the one between hosts, if any."""

    name: str
    seeds: list[Summary]
    link: Summary | None

    @property
    def quality(self) -> str:
        name: str = self.seeds[0]["quality"]
        return name

    def curve(self) -> list[float]:
        """The quality after each epoch, mean over the seeds."""
        curves = [run["curves"][self.quality] for run in self.seeds]
        return [statistics.fmean(values) for values in zip(*curves, strict=True)]

    def mean(self, key: str) -> float:
        return statistics.fmean(run[key] for run in self.seeds)

    def seconds_to(self, target: float) -> float | None:
        """Between the hosts, until the quality is reached; None if it is not."""
        higher = self.seeds[0]["higher_is_better"]
        for epoch, value in enumerate(self.curve(), 1):
            if self.link and (value >= target if higher else value <= target):
                return epoch * self.seconds_per_epoch(self.link)
        return None

    def seconds_per_epoch(self, run: Summary) -> float:
        steps = self.seeds[0]["steps"] / self.seeds[0]["epochs"]
        return float(steps * run["iteration_seconds"])


@dataclass(frozen=True)
class Results:
    """Of each task, by name: its methods, the baseline first, and the rows of observed runs."""

    methods: dict[str, list[Method]]
    observed: dict[str, dict[str, list[dict[str, Any]]]]

    @classmethod
    def read(
        cls,
        folder: Path,
        tasks: Sequence[Task],
        methods: Sequence[str],
        observed: Sequence[str],
        link: str,
    ) -> Results:
        """What reproduce.py's runs have left in the folder."""
        found: dict[str, list[Method]] = {}
        rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for task in tasks:
            of_task = folder / task.name
            found[task.name] = [read_method(of_task / name, link) for name in methods]
            rows[task.name] = {
                name: json.loads((of_task / "observed" / name / "observations.json").read_text())
                for name in observed
            }
        return cls(found, rows)


def read_method(folder: Path, link: str) -> Method:
    seeds = [json.loads(path.read_text()) for path in sorted(folder.glob("seed-*/summary.json"))]
    linked = folder / link / "summary.json"
    return Method(folder.name, seeds, json.loads(linked.read_text()) if linked.exists() else None)


def target_quality(methods: Sequence[Method]) -> float:
    dense = next((method for method in methods if method.name == BASELINE), methods[0]).curve()
    return dense[0] + SHARE_OF_WAY * (dense[-1] - dense[0])


def write_results(results: Results, page: Path, link: str) -> None:
    """Writes the page, and the pictures that it shows into a folder of its name."""
    pictures = page.with_suffix("")
    pictures.mkdir(parents=True, exist_ok=True)
    parts = [introduction(results, link)]
    for task, methods in results.methods.items():
        draw_methods(methods, pictures / f"{task}.png", link)
        draw_observed(results.observed[task], pictures / f"{task}-observed.png")
        parts.append(section(task, methods, results.observed[task], pictures.name, link))
    page.write_text("\n\n".join(parts) + "\n")


def introduction(results: Results, link: str) -> str:
    run = next(iter(results.methods.values()))[0].seeds[0]
    return f"""# Results on the examples' tasks

Written by `make reproduce`: every method with the same models, data, order and number of epochs,
on {run["world_size"]} ranks. Quality is the mean over seeds, with the lowest and the highest. Bytes
are counted by the transport, or for `dense` computed. Seconds of a step are medians, on this
machine, whose cores the ranks share, and between hosts on links of {link}: network namespaces on
the same machine, with the bandwidth of such a link but without processors of their own.

Seconds to a quality are steps times the seconds of a step between the hosts. The quality is
{100 * SHARE_OF_WAY:g} % of the way that dense training goes from its first epoch to its last.
Steps between hosts are those without a density warm-up, whose epochs take longer. `recommended` is
`oktopk` with what the training program recommends: a learning rate of its own may be part of it."""


def section(
    task: str,
    methods: Sequence[Method],
    observed: dict[str, list[dict[str, Any]]],
    pictures: str,
    link: str,
) -> str:
    first = methods[0].seeds[0]
    quality, better = words(methods[0].quality), "higher" if first["higher_is_better"] else "lower"
    seeds = len(methods[0].seeds)
    fill_in = observed["topk_dsa"]
    result = statistics.fmean(row["result_density"] for row in fill_in)
    xis = [
        f"{statistics.median(row['xi'] for row in rows if row['xi'] is not None):.2f} at density "
        f"{100 * rows[-1]['asked_density']:g} %"
        for rows in (observed[name] for name in XI)
    ]
    return f"""## {first["task"]}

{first["parameters"]:,} parameters, {first["data"]}, {first["batch"]} a rank and step,
{first["epochs"]} epochs of {first["steps"] // first["epochs"]} steps; seeds: {seeds}.
{quality.capitalize()}: {better} is better.

{table(methods, link)}

![quality over epochs and time, and where the time goes]({pictures}/{task}.png)

Of a step, what of selecting and communicating the backward pass hides is not shown; what it does
not hide is divided between both as the whole is.

![what is selected, against what was asked for]({pictures}/{task}-observed.png)

No selection exceeds four times what was asked for.

Fill-in: selections of {100 * fill_in[-1]["asked_density"]:g} % make a result of
{100 * result:.2f} % in TopkDSA, mean of all steps. The xi of Ok-Topk's Assumption 1, median of the
steps that were looked at: {", ".join(xis)}."""


def table(methods: Sequence[Method], link: str) -> str:
    quality, target = methods[0].quality, target_quality(methods)
    heading = ["method", words(quality), "MB sent per rank and step", "density", "s per step"]
    heading += [f"s per step, {link}", f"s to {target:.3f}"]
    rows = [heading, ["---"] * len(heading)]
    for method in methods:
        values = [run[quality] for run in method.seeds]
        spread = f" ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else ""
        rows.append(
            [
                NAMES[method.name],
                f"{statistics.fmean(values):.4f}{spread}",
                f"{method.mean('sent_bytes_per_iteration') / 1e6:.3f}",
                f"{100 * method.mean('realised_density'):.2f} %",
                number(method.mean("iteration_seconds")),
                number(method.link["iteration_seconds"] if method.link else None),
                number(method.seconds_to(target), 0),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def draw_methods(methods: Sequence[Method], path: Path, link: str) -> None:
    """Quality over epochs and over time, and the parts of a step here and between hosts."""
    figure = Figure(figsize=(13.5, 9.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    (by_epoch, by_time), bars = figure.subplots(2, 2)
    for method, style in zip(methods, many_styles(), strict=False):
        curve = method.curve()
        epochs = range(1, len(curve) + 1)
        by_epoch.plot(epochs, curve, label=NAMES[method.name], **style)
        if method.link is not None:
            seconds = method.seconds_per_epoch(method.link)
            by_time.plot([seconds * epoch for epoch in epochs], curve, **style)
    quality = words(methods[0].quality)
    decorate(by_epoch, quality.capitalize(), "mean over seeds")
    decorate(by_time, f"{quality.capitalize()} over time, link of {link}", "mean over seeds")
    by_time.set_xlabel("seconds")
    figure.legend(loc="outside lower center", ncols=5, fontsize=10)
    draw_parts(bars[0], [(m.name, m.seeds[0]) for m in methods], "A step on this machine")
    linked = [(m.name, m.link) for m in methods if m.link is not None]
    draw_parts(bars[1], linked, f"A step between hosts, link of {link}")
    figure.savefig(path)


def draw_parts(panel: Axes, runs: Sequence[tuple[str, Summary]], title: str) -> None:
    """Stacked bars: compute, and the exposed part of selecting and of communicating."""
    bottom = [0.0] * len(runs)
    for part, colour in (("compute", "#56B4E9"), ("select", "#E69F00"), ("communicate", "#0072B2")):
        heights = [parts_of(run)[part] for _, run in runs]
        panel.bar(range(len(runs)), heights, bottom=bottom, label=part, color=colour)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    decorate(panel, title, "seconds")
    panel.set_xlabel("")
    names = [NAMES[name].replace(", ", ",\n") for name, _ in runs]
    panel.set_xticks(range(len(runs)), names, rotation=60)
    panel.legend(fontsize=9)


def parts_of(run: Summary) -> dict[str, float]:
    """Seconds of a step: computing, and what of selecting and communicating is not hidden."""
    waiting = sum(run[name] for name in WAITING)
    share = run["select_seconds"] / max(run["select_seconds"] + waiting, 1e-12)
    exposed = run["iteration_seconds"] - run["compute_seconds"]
    return {
        "compute": run["compute_seconds"],
        "select": share * exposed,
        "communicate": (1 - share) * exposed,
    }


def draw_observed(observed: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Densities and thresholds over the steps, fill-in, and xi: Ok-Topk's Figures 4, 5 and 6."""
    figure = Figure(figsize=(13.5, 9.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    (density, threshold), (fill_in, xi) = figure.subplots(2, 2)
    labels = {"reused": "reused for 32 steps", "sampled": "sampled", "gaussian_k": "Gaussiank"}
    for name, style in zip(labels, many_styles(marker=False), strict=False):
        rows = observed[name]
        shares = [row["selected_density"] / row["asked_density"] for row in rows]
        density.plot([row["step"] for row in rows], shares, label=labels[name], **style)
        close = [row for row in rows if row["exact_threshold"] and row["threshold"]]
        ratios = [row["threshold"] / row["exact_threshold"] for row in close]
        threshold.plot([row["step"] for row in close], ratios, label=labels[name], **style)
    for name, label in (("selected_density", "selected by rank 0"), ("result_density", "result")):
        rows = observed["topk_dsa"]
        shares = [row[name] / row["asked_density"] for row in rows]
        fill_in.plot([row["step"] for row in rows], shares, label=label)
    for name, style in zip(XI, many_styles(False), strict=False):
        close = [row for row in observed[name] if row["xi"] is not None]
        label = f"density {100 * close[-1]['asked_density']:g} %"
        xi.plot([row["step"] for row in close], [row["xi"] for row in close], label=label, **style)
    for panel, title in (
        (density, "Entries selected, over those asked for"),
        (threshold, "Threshold in use, over the exact one"),
        (fill_in, "TopkDSA: entries, over those asked for"),
        (xi, "xi of Assumption 1"),
    ):
        decorate(panel, title, "")
        panel.set_xlabel("step")
        panel.legend(fontsize=9)
    for panel in (density, threshold):
        log_scale(panel, [value for line in panel.lines for value in line.get_ydata()])
    figure.savefig(path)


def many_styles(marker: bool = True) -> list[dict[str, Any]]:
    """More than the report has: its colours with each of two line styles."""
    return [
        {"color": colour, "marker": shape if marker else None, "linestyle": line, "markersize": 5}
        for line in ("-", "--")
        for colour, shape, _ in STYLES
    ]

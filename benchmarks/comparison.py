"""Tables and pictures of the runs that reproduce.py has made, from the files that they left."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts import parse_rate
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from report import LABELS, STYLES, decorate, log_scale, words

BASELINE = "dense"
AT_RECIPES_LR = "dense_recommended"
NAMES = {
    **LABELS,
    AT_RECIPES_LR: "dense allreduce, the recipe's learning rate",
    "auto": "auto",
    "recommended": "Ok-Topk, recommended recipe",
    "recommended_quantized": "quantized Top-k, recommended recipe",
}
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
    link_steps: int = 20  # between hosts; as many as stand for all
    batch_on_many_hosts: int = 0  # 0: it is not trained there
    recipe_lr: float | None = None  # where the recommended recipe has a learning rate of its own

    def trains_dense_at_recipe_lr(self, fast: bool) -> bool:
        """What the recipe owes to its learning rate is no merit of the exchange."""
        return self.recipe_lr is not None and not fast


@dataclass(frozen=True)
class Method:
    """The runs of a method on a task: one for each seed, and those between hosts, if any.

    `link` is of some steps between as many hosts as the seeds' runs have ranks, and without a
    density warm-up; `hosts` is a whole training between more of them.
    """

    name: str
    seeds: list[Summary]
    link: Summary | None
    hosts: Summary | None = None

    @property
    def quality(self) -> str:
        name: str = self.seeds[0]["quality"]
        return name

    @property
    def steps(self) -> float:
        """Of an epoch."""
        return float(self.seeds[0]["steps"] / self.seeds[0]["epochs"])

    def curve(self) -> list[float]:
        """The quality after each epoch, mean over the seeds."""
        curves = [run["curves"][self.quality] for run in self.seeds]
        return [statistics.fmean(values) for values in zip(*curves, strict=True)]

    def finals(self) -> list[float]:
        """The quality of each seed in the end."""
        return [run[self.quality] for run in self.seeds]

    def median(self, key: str) -> float:
        return float(statistics.median(run[key] for run in self.seeds))

    def sent_megabytes(self) -> list[float]:
        """Of a rank and step, in each epoch; mean over the seeds."""
        curves = [each(run["curves"]["cumulative_sent_bytes"]) for run in self.seeds]
        return [statistics.fmean(values) / self.steps / 1e6 for values in zip(*curves, strict=True)]

    def seconds_between_hosts(self, bits_per_second: float) -> list[float] | None:
        """After each epoch, if there is a run between hosts.

        Its steps have no density warm-up: epochs that have one are given what they took longer on
        this machine than the last, and what they sent more.
        """
        if self.link is None:
            return None
        epochs = [self.steps * self.link["iteration_seconds"]] * self.seeds[0]["epochs"]
        if self.seeds[0]["density_warmup"]:
            sent = self.sent_megabytes()
            times = [each(run["cumulative_seconds"]) for run in self.seeds]
            local = [statistics.median(values) for values in zip(*times, strict=True)]
            for epoch in range(len(self.seeds[0]["density_warmup"][: len(epochs)])):
                more = max(0.0, sent[epoch] - sent[-1]) * 8e6 * self.steps
                epochs[epoch] += max(0.0, local[epoch] - local[-1]) + more / bits_per_second
        return list(itertools.accumulate(epochs))

    def seconds_to(self, target: float, bits_per_second: float) -> float | None:
        """Between the hosts, until the end of the epoch that reaches the quality, if any does."""
        times = self.seconds_between_hosts(bits_per_second)
        epoch = first_to_reach(self.curve(), target, self.seeds[0]["higher_is_better"])
        return None if times is None or epoch is None else times[epoch]


def each(totals: Sequence[float]) -> list[float]:
    """What each epoch adds to a total."""
    return [late - early for early, late in itertools.pairwise([0.0, *totals])]


def first_to_reach(curve: Sequence[float], target: float, higher: bool) -> int | None:
    """The epoch, from 0 on, after which the quality is the target or better."""
    for epoch, value in enumerate(curve):
        if value >= target if higher else value <= target:
            return epoch
    return None


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
        hosts: str,
        fast: bool = False,
    ) -> Results:
        """What reproduce.py's runs have left in the folder."""
        found: dict[str, list[Method]] = {}
        rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for task in tasks:
            of_task = folder / task.name
            names = list(methods) + [AT_RECIPES_LR] * task.trains_dense_at_recipe_lr(fast)
            found[task.name] = [read_method(of_task / name, link, hosts) for name in names]
            rows[task.name] = {
                name: json.loads((of_task / "observed" / name / "observations.json").read_text())
                for name in observed
            }
        return cls(found, rows)


def read_method(folder: Path, link: str, hosts: str) -> Method:
    def read(name: str) -> Summary | None:
        path = folder / name / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None

    seeds = [json.loads(path.read_text()) for path in sorted(folder.glob("seed-*/summary.json"))]
    return Method(folder.name, seeds, read(link), read(hosts))


def baseline(methods: Sequence[Method]) -> Method:
    return next(method for method in methods if method.name == BASELINE)


def target_quality(methods: Sequence[Method]) -> float:
    dense = baseline(methods).curve()
    return dense[0] + SHARE_OF_WAY * (dense[-1] - dense[0])


def write_results(results: Results, page: Path, link: str, first: Sequence[str]) -> None:
    """Writes the page, and the pictures that it shows into a folder of its name.

    ``first``: sections that stand before those of the tasks.
    """
    pictures = page.with_suffix("")
    pictures.mkdir(parents=True, exist_ok=True)
    parts = [introduction(results, link), *first]
    for task, methods in results.methods.items():
        draw_methods(methods, pictures / f"{task}.png", link)
        draw_observed(results.observed[task], pictures / f"{task}-observed.png")
        parts.append(section(task, methods, results.observed[task], pictures.name, link))
    page.write_text("\n\n".join(parts) + "\n")


def introduction(results: Results, link: str) -> str:
    methods = next(iter(results.methods.values()))
    run = methods[0].seeds[0]
    between = (
        f"""Between hosts means on links of {link}: network namespaces on the same
machine, with the bandwidth of such a link but without processors of their own. Seconds to a quality
are composed of the epochs that the runs on this machine needed and the seconds of a step between
hosts, median of some; to an epoch with a density warm-up is added what it took longer and sent
more than the last. They come in whole epochs."""
        if any(method.link for method in methods)
        else "Nothing was measured between hosts, as that takes root and network namespaces."
    )
    return f"""# Results on the examples' tasks

Written by `make reproduce`: every method with the same models, data, order and number of epochs,
on {run["world_size"]} ranks. Quality is the mean over seeds, with the lowest and the highest. Bytes
are counted by the transport, or for `dense` computed: the mean of all steps, and of those of the
last epoch, when a density warm-up is over and `auto` has tried what it tries. Seconds of a step are
medians, of steps and then of seeds, on this machine, whose cores the ranks share. {between}

The target quality of the tables is {100 * SHARE_OF_WAY:g} % of the way that dense training goes
from its first epoch to its last. The density counts parameters that are sent whole, too."""


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
    xis = []
    for rows in (observed[name] for name in XI):
        found = [row["xi"] for row in rows if row["xi"] is not None]
        density = 100 * rows[-1]["asked_density"]
        xis.append(f"{statistics.median(found):.2f} ({max(found):.2f}) at {density:g} %")
    return f"""## {first["task"]}

{first["parameters"]:,} parameters, {first["data"]}, {first["batch"]} a rank and step,
{first["epochs"]} epochs of {first["steps"] // first["epochs"]} steps; seeds: {seeds}.
{quality.capitalize()}: {better} is better. {recipes(methods)}{twins(methods)}

{table(methods, link)}

![quality over epochs and time, and where the time goes]({pictures}/{task}.png)

The bars are of the seed whose step is the median one. Computing is a step without what the exchange
adds to it; that part is divided into selecting and communicating as the whole of both is, hidden
parts included. Communicating holds applying the result and waiting for the other rank.

![what is selected, against what was asked for]({pictures}/{task}-observed.png)

No selection exceeds four times what was asked for and 1,024 more, whatever passes the threshold.

Fill-in: selections of {100 * fill_in[-1]["asked_density"]:g} % make a result of
{100 * result:.2f} % in TopkDSA, mean of all steps; {first["world_size"]} ranks can make no more
than {first["world_size"]} times what they select. The xi of Ok-Topk's Assumption 1, median
(largest) of the steps that were looked at: {", ".join(xis)}."""


def recipes(methods: Sequence[Method]) -> str:
    """What a recipe changes."""
    plain = baseline(methods).seeds[0]
    for method in methods:
        run = method.seeds[0]
        if not method.name.startswith("recommended"):
            continue
        warmup = ", ".join(f"{100 * density:g} %" for density in run["density_warmup"])
        parts = [f"a learning rate of {run['lr']:g} (others: {plain['lr']:g})"]
        parts += [f"densities of {warmup} in the first epochs"] if warmup else []
        parts += ["momentum correction"] if run["momentum_correction"] else []
        parts += ["selection by Adam's first moment"] if run["first_moment"] else []
        return f"The recommended recipe: {', '.join(parts)}. "
    return ""


def twins(methods: Sequence[Method]) -> str:
    """Which methods give the same model, bit for bit: their rows are no two witnesses."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for method in methods:
        digests = tuple(run["parameters_sha256"] for run in method.seeds)
        alike.setdefault(digests, []).append(NAMES[method.name])
    groups = [" and ".join(names) for names in alike.values() if len(names) > 1]
    return f"Bit for bit the same model: {'; '.join(groups)}." if groups else ""


def table(methods: Sequence[Method], link: str) -> str:
    quality, target = methods[0].quality, target_quality(methods)
    heading = ["method", words(quality), "MB sent per rank and step", "last epoch", "density"]
    heading += ["s per step", f"s per step, {link}", f"s to {target:.3f}"]
    rows = [heading, ["---"] * len(heading)]
    for method in methods:
        values = method.finals()
        spread = f" ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else ""
        sent = method.sent_megabytes()
        rows.append(
            [
                NAMES[method.name],
                f"{statistics.fmean(values):.4f}{spread}",
                f"{statistics.fmean(sent):.3f}",
                f"{sent[-1]:.3f}",
                f"{100 * method.median('realised_density'):.2f} %",
                number(method.median("iteration_seconds")),
                number(method.link["iteration_seconds"] if method.link else None),
                number(method.seconds_to(target, parse_rate(link)), 0),
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
        seconds = method.seconds_between_hosts(parse_rate(link))
        if seconds is not None:
            by_time.plot(seconds, curve, **style)
    quality = words(methods[0].quality)
    decorate(by_epoch, quality.capitalize(), "mean over seeds")
    decorate(by_time, f"{quality.capitalize()} over time, link of {link}", "mean over seeds")
    by_time.set_xlabel("seconds")
    figure.legend(loc="outside lower center", ncols=5, fontsize=10)
    here = [(m.name, median_run(m.seeds)) for m in methods]
    draw_parts(bars[0], here, "A step on this machine")
    linked = [(m.name, m.link) for m in methods if m.link is not None]
    draw_parts(bars[1], linked, f"A step between hosts, link of {link}")
    figure.savefig(path)


def median_run(runs: Sequence[Summary]) -> Summary:
    """The one with the (lower) median step."""
    ordered = sorted(runs, key=lambda run: float(run["iteration_seconds"]))
    return ordered[(len(ordered) - 1) // 2]


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
    log_scale(density, [value for line in density.lines for value in line.get_ydata()])
    figure.savefig(path)


def many_styles(marker: bool = True) -> list[dict[str, Any]]:
    """More than the report has: its colours with each of two line styles."""
    return [
        {"color": colour, "marker": shape if marker else None, "linestyle": line, "markersize": 5}
        for line in ("-", "--")
        for colour, shape, _ in STYLES
    ]

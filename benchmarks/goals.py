"""What the comparison has to show, the figures, and whether they are met."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from comparison import AT_RECIPES_LR, BASELINE, NAMES, Method, Results, first_to_reach, number
from hosts import parse_rate

# That are to end within two standard errors of dense training.
AS_GOOD = ("block_topk", "recommended", "recommended_quantized")
SELECTIONS = ("sampled", "quantized_topk")  # observed runs whose number selected is judged
POINTS = 0.005  # by which an accuracy or an error rate may be worse
RATES = ("test_accuracy", "word_error_rate")
FROM_K = 0.11  # that the number selected may be from k, mean of the steps
SPEEDUP = 3.0  # of time to dense's quality

# Why a figure is missed, by task and goal; kept by hand, as it takes an experiment to know.
WHY: dict[tuple[str, str], str] = {
    ("vgg16", "Ok-Topk reaches dense's final quality first on links of 1gbit"): (
        "with dense training's own learning rate it ends 0.001 below, which is less than the seeds "
        "differ by; with the recipe it is first"
    ),
    ("lstm", "Ok-Topk reaches dense's final quality first on links of 1gbit"): (
        "six epochs without a recipe leave it behind dense training, if by less than the seeds "
        "differ; with the recipe, whose density falls from 25 %, it is first"
    ),
    ("bert", "Ok-Topk reaches dense's final quality first on links of 1gbit"): (
        "three epochs without a recipe leave its loss 0.03 above dense training's; with the recipe "
        "it is first"
    ),
    (
        "vgg16",
        "Ok-Topk, recommended recipe reaches dense's final quality 3 times as soon with 4 hosts "
        "on links of 1gbit",
    ): (
        "dense training computes for 0.47 s of a step's 1.25 s, as four ranks share two cores, so "
        "that no exchange can make a step three times as quick; and the recipe's first epoch, at a "
        "density of 25 %, takes twice as long as the last"
    ),
}
UNEXPLAINED = "not explained yet"


@dataclass(frozen=True)
class Goal:
    """A figure; ``met`` is None where what it takes has not been measured."""

    task: str
    name: str
    figure: str
    met: bool | None

    @property
    def verdict(self) -> str:
        return "not measured" if self.met is None else "met" if self.met else "missed"


def goals(results: Results, link: str, hosts: int) -> list[Goal]:
    found = []
    for task, methods in results.methods.items():
        by_name = {method.name: method for method in methods}
        dense = best_dense(by_name)
        found += [quality(task, dense, by_name[name]) for name in AS_GOOD if name in by_name]
        for name in SELECTIONS:
            found.append(selected(task, name, results.observed[task][name]))
        plain = [by_name[name] for name in ("dense", "dense_overlap") if name in by_name]
        for name in ("oktopk", "recommended"):
            if name in by_name:
                found.append(first(task, plain, by_name[name], link))
        if "recommended" in by_name and any(method.hosts for method in methods):
            found.append(speedup(task, plain, by_name["recommended"], link, hosts))
    return found


def best_dense(by_name: dict[str, Method]) -> Method:
    """Of the learning rates that dense training was made with."""
    runs = [by_name[name] for name in (BASELINE, AT_RECIPES_LR) if name in by_name]
    sign = 1 if runs[0].seeds[0]["higher_is_better"] else -1
    return max(runs, key=lambda run: sign * statistics.fmean(run.finals()))


def quality(task: str, dense: Method, method: Method) -> Goal:
    """Within two standard errors of dense training, or half a point."""
    name = f"{NAMES[method.name]} within two standard errors of dense"
    values, others = dense.finals(), method.finals()
    worse, error = difference(values, others, dense.seeds[0]["higher_is_better"])
    if error is None:
        return Goal(task, name, f"{worse:+.4f} worse, one seed", None)
    most = 2 * error
    if dense.quality in RATES:
        name += f", or {100 * POINTS:g} points"
        most = max(most, POINTS)
    figure = f"{worse:+.4f} worse than {NAMES[dense.name]}, standard error {error:.4f}"
    return Goal(task, name, figure, worse <= most)


def difference(
    dense: Sequence[float], others: Sequence[float], higher_is_better: bool
) -> tuple[float, float | None]:
    """How much worse the others' mean is, and the standard error of that, unless of one seed."""
    sign = 1 if higher_is_better else -1
    worse = sign * (statistics.fmean(dense) - statistics.fmean(others))
    if min(len(dense), len(others)) < 2:
        return worse, None
    return worse, math.sqrt(sum(statistics.variance(all_) / len(all_) for all_ in (dense, others)))


def selected(task: str, name: str, rows: Sequence[dict[str, Any]]) -> Goal:
    """The number selected, of rank 0's largest group."""
    ratios = [row["selected_density"] / row["asked_density"] for row in rows]
    away = statistics.fmean(abs(ratio - 1) for ratio in ratios)
    figure = f"{100 * away:.1f} % away from k, {statistics.fmean(ratios):.3f} k; mean of the steps"
    what = "Ok-Topk" if name == "sampled" else NAMES[name]
    return Goal(
        task, f"{what} selects within {100 * FROM_K:g} % of k on average", figure, away <= FROM_K
    )


def first(task: str, plain: Sequence[Method], method: Method, link: str) -> Goal:
    """Whether it reaches dense's final quality before any dense method does."""
    name = f"{NAMES[method.name]} reaches dense's final quality first on links of {link}"
    target, bits = plain[0].curve()[-1], parse_rate(link)
    if any(one.link is None for one in (*plain, method)):
        return Goal(task, name, "–", None)
    own = method.seconds_to(target, bits)
    others = [one.seconds_to(target, bits) for one in plain]
    texts = [
        f"{NAMES[one.name]} {number(seconds, 0)} s"
        for one, seconds in zip((*plain, method), (*others, own), strict=True)
    ]
    met = own is not None and all(other is None or own < other for other in others)
    return Goal(task, name, ", ".join(texts), met)


def speedup(task: str, plain: Sequence[Method], method: Method, link: str, hosts: int) -> Goal:
    """How much earlier it reaches dense's final quality between more hosts, in whole trainings."""
    name = (
        f"{NAMES[method.name]} reaches dense's final quality {SPEEDUP:g} times as soon with "
        f"{hosts} hosts on links of {link}"
    )
    runs = [(one.name, one.hosts) for one in (*plain, method)]
    if any(run is None for _, run in runs):
        return Goal(task, name, "–", None)
    complete = {name: run for name, run in runs if run is not None}
    quality, higher = method.quality, method.seeds[0]["higher_is_better"]
    target = complete["dense"]["curves"][quality][-1]
    seconds: dict[str, float | None] = {}
    for hook, run in complete.items():
        epoch = first_to_reach(run["curves"][quality], target, higher)
        seconds[hook] = None if epoch is None else run["cumulative_seconds"][epoch]
    texts = [f"{NAMES[hook]} {number(value, 0)} s" for hook, value in seconds.items()]
    own = seconds.pop(method.name)
    best = min(value for value in seconds.values() if value is not None)
    ratio = None if own is None else best / own
    run = complete[method.name]
    bound = min(complete[one.name]["iteration_seconds"] for one in plain) / run["compute_seconds"]
    figure = (
        f"{number(ratio, 2)} times: {', '.join(texts)}. As {hosts} ranks share this machine's "
        f"processors, a step that exchanged nothing would be {bound:.2f} times as quick"
    )
    return Goal(task, name, figure, ratio is not None and ratio >= SPEEDUP)


def section(found: Sequence[Goal]) -> str:
    """As a part of the page."""
    rows = ["| task | goal | figure | |", "| --- | --- | --- | --- |"]
    rows += [f"| {goal.task} | {goal.name} | {goal.figure} | {goal.verdict} |" for goal in found]
    missed = [goal for goal in found if goal.met is False]
    reasons = [
        f"- {goal.task}, {goal.name}: {WHY.get((goal.task, goal.name), UNEXPLAINED)}."
        for goal in missed
    ]
    why = ["", "Why figures are missed:", "", *reasons] if missed else []
    return "\n".join(["## Goals", "", *rows, *why])

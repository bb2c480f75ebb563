#!/usr/bin/env python3
"""Trains the examples' tasks by sparsecomm.prepare and dense, and writes the table of recipes.

    python benchmarks/recipes.py                        an hour on two cores
    python benchmarks/recipes.py --tasks lm --seeds 1   one task, and no table

Dense training is tried at several learning rates with the first seed, and the one that does best
counts. Every run keeps its summary.json under runs/recipes, so what was broken off goes on where it
stopped. All figures go to benchmarks/results/recipes.json, and from there into docs/results.md.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from command_line import make_parser
from goals import difference
from rank_runs import RANKS, ROOT, Run, make_all

from sparsecomm.cli.bench import at_least_1, write_json

FILE = ROOT / "benchmarks" / "results" / "recipes.json"
PAGE = ROOT / "docs" / "results.md"
HEADING = "## Recipes"
SEEDS = (1, 2, 3)
DENSE, PREPARED = "ddp", "prepare"


@dataclass(frozen=True)
class Recipe:
    """How prepare trains a task, and dense training what it is compared with."""

    name: str  # of the task
    optimizer: str
    epochs: int
    density: float
    lr: float
    dense_lr: float  # dense training's best of these
    tried: tuple[float, ...]
    most_worse: float | None = None  # None: two standard errors

    @property
    def program(self) -> list[str]:
        return [f"examples/train_{self.name}.py", "--epochs", str(self.epochs)]


@dataclass(frozen=True)
class Way:
    """Another way of giving AdamW sparse gradients, for the language model."""

    name: str
    options: tuple[str, ...]


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("vgg16", "SGD, momentum 0.9", 5, 0.02, 0.02, 0.02, (0.02,)),
        Recipe("lstm", "SGD, momentum 0.9", 6, 0.02, 0.006, 0.006, (0.006,)),
        Recipe("bert", "AdamW", 3, 0.02, 0.002, 0.002, (0.002, 0.004)),
        Recipe("lm", "AdamW", 2, 0.01, 0.006, 0.003, (0.003, 0.006), most_worse=0.03),
    )
}
# The language model's other runs, each with the first seed and the recipe's learning rate.
WAYS = (
    Way("Ok-Topk, AdamW as ever", ("--hook", "oktopk")),
    Way("the same, `first_moment=0.9` in the state", ("--hook", "oktopk", "--first-moment")),
)


@dataclass(frozen=True)
class Record:
    """One run: what was trained, how, and its result."""

    task: str
    model: str
    method: str  # "ddp", "prepare", or the name of a way
    lr: float
    seed: int
    density: float
    ranks: int
    parameters: int
    steps: int
    quality: str
    higher_is_better: bool
    value: float
    sent_bytes: float  # of a rank and step, mean of the last epoch
    mean_sent_bytes: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=RECIPES, default=[*RECIPES], help="what to train")
    add("--seeds", nargs="+", type=at_least_1, default=[*SEEDS], help="a run of each")
    add("--folder", type=Path, default=ROOT / "runs" / "recipes", help="of all runs")
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    planned = [
        case
        for name in options.tasks
        for case in plan(RECIPES[name], options.seeds, options.folder)
    ]
    failed = make_all([run for *_, run in planned])
    if failed:
        print("these have failed, and nothing is written before they have not:", file=sys.stderr)
        for run in failed:
            print(f"  {run.folder / 'log.txt'}", file=sys.stderr)
        return 1
    records = [record(*case) for case in planned]
    text = section(records)
    print(text)
    if options.tasks == [*RECIPES] and options.seeds == [*SEEDS]:
        write_json(FILE, [asdict(row) for row in records])
        replace_section(PAGE, text)
    return 0


def plan(recipe: Recipe, seeds: Sequence[int], folder: Path) -> list[tuple[Recipe, str, int, Run]]:
    """Returns the runs of a recipe, with their methods and seeds; of some only the first seed."""
    own = ("--hook", PREPARED, "--density", str(recipe.density))
    cases: list[tuple[str, float, int, tuple[str, ...]]]
    cases = [(DENSE, recipe.dense_lr, seed, ("--hook", DENSE)) for seed in seeds]
    cases += [(PREPARED, recipe.lr, seed, own) for seed in seeds]
    others = [lr for lr in recipe.tried if lr != recipe.dense_lr]
    cases += [(DENSE, lr, seeds[0], ("--hook", DENSE)) for lr in others]
    if recipe.name == "lm":
        cases += [
            (way.name, recipe.lr, seeds[0], (*way.options, "--density", str(recipe.density)))
            for way in WAYS
        ]
    found = []
    for method, lr, seed, hook in cases:
        command = [*recipe.program, *hook, "--lr", str(lr), "--seed", str(seed)]
        path = folder / recipe.name / "-".join(part.strip("-") for part in (*hook, str(lr)))
        found.append((recipe, method, seed, Run(path / f"seed-{seed}", command)))
    return found


def record(recipe: Recipe, method: str, seed: int, run: Run) -> Record:
    made: dict[str, Any] = json.loads((run.folder / "summary.json").read_text())
    totals = [0.0, *made["curves"]["cumulative_sent_bytes"]]
    return Record(
        task=recipe.name,
        model=made["task"],
        method=method,
        lr=made["lr"],
        seed=seed,
        density=made["density"],
        ranks=made["world_size"],
        parameters=made["parameters"],
        steps=made["steps"],
        quality=made["quality"],
        higher_is_better=made["higher_is_better"],
        value=made[made["quality"]],
        sent_bytes=(totals[-1] - totals[-2]) * made["epochs"] / made["steps"],
        mean_sent_bytes=made["sent_bytes_per_iteration"],
    )


def section(records: Sequence[Record]) -> str:
    """The part of the page: the recipes, and ways of giving AdamW sparse gradients."""
    rows = [
        [
            "task",
            "optimizer",
            "density",
            "learning rate",
            "result",
            "dense",
            "of dense's bytes",
            "",
        ],
        ["---"] * 8,
    ]
    texts = []
    for name, recipe in RECIPES.items():
        of_task = [row for row in records if row.task == name]
        if of_task:
            rows.append(compare(recipe, of_task))
            others = [row for row in of_task if row.method not in (DENSE, PREPARED)]
            texts += [ways(of_task, recipe)] if others else []
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n\n".join([HEADING, INTRODUCTION, table, *texts])


INTRODUCTION = f"""Trained by `sparsecomm.prepare(ddp, optimizer, density, total_steps=...)` on
{RANKS} ranks with {len(SEEDS)} seeds (`benchmarks/recipes.py`), with the optimizer and the schedule
of the example. The density begins at 25 %, 6.25 % and 4 %: for 100 steps each, for a fifth of the
steps each in shorter trainings. Dense training has the best of the learning rates that are named
with it, by the first seed. Bytes are shares of dense training's, in the last epoch, and in brackets
in all. "As good" is within two standard errors of dense training, the language model within 0.03
nats.

**The learning rate**: begin with dense training's best. With AdamW try twice that, too: the
language model wants it, and BERT does not."""


def compare(recipe: Recipe, records: Sequence[Record]) -> list[str]:
    """A row of the table of recipes.

    Raises:
        ValueError: dense training does better at another learning rate than the recipe names.
    """
    own = [row for row in records if row.method == PREPARED]
    dense = [row for row in records if (row.method, row.lr) == (DENSE, recipe.dense_lr)]
    sign = 1 if own[0].higher_is_better else -1
    seed = dense[0].seed
    first = [row for row in records if row.method == DENSE and row.seed == seed]
    best = max(first, key=lambda row: sign * row.value)
    if best.lr != recipe.dense_lr:
        raise ValueError(
            f"{recipe.name}: dense training comes to {best.value:g} at {best.lr:g}, which is "
            f"better than at the recipe's dense_lr, {recipe.dense_lr:g}: name that"
        )
    values, others = ([row.value for row in rows] for rows in (own, dense))
    worse, error = difference(others, values, own[0].higher_is_better)
    if error is None:
        outcome = f"{worse:+.4f} worse, one seed"
    else:
        most = 2 * error if recipe.most_worse is None else recipe.most_worse
        good = "as good" if worse <= most else "not as good"
        outcome = f"{worse:+.4f} worse, standard error {error:.4f}: {good}"
    tried = " or ".join(f"{lr:g}" for lr in recipe.tried)
    bytes_ = [
        statistics.fmean(getattr(row, name) for row in dense)
        / statistics.fmean(getattr(row, name) for row in own)
        for name in ("sent_bytes", "mean_sent_bytes")
    ]
    return [
        f"{own[0].model}, {own[0].parameters:,} parameters, {own[0].steps} steps",
        recipe.optimizer,
        f"{100 * own[0].density:g} %",
        f"{own[0].lr:g}",
        f"{own[0].quality.replace('_', ' ')} {spread(values)}",
        f"{spread(others)}, {recipe.dense_lr:g} of {tried}",
        f"1/{bytes_[0]:.1f} (1/{bytes_[1]:.1f})",
        outcome,
    ]


def spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def ways(records: Sequence[Record], recipe: Recipe) -> str:
    """Compares other ways for the language model's optimizer, with the first seed."""
    names = {DENSE: "plain DDP", PREPARED: "**`sparsecomm.prepare`**"}
    seed = records[0].seed
    first = {(row.method, row.lr): row for row in records if row.seed == seed}
    quality = records[0].quality.replace("_", " ")
    rows = [["AdamW", "learning rate", quality], ["---"] * 3]
    cases = [(DENSE, lr) for lr in recipe.tried]
    cases += [(method, recipe.lr) for method in (*(way.name for way in WAYS), PREPARED)]
    for method, lr in cases:
        rows.append([names.get(method, method), f"{lr:g}", f"{first[method, lr].value:.3f}"])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return (
        f"Ways of giving AdamW sparse gradients: the language model, density "
        f"{100 * recipe.density:g} %, one seed.\n\n{table}"
    )


def read() -> list[Record]:
    """Reads the last comparison."""
    return [Record(**row) for row in json.loads(FILE.read_text())]


def replace_section(page: Path, text: str) -> None:
    """Puts the section in place of the one that the page has, or at its end."""
    before, _, rest = page.read_text().partition(f"{HEADING}\n")
    _, heading, after = rest.partition("\n## ")
    page.write_text(f"{before.rstrip()}\n\n{text}\n" + (f"\n## {after}" if heading else ""))


if __name__ == "__main__":
    sys.exit(main())

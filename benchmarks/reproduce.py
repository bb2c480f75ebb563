#!/usr/bin/env python3
"""Compares every way of exchanging gradients on every task of the examples, and writes it down.

    make reproduce                              up to three hours on two cores
    make reproduce FAST=1                       ten minutes: shows that it works, and no more
    make reproduce ARGS="--tasks vgg16"         one task

Every method trains as many epochs with the same seeds, on two ranks of this machine. Then each
makes some steps on two hosts with a link of 1 Gbit/s (network namespaces, see hosts.py: as root),
and some runs are observed (see observe.py). Every run keeps its summary.json under runs/reproduce,
so what was broken off goes on where it stopped; tables and pictures are made from those files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import goals
import recipes
from command_line import make_parser
from comparison import AT_RECIPES_LR, BASELINE, Results, Task, write_results
from hosts import missing
from rank_runs import LINK, RANKS, ROOT, Run, make_all

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from common.exchange import HOOKS

# Whole trainings between more hosts, and batches that make the steps those of the other runs.
MANY_HOSTS = 4
ON_MANY_HOSTS = ("dense", "dense_overlap", "oktopk", "recommended")
MANY_HOSTS_FOLDER = f"{MANY_HOSTS}-hosts"

TASKS = {
    task.name: task
    for task in (
        Task(
            "vgg16",
            full=("--epochs", "5"),
            fast=("--epochs", "2", "--limit", "96"),
            batch_on_many_hosts=8,
            recipe_lr=0.02,
        ),
        Task(
            "lstm",
            full=("--epochs", "6"),
            fast=("--epochs", "2", "--limit", "64"),
            link_steps=94,  # an epoch, which goes from short utterances to long ones
        ),
        Task(
            "bert",
            full=("--epochs", "3"),
            fast=("--epochs", "2", "--limit", "60"),
        ),
    )
}
# Plain DDP is what dense_overlap is over another transport.
METHODS: dict[str, tuple[str, ...]]
METHODS = {hook: ("--hook", hook) for hook in HOOKS if hook != "ddp"}
METHODS["recommended"] = ("--hook", "oktopk", "--recipe", "recommended")
METHODS["recommended_quantized"] = ("--hook", "quantized_topk", "--recipe", "recommended")
FAST_ON_HOSTS = ("dense", "dense_overlap", "oktopk")
OBSERVED = {
    "reused": ("--hook", "oktopk", "--threshold", "reused"),
    "sampled": ("--hook", "oktopk"),
    "gaussian_k": ("--hook", "gaussian_k"),
    "topk_dsa": ("--hook", "topk_dsa"),
    "sparser": ("--hook", "oktopk", "--density", "0.005"),
    "denser": ("--hook", "oktopk", "--density", "0.08"),
    "quantized_topk": ("--hook", "quantized_topk"),
}
STEPS_OBSERVED = 160  # five times the default period of exact thresholds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--fast", action="store_true", help="few examples, one seed: shows that it works")
    add("--tasks", nargs="+", choices=TASKS, default=[*TASKS], help="what to train")
    add("--methods", nargs="+", choices=METHODS, default=[*METHODS], help="beside dense")
    add("--folder", type=Path, default=None, help="of all runs (runs/reproduce, -fast)")
    add(
        "--page",
        type=Path,
        default=None,
        help="written (docs/results.md; of a part, in the folder)",
    )
    options = parser.parse_args(arguments)
    folder: Path = options.folder or ROOT / "runs" / f"reproduce{'-fast' * options.fast}"
    # What all are compared with is always among them.
    methods = [name for name in METHODS if name in (*options.methods, BASELINE)]
    whole = not options.fast and options.tasks == [*TASKS] and methods == [*METHODS]
    page: Path = options.page or (ROOT / "docs" if whole else folder) / "results.md"
    tasks = [TASKS[name] for name in options.tasks]
    os.chdir(ROOT)

    recorded = [recipes.section(recipes.read())] if whole else []
    problem = missing()
    if problem is not None:
        print(f"nothing is measured on links of {LINK}: {problem}", file=sys.stderr)
    runs = plan(folder.resolve(), tasks, methods, options.fast, problem is None)
    failed = make_all(runs)
    if failed:
        print("these have failed, and nothing is written before they have not:", file=sys.stderr)
        for run in failed:
            print(f"  {run.folder / 'log.txt'}", file=sys.stderr)
        return 1
    results = Results.read(
        folder, tasks, methods, [*OBSERVED], LINK, MANY_HOSTS_FOLDER, options.fast
    )
    found = goals.goals(results, LINK, MANY_HOSTS)
    write_results(results, page, LINK, [goals.section(found), *recorded])
    hours = sum(run.seconds() for run in runs) / 3600
    print(f"wrote {page} of runs that took {hours:.1f} hours")
    return 0


def plan(
    folder: Path, tasks: Sequence[Task], methods: Sequence[str], fast: bool, hosts: bool
) -> list[Run]:
    """All runs; those that a comparison needs come together."""
    runs = []
    seeds = (1,) if fast else (1, 2, 3)
    for task in tasks:
        program = [f"examples/train_{task.name}.py", *(task.fast if fast else task.full)]
        for seed in seeds:
            for method in methods:
                command = [*program, *METHODS[method], "--seed", str(seed)]
                runs.append(Run(folder / task.name / method / f"seed-{seed}", command))
        if task.trains_dense_at_recipe_lr(fast):
            command = [*program, *METHODS[BASELINE], "--lr", str(task.recipe_lr), "--seed"]
            runs += [
                Run(folder / task.name / AT_RECIPES_LR / f"seed-{seed}", [*command, str(seed)])
                for seed in seeds
            ]
        if hosts:
            for method in methods:
                if fast and method not in FAST_ON_HOSTS:
                    continue
                steps = 4 if fast else task.link_steps
                command = [*program, *METHODS[method], "--steps", str(steps)]
                command += ["--density-warmup", ""]
                runs.append(Run(folder / task.name / method / LINK, command, hosts=RANKS))
            if task.batch_on_many_hosts and not fast:
                batch = ("--batch", str(task.batch_on_many_hosts))
                runs += [
                    Run(
                        folder / task.name / method / MANY_HOSTS_FOLDER,
                        [*program, *METHODS[method], *batch],
                        hosts=MANY_HOSTS,
                    )
                    for method in ON_MANY_HOSTS
                    if method in methods
                ]
        for name, chosen in OBSERVED.items():
            command = ["benchmarks/observe.py", *program, *chosen]
            command += ["--steps", str(STEPS_OBSERVED)]
            runs.append(
                Run(folder / task.name / "observed" / name, command, result="observations.json")
            )
    return runs


if __name__ == "__main__":
    sys.exit(main())

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

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import goals
from comparison import AT_RECIPES_LR, BASELINE, Results, Task, write_results
from hosts import Hosts, HostsError, missing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from common.exchange import HOOKS

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
LINK = "1gbit"
# Whole trainings between more hosts, and batches that make the steps those of the other runs.
MANY_HOSTS = 4
ON_MANY_HOSTS = ("dense", "dense_overlap", "oktopk", "recommended")
MANY_HOSTS_FOLDER = f"{MANY_HOSTS}-hosts"
LONGEST_RUN = 3600  # seconds

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


@dataclass(frozen=True)
class Run:
    """A command that leaves `result` in `folder`."""

    folder: Path
    command: list[str]
    result: str = "summary.json"
    hosts: int = 0  # 0: ranks of this machine, with nothing between them

    def is_done(self) -> bool:
        """Whether it has been made, by the same command."""
        made = self.record().get("command")
        return bool(made == self.command) and (self.folder / self.result).is_file()

    def seconds(self) -> float:
        """What it took, once it is done."""
        return float(self.record()["seconds"])

    def record(self) -> dict[str, Any]:
        """Its command and its seconds, if it has been made."""
        try:
            found = json.loads((self.folder / "command.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def make(self) -> None:
        """Runs it anew.

        Raises:
            subprocess.SubprocessError, HostsError: it has failed; log.txt in its folder says why.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        log = self.folder / "log.txt"
        output = ["--output", str(self.folder)]
        begin = time.monotonic()
        if self.hosts > 0:
            command = [sys.executable, *self.command, *output]
            # Every host adds to the log.
            logged = ["sh", "-c", f'exec "$0" "$@" >> "{log}" 2>&1', *command]
            with Hosts(self.hosts, LINK) as hosts:
                hosts.run_ranks(logged)
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, "--nproc-per-node", str(RANKS), *self.command, *output]
            with (
                log.open("w") as file,
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                ) as process,
            ):
                try:
                    status = process.wait(LONGEST_RUN)
                except BaseException:
                    process.terminate()  # upon which it ends its ranks, as it could not if killed
                    raise
            if status != 0:
                raise subprocess.CalledProcessError(status, command)
        record = {"command": self.command, "seconds": time.monotonic() - begin}
        (self.folder / "command.json").write_text(json.dumps(record))


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
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
    write_results(results, page, LINK, goals.section(found))
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


def make_all(runs: Sequence[Run]) -> list[Run]:
    """Makes those that are not made yet; returns those that have failed."""
    left = [run for run in runs if not run.is_done()]
    print(f"{len(runs)} runs, of which {len(runs) - len(left)} are there", flush=True)
    failed = []
    begin = time.monotonic()
    for number, run in enumerate(left, 1):
        try:
            run.make()
        except (subprocess.SubprocessError, HostsError) as error:
            failed.append(run)
            print(f"{run.folder}: {error}", file=sys.stderr, flush=True)
            continue
        minutes = (time.monotonic() - begin) / 60
        print(
            f"{number}/{len(left)} {os.path.relpath(run.folder)}: {minutes:.1f} minutes so far, "
            f"about {minutes / number * (len(left) - number):.0f} to go",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())

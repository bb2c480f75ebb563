#!/usr/bin/env python3
"""Runs a training program of the examples and records what its hook selects, and what it misses.

    torchrun --nproc-per-node 2 benchmarks/observe.py --every 5 \
        examples/train_vgg16.py --hook oktopk --threshold reused --output runs/observed

Beside summary.json, rank 0 leaves observations.json: a row for every step with the densities, and
for every fifth with the threshold in use, the exact one, that of a normal distribution, and the xi
of Ok-Topk's Assumption 1 (Li and Hoefler 2022, section 4). The times of such a run mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsecomm import _C, functional
from sparsecomm.cli.bench import at_least_1

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from common import training
from common.errors import UserError
from common.exchange import SEND_ALL, SparseExchange
from common.task import Batch

EXAMPLES = Path(training.__file__).resolve().parent.parent


@dataclass
class Observation:
    """A step, of the largest group of parameters unless it says otherwise.

    Densities are those of rank 0's selection and of the result. The thresholds are of rank 0.
    """

    step: int
    asked_density: float
    selected_density: float
    result_density: float
    threshold: float | None
    exact_threshold: float | None = None
    gaussian_threshold: float | None = None
    k: int | None = None
    passing: int | None = None  # entries that reach the threshold in use
    xi: float | None = None  # over all groups that select


class Observed(training.Training):
    """A run that looks at gradients and residuals before they are exchanged."""

    every = 1

    def __init__(self, options: argparse.Namespace, make_task: training.MakeTask) -> None:
        if options.hook in SEND_ALL or options.python_hook:
            raise UserError(f"--hook {options.hook} selects nothing, or --python-hook is given")
        if options.momentum_correction or options.first_moment:
            raise UserError(
                "what velocities or moments select is not observed; leave those options"
            )
        super().__init__(options, make_task)
        assert isinstance(self.exchange, SparseExchange)
        self.state = self.exchange.state
        self.named = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        self.local: dict[str, Tensor] = {}
        for name, parameter in self.named.items():
            remember = partial(self.remember, name)
            parameter.register_hook(remember)  # type: ignore[no-untyped-call]
        self.observations: list[Observation] = []
        self.looks = False

    def remember(self, name: str, gradient: Tensor) -> None:
        if self.looks:
            self.local[name] = gradient.detach().flatten().clone()

    def train_step(self, batch: Batch) -> float:
        # The first step finds the groups.
        self.looks = self.step > 0 and self.step % self.every == 0
        before = next(iter(self.state.state_dict().values())) if self.looks else {}
        loss = super().train_step(batch)
        groups = self.state.stats()["groups"]
        last = max(groups, key=lambda group: int(group["numel"]))
        observation = Observation(
            step=self.step - 1,
            asked_density=self.state.density,
            selected_density=last["realised_density"],
            result_density=last["result_density"],
            threshold=last["threshold"],
        )
        if self.looks:
            self.look(before, observation)
            self.local.clear()
        self.observations.append(observation)
        return loss

    def look(self, before: dict[str, Any], observation: Observation) -> None:
        """Compares the step that was made with the exact ones."""
        scale = self.clip_factor()
        difference = norm = torch.zeros((), dtype=torch.float64)
        largest = 0
        for group in before["groups"]:
            names = group["parameters"]
            if any(self.named[name].dim() < 2 for name in names):
                continue  # sent whole
            gradient = scale * torch.cat([self.local[name] for name in names])
            residual = torch.cat([before["residuals"][name].flatten() for name in names])
            accumulated = gradient + residual
            k = _C.entries_at(self.state.density, accumulated.numel())
            if accumulated.numel() > largest:
                largest = accumulated.numel()
                exact = functional.threshold_exact(accumulated, k)
                gaussian = functional.threshold_gaussian(accumulated, k)
                observation.k = k
                observation.exact_threshold = float(exact.magnitude)
                observation.gaussian_threshold = float(gaussian.magnitude)
                if observation.threshold is not None:
                    passing = (accumulated.abs() >= observation.threshold).sum()
                    observation.passing = int(passing)
            for tensor in (gradient, accumulated):
                dist.all_reduce(tensor)
                tensor /= self.ranks
            wanted = torch.zeros_like(accumulated)
            top = accumulated.abs().topk(k).indices
            wanted[top] = accumulated[top]
            result = torch.cat([self.gradient_of(name) for name in names])
            difference = difference + (wanted - result).double().square().sum()
            norm = norm + gradient.double().square().sum()
        observation.xi = (difference / norm).sqrt().item()

    def clip_factor(self) -> float:
        """What the hook scales this rank's gradient by before it accumulates it."""
        if self.task.clip_norm is None:
            return 1.0
        parts = [torch.linalg.vector_norm(part) for part in self.local.values()]
        norm = torch.linalg.vector_norm(torch.stack(parts)).item()
        return float(min(1.0, self.task.clip_norm / self.ranks**0.5 / max(norm, 1e-30)))

    def gradient_of(self, name: str) -> Tensor:
        gradient = self.named[name].grad
        assert gradient is not None
        return gradient.detach().flatten()

    def summarise(self) -> None:
        super().summarise()
        if self.rank == 0:
            path = self.options.output / "observations.json"
            rows = [asdict(observation) for observation in self.observations]
            path.write_text(json.dumps(rows, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=at_least_1, default=5, help="steps between close looks")
    parser.add_argument("program", type=Path, help="such as examples/train_vgg16.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    options = parser.parse_args(arguments)
    if options.program.resolve().parent != EXAMPLES:
        parser.error(f"{options.program} is no program in {EXAMPLES}")
    Observed.every = options.every
    training.Training = Observed  # type: ignore[misc]
    program = importlib.import_module(options.program.stem)
    return int(program.main(options.arguments))


if __name__ == "__main__":
    sys.exit(main())

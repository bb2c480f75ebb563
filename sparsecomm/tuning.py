"""Options of an exchange that make the steps of a program quick, found by trying them."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from sparsecomm.transports import require_initialised
from sparsecomm.units import format_seconds

if TYPE_CHECKING:
    import optuna

_Indices: TypeAlias = tuple[int, ...]  # of each option's value
SPACE: Mapping[str, Sequence[Any]] = {
    "groups": ("model", 2, 4, 8, "buckets"),
    "density": (0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
}
"""What :func:`autotune` tries where it is not told."""


@dataclass(frozen=True)
class TuningTrial:
    """What one choice of options took.

    Attributes:
        options: by name.
        seconds: of a step: the median, of the slowest rank.
    """

    options: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True)
class Tuning:
    """What :func:`autotune` has found. Its text is a report.

    Attributes:
        trials: the quickest first.
        tolerance: as :func:`autotune` was given it.
    """

    trials: tuple[TuningTrial, ...]
    tolerance: float = field(default=0.05, kw_only=True)

    @property
    def best(self) -> Mapping[str, Any]:
        """The options to use.

        Of the trials that took no longer than the quickest and ``tolerance`` of that, those of the
        greatest density, since more of the gradient is sent then; of these the quickest.
        """
        most = (1 + self.tolerance) * self.trials[0].seconds
        near = [trial for trial in self.trials if trial.seconds <= most]
        return max(near, key=lambda trial: float(trial.options.get("density", 0))).options

    def __str__(self) -> str:
        names = [*self.trials[0].options]
        rows = [["", "a step", "to the quickest", *names]]
        for trial in self.trials:
            mark = "best" if trial.options is self.best else ""
            ratio = trial.seconds / self.trials[0].seconds
            values = [str(trial.options[name]) for name in names]
            rows.append([mark, format_seconds(trial.seconds), f"{ratio:.2f}", *values])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join(lines)


def autotune(
    start: Callable[..., Callable[[], object]],
    space: Mapping[str, Sequence[Any]] | None = None,
    *,
    trials: int = 20,
    steps: int = 10,
    warmup: int = 5,
    tolerance: float = 0.05,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> Tuning:
    """Tries options of an exchange on a program's own steps, and says which to use.

    Collective: every rank of the group calls it alike. Which options are tried next is up to
    optuna's tree-structured Parzen estimator, on the first rank; if there are no more combinations
    than trials, each is tried once. It takes ``trials * (warmup + steps)`` steps at most.

    A time says nothing of what a model learns: a low density is quick and may train worse. So of
    trials that take about as long the one that sends most is the best.

    Args:
        start: called with a value for each name of ``space``, by keyword. It makes a model, an
            optimizer and a state with these options, or a :class:`Communicator`, and returns a
            function that makes a step. What a former trial has made is dropped before.
        space: for each option the values to try, at least one; numbers in ascending order, so that
            what lies between others is known to. ``None``: ``groups`` and ``density`` of a state,
            :data:`SPACE`. ``fusion_bytes`` is another, of a :class:`Communicator`.
        trials: how many combinations to try at most.
        steps: that are measured of each.
        warmup: that come before these: the first ones measure links, make DDP's buckets anew and
            find thresholds. What takes longer to settle, as ``groups="auto"``, ``density_scope``
            and an :class:`AutoState` do, needs more, some tens.
        tolerance: see :attr:`Tuning.best`.
        seed: of the estimator.
        process_group: the ranks; the default group if ``None``.

    Returns:
        All that was tried, the same on all ranks.

    Raises:
        ImportError: there are more combinations than trials, and optuna is not installed:
            ``pip install 'sparsecomm[tune]'``.
        RuntimeError: torch.distributed is not initialised.
        TypeError: ``space`` is no mapping to sequences.
        ValueError: an argument outside its range, or no value to try.
        Exception: whatever ``start``, or a step, raises; on ranks where nothing was raised, a
            RuntimeError that says what another one raised.
    """
    chosen = _checked(SPACE if space is None else space)
    for name, least in {"trials": trials, "steps": steps}.items():
        if least < 1:
            raise ValueError(f"{name}={least}: use 1 or more")
    if warmup < 0 or not 0 <= tolerance < math.inf:
        raise ValueError(f"warmup={warmup} and tolerance={tolerance} must be 0 or more")
    require_initialised()
    found: dict[_Indices, TuningTrial] = {}

    def seconds_of(indices: _Indices) -> float:
        if indices not in found:
            options = {name: chosen[name][i] for name, i in zip(chosen, indices, strict=True)}
            seconds = _measured(start, options, warmup, steps, process_group)
            found[indices] = TuningTrial(options, seconds)
        return found[indices].seconds

    combinations = [*itertools.product(*(range(len(values)) for values in chosen.values()))]
    if len(combinations) <= trials:
        for indices in combinations:
            seconds_of(indices)
    else:
        study = _study(trials, seed)  # on each rank, so that all raise if there can be none
        for _ in range(trials):
            asked = study.ask()
            own = tuple(_suggested(asked, name, values) for name, values in chosen.items())
            study.tell(asked, seconds_of(_from_first_rank(own, process_group)))
    ordered = sorted(found.values(), key=lambda trial: trial.seconds)
    return Tuning(tuple(ordered), tolerance=tolerance)


def _checked(space: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    if not isinstance(space, Mapping):
        raise TypeError(f"space must map names to values, and is a {type(space).__name__}")
    if not space:
        raise ValueError("space has no option to try; None is groups and density")
    for name, values in space.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise TypeError(f"space[{name!r}] must be a list of values, not {values!r}")
        if not values:
            raise ValueError(f"space[{name!r}] has no value to try")
    return dict(space)


def _study(trials: int, seed: int) -> optuna.Study:
    try:
        import optuna
    except ImportError as error:
        raise ImportError(
            "to choose among more combinations than trials, sparsecomm.autotune needs optuna: pip "
            "install 'sparsecomm[tune]', or allow for more trials"
        ) from error
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(1, trials // 3))
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(sampler=sampler)
    finally:
        optuna.logging.set_verbosity(verbosity)


def _suggested(trial: optuna.Trial, name: str, values: Sequence[Any]) -> int:
    """Returns the index of a value."""
    if all(isinstance(value, (int, float)) for value in values):
        return trial.suggest_int(name, 0, len(values) - 1)
    return int(trial.suggest_categorical(name, [*range(len(values))]))


def _from_first_rank(indices: _Indices, process_group: dist.ProcessGroup | None) -> _Indices:
    everyone: list[_Indices] = [()] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, indices, group=process_group)
    return everyone[0]


def _measured(
    start: Callable[..., Callable[[], object]],
    options: Mapping[str, Any],
    warmup: int,
    steps: int,
    process_group: dist.ProcessGroup | None,
) -> float:
    """Returns the seconds of a step, the same on all ranks."""
    gc.collect()  # what the former trial made may be in cycles
    raised: Exception | None = None
    seconds: list[float] = []
    try:
        step = start(**options)
        for _ in range(warmup + steps):
            began = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    except Exception as error:
        raised = error
    own = statistics.median(seconds[warmup:]) if raised is None else repr(raised)
    everyone: list[float | str] = [0.0] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, own, group=process_group)
    if raised is not None:
        raise raised
    for rank, found in enumerate(everyone):
        if isinstance(found, str):
            raise RuntimeError(f"rank {rank} raised {found} with the options {dict(options)}")
    return max(found for found in everyone if not isinstance(found, str))

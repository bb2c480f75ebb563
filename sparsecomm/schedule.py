"""Where selection thresholds come from, and what share of a gradient is sent, at which step.

Steps are those of the state that has the schedule, and part of its checkpoint: a run that is
resumed goes on where it was.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = ("exact", "reused", "sampled", "gaussian")


@dataclass(frozen=True)
class ThresholdSchedule:
    """A schedule of threshold sources.

    The threshold is the exact k-th largest magnitude at every step that ``period`` divides and
    wherever no earlier threshold exists; between these steps it comes from ``between``:

    - ``"sampled"``: estimated anew at every step, the local one from a strided sample of gradient
      and residual, the global one from one histogram per rank. Keeps the number selected close to k
      from the first step on.
    - ``"reused"``: the last exact one, as in Ok-Topk (section 3.1.3). Cheapest; the number
      selected drifts while the gradients still change quickly.
    - ``"exact"``: exact at every step.
    - ``"gaussian"``: from the mean and the deviation of gradient and residual, as if they were
      normally distributed, lowered until more than 3/4 k pass (Shi et al. 2019), at every step; the
      global one is sampled.

    Args:
        between: source of the threshold between exact steps.
        period: steps from one exact threshold to the next (the paper's tau').
        partition_period: steps between two agreements on the regions that the ranks reduce (the
            paper's tau); of the algorithm ``"oktopk"``.

    Raises:
        TypeError: a period that is no integer.
        ValueError: unknown source, or a period below 1.
    """

    between: str = "sampled"
    period: int = 32
    partition_period: int = 64

    def __post_init__(self) -> None:
        if self.between not in SOURCES:
            raise ValueError(f"between={self.between!r} is none of {', '.join(SOURCES)}")
        check_steps("period", self.period)
        check_steps("partition_period", self.partition_period)

    @classmethod
    def oktopk(cls, tau_prime: int = 32, tau: int = 64) -> ThresholdSchedule:
        """The paper's: exact every ``tau_prime`` steps, reused between; new regions every ``tau``.

        It used 32 and 64 for VGG16 and LSTM, 128 and 64 for BERT.
        """
        return cls("reused", tau_prime, tau)

    @classmethod
    def exact(cls) -> ThresholdSchedule:
        """Exact at every step."""
        return cls("exact", 1)

    @classmethod
    def gaussian(cls) -> ThresholdSchedule:
        """Gaussian-k's: from the moments at every step."""
        return cls("gaussian")

    def source(self, step: int) -> str:
        """Where the local threshold of a step comes from, once there is an earlier one.

        Raises:
            ValueError: a negative step.
        """
        if step < 0:
            raise ValueError(f"step={step} is negative; a state's steps count from 0")
        exact = self.between != "gaussian" and step % self.period == 0
        return "exact" if exact else self.between


@dataclass(frozen=True)
class DensityWarmup:
    """Densities of the first steps, from which the state's own is approached.

    Gradients change most quickly in the first epochs, where a small density costs accuracy. The
    density never falls below the final one (Lin et al. 2018, section 3.3).

    Args:
        steps: of each stage; one epoch, usually.
        densities: of the stages, each in (0, 1].

    Raises:
        TypeError: ``steps`` is no integer, or a density no number.
        ValueError: fewer than one step, or a density outside its range.
    """

    steps: int
    densities: tuple[float, ...] = (0.25, 0.0625, 0.015625)

    def __post_init__(self) -> None:
        check_steps("steps", self.steps)
        if not isinstance(self.densities, (tuple, list)):
            raise TypeError(f"densities={self.densities!r} is no sequence of numbers")
        densities = tuple(
            check_density(density, "a warm-up's density") for density in self.densities
        )
        object.__setattr__(self, "densities", densities)

    def density(self, step: int, final: float) -> float:
        """That of a step, counted from the end of the state's dense steps."""
        stage = step // self.steps
        return max(self.densities[stage], final) if stage < len(self.densities) else final


def check_density(density: float, name: str = "density") -> float:
    """Returns it as a float; raises TypeError or ValueError unless it is a share in (0, 1]."""
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise TypeError(f"{name} must be a number, not {type(density).__name__}")
    if not 0 < density <= 1:
        raise ValueError(f"{name}={density!r} is not in (0, 1]; 0.01 sends one entry in a hundred")
    return float(density)


def check_steps(name: str, steps: int, least: int = 1) -> None:
    """Raises TypeError or ValueError unless it is a number of steps."""
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"{name} must be an integer, not {type(steps).__name__}")
    if steps < least:
        raise ValueError(f"{name}={steps} is not a number of steps; use {least} or more")

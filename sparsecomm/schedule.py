"""Where selection thresholds come from at which step."""

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

    Raises:
        ValueError: unknown source, or a period below 1.
    """

    between: str = "sampled"
    period: int = 32

    def __post_init__(self) -> None:
        if self.between not in SOURCES:
            raise ValueError(f"between={self.between!r} is none of {', '.join(SOURCES)}")
        if not isinstance(self.period, int) or self.period < 1:
            raise ValueError(f"period={self.period!r} is not a number of steps; use 1 or more")

    @classmethod
    def oktopk(cls, tau_prime: int = 32) -> ThresholdSchedule:
        """The paper's: exact every ``tau_prime`` steps, reused between.

        It used 32 for VGG16 and LSTM, 128 for BERT.
        """
        return cls(between="reused", period=tau_prime)

    @classmethod
    def exact(cls) -> ThresholdSchedule:
        """Exact at every step."""
        return cls(between="exact", period=1)

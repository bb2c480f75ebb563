"""Gradients to measure with: many small entries, and k large ones that a top-k selection finds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

BACKGROUND = 0.01  # standard deviation of the small entries
RUNS = 16  # of a clustered gradient


@dataclass(frozen=True)
class Pattern:
    """Where the large entries are.

    ``uniform``: anywhere, on each rank elsewhere. ``shared:F``: anywhere, and a share F of them at
    the same places on all ranks. ``clustered``: in 16 runs without gaps, on each rank elsewhere;
    ``clustered:F``: with a share F of the runs at the same places on all ranks.
    """

    name: str
    clustered: bool
    shared: float

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Reads a pattern's name.

        Raises:
            ValueError: it is none, or its share is outside [0, 1].
        """
        kind, colon, share = text.partition(":")
        if kind not in ("uniform", "clustered", "shared") or (kind == "uniform" and colon):
            raise ValueError(f"{text!r} is none of uniform, clustered, clustered:F, shared:F")
        if not colon:
            if kind == "shared":
                raise ValueError("shared needs the share that all ranks have in common: shared:0.3")
            return cls(text, kind == "clustered", 0.0)
        try:
            value = float(share)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 1:
            raise ValueError(f"{share!r} in {text!r} is not a share from 0 to 1")
        return cls(text, kind == "clustered", value)


def make_gradient(
    pattern: Pattern, numel: int, k: int, dtype: torch.dtype, seed: int, number: int, rank: int
) -> torch.Tensor:
    """Returns gradient ``number`` of ``rank``, the same for the same arguments.

    Small entries are normal with standard deviation 0.01. The k large ones are log-normal, of
    median 1 and either sign: a heavy tail, as in real gradients.
    """
    own = np.random.default_rng([seed, number, rank + 1])
    common = np.random.default_rng([seed, number, 0])
    values = own.standard_normal(numel, dtype=np.float32) * np.float32(BACKGROUND)
    places = large_places(pattern, numel, k, own, common)
    signs = own.choice(np.array([-1, 1], dtype=np.float32), len(places))
    values[places] = signs * own.lognormal(size=len(places)).astype(np.float32)
    return torch.from_numpy(values).to(dtype)


def large_places(
    pattern: Pattern, numel: int, k: int, own: np.random.Generator, common: np.random.Generator
) -> NDArray[np.int64]:
    """The indices of the large entries: k runs of one entry, or up to 16 longer ones."""
    length = math.ceil(k / RUNS) if pattern.clustered else 1
    count = math.ceil(k / length)
    slots = max(count, numel // length)
    agreed = common.choice(slots, round(pattern.shared * count), replace=False)
    # As many candidates as places: even if all that is agreed is among them, enough are left.
    others = np.setdiff1d(own.choice(slots, count, replace=False), agreed)
    others = own.choice(others, count - len(agreed), replace=False)
    starts = np.concatenate([agreed, others]).astype(np.int64) * length
    places = (starts[:, None] + np.arange(length)).ravel()[:k]
    return places[places < numel]

"""Seeds of random numbers."""

from __future__ import annotations

import numpy as np


def mix_seed(*parts: int) -> int:
    """One generator seed from several numbers, so that neighbouring ones share no stream."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])

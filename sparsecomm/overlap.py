"""DDP's overlap of the backward pass with the exchange of its buckets, as a model."""

from __future__ import annotations

from collections.abc import Sequence

# Share of a step's computing that is the backward pass: twice the operations of the forward pass.
BACKWARD_SHARE = 2 / 3
_MIB = 1 << 20
_FIRST_BUCKET_BYTES = _MIB
_BUCKET_CAP_MB = 25


def bucket_numels(numel: int, element_bytes: int, bucket_cap_mb: int | None) -> list[int]:
    """Returns the entries of each of DDP's buckets, in the order in which they become ready.

    Args:
        numel: entries of the gradient; DDP ends a bucket with a parameter, this within one.
        element_bytes: bytes of an entry.
        bucket_cap_mb: DDP's argument of that name; ``None``: a first bucket of 1 MiB, then 25 MiB.
    """
    cap = (_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * _MIB // element_bytes
    first = cap if bucket_cap_mb is not None else _FIRST_BUCKET_BYTES // element_bytes
    numels = [min(first, numel)]
    left = numel - numels[0]
    return numels + [cap] * (left // cap) + ([left % cap] if left % cap else [])


def exposed_seconds(
    numels: Sequence[int], exchange_seconds: Sequence[float], backward_seconds: float
) -> float:
    """Returns the seconds from the end of the backward pass to that of the last exchange.

    Gradients become ready evenly over the backward pass. The exchange of a bucket starts when the
    bucket is complete and the previous exchange has ended; so that of the last bucket is exposed.

    Args:
        numels: entries of each bucket.
        exchange_seconds: of each bucket.
        backward_seconds: of the backward pass.
    """
    total = left = sum(numels)
    end = -backward_seconds  # times are from the end of the pass on: no rounding hides anything
    for numel, seconds in zip(numels, exchange_seconds, strict=True):
        left -= numel
        end = max(end, -backward_seconds * left / total) + seconds
    return end

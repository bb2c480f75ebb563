"""The DDP model behind a bucket that DDP gives a hook in Python, which itself does not say."""

from __future__ import annotations

import weakref

from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from sparsecomm import _C
from sparsecomm.instances import instances


class ModelFinder:
    """Finds the DDP model once, among all objects of the process: in tens of milliseconds."""

    def __init__(self) -> None:
        self._found: weakref.ref[DistributedDataParallel] | None = None
        self._searched = False

    def model_of(self, bucket: GradBucket) -> DistributedDataParallel | None:
        """``None``: of no model that the garbage collector shows, such as one that is frozen."""
        ddp = self._found() if self._found is not None else None
        if ddp is None and (self._found is not None or not self._searched):
            self._searched = True
            ddp = _search(bucket)
            self._found = weakref.ref(ddp) if ddp is not None else None
        return ddp


def _search(bucket: GradBucket) -> DistributedDataParallel | None:
    parameter = bucket.parameters()[0]
    holders = []
    for candidate in instances(DistributedDataParallel):
        reducer = vars(candidate).get("reducer")
        # Of another model the reducer may be at work on another thread.
        if reducer is None or not any(parameter is p for p in candidate.parameters()):
            continue
        if _C.is_bucket_of(bucket, reducer):
            return candidate
        holders.append(candidate)
    # The zeros of a rank that has joined are in no bucket of its reducer.
    return holders[0] if len(holders) == 1 else None

"""The summary of a run, and the proof that its ranks hold the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from common.errors import TrainingError


def common_digest(tensors: Iterable[Tensor]) -> str:
    """The SHA-256 of the tensors' bytes. Collective.

    Raises:
        TrainingError: the ranks do not hold the same.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    every = [""] * dist.get_world_size()
    dist.all_gather_object(every, digest.hexdigest())
    different = [rank for rank, other in enumerate(every) if other != every[0]]
    if different:
        raise TrainingError(f"the parameters of ranks {different} differ from those of rank 0")
    return every[0]


def write(folder: Path, summary: dict[str, Any]) -> None:
    """Writes summary.json into the folder, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "summary.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(summary, indent=2) + "\n")
    partial.replace(path)
    print(f"wrote {path}", flush=True)

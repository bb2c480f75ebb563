"""Checkpoints that are either whole or absent.

A checkpoint is a folder `epoch-0003` with what the ranks share (`shared.pt`) and one file per
rank (`rank-0.pt`, ...). The ranks write into a folder of another name, and only when all of
them have finished does one rename give it its name. The folder must be visible to every rank.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import UserError
from common.group import attempt, launch

_NAME = re.compile(r"epoch-(\d{4,})")


class CheckpointError(UserError):
    """A checkpoint cannot be used; the message names the file and what is wrong with it."""


def save(folder: Path, epoch: int, shared: dict[str, Any], own: dict[str, Any]) -> Path:
    """Writes the checkpoint of an epoch and then drops the older ones. Every rank calls it."""
    rank = dist.get_rank()
    final = folder / f"epoch-{epoch:04d}"
    partial = folder / f"{final.name}.partial"
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    _write(partial / f"rank-{rank}.pt", own)
    if rank == 0:
        _write(partial / "shared.pt", {**shared, "launch": launch()})
    dist.barrier()
    if rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for other in folder.iterdir():
            if other != final and _NAME.match(other.name):
                shutil.rmtree(other, ignore_errors=True)
    return final


def newest(folder: Path) -> int | None:
    """The epoch of the newest complete checkpoint, as rank 0 sees it."""
    epochs = [-1]
    if dist.get_rank() == 0 and folder.is_dir():
        matches = (_NAME.fullmatch(entry.name) for entry in folder.iterdir())
        epochs += [int(match[1]) for match in matches if match]
    epoch = torch.tensor(max(epochs))
    dist.broadcast(epoch, src=0)
    return None if epoch.item() < 0 else int(epoch.item())


def find(folder: Path, resume: bool, settings: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """The newest checkpoint to go on from: its epoch, and what the ranks share.

    ``None`` where there is none, which rank 0 says if one is asked for: by ``resume``, or by a
    restart of torchrun, which goes on from what it has left itself.

    Raises:
        CheckpointError: there is one, but it is not asked for, it belongs to a run with other
            settings, or it cannot be read.
    """
    epoch = newest(folder)
    if epoch is None:
        if (resume or attempt() > 0) and dist.get_rank() == 0:
            print(f"no checkpoint in {folder}: starting from the beginning", flush=True)
        return None
    shared = load_shared(folder, epoch)
    # Rank 0 decides: it has written that, and every host counts restarts by itself.
    wanted = [resume or (attempt() > 0 and shared.get("launch") == launch())]
    dist.broadcast_object_list(wanted)
    if not wanted[0]:
        raise CheckpointError(
            f"{folder} holds a checkpoint of epoch {epoch}: "
            "go on from it with --resume, or choose another --output"
        )
    before = shared.get("settings")
    if not isinstance(before, dict):
        raise CheckpointError(f"{folder}: epoch {epoch} does not say of what run it is")
    different = [
        f"{name} was {before.get(name)}, is {value}"
        for name, value in settings.items()
        if before.get(name) != value
    ]
    if different:
        raise CheckpointError(f"{folder}: of another run: {'; '.join(different)}")
    return epoch, shared


def load_shared(folder: Path, epoch: int) -> dict[str, Any]:
    """What the ranks share, the same on every rank."""
    return _read(folder / f"epoch-{epoch:04d}" / "shared.pt")


def load_own(folder: Path, epoch: int, rank: int) -> dict[str, Any]:
    """What belongs to a rank alone."""
    return _read(folder / f"epoch-{epoch:04d}" / f"rank-{rank}.pt")


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        with path.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; do all ranks share the folder?") from None
    except Exception as error:  # whatever a damaged file makes the reader raise
        raise CheckpointError(f"{path}: not a readable checkpoint: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a dictionary")
    return content

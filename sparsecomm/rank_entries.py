"""State dicts of many ranks: an entry for each, merged where their number changes.

``state_dict()`` of a state has one entry, under a key that names the rank, so that
torch.distributed.checkpoint, which takes equal keys for copies of one thing, keeps every rank's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# Functions of objects that hold a state, such as a subclass or accelerate's optimizer.
_HOLDERS = {"state_dict", "<dictcomp>", "<genexpr>", "<listcomp>"}
KEY = re.compile(r"rank_(\d+)_of_(\d+)(.*)")
_GROUP = re.compile(r"_from_rank_\d+$")


def rank_key(rank: int, size: int, part: str = "") -> str:
    """The key of a rank's entry; ``part`` tells apart groups of ranks that hold different parts."""
    return f"rank_{rank}_of_{size}{part}"


def part_of_group(group: dist.ProcessGroup | None, shards: int = 1) -> str:
    """Tells a group from the others of the world, if there are any but those of other shards.

    By its first rank, which is the same with more or fewer ranks if these are dealt to the groups
    in turn, as over the first dimension of a mesh.
    """
    ranks = dist.get_process_group_ranks(group)
    return "" if len(ranks) * shards == dist.get_world_size() else f"_from_rank_{min(ranks)}"


def refuse_to_copy(state: object) -> NoReturn:
    """Raises TypeError: pickle, torch.save and copy were given a state itself."""
    raise TypeError(
        f"{type(state).__name__} has connections to other ranks, and cannot be pickled or copied: "
        "save its state_dict() on every rank, and load that into a new one. Of a model in "
        "DistributedDataParallel copy, average or save ddp.module, not ddp, which holds the state. "
        "Give a trainer that copies its arguments the state after it has prepared the model, by "
        "sparsecomm.register_comm_hook(model, state)"
    )


def refuse_saver_of_one_rank(size: int) -> None:
    """Raises ValueError if accelerate asks for a state_dict, of which it writes rank 0's alone.

    Only the name of the calling module tells ``Accelerator.save_state`` from a caller that writes
    the state_dict of every rank.
    """
    if size > 1 and _caller() == "accelerate.checkpointing":
        raise ValueError(
            "accelerate would save the residuals of rank 0 alone, which no other rank can load: "
            "save state.state_dict() on every rank, in a hook of "
            "accelerator.register_save_state_pre_hook for example, and give accelerate neither the "
            "state (register_for_checkpointing) nor an optimizer of sparsecomm.optim (prepare)"
        )


def is_called_by(module: str) -> bool:
    """Whether a function of the module, of that name, is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def _caller() -> str:
    """Returns the module that asks for a state_dict, by whatever objects that hold the state."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] != "sparsecomm" and frame.f_code.co_name not in _HOLDERS:
            return module
        frame = frame.f_back
    return ""


def entry_of(
    state_dict: Mapping[str, Any], rank: int, size: int, part: str = ""
) -> Mapping[str, Any]:
    """The entry of this rank, or what those of all ranks of another number make together."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"a state_dict is a dict, as state_dict() returns it, not {type(state_dict).__name__}"
        )
    saved_by, keys = keys_to_load(state_dict, rank, size, part)
    if not keys:
        raise ValueError(
            f"the state_dict has {', '.join(map(str, state_dict)) or 'nothing'}, and neither "
            f"{rank_key(rank, size, part)} nor all ranks of another number: load on each rank what "
            "that rank saved, or the state_dicts of all ranks of the saved run together, in one "
            "dict; of several groups, those of one"
        )
    if saved_by != size:
        return merge([state_dict[key] for key in keys])
    entry: Mapping[str, Any] = state_dict[keys[0]]
    return entry


def keys_to_load(
    keys: Iterable[str], rank: int, size: int, part: str = ""
) -> tuple[int, list[str]]:
    """How many ranks saved what is to be loaded, and their keys: this rank's alone if as many.

    From this rank's group first; then from one without a name, as in earlier releases; then from
    the only one there is. No keys: nothing fits, or several groups do.
    """
    found: dict[tuple[str, int], set[int]] = {}
    for key in keys:
        if match := KEY.fullmatch(str(key)):
            found.setdefault((match[3], int(match[2])), set()).add(int(match[1]))
    plain = _GROUP.sub("", part)
    of_any = {other for other, _ in found if _GROUP.sub("", other) == plain}
    # A lone entry of another group is a mistake, but not if this group has become the world.
    for parts, alone in (({part}, True), ({plain}, True), (of_any, part == plain)):
        fitting = [
            (saved_by, other)
            for (other, saved_by), ranks in found.items()
            if other in parts
            and (ranks == set(range(saved_by)) or (alone and saved_by == size and rank in ranks))
        ]
        fitting = [of for of in fitting if of[0] == size] or fitting
        if len(fitting) == 1:
            [(saved_by, other)] = fitting
            of_ranks = [rank] if saved_by == size else range(saved_by)
            return saved_by, [rank_key(r, saved_by, other) for r in of_ranks]
        if fitting:
            break
    return 0, []


def merge(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What any rank of a run of any size goes on with, after a run of ``len(entries)`` ranks.

    Where results are averages over ranks, what P ranks have not sent yet is the sum of their
    residuals over P, and as much is to come from Q ranks if each of them gets just that. Where they
    are sums, each has to get P / Q times as much; the groups say P.
    """
    first = entries[0]
    for entry in entries[1:]:
        if entry.keys() != first.keys():
            raise ValueError("the entries of the state_dict are of different kinds of states")
    return {
        name: _mean_of_each([entry[name] for entry in entries], name)
        if name in ("residuals", "moments")
        else merge_leaf([entry[name] for entry in entries], name)
        for name in first
    }


def _mean_of_each(tensors: Sequence[Mapping[str, torch.Tensor]], what: str) -> dict[str, Any]:
    for other in tensors[1:]:
        if other.keys() != tensors[0].keys():
            raise ValueError(f"the ranks of the state_dict have {what} of different parameters")
    result = {}
    for name, tensor in tensors[0].items():
        total = tensor.clone()
        for other in tensors[1:]:
            if other[name].shape != total.shape:
                raise ValueError(
                    f"the {what} of {name} in the state_dict have different shapes: "
                    f"{tuple(total.shape)} and {tuple(other[name].shape)}"
                )
            total += other[name]
        result[name] = total.div_(len(tensors))
    return result


def merge_leaf(values: Sequence[Any], name: str) -> Any:
    if name == "groups":
        return _merge_groups(values)
    if any(value != values[0] for value in values):
        raise ValueError(
            f"the ranks of the state_dict differ in {name}: {', '.join(map(repr, values))}; load "
            "what all ranks saved in the same step"
        )
    return values[0]


def _merge_groups(values: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[dict[str, Any], ...]:
    kept = [[(group["parameters"], group["step"]) for group in groups] for groups in values]
    steps = [[step for _, step in groups] for groups in kept]
    if any(groups != kept[0] for groups in kept):
        raise ValueError(
            f"the ranks of the state_dict were at steps {', '.join(map(str, steps))} of their "
            "groups of parameters; load what all ranks saved in the same step"
        )
    # No threshold, no shares of the result and no plan: those were for that number of ranks.
    return tuple(
        {
            "parameters": list(parameters),
            "step": step,
            "local_threshold": 0.0,
            "global_threshold": 0.0,
            "boundaries": [],
            "ranks": len(values),
        }
        for parameters, step in kept[0]
    )

"""For torch.distributed.checkpoint: going on with another number of ranks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from sparsecomm.rank_entries import KEY, keys_to_load, merge_leaf

__all__ = ["ReshardingLoadPlanner"]


class ReshardingLoadPlanner(DefaultLoadPlanner):
    """For ``torch.distributed.checkpoint.load(..., planner=...)`` with any number of ranks.

    Where a checkpoint was saved by another number of ranks, each rank reads the residuals of all of
    them, one after the other, and keeps the sum divided by their number, so that no gradient is
    lost; thresholds are found anew. All else in the checkpoint is loaded as by torch's own planner,
    whose arguments these are; with the same ranks as before, all of it.

    Args:
        flatten_state_dict: must be true for what this class is for, as it is where one saves
            with torch's default planner.
        flatten_sharded_tensors: for FSDP1 with tensor parallelism.
        allow_partial_load: what the checkpoint lacks stays as it is.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self._sources: dict[str, list[str]] = {}  # by what they are added up in
        self._renamed: set[str] = set()  # of these, what is one source as it is
        self._target: dict[str, str] = {}  # the inverse
        self._leaves: dict[str, dict[str, Any]] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Learns what is wanted, and what there is."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        saved = metadata.state_dict_metadata.keys() if metadata else ()
        self._sources, self._renamed = {}, set()
        for name, path in self.mappings.items():
            if name in saved:
                continue
            merged, sources = _sources(path, saved)
            if sources:
                self._sources[name] = sources
                if not merged:
                    self._renamed.add(name)
        self._target = {s: name for name, sources in self._sources.items() for s in sources}
        self._leaves = {name: {} for name in self._sources}

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads."""
        assert self.metadata is not None
        wanted = self.state_dict
        self.state_dict = {name: v for name, v in wanted.items() if name not in self._sources}
        plan = super().create_local_plan()
        self.state_dict = wanted
        items = list(plan.items)
        for name, sources in self._sources.items():
            if isinstance(wanted[name], torch.Tensor):
                wanted[name].zero_()
            for source in sources:
                items += create_default_local_load_plan({source: wanted[name]}, self.metadata).items
        return replace(plan, items=items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where to read to: for what is added up, a tensor of its own."""
        where: torch.Tensor = super().resolve_tensor(self._here(read_item))
        return torch.empty_like(where) if read_item.dest_index.fqn in self._target else where

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Adds up what has been read."""
        name = self._target.get(read_item.dest_index.fqn)
        if name is None:
            super().commit_tensor(read_item, tensor)
        else:
            sum_so_far: torch.Tensor = super().resolve_tensor(self._here(read_item))
            sum_so_far.add_(tensor.div_(len(self._sources[name])))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes what is no tensor."""
        source = read_item.dest_index.fqn
        name = self._target.get(source)
        if name is None:
            super().load_bytes(read_item, value)
            return
        leaves = self._leaves[name]
        leaves[source] = torch.load(value, weights_only=True)
        if len(leaves) == len(self._sources[name]):
            *path, last = self.mappings[name]
            place: Any = self.original_state_dict
            for key in path:
                place = place[key]
            renamed = name in self._renamed
            place[last] = leaves[source] if renamed else merge_leaf([*leaves.values()], str(last))

    def _here(self, read_item: ReadItem) -> ReadItem:
        name = self._target.get(read_item.dest_index.fqn)
        if name is None:
            return read_item
        return replace(read_item, dest_index=replace(read_item.dest_index, fqn=name))


def _sources(path: Sequence[str | int], saved: Iterable[str]) -> tuple[bool, list[str]]:
    """The names under which what is wanted at ``path`` was saved, and if they are to be merged."""
    for i, step in enumerate(path):
        if match := KEY.fullmatch(str(step)):
            before, after = (".".join(map(str, side)) for side in (path[:i], path[i + 1 :]))
            start, end = before + "." if before else "", "." + after
            keys = {
                name[len(start) : len(name) - len(end)]
                for name in saved
                if name.startswith(start) and name.endswith(end)
            }
            size = int(match[2])
            saved_by, found = keys_to_load(keys, int(match[1]), size, match[3])
            if found:
                return saved_by != size, [start + key + end for key in found]
    return True, []

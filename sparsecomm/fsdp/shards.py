"""A sparse reduce-scatter of FSDP2's gradients, which needs no replicas."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard
from typing_extensions import Unpack

from sparsecomm import _C
from sparsecomm import functional as sf
from sparsecomm.collectives import reduce_scatter_sparse
from sparsecomm.communicator import Communicator
from sparsecomm.fsdp.modules import check_entries, groups_of, poison_grads, shard_of
from sparsecomm.options import CommunicatorKeywords, CommunicatorOptions, communicator_options
from sparsecomm.rank_entries import (
    entry_of,
    part_of_group,
    rank_key,
    refuse_saver_of_one_rank,
    refuse_to_copy,
)
from sparsecomm.schedule import check_density

_FORMAT = 1  # of state_dict()


class ReduceScatterState:
    """What :func:`sparsecomm.fsdp.apply_reduce_scatter` returns: the residuals, for checkpoints.

    They are in the units of the gradients, so a ``GradScaler``, which changes these, has no place
    here: train in bf16.
    """

    def __init__(
        self,
        groups: Sequence[tuple[FSDPModule, FSDPParamGroup]],
        names: Mapping[int, str],
        density: float,
        dense_below: int,
        options: CommunicatorOptions,
    ) -> None:
        info = groups[0][1].mesh_info
        assert isinstance(info, FSDPMeshInfo)
        self._density = density
        part = part_of_group(info.shard_process_group)
        self._place = info.shard_mesh_rank, info.shard_mesh_size, part
        communicator = Communicator._connected_in(
            "sparsecomm.fsdp.apply_reduce_scatter", info.shard_process_group, options
        )
        self._step = _Step()
        self._comms = [
            _SparseReduceScatter(group, names, density, dense_below, communicator, self._step)
            for _, group in groups
        ]
        for (module, _), comm in zip(groups, self._comms, strict=True):
            module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]

    @property
    def density(self) -> float:
        """Share of each module's gradient that every rank sends."""
        return self._density

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's residuals, one of each whole parameter, under a key that names it.

        What a backward pass that ended with an exception had delivered goes back into the residuals
        first.

        Raises:
            ValueError: a backward pass is in progress; or accelerate's
                ``register_for_checkpointing``, which keeps rank 0's alone, asks for it.
        """
        refuse_saver_of_one_rank(self._place[1])
        self._step.take_back_broken_pass("save the state")
        residuals = {name: r for comm in self._comms for name, r in comm.residuals().items()}
        entry = {"format": _FORMAT, "density": self._density, "residuals": residuals}
        return {rank_key(*self._place): entry}

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_to_copy(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned on this rank, or on all of another number.

        As ``CompressionState.load_state_dict``, which says what becomes of residuals where the
        number of ranks changes.

        Raises:
            ValueError: not such a state_dict, or of another model or density; or a backward pass is
                in progress.
        """
        self._step.take_back_broken_pass("load a state")
        entry = entry_of(state_dict, *self._place)
        for key, value in {"format": _FORMAT, "density": self._density}.items():
            if entry.get(key) != value:
                raise ValueError(f"the state_dict has {key} = {entry.get(key)!r}, not {value!r}")
        residuals = entry["residuals"]
        expected = {name: n for comm in self._comms for name, n in comm.sizes().items()}
        found = {name: residual.numel() for name, residual in residuals.items()}
        if found != expected:
            different = sorted(set(found.items()) ^ set(expected.items()))
            raise ValueError(
                "the state_dict belongs to another model: names and sizes of residuals that are "
                f"only there or only here are {different}"
            )
        for comm in self._comms:
            comm.load(residuals)


def _trained(group: FSDPParamGroup) -> list[FSDPParam]:
    return [p for p in group.fsdp_params if p.sharded_param.requires_grad]


class _Step:
    """The exchanges of a backward pass stand or fall together."""

    def __init__(self) -> None:
        self._sent: dict[_SparseReduceScatter, sf.SparseVector | None] = {}
        self._backward: weakref.ref[Callable[[], None]] | None = None  # gone with its pass

    def sent(self, comm: _SparseReduceScatter, selected: sf.SparseVector | None) -> None:
        """``None``: nothing, since a gradient was not finite."""
        if comm in self._sent or not self._runs():
            self._take_back()  # the last backward pass
        if not self._sent:
            end = self._end  # an object that the backward pass alone keeps
            torch.autograd.Variable._execution_engine.queue_callback(end)
            self._backward = weakref.ref(end)
        self._sent[comm] = selected

    def take_back_broken_pass(self, before_what: str) -> None:
        """Adds to the residuals what a backward pass that ended with an exception had delivered.

        Raises:
            ValueError: a backward pass that has delivered something is in progress.
        """
        if self._sent:
            self._await_end_of_broken_pass()
        if self._sent and self._runs():
            raise ValueError(
                f"cannot {before_what} in the middle of a backward pass; do it after backward() "
                "has returned"
            )
        self._take_back()

    def _await_end_of_broken_pass(self) -> None:
        """Waits until a device's thread, too, has let go of a pass that backward() has left."""
        deadline = time.monotonic() + 0.1
        while self._runs() and torch._C._current_graph_task_id() == -1:
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)

    def _runs(self) -> bool:
        return self._backward is not None and self._backward() is not None

    def _end(self) -> None:
        if any(selected is None for selected in self._sent.values()):
            for comm in self._sent:
                comm.poison()
            self._take_back()
        self._sent.clear()

    def _take_back(self) -> None:
        for comm, selected in self._sent.items():
            if selected is not None:
                comm.take_back(selected)
        self._sent.clear()


class _SparseReduceScatter:
    """What FSDP calls instead of torch's reduce-scatter, for the gradients of one module."""

    def __init__(
        self,
        group: FSDPParamGroup,
        names: Mapping[int, str],
        density: float,
        dense_below: int,
        communicator: Communicator,
        step: _Step,
    ) -> None:
        trained = _trained(group)
        for p in trained:
            if not isinstance(p.fsdp_placement, Shard) or p.fsdp_placement.dim != 0:
                raise ValueError(
                    f"{names[id(p.sharded_param)]} is placed as {p.fsdp_placement}; only "
                    "parameters that are sharded along dimension 0 can be exchanged"
                )
        self._members = {names[id(p.sharded_param)]: p for p in group.fsdp_params}
        self._size = communicator.size
        self._names = [names[id(p.sharded_param)] for p in trained]
        self._sizes = [p.sharded_param.numel() for p in trained]
        # Of a rank's part, which is the same of each parameter for every rank.
        self._parts = [p.padded_sharded_param_size.numel() for p in trained]
        self._density = density
        self._communicator = communicator
        self._step = step
        is_double = trained[0].sharded_param.dtype == torch.float64
        self._residual = torch.zeros(
            self._size * sum(self._parts),
            dtype=torch.float64 if is_double else torch.float32,
            device=group.device,
        )
        whole = torch.zeros(sum(self._parts), dtype=torch.bool)
        for part, p in zip(whole.split(self._parts), trained, strict=True):  # type: ignore[no-untyped-call]
            part.fill_(p.sharded_param.dim() < dense_below)
        self._whole = whole.repeat(self._size).nonzero().reshape(-1).to(group.device)
        self._others = self._residual.numel() - self._whole.numel()

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        changed = {
            name: p.unsharded_param.requires_grad
            for name, p in self._members.items()
            if p.unsharded_param.requires_grad != (name in self._names)
        }
        if changed:
            raise ValueError(
                "requires_grad has changed since apply_reduce_scatter was called: "
                + ", ".join(f"{name} is {'un' * now}frozen now" for name, now in changed.items())
                + "; call apply_reduce_scatter again, and load what the former state saved "
                "(docs/tutorials/sharded.md, Freezing and unfreezing)"
            )
        check_entries(input_tensor.numel(), self._residual.numel(), self._names)
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(
                f"FSDP asks for {op}; gradients can be averaged or summed: leave out "
                "set_gradient_divide_factor"
            )
        finite = input_tensor.isfinite().all().to(torch.int32)
        dist.all_reduce(finite, dist.ReduceOp.MIN, group)
        if not finite:
            output_tensor.fill_(torch.nan)
            self._step.sent(self, None)
            return
        selected = self._select(input_tensor)
        try:
            reduced = self._reduce(selected)
        except BaseException:
            self.take_back(selected)
            raise
        divisor = self._size if op == dist.ReduceOp.AVG else 1
        output_tensor.copy_(reduced.div_(divisor))
        self._step.sent(self, selected)

    def _select(self, gradient: torch.Tensor) -> sf.SparseVector:
        residual, whole = self._residual, self._whole
        gradient_whole = gradient[whole].to(residual.dtype)
        gradient[whole] = 0
        values = residual[whole].add_(gradient_whole)
        residual[whole] = 0
        if not self._others:
            return sf.SparseVector(whole, values)
        threshold = sf.threshold_exact(
            gradient, _C.entries_at(self._density, self._others), residual=residual
        )
        others = sf.fused_error_feedback(gradient, residual, threshold=threshold)
        return sf.SparseVector(
            torch.cat([whole, others.indices.to(whole.dtype)]), torch.cat([values, others.values])
        )

    def _reduce(self, selected: sf.SparseVector) -> torch.Tensor:
        indices, values = selected.indices.cpu()[None], selected.values.cpu()
        contribution = torch.sparse_coo_tensor(
            indices, values, self._residual.shape, check_invariants=False
        )
        reduced = reduce_scatter_sparse(contribution, communicator=self._communicator)
        return reduced.to_dense()

    def take_back(self, selected: sf.SparseVector) -> None:
        self._residual.index_add_(0, selected.indices.long(), selected.values)

    def poison(self) -> None:
        poison_grads(self._members[name] for name in self._names)

    def sizes(self) -> dict[str, int]:
        return dict(zip(self._names, self._sizes, strict=True))

    def residuals(self) -> dict[str, torch.Tensor]:
        """By parameter, in its order of entries, without what pads it for so many ranks."""
        return {
            name: part.reshape(-1)[:size].clone()
            for name, part, size in zip(self._names, self._of_each(), self._sizes, strict=True)
        }

    def load(self, residuals: Mapping[str, torch.Tensor]) -> None:
        for name, part, size in zip(self._names, self._of_each(), self._sizes, strict=True):
            padded = torch.zeros(part.shape, dtype=part.dtype, device=part.device)
            padded.reshape(-1)[:size] = residuals[name].reshape(-1)
            part.copy_(padded)

    def _of_each(self) -> tuple[torch.Tensor, ...]:
        """Views: a row for every rank's part."""
        rows = self._residual.view(self._size, -1)
        return torch.split(rows, self._parts, dim=1)


def apply_reduce_scatter(
    model: nn.Module,
    density: float = 0.01,
    *,
    dense_below: int = 2,
    **keywords: Unpack[CommunicatorKeywords],
) -> ReduceScatterState:
    """Reduces and scatters the gradients of a model that FSDP2 shards sparsely, without replicas.

    Call it after ``fully_shard`` and before the first backward pass, on every rank. In each FSDP
    module every rank adds its gradient to a residual and sends the ``density`` largest entries of
    that, exactly so many, to the ranks whose shards they belong to, which get the sum of what
    comes. The rest waits in the residual (SparCML, sections 5.3 and 8.1).

    That residual is of the whole model: each rank keeps a float32 (float64) number for every
    parameter entry, sharded or not. Where that is too much, shard within groups and use
    :func:`sparsecomm.fsdp.apply` between them. Parameters are gathered as before, and a gather is
    as much traffic as a dense reduce-scatter.

    Parameters of a module that are frozen or unfrozen later need another call, which returns a new
    state; a module that is frozen now and trained later is reduced densely until then.

    An overflow on one rank makes the gradients of all modules NaN on all ranks, and takes back what
    was delivered in that backward pass.

    Args:
        model: with ``fully_shard`` applied, on a mesh of one dimension, along dimension 0.
        density: share of a module's entries, in (0, 1].
        dense_below: parameters with fewer dimensions are sent whole.
        keywords: as in :class:`sparsecomm.CompressionState`; ``threads`` are not used.

    Raises:
        TypeError: no module of ``model`` is an ``FSDPModule``.
        ValueError: an argument outside its range, every parameter is frozen, FSDP replicates the
            model itself, or shards modules over different ranks or another dimension.
        RuntimeError: this release of torch lets nobody replace the reduce-scatter; or modules are
            gathered, as after a forward pass without a backward pass.
    """
    options = communicator_options(apply_reduce_scatter, keywords)
    density = check_density(density)
    if isinstance(dense_below, bool) or not isinstance(dense_below, int) or dense_below < 0:
        raise ValueError(f"dense_below={dense_below!r} is no number of dimensions; use 0 or more")
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter; use a "
            "later one"
        )
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    groups = list(groups_of(model))
    if len({shard_of(group) for _, group in groups}) != 1:
        raise ValueError("modules are sharded over different numbers of ranks")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = [(module, group) for module, group in groups if _trained(group)]
    if not trained:
        raise ValueError(
            f"every parameter of this {type(model).__name__} is frozen; call apply_reduce_scatter "
            "when some are to be trained"
        )
    state = ReduceScatterState(trained, names, density, dense_below, options)
    for module, group in groups:
        former = isinstance(group._reduce_scatter_comm, _SparseReduceScatter)
        if former and not _trained(group):
            module.set_custom_reduce_scatter(DefaultReduceScatter())
    return state

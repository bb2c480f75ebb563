"""DDP communication hooks: error-feedback top-k selection and sparse allreduce."""

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from sparsecomm import _C
from sparsecomm.build import CUDA_LIBRARY
from sparsecomm.schedule import ThresholdSchedule
from sparsecomm.transports import AUTO, connect, names, require_initialised

_FORMAT = 1  # of state_dict()


class CompressionState:
    """What the hooks' states have in common; use one of the subclasses.

    A state belongs to one DDP model. It keeps, per parameter, the residual: the part of the
    gradients that has not been sent yet (float32, float64 for float64 parameters). Buckets must be
    of dtype float32, float64, float16 or bfloat16, and all on the CPU or on one CUDA device; there
    they are selected and packed on a stream of their own, and only what is packed leaves it.

    Args:
        density: share of the gradient's entries that each rank selects and that the result holds,
            in (0, 1].
        process_group: the ranks that exchange; the default group if ``None``. Give DDP the same
            one.
        schedule: where thresholds come from.
        partition_period: steps between two agreements on the regions that the ranks reduce (the
            paper's tau).
        balance_factor: shares of the result are evened out when the largest exceeds the average by
            this factor.
        index_codec: ``"smallest"`` picks the smallest encoding per message; a name of
            ``build_info()["index_codecs"]`` forces one.
        value_codec: ``"raw"``, or a lossy name of ``build_info()["value_codecs"]``, such as
            ``"bf16"`` or ``"qsgd8"``, in which values travel; what rounding takes stays in the
            residuals. For ``topk_a``, ``gaussian_k`` and ``oktopk``.
        seed: of stochastic rounding, the same on every rank.
        threads: how many of torch's threads find the threshold and select; ``None`` takes
            ``torch.get_num_threads()``. The result does not depend on it.
        timeout: of one exchange, and of connecting; torch.distributed's default if ``None``.
        transport: what moves the bytes: ``"ucx"``, ``"c10d"``, or ``"auto"``, which takes the first
            of them that works on all ranks and logs a warning where that is not UCX.
        named_parameters: as ``model.named_parameters()`` gives them. The names become the keys of
            ``state_dict()``; without them, parameters are numbered in the order in which DDP's
            first buckets hold them. :func:`register_comm_hook` sets them itself.

    Raises:
        ValueError: an argument outside its range.
    """

    algorithm: ClassVar[str]
    _selects: ClassVar[bool] = True

    def __init__(
        self,
        density: float = 0.01,
        process_group: dist.ProcessGroup | None = None,
        *,
        schedule: ThresholdSchedule | None = None,
        partition_period: int = 64,
        balance_factor: float = 4.0,
        index_codec: str = "smallest",
        value_codec: str = "raw",
        seed: int = 0,
        threads: int | None = None,
        timeout: timedelta | None = None,
        transport: str = AUTO,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        schedule = ThresholdSchedule() if schedule is None else schedule
        if not isinstance(schedule, ThresholdSchedule):
            raise TypeError(f"schedule must be a ThresholdSchedule, not {type(schedule).__name__}")
        self._density = _checked_density(density)
        if not isinstance(partition_period, int) or partition_period < 1:
            raise ValueError(
                f"partition_period={partition_period!r} is not a number of steps; use 1 or more"
            )
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads={threads!r} is not a number of threads; use 1 or more")
        self._timeout = default_pg_timeout if timeout is None else timeout
        if self._timeout <= timedelta(0):
            raise ValueError(f"timeout={self._timeout} is not positive")
        if transport not in names():
            raise ValueError(f"transport={transport!r} is none of {', '.join(names())}")
        self._transport = transport
        self._process_group = process_group
        self._registered = False
        self._native = _C.HookState(
            _C.ExchangeOptions(
                algorithm=self.algorithm,
                density=self._density,
                between=schedule.between,
                threshold_period=schedule.period,
                partition_period=partition_period,
                balance_factor=balance_factor,
                index_codec=index_codec,
                value_codec=value_codec,
                seed=seed,
                average=True,
            ),
            self._timeout,
            torch.get_num_threads() if threads is None else threads,
            str(CUDA_LIBRARY),
        )
        if named_parameters is not None:
            self._native.name_parameters(list(named_parameters))

    @property
    def density(self) -> float:
        """Share of the entries that is sent; may be set between steps, on all ranks alike."""
        return self._density

    @density.setter
    def density(self, density: float) -> None:
        density = _checked_density(density)
        if density != 1 and not self._selects:
            raise ValueError(f"{type(self).__name__} sends every entry; its density is 1")
        self._native.set_density(density)
        self._density = density

    def stats(self) -> dict[str, float]:
        """Totals of this rank since the state was made.

        ``steps``; ``realised_density`` (entries selected over entries seen) and ``result_density``
        (entries of the results over entries seen); ``sent_bytes``, ``received_bytes`` and
        ``messages`` (sent), control messages included; ``select_seconds``, ``exchange_seconds`` and
        ``apply_seconds``, each summed over the buckets.

        Raises:
            ValueError: an exchange is in progress.
        """
        stats: dict[str, float] = self._native.stats()
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to be bit-identical.

        It holds tensors, numbers, strings, lists and dicts only. Residuals differ from rank to
        rank, so every rank saves its own.

        Raises:
            ValueError: an exchange is in progress.
        """
        rank, world_size = self._place()
        return {
            "format": _FORMAT,
            "algorithm": self.algorithm,
            "density": self._density,
            "rank": rank,
            "world_size": world_size,
            **self._native.checkpoint(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned on the same rank of a run with as many ranks.

        Before the first step, residuals are matched with the parameters as these appear; what does
        not fit raises in that step.

        Raises:
            ValueError: not a state_dict of this kind of state, of another rank or world size, or of
                another model.
        """
        missing = {"format", "algorithm", "density", "rank", "world_size", "residuals", "groups"}
        missing -= state_dict.keys()
        if missing:
            raise ValueError(
                f"this is no state_dict of {type(self).__name__}: it lacks "
                + ", ".join(sorted(missing))
            )
        rank, world_size = self._place()
        expected = {
            "format": _FORMAT,
            "algorithm": self.algorithm,
            "rank": rank,
            "world_size": world_size,
        }
        for key, value in expected.items():
            if state_dict[key] != value:
                raise ValueError(
                    f"the state_dict has {key} = {state_dict[key]!r}, this state {value!r}; load "
                    "on each rank what that rank saved, with the same hook and number of ranks"
                )
        density = _checked_density(state_dict["density"])
        self._native.load(
            {"residuals": dict(state_dict["residuals"]), "groups": list(state_dict["groups"])}
        )
        self.density = density

    def __repr__(self) -> str:
        return f"{type(self).__name__}(density={self._density:g})"

    def _place(self) -> tuple[int, int]:
        require_initialised()
        return dist.get_rank(self._process_group), dist.get_world_size(self._process_group)

    def _connect(self) -> None:
        if not self._native.connected:
            self._native.connect(connect(self._process_group, self._timeout, self._transport))

    def _run(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._connect()
        future: torch.futures.Future[torch.Tensor] = self._native.run(bucket).get_future()
        return future


class OkTopkState(CompressionState):
    """State of :func:`oktopk_hook`: Ok-Topk's O(k) sparse allreduce.

    Li and Hoefler 2022, Algorithms 1 and 2. The result holds the k entries of largest magnitude of
    the sum of the ranks' selections; what was selected but did not get there stays in the residual.
    Each rank receives at most 6k(P-1)/P words, whatever the number of ranks P, as long as ranks
    select in similar places, which data-parallel ranks do.
    """

    algorithm = "oktopk"


class TopkState(CompressionState):
    """State of :func:`topk_hook`: every rank's top k, gathered by all and summed.

    TopkA in Li and Hoefler 2022, Table 1; SparCML, section 8.1. The result holds the union of the
    selections. Each rank receives 2k(P-1) words, so this suits few ranks.
    """

    algorithm = "topk_a"


class AutoState(CompressionState):
    """State of :func:`auto_hook`: a plan chooses the algorithm of every step.

    The first step measures the link and the kernels, in some tens of milliseconds, and takes what
    is predicted to be quickest, for each group of parameters by itself; the times of further steps
    correct that. A dense exchange is one of the candidates, and takes what the residuals hold
    along. What a step delivers depends on the choice: every entry (dense), the union of the
    selections, or the k largest of their sum; what is not delivered stays in the residual.

    A run that is resumed begins with the plan of the saved one. Since plans follow measured times,
    two runs need not choose alike; where every bit has to repeat, name the algorithm, as
    :class:`OkTopkState` does.
    """

    algorithm = "auto"

    @property
    def algorithms(self) -> list[str]:
        """What each group's next step will use, ``"auto"`` before the first.

        Raises:
            ValueError: an exchange is in progress.
        """
        return self._native.algorithms()


class DenseOverlapState(CompressionState):
    """State of :func:`dense_overlap_hook`: every entry, each bucket as soon as it is there.

    DenseOvlp in Li and Hoefler 2022, Table 1: the exchange of a bucket goes on while the backward
    pass computes the next ones, and within it chunks are reduced while former ones are gathered. As
    plain DDP, but over sparsecomm's transports; for comparison, and where sparsity does not pay.
    Nothing is lost and no residual kept. From the second step on, when DDP has rebuilt its buckets,
    there are several; ``bucket_cap_mb`` of DDP is their size.

    Args:
        process_group: as in :class:`CompressionState`, and so are the others.
        timeout: of one exchange, and of connecting.
        transport: what moves the bytes.
        named_parameters: for error messages.
    """

    algorithm = "dense_overlap"
    _selects = False

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta | None = None,
        transport: str = AUTO,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        super().__init__(
            1.0,
            process_group,
            timeout=timeout,
            transport=transport,
            named_parameters=named_parameters,
        )


def auto_hook(state: AutoState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: ``ddp.register_comm_hook(AutoState(), auto_hook)``."""
    return _checked_state(state, AutoState, "auto_hook")._run(bucket)


def dense_overlap_hook(
    state: DenseOverlapState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook, for a :class:`DenseOverlapState`."""
    return _checked_state(state, DenseOverlapState, "dense_overlap_hook")._run(bucket)


def oktopk_hook(state: OkTopkState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: ``ddp.register_comm_hook(OkTopkState(), oktopk_hook)``."""
    return _checked_state(state, OkTopkState, "oktopk_hook")._run(bucket)


def topk_hook(state: TopkState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: ``ddp.register_comm_hook(TopkState(), topk_hook)``."""
    return _checked_state(state, TopkState, "topk_hook")._run(bucket)


_HOOKS: dict[type[CompressionState], Callable[..., torch.futures.Future[torch.Tensor]]] = {
    AutoState: auto_hook,
    DenseOverlapState: dense_overlap_hook,
    OkTopkState: oktopk_hook,
    TopkState: topk_hook,
}


def register_comm_hook(ddp: DistributedDataParallel, state: CompressionState) -> None:
    """Registers the hook that belongs to ``state`` with DDP's reducer, in C++.

    The same as ``ddp.register_comm_hook(state, hook)``, but no Python runs per bucket, the model's
    process group is used, and ``state_dict()`` gets the model's parameter names. Collective: it
    connects the ranks.

    Raises:
        TypeError: ``ddp`` is not a DistributedDataParallel model, or ``state`` not one of our
            states.
        RuntimeError: the model has a hook already or has run a backward pass, or the state serves
            another model.
        ValueError: the state was given another process group than the model.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"register_comm_hook needs a DistributedDataParallel model, not {type(ddp).__name__}"
        )
    if type(state) not in _HOOKS:
        known = ", ".join(kind.__name__ for kind in _HOOKS)
        raise TypeError(f"state must be one of {known}, not {type(state).__name__}")
    if state._registered:
        raise RuntimeError("this state serves another model already; make one state per model")
    if ddp._comm_hooks:
        raise RuntimeError("this model has a communication hook already; DDP takes one")
    if _C.has_run_backward(ddp.reducer):
        raise RuntimeError(
            "this model has run a backward pass; register the hook before the first backward pass"
        )
    if state._process_group not in (None, ddp.process_group):
        raise ValueError("the state's process group is not the model's; give both the same one")
    state._process_group = ddp.process_group
    state._native.name_parameters(list(ddp.module.named_parameters()))
    state._connect()
    _C.register_hook(ddp.reducer, state._native)
    # What DDP.register_comm_hook does besides, for its log and for compiled DDP.
    ddp._comm_hooks.append((_HOOKS[type(state)], state))
    assert ddp.logger is not None
    ddp.logger._set_comm_hook_name(_HOOKS[type(state)].__qualname__)
    state._registered = True


def _checked_density(density: float) -> float:
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise TypeError(f"density must be a number, not {type(density).__name__}")
    if math.isnan(density) or not 0 < density <= 1:
        raise ValueError(f"density={density!r} is not in (0, 1]; 0.01 sends one entry in a hundred")
    return float(density)


def _checked_state(
    state: CompressionState, kind: type[CompressionState], hook: str
) -> CompressionState:
    if not isinstance(state, kind):
        raise TypeError(f"{hook} needs a {kind.__name__}, not {type(state).__name__}")
    return state

"""DDP communication hooks: error-feedback top-k selection and sparse allreduce."""

import re
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from sparsecomm import _C
from sparsecomm.build import CUDA_LIBRARY
from sparsecomm.compression import Compression, CompressionOptions, check_dtype, check_options
from sparsecomm.figures import together
from sparsecomm.grouping import described as described_groups
from sparsecomm.grouping import way, with_names
from sparsecomm.joint import Joint
from sparsecomm.momentum import watch_momentum
from sparsecomm.options import COMMUNICATOR_KEYWORDS, CommunicatorKeywords, communicator_options
from sparsecomm.rank_entries import (
    entry_of,
    part_of_group,
    rank_key,
    refuse_saver_of_one_rank,
    refuse_to_copy,
)
from sparsecomm.reducer import ModelFinder
from sparsecomm.schedule import check_density
from sparsecomm.transports import (
    connect,
    log_trouble,
    require_initialised,
)

_FORMAT = 4  # of state_dict()
_MEMORY_ORDER = 3  # the format with residuals as they lay in memory
_SETTLING = timedelta(seconds=10)  # until the other groups of a failed step have failed as well
_NUMBERED = re.compile(r"parameter\.\d+")  # the key of a parameter without a name
_KEYS = {"format", "algorithm", "density", "residuals", "moments", "groups", "loss_scale"}
_PYTHON_REDUCER = (
    'torch._dynamo.config.optimize_ddp = "python_reducer" makes DDP bring gradients one by one; '
    'these hooks exchange buckets: set optimize_ddp = "ddp_optimizer" before making the model'
)
_State = TypeVar("_State", bound="CompressionState")


class LossScaler(Protocol):
    """The part of ``torch.amp.GradScaler`` that :meth:`CompressionState.follow` needs."""

    def get_scale(self) -> float: ...


class CompressionState:
    """State of :func:`compression_hook`: any algorithm, with any options.

    A state belongs to one DDP model. It keeps, per parameter, the residual: the part of the
    gradients that has not been sent yet (float32, float64 for float64 parameters). Buckets must be
    of dtype float32, float64, float16 or bfloat16, and all on the CPU or on one CUDA device; there
    they are selected and packed on a stream of their own, and only what is packed leaves it.

    The subclasses are the methods by name. They take ``density``, ``process_group`` and, by
    keyword, the arguments below and all other fields of :class:`Compression`.

    Args:
        compression: what is sent, and how.
        process_group: the ranks that exchange; the default group if ``None``. Give DDP the same
            one.
        named_parameters: as ``model.named_parameters()`` gives them. The names become the keys of
            ``state_dict()``. :func:`register_comm_hook` sets them itself. A hook in Python takes
            them from its DDP model in the first step, and if it does not find that, numbers the
            parameters in the order in which DDP's first buckets hold them.
        keywords: ``timeout``, ``threads``, ``transport``, ``stall_limit``, ``aggregators``,
            ``aggregator_transport``, ``aggregator_token_file``: fields of
            :class:`CommunicatorOptions`; or ``communicator_options``, such an object.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an argument outside its range.
    """

    _average = True  # over the ranks, as DDP expects

    def __init__(
        self,
        compression: Compression,
        process_group: dist.ProcessGroup | None = None,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        **keywords: Unpack[CommunicatorKeywords],
    ) -> None:
        self._communicator_options = communicator_options(type(self), keywords)
        if not isinstance(compression, Compression):
            raise TypeError(f"compression must be a Compression, not {type(compression).__name__}")
        if self._communicator_options.aggregators and not compression.uses_aggregators:
            raise ValueError(
                f"algorithm={compression.algorithm!r} uses no aggregators; give none, or choose "
                'algorithm="ina", "ina_sparse" or "auto"'
            )
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                "process_group must be a torch.distributed.ProcessGroup that this process is part "
                f"of, not {type(process_group).__name__}"
            )
        self._process_group = process_group
        self._registered = False
        self._reconnected = False
        self._connected_group: weakref.ref[dist.ProcessGroup] | None = None
        self._error: Exception | None = None  # of this step's hook in Python
        self._joint_ref: weakref.ref[Joint] | None = None
        self._stand_ins: dict[str, torch.Tensor] = {}  # what parameters of that name are known as
        self._part = ""  # of the model, where ranks hold different ones
        self._models = ModelFinder()
        self._group_numbers: dict[torch.Tensor, int] = {}
        self._compression = compression
        self._native = _C.HookState(
            compression.native(average=self._average),
            self._communicator_options.limit,
            self._communicator_options.threads or torch.get_num_threads(),
            str(CUDA_LIBRARY),
            compression.dense_below,
            compression.clip_norm or 0.0,
            self._communicator_options.stall_limit,
            log_trouble,
            self._communicator_options.aggregator_addresses(compression.uses_aggregators),
            way(compression.groups),
        )
        # A thread that drops a Python object while the interpreter ends would abort the process.
        weakref.finalize(self, self._native.close)
        self._knows_names = False
        if named_parameters is not None:
            self._name(named_parameters)

    @property
    def compression(self) -> Compression:
        """The options of the exchange, with the density that is set now."""
        return self._compression

    @property
    def algorithm(self) -> str:
        """The name of the algorithm, ``"auto"`` where a plan chooses."""
        return self._compression.algorithm

    @property
    def _saved_algorithm(self) -> str:
        """The name of what can go on with a checkpoint of this state."""
        return self.algorithm

    @property
    def density(self) -> float:
        """Share of the entries that is sent; may be set between steps, on all ranks alike.

        Parameters with a density of their own keep it, and during a warm-up its densities hold
        where they are greater.
        """
        return self._compression.density

    @density.setter
    def density(self, density: float) -> None:
        density = check_density(density)
        if density != 1 and not self._compression.selects:
            raise ValueError(f"{type(self).__name__} sends every entry; its density is 1")
        self._native.set_density(density)
        self._compression = replace(self._compression, density=density)

    def follow(self, scaler: LossScaler) -> None:
        """Keeps the residuals in the units of a loss scale, for fp16 with a ``GradScaler``.

        Gradients carry the scale, and so does what is kept of them: before the first bucket of each
        step its ``get_scale()`` is asked for (which waits for the device), and when it has changed,
        residuals, velocities, moments and thresholds are multiplied by the ratio; powers of 2, as
        the scaler's own, round nothing. ``clip_norm`` means the gradient without the scale. A step
        with an overflow on any rank has a non-finite gradient on all, so every scaler skips it.

        Call it before the first step, on every rank, with the scaler that scales the loss. A step
        in which the scales of ranks differ raises an error that names them. A rank that has run out
        of data in a ``join()`` is not asked: what it keeps follows the others' scale.

        Raises:
            TypeError: ``scaler`` has no ``get_scale()``.
            ValueError: an exchange is in progress.
        """
        if not callable(getattr(scaler, "get_scale", None)):
            raise TypeError(
                f"follow() needs a torch.amp.GradScaler, and {type(scaler).__name__} has no "
                "get_scale()"
            )
        self._native.follow_loss_scale(scaler.get_scale)

    def reconnect(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Continues after a failure with the ranks of another process group.

        Collective: every rank of ``process_group`` calls it. The residuals stay as they are, with
        the gradient of the step that failed, so go on with the next batch; thresholds are found
        anew. Parameters that are exchanged whole have no residual, and lose the gradient of that
        step. All survivors of a failure have applied the same steps, so their parameters agree.
        Then make a DDP model of the same module on that group, and register the state with it
        again. An optimizer of ``sparsecomm.optim`` goes on by itself after
        ``optimizer.exchange.reconnect(group)``.

        Args:
            process_group: the ranks that are left, or that take part from now on; the default group
                if ``None``. A rank that is new must load the parameters and this state first, from
                what another rank saved.

        Raises:
            RuntimeError: torch.distributed is not initialised, or the ranks did not all connect.
            ValueError: the state has not been connected yet, is closed, or serves a sharded model,
                or an exchange or a backward pass is in progress. Raised before anything is
                connected.
        """
        self._require_reconnectable()
        self._native.reconnect(self._transport_to(process_group, "state.reconnect"))
        self._process_group = process_group
        self._registered = False
        self._models = ModelFinder()
        self._reconnected = True

    def _require_reconnectable(self) -> None:
        if self._part:
            raise ValueError(
                "the state of a sharded model cannot be reconnected, since the shards of a lost "
                "rank are gone: start all ranks anew from a checkpoint"
            )
        if not self._native.connected:
            raise ValueError(
                "this state is not connected, so there is nothing to reconnect: it has made no "
                "step yet, which connects it to its process group, or it is closed"
            )
        deadline = time.monotonic() + _SETTLING.total_seconds()
        while True:
            try:
                self._native.stats()  # raises while gradients are being exchanged
                break
            except ValueError as error:
                if time.monotonic() > deadline:
                    raise ValueError(f"cannot reconnect: {error}") from error
            time.sleep(0.01)
        try:
            self._native.checkpoint()  # raises in the middle of a backward pass
        except ValueError as error:
            raise ValueError(f"cannot reconnect: {error}") from error

    def _transport_to(self, process_group: dist.ProcessGroup | None, call: str) -> _C.Transport:
        """Connects the ranks of ``process_group`` and notes which group that is."""
        require_initialised()
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None
        options = self._communicator_options
        transport = connect(
            process_group,
            options.limit,
            options.transport,
            call=call,
            stall_limit=options.stall_limit,
            agreed=f"groups={text}" if (text := described_groups(self._compression.groups)) else "",
        )
        self._connected_group = weakref.ref(group)
        return transport

    def stats(self) -> dict[str, Any]:
        """Returns what this rank has sent and how long that took, in all and in the last step.

        Any thread may ask, at any time; in the middle of a step that may raise, as below.

        Totals since the state was made, numbers: ``steps``; ``realised_density`` (entries selected
        over entries seen) and ``result_density`` (entries of the results over entries seen);
        ``sent_bytes``, ``received_bytes`` and ``messages`` (sent), control messages included;
        ``agree_seconds`` (waiting for the other ranks to come, and comparing with them),
        ``select_seconds``, ``exchange_seconds`` and ``apply_seconds``, each summed over the groups;
        ``exposed_seconds``, which no backward pass hid: from when the last bucket of a step had
        come to when the last group's result was written (on a CUDA device: enqueued).

        ``lost_aggregators`` maps the address of each aggregator that is not used now to the reason.

        ``grouping`` is ``None`` unless ``groups`` is ``"auto"`` and there is a choice. Then it is a
        dict: ``groups``, those of the next step, ``"model"`` or ``"buckets"``; ``decided``, false
        while both are tried; ``model_seconds`` and ``buckets_seconds``, the time of a step from
        when its first bucket has come until all groups are done, the median of those tried and the
        least of all ranks (until the decision: this rank's), ``None`` where it has not been tried.

        ``last_step`` is a dict with these figures of the last step of all groups, but for
        ``steps``, and with ``observed_seconds`` and, where a plan chose in every group,
        ``predicted_seconds``; before the first step it is empty.

        ``groups`` is a list with a dict for each group of parameters, of the last step it completed
        here:

        - ``name``; ``parameters`` and ``numel``, how many it has;
        - ``step`` of the group, from 0; ``algorithm`` that ran; ``finite``, false where some rank
          had an overflow, so that nothing was exchanged;
        - ``realised_density`` and ``result_density``, as above;
        - ``threshold``, the magnitude (in units of the loss scale) from which on entries were
          selected, and ``threshold_age``, the steps since it was found: 0 unless the schedule
          reuses it. ``None`` where nothing is selected by a threshold; the age also where the
          threshold came from a checkpoint;
        - ``sent_bytes``, ``received_bytes``, ``messages``;
        - ``agree_seconds``, ``select_seconds``, ``exchange_seconds``, ``apply_seconds``;
        - ``exposed_seconds``, from when the step's last bucket had come to when the group was done,
          0 where that was before. Groups are exchanged one after another, so the largest is the
          step's;
        - ``observed_seconds``, the step without the wait for other ranks, and
          ``predicted_seconds``, what the plan expected of it, corrected by the steps before;
          ``None`` where no plan chose.

        Raises:
            ValueError: an exchange is in progress.
        """
        stats: dict[str, Any] = self._native.stats()
        return {**stats, "last_step": together(stats["groups"])}

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to be bit-identical.

        It holds tensors, numbers, strings, tuples, lists and dicts only. Residuals differ from rank
        to rank, so every rank saves its own, under a key that names it: ``"rank_0_of_2"``, or
        ``"rank_0_of_2_from_rank_1"`` in a group that is not the world, by its first rank there.
        With torch.distributed.checkpoint, save the state itself, beside the model; so that it can
        be loaded before the first step, it must know the parameters' names.

        What a backward pass that ended with an exception had exchanged goes back into the residuals
        first.

        Raises:
            ValueError: an exchange, or a backward pass, is in progress; or accelerate's
                ``register_for_checkpointing``, which keeps rank 0's alone, asks for it.
        """
        place = self._place()
        refuse_saver_of_one_rank(place[1])
        saved = self._native.checkpoint()
        entry = {
            "format": _FORMAT if saved.pop("row_major") else _MEMORY_ORDER,
            "algorithm": self._saved_algorithm,
            "density": self.density,
            **saved,
            # torch.distributed.checkpoint takes a tuple for one thing, a list for several.
            "groups": tuple(saved["groups"]),
        }
        return {rank_key(*place, self._key_part()): entry}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned on this rank, or on all of another number.

        With another number of ranks, ``state_dict`` is what all of them saved, in one dict:
        ``{**rank_0, **rank_1}``. Each rank then goes on with the sum of the residuals divided by
        the former number of ranks, so that nothing is lost, with the steps that were counted, and
        without thresholds, which are found anew. For torch.distributed.checkpoint there is
        :class:`sparsecomm.checkpoint.ReshardingLoadPlanner`.

        A state that knows the parameters' names, by :func:`register_comm_hook` or
        ``named_parameters``, compares names, sizes and types at once. One that does not matches
        residuals with the parameters as these appear, and what does not fit raises in that step.

        Raises:
            ValueError: not a state_dict of this kind of state, of another rank, or of
                another model; or an exchange, or a backward pass, is in progress; or the state is
                closed.
        """
        self._load(state_dict)
        if (joint := self._joint()) is not None:
            joint.state_was_loaded()

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        place = self._place()
        try:
            density, loaded = self._read(state_dict, *place)
        except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"this is not a state_dict of {type(self).__name__}: "
                f"{type(error).__name__}: {error}"
            ) from error
        before = self.density
        # First, since a change of density makes thresholds out of date.
        self.density = density
        try:
            self._native.load(loaded)
        except BaseException:
            self.density = before
            raise

    def _read(
        self, state_dict: Mapping[str, Any], rank: int, size: int
    ) -> tuple[float, dict[str, Any]]:
        """The density, and what the core is to load."""
        entry = entry_of(state_dict, rank, size, self._key_part())
        missing = _KEYS - entry.keys()
        if missing:
            raise ValueError(
                f"this is not a state_dict of {type(self).__name__}: it lacks "
                + ", ".join(sorted(missing))
            )
        row_major = entry["format"] != _MEMORY_ORDER
        expected = {
            "format": _FORMAT if row_major else _MEMORY_ORDER,
            "algorithm": self._saved_algorithm,
        }
        for key, value in expected.items():
            if entry[key] != value:
                raise ValueError(
                    f"the state_dict has {key} = {entry[key]!r}, this state {value!r}; load it "
                    "with the same hook, and the release of sparsecomm that saved it"
                )
        for group in entry["groups"]:
            nameless = [key for key in group["parameters"] if key not in entry["residuals"]]
            if nameless:
                raise ValueError(
                    f"the state_dict has no residual of {', '.join(nameless)}, which it exchanged: "
                    "it belongs to another model, or torch.distributed.checkpoint asked a state "
                    "that knows no names; use sparsecomm.register_comm_hook, or named_parameters"
                )
        kept = {key: dict(entry[key]) for key in ("residuals", "moments")}
        former = next((group["ranks"] for group in entry["groups"] if "ranks" in group), size)
        if not self._average and former != size:
            for tensors in kept.values():
                tensors.update({name: t * (former / size) for name, t in tensors.items()})
        loaded = {
            **kept,
            "row_major": row_major,
            "groups": list(entry["groups"]),
            "loss_scale": float(entry["loss_scale"]),
        }
        return check_density(entry["density"]), loaded

    def __repr__(self) -> str:
        text = f"{type(self).__name__}(density={self.density:g})"
        warmup = self._compression.warmup
        if (joint := self._joint()) is not None:
            text += f" {joint!r}"
            if warmup is not None:
                densities = ", ".join(f"{density:g}" for density in warmup.densities)
                text += f", after {warmup.steps} steps each at {densities}"
        return text

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_to_copy(self)

    def _joint(self) -> Joint | None:
        """That with a prepared optimizer, which holds it."""
        return self._joint_ref() if self._joint_ref is not None else None

    def _place(self) -> tuple[int, int]:
        require_initialised()
        return dist.get_rank(self._process_group), dist.get_world_size(self._process_group)

    def _key_part(self) -> str:
        return self._part or part_of_group(self._process_group)

    def _name(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = list(named_parameters)
        for name, parameter in parameters:
            if parameter.requires_grad:
                check_dtype(name, parameter)
        densities = self._compression.densities_of(parameters)
        numbers = self._compression.group_numbers_of(parameters)
        self._native.name_parameters(parameters)
        self._native.set_densities(densities)
        self._native.set_groups(numbers)
        self._group_numbers = dict(numbers)
        # A state is kept longer than the modules, and pickled without them.
        groups = with_names(self._compression.groups, parameters)
        self._compression = replace(self._compression, groups=groups)
        self._knows_names = True

    def _name_as_in(self, ddp: DistributedDataParallel | None) -> None:
        """Takes the names of the model, unless the state knows some, or has loaded numbers."""
        if self._knows_names or ddp is None:
            return
        names = _named_parameters(ddp)
        loaded = self._native.checkpoint()["residuals"]
        if all(key in names or not _NUMBERED.fullmatch(key) for key in loaded):
            self._native.name_parameters([*names.items()])

    def _connect(self, call: str = "the first step") -> None:
        if not self._native.connected:
            by_name = self._compression.densities or way(self._compression.groups) == "number"
            if by_name and not self._knows_names:
                raise ValueError(
                    "densities and groups go by parameters' names, which this state does not "
                    "know: give it named_parameters=model.named_parameters(), or use "
                    "sparsecomm.register_comm_hook"
                )
            self._native.connect(self._transport_to(self._process_group, call))

    def _require_ranks_of(self, ddp: DistributedDataParallel) -> None:
        """Raises unless this state exchanges, or is to exchange, among the ranks of ``ddp``."""
        own = self._process_group or dist.group.WORLD
        if self._connected_group is not None:
            own = self._connected_group()
        if own is not ddp.process_group and _members(own) != _members(ddp.process_group):
            raise self._other_group(own, ddp)

    def _other_group(
        self, own: dist.ProcessGroup | None, ddp: DistributedDataParallel
    ) -> ValueError:
        return ValueError(
            "the state's process group is not the model's: the state exchanges among "
            f"{_members(own)}, and DistributedDataParallel among {_members(ddp.process_group)}; "
            + (
                "call state.reconnect(ddp.process_group) on each of these ranks"
                if self._native.connected
                else "make the state with process_group=ddp.process_group"
            )
        )

    def _run(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        # As the hook in C++ does: see DdpHook.
        if bucket.index() == 0:
            self._error = None
        if self._error is None:
            try:
                ddp = self._models.model_of(bucket)
                if ddp is not None:
                    self._require_ranks_of(ddp)
                if not self._native.connected:
                    watch_momentum(self, bucket.parameters())
                    self._name_as_in(ddp)
                self._connect()
                work = self._native.run(bucket, ddp.reducer if ddp is not None else None)
                future: torch.futures.Future[torch.Tensor] = work.get_future()
                return future
            except Exception as error:
                self._error = error
        return _failed(self._error)


class _MethodOptions(CompressionOptions, CommunicatorKeywords, total=False):
    """What the states of one method take by keyword."""


class _Method(CompressionState):
    _algorithm: ClassVar[str]
    _defaults: ClassVar[CompressionOptions] = {}

    def __init__(
        self,
        density: float = 0.01,
        process_group: dist.ProcessGroup | None = None,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        **options: Unpack[_MethodOptions],
    ) -> None:
        check_options(type(self), options, _MethodOptions)
        chosen: dict[str, Any] = {**self._defaults, **options}
        keywords: Any = {k: chosen.pop(k) for k in COMMUNICATOR_KEYWORDS if k in chosen}
        super().__init__(
            Compression(algorithm=self._algorithm_over(keywords), density=density, **chosen),
            process_group,
            named_parameters=named_parameters,
            **keywords,
        )

    def _algorithm_over(self, keywords: CommunicatorKeywords) -> str:
        return self._algorithm


class OkTopkState(_Method):
    """State of :func:`oktopk_hook`: Ok-Topk's O(k) sparse allreduce.

    Li and Hoefler 2022, Algorithms 1 and 2. The result holds the k entries of largest magnitude of
    the sum of the ranks' selections; what was selected but did not get there stays in the residual.
    Each rank receives at most 6k(P-1)/P words, whatever the number of ranks P and wherever they
    select, k being the largest selection: with a threshold that is reused between exact ones
    (``ThresholdSchedule.oktopk()``) more or fewer entries than the density says may pass it.
    """

    _algorithm = "oktopk"


class TopkState(_Method):
    """State of :func:`topk_hook`: every rank's top k, gathered by all and summed.

    TopkA in Li and Hoefler 2022, Table 1; SparCML, section 8.1. The result holds the union of the
    selections: with ``select="exact"`` of the k largest entries of each rank, with
    ``select="bucket"`` of the largest in every 512, by default of about k by a threshold. Each rank
    receives 2k(P-1) words, so this suits few ranks.
    """

    _algorithm = "topk_a"


class QuantizedTopkState(_Method):
    """State of :func:`quantized_topk_hook`: SparCML's Algorithm 1, quantised top-k.

    Of each bucket of 512 consecutive entries the largest are sent, by default with 4 bits each and
    a scale for every 1,024 of them; ``quantize`` says 2, 4 or 8. Rounding is stochastic, so
    unbiased, and its error goes back into the residual. Renggli et al. 2019, sections 6 and 8.
    """

    _algorithm = "topk_a"
    _defaults: ClassVar[CompressionOptions] = {"select": "bucket", "quantize": 4}


class GaussianKState(_Method):
    """State of :func:`gaussian_k_hook`: as :class:`TopkState`, by a threshold of moments.

    The threshold is what k of the entries would exceed if they were normally distributed, at every
    step, lowered until more than 3/4 k pass (Shi et al. 2019; Li and Hoefler 2022, Table 1). Where
    the distribution has heavier tails, as gradients do, more than k are sent.
    """

    _algorithm = "gaussian_k"


class GTopkState(_Method):
    """State of :func:`gtopk_hook`: summed up a tree, cut to the k largest at each rank.

    Shi et al. 2019; Li and Hoefler 2022, Table 1. At most 2k log2 P words are received by any rank,
    and the result has k entries, not quite the k largest of the sum: what is cut on the way stays
    in the residual of the rank that cut it.
    """

    _algorithm = "gtopk"


class TopkDsaState(_Method):
    """State of :func:`topk_dsa_hook`: reduced by regions, which turn dense where that is less.

    TopkDSA in Li and Hoefler 2022, Table 1; SparCML, section 5.3. The result holds the union of the
    selections. Each rank receives 4k(P-1)/P to (2k + N)(P-1)/P words.
    """

    _algorithm = "topk_dsa"


class BlockTopkState(_Method):
    """State of :func:`block_topk_hook`: whole blocks of the gradient, summed by aggregators.

    Of every ``block`` consecutive entries (256 by default) all or none are sent, those of the
    largest norms. Where there are ``aggregators``, they add the blocks (Gu et al. 2024, OmNICCL),
    and each rank sends what it has selected and receives the union, whatever the number of ranks;
    else the ranks do, as with :class:`TopkDsaState`. The results differ by rounding alone, so a
    checkpoint of one goes on with the other.
    """

    _algorithm = "topk_dsa"
    _defaults: ClassVar[CompressionOptions] = {"select": "block"}

    def _algorithm_over(self, keywords: CommunicatorKeywords) -> str:
        options = communicator_options(type(self), keywords)
        return "ina_sparse" if options.has_aggregators else self._algorithm

    @property
    def _saved_algorithm(self) -> str:
        return "block_topk"


class AutoState(_Method):
    """State of :func:`auto_hook`: a plan chooses the algorithm of every step.

    The first step measures the link and the kernels, in some tens of milliseconds, and takes what
    is predicted to be quickest, for each group of parameters by itself; the times of further steps
    correct that. A dense exchange is one of the candidates, and takes what the residuals hold
    along. What a step delivers depends on the choice: every entry (dense), the union of the
    selections, or the k largest of their sum; what is not delivered stays in the residual.

    By default ``groups`` is ``"auto"``: the whole model is one group at first, and DDP's buckets
    are groups then, whose exchange overlaps with the backward pass; each for ten steps or more.
    What took less time, from when the first bucket of a step had come, is kept; one group if the
    other gains less than 2 %. :meth:`CompressionState.stats` and :func:`sparsecomm.report` say what
    was found.

    A run that is resumed begins with the plan of the saved one, and with its groups if they had
    been chosen. Since plans and groups follow measured times, two runs need not choose alike; where
    every bit has to repeat, name the algorithm, as :class:`OkTopkState` does, and the groups.
    """

    _algorithm = "auto"
    _defaults: ClassVar[CompressionOptions] = {"groups": "auto"}

    @property
    def algorithms(self) -> list[str]:
        """The algorithm of each group's next step, ``"auto"`` before the first.

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
        process_group: as in :class:`CompressionState`.
        named_parameters: for error messages.
        keywords: as in :class:`CompressionState`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        **keywords: Unpack[CommunicatorKeywords],
    ) -> None:
        super().__init__(
            Compression(algorithm="dense_overlap", density=1),
            process_group,
            named_parameters=named_parameters,
            **keywords,
        )


_HOOKS: dict[type[CompressionState], Callable[..., torch.futures.Future[torch.Tensor]]] = {}


def _hook_of(
    kind: type[_State], name: str
) -> Callable[[_State, GradBucket], torch.futures.Future[torch.Tensor]]:
    """Makes the DDP communication hook of the states of class ``kind``."""

    def hook(state: _State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not isinstance(bucket, GradBucket):
            raise RuntimeError(_PYTHON_REDUCER)
        if not isinstance(state, kind):
            needed = f"{name} needs a state of class {kind.__name__}"
            return _failed(TypeError(f"{needed}, not {described(state)}"))
        return state._run(bucket)

    hook.__name__ = hook.__qualname__ = name
    hook.__doc__ = f"DDP communication hook: ``ddp.register_comm_hook({kind.__name__}(), {name})``."
    _HOOKS[kind] = hook
    return hook


compression_hook = _hook_of(CompressionState, "compression_hook")
"""DDP communication hook of a :class:`CompressionState`."""
auto_hook = _hook_of(AutoState, "auto_hook")
"""DDP communication hook of an :class:`AutoState`."""
block_topk_hook = _hook_of(BlockTopkState, "block_topk_hook")
"""DDP communication hook of a :class:`BlockTopkState`."""
dense_overlap_hook = _hook_of(DenseOverlapState, "dense_overlap_hook")
"""DDP communication hook of a :class:`DenseOverlapState`."""
gaussian_k_hook = _hook_of(GaussianKState, "gaussian_k_hook")
"""DDP communication hook of a :class:`GaussianKState`."""
gtopk_hook = _hook_of(GTopkState, "gtopk_hook")
"""DDP communication hook of a :class:`GTopkState`."""
oktopk_hook = _hook_of(OkTopkState, "oktopk_hook")
"""DDP communication hook of an :class:`OkTopkState`."""
quantized_topk_hook = _hook_of(QuantizedTopkState, "quantized_topk_hook")
"""DDP communication hook of a :class:`QuantizedTopkState`."""
topk_dsa_hook = _hook_of(TopkDsaState, "topk_dsa_hook")
"""DDP communication hook of a :class:`TopkDsaState`."""
topk_hook = _hook_of(TopkState, "topk_hook")
"""DDP communication hook of a :class:`TopkState`."""


def register_comm_hook(
    ddp: DistributedDataParallel, state: CompressionState | None = None
) -> CompressionState:
    """Registers the hook that belongs to ``state`` with DDP's reducer, in C++.

    The same as ``ddp.register_comm_hook(state, hook)``, but no Python runs per bucket, the model's
    process group is used, and ``state_dict()`` gets the model's parameter names. Collective: it
    connects the ranks. The optimizer stays as it is: :func:`sparsecomm.prepare` also moves its
    momentum into the state.

    Args:
        ddp: the model, before its first backward pass.
        state: what is exchanged, and how; ``None``: an :class:`AutoState` with its defaults.

    Returns:
        The state.

    Raises:
        TypeError: ``ddp`` is not a DistributedDataParallel model, or ``state`` not one of our
            states.
        RuntimeError: the model has a hook already or has run a backward pass, the state serves
            another model, or ``torch._dynamo.config.optimize_ddp`` is ``"python_reducer"``. The
            model raises it in its forward pass once parameters have been replaced, or converted to
            another type or device, and be it back again, or are trained that were frozen when DDP
            was made: DDP reduces no gradient of these.
        ValueError: the state was given another process group than the model, or is connected to
            another one. The model raises it in its forward pass once it is given another one.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            "register_comm_hook needs a DistributedDataParallel model, not "
            f"{type(ddp).__name__}: {_remedy(ddp)}"
        )
    if state is None:
        state = AutoState()
    if type(state) not in _HOOKS:
        known = ", ".join(kind.__name__ for kind in _HOOKS)
        raise TypeError(
            f"state must be one of {known}, not {described(state)}; a subclass of them "
            "goes with ddp.register_comm_hook(state, hook)"
        )
    if state._registered:
        raise RuntimeError(
            "this state serves another model already; make one state per model, or, if this "
            "model takes the place of that one on another process group, call "
            "state.reconnect(ddp.process_group) on each of its ranks first"
        )
    if ddp._comm_hooks:
        raise RuntimeError("this model has a communication hook already; DDP takes one")
    if _C.has_run_backward(ddp.reducer):
        raise RuntimeError(
            "this model has run a backward pass; register the hook before the first backward pass"
        )
    if ddp._use_python_reducer:
        raise RuntimeError(_PYTHON_REDUCER)
    connected = state._connected_group
    own = connected() if connected is not None else state._process_group or ddp.process_group
    if own is not ddp.process_group:
        raise state._other_group(own, ddp)
    state._process_group = ddp.process_group
    if not state._reconnected:  # else it has the names already
        state._name(_named_parameters(ddp).items())
    state._connect("sparsecomm.register_comm_hook")
    _C.register_hook(ddp.reducer, state._native)
    # As DDP.register_comm_hook does, for its log and for compiled DDP.
    ddp._comm_hooks.append((_HOOKS[type(state)], state))
    assert ddp.logger is not None
    ddp.logger._set_comm_hook_name(_HOOKS[type(state)].__qualname__)
    state._registered = True
    if (joint := state._joint()) is not None:
        joint.move_to(ddp)
    ddp.register_forward_pre_hook(_watch(ddp, state))
    watch_momentum(state, ddp.module.parameters())
    return state


def _watch(
    ddp: DistributedDataParallel, state: CompressionState
) -> Callable[[DistributedDataParallel, Any], None]:
    """Returns a forward hook that raises if DDP reduces among other ranks, or not all gradients.

    Torch gives a parameter whose type or device has changed another gradient accumulator, which
    DDP's reducer does not know, even if it is changed back; nor does it know a new parameter, or
    one that was frozen when DDP was made.
    """
    reduced: set[str] = set()
    places = []
    for path, module in ddp.module.named_modules():
        for key, parameter in module._parameters.items():
            name = f"{path}.{key}" if path else key
            if parameter is not None and _C.has_reducer(parameter):
                reduced.add(name)
            elif parameter is None or name in ddp.parameters_to_ignore:
                continue
            places.append((name, module._parameters, key))

    def before_forward(model: DistributedDataParallel, _inputs: Any) -> None:
        if (joint := state._joint()) is not None:
            joint.before_forward()
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        state._require_ranks_of(model)
        name = _C.first_unreduced(places)
        if name is None:
            return
        if name in reduced:
            raise RuntimeError(
                f"DistributedDataParallel no longer reduces the gradient of {name}, which has been "
                "replaced, or converted to another type or device, so that ranks would drift "
                "apart: make DistributedDataParallel, and the state, anew for the model as it is"
            )
        raise RuntimeError(
            f"DistributedDataParallel does not reduce the gradient of {name}, which was frozen, or "
            "not there, when it was made, so that ranks would drift apart: make "
            "DistributedDataParallel, and the state, anew (docs/training.md, Unfreezing layers), "
            "or freeze parameters after making it, with find_unused_parameters=True"
        )

    return before_forward


def _remedy(model: Any) -> str:
    """Returns what to do instead, for a ``model`` that is not a DistributedDataParallel."""
    if not isinstance(model, torch.nn.Module):
        return "give it the model that DistributedDataParallel(...) returned"
    # By names, since the import of FSDP takes long.
    if hasattr(model, "set_all_reduce_hook") or type(model).__name__ == "FullyShardedDataParallel":
        return "shard it by fully_shard, and use sparsecomm.fsdp.apply"
    if callable(getattr(model, "register_comm_hook", None)):
        return "with replicate() call model.register_comm_hook(state, sparsecomm.oktopk_hook)"
    return (
        "wrap it in DistributedDataParallel first. A trainer wraps it in a method such as "
        "prepare(), and may keep the wrapped model in another attribute. With one process trainers "
        "do not wrap it: there is nothing to exchange then"
    )


def _named_parameters(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Returns those that DDP was not told to ignore, or reduces all the same."""
    ignored = ddp.parameters_to_ignore
    named = ddp.module.named_parameters()
    return {name: p for name, p in named if name not in ignored or _C.has_reducer(p)}


def _members(group: dist.ProcessGroup | None) -> str:
    """Names a group by its ranks in the default group."""
    ranks = None if group is None else distributed_c10d._world.pg_group_ranks.get(group)
    return "the ranks of a destroyed group" if ranks is None else f"ranks {[*ranks]}"


def described(state: object) -> str:
    """Names what was given for a state."""
    if isinstance(state, type):
        return f"the class {state.__name__} itself: call it, {state.__name__}(density=0.01)"
    return type(state).__name__


def _failed(error: Exception) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = _C.failed_work(error).get_future()
    return future

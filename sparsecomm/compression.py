"""What is sent of a gradient, and how: the options that hooks and optimizers share."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch

from sparsecomm import _C, grouping
from sparsecomm.grouping import Groups
from sparsecomm.schedule import DensityWarmup, ThresholdSchedule, check_density, check_steps

AUTO = "auto"
SELECTIONS = ("threshold", "exact", "bucket", "block")
_SCOPES = ("group", "model")
_BITS = (2, 4, 8)
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MOST_OF_A_BUCKET = 4096


class SelectionOptions(TypedDict, total=False):
    """The fields of :class:`Compression` that optimizers take by keyword."""

    select: str
    bucket: int
    block: int
    quantize: int | None
    schedule: ThresholdSchedule | None
    warmup: DensityWarmup | None
    dense_steps: int
    densities: Mapping[str, float]
    groups: Groups
    density_scope: str
    dense_below: int
    mask_momentum: bool
    first_moment: float
    clip_norm: float | None
    balance_factor: float
    index_codec: str
    value_codec: str
    seed: int


class CompressionOptions(SelectionOptions, total=False):
    """The fields of :class:`Compression` that every state takes by keyword."""

    momentum: float
    nesterov: bool


@dataclass(frozen=True, kw_only=True)
class Compression:
    """What is sent of a gradient, and how.

    Args:
        algorithm: a name of ``build_info()["algorithms"]``, or ``"auto"``, which plans every step.
        density: share of the gradient's entries that each rank selects and that the result holds,
            in (0, 1].
        select: ``"threshold"``: about ``density`` of all entries, by a threshold that ``schedule``
            finds; ``"exact"``: exactly so many, by an exact threshold at every step; ``"bucket"``:
            the largest of every ``bucket`` consecutive entries, without a threshold (SparCML,
            section 8); ``"block"``: those runs of ``block`` consecutive entries, whole, whose norms
            are the largest (OmNICCL).
        bucket: entries of a bucket, 1 to 4,096; at least one of each is sent.
        block: entries of a block, a power of two from 16 to 16,384.
        quantize: 2, 4 or 8 bits for each value that is sent, rounded stochastically (QSGD); the
            error of rounding stays in the residual. ``None``: as ``value_codec`` says.
        schedule: where thresholds come from; ``None`` for ``ThresholdSchedule()``.
        warmup: densities of the first steps.
        dense_steps: so many steps at the start, before ``warmup``, send everything.
        densities: densities of modules or parameters of their own, by name as in
            ``model.named_parameters()``; the longest name that fits counts. At 1 a parameter is
            sent whole, by a dense allreduce.
        groups: which parameters are exchanged together, each group as soon as its gradients are
            there: a number of groups, about as large; ``"model"``: one, as in the papers; a size in
            bytes of the gradient, such as ``"25MB"``, at most; lists of names or modules;
            ``"buckets"``: DDP's own buckets, or those of an optimizer of ours; ``"auto"``:
            ``"model"`` or ``"buckets"``, both of which are tried, for some tens of steps, and the
            quicker one kept. ``None``: all that one bucket brings in the first step, which with
            DDP's defaults is the whole model. What is sent whole is one more group, but for
            ``"buckets"`` and ``None``. Parameters of several dtypes, densities or momenta are
            groups of their own.
        density_scope: of ``density``: ``"group"``: every group selects that share of its entries;
            ``"model"``: all groups without a density of their own together do, those more whose
            gradients are larger: all select what exceeds the same magnitude, which follows from how
            much the groups have selected two steps before. In the first ten steps or so less is
            selected, then several times as much as asked for, and later some percent more or less;
            so it is after a change of the density, too.
        dense_below: parameters with fewer dimensions are always sent whole: by default those with
            fewer than two, which are biases and those of norms. 0 for none.
        momentum: of momentum correction, in [0, 1); 0 for none. Use an optimizer without momentum
            then, such as Adam with a first beta of 0: what is selected is accumulated velocity
            instead of accumulated gradients (Lin et al. 2018, section 3.1). Where everything is
            sent, with SGD, that is SGD with this momentum.
        nesterov: Nesterov's momentum: gradient plus ``momentum`` times velocity is what is
            accumulated. Where everything is sent, that is SGD with ``nesterov=True``.
        mask_momentum: an entry that has been delivered loses its velocity, so that no stale one
            carries it on (momentum factor masking, section 3.2).
        first_moment: for Adam, its first beta, in [0, 1); 0 for none. What is sent is chosen by the
            magnitude of the local first moment, not of the accumulated gradient. ``momentum`` does
            better.
        clip_norm: before it is accumulated, each rank's gradient is scaled down to a norm of at
            most ``clip_norm / sqrt(P)`` for P ranks (section 3.2), that of all parameters, so no
            exchange begins before the backward pass ends. ``None``: not.
        balance_factor: of ``"oktopk"``: shares of the result are evened out when the largest
            exceeds the average by this factor.
        index_codec: ``"smallest"`` picks the smallest encoding per message; a name of
            ``build_info()["index_codecs"]`` forces one.
        value_codec: ``"raw"``, or a lossy name of ``build_info()["value_codecs"]``, such as
            ``"bf16"``, in which values travel; what rounding takes stays in the residuals. For
            ``topk_a``, ``gaussian_k`` and ``oktopk``; for ``dsar_split_allgather`` it is the codec
            of its dense half.
        seed: of stochastic rounding, the same on every rank.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an argument outside its range, or two that exclude each other.
    """

    algorithm: str = "oktopk"
    density: float = 0.01
    select: str = "threshold"
    bucket: int = 512
    block: int = 256
    quantize: int | None = None
    schedule: ThresholdSchedule | None = None
    warmup: DensityWarmup | None = None
    dense_steps: int = 0
    densities: Mapping[str, float] = field(default_factory=dict, hash=False)
    groups: Groups = None
    density_scope: str = "group"
    dense_below: int = 2
    momentum: float = 0.0
    nesterov: bool = False
    mask_momentum: bool = True
    first_moment: float = 0.0
    clip_norm: float | None = None
    balance_factor: float = 4.0
    index_codec: str = "smallest"
    value_codec: str = "raw"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density(self.density))
        if self.select not in SELECTIONS:
            raise ValueError(f"select={self.select!r} is none of {', '.join(SELECTIONS)}")
        _check_integer("bucket", self.bucket, 1, _MOST_OF_A_BUCKET)
        _check_integer("block", self.block, 1)
        if self.quantize is not None and self.quantize not in _BITS:
            raise ValueError(f"quantize={self.quantize!r} bits: choose 2, 4 or 8, or None")
        if self.quantize is not None and self.value_codec != "raw":
            raise ValueError(
                f"quantize={self.quantize} and value_codec={self.value_codec!r} both say how "
                "values travel; give one of them"
            )
        if self.schedule is not None and not isinstance(self.schedule, ThresholdSchedule):
            raise TypeError(
                f"schedule must be a ThresholdSchedule, not {type(self.schedule).__name__}"
            )
        if self.schedule is not None and self.select != "threshold":
            raise ValueError(
                f'a schedule is of select="threshold"; select={self.select!r} has none'
            )
        if self.warmup is not None and not isinstance(self.warmup, DensityWarmup):
            raise TypeError(f"warmup must be a DensityWarmup, not {type(self.warmup).__name__}")
        check_steps("dense_steps", self.dense_steps, 0)
        if not isinstance(self.densities, Mapping):
            raise TypeError(
                "densities must map names to densities, and is no mapping but a "
                + type(self.densities).__name__
            )
        for name in self.densities:
            if not isinstance(name, str):
                raise TypeError(f"densities has the key {name!r}, which is no name")
        densities = {
            name: check_density(density, f"densities[{name!r}]")
            for name, density in self.densities.items()
        }
        object.__setattr__(self, "densities", densities)
        object.__setattr__(self, "groups", grouping.checked(self.groups))
        if self.density_scope not in _SCOPES:
            raise ValueError(
                f"density_scope={self.density_scope!r} is none of {', '.join(_SCOPES)}"
            )
        if self.density_scope == "model" and self.select != "threshold":
            raise ValueError(
                f'density_scope="model" selects by a magnitude common to all groups, and '
                f'select={self.select!r} does not: use select="threshold"'
            )
        _check_integer("dense_below", self.dense_below, 0)
        _check_number("momentum", self.momentum)
        _check_number("first_moment", self.first_moment)
        for name in ("nesterov", "mask_momentum"):
            if not isinstance(getattr(self, name), bool):
                kind = type(getattr(self, name)).__name__
                raise TypeError(f"{name} must be True or False, not {kind}")
        if self.nesterov and self.momentum == 0:
            raise ValueError(
                "nesterov=True is of a momentum, and momentum=0: give it one, such as 0.9"
            )
        if self.clip_norm is not None:
            _check_number("clip_norm", self.clip_norm)
            if not 0 < self.clip_norm < math.inf:
                raise ValueError(f"clip_norm={self.clip_norm!r} is not a positive norm")
        _check_number("balance_factor", self.balance_factor)
        _check_integer("seed", self.seed, 0)
        for name in ("algorithm", "index_codec", "value_codec"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a name, not {type(getattr(self, name)).__name__}")
        if self.algorithm not in (AUTO, *_algorithms()):
            raise ValueError(
                f"algorithm {self.algorithm!r} is unknown; choose one of "
                + ", ".join((AUTO, *_algorithms()))
            )
        if self.algorithm == "gaussian_k" and self.select != "threshold":
            raise ValueError(
                f"gaussian_k finds its own thresholds: select={self.select!r} has no place there; "
                'use algorithm="topk_a"'
            )
        self.native()
        if not self.selects and self.groups not in (None, grouping.BUCKETS, grouping.AUTO):
            raise ValueError(
                f"algorithm={self.algorithm!r} keeps nothing, and exchanges bucket by bucket: "
                "leave groups out"
            )
        if not self.selects and self.density_scope != "group":
            raise ValueError(
                f"algorithm={self.algorithm!r} sends every entry: leave density_scope out"
            )
        if not self.selects and self.density != 1:
            raise ValueError(
                f"algorithm={self.algorithm!r} sends every entry; give it density=1, "
                f"not {self.density:g}"
            )

    @property
    def selects(self) -> bool:
        """False where the algorithm sends every entry and nothing is kept."""
        return self.algorithm == AUTO or _algorithms()[self.algorithm]

    @property
    def uses_aggregators(self) -> bool:
        """Whether aggregators can have a part in the exchange."""
        row = {"name": self.algorithm, "needs": "aggregators"}
        return self.algorithm == AUTO or any(
            row.items() <= each.items() for each in _C.algorithms()
        )

    def native(self, *, average: bool = True) -> _C.ExchangeOptions:
        """The same for the C++ engine; raises ValueError where that refuses them."""
        schedule = self.schedule or ThresholdSchedule()
        if self.select == "exact":
            schedule = ThresholdSchedule.exact()
        codec = self.value_codec if self.quantize is None else f"qsgd{self.quantize}"
        # Where sums are rounded, not what goes into them.
        of_sums = self.algorithm == "dsar_split_allgather"
        return _C.ExchangeOptions(
            algorithm=self.algorithm,
            density=self.density,
            between=schedule.between,
            threshold_period=schedule.period,
            partition_period=schedule.partition_period,
            balance_factor=self.balance_factor,
            index_codec=self.index_codec,
            value_codec="raw" if of_sums else codec,
            dense_codec=codec if of_sums else "raw",
            seed=self.seed,
            average=average,
            bucket=self.bucket if self.select == "bucket" else 0,
            block=self.block if self.select == "block" else 0,
            momentum=self.momentum,
            nesterov=self.nesterov,
            mask_momentum=self.mask_momentum,
            first_moment=self.first_moment,
            dense_steps=self.dense_steps,
            warmup_steps=self.warmup.steps if self.warmup else 1,
            warmup_densities=list(self.warmup.densities) if self.warmup else [],
            groups=grouping.described(self.groups),
            shares_density=self.density_scope == "model",
        )

    def group_numbers_of(
        self, named_parameters: Sequence[tuple[str, torch.Tensor]]
    ) -> list[tuple[torch.Tensor, int]]:
        """The number of each parameter's group; empty if groups do not go by numbers.

        Raises:
            ValueError: ``groups`` does not fit these parameters.
        """
        if grouping.way(self.groups) != "number":
            return []
        own = dict(self.densities_of(named_parameters))

        def is_whole(parameter: torch.Tensor) -> bool:
            return own.get(parameter, 1 if parameter.dim() < self.dense_below else 0) == 1

        return grouping.numbers(self.groups, named_parameters, is_whole)

    def densities_of(
        self, named_parameters: Iterable[tuple[str, torch.Tensor]]
    ) -> list[tuple[torch.Tensor, float]]:
        """The parameters that ``densities`` gives one of their own, with it.

        Raises:
            ValueError: a name that fits no parameter.
        """
        result = []
        unused = set(self.densities)
        for name, parameter in named_parameters:
            fitting = [n for n in self.densities if name == n or name.startswith(n + ".")]
            unused.difference_update(fitting)
            if fitting:
                result.append((parameter, self.densities[max(fitting, key=len)]))
        if unused:
            raise ValueError(
                f"densities names {', '.join(sorted(unused))}, which no parameter of the model "
                "has; use the names of model.named_parameters(), or of modules: a parameter that "
                "several modules share has the first of its names alone"
            )
        return result


def check_dtype(name: str, parameter: torch.Tensor) -> None:
    """Raises TypeError unless the parameter's gradients can be exchanged."""
    if parameter.dtype in _DTYPES:
        return
    remedy = (
        "train torch.view_as_real of it" if parameter.is_complex() else "convert the model before"
    )
    raise TypeError(
        f"{name} is a parameter of {parameter.dtype}, whose gradient cannot be exchanged sparsely; "
        f"it must be float32, float64, float16 or bfloat16: {remedy}"
    )


def check_options(owner: Callable[..., Any], options: Mapping[str, Any], known: type) -> None:
    """Raises TypeError, in the name of ``owner``, unless ``known``, a typed dict, has them all."""
    own = inspect.signature(owner).parameters.values()
    named = [p.name for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [*known.__annotations__, *named]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise TypeError(
                f"{owner.__name__}() got an unexpected keyword argument {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )


@functools.cache
def _algorithms() -> dict[str, bool]:
    """By name, whether it selects."""
    return {row["name"]: row["sparse"] for row in _C.algorithms()}


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")


def _check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    if value < least or (most is not None and value > most):
        until = f"{least} or more" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}={value} is out of range: choose {until}")

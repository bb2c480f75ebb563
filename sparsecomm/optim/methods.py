"""torch's SGD, Adam and AdamW that exchange sparse gradients, by method."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from sparsecomm.compression import (
    Compression,
    CompressionOptions,
    SelectionOptions,
    check_options,
)
from sparsecomm.optim.distributed import DistributedOptimizer
from sparsecomm.options import COMMUNICATOR_KEYWORDS, CommunicatorKeywords, communicator_options


class ExchangeOptions(SelectionOptions, CommunicatorKeywords, total=False):
    """What the optimizers by method take by keyword.

    The keywords of :class:`sparsecomm.optim.DistributedOptimizer`, and fields of
    :class:`sparsecomm.Compression`, but for ``momentum`` and ``nesterov``, which are torch's.
    """

    density: float
    process_group: dist.ProcessGroup | None
    average: bool
    bucket_cap_mb: float
    compare_every: int


class AdamExchangeOptions(ExchangeOptions, total=False):
    """The same for Adam, whose own momentum is ``betas[0]``."""

    momentum: float


class _Method(DistributedOptimizer):
    _algorithm: ClassVar[str]
    _defaults: ClassVar[CompressionOptions] = {}

    def _begin(
        self,
        options: ExchangeOptions,
        known: type = ExchangeOptions,
        lr_in_accumulator: bool = False,
    ) -> None:
        check_options(type(self), options, known)
        given: dict[str, Any] = {**self._defaults, **options}
        keywords = {name: given.pop(name) for name in COMMUNICATOR_KEYWORDS if name in given}
        names = ("average", "bucket_cap_mb", "compare_every")
        others = {name: given.pop(name) for name in names if name in given}
        process_group = given.pop("process_group", None)
        self._attach(
            Compression(algorithm=self._algorithm, **given),
            process_group,
            lr_in_accumulator=lr_in_accumulator,
            options=communicator_options(type(self), keywords),
            **others,
        )


class _SparseSGD(_Method, torch.optim.SGD):
    _base = torch.optim.SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        lr_in_accumulator: bool = False,
        **options: Unpack[ExchangeOptions],
    ) -> None:
        torch.optim.SGD.__init__(
            self,
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        self._begin(options, lr_in_accumulator=lr_in_accumulator)


class TopkSGD(_SparseSGD):
    """SGD that exchanges every rank's top k and applies their union.

    With ``select="bucket"``, ``lr_in_accumulator=True``, ``average=False`` and ``dense_below=0`` it
    is SparCML's Algorithm 1 without quantisation (Renggli et al. 2019), which sums and takes the
    largest of every 512 entries.

    ``params``, ``lr``, ``momentum``, ``dampening``, ``weight_decay``, ``nesterov``, ``maximize``,
    ``foreach`` and ``fused`` are ``torch.optim.SGD``'s; at density 1 so is the result. Without
    momentum and weight decay a step changes the entries that were received, and no other.
    ``params`` may be ``model.named_parameters()``, whose names then are in errors and checkpoints.

    Args:
        lr_in_accumulator: residuals hold ``lr`` times the gradient, by the ``lr`` of each step, and
            what arrives is the update, which is applied where entries were received.
            ``weight_decay`` is part of the gradient then, and ``momentum`` must be 0. ``False``:
            residuals hold the gradient, and ``lr`` is that of the step in which an entry arrives.
        options: ``density`` (0.01), and what :class:`sparsecomm.optim.DistributedOptimizer` and
            :class:`sparsecomm.Compression` take by keyword, but for ``momentum``.

    Raises:
        TypeError: an argument of the wrong kind, or a parameter that cannot be compressed.
        ValueError: an argument outside its range.
        RuntimeError: there is no process group, or ranks disagree: see
            :class:`sparsecomm.optim.DistributedOptimizer`.
    """

    _algorithm = "topk_a"


class QuantizedTopkSGD(_SparseSGD):
    """SGD that exchanges the top k of every 512 entries in few bits, after SparCML's Algorithm 1.

    With ``lr_in_accumulator=True``, ``average=False`` and ``dense_below=0`` it differs from the
    paper (Renggli et al. 2019) in that the residual keeps what rounding takes away, and that 1,024
    selected values share a scale. ``quantize`` says 2, 4 (the default) or 8 bits. Arguments and
    errors are those of :class:`TopkSGD`.
    """

    _algorithm = "topk_a"
    _defaults: ClassVar[CompressionOptions] = {"select": "bucket", "quantize": 4}


class OkTopkSGD(_SparseSGD):
    """SGD that applies the k largest entries of the ranks' sum, by Ok-Topk's O(k) allreduce.

    With ``lr_in_accumulator=True``, ``bucket_cap_mb=math.inf``, ``dense_below=0`` and
    ``schedule=ThresholdSchedule.oktopk()`` it is Algorithm 2 of Li and Hoefler 2022. Arguments and
    errors are those of :class:`TopkSGD`.
    """

    _algorithm = "oktopk"


class _SparseAdam(_Method):
    _algorithm = "oktopk"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
        **options: Unpack[AdamExchangeOptions],
    ) -> None:
        decay = {} if weight_decay is None else {"weight_decay": weight_decay}
        base: Any = self._base
        base.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            amsgrad=amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            fused=fused,
            **decay,
        )
        self._begin(options, AdamExchangeOptions)


class OkTopkAdam(_SparseAdam, torch.optim.Adam):
    """Adam on gradients that Ok-Topk exchanges (Li and Hoefler 2022, section 5).

    Give it ``betas=(0.0, 0.999), momentum=0.9``: with the momentum before the selection and none in
    Adam it trains better than with ``betas=(0.9, 0.999)``, which logs a warning. The arguments
    before ``options`` are ``torch.optim.Adam``'s; ``options`` and errors are as in
    :class:`TopkSGD`, and ``momentum`` is that of :class:`sparsecomm.Compression`. ``weight_decay``
    is 0 unless given.
    """

    _base = torch.optim.Adam


class OkTopkAdamW(_SparseAdam, torch.optim.AdamW):
    """AdamW on gradients that Ok-Topk exchanges, as :class:`OkTopkAdam`.

    ``weight_decay`` is 0.01 unless given, as that of ``torch.optim.AdamW``, and is applied densely,
    to the parameters.
    """

    _base = torch.optim.AdamW

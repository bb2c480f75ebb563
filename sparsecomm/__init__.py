"""Sparse gradient exchange for data-parallel training with PyTorch.

Importing this package also registers the ``torch.distributed`` backend ``"sparsecomm"``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from sparsecomm import torch_release

torch_release.require(torch.__version__)  # before anything compiled is loaded

from sparsecomm import functional, optim
from sparsecomm.announcement import announce_aggregators
from sparsecomm.backend import backend_stats
from sparsecomm.backend import register as register_backend
from sparsecomm.build import __version__, build_info
from sparsecomm.collectives import (
    CancelledError,
    Work,
    allgather_sparse,
    allreduce,
    grouped_allreduce,
    join,
    reduce_scatter_sparse,
)
from sparsecomm.communicator import Communicator
from sparsecomm.compression import Compression
from sparsecomm.hooks import (
    AutoState,
    BlockTopkState,
    CompressionState,
    DenseOverlapState,
    GaussianKState,
    GTopkState,
    OkTopkState,
    QuantizedTopkState,
    TopkDsaState,
    TopkState,
    auto_hook,
    block_topk_hook,
    compression_hook,
    dense_overlap_hook,
    gaussian_k_hook,
    gtopk_hook,
    oktopk_hook,
    quantized_topk_hook,
    register_comm_hook,
    topk_dsa_hook,
    topk_hook,
)
from sparsecomm.options import CommunicatorOptions, Options
from sparsecomm.planning import Explanation, Link, Prediction, StepPrediction, explain
from sparsecomm.preparation import prepare
from sparsecomm.reporting import report, report_at_exit, write_stats
from sparsecomm.schedule import DensityWarmup, ThresholdSchedule
from sparsecomm.tracing import Timeline, timeline
from sparsecomm.tuning import Tuning, TuningTrial, autotune

if TYPE_CHECKING:
    from sparsecomm import checkpoint, fsdp

__all__ = [
    "AutoState",
    "BlockTopkState",
    "CancelledError",
    "Communicator",
    "CommunicatorOptions",
    "Compression",
    "CompressionState",
    "DenseOverlapState",
    "DensityWarmup",
    "Explanation",
    "GTopkState",
    "GaussianKState",
    "Link",
    "OkTopkState",
    "Options",
    "Prediction",
    "QuantizedTopkState",
    "StepPrediction",
    "ThresholdSchedule",
    "Timeline",
    "TopkDsaState",
    "TopkState",
    "Tuning",
    "TuningTrial",
    "Work",
    "__version__",
    "allgather_sparse",
    "allreduce",
    "announce_aggregators",
    "auto_hook",
    "autotune",
    "backend_stats",
    "block_topk_hook",
    "build_info",
    "checkpoint",
    "compression_hook",
    "dense_overlap_hook",
    "explain",
    "fsdp",
    "functional",
    "gaussian_k_hook",
    "grouped_allreduce",
    "gtopk_hook",
    "join",
    "oktopk_hook",
    "optim",
    "prepare",
    "quantized_topk_hook",
    "reduce_scatter_sparse",
    "register_comm_hook",
    "report",
    "report_at_exit",
    "timeline",
    "topk_dsa_hook",
    "topk_hook",
    "write_stats",
]

register_backend()

# They import parts of torch that take long, and that few need.
_LAZY = ("checkpoint", "fsdp")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

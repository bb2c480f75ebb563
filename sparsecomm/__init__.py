"""Sparse gradient exchange for data-parallel training with PyTorch.

Importing this package also registers the ``torch.distributed`` backend ``"sparsecomm"``.
"""

from sparsecomm import functional
from sparsecomm.backend import register as register_backend
from sparsecomm.build import __version__, build_info
from sparsecomm.collectives import (
    CancelledError,
    Work,
    allgather_sparse,
    allreduce,
    reduce_scatter_sparse,
)
from sparsecomm.communicator import Communicator
from sparsecomm.hooks import (
    AutoState,
    CompressionState,
    DenseOverlapState,
    OkTopkState,
    TopkState,
    auto_hook,
    dense_overlap_hook,
    oktopk_hook,
    register_comm_hook,
    topk_hook,
)
from sparsecomm.planning import Explanation, Link, Prediction, explain
from sparsecomm.schedule import ThresholdSchedule

__all__ = [
    "AutoState",
    "CancelledError",
    "Communicator",
    "CompressionState",
    "DenseOverlapState",
    "Explanation",
    "Link",
    "OkTopkState",
    "Prediction",
    "ThresholdSchedule",
    "TopkState",
    "Work",
    "__version__",
    "allgather_sparse",
    "allreduce",
    "auto_hook",
    "build_info",
    "dense_overlap_hook",
    "explain",
    "functional",
    "oktopk_hook",
    "reduce_scatter_sparse",
    "register_comm_hook",
    "topk_hook",
]

register_backend()

"""Sparse gradient exchange for data-parallel training with PyTorch.

Importing this package also registers the ``torch.distributed`` backend ``"sparsecomm"``.
"""

from sparsecomm.backend import register as register_backend
from sparsecomm.build import __version__, build_info
from sparsecomm.communicator import Communicator
from sparsecomm.hooks import (
    CompressionState,
    OkTopkState,
    TopkState,
    oktopk_hook,
    register_comm_hook,
    topk_hook,
)
from sparsecomm.schedule import ThresholdSchedule

__all__ = [
    "Communicator",
    "CompressionState",
    "OkTopkState",
    "ThresholdSchedule",
    "TopkState",
    "__version__",
    "build_info",
    "oktopk_hook",
    "register_comm_hook",
    "topk_hook",
]

register_backend()

"""Optimizers that exchange sparse gradients themselves, without DDP.

They are torch's optimizers: parameter groups, closures, schedulers and hooks are as there. The
exchange starts while the backward pass runs, and ``step()`` waits for it.
"""

from sparsecomm.optim.distributed import DistributedOptimizer
from sparsecomm.optim.methods import (
    OkTopkAdam,
    OkTopkAdamW,
    OkTopkSGD,
    QuantizedTopkSGD,
    TopkSGD,
)

__all__ = [
    "DistributedOptimizer",
    "OkTopkAdam",
    "OkTopkAdamW",
    "OkTopkSGD",
    "QuantizedTopkSGD",
    "TopkSGD",
]

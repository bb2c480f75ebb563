"""Sparse exchange between the replicas of models that FSDP2 shards: hybrid sharding (HSDP).

Within a group of ranks FSDP2 shards the model and reduces gradients as ever; between such groups,
which are replicas of one another, the gradient shards are exchanged sparsely::

    mesh = init_device_mesh("cuda", (4, 8), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    state = sparsecomm.fsdp.apply(model, sparsecomm.Compression(density=0.01), mesh["replicate"])

Fast links, within a host say, are for sharding; the slow ones carry 1% of the gradient. Without
replicas there is :func:`apply_reduce_scatter`.
"""

from sparsecomm.fsdp.replicas import apply
from sparsecomm.fsdp.shards import ReduceScatterState, apply_reduce_scatter

__all__ = ["ReduceScatterState", "apply", "apply_reduce_scatter"]

"""Sharded tensors: one sample over the ranks of a mesh."""

from shardfield.domain_parallel import (  # noqa: F401
    _boundary,
    _given_gradients,
    _written_tensors,
)
from shardfield.domain_parallel._halo import all_reduce, halo_exchange, ring_shift
from shardfield.domain_parallel._local_map import local_map
from shardfield.domain_parallel._scatter import scatter_tensor, shard_tensor
from shardfield.domain_parallel._shard_tensor import ShardTensor
from shardfield.domain_parallel._sync import sync_module_over_mesh

__all__ = [
    "ShardTensor",
    "all_reduce",
    "halo_exchange",
    "local_map",
    "ring_shift",
    "scatter_tensor",
    "shard_tensor",
    "sync_module_over_mesh",
]

"""Shardfield: one sample on many devices, the PyTorch model unchanged."""

from shardfield._report import Report, report, set_strict
from shardfield.domain_parallel import (
    ShardTensor,
    scatter_tensor,
    shard_tensor,
    sync_module_over_mesh,
)

__all__ = [
    "Report",
    "ShardTensor",
    "report",
    "scatter_tensor",
    "set_strict",
    "shard_tensor",
    "sync_module_over_mesh",
]

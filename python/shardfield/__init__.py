"""Shardfield: one sample on many devices, the PyTorch model unchanged."""

from shardfield._report import Report, report, set_strict
from shardfield._reproducible import is_reproducible, set_reproducible
from shardfield.domain_parallel import (
    ShardTensor,
    scatter_tensor,
    shard_tensor,
    sync_module_over_mesh,
)

__all__ = [
    "Report",
    "ShardTensor",
    "is_reproducible",
    "report",
    "scatter_tensor",
    "set_reproducible",
    "set_strict",
    "shard_tensor",
    "sync_module_over_mesh",
]

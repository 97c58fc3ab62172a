"""The distributed runtime: ranks, groups and meshes, and collectives that differentiate."""

from shardfield._faults import name_layers, tell_failures
from shardfield.distributed import fft
from shardfield.distributed._align import Alignment, align_communicators
from shardfield.distributed._collectives import (
    all_gather_v,
    all_to_all_v,
    check_level,
    gather_v,
    indexed_all_to_all_v,
    reduce_scatter_v,
    scatter_v,
    set_call_checks,
    set_check_level,
)
from shardfield.distributed._config import ProcessGroupConfig, ProcessGroupNode
from shardfield.distributed._manager import (
    DistributedManager,
    UndefinedGroupError,
    UninitializedManagerError,
)
from shardfield.distributed._reduce import fused_all_reduce, reduce_loss
from shardfield.distributed._shared_module import mark_module_as_shared, unmark_module_as_shared

__all__ = [
    "Alignment",
    "DistributedManager",
    "ProcessGroupConfig",
    "ProcessGroupNode",
    "UndefinedGroupError",
    "UninitializedManagerError",
    "align_communicators",
    "all_gather_v",
    "all_to_all_v",
    "check_level",
    "fft",
    "fused_all_reduce",
    "gather_v",
    "indexed_all_to_all_v",
    "mark_module_as_shared",
    "name_layers",
    "reduce_loss",
    "reduce_scatter_v",
    "scatter_v",
    "set_call_checks",
    "set_check_level",
    "tell_failures",
    "unmark_module_as_shared",
]

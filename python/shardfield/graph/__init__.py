"""Meshes and graphs: files, partitions, ghosts, exchange plans."""

from shardfield.graph._atoms import Neighbors, ShardedAtoms, neighbor_list, shard_atoms
from shardfield.graph._coarse import CoarseLevel, bistride_levels
from shardfield.graph._files import FilePiece, read_mesh, read_partition, write_mesh
from shardfield.graph._halo_graph import (
    EdgesOfPart,
    HaloCost,
    HaloGraph,
    LocalGraph,
    NodesOfPart,
)
from shardfield.graph._hops import HopPlan, plan_hops
from shardfield.graph._libraries import methods
from shardfield.graph._mesh import CellBlock, Mesh
from shardfield.graph._nodes import partition_nodes
from shardfield.graph._partition import (
    ExchangePlan,
    Partition,
    Piece,
    Quality,
    Trial,
    cut_by_labels,
    partition,
    partition_labels,
)
from shardfield.graph._picture import draw

__all__ = [
    "CellBlock",
    "CoarseLevel",
    "EdgesOfPart",
    "ExchangePlan",
    "FilePiece",
    "HaloCost",
    "HaloGraph",
    "HopPlan",
    "LocalGraph",
    "Mesh",
    "Neighbors",
    "NodesOfPart",
    "Partition",
    "Piece",
    "Quality",
    "ShardedAtoms",
    "Trial",
    "bistride_levels",
    "cut_by_labels",
    "draw",
    "methods",
    "neighbor_list",
    "partition",
    "partition_labels",
    "partition_nodes",
    "plan_hops",
    "read_mesh",
    "read_partition",
    "shard_atoms",
    "write_mesh",
]

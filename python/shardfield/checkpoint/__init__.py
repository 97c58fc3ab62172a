"""Checkpoints: in one file for everyone, or in pieces that each rank writes and reads itself."""

from shardfield.checkpoint._dcp import load_dcp
from shardfield.checkpoint._format import CheckpointError
from shardfield.checkpoint._full import load_full, save_full
from shardfield.checkpoint._sharded import Reader, SaveHandle, load_sharded, save_sharded

__all__ = [
    "CheckpointError",
    "Reader",
    "SaveHandle",
    "load_dcp",
    "load_full",
    "load_sharded",
    "save_full",
    "save_sharded",
]

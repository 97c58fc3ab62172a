"""Loads the extension. torch must be in the process first: the extension links to its libraries."""

import importlib

import torch  # noqa: F401

try:
    from shardfield import _shardfield as core
except ImportError:
    core = importlib.import_module("_shardfield")

__all__ = ["core"]

"""Published case J13: counts and offsets beyond 32 bits."""

from __future__ import annotations

import torch
from oracle import is_sharded
from shardfield._core import core
from shardfield.domain_parallel import ShardTensor
from torch.distributed.tensor import Shard

LENGTH = 3_000_000_000


def test_J13_pieces_of_three_billion_elements():
    for rule in (core.chunk_sizes, core.blockwise_sizes):
        for parts in (2, 3, 7):
            sizes = rule(LENGTH, parts)
            assert sum(sizes) == LENGTH and len(sizes) == parts
            assert max(sizes) - min(sizes) < parts


def long_tensor(mesh) -> None:
    """Every element of a piece is the same one in memory: three billion take a byte."""
    rank, n = mesh.get_local_rank(), mesh.size()
    own = LENGTH // n
    piece = torch.full((1,), rank, dtype=torch.int8).expand(own)
    x = ShardTensor.from_local(piece, mesh, [Shard(0)])
    assert x.shape == (LENGTH,) and is_sharded(x)
    assert x.to_local().untyped_storage().nbytes() == 1
    assert x[LENGTH - 3 :].full_tensor().tolist() == [n - 1] * 3
    border = x[own - 2 : own + 2].full_tensor().tolist()
    assert border == [0, 0, 1, 1]
    assert x[2_999_999_999].item() == n - 1
    assert x.view(-1, 5)[599_999_999].tolist() == [n - 1] * 5


def test_J13_offsets_beyond_32_bits(run_mesh):
    for ranks in (2, 3):
        run_mesh((ranks,), long_tensor)

"""Published cases, kind A: uneven and empty pieces, and the bookkeeping of who owns what."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import Cut, arange, assert_equal, check_same_as_serial, full, is_sharded, sharded
from shardfield.domain_parallel import ShardTensor, shard_tensor
from torch import nn
from torch.distributed.tensor import Shard


def two_cuts(mesh, op: str) -> None:
    a, b = arange(2, 3), arange(2, 3) + 10
    ours = [sharded(a, mesh, 0, [0, 2]), sharded(b, mesh, 0, [1, 1])]
    call = {
        "mul": torch.mul,
        "add": torch.add,
        "where": lambda x, y: torch.where(x > 2, x, y),
        "cross": lambda x, y: torch.linalg.cross(x, y, dim=1),
        "matmul": lambda x, y: torch.matmul(x[:, None, :], y[:, :, None]),
    }[op]
    assert_equal(call(*ours), call(a, b), op)
    if op == "mul":
        assert full(call(*ours)).tolist() == [[0, 11, 24], [39, 56, 75]]
    check_same_as_serial(
        call,
        [Cut(a, [Shard(0)], {0: [0, 2]}), Cut(b, [Shard(0)], {0: [1, 1]})],
        mesh,
        no_fallback=False,
    )


@pytest.mark.parametrize("op", ["mul", "add", "where", "cross", "matmul"])
def test_A1_operands_cut_at_different_rows(run_mesh, op):
    run_mesh((2,), two_cuts, op=op)


def inferred_global_shape(mesh) -> None:
    rank = mesh.get_local_rank()
    piece = torch.full((1 if rank == 3 else 3, 2), float(rank))
    x = ShardTensor.from_local(piece, mesh, [Shard(0)])
    assert tuple(x.shape) == (10, 2)
    assert x.full_tensor()[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    rows = {0: [torch.Size([n, 2]) for n in (3, 3, 3, 1)]}
    y = ShardTensor.from_local(piece, mesh, [Shard(0)], sharding_shapes=rows)
    assert tuple(y.shape) == (10, 2)
    with pytest.raises((ValueError, RuntimeError), match="12") as caught:
        ShardTensor.from_local(
            piece, mesh, [Shard(0)], sharding_shapes=rows, global_shape=torch.Size([12, 2])
        )
    assert "10" in str(caught.value)


def test_A3_global_shape_comes_from_all_pieces(run_mesh):
    run_mesh((4,), inferred_global_shape)


def one_dim_cut_twice(mesh) -> None:
    i, j = mesh.get_coordinate()
    x = shard_tensor(arange(5), mesh, [Shard(0), Shard(0)])
    place = 2 * i + j
    assert x.to_local().tolist() == [[0.0, 1.0], [2.0], [3.0], [4.0]][place]
    assert list(x.offsets()) == [[0, 2, 3, 4][place]]
    assert x.full_tensor().tolist() == [0, 1, 2, 3, 4]
    wrapped = ShardTensor.from_local(x.to_local(), mesh, [Shard(0), Shard(0)])
    assert tuple(wrapped.shape) == (5,)
    assert wrapped.full_tensor().tolist() == [0, 1, 2, 3, 4]


def test_A5_one_dim_cut_by_both_mesh_axes(run_mesh):
    run_mesh((2, 2), one_dim_cut_twice)


OPS_ON_TWO = {
    "add": lambda x: x + 1,
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "conv": lambda x: F.conv1d(x[None, None], torch.ones(1, 1, 3, dtype=x.dtype), padding=1),
    "softmax": lambda x: x.softmax(0),
}


def fewer_elements_than_ranks(mesh, op: str) -> None:
    x = shard_tensor(arange(2) + 1, mesh, [Shard(0)])
    assert x.to_local().numel() == (1 if mesh.get_local_rank() < 2 else 0)
    check_same_as_serial(OPS_ON_TWO[op], [arange(2) + 1], mesh, [Shard(0)])


@pytest.mark.parametrize("op", OPS_ON_TWO)
def test_A7_fewer_elements_than_ranks(run_mesh, op):
    run_mesh((4,), fewer_elements_than_ranks, op=op)


def declared_shape_does_not_add_up(mesh) -> None:
    rank = mesh.get_local_rank()
    piece = torch.zeros([2, 2, 1][rank], 2)
    with pytest.raises((ValueError, RuntimeError), match="6") as caught:
        ShardTensor.from_local(piece, mesh, [Shard(0)], global_shape=torch.Size([6, 2]))
    assert "5" in str(caught.value)
    with pytest.raises((ValueError, RuntimeError)):
        ShardTensor.from_local(torch.zeros(2, 3 if rank == 1 else 2), mesh, [Shard(0)])
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        kind = torch.float64 if rank == 2 else torch.float32
        ShardTensor.from_local(torch.zeros(2, 2, dtype=kind), mesh, [Shard(0)])


def test_A9_pieces_that_do_not_add_up_are_refused_everywhere(run_mesh):
    run_mesh((3,), declared_shape_does_not_add_up)


def parameter_keeps_its_size(mesh) -> None:
    p = nn.Parameter(shard_tensor(arange(5, 3), mesh, [Shard(0), Shard(0)]))
    assert is_sharded(p) and tuple(p.shape) == (5, 3)
    back = ShardTensor.from_local(p.to_local(), mesh, p.placements)
    assert tuple(back.shape) == (5, 3)
    assert_equal(back, arange(5, 3), "unwrapped and wrapped again")
    assert_equal(p.detach() * 2, arange(5, 3) * 2, "used")


def test_A11_parameter_cut_by_two_axes_keeps_its_uneven_size(run_mesh):
    run_mesh((2, 2), parameter_keeps_its_size)

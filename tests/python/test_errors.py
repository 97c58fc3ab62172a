"""Bad input gets a sentence with op, sizes, rank and what to do; nothing hangs."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import assert_equal, numbers, sharded
from rank_pool import mesh_of
from shardfield.domain_parallel import ShardTensor, scatter_tensor, shard_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

REFUSED = (RuntimeError, ValueError, TypeError, IndexError)
BOUND_S = 15


def refused(call) -> str:
    """The text of the error that `call` raises, within a bound."""
    began = time.monotonic()
    with pytest.raises(REFUSED) as caught:
        call()
    assert time.monotonic() - began < BOUND_S
    text = str(caught.value).strip()
    assert len(text) > 20, f"no sentence: {text!r}"
    return text


def still_works(mesh) -> None:
    x = numbers(2 * mesh.size(), 2)
    assert_equal(shard_tensor(x, mesh, [Shard(0)]).sum(0), x.sum(0), "after the error")


def shapes_disagree(mesh) -> str:
    rank = mesh.get_local_rank()
    text = refused(lambda: ShardTensor.from_local(torch.ones(2, 3 + (rank == 1)), mesh, [Shard(0)]))
    still_works(mesh)
    return text


def test_ranks_that_disagree_on_a_shape(run_mesh):
    for ranks in (2, 3):
        for text in run_mesh((ranks,), shapes_disagree):
            assert "from_local" in text and "rank" in text and "3" in text and "4" in text, text


def dtypes_disagree(mesh) -> str:
    kind = torch.float32 if mesh.get_local_rank() else torch.float64
    text = refused(lambda: ShardTensor.from_local(torch.ones(2, 3, dtype=kind), mesh, [Shard(0)]))
    still_works(mesh)
    return text


def test_ranks_that_disagree_on_a_dtype(run_mesh):
    for text in run_mesh((2,), dtypes_disagree):
        assert ("from_local" in text and "float" in text.lower() and "double" in text.lower()) or (
            "float32" in text and "float64" in text
        ), text


def specs_disagree(mesh) -> str:
    text = refused(
        lambda: ShardTensor.from_local(torch.ones(2, 2), mesh, [Shard(mesh.get_local_rank())])
    )
    still_works(mesh)
    return text


def test_ranks_that_disagree_on_a_placement(run_mesh):
    for text in run_mesh((2,), specs_disagree):
        assert "from_local" in text and "rank" in text, text


def numbers_of_dims_disagree(mesh) -> str:
    shape = (2, 2) if mesh.get_local_rank() else (2, 2, 1)
    text = refused(lambda: ShardTensor.from_local(torch.ones(shape), mesh, [Shard(0)]))
    still_works(mesh)
    return text


def test_ranks_that_disagree_on_the_number_of_dims(run_mesh):
    for text in run_mesh((3,), numbers_of_dims_disagree):
        assert "from_local" in text and "rank" in text, text


def lists_that_do_not_fit(mesh) -> list[str]:
    piece = torch.ones(2, 3)
    size = torch.Size
    wrong = [
        ({0: [size([2, 3])]}, None),  # too few pieces
        ({0: [size([2, 3]), size([4, 3])]}, (5, 3)),  # does not add up
        ({0: [size([5, 3]), size([5, 3])]}, None),  # not this piece
        ({0: [size([2, 3]), size([2, 4])]}, None),  # other dims differ
        ({0: [size([2, 3, 1]), size([2, 3, 1])]}, None),  # another number of dims
        ({3: [size([2, 3]), size([2, 3])]}, None),  # no such mesh axis
        ({0: [size([2, 3]), size([-2, 3])]}, None),  # negative
    ]
    texts = [
        refused(
            lambda s=shapes, g=whole: ShardTensor.from_local(
                piece, mesh, [Shard(0)], sharding_shapes=s, global_shape=g and torch.Size(g)
            )
        )
        for shapes, whole in wrong
    ]
    texts.append(
        refused(lambda: ShardTensor.from_local(piece, mesh, [Shard(0)], sharding_shapes="even"))
    )
    still_works(mesh)
    return texts


def test_piece_lists_that_do_not_add_up(run_mesh):
    texts = run_mesh((2,), lists_that_do_not_fit)[0]
    assert all("from_local" in text for text in texts), texts
    assert "6" in texts[1] and "5" in texts[1]
    assert "infer" in texts[-1] and "chunk" in texts[-1], "the known words are listed"


def placements_that_do_not_fit(mesh) -> list[str]:
    x = numbers(4, 3)
    texts = [
        refused(lambda: shard_tensor(x, mesh, [Shard(2)])),
        refused(lambda: shard_tensor(x, mesh, [Shard(-3)])),
        refused(lambda: shard_tensor(x, mesh, [Shard(0), Shard(1)])),
        refused(lambda: shard_tensor(x, mesh, [])),
        refused(lambda: ShardTensor.from_local(x, mesh, [Shard(5)])),
        refused(lambda: scatter_tensor(x, 0, mesh, [Shard(2)])),
        refused(lambda: sharded(x, mesh, 0).redistribute(placements=[Shard(2)])),
        refused(lambda: shard_tensor(torch.tensor(1.0), mesh, [Shard(0)])),
        refused(lambda: shard_tensor(x, mesh, ["rows"])),
    ]
    still_works(mesh)
    return texts


def test_placements_on_dims_that_do_not_exist(run_mesh):
    texts = run_mesh((2,), placements_that_do_not_fit)[0]
    assert "shard_tensor" in texts[0] and "2" in texts[0]
    assert "shard_tensor" in texts[2] and "1" in texts[2] and "2" in texts[2]
    assert "from_local" in texts[4] and "scatter_tensor" in texts[5] and "redistribute" in texts[6]


def scatter_misuse(mesh) -> list[str]:
    rank = dist.get_rank()
    texts = [
        refused(lambda: scatter_tensor(numbers(4), 17, mesh, [Shard(0)])),
        refused(lambda: scatter_tensor(None, 0, mesh, [Shard(0)])),  # the source has none either
        refused(
            lambda: scatter_tensor(
                numbers(4) if rank == 0 else None, 0, mesh, [Shard(0)], global_shape=(5,)
            )
        ),
    ]
    still_works(mesh)
    return texts


def test_scatter_from_a_wrong_source(run_mesh):
    for texts in run_mesh((2,), scatter_misuse):
        assert "17" in texts[0] and all("scatter_tensor" in text for text in texts), texts


def two_meshes() -> list[str]:
    first, second = mesh_of((2,)), mesh_of((2, 1))
    a = shard_tensor(numbers(4), first, [Shard(0)])
    b = shard_tensor(numbers(4), second, [Shard(0), Replicate()])
    texts = [
        refused(lambda: a + b),
        refused(lambda: torch.where(a > 0, a, b)),
        refused(lambda: torch.cat([a, b])),
        refused(lambda: a.add_(b)),
        refused(lambda: F.mse_loss(a, b)),
    ]
    still_works(first)
    return texts


def test_tensors_of_two_meshes_in_one_op(run_ranks):
    for text in run_ranks(2, two_meshes)[0]:
        assert "mesh" in text.lower(), text


def closed_group() -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    mesh = DeviceMesh.from_group(group, "cpu")
    x = shard_tensor(numbers(1, 1, 8), mesh, [Shard(2)])
    F.conv1d(x, numbers(1, 1, 3), padding=1)
    dist.destroy_process_group(group)
    return refused(lambda: F.conv1d(x, numbers(1, 1, 3), padding=1))


def test_a_closed_group(run_ranks):
    for text in run_ranks(2, closed_group):
        assert "group" in text.lower() or "closed" in text.lower(), text


def plain_operands_that_do_not_fit(mesh) -> list[str]:
    x = sharded(numbers(1, 4, 6), mesh, 2)
    texts = [
        refused(lambda: x + numbers(5)),
        refused(lambda: F.conv1d(x, numbers(2, 3, 3))),
        refused(lambda: F.conv1d(x, numbers(2, 4, 9))),
        refused(lambda: F.linear(x, numbers(2, 5))),
        refused(lambda: torch.cat([x, sharded(numbers(1, 3, 6), mesh, 2)], 0)),
        refused(lambda: x.view(5, 5)),
        refused(lambda: x.sum(4)),
        refused(lambda: F.pad(x, (7, 7), mode="reflect")),
        refused(lambda: F.group_norm(x, 3)),
        refused(lambda: F.max_pool1d(x, 3, padding=2)),
        refused(lambda: x.permute(0, 1)),
        refused(lambda: x.narrow(2, 4, 5)),
        refused(lambda: F.interpolate(x, size=4, scale_factor=2)),
        refused(lambda: F.batch_norm(x, numbers(3), numbers(3).abs(), training=True)),
    ]
    still_works(mesh)
    return texts


def test_operands_that_do_not_fit(run_mesh):
    for ranks in (1, 2, 3):
        run_mesh((ranks,), plain_operands_that_do_not_fit)


def not_a_member() -> str:
    mesh = DeviceMesh("cpu", torch.tensor([0, 1]))
    text = ""
    if dist.get_rank() == 2:
        text = refused(lambda: shard_tensor(numbers(4), mesh, [Shard(0)]))
    else:
        still_works(mesh)
    return text


def test_a_rank_outside_the_mesh(run_ranks):
    assert "mesh" in run_ranks(3, not_a_member)[2].lower()


def one_rank_throws(mesh) -> str:
    """A rank that fails between two exchanges."""
    x = sharded(numbers(1, 1, 8), mesh, 2)
    w = numbers(1, 1, 3, seed=1)
    if mesh.get_local_rank() == 1:
        raise ValueError("this rank failed by itself")
    return str(F.conv1d(x, w, padding=1).shape)


def test_a_rank_that_throws_by_itself_is_reported(run_mesh):
    from rank_pool import RankFailure

    began = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1: ValueError: this rank failed by itself"):
        run_mesh((2,), one_rank_throws)
    assert time.monotonic() - began < 60


def replicated_only(mesh) -> None:
    x = shard_tensor(numbers(4), mesh, [Replicate()])
    assert not isinstance(x, ShardTensor)
    y = ShardTensor.from_local(numbers(4), mesh, [Replicate()])
    assert_equal(y, numbers(4), "a replicated tensor is plain")


def test_there_is_no_replicated_sharded_tensor(run_mesh, ranks):
    run_mesh((ranks,), replicated_only)

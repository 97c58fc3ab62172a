"""Published cases, kind J: what collectives of the back ends get wrong."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist
from oracle import arange, assert_equal, full, numbers, sharded
from shardfield.domain_parallel import ShardTensor, scatter_tensor, shard_tensor
from torch.distributed.tensor import Partial, Replicate, Shard


def strided_pieces(mesh) -> None:
    strided = arange(6)[::2]
    x = ShardTensor.from_local(strided, mesh, [Shard(0)])
    assert x.full_tensor().tolist() == [0, 2, 4, 0, 2, 4]
    summed = ShardTensor.from_local(strided, mesh, [Partial()])
    assert summed.tolist() == [0, 4, 8]
    rank = dist.get_rank()
    y = scatter_tensor(arange(20)[0:12:2] if rank == 0 else None, 0, mesh, [Shard(0)])
    assert y.to_local().tolist() == [[0, 2, 4], [6, 8, 10]][rank]
    z = shard_tensor(arange(4, 6)[:, ::2], mesh, [Shard(0)]).redistribute(placements=[Shard(1)])
    assert_equal(z, arange(4, 6)[:, ::2], "moved to another dim")
    t = ShardTensor.from_local(arange(3, 2).t(), mesh, [Shard(0)])
    assert_equal(t, arange(3, 2).t().repeat(2, 1), "transposed piece")


def test_J1_strided_pieces(run_mesh):
    run_mesh((2,), strided_pieces)


def layouts_differ_between_ranks(mesh) -> None:
    image = numbers(1, 4, 6, 6)
    piece = image.chunk(2, 2)[mesh.get_local_rank()]
    if mesh.get_local_rank() == 1:
        piece = piece.contiguous(memory_format=torch.channels_last)
    x = ShardTensor.from_local(piece, mesh, [Shard(2)])
    assert_equal(x, image, "gathered")
    assert_equal(x.redistribute(placements=[Shard(3)]), image, "moved")
    assert_equal(x.sum(2), image.sum(2), "summed")


def test_J1_one_rank_holds_its_piece_channels_last(run_mesh):
    run_mesh((2,), layouts_differ_between_ranks)


def conjugate_and_negative_bits(mesh) -> None:
    z = torch.tensor([1 + 2j, 3 + 4j], dtype=torch.complex128)
    assert z.conj().is_conj()
    assert ShardTensor.from_local(z.conj(), mesh, [Partial()]).tolist() == [2 - 4j, 6 - 8j]
    negative = z.conj().imag
    assert negative.is_neg()
    assert ShardTensor.from_local(negative, mesh, [Partial()]).tolist() == [-4, -8]
    x = ShardTensor.from_local(z.conj(), mesh, [Shard(0)])
    assert x.full_tensor().tolist() == [1 - 2j, 3 - 4j] * 2
    wide = torch.view_as_complex(numbers(4, 6, 2))
    moved = shard_tensor(wide.conj(), mesh, [Shard(0)]).redistribute(placements=[Shard(1)])
    assert_equal(moved, wide.conj().resolve_conj(), "complex all-to-all")
    assert_equal(shard_tensor(wide, mesh, [Shard(0)]).sum(), wide.sum(), "complex sum")


def test_J17_conjugate_and_negative_bits_and_complex_exchanges(run_mesh):
    run_mesh((2,), conjugate_and_negative_bits)


def nothing_to_send(mesh) -> None:
    n = mesh.size()
    x = sharded(arange(3, 4), mesh, 0, [3] + [0] * (n - 1))
    assert full(x).tolist() == arange(3, 4).tolist()
    y = x.redistribute(placements=[Shard(1)])
    assert_equal(y, arange(3, 4), "from one rank to all")
    z = y.redistribute(placements=[Shard(0)])
    assert_equal(z, arange(3, 4), "and back")
    assert_equal(x.flip(0), arange(3, 4).flip(0), "flipped")
    empty = sharded(torch.zeros(0, 4), mesh, 0)
    assert tuple(full(empty).shape) == (0, 4)
    assert float(empty.sum()) == 0


def test_J3_ranks_with_nothing_to_send(run_mesh, mesh_shape):
    if len(mesh_shape) == 1:
        run_mesh(mesh_shape, nothing_to_send)
    else:
        run_mesh((4,), nothing_to_send)


def sizes_disagree(mesh) -> str:
    piece = torch.ones(4 if mesh.get_local_rank() == 0 else 2)
    began = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        ShardTensor.from_local(piece, mesh, [Partial()])
    assert time.monotonic() - began < 20
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        kind = torch.float32 if mesh.get_local_rank() == 0 else torch.int32
        ShardTensor.from_local(torch.ones(4, dtype=kind), mesh, [Partial()])
    return str(caught.value)


def test_J5_summing_tensors_of_other_sizes_is_refused_on_every_rank(run_mesh):
    texts = run_mesh((2,), sizes_disagree)
    assert all("4" in text and "2" in text for text in texts)


def big_sums(mesh) -> None:
    x = ShardTensor.from_local(torch.ones(2_000_000), mesh, [Partial()])
    assert float(x.min()) == float(x.max()) == mesh.size()
    y = shard_tensor(torch.ones(4_000_000), mesh, [Shard(0)])
    for _ in range(10):
        assert float(y.sum()) == 4_000_000
        assert float(y.redistribute(placements=[Replicate()]).min()) == 1


def test_J11_no_unfinished_buffer_is_handed_out(run_mesh):
    run_mesh((2,), big_sums)


def freed_in_another_order(mesh) -> None:
    kept = [shard_tensor(numbers(6, 2, seed=i), mesh, [Shard(0)]) for i in range(6)]
    loops = []
    for i, x in enumerate(kept):
        cycle = {"x": x.requires_grad_(), "y": (x * x).sum()}
        cycle["self"] = cycle
        if i % 2 == mesh.get_local_rank() % 2:
            loops.append(cycle)
    order = range(6) if mesh.get_local_rank() % 2 else reversed(range(6))
    for i in order:
        kept[i] = None
        gc.collect()
    loops.clear()
    gc.collect()
    with pytest.raises(RuntimeError, match="thrown through a scope"):
        scoped = shard_tensor(numbers(6, 2), mesh, [Shard(0)])
        raise RuntimeError(f"thrown through a scope that holds {tuple(scoped.shape)}")
    assert_equal(shard_tensor(numbers(6, 2), mesh, [Shard(0)]).sum(), numbers(6, 2).sum(), "after")


def test_J15_freeing_tensors_never_communicates(run_mesh):
    run_mesh((2,), freed_in_another_order)
    run_mesh((4,), freed_in_another_order)

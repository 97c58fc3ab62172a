"""Published cases, kind P: faults of torch.distributed itself (2.13, Gloo) that must not come through."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import arange, assert_equal, check_same_as_serial, full, numbers, sharded
from shardfield.distributed import (
    all_gather_v,
    all_to_all_v,
    fused_all_reduce,
    gather_v,
    reduce_scatter_v,
    scatter_v,
)
from shardfield.domain_parallel import ShardTensor, scatter_tensor, shard_tensor
from torch.distributed.tensor import Replicate, Shard


def strided_input() -> None:
    rank = dist.get_rank()
    x = torch.arange(6.0)[::2]
    assert fused_all_reduce(x).tolist() == [0, 4, 8]
    both = torch.arange(20.0).reshape(2, 10)[:, 0:6:2]  # 0, 2, 4 and 10, 12, 14
    mine = scatter_v(both if rank == 0 else None, [1, 1])
    assert mine.tolist() == [[[0, 2, 4]], [[10, 12, 14]]][rank]
    assert all_gather_v(x, [3, 3]).tolist() == [0, 2, 4, 0, 2, 4]
    assert gather_v(x, [3, 3]).tolist() == ([0, 2, 4, 0, 2, 4] if rank == 0 else [])
    assert (
        reduce_scatter_v(torch.arange(12.0)[::2], [3, 3]).tolist()
        == [
            [0, 4, 8],
            [12, 16, 20],
        ][rank]
    )


def test_P1_strided_input(run_ranks):
    run_ranks(2, strided_input)


def broadcast_of_a_view(mesh) -> None:
    source = torch.arange(6.0)[::2] if mesh.get_local_rank() == 0 else None
    assert scatter_tensor(source, 0, mesh, [Replicate()]).tolist() == [0, 2, 4]


def test_P1_a_view_that_one_rank_gives_to_all(run_mesh):
    run_mesh((2,), broadcast_of_a_view)


def strided_exchange() -> None:
    rank = dist.get_rank()
    x = torch.arange(10.0 * rank, 10.0 * rank + 8)[::2]
    want = [[0, 2, 10, 12], [4, 6, 14, 16]][rank]
    assert all_to_all_v(x, [[2, 2], [2, 2]]).tolist() == want
    columns = torch.arange(8.0).reshape(2, 4).t()  # rows 0,4 1,5 2,6 3,7
    got = all_to_all_v(columns, [[2, 2], [2, 2]])
    assert got.tolist() == ([[0, 4], [1, 5]] * 2 if rank == 0 else [[2, 6], [3, 7]] * 2)


def test_P2_all_to_all_of_strided_tensors(run_ranks):
    run_ranks(2, strided_exchange)


def other_memory_order_on_one_rank() -> None:
    x = numbers(2, 3, 4, 5)
    if dist.get_rank() == 1:
        x = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(fused_all_reduce(x), 2 * numbers(2, 3, 4, 5))
    assert torch.equal(all_gather_v(x, [2, 2]), numbers(2, 3, 4, 5).repeat(2, 1, 1, 1))


def test_P3_channels_last_on_one_rank(run_ranks):
    run_ranks(2, other_memory_order_on_one_rank)


def lazy_bits() -> None:
    z = torch.tensor([1 + 2j, 3 + 4j]).conj()
    assert z.is_conj() and z.imag.is_neg()
    assert fused_all_reduce(z).tolist() == [2 - 4j, 6 - 8j]
    assert fused_all_reduce(z.imag).tolist() == [-4, -8]
    assert all_gather_v(z, [2, 2]).tolist() == [1 - 2j, 3 - 4j] * 2


def test_P4_conjugate_and_negative_views(run_ranks):
    run_ranks(2, lazy_bits)


def complex_exchanges() -> None:
    rank = dist.get_rank()
    z = torch.tensor([1 + 1j, 2 + 2j], dtype=torch.complex128) * (rank + 1)
    assert all_gather_v(z, [2, 2]).tolist() == [1 + 1j, 2 + 2j, 2 + 2j, 4 + 4j]
    assert all_to_all_v(z, [[1, 1], [1, 1]]).tolist() == [[1 + 1j, 2 + 2j], [2 + 2j, 4 + 4j]][rank]


def test_P5_complex_numbers(run_ranks):
    run_ranks(2, complex_exchanges)


def sums_under_autograd() -> None:
    rank = dist.get_rank()
    x = torch.ones((), dtype=torch.float64, requires_grad=True)
    ((rank + 1) * fused_all_reduce((rank + 1) * x)).backward()
    assert float(x.grad) == [3, 6][rank]
    x.grad = None
    y = 2 * x
    z = y * y
    assert float(fused_all_reduce(y)) == 4
    assert float(y) == 2
    z.backward()
    assert float(x.grad) == 8


def test_P6_gradients_and_saved_values(run_ranks):
    run_ranks(2, sums_under_autograd)


def wrong_sizes() -> None:
    rank = dist.get_rank()
    for call in (
        lambda: fused_all_reduce(torch.ones(4 if rank == 0 else 2)),
        lambda: fused_all_reduce(torch.ones(4, dtype=torch.float32 if rank == 0 else torch.int32)),
        lambda: all_to_all_v(torch.ones(4 if rank == 0 else 6), [[2, 2], [2, 2]]),
    ):
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank"):
            call()
        assert time.monotonic() - began < 10
    assert fused_all_reduce(torch.ones(1)).tolist() == [2]


def test_P7_sizes_and_dtypes_that_differ(run_ranks):
    run_ranks(2, wrong_sizes)


def nan_of_each_rank(mesh) -> None:
    for holder in range(mesh.size()):
        x = torch.full((2,), float("nan") if mesh.get_local_rank() == holder else 1.0)
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            assert fused_all_reduce(x, op=op).isnan().all()
        whole = torch.ones(mesh.size())
        whole[holder] = float("nan")
        cut = shard_tensor(whole, mesh, [Shard(0)])
        assert cut.max().isnan() and cut.amin(0).isnan()


def test_P8_nan_wins_whichever_rank_holds_it(run_mesh, ranks):
    run_mesh((ranks,), nan_of_each_rank)


EMPTY_PIECES = {
    "conv": lambda x: F.conv1d(x, numbers(2, 3, 3, seed=1), padding=1),
    "fft": lambda x: torch.fft.fft(x, dim=2).real,
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "mean": lambda x: x.mean(),
    "amax": lambda x: x.amax(2),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 3),
}


def empty_pieces(mesh) -> None:
    n = mesh.size()
    for name, function in EMPTY_PIECES.items():
        for sizes in ([5] + [0] * (n - 1), [0] * (n - 1) + [5]):
            check_same_as_serial(
                function,
                [numbers(2, 3, 5)],
                mesh,
                [Shard(2)],
                sizes={0: sizes},
                no_fallback=name != "fft",
            )


def test_P9_empty_pieces(run_mesh, ranks):
    run_mesh((ranks,), empty_pieces)


def calls_of_a_foreigner() -> None:
    group = dist.new_group([0])
    x = torch.ones(1)
    if dist.get_rank() == 0:
        assert fused_all_reduce(x, group=group).tolist() == [1]
        return
    for call in (
        lambda: fused_all_reduce(x, group=group),
        lambda: all_gather_v(x, [1], group=group),
        lambda: all_to_all_v(x, [[1]], group=group),
    ):
        with pytest.raises(RuntimeError, match="rank 1 is not in the group"):
            call()


def test_P10_a_rank_outside_of_the_group(run_ranks):
    run_ranks(2, calls_of_a_foreigner)


KERNELS = [(3, 1, 1), (3, 2, 1), (2, 2, 0), (5, 1, 2), (4, 2, 1), (3, 1, 0)]


def cut_convolutions(mesh) -> None:
    for k, s, p in KERNELS:
        for dim in (2, 3):
            (out,) = check_same_as_serial(
                lambda x, w, s=s, p=p: F.conv2d(x, w, stride=s, padding=p),
                [numbers(1, 2, 9, 8)],
                mesh,
                [Shard(dim)],
                plain=[numbers(3, 2, k, k, seed=1).requires_grad_()],
                output_sharded=True,
            )
            lengths = all_gather_v(torch.tensor([out.to_local().shape[dim]]), [1] * mesh.size())
            assert int(lengths.sum()) == out.shape[dim]


def test_P11_a_convolution_says_what_it_holds(run_mesh):
    run_mesh((2,), cut_convolutions)


def the_rest(mesh) -> None:
    rank = mesh.get_local_rank()
    x = sharded(torch.zeros(6, dtype=torch.float64), mesh, 0)
    x[2:5] = 1.0
    assert full(x).tolist() == [0, 0, 1, 1, 1, 0]
    piece = torch.full((1 if rank == 0 else 4,), float(rank))
    shapes = {0: [torch.Size([1]), torch.Size([4])]}
    wrapped = ShardTensor.from_local(piece, mesh, [Shard(0)], sharding_shapes=shapes)
    assert wrapped.full_tensor().tolist() == [0, 1, 1, 1, 1]
    logits, weight = numbers(6, 3), torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    target = torch.tensor([0, 1, 2, 2, 1, 0])
    for sizes in ([1, 5], [6, 0]):
        got = F.nll_loss(
            F.log_softmax(sharded(logits, mesh, 0, sizes), 1),
            sharded(target, mesh, 0, sizes),
            weight,
        )
        assert_equal(got, F.nll_loss(F.log_softmax(logits, 1), target, weight), "weighted")
    torch.manual_seed(0)
    kept = full(F.dropout(sharded(torch.ones(64), mesh, 0), 0.5) != 0)
    assert not torch.equal(kept[:32], kept[32:])


def test_P12_writes_uneven_pieces_weights_and_masks(run_mesh):
    run_mesh((2,), the_rest)


def fine_in_torch(mesh) -> None:
    x = sharded(arange(5, 3), mesh, 0, [4, 1])
    assert float(x.mean()) == 7
    assert_equal(x.var(0), arange(5, 3).var(0), "var")
    assert int(x.argmax()) == 14
    assert x.flatten().topk(2).values.tolist() == [14, 13]
    assert_equal(x.cumsum(0), arange(5, 3).cumsum(0), "cumsum")
    y = shard_tensor(arange(12, 8), mesh, [Shard(0)])
    assert_equal(y.view(16, 6), arange(12, 8).view(16, 6), "view")
    assert_equal(y.flip(0).roll(3, 0), arange(12, 8).flip(0).roll(3, 0), "flip, roll")
    short = torch.tensor([256.0 if mesh.get_local_rank() == 0 else 4.0]).bfloat16()
    assert float(fused_all_reduce(short)) == 260
    rows = torch.arange(3.0)
    assert reduce_scatter_v(rows, [2, 1]).tolist() == [[0, 2], [4]][mesh.get_local_rank()]


def test_P_what_is_right_there_is_right_here(run_mesh):
    run_mesh((2,), fine_in_torch)

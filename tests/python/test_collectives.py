"""Collectives on a rank's own tensors: values, first and second gradients against one process.

The oracle holds every rank's input at once and computes every rank's output with plain torch ops.
The gradient is that of the sum of all ranks' losses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from oracle import assert_equal, numbers
from shardfield.distributed import (
    all_gather_v,
    all_to_all_v,
    fused_all_reduce,
    gather_v,
    indexed_all_to_all_v,
    mark_module_as_shared,
    reduce_loss,
    reduce_scatter_v,
    scatter_v,
    unmark_module_as_shared,
)
from shardfield.domain_parallel import shard_tensor
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import shardfield

SIZES = {1: [3], 2: [3, 0], 3: [2, 0, 3], 4: [1, 3, 0, 2]}
DIMS = [(0, (5,)), (0, (2, 3)), (1, (2, 3)), (-1, (2, 2))]


def shape_of(rows: int, dim: int, others: tuple[int, ...]) -> list[int]:
    """`others` with `rows` put in at `dim`."""
    dims = len(others) + 1
    shape = list(others)
    shape.insert(dim % dims, rows)
    return shape


def table(n: int) -> list[list[int]]:
    """How many rows rank i sends to rank j: uneven, some 0."""
    return [[(2 * i + 3 * j) % 4 for j in range(n)] for i in range(n)]


def loss_of(out: Tensor, seed: int) -> Tensor:
    """Cubic, so that no derivative up to the second is constant."""
    return (out * numbers(*out.shape, seed=100 + seed) + out.pow(3) / 3).sum()


def check(
    ours: Callable[[Tensor], Tensor],
    serial: Callable[[list[Tensor]], list[Tensor]],
    shapes: list[list[int]],
    what: str,
) -> None:
    """One collective with these input shapes per rank: output, gradient, gradient of a penalty."""
    rank = dist.get_rank()
    inputs = [numbers(*shape, seed=r).requires_grad_() for r, shape in enumerate(shapes)]
    outputs = serial(inputs)
    total = sum(loss_of(out, r) for r, out in enumerate(outputs))
    first = torch.autograd.grad(total, inputs, create_graph=True)
    second = torch.autograd.grad(sum((g * g).sum() for g in first), inputs)
    x = numbers(*shapes[rank], seed=rank).requires_grad_()
    out = ours(x)
    assert out.is_contiguous()
    assert_equal(out, outputs[rank], f"{what}: output")
    (grad,) = torch.autograd.grad(loss_of(out, rank), x, create_graph=True)
    assert_equal(grad, first[rank], f"{what}: gradient")
    (twice,) = torch.autograd.grad((grad * grad).sum(), x)
    assert_equal(twice, second[rank], f"{what}: second gradient")


def blocks(x: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
    return list(x.split(sizes, dim))


def gathers(dim: int, others: tuple[int, ...]) -> None:
    n = dist.get_world_size()
    sizes = SIZES[n]
    check(
        lambda x: all_gather_v(x, sizes, dim),
        lambda xs: [torch.cat(xs, dim)] * n,
        [shape_of(s, dim, others) for s in sizes],
        f"all_gather_v {dim}",
    )
    check(
        lambda x: reduce_scatter_v(x, sizes, dim),
        lambda xs: blocks(sum(xs), sizes, dim),
        [shape_of(sum(sizes), dim, others)] * n,
        f"reduce_scatter_v {dim}",
    )


def gathers_to(dst: int, dim: int, others: tuple[int, ...]) -> None:
    n = dist.get_world_size()
    sizes = SIZES[n]
    check(
        lambda x: gather_v(x, sizes, dim, dst),
        lambda xs: [
            torch.cat(xs, dim) if r == dst else x.narrow(dim, 0, 0) for r, x in enumerate(xs)
        ],
        [shape_of(s, dim, others) for s in sizes],
        f"gather_v {dim} to {dst}",
    )


def all_gathers() -> None:
    for dim, others in DIMS:
        gathers(dim, others)
        for dst in {0, dist.get_world_size() - 1}:
            gathers_to(dst, dim, others)


def test_gathers_and_their_adjoints(run_ranks, ranks):
    run_ranks(ranks, all_gathers)


def scatters(root: int) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    sizes = SIZES[n]
    for dim, others in DIMS:
        whole = numbers(*shape_of(sum(sizes), dim, others)).requires_grad_()
        pieces = blocks(whole, sizes, dim)
        total = sum(loss_of(p, r) for r, p in enumerate(pieces))
        (first,) = torch.autograd.grad(total, whole, create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), whole)
        x = whole.detach().clone().requires_grad_() if rank == root else None
        mine = scatter_v(x, sizes, dim, src=root)
        assert_equal(mine, pieces[rank], "piece")
        assert mine.requires_grad
        inputs = [x] if x is not None else []
        loss = loss_of(mine, rank)
        if x is None:
            loss.backward()
            continue
        (grad,) = torch.autograd.grad(loss, inputs)
        assert_equal(grad, first, "gradient")
        assert second.shape == whole.shape


def test_scatter_with_tensors_on_the_source_alone(run_ranks, ranks):
    run_ranks(ranks, scatters, root=0)
    run_ranks(ranks, scatters, root=ranks - 1)


def scatter_of_everyones_tensor() -> None:
    """Tensors on every rank: only the source's is read, and both gradients of the others are 0."""
    n = dist.get_world_size()
    sizes = SIZES[n]
    check(
        lambda x: scatter_v(x, sizes, 0, src=n - 1),
        lambda xs: [p + 0 * xs[r].sum() for r, p in enumerate(blocks(xs[n - 1], sizes, 0))],
        [[sum(sizes), 2]] * n,
        "scatter_v",
    )


def test_scatter_and_its_two_derivatives(run_ranks, ranks):
    run_ranks(ranks, scatter_of_everyones_tensor)


def exchange(dim: int, others: tuple[int, ...]) -> None:
    n = dist.get_world_size()
    sizes = table(n)

    def swapped(xs: list[Tensor]) -> list[Tensor]:
        parts = [blocks(x, row, dim) for x, row in zip(xs, sizes, strict=True)]
        return [torch.cat([parts[i][j] for i in range(n)], dim) for j in range(n)]

    check(
        lambda x: all_to_all_v(x, sizes, dim),
        swapped,
        [shape_of(sum(row), dim, others) for row in sizes],
        f"all_to_all_v {dim}",
    )


def chosen_rows(dim: int, others: tuple[int, ...]) -> None:
    n = dist.get_world_size()
    sizes = table(n)
    rows = 4
    generator = torch.Generator().manual_seed(3)
    picks = [[torch.randint(rows, (count,), generator=generator) for count in row] for row in sizes]

    def chosen(xs: list[Tensor]) -> list[Tensor]:
        return [
            torch.cat([xs[i].index_select(dim, picks[i][j]) for i in range(n)], dim)
            for j in range(n)
        ]

    check(
        lambda x: indexed_all_to_all_v(x, picks[dist.get_rank()], sizes, dim=dim),
        chosen,
        [shape_of(rows, dim, others)] * n,
        f"indexed_all_to_all_v {dim}",
    )


def all_exchanges() -> None:
    for dim, others in DIMS:
        exchange(dim, others)
        chosen_rows(dim, others)


def test_blocks_and_chosen_rows_to_every_rank_duplicates_added(run_ranks, ranks):
    run_ranks(ranks, all_exchanges)


def every_dtype() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    sizes = SIZES[n]
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
    ):
        whole = numbers(sum(sizes), 4) * 9
        whole = whole > 0 if dtype == torch.bool else whole.abs().to(dtype)
        if dtype.is_complex:
            whole = torch.complex(whole.real, numbers(sum(sizes), 4, seed=1).to(whole.real.dtype))
        pieces = whole.split(sizes)
        assert torch.equal(all_gather_v(pieces[rank], sizes), whole), dtype
        gathered = gather_v(pieces[rank], sizes)
        assert torch.equal(gathered, whole if rank == 0 else whole[:0]), dtype
        scattered = scatter_v(whole if rank == 0 else None, sizes)
        assert torch.equal(scattered, pieces[rank]), dtype
        summed = reduce_scatter_v(whole, sizes)
        wanted = pieces[rank] if dtype == torch.bool else (pieces[rank] * n).to(dtype)
        torch.testing.assert_close(summed, wanted)
        reduced = fused_all_reduce([whole, whole[:1]])
        wanted = whole if dtype == torch.bool else (whole * n).to(dtype)
        torch.testing.assert_close(reduced[0], wanted)
        torch.testing.assert_close(reduced[1], wanted[:1])


def test_every_dtype(run_ranks, ranks):
    run_ranks(ranks, every_dtype)


NARROW = (torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn)


def narrow_dtypes() -> None:
    """What the transports do not reduce: CT volumes in int16, counts without a sign, float8."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for dtype in NARROW:
        x = torch.tensor([rank + 1, 3, 0]).to(dtype)
        wanted = torch.tensor([n * (n + 1) // 2, 3 * n, 0])
        assert torch.equal(fused_all_reduce(x).to(torch.int64), wanted), dtype
        own = reduce_scatter_v(x, [3] + [0] * (n - 1)).to(torch.int64)
        assert torch.equal(own, wanted if rank == 0 else wanted[:0]), dtype
        if dtype != torch.uint64:
            most = fused_all_reduce(x, op=dist.ReduceOp.MAX)
            assert most.dtype == dtype and most.to(torch.int64).tolist() == [n, 3, 0], dtype
        assert all_gather_v(x, [3] * n).dtype == dtype
    lowest = torch.tensor([-32768 if rank == n - 1 else 32767], dtype=torch.int16)
    assert fused_all_reduce(lowest, op=dist.ReduceOp.MIN).tolist() == [-32768]
    assert fused_all_reduce(torch.tensor([65535 if rank else 1], dtype=torch.uint16)).tolist() == [
        (1 + 65535 * (n - 1)) % 65536
    ]
    flags = torch.tensor([rank == 0, True, False])
    assert fused_all_reduce(flags).tolist() == [True, True, False]
    assert fused_all_reduce(flags, op=dist.ReduceOp.PRODUCT).tolist() == [n == 1, True, False]
    with pytest.raises(RuntimeError, match="without a sign can only be summed"):
        fused_all_reduce(torch.ones(1).to(torch.uint64), op=dist.ReduceOp.MAX)


def test_dtypes_that_the_transports_do_not_reduce(run_ranks, ranks):
    run_ranks(ranks, narrow_dtypes)


def narrow_tensors(mesh) -> None:
    whole = (torch.arange(14) * 5 % 11 - 3).to(torch.int16).view(7, 2)
    x = shard_tensor(whole, mesh, [Shard(0)])
    for call in (
        lambda t: t.amax(),
        lambda t: t.min(),
        lambda t: t.argmax(),
        lambda t: t.max(0),
        lambda t: t.aminmax(),
        lambda t: (t + 3).flatten().bincount(),
        lambda t: t.flatten().sort(),
        lambda t: t.sum(0),
    ):
        got, want = call(x), call(whole)
        many = isinstance(want, tuple)
        for a, b in zip(got if many else [got], want if many else [want], strict=True):
            a = a.full_tensor() if hasattr(a, "full_tensor") else a
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_sharded_tensors_of_int16(run_mesh, ranks):
    run_mesh((ranks,), narrow_tensors)


def strided_and_lazy_views() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    ones = [1] * n
    strided = (torch.arange(6.0) + 10 * rank)[::2]
    assert all_gather_v(strided, [3] * n)[-3:].tolist() == [
        10 * (n - 1) + k for k in (0.0, 2.0, 4.0)
    ]
    assert fused_all_reduce(torch.arange(6.0)[::2]).tolist() == [0, 2 * n, 4 * n]
    source = torch.arange(20.0)[: 4 * n : 2] if rank == 0 else None
    assert scatter_v(source, [2] * n).tolist() == [4 * rank, 4 * rank + 2]
    assert reduce_scatter_v(torch.arange(2.0 * n)[::2], ones).tolist() == [2 * rank * n]
    sent = torch.arange(4.0 * n)[::4] + 100 * rank
    every = all_to_all_v(sent, [ones] * n)
    assert every.tolist() == [4 * rank + 100 * r for r in range(n)]
    image = numbers(2, 3, 4, 4, seed=rank)
    channels_last = image.contiguous(memory_format=torch.channels_last) if rank == 0 else image
    whole = all_gather_v(channels_last, [4] * n, dim=2)
    assert torch.equal(whole, torch.cat([numbers(2, 3, 4, 4, seed=r) for r in range(n)], 2))
    z = torch.tensor([1 + 2j, 3 + 4j])
    assert fused_all_reduce(z.conj()).tolist() == [n * (1 - 2j), n * (3 - 4j)]
    assert fused_all_reduce(z.conj().imag).tolist() == [-2 * n, -4 * n]
    assert all_gather_v(z.conj(), [2] * n).tolist() == [1 - 2j, 3 - 4j] * n
    assert all_to_all_v(z[:1].repeat(n).conj(), [ones] * n).tolist() == [1 - 2j] * n
    with pytest.raises(RuntimeError, match="complex values can only be summed"):
        fused_all_reduce(z, op=dist.ReduceOp.MAX)


def test_J1_J17_strided_and_conjugated_input(run_ranks, ranks):
    run_ranks(ranks, strided_and_lazy_views)


def nothing_to_send() -> None:
    rank = dist.get_rank()
    sizes = [[3, 0], [0, 0]]
    out = all_to_all_v(torch.arange(3.0) if rank == 0 else torch.zeros(0), sizes)
    assert out.tolist() == ([0, 1, 2] if rank == 0 else [])


def test_J3_a_rank_with_nothing_to_send(run_ranks):
    run_ranks(2, nothing_to_send)


def calls_that_do_not_fit() -> list[str]:
    rank = dist.get_rank()
    texts = []
    for call in (
        lambda: fused_all_reduce(torch.ones(4 if rank == 0 else 2)),
        lambda: fused_all_reduce(torch.ones(4, dtype=torch.float32 if rank == 0 else torch.int32)),
        lambda: all_gather_v(torch.ones(4 if rank == 0 else 2), [4, 4]),
        lambda: all_gather_v(torch.ones(2, 3 + rank), [2, 2]),
        lambda: all_gather_v(torch.ones(2), [2, 2] if rank == 0 else [2, 2, 2]),
        lambda: gather_v(torch.ones(2), [2, 2], dst=rank),
        lambda: all_to_all_v(torch.ones(2), [[1, 1], [1, 1]] if rank == 0 else [[2, 0], [0, 2]]),
        lambda: (
            all_gather_v(torch.ones(2), [2, 2]) if rank == 0 else gather_v(torch.ones(2), [2, 2])
        ),
        lambda: scatter_v(None, [1, 1]),
        lambda: indexed_all_to_all_v(
            torch.ones(2), [torch.tensor([0]), torch.tensor([2 * rank])], [[1, 1], [1, 1]]
        ),
    ):
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            call()
        assert time.monotonic() - began < 10
        texts.append(str(caught.value))
    # And the group is in step afterwards.
    assert fused_all_reduce(torch.ones(1)).tolist() == [2]
    return texts


def test_J5_calls_that_do_not_fit_are_refused_on_every_rank(run_ranks):
    for texts in zip(*run_ranks(2, calls_that_do_not_fit), strict=True):
        assert all("rank" in text for text in texts), texts
    here, there = run_ranks(2, calls_that_do_not_fit)
    for text in (here[0], there[0]):
        assert "rank 0: Float [4]" in text
        assert "rank 1: Float [2]" in text
    assert "Int [4]" in here[1]
    assert "expected 4 rows along dim 0 (from sizes)" in there[2]
    assert "another op" in here[7]
    assert "expected a tensor on the source rank" in here[8]
    assert "expected indices in [0, 2)" in there[9]


def tensors_that_have_no_rows() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    sparse = torch.eye(2).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for wrong in (sparse, nested, quantized):
        for call in (lambda x: all_gather_v(x, [2] * n), fused_all_reduce):
            with pytest.raises(RuntimeError, match="expected a dense tensor with memory"):
                call(wrong)
        text = "expected a dense tensor" if rank == 0 else r"rank 0: no tensor to move \(refused"
        with pytest.raises(RuntimeError, match=text):
            scatter_v(wrong, [2] + [0] * (n - 1))
    with pytest.raises(RuntimeError, match=r"outside of torch\.func's transforms"):
        torch.func.grad(lambda x: all_gather_v(x, [2] * n).sum())(torch.ones(2))
    rows = [torch.ones(1, dtype=torch.bool)] * n
    with pytest.raises(RuntimeError, match=r"whole numbers as indices, got Bool; mask\.nonzero"):
        indexed_all_to_all_v(torch.ones(2), rows, [[1] * n] * n)
    with pytest.raises(RuntimeError, match="whole numbers as indices, got Float"):
        indexed_all_to_all_v(torch.ones(2), [torch.zeros(1)] * n, [[1] * n] * n)
    with pytest.raises(RuntimeError, match="expected at most 16 dims, got 17"):
        all_gather_v(torch.ones([1] * 17), [1] * n)
    long = torch.arange(3.0).reshape([1] * 11 + [3])
    own = scatter_v(long if rank == 0 else None, [1] + [0] * (n - 1))
    assert own.shape == (int(rank == 0), *long.shape[1:])
    assert all_gather_v(long, [3] * n, -1).flatten().tolist() == [0, 1, 2] * n


def test_tensors_without_rows_in_memory_are_refused_and_twelve_dims_pass(run_ranks, ranks):
    run_ranks(ranks, tensors_that_have_no_rows)


def other_order_of_two_groups() -> None:
    limit = timedelta(seconds=3)
    groups = [dist.new_group([0, 1], timeout=limit) for _ in range(2)]
    for g in groups:
        fused_all_reduce(torch.ones(1), group=g)
    order = groups if dist.get_rank() == 0 else groups[::-1]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="fused_all_reduce on rank"):
        for g in order:
            fused_all_reduce(torch.ones(2), group=g)
    assert time.monotonic() - began < 15


def test_J9_another_order_of_groups_ends_within_the_timeout(run_ranks):
    run_ranks(2, other_order_of_two_groups)


def sum_over_ranks() -> None:
    rank = dist.get_rank()
    x = torch.ones((), dtype=torch.float64, requires_grad=True)
    y = (rank + 1) * x
    s = fused_all_reduce(y)
    ((rank + 1) * s).backward()
    assert float(x.grad) == [3, 6][rank]
    assert float(y.detach()) == rank + 1


def test_F1_a_sum_over_ranks_keeps_its_gradient(run_ranks):
    run_ranks(2, sum_over_ranks)


def gather_of_a_transpose() -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    weight = torch.arange(6.0).reshape(3, 2)
    whole = all_gather_v(x.t(), [3, 3])
    (whole * torch.cat([weight, 2 * weight])).sum().backward()
    scale = dist.get_rank() + 1
    assert x.grad.tolist() == [[0, 4 * scale, 8 * scale], [2 * scale, 6 * scale, 10 * scale]]


def test_F3_gather_of_a_strided_tensor(run_ranks):
    run_ranks(2, gather_of_a_transpose)


def reduced_loss() -> None:
    rank = dist.get_rank()
    x = (torch.arange(4.0, dtype=torch.float64) + 4 * rank).requires_grad_()
    loss = reduce_loss(x.mean(), dst_rank=1)
    assert loss.shape == (() if rank == 1 else (0,))
    (loss**2).sum().backward()
    assert x.grad.tolist() == [0.875] * 4
    assert reduce_loss(float(rank + 1), dst_rank=1) == (1.5 if rank == 1 else None)
    assert reduce_loss(float(rank + 1), mean=False) == (3 if rank == 0 else None)
    counts = reduce_loss(torch.tensor(rank + 1), dst_rank=1)  # mean() knows no whole numbers
    assert counts.tolist() == (1.5 if rank == 1 else [])
    with pytest.raises(ValueError, match=r"expected one element, got \(4,\)"):
        reduce_loss(x)


def test_F15_a_reduced_loss_keeps_its_gradient(run_ranks):
    run_ranks(2, reduced_loss)


def saved_values_survive() -> None:
    x = torch.ones((), dtype=torch.float64, requires_grad=True)
    y = 2 * x
    z = y * y
    assert float(fused_all_reduce(y.detach())) == 4
    assert float(y) == 2
    z.backward()
    assert float(x.grad) == 8


def test_F19_values_saved_for_backward_are_not_changed(run_ranks):
    run_ranks(2, saved_values_survive)


def many_tensors() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    tree = {
        "b": [torch.full((i, 2), 1.0 + rank) for i in range(10)],
        "a": (torch.tensor(rank), {"flag": torch.tensor([rank == 0])}),
    }
    with shardfield.report() as report:
        out = fused_all_reduce(tree)
    total = n * (n + 1) / 2
    assert list(out) == ["b", "a"]
    assert all(torch.equal(t, torch.full((i, 2), total)) for i, t in enumerate(out["b"]))
    assert int(out["a"][0]) == n * (n - 1) / 2
    assert out["a"][1]["flag"].tolist() == [True]
    # float32, int64 and uint8, beside the comparison of the call.
    messages = sum(row.messages for row in report.rows.values()) if n > 1 else 4
    assert messages == 4, report.table()
    with shardfield.report() as report:
        fused_all_reduce(tree["b"], bucket_bytes=100)
    if n > 1:
        assert sum(row.messages for row in report.rows.values()) > 4
    result, handle = fused_all_reduce(tree["b"], async_op=True)
    assert handle.wait()
    assert torch.equal(result[3], out["b"][3])
    short = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)
    assert fused_all_reduce(short).item() == float(torch.tensor(256.0 + n - 1).bfloat16())
    with pytest.raises(TypeError, match="got str"):
        fused_all_reduce(["no tensor"])


def test_many_tensors_in_few_messages(run_ranks, ranks):
    run_ranks(ranks, many_tensors)


def reduction(op: dist.ReduceOp, serial: Callable[[list[Tensor]], Tensor]) -> None:
    n = dist.get_world_size()
    check(lambda x: fused_all_reduce(x, op=op), lambda xs: [serial(xs)] * n, [[3, 2]] * n, str(op))


def reductions_and_their_gradients() -> None:
    n = dist.get_world_size()
    reduction(dist.ReduceOp.SUM, sum)
    reduction(dist.ReduceOp.AVG, lambda xs: sum(xs) / n)
    reduction(dist.ReduceOp.MAX, lambda xs: torch.stack(xs).amax(0))
    reduction(dist.ReduceOp.MIN, lambda xs: torch.stack(xs).amin(0))
    # All ranks hold the maximum: they share its gradient.
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    fused_all_reduce(x, op=dist.ReduceOp.MAX).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))
    nan = torch.tensor([1.0, float("nan") if dist.get_rank() == n - 1 else 2.0])
    top = fused_all_reduce(nan, op=dist.ReduceOp.MAX)
    assert float(top[0]) == 1
    assert bool(top[1].isnan())
    assert fused_all_reduce(torch.tensor([2.0]), op=dist.ReduceOp.PRODUCT).item() == 2.0**n
    with pytest.raises(RuntimeError, match="no gradient"):
        fused_all_reduce(x, op=dist.ReduceOp.PRODUCT)
    with pytest.raises(RuntimeError, match="floating-point tensors for an average"):
        fused_all_reduce(torch.tensor([1]), op=dist.ReduceOp.AVG)


def test_reductions_and_their_gradients(run_ranks, ranks):
    run_ranks(ranks, reductions_and_their_gradients)


def shared_module() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    rows = numbers(2 * n, 3)
    wanted = torch.autograd.grad(net(rows).pow(2).sum(), list(net.parameters()))
    assert mark_module_as_shared(net, dist.group.WORLD) is net
    with pytest.raises(RuntimeError, match=r"'0\.weight' is marked already"):
        mark_module_as_shared(net, dist.group.WORLD)
    mine = rows[2 * rank : 2 * rank + 2]
    net(mine).pow(2).sum().backward()
    for p, grad in zip(net.parameters(), wanted, strict=True):
        assert_equal(p.grad, grad, "summed once")
    net(mine).pow(2).sum().backward()
    for p, grad in zip(net.parameters(), wanted, strict=True):
        assert_equal(p.grad, 2 * grad, "accumulated")
    net.zero_grad()
    unmark_module_as_shared(net)
    net(mine).pow(2).sum().backward()
    alone = torch.autograd.grad(net(mine).pow(2).sum(), list(net.parameters()))
    for p, grad in zip(net.parameters(), alone, strict=True):
        assert_equal(p.grad, grad, "not summed")
    with pytest.raises(RuntimeError, match="is not marked"):
        unmark_module_as_shared(net)


def test_gradients_of_a_shared_module_are_summed_once(run_ranks, ranks):
    run_ranks(ranks, shared_module)


def short_gradients() -> None:
    """16-bit gradients of rows that many ranks use are added in float32."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    whole = all_gather_v(x, [1] * n)
    scale = 256.0 if rank == 0 else 1.0
    (whole.float() * scale).sum().backward()
    assert x.grad.item() == float(torch.tensor(256.0 + n - 1).bfloat16())
    y = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    picks = [torch.zeros(300, dtype=torch.int64)] * n
    sent = indexed_all_to_all_v(y, picks, [[300] * n] * n)
    sent.float().sum().backward()
    assert y.grad.item() == float(torch.tensor(300.0 * n).bfloat16())


def test_16_bit_gradients_are_added_in_float32(run_ranks, ranks):
    run_ranks(ranks, short_gradients)


def sharded_input_is_refused(mesh) -> None:
    x = shard_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"expected this rank's own tensor.*to_local"):
        all_gather_v(x, [2, 2])
    alone = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="rank 1 is not in the group"):
            all_gather_v(torch.ones(1), [1], group=alone)
    else:
        assert all_gather_v(torch.ones(1), [1], group=alone).tolist() == [1]


def test_sharded_input_and_foreign_groups_are_refused(run_mesh):
    run_mesh((2,), sharded_input_is_refused)

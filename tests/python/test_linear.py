"""linear and the matrix products: which dim is cut on which operand, gradients, bytes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from many_cases import check_cases
from oracle import Cut, assert_equal, check_same_as_serial, is_sharded, numbers, sharded
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardfield

W = numbers(5, 4, seed=3)
B = numbers(5, seed=4)
M = numbers(2, 4, 5, seed=5)

CASES = {
    "linear": lambda x: F.linear(x, W, B),
    "linear_no_bias": lambda x: F.linear(x, W),
    "matmul": lambda x: x @ W.t(),
    "matmul_batched": lambda x: x @ M,
    "matmul_vector": lambda x: x @ W[0],
    "vector_matmul": lambda x: W[0, :3] @ x[:, :3],
    "matmul_self": lambda x: x @ x.transpose(1, 2),
    "matmul_self_contract": lambda x: x.transpose(1, 2) @ x,
    "bmm": lambda x: torch.bmm(x, M),
    "baddbmm": lambda x: torch.baddbmm(x[:, :, :1], x, M, beta=0.5, alpha=2),
    "mm": lambda x: x[0] @ W.t(),
    "addmm": lambda x: torch.addmm(B, x[1], W.t(), beta=2, alpha=3),
    "addmm_beta_0": lambda x: torch.addmm(B * torch.nan, x[1], W.t(), beta=0),
    "mv": lambda x: torch.mv(x[0], W[1]),
    "addmv": lambda x: torch.addmv(x[0, :, 0], x[0], W[1], beta=0.5, alpha=2),
    "dot": lambda x: torch.dot(x[0, :, 0], x[1, :, 1]),
    "addr": lambda x: torch.addr(x[0, :, :], x[0, :, 0], W[1], beta=0.5),
    "outer": lambda x: torch.outer(x[0, :, 0], x[0, 0, :]),
    "merged": lambda x: F.linear(x.reshape(-1, 4), W, B).reshape(2, 7, 5),
    "merged_mm": lambda x: torch.addmm(B, x.reshape(-1, 4), W.t()),
    "einsum_bnc_dc": lambda x: torch.einsum("bnc,dc->bnd", x, W),
    "einsum_attention": lambda x: torch.einsum("bnc,bmc->bnm", x, x),
    "einsum_all": lambda x: torch.einsum("bnc,bnc->", x, x),
    "tensordot": lambda x: torch.tensordot(x, W, dims=([2], [1])),
    "inner": lambda x: torch.inner(x, W),
    "bilinear": lambda x: F.bilinear(x, x, numbers(3, 4, 4, seed=8), B[:3]),
    "four_dims": lambda x: x[:, None].expand(2, 3, 7, 4) @ M[:, None],
}


def all_cases(mesh) -> None:
    check_cases(mesh, CASES, numbers(2, 7, 4), (0, 1, 2), no_fallback=True)


def test_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, all_cases)


def modules(mesh) -> None:
    for dims in itertools.product((0, 1), repeat=mesh.ndim):
        placements = [Shard(d) for d in dims]
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)).double()
        check_same_as_serial(net, [numbers(2, 7, 4)], mesh, placements, output_sharded=True)


def test_modules(run_mesh, mesh_shape):
    run_mesh(mesh_shape, modules)


def both_sharded(mesh) -> None:
    """Every pair of cut dims of the two operands, equal and unequal borders."""
    n = mesh.size()
    a, b = numbers(5, 6), numbers(6, 7, seed=1)
    for da, db in itertools.product((0, 1), (0, 1)):
        for uneven in (False, True):
            sizes = {0: [a.size(da)] + [0] * (n - 1)} if uneven else {}
            check_same_as_serial(
                torch.mm, [Cut(a, [Shard(da)], sizes), Cut(b, [Shard(db)], {})], mesh
            )
    p, q = numbers(3, 5, 6), numbers(3, 6, 4, seed=1)
    for da, db in itertools.product((0, 1, 2), (0, 1, 2)):
        cuts = [Cut(p, [Shard(da)], {}), Cut(q, [Shard(db)], {})]
        check_same_as_serial(torch.bmm, cuts, mesh)
        check_same_as_serial(torch.matmul, [cuts[0], Cut(q[:1], [Shard(db)], {})], mesh)
        check_same_as_serial(torch.matmul, [cuts[0], Cut(q[0], [Shard(db % 2)], {})], mesh)


def test_both_sharded(run_mesh, ranks):
    run_mesh((ranks,), both_sharded)


def two_axes(mesh) -> None:
    """Row cut on one axis and column or inner cut on the other."""
    a, b = numbers(5, 6), numbers(6, 7, seed=1)
    kinds = [Replicate(), Shard(0), Shard(1)]
    for pa, qa, pb, qb in itertools.product(kinds, repeat=4):
        if isinstance(pa, Replicate) and isinstance(qa, Replicate):
            continue
        if isinstance(pb, Replicate) and isinstance(qb, Replicate):
            continue
        check_same_as_serial(
            torch.mm, [Cut(a, [pa, qa], {}), Cut(b, [pb, qb], {})], mesh, second=False
        )


def test_two_axes(run_mesh):
    run_mesh((2, 2), two_axes)


def sharded_weight(mesh) -> None:
    x, w, b = numbers(3, 7, 4), numbers(5, 4, seed=1), numbers(5, seed=2)
    for dim in (0, 1):
        for bias in ([Cut(b, [Shard(0)], {})], []):
            cuts = [Cut(w, [Shard(dim)], {}), *bias]
            check_same_as_serial(lambda *wb: F.linear(x, *wb), cuts, mesh)
            for dx in (0, 1, 2):
                check_same_as_serial(F.linear, [Cut(x, [Shard(dx)], {}), *cuts], mesh)


def test_sharded_weight(run_mesh, ranks):
    run_mesh((ranks,), sharded_weight)


def bias_once(mesh) -> None:
    x = sharded(torch.tensor([[1.0, 2, 3, 4]]), mesh, 1).requires_grad_()
    w = torch.ones(1, 4).requires_grad_()
    b = torch.ones(1).requires_grad_()
    y = F.linear(x, w, b)
    assert not is_sharded(y)
    assert y.item() == 11
    y.sum().backward()
    assert b.grad.item() == 1
    assert_equal(w.grad, torch.tensor([[1.0, 2, 3, 4]]), "weight gradient")
    assert_equal(x.grad, torch.ones(1, 4), "input gradient")


def test_F5_bias_is_added_once(run_mesh):
    run_mesh((4,), bias_once)


def sequence_cut(mesh) -> None:
    torch.manual_seed(0)
    check_same_as_serial(
        nn.Linear(8, 4).double(),
        [numbers(2, 10, 8)],
        mesh,
        [Shard(1)],
        sizes={0: [3, 3, 3, 1]},
        output_sharded=True,
    )


def test_B3_linear_over_a_cut_sequence(run_mesh):
    run_mesh((4,), sequence_cut)


def other_borders(mesh) -> None:
    """A1: equal shapes, other borders: moved, never paired by place."""
    a, b = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3) + 10
    x, y = sharded(a, mesh, 0, [0, 2]), sharded(b, mesh, 0, [1, 1])
    assert_equal(x * y, a * b, "mul")
    assert_equal(torch.linalg.cross(x, y), torch.linalg.cross(a, b), "cross")
    assert_equal(x[:, None] @ y[:, :, None], a[:, None] @ b[:, :, None], "batch dims")
    assert_equal(torch.where(x > 2, x, y), torch.where(a > 2, a, b), "where")


def test_A1_operands_with_other_borders(run_mesh):
    run_mesh((2,), other_borders)


def cross_product(mesh) -> None:
    a = sharded(torch.tensor([[0.0, 1, 2], [3, 4, 5]]), mesh, 0).requires_grad_()
    b = torch.tensor([1.0, 2, 3]).requires_grad_()
    out = torch.linalg.cross(a, b.expand(2, 3))
    assert_equal(out, torch.tensor([[-1.0, 2, -1], [2, -4, 2]]), "cross")
    out.sum().backward()
    assert_equal(b.grad, torch.tensor([2.0, -4, 2]), "gradient of b")
    x = numbers(3, 4, 3)
    other = numbers(3, 4, 3, seed=1)
    for dim in (0, 1, 2):
        for along in (0, 2):
            check_same_as_serial(
                lambda u, v, along=along: torch.linalg.cross(u, v, dim=along),
                [Cut(x, [Shard(dim)], {})],
                mesh,
                plain=[other],
            )


def test_F13_cross_product(run_mesh):
    run_mesh((2,), cross_product)


def messages_of_linear(mesh) -> None:
    """No bytes forward; weight and bias gradient in one all-reduce, nothing else."""
    x = sharded(numbers(2, 8, 4), mesh, 1).requires_grad_()
    layer = nn.Linear(4, 6).double()
    with shardfield.report() as forward:
        y = layer(x)
    assert forward.bytes_sent == 0
    loss = (y * y).sum()
    with shardfield.report() as backward:
        loss.backward()
    linear = [row for (_, op), row in backward.rows.items() if "linear" in op]
    assert sum(row.messages for row in linear) == 1, backward


def test_messages_of_linear(run_mesh):
    run_mesh((2,), messages_of_linear)


def bad_sizes(mesh) -> None:
    x = sharded(numbers(2, 7, 4), mesh, 1)
    for call in (
        lambda: F.linear(x, numbers(5, 3)),
        lambda: x @ numbers(3, 2),
        lambda: torch.mm(x, numbers(4, 2)),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            call()


def test_bad_sizes(run_mesh):
    run_mesh((2,), bad_sizes)


def scripted(mesh) -> None:
    torch.manual_seed(0)
    layer = torch.jit.script(nn.Linear(4, 3).double())
    x = sharded(numbers(2, 7, 4), mesh, 1)
    want = layer(numbers(2, 7, 4))
    for _ in range(3):
        assert_equal(layer(x), want, "scripted linear")


def test_scripted_linear(run_mesh):
    run_mesh((2,), scripted)


def drawn_products(mesh, seed: int) -> None:
    """Batched products: broadcast batch dims, either operand plain or cut anywhere, any borders."""
    draw = random.Random(seed)
    for _ in range(12):
        batch = [draw.randint(1, 4) for _ in range(draw.randint(0, 2))]
        n, k, m = (draw.randint(1, 6) for _ in range(3))
        left = [b if draw.random() < 0.7 else 1 for b in batch] + [n, k]
        right = [b if draw.random() < 0.7 else 1 for b in batch][draw.randint(0, 1) :]
        right += [k, m]
        cuts = []
        for shape in (left, right):
            dims = [draw.randrange(len(shape)) for _ in range(mesh.ndim)]
            sizes = {}
            if mesh.ndim == 1:
                length = shape[dims[0]]
                ends = [0, *sorted(draw.randint(0, length) for _ in range(mesh.size() - 1)), length]
                sizes = {0: [b - a for a, b in itertools.pairwise(ends)]}
            cuts.append(
                Cut(numbers(*shape, seed=draw.randrange(99)), [Shard(d) for d in dims], sizes)
            )
        kind = draw.choice(("both", "left", "right"))
        text = f"{left} @ {right}, cut {[c.placements for c in cuts]} {kind} seed {seed}"
        try:
            if kind == "both":
                check_same_as_serial(torch.matmul, cuts, mesh)
            elif kind == "left":
                check_same_as_serial(torch.matmul, cuts[:1], mesh, plain=[cuts[1].full])
            else:
                check_same_as_serial(
                    lambda b, a: torch.matmul(a, b), cuts[1:], mesh, plain=[cuts[0].full]
                )
        except Exception as error:
            raise AssertionError(text) from error


def test_drawn_products(run_mesh, mesh_shape):
    for seed in range(3):
        print(f"seed {seed}")
        run_mesh(mesh_shape, drawn_products, seed=seed)

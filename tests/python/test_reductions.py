"""Reductions over whole and cut dims: values, positions, kinds, gradients shared among ties."""

from __future__ import annotations

import math
import random

import torch
from many_cases import check_cases
from oracle import Cut, assert_equal, check_same_as_serial, full, is_sharded, numbers, sharded
from torch.distributed.tensor import Shard

INF = math.inf

CASES = {
    "sum": lambda x: x.sum(),
    "sum_12": lambda x: x.sum((1, 2)),
    "mean": lambda x: x.mean(),
    "mean_1": lambda x: x.mean(1, keepdim=True) * x,
    "amax": lambda x: x.amax(),
    "amax_1": lambda x: x.amax(1),
    "amax_02": lambda x: x.amax((0, 2), keepdim=True) + x,
    "amin_1": lambda x: x.amin(1),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max_1": lambda x: x.max(1),
    "max_1_keep": lambda x: x.max(1, keepdim=True),
    "min_2": lambda x: x.min(2),
    "min_0": lambda x: x.min(0),
    "argmax": lambda x: x.argmax(),
    "argmax_1": lambda x: x.argmax(1),
    "argmin_keep": lambda x: x.argmin(2, keepdim=True),
    "argmin": lambda x: x.argmin(),
    "aminmax": lambda x: torch.aminmax(x),
    "aminmax_1": lambda x: torch.aminmax(x, dim=1),
    "prod": lambda x: (x + 1.5).prod(),
    "prod_1": lambda x: x.prod(1),
    "prod_2_keep": lambda x: x.prod(2, keepdim=True),
    "prod_zero": lambda x: (x * (x > 0)).prod(1),
    "var": lambda x: x.var(),
    "var_1": lambda x: x.var(1),
    "var_biased": lambda x: x.var((1, 2), correction=0, keepdim=True),
    "std_0": lambda x: x.std(0),
    "std_12": lambda x: x.std((1, 2)),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "std_mean": lambda x: torch.std_mean(x, (1, 2), keepdim=True),
    "norm": lambda x: x.norm(),
    "norm_1": lambda x: x.norm(dim=1),
    "norm_p1": lambda x: x.norm(1, dim=(1, 2)),
    "norm_p3": lambda x: x.norm(3, dim=1),
    "norm_inf": lambda x: x.norm(INF, dim=1),
    "norm_minus_inf": lambda x: torch.linalg.vector_norm(x, -INF, dim=1),
    "norm_0": lambda x: torch.linalg.vector_norm(x, 0, dim=1),
    "norm_half": lambda x: torch.linalg.vector_norm(x, 0.5, dim=1),
    "norm_negative": lambda x: torch.linalg.vector_norm(x, -1.0, dim=1),
    "norm_zero_vector": lambda x: (x * 0).norm(dim=1) + x.sum(1),
    "frobenius": lambda x: torch.linalg.matrix_norm(x),
    "normalize": lambda x: torch.nn.functional.normalize(x, dim=1),
    "dist": lambda x: torch.dist(x, x * 0.5),
    "logsumexp_1": lambda x: x.logsumexp(1),
    "logsumexp_02": lambda x: x.logsumexp((0, 2), keepdim=True),
    "nansum": lambda x: x.where(x > -1, torch.nan).nansum(1),
    "nanmean": lambda x: x.where(x > -2.5, torch.nan).nanmean(),
    "count_nonzero": lambda x: torch.count_nonzero(x > 0),
    "count_nonzero_1": lambda x: torch.count_nonzero(x > 0, dim=1),
    "any": lambda x: (x > 2).any(),
    "any_1": lambda x: (x > 1).any(1),
    "all_2": lambda x: (x > -1).all(2, keepdim=True),
    "all": lambda x: (x > -9).all(),
    "isnan_any": lambda x: x.isnan().any(),
    "sum_bool": lambda x: (x > 0).sum(1),
    "sum_int": lambda x: (x * 4).int().sum(),
    "merged": lambda x: x.reshape(-1, 5).amax(0),
    "merged_var": lambda x: x.reshape(-1, 5).var(0),
    "merged_argmax": lambda x: x.transpose(0, 1).flatten().argmax(),
    "median_1": lambda x: x.median(1),
    "kthvalue_1": lambda x: x.kthvalue(2, 1),
    "median_2_keep": lambda x: x.median(2, keepdim=True),
    "cov": lambda x: torch.cov(x.flatten(1)),
    "cosine": lambda x: torch.nn.functional.cosine_similarity(x, x.flip(2), dim=1),
}


def all_cases(mesh) -> None:
    check_cases(mesh, CASES, numbers(3, 7, 5), (0, 1, 2), no_fallback=True)


def test_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, all_cases, limit_s=180)


TIES = {
    "amax_1": lambda x: x.amax(1),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin((0, 1)),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max_1": lambda x: x.max(1),
    "min_1": lambda x: x.min(1),
    "max_0": lambda x: x.max(0),
    "norm_inf": lambda x: x.norm(INF, dim=1),
    "argmax": lambda x: x.argmax(),
    "argmax_1": lambda x: x.argmax(1),
    "argmin_0": lambda x: x.argmin(0),
    "aminmax": lambda x: torch.aminmax(x),
}


def ties(mesh) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 3, (3, 8), generator=generator).double()
    check_cases(mesh, TIES, x, (0, 1), no_fallback=True)


def test_ties_as_on_one_device(run_mesh, mesh_shape):
    run_mesh(mesh_shape, ties)


def nans(mesh) -> None:
    x = numbers(4, 6)
    x[1, 4] = x[1, 1] = x[3, 5] = torch.nan
    cases = {
        "amax_1": lambda t: t.amax(1),
        "max_1": lambda t: t.max(1),
        "argmax_1": lambda t: t.argmax(1),
        "argmin": lambda t: t.argmin(),
        "max": lambda t: t.max(),
        "sum_1": lambda t: t.sum(1),
        "nanmean_1": lambda t: t.nanmean(1),
    }
    check_cases(mesh, cases, x, (0, 1), requires_grad=False)


def test_nan_wins_on_every_rank(run_mesh, mesh_shape):
    run_mesh(mesh_shape, nans)


def whole_numbers(mesh) -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool, torch.float32):
        x = torch.randint(0, 5, (3, 7), generator=torch.Generator().manual_seed(1)).to(dtype)
        cases = {
            "sum": lambda t: t.sum(1),
            "prod": lambda t: t.prod(),
            "any": lambda t: t.any(1),
            "all": lambda t: t.all(),
            "amax": lambda t: t.amax(1),
            "amin": lambda t: t.amin(),
        }
        if dtype != torch.bool:
            cases |= {"max_1": lambda t: t.max(1), "argmin": lambda t: t.argmin(0)}
        check_cases(mesh, cases, x, (0, 1), requires_grad=False)


def test_integer_and_bool_dtypes(run_mesh, ranks):
    run_mesh((ranks,), whole_numbers)


def half_precision(mesh) -> None:
    """One rounding, as on one device: many small terms do not stall."""
    x = torch.full((4096,), 0.01, dtype=torch.bfloat16)
    cut = sharded(x, mesh, 0)
    for name in ("sum", "mean", "var", "norm"):
        want, got = getattr(x, name)(), getattr(cut, name)()
        assert got.dtype == torch.bfloat16
        assert abs(float(got) - float(want)) <= 0.01 * abs(float(want)) + 1e-6, (name, got, want)


def test_half_precision(run_mesh, ranks):
    run_mesh((ranks,), half_precision)


def uneven_means(mesh) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    cut = sharded(x, mesh, 0, [2, 1])
    assert float(cut.mean()) == 5.5
    assert_equal(cut.mean(0), torch.tensor([4.0, 5, 6, 7]), "mean over dim 0")
    assert float(sharded(x[:1], mesh, 0, [1, 0]).mean()) == 1.5


def test_C1_mean_of_uneven_pieces(run_mesh):
    run_mesh((2,), uneven_means)


def sum_is_a_plain_number(mesh) -> None:
    x = sharded(torch.tensor([1.0, 2, 3, 4]), mesh, 0)
    p = torch.dot(x, x)
    assert not is_sharded(p)
    values = [float(v) for v in (p, p * 2, p * 3, p / 2, p + 1, 1 - p, p + p, p * p)]
    assert values == [30, 60, 90, 15, 31, -29, 60, 900]


def test_C3_a_sum_is_final(run_mesh):
    run_mesh((2,), sum_is_a_plain_number)


def global_positions(mesh) -> None:
    assert int(sharded(torch.tensor([10.0, 5, 3, 8]), mesh, 0).argmax()) == 0
    value, index = sharded(torch.tensor([1.0, 5, 3, 8, 8, 2]), mesh, 0).max(0)
    assert (float(value), int(index)) == (8, 3)
    assert int(sharded(torch.tensor([4.0, 9]), mesh, 0, [0, 2]).argmax()) == 1


def test_C5_positions_are_global(run_mesh):
    run_mesh((2,), global_positions)


def empty_rank(mesh) -> None:
    for dtype in (torch.float32, torch.int32, torch.uint8):
        x = sharded(torch.tensor([3, 1, 2], dtype=dtype), mesh, 0, [1, 1, 1, 0])
        assert (int(x.min()), int(x.max()), int(x.argmin())) == (1, 3, 1)
        assert (int(x.min(0)[1]), int(x.max(0)[1])) == (1, 0)


def test_C7_extrema_with_an_empty_rank(run_mesh):
    run_mesh((4,), empty_rank)


def many_flags(mesh) -> None:
    flags = sharded(torch.ones(256, dtype=torch.uint8), mesh, 0)
    assert bool(flags.any()) and bool(flags.max())
    assert int(flags.sum()) == 256


def test_C9_flags_do_not_wrap(run_mesh):
    run_mesh((2,), many_flags)


def few_elements(mesh) -> None:
    x = torch.tensor([2.0, -1.0])
    cut = sharded(x, mesh, 0, [1, 1, 0, 0])
    for name in ("sum", "max", "mean", "min", "prod", "norm", "var", "argmax"):
        assert_equal(getattr(cut, name)(), getattr(x, name)(), name)


def test_A7_fewer_elements_than_ranks(run_mesh):
    run_mesh((4,), few_elements)


def squared_mean(mesh) -> None:
    x = sharded(torch.arange(8.0), mesh, 0).requires_grad_()
    (x.mean() ** 2).backward()
    assert is_sharded(x.grad)
    assert_equal(x.grad, torch.full((8,), 0.875), "gradient")


def test_F15_mean_keeps_its_gradient(run_mesh):
    run_mesh((2,), squared_mean)


REDUCED = {
    "sum": lambda t: t.sum(),
    "mean": lambda t: t.mean(),
    "rows": lambda t: (2 * t.sum(0)).sum(),
    "columns": lambda t: t.sum(1).sum(),
    "parts": lambda t: torch.view_as_real(t * (1 + 1j)).sum(-1).square().sum(),
}


def written_gradients(mesh) -> None:
    """The gradient of a sum is one value for many elements, and can be written all the same."""
    for name, function in REDUCED.items():
        for dim in (0, 1):
            want, x = numbers(4, 3).requires_grad_(), sharded(numbers(4, 3), mesh, dim)
            x.requires_grad_()
            for t in (want, x):
                function(t).backward()
                t.grad.mul_(2)
                function(t).backward()
                t.grad[1:3] += 1
            assert_equal(x.grad, want.grad, f"{name}, cut along {dim}")
            x.grad.zero_()


def test_gradients_of_sums_are_written_in_place(run_mesh, ranks):
    run_mesh((ranks,), written_gradients)


def energy(mesh) -> None:
    x = sharded(torch.tensor([1.0, 2, 3, 4]), mesh, 0).requires_grad_()
    (force,) = torch.autograd.grad(-(x * x).sum(), x)
    assert_equal(force, torch.tensor([-2.0, -4, -6, -8]), "force")


def test_F9_force_of_an_energy(run_mesh):
    for n in (1, 2, 4):
        run_mesh((n,), energy)


def comparisons(mesh) -> None:
    x = numbers(5, 4)
    cut = sharded(x, mesh, 0)
    other = x.clone()
    other[-1, -1] += 1
    assert torch.equal(cut, x) and torch.equal(x, cut) and torch.equal(cut, cut.clone())
    assert not torch.equal(cut, other) and not torch.equal(cut, x[:, :3])
    assert torch.allclose(cut, x) and not torch.allclose(cut, other)
    assert sharded(torch.tensor([7.0]), mesh, 0).item() == 7
    assert bool(sharded(torch.tensor([[1]]), mesh, 0))


def test_comparisons_answer_alike_everywhere(run_mesh, ranks):
    run_mesh((ranks,), comparisons)


def drawn_reductions(mesh, seed: int) -> None:
    draw = random.Random(seed)
    ops = ["sum", "mean", "amax", "amin", "var", "std", "logsumexp"]
    for _ in range(12):
        shape = [draw.randint(1, 6) for _ in range(draw.randint(2, 4))]
        axes = [draw.randrange(len(shape)) for _ in range(mesh.ndim)]
        count = draw.randint(1, len(shape))
        dims = sorted(draw.sample(range(len(shape)), count))
        op, keep = draw.choice(ops), draw.random() < 0.5
        if op in ("var", "std") and math.prod(shape[d] for d in dims) < 2:
            op = "sum"
        x = numbers(*shape, seed=draw.randrange(1000))
        try:
            check_same_as_serial(
                lambda t, op=op, dims=dims, keep=keep: getattr(t, op)(dims, keepdim=keep),
                [Cut(x, [Shard(d) for d in axes], {})],
                mesh,
            )
        except Exception as error:
            raise AssertionError(f"{op} {shape} dims {dims} cut {axes} seed {seed}") from error


def test_drawn_reductions(run_mesh, mesh_shape):
    for seed in range(3):
        print(f"seed {seed}")
        run_mesh(mesh_shape, drawn_reductions, seed=seed)


def lone_sharded_values(mesh) -> None:
    x = sharded(numbers(4, 4), mesh, 0)
    assert float(full(x.trace())) == float(numbers(4, 4).trace())


def test_trace(run_mesh):
    run_mesh((2,), lone_sharded_values)

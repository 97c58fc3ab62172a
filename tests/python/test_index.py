"""Reading and writing by index on whole and cut dims; no write may be lost."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from many_cases import check_cases, layouts_of
from oracle import (
    Cut,
    assert_equal,
    check_same_as_serial,
    full,
    is_sharded,
    numbers,
    scatter,
    sharded,
)
from torch.distributed.tensor import Shard

IDX = torch.tensor([4, 0, 6, 6, 2, -1])
IDX2 = torch.tensor([[1, 0], [3, 3]])
PLAIN_MASK = numbers(3, 7, 4, seed=9) > 0
ROWS = numbers(6, 4, seed=3)

READS = {
    "int_0": lambda x: x[1] * 2,
    "int_1": lambda x: x[:, 3] * 2,
    "int_last": lambda x: x[..., -1] * 2,
    "int_int": lambda x: x[1, 2] * 2,
    "element": lambda x: x[1, 2, 3] * 2,
    "element_flat": lambda x: x[0, :, 0][5] * 3,
    "iterate": lambda x: sum(row * (i + 1) for i, row in enumerate(x.unbind(1))),
    "list": lambda x: x[:, IDX],
    "list_0": lambda x: x[[2, 0, 2]],
    "list_last": lambda x: x[..., [3, 1]],
    "index_2d": lambda x: x[:, IDX2],
    "pairs": lambda x: x[[0, 2, 1], [1, 6, 3]],
    "pairs_apart": lambda x: x[[0, 2, 1], :, [1, 3, 3]],
    "broadcast_pairs": lambda x: x[torch.tensor([[0], [2]]), IDX],
    "slice_then_list": lambda x: x[:, 1:, [0, 2]],
    "plain_mask": lambda x: x[PLAIN_MASK],
    "own_mask": lambda x: x[x > 0],
    "own_mask_sum": lambda x: x[x.detach() > 0.3].sum(),
    "row_mask": lambda x: x[:, torch.tensor([1, 0, 0, 1, 1, 0, 1]).bool()],
    "lead_mask": lambda x: x[x.detach().sum(2) > 0],
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "masked_select_plain": lambda x: torch.masked_select(x, PLAIN_MASK[:1]),
    "index_select": lambda x: x.index_select(1, torch.tensor([5, 5, 0, 3])),
    "index_select_0": lambda x: x.index_select(0, torch.tensor([2, 1])),
    "gather_1": lambda x: x.gather(1, (x.detach() * 10).long().abs() % 7),
    "gather_plain": lambda x: x.gather(1, IDX2.reshape(1, 2, 2).expand(3, 2, 2).abs()),
    "gather_2": lambda x: x.gather(2, x.detach().argsort(2)),
    "take_along_dim": lambda x: torch.take_along_dim(x, x.detach().argsort(1), 1),
    "sort_1": lambda x: x.sort(1),
    "sort_stable": lambda x: x.sort(dim=2, descending=True, stable=True),
    "argsort": lambda x: x.argsort(1),
    "topk": lambda x: x.topk(3, 1),
    "cumsum_1": lambda x: x.cumsum(1),
    "cumprod_1": lambda x: x.cumprod(1),
    "cummax_2": lambda x: x.cummax(2),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "where": lambda x: torch.where(x > 0, x * 2, x * x),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.5),
    "masked_fill_plain": lambda x: x.masked_fill(PLAIN_MASK, -1) * x,
    "one_hot": lambda x: F.one_hot((x.detach() > 0).long(), 2) * x[..., None],
}


def reads(mesh) -> None:
    check_cases(mesh, READS, numbers(3, 7, 4), (0, 1, 2), no_fallback=True)


def test_reads_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, reads, limit_s=180)


def set_(x, key, value):
    x[key] = value
    return x


WRITES = {
    "int_0": lambda x: set_(x, 1, 5.0),
    "int_1": lambda x: set_(x, (slice(None), 3), 5.0),
    "int_row": lambda x: set_(x, (slice(None), 6), ROWS[0]),
    "int_last": lambda x: set_(x, (..., 3), 1.0),
    "element": lambda x: set_(x, (1, 2, 3), 7.0),
    "zero_row": lambda x: [x[:, 0].zero_(), x][1],
    "fill_last": lambda x: [x[..., 3].fill_(1), x][1],
    "add_row": lambda x: [x[:, 5].add_(x[:, 1]), x][1],
    "row_from_row": lambda x: set_(x, (slice(None), 0), x[:, 6]),
    "inplace_item": lambda x: [x[0].mul_(3), x][1],
    "slice": lambda x: set_(x, (slice(None), slice(1, 6, 2)), 0.0),
    "slice_tensor": lambda x: set_(x, (0, slice(1, 7)), ROWS),
    "list": lambda x: set_(x, (slice(None), [5, 0, 2]), 3.0),
    "list_rows": lambda x: set_(x, (0, [1, 4, 6, 0, 2, 3]), ROWS),
    "list_middle": lambda x: set_(x, (slice(None), [1, 6]), ROWS[:2]),
    "pairs": lambda x: set_(x, ([0, 2, 1], [1, 6, 3]), ROWS[:3]),
    "pairs_apart": lambda x: set_(x, ([0, 2], slice(None), [1, 3]), -2.0),
    "negative": lambda x: set_(x, (slice(None), [-1, -7]), 9.0),
    "mask_plain": lambda x: set_(x, PLAIN_MASK, 0.0),
    "mask_own": lambda x: set_(x, x.detach() > 0, 0.25),
    "mask_rows": lambda x: set_(x, (slice(None), torch.arange(7) % 2 == 0), 4.0),
    "mask_lead": lambda x: set_(x, x.detach().sum(2) > 0, 1.5),
    "mask_values": lambda x: set_(x, PLAIN_MASK, torch.arange(int(PLAIN_MASK.sum())).double()),
    "accumulate": lambda x: x.index_put(
        (torch.tensor([0, 0, 2]), torch.tensor([1, 1, 6])), ROWS[:3], accumulate=True
    ),
    "masked_fill_": lambda x: x.masked_fill_(x.detach() > 0, 2.0),
    "diagonal_free": lambda x: set_(x, (slice(None), [0, 1, 2], [0, 1, 2]), 8.0),
}


def writes(mesh) -> None:
    """Values, and gradients through the write (on a copy, so that the leaf stays)."""
    cases = {name: lambda x, f=f: f(x * 1) * 2 for name, f in WRITES.items()}
    check_cases(mesh, cases, numbers(3, 7, 4), (0, 1, 2), no_fallback=True)


def test_writes_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, writes, limit_s=180)


def writes_without_grad(mesh) -> None:
    x = numbers(3, 7, 4)
    for layout, cut in layouts_of(mesh, (0, 1, 2), x):
        for name, write in WRITES.items():
            for mode in (torch.no_grad, torch.inference_mode):
                from oracle import scatter

                with mode():
                    ours, want = scatter(cut, mesh).clone(), x.clone()
                    a, b = write(ours), write(want)
                    assert_equal(a, b, f"{name} [{layout}]")
                    if name != "accumulate":
                        assert_equal(ours, want, f"{name} [{layout}] in place")


def test_writes_reach_the_tensor(run_mesh, mesh_shape):
    run_mesh(mesh_shape, writes_without_grad, limit_s=180)


def one_element(mesh) -> None:
    x = sharded(torch.arange(5.0), mesh, 0)
    x[3] = 9
    x[0] += 2
    assert_equal(x, torch.tensor([2.0, 1, 2, 9, 4]), "elements of a 1-d tensor")
    leaf = sharded(torch.arange(5.0), mesh, 0).requires_grad_()
    y = leaf * 2
    y[3] = 9
    y[1].mul_(3)
    y.sum().backward()
    assert_equal(leaf.grad, torch.tensor([2.0, 6, 2, 0, 2]), "gradient past the writes")


def test_elements_of_a_vector(run_mesh, ranks):
    run_mesh((ranks,), one_element)


def plain_value_gradient(mesh) -> None:
    """Written plain values get a plain, whole gradient."""
    value = numbers(2, 4, seed=5).requires_grad_()
    x = sharded(numbers(3, 7, 4), mesh, 1) * 1.0
    y = x.index_put((torch.tensor([0, 2]), torch.tensor([1, 6])), value)
    (y * y).sum().backward()
    assert not is_sharded(value.grad)
    assert_equal(value.grad, 2 * value.detach(), "gradient of the values")


def test_gradient_of_written_values(run_mesh, ranks):
    run_mesh((ranks,), plain_value_gradient)


def lookups(mesh) -> None:
    """Sharded positions in plain tables: embedding, table[idx], index_select."""
    table = numbers(11, 3)
    index = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(2))
    for dim in (0, 1):
        for function in (
            lambda i, t: F.embedding(i, t),
            lambda i, t: F.embedding(i, t, padding_idx=2),
            lambda i, t: F.embedding(i, t, scale_grad_by_freq=True),
            lambda i, t: t[i],
            lambda i, t: t[:, :2].t()[:, i],
            lambda i, t: t.index_select(0, i[0]),
            lambda i, t: torch.nn.functional.one_hot(i).double() @ t,
        ):
            placements = [Shard(dim)] * mesh.ndim if mesh.ndim == 1 else [Shard(0), Shard(1)]
            check_same_as_serial(
                function, [Cut(index, placements, {})], mesh, plain=[table], second=False
            )
        check_same_as_serial(
            lambda t: F.embedding(index, t),
            [Cut(numbers(11, 4), [Shard(dim)] * mesh.ndim, {})],
            mesh,
            second=False,
        )


def test_lookups(run_mesh, mesh_shape):
    run_mesh(mesh_shape, lookups)


def labels_of_rows(mesh) -> None:
    """x[arange(n), label]: every rank reads its own rows, whatever the labels' kind."""
    n, x = 11, numbers(11, 4, 3)
    label = torch.arange(n) % 3 - 1
    rows = torch.arange(n)
    for read in (
        lambda t, i: t[rows, i],
        lambda t, i: t[rows, :, i],
        lambda t, i: t.transpose(0, 1)[:, rows, i],
    ):
        for sharded_label in (False, True):
            ours = sharded(label, mesh, 0) if sharded_label else label
            check_same_as_serial(
                lambda t, r=read, o=ours: r(t, o if is_sharded(t) else label),
                [x],
                mesh,
                [Shard(0)],
                output_sharded=True,
            )
    backwards = sharded(x, mesh, 0)[rows.flip(0), label]
    assert_equal(backwards, x[rows.flip(0), label], "rows in another order")


def tables_of_neighbours(mesh) -> None:
    """x[:, neighbours] of a cut dim stays cut along the rows, as long as each rank has a line."""
    x = numbers(2, 12, 3)
    generator = torch.Generator().manual_seed(5)
    for lines in (12, 7, 5):
        table = torch.randint(-12, 12, (lines, 4), generator=generator)
        for sizes in ({}, {0: [1] * (mesh.size() - 1) + [13 - mesh.size()]}):
            check_same_as_serial(
                lambda t, i=table: t[:, i].amax(2),
                [x],
                mesh,
                [Shard(1)],
                sizes=sizes,
                output_sharded=True,
            )
            y = scatter(Cut(x, [Shard(1)], sizes), mesh)[:, table]
            assert y.placements == (Shard(1),)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_tables_of_neighbours(run_mesh, size):
    run_mesh((size,), tables_of_neighbours)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_labels_of_rows(run_mesh, size):
    run_mesh((size,), labels_of_rows)


def dynamic_slices(mesh) -> None:
    x = sharded(torch.arange(8.0), mesh, 0)
    assert full(x[5:7]).tolist() == [5, 6]
    assert full(x[7:8]).tolist() == [7]
    assert full(x[1:5]).tolist() == [1, 2, 3, 4]


def test_B9_slices_of_a_cut_dim(run_mesh, ranks):
    run_mesh((ranks,), dynamic_slices)


def out_of_range(mesh) -> None:
    x = sharded(numbers(3, 7), mesh, 1)
    for call in (
        lambda: x[:, [7]],
        lambda: x[:, 7],
        lambda: x[3],
        lambda: set_(x, (slice(None), [7]), 0.0),
        lambda: x.index_select(1, torch.tensor([-1])),
        lambda: x[torch.zeros(2, 7).bool()],
    ):
        with pytest.raises((IndexError, RuntimeError)):
            call()


def test_out_of_range(run_mesh):
    run_mesh((2,), out_of_range)

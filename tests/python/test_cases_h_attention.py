"""CASES, kind H: attention over a split sequence."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from oracle import Cut, assert_equal, check_same_as_serial, full, is_sharded, numbers, sharded
from torch import Tensor, nn
from torch.distributed.tensor import Shard


def odd_length(mesh) -> None:
    ones = torch.ones(1, 1, 7, 1, dtype=torch.float64)
    values = torch.arange(7.0, dtype=torch.float64).view(1, 1, 7, 1)
    q, k, v = (sharded(t, mesh, 2) for t in (ones, ones, values))
    causal = full(F.scaled_dot_product_attention(q, k, v, is_causal=True)).flatten()
    assert_equal(causal, torch.arange(7, dtype=torch.float64) / 2, "causal", atol=1e-14)
    first = full(F.scaled_dot_product_attention(q, k, v)).flatten()
    assert_equal(first, torch.full((7,), 3.0, dtype=torch.float64), "full", atol=1e-14)
    for _ in range(4):
        assert torch.equal(full(F.scaled_dot_product_attention(q, k, v)).flatten(), first)


@pytest.mark.parametrize("world", [2, 4])
def test_h1_no_padding_of_odd_lengths(run_mesh, world):
    run_mesh((world,), odd_length)


def gradients(mesh) -> None:
    for dtype, atol in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        q, k, v = (numbers(1, 2, 7, 4, seed=s, dtype=dtype) for s in range(3))
        cuts = [Cut(t, [Shard(2)]) for t in (q, k, v)]
        check_same_as_serial(
            F.scaled_dot_product_attention, cuts, mesh, second=False, atol=atol, rtol=atol
        )


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_h3_gradients_use_the_whole_softmax(run_mesh, world):
    run_mesh((world,), gradients)


def merged(mesh) -> None:
    inf = math.inf
    for parts, want in (((0, 200), 200), ((-inf, 5), 5), ((-inf, -inf), -inf), ((inf, 0), inf)):
        x = torch.tensor(parts, dtype=torch.float64)
        got = torch.logsumexp(sharded(x, mesh, 0), 0)
        assert_equal(full(got), torch.tensor(float(want), dtype=torch.float64), f"{parts}")
    x = torch.tensor([[0.0, 200], [-inf, 5], [1e3, -1e3]], dtype=torch.float64)
    assert_equal(full(sharded(x, mesh, 1).softmax(1)), x.softmax(1), "softmax")
    assert_equal(full(sharded(x, mesh, 1).log_softmax(1)), x.log_softmax(1), "log_softmax")


def test_h5_merge_of_sums_of_exponentials(run_mesh):
    run_mesh((2,), merged)


def masks(mesh) -> None:
    q, k, v = (numbers(2, 3, 8, 4, seed=s) for s in range(3))
    rows = [Cut(t, [Shard(2)]) for t in (q, k, v)]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    for mask, dim in ((numbers(8, 8, seed=4), 0), (numbers(3, 8, 8, seed=5), 0)):
        for cut in (dim, mask.dim() - 2, mask.dim() - 1):
            check_same_as_serial(attend, [*rows, Cut(mask, [Shard(cut)])], mesh, second=False)
    key_mask = numbers(2, 1, 1, 8, seed=6) > -0.5
    check_same_as_serial(attend, rows, mesh, plain=[key_mask], second=False)
    check_same_as_serial(attend, [*rows, Cut(key_mask, [Shard(3)])], mesh, second=False)


def test_h7_masks_are_aligned_from_the_right(run_mesh):
    run_mesh((2,), masks)


class Block(nn.Module):
    """One attention block that notes how many tokens its rank holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.out = nn.Linear(8, 24).double(), nn.Linear(8, 8).double()
        self.held: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        if is_sharded(y):
            self.held.append(y.to_local().shape[2])
        return self.out(y.transpose(1, 2).flatten(2))


def local_tokens(mesh) -> None:
    net = Block()
    check_same_as_serial(net, [numbers(2, 12, 8)], mesh, [Shard(1)], second=False)
    assert net.held == [12 // mesh.size()]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_h9_a_rank_holds_its_share_of_the_tokens(run_mesh, world):
    run_mesh((world,), local_tokens)


def slices(x: Tensor) -> Tensor:
    """Physics attention (Transolver): points -> slices -> points, each sample on its own."""
    torch.manual_seed(3)
    assign, query = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 12, dtype=torch.float64)
    weights = (x @ assign).softmax(-1)
    tokens = torch.einsum("bng,bnc->bgc", weights, x) / (weights.sum(1).unsqueeze(-1) + 1e-5)
    q, k, v = (tokens @ query).chunk(3, -1)
    mixed = F.scaled_dot_product_attention(q, k, v)
    return torch.einsum("bgc,bng->bnc", mixed, weights)


def physics(mesh) -> None:
    for sizes in ([5, 2], [7, 0]):
        check_same_as_serial(
            slices, [numbers(2, 7, 4)], mesh, [Shard(1)], sizes={0: sizes}, second=False
        )


def test_h11_slices_of_uneven_points(run_mesh):
    run_mesh((2,), physics)

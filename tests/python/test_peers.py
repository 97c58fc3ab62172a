"""Silent faults of comparable systems (findings 1, 3, 4 and 11), with the right values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import Cut, check_same_as_serial, numbers, sharded
from torch.distributed.tensor import Shard


def cross_entropy(mesh, weighted: bool, sizes: list[int] | None) -> None:
    target = (numbers(2, 10, 4, seed=1) > 0).long() + (numbers(2, 10, 4, seed=2) > 0.5).long()
    target[0, 3, 1] = -100
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64) if weighted else None
    cut = {0: sizes} if sizes else {}
    from oracle import scatter

    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.1):
            ours = scatter(Cut(target, [Shard(1)], cut), mesh)

            def function(x, r=reduction, s=smoothing, t=ours):
                labels = t if x.shape and hasattr(x, "to_local") else target
                return F.cross_entropy(x, labels, weight, reduction=r, label_smoothing=s)

            check_same_as_serial(function, [Cut(numbers(2, 3, 10, 4), [Shard(2)], cut)], mesh)


def halves_of_a_mask(mesh) -> list[float]:
    torch.manual_seed(0)
    x = sharded(torch.ones(2000), mesh, 0)
    y = F.dropout(x, 0.5)
    return y.to_local().tolist()


def test_finding_3_dropout_halves_differ(run_mesh):
    left, right = run_mesh((2,), halves_of_a_mask)
    agree = sum(a == b for a, b in zip(left, right, strict=True))
    assert 400 < agree < 600


OPERATORS = {
    "quantile": lambda x: torch.quantile(x, 0.3),
    "vector_matrix": lambda x: x[0] @ x.t(),
    "histc": lambda x: torch.histc(x.detach(), 5, -2, 2),
    "amax": lambda x: x.amax(0),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x.view(1, *x.shape), 1),
    "norm_inf": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "view": lambda x: x.view(-1) * 2,
    "sum_keepdim": lambda x: x.sum(0, keepdim=True),
    "addmm": lambda x: torch.addmm(x[:, :1], x, x.t()),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([0], [0])),
    "masked_select": lambda x: x[x > 0],
    "nonzero": lambda x: (x.detach() > 0).nonzero(),
    "index_list": lambda x: x[[0, 3, 5]],
    "unbind": lambda x: x.unbind(0),
    "cumprod": lambda x: x.cumprod(0),
    "cumsum": lambda x: x.cumsum(0),
    "unfold": lambda x: x.unfold(0, 3, 2) * 1,
    "negative_pad": lambda x: F.pad(x, (0, 0, -1, -2)),
    "select": lambda x: x.select(0, 4) * 2,
    "median": lambda x: x.median(),
    "sort": lambda x: x.sort(0).values,
}


def operator(mesh, name: str, sizes: list[int] | None) -> None:
    if name == "unfold":  # a view that no piece can give: refused, never a copy that loses writes
        with pytest.raises(RuntimeError, match=r"unfold: .*full_tensor"):
            OPERATORS[name](sharded(numbers(7, 5), mesh, 0, sizes))
        return
    check_same_as_serial(
        OPERATORS[name],
        [Cut(numbers(7, 5), [Shard(0)], {0: sizes} if sizes else {})],
        mesh,
        second=name not in ("histc", "nonzero", "norm_inf", "cumprod"),
        no_fallback=False,
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_finding_11_operators_silent_or_failing_elsewhere(run_mesh, name):
    run_mesh((2,), operator, name=name, sizes=None)
    run_mesh((3,), operator, name=name, sizes=[4, 0, 3])

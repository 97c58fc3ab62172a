"""Published cases, kind G: random numbers, and independence of the layout."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from oracle import Cut, assert_equal, full, is_sharded, numbers, scatter, sharded
from rank_pool import mesh_of
from shardfield.domain_parallel import shard_tensor, sync_module_over_mesh
from torch import nn
from torch.distributed.tensor import Shard

DRAWS = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "normal_": lambda x: torch.empty_like(x).normal_(2.0, 3.0),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1.0, 2.0),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout2d": lambda x: F.dropout2d(x[None, :, :, None], 0.4)[0, :, :, 0],
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[None], 0.4, True)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "exponential_": lambda x: torch.empty_like(x).exponential_(0.5),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(1.0, 2.0),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.5, 0.7),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "normal of deviations": lambda x: torch.normal(1.0, x),
    "normal of both": lambda x: torch.normal(x, x + 1),
    "rrelu": lambda x: F.rrelu(-x.abs() - 1, training=True),
}


def drawn(mesh, name: str, dims: tuple[int, ...], sizes: list[int] | None) -> list:
    torch.manual_seed(0)
    cut = Cut(
        torch.ones(6, 4, dtype=torch.float64), [Shard(d) for d in dims], {0: sizes} if sizes else {}
    )
    x = scatter(cut, mesh)
    values = DRAWS[name](x)
    assert is_sharded(values)
    again = DRAWS[name](x)
    assert not torch.equal(full(values), full(again)), "two draws are equal"
    return full(values).tolist()


LAYOUTS = [
    ((1,), (0,), None),
    ((2,), (0,), None),
    ((2,), (1,), None),
    ((3,), (0,), [5, 0, 1]),
    ((3,), (1,), None),
    ((4,), (0,), None),
    ((4,), (1,), None),
    ((2, 2), (0, 1), None),
    ((2, 2), (1, 0), None),
]


@pytest.mark.parametrize("name", DRAWS)
def test_G1_random_values_do_not_depend_on_the_layout(run_mesh, name):
    seen = [
        result
        for shape, dims, sizes in LAYOUTS
        for result in run_mesh(shape, drawn, name=name, dims=dims, sizes=sizes)
    ]
    assert all(values == seen[0] for values in seen)
    flat = torch.tensor(seen[0]).flatten()
    assert len(flat.unique()) > 1


def masks_on_two_axes() -> list:
    mesh = mesh_of((2, 2), ("data", "domain"))
    torch.manual_seed(10 + mesh.get_local_rank(0))  # data ranks differ on purpose
    if mesh.get_local_rank(1) == 1:
        torch.rand(7)  # one domain rank has drawn more than the other
    net = nn.Dropout(0.5)
    sync_module_over_mesh(net, mesh["domain"])
    plain = net(torch.ones(64))
    x = shard_tensor(torch.ones(64), mesh["domain"], [Shard(0)])
    y = net(x)
    return [plain.tolist(), full(y).tolist(), y.to_local().tolist()]


def test_G3_masks_on_a_data_and_a_domain_axis(run_ranks):
    results = run_ranks(4, masks_on_two_axes)  # rank = 2 * data + domain
    plain, whole, piece = zip(*results, strict=True)
    assert plain[0] == plain[1] and plain[2] == plain[3], "plain tensors share a mask over domain"
    assert plain[0] != plain[2], "data ranks draw different masks"
    assert whole[0] == whole[1] and whole[2] == whole[3] and whole[0] != whole[2]
    assert piece[0] != piece[1], "the two halves have different masks"


def dropout_gradient(mesh) -> None:
    torch.manual_seed(3)
    x = sharded(numbers(50), mesh, 0).requires_grad_()
    y = F.dropout(x, 0.5)
    y.sum().backward()
    kept = full(y.detach()) != 0
    assert_equal(x.grad, kept.double() * 2, "gradient is the mask")
    assert 5 < int(kept.sum()) < 45
    assert torch.equal(full(F.dropout(x, 0.5, training=False)), full(x.detach()))


def test_dropout_gradient_is_its_mask(run_mesh, mesh_shape):
    if len(mesh_shape) == 1:
        run_mesh(mesh_shape, dropout_gradient)
    else:
        run_mesh(mesh_shape, drawn, name="dropout", dims=(0, 1), sizes=None)


# Case G5: the parity tests by name; a test that vanishes in a merge fails this one.
ROWS = {
    "a": ["A1", "A3", "A5", "A7", "A9", "A11"],
    "b": ["B1", "B3", "B5", "B7", "B9", "B11", "B13", "B15"],
    "c": ["C1", "C3", "C5", "C7", "C9", "C11", "C13"],
    "d": ["D1", "D3", "D5", "D7", "D9", "D11", "D13", "D15", "D17"],
    "e": ["E1", "E3", "E5", "E7", "E9"],
    "f": ["F1", "F3", "F5", "F7", "F9", "F11", "F13", "F15", "F17", "F19"],
    "g": ["G1", "G3", "G5"],
    "j": ["J1", "J3", "J5", "J11", "J15", "J17"],
}


# Rows with tests beside what they are about: ranks, groups, launchers, transforms, checkpoints.
ELSEWHERE = {
    "i": ["I1", "I3", "I5", "I7", "I9", "I11"],
    "j": ["J7", "J9", "J13"],
    "k": ["K1", "K3", "K5", "K7"],
    "n": ["N1", "N3", "N5", "N7"],
    "p": [f"P{i}" for i in range(1, 13)],
}


def names_of_tests(pattern: str) -> list[str]:
    return [
        node.name.lower()
        for path in Path(__file__).parent.glob(pattern)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


@pytest.mark.parametrize("kind", ROWS)
def test_G5_every_parity_test_is_there(kind):
    names = names_of_tests(f"test_cases_{kind}_*.py")
    for row in ROWS[kind]:
        assert any(name.startswith(f"test_{row.lower()}_") for name in names), f"{row} has no test"


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_G5_every_test_of_the_runtime_is_there(kind):
    names = names_of_tests("test_*.py")
    for row in ELSEWHERE[kind]:
        assert any(f"_{row.lower()}_" in name for name in names), f"{row} has no test"

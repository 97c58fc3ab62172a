"""PyTorch Geometric's layers, unchanged, on nodes and edges cut over the ranks.

Outputs, gradients of features and weights, batch statistics and pooling equal serial; nodes are
never gathered.
"""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import Cut, assert_equal, full, is_sharded, numbers, scatter
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import shardfield

NODES, EDGES, WIDTH = 13, 37, 4
LINKS = torch.randint(0, NODES, (2, EDGES), generator=torch.Generator().manual_seed(5))
LINKS = LINKS[:, LINKS[0] != LINKS[1]]
GRAPH_OF_NODE = torch.arange(NODES) * 3 // NODES


class Block(nn.Module):
    """An encode-process block as mesh networks have it: edge update, sum, node update."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(3 * WIDTH, WIDTH), nn.SiLU(), nn.LayerNorm(WIDTH))
        self.node = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        from torch_geometric.utils import scatter as scatter_rows

        ends = torch.cat([x[links[0]], x[links[1]], x[links[0]] - x[links[1]]], -1)
        messages = self.edge(ends)
        total = scatter_rows(messages, links[1], dim=0, dim_size=x.size(0), reduce="sum")
        return x + self.node(torch.cat([x, total], -1))


class Pooled(nn.Module):
    """Batch norm between two convolutions, then one value per graph."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import BatchNorm, GCNConv

        self.first, self.norm, self.last = (
            GCNConv(WIDTH, WIDTH),
            BatchNorm(WIDTH),
            GCNConv(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        from torch_geometric.nn import global_add_pool, global_max_pool, global_mean_pool

        y = self.last(torch.relu(self.norm(self.first(x, links))), links)
        graph = GRAPH_OF_NODE
        if is_sharded(x):
            graph = scatter(Cut(graph, x._spec.placements), x._spec.mesh)
        sums = global_add_pool(y, graph, size=3) + global_mean_pool(y, graph, size=3)
        return sums + global_max_pool(y, graph, size=3)


def layer(name: str) -> nn.Module:
    from torch_geometric import nn as pyg

    torch.manual_seed(0)
    perceptron = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    made: nn.Module = {
        "GCN": lambda: pyg.GCNConv(WIDTH, WIDTH),
        "SAGE": lambda: pyg.SAGEConv(WIDTH, WIDTH),
        "SAGE-max": lambda: pyg.SAGEConv(WIDTH, WIDTH, aggr="max"),
        "GAT": lambda: pyg.GATConv(WIDTH, WIDTH, heads=2, concat=False),
        "GATv2": lambda: pyg.GATv2Conv(WIDTH, WIDTH),
        "GIN": lambda: pyg.GINConv(perceptron, train_eps=True),
        "EdgeConv": lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())),
        "GatedGraph": lambda: pyg.GatedGraphConv(WIDTH, 2),
        "MeshGraphNet block": Block,
        "pooled": Pooled,
    }[name]()
    return made.double()


NAMES = [
    "GCN",
    "SAGE",
    "SAGE-max",
    "GAT",
    "GATv2",
    "GIN",
    "EdgeConv",
    "GatedGraph",
    "MeshGraphNet block",
    "pooled",
]


def same_as_serial(mesh, name: str) -> None:
    model = layer(name)
    serial_model = copy.deepcopy(model)
    axes = [Replicate()] * (mesh.ndim - 1)
    x = numbers(NODES, WIDTH).requires_grad_()
    want = serial_model(x, LINKS)
    (want * numbers(*want.shape, seed=9)).sum().backward()
    ours = scatter(Cut(x.detach(), [*axes, Shard(0)]), mesh).detach().requires_grad_()
    links = scatter(Cut(LINKS, [*axes, Shard(1)]), mesh)
    with shardfield.report() as report:
        got = model(ours, links)
        (got * numbers(*want.shape, seed=9)).sum().backward()
    assert_equal(full(got), want, "output", rtol=1e-8)
    assert_equal(full(ours.grad), x.grad, "input gradient", rtol=1e-8)
    for (key, mine), theirs in zip(
        model.named_parameters(), serial_model.parameters(), strict=True
    ):
        assert_equal(mine.grad, theirs.grad, f"gradient of {key}", rtol=1e-8)
    for (key, mine), theirs in zip(model.named_buffers(), serial_model.buffers(), strict=True):
        assert_equal(full(mine), theirs, f"buffer {key}", rtol=1e-8)
    assert not report.fallbacks, dict(report.fallbacks)
    assert name == "pooled" or is_sharded(got)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (4,), (2, 2)], ids=str)
def test_same_as_serial(run_mesh, name, shape):
    run_mesh(shape, same_as_serial, name=name)


def several_kinds(mesh) -> None:
    """Attention between kinds of nodes; its weights per kind write blocks of flattened heads."""
    from torch_geometric.nn import HGTConv

    kinds = ["a", "b"], [("a", "to", "b"), ("b", "back", "a")]
    features = [numbers(NODES, WIDTH), numbers(6, WIDTH, seed=1)]
    links = torch.stack([LINKS[0], LINKS[1] % 6])
    torch.manual_seed(0)
    model = HGTConv(WIDTH, WIDTH, kinds, heads=2).double()

    def run(a: Tensor, b: Tensor, to: Tensor, back: Tensor) -> list[Tensor]:
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        out = model({"a": a, "b": b}, {kinds[1][0]: to, kinds[1][1]: back})
        loss = sum((out[k] * out[k]).sum() for k in "ab")
        weights = list(model.parameters())
        gradients = torch.autograd.grad(loss, [a, b, *weights], allow_unused=True)
        return [out["a"], out["b"], *(g for g in gradients if g is not None)]

    want = run(*features, links, links.flip(0))
    cut = [scatter(Cut(t, [Shard(0)]), mesh) for t in features]
    cut += [scatter(Cut(t, [Shard(1)]), mesh) for t in (links, links.flip(0))]
    for got, expected in zip(run(*cut), want, strict=True):
        assert_equal(full(got), expected, "several kinds", rtol=1e-8)


@pytest.mark.parametrize("size", [2, 3])
def test_several_kinds_of_nodes(run_mesh, size):
    run_mesh((size,), several_kinds)

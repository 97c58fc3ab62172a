"""Several edge sets, bi-stride pooling and time rollouts of PyTorch Geometric layers on ranks.

Outputs of every step, gradients of inputs and weights equal serial; nothing is gathered.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import assert_equal, full, is_sharded, numbers, sharded
from rank_pool import mesh_of
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components, shortest_path
from shardfield.domain_parallel import sync_module_over_mesh
from test_geometric import Block
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardfield
import shardfield.graph as graph

NODES, WIDTH, LEVELS = 37, 4, 2
STEPS, SAMPLES, UPDATES = 4, 2, 3


def mesh_edges(n: int = 6) -> Tensor:
    """Both directions of the sides of n by n squares and of one diagonal each; one node apart."""
    at = torch.arange(n * n).reshape(n, n)
    pairs = [(at[:-1], at[1:]), (at[:, :-1], at[:, 1:]), (at[:-1, :-1], at[1:, 1:])]
    ends = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], 1)
    return torch.cat([ends, ends.flip(0)], 1)


EDGES = mesh_edges()


def adjacency(edge_index, n):
    ones = np.ones(np.shape(edge_index)[1])
    return coo_matrix((ones, tuple(np.asarray(edge_index))), (n, n)).tocsr()


@pytest.mark.parametrize("seed", range(4))
def test_levels_follow_from_distances(seed):
    """Layers by SciPy's distances, components by SciPy: the same nodes, the same edges."""
    rng = np.random.default_rng(seed)
    n = 40
    edges = rng.integers(0, n, (2, 45 + 10 * seed))
    for level in graph.bistride_levels(edges, n, 3):
        links = adjacency(edges, n)
        links = ((links + links.T) > 0).astype(float)
        count, component = connected_components(links)
        hops = shortest_path(links, unweighted=True)
        kept = []
        for c in range(count):
            members = np.flatnonzero(component == c)
            odd = members[hops[members[0], members] % 2 == 1]
            even = np.setdiff1d(members, odd)
            kept += (odd if 0 < len(odd) < len(even) else even).tolist()
        assert level.nodes.tolist() == sorted(kept)
        near = hops[np.ix_(level.nodes, level.nodes)]
        want = np.argwhere((near > 0) & (near <= 2)).T
        np.testing.assert_array_equal(level.edge_index, want)
        edges, n = level.edge_index, len(level.nodes)


def test_level_errors():
    with pytest.raises(ValueError, match="edge 0 joins nodes 0 and 9; expected 0 to 2"):
        graph.bistride_levels([[0], [9]], 3, 1)
    with pytest.raises(ValueError, match="expected 0 or more levels, got -1"):
        graph.bistride_levels([[0], [1]], 3, -1)


class Bistride(nn.Module):
    """Down through the levels, each with its own edges, and up again with skips."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GATv2Conv, GCNConv, SAGEConv

        self.down = nn.ModuleList([SAGEConv(WIDTH, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.bottom = GATv2Conv(WIDTH, WIDTH)
        self.up = nn.ModuleList([GCNConv(WIDTH, WIDTH), SAGEConv(WIDTH, WIDTH, aggr="max")])

    def forward(self, x: Tensor, edges: list[Tensor], picked: list[Tensor]) -> Tensor:
        skips = []
        for layer, links, nodes in zip(self.down, edges, picked, strict=False):
            skips.append(x + torch.tanh(layer(x, links)))
            x = skips[-1].index_select(0, nodes)
        x = torch.tanh(self.bottom(x, edges[len(picked)]))
        for layer, links, nodes in list(zip(self.up, edges, picked, strict=False))[::-1]:
            skip = skips.pop()
            x = skip + torch.zeros_like(skip).index_add(0, nodes, x)
            x = x + torch.tanh(layer(x, links))
        return x


class Rollout(nn.Module):
    """Steps of a mesh network: each adds its output to the state; all states come back."""

    def __init__(self, steps: int = STEPS) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv

        self.steps = steps
        self.block = Block()
        self.attention = GATConv(WIDTH, WIDTH, heads=2, concat=False)

    def forward(self, x: Tensor, edges: Tensor) -> list[Tensor]:
        states = []
        for _ in range(self.steps):
            x = x + 0.3 * torch.tanh(self.attention(self.block(x, edges), edges))
            states.append(x)
        return states


class CoarseRollout(nn.Module):
    """The same with the multiscale network in each step."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.steps = steps
        self.net = Bistride()

    def forward(self, x: Tensor, edges: list[Tensor], picked: list[Tensor]) -> list[Tensor]:
        states = []
        for _ in range(self.steps):
            x = x + 0.3 * self.net(x, edges, picked)
            states.append(x)
        return states


def hierarchy() -> tuple[list[Tensor], list[Tensor]]:
    """Edges of every level, and the nodes that each coarser one picks."""
    levels = graph.bistride_levels(EDGES, NODES, LEVELS)
    assert [len(level.nodes) for level in levels] == [16, 6]
    edges = [EDGES, *(torch.from_numpy(level.edge_index) for level in levels)]
    return edges, [torch.from_numpy(level.nodes) for level in levels]


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def loss_of(states: list[Tensor], weights: list[Tensor]) -> Tensor:
    """A loss of the states of all steps."""
    parts = [(state * w).sum() for state, w in zip(states, weights, strict=True)]
    return torch.stack(parts).sum() + states[-1].square().sum()


def loss_weights(steps: int) -> list[Tensor]:
    return [numbers(NODES, WIDTH, seed=9 + i) for i in range(steps)]


def compare(model, x, inputs, cut_inputs, shard, whole) -> None:
    """States of all steps, input gradient and weight gradients, serial and on the ranks."""
    serial = copy.deepcopy(model)
    weights = loss_weights(model.steps)
    ours = shard(x).detach().requires_grad_()
    with shardfield.report() as report:
        states = model(ours, *cut_inputs)
        loss_of(states, [shard(w) for w in weights]).backward()
    x = x.clone().requires_grad_()
    want = serial(x, *inputs)
    loss_of(want, weights).backward()
    for i, (got, state) in enumerate(zip(states, want, strict=True)):
        assert is_sharded(got)
        assert_equal(whole(got), state, f"state {i}", rtol=1e-9)
    assert_equal(whole(ours.grad), x.grad, "input gradient", rtol=1e-8)
    for (name, p), q in zip(model.named_parameters(), serial.parameters(), strict=True):
        assert_equal(p.grad, q.grad, f"gradient of {name}", rtol=1e-8)
    assert not report.fallbacks, dict(report.fallbacks)


def by_rows(mesh, kind, sizes: list[int] | None = None) -> None:
    """Nodes cut evenly or by `sizes`, edges and picks of every level cut on their own."""
    inputs = (EDGES,) if kind is Rollout else hierarchy()
    cut = [
        sharded(t, mesh, 1) if isinstance(t, Tensor) else [sharded(s, mesh, s.dim() - 1) for s in t]
        for t in inputs
    ]
    x = numbers(NODES, WIDTH)
    compare(made(kind), x, inputs, cut, lambda t: sharded(t, mesh, 0, sizes), full)


@pytest.mark.parametrize("kind", [Rollout, CoarseRollout])
def test_rollouts_equal_serial(run_mesh, ranks, kind):
    run_mesh((ranks,), by_rows, kind=kind)


@pytest.mark.parametrize("kind", [Rollout, CoarseRollout])
def test_rollouts_with_pieces_of_any_size(run_mesh, kind):
    run_mesh((3,), by_rows, kind=kind, sizes=[NODES - 5, 0, 5])


def by_owners(mesh) -> int:
    """Every level in one halo graph; a coarse node belongs to the owner of the one it is."""
    edges, picked = hierarchy()
    labels = [graph.partition_nodes(EDGES, NODES, mesh.size(), "levels")]
    kinds: dict[str, int] = {"level 0": NODES}
    links: dict[tuple[str, str, str], Tensor] = {("level 0", "near", "level 0"): edges[0]}
    for i, nodes in enumerate(picked):
        finer, coarser = f"level {i}", f"level {i + 1}"
        kinds[coarser] = len(nodes)
        labels.append(labels[-1][nodes])
        links[coarser, "near", coarser] = edges[i + 1]
        links[finer, "picked", coarser] = torch.stack([nodes, torch.arange(len(nodes))])
    halo = graph.HaloGraph(links, kinds, dict(zip(kinds, labels, strict=True)), mesh.size())
    assert halo.faults() == []
    here = halo.on(mesh)
    cut = [
        [here.edge_index(t) for t in links if t[1] == "near"],
        [here.edge_index(t)[0] for t in links if t[1] == "picked"],
    ]
    compare(
        made(CoarseRollout),
        numbers(NODES, WIDTH),
        (edges, picked),
        cut,
        lambda t: here.shard_nodes(t, "level 0"),
        lambda t: here.gather_nodes(t, "level 0"),
    )
    finest = here.shard_nodes(numbers(NODES, WIDTH), "level 0")
    rows = cut[1][0]
    with shardfield.report() as report:
        coarse = finest.index_select(0, rows)
    assert coarse.to_local().shape[0] == int((labels[1] == mesh.get_rank()).sum())
    return report.bytes_sent


@pytest.mark.parametrize("size", [1, 2, 4])
def test_levels_of_one_halo_graph(run_mesh, size):
    """Picked rows are at home already: pooling sends counts, not rows."""
    sent = run_mesh((size,), by_owners)
    assert max(sent) <= 8 * 8 * size


def trained(model, states, cut, group_mean) -> list[float]:
    """Losses of a few steps of gradient descent on the targets of every step of a rollout."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(UPDATES):
        parts = []
        for x in states:
            predicted = model(cut(x), *hierarchy_on(cut))
            parts.append(sum((p - cut(x.tanh())).square().mean() for p in predicted))
        loss = torch.stack(parts).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(group_mean(loss.detach()))
    return losses


def hierarchy_on(cut) -> list[list[Tensor]]:
    return [[cut(t) for t in part] for part in hierarchy()]


def on_both_axes(shape, names) -> None:
    """DDP over the data axis, one sample a data rank; its nodes over the domain axis."""
    mesh = mesh_of(shape, names)
    data, domain = mesh["data"], mesh["domain"]
    model = made(CoarseRollout)
    serial = copy.deepcopy(model)
    sync_module_over_mesh(model, domain)
    wrapped = DistributedDataParallel(model, process_group=data.get_group())
    samples = [numbers(NODES, WIDTH, seed=s) for s in range(SAMPLES)]

    def cut(t: Tensor) -> Tensor:
        return sharded(t, domain, 1 if t.dim() == 2 and not t.is_floating_point() else 0)

    def mean(loss: Tensor) -> float:
        dist.all_reduce(loss, group=data.get_group())
        return float(loss) / data.size()

    with shardfield.report() as report:
        got = trained(wrapped, samples[data.get_local_rank() :: SAMPLES], cut, mean)
    want = trained(serial, samples, lambda t: t, float)
    assert got == pytest.approx(want, rel=1e-9)
    assert want[-1] < want[0]
    for (name, p), q in zip(model.named_parameters(), serial.named_parameters(), strict=True):
        assert_equal(p, q[1], name, rtol=1e-8)
    assert not report.fallbacks, dict(report.fallbacks)


def test_data_axis_beside_the_domain(run_ranks):
    run_ranks(4, on_both_axes, shape=(2, 2), names=("data", "domain"))

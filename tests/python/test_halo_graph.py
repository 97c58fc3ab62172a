"""Halo graphs: exact parts, the checker, and message passing equal to serial on 1 to 4 ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import assert_equal, is_sharded, numbers
from torch import nn

import shardfield
import shardfield.graph as graph

NODES, EDGES = 23, 70


def random_edges(seed: int = 0) -> torch.Tensor:
    """Directed, with repeats and self-loops; the last three nodes have no edges."""
    draw = torch.Generator("cpu").manual_seed(seed)
    edges = torch.randint(0, NODES - 3, (2, EDGES), generator=draw, device="cpu")
    edges[:, 5] = edges[:, 6]
    edges[1, 7] = edges[0, 7]
    return edges


def labels_of(cut: str, parts: int) -> np.ndarray:
    """Parts of the nodes: balanced, scattered, or with an empty part."""
    if cut == "balanced":
        return graph.partition_nodes(random_edges(), NODES, parts, "levels")
    if cut == "scattered":
        return np.arange(NODES) * 7 % parts
    return np.zeros(NODES, int) if parts < 3 else np.arange(NODES) % 2 * 2


class EdgeBlock(nn.Module):
    """A MeshGraphNet-style block: messages from both ends and the edge, then an update."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(4 + 4 + 3, 8), nn.GELU(), nn.Linear(8, 3))
        self.node = nn.Sequential(nn.Linear(4 + 3, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, here, x, e):
        new = e + self.edge(torch.cat([here.sources(x), here.targets(x), e], dim=1))
        return x + self.node(torch.cat([x, here.aggregate(new, "sum")], dim=1)), new


class Attention(nn.Module):
    """A graph attention layer written with plain PyTorch between the primitives."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(4, 4)
        self.score = nn.Linear(8, 1)

    def forward(self, here, x, e):
        v = self.value(x)
        score = torch.tanh(self.score(torch.cat([here.sources(v), here.targets(v)], dim=1)))
        weight = torch.exp(score - here.targets(here.aggregate(score, "max")))
        total = here.aggregate(weight, "sum")
        share = weight / here.targets(total)
        return here.aggregate(share * here.sources(v), "sum"), e


class Convolution(nn.Module):
    """A GCN layer: both degrees, mean and max beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, here, x, e):
        h = self.lin(x)
        scale = here.sources(1 / (here.out_degrees().double()[:, None] + 1).sqrt())
        out = here.aggregate(scale * here.sources(h), "sum")
        out = out / (here.in_degrees().double()[:, None] + 1).sqrt()
        return out + here.aggregate(here.sources(h), "mean") + here.aggregate(e, "max").sum(1)[
            :, None
        ], e


class Overlapped(nn.Module):
    """Messages from an MLP, those of own edges computed while the halo travels."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(4 + 4 + 3, 8), nn.Tanh(), nn.Linear(8, 4))

    def message(self, source, target, e):
        return self.edge(torch.cat([source, target, e], dim=1))

    def forward(self, here, x, e):
        return x + sum(here.propagate(x, self.message, e, r) for r in ("sum", "mean", "max")), e


LAYERS = {
    "edge block": EdgeBlock,
    "attention": Attention,
    "convolution": Convolution,
    "overlapped": Overlapped,
}


class Serial:
    """The same primitives on whole tensors."""

    def __init__(self, edges: torch.Tensor, num_nodes: int) -> None:
        self.edges, self.num_nodes = edges, num_nodes

    def sources(self, x):
        return x[self.edges[0]]

    def targets(self, x):
        return x[self.edges[1]]

    def aggregate(self, m, reduce="sum"):
        index = self.edges[1][:, None].expand_as(m)
        out = m.new_zeros((self.num_nodes, m.shape[1]))
        if reduce == "sum":
            return out.index_add(0, self.edges[1], m)
        name = {"mean": "mean", "max": "amax"}[reduce]
        return out.scatter_reduce(0, index, m, name, include_self=False)

    def propagate(self, x, message, e, reduce):
        return self.aggregate(message(self.sources(x), self.targets(x), e), reduce)

    def in_degrees(self):
        return torch.bincount(self.edges[1], minlength=self.num_nodes)

    def out_degrees(self):
        return torch.bincount(self.edges[0], minlength=self.num_nodes)


def train_step(net, here, x, e):
    for layer in net:
        x, e = layer(here, x, e)
    loss = (x * torch.sin(x)).sum() + (e * e).mean()
    return x, e, loss


def equals_serial(mesh, layer: str, cut: str):
    edges = random_edges().to(torch.get_default_device())
    cut_up = graph.HaloGraph(edges, NODES, labels_of(cut, mesh.size()), num_parts=mesh.size())
    here = cut_up.on(mesh)
    torch.manual_seed(3)
    net = nn.ModuleList([LAYERS[layer](), LAYERS[layer]()]).double()
    full_x, full_e = numbers(NODES, 4), numbers(EDGES, 3, seed=1)
    whole_x, whole_e = full_x.clone().requires_grad_(), full_e.clone().requires_grad_()
    want_x, want_e, loss = train_step(net, Serial(edges, NODES), whole_x, whole_e)
    loss.backward()
    want = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    x, e = here.shard_nodes(full_x).requires_grad_(), here.shard_edges(full_e).requires_grad_()
    assert is_sharded(x) or mesh.size() == 1
    with shardfield.report() as report:
        got_x, got_e, loss = train_step(net, here, x, e)
        loss.backward()
    assert not report.fallbacks
    assert_equal(here.gather_nodes(got_x), want_x, "nodes")
    assert_equal(here.gather_edges(got_e), want_e, "edges")
    assert_equal(here.gather_nodes(x.grad), whole_x.grad, "gradient of nodes")
    if whole_e.grad is not None and whole_e.grad.any():
        assert_equal(here.gather_edges(e.grad), whole_e.grad, "gradient of edges")
    for name, p in net.named_parameters():
        assert name not in want or not is_sharded(p.grad)
        if name in want:
            assert_equal(p.grad, want[name], f"gradient of {name}")


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("cut", ["balanced", "scattered", "empty part"])
def test_message_passing_equals_serial(run_mesh, ranks, layer, cut):
    run_mesh((ranks,), equals_serial, layer=layer, cut=cut)


def second_derivative(mesh):
    edges = random_edges()
    here = graph.HaloGraph(edges, NODES, labels_of("scattered", mesh.size())).on(mesh)
    serial = Serial(edges, NODES)
    ones = torch.ones(EDGES, 2, dtype=torch.float64)

    def ones_of(prims):
        return ones if prims is serial else prims.shard_edges(ones)

    def penalty(prims, x):
        y = prims.aggregate(torch.tanh(prims.sources(x)) * prims.targets(x))
        y = y + prims.propagate(x, lambda a, b, c: torch.sin(a) * b * c, ones_of(prims), "sum")
        (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        (grad * grad).sum().backward()

    whole = numbers(NODES, 2).requires_grad_()
    penalty(serial, whole)
    x = here.shard_nodes(whole.detach()).requires_grad_()
    penalty(here, x)
    assert_equal(here.gather_nodes(x.grad), whole.grad, "gradient of the penalty")


def test_second_derivatives_equal_serial(run_mesh, ranks):
    run_mesh((ranks,), second_derivative)


def dot_test(mesh):
    here = graph.HaloGraph(random_edges(), NODES, labels_of("scattered", mesh.size())).on(mesh)
    x = here.shard_nodes(numbers(NODES, 3)).requires_grad_()
    rows = here.fetch(x)
    weight = torch.randn(rows.shape, dtype=torch.float64) * (mesh.get_rank() + 1)
    rows.backward(weight)
    left = (rows * weight).sum()
    right = (
        (x.detach().to_local() * x.grad.to_local()).sum() if is_sharded(x) else (x * x.grad).sum()
    )
    sums = torch.stack([left.detach(), right.detach()])
    torch.distributed.all_reduce(sums)
    return sums.tolist()


def test_the_backward_of_fetch_is_its_adjoint(run_mesh, ranks):
    for left, right in run_mesh((ranks,), dot_test):
        assert left == pytest.approx(right, rel=1e-12)


def order_of_work(mesh):
    """What is done when, on a graph of two halves with one edge across in each direction."""
    here = graph.HaloGraph([[0, 1, 1, 2], [1, 0, 2, 1]], 4, [0, 0, 1, 1]).on(mesh)
    log = []
    rows = here._rows["node"]

    class Watched:
        def start(self, own):
            log.append("start")
            return rows.start(own)

        def finish(self, own, pending):
            log.append("finish")
            return rows.finish(own, pending)

    here._rows["node"] = Watched()

    def message(source, target):
        log.append("messages")
        return source * target

    x = here.shard_nodes(numbers(4, 2))
    with shardfield.report() as report:
        here.propagate(x, message)
    return log, report.bytes_sent


def test_own_edges_are_worked_on_while_the_halo_travels(run_mesh):
    for log, sent in run_mesh((2,), order_of_work):
        assert log == ["start", "messages", "finish", "messages"]
        assert sent == 2 * 8


def bytes_of_a_layer(mesh):
    cut_up = graph.HaloGraph(random_edges(), NODES, labels_of("balanced", mesh.size()))
    here = cut_up.on(mesh)
    x = here.shard_nodes(numbers(NODES, 4)).requires_grad_()
    with shardfield.report() as report:
        out = here.aggregate(here.sources(x))
    forward = report.bytes_sent
    loss = out.sum()
    with shardfield.report() as report:
        loss.backward()
    plan = cut_up.nodes(mesh.get_rank()).exchange
    sent = sum(len(rows) for rows in plan.sends.values())
    return forward, report.bytes_sent, sent * 4 * 8, (plan.num_rows - plan.num_owned) * 4 * 8


def test_a_layer_moves_each_halo_row_once(run_mesh):
    for forward, backward, sent, received in run_mesh((3,), bytes_of_a_layer):
        assert forward == sent
        assert backward == received


# ------------------------------------------------------------------------------------ parts, local


def test_the_checker_finds_nothing_in_any_cut():
    for parts in (1, 2, 3, 5):
        for cut in ("balanced", "scattered", "empty part"):
            for hops in (1, 2):
                labels = labels_of(cut, parts)
                cut_up = graph.HaloGraph(random_edges(), NODES, labels, parts, hops)
                assert cut_up.faults() == []


def test_parts_are_the_serial_neighbourhoods():
    edges = random_edges()
    cut_up = graph.HaloGraph(edges, NODES, labels_of("scattered", 4))
    owned = []
    for part in range(4):
        nodes, links = cut_up.nodes(part), cut_up.edges(part)
        own = nodes.nodes[: nodes.exchange.num_owned]
        owned.append(own)
        into = np.flatnonzero(np.isin(edges[1].numpy(), own))
        np.testing.assert_array_equal(np.sort(links.edges), into)
        np.testing.assert_array_equal(nodes.nodes[links.edge_index], edges[:, links.edges].numpy())
        interior = np.isin(edges[0, links.edges].numpy(), own)
        assert interior[: links.num_interior].all()
        assert not interior[links.num_interior :].any()
    np.testing.assert_array_equal(np.sort(np.concatenate(owned)), np.arange(NODES))


def test_several_kinds_of_nodes_and_edges():
    draw = np.random.default_rng(0)
    edges = {
        ("mesh", "near", "mesh"): draw.integers(0, 10, (2, 30)),
        ("mesh", "feeds", "grid"): draw.integers(0, 6, (2, 20)),
        ("grid", "reads", "mesh"): draw.integers(0, 6, (2, 15)),
    }
    labels = {"mesh": np.arange(10) % 3, "grid": np.arange(6) % 2}
    cut_up = graph.HaloGraph(edges, {"mesh": 10, "grid": 6}, labels, num_parts=3)
    assert cut_up.faults() == []
    assert sum(len(cut_up.edges(p, ("mesh", "feeds", "grid")).edges) for p in range(3)) == 20
    with pytest.raises(ValueError, match="no edges"):
        cut_up.edges(0)
    with pytest.raises(ValueError, match="name nodes of kind 'sea'"):
        graph.HaloGraph({("sea", "to", "mesh"): [[0], [0]]}, {"mesh": 1}, {"mesh": [0]})


def hetero_equals_serial(mesh):
    draw = np.random.default_rng(1)
    up, down = ("mesh", "feeds", "grid"), ("grid", "reads", "mesh")
    edges = {up: draw.integers(0, 6, (2, 20)), down: draw.integers(0, 6, (2, 15))}
    labels = {"mesh": np.arange(10) % mesh.size(), "grid": np.arange(6) // 2 % mesh.size()}
    here = graph.HaloGraph(edges, {"mesh": 10, "grid": 6}, labels, mesh.size()).on(mesh)
    full = numbers(10, 3)
    weight = numbers(3, 3, seed=2).requires_grad_()
    x = here.shard_nodes(full, "mesh").requires_grad_()
    grid = here.aggregate(here.sources(x, up) @ weight, "sum", up)
    back = here.aggregate(torch.tanh(here.sources(grid, down)), "sum", down)
    (back * back).sum().backward()
    got = weight.grad.clone()
    weight.grad = None
    whole = full.clone().requires_grad_()
    e = {k: torch.from_numpy(v) for k, v in edges.items()}
    grid = torch.zeros(6, 3, dtype=torch.float64).index_add(0, e[up][1], whole[e[up][0]] @ weight)
    want = torch.zeros(10, 3, dtype=torch.float64).index_add(
        0, e[down][1], torch.tanh(grid[e[down][0]])
    )
    (want * want).sum().backward()
    assert_equal(here.gather_nodes(back, "mesh"), want, "nodes")
    assert_equal(here.gather_nodes(x.grad, "mesh"), whole.grad, "gradient of nodes")
    assert_equal(got, weight.grad, "gradient of the weight")


def test_two_kinds_equal_serial(run_mesh, ranks):
    run_mesh((ranks,), hetero_equals_serial)


def fewest_rows(mesh, edges: list[list[int]], labels: list[int], side: str):
    """Sums and means of sources, their gradients and second derivatives, and the bytes sent."""
    index, n = torch.tensor(edges), len(labels)
    here = graph.HaloGraph(index, n, np.array(labels) % mesh.size(), mesh.size()).on(mesh)
    if mesh.size() == 2:
        assert here.side() == side
    serial = Serial(index, n)
    sent = 0
    for reduce in ("sum", "mean"):
        whole = numbers(n, 3).requires_grad_()
        x = here.shard_nodes(whole.detach()).requires_grad_()
        with shardfield.report() as report:
            got = here.sum_sources(x, reduce)
        sent += report.bytes_sent
        want = serial.aggregate(serial.sources(whole), reduce)
        assert_equal(here.gather_nodes(got), want, reduce)
        for value, leaf in ((torch.tanh(got), x), (torch.tanh(want), whole)):
            (grad,) = torch.autograd.grad(value.square().sum(), leaf, create_graph=True)
            (grad * grad).sum().backward()
        assert_equal(here.gather_nodes(x.grad), whole.grad, f"second derivative of {reduce}")
    with pytest.raises(ValueError, match="expected sum or mean, got 'max'"):
        here.sum_sources(x, "max")
    return sent


@pytest.mark.parametrize(
    ("edges", "side"),
    [
        ([[0, 0, 0, 0], [2, 3, 4, 5]], "sources"),
        ([[2, 3, 4, 5, 2], [0, 0, 0, 0, 0]], "targets"),
        ([[2, 3, 4, 5, 4, 1], [0, 1, 0, 0, 4, 1]], "targets"),
        ([[0, 1], [1, 0]], "sources"),
    ],
)
def test_sums_move_the_fewest_rows(run_mesh, ranks, edges, side):
    """A star outwards sends its middle, a star inwards the sum of each rank."""
    labels = [0, 0, 1, 1, 1, 1] if ranks == 2 else [0, 0, 1, 2, 3, 1]
    sent = run_mesh((ranks,), fewest_rows, edges=edges, labels=labels, side=side)
    if ranks == 2:
        crossing = {(a, b) for a, b in zip(*edges, strict=True) if (a < 2) != (b < 2)}
        ends = [len({pair[i] for pair in crossing}) for i in (0, 1)]
        assert sum(sent) == 2 * min(ends) * 3 * 8


class Hop(nn.Module):
    """A layer by index alone, as other libraries write it, scaled by the degrees it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 3)

    def forward(self, x, links, degrees):
        ends = torch.cat([x.index_select(0, links[0]), x.index_select(0, links[1])], 1)
        messages = torch.tanh(self.lin(ends)) / degrees.index_select(0, links[0])[:, None]
        return x + torch.zeros_like(x).index_add(0, links[1], messages)


def one_exchange_for_all_layers(mesh, cut: str):
    edges, layers = random_edges(), 3
    cut_up = graph.HaloGraph(
        edges, NODES, labels_of(cut, mesh.size()), num_parts=mesh.size(), hops=layers
    )
    here = cut_up.on(mesh)
    torch.manual_seed(3)
    net = nn.ModuleList([Hop() for _ in range(layers)]).double()
    whole = numbers(NODES, 3).requires_grad_()
    degrees = torch.bincount(edges[0], minlength=NODES).double()
    want = whole
    for layer in net:
        want = layer(want, edges, degrees)
    (want * want).sum().backward()
    grads = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    x = here.shard_nodes(whole.detach()).requires_grad_()
    with shardfield.report() as report:
        y = here.spread(x)
    once = report.bytes_sent
    links, degrees = here.edge_index(), here.out_degrees().double()
    with shardfield.report() as report:
        for layer in net:
            y = layer(y, links, degrees)
    counts = report.bytes_sent  # each rank asks no other for rows
    y = here.own(y)
    (y * y).sum().backward()
    assert not report.fallbacks
    assert_equal(here.gather_nodes(y), want, "nodes")
    assert_equal(here.gather_nodes(x.grad), whole.grad, "gradient of nodes")
    for got, grad in zip(net.parameters(), grads, strict=True):
        assert_equal(got.grad, grad, "gradient of a weight")
    for call in (here.sources, here.targets, here.aggregate):
        with pytest.raises(ValueError, match="expected a graph with 1 hop, this one has 3"):
            call(x)
    sent = sum(len(rows) for rows in cut_up.nodes(here.part).exchange.sends.values())
    return once, sent * 3 * 8, counts


@pytest.mark.parametrize("cut", ["balanced", "scattered", "empty part"])
def test_one_exchange_serves_several_layers(run_mesh, ranks, cut):
    for once, halo, counts in run_mesh((ranks,), one_exchange_for_all_layers, cut=cut):
        assert once == halo
        assert counts <= 3 * 4 * (ranks - 1) * (ranks * ranks * 8 + 2 * 8)


def test_costs_of_both_ways():
    line = [[0, 1, 2], [1, 2, 3]]
    per_layer = graph.HaloGraph(line, 4, [0, 0, 1, 1]).cost(3)
    at_once = graph.HaloGraph(line, 4, [0, 0, 1, 1], hops=3).cost(3)
    assert per_layer == (3, 0)
    assert at_once == (2, 2)


def test_hops_are_chosen_by_cost():
    nodes = np.arange(40)
    line = [nodes[:-1], nodes[1:]]
    labels = nodes // 10
    # A line cut into four: one row per border and layer, or one row and a few edges again.
    slow_network = graph.plan_hops(line, 40, labels, 3, width=8, latency_s=1e-3)
    assert slow_network.hops == 3
    assert slow_network.per_layer_s == pytest.approx(3 * (2e-3 + 8 * 4 / 10e9))
    # Middle parts receive 3 rows of inputs, and work on 2 + 1 edges for their neighbour.
    assert slow_network.at_once_s == pytest.approx(2e-3 + 3 * 8 * 4 / 10e9 + 3 * 4 * 64 / 1e12)
    costly_edges = graph.plan_hops(line, 40, labels, 3, width=8, latency_s=0, flops_per_edge=1e6)
    assert costly_edges.hops == 1
    assert "an exchange per layer" in str(costly_edges)
    assert "3 hops at once" in str(slow_network)
    with pytest.raises(ValueError, match="at least 1 layer"):
        graph.plan_hops(line, 40, labels, 0, width=8)


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="edge 1 joins nodes 1 and 5"):
        graph.HaloGraph([[0, 1], [1, 5]], 3, [0, 0, 1])
    with pytest.raises(ValueError, match="node 2 has label 4"):
        graph.HaloGraph([[0], [1]], 3, [0, 0, 4], num_parts=2)
    with pytest.raises(ValueError, match=r"expected labels \(3,\)"):
        graph.HaloGraph([[0], [1]], 3, [0, 0])


def wrong_mesh(mesh):
    cut_up = graph.HaloGraph([[0], [1]], 3, [0, 1, 2])
    with pytest.raises(ValueError, match="with 3 ranks"):
        cut_up.on(mesh)
    here = graph.HaloGraph([[0], [1]], 3, [0, 1, 1]).on(mesh)
    with pytest.raises(TypeError, match="plain one"):
        here.sources(torch.zeros(3, 1))
    with pytest.raises(ValueError, match="expected 3 rows"):
        here.shard_nodes(torch.zeros(4, 1))


def test_misuse_on_a_mesh_is_named(run_mesh):
    run_mesh((2,), wrong_mesh)

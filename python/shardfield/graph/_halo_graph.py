"""Halo graphs: each rank's exact subgraph, checked, and message passing that equals serial."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfield._core import core
from shardfield._mesh import core_mesh
from shardfield.graph._nodes import edge_array
from shardfield.graph._partition import ExchangePlan

EdgeType = tuple[str, str, str]
ONLY_KIND = "node"
ONLY_EDGES = ("node", "to", "node")


@dataclass(frozen=True)
class NodesOfPart:
    """One kind of nodes on one part: own nodes by number, then halo nodes by (owner, number).

    Attributes:
        nodes: number of each local node in the whole graph, int64.
        owners: part that owns it, int32.
        hops: 0 for own nodes, else edges to the nearest own node, int32.
        exchange: how halo rows get their owners' values.
    """

    nodes: NDArray[np.int64]
    owners: NDArray[np.int32]
    hops: NDArray[np.int32]
    exchange: ExchangePlan


@dataclass(frozen=True)
class EdgesOfPart:
    """One kind of edges on one part, those with own sources first, else in the caller's order.

    Attributes:
        edges: number of each local edge in the whole graph, int64.
        edge_index: local node numbers, int64 (2, num_edges).
        num_interior: edges 0 .. num_interior - 1 have own sources: they need no halo.
        target_hops: hops of each edge's target; 0 where the part owns it.
        in_degrees: edges of the whole graph into each local target node, int64.
        out_degrees: edges of the whole graph out of each local source node, int64.
    """

    edges: NDArray[np.int64]
    edge_index: NDArray[np.int64]
    num_interior: int
    target_hops: NDArray[np.int32]
    in_degrees: NDArray[np.int64]
    out_degrees: NDArray[np.int64]


class HaloCost(NamedTuple):
    """What one pass over several layers costs, all parts together."""

    exchanged_rows: int
    redundant_edges: int


class HaloGraph:
    """A graph cut into parts: every part holds its own nodes, all edges into them, and the sources
    of those (its halo), so that a layer of message passing after one exchange equals the serial
    one. Directed edges, repeats, self-loops, isolated nodes and empty parts are kept as they are.
    Local: every rank makes the same parts from the same graph.

    Args:
        edge_index: (2, num_edges) sources and targets; for several kinds a dict
            {(source kind, name, target kind): edge_index}.
        num_nodes: how many nodes; a dict per kind. Never guessed from the edges.
        labels: part of each node, as from `partition_nodes`; a dict per kind.
        num_parts: how many parts; the largest label plus one where not given.
        hops: 1 for an exchange before every layer; L holds what L layers need after one exchange.

    Raises:
        ValueError: for edges or labels out of range; names the edge or node.

    Example:
        >>> g = HaloGraph([[0, 1], [1, 2]], num_nodes=3, labels=[0, 0, 1])
        >>> g.nodes(1).nodes, g.edges(1).edges
        (array([2, 1]), array([1]))
    """

    def __init__(
        self,
        edge_index: Any,
        num_nodes: int | Mapping[str, int],
        labels: ArrayLike | Mapping[str, ArrayLike],
        num_parts: int | None = None,
        hops: int = 1,
    ) -> None:
        if not isinstance(edge_index, Mapping):
            edge_index = {ONLY_EDGES: edge_index}
            num_nodes, labels = {ONLY_KIND: num_nodes}, {ONLY_KIND: labels}  # type: ignore[dict-item]
        assert isinstance(num_nodes, Mapping)
        assert isinstance(labels, Mapping)
        self.kinds = list(num_nodes)
        self.edge_types: list[EdgeType] = list(edge_index)
        self.num_nodes = dict(num_nodes)
        self.hops = hops
        owners = [self._labels_of(kind, labels) for kind in self.kinds]
        top = max((int(o.max(initial=-1)) for o in owners), default=-1) + 1
        self.num_parts = max(top, 1) if num_parts is None else num_parts
        relations = []
        self.num_edges: dict[EdgeType, int] = {}
        for edge_type, index in edge_index.items():
            source, _, target = edge_type
            for kind in (source, target):
                if kind not in self.num_nodes:
                    raise ValueError(
                        f"HaloGraph: edges {edge_type} name nodes of kind {kind!r}; num_nodes has "
                        f"{', '.join(self.kinds)}"
                    )
            most = max(self.num_nodes[source], self.num_nodes[target])
            edges = edge_array(index, most, "HaloGraph")
            self.num_edges[edge_type] = edges.shape[1]
            place = (self.kinds.index(source), self.kinds.index(target))
            relations.append((*place, edges[0].copy(), edges[1].copy()))
        self._whole = owners, relations
        self._core = core.graph_cut_graph(*self._whole, self.num_parts, hops)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_core"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._core = core.graph_cut_graph(*self._whole, self.num_parts, self.hops)

    def _labels_of(self, kind: str, labels: Mapping[str, ArrayLike]) -> NDArray[np.int32]:
        given = labels[kind]
        if isinstance(given, torch.Tensor):
            given = given.detach().cpu().numpy()
        array = np.ascontiguousarray(given, np.int32)
        if array.shape != (self.num_nodes[kind],):
            raise ValueError(
                f"HaloGraph: expected labels ({self.num_nodes[kind]},) for nodes of kind {kind!r}, "
                f"got {array.shape}"
            )
        return array

    def nodes(self, part: int, kind: str | None = None) -> NodesOfPart:
        """The nodes of a part. `kind` may be left out where there is one."""
        found = self._core.nodes(part, self._kind(kind))
        found["exchange"] = ExchangePlan(found["exchange"])
        return NodesOfPart(**found)

    def edges(self, part: int, edge_type: EdgeType | None = None) -> EdgesOfPart:
        """The edges of a part. `edge_type` may be left out where there is one."""
        found = self._core.links(part, self._relation(edge_type))
        found["edges"] = found.pop("links")
        found["edge_index"] = np.stack([found.pop("sources"), found.pop("targets")])
        return EdgesOfPart(**found)

    def faults(self) -> list[str]:
        """What is wrong with the parts, one sentence each; empty when all is right: own nodes
        partition the nodes, every own node has exactly its edges of the whole graph, degrees are
        those of the whole graph, and the exchange plans of all parts match. Local.
        """
        return self._core.faults()

    def cost(self, num_layers: int) -> HaloCost:
        """What `num_layers` layers cost: with an exchange before each where hops is 1, else with
        one exchange before all of them.
        """
        return HaloCost(*self._core.cost(num_layers, self.hops == 1))

    def traffic(self, part: int) -> tuple[int, int]:
        """Messages that a part sends and receives in one exchange, and the rows in the larger of
        both directions, over all kinds of nodes.
        """
        plans = [self.nodes(part, kind).exchange for kind in self.kinds]
        messages = sum(len(p.sends) + len(p.receives) for p in plans)
        out = sum(len(rows) for p in plans for rows in p.sends.values())
        return messages, max(out, sum(p.num_rows - p.num_owned for p in plans))

    def on(self, mesh: DeviceMesh) -> LocalGraph:
        """This rank's part on a mesh of one axis with one rank per part. Local."""
        return LocalGraph(self, mesh)

    def _kind(self, kind: str | None) -> int:
        if kind is None and len(self.kinds) == 1:
            return 0
        if kind not in self.kinds:
            raise ValueError(f"HaloGraph: no nodes of kind {kind!r}; there are {self.kinds}")
        return self.kinds.index(kind)

    def _relation(self, edge_type: EdgeType | None) -> int:
        if edge_type is None and len(self.edge_types) == 1:
            return 0
        if edge_type not in self.edge_types:
            raise ValueError(f"HaloGraph: no edges {edge_type!r}; there are {self.edge_types}")
        return self.edge_types.index(edge_type)

    def __repr__(self) -> str:
        nodes = ", ".join(f"{n} {kind}s" for kind, n in self.num_nodes.items())
        return f"HaloGraph({nodes}, {sum(self.num_edges.values())} edges in {self.num_parts} parts)"


class _EdgesOut(NamedTuple):
    """Edges out of a rank's own nodes: local sources and targets, own targets and then those of
    others, how many these are on this rank and how many copies on all, and their exchange.
    """

    sources: Tensor
    targets: Tensor
    num_rows: int
    halo: int
    rows: Any


class LocalGraph:
    """This rank's part of a `HaloGraph`. Node and edge features are ShardTensors whose pieces are
    the rows that each rank owns; whatever is computed row by row between `sources`, `targets` and
    `aggregate` is plain PyTorch, and gradients, those of parameters included, equal serial ones.

    Example, a layer with messages from an MLP:
        >>> here = graph.on(mesh)
        >>> x = here.shard_nodes(features)
        >>> m = mlp(torch.cat([here.sources(x), here.targets(x)], dim=1))
        >>> x = x + here.aggregate(m)

    Where the graph has L hops, one exchange serves L layers of any library, which work on the
    rows of own nodes and halos of all ranks as if these were one graph:
        >>> y = here.spread(x)
        >>> for layer in layers:  # L of them
        ...     y = layer(y, here.edge_index())
        >>> y = here.own(y)
    A layer that needs degrees must take those of `in_degrees` and `out_degrees`: the outermost
    nodes lack edges. Statistics over nodes, such as batch norm, would count halos again.
    """

    def __init__(self, graph: HaloGraph, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1 or mesh.size() != graph.num_parts:
            raise ValueError(
                f"HaloGraph.on: expected a mesh of one axis with {graph.num_parts} ranks, one per "
                f"part, got shape {tuple(mesh.mesh.shape)}; pass a submesh such as mesh['domain']"
            )
        self.graph = graph
        self._mesh = core_mesh(mesh)
        self.part: int = self._mesh.rank
        self._device = torch.device(
            mesh.device_type if mesh.device_type == "cpu" else torch.get_default_device()
        )
        self._out: dict[EdgeType, _EdgesOut] = {}
        every = range(graph.num_parts)
        self._nodes = {k: [graph.nodes(p, k) for p in every] for k in graph.kinds}
        self._edges = {t: [graph.edges(p, t) for p in every] for t in graph.edge_types}
        self._rows = {
            kind: core.graph_listed_rows(
                self._mesh, 0, nodes[self.part].exchange._core, str(self._device)
            )
            for kind, nodes in self._nodes.items()
        }
        self._index = {
            t: torch.from_numpy(edges[self.part].edge_index).to(self._device)
            for t, edges in self._edges.items()
        }

    def shard_nodes(self, full: Tensor, kind: str | None = None) -> Tensor:
        """Features of all nodes (num_nodes, ...), the same on every rank, as a sharded tensor of
        the rows in owners' order. Local; gradients do not reach `full`.
        """
        own = [n.nodes[: n.exchange.num_owned] for n in self._nodes[self._kind(kind)]]
        return self._shard(full, own)

    def shard_edges(self, full: Tensor, edge_type: EdgeType | None = None) -> Tensor:
        """Features of all edges (num_edges, ...), likewise."""
        return self._shard(full, [e.edges for e in self._edges[self._type(edge_type)]])

    def edge_index(self, edge_type: EdgeType | None = None) -> Tensor:
        """Source and target of each edge as rows of the sharded node tensors, sharded (2, num_edges)
        int64 in the order of `shard_edges`: for layers of other libraries, which gather and scatter
        by it. With several hops as rows of what `spread` gives. Local.
        """
        name = self._type(edge_type)
        ends = []
        for kind, local in zip(
            (name[0], name[2]), self._edges[name][self.part].edge_index, strict=True
        ):
            parts = self._nodes[kind]
            if self.graph.hops > 1:
                ends.append(local + sum(self._counts(kind)[: self.part]))
                continue
            own = np.concatenate([n.nodes[: n.exchange.num_owned] for n in parts])
            row_of = np.empty_like(own)
            row_of[own] = np.arange(len(own))
            ends.append(row_of[parts[self.part].nodes[local]])
        piece = torch.from_numpy(np.stack(ends)).to(self._device)
        sizes = [len(e.edges) for e in self._edges[name]]
        return core.wrap(piece, self._mesh, [(1, [0], sizes)], [2, sum(sizes)], False)

    def gather_nodes(self, x: Tensor, kind: str | None = None) -> Tensor:
        """All rows of a sharded node tensor as a plain tensor in the graph's order. Collective."""
        own = [n.nodes[: n.exchange.num_owned] for n in self._nodes[self._kind(kind)]]
        return self._gather(x, own)

    def gather_edges(self, x: Tensor, edge_type: EdgeType | None = None) -> Tensor:
        """All rows of a sharded edge tensor, likewise."""
        return self._gather(x, [e.edges for e in self._edges[self._type(edge_type)]])

    def fetch(self, x: Tensor, kind: str | None = None) -> Tensor:
        """This rank's own rows of a sharded node tensor and behind them its halo's, as a per-rank
        tensor. Collective: one message per pair of touching parts. Differentiable to any order: the
        backward adds each copy's gradient at its owner.
        """
        return self._rows[self._kind(kind)].fetch(self._own(x))

    def spread(self, x: Tensor, kind: str | None = None) -> Tensor:
        """Own rows and halo rows of every rank as one sharded node tensor, which `edge_index`
        numbers where the graph has several hops. Collective and differentiable as `fetch`.
        """
        self._check_hops("spread", several=True)
        name = self._kind(kind)
        return self._wrap(self.fetch(x, name), self._counts(name))

    def own(self, x: Tensor, kind: str | None = None) -> Tensor:
        """The rows of own nodes of what `spread` gave, as a sharded node tensor. Local,
        differentiable.
        """
        self._check_hops("own", several=True)
        owned = [n.exchange.num_owned for n in self._nodes[self._kind(kind)]]
        return self._wrap(self._own(x)[: owned[self.part]], owned)

    def sources(self, x: Tensor, edge_type: EdgeType | None = None) -> Tensor:
        """Row of each edge's source node, as a sharded edge tensor. Collective, differentiable."""
        self._check_hops("sources")
        name = self._type(edge_type)
        rows = self.fetch(x, name[0]).index_select(0, self._index[name][0])
        return self._wrap(rows, [len(e.edges) for e in self._edges[name]])

    def targets(self, x: Tensor, edge_type: EdgeType | None = None) -> Tensor:
        """Row of each edge's target node, as a sharded edge tensor. Local, differentiable."""
        self._check_hops("targets")
        name = self._type(edge_type)
        rows = self._own(x).index_select(0, self._index[name][1])
        return self._wrap(rows, [len(e.edges) for e in self._edges[name]])

    def aggregate(
        self, messages: Tensor, reduce: str = "sum", edge_type: EdgeType | None = None
    ) -> Tensor:
        """Sum, mean, max or min of the messages into each node, as a sharded node tensor; 0 for
        nodes without edges. Local, differentiable.
        """
        self._check_hops("aggregate")
        name = self._type(edge_type)
        local = messages.to_local()  # type: ignore[attr-defined]
        counts = [n.exchange.num_owned for n in self._nodes[name[2]]]
        target = self._index[name][1]
        out = local.new_zeros((counts[self.part], *local.shape[1:]))
        if reduce in ("sum", "mean"):
            out = out.index_add(0, target, local)
        elif reduce in ("max", "min"):
            index = target.reshape(-1, *[1] * (local.dim() - 1)).expand_as(local)
            out = out.scatter_reduce(0, index, local, f"a{reduce}", include_self=False)
        else:
            raise ValueError(f"aggregate: expected sum, mean, max or min, got {reduce!r}")
        if reduce == "mean":
            degree = torch.bincount(target, minlength=counts[self.part]).clamp(min=1)
            out = out / degree.reshape(-1, *[1] * (local.dim() - 1)).to(out.dtype)
        return self._wrap(out, counts)

    def propagate(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        message: Callable[..., Tensor],
        edge_features: Tensor | None = None,
        reduce: str = "sum",
        edge_type: EdgeType | None = None,
    ) -> Tensor:
        """One layer while the halo travels: messages of edges with own sources are computed first,
        those across borders once the halo is there. Equal to
        `aggregate(message(sources(x), targets(x), edge_features), reduce)`.

        Collective: one message per pair of touching parts. Differentiable to any order.

        Args:
            x: sharded node tensor; (source kind's, target kind's) for edges between two kinds.
            message: called with sharded tensors of some edges: rows of their sources and targets,
                and where given their features; must treat each edge alone (no batch statistics).
                It may be called once or twice, alike on all ranks.
            edge_features: sharded edge tensor.
            reduce: sum, mean, max or min.
            edge_type: may be left out where there is one.

        Returns:
            A sharded node tensor of the target kind.
        """
        self._check_hops("propagate")
        name = self._type(edge_type)
        from_nodes, to_nodes = x if isinstance(x, tuple) else (x, x)
        rows, own = self._rows[name[0]], self._own(from_nodes)
        pending = rows.start(own.detach())
        target_rows = self._own(to_nodes)
        features = None if edge_features is None else self._own(edge_features)
        inside = [e.num_interior for e in self._edges[name]]
        across = [len(e.edges) - e.num_interior for e in self._edges[name]]
        here = slice(0, inside[self.part]), slice(inside[self.part], None)

        def messages(values: Tensor, first: int, edges: slice, sizes: list[int]) -> Tensor:
            source, target = self._index[name][:, edges]
            given = [values.index_select(0, source - first), target_rows.index_select(0, target)]
            given += [] if features is None else [features[edges]]
            return self._own(message(*(self._wrap(t, sizes) for t in given)))

        parts = [messages(own, 0, here[0], inside)] if any(inside) else []
        halo = rows.finish(own, pending)
        if any(across) or not parts:
            parts.append(messages(halo, own.size(0), here[1], across))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        sizes = [len(e.edges) for e in self._edges[name]]
        return self.aggregate(self._wrap(joined, sizes), reduce, name)

    def sum_sources(
        self, x: Tensor, reduce: str = "sum", edge_type: EdgeType | None = None
    ) -> Tensor:
        """`aggregate(sources(x), reduce)` for "sum" and "mean", by the fewest bytes: either rows of
        sources travel, or what each rank has added up for targets of others. `side` says which.
        Collective: one message per pair of touching parts. Differentiable to any order.
        """
        self._check_hops("sum_sources")
        if reduce not in ("sum", "mean"):
            raise ValueError(f"sum_sources: expected sum or mean, got {reduce!r}")
        name = self._type(edge_type)
        if self.side(name) == "sources":
            return self.aggregate(self.sources(x, name), reduce, name)
        back = self._reversed(name)
        own = self._own(x)
        sums = own.new_zeros((back.num_rows, *own.shape[1:]))
        sums = sums.index_add(0, back.targets, own.index_select(0, back.sources))
        out = self._wrap(back.rows.give_back(sums), self._counts(name[2]))
        if reduce == "mean":
            degree = self.in_degrees(name).clamp(min=1)
            out = out / degree.reshape(-1, *[1] * (own.dim() - 1)).to(out.dtype)
        return out

    def side(self, edge_type: EdgeType | None = None) -> str:
        """What `sum_sources` sends: rows of "sources", or sums of "targets" where these are fewer,
        all ranks together. Local.
        """
        name = self._type(edge_type)
        plans = [n.exchange for n in self._nodes[name[0]]]
        rows_of_sources = sum(p.num_rows - p.num_owned for p in plans)
        return "targets" if self._reversed(name).halo < rows_of_sources else "sources"

    def _reversed(self, name: EdgeType) -> _EdgesOut:
        """This rank's edges out of its own nodes, found once."""
        if name not in self._out:
            owners, relations = self.graph._whole
            source, target, starts, ends = relations[self.graph.edge_types.index(name)]
            parts = core.graph_cut_graph(
                owners, [(target, source, ends, starts)], self.graph.num_parts, 1
            )
            plans = [parts.nodes(p, target)["exchange"] for p in range(self.graph.num_parts)]
            links, own = parts.links(self.part, 0), plans[self.part]
            self._out[name] = _EdgesOut(
                torch.from_numpy(links["targets"].copy()).to(self._device),
                torch.from_numpy(links["sources"].copy()).to(self._device),
                own.num_rows,
                sum(p.num_rows - p.num_owned for p in plans),
                core.graph_listed_rows(self._mesh, 0, own, str(self._device)),
            )
        return self._out[name]

    def in_degrees(self, edge_type: EdgeType | None = None) -> Tensor:
        """Edges into each node of the whole graph, int64, as a sharded node tensor; with several
        hops in the rows of `spread`. Local.
        """
        name = self._type(edge_type)
        counts = self._counts(name[2])
        degrees = self._edges[name][self.part].in_degrees[: counts[self.part]]
        return self._wrap(torch.from_numpy(degrees.copy()).to(self._device), counts)

    def out_degrees(self, edge_type: EdgeType | None = None) -> Tensor:
        """Edges out of each node of the whole graph, int64, as a sharded node tensor; with several
        hops in the rows of `spread`. Local.
        """
        name = self._type(edge_type)
        counts = self._counts(name[0])
        degrees = self._edges[name][self.part].out_degrees[: counts[self.part]]
        return self._wrap(torch.from_numpy(degrees.copy()).to(self._device), counts)

    def _counts(self, kind: str) -> list[int]:
        """Rows of every rank that layers work on: own ones, with several hops the halo's too."""
        plans = [n.exchange for n in self._nodes[kind]]
        return [p.num_rows if self.graph.hops > 1 else p.num_owned for p in plans]

    def _check_hops(self, call: str, several: bool = False) -> None:
        if (self.graph.hops > 1) != several:
            instead = (
                "spread, edge_index and own" if self.graph.hops > 1 else "sources or edge_index"
            )
            raise ValueError(
                f"LocalGraph.{call}: expected a graph with {'several hops' if several else '1 hop'}, "
                f"this one has {self.graph.hops}; use {instead}"
            )

    def _kind(self, kind: str | None) -> str:
        return self.graph.kinds[self.graph._kind(kind)]

    def _type(self, edge_type: EdgeType | None) -> EdgeType:
        return self.graph.edge_types[self.graph._relation(edge_type)]

    def _own(self, x: Tensor) -> Tensor:
        if not hasattr(x, "to_local"):
            raise TypeError(
                "LocalGraph: expected a sharded node tensor, got a plain one; make it with "
                "shard_nodes"
            )
        return x.to_local()

    def _shard(self, full: Tensor, rows: list[NDArray[np.int64]]) -> Tensor:
        expected = sum(len(r) for r in rows)
        if full.dim() == 0 or full.size(0) != expected:
            raise ValueError(
                f"LocalGraph: expected {expected} rows in front, got shape {tuple(full.shape)}"
            )
        own = torch.from_numpy(rows[self.part].copy()).to(full.device)
        piece = full.detach().index_select(0, own)
        out = self._wrap(piece, [len(r) for r in rows])
        return out.requires_grad_(full.requires_grad)

    def _gather(self, x: Tensor, rows: list[NDArray[np.int64]]) -> Tensor:
        order = torch.from_numpy(np.argsort(np.concatenate(rows), kind="stable"))
        whole: Tensor = x.full_tensor()  # type: ignore[attr-defined]
        return whole.index_select(0, order.to(whole.device))

    def _wrap(self, piece: Tensor, sizes: list[int]) -> Tensor:
        """A sharded tensor of every rank's rows; all ranks know the sizes."""
        shape = [sum(sizes), *piece.shape[1:]]
        return core.wrap(piece, self._mesh, [(0, [0], sizes)], shape, False)

"""An exchange before every layer, or one for all of them: which is cheaper."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shardfield.graph._halo_graph import HaloGraph


class HopPlan(NamedTuple):
    """The choice and what it rests on; `str` says it in words.

    Attributes:
        hops: 1 for an exchange before every layer, else the number of layers.
        per_layer_s: seconds that exchanges take the slowest part, one before every layer.
        at_once_s: seconds of one exchange and of the edges it makes the slowest part work on for
            others.
    """

    hops: int
    per_layer_s: float
    at_once_s: float

    def __str__(self) -> str:
        chosen = "an exchange per layer" if self.hops == 1 else f"{self.hops} hops at once"
        return (
            f"{chosen}: {self.per_layer_s * 1e3:.3g} ms per layer-wise pass, "
            f"{self.at_once_s * 1e3:.3g} ms with one exchange and redundant edges"
        )


def plan_hops(
    edge_index: Any,
    num_nodes: Any,
    labels: Any,
    num_layers: int,
    *,
    width: int,
    input_width: int | None = None,
    flops_per_edge: float | None = None,
    bytes_per_value: int = 4,
    bytes_per_second: float = 10e9,
    latency_s: float = 20e-6,
    flops_per_second: float = 1e12,
) -> HopPlan:
    """Chooses between exchanging the halo before every layer and exchanging the inputs of a wider
    halo once. Local: the same on every rank.

    Times are those of the slowest part:

        per layer: num_layers * (messages * latency + rows * width * bytes / bandwidth)
        at once:   messages * latency + rows * input_width * bytes / bandwidth
                   + edges worked on for others * flops_per_edge / flops_per_second

    Args:
        edge_index: as for `HaloGraph`.
        num_nodes: as for `HaloGraph`.
        labels: as for `HaloGraph`.
        num_layers: layers of message passing.
        width: features per node between layers.
        input_width: features per node before the first; `width` where not given.
        flops_per_edge: work of one message; 4 * width**2 (two layers on both ends) where not given.
        bytes_per_value: 4 for float32.
        bytes_per_second: of one rank's link.
        latency_s: of one message.
        flops_per_second: of one rank.

    Returns:
        The choice; give its `hops` to `HaloGraph`.

    Raises:
        ValueError: for fewer than one layer, or a broken graph.
    """
    if num_layers < 1:
        raise ValueError(f"plan_hops: expected at least 1 layer, got {num_layers}")
    narrow = HaloGraph(edge_index, num_nodes, labels)
    wide = HaloGraph(edge_index, num_nodes, labels, hops=num_layers)
    value_s = bytes_per_value / bytes_per_second
    work_s = (4.0 * width * width if flops_per_edge is None else flops_per_edge) / flops_per_second
    inputs = width if input_width is None else input_width
    per_layer = [
        num_layers * (messages * latency_s + rows * width * value_s)
        for messages, rows in map(narrow.traffic, range(narrow.num_parts))
    ]
    at_once = []
    for part in range(wide.num_parts):
        messages, rows = wide.traffic(part)
        repeats = 0
        for edge_type in wide.edge_types:
            hops = wide.edges(part, edge_type).target_hops
            repeats += int(np.maximum(num_layers - hops[hops > 0], 0).sum())
        at_once.append(messages * latency_s + rows * inputs * value_s + repeats * work_s)
    best = num_layers if max(at_once) < max(per_layer) else 1
    return HopPlan(best, max(per_layer), max(at_once))

"""A mesh network in plain PyTorch. Nothing in this file knows about several ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def perceptron(inputs: int, width: int, outputs: int, *, norm: bool = True) -> nn.Sequential:
    """Two linear layers, with a layer norm behind them where wanted."""
    layers = [nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, outputs)]
    return nn.Sequential(*layers, *([nn.LayerNorm(outputs)] if norm else []))


class Block(nn.Module):
    """Each edge is updated from itself and its ends, each node from itself and its edges' sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge, self.node = (perceptron(k * width, width, width) for k in (3, 2))

    def forward(self, x: Tensor, e: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        source, target = edge_index
        ends = [x.index_select(0, source), x.index_select(0, target)]
        e = e + self.edge(torch.cat([e, *ends], dim=1))
        total = torch.zeros_like(x).index_add(0, target, e)
        return x + self.node(torch.cat([x, total], dim=1)), e


class MeshNetwork(nn.Module):
    """Encoder, blocks of message passing, decoder, as in MeshGraphNets (Pfaff et al., 2021).

    Node features ``(n, 4)``, edge features ``(e, 4)`` and ``edge_index (2, e)`` give ``(n, 1)``.
    """

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.nodes, self.edges = perceptron(4, width, width), perceptron(4, width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = perceptron(width, width, 1, norm=False)

    def forward(self, nodes: Tensor, edges: Tensor, edge_index: Tensor) -> Tensor:
        x, e = self.nodes(nodes), self.edges(edges)
        for block in self.blocks:
            x, e = block(x, e, edge_index)
        return self.head(x)

"""Training on one surface, alone or as one of several ranks: one loop for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from .data import Surface, load
from .model import MeshNetwork

LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Task:
    """What to train."""

    target: str = "curvature"
    dtype: str = "float64"
    coarser: int = 0
    steps: int = 30
    width: int = 16
    blocks: int = 3

    def surface(self, hemisphere: str) -> Surface:
        """The hemisphere as a graph."""
        return load(hemisphere, self.target, getattr(torch, self.dtype), self.coarser)

    def model(self, seed: int = 0) -> MeshNetwork:
        """A network with first weights that follow from the seed."""
        torch.manual_seed(seed)
        return MeshNetwork(self.width, self.blocks).to(getattr(torch, self.dtype))


@dataclass
class Result:
    """What a run leaves behind.

    Attributes:
      losses: loss of every step.
      prediction: on the left hemisphere, which it was trained on, ``(n,)``.
      held_out: on the right one, which it never saw, ``(n,)``.
      labels: rank of each vertex; all 0 for a serial run.
      halos: rows each rank borrows in one exchange.
      bytes_sent: by this rank over the whole training.
      fallbacks: operations that gathered, with their counts.
    """

    losses: list[float]
    prediction: NDArray[np.float64]
    held_out: NDArray[np.float64]
    labels: NDArray[np.int32]
    halos: list[int] = field(default_factory=list)
    bytes_sent: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


def train(
    model: nn.Module,
    graph: tuple[Tensor, Tensor, Tensor],
    target: Tensor,
    steps: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train with Adam; the losses.

    Args:
      model: any module; its parameters are plain tensors, equal on all ranks.
      graph: node features, edge features and edge_index, plain or sharded.
      target: ``(n, 1)``, plain or sharded as the nodes are.
      steps: number of optimizer steps.
      on_step: called after each step with its index and loss.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model(*graph) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        on_step(step, losses[-1])
    return losses


def run_serial(task: Task) -> Result:
    """The reference: the whole surface on one process."""
    model, s = task.model(), task.surface("left")
    graph = (s.nodes, s.edges, s.edge_index)
    losses = train(model, graph, s.target, task.steps)
    with torch.no_grad():
        prediction = model(*graph)[:, 0].double().numpy()
    return Result(losses, prediction, _held_out(model, task), np.zeros(len(s.points), np.int32))


def run_sharded(task: Task) -> Result:
    """As one rank of several; the default process group must exist. Every rank returns the same
    but for bytes_sent.
    """
    from shardfield.domain_parallel import sync_module_over_mesh
    from torch.distributed.device_mesh import init_device_mesh

    import shardfield
    import shardfield.graph

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    s = task.surface("left")
    n = len(s.points)
    labels = shardfield.graph.partition_nodes(s.edge_index, n, mesh.size(), coordinates=s.points)
    graph = shardfield.graph.HaloGraph(s.edge_index, n, labels)
    if faults := graph.faults():
        raise RuntimeError("; ".join(faults))
    here = graph.on(mesh)
    parts = (here.shard_nodes(s.nodes), here.shard_edges(s.edges), here.edge_index())
    model = task.model(seed=dist.get_rank())  # differs between ranks until synchronised
    if dist.get_rank() == 0:
        model = task.model()
    sync_module_over_mesh(model, mesh)
    with shardfield.report() as report:
        losses = train(model, parts, here.shard_nodes(s.target), task.steps)
    with torch.no_grad():
        prediction = here.gather_nodes(model(*parts))[:, 0].double().numpy()
    exchanges = [graph.nodes(part).exchange for part in range(mesh.size())]
    halos = [exchange.num_rows - exchange.num_owned for exchange in exchanges]
    traffic = report.bytes_sent, dict(report.fallbacks)
    return Result(losses, prediction, _held_out(model, task), labels, halos, *traffic)


def _held_out(model: nn.Module, task: Task) -> NDArray[np.float64]:
    """The prediction for the right hemisphere: weights are plain, so this is one device's work."""
    s = task.surface("right")
    with torch.no_grad():
        return model(s.nodes, s.edges, s.edge_index)[:, 0].double().numpy()

"""One rank of a run: alone, or one of several that share the volume."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .layers import trace_layers
from .model import UNet
from .train import learning_rates, train


@dataclass(frozen=True)
class Plan:
    """How one run is laid out.

    Attributes:
      title: name in tables and files.
      mesh: ranks along each mesh axis; empty for the serial run.
      dims: the tensor dimension each mesh axis cuts.
      steps: optimizer steps.
      data: file written by `export`.
      threads: threads per rank.
    """

    title: str
    mesh: tuple[int, ...]
    dims: tuple[int, ...]
    steps: int
    data: str
    threads: int

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return math.prod(self.mesh)


@dataclass
class Outcome:
    """What a rank hands back; plain values and one array, so that it travels."""

    rank: int
    run: dict[str, Any]
    layers: list[dict[str, Any]] = field(default_factory=list)
    traffic: dict[str, Any] = field(default_factory=dict)
    prediction: np.ndarray | None = None


class Sink(Protocol):
    """Where messages for the progress display go."""

    def put(self, item: Any) -> None:
        """Accept one message."""


def export(path: str, scan: Tensor, labels: Tensor, model: UNet, steps: int) -> None:
    """Write volume, labels, first weights and learning rates to a file for Python and C++ to read.

    C++ does so with `torch::pickle_load`.
    """
    rates = torch.tensor(learning_rates(steps, scan.numel()), dtype=torch.float64)
    tensors = {"scan": scan, "labels": labels, "rates": rates}
    tensors |= {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _load(plan: Plan) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    tensors = torch.load(plan.data, weights_only=True, mmap=True)
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    return tensors["scan"].clone(), tensors["labels"].clone(), weights


def run_serial(plan: Plan, sink: Sink) -> Outcome:
    """Run the reference: the same model and loop on the whole volume in one process."""
    torch.set_num_threads(plan.threads)
    scan, labels, weights = _load(plan)
    model = UNet().to(scan.dtype)
    model.load_state_dict(weights)
    rates = learning_rates(plan.steps, scan.numel())
    run = train(model, scan, labels, rates, lambda step, loss: sink.put((step, loss)))
    with torch.no_grad():
        prediction = model(scan).argmax(dim=1)[0].numpy().astype(np.uint8)
    layers = trace_layers(model, lambda: model(scan))
    return Outcome(0, asdict(run), layers, {}, prediction)


def run_sharded(plan: Plan, sink: Sink) -> Outcome:
    """Run as one rank of several; the default process group must exist.

    Only rank 0 reads the volume and the weights; model and loop are those of the serial run.
    """
    from shardfield.domain_parallel import scatter_tensor, sync_module_over_mesh
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    import shardfield

    torch.set_num_threads(plan.threads)
    rank = dist.get_rank()
    names = tuple(f"domain{axis}" for axis in range(len(plan.mesh)))
    mesh = init_device_mesh("cpu", plan.mesh, mesh_dim_names=names)

    scan = labels = None
    torch.manual_seed(rank)  # Weights differ between ranks until they are synchronised.
    model = UNet()
    if rank == 0:
        scan, labels, weights = _load(plan)
        model.to(scan.dtype).load_state_dict(weights)
    scan = scatter_tensor(scan, 0, mesh, tuple(Shard(dim) for dim in plan.dims))
    labels = scatter_tensor(labels, 0, mesh, tuple(Shard(dim - 1) for dim in plan.dims))
    model.to(scan.dtype)
    sync_module_over_mesh(model, mesh)

    rates = learning_rates(plan.steps, scan.numel())
    with shardfield.report(model) as report:
        run = train(model, scan, labels, rates, lambda step, loss: sink.put((step, loss)))
    traffic = {
        "bytes_sent": report.bytes_sent,
        "by_layer": report.bytes_by_layer(),
        "fallbacks": report.fallbacks,
        "table": report.table(),
    }
    with torch.no_grad():
        prediction = model(scan).full_tensor().argmax(dim=1)[0].numpy().astype(np.uint8)
    with shardfield.report(model) as report:
        layers = trace_layers(model, lambda: model(scan))
    traffic["forward"] = report.bytes_by_layer()
    return Outcome(rank, asdict(run), layers, traffic, prediction if rank == 0 else None)


def spawned(rank: int, plan: Plan, port: int, results: Sink, progress: Sink) -> None:
    """Entry of a spawned process: join the others on the loopback interface, run, hand back."""
    silent = _Silent()
    sink = progress if rank == 0 else silent
    if not plan.mesh:
        results.put(run_serial(plan, sink))
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(minutes=5))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.ranks)
    try:
        results.put(run_sharded(plan, sink))
        dist.barrier()
    finally:
        dist.destroy_process_group()


class _Silent:
    def put(self, item: Any) -> None:
        """Drop the message."""

"""The training loop: one for the serial run and for every rank of a sharded one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .memory import peak_memory
from .model import dice_and_cross_entropy

LEARNING_RATE = 0.05
BETAS = (0.9, 0.95)
MANY_VOXELS = 500_000
WARM_UP_STEPS = 15
MEASURED_STEP = 1  # The second step: gradients and optimizer state exist by then.


@dataclass
class Run:
    """What a training run leaves behind on one rank.

    Attributes:
      losses: loss of every step.
      seconds: wall time of every step but the measured one.
      activation_bytes: peak of live allocations over forward, loss and backward of one step.
      state_bytes: weights, gradients and optimizer state.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    activation_bytes: int = 0
    state_bytes: int = 0


def learning_rates(steps: int, voxels: int) -> list[float]:
    """Adam's rate at each step; on large volumes it doubles from step to step at first.

    Gradients that are sums over millions of voxels differ between two orders of summation in float32
    (docs/demo.md), and Adam turns even small ones into full steps. While steps are small, losses of
    different runs can be compared.
    """
    warm_up = WARM_UP_STEPS if voxels > MANY_VOXELS else 0
    return [LEARNING_RATE * 2.0 ** min(0, step - warm_up) for step in range(steps)]


def _forward_backward(model: nn.Module, scan: Tensor, labels: Tensor) -> Tensor:
    loss = dice_and_cross_entropy(model(scan), labels)
    loss.backward()
    return loss.detach()


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def train(
    model: nn.Module,
    scan: Tensor,
    labels: Tensor,
    rates: Sequence[float],
    on_step: Callable[[int, float], None],
) -> Run:
    """Train with Adam on one volume.

    Args:
      model: any module; its parameters are plain tensors, equal on all ranks.
      scan: ``(1, 1, D, H, W)``, plain or sharded.
      labels: ``(1, D, H, W)``, int64, plain or sharded alike.
      rates: learning rate of each step.
      on_step: called after each step with its index and loss.

    Returns:
      Losses, times and memory.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=BETAS, foreach=False)
    run = Run()
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        # Gradients are kept allocated, so that they count as state and not as activations.
        optimizer.zero_grad(set_to_none=False)
        start = time.perf_counter()
        if step == MEASURED_STEP:
            with peak_memory() as peak:
                loss = _forward_backward(model, scan, labels)
            run.activation_bytes = peak.bytes
        else:
            loss = _forward_backward(model, scan, labels)
        optimizer.step()
        if step != MEASURED_STEP:
            run.seconds.append(time.perf_counter() - start)
        run.losses.append(loss.item())
        on_step(step, run.losses[-1])
    for parameter in model.parameters():
        run.state_bytes += _bytes(parameter) + _bytes(parameter.grad)
    for state in optimizer.state.values():
        run.state_bytes += sum(
            _bytes(value) for value in state.values() if isinstance(value, Tensor)
        )
    return run

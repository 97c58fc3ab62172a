"""Shapes and pieces of every layer, read off one forward pass by module hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Layer:
    """One layer as one rank saw it.

    Attributes:
      name: dotted module name.
      kind: class name of the module.
      options: kernel, stride, padding and dilation where the module has them.
      shape_in, shape_out: global shapes.
      piece_in, piece_out: shapes of this rank's pieces.
      weight_bytes: parameters of the layer.
    """

    name: str
    kind: str
    options: dict[str, list[int]] = field(default_factory=dict)
    shape_in: list[int] = field(default_factory=list)
    shape_out: list[int] = field(default_factory=list)
    piece_in: list[int] = field(default_factory=list)
    piece_out: list[int] = field(default_factory=list)
    weight_bytes: int = 0


def _piece(tensor: Tensor) -> list[int]:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return list(local.shape)


def trace_layers(model: nn.Module, run: Callable[[], Any]) -> list[dict[str, Any]]:
    """Call ``run`` once and describe every leaf module it passes through, in order.

    Args:
      model: the network.
      run: calls the network.
    """
    layers: list[Layer] = []

    def describe(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            layer = Layer(name, type(module).__name__)
            for option in ("kernel_size", "stride", "padding", "dilation"):
                if hasattr(module, option):
                    layer.options[option] = list(getattr(module, option))
            layer.shape_in, layer.shape_out = list(inputs[0].shape), list(output.shape)
            layer.piece_in, layer.piece_out = _piece(inputs[0]), _piece(output)
            layer.weight_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
            layers.append(layer)

        return hook

    hooks = [
        module.register_forward_hook(describe(name))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return [asdict(layer) for layer in layers]

"""The graph that autograd recorded for a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def nodes_of(value: torch.Tensor, enters: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Yields every node that `value` was computed by, once; what lies behind a node only where
    `enters(node)` holds. Local.
    """
    seen: set[Any] = set()
    todo = [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if enters is None or enters(node):
            todo.extend(edge for edge, _ in node.next_functions)

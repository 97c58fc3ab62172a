"""Many small cases in one call of the rank pool, each named when it fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from oracle import Cut, check_same_as_serial
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

Cases = dict[str, Callable[..., Any]]


def layouts_of(mesh: DeviceMesh, dims: Sequence[int], x: Tensor) -> Iterable[tuple[str, Cut]]:
    """Cuts of x along each of `dims` (even, uneven, empty pieces), and two at once on two axes."""
    if mesh.ndim == 2:
        for first in dims:
            for second in dims:
                yield f"dims {first},{second}", Cut(x, [Shard(first), Shard(second)], {})
            yield f"dim {first} on axis 1", Cut(x, [Replicate(), Shard(first)], {})
        return
    n = mesh.size()
    for dim in dims:
        placements: list[Placement] = [Shard(dim)]
        yield f"dim {dim}", Cut(x, placements, {})
        if n == 1:
            continue
        length = x.size(dim)
        last_heavy = [0] * (n - 1) + [length]
        yield f"dim {dim} all on the last rank", Cut(x, placements, {0: last_heavy})
        if length > 1:
            uneven = [0] * n
            uneven[0], uneven[-1] = 1, length - 1
            yield f"dim {dim} as {uneven}", Cut(x, placements, {0: uneven})


def check_cases(
    mesh: DeviceMesh, cases: Cases, x: Tensor, dims: Sequence[int], **options: Any
) -> None:
    """Every case on every layout against the plain op; all failures in one message."""
    failures = []
    for layout, cut in layouts_of(mesh, dims, x):
        for name, function in cases.items():
            try:
                check_same_as_serial(function, [cut], mesh, **options)
            except Exception:  # every failure is told, with its case
                failures.append(f"--- {name} [{layout}]\n{traceback.format_exc(limit=-2)[-900:]}")
    assert not failures, f"{len(failures)} cases failed\n" + "\n".join(failures[:6])

"""Ways to cut a tensor that operators with windows find hard."""

from __future__ import annotations

from collections.abc import Sequence

from oracle import Cut
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard


def cuts_of(mesh: DeviceMesh, x: Tensor, dims: Sequence[int]) -> list[Cut]:
    """Even, thin and partly empty pieces along each of `dims`; on a mesh of two axes along two."""
    cuts = []
    for i in range(len(dims)):
        placements = [Shard(dims[(i + axis) % len(dims)]) for axis in range(mesh.ndim)]
        thin, empty = {}, {}
        for axis, placement in enumerate(placements):
            n, parts = x.size(placement.dim), mesh.size(axis)
            thin[axis] = [1] * (parts - 1) + [n - parts + 1]
            empty[axis] = [0, n, *[0] * (parts - 2)] if parts > 1 else [n]
        cuts.append(Cut(x, placements))
        if len({p.dim for p in placements}) == mesh.ndim:
            cuts += [Cut(x, placements, thin), Cut(x, placements, empty)]
    return cuts

"""An op of ATen with another rule: two-dimensional FFTs along cut dims.

The library has a rule of this kind; here one is written from Python and put in its place. A rank
transforms along the dims that it holds whole and the field is turned in between (the pencil
decomposition of parallel FFTs): every element moves twice, and no rank ever holds the field.
"""

from __future__ import annotations

from typing import Any

import torch
from shardfield.domain_parallel import ShardTensor
from torch.distributed.tensor import Shard

_ALONG_ONE = {
    torch.ops.aten.fft_fft2.default: torch.fft.fft,
    torch.ops.aten.fft_ifft2.default: torch.fft.ifft,
}


def smoothed(u: torch.Tensor, length: float = 1.5) -> torch.Tensor:
    """A periodic field (..., rows, columns) with waves below `length` grid cells damped."""
    rows = torch.fft.fftfreq(u.shape[-2], dtype=u.dtype, device=u.device)[:, None]
    columns = torch.fft.fftfreq(u.shape[-1], dtype=u.dtype, device=u.device)
    gain = torch.exp(-((2 * torch.pi * length) ** 2) * (rows**2 + columns**2) / 2)
    return torch.fft.ifft2(torch.fft.fft2(u) * gain).real


def sharded_fft2(op: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """The rule for fft2 and ifft2: one dim at a time, the other one cut."""
    given = dict(zip(("self", "s", "dim", "norm"), args, strict=False)) | kwargs
    if given.get("s") is not None:
        raise ValueError("fft2: of sharded tensors takes no size s; pad or slice first")
    x, norm = given["self"], given.get("norm")
    mesh, (d, e) = x._spec.mesh, (dim % x.dim() for dim in given.get("dim", (-2, -1)))

    def along(t: torch.Tensor, transformed: int, cut: int) -> torch.Tensor:
        placements = [Shard(cut) if isinstance(p, Shard) else p for p in x.placements]
        piece = t.redistribute(placements=placements).to_local()
        if piece.numel():
            piece = _ALONG_ONE[op](piece, dim=transformed, norm=norm)
        else:  # the FFT library refuses empty pieces
            piece = piece.to(piece.dtype.to_complex())
        return ShardTensor.from_local(piece, mesh, placements)

    return along(along(x, e, d), d, e).redistribute(placements=x.placements)


def register() -> list[Any]:
    """Puts the rule in place of the library's; `.remove()` of each brings that back."""
    return [ShardTensor.register_dispatch_handler(op, sharded_fft2) for op in _ALONG_ONE]

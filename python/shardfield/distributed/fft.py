"""torch.fft, for sharded and plain tensors alike, and what a rank will hold on the way.

The transforms are torch's own functions: sharded in, sharded out, any `s`, `dim`, `norm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from math import prod

from torch.fft import (
    fft,
    fft2,
    fftn,
    fftshift,
    hfft,
    hfft2,
    hfftn,
    ifft,
    ifft2,
    ifftn,
    ifftshift,
    ihfft,
    ihfft2,
    ihfftn,
    irfft,
    irfft2,
    irfftn,
    rfft,
    rfft2,
    rfftn,
)


def work_elements(
    shape: Sequence[int], parts: Mapping[int, int], dim: Sequence[int] | None = None
) -> int:
    """Elements that a rank holds at most after any step of a complex transform: the size of one of its
    buffers, for a plan before anything is allocated. A step needs two such buffers and what the
    FFT library takes for itself. Local; no rank, mesh or tensor is needed.

    Each cut dim is made whole by moving its cut to another dim (Pekurovsky, P3DFFT, SIAM J. Sci.
    Comput. 34, 2012). The bound holds wherever the cuts go; it counts the whole tensor where none
    may go, since the dim is gathered then.

    Args:
        shape: of the whole tensor.
        parts: pieces per cut dim, in sizes that differ by one at most: `{0: 4}`, `{1: 2, 2: 2}`.
        dim: the transformed dims; None for all.

    Returns:
        A number of elements; times 16 for the bytes of complex128.

    Raises:
        ValueError: dims that the shape does not have, or no pieces.

    Example:
        >>> work_elements((2048, 1024, 1024), {})
        2147483648
        >>> work_elements((9, 8, 8), {0: 4})  # 3 x 8 x 8 before, 9 x 2 x 8 after
        192
    """
    ndim = len(shape)
    named = [*parts, *(range(ndim) if dim is None else dim)]
    if not all(-ndim <= d < ndim for d in named) or any(p < 1 for p in parts.values()):
        raise ValueError(
            f"work_elements: expected dims in [{-ndim}, {ndim}) and 1 piece or more, got pieces "
            f"{dict(parts)} and dims {list(named[len(parts) :])} for the shape {list(shape)}"
        )
    cuts = {d % ndim: p for d, p in parts.items() if p > 1}
    pieces = list(cuts.values())
    transformed = range(ndim) if dim is None else [d % ndim for d in dim]
    reached = [
        dict(zip(places, pieces, strict=True))
        for places in permutations(range(ndim), len(pieces))
        if all(shape[d] >= p for d, p in zip(places, pieces, strict=True))
    ]
    for d in transformed:
        if d in cuts and all(d in placed for placed in reached):
            return prod(shape)
    return max(_piece(shape, placed) for placed in [cuts, *reached])


def _piece(shape: Sequence[int], cuts: Mapping[int, int]) -> int:
    """Elements of the largest piece: 10 x 4 in {0: 3} gives 4 x 4."""
    return prod(-(-n // cuts.get(d, 1)) for d, n in enumerate(shape))


__all__ = [
    "fft",
    "fft2",
    "fftn",
    "fftshift",
    "hfft",
    "hfft2",
    "hfftn",
    "ifft",
    "ifft2",
    "ifftn",
    "ifftshift",
    "ihfft",
    "ihfft2",
    "ihfftn",
    "irfft",
    "irfft2",
    "irfftn",
    "rfft",
    "rfft2",
    "rfftn",
    "work_elements",
]

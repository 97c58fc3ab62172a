"""The least number of bytes each layer of the network has to move between the pieces.

A layer reads, for output row o, the input rows ``[o*s - p, o*s - p + k_e)`` with
``k_e = d*(k - 1) + 1``. Whatever of them lies in another rank's piece has to cross once. Output
rows are given to ranks such that ``(k_e - s)+`` rows cross at every border, which no placement
can undercut. Backward, a layer may return the gradient of the rows it borrowed or borrow gradient
rows of its output: the smaller counts. Weight gradients and norm statistics are all-reduced; a
ring, which is optimal, moves ``2*S*(P - 1)`` bytes in total.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

Range = tuple[int, int]
Reads = Callable[[int], Range]


@dataclass
class Halo:
    """Rows crossing for one layer, in elements per channel, summed over all ranks."""

    forward: int
    backward_by_output: int
    most_received: int


def conv_reads(kernel: int, stride: int, padding: int, dilation: int, size: int) -> Reads:
    """Input rows read by one output row of a convolution, clipped to the input."""
    extent = dilation * (kernel - 1) + 1

    def reads(row: int) -> Range:
        first = row * stride - padding
        return max(first, 0), min(first + extent, size)

    return reads


def linear_reads(size_in: int, size_out: int) -> Reads:
    """Input rows read by one output row of a (tri)linear resize with align_corners=False."""

    def reads(row: int) -> Range:
        at = max((row + 0.5) * size_in / size_out - 0.5, 0.0)
        low = min(math.floor(at), size_in - 1)
        return low, min(low + (2 if at > low else 1), size_in)

    return reads


def best_cut(cut: Sequence[int], reads: Reads, size_out: int) -> list[int]:
    """Borders of the output along one axis for which the fewest rows cross.

    Args:
      cut: borders of the input, from 0 to its size, one more than there are pieces.
      reads: rows read per output row.
      size_out: rows of the output.
    """
    borders = [0]
    for border in cut[1:-1]:

        def crossing(row: int, border: int = border) -> int:
            left = border - reads(row)[0] if row < size_out else 0
            right = reads(row - 1)[1] - border if row > 0 else 0
            return max(left, 0) + max(right, 0)

        guess = round(border * size_out / max(cut[-1], 1))
        near = range(max(borders[-1], guess - 4), min(size_out, guess + 4) + 1)
        borders.append(min(near, key=lambda row: (crossing(row), abs(row - guess))))
    return [*borders, size_out]


def _span(rows: Range, reads: Reads) -> Range:
    if rows[0] >= rows[1]:
        return 0, 0
    return reads(rows[0])[0], reads(rows[1] - 1)[1]


def _readers(rows: Range, reads: Reads, size_out: int) -> Range:
    """Output rows that read any of the given input rows."""
    hit = [o for o in range(size_out) if reads(o)[0] < rows[1] and reads(o)[1] > rows[0]]
    return (hit[0], hit[-1] + 1) if hit else (0, 0)


def _volume(box: Sequence[Range]) -> int:
    return math.prod(max(high - low, 0) for low, high in box)


def _borrowed(needed: Sequence[Range], owned: Sequence[Range]) -> int:
    common = [(max(n[0], o[0]), min(n[1], o[1])) for n, o in zip(needed, owned, strict=True)]
    return _volume(needed) - _volume(common)


def halo(
    cuts_in: Sequence[Sequence[int]],
    reads: Sequence[Reads],
    sizes_out: Sequence[int],
    cuts_out: Sequence[Sequence[int]] | None = None,
) -> Halo:
    """Elements per channel that must cross for one layer.

    Args:
      cuts_in: borders of the input's pieces along each spatial axis, ``[0, size]`` where uncut.
      reads: rows read per output row along each axis.
      sizes_out: sizes of the output.
      cuts_out: borders of the output, or None for the best ones.
    """
    if cuts_out is None:
        cuts_out = [best_cut(*axis) for axis in zip(cuts_in, reads, sizes_out, strict=True)]
    result = Halo(0, 0, 0)
    for at in product(*(range(len(cut) - 1) for cut in cuts_in)):
        owned_in = [(c[i], c[i + 1]) for c, i in zip(cuts_in, at, strict=True)]
        owned_out = [(c[i], c[i + 1]) for c, i in zip(cuts_out, at, strict=True)]
        received = _borrowed([_span(o, r) for o, r in zip(owned_out, reads, strict=True)], owned_in)
        result.forward += received
        result.most_received = max(result.most_received, received)
        wanted = [_readers(o, r, n) for o, r, n in zip(owned_in, reads, sizes_out, strict=True)]
        result.backward_by_output += _borrowed(wanted, owned_out)
    return result

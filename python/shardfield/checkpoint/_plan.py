"""Who writes which piece, and which parts of pieces make up a box: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from shardfield.checkpoint._format import CheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape
Manifest = dict[str, dict[str, Any]]  # name -> {shape, dtype, offset, piece}


def overlap(a: Box, b: Box) -> Box | None:
    """The common part of two boxes; None when there is none. (0, 3) and (2, 4) share (2, 1)."""
    offset = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    stop = [min(xo + xs, yo + ys) for xo, xs, yo, ys in zip(a[0], a[1], b[0], b[1], strict=True)]
    shape = tuple(s - o for s, o in zip(stop, offset, strict=True))
    return None if min(shape, default=1) <= 0 else (offset, shape)


def slices(part: Box, box: Box) -> tuple[slice, ...]:
    """A part's place inside a box that holds it."""
    return tuple(
        slice(o - start, o - start + n)
        for o, n, start in zip(part[0], part[1], box[0], strict=True)
    )


def are_apart(boxes: Sequence[Box]) -> bool:
    """True when no two boxes share an element. Each box meets only those that reach it along the dim
    with most starts: in a grid of pieces a row of them, not all.
    """
    num_dims = len(boxes[0][0]) if boxes else 0
    if num_dims == 0:
        return len(boxes) < 2
    dim = max(range(num_dims), key=lambda d: len({offset[d] for offset, _ in boxes}))
    reaching: list[Box] = []
    for box in sorted(boxes, key=lambda b: b[0][dim]):
        reaching = [(o, s) for o, s in reaching if o[dim] + s[dim] > box[0][dim]]
        if any(overlap(box, other) for other in reaching):
            return False
        reaching.append(box)
    return True


def check_cover(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raises unless the boxes hold every element of the tensor exactly once.

    Raises:
        CheckpointError: naming the tensor and the boxes.
    """
    inside = all(
        len(o) == len(s) == len(shape)
        and all(x >= 0 and n >= 0 and x + n <= m for x, n, m in zip(o, s, shape, strict=True))
        for o, s in boxes
    )
    total = sum(prod(s) for _, s in boxes)
    if not inside or total != prod(shape) or not are_apart(boxes):
        listed = ", ".join(f"{list(s)} at {list(o)}" for o, s in boxes[:16])
        raise CheckpointError(
            f"checkpoint: the pieces of '{name}' {list(shape)} do not hold each element once: {listed}"
            + (f" and {len(boxes) - 16} more" if len(boxes) > 16 else "")
        )


def check_same_names(manifests: Sequence[Manifest]) -> None:
    """Raises when the ranks' tensors differ in name, shape or dtype.

    Raises:
        CheckpointError: with the ranks that lack a name or hold another shape.
    """
    every = sorted({name for manifest in manifests for name in manifest})
    for name in every:
        lacking = [r for r, manifest in enumerate(manifests) if name not in manifest]
        if lacking:
            raise CheckpointError(
                f"checkpoint: '{name}' is missing on ranks {lacking}; all ranks must save the same names"
            )
        kinds = {r: (m[name]["shape"], m[name]["dtype"]) for r, m in enumerate(manifests)}
        if len({str(kind) for kind in kinds.values()}) > 1:
            raise CheckpointError(f"checkpoint: '{name}' differs between ranks: {kinds}")


def assign_owners(
    manifests: Sequence[Manifest], itemsize: Mapping[str, int], balanced: bool = True
) -> dict[str, list[tuple[int, Box]]]:
    """The owner and box of every piece: of replicas the holder with the fewest bytes so far, or the
    first rank when not `balanced`. The same on every rank.

    Raises:
        CheckpointError: names, shapes or pieces that do not fit together.
    """
    check_same_names(manifests)
    load = [0] * len(manifests)
    owners: dict[str, list[tuple[int, Box]]] = {}
    # Large pieces first, so that small ones even out the rest.
    for name in sorted(manifests[0], key=lambda n: (-prod(manifests[0][n]["shape"]), n)):
        holders: dict[Box, list[int]] = {}
        for rank, manifest in enumerate(manifests):
            entry = manifest[name]
            box = (tuple(entry["offset"]), tuple(entry["piece"]))
            if prod(box[1]):
                holders.setdefault(box, []).append(rank)
        check_cover(name, manifests[0][name]["shape"], list(holders))
        owners[name] = []
        for box, ranks in holders.items():
            owner = min(ranks, key=lambda r: (load[r] if balanced else 0, r))
            load[owner] += prod(box[1]) * itemsize[name]
            owners[name].append((owner, box))
    return owners

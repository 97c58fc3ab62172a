"""Reproducible mode: the same bits for every number of ranks."""

from shardfield._core import core


def set_reproducible(on: bool = True) -> None:
    """Makes results on sharded tensors independent of how they are cut, to the last bit.

    Losses, norms, statistics, convolutions, matrix products, softmax and their gradients then have
    the same bits on any number of ranks, one included, for any placement and thread count. Sums run
    without rounding over slices of the operands (Ozaki et al., Numerical Algorithms 59, 2012;
    Demmel and Nguyen, IEEE Transactions on Computers 64, 2015) and are rounded once, so they are
    also closer to the true value. Training takes about ten times longer. docs/reproducible.md lists
    the ops.

    Plain tensors are not touched: to compare with one device, shard over a mesh of one rank.

    For the whole process, in-process ranks together. Local; set it on every rank, between steps.

    Args:
        on: False returns to the usual arithmetic.
    """
    core.set_reproducible(on)


def is_reproducible() -> bool:
    """True in reproducible mode. Local."""
    return bool(core.is_reproducible())

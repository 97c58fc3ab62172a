"""The worked examples of examples/python/extending, against one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle import Cut, check_same_as_serial, full, is_sharded, numbers, scatter
from torch.distributed.tensor import Replicate, Shard

import shardfield

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python" / "extending"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))  # the ranks import this file too

import heat  # noqa: E402
import spectral  # noqa: E402
import transport  # noqa: E402

ROWS = {1: [9], 2: [7, 2], 3: [4, 0, 5], 4: [1, 3, 0, 5]}


def cuts_of(mesh) -> list[Cut]:
    """Rows cut unevenly, columns cut, and on two axes both."""
    u = numbers(9, 6)
    if mesh.ndim == 2:
        both = Cut(u, [Shard(0), Shard(1)], {0: [7, 2], 1: [1, 5]})
        return [both, Cut(u, [Replicate(), Shard(0)], {1: [2, 7]})]
    return [Cut(u, [Shard(0)], {0: ROWS[mesh.size()]}), Cut(u, [Shard(1)])]


def removed(handles) -> None:
    for handle in handles if isinstance(handles, list) else [handles]:
        handle.remove()


def function(mesh) -> None:
    for cut in cuts_of(mesh):
        with pytest.raises(RuntimeError, match="as_strided"):  # why the example is worth its lines
            heat.warmed(scatter(cut, mesh))
        handle = heat.register()
        try:
            check_same_as_serial(heat.warmed, [cut], mesh, output_sharded=True)
        finally:
            removed(handle)
    with pytest.raises(RuntimeError, match="as_strided"):
        heat.laplacian(scatter(cuts_of(mesh)[0], mesh))


def kernel(mesh) -> None:
    handle = transport.register()
    try:
        for cut in cuts_of(mesh):
            if isinstance(cut.placements[-1], Shard) and mesh.ndim == 2 and cut.sizes.get(0):
                cut = Cut(cut.full, [Shard(1), Shard(0)], {0: [1, 5], 1: [7, 2]})
            check_same_as_serial(
                lambda u: transport.flux(u, 0.8).sin(), [cut], mesh, output_sharded=True
            )
    finally:
        removed(handle)
    with shardfield.report() as report:  # without a rule: right, but gathered and told
        got = transport.flux(scatter(cuts_of(mesh)[0], mesh), 0.8)
    assert report.fallbacks
    torch.testing.assert_close(full(got), transport.flux(numbers(9, 6), 0.8))


def aten_op(mesh) -> None:
    handles = spectral.register()
    try:
        for cut in cuts_of(mesh):
            check_same_as_serial(
                lambda u: spectral.smoothed(u).sin(), [cut], mesh, output_sharded=True
            )
        with pytest.raises(ValueError, match="takes no size s"):
            torch.fft.fft2(scatter(cuts_of(mesh)[0], mesh), s=(4, 4))
    finally:
        removed(handles)
    u = scatter(cuts_of(mesh)[0], mesh)  # the library's rule, which takes sizes, is back
    torch.testing.assert_close(
        full(torch.fft.fft2(u, s=(4, 4))), torch.fft.fft2(cuts_of(mesh)[0].full, s=(4, 4))
    )


@pytest.mark.parametrize("case", [function, kernel, aten_op])
def test_example(run_mesh, mesh_shape, case):
    run_mesh(mesh_shape, case)


def handles(mesh) -> None:
    """The last handler counts; remove() brings back the one before, and may be called again."""
    from shardfield.domain_parallel import ShardTensor

    def giving(value: float):
        return lambda op, types, args, kwargs: torch.full((), value)

    x = scatter(Cut(numbers(4), [Shard(0)]), mesh)
    assert is_sharded(x)
    first = ShardTensor.register_dispatch_handler(torch.ops.aten.dot.default, giving(1.0))
    second = ShardTensor.register_named_function_handler("aten::dot", giving(2.0))
    assert torch.dot(x, x).item() == 2.0
    second.remove()
    assert torch.dot(x, x).item() == 1.0
    first.remove()
    first.remove()
    torch.testing.assert_close(torch.dot(x, x), numbers(4).dot(numbers(4)))


def test_handlers_can_be_taken_off(run_mesh):
    run_mesh((2,), handles)


def test_under_torchrun():
    """As the documentation says to start it."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3",
         str(EXAMPLES / "compare.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("value and two derivatives within") == 3, done.stdout
    assert "Overriding" not in done.stderr, done.stderr

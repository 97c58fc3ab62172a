"""Published models, unchanged: everything they compute and learn as on one device.

Output, input gradient, every weight gradient and every buffer, in float64, on 1, 2, 3 and 4 ranks
along each spatial dim and on a 2 x 2 mesh over the first two, with no gather anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

# The spatial rank of each model of the zoo (which is imported by the ranks only: it takes seconds).
SPATIAL = {
    "monai.UNet": 3,
    "monai.UNet-batch-2d": 2,
    "monai.BasicUNet": 2,
    "monai.SegResNet": 3,
    "monai.VNet": 2,
    "monai.DynUNet": 3,
    "monai.AttentionUnet": 2,
    "monai.SwinUNETR-conv-parts": 3,
    "timm.resnet18": 2,
    "timm.convnext": 2,
    "smp.Unet": 2,
}
PLACES = [
    (name, shape, dims)
    for name, spatial in SPATIAL.items()
    for shape, dims in [
        *(((ranks,), (2 + d,)) for ranks in (1, 2, 3, 4) for d in range(spatial)),
        ((2, 2), (2, 3)),
    ]
]


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, (list, tuple)) else output


def _loss(output: Tensor) -> Tensor:
    """Differs at every element of the output."""
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return (output * weight + 0.5 * output * output).mean()


def save_serial_run(name: str, path: str) -> None:
    """What one device computes, written once per model."""
    import zoo

    model, x = zoo.build(name), zoo.example(name).requires_grad_()
    output = _first(model(x))
    _loss(output).backward()
    torch.save(
        {
            "output": output.detach(),
            "input": x.grad,
            "gradients": {n: p.grad for n, p in model.named_parameters()},
            "buffers": dict(model.named_buffers()),
        },
        path,
    )


def compare_model(mesh, name: str, dims: tuple[int, ...], path: str) -> dict[str, float]:
    """Runs the model on a sharded input; returns the worst relative errors."""
    import zoo
    from oracle import full, is_sharded
    from shardfield.domain_parallel import shard_tensor

    import shardfield

    serial = torch.load(path)
    model = zoo.build(name)
    x = shard_tensor(zoo.example(name), mesh, [Shard(d) for d in dims]).detach().requires_grad_()
    with shardfield.report() as report:
        output = _first(model(x))
        _loss(output).backward()
    assert is_sharded(x.grad), "the input's gradient is plain"
    everything = {"output": (output, serial["output"]), "input gradient": (x.grad, serial["input"])}
    floor = 1e-4 * max(
        (float(g.abs().max()) for g in serial["gradients"].values() if g is not None), default=1.0
    )
    for n, p in model.named_parameters():
        want = serial["gradients"][n]
        assert (p.grad is None) == (want is None), f"gradient of {n}: one side is None"
        if want is not None:
            assert not is_sharded(p.grad), f"gradient of {n} is sharded"
            everything[f"gradient of {n}"] = (p.grad, want)
    for n, b in model.named_buffers():
        everything[f"buffer {n}"] = (b, serial["buffers"][n])
    worst = {"error": 0.0}
    wrong = []
    for what, (got, want) in everything.items():
        assert tuple(got.shape) == tuple(want.shape), (
            f"{what}: {tuple(got.shape)}, serial {tuple(want.shape)}"
        )
        size = max(float(want.abs().max()), floor if what.startswith("gradient") else 1e-12)
        error = float((full(got).detach() - want).abs().max()) / size
        worst["error"] = max(worst["error"], error)
        if not error <= 1e-8:
            wrong.append(f"{what}: {error:.2e}")
    assert not wrong, f"{len(wrong)} of {len(everything)} differ: " + "; ".join(wrong[:12])
    assert not report.fallbacks, f"gathered: {dict(report.fallbacks)}"
    return worst


@pytest.fixture(scope="session")
def serial_run(pool_of, tmp_path_factory):
    """`serial_run(name)`: the file that holds the serial run of a model."""
    folder = tmp_path_factory.mktemp("serial")

    def get(name: str) -> str:
        path: Path = folder / f"{name}.pt"
        if not path.exists():
            pool_of(1).run(save_serial_run, {"name": name, "path": str(path)})
        return str(path)

    return get


@pytest.mark.parametrize(
    ("name", "shape", "dims"),
    PLACES,
    ids=[f"{n}-{'x'.join(map(str, s))}-dim{'+'.join(map(str, d))}" for n, s, d in PLACES],
)
def test_model(run_mesh, serial_run, name, shape, dims):
    run_mesh(shape, compare_model, name=name, dims=dims, path=serial_run(name), limit_s=180)

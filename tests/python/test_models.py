"""Published models, unchanged: everything they compute and learn as on one device.

Output, input gradient, every weight gradient and every buffer, in float64, with no gather anywhere:
every model on two ranks along each spatial dim, on three, on four and on a 2 x 2 mesh;
`python tests/python/zoo_table.py` runs every placement and writes docs/zoo.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from zoo import ZOO

SEED = 7


def _loss(output: Tensor) -> Tensor:
    """Differs at every element of the output."""
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return (output * weight + 0.5 * output * output).mean()


def _train(name: str, x: Tensor) -> tuple[torch.nn.Module, Tensor]:
    """One forward and backward pass; noise drawn by the model starts from one seed."""
    import zoo

    model = zoo.build(name)
    torch.manual_seed(SEED)
    output = ZOO[name].output(model(x))
    _loss(output).backward()
    return model, output


def save_oracle(mesh, name: str, path: str) -> None:
    """What one device computes, written once per model."""
    import zoo
    from oracle import full
    from shardfield.domain_parallel import shard_tensor

    x = zoo.example(name)
    if ZOO[name].draws:
        x = shard_tensor(x, mesh, [Shard(2)]).detach()
    model, output = _train(name, x.requires_grad_())
    torch.save(
        {
            "output": full(output).detach(),
            "input": full(x.grad),
            "gradients": {n: p.grad for n, p in model.named_parameters()},
            "buffers": dict(model.named_buffers()),
        },
        path,
    )


def _pairs(model, output: Tensor, x: Tensor, oracle: dict[str, Any]) -> dict[str, Any]:
    """By name: our value, the oracle's, and the least magnitude that errors are measured by.

    Weight gradients that vanish on paper (a bias before a norm) and running means of what has none
    are rounding noise.
    """
    from oracle import is_sharded

    gradients = [g for g in oracle["gradients"].values() if g is not None]
    floor = 1e-4 * max((float(g.abs().max()) for g in gradients), default=1.0)
    pairs = {
        "output": (output, oracle["output"], 1e-12),
        "input gradient": (x.grad, oracle["input"], 1e-12),
    }
    assert is_sharded(x.grad), "the input's gradient is plain"
    for n, p in model.named_parameters():
        want = oracle["gradients"][n]
        assert (p.grad is None) == (want is None), f"gradient of {n}: one side is None"
        if want is not None:
            assert not is_sharded(p.grad), f"gradient of {n} is sharded"
            pairs[f"gradient of {n}"] = (p.grad, want, floor)
    for n, b in model.named_buffers():
        pairs[f"buffer {n}"] = (b, oracle["buffers"][n], 1e-6)
    return pairs


def compare_model(mesh, name: str, dims: tuple[int, ...], path: str) -> dict[str, Any]:
    """Runs the model on a sharded input beside the oracle.

    Returns:
        "error", the largest relative difference; "fallbacks", gathers by op; "bytes", sent by this
        rank.
    """
    import zoo
    from oracle import full
    from shardfield.domain_parallel import shard_tensor

    import shardfield

    x = shard_tensor(zoo.example(name), mesh, [Shard(d) for d in dims]).detach().requires_grad_()
    with shardfield.report() as report:
        model, output = _train(name, x)
    worst = 0.0
    wrong = []
    pairs = _pairs(model, output, x, torch.load(path))
    for what, (got, want, floor) in pairs.items():
        assert tuple(got.shape) == tuple(want.shape), (
            f"{what}: {tuple(got.shape)}, serial {tuple(want.shape)}"
        )
        size = max(float(want.abs().max()), floor)
        error = float((full(got).detach() - want).abs().max()) / size
        worst = max(worst, error)
        if not error <= 1e-8:
            wrong.append(f"{what}: {error:.2e}")
    assert not wrong, f"{len(wrong)} of {len(pairs)} differ: " + "; ".join(wrong[:12])
    return {"error": worst, "fallbacks": dict(report.fallbacks), "bytes": report.bytes_sent}


Place = tuple[tuple[int, ...], tuple[int, ...]]


def every_place(name: str) -> list[Place]:
    """Meshes and the dims they cut: each dim on 1 to 4 ranks, the first two on 2 x 2."""
    lines = [((ranks,), (d,)) for ranks in (1, 2, 3, 4) for d in ZOO[name].spatial_dims]
    return [*lines, ((2, 2), (2, 3))]


def places_of_a_test_run(name: str) -> list[Place]:
    """Two ranks along each dim, three, four and 2 x 2 ranks once; a few models everywhere."""
    places = every_place(name)
    last = ZOO[name].spatial_dims[-1]
    once = {((3,), (2,)), ((4,), (last,)), ((2, 2), (2, 3))}
    if ZOO[name].only_two_ranks:
        once = set()
    return [p for p in places if ZOO[name].everywhere or p[0] == (2,) or p in once]


PLACES = [(name, *place) for name in ZOO for place in places_of_a_test_run(name)]


@pytest.fixture(scope="session")
def oracle_of(pool_of, tmp_path_factory):
    """`oracle_of(name)`: the file that holds the serial run of a model."""
    import rank_pool

    folder = tmp_path_factory.mktemp("serial")

    def get(name: str) -> str:
        path: Path = folder / f"{name}.pt"
        if not path.exists():
            case = {"shape": (1,), "function": save_oracle, "name": name, "path": str(path)}
            pool_of(1).run(rank_pool.call_on_mesh, case)
        return str(path)

    return get


@pytest.mark.parametrize(
    ("name", "shape", "dims"),
    PLACES,
    ids=[f"{n}-{'x'.join(map(str, s))}-dim{'+'.join(map(str, d))}" for n, s, d in PLACES],
)
def test_model(run_mesh, oracle_of, name, shape, dims):
    results = run_mesh(
        shape, compare_model, name=name, dims=dims, path=oracle_of(name), limit_s=180
    )
    assert not results[0]["fallbacks"], f"gathered: {results[0]['fallbacks']}"

"""Fixtures shared by all Python tests: pools of ranks, and the meshes they run on."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rank_pool

MESHES = [(1,), (2,), (3,), (4,), (2, 2)]
GEOMETRIC = ("test_geometric.py", "test_multiscale.py")


def mesh_id(shape: tuple[int, ...]) -> str:
    """The name of a mesh in test ids: "2", "2x2"."""
    return "x".join(map(str, shape))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`ranks` runs a test on 1, 2, 3 and 4 ranks; `mesh_shape` adds the 2 x 2 mesh."""
    if "ranks" in metafunc.fixturenames:
        metafunc.parametrize("ranks", (1, 2, 3, 4))
    if "mesh_shape" in metafunc.fixturenames:
        metafunc.parametrize("mesh_shape", MESHES, ids=mesh_id)


@pytest.fixture(scope="session")
def pool_of(request: pytest.FixtureRequest) -> Iterator[Callable[[int], rank_pool.RankPool]]:
    """`pool_of(n)`: the pool of n ranks, started once for the whole run."""
    preload = ["shardfield", "shardfield.domain_parallel", "oracle", "pytest"]
    # The published models take seconds to import: once in the fork server instead of once per rank.
    if any(item.path.name == "test_models.py" for item in request.session.items):
        preload.append("zoo_packages")
    if any(item.path.name in GEOMETRIC for item in request.session.items):
        preload.append("torch_geometric.nn")
    if any(item.path.name == "test_atomistic.py" for item in request.session.items):
        preload.append("mace_packages")
    if importlib.util.find_spec("shardfield") is None:
        preload = ["pytest"]
    with rank_pool.pools(preload) as get:
        yield get


@pytest.fixture
def run_ranks(pool_of: Callable[[int], rank_pool.RankPool]) -> Callable[..., list[Any]]:
    """`run_ranks(n, case, **kwargs)`: what `case(**kwargs)` returned on each of n ranks."""

    def run(
        world_size: int, case: Callable[..., Any], *, limit_s: float | None = None, **kwargs: Any
    ):
        limit = rank_pool.CASE_LIMIT_S if limit_s is None else limit_s
        return pool_of(world_size).run(case, kwargs, limit_s=limit)

    return run


@pytest.fixture
def run_mesh(run_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """`run_mesh((2, 2), case, **kwargs)`: the same for `case(mesh, **kwargs)` on that mesh."""

    def run(
        shape: tuple[int, ...],
        case: Callable[..., Any],
        *,
        limit_s: float | None = None,
        **kwargs: Any,
    ):
        return run_ranks(
            math.prod(shape),
            rank_pool.call_on_mesh,
            limit_s=limit_s,
            shape=tuple(shape),
            function=case,
            **kwargs,
        )

    return run

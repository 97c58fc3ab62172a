"""DistributedManager's groups and meshes, and the tree of groups, on the rank pools."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from shardfield._core import core
from shardfield.distributed import (
    DistributedManager,
    ProcessGroupConfig,
    ProcessGroupNode,
    UndefinedGroupError,
    UninitializedManagerError,
    all_gather_v,
    fused_all_reduce,
)
from shardfield.domain_parallel import shard_tensor
from torch.distributed.tensor import Shard


def members(name: str) -> list[int]:
    return dist.get_process_group_ranks(DistributedManager().group(name))


def a_group_of_one_comes_first() -> None:
    """Ranks of the world, not of the group that was made before the manager looked."""
    n, rank = dist.get_world_size(), dist.get_rank()
    alone = dist.new_group([n - 1])
    if rank == n - 1:
        assert fused_all_reduce(torch.ones(1), group=alone).tolist() == [1]
    DistributedManager.initialize()
    dm = DistributedManager()
    assert (dm.rank, dm.world_size, dm.local_rank) == (rank, n, rank)
    assert dm.device.index in (None, rank)
    mesh = dm.initialize_mesh((-1,), ("domain",))
    assert (dm.group_rank("domain"), dm.group_size("domain")) == (rank, n)
    x = shard_tensor(torch.arange(float(n)), mesh, [Shard(0)])
    assert x.to_local().tolist() == [rank]
    ranks = all_gather_v(torch.tensor([dm.rank]), [1] * n, group="domain")
    assert ranks.tolist() == list(range(n))
    with pytest.raises(RuntimeError, match=f"on rank {rank} of {n}"):
        all_gather_v(torch.ones(1), [2] * n, group="domain")
    DistributedManager.cleanup(barrier=True)


def test_J7_a_group_of_one_before_the_world(run_ranks, ranks):
    run_ranks(ranks, a_group_of_one_comes_first)


def starts_over_a_group_that_exists() -> None:
    with pytest.raises(UninitializedManagerError, match="call DistributedManager"):
        DistributedManager()
    DistributedManager.initialize()
    dm = DistributedManager()
    assert (dm.rank, dm.world_size) == (dist.get_rank(), dist.get_world_size())
    assert dm.launcher == "TORCH"
    assert dm.distributed == (dm.world_size > 1)
    assert dm.group() is dist.group.WORLD
    assert dm.group_names == ["world"]
    assert dm.group_name() == "world"
    assert dm is DistributedManager()
    if not torch.cuda.is_available():
        assert dm.device == torch.device("cpu")
        assert not dm.cuda
    dm.broadcast_buffers = True
    assert DistributedManager().broadcast_buffers
    with pytest.warns(UserWarning, match="already initialized"):
        DistributedManager.initialize()
    with pytest.raises(UndefinedGroupError, match=r"no group 'domain'; known are \['world'\]"):
        dm.group("domain")
    DistributedManager.cleanup(barrier=True)
    assert not DistributedManager.is_initialized()
    assert dist.is_initialized()  # it was not the manager's
    with pytest.raises(UninitializedManagerError):
        dm.rank  # noqa: B018
    DistributedManager.cleanup()


def test_takes_over_a_group_and_gives_it_back(run_ranks, ranks):
    run_ranks(ranks, starts_over_a_group_that_exists)


def blocks_and_their_orthogonal() -> None:
    DistributedManager.initialize()
    dm = DistributedManager()
    n, rank = dm.world_size, dm.rank
    size = 2 if n % 2 == 0 else n
    DistributedManager.create_process_subgroup("block", size)
    DistributedManager.create_orthogonal_process_group("across", "block")
    first = rank // size * size
    assert members("block") == list(range(first, first + size))
    assert members("across") == list(range(rank % size, n, size))
    assert dm.group_rank("block") == rank % size
    assert dm.group_size("across") == n // size
    assert dm.group_name(dm.group("across")) == "across"
    with pytest.raises(ValueError, match="exists already"):
        DistributedManager.create_process_subgroup("block", size)
    with pytest.raises(RuntimeError, match=f"divides the {n} ranks"):
        DistributedManager.create_process_subgroup("odd", n + 1)
    with pytest.raises(ValueError, match="nothing is orthogonal"):
        DistributedManager.create_orthogonal_process_group("none", "world")
    whole = all_gather_v(torch.tensor([float(rank)]), [1] * size, group="block")
    assert whole.tolist() == [float(r) for r in range(first, first + size)]
    DistributedManager.cleanup(barrier=True)


def test_subgroups_and_orthogonal_groups(run_ranks, ranks):
    run_ranks(ranks, blocks_and_their_orthogonal)


def named_meshes() -> None:
    DistributedManager.initialize()
    dm = DistributedManager()
    rank = dm.rank
    with pytest.raises(UndefinedGroupError):
        dm.mesh("domain")
    for shape, names in [
        ((3, 2), "ab"),
        ((2, 2), "a"),
        ((4,), ("a", "b")),
        ((2, 2), "aa"),
        ((0, -1), "ab"),
    ]:
        with pytest.raises(RuntimeError, match="initialize_mesh"):
            dm.initialize_mesh(shape, names)
    mesh = dm.initialize_mesh((-1, 2), ("data", "domain"))
    assert dm.mesh() is mesh is dm.global_mesh
    assert dm.mesh_dims == {"data": 2, "domain": 2}
    assert dm.mesh_sizes() == [2, 2]
    first = rank // 2 * 2
    assert members("domain") == [first, first + 1]
    assert members("data") == [rank % 2, rank % 2 + 2]
    assert dm.mesh("domain").size() == dm.group_size("domain") == 2
    assert dist.get_process_group_ranks(dm.get_mesh_group(mesh)) == [0, 1, 2, 3]
    # The axes in the other order.
    turned = dm.initialize_mesh((2, 2), ("domain", "data"), name="turned")
    assert dm.mesh("turned") is turned
    assert turned["domain"].mesh.tolist() == [rank % 2, rank % 2 + 2]
    assert dm.mesh_names() == ["global", "turned", "data", "domain"]
    x = torch.arange(6.0).reshape(3, 2)
    assert shard_tensor(x, dm.mesh("domain"), [Shard(0)]).full_tensor().tolist() == x.tolist()
    DistributedManager.cleanup(barrier=True)


def test_K5_named_meshes_and_their_groups(run_ranks):
    run_ranks(4, named_meshes)


def tree_of_groups() -> None:
    DistributedManager.initialize()
    rank = DistributedManager().rank
    config = ProcessGroupConfig(ProcessGroupNode("world"))
    config.add_node(ProcessGroupNode("model"), parent="world")
    config.add_node(ProcessGroupNode("data"), parent="world")
    config.add_node(ProcessGroupNode("height", size=2), parent="model")
    config.add_node(ProcessGroupNode("width", size=1), parent="model")
    DistributedManager.create_groups_from_config(config)
    first = rank // 2 * 2
    assert members("model") == members("height") == [first, first + 1]
    assert members("data") == [rank % 2, rank % 2 + 2]
    assert members("width") == [rank]
    rows = ProcessGroupConfig(ProcessGroupNode("world"))
    rows.add_node(ProcessGroupNode("outer", 2), parent="world")
    rows.add_node(ProcessGroupNode("inner"), parent="world")
    DistributedManager.create_groups_from_config(rows, innermost="last")
    assert members("inner") == [first, first + 1]
    assert members("outer") == [rank % 2, rank % 2 + 2]
    wrong = ProcessGroupConfig(ProcessGroupNode("world"))
    wrong.add_node(ProcessGroupNode("three", size=3), parent="world")
    with pytest.raises(RuntimeError, match="three=3"):
        DistributedManager.create_groups_from_config(wrong)
    for size in (0, -1, 2.0, "2"):
        wrong.get_node("three").size = size
        with pytest.raises(ValueError, match=r"size of 1 or more for 'three'.*got"):
            DistributedManager.create_groups_from_config(wrong)
    half = ProcessGroupConfig(ProcessGroupNode("world"))
    half.add_node(ProcessGroupNode("fresh", 2), parent="world")
    half.add_node(ProcessGroupNode("data"), parent="world")
    with pytest.raises(ValueError, match="'data' exists already"):
        DistributedManager.create_groups_from_config(half)
    with pytest.raises(ValueError, match="'data' exists already"):
        DistributedManager().initialize_mesh((2, 2), ("fresh", "data"))
    assert "fresh" not in DistributedManager().group_names  # nothing was made half
    assert DistributedManager().global_mesh is None
    name = DistributedManager.create_group_from_node(ProcessGroupNode("pair", 2))
    assert members(name) == [rank % 2, rank % 2 + 2]
    DistributedManager.cleanup(barrier=True)


def test_tree_of_groups(run_ranks):
    run_ranks(4, tree_of_groups)


def test_sizes_of_a_tree():
    config = ProcessGroupConfig(ProcessGroupNode("world"))
    config.add_node(ProcessGroupNode("model"), parent="world")
    config.add_node(ProcessGroupNode("data"), parent="world")
    config.add_node(ProcessGroupNode("channel"), parent="model")
    config.add_node(ProcessGroupNode("spatial"), parent="model")
    assert config.leaf_groups() == ["data", "channel", "spatial"]
    config.set_leaf_group_sizes({"channel": 3, "spatial": 2, "data": 4})
    assert config.get_node("model").size == 6
    assert config.get_node("world").size == 24
    config.set_leaf_group_sizes({"data": 2})
    assert config.update_parent_sizes() == 12
    with pytest.raises(ValueError, match="'model' is no leaf"):
        config.set_leaf_group_sizes({"model": 2})
    with pytest.raises(ValueError, match="'data' already"):
        config.add_node(ProcessGroupNode("data"), parent="model")
    with pytest.raises(ValueError, match="no group 'nobody'"):
        config.get_node("nobody")
    fixed = ProcessGroupConfig(ProcessGroupNode("world", size=8))
    fixed.add_node(ProcessGroupNode("data"), parent="world")
    fixed.add_node(ProcessGroupNode("domain"), parent="world")
    with pytest.raises(RuntimeError, match="data=2, domain=3 = 6"):
        fixed.set_leaf_group_sizes({"data": 2, "domain": 3})
    fixed.set_leaf_group_sizes({"data": 2, "domain": 4})


def explicit_values() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "one")
        with pytest.raises(RuntimeError, match="whole number in LOCAL_RANK, got 'one'"):
            DistributedManager.initialize()
    with pytest.raises(ValueError, match=r"expected a rank in \[0, 2\), got 2"):
        DistributedManager.setup(rank=2, world_size=2)
    with pytest.raises(RuntimeError, match=r"torch\.distributed is rank"):
        DistributedManager.setup(rank=0, world_size=9)
    assert not DistributedManager.is_initialized()
    DistributedManager.setup(rank=dist.get_rank(), world_size=dist.get_world_size(), local_rank=3)
    dm = DistributedManager()
    assert dm.local_rank == 3
    visible = torch.cuda.device_count()
    assert dm.device == (torch.device("cuda", 3 % visible) if visible else torch.device("cpu"))
    DistributedManager.cleanup()


def test_K3_explicit_values_and_a_local_rank_beyond_the_devices(run_ranks):
    run_ranks(2, explicit_values)


def test_K3_the_accelerator_of_a_local_rank():
    """What the manager asks on every host, here without any accelerator; -1 stands for the CPU."""
    local_and_visible = [(3, 1), (0, 4), (3, 4), (5, 4), (3, 0), (0, 0)]
    assert [core.device_index(*pair) for pair in local_and_visible] == [0, 0, 3, 1, -1, -1]

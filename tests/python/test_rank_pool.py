"""The pool itself: results by rank, failures with traces, deaths and hangs, restarts."""

from __future__ import annotations

import os
import time

import pytest
import rank_pool
import torch
import torch.distributed as dist


def sum_of_ranks(scale: int) -> int:
    value = torch.tensor(scale * (dist.get_rank() + 1))
    dist.all_reduce(value)
    return int(value)


def fail_on(rank: int, how: str) -> int:
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("this rank had enough")
        if how == "die":
            os._exit(7)
        if how == "hang":
            time.sleep(3600)
    return dist.get_rank()


def skip_a_collective_on_the_last_rank() -> None:
    if dist.get_rank() != dist.get_world_size() - 1:
        dist.all_reduce(torch.ones(3))


def coordinates(mesh) -> list[int]:
    return list(mesh.get_coordinate())


def threads() -> int:
    return torch.get_num_threads()


def process_id() -> int:
    return os.getpid()


def test_every_rank_answers(run_ranks, ranks):
    assert run_ranks(ranks, sum_of_ranks, scale=3) == [3 * ranks * (ranks + 1) // 2] * ranks


def test_meshes(run_mesh, mesh_shape):
    places = run_mesh(mesh_shape, coordinates)
    assert sorted(map(tuple, places)) == sorted(
        map(
            tuple,
            torch.cartesian_prod(*(torch.arange(n) for n in mesh_shape))
            .reshape(-1, len(mesh_shape))
            .tolist(),
        )
    )


def test_one_thread_per_rank(run_ranks):
    assert run_ranks(2, threads) == [1, 1]


def test_processes_are_kept_between_cases(run_ranks):
    assert run_ranks(2, process_id) == run_ranks(2, process_id)


def test_an_exception_comes_back_with_its_trace_and_the_pool_recovers(run_ranks):
    with pytest.raises(
        rank_pool.RankFailure, match="rank 1: ValueError: this rank had enough"
    ) as caught:
        run_ranks(3, fail_on, rank=1, how="raise")
    assert "in fail_on" in str(caught.value)
    assert run_ranks(3, sum_of_ranks, scale=1) == [6, 6, 6]


def test_a_dead_rank_is_named_and_the_pool_recovers(run_ranks):
    began = time.monotonic()
    with pytest.raises(rank_pool.RankFailure, match="rank 0 died with exit code 7"):
        run_ranks(2, fail_on, rank=0, how="die")
    assert time.monotonic() - began < 30
    assert run_ranks(2, sum_of_ranks, scale=1) == [3, 3]


def test_a_hanging_rank_is_named_with_its_stack(run_ranks):
    began = time.monotonic()
    with pytest.raises(rank_pool.RankFailure, match="rank 1 did not answer") as caught:
        run_ranks(2, fail_on, rank=1, how="hang", limit_s=2)
    assert time.monotonic() - began < 30
    assert "fail_on" in str(caught.value)
    assert run_ranks(2, sum_of_ranks, scale=1) == [3, 3]


def test_a_skipped_collective_is_charged_to_its_own_case(run_ranks):
    with pytest.raises(rank_pool.RankFailure):
        run_ranks(2, skip_a_collective_on_the_last_rank, limit_s=5)
    assert run_ranks(2, sum_of_ranks, scale=1) == [3, 3]


def test_ranks_leave_with_exit_code_0():
    with rank_pool.pools() as pool_of:
        pool = pool_of(2)
        assert pool.run(sum_of_ranks, {"scale": 1}) == [3, 3]
    assert pool.exit_codes == [0, 0]

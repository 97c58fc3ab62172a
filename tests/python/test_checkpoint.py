"""Checkpoints: written once per byte, read on any other layout, refused when damaged."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import pickle
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from oracle import arange, assert_equal, full, numbers, sharded
from rank_pool import RankFailure, mesh_of
from shardfield._core import core
from shardfield._mesh import core_mesh
from shardfield.checkpoint._format import BLOCK_BYTES
from shardfield.checkpoint._plan import assign_owners, check_cover
from shardfield.checkpoint._sharded import index_bytes
from shardfield.domain_parallel import shard_tensor
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from shardfield.checkpoint import (
    CheckpointError,
    Reader,
    load_full,
    load_sharded,
    save_full,
    save_sharded,
)

INDEX = "shardfield.index.json"


def chunked(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Cut over all ranks of the pool, as torch.chunk cuts."""
    return shard_tensor(value, mesh_of((dist.get_world_size(),)), [Shard(dim)])


def data_bytes(folder: str) -> int:
    """Bytes of tensors in all files of a folder."""
    found = 0
    for path in Path(folder).glob("*.safetensors"):
        reader = Reader(path)
        found += sum(reader.meta(name).nbytes for name in reader.names)
    return found


# ------------------------------------------------------------------------------ other rank counts


def save_rows(folder: str, rows: int) -> None:
    save_sharded(folder, {"x": chunked(arange(rows, 3)), "w": numbers(4, 2), "step": 7}, rng=False)
    if dist.get_rank() == 0:
        assert data_bytes(folder) == (rows * 3 + 8) * 8
    dist.barrier()


def load_rows(folder: str, rows: int, dim: int = 0) -> None:
    x = chunked(torch.zeros(rows, 3, dtype=torch.float64), dim)
    w = torch.zeros(4, 2, dtype=torch.float64)
    state = load_sharded(folder, {"x": x, "w": w, "step": 0})
    assert state["step"] == 7
    assert state["x"] is x
    assert_equal(x, arange(rows, 3), "cut rows")
    assert_equal(w, numbers(4, 2), "plain tensor")
    reader = Reader(folder)
    piece = x.to_local()
    box = (tuple(x.offsets()), tuple(piece.shape))
    assert torch.equal(reader.read("x", box), piece)
    assert reader.bytes_read == piece.nbytes


@pytest.mark.parametrize("rows", [6, 1])
def test_N1_N3_saved_on_four_ranks_loaded_on_others(run_ranks, tmp_path, rows):
    folder = str(tmp_path)
    run_ranks(4, save_rows, folder=folder, rows=rows)
    for ranks in (1, 2, 3, 4, 5):
        run_ranks(ranks, load_rows, folder=folder, rows=rows)
        run_ranks(ranks, load_rows, folder=folder, rows=rows, dim=1)


def test_N1_forty_rows_over_thirty_ranks():
    manifests = []
    for rank in range(30):  # pieces of 2 rows, from rank 20 on empty
        rows = max(0, min(2, 40 - 2 * rank))
        offset = [min(2 * rank, 40), 0]
        manifests.append(
            {"x": {"shape": [40, 3], "dtype": "F32", "offset": offset, "piece": [rows, 3]}}
        )
    owners = assign_owners(manifests, {"x": 4})
    covered = [
        row for _, (offset, shape) in owners["x"] for row in range(offset[0], offset[0] + shape[0])
    ]
    assert sorted(covered) == list(range(40))
    assert len(owners["x"]) == 20
    manifests[3]["x"]["offset"] = [5, 0]
    with pytest.raises(CheckpointError, match=r"do not hold each element once"):
        assign_owners(manifests, {"x": 4})


def test_pieces_that_overlap_or_leave_holes():
    """Random cuts of a box, moved and stretched at random, against counting every element."""
    dice = random.Random(5)
    outcomes = set()
    for _ in range(300):
        shape = [dice.randrange(1, 6) for _ in range(dice.randrange(4))]
        boxes = [((0,) * len(shape), tuple(shape))]
        for _ in range(dice.randrange(6) if shape else 0):
            offset, size = boxes.pop(dice.randrange(len(boxes)))
            d = dice.randrange(len(shape))
            at = dice.randrange(size[d] + 1)
            for start, n in ((0, at), (at, size[d] - at)):
                boxes.append(
                    (
                        (*offset[:d], offset[d] + start, *offset[d + 1 :]),
                        (*size[:d], n, *size[d + 1 :]),
                    )
                )
        if dice.random() < 0.5 and shape:
            i, d = dice.randrange(len(boxes)), dice.randrange(len(shape))
            change = [list(part) for part in boxes[i]]
            change[dice.randrange(2)][d] += dice.choice((-1, 1))
            boxes[i] = (tuple(change[0]), tuple(change[1]))
        count = torch.zeros(shape, dtype=torch.int64)
        inside = True
        for offset, size in boxes:
            ends = zip(offset, size, shape, strict=True)
            inside &= all(o >= 0 and n >= 0 and o + n <= m for o, n, m in ends)
            count[
                tuple(slice(max(o, 0), max(o + n, 0)) for o, n in zip(offset, size, strict=True))
            ] += 1
        good = inside and bool((count == 1).all())
        outcomes.add(good)
        try:
            check_cover("x", shape, boxes)
            assert good, boxes
        except CheckpointError:
            assert not good, boxes
    assert outcomes == {True, False}


def test_thousands_of_pieces_are_compared_in_no_time():
    grid = [((i, 8 * j), (1, 8)) for i in range(64) for j in range(64)]
    began = time.monotonic()
    check_cover("x", (64, 512), grid)
    with pytest.raises(CheckpointError, match="and 4080 more"):
        check_cover("x", (64, 512), [*grid[:-1], grid[0]])
    assert (
        time.monotonic() - began < 10
    )  # 8 million comparisons where every piece meets every other


def save_on_two_axes(folder: str) -> None:
    mesh = mesh_of((2, 2))
    x = shard_tensor(arange(5, 3), mesh, [Shard(0), Shard(0)])
    assert x.to_local().shape[0] == [2, 1, 1, 1][dist.get_rank()]
    d = distribute_tensor(arange(5, 3), mesh, [Shard(0), Shard(1)])
    save_sharded(folder, {"x": x, "d": d}, rng=False)


def load_on_two_axes(folder: str) -> None:
    mesh = mesh_of((2, 2))
    d = distribute_tensor(torch.zeros(5, 3, dtype=torch.float64), mesh, [Shard(0), Shard(0)])
    x = shard_tensor(torch.zeros(5, 3, dtype=torch.float64), mesh, [Shard(1), Shard(0)])
    load_sharded(folder, {"x": x, "d": d})
    assert_equal(x, arange(5, 3), "sharded")
    assert torch.equal(d.full_tensor(), arange(5, 3))


def load_plain(folder: str) -> None:
    found = load_sharded(folder)
    assert all(torch.equal(found[name], arange(5, 3)) for name in ("x", "d"))


def test_N3_five_rows_on_a_two_by_two_mesh(run_ranks, tmp_path):
    folder = str(tmp_path)
    run_ranks(4, save_on_two_axes, folder=folder)
    run_ranks(4, load_on_two_axes, folder=folder)
    run_ranks(3, load_plain, folder=folder)


def two_level_net() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(4, 10), nn.Linear(10, 3)).double()


def save_with_strided_shards(folder: str) -> None:
    """FSDP2 over one axis of a tensor-parallel layer: both axes cut the same dim."""
    mesh = mesh_of((2, 2), ("data", "model"))
    net = parallelize_module(
        two_level_net(), mesh["model"], {"0": ColwiseParallel(), "1": RowwiseParallel()}
    )
    fully_shard(net, mesh=mesh["data"])
    save_sharded(folder, {"model": net}, rng=False)


def load_into_plain(folder: str) -> None:
    net = two_level_net()
    wanted = {k: v.clone() for k, v in net.state_dict().items()}
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    load_sharded(folder, {"model": net})
    for name, value in net.state_dict().items():
        assert torch.equal(value, wanted[name]), name


def test_N3_two_axes_that_cut_one_dim_of_a_model(run_ranks, tmp_path):
    run_ranks(4, save_with_strided_shards, folder=str(tmp_path))
    run_ranks(3, load_into_plain, folder=str(tmp_path))


def save_fused(folder: str) -> None:
    save_sharded(folder, {"w": chunked(arange(16))}, rng=False)


def load_fused(folder: str) -> None:
    w = chunked(torch.zeros(16, dtype=torch.float64))
    load_sharded(folder, {"w": w})
    assert full(w).tolist() == list(range(16))


def test_N5_a_fused_weight_keeps_its_order(run_ranks, tmp_path):
    run_ranks(8, save_fused, folder=str(tmp_path))
    for ranks in (1, 2, 4):
        run_ranks(ranks, load_fused, folder=str(tmp_path))


def uneven_and_moved(mesh, folder: str) -> None:
    n = mesh.size()
    sizes = [5] + [0] * (n - 1)
    x = sharded(numbers(5, 4), mesh, 0, sizes)
    save_sharded(folder, {"x": x}, rng=False)
    target = sharded(torch.zeros(5, 4, dtype=torch.float64), mesh, 0, sizes[::-1])
    load_sharded(folder, {"x": target})
    assert_equal(target, numbers(5, 4), "other piece sizes")


def test_other_piece_sizes(run_mesh, ranks, tmp_path):
    run_mesh((ranks,), uneven_and_moved, folder=str(tmp_path))


def every_dtype(folder: str) -> None:
    values = {}
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ):
        value = numbers(5, 2)
        value = (
            torch.complex(value, -value).to(dtype) if dtype.is_complex else (value > 0).to(dtype)
        )
        values[str(dtype)] = value
    values["scalar"] = torch.tensor(3.5)
    # Numbers that JSON has no word for.
    extra = {"inf": float("inf"), "nested": [float("-inf"), {3: "three"}]}
    save_sharded(folder, {**extra, "nan": float("nan")}, rng=False)
    found = load_sharded(folder)
    assert math.isnan(found.pop("nan"))
    assert found == extra
    values["empty"] = torch.zeros(0, 3)
    cut = {name: chunked(v) if v.dim() and v.numel() else v for name, v in values.items()}
    save_sharded(folder, cut, rng=False)
    loaded = load_sharded(folder)
    save_full(f"{folder}/all.safetensors", cut)
    whole = load_full(f"{folder}/all.safetensors")
    for name, value in values.items():
        for found in (loaded[name], whole[name]):
            assert found.dtype == value.dtype
            assert torch.equal(found, value), name


def test_every_dtype(run_ranks, tmp_path):
    run_ranks(2, every_dtype, folder=str(tmp_path))


# ------------------------------------------------------------------------------- a whole training


class Net(nn.Module):
    """A plain layer with dropout beside a weight that is cut over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.plain = nn.Linear(6, 6).double()
        self.cut = nn.Parameter(chunked(numbers(6, 6)))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.dropout(self.plain(x), 0.5, True)
        return nn.functional.linear(hidden, self.cut).pow(2).sum()


def parts() -> dict:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    return {"model": net, "optimizer": optimizer, "scheduler": scheduler, "step": 0}


def train(state: dict, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        state["optimizer"].zero_grad()
        loss = state["model"](numbers(2, 6, seed=state["step"]))
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["step"] += 1
        losses.append(float(loss))
    return losses


def train_and_save(folder: str, async_op: bool = False) -> list[float]:
    state = parts()
    torch.manual_seed(11)
    train(state, 3)
    handle = save_sharded(folder, state, async_op=async_op)
    losses = train(state, 3)
    if async_op:
        handle.wait()
        assert handle.done()
    return losses


def load_and_train(folder: str) -> list[float]:
    state = parts()
    loaded = load_sharded(folder, state)
    assert loaded["model"] is state["model"]
    assert int(state["model"].calls) == 3
    moments = state["optimizer"].state[state["model"].cut]["exp_avg"]
    assert moments.to_local().shape == state["model"].cut.to_local().shape
    assert state["optimizer"].param_groups[0]["lr"] == 0.005
    return train(loaded, 3)


@pytest.mark.parametrize("async_op", [False, True])
def test_training_goes_on_as_if_it_had_not_stopped(run_ranks, tmp_path, async_op):
    folder = str(tmp_path)
    wanted = run_ranks(4, train_and_save, folder=folder, async_op=async_op)
    for ranks in (4, 2, 1):
        for losses in run_ranks(ranks, load_and_train, folder=folder):
            assert losses == pytest.approx(wanted[0], rel=1e-12)


def every_rank_keeps_its_generator(folder: str) -> None:
    torch.manual_seed(dist.get_rank())
    save_sharded(folder, {"step": 1})
    wanted = torch.rand(3)
    torch.manual_seed(99)
    assert load_sharded(folder, {"step": 0})["step"] == 1
    assert torch.equal(torch.rand(3), wanted)


def test_every_rank_keeps_its_generator(run_ranks, ranks, tmp_path):
    run_ranks(ranks, every_rank_keeps_its_generator, folder=str(tmp_path))


# ------------------------------------------------------------------------------------ whole files


def save_whole(folder: str) -> None:
    mesh = mesh_of((dist.get_world_size(),))
    values = {
        "sharded": chunked(numbers(5, 4)),
        "columns": chunked(numbers(4, 5, seed=1), 1),
        "dtensor": distribute_tensor(numbers(5, 4, seed=2), mesh, [Shard(0)]),
        "plain": numbers(3, seed=3),
    }
    state = {"values": values, "note": "text", "sizes": (1, [2.5, None, True])}
    save_full(f"{folder}/state.pt", state)
    save_full(values, f"{folder}/values.safetensors")  # either order
    with pytest.raises(TypeError, match="expected a path and a state, got dict and int"):
        save_full(values, 3)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    wanted = {k: v.clone() for k, v in net.state_dict().items()}
    fully_shard(net, mesh=mesh)
    save_full(f"{folder}/net.pt", net)
    found = torch.load(f"{folder}/net.pt", weights_only=True)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[k], wanted[k]) for k in wanted)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    load_full(f"{folder}/net.pt", net)
    assert all(torch.equal(v.full_tensor(), wanted[k]) for k, v in net.state_dict().items())
    target = {k: torch.zeros_like(v) for k, v in values.items()}
    load_full(target, f"{folder}/values.safetensors")
    assert_equal(target["sharded"], numbers(5, 4), "sharded")
    assert_equal(target["columns"], numbers(4, 5, seed=1), "columns")


def test_whole_files_need_no_shardfield(run_ranks, ranks, tmp_path):
    run_ranks(ranks, save_whole, folder=str(tmp_path))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["note"] == "text"
    assert state["sizes"] == (1, [2.5, None, True])
    flat = safetensors.torch.load_file(tmp_path / "values.safetensors")
    for values in (state["values"], flat):
        assert torch.equal(values["sharded"], numbers(5, 4))
        assert torch.equal(values["columns"], numbers(4, 5, seed=1))
        assert torch.equal(values["dtensor"], numbers(5, 4, seed=2))
        assert torch.equal(values["plain"], numbers(3, seed=3))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "net.pt",
        "state.pt",
        "values.safetensors",
    ]


def gathered_one_at_a_time(folder: str) -> int:
    """The most whole tensors that are alive while one of six is written."""
    rows, most = 4096, 0

    def look(done: int, of: int) -> None:
        nonlocal most
        gc.collect()
        alive = {
            o.untyped_storage().data_ptr()
            for o in gc.get_objects()
            if type(o) is torch.Tensor and not hasattr(o, "to_local") and o.numel() == rows * 8
        }
        most = max(most, len(alive))

    state = {str(i): chunked(numbers(rows, 8, seed=i)) for i in range(6)}
    save_full(f"{folder}/all.safetensors", state, progress=look)
    return most


def test_one_whole_tensor_at_a_time(run_ranks, tmp_path):
    assert run_ranks(2, gathered_one_at_a_time, folder=str(tmp_path)) == [1, 0]
    assert len(safetensors.torch.load_file(tmp_path / "all.safetensors")) == 6


def naive_save(folder: str) -> None:
    net = Net()
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        torch.save(net.state_dict(), f"{folder}/rank{dist.get_rank()}.pt")


def test_the_naive_save_is_refused(run_ranks, tmp_path):
    run_ranks(2, naive_save, folder=str(tmp_path))


# ----------------------------------------------------------------------------------------- errors


def refused_saves(folder: str) -> list[str]:
    rank = dist.get_rank()
    x = torch.ones(2)
    texts = []
    for state in (
        {"a": x, "b": x} if rank == 0 else {"a": x},
        {"a": torch.ones(2 + rank)},
        {"a": x, "step": float("nan") if rank else 0.0},
        {"a": object() if rank == 1 else 1},
    ):
        with pytest.raises(CheckpointError) as caught:
            save_sharded(folder, state)
        texts.append(str(caught.value))
    assert not list(Path(folder).glob("*.safetensors"))
    save_sharded(folder, {"a": x})
    for state, text in (
        ({"b": x}, r"only in the state \['b'\]"),
        ({"a": {"c": x}}, r"only in the state \['a/c'\], only in the checkpoint \['a'\]"),
        ({"a": torch.ones(3)}, r"'a' is F32 \[2\] in the checkpoint, the state expects F32 \[3\]"),
        ({"a": torch.ones(2, dtype=torch.float64)}, "expects F64"),
    ):
        with pytest.raises(CheckpointError, match=text):
            load_sharded(folder, state)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_sharded(f"{folder}/nothing", {"a": x})
    return texts


def test_N7_ranks_that_differ_get_the_same_error(run_ranks, tmp_path):
    here, there = run_ranks(2, refused_saves, folder=str(tmp_path))
    assert here == there
    assert "'b' is missing on ranks [1]" in here[0]
    assert "'a' differs between ranks" in here[1]
    assert "ranks [1] hold other values" in here[2]
    assert "ranks [1]: checkpoint: 'a' is a object" in here[3]


def test_a_damaged_byte_is_found(tmp_path):
    value = torch.arange(BLOCK_BYTES // 4 + 10, dtype=torch.float32)  # two blocks
    save_sharded(tmp_path, {"x": value}, rng=False)
    (path,) = tmp_path.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="the file is damaged"):
        load_sharded(tmp_path)
    # A range in the whole block is still good, and checks can be left out.
    assert torch.equal(Reader(tmp_path).read("x", ((0,), (5,))), value[:5])
    assert load_sharded(tmp_path, verify=False)["x"].shape == value.shape
    path.write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match="cut off inside"):
        load_sharded(tmp_path, verify=False)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_sharded(tmp_path)


def test_malformed_files_are_refused_whatever_is_in_them(tmp_path):
    state = {"x": numbers(4, 3), "y": torch.ones(2, dtype=torch.bool), "n": [1, "two"]}
    save_sharded(tmp_path / "pieces", state, rng=False)
    save_full(tmp_path / "whole.safetensors", state)
    save_full(tmp_path / "whole.pt", state)
    dice = random.Random(1)
    for path, load in (
        (tmp_path / "pieces" / INDEX, lambda: load_sharded(tmp_path / "pieces")),
        (tmp_path / "whole.safetensors", lambda: load_full(tmp_path / "whole.safetensors")),
        (tmp_path / "whole.pt", lambda: load_full(tmp_path / "whole.pt")),
    ):
        good = path.read_bytes()
        refused = 0
        for _ in range(60):
            bad = bytearray(good)
            if dice.random() < 0.3:
                del bad[dice.randrange(len(bad)) :]
            else:
                for _ in range(dice.randrange(1, 6)):
                    bad[dice.randrange(min(len(bad), 400))] = dice.randrange(256)
            path.write_bytes(bad)
            try:
                load()
            except CheckpointError:
                refused += 1
        assert refused > 20, path
        path.write_bytes(good)
        assert load()["n"] == [1, "two"]


class Intruder:
    """Pickled by hand: whoever unpickles it writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def no_pickle(*args, **kwargs):
    raise AssertionError("a pickle was read or written")


def saved_and_loaded_without_pickle(folder: str) -> None:
    net = nn.Linear(3, 2)
    state = {"net": net, "x": chunked(numbers(4, 3)), "note": ["text", 1.5]}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
            patch.setattr(pickle, name, no_pickle)
        save_sharded(f"{folder}/pieces", state)
        assert load_sharded(f"{folder}/pieces", state)["note"] == ["text", 1.5]
        save_full(f"{folder}/net.safetensors", net)
        load_full(f"{folder}/net.safetensors", net)
        load_full(f"{folder}/net.pt", net)


def test_nothing_is_unpickled(run_ranks, tmp_path):
    net = nn.Linear(3, 2)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    run_ranks(2, saved_and_loaded_without_pickle, folder=str(tmp_path))
    torch.save({"x": torch.ones(1), "y": Intruder(str(tmp_path / "was_here"))}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_full(tmp_path / "bad.pt")
    assert not (tmp_path / "was_here").exists()


def test_an_index_that_names_foreign_files_is_refused(tmp_path):
    save_sharded(tmp_path, {"x": torch.ones(2)}, rng=False)
    body = json.loads((tmp_path / INDEX).read_text())["index"]
    piece = body["tensors"]["x"]["pieces"][0]
    for offset in ([-1], [1], [2**62], [0, 0]):
        piece["offset"] = offset
        (tmp_path / INDEX).write_bytes(index_bytes(body))
        with pytest.raises(CheckpointError, match="do not hold each element once"):
            load_sharded(tmp_path)
    piece["offset"] = [0]
    for change in ("../../etc/passwd", "/etc/passwd", "../0123456789abcdef-r00000.safetensors"):
        piece["file"] = change
        (tmp_path / INDEX).write_bytes(index_bytes(body))
        with pytest.raises(CheckpointError, match="names the file"):
            load_sharded(tmp_path)
    body["version"] = 2
    (tmp_path / INDEX).write_bytes(index_bytes(body))
    with pytest.raises(CheckpointError, match="version 2"):
        load_sharded(tmp_path)


def read_in_cpp(folder: str) -> None:
    reader = core.CheckpointReader(folder, True)
    x = chunked(torch.zeros(6, 3, dtype=torch.float64), 1)
    reader.read_into("x", x)
    assert_equal(x, arange(6, 3), "sharded")
    assert reader.bytes_read == x.to_local().nbytes
    w = torch.zeros(4, 2, dtype=torch.float64)
    reader.read_into("w", w)
    assert_equal(w, numbers(4, 2), "plain")
    assert reader.integer("step") == 7
    with pytest.raises(RuntimeError, match="no tensor 'y'"):
        reader.read_into("y", w)
    with pytest.raises(RuntimeError, match=r"'w' is Double \[4, 2\] in the checkpoint"):
        reader.read_into("w", w.float())


def test_the_reader_in_cpp(run_ranks, tmp_path):
    run_ranks(4, save_rows, folder=str(tmp_path), rows=6)
    for ranks in (1, 3):
        run_ranks(ranks, read_in_cpp, folder=str(tmp_path))


def write_in_cpp(folder: str) -> None:
    mesh = mesh_of((dist.get_world_size(),))
    tensors = {
        "part/x": chunked(arange(6, 3)),
        "part/w": numbers(4, 2),
        "z": torch.complex(numbers(3), numbers(3, seed=1)).conj(),
        "b": torch.tensor(True),
    }
    core.save_checkpoint(folder, tensors, {"step": 9}, core_mesh(mesh))


def test_the_writer_in_cpp(run_ranks, tmp_path):
    run_ranks(3, write_in_cpp, folder=str(tmp_path))
    found = load_sharded(tmp_path)
    assert found["step"] == 9
    assert torch.equal(found["part"]["x"], arange(6, 3))
    assert torch.equal(found["part"]["w"], numbers(4, 2))
    assert torch.equal(found["z"], torch.complex(numbers(3), -numbers(3, seed=1)))
    assert bool(found["b"])
    for path in tmp_path.glob("*.safetensors"):
        safetensors.torch.load_file(path)  # files of the format, whoever reads them


def test_sha256():
    for size in (0, 1, 55, 56, 63, 64, 65, 1000):
        data = bytes(i % 251 for i in range(size))
        assert core.sha256(data) == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("async_op", [False, True])
def test_killed_at_any_moment_the_last_good_checkpoint_loads(tmp_path, async_op):
    """A process saves step after step and is killed; what is there loads and is of one step."""
    dice = random.Random(2)
    seen = set()
    save_sharded(tmp_path, {"x": torch.zeros(40000), "step": 0}, rng=False)
    for _ in range(15):
        child = os.fork()
        if child == 0:
            try:
                step = load_sharded(tmp_path, rng=False)["step"]
                x = torch.zeros(40000)
                while True:
                    step += 1
                    x.fill_(step)  # while the save before may still be on its way to the disk
                    save_sharded(tmp_path, {"x": x, "step": step}, rng=False, async_op=async_op)
            finally:
                os._exit(1)
        time.sleep(dice.uniform(0.01, 0.12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = load_sharded(tmp_path)
        assert torch.equal(found["x"], torch.full((40000,), float(found["step"])))
        seen.add(found["step"])
    assert len(seen) > 3
    (tmp_path / f"{INDEX}.tmp-1").write_text("killed before the rename")
    save_sharded(tmp_path, {"x": torch.ones(1), "step": 1}, rng=False)
    assert len(list(tmp_path.iterdir())) == 2


def one_rank_is_killed(folder: str, after_s: float) -> None:
    """Both save step after step; rank 1 is killed by a timer, wherever it is by then."""
    x = chunked(torch.zeros(20000, 2))
    step = 0
    while True:
        with torch.no_grad():
            x.fill_(step)
        save_sharded(folder, {"x": x, "step": step}, rng=False)
        if step == 0 and dist.get_rank() == 1:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        step += 1


@pytest.mark.parametrize("after_s", [0.05, 0.11, 0.2])
def test_a_rank_killed_while_saving_leaves_a_checkpoint_and_no_hang(run_ranks, tmp_path, after_s):
    folder = str(tmp_path)
    began = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 died with exit code -9") as caught:
        run_ranks(2, one_rank_is_killed, folder=folder, after_s=after_s)
    assert time.monotonic() - began < 60
    survivor = caught.value.answers[0]
    assert survivor is not None, "rank 0 hangs"
    assert "peer failed" in survivor.error
    found = load_sharded(folder)
    assert torch.equal(found["x"], torch.full((20000, 2), float(found["step"])))


def progress_of_a_save(folder: str) -> None:
    told: list[tuple[int, int]] = []
    value = torch.ones(BLOCK_BYTES // 4 + 1)
    save_sharded(folder, {"x": value}, rng=False, progress=lambda done, of: told.append((done, of)))
    if dist.get_rank() == 0:
        assert told == [(BLOCK_BYTES, value.nbytes), (value.nbytes, value.nbytes)]
    else:
        assert told == []
    save_sharded(folder, {"x": value}, rng=False, progress=True)


def test_progress(run_ranks, tmp_path):
    run_ranks(2, progress_of_a_save, folder=str(tmp_path))

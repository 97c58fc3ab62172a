"""What a checkpoint's state may hold: objects in lists, numbers and names of any kind; torch's own."""

from __future__ import annotations

import zipfile

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from oracle import arange, assert_equal, numbers
from rank_pool import mesh_of
from test_checkpoint import chunked
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from shardfield.checkpoint import (
    CheckpointError,
    Reader,
    load_dcp,
    load_full,
    load_sharded,
    save_full,
    save_sharded,
)


def two_of_each() -> dict:
    """A generator and its critic, say: objects in lists and tuples."""
    nets = [nn.Linear(3, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in nets]
    schedulers = tuple(torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers)
    return {"nets": nets, "optimizers": optimizers, "schedulers": schedulers, "losses": []}


def objects_in_lists(folder: str) -> None:
    saved, fresh = two_of_each(), two_of_each()
    for net, optimizer in zip(saved["nets"], saved["optimizers"], strict=True):
        net(torch.ones(1, net.in_features)).sum().backward()
        optimizer.step()
    saved["schedulers"][1].step()
    saved["losses"] = [2.0, 1.0]
    save_sharded(f"{folder}/pieces", saved)
    save_full(f"{folder}/one.pt", saved)
    for load, path in ((load_sharded, "pieces"), (load_full, "one.pt")):
        got = load(f"{folder}/{path}", fresh)
        assert got["losses"] == [2.0, 1.0]
        for i in range(2):
            assert got["optimizers"][i] is fresh["optimizers"][i]
            assert torch.equal(fresh["nets"][i].weight, saved["nets"][i].weight)
            state = fresh["optimizers"][i].state[fresh["nets"][i].weight]
            wanted = saved["optimizers"][i].state[saved["nets"][i].weight]
            assert torch.equal(state["exp_avg"], wanted["exp_avg"])
        assert [s.last_epoch for s in fresh["schedulers"]] == [0, 1]
        assert fresh["optimizers"][1].param_groups[0]["lr"] == 0.05
        fresh = two_of_each()
        for wrong, name in (
            ({**fresh, "optimizers": fresh["optimizers"][:1]}, "optimizers"),
            ({"losses": [], "lr": 0.1}, "'lr'"),
            ({"schedulers": {"first": fresh["schedulers"][0]}}, "schedulers"),
        ):
            with pytest.raises(CheckpointError, match=name):
                load(f"{folder}/{path}", wrong)
        loose = load(f"{folder}/{path}", {"losses": [], "lr": 0.1}, strict=False)
        assert (loose["losses"], loose["lr"]) == ([2.0, 1.0], 0.1)


def test_objects_in_lists_get_their_state_and_what_is_not_there_is_named(run_ranks, tmp_path):
    run_ranks(2, objects_in_lists, folder=str(tmp_path))


def what_a_state_may_hold(folder: str) -> None:
    """Numbers of any size, names of any text; a module or a tensor alone; a user's own "rng"."""
    big = numpy.random.default_rng(0).bit_generator.state  # whole numbers of 128 bits
    state = {
        "big": big,
        "most": [2**63 - 1, -(2**63), 2**63, -(2**200)],
        "rng": {"x": arange(2, 3)},
    }
    state |= {"": {"": 1}, "a/b": torch.ones(1), "~": "\U0001f600\x00"}
    for save, load, path in (
        (save_sharded, load_sharded, "pieces"),
        (save_full, load_full, "whole.safetensors"),
        (save_full, load_full, "whole.pt"),
    ):
        save(f"{folder}/{path}", state)
        found = load(f"{folder}/{path}")
        assert found["big"] == big and found["most"] == state["most"]
        assert torch.equal(found["rng"]["x"], arange(2, 3))
        assert list(found) == list(state) and found["~"] == state["~"]
        assert found[""] == {"": 1}
    net, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save_sharded(f"{folder}/net", net)
    assert load_sharded(f"{folder}/net", other) is other
    assert torch.equal(other.weight, net.weight)
    for wrong, text in (
        ({1: torch.ones(1), "1": torch.zeros(1)}, "two entries are named '1'"),
        ({"": {"a": torch.ones(1)}, "a": torch.zeros(1)}, "two entries are named 'a'"),
        ({"x": "\ud800"}, "is no text"),
        ({"\ud800": 1}, "is no text"),
        ({"x": torch.eye(2).to_sparse()}, r"'x' is a torch\.sparse_coo tensor"),
        ({"x": torch.ones(1, device="meta")}, "'x' is a meta tensor"),
    ):
        for save, path in ((save_sharded, "pieces"), (save_full, "whole.safetensors")):
            with pytest.raises(CheckpointError, match=text):
                save(f"{folder}/{path}", wrong)
    assert load_sharded(f"{folder}/pieces")["big"] == big


def test_what_a_state_may_hold(run_ranks, tmp_path):
    run_ranks(2, what_a_state_may_hold, folder=str(tmp_path))


# ---------------------------------------------------------------------- torch.distributed.checkpoint


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float64, torch.int16], ids=str)
def test_values_of_every_alignment_in_a_file(tmp_path, dtype):
    """The header's length, and with it the address of the first value, follows the names' lengths."""
    for letters in range(1, 18):
        for value in (torch.tensor([5.0]).to(dtype), torch.arange(6.0).to(dtype).view(2, 3)):
            name = "n" * letters
            save_sharded(tmp_path / "pieces", {name: value}, rng=False)
            save_full(tmp_path / "whole.safetensors", {name: value})
            assert torch.equal(load_sharded(tmp_path / "pieces")[name], value)
            if value.dim() == 2:
                part = Reader(tmp_path / "pieces").read(name, ((0, 1), (2, 2)))
                assert torch.equal(part, value[:, 1:])
            assert torch.equal(load_full(tmp_path / "whole.safetensors")[name], value)


def test_a_file_of_torch_whose_values_start_anywhere(tmp_path):
    """A byte more in the zip's own header moves the values by one: torch maps them all the same."""
    value = torch.tensor([5 + 6j], dtype=torch.complex128)
    save_full(tmp_path / "x.pt", {"x": value})
    content = bytearray((tmp_path / "x.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        (record,) = [i for i in archive.infolist() if i.filename.endswith("/data/0")]
    length = record.header_offset + 28  # of the extra field, which pads the values to 64 bytes
    content[length] -= 1
    (tmp_path / "x.pt").write_bytes(content)
    found = load_full(tmp_path / "x.pt")["x"]  # other numbers: this format has no hashes
    assert found.shape == value.shape and found.dtype == value.dtype


def save_with_torch(folder: str) -> None:
    mesh = mesh_of((dist.get_world_size(),))
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()
    fully_shard(net, mesh=mesh)
    rows = distribute_tensor(numbers(5, 4), mesh, [Shard(0)])
    dcp.save({"model": net.state_dict(), "x": {"rows": rows}}, checkpoint_id=folder)


def load_from_torch(folder: str) -> None:
    torch.manual_seed(4)
    wanted = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()
    rows = chunked(torch.zeros(5, 4, dtype=torch.float64), 1)
    state = {"model": net, "x": {"rows": rows}}
    with pytest.raises(CheckpointError, match="pass allow_pickle=True"):
        load_dcp(folder, state)
    assert load_dcp(folder, state, allow_pickle=True) is state
    assert_equal(rows, numbers(5, 4), "rows")
    for p, q in zip(net.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(CheckpointError, match=r"ranks \[.*only in the state \['y'\]"):
        load_dcp(folder, {"y": torch.zeros(1)}, allow_pickle=True)
    with pytest.raises(CheckpointError, match="holds no checkpoint of torch"):
        load_dcp(f"{folder}/no", state, allow_pickle=True)


def test_checkpoints_of_torch_are_read(run_ranks, tmp_path):
    run_ranks(2, save_with_torch, folder=str(tmp_path))
    for ranks in (1, 3):
        run_ranks(ranks, load_from_torch, folder=str(tmp_path))


def a_training_step(mesh) -> tuple[nn.Module, torch.optim.Optimizer, object]:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()
    if mesh is not None:
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    net(numbers(2, 4)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    return net, optimizer, scheduler


def save_training_with_torch(folder: str) -> None:
    net, optimizer, scheduler = a_training_step(mesh_of((dist.get_world_size(),)))
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    state |= {"scheduler": scheduler.state_dict(), "seen": [torch.ones(2), "two"], "log": [1, 2]}
    dcp.save(state, checkpoint_id=folder)


def load_training_from_torch(folder: str) -> None:
    net, optimizer, scheduler = a_training_step(None)
    wanted = {id(p): dict(optimizer.state[p]) for p in net.parameters()}
    for p in net.parameters():
        optimizer.state[p] = {k: torch.zeros_like(v) for k, v in optimizer.state[p].items()}
    optimizer.param_groups[0]["lr"] = scheduler.last_epoch = 9
    state = {"net": net, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    state |= {"seen": [torch.zeros(2), ""], "log": []}
    assert load_dcp(folder, state, allow_pickle=True) is state
    assert (state["step"], state["seen"][1], state["log"]) == (7, "two", [1, 2])
    assert state["seen"][0].tolist() == [1, 1]
    assert state["optimizer"] is optimizer
    for p in net.parameters():
        for name, value in wanted[id(p)].items():
            assert torch.equal(optimizer.state[p][name], value), name
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (0.05, 1)
    for missing in ({"epoch": 0}, {"net": {"weight": torch.ones(1)}}, {"optimizer": {"lr": 1}}):
        with pytest.raises(CheckpointError, match=r"only in the state \['(epoch|net|optimizer)"):
            load_dcp(folder, missing, allow_pickle=True)


def save_by_names(folder: str) -> None:
    net, optimizer, _ = a_training_step(mesh_of((dist.get_world_size(),)))
    model, state = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder)


def load_by_names(folder: str) -> None:
    wanted, trained, _ = a_training_step(None)
    net, optimizer, _ = a_training_step(mesh_of((dist.get_world_size(),)))
    optimizer.param_groups[0]["lr"] = 9.0
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
            optimizer.state[p]["exp_avg"].zero_()
    with pytest.raises(CheckpointError, match=r"saved by parameters' names.*get_optimizer_state"):
        load_dcp(folder, {"optimizer": optimizer}, allow_pickle=True)
    model, state = get_state_dict(net, optimizer)
    found = load_dcp(folder, {"model": model, "optimizer": state}, allow_pickle=True)
    set_state_dict(
        net,
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
    )
    assert optimizer.param_groups[0]["lr"] == 0.05
    for p, q in zip(net.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)
        moment = optimizer.state[p]["exp_avg"].full_tensor()
        assert torch.allclose(moment, trained.state[q]["exp_avg"], rtol=1e-12)


def test_states_by_parameters_names_in_checkpoints_of_torch(run_ranks, tmp_path):
    run_ranks(2, save_by_names, folder=str(tmp_path))
    run_ranks(3, load_by_names, folder=str(tmp_path))


def test_optimizers_and_numbers_in_checkpoints_of_torch_are_read(run_ranks, tmp_path):
    run_ranks(2, save_training_with_torch, folder=str(tmp_path))
    for ranks in (1, 2):
        run_ranks(ranks, load_training_from_torch, folder=str(tmp_path))

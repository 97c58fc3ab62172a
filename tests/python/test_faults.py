"""A rank that fails, leaves or makes another call: the others raise, in time, and say where."""

from __future__ import annotations

import importlib
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import assert_equal, check_same_as_serial, numbers, sharded
from shardfield.distributed import check_level, name_layers, set_check_level
from test_launchers import clean_environment, free_port, run_job
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

HERE = Path(__file__).resolve().parent
TOOLS = str(HERE.parent.parent / "tools")


def tool(name: str):
    """A module of tools/, importable by the processes it starts too."""
    if TOOLS not in sys.path:
        sys.path.insert(0, TOOLS)
    return importlib.import_module(name)


# ------------------------------------------------------------------- ranks that are gone, by events


@pytest.fixture(scope="module")
def injection():
    module = tool("fault_injection")
    return module, module.context(), module.reference()


# (ranks, victim, fault, share of the step's events, delay): forward, backward, optimizer, saving
INJECTED = [
    (2, 1, "kill", 0.05, 0.0),
    (3, 0, "kill", 0.4, 0.0003),
    (2, 0, "exit", 0.6, 0.0),
    (3, 2, "raise", 0.3, 0.0),
    (2, 1, "kill", 0.97, 0.0),
]


@pytest.mark.parametrize(("size", "victim", "fault", "share", "delay_s"), INJECTED)
def test_the_others_raise_and_the_checkpoint_is_good(
    injection, size, victim, fault, share, delay_s
):
    module, context, want = injection
    events = module.EVENTS[size]
    case = module.Case(size, victim, fault, int(share * events), delay_s)
    outcome = module.run_case(case, context, want)
    assert outcome.is_good, outcome
    assert outcome.seconds < 30
    others = [text for r, text in outcome.messages.items() if r != victim]
    if fault == "raise":
        assert outcome.messages[victim] == "ValueError: the injected error"
        assert all(f"Rank {victim} raised ValueError: the injected error" in t for t in others)
    else:
        assert any(f"Ranks [{victim}] told nothing" in text for text in others), others


# ----------------------------------------------------------------------- calls that do not fit


def other_calls(mesh) -> list[str]:
    """At level full: another op, dtype, shape, kind; a gather for a sum."""
    set_check_level("full")
    assert check_level() == "full"
    last = mesh.get_local_rank() == mesh.size() - 1
    x = sharded(numbers(1, 2, 12), mesh, 2)
    calls = [
        lambda: x.mean() if last else x.sum(),
        lambda: (x.float() if last else x).sum(),
        lambda: x.sum((0, 2)) if last else x.sum((1, 2)),
        lambda: x.amax() if last else x.sum(),
    ]
    texts = []
    try:
        for call in calls:
            began = time.monotonic()
            with pytest.raises(RuntimeError, match="the ranks do not agree, on rank") as caught:
                call()
            assert time.monotonic() - began < 5, "named at once, not at the timeout"
            texts.append(str(caught.value))
        assert_equal(x.sum(), numbers(1, 2, 12).sum(), "the group is good after the errors")
    finally:
        set_check_level("cheap")
    return texts


@pytest.mark.parametrize("size", [2, 3])
def test_other_calls_are_named_at_level_full(run_mesh, size):
    for texts in run_mesh((size,), other_calls):
        op, dtype, shape, kind = texts
        assert "rank 0: sum over ranks in aten::sum: Double []" in op
        assert f"rank {size - 1}: sum over ranks in aten::mean" in op
        assert "Double" in dtype and "Float" in dtype
        assert "[2]" in shape and "[1]" in shape
        assert "maximum over ranks" in kind and "sum over ranks" in kind


def other_messages() -> str:
    """At level full two ranks whose messages do not fit are told what the other one sends."""
    texts = ""
    rank = dist.get_rank()
    set_check_level("full")
    try:
        for width, dtype in ((5, torch.float64), (3, torch.float32)):
            mesh = DeviceMesh.from_group(
                dist.new_group([0, 1], timeout=timedelta(seconds=5)), "cpu"
            )
            x = sharded(numbers(1, 2, 12), mesh, 2).to(dtype if rank else torch.float64)
            with pytest.raises(RuntimeError, match="the ranks do not agree, on rank") as caught:
                F.max_pool1d(x, width if rank else 3, 1, width // 2 if rank else 1)
            texts += str(caught.value)
    finally:
        set_check_level("cheap")
    return texts


def test_other_messages_are_named_at_level_full(run_ranks):
    for text in run_ranks(2, other_messages):
        assert "rank 0: messages in aten::max_pool1d: Double, 16 bytes to rank 1, awaits 16" in text
        assert "rank 1: messages in aten::max_pool1d: Double, 32 bytes to rank 0, awaits 32" in text
        assert "rank 1: messages in aten::max_pool1d: Float, 8 bytes to rank 0, awaits 8" in text


def other_values(mesh) -> list[str]:
    """At level full: plain tensors that only one rank has another value of, one bit apart."""
    last = mesh.get_local_rank() == mesh.size() - 1

    def plain(*shape: int) -> torch.Tensor:
        t = numbers(*shape)
        if last:
            t.view(-1)[-1].nextafter_(torch.tensor(9.0).double())
        return t

    set_check_level("full")
    x = sharded(numbers(1, 2, 12), mesh, 2)
    conv = nn.Conv1d(2, 2, 3, padding=1).double()
    conv.weight.data = plain(2, 2, 3)
    conv.bias.data = numbers(2)
    calls = {
        "weight Double [2, 2, 3]": lambda: conv(x),
        "other Double [12]": lambda: x + plain(12),
        "other Double []": lambda: x * (2.0 + last),
        "tensors Double [1, 2, 12]": lambda: torch.cat([x, plain(1, 2, 12)], 1),
        "indices Long [1]": lambda: x[0, torch.tensor([int(last)])],
        "other Double [1, 2, 12]": lambda: x.add_(plain(1, 2, 12)),
    }
    texts = []
    try:
        for operand, call in calls.items():
            with pytest.raises(RuntimeError, match="the ranks do not agree, on rank") as caught:
                call()
            texts.append(str(caught.value))
            assert f"{operand} hash" in texts[-1], (operand, texts[-1])
            assert "sync_module_over_mesh" in texts[-1]
        assert_equal(x, numbers(1, 2, 12), "no value was changed")
    finally:
        set_check_level("cheap")
    x + plain(12)  # not compared at other levels
    return texts


@pytest.mark.parametrize("size", [2, 4])
def test_other_plain_values_are_named_at_level_full(run_mesh, size):
    for texts in run_mesh((size,), other_values):
        for text in texts:
            assert all(f"\n  rank {r}: plain operands of aten::" in text for r in range(size))


class Block(nn.Module):
    """An exchange of every kind."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(2, 4, 5, stride=2, padding=2)
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose1d(4, 2, 4, stride=2, padding=1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(F.gelu(self.norm(self.conv(x))))
        return y + F.max_pool1d(y, 3, 1, 1).mean(2, keepdim=True)


def compared_all_the_time(mesh) -> None:
    """Right calls pass at level full, also where ranks hold nothing."""
    set_check_level("full")
    try:
        for length in (13, 2):
            check_same_as_serial(Block(), [numbers(2, 2, length)], mesh, [Shard(2)])
    finally:
        set_check_level("cheap")


def test_right_calls_pass_at_level_full(run_mesh, ranks):
    run_mesh((ranks,), compared_all_the_time)


def another_order() -> str:
    """At the default level: bounded by the group's timeout; what each rank did is in the text."""
    limit = timedelta(seconds=2)
    rank = dist.get_rank()
    for attempt in range(2):  # the second time with a new group: the first is broken
        mesh = DeviceMesh.from_group(dist.new_group([0, 1], timeout=limit), "cpu")
        x = sharded(numbers(1, 1, 8), mesh, 2)
        model = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1)).double()
        assert_equal(x.sum(), numbers(1, 1, 8).sum(), f"group {attempt} works")
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="a peer failed, left, or made another call") as e:
            model(x) if rank == 0 else x.sum()
        assert time.monotonic() - began < 10
    return str(e.value)


def test_another_order_is_bounded_and_a_new_group_works(run_ranks):
    texts = run_ranks(2, another_order)
    assert "aten::convolution on rank 0 of 2" in texts[0]
    assert "This rank was in layer 'Sequential.0'" in texts[0]
    assert "Rank 1 stopped at aten::sum on rank 1 of 2" in texts[0]
    assert "aten::sum on rank 1 of 2" in texts[1]
    assert "Rank 0 stopped at aten::convolution on rank 0 of 2 in layer 'Sequential.0'" in texts[1]


def backward_of_one_rank() -> list[str]:
    """Rank 1 does not run backward: of a library's node, and of PyTorch's own formula."""
    texts = []
    for layer in (nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(2)):
        mesh = DeviceMesh.from_group(dist.new_group([0, 1], timeout=timedelta(seconds=2)), "cpu")
        model = nn.Sequential(nn.Tanh(), layer).double()
        names = name_layers(model)
        x = sharded(numbers(2, 2, 12), mesh, 2).requires_grad_()
        loss = model(x).square().sum()
        names.remove()
        if dist.get_rank() == 1:
            time.sleep(3)
            continue
        with pytest.raises(RuntimeError, match="in backward") as caught:
            loss.backward()
        texts.append(str(caught.value))
    return texts


def test_backward_names_op_rank_and_layer(run_ranks):
    convolution, norm = run_ranks(2, backward_of_one_rank)[0]
    assert "aten::convolution on rank 0 of 2 in layer '1', in backward" in convolution, convolution
    assert "norm_backward on rank 0 of 2, in backward" in norm, norm
    assert "This rank was in layer '1'" in norm, norm


# ---------------------------------------------------------------------------------- after a fault


def test_torchrun_restarts_from_the_checkpoint(tmp_path):
    """Rank 1 is killed in the middle of a backward; the restarted job ends as if it had not been."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "--monitor-interval=0.2", f"--master-port={free_port()}"]
    run_job([*command, str(HERE / "restarted_rank.py"), str(tmp_path)], clean_environment())
    found = json.loads((tmp_path / "rank0.json").read_text())
    assert found["restarts"] == 1 and found["resumed_at"] > 0
    module = tool("fault_injection")
    want = module.reference()[-1]
    for name, value in found["parameters"].items():
        assert_equal(torch.tensor(value, dtype=want[name].dtype), want[name], name, 1e-8, 1e-10)


def soak() -> dict[str, int]:
    return tool("soak").run(warm=60, steps=180)


def test_nothing_grows(run_ranks):
    """A small part of tools/soak.py."""
    for growth in run_ranks(2, soak, limit_s=120):
        assert growth["threads"] == 0 and growth["handles"] == 0, growth
        assert growth["bytes"] < 4 << 20, growth

"""Where the mechanism is known to break: Python boundary, autocast, errors, exit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import (
    arange,
    assert_equal,
    full,
    numbers,
    sharded,
)
from shardfield.domain_parallel import shard_tensor
from torch import nn
from torch.distributed.tensor import Shard

import shardfield

# --------------------------------------------------------------------------- 8: the Python boundary


def indexing(mesh) -> None:
    x, y = sharded(numbers(6, 4), mesh, 0), numbers(6, 4)
    mask = y > 0
    index = torch.tensor([0, 5, 2])
    for get in (
        lambda t, m: t[m],
        lambda t, m: t[index],
        lambda t, m: t[:, index.clamp(max=3)],
        lambda t, m: t[True],
        lambda t, m: t[None],
        lambda t, m: t[..., 0],
        lambda t, m: t[torch.tensor(3)],
        lambda t, m: t[index, index.clamp(max=3)],
    ):
        assert_equal(get(x, mask), get(y, mask), "indexing")
    assert_equal(x[sharded(mask, mesh, 0)], y[mask], "sharded mask")
    for put in (
        lambda t: t.__setitem__(mask, 0.0),
        lambda t: t.__setitem__((slice(None), index.clamp(max=3)), 1.0),
        lambda t: t.__setitem__(index, 2.0),
        lambda t: t.masked_fill_(mask, 3.0),
        lambda t: t.index_fill_(0, index, 4.0),
    ):
        a, b = sharded(numbers(6, 4), mesh, 0), numbers(6, 4)
        put(a)
        put(b)
        assert_equal(a, b, "assignment by index")
    a = sharded(numbers(6, 4), mesh, 0)
    a[sharded(mask, mesh, 0)] = 0
    assert_equal(a, y * ~mask, "assignment by sharded mask")


def test_8_indexing_and_assignment(run_mesh):
    run_mesh((1,), indexing)
    run_mesh((2,), indexing)


def storage_access_throws(mesh) -> None:
    x = sharded(numbers(6, 4), mesh, 0)
    for touch in (lambda: x.untyped_storage(), lambda: x.data_ptr(), lambda: x.storage()):
        with pytest.raises(RuntimeError) as caught:
            touch()
        assert "to_local" in str(caught.value) or "full_tensor" in str(caught.value)


def test_F_storage_access_throws_with_advice(run_mesh):
    run_mesh((2,), storage_access_throws)


def as_strided_is_refused(mesh) -> None:
    x = sharded(arange(6, 4), mesh, 0)
    with pytest.raises(RuntimeError):
        x.as_strided((2, 3), (1, 2))
    assert_equal(x.as_strided((6, 4), (4, 1)), arange(6, 4), "its own geometry")
    assert_equal(x.as_strided((4, 6), (1, 4)), arange(6, 4).t(), "a permutation")


def test_1_as_strided(run_mesh):
    run_mesh((2,), as_strided_is_refused)


# ----------------------------------------------------------------------------- 10: autocast, scaler


def scaler(mesh) -> None:
    p = nn.Parameter(sharded(numbers(6, 3, dtype=torch.float32), mesh, 0))
    q = nn.Parameter(numbers(6, 3, dtype=torch.float32))
    for bad in (False, True):
        for parameter in (p, q):
            parameter.grad = None
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            grad_scaler = torch.amp.GradScaler(mesh.device_type, init_scale=8.0)
            factor = numbers(6, 3, seed=1, dtype=torch.float32)
            if bad:
                factor[0, 0] = float("inf")  # on the first rank only
            loss = (parameter * factor).sum()
            grad_scaler.scale(loss).backward()
            grad_scaler.step(optimizer)
            grad_scaler.update()
            assert grad_scaler.get_scale() == (4.0 if bad else 8.0)
        assert_equal(p, q, "after a step", rtol=1e-6, atol=1e-6)


def test_10_grad_scaler_on_sharded_parameters(run_mesh):
    run_mesh((1,), scaler)
    run_mesh((2,), scaler)


def autocast_decides_once(mesh) -> None:
    x, y = (
        sharded(numbers(2, 6, 4, dtype=torch.float32), mesh, 1),
        numbers(2, 6, 4, dtype=torch.float32),
    )
    w = numbers(3, 4, seed=1, dtype=torch.float32)
    calls = {
        "linear": lambda t: F.linear(t, w),
        "mse": lambda t: F.mse_loss(t, t * 2),
        "softmax": lambda t: t.softmax(2),
        "layer_norm": lambda t: F.layer_norm(t, (4,)),
        "sum": lambda t: t.sum(),
        "conv": lambda t: F.conv1d(t.transpose(1, 2), w[:, :, None]),
        "cat": lambda t: torch.cat([t, t.bfloat16()], 2),
        "gelu": F.gelu,
        "exp": torch.exp,
        "addcmul": lambda t: torch.addcmul(t, t, t),
    }
    with torch.autocast(mesh.device_type, dtype=torch.bfloat16):
        for name, call in calls.items():
            assert call(x).dtype == call(y).dtype, name


def test_10_autocast_decides_each_dtype_once(run_mesh):
    run_mesh((2,), autocast_decides_once)


# ---------------------------------------------------------------------------------- C5, C6, exit


def mixed_arguments(mesh) -> None:
    """Plain first, sharded second: every argument is tested before it is taken for sharded."""
    x, y = numbers(6, 4), sharded(numbers(6, 4, seed=1), mesh, 0)
    b = numbers(6, 4, seed=1)
    for f in (
        torch.add,
        torch.mul,
        torch.maximum,
        torch.atan2,
        lambda s, t: torch.where(s > 0, s, t),
        lambda s, t: torch.cat([s, t]),
        lambda s, t: torch.stack([s, t]),
        lambda s, t: s @ t.t(),
        lambda s, t: torch.lerp(s, s, t.abs()),
        lambda s, t: torch.addcmul(s, s, t),
        F.mse_loss,
        F.l1_loss,
        lambda s, t: F.linear(s, t),
        lambda s, t: F.conv1d(s[None].transpose(1, 2), t[:, :, None]),
    ):
        assert_equal(f(x, y), f(x, b), "plain first")


def test_C1_plain_first_argument(run_mesh):
    run_mesh((2,), mixed_arguments)


STRUCTURED = [
    "acos",
    "digamma",
    "erfinv",
    "exp2",
    "i0",
    "log2",
    "log10",
    "sgn",
    "sinc",
    "special_i1",
    "special_ndtr",
    "tril",
    "triu",
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "argsort",
    "isfinite",
    "isnan",
    "signbit",
    "bitwise_not",
    "logical_not",
    "norm",
    "all",
    "any",
    "aminmax",
    "count_nonzero",
    "diff",
    "fliplr",
    "flipud",
    "rot90",
    "t",
    "trapezoid",
    "unique",
    "std",
    "var",
    "median",
]


def many_operators_after_load(mesh) -> None:
    """Structured operators have kernels that would win over a fallback."""
    x = sharded(numbers(6, 4).abs() + 0.5, mesh, 0)
    y = numbers(6, 4).abs() + 0.5
    for name in STRUCTURED:
        if name == "bitwise_not":
            a, b = torch.bitwise_not(x > 1), torch.bitwise_not(y > 1)
        elif name.startswith("special_"):
            f = getattr(torch.special, name.removeprefix("special_"))
            a, b = f(x), f(y)
        else:
            f = getattr(torch, name)
            arguments = {"cumsum": (0,), "cumprod": (0,), "logcumsumexp": (0,), "argsort": (0,)}
            more = arguments.get(name, ())
            a, b = f(x, *more), f(y, *more)
        for got, want in zip(
            a if isinstance(a, tuple) else [a], b if isinstance(b, tuple) else [b], strict=True
        ):
            torch.testing.assert_close(full(got), want, equal_nan=True, msg=name)


def test_trap_structured_operators(run_mesh):
    run_mesh((1,), many_operators_after_load)
    run_mesh((3,), many_operators_after_load)


EXIT_PROGRAM = """
import os, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
import shardfield
from shardfield.domain_parallel import shard_tensor
from torch.distributed.tensor import Shard
from torch.distributed.device_mesh import init_device_mesh
rank, n, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(path, n), rank=rank, world_size=n)
mesh = init_device_mesh("cpu", (n,))
x = shard_tensor(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), mesh, [Shard(0)])
x.requires_grad_()
(x * x).mean().backward()
keep = [x, x.grad, x[1:5]]
if sys.argv[4] == "destroy":
    dist.destroy_process_group()
print("done", flush=True)
"""


@pytest.mark.parametrize("how", ["destroy", "leave"])
def test_process_exit_is_clean(tmp_path, how):
    program = tmp_path / "leave.py"
    program.write_text(textwrap.dedent(EXIT_PROGRAM))
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    for attempt in range(1):
        store = tmp_path / f"store{attempt}"
        ranks = [
            subprocess.Popen(
                [sys.executable, str(program), str(rank), "2", str(store), how],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
                cwd=Path(__file__).parent,
            )
            for rank in range(2)
        ]
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, f"rank {rank} left with {process.returncode}:\n{err}"
            assert "done" in out


def one_rank_fails_inside(mesh) -> str:
    """A rank fails inside an operator after its peers have entered the exchange."""
    x = shard_tensor(numbers(1, 1, 8), mesh, [Shard(2)])
    began = time.monotonic()
    bad = numbers(1, 2 if mesh.get_local_rank() == 1 else 1, 3)
    try:
        F.conv1d(x, bad, padding=1)
    except RuntimeError as error:
        return f"{time.monotonic() - began:.1f} {error}"
    return f"{time.monotonic() - began:.1f} no error"


def test_C6_a_rank_that_fails_inside_an_operator_is_heard_of(run_mesh):
    import rank_pool

    try:
        texts = run_mesh((2,), one_rank_fails_inside)
    except rank_pool.RankFailure as failure:  # the group is broken by design afterwards
        texts = [a.value if a and a.ok else (a.error if a else "hung") for a in failure.answers]
    assert "hung" not in texts, texts
    assert dist.is_available()


def reports_stay_with_their_ops(mesh) -> None:
    with shardfield.report() as first:
        x = sharded(numbers(1, 1, 8), mesh, 2)
        F.conv1d(x, numbers(1, 1, 3), padding=1)
    with shardfield.report() as second:
        pass
    assert second.bytes_sent == 0 and not second.fallbacks
    if mesh.size() > 1:
        assert first.bytes_sent > 0


def test_report_covers_its_own_block_only(run_mesh, ranks):
    run_mesh((ranks,), reports_stay_with_their_ops)

"""How a sharded tensor behaves as a `torch.Tensor`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import (
    Cut,
    arange,
    assert_equal,
    chunk_sizes,
    full,
    is_sharded,
    numbers,
    scatter,
    sharded,
)
from shardfield.domain_parallel import (
    ShardTensor,
    scatter_tensor,
    shard_tensor,
    sync_module_over_mesh,
)
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import shardfield

# ------------------------------------------------------------------------------------- construction


def from_local_forms(mesh) -> None:
    rank, n = mesh.get_local_rank(), mesh.size()
    sizes = [3 + (r == 1) for r in range(n)]
    whole = arange(sum(sizes), 2)
    piece = whole.split(sizes)[rank]
    listed = {0: [torch.Size([s, 2]) for s in sizes]}
    for shapes in ("infer", listed):
        x = ShardTensor.from_local(piece, mesh, [Shard(0)], sharding_shapes=shapes)
        assert_equal(x, whole, f"from_local {type(shapes).__name__}")
        assert torch.equal(x.to_local(), piece)
    assert_equal(ShardTensor.from_local(piece, mesh, [Shard(0)]), whole, "the default is infer")

    even = arange(2 * n + 1, 3)
    lengths = chunk_sizes(2 * n + 1, n)
    piece = even.split(lengths)[rank]
    for shapes in ("chunk", "blockwise"):
        x = ShardTensor.from_local(
            piece, mesh, [Shard(0)], sharding_shapes=shapes, global_shape=even.shape
        )
        assert_equal(x, even, f"from_local {shapes}")


def test_from_local_infer_chunk_blockwise_and_list(run_mesh, ranks):
    run_mesh((ranks,), from_local_forms)


def wrapping_known_sizes_is_free(mesh) -> None:
    piece = torch.ones(2, 2)
    listed = {0: [torch.Size([2, 2])] * mesh.size()}
    shard_tensor(torch.ones(4), mesh, [Shard(0)])  # the first use of a mesh may check it
    with shardfield.report() as report:
        ShardTensor.from_local(piece, mesh, [Shard(0)], sharding_shapes=listed)
        shard_tensor(torch.ones(8, 2), mesh, [Shard(0)])
    assert report.bytes_sent == 0


def test_wrapping_with_known_sizes_does_not_communicate(run_mesh):
    run_mesh((2,), wrapping_known_sizes_is_free)


def from_local_without_cuts(mesh) -> None:
    rank = mesh.get_local_rank()
    plain = ShardTensor.from_local(arange(3), mesh, [Replicate()])
    assert not is_sharded(plain) and plain.tolist() == [0, 1, 2]
    summed = ShardTensor.from_local(arange(3) + rank, mesh, [Partial()])
    assert not is_sharded(summed)
    assert summed.tolist() == [mesh.size() * i + sum(range(mesh.size())) for i in range(3)]


def test_from_local_replicate_and_partial_are_plain(run_mesh, ranks):
    run_mesh((ranks,), from_local_without_cuts)


def from_local_gradient(mesh) -> None:
    rank, n = mesh.get_local_rank(), mesh.size()
    piece = (arange(2, 3) + rank).requires_grad_()
    x = ShardTensor.from_local(piece, mesh, [Shard(0)])
    weight = numbers(2 * n, 3)
    (x * weight).sum().backward()
    assert not is_sharded(piece.grad)
    assert_equal(piece.grad, weight[2 * rank : 2 * rank + 2], "gradient of the piece")
    part = (arange(3) + rank).requires_grad_()
    (ShardTensor.from_local(part, mesh, [Partial()]) * weight[0]).sum().backward()
    assert_equal(part.grad, weight[0], "gradient of a partial")


def test_from_local_is_differentiable(run_mesh, ranks):
    run_mesh((ranks,), from_local_gradient)


def scatter_from_any_rank(mesh, placements) -> None:
    whole = numbers(5, 7)
    for source in range(mesh.size()):
        mine = whole if dist.get_rank() == source else None
        x = scatter_tensor(mine, source, mesh, placements)
        assert is_sharded(x) and x.dtype == torch.float64
        assert_equal(x, whole, f"from rank {source}")
    y = scatter_tensor(
        whole if dist.get_rank() == 0 else None, 0, mesh, placements, requires_grad=True
    )
    assert y.requires_grad and y.is_leaf
    (y * y).sum().backward()
    assert_equal(y.grad, 2 * whole, "gradient of the scattered leaf")
    strided = whole.t() if dist.get_rank() == 0 else None
    assert_equal(scatter_tensor(strided, 0, mesh, placements), whole.t(), "transposed source")


def test_scatter_tensor_from_any_rank(run_mesh, mesh_shape):
    placements = [Shard(0)] if len(mesh_shape) == 1 else [Shard(0), Shard(1)]
    run_mesh(mesh_shape, scatter_from_any_rank, placements=placements)


def redistribute_both_ways(mesh) -> None:
    whole = numbers(5, 7)
    kinds = [[Shard(0)], [Shard(1)], [Replicate()]]
    if mesh.ndim == 2:
        kinds = [
            [Shard(0), Shard(1)],
            [Shard(1), Shard(0)],
            [Shard(0), Replicate()],
            [Replicate(), Shard(1)],
            [Shard(1), Shard(1)],
            [Replicate(), Replicate()],
        ]
    for a in kinds:
        for b in kinds:
            x = shard_tensor(whole, mesh, a).detach().requires_grad_()
            if not is_sharded(x):
                continue
            y = x.redistribute(placements=b)
            assert is_sharded(y) == any(isinstance(p, Shard) for p in b)
            assert_equal(y, whole, f"{a} to {b}")
            (y * y * y).sum().backward()
            assert is_sharded(x.grad)
            assert_equal(x.grad, 3 * whole**2, f"gradient of {a} to {b}")


def test_redistribute_both_ways(run_mesh, mesh_shape):
    run_mesh(mesh_shape, redistribute_both_ways)


def plain_to_sharded_and_back(mesh) -> None:
    w = numbers(6, 3).requires_grad_()
    x = shard_tensor(w, mesh, [Shard(0)])
    assert is_sharded(x)
    (x * x).sum().backward()
    assert not is_sharded(w.grad)
    assert_equal(w.grad, 2 * w.detach(), "gradient of the plain source")
    v = sharded(numbers(6, 3), mesh, 0).requires_grad_()
    (v.full_tensor() ** 2).sum().backward()
    assert_equal(v.grad, 2 * numbers(6, 3), "gradient through full_tensor")
    u = sharded(numbers(6, 3), mesh, 0).requires_grad_()
    (u.to_local() ** 2).sum().backward()
    assert is_sharded(u.grad)
    assert_equal(u.grad, 2 * numbers(6, 3), "gradient through to_local")


def test_plain_to_sharded_and_back(run_mesh, ranks):
    run_mesh((ranks,), plain_to_sharded_and_back)


def attributes(mesh) -> None:
    x = sharded(arange(5, 4), mesh, 0)
    assert type(x) is torch.Tensor and isinstance(x, ShardTensor) and isinstance(x, torch.Tensor)
    assert not isinstance(arange(3), ShardTensor)
    assert tuple(x.placements) == (Shard(0),)
    assert x.device_mesh == mesh and x._spec.mesh == mesh
    assert tuple(x._spec.placements) == (Shard(0),)
    assert x._spec.mesh.get_group() is not None
    sizes = chunk_sizes(5, mesh.size())
    assert list(x.offsets()) == [sum(sizes[: mesh.get_local_rank()]), 0]
    assert x.shape == (5, 4) and x.stride() == (4, 1) and x.numel() == 20 and x.dim() == 2
    assert x.device.type == mesh.device_type and x.is_contiguous() and len(x) == 5
    for name in ("placements", "device_mesh", "to_local", "full_tensor", "redistribute", "_spec"):
        assert not hasattr(arange(3), name), name
    y = x.permute(1, 0)
    assert y.stride() == (1, 4) and not y.is_contiguous()
    assert x[:, 1:3].stride() == (4, 1) and x[:, 1:3].storage_offset() == 1


def test_attributes_are_global_and_only_on_sharded_tensors(run_mesh, ranks):
    run_mesh((ranks,), attributes)


# ----------------------------------------------------------------------- printing, copies, pickling


def printing_alone(mesh) -> str:
    x = sharded(arange(4, 3), mesh, 0).requires_grad_()
    text = ""
    if mesh.get_local_rank() == 0:  # one rank alone: a collective would hang
        text = repr(x) + f"{x}" + str((x * 2).detach())
        assert "..." not in text or len(text) < 3000
    return text


def test_printing_on_one_rank_does_not_communicate(run_mesh):
    text = run_mesh((2,), printing_alone)[0]
    assert "ShardTensor" in text and "(4, 3)" in text and "requires_grad" in text
    assert "Shard(dim=0)" in text or "Shard(0)" in text or "S(0)" in text


def copies(mesh) -> None:
    x = sharded(numbers(5, 3), mesh, 0).requires_grad_()
    (x * x).sum().backward()
    y = copy.deepcopy(x)
    assert is_sharded(y) and y.requires_grad and y.is_leaf and is_sharded(y.grad)
    assert_equal(y, numbers(5, 3), "deepcopy")
    assert_equal(y.grad, 2 * numbers(5, 3), "deepcopy of the gradient")
    with torch.no_grad():
        y.add_(1)
    assert_equal(x, numbers(5, 3), "the original")
    module = nn.Module()
    module.weight = nn.Parameter(x.detach().clone())
    module.same = module.weight
    twin = copy.deepcopy(module)
    assert twin.weight is twin.same and is_sharded(twin.weight)
    assert isinstance(twin.weight, nn.Parameter)
    alias = copy.copy(x)
    assert is_sharded(alias)
    with pytest.raises(RuntimeError):
        copy.deepcopy(x * 2)


def test_copies(run_mesh, ranks):
    run_mesh((ranks,), copies)


def pickling(mesh) -> list[str]:
    import io

    x = sharded(numbers(5, 3), mesh, 0)
    texts = []
    for call in (lambda: pickle.dumps(x), lambda: torch.save({"x": x}, io.BytesIO())):
        with pytest.raises((RuntimeError, TypeError, pickle.PicklingError)) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_pickling_is_refused_with_the_right_call(run_mesh):
    for text in run_mesh((2,), pickling)[0]:
        assert "save_sharded" in text and "full_tensor" in text


def refusals(mesh) -> None:
    import numpy as np

    x = sharded(numbers(5, 3), mesh, 0)
    for call in (
        lambda: x.numpy(),
        lambda: np.asarray(x),
        lambda: x.tolist(),
        lambda: x.data_ptr(),
        lambda: x.untyped_storage(),
        lambda: x.__dlpack__(),
        lambda: x.share_memory_(),
    ):
        with pytest.raises((RuntimeError, TypeError, BufferError)) as caught:
            call()
        assert "to_local" in str(caught.value) or "full_tensor" in str(caught.value), caught.value
    for call in (
        lambda: x.resize_(3, 5),
        lambda: x.set_(numbers(5, 3)),
        lambda: x.resize_as_(numbers(3)),
    ):
        with pytest.raises(RuntimeError):
            call()
    assert_equal(x, numbers(5, 3), "unchanged by what was refused")


def test_raw_memory_is_refused_with_advice(run_mesh):
    run_mesh((2,), refusals)


# ----------------------------------------------------------------------------------------- autograd


def hooks_and_leaves(mesh) -> None:
    seen = []
    x = sharded(numbers(6, 3), mesh, 0).requires_grad_()
    x.register_hook(lambda g: seen.append(("tensor", is_sharded(g))))
    x.register_post_accumulate_grad_hook(lambda t: seen.append(("post", is_sharded(t.grad))))
    y = x * 2
    y.retain_grad()
    y.grad_fn.register_hook(lambda gi, go: seen.append(("node", is_sharded(go[0]))))
    (y * y).sum().backward()
    assert sorted(seen) == [("node", True), ("post", True), ("tensor", True)]
    assert is_sharded(y.grad)
    assert_equal(y.grad, 4 * numbers(6, 3), "retained gradient")
    assert_equal(x.grad, 8 * numbers(6, 3), "gradient")
    (x * 3).sum().backward()
    assert_equal(x.grad, 8 * numbers(6, 3) + 3, "accumulated gradient")
    (x * 1).backward(numbers(6, 3, seed=1))  # a plain gradient is the whole one
    assert is_sharded(x.grad)
    assert_equal(
        x.grad, 8 * numbers(6, 3) + 3 + numbers(6, 3, seed=1), "plain gradient accumulated"
    )


def test_hooks_and_sharded_gradients_of_leaves(run_mesh, ranks):
    run_mesh((ranks,), hooks_and_leaves)


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv1d(4, 1, 5, padding=2)
    ).double()


def checkpointed(mesh) -> None:
    net, serial = small_net(), small_net()
    x = numbers(1, 2, 9).requires_grad_()
    (serial(x) ** 2).sum().backward()
    for reentrant in (False, True):
        net.zero_grad()
        ours = sharded(x.detach(), mesh, 2).requires_grad_()
        (checkpoint(net, ours, use_reentrant=reentrant) ** 2).sum().backward()
        assert_equal(ours.grad, x.grad, f"input, reentrant {reentrant}")
        for (name, p), q in zip(net.named_parameters(), serial.parameters(), strict=True):
            assert_equal(p.grad, q.grad, f"{name}, reentrant {reentrant}")


def checkpointed_dropout(mesh) -> None:
    x = sharded(numbers(64), mesh, 0).requires_grad_()
    torch.manual_seed(1)
    y = checkpoint(lambda t: F.dropout(t, 0.5) * t, x, use_reentrant=False)
    kept = (full(y.detach()) != 0).double()
    y.sum().backward()
    assert_equal(x.grad, 4 * kept * numbers(64), "the same mask when recomputed")


def test_checkpointing(run_mesh, ranks):
    run_mesh((ranks,), checkpointed)
    run_mesh((ranks,), checkpointed_dropout)


def autocast_dtypes(mesh) -> None:
    net, x = small_net().float(), numbers(1, 2, 16, dtype=torch.float32)
    ours = sharded(x, mesh, 2).requires_grad_()
    with torch.autocast(mesh.device_type, dtype=torch.bfloat16):
        got, want = net(ours), net(x)
        assert (ours @ numbers(16, 3, dtype=torch.float32)).dtype == torch.bfloat16
        assert F.mse_loss(got, want).dtype == F.mse_loss(want, want).dtype
    assert got.dtype == want.dtype == torch.bfloat16
    assert float((full(got).float() - want.float()).detach().abs().max()) < 0.1
    got.float().sum().backward()
    assert ours.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())


def test_autocast(run_mesh, ranks):
    run_mesh((ranks,), autocast_dtypes)


def without_gradients(mesh) -> None:
    net, x = small_net(), numbers(1, 2, 9)
    want = net(x).detach()
    with torch.no_grad():
        y = net(sharded(x, mesh, 2))
        assert is_sharded(y) and not y.requires_grad
        assert_equal(y, want, "no_grad")
    with torch.inference_mode():
        s = sharded(x, mesh, 2)
        y = net(s)
        assert is_sharded(y) and y.is_inference()
        assert_equal(y, want, "inference_mode")
        v = s[:, 1:]
        v.mul_(2)
        assert_equal(v, x[:, 1:] * 2, "view of an inference tensor")
        for op in (
            lambda t: t.sum(),
            lambda t: t.mean(2),
            lambda t: t.amax(2),
            lambda t: t.softmax(2),
            lambda t: t.flip(2),
            lambda t: F.pad(t, (1, 2)),
            lambda t: F.max_pool1d(t, 3, 2, 1),
            lambda t: F.interpolate(t, scale_factor=2),
            lambda t: torch.cat([t, t], 2),
            lambda t: F.mse_loss(t, t * 2),
            lambda t: F.linear(t.transpose(1, 2), numbers(3, 2)),
            lambda t: t.reshape(2, -1),
            lambda t: F.batch_norm(t, None, None, training=True),
            lambda t: F.instance_norm(t),
            lambda t: t.diagonal(0, 1, 2),
        ):
            fresh = sharded(x, mesh, 2)
            assert_equal(op(fresh), op(x), "in inference mode")
    outer = sharded(x, mesh, 2)
    with torch.inference_mode():
        view = outer[:, 0]
        assert not view.is_inference()
    outside = y.detach()
    assert outside.is_inference()


def test_no_grad_and_inference_mode(run_mesh, ranks):
    run_mesh((ranks,), without_gradients)


def optimizers(mesh, name: str, foreach: bool) -> None:
    make = {
        "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=foreach),
        "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1, foreach=foreach),
        "adam": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True, foreach=foreach),
    }[name]
    a, b = numbers(7, 3), numbers(3, seed=1)
    serial = [nn.Parameter(a.clone()), nn.Parameter(b.clone())]
    ours = [nn.Parameter(sharded(a, mesh, 0)), nn.Parameter(b.clone())]
    pair = [make(serial), make(ours)]
    for _ in range(4):
        for parameters, optimizer in zip((serial, ours), pair, strict=True):
            optimizer.zero_grad()
            ((parameters[0] * parameters[1]).sin().sum() + (parameters[0] ** 2).mean()).backward()
            optimizer.step()
    assert isinstance(ours[0], nn.Parameter) and is_sharded(ours[0])
    assert_equal(ours[0], serial[0], "sharded parameter")
    assert_equal(ours[1], serial[1], "plain parameter")


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizers_on_sharded_and_plain_parameters(run_mesh, name, foreach):
    for ranks in (1, 2, 3):
        run_mesh((ranks,), optimizers, name=name, foreach=foreach)


def set_data(mesh) -> None:
    x = sharded(numbers(5, 3), mesh, 0).requires_grad_()
    x.data = sharded(numbers(5, 3, seed=1), mesh, 0)
    assert_equal(x, numbers(5, 3, seed=1), "x.data = sharded")
    x.data = sharded(numbers(4, 2, seed=2), mesh, 0)
    assert tuple(x.shape) == (4, 2)
    assert_equal(x, numbers(4, 2, seed=2), "x.data = another shape")
    x.data.mul_(2)
    assert_equal(x, 2 * numbers(4, 2, seed=2), "in place through .data")
    module = nn.Module()
    module.weight = nn.Parameter(sharded(numbers(5, 3), mesh, 0))
    module.float()
    assert is_sharded(module.weight) and module.weight.dtype == torch.float32
    module.load_state_dict({"weight": numbers(5, 3, seed=3)})
    assert_equal(module.weight, numbers(5, 3, seed=3).float(), "loaded from plain")
    module.load_state_dict({"weight": sharded(numbers(5, 3, seed=4), mesh, 0)})
    assert_equal(module.weight, numbers(5, 3, seed=4).float(), "loaded from sharded")


def test_data_assignment_and_state_dicts(run_mesh, ranks):
    run_mesh((ranks,), set_data)


def in_place_ops(mesh) -> None:
    def block(x, w):
        y = x * 1
        y.mul_(2).add_(w)
        y[:, 1:3] = x[:, 1:3] * w[:, 1:3]
        y[0].zero_()
        y.unsqueeze(1).mul_(3)
        z = torch.zeros_like(x)
        z[:, 1:4] = y[:, 1:4]
        z.copy_(z + y)
        z.clamp_(-1, 5)
        return z

    from oracle import check_same_as_serial

    x, w = numbers(6, 4), numbers(1, 4, seed=1)
    for dim in (0, 1):
        check_same_as_serial(block, [x], mesh, [Shard(dim)], plain=[w])
    target = numbers(6, 4, seed=2)
    whole = torch.empty(6, 4, dtype=torch.float64)
    whole.copy_(sharded(target, mesh, 0))
    assert_equal(whole, target, "plain.copy_(sharded) gathers")
    cut = sharded(torch.zeros(6, 4, dtype=torch.float64), mesh, 0)
    cut.copy_(target)
    assert_equal(cut, target, "sharded.copy_(plain) slices")
    cut.copy_(sharded(target * 2, mesh, 1))
    assert_equal(cut, target * 2, "sharded.copy_(other cut) moves")
    plain = torch.zeros(6, 4, dtype=torch.float64)
    plain.add_(sharded(target, mesh, 0))
    assert_equal(plain, target, "plain.add_(sharded)")
    plain[:] = sharded(target * 3, mesh, 0)
    assert_equal(plain, target * 3, "plain[:] = sharded")
    out = torch.empty(6, 4, dtype=torch.float64)
    torch.add(sharded(target, mesh, 0), 1, out=out)
    assert_equal(out, target + 1, "add(out=plain)")


def test_in_place(run_mesh, ranks):
    run_mesh((ranks,), in_place_ops)


def creation(mesh) -> None:
    x = sharded(numbers(7, 3), mesh, 0)
    for call, value in (
        (torch.zeros_like, 0.0),
        (torch.ones_like, 1.0),
        (lambda t: torch.full_like(t, 2.5), 2.5),
        (lambda t: t.new_zeros(t.shape), 0.0),
        (lambda t: t.new_ones(t.shape), 1.0),
        (lambda t: t.new_full(t.shape, 2.5), 2.5),
    ):
        y = call(x)
        assert is_sharded(y) and y.to_local().shape == x.to_local().shape
        assert_equal(y, torch.full((7, 3), value, dtype=torch.float64), "filled")
    assert is_sharded(torch.empty_like(x)) and is_sharded(x.new_empty(x.shape))
    assert not is_sharded(x.new_zeros(3, 2))
    assert not is_sharded(x.new_tensor([1.0, 2.0]))
    assert is_sharded(x.clone()) and is_sharded(x.to(torch.float32)) and is_sharded(x.bool())
    assert_equal(x.to(torch.float32).to(torch.float64), numbers(7, 3).float().double(), "cast")


def test_creation_from_a_sharded_tensor(run_mesh, ranks):
    run_mesh((ranks,), creation)


def python_protocol(mesh) -> None:
    x = sharded(arange(5, 3), mesh, 0)
    assert [row.tolist() if not is_sharded(row) else full(row).tolist() for row in x] == arange(
        5, 3
    ).tolist()
    assert_equal(x[None, ..., 0], arange(5, 3)[None, ..., 0], "indexing")
    assert_equal(x[torch.tensor(2)], arange(5, 3)[2], "0-d index")
    assert bool((x == x).all()) and torch.equal(x, x.clone()) and torch.allclose(x, x + 1e-12)
    assert not torch.equal(x, x + 1)
    assert float(sharded(torch.tensor([3.0]), mesh, 0).item()) == 3.0
    x.note = "kept"
    assert x.note == "kept"
    assert x.element_size() == 8 and x.nbytes == 120
    assert x.is_floating_point() and not x.is_complex() and x.is_leaf
    assert f"{x.sum():.1f}" == "105.0"


def test_python_protocol(run_mesh, ranks):
    run_mesh((ranks,), python_protocol)


# ------------------------------------------------------------------------- report, strict, handlers


def reporting(mesh) -> None:
    x = sharded(numbers(1, 1, 12), mesh, 2)
    w = numbers(1, 1, 3, seed=1)
    with shardfield.report() as report:
        F.conv1d(x, w, padding=1)
        torch.unique_consecutive(sharded(numbers(8), mesh, 0))
        with shardfield.report() as inner:
            x + 1
    assert isinstance(report.fallbacks, dict)
    assert sum(report.fallbacks.values()) >= 1
    assert any("unique_consecutive" in name for name in report.fallbacks), report.fallbacks
    if mesh.size() > 1:
        assert report.bytes_sent > 0
    assert not inner.fallbacks and inner.bytes_sent == 0
    table = report.table()
    assert "conv" in table and "unique_consecutive" in table


def test_report(run_mesh, ranks):
    run_mesh((ranks,), reporting)


def reporting_by_layer(mesh) -> None:
    """Forward calls and backward traffic are charged to the module that made them."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.InstanceNorm1d(4)
    ).double()
    x = sharded(numbers(2, 2, 12), mesh, 2)
    with shardfield.report(net) as report:
        y = net(x)
        forward = {
            layer: sum(r.calls for (at, _), r in report.rows.items() if at == layer)
            for layer in "0123"
        }
        sent = {
            layer: sum(r.bytes_sent for (at, _), r in report.rows.items() if at == layer)
            for layer in "013"
        }
        y.square().mean().backward()
        after = {
            layer: sum(r.bytes_sent for (at, _), r in report.rows.items() if at == layer)
            for layer in "013"
        }
    assert forward == dict.fromkeys("0123", 1), forward
    if mesh.size() > 1:
        assert all(after[layer] > sent[layer] > 0 for layer in "013"), (sent, after)
    elsewhere = [op for (layer, op) in report.rows if layer == "" and "norm" in op]
    assert not elsewhere, elsewhere


def test_report_by_layer(run_mesh, ranks):
    run_mesh((ranks,), reporting_by_layer)


def strict_mode(mesh) -> list[str]:
    x = sharded(numbers(8), mesh, 0)
    shardfield.set_strict(True)
    try:
        with pytest.raises(RuntimeError) as caught:
            torch.unique_consecutive(x)
        with pytest.raises(RuntimeError) as into_plain:
            torch.zeros(8, dtype=x.dtype).copy_(x)
        assert_equal(x * 2 + x.sum(), numbers(8) * 2 + numbers(8).sum(), "sharded ops go on")
    finally:
        shardfield.set_strict(False)
    assert_equal(torch.unique_consecutive(x), torch.unique_consecutive(numbers(8)), "allowed again")
    return [str(caught.value), str(into_plain.value)]


def test_strict_mode_refuses_a_gather(run_mesh):
    text, into_plain = run_mesh((2,), strict_mode)[0]
    assert "unique_consecutive" in text
    assert "ordinary tensor" in into_plain
    assert "x.new_zeros" in into_plain


def my_function(x, y):
    """A Python function with `__torch_function__` dispatch, for the handlers below."""
    if torch.overrides.has_torch_function((x, y)):
        return torch.overrides.handle_torch_function(my_function, (x, y), x, y)
    return (x * y).sum()


def handlers(mesh) -> None:
    seen = []

    def dot(func, types, args, kwargs):
        a, b = args
        seen.append(func)
        part = torch.dot(a.to_local(), b.to_local())
        out = part.clone()
        dist.all_reduce(out, group=a._spec.mesh.get_group())
        return ShardTensor.from_local(out, a._spec.mesh, (Replicate(),))

    a, b = sharded(numbers(9), mesh, 0), sharded(numbers(9, seed=1), mesh, 0)
    want = torch.dot(numbers(9), numbers(9, seed=1))
    plain_dot = torch.dot
    handle = ShardTensor.register_function_handler(torch.dot, dot)
    assert_equal(torch.dot(a, b), want, "function handler")
    assert seen == [plain_dot]
    assert_equal(torch.dot(numbers(9), numbers(9, seed=1)), want, "plain call")
    assert len(seen) == 1, "the handler is for sharded tensors only"
    handle.remove()
    assert torch.dot is plain_dot

    def vdot(func, types, args, kwargs):
        seen.append("op")
        return (args[0] * args[1]).sum()

    ShardTensor.register_dispatch_handler(torch.ops.aten.vdot.default, vdot)
    assert_equal(torch.vdot(a, b), want, "op handler")
    assert seen[-1] == "op"


def named_handler(mesh) -> None:
    seen = []

    def double(func, types, args, kwargs):
        seen.append("named")
        return args[0] * 2

    ShardTensor.register_named_function_handler("shardfield_tests.double.default", double)
    library = torch.library.Library("shardfield_tests", "FRAGMENT")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x + x, "CompositeExplicitAutograd")
    x = sharded(numbers(5), mesh, 0)
    assert_equal(torch.ops.shardfield_tests.double(x), 2 * numbers(5), "named handler")
    assert seen == ["named"]
    assert_equal(torch.ops.shardfield_tests.double(numbers(5)), 2 * numbers(5), "plain")
    assert seen == ["named"]
    library._destroy()


def test_handlers(run_mesh):
    run_mesh((2,), handlers)
    run_mesh((2,), named_handler)


def late_custom_op(mesh) -> None:
    @torch.library.custom_op("shardfield_tests_late::thrice", mutates_args=())
    def thrice(x: torch.Tensor) -> torch.Tensor:
        x.data_ptr()  # real memory is needed: a sharded tensor must not arrive here
        return x * 3

    thrice.register_autograd(lambda ctx, g: g * 3)
    x = sharded(numbers(5), mesh, 0).requires_grad_()
    with shardfield.report() as report:
        y = thrice(x)
    assert_equal(y, 3 * numbers(5), "custom op")
    assert sum(report.fallbacks.values()) == 1
    y.sum().backward()
    assert_equal(x.grad, torch.full((5,), 3.0, dtype=torch.float64), "gradient")


def test_custom_op_registered_later(run_mesh):
    run_mesh((2,), late_custom_op)


def synchronised(mesh) -> None:
    torch.manual_seed(mesh.get_local_rank())
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    net.register_buffer("offset", torch.rand(2))
    if mesh.size() > 1:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            sync_module_over_mesh(net, mesh, verify=True)
        assert "0.weight" in str(caught.value)
    sync_module_over_mesh(net, mesh)
    sync_module_over_mesh(net, mesh, verify=True)
    torch.manual_seed(0)
    first = nn.Linear(3, 2)
    assert torch.equal(net[0].weight, first.weight), "the values are those of mesh rank 0"


def test_sync_module_over_mesh(run_mesh, ranks):
    run_mesh((ranks,), synchronised)


def empty_pieces(mesh) -> None:
    n = mesh.size()
    x = scatter(Cut(numbers(1, 2, 6), [Shard(2)], {0: [6] + [0] * (n - 1)}), mesh)
    net = small_net()
    assert_equal(net(x), net(numbers(1, 2, 6)), "net on one rank's piece")


def test_one_rank_holds_everything(run_mesh, ranks):
    run_mesh((ranks,), empty_pieces)


def test_torch_overrides_can_list_every_function():
    """torch.fx tracers ask for it; names of sharded tensors stay free on plain ones."""
    import torch.overrides

    assert torch.add in torch.overrides.get_overridable_functions()[torch]
    x = torch.zeros(2)
    x.placements = "mine"
    assert x.placements == "mine"
    assert not hasattr(torch.zeros(2), "placements")


def memory_order(mesh) -> None:
    """A channels_last tensor is cut channels_last: strides of the whole and of the piece."""
    for shape, order in (
        ((2, 3, 8, 6), torch.channels_last),
        ((2, 3, 4, 8, 6), torch.channels_last_3d),
    ):
        x = numbers(*shape).to(memory_format=order)
        y = shard_tensor(x, mesh, [Shard(2)])
        assert y.stride() == x.stride() and y.is_contiguous(memory_format=order)
        assert y.to_local().is_contiguous(memory_format=order)
        assert_equal(
            y.permute(0, 2, 3, 1, *range(4, x.dim())), x.transpose(1, 2).transpose(2, 3), ""
        )
        leaf = y.detach().requires_grad_()
        (leaf * x).sum().backward()
        assert_equal(leaf.grad, x, "gradient")
    contiguous = shard_tensor(numbers(2, 1, 8, 6), mesh, [Shard(2)])
    assert contiguous.is_contiguous() and contiguous.view(2, 8, 6).shape == (2, 8, 6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_memory_order_is_kept(run_mesh, size):
    run_mesh((size,), memory_order)

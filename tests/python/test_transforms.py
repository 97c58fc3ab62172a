"""torch.func, forward mode and torch.autograd.functional on sharded tensors: right, or a sentence."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from oracle import assert_equal, full, is_sharded, numbers, sharded
from torch import func, nn
from torch.distributed.tensor import Shard

X0, W0 = numbers(6, 4), numbers(4, 3, seed=1)
SIZES = {1: [6], 2: [4, 2], 3: [1, 0, 5], 4: [2, 0, 3, 1]}


def field(mesh, dim: int = 0) -> torch.Tensor:
    sizes = SIZES[mesh.size(-1)] if dim == 0 else None
    return sharded(X0, mesh, dim, sizes)


def compare(got, want, what: str) -> None:
    """Tensors in any structure."""
    got, want = torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want)
    assert len(got) == len(want), what
    for i, (ours, serial) in enumerate(zip(got, want, strict=True)):
        assert_equal(ours, serial, f"{what} [{i}]")


def channels(d: torch.Tensor) -> torch.Tensor:
    return d.t()[None]


FAMILIES = {
    "pointwise": lambda d: d.sin() * d.exp(),
    "matmul": lambda d: (d @ W0).tanh(),
    "sum": lambda d: d.square().sum(0),
    "mean_all": lambda d: d.square().mean(),
    "softmax": lambda d: d.softmax(0),
    "variance": lambda d: d.var(0),
    "layer_norm": lambda d: F.layer_norm(d, (4,)),
    "group_norm": lambda d: F.group_norm(channels(d), 2),
    "batch_norm": lambda d: F.batch_norm(d, None, None, training=True),
    "convolution": lambda d: F.conv1d(channels(d), numbers(3, 4, 3, seed=2), padding=1),
    "transposed": lambda d: F.conv_transpose1d(channels(d), numbers(4, 3, 3, seed=2)),
    "max_pool": lambda d: F.max_pool1d(channels(d), 2),
    "interpolate": lambda d: F.interpolate(channels(d), scale_factor=2, mode="linear"),
    "pad": lambda d: F.pad(channels(d), (1, 2), mode="reflect"),
    "cumsum": lambda d: d.cumsum(0).square(),
    "sort": lambda d: d.sort(0).values * d,
    "gather": lambda d: d.gather(0, torch.tensor([[5, 0, 2, 1]])),
    "cat_flip": lambda d: torch.cat([d, d.flip(0)], 0).square(),
    "index": lambda d: d[[5, 0, 3]].square(),
    "mse": lambda d: F.mse_loss(d.sin(), X0),
    "cross_entropy": lambda d: F.cross_entropy(d, torch.tensor([0, 1, 2, 3, 0, 1])),
}


def tangents(mesh) -> None:
    """func.jvp through every family; the tangent sharded, or plain."""
    t0 = numbers(6, 4, seed=3)
    for name, f in FAMILIES.items():
        want = func.jvp(f, (X0,), (t0,))
        for t in (sharded(t0, mesh, 0, SIZES[mesh.size(-1)]), t0):
            compare(func.jvp(f, (field(mesh),), (t,)), want, f"jvp of {name}")


WEIGHTED = {
    "linear": lambda d, w: F.linear(d, w[:, :1].t(), w[0, :1]),
    "matmul": lambda d, w: d @ w,
    "layer_norm": lambda d, w: F.layer_norm(d, (4,), w[:, 0], w[:, 1]),
    "convolution": lambda d, w: F.conv1d(channels(d), w.t()[:, :, None], w[0]),
    "scale": lambda d, w: d * w[:, 0],
    "embedding": lambda d, w: F.embedding(torch.tensor([0, 3, 1]), w) * d[:3, :3],
}


def dual_numbers(mesh) -> None:
    """torch.autograd.forward_ad: a tangent on the sharded input, and on a plain weight."""
    t0, tw = numbers(6, 4, seed=3), numbers(4, 3, seed=4)

    def tangent_of(f, *pairs):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(v, t) if t is not None else v for v, t in pairs]
            return forward_ad.unpack_dual(f(*duals)).tangent

    ours, tangent = field(mesh), sharded(t0, mesh, 0, SIZES[mesh.size(-1)])
    for name, f in FAMILIES.items():
        if name != "cross_entropy":  # refused, below
            compare(tangent_of(f, (ours, tangent)), tangent_of(f, (X0, t0)), f"tangent of {name}")
    for name, f in WEIGHTED.items():
        want = tangent_of(f, (X0, None), (W0, tw))
        compare(tangent_of(f, (ours, None), (W0, tw)), want, f"weight tangent of {name}")
        want = tangent_of(f, (X0, t0), (W0, tw))
        compare(tangent_of(f, (ours, tangent), (W0, tw)), want, f"both tangents of {name}")


def cotangents(mesh) -> None:
    """func.grad, its gradient, and func.vjp through every family."""
    for name, f in FAMILIES.items():

        def loss(x, w, f=f):
            return (f(x * w.mean()) ** 2).sum()

        def penalty(x, w, loss=loss):
            return sum(g.square().sum() for g in func.grad(loss, argnums=(0, 1))(x, w))

        for transform in (func.grad(loss, argnums=(0, 1)), func.grad(penalty, argnums=(0, 1))):
            got = transform(field(mesh), W0)
            assert not is_sharded(got[1]), f"{name}: a plain tensor's gradient must be plain"
            compare(got, transform(X0, W0), f"gradients of {name}")
        out, back = func.vjp(f, field(mesh))
        serial, serial_back = func.vjp(f, X0)
        compare(out, serial, name)
        compare(back(torch.ones_like(out)), serial_back(torch.ones_like(serial)), f"vjp of {name}")


MAPPED = {
    "pointwise": lambda r: r.sin() * r,
    "sum": lambda r: r.square().sum(),
    "softmax": lambda r: r.softmax(-1),
    "layer_norm": lambda r: F.layer_norm(r, r.shape[-1:]),
    "cumsum": lambda r: r.cumsum(0),
    "sort": lambda r: r.sort(0).values,
    "index": lambda r: r[[2, 0]],
    "matrix": lambda r: r[None] @ r[:, None],
}


def mapped(mesh) -> None:
    """One row at a time, over the cut dim and over a whole one."""
    for name, f in MAPPED.items():
        for dim in (0, 1):
            got, want = func.vmap(f, in_dims=dim)(field(mesh)), func.vmap(f, in_dims=dim)(X0)
            compare(got, want, f"vmap of {name} over dim {dim}")
    scales = numbers(5, seed=4)
    compare(
        func.vmap(lambda k, x: (k * x) @ W0, in_dims=(0, None))(scales, field(mesh)),
        func.vmap(lambda k, x: (k * x) @ W0, in_dims=(0, None))(scales, X0),
        "vmap over a plain tensor",
    )


def physics(mesh) -> None:
    """Losses of physics-informed networks: derivatives at every point, then those of the weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def u(p, x):
        return func.functional_call(net, p, (x[None],)).sum()

    def laplacian(p, points):
        return func.vmap(lambda x: func.hessian(u, argnums=1)(p, x).diagonal().sum())(points)

    def residual(p, points):
        return (laplacian(p, points) - points.sum(1)).square().mean()

    compare(laplacian(weights, field(mesh)), laplacian(weights, X0), "laplacian")
    compare(
        func.grad(residual)(weights, field(mesh)), func.grad(residual)(weights, X0), "its weights"
    )
    for one in (func.jacrev, func.jacfwd):
        per_point = func.vmap(one(lambda x: u(weights, x)))
        compare(per_point(field(mesh)), per_point(X0), one.__name__)


def whole_matrices(mesh) -> None:
    """Jacobians and Hessians of all points at once, and products with them."""

    def f(x):
        return (x @ W0).sin().sum(1)

    def loss(x):
        return f(x).square().sum()

    for name, transform in {
        "jacrev": func.jacrev(f),
        "hessian": func.hessian(loss),
        "jacfwd of the loss": func.jacfwd(loss),
        "jvp of grad": lambda x: func.jvp(func.grad(loss), (x,), (x,)),
        "grad of jvp": func.grad(lambda x: func.jvp(f, (x,), (x,))[1].square().sum()),
    }.items():
        compare(transform(field(mesh)), transform(X0), name)


def functional(mesh) -> None:
    """torch.autograd.functional, and gradcheck."""
    af = torch.autograd.functional
    x = field(mesh)

    def f(t):
        return (t @ W0).sin()

    def loss(t):
        return f(t).square().sum()

    v = numbers(6, 3, seed=5)
    for name, call in {
        "vjp": lambda t: af.vjp(f, t, v),
        "jvp": lambda t: af.jvp(f, t, t * 2),
        "hvp": lambda t: af.hvp(loss, t, t * 2),
        "vhp": lambda t: af.vhp(loss, t, t * 2),
        "jacobian": lambda t: af.jacobian(lambda s: f(s).sum(0), t),
        "jacobian of pieces": lambda t: af.jacobian(f, t),
        "hessian": lambda t: af.hessian(loss, t),
    }.items():
        compare(call(x), call(X0), name)
    assert torch.autograd.gradcheck(lambda t: full(f(t)), (x.detach().requires_grad_(),))


@pytest.mark.parametrize(
    "case", [tangents, dual_numbers, cotangents, mapped, physics, whole_matrices, functional]
)
def test_transforms(run_mesh, case):
    for shape in ((1,), (2,), (3,), (2, 2)):
        run_mesh(shape, case)


def refusals(mesh) -> None:
    """What PyTorch cannot batch or has no tangent for says so, alike on every rank."""
    af = torch.autograd.functional

    def f(t):
        return (t @ W0).sin()

    x = field(mesh).requires_grad_()
    for call in (
        lambda: af.jacobian(f, x, vectorize=True),
        lambda: af.jacobian(lambda t: f(t).sum(0), x, vectorize=True),
        lambda: af.jacobian(lambda w: (x.detach() @ w).sin().sum(0), W0, vectorize=True),
        lambda: af.hessian(lambda t: f(t).sum(), x, vectorize=True),
        lambda: torch.autograd.grad(f(x).sum(0), x, torch.eye(3).double(), is_grads_batched=True),
    ):
        with pytest.raises(RuntimeError, match=r"batched gradients .* use vectorize=False"):
            call()
    for call in (
        lambda dual: F.cross_entropy(dual, torch.tensor([0, 1, 2, 3, 0, 1])),
        lambda dual: torch.linalg.svdvals(dual[None].expand(2, -1, -1)),
        lambda dual: dual.redistribute(placements=[Shard(1)]),
        lambda dual: dual.full_tensor(),
    ):
        with (
            forward_ad.dual_level(),
            pytest.raises(RuntimeError, match=r"forward-mode derivatives .* are not available"),
        ):
            call(forward_ad.make_dual(x.detach(), x.detach()))
    forward = af.jacobian(f, x.detach(), vectorize=True, strategy="forward-mode")
    compare(forward, af.jacobian(f, X0), "jacobian of tangents")
    plain = X0.clone().requires_grad_()
    compare(af.jacobian(f, plain, vectorize=True), af.jacobian(f, plain), "plain as before")


def test_what_cannot_be_transformed_is_refused(run_mesh):
    run_mesh((2,), refusals)

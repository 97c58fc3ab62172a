"""Attention whose keys and values stay cut and pass by in blocks: values, derivatives, bytes, memory."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from oracle import Cut, check_same_as_serial, full, numbers, scatter
from torch.distributed.tensor import Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardfield

# Keys and values of 1 MiB and more pass by in blocks.
B, H, L, S, E, EV = 1, 4, 300, 420, 40, 48


def operands(
    length: int = L, keys: int = S, heads: int = H, features: int = EV
) -> list[torch.Tensor]:
    """Values as long as keys (`features=E`) let PyTorch's fused kernel work blocks out."""
    return [
        numbers(B, H, length, E),
        numbers(B, heads, keys, E, seed=1),
        numbers(B, heads, keys, features, seed=2),
    ]


def attend(q, k, v, mask=None, **options):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def cut_rows(mesh, tensors, dims=(2, 2), sizes=(None, None, None)) -> list[Cut]:
    places = [Shard(d) for d in dims[: mesh.ndim]]
    return [Cut(t, places, s) for t, s in zip(tensors, sizes, strict=True)]


def passes_round(mesh) -> None:
    """One message per block and step, none for what a rank holds already."""
    q, k, v = (scatter(c, mesh) for c in cut_rows(mesh, operands()))
    with shardfield.report() as report:
        attend(q, k, v)
    assert not report.fallbacks
    ranks, rank = mesh.size(), mesh.get_local_rank()
    lengths = [len(c) for c in torch.arange(S).chunk(ranks)]
    rows = sum(lengths) - lengths[(rank + 1) % ranks]
    assert report.bytes_sent == 8 * B * H * rows * (E + EV)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_forward_sends_each_block_to_each_rank_once(run_mesh, size):
    run_mesh((size,), passes_round)


def backward_bytes(mesh) -> tuple[int, int]:
    q, k, v = (scatter(c, mesh).requires_grad_() for c in cut_rows(mesh, operands(S, S)))
    sent = []
    for causal in (False, True):
        with shardfield.report() as report:
            out = attend(q, k, v, is_causal=causal)
            out.backward(torch.ones_like(out))
        sent.append(report.bytes_sent)
    return sent[0], sent[1]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_of_a_step(run_mesh, size):
    """Keys go round; then queries do, with gradients and two numbers, and gradients go home.

    The causal half never travels.
    """
    results = run_mesh((size,), backward_bytes)
    row = 8 * B * H * ((E + EV) + (2 * E + EV + 2))
    assert sum(full for full, _ in results) == row * S * (size - 1)
    assert sum(half for _, half in results) == row * S * (size - 1) // 2


def few_keys(mesh) -> int:
    q, k, v = (scatter(c, mesh).requires_grad_() for c in cut_rows(mesh, operands(4 * S, S)))
    out = attend(q, k, v)
    with shardfield.report() as report:
        out.backward(torch.ones_like(out))
    return report.bytes_sent


def test_what_is_less_travels_in_backward(run_mesh):
    """Keys, values and their gradients where there are four queries to each."""
    assert sum(run_mesh((2,), few_keys)) == 8 * B * H * S * 2 * (E + EV)


def saved_bytes(mesh) -> None:
    """What autograd keeps is this rank's share, not the keys of all."""
    q, k, v = (scatter(c, mesh).requires_grad_() for c in cut_rows(mesh, operands(S, S)))
    kept: dict[int, int] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        own = t.to_local() if hasattr(t, "to_local") else t
        kept[own.data_ptr()] = own.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        attend(q, k, v)
    whole = 8 * B * H * S * (2 * E + 2 * EV + 1)
    assert sum(kept.values()) <= whole / mesh.size() * 1.01


@pytest.mark.parametrize("size", [2, 4])
def test_memory_kept_for_backward(run_mesh, size):
    run_mesh((size,), saved_bytes)


def same_as_serial(mesh, dims) -> None:
    keep = {"second": False}  # PyTorch's fused kernels have no second derivative
    for features in (E, EV):
        cuts = cut_rows(mesh, operands(features=features), dims)
        check_same_as_serial(attend, cuts, mesh, **keep)
    for length, keys, features in ((L, S, E), (L, 410, EV), (S, S, E)):
        cuts = cut_rows(mesh, operands(length, keys, features=features), dims)
        check_same_as_serial(
            lambda q, k, v: attend(q, k, v, is_causal=True, scale=0.7), cuts, mesh, **keep
        )
    for mask in (
        numbers(L, S, seed=3),
        numbers(L, S, seed=3) > 0,
        numbers(H, 1, S, seed=3),
        numbers(B, 1, L, 1, seed=3),
        numbers(1, S, seed=3) > -1,
    ):
        check_same_as_serial(attend, cut_rows(mesh, operands(), dims), mesh, plain=[mask], **keep)


def test_values_and_gradients(run_mesh, mesh_shape):
    run_mesh(mesh_shape, same_as_serial, dims=(2, 2))


@pytest.mark.parametrize("dims", [(1, 2), (2, 1), (0, 2), (2, 3)])
def test_rows_beside_other_cuts(run_mesh, dims):
    run_mesh((2, 2), same_as_serial, dims=dims)


def image_tokens(mesh, dims) -> None:
    """Tokens of an image whose rows or columns are cut lie in many runs: they need no order."""
    image = [numbers(B, H, E, 20, 23, seed=i) for i in range(3)]

    def of_tokens(*images: torch.Tensor) -> torch.Tensor:
        return attend(*(t.flatten(-2).transpose(-2, -1) for t in images))

    with shardfield.report() as report:
        check_same_as_serial(of_tokens, cut_rows(mesh, image, dims), mesh, second=False)
    assert not report.fallbacks
    # Twice forward and once backward, less than all keys to every rank.
    assert report.bytes_sent < 4 * 8 * B * H * 2 * E * 20 * 23


@pytest.mark.parametrize(
    ("shape", "dims"), [((2,), (4,)), ((3,), (4,)), ((2, 2), (3, 4)), ((2, 2), (4, 1))]
)
def test_tokens_of_images(run_mesh, shape, dims):
    run_mesh(shape, image_tokens, dims=dims)


def uneven(mesh) -> None:
    q, k, v = operands(keys=440, features=E)
    for rows, keys in (([100, 0, 200], [0, 420, 20]), ([1, 298, 1], [440, 0, 0])):
        cuts = cut_rows(mesh, [q, k, v], sizes=({0: rows}, {0: keys}, {0: keys}))
        check_same_as_serial(attend, cuts, mesh, second=False)
        check_same_as_serial(lambda *t: attend(*t, is_causal=True), cuts, mesh, second=False)
    cuts = cut_rows(mesh, [t[0] for t in operands()], dims=(1,))
    check_same_as_serial(attend, cuts, mesh, second=False)


def test_uneven_and_empty_pieces_and_three_dims(run_mesh):
    run_mesh((3,), uneven)


def second_derivatives(mesh) -> None:
    cuts = cut_rows(mesh, operands(280, 400))
    with sdpa_kernel(SDPBackend.MATH):
        check_same_as_serial(attend, cuts, mesh)
        check_same_as_serial(lambda q, k, v: attend(q, k, v, is_causal=True), cuts, mesh)
        mask = numbers(H, 280, 400, seed=3)
        check_same_as_serial(attend, cuts, mesh, plain=[mask])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_second_derivatives(run_mesh, size):
    run_mesh((size,), second_derivatives)


def grouped(mesh) -> None:
    cuts = cut_rows(mesh, operands(heads=2, keys=800))
    with shardfield.report() as report:
        check_same_as_serial(
            lambda q, k, v: attend(q, k, v, enable_gqa=True), cuts, mesh, second=False
        )
    assert not report.fallbacks


@pytest.mark.parametrize("size", [2, 3])
def test_heads_that_share_keys(run_mesh, size):
    run_mesh((size,), grouped)


def masked_rows(mesh) -> None:
    """A row without keys gives zeros, as in PyTorch; NaN stays in its rows."""
    q, k, v = operands()
    mask = numbers(L, S, seed=3) > 0
    mask[2], mask[L - 1] = False, False
    check_same_as_serial(attend, cut_rows(mesh, [q, k, v]), mesh, plain=[mask], second=False)
    q[0, 1, 5] = float("nan")
    got = attend(*(scatter(c, mesh) for c in cut_rows(mesh, [q, k, v]))).full_tensor()
    assert torch.equal(got.isnan(), attend(q, k, v).isnan())


def test_rows_without_keys(run_mesh):
    run_mesh((3,), masked_rows)


def values_at_the_edge(mesh) -> None:
    """Infinite scores, hidden NaN, no features, scales below zero: as PyTorch has them."""

    def found(q, k, v, grad=1.0, **options) -> list[torch.Tensor]:
        tensors = [t.detach().requires_grad_() for t in (q, k, v)]
        out = attend(*tensors, **options)
        return [out, *torch.autograd.grad(out, tensors, torch.full_like(out, grad))]

    def compare(tensors, ours=None, **options) -> None:
        want = found(*tensors, **options)
        got = found(*(scatter(c, mesh) for c in cut_rows(mesh, ours or tensors)), **options)
        for g, w in zip(map(full, got), want, strict=True):
            largest = w.nan_to_num().abs().max() if w.numel() else 0.0
            assert torch.allclose(g, w, rtol=1e-4, atol=1e-4 * float(largest), equal_nan=True)

    for features in (E, EV):
        q, k, v = operands(features=features)
        for factor in (1.0, 1e-30, 1e-165, 1e20):
            compare((q, k, v), grad=factor)
        compare([t.float() for t in operands(S, 2 * S, features=features)], grad=1e-24)
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel gives NaN
            compare((q, k, v), is_causal=True, scale=-0.3)
            compare(operands(S, S, features=features), is_causal=True, scale=-0.3)
        compare((q, k, v), scale=0.0)
        hidden = [q, k.clone(), v.clone()]
        hidden[1][:, :, L:], hidden[2][:, :, L:] = float("nan"), float("nan")
        compare((q, k, v), hidden, is_causal=True)  # keys that no row sees
    q, k, v = operands()
    q, k = q.abs(), k.clone()
    k[0, 0, 200, 3] = float("inf")
    compare((q, k, v))
    compare((q[..., :0], k[..., :0], numbers(B, H, S, 3 * EV)))


@pytest.mark.parametrize("size", [2, 3])
def test_values_at_the_edge(run_mesh, size):
    run_mesh((size,), values_at_the_edge)


def short_types(mesh) -> None:
    """As near to float64 as PyTorch's own kernels by a factor of two, or within four roundings."""
    for features, dtype in itertools.product(
        (E, EV), (torch.bfloat16, torch.float16, torch.float32)
    ):
        exact = [t.to(dtype).double() for t in operands(900, 1800, features=features)]
        plain = [t.to(dtype).requires_grad_() for t in exact]
        cut = [
            scatter(c, mesh).requires_grad_() for c in cut_rows(mesh, [t.to(dtype) for t in exact])
        ]
        want, usual, got = [], [], []
        for tensors, found in (
            ([t.requires_grad_() for t in exact], want),
            (plain, usual),
            (cut, got),
        ):
            out = attend(*tensors)
            found += [out, *torch.autograd.grad(out, tensors, torch.ones_like(out))]
        for w, u, g in zip(want, usual, got, strict=True):
            assert g.dtype == dtype
            errors = [(full(t).double() - w).abs().max() / w.abs().max() for t in (u, g)]
            assert errors[1] < max(2 * errors[0], 4 * torch.finfo(dtype).eps), (
                features,
                dtype,
                errors,
            )


def test_short_types(run_mesh):
    run_mesh((2,), short_types)


def wrong_calls(mesh) -> None:
    """Also where keys are small enough to be brought whole."""
    q, k, v = (scatter(c, mesh) for c in cut_rows(mesh, operands()))
    with pytest.raises(RuntimeError, match=r"expected query .* got .*rank"):
        attend(q, k[..., :7], v)
    with pytest.raises(RuntimeError, match=r"of one dtype, got .* on rank"):
        attend(q, k.float(), v)
    with pytest.raises(RuntimeError, match="expected attn_mask or is_causal, got both on rank"):
        attend(q, k, v, numbers(L, S) > 0, is_causal=True)
    three = scatter(Cut(numbers(B, 3, S, E), [Shard(2)]), mesh)
    with pytest.raises(RuntimeError, match=r"expected heads of query .* on rank"):
        attend(q, three, three, enable_gqa=True)
    for wrong in (numbers(L + 1, S), numbers(H - 1, L, S), numbers(1, B, H, L, S), numbers(S)):
        with pytest.raises(RuntimeError, match=r"expected attn_mask that broadcasts .* on rank"):
            attend(q, k, v, wrong > 0)


def test_wrong_calls_raise_on_every_rank(run_mesh):
    run_mesh((2,), wrong_calls)

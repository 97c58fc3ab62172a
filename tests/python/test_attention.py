"""Scaled dot-product attention over every cut: rows, batch, heads and features; masks; shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import Cut, assert_equal, check_same_as_serial, full, is_sharded, numbers, scatter
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardfield

B, H, L, S, E = 2, 4, 7, 9, 6


def _with_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7)


def _placements(mesh, dims):
    """One dim per mesh axis (all axes on the first when there is one), None for a whole axis."""
    dims = dims if len(dims) == mesh.ndim else [dims[0]] * mesh.ndim
    return [Replicate() if d is None else Shard(d) for d in dims]


def every_operand_cut(mesh, dims, kv_dims=None) -> None:
    q, k, v = numbers(B, H, L, E), numbers(B, H, S, E, seed=1), numbers(B, H, S, 5, seed=2)
    places, kv_places = _placements(mesh, dims), _placements(mesh, kv_dims or dims)
    cuts = [Cut(q, places), Cut(k, kv_places), Cut(v, kv_places)]
    # PyTorch's fused kernels have no second derivative.
    check_same_as_serial(F.scaled_dot_product_attention, cuts, mesh, second=False)
    mask = numbers(H, L, S, seed=3)
    check_same_as_serial(_with_mask, cuts, mesh, plain=[mask], second=False)
    check_same_as_serial(_with_mask, cuts, mesh, plain=[numbers(L, S, seed=3) > 0], second=False)
    check_same_as_serial(_causal, cuts, mesh, second=False)


@pytest.mark.parametrize("dim", range(4))
def test_every_dim(run_mesh, mesh_shape, dim):
    run_mesh(mesh_shape, every_operand_cut, dims=[dim])


@pytest.mark.parametrize(
    ("dims", "kv_dims"),
    [
        ([2, 0], [2, 0]),
        ([1, 2], [1, 2]),
        ([2, None], [None, 2]),
        ([0, 2], [1, 0]),
        ([3, 2], [2, 3]),
    ],
)
def test_two_dims(run_mesh, dims, kv_dims):
    run_mesh((2, 2), every_operand_cut, dims=dims, kv_dims=kv_dims)


def some_operands_plain(mesh) -> None:
    q, k, v = numbers(B, H, L, E), numbers(B, H, S, E, seed=1), numbers(B, H, S, 5, seed=2)
    for dim in (0, 1, 2):
        place = [Shard(dim)] * mesh.ndim
        check_same_as_serial(
            F.scaled_dot_product_attention, [Cut(q, place)], mesh, plain=[k, v], second=False
        )
        check_same_as_serial(
            lambda k, v, q: F.scaled_dot_product_attention(q, k, v),
            [Cut(k, place), Cut(v, place)],
            mesh,
            plain=[q],
            second=False,
        )


def test_plain_operands(run_mesh, mesh_shape):
    run_mesh(mesh_shape, some_operands_plain)


def uneven_and_empty(mesh) -> None:
    q, k, v = numbers(3, L, E), numbers(3, S, E, seed=1), numbers(3, S, 5, seed=2)
    for dim, q_sizes, k_sizes in ((1, [5, 0, 2], [0, 1, 8]), (0, [0, 3, 0], [1, 0, 2])):
        place = [Shard(dim)]
        cuts = [Cut(q, place, {0: q_sizes}), Cut(k, place, {0: k_sizes}), Cut(v, place)]
        check_same_as_serial(F.scaled_dot_product_attention, cuts, mesh, second=False)
        check_same_as_serial(_causal, cuts, mesh, second=False)


def test_uneven_and_empty_pieces(run_mesh):
    run_mesh((3,), uneven_and_empty)


def masked_rows(mesh) -> None:
    """A row whose keys are all masked gives zeros, cut along the rows and along the keys."""
    q, k, v = numbers(1, 2, L, E), numbers(1, 2, S, E, seed=1), numbers(1, 2, S, 5, seed=2)
    mask = numbers(L, S, seed=3) > 0
    mask[2] = False
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    for q_place, k_place in ((Shard(2), Shard(2)), (Replicate(), Shard(2))):
        got = F.scaled_dot_product_attention(
            scatter(Cut(q, [q_place]), mesh) if isinstance(q_place, Shard) else q,
            scatter(Cut(k, [k_place]), mesh),
            scatter(Cut(v, [k_place]), mesh),
            attn_mask=mask,
        )
        assert_equal(got, want, f"{q_place} {k_place}")
    scores = numbers(4, 6).masked_fill(numbers(4, 6, seed=5) > 0.3, float("-inf"))
    scores[1] = float("-inf")
    for dim in (0, 1):
        for over in (0, 1):
            cut = scatter(Cut(scores, [Shard(dim)]), mesh)
            assert_equal(
                torch.ops.aten._safe_softmax(cut, over),
                torch.ops.aten._safe_softmax(scores, over),
                f"cut {dim}, over {over}",
            )


def test_rows_without_keys(run_mesh):
    run_mesh((3,), masked_rows)


def grouped_heads(mesh) -> None:
    q, k, v = numbers(B, 4, L, E), numbers(B, 2, S, E, seed=1), numbers(B, 2, S, E, seed=2)
    for dim in (0, 1, 2):
        place = [Shard(dim)]
        check_same_as_serial(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            [Cut(q, place), Cut(k, place), Cut(v, place)],
            mesh,
            second=False,
        )


def test_grouped_heads(run_mesh):
    run_mesh((2,), grouped_heads)


def dropout(mesh) -> list[float]:
    q, k, v = numbers(1, 2, 8, E), numbers(1, 2, S, E, seed=1), torch.ones(1, 2, S, 3).double()
    torch.manual_seed(5)
    cut = [scatter(Cut(t, [Shard(2)]), mesh) for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*cut, dropout_p=0.4)
    return full(out).flatten().tolist()


def test_dropout_masks_do_not_depend_on_the_ranks(run_mesh):
    one = run_mesh((1,), dropout)[0]
    assert any(abs(x - 1) > 1e-3 for x in one)
    for size in (2, 3):
        assert run_mesh((size,), dropout)[0] == pytest.approx(one, rel=1e-12)


def merged_tokens(mesh) -> None:
    """The tokens of an image whose columns are cut: rows of the query lie in many runs."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(6, 2, batch_first=True).double()

        def forward(self, image):
            x = image.flatten(2).transpose(1, 2)
            return self.attend(x, x, x, need_weights=False)[0]

    for dim in (0, 2, 3):
        check_same_as_serial(
            Tokens(),
            [Cut(numbers(2, 6, 4, 5), [Shard(dim)] * mesh.ndim)],
            mesh,
            second=False,
        )


def test_merged_tokens_of_an_image(run_mesh, mesh_shape):
    run_mesh(mesh_shape, merged_tokens)


def traffic(mesh) -> dict[int, int]:
    sent = {}
    for dim in (0, 1, 2):
        cut = [
            scatter(Cut(numbers(4, 4, n, 8), [Shard(dim)]), mesh).requires_grad_()
            for n in (64, 16, 16)
        ]
        with shardfield.report() as report:
            out = F.scaled_dot_product_attention(*cut)
        assert is_sharded(out) and out.to_local().shape[dim] * 2 == out.shape[dim]
        assert not report.fallbacks
        sent[dim] = report.bytes_sent
    return sent


def test_batch_and_heads_send_nothing_and_rows_send_keys_and_values(run_mesh):
    for sent in run_mesh((2,), traffic):
        assert sent[0] == sent[1] == 0
        assert sent[2] == 2 * 4 * 4 * 8 * 8 * 8  # half of the keys and values, in float64


def inference_kernels(mesh) -> None:
    """Without gradients PyTorch calls one fused kernel for a layer: the same values, in pieces."""
    x = numbers(4, 7, 8)
    padding = torch.zeros(4, 7, dtype=torch.bool)
    padding[1, 5:] = True
    causal = torch.ones(7, 7, dtype=torch.bool).triu(1)
    torch.manual_seed(0)
    attend = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    layers = [
        nn.TransformerEncoderLayer(8, 2, 16, activation=a, batch_first=True, norm_first=first)
        .double()
        .eval()
        for a, first in (("relu", False), ("gelu", True))
    ]
    calls = {
        "weights": lambda t: attend(t, t, t),
        "each_head": lambda t: attend(
            t, t, t, key_padding_mask=padding, attn_mask=causal, average_attn_weights=False
        ),
        "no_weights": lambda t: attend(t, t, t, need_weights=False)[0],
        "encoder": nn.TransformerEncoder(layers[0], 2).eval(),
        **{
            f"layer{i}_{name}": lambda t, m=layer, o=options: m(t, **o)
            for i, layer in enumerate(layers)
            for name, options in {
                "plain": {},
                "padded": {"src_key_padding_mask": padding},
                "causal": {"src_mask": causal},
            }.items()
        },
    }
    for name, call in calls.items():
        for dim in (0, 1, 2):
            cut = scatter(Cut(x, [Shard(dim)] * mesh.ndim), mesh)
            with torch.no_grad(), shardfield.report() as report:
                got, want = call(cut), call(x)
            got, want = (v if isinstance(v, tuple) else (v,) for v in (got, want))
            for g, w in zip(got, want, strict=True):
                assert_equal(g, w, f"{name} cut {dim}", 1e-12, 1e-13)
            assert not report.fallbacks, f"{name} cut {dim}: {report.fallbacks}"


def test_layers_without_gradients(run_mesh, mesh_shape):
    run_mesh(mesh_shape, inference_kernels)


def nested(mesh) -> str:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    padding = torch.zeros(4, 7, dtype=torch.bool)
    padding[1, 5:] = True
    x = scatter(Cut(numbers(4, 7, 8), [Shard(1)]), mesh)
    try:
        with torch.no_grad():
            encoder.double().eval()(x, src_key_padding_mask=padding)
    except RuntimeError as error:
        return str(error)
    return "not refused"


def test_a_nested_tensor_is_refused(run_mesh):
    assert "enable_nested_tensor=False" in run_mesh((2,), nested)[0]

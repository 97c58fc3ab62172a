"""LSTM, GRU and plain recurrent layers: batch, time and features cut."""

from __future__ import annotations

import pytest
import torch
from oracle import Cut, check_same_as_serial, full, numbers, scatter
from torch import nn
from torch.distributed.tensor import Shard

LAYERS = {
    "lstm": lambda **o: nn.LSTM(5, 3, **o),
    "projected": lambda **o: nn.LSTM(5, 4, proj_size=3, **o),
    "gru": lambda **o: nn.GRU(5, 3, **o),
    "tanh": lambda **o: nn.RNN(5, 3, **o),
    "relu": lambda **o: nn.RNN(5, 3, nonlinearity="relu", **o),
}
OPTIONS = {
    "plain": {},
    "deep": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "no_bias": {"bias": False, "batch_first": True},
}


def all_layers(mesh, kind: str) -> None:
    for name, options in OPTIONS.items():
        for dim in (0, 1, 2):
            for shape in ((7, 4, 5), (2, 6, 5)):
                x = numbers(*shape)
                try:
                    check_same_as_serial(
                        LAYERS[kind](**options).double(),
                        [Cut(x, [Shard(dim)] * mesh.ndim)],
                        mesh,
                        second=False,
                        no_fallback=False,
                    )
                except AssertionError as error:
                    raise AssertionError(f"{kind} {name} {shape} cut {dim}: {error}") from error


@pytest.mark.parametrize("kind", LAYERS)
def test_same_as_serial(run_mesh, mesh_shape, kind):
    run_mesh(mesh_shape, all_layers, kind=kind)


def cells(mesh) -> None:
    """Three steps; the batch or the features cut."""

    class Steps(nn.Module):
        def __init__(self, cell: nn.Module) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = None
            for step in x.unbind(1):
                state = self.cell(step, state)
            return state[0] * state[1] if isinstance(state, tuple) else state

    for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        for dim in (0, 2):
            cut = Cut(numbers(6, 3, 5), [Shard(dim)] * mesh.ndim)
            check_same_as_serial(Steps(kind(5, 3)).double(), [cut], mesh, no_fallback=False)


def test_cells(run_mesh, mesh_shape):
    run_mesh(mesh_shape, cells)


def states(mesh) -> None:
    layer = nn.LSTM(5, 3, batch_first=True).double()
    h, c = numbers(1, 6, 3, seed=1), numbers(1, 6, 3, seed=2)
    place = [Shard(0)] * mesh.ndim
    check_same_as_serial(
        lambda x, h, c: layer(x, (h, c)),
        [Cut(numbers(6, 4, 5), place)],
        mesh,
        plain=[h, c],
        second=False,
    )
    check_same_as_serial(
        lambda x, h, c: layer(x, (h, c)),
        [Cut(numbers(6, 4, 5), place), *(Cut(t, [Shard(1)] * mesh.ndim) for t in (h, c))],
        mesh,
        second=False,
    )


def test_given_states(run_mesh, mesh_shape):
    run_mesh(mesh_shape, states)


def dropout(mesh) -> list[float]:
    torch.manual_seed(3)
    layer = nn.LSTM(5, 3, num_layers=2, dropout=0.5, batch_first=True).double()
    x = scatter(Cut(numbers(6, 4, 5), [Shard(0)]), mesh)
    return full(layer(x)[0]).flatten().tolist()


def test_dropout_does_not_depend_on_the_ranks(run_mesh):
    one = run_mesh((1,), dropout)[0]
    for size in (2, 4):
        assert run_mesh((size,), dropout)[0] == pytest.approx(one, rel=1e-12)

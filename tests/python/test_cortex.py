"""The cortex example: a real surface, a mesh network, every step equal to one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle import assert_equal

import shardfield.graph

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))  # the ranks import this file too

from cortex.data import load  # noqa: E402
from cortex.train import Task, run_serial, run_sharded  # noqa: E402

TASK = Task(coarser=2, steps=4, width=8, blocks=2)


def trained() -> dict:
    """What one rank returns, as plain values."""
    return vars(run_sharded(TASK))


@pytest.mark.parametrize("size", [2, 4])
def test_losses_and_predictions_equal_serial(run_ranks, size):
    serial = run_serial(TASK)
    results = run_ranks(size, trained)
    for result in results:
        assert result["losses"] == pytest.approx(serial.losses, rel=1e-9)
        for field in ("prediction", "held_out"):
            got, want = torch.from_numpy(result[field]), torch.from_numpy(getattr(serial, field))
            assert_equal(got, want, field, rtol=1e-8)
        assert result["fallbacks"] == {}
        assert set(result["labels"]) == set(range(size))
    assert serial.losses[-1] < serial.losses[0]


def test_the_surface_is_the_closed_mesh_it_should_be():
    """A subdivided icosahedron, at every coarseness: 12 corners of degree 5, sphere topology."""
    for coarser, count in ((0, 10242), (1, 2562), (2, 642)):
        surface = load("right", "sulcus", torch.float64, coarser)
        degrees = torch.bincount(surface.edge_index[1])
        assert surface.points.shape == surface.inflated.shape == (count, 3)
        assert torch.bincount(degrees).tolist() == [0] * 5 + [12, count - 12]
        assert count - surface.edge_index.shape[1] // 2 + len(surface.triangles) == 2
        outward = surface.nodes[:, :3] * torch.from_numpy(surface.points - surface.points.mean(0))
        assert outward.sum(1).gt(0).double().mean() > 0.7
        assert surface.target.std(correction=0).item() == pytest.approx(1)


def borrowed(mesh) -> tuple[int, int]:
    """Rows that the partition says a rank must borrow, and bytes that a gather by edges sent."""
    import shardfield as sf

    surface = load("left", "curvature", torch.float64, 2)
    n = len(surface.points)
    labels = shardfield.graph.partition_nodes(
        surface.edge_index, n, mesh.size(), coordinates=surface.points
    )
    graph = shardfield.graph.HaloGraph(surface.edge_index, n, labels)
    here = graph.on(mesh)
    x, edge_index = here.shard_nodes(surface.nodes), here.edge_index()
    with sf.report() as report:
        read = x.index_select(0, edge_index[0])
    assert_equal(read.to_local(), here.sources(x).to_local(), "rows of the sources")
    assert_equal(
        here.gather_edges(read), surface.nodes[surface.edge_index[0]], "rows in the graph's order"
    )
    exchange = graph.nodes(here.part).exchange
    return exchange.num_rows - exchange.num_owned, report.bytes_sent


def test_an_edge_index_of_the_pieces_moves_the_halo_only(run_mesh):
    """Rows of 4 values and their numbers travel; lists of counts come on top, nothing else."""
    results = run_mesh((4,), borrowed)
    rows = sum(halo for halo, _ in results)
    assert sum(sent for _, sent in results) <= rows * (4 * 8 + 8) + 4 * 2 * 3 * (4 * 4 * 8 + 2 * 8)


def test_runs_as_a_program(tmp_path):
    """Started by torchrun: status 0, the figures, the picture and the licence note."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(EXAMPLES / "cortex_graph.py"), "--coarser=2", "--steps=2", f"--out={tmp_path}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "cortex_graph.json").read_text(encoding="utf-8"))
    assert figures["holds"]
    assert figures["vertices"] == 642
    assert (tmp_path / "cortex_graph.png").read_bytes().startswith(b"\x89PNG")
    assert "fsaverage5" in (tmp_path / "cortex_licence.txt").read_text(encoding="utf-8")

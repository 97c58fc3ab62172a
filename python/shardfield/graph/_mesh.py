"""Meshes: points, blocks of cells and fields, taken from and given back to meshio and pyvista."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardfield._core import core
from shardfield.graph._kinds import KIND_OF_NAME, NAME_OF_KIND, NODES_OF_KIND


@dataclass(frozen=True)
class CellBlock:
    """A run of cells. Arrays are kept as they are, not copied.

    Attributes:
        kind: "triangle", "tetra", "hexahedron", ...; "mixed" where `kinds` says it cell by cell.
        nodes: point numbers, int64; (num_cells, nodes per cell), or flat where `offsets` is given.
        offsets: int64 (num_cells + 1), or None: cell i has nodes[offsets[i]:offsets[i + 1]].
        kinds: VTK's number of each cell's kind, uint8 (num_cells); only for "mixed".
    """

    kind: str
    nodes: NDArray[np.int64]
    offsets: NDArray[np.int64] | None = None
    kinds: NDArray[np.uint8] | None = None

    @property
    def num_cells(self) -> int:
        """How many cells the block has."""
        return len(self.nodes) if self.offsets is None else len(self.offsets) - 1


class Mesh:
    """A mesh on this process. Local; nothing is copied where dtype and layout already fit.

    Args:
        points: (num_points, 1 to 3), float64.
        cells: `CellBlock`s, or (kind, nodes) pairs as in meshio. Cells are numbered through the
            blocks in order.
        point_data: fields, first dim num_points.
        cell_data: fields, first dim num_cells.
        cell_sets: named groups of cells (materials, regions), each a list of cell numbers.

    Raises:
        ValueError: for an empty mesh, NaN or infinite points, node numbers out of range, repeated
            corners, unknown kinds or fields of the wrong length. The message names the cell.

    Example:
        >>> mesh = Mesh([[0, 0], [1, 0], [0, 1], [1, 1]], [("triangle", [[0, 1, 2], [1, 3, 2]])])
        >>> mesh.num_cells
        2
    """

    def __init__(
        self,
        points: ArrayLike,
        cells: Sequence[CellBlock | tuple[str, ArrayLike]],
        point_data: Mapping[str, ArrayLike] | None = None,
        cell_data: Mapping[str, ArrayLike] | None = None,
        cell_sets: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        given = np.asarray(points)
        if given.dtype.kind not in "fiub":
            raise ValueError(f"mesh: expected real coordinates, got {given.dtype}")
        self.points = np.ascontiguousarray(given, dtype=np.float64)
        if self.points.ndim != 2:
            raise ValueError(
                f"mesh: expected points (num_points, 1 to 3), got shape {self.points.shape}"
            )
        self.blocks = [b if isinstance(b, CellBlock) else _block(*b) for b in cells]
        self.point_data = {k: np.asarray(v) for k, v in (point_data or {}).items()}
        self.cell_data = {k: np.asarray(v) for k, v in (cell_data or {}).items()}
        self.cell_sets = {k: np.asarray(v, np.int64) for k, v in (cell_sets or {}).items()}
        self._core = core.GraphMesh(self.points, [_raw(b) for b in self.blocks])
        self.library = ""
        _check_fields("point", self.point_data, self.num_points)
        _check_fields("cell", self.cell_data, self.num_cells)
        for name, rows in self.cell_sets.items():
            if rows.size and (rows.min() < 0 or rows.max() >= self.num_cells):
                raise ValueError(
                    f"mesh: cell set {name!r} names cells {rows.min()} to {rows.max()}; expected "
                    f"0 to {self.num_cells - 1}"
                )

    @property
    def num_points(self) -> int:
        """How many points."""
        return self._core.num_points

    @property
    def num_cells(self) -> int:
        """How many cells, over all blocks."""
        return self._core.num_cells

    def centroids(self) -> NDArray[np.float64]:
        """Mean of each cell's points, (num_cells, 3); coordinates that the mesh lacks are 0."""
        return self._core.centroids(0)

    @functools.cached_property
    def kinds(self) -> NDArray[np.uint8]:
        """VTK's number of each cell's kind."""
        return np.concatenate(
            [
                b.kinds
                if b.kinds is not None
                else np.full(b.num_cells, KIND_OF_NAME[b.kind], np.uint8)
                for b in self.blocks
            ]
        )

    def flat_cells(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets (num_cells + 1) and nodes of all blocks in one pair of arrays."""
        if len(self.blocks) == 1 and self.blocks[0].offsets is not None:
            return self.blocks[0].offsets, self.blocks[0].nodes
        counts = np.concatenate([_counts(b) for b in self.blocks])
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        return offsets, np.concatenate([b.nodes.reshape(-1) for b in self.blocks])

    @classmethod
    def from_meshio(cls, mesh: Any) -> Mesh:
        """From a `meshio.Mesh`. A field kept per block is joined into one array."""
        blocks = [_block(block.type, block.data) for block in mesh.cells]
        cell_data = {
            name: values[0] if len(values) == 1 else np.concatenate(values)
            for name, values in mesh.cell_data.items()
        }
        first = np.cumsum([0, *(len(block.data) for block in mesh.cells)])
        cell_sets = {
            name: np.concatenate(
                [
                    np.asarray([] if cells is None else cells, np.int64) + first[b]
                    for b, cells in enumerate(per_block)
                ]
            )
            for name, per_block in mesh.cell_sets.items()
            if not name.startswith("gmsh:")
        }
        out = cls(mesh.points, blocks, mesh.point_data, cell_data, cell_sets)
        out.library = "meshio"
        return out

    @classmethod
    def from_pyvista(cls, grid: Any) -> Mesh:
        """From a pyvista or VTK data set (others than unstructured grids are converted)."""
        import pyvista

        if not isinstance(grid, pyvista.DataObject) and hasattr(grid, "GetCellData"):
            grid = pyvista.wrap(grid)
        if not isinstance(grid, pyvista.DataSet):
            raise TypeError(
                f"mesh: expected a pyvista data set, got {type(grid).__name__}; several in one, "
                "such as a MultiBlock, become one by combine()"
            )
        if not hasattr(grid, "celltypes"):
            grid = grid.cast_to_unstructured_grid()
        kinds = np.asarray(grid.celltypes, np.uint8)
        nodes = np.asarray(grid.cell_connectivity, np.int64)
        width = NODES_OF_KIND.get(int(kinds[0])) if len(kinds) else None
        if width and (kinds == kinds[0]).all():
            block = CellBlock(NAME_OF_KIND[int(kinds[0])], nodes.reshape(-1, width))
        else:
            offsets = grid.cell_offsets if hasattr(grid, "cell_offsets") else grid.offset
            block = CellBlock("mixed", nodes, np.asarray(offsets, np.int64), kinds)
        out = cls(grid.points, [block], dict(grid.point_data), dict(grid.cell_data))
        out.library = "pyvista"
        return out

    def to_meshio(self) -> Any:
        """As a `meshio.Mesh`; runs of cells of one kind and number of nodes become its blocks."""
        import meshio

        offsets, nodes = self.flat_cells()
        kinds, counts = self.kinds, np.diff(offsets)
        changes: NDArray[np.int64] = (
            np.flatnonzero((np.diff(kinds) != 0) | (np.diff(counts) != 0)) + 1
        )
        borders = [0, *changes.tolist(), len(kinds)] if len(kinds) else [0]
        cells = []
        for begin, end in itertools.pairwise(borders):
            rows = nodes[offsets[begin] : offsets[end]].reshape(end - begin, -1)
            name, order = _meshio_form(int(kinds[begin]))
            cells.append((name, rows if order is None else rows[:, order]))
        cell_data = {
            name: [values[b:e] for b, e in itertools.pairwise(borders)]
            for name, values in self.cell_data.items()
        }
        cell_sets = {
            name: [
                np.asarray(rows[(rows >= b) & (rows < e)] - b)
                for b, e in itertools.pairwise(borders)
            ]
            for name, rows in self.cell_sets.items()
        }
        return meshio.Mesh(
            self.points, cells, dict(self.point_data), cell_data, cell_sets=cell_sets
        )

    def to_pyvista(self) -> Any:
        """As a `pyvista.UnstructuredGrid`."""
        return grid_of(self.points, *self.flat_cells(), self.kinds, self.point_data, self.cell_data)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_core"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._core = core.GraphMesh(self.points, [_raw(b) for b in self.blocks])

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(b.kind for b in self.blocks))
        return f"Mesh({self.num_points} points, {self.num_cells} cells: {kinds})"


def as_mesh(mesh: Any) -> Mesh:
    """A `Mesh` from a `Mesh`, a meshio mesh or a pyvista data set.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(mesh, Mesh):
        return mesh
    origin = type(mesh).__module__.partition(".")[0]
    if origin in ("meshio", "meshioplusplus"):
        return Mesh.from_meshio(mesh)
    if hasattr(mesh, "cell_data") and hasattr(mesh, "GetCellData"):
        return Mesh.from_pyvista(mesh)
    raise TypeError(
        f"mesh: expected a shardfield.graph.Mesh, a meshio.Mesh or a pyvista data set, "
        f"got {type(mesh).__name__}"
    )


def grid_of(
    points: NDArray[Any],
    offsets: NDArray[np.int64],
    nodes: NDArray[np.int64],
    kinds: NDArray[np.uint8],
    point_data: Mapping[str, NDArray[Any]],
    cell_data: Mapping[str, NDArray[Any]],
) -> Any:
    """A pyvista grid over these arrays; points get a third coordinate where they lack it."""
    import pyvista
    from vtkmodules.util.numpy_support import numpy_to_vtk

    if points.shape[1] < 3:
        points = np.pad(points, ((0, 0), (0, 3 - points.shape[1])))
    grid = pyvista.UnstructuredGrid()
    grid.points = points
    if len(kinds):
        cells = pyvista.CellArray.from_arrays(offsets, nodes, deep=True)
        grid.SetCells(numpy_to_vtk(kinds, deep=True), cells)
    for name, values in point_data.items():
        grid.point_data[name] = values
    for name, values in cell_data.items():
        grid.cell_data[name] = values
    return grid


def _number_of(kind: str) -> int:
    """VTK's number of a kind."""
    if kind not in KIND_OF_NAME:
        raise ValueError(
            f"mesh: cells of kind {kind!r} are not known; expected one of "
            f"{', '.join(KIND_OF_NAME)}, convert such cells first"
        )
    return KIND_OF_NAME[kind]


def _point_numbers(nodes: ArrayLike) -> NDArray[np.int64]:
    """Point numbers as int64; fractions are an error, not cut off."""
    array = np.asarray(nodes)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"mesh: expected whole numbers of points, got {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.int64)


def _block(kind: str, nodes: ArrayLike) -> CellBlock:
    """A block from meshio's pair: a 2-d array, or for polygons a list of lists."""
    number = _number_of(kind)
    if kind == "polygon":
        rows = [_point_numbers(row) for row in nodes]  # type: ignore[union-attr]
        counts = [len(row) for row in rows]
        flat = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        return CellBlock(kind, flat, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    array = _point_numbers(nodes)
    width = NODES_OF_KIND[number]
    array = array.reshape(-1, 1) if width == 1 else array
    if array.size and (array.ndim != 2 or array.shape[1] != width):
        raise ValueError(
            f"mesh: expected nodes (num_cells, {width}) for cells of kind {kind!r}, got shape "
            f"{array.shape}"
        )
    return CellBlock(kind, array.reshape(-1, width))


def _raw(block: CellBlock) -> tuple[int, NDArray[np.int64], Any, Any]:
    """The block as the C++ core takes it."""
    number = 0 if block.kinds is not None else _number_of(block.kind)
    return number, _point_numbers(block.nodes), block.offsets, block.kinds


def _counts(block: CellBlock) -> NDArray[np.int64]:
    if block.offsets is not None:
        return np.diff(block.offsets)
    return np.full(block.num_cells, NODES_OF_KIND[KIND_OF_NAME[block.kind]], np.int64)


def _meshio_form(kind: int) -> tuple[str, list[int] | None]:
    """Name in meshio, and the order of nodes that turns VTK's pixels and voxels into its cells."""
    if kind == KIND_OF_NAME["pixel"]:
        return "quad", [0, 1, 3, 2]
    if kind == KIND_OF_NAME["voxel"]:
        return "hexahedron", [0, 1, 3, 2, 4, 5, 7, 6]
    if kind not in NAME_OF_KIND:
        raise ValueError(f"mesh: meshio has no cells of VTK's kind {kind}; use to_pyvista")
    return NAME_OF_KIND[kind], None


def _check_fields(what: str, fields: Mapping[str, NDArray[Any]], length: int) -> None:
    for name, values in fields.items():
        if values.ndim == 0 or len(values) != length:
            raise ValueError(
                f"mesh: {what} data {name!r} has shape {values.shape}; expected {length} in front, "
                f"the number of {what}s"
            )

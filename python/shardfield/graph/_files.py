"""Mesh files, read and written by meshio and pyvista (VTK)."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from shardfield._core import core
from shardfield.graph._mesh import Mesh, as_mesh
from shardfield.graph._partition import ExchangePlan, Partition, Piece

VTK_SUFFIXES = {".vtu", ".pvtu", ".vtk", ".vtp", ".pvtp", ".vti", ".vtr", ".vts", ".vtkhdf"}
# Where a text header must have ended: at the end of the file meshio looks for these for ever.
HEADER_ENDS = {".ply": b"end_header", ".off": b"\n", ".msh": b"\n"}
LONGEST_HEADER = 1 << 20


def read_mesh(path: str | Path) -> Mesh:
    """Reads a mesh file with the library that knows it. Local.

    pyvista reads VTK's own formats (VTU, PVTU, legacy VTK, ...), meshio the others and, where
    pyvista is not installed, VTU and VTK too: Gmsh, Exodus, STL, PLY, OBJ, XDMF, MED, CGNS, ...

    Raises:
        FileNotFoundError: where there is no such file.
        ImportError: where neither library is installed, or lacks a package that the format needs;
            says what to install.
        ValueError: for a file that cannot be read or holds no valid mesh; names the file, and the
            cell where there is one.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"read_mesh: no file {str(path)!r}")
    order = ["meshio", "pyvista"]
    if path.suffix.lower() in VTK_SUFFIXES:
        order.reverse()
    for library in filter(_has, order):
        return _read_by(library, path)
    raise ImportError(
        f"read_mesh: reading {path.suffix} files needs pyvista or meshio; "
        "pip install shardfield[mesh]"
    )


def _read_by(library: str, path: Path) -> Mesh:
    """Reads by one library. Whatever it throws comes with the file's name; meshio ends the process
    by SystemExit for some files.
    """
    ending = HEADER_ENDS.get(path.suffix.lower(), b"")
    with path.open("rb") if path.is_file() else nullcontext() as file:
        if file is not None and ending not in file.read(LONGEST_HEADER):
            raise ValueError(f"read_mesh: the file {str(path)!r} ends inside its header")
    try:
        found = importlib.import_module(library).read(path)
        return Mesh.from_pyvista(found) if library == "pyvista" else Mesh.from_meshio(found)
    except ImportError as error:
        raise ImportError(
            f"read_mesh: {library} needs {error.name} for the file {str(path)!r}; "
            f"pip install {error.name}"
        ) from error
    except (Exception, SystemExit) as error:
        words = "it says why above" if isinstance(error, SystemExit) else str(error)
        raise ValueError(f"read_mesh: {library} found no mesh in {str(path)!r}: {words}") from error


def write_mesh(path: str | Path, mesh: Any) -> list[Path]:
    """Writes a mesh, or a partition as one file per piece and an index. Local.

    A `Partition` goes to a .pvtu file with a .vtu file per piece beside it. Cells and points carry
    "owner", "global_id" and "vtkGhostType"; the index says how many ghost layers there are, so
    that ParaView hides ghosts and filters use them.

    Args:
        path: .vtu, .vtk and the like by pyvista; other formats by meshio.
        mesh: a `Mesh`, a meshio mesh, a pyvista data set, or for .pvtu a `Partition`.

    Returns:
        The files written; for a partition the index first.

    Raises:
        ValueError: for a partition whose path does not end in .pvtu.
        ImportError: where the library for the format is not installed.
    """
    path = Path(path)
    if isinstance(mesh, Partition):
        if path.suffix.lower() != ".pvtu":
            raise ValueError(
                f"write_mesh: a partition is written as .pvtu, got {path.name!r}; change the "
                "ending, or write one piece.mesh at a time"
            )
        return write_grids(path, [piece.to_pyvista() for piece in mesh], mesh.ghost_layers)
    whole = as_mesh(mesh)
    if path.suffix.lower() in VTK_SUFFIXES and _has("pyvista"):
        whole.to_pyvista().save(path)
    else:
        _require("meshio", path)
        whole.to_meshio().write(path)
    return [path]


def write_grids(path: Path, grids: Sequence[Any], ghost_layers: int) -> list[Path]:
    """Writes pyvista grids as the pieces of one .pvtu file; see write_mesh."""
    _require("pyvista", path)
    from vtkmodules.vtkIOParallelXML import vtkXMLPUnstructuredGridWriter

    writer = vtkXMLPUnstructuredGridWriter()
    source = _source_of(grids)
    writer.SetInputConnection(source.GetOutputPort())
    writer.SetFileName(str(path))
    writer.SetNumberOfPieces(len(grids))
    writer.SetStartPiece(0)
    writer.SetEndPiece(len(grids) - 1)
    writer.SetGhostLevel(ghost_layers)
    writer.SetHeaderTypeToUInt64()
    if not writer.Write():
        raise OSError(f"write_mesh: VTK could not write {str(path)!r}")
    return [path, *_pieces_of(path, "write_mesh")]


def read_partition(path: str | Path) -> list[FilePiece]:
    """Reads the pieces that write_mesh wrote, with exchange plans between them. Local.

    Args:
        path: the .pvtu file.

    Returns:
        One `FilePiece` per part, in the order of the parts. Parts without cells have no file and
        are left out.

    Raises:
        FileNotFoundError: where the index or a piece that it names is not there.
        ValueError: for pieces without "owner" and "global_id" arrays on their cells and points,
            two pieces of one part, or ghosts whose owner is not among the files.
    """
    path = Path(path)
    _require("pyvista", path)
    import pyvista

    if not path.exists():
        raise FileNotFoundError(f"read_partition: no file {str(path)!r}")
    names = _pieces_of(path, "read_partition")
    for name in names:
        if not name.exists():
            raise FileNotFoundError(
                f"read_partition: {str(path)!r} names the piece {name.name!r}, which is not there"
            )
    pieces = [FilePiece(name, pyvista.read(name)) for name in names]
    pieces.sort(key=lambda piece: piece.part)
    for one, other in itertools.pairwise(pieces):
        if one.part == other.part:
            raise ValueError(
                f"read_partition: {one.name} and {other.name} both hold part {one.part}; expected "
                "one file per part"
            )
    for what in ("cell", "point"):
        _plan(pieces, what)
    return pieces


class FilePiece:
    """A piece read from a file, with what `Piece` has: part, cells, cell_owners, points,
    point_owners, cell_exchange, point_exchange; `grid` is the pyvista data set.
    """

    def __init__(self, path: Path, grid: Any) -> None:
        self.grid = grid
        self.name = path.name
        for what, fields in (("cell", grid.cell_data), ("point", grid.point_data)):
            for name in ("owner", "global_id", "vtkGhostType"):
                if name not in fields:
                    raise ValueError(
                        f"read_partition: {path.name} has no {what} array {name!r}; expected a "
                        "piece that write_mesh wrote"
                    )
        ghost = np.asarray(grid.cell_data["vtkGhostType"]) != 0
        self.cells = np.asarray(grid.cell_data["global_id"], np.int64)
        self.cell_owners = np.asarray(grid.cell_data["owner"], np.int32)
        self.points = np.asarray(grid.point_data["global_id"], np.int64)
        self.point_owners = np.asarray(grid.point_data["owner"], np.int32)
        own = np.unique(self.cell_owners[~ghost])
        if len(own) != 1:
            raise ValueError(
                f"read_partition: the cells of {path.name} that are no ghosts have the owners "
                f"{own.tolist()}; expected one"
            )
        self.part = int(own[0])
        self.cell_exchange: ExchangePlan
        self.point_exchange: ExchangePlan

    num_owned_cells = Piece.num_owned_cells


def _plan(pieces: list[FilePiece], what: str) -> None:
    """Sets the exchange plans for "cell" or "point" rows of all pieces."""
    rows = [getattr(piece, f"{what}s") for piece in pieces]
    owners = [getattr(piece, f"{what}_owners") for piece in pieces]
    # Counted anew: a file's numbers may be of any size.
    known = np.unique(np.concatenate(rows))
    owner_of: NDArray[np.int32] = np.zeros(len(known), np.int32)
    parts = {
        piece.part: np.searchsorted(known, row) for piece, row in zip(pieces, rows, strict=True)
    }
    for row, owner in zip(parts.values(), owners, strict=True):
        owner_of[row] = owner
    missing = sorted(set(owner_of.tolist()) - set(parts))
    if missing:
        raise ValueError(
            f"read_partition: ghost {what}s are owned by parts {missing}, which have no file"
        )
    nothing: NDArray[np.int64] = np.zeros(0, np.int64)
    held = [parts.get(part, nothing) for part in range(pieces[-1].part + 1)]
    plans = core.graph_plan_exchanges(held, owner_of)
    for piece in pieces:
        setattr(piece, f"{what}_exchange", ExchangePlan(plans[piece.part]))


def _pieces_of(index: Path, op: str) -> list[Path]:
    """Files of the pieces that a .pvtu file names, in its order."""
    try:
        root = ElementTree.parse(index).getroot()
    except ElementTree.ParseError as error:
        raise ValueError(f"{op}: {str(index)!r} is no .pvtu file: {error}") from error
    names = [piece.get("Source") for piece in root.iter("Piece")]
    if root.get("type") != "PUnstructuredGrid" or not names or None in names:
        raise ValueError(f"{op}: {str(index)!r} is no .pvtu file; expected an index of pieces")
    return [index.parent / str(name) for name in names]


def _source_of(grids: Sequence[Any]) -> Any:
    """A VTK source whose i-th piece is grids[i]."""
    from vtkmodules.util.vtkAlgorithm import VTKPythonAlgorithmBase
    from vtkmodules.vtkCommonExecutionModel import vtkAlgorithm, vtkStreamingDemandDrivenPipeline

    class Pieces(VTKPythonAlgorithmBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(0, None, 1, "vtkUnstructuredGrid")

        def RequestInformation(self, request: Any, inputs: Any, outputs: Any) -> int:  # noqa: N802
            info = outputs.GetInformationObject(0)
            info.Set(vtkAlgorithm.CAN_HANDLE_PIECE_REQUEST(), 1)
            return 1

        def RequestData(self, request: Any, inputs: Any, outputs: Any) -> int:  # noqa: N802
            info = outputs.GetInformationObject(0)
            piece = info.Get(vtkStreamingDemandDrivenPipeline.UPDATE_PIECE_NUMBER())
            self.GetOutputDataObject(0).ShallowCopy(grids[piece])
            return 1

    return Pieces()


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _require(module: str, path: Path) -> None:
    if not _has(module):
        raise ImportError(
            f"write_mesh: {path.suffix} files need {module}; pip install shardfield[mesh]"
        )

"""Names of the kinds of cells: VTK's numbers, meshio's words."""

from __future__ import annotations

KIND_OF_NAME: dict[str, int] = {
    "vertex": 1,
    "line": 3,
    "triangle": 5,
    "polygon": 7,
    "pixel": 8,
    "quad": 9,
    "tetra": 10,
    "voxel": 11,
    "hexahedron": 12,
    "wedge": 13,
    "pyramid": 14,
    "line3": 21,
    "triangle6": 22,
    "quad8": 23,
    "tetra10": 24,
    "hexahedron20": 25,
    "wedge15": 26,
    "pyramid13": 27,
    "quad9": 28,
    "hexahedron27": 29,
}
NAME_OF_KIND: dict[int, str] = {number: name for name, number in KIND_OF_NAME.items()}
NODES_OF_KIND: dict[int, int] = {
    1: 1, 3: 2, 5: 3, 8: 4, 9: 4, 10: 4, 11: 8, 12: 8, 13: 6, 14: 5,
    21: 3, 22: 6, 23: 8, 24: 10, 25: 20, 26: 15, 27: 13, 28: 9, 29: 27,
}  # fmt: skip

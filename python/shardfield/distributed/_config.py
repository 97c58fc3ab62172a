"""A tree of named process groups, described before it is created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral

from shardfield._core import core


@dataclass
class ProcessGroupNode:
    """One named kind of group.

    Args:
        name: the group's name.
        size: ranks per group; None to have it inferred from parent and children.
    """

    name: str
    size: int | None = None


class ProcessGroupConfig:
    """A tree of groups whose sizes multiply out: a parent has as many ranks as its children's product.

    Args:
        node: the root, usually the world.

    Example:
        >>> config = ProcessGroupConfig(ProcessGroupNode("world"))
        >>> config.add_node(ProcessGroupNode("domain"), parent="world")
        >>> config.add_node(ProcessGroupNode("data"), parent="world")
        >>> config.add_node(ProcessGroupNode("width"), parent="domain")
        >>> config.add_node(ProcessGroupNode("height"), parent="domain")
        >>> config.set_leaf_group_sizes({"data": 2, "height": 2, "width": 2})
        >>> config.get_node("domain").size, config.get_node("world").size
        (4, 8)
    """

    def __init__(self, node: ProcessGroupNode) -> None:
        self.root = node
        self._nodes: list[ProcessGroupNode] = [node]
        self._parents: list[int] = [-1]
        self._derived: set[str] = set()

    def add_node(self, node: ProcessGroupNode, parent: str | ProcessGroupNode) -> None:
        """Adds a child.

        Raises:
            ValueError: a name that exists already, or an unknown parent.
        """
        if node.name in self.names():
            raise ValueError(
                f"ProcessGroupConfig: there is a group '{node.name}' already; choose another name"
            )
        name = parent.name if isinstance(parent, ProcessGroupNode) else parent
        self._parents.append(self._index(name))
        self._nodes.append(node)

    def names(self) -> list[str]:
        """All names, parents before children."""
        return [n.name for n in self._nodes]

    def get_node(self, name: str) -> ProcessGroupNode:
        """The node of a name.

        Raises:
            ValueError: an unknown name.
        """
        return self._nodes[self._index(name)]

    def leaf_groups(self) -> list[str]:
        """Names of the nodes without children."""
        return [n.name for i, n in enumerate(self._nodes) if i not in self._parents]

    def update_parent_sizes(self) -> int:
        """Infers the sizes that were not given, and checks the others.

        Returns:
            The size of the root.

        Raises:
            RuntimeError: sizes that do not multiply out or cannot be inferred, naming the nodes.
        """
        sizes = core.infer_group_sizes(self._given(), 0)
        for node, size in zip(self._nodes, sizes, strict=True):
            if not node.size or node.name in self._derived:
                self._derived.add(node.name)
                node.size = size
        return sizes[0]

    def set_leaf_group_sizes(
        self, group_sizes: Mapping[str, int], update_parent_sizes: bool = True
    ) -> None:
        """Sets sizes of leaves.

        Raises:
            ValueError: a name that is unknown or no leaf.
            RuntimeError: sizes that do not multiply out.
        """
        leaves = self.leaf_groups()
        for name, size in group_sizes.items():
            if name not in leaves:
                raise ValueError(
                    f"ProcessGroupConfig: '{name}' is no leaf; the leaves are {leaves}"
                )
            self.get_node(name).size = size
            self._derived.discard(name)
        if update_parent_sizes:
            self.update_parent_sizes()

    def plan(
        self, world_size: int, first_is_innermost: bool = True
    ) -> list[tuple[str, list[list[int]], list[list[int]]]]:
        """Name, groups and enclosing groups of every node but the root, for a job of this size."""
        return core.plan_groups(self._given(), world_size, first_is_innermost)

    def _given(self) -> list[tuple[str, int, int]]:
        for node in self._nodes:
            if node.size is not None and not (isinstance(node.size, Integral) and node.size > 0):
                raise ValueError(
                    f"ProcessGroupConfig: expected a size of 1 or more for '{node.name}', or None to "
                    f"have it inferred, got {node.size!r}"
                )
        return [
            (n.name, 0 if n.name in self._derived else (n.size or 0), parent)
            for n, parent in zip(self._nodes, self._parents, strict=True)
        ]

    def _index(self, name: str) -> int:
        if name not in self.names():
            raise ValueError(f"ProcessGroupConfig: no group '{name}'; known are {self.names()}")
        return self.names().index(name)

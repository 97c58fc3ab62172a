"""What the library did: per layer and op, calls, bytes, messages and fallbacks."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple

import torch

from shardfield._core import core


class Row(NamedTuple):
    """Counts of one op in one layer on this rank."""

    calls: int
    bytes_sent: int
    messages: int
    fallbacks: int


class Report:
    """Counts on this rank between entering and leaving a `with` block (or until now, inside it).

    Args:
        model: names the layers: ops are charged to the innermost submodule whose forward runs, and
            their backward to the same one. Without it every op is charged to layer "".

    Example:
        >>> with shardfield.report(model) as r:
        ...     model(x).sum().backward()
        >>> r.fallbacks, r.bytes_sent
        ({}, 18432)
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._model = model
        self._record: Any = None
        self._hooks: list[Any] = []

    def __enter__(self) -> Report:
        self._record = core.start_recording()
        if self._model is not None:
            for name, module in self._model.named_modules():
                self._hook(name, module)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        core.stop_recording(self._record)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, name: str, module: torch.nn.Module) -> None:
        layer = core.intern_layer(name)
        outer: list[int] = []

        def before(_module: torch.nn.Module, _args: Any) -> None:
            outer.append(core.current_layer())
            core.set_current_layer(layer)

        def after(_module: torch.nn.Module, _args: Any, _out: Any) -> None:
            core.set_current_layer(outer.pop() if outer else 0)

        self._hooks.append(module.register_forward_pre_hook(before))
        self._hooks.append(module.register_forward_hook(after, always_call=True))

    @property
    def rows(self) -> dict[tuple[str, str], Row]:
        """Counts by (layer, op)."""
        return {key: Row(*counts) for key, counts in self._record.rows().items()}

    @property
    def fallbacks(self) -> dict[str, int]:
        """Op name to how often it gathered because it has no sharded form."""
        out: dict[str, int] = {}
        for (_, op), row in self.rows.items():
            if row.fallbacks:
                out[op] = out.get(op, 0) + row.fallbacks
        return out

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank sent."""
        return sum(row.bytes_sent for row in self.rows.values())

    @property
    def messages(self) -> int:
        """Messages this rank sent, collectives counted as one."""
        return sum(row.messages for row in self.rows.values())

    def bytes_by_layer(self) -> dict[str, int]:
        """Bytes this rank sent, by layer."""
        out: dict[str, int] = {}
        for (layer, _), row in self.rows.items():
            out[layer] = out.get(layer, 0) + row.bytes_sent
        return out

    def table(self) -> str:
        """The rows as text, largest traffic first."""
        lines = [
            f"{'layer':30} {'op':40} {'calls':>7} {'bytes':>12} {'messages':>9} {'fallbacks':>9}"
        ]
        for (layer, op), row in sorted(self.rows.items(), key=lambda item: -item[1].bytes_sent):
            lines.append(
                f"{layer:30} {op:40} {row.calls:7d} {row.bytes_sent:12d} {row.messages:9d} {row.fallbacks:9d}"
            )
        return "\n".join(lines)


def report(model: torch.nn.Module | None = None) -> Report:
    """Counts what the library does on this rank inside a `with` block. Local."""
    return Report(model)


def set_strict(strict: bool = True) -> None:
    """With True, an op without a sharded form is an error instead of a gather. Local; set it on
    every rank.
    """
    core.set_strict(strict)

"""The tables of docs/performance.md: one module a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

#: What ``benchmarks.report`` wrote.
Report: TypeAlias = Mapping[str, Any]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown, with a line break at its end."""
    lines = [list(head), ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)

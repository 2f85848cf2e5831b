"""Checks that files, classes and functions stay small enough to be read in one go.

python tools/check_sizes.py DIR...
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

_MAX_FILE_LINES, _MAX_TEST_FILE_LINES = 300, 500
_MAX_CLASS_LINES, _MAX_FUNCTION_LINES = 250, 50
_GENERATED = Path("quartet/v1")


def oversized(path: Path) -> Iterator[str]:
    """Yield a sentence for the file and for each class and function in it that is too long."""
    source = path.read_text(encoding="utf-8")
    num_lines, limit = source.count("\n"), _MAX_TEST_FILE_LINES if path.parts[0] == "tests" else _MAX_FILE_LINES
    if num_lines > limit:
        yield f"{path}: {num_lines} lines, at most {limit}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            num_lines = node.end_lineno - node.lineno + 1
            limit = _MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else _MAX_FUNCTION_LINES
            if num_lines > limit:
                yield f"{path}:{node.lineno}: {node.name} has {num_lines} lines, at most {limit}"


def main() -> int:
    """Check every Python file under the directories named on the command line; return the exit status."""
    paths = [path for root in sys.argv[1:] for path in sorted(Path(root).rglob("*.py"))]
    findings = [text for path in paths if _GENERATED not in path.parents for text in oversized(path)]
    print("\n".join(findings) or f"Sizes of {len(paths)} files are fine.")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

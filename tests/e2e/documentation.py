"""What pages show: commands, what is in their output, fields of tables, Python examples."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = tuple(ROOT / "docs" / name for name in ("http.md", "responses.md", "messages.md"))
#: Pages whose commands are for the fleet of mock engines.
GUIDES = tuple(ROOT / "docs" / name for name in ("tuning.md", "troubleshooting.md", "observability.md"))

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)\n\1```$", re.DOTALL | re.MULTILINE)
_CELL = re.compile(r"`(curl [^`]*)` → `([^`]*)`")
_GUIDE_CELL = re.compile(r"`([^`]+)` → `([^`]+)`")
_COMMAND = re.compile(r"\n(?=(?:curl|printf|for) )")
_LOOP = re.compile(r"for field in (.*?); do", re.DOTALL)
_FIELD_TABLES = re.compile(r"^## Fields of .*?(?=^## (?!Fields))", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Line:
    """A command of a page.

    Attributes:
        shown: what must be in its output; ``FIELD`` stands for each field that it goes through.
    """

    command: str
    shown: str

    @property
    def wanted(self) -> list[str]:
        """Each text that must be in its output."""
        loop = _LOOP.match(self.command)
        if loop is None:
            return [self.shown]
        words = shlex.split(loop[1].replace("\\\n", " "))
        return [self.shown.replace("FIELD", word.partition(":")[0]) for word in words]


def lines() -> Iterator[Line]:
    """The pages' lines with curl, but for the one with TLS."""
    for path in PAGES:
        page = path.read_text()
        for command, shown in _CELL.findall(page):
            yield Line(command, shown)
        for _, language, block in _BLOCK.findall(page):
            for text in [] if language else _COMMAND.split(block):
                command, _, shown = text.rpartition("\n# ")
                if "--cacert" not in text:
                    yield Line(command, shown)


def guide_fleet() -> list[str]:
    """The arguments of the ``quartet up`` whose fleet the guides' commands are for."""
    [command] = re.findall(r"^```\nquartet up (.*)\n```$", GUIDES[0].read_text(), re.MULTILINE)
    return shlex.split(command)


def guide_functions() -> str:
    """The shell functions that commands of the guides use."""
    [functions] = [block for _, language, block in _BLOCK.findall(GUIDES[0].read_text()) if language == "bash"]
    return str(functions)


def guide_lines() -> dict[str, set[str]]:
    """The guides' commands, and what must be in the output of each."""
    wanted: dict[str, set[str]] = {}
    for page in GUIDES:
        for command, shown in _GUIDE_CELL.findall(page.read_text()):
            wanted.setdefault(command, set()).add(shown)
    return wanted


def fields() -> set[str]:
    """The names in the first columns of the tables of fields."""
    tables = "".join([table for page in PAGES for table in _FIELD_TABLES.findall(page.read_text())])
    rows = re.findall(r"^\| ((?:`|parts ).*?) \| (.*?) \|(.*?)\|$", tables, re.MULTILINE)
    # The fields of messages stand beside these.
    cells = [cell for name, _, what in rows for cell in (name, what if name == "`messages`" else "")]
    return {name.rpartition(".")[2] for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def python_examples() -> Iterator[tuple[str, str]]:
    """Those with clients of other vendors, and which page each is on."""
    for page in (*PAGES, ROOT / "README.md"):
        for indent, language, block in _BLOCK.findall(page.read_text()):
            if language == "python" and ("from openai" in block or "from anthropic" in block):
                yield page.name, re.sub(f"^{indent}", "", block, flags=re.MULTILINE)

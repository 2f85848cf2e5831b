"""How answers look: reasoning dimmed, the text as it is, a line for each tool call and each result."""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import Enum, auto

from cli.output import has_styles, print_styled
from quartet.client import Delta, JsonObject, ToolCall
from quartet.errors import InvalidRequestError
from quartet.text.parsed import ParsedBuilder

#: Characters of a call or result that are shown.
_MAX_SHOWN = 200
#: Begins lines of reasoning where nothing can be dimmed.
_BAR = "│ "


class Answer:
    """One answer as far as it has come."""

    def __init__(self) -> None:
        """Nothing came."""
        self._texts: list[str] = []
        self._parsed = ParsedBuilder()
        self._complete: set[int] = set()

    def add(self, delta: Delta) -> list[ToolCall]:
        """Take more; returns the calls that are complete now."""
        if delta.text:
            self._texts.append(delta.text)
        self._parsed.add(delta.reasoning, delta.tool_calls)
        # An attempt that goes on with a broken one may say again that a call is complete.
        ended = {call.index for call in delta.tool_calls if call.is_complete} - self._complete
        self._complete |= ended
        return self._calls(ended) if ended else []

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """All of it."""
        return self._parsed.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Those that are complete."""
        return tuple(self._calls(self._complete))

    def _calls(self, indices: set[int]) -> list[ToolCall]:
        return [
            ToolCall(call.name, JsonObject.of_text(call.arguments or "{}"), call.id)
            for call in self._parsed.tool_calls
            if call.index in indices
        ]


class AnswerPrinter:
    """Prints answers as they come, with an empty line between reasoning, text and calls."""

    def __init__(self, *, keeps_text_apart: bool = False) -> None:
        """``keeps_text_apart``: standard output gets the text and nothing else, the rest goes to standard error."""
        self._keeps_text_apart = keeps_text_apart
        self._dims = has_styles(err=keeps_text_apart)
        self._last: _Part | None = None
        self._is_at_line_start = True

    def show(self, delta: Delta, calls: Iterable[ToolCall]) -> None:
        """Print what came, and ``calls``, which it completes: ``→ calculator(expression="6*7")``."""
        if delta.reasoning:
            self._show_reasoning(delta.reasoning)
        if delta.text:
            self._show_text(delta.text)
        for call in calls:
            self._show_line(f"→ {one_line(_describe(call))}", "cyan")

    def show_result(self, text: str, *, is_error: bool = False) -> None:
        """Print what a call returned: ``← 42``."""
        self._show_line(f"← {one_line(text)}", "yellow" if is_error else "cyan")

    def end(self) -> None:
        """End the last line, or print an empty one for an answer without any."""
        if self._keeps_text_apart or self._last is None:
            print(flush=True)
        else:
            self.end_line()

    def end_line(self) -> None:
        """End the last line if it has not ended."""
        if not self._is_at_line_start:
            self._print("\n")

    def _show_reasoning(self, text: str) -> None:
        if not (text := self._begin(_Part.REASONING, text)):
            return
        if self._dims:
            self._print(text, dim=True)
            return
        for line in text.splitlines(keepends=True):
            self._print(_BAR + line if self._is_at_line_start else line)

    def _show_text(self, text: str) -> None:
        shown = self._begin(_Part.TEXT, text)
        if self._keeps_text_apart:
            shown = text
        if shown:
            print(shown, end="", flush=True)
            self._is_at_line_start = shown.endswith("\n")

    def _show_line(self, line: str, colour: str) -> None:
        self._begin(_Part.CALLS, line)
        print_styled(line, err=self._keeps_text_apart, fg=colour)
        self._is_at_line_start = True

    def _begin(self, part: _Part, text: str) -> str:
        """Part ``part`` from what was printed before; returns ``text`` without the line breaks that do the same."""
        if self._last is part:
            return text
        if self._last is not None and (text := text.lstrip("\n")):
            self._print("\n" if self._is_at_line_start else "\n\n")
        if text:
            self._last = part
        return text

    def _print(self, text: str, *, dim: bool = False) -> None:
        print_styled(text, err=self._keeps_text_apart, nl=False, dim=dim)
        self._is_at_line_start = text.endswith("\n")


class _Part(Enum):
    REASONING = auto()
    TEXT = auto()
    CALLS = auto()


def _describe(call: ToolCall) -> str:
    try:
        values = call.arguments.value("arguments")
    except InvalidRequestError:
        return f"{call.name}({call.arguments.text})"
    shown = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
    return f"{call.name}({', '.join(shown)})"


def one_line(text: str) -> str:
    """``text`` on one line, and not a long one; others' control characters must not reach the terminal."""
    if len(text) > _MAX_SHOWN:
        text = text[: _MAX_SHOWN - 1] + "…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)

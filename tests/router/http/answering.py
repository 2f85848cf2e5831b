"""What requests become and how answers are written, without a server."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from quartet.api.blocks import BlockAnswer
from quartet.api.openai.requests import Asked
from quartet.api.request import Accepted, ChoiceFinished, TimeBreakdown, Usage
from quartet.engine.base import FinishReason
from quartet.text.parsed import Parsed, ToolCallDelta

USAGE = Usage(num_prompt_tokens=30, num_cached_tokens=20, num_output_tokens=7, num_attempts=1)

#: What a parser shows of an answer with reasoning, text and two calls, the first of them in parts.
PARTS = [
    Parsed(reasoning="let me "),
    Parsed(reasoning="see", text="Well "),
    Parsed(text="then."),
    Parsed(tool_calls=[ToolCallDelta(0, "call_1", "weather", '{"city": ')]),
    Parsed(text=" So", tool_calls=[ToolCallDelta(0, "", "", '"Köln"}', True), ToolCallDelta(1, "call_2", "time")]),
    Parsed(tool_calls=[ToolCallDelta(0, is_complete=True), ToolCallDelta(1, "", "", "{}", True)]),
]


def run(steps: Generator[int, None, Asked]) -> Asked:
    """What a reader reads."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        asked: Asked = end.value
        return asked


@dataclass
class Events:
    """Takes events in place of a connection.

    Attributes:
        sent: the JSON of each, whose type its first line must name.
        num_repeated: those for which a reader may leave more unread.
    """

    sent: list[dict[str, Any]] = field(default_factory=list)
    num_repeated: int = 0

    def send(self, event: str) -> None:
        head, data, *rest = event.split("\n")
        assert rest == ["", ""] and event.isascii()
        self.sent.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {self.sent[-1]['type']}"

    def repeat(self, event: str) -> None:
        self.num_repeated += 1
        self.send(event)


def answer(sink: BlockAnswer, parts: list[Parsed], reason: FinishReason, stop_string: str | None = None) -> None:
    """Give ``sink`` an answer of ``parts``."""
    sink.accept(Accepted(request_id="r", choices=(), num_prompt_tokens=30, seed=0))
    for offset, part in enumerate(parts):
        if part.reasoning or part.tool_calls:
            sink.add_parsed(0, offset, (5,), part, ())
        else:
            sink.add(0, offset, (5,), part.text, ())
    finished = ChoiceFinished(choice=0, reason=reason, usage=USAGE, time=TimeBreakdown(), stop_string=stop_string)
    sink.finish(finished)
    sink.end()

"""An answer's text as its client gets it: content, reasoning and tool calls apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from quartet.text.parse import CallArguments, CallBegin, CallEnd, Content, Event, OutputParser, Reasoning
from quartet.text.parse.states import Format

# Mistral's templates take ids of nine letters and digits only.
_SHORT_ID_PARSER, _SHORT_ID_LENGTH, _ID_LENGTH = "mistral", 9, 24


@dataclass(slots=True)
class ToolCallDelta:
    """More of one tool call.

    Attributes:
        index: its number within the choice.
        id, name: with its first part; otherwise empty.
        arguments: more of them; all of a complete call are one JSON object.
        is_complete: a call that never is was cut, or proved malformed after its arguments had been shown.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_complete: bool = False


@dataclass(slots=True)
class Parsed:
    """What an output shows next. Its parts are not aligned with each other. Each token may make one."""

    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


class ParsedBuilder:
    """Joins reasoning and tool calls that come in parts, in time that is linear in what comes.

    Attributes:
        num_characters: of reasoning and arguments.
    """

    __slots__ = ("_arguments", "_calls", "_places", "_reasoning", "num_characters")

    def __init__(self) -> None:
        """Nothing came."""
        self.num_characters = 0
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[list[str]] = []
        self._places: dict[int, int] = {}  # by index, where a call is in both

    def add(self, reasoning: str, tool_calls: Iterable[ToolCallDelta]) -> None:
        """Take more."""
        if reasoning:
            self._reasoning.append(reasoning)
            self.num_characters += len(reasoning)
        for call in tool_calls:
            self.num_characters += len(call.arguments)
            # A router that goes on for another may say again of any call that it is complete.
            if (place := self._places.get(call.index)) is not None:
                known = self._calls[place]
                known.id, known.name = known.id or call.id, known.name or call.name
                known.is_complete |= call.is_complete
                self._arguments[place].append(call.arguments)
            else:
                self._places[call.index] = len(self._calls)
                self._calls.append(ToolCallDelta(call.index, call.id, call.name, "", call.is_complete))
                self._arguments.append([call.arguments])

    @property
    def reasoning(self) -> str:
        """All of it."""
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        """One for each call, in the order in which they began."""
        for call, arguments in zip(self._calls, self._arguments, strict=True):
            call.arguments = "".join(arguments)
        return tuple(self._calls)


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """How a model writes reasoning and tool calls.

    Attributes:
        format: what a parser reads.
        reasoning_parser, tool_call_parser: its names; empty: such parts stay in the content.
        shown: the special tokens that the parser must see.
    """

    format: Format
    reasoning_parser: str
    tool_call_parser: str
    shown: frozenset[int]

    @property
    def needs_prompt_end(self) -> bool:
        """Whether a prompt may begin what the answer goes on with."""
        return bool(self.format.starts)


@dataclass(frozen=True, kw_only=True)
class OutputParsing:
    """How the outputs of one request are parsed.

    Attributes:
        prompt_end: the end of the prompt's text, special tokens included: templates may begin the reasoning.
        tools: JSON Schemas of the parameters, by function.
        streams_arguments: show arguments of calls as they come.
        allows_parallel_calls: else only the first call of a choice is shown.
        request_id: makes the ids of calls, where the model writes none: every attempt makes the same.
    """

    format: OutputFormat
    request_id: str
    prompt_end: str = field(default="", repr=False)
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    streams_arguments: bool = False
    allows_parallel_calls: bool = True

    def start(self, choice: int) -> ParsedText:
        """Begin to parse an output."""
        return ParsedText(self, choice)


class ParsedText:
    """Parses the text of one choice.

    Attributes:
        num_complete_calls: calls that were shown whole.
    """

    def __init__(self, parsing: OutputParsing, choice: int) -> None:
        """Use ``OutputParsing.start``."""
        self.num_complete_calls = 0
        self._id_source = f"{parsing.request_id}/{choice}"
        self._id_length = _ID_LENGTH
        self._id_prefix = "call_"
        if parsing.format.tool_call_parser == _SHORT_ID_PARSER:
            self._id_length, self._id_prefix = _SHORT_ID_LENGTH, ""
        self._num_ids = 0
        self._has_one_call = not parsing.allows_parallel_calls
        self._parser = OutputParser(
            parsing.format.format,
            prompt_end=parsing.prompt_end,
            tools=parsing.tools,
            streams_arguments=parsing.streams_arguments,
            make_id=self._make_id,
        )
        #: Takes the next text and returns what it shows, mostly one event of its only piece.
        self.push = self._parser.push
        #: The output has ended; returns what was held back.
        self.finish = self._parser.finish

    def join(self, events: Iterable[Event]) -> Parsed:
        """What ``events`` show together; each must be given once, in order."""
        text: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCallDelta] = []
        for event in events:
            if isinstance(event, Content):
                text.append(event.text)
            elif isinstance(event, Reasoning):
                reasoning.append(event.text)
            elif not (self._has_one_call and event.index):
                self._add_call(calls, event)
        return Parsed("".join(text), "".join(reasoning), calls)

    def more_arguments(self, event: CallArguments) -> ToolCallDelta | None:
        """What ``join`` makes of ``event`` alone; ``None``: nothing."""
        return None if self._has_one_call and event.index else ToolCallDelta(event.index, "", "", event.text)

    def _add_call(self, calls: list[ToolCallDelta], event: CallBegin | CallArguments | CallEnd) -> None:
        if isinstance(event, CallBegin):
            calls.append(ToolCallDelta(event.index, event.id, event.name))
            return
        if not calls or calls[-1].index != event.index:
            calls.append(ToolCallDelta(event.index))
        if isinstance(event, CallArguments):
            calls[-1].arguments += event.text
        else:
            calls[-1].is_complete = True
            self.num_complete_calls += 1

    def _make_id(self) -> str:
        source = f"{self._id_source}/{self._num_ids}"
        self._num_ids += 1
        digest = blake2b(source.encode(), digest_size=16).hexdigest()
        return self._id_prefix + digest[: self._id_length]


class GivenParts:
    """Leaves out of an output what its client already has. Bytes are of UTF-8.

    Attributes:
        is_over: nothing more is to be left out.
    """

    def __init__(self, num_text_bytes: int, num_reasoning_bytes: int, num_calls: int, num_argument_bytes: int) -> None:
        """So much of each was given; the beginnings of ``num_calls`` calls."""
        self._num_text_bytes = num_text_bytes
        self._num_reasoning_bytes = num_reasoning_bytes
        self._num_calls = num_calls
        self._last_call = num_calls - 1
        self._num_argument_bytes = num_argument_bytes

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be left out."""
        return not (self._num_text_bytes or self._num_reasoning_bytes or self._num_calls or self._num_argument_bytes)

    def leave_out(self, parsed: Parsed, *, errors: str = "ignore") -> Parsed:
        """``parsed`` without it; ``errors`` says what to do with half a character, as for ``bytes.decode``."""
        text, self._num_text_bytes = _without(parsed.text, self._num_text_bytes, errors)
        reasoning, self._num_reasoning_bytes = _without(parsed.reasoning, self._num_reasoning_bytes, errors)
        calls = [left for call in parsed.tool_calls if (left := self._leave_out_call(call, errors)) is not None]
        return Parsed(text, reasoning, calls)

    def _leave_out_call(self, call: ToolCallDelta, errors: str) -> ToolCallDelta | None:
        arguments, self._num_argument_bytes = _without(call.arguments, self._num_argument_bytes, errors)
        if call.name and not self._num_calls:
            return ToolCallDelta(call.index, call.id, call.name, arguments, call.is_complete)
        if call.name:
            self._num_calls -= 1
        if call.index < self._last_call and not arguments:
            return None  # its end came before the next call began
        # Whether its client also has the end of the last one is not known; to say it twice does no harm.
        return ToolCallDelta(call.index, "", "", arguments, call.is_complete)


def _without(text: str, num_bytes: int, errors: str) -> tuple[str, int]:
    """``text`` without its first bytes, and how many are left to leave out of what follows."""
    if not num_bytes:
        return text, 0
    encoded = text.encode()
    return encoded[num_bytes:].decode(errors=errors), max(num_bytes - len(encoded), 0)

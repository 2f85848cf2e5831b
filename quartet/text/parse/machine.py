"""The machine that reads a model's output as a format's table says."""

from __future__ import annotations

import html
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

from quartet.text.parse.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from quartet.text.parse.states import BACK, MAX_SPACE, NAME, SPACE, WORD, Do, Edge, Format, Scan, Sink, State, trie
from quartet.text.parse.values import ObjectScan, argument_types, parse_json, to_json

_SPACE = re.compile(r"\s*+")
_STRING = frozenset(["string"])
_ANY = frozenset(["string", "number", "integer", "boolean", "null", "array", "object"])
_WORD_KEYS, _ARGUMENT_KEYS = ("name", "type", "id"), ("arguments", "parameters")
#: How keys, by "", and their values begin in a JSON object that may be a call although nothing marks it.
_BEGINNINGS = {
    "": re.compile(rf'{SPACE}(?:"(?:{trie((*_WORD_KEYS, *_ARGUMENT_KEYS))}(?:"{SPACE})?|\Z))?'),
    **dict.fromkeys(_WORD_KEYS, re.compile(rf'{SPACE}(?:"{NAME}(?:"{SPACE})?+|{WORD}{SPACE})')),
    **dict.fromkeys(_ARGUMENT_KEYS, re.compile(rf'{SPACE}(?:\{{|"{SPACE}\{{?)?')),
}
# What of it is read at once: a word or one other character; if a quote stands before these, this too.
_STEP = re.compile(r'(?:\s*+")?+(?:[\w.\-]++|[\s\S])?')


class OutputParser:
    """Parses one output, which comes in pieces; what it shows doesn't depend on these, and the work is linear.

    A call is shown once it is complete; malformed, it stays text; cut, it is left out.
    What has begun as a call of a known function is held back to its end, however long.
    If arguments are streamed, a call begins with its first argument, and then may never end.
    ``num_failed_calls`` counts those that were marked or shown as calls and were malformed or cut.
    """

    def __init__(
        self,
        format: Format,
        *,
        prompt_end: str = "",
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        streams_arguments: bool = False,
        make_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
    ) -> None:
        """Begin an output.

        Args:
            format: of the model, see ``choose_format``.
            prompt_end: text of the prompt's last tokens, special ones included: templates may begin the reasoning.
            tools: JSON Schemas of the parameters by function name, for values that the model writes without a type.
                Without markers only calls of these functions are calls. ``None``: unknown.
            streams_arguments: show arguments as they come.
            make_id: makes the ids of calls where the model writes none.
        """
        self.num_failed_calls = 0
        self._format = format
        self._tools = tools or {}
        self._names: list[str] = []  # of the functions that the open call must be of, in order; empty: of any
        self._streams, self._make_id = streams_arguments, make_id
        self._events: list[Event] = []
        self._buffer = self._held = ""
        self._is_last = self._waits = False
        self._field: list[str] = []
        self._streams_value = False  # the text is an argument's value, and shown as it comes
        self._is_open = False  # something that may be a call has begun
        self._is_shown = self._is_unmarked = False  # a part of it was shown as a call; nothing marks it as one
        self._raw: list[str] = []  # its text
        self._num_calls = self._raw_from = 0  # calls that have begun; where in the buffer the open one's text does
        self._ready: list[Event] = []  # what to show of it, if it is complete
        self._forget_call()
        self._origin = self._content = format.states["content"]
        self._enter(format.start_after(prompt_end))

    def push(self, text: str) -> list[Event]:
        """Take what comes next of the output; returns what it shows."""
        if not self._held and self._plain is not None and self._notable(text) is None:
            return [self._plain(text)] if text else []
        if self._held or self._is_doubtful or not self._scan.take_plain(text):
            return self._run(self._held + text)
        self._events = []
        self._take_scanned(is_complete=False)
        if not self._is_shown:
            self._raw.append(text)
        return self._events

    def finish(self) -> list[Event]:
        """The output has ended; returns what was held back. Nothing may be pushed after."""
        self._is_last = True
        # What nothing marks, or what a section holds in place of a call, is text; a call that was cut is left out.
        in_section = any(edge.do is Do.END_SECTION for edge in self._state.edges)
        is_text = self._is_unmarked or (in_section and any(map(str.strip, self._field)))
        events = self._run(self._held)
        if self._is_open:
            self._raw_from, self._is_shown = len(self._buffer) - len(self._held), self._is_shown or not is_text
            self._fail(len(self._buffer))
        return events

    def _run(self, buffer: str) -> list[Event]:
        events = self._events = []
        at, self._buffer, self._raw_from, self._waits = 0, buffer, 0, False
        while not self._waits:
            at = self._step(at)
        if self._is_open and not self._is_shown:
            self._raw.append(buffer[self._raw_from : at])
        self._held = buffer[at:]
        return events

    def _go(self, name: str) -> None:
        is_elsewhere = name == BACK and self._origin is not self._content
        self._enter(self._origin if is_elsewhere else self._format.states[name])

    def _enter(self, state: State) -> None:
        self._state, self._notable = state, state.notable.search
        self._plain = _PLAIN.get(state.sink) if state.scan is Scan.TEXT else None
        self._step = self._text if state.scan is Scan.TEXT else self._expect
        is_call = state.scan is Scan.CALL
        if is_call or state.scan is Scan.OBJECT:
            self._step = self._object
            self._scan = ObjectScan(state.quoting, self._accepts if is_call else None)
        # Whether there is no object, or it has not begun as calls of known functions do.
        self._is_doubtful = self._is_unmarked if is_call else state.scan is not Scan.OBJECT

    # Steps: each reads from ``at`` on and returns how far it came, or says that it waits for more.

    def _text(self, at: int) -> int:
        start, end, edge = self._find_edge(at)
        cut = start
        if edge.strips if edge is not None else self._state.strips and not self._is_last:
            space = max(at, start - MAX_SPACE)
            cut = space + len(self._buffer[space:start].rstrip())
        if (bad := self._put(at, cut)) is not None:
            return self._fail(bad)
        self._waits = edge is None
        return cut if edge is None else self._take(edge, cut, start if edge.keeps else end)

    def _find_edge(self, at: int) -> tuple[int, int, Edge | None]:
        """Where the next marker begins and ends, and its edge; ``None``: more text must tell."""
        state, buffer = self._state, self._buffer
        while (match := state.pattern.search(buffer, at)) is not None:
            start, end = match.span()
            edge = state.by_marker.get(match.group())
            is_only = edge is not None and sum(marker.startswith(edge.marker) for marker in state.by_marker) == 1
            if end == len(buffer) and not self._is_last and not is_only:
                return start, end, None
            if edge is not None and edge.follow:
                follow = edge.follows.match(buffer, end)
                if follow is not None and follow.group(1) not in edge.follow and not self._is_last:
                    return start, end, None
                edge = edge if follow is not None else None
            if edge is not None:
                return start, end, edge
            at = start + 1
        return len(buffer), len(buffer), None

    def _put(self, begin: int, end: int) -> int | None:
        """Give the sink its text; returns where a field stops being one."""
        text, state = self._buffer[begin:end], self._state
        if self._streams_value:
            self._add_arguments(to_json(text, _STRING)[1:-1])
        elif text and state.sink is Sink.FIELD:
            if (shape := state.fits) is not None:
                field = "".join(self._field)
                if not self._may_begin(shape, field + text):
                    ends = range(1, len(text) + 1)
                    return begin + bisect_left(ends, True, key=lambda n: not self._may_begin(shape, field + text[:n]))
            self._field.append(text)
        elif text and state.sink is not Sink.NOTHING:
            self._events.append(_PLAIN[state.sink](text))
        return None

    def _expect(self, at: int) -> int:
        state, buffer = self._state, self._buffer
        if state.drops_space and (space := _SPACE.match(buffer, at)) is not None:
            at = space.end()
        match = state.pattern.match(buffer, at)
        edge = state.by_marker.get(match.group(1)) if match is not None else None
        if match is not None and edge is not None:
            return self._take(edge, at, match.start(1) if edge.keeps else match.end())
        is_open_end = match is not None and match.end() == len(buffer)
        if is_open_end and not (self._is_last and state.otherwise is not None):
            self._waits = True
            return at
        if state.otherwise is None:
            return self._fail(at)
        self._go(state.otherwise)
        return len(buffer) if is_open_end and state.skips_cut else at

    def _object(self, at: int) -> int:
        state, scan, buffer, stop = self._state, self._scan, self._buffer, at
        while self._is_doubtful and stop < len(buffer):
            begin, stop = at, _STEP.match(buffer, stop).end()  # type: ignore[union-attr]  # it always matches
            at = scan.feed(buffer, begin, stop)
            key, word, is_over = scan.key, scan.word, scan.is_malformed or scan.is_done
            if is_over or not self._may_begin(_BEGINNINGS[key], word, is_name=key == "name"):
                return self._fail(begin)  # what was read at once is text, and no marker begins in it
            self._is_doubtful = key not in _ARGUMENT_KEYS or not word.endswith("{")
        if not self._is_doubtful:
            at = scan.feed(buffer, at, len(buffer))
        if not self._take_scanned(is_complete=scan.is_done) or scan.is_malformed:
            return self._fail(at)
        self._waits = not scan.is_done
        if scan.is_done and state.ends:
            self._end_call()
        if scan.is_done:
            self._go(state.then)
        return at

    def _take(self, edge: Edge, begin: int, at: int) -> int:
        """Leave the state by ``edge``, whose marker, and the whitespace it strips, begins at ``begin``."""
        field, to = "".join(self._field), edge.to
        self._field = []
        if edge.do in (Do.OPEN, Do.OPEN_UNMARKED):
            self.num_failed_calls += self._is_open and bool(field.strip())  # noise: it is left out
            self._open_call(begin, is_unmarked=edge.do is Do.OPEN_UNMARKED)
        elif edge.do is Do.HEADER:
            to = self._read_header(field)
        elif edge.do is not None and not _ACTIONS[edge.do](self, field):
            return self._fail(at)
        if edge.ends:
            self._end_call()
        self._is_open &= edge.do is not Do.END_SECTION
        self._go(to)
        return at

    # Calls: what actions do returns whether the call is still well-formed.

    def _open_call(self, begin: int, *, is_unmarked: bool = False) -> None:
        if not self._is_open:  # else it is one more of the markers before a call
            self._is_open, self._is_shown, self._is_unmarked = True, False, is_unmarked
            self._origin = self._state if self._state.scan is Scan.TEXT else self._content
            self._raw, self._raw_from = [], begin
            self._names = sorted(self._tools) if is_unmarked else []
            self._forget_call()

    def _forget_call(self) -> None:
        self._name, self._id = "", ""
        self._arguments, self._keys = list[str](), set[str]()
        self._has_begun = False  # whether its beginning was shown

    def _fail(self, at: int) -> int:
        """The call is malformed: go back to where it began, with its text if that can be shown."""
        raw = "".join(self._raw) + self._buffer[self._raw_from : at]
        self.num_failed_calls += self._is_shown or not self._is_unmarked
        self._is_open, self._streams_value, self._field = False, False, []
        self._num_calls -= sum(isinstance(event, CallBegin) for event in self._ready)
        self._ready.clear()
        self._enter(self._origin)
        if raw and not self._is_shown and self._plain is not None:
            self._events.append(self._plain(raw))
        return at

    def _set_name(self, field: str) -> bool:
        self._name = field.strip()
        is_known = not self._names or self._name in self._tools
        return is_known and bool(self._name) and re.fullmatch(NAME, self._name) is not None

    def _may_begin(self, shape: re.Pattern[str], text: str, *, is_name: bool = True) -> bool:
        """Whether a word may begin so; as a name without a marker, it must be one of a function of the request."""
        is_fit = shape.fullmatch(text) is not None
        if not (is_fit and is_name and self._names):
            return is_fit
        word = text.strip().strip('"')
        word = parse_json(f'"{word}"') or "" if "\\" in word else word
        first = bisect_left(self._names, word)
        return first < len(self._names) and self._names[first].startswith(word)

    def _set_named_id(self, field: str) -> bool:
        self._set_id(field)
        name, colon, number = field.strip().removeprefix("functions.").rpartition(":")
        return self._set_name(name if colon and number.isdecimal() else field)

    def _set_id(self, field: str) -> bool:
        self._id = field.strip()
        return True

    def _read_header(self, field: str) -> str:
        """Harmony: what a message is, as its header says; returns the state that reads it."""
        recipient = (re.findall(r"to=([^\s<]+)", field) or ["assistant"])[-1]
        channel = (re.findall(r"<\|channel\|>\s*(\w+)", field) or ["final"])[-1]
        if recipient.startswith("functions."):
            self._is_open = "arguments" in self._format.states and self._set_name(recipient.removeprefix("functions."))
            return "arguments" if self._is_open else "content"
        self._is_open = False
        self.num_failed_calls += recipient != "assistant"  # to a tool of the model's own: it is left out
        return "built_in" if recipient != "assistant" else "reasoning" if channel == "analysis" else "content"

    def _accepts(self, key: str, value: str | None) -> bool:
        """Whether a call as a JSON object may have this key, or value."""
        if value is None:
            return not self._is_unmarked or (key in _BEGINNINGS and (key not in _ARGUMENT_KEYS or bool(self._name)))
        text = parse_json(value)
        if key == "id" and isinstance(text, str):
            self._set_id(text)
        return key != "name" or (isinstance(text, str) and self._set_name(text))

    def _take_scanned(self, *, is_complete: bool) -> bool:
        """Take what was read of arguments; of a call that is a JSON object, what is known of its arguments."""
        if self._state.scan is Scan.OBJECT:
            self._add_arguments(self._scan.take_json())
        if self._state.scan is Scan.OBJECT or not (is_complete or (self._streams and self._name)):
            return True
        values = self._scan.values
        pieces = values.get("arguments", values.get("parameters", []))
        is_object = self._has_begun or pieces[:1] == ["{"]
        if not is_complete and not (is_object and pieces):
            return True
        text = "".join(pieces)
        pieces.clear()
        if not is_object:
            value = parse_json(text)  # perhaps JSON in a string
            text = value if isinstance(value, str) else "{}" if value is None else text
        if not self._name or not (is_object or isinstance(parse_json(text), dict)):
            return False
        self._add_arguments(text)
        return True

    def _begin_value(self, key: str, types: frozenset[str] | None) -> bool:
        if key in self._keys:
            return False
        lead = ("{" if not self._keys else ", ") + to_json(key, _STRING) + ": "
        self._keys.add(key)
        # Of other values only the end shows what JSON they are.
        self._types, self._streams_value = types, self._streams and types == _STRING
        self._add_arguments(lead + '"' if self._streams_value else lead)
        return True

    def _end_value(self, field: str) -> bool:
        self._add_arguments('"' if self._streams_value else to_json(field, self._types))
        self._streams_value = False
        return True

    def _add_arguments(self, text: str) -> None:
        if text and not self._has_begun:
            self._has_begun = True
            self._ready.append(CallBegin(self._num_calls, self._id or self._make_id(), self._name))
            self._num_calls += 1
        if not self._streams:
            self._arguments.append(text)
        elif text:
            self._ready.append(CallArguments(self._num_calls - 1, text))
            self._show_ready()

    def _end_listed(self) -> bool:
        """The call is complete, but unless it was streamed, it counts only if all others of its list are."""
        index = self._num_calls - 1
        if self._streams:
            self._events.append(CallEnd(index))
        else:
            self._ready += (CallArguments(index, "".join(self._arguments)), CallEnd(index))
        self._forget_call()
        return True

    def _end_call(self) -> None:
        if self._keys or not self._has_begun:
            self._add_arguments("}" if self._keys else "{}")
        self._end_listed()
        self._is_open = False
        self._show_ready()

    def _show_ready(self) -> None:
        self._is_shown = True
        self._events += self._ready
        self._ready.clear()


_PLAIN: Mapping[Sink, type[Content] | type[Reasoning]] = {Sink.CONTENT: Content, Sink.REASONING: Reasoning}
_ACTIONS: Mapping[Do, Callable[[OutputParser, str], bool]] = {
    Do.NAME: OutputParser._set_name,
    Do.NAMED_ID: OutputParser._set_named_id,
    Do.ID: OutputParser._set_id,
    Do.KEY: lambda parser, field: parser._begin_value(field, argument_types(parser._tools.get(parser._name), field)),
    Do.KEY_OF_STRING: lambda parser, field: parser._begin_value(html.unescape(field), _STRING),
    Do.KEY_OF_JSON: lambda parser, field: parser._begin_value(html.unescape(field), _ANY),
    Do.VALUE: OutputParser._end_value,
    Do.END_SECTION: lambda parser, field: not field.strip(),
    Do.NEXT: lambda parser, field: parser._end_listed(),
}

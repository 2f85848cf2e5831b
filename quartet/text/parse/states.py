"""States and edges: the tables that say how a family of models writes reasoning and tool calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property

#: Of a run of whitespace, as much may be held back, dropped before a marker, or come between a marker and what must
#: follow it: what is held back, and read again at each delta, stays short.
MAX_SPACE = 64

#: As a target: where the call began.
BACK = "back"


class Scan(Enum):
    """How a state reads."""

    TEXT = auto()  # text of any length up to the first marker
    EXPECT = auto()  # a marker must come now; else ``otherwise`` is the next state, or the call is malformed
    OBJECT = auto()  # the arguments: one object
    CALL = auto()  # one JSON object with the name and the arguments of a call


class Quoting(Enum):
    """How an object is written."""

    JSON = auto()
    GEMMA = auto()  # {key:<|"|>text<|"|>,other key:1}: keys are bare, and strings know no escapes
    PYTHON = auto()  # (key='text', other_key={'a': None}): arguments of a Python call


#: What strings are written between.
QUOTES = {Quoting.JSON: ('"',), Quoting.GEMMA: ('<|"|>',), Quoting.PYTHON: ("'''", '"""', "'", '"')}


class Sink(Enum):
    """Where the text of a ``Scan.TEXT`` state goes."""

    CONTENT = auto()
    REASONING = auto()
    FIELD = auto()  # is kept for the next edge
    VALUE = auto()  # of an argument
    NOTHING = auto()


class Do(Enum):
    """What an edge does."""

    OPEN = auto()  # a call may begin here; if it proves malformed, its text is shown where it stood
    OPEN_UNMARKED = auto()  # the same, and only the text itself can say that it is a call
    NAME = auto()  # the field is the call's name
    NAMED_ID = auto()  # the field is functions.NAME:NUMBER, name and id of the call
    ID = auto()
    CALL_ATTRIBUTES = auto()  # the field is tool="NAME" ...
    HEADER = auto()  # the field is a header of Harmony, which says what comes next
    KEY = auto()  # the field is an argument's key; the tool's schema says its type
    KEY_OF_STRING = auto()
    KEY_OF_JSON = auto()
    KEY_ATTRIBUTES = auto()  # the field is key="KEY" type="TYPE"
    VALUE = auto()  # an argument's value is complete
    NEXT = auto()  # the call is complete, but counts only if all of its list are


@dataclass(frozen=True)
class Edge:
    """A way out of a state.

    Attributes:
        marker: what must be in the text.
        to: the next state.
        do: what happens.
        ends: the call is complete.
        keeps: the next state reads the marker again.
        strips: whitespace before the marker is dropped.
        follow: one of these, or the end of the output, must come after the marker and any whitespace; else the marker
            is part of the text. Empty: anything may follow.
    """

    marker: str
    to: str
    do: Do | None = None
    ends: bool = False
    keeps: bool = False
    strips: bool = False
    follow: tuple[str, ...] = ()

    @cached_property
    def follows(self) -> re.Pattern[str]:
        """Matches after the marker; group 1 is none of ``follow`` where the text ends before it can be told."""
        return re.compile(rf"\s{{0,{MAX_SPACE}}}+({trie(self.follow)}|\Z)")


@dataclass(frozen=True)
class State:
    """One state.

    Attributes:
        edges: the ways out.
        scan: how it reads.
        sink: where text goes.
        otherwise: of ``Scan.EXPECT``.
        drops_space: of ``Scan.EXPECT``: whitespace before the marker is dropped, also where ``otherwise`` is taken.
        then: the next state after an object or call; both end by themselves.
        ends: whether the call is complete then.
        quoting: of objects.
        bars: of fields: finds characters that can't be in it; the call is malformed then.
    """

    edges: tuple[Edge, ...] = ()
    scan: Scan = Scan.TEXT
    sink: Sink = Sink.NOTHING
    otherwise: str | None = None
    drops_space: bool = True
    then: str = BACK
    ends: bool = True
    quoting: Quoting = Quoting.JSON
    bars: re.Pattern[str] | None = None

    @cached_property
    def by_marker(self) -> dict[str, Edge]:
        """The edges by their markers."""
        return {edge.marker: edge for edge in self.edges}

    @cached_property
    def strips(self) -> bool:
        """Whether whitespace at the text's end must wait for what comes next."""
        return any(edge.strips for edge in self.edges)

    @cached_property
    def extendable(self) -> frozenset[str]:
        """Markers that begin a longer one."""
        return frozenset(a for a in self.by_marker for b in self.by_marker if a != b and b.startswith(a))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Finds the first marker, or the beginning of one at the text's end."""
        return re.compile(trie(self.by_marker) if self.edges else r"(?!)")

    @cached_property
    def expected(self) -> re.Pattern[str]:
        """Matches whitespace and then, as group 1, a marker or the beginning of one at the text's end."""
        return re.compile(rf"\s{{0,{MAX_SPACE}}}+({trie(self.by_marker)}|\Z)")

    @cached_property
    def notable(self) -> re.Pattern[str]:
        """Finds nothing in text that can be shown as it is: no marker begins in it, and no whitespace waits."""
        firsts = "".join(sorted({re.escape(marker[0]) for marker in self.by_marker}))
        parts = ([f"[{firsts}]"] if firsts else []) + ([r"\s\Z"] if self.strips else [])
        return re.compile("|".join(parts) or r"(?!)")


@dataclass(frozen=True)
class Format:
    """How one family writes, as a graph.

    Attributes:
        states: by name; ``content`` must be among them.
        start: the state that an output begins in.
        starts: other beginnings: by how the prompt ends, without whitespace after it.
        after_call: where content goes on after a call.
    """

    states: Mapping[str, State]
    start: str = "start"
    starts: Mapping[str, str] = field(default_factory=dict)
    after_call: str = "content"

    def start_after(self, prompt_end: str) -> str:
        """The state that an output after this prompt begins in: templates may begin the reasoning themselves."""
        end = prompt_end.rstrip()
        return next((state for opener, state in self.starts.items() if end.endswith(opener)), self.start)

    def needs(self, special_token: str) -> bool:
        """Whether ``special_token`` must be in the text: it is a marker or part of one.

        Text for people leaves special tokens out. A parser must see those that its format is written with, also the
        ones that end a generation, and no others.
        """
        return bool(special_token) and any(special_token in text for text in self._written)

    @cached_property
    def _written(self) -> frozenset[str]:
        states = self.states.values()
        markers = {text for state in states for edge in state.edges for text in (edge.marker, *edge.follow)}
        return frozenset(markers.union(*(QUOTES[state.quoting] for state in states if state.scan is Scan.OBJECT)))


def trie(words: Iterable[str]) -> str:
    """A pattern for the longest of ``words``, or for the beginning of one that reaches the text's end."""
    tails: dict[str, list[str]] = {}
    for word in filter(None, words):
        tails.setdefault(word[0], []).append(word[1:])
    return f"(?:{'|'.join(re.escape(first) + _rest(rest) for first, rest in tails.items())})"


def _rest(tails: list[str]) -> str:
    if tails == [""]:
        return ""
    return trie(tails) + "?" if "" in tails else rf"(?:{trie(tails)}|\Z)"

"""States and edges: the tables that say how a family of models writes reasoning and tool calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property

#: Of a run of whitespace, as much may be held back, dropped before a marker, or come before what must follow one.
MAX_SPACE = 64
SPACE = rf"\s{{0,{MAX_SPACE}}}+"
#: Characters of a name or key, or of the id of a call that nothing marks; and how these begin.
MAX_NAME = 320
NAME, KEY, WORD = (rf"[{of}]{{0,{MAX_NAME}}}+" for of in (r"^\s{}()\[\]<>\"'", r"^\n<", r"\w.\-"))
#: What models may write in a section before its first call. What is longer is a text about sections.
NOISE = rf"[\s\S]{{0,{MAX_SPACE}}}+"
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
    FIELD = auto()  # is kept for the next edge, unless it is an argument's value that is streamed
    NOTHING = auto()


class Do(Enum):
    """What an edge does."""

    OPEN = auto()  # a call, or what announces one, may begin here; malformed, its text is shown where it stood
    OPEN_UNMARKED = auto()  # the same, and only the text itself can say that it is a call
    NAME = auto()  # the field is the call's name
    NAMED_ID = auto()  # the field is functions.NAME:NUMBER, name and id of the call
    ID = auto()
    HEADER = auto()  # the field is a header of Harmony, which says what comes next
    KEY = auto()  # the field is an argument's key; the tool's schema says its type
    KEY_OF_STRING = auto()  # the same, with its type and as an attribute of XML
    KEY_OF_JSON = auto()
    VALUE = auto()  # an argument's value is complete
    END_SECTION = auto()  # a section ends that held no call: it is text, unless it is empty
    NEXT = auto()  # the call is complete, but counts only if all of its list are


@dataclass(frozen=True)
class Edge:
    """A way out of a state."""

    marker: str  # what must be in the text
    to: str  # the next state
    do: Do | None = None
    ends: bool = False  # the call is complete
    keeps: bool = False  # the next state reads the marker again
    strips: bool = False  # whitespace before the marker is dropped
    follow: tuple[str, ...] = ()  # one of these or the output's end must follow, after any whitespace; else it is text

    @cached_property
    def follows(self) -> re.Pattern[str]:
        """Matches after the marker; group 1 is none of ``follow`` where the text ends before it can be told."""
        return re.compile(rf"{SPACE}({trie(self.follow)}|\Z)")


@dataclass(frozen=True)
class State:
    """One state, and how it reads."""

    edges: tuple[Edge, ...] = ()
    scan: Scan = Scan.TEXT
    sink: Sink = Sink.NOTHING
    otherwise: str | None = None  # of ``Scan.EXPECT``
    drops_space: bool = True  # of ``Scan.EXPECT``: whitespace is dropped, also where ``otherwise`` is taken
    skips_cut: bool = False  # of ``Scan.EXPECT`` with ``otherwise``: a marker that the output's end cuts is dropped
    then: str = BACK  # after an object or call; both end by themselves
    ends: bool = True  # whether the call is complete then
    quoting: Quoting = Quoting.JSON  # of objects
    shape: str | None = None  # of fields: a pattern of how one may begin; else the call is malformed

    @cached_property
    def by_marker(self) -> dict[str, Edge]:
        """The edges by their markers."""
        return {edge.marker: edge for edge in self.edges}

    @cached_property
    def fits(self) -> re.Pattern[str] | None:
        """Matches how a field may begin, whitespace aside; ``None``: anyhow."""
        return None if self.shape is None else re.compile(SPACE + self.shape + SPACE)

    @cached_property
    def strips(self) -> bool:
        """Whether whitespace must wait for what comes next."""
        return any(edge.strips for edge in self.edges)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Finds a marker, or its beginning at the text's end; if one is expected, as group 1 after whitespace."""
        markers = trie(self.by_marker)
        return re.compile(rf"{SPACE}({markers}|\Z)" if self.scan is Scan.EXPECT else markers)

    @cached_property
    def notable(self) -> re.Pattern[str]:
        """Finds nothing in text that can be shown as it is: no marker begins in it, and no whitespace waits."""
        firsts = "".join(re.escape(marker[0]) for marker in self.by_marker)
        return re.compile((f"[{firsts}]" if firsts else "(?!)") + (r"|\s\Z" if self.strips else ""))


@dataclass(frozen=True)
class Format:
    """How one family writes."""

    states: Mapping[str, State]  # by name, ``start`` and ``content`` among them
    starts: Mapping[str, str] = field(default_factory=dict)  # states after prompts that end so, whitespace aside

    def start_after(self, prompt_end: str) -> State:
        """The state that an output after this prompt begins in: templates may begin the reasoning themselves."""
        end = prompt_end.rstrip()
        return self.states[next((name for opener, name in self.starts.items() if end.endswith(opener)), "start")]

    def needs(self, special_token: str) -> bool:
        """Whether parsers must see ``special_token``, which text for people leaves out; also if it ends the output."""
        return bool(special_token) and any(special_token in text for text in self._texts)

    @cached_property
    def _texts(self) -> frozenset[str]:
        states = self.states.values()
        texts = {text for state in states for edge in state.edges for text in (edge.marker, *edge.follow)}
        return frozenset(texts.union(*(QUOTES[state.quoting] for state in states if state.scan is Scan.OBJECT)))


def trie(words: Iterable[str]) -> str:
    """A pattern for the longest of ``words``, or for the beginning of one that reaches the text's end."""
    longest_first = sorted(words, key=len, reverse=True)
    patterns = ["(?:".join(map(re.escape, word)) + r"|\Z)" * (len(word) - 1) for word in longest_first]
    return f"(?:{'|'.join(patterns) or '(?!)'})"

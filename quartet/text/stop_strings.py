"""Where a text that arrives in pieces ends: at its first complete stop string."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from quartet.errors import InvalidRequestError

# The state of a text whose end begins no stop string.
_ROOT = 0

# The ending of a state that no text has reached yet.
_UNKNOWN = -1


class StopStrings:
    """The stop strings of one request, as an automaton that the matchers of its choices share.

    It is that of Aho and Corasick, "Efficient string matching" (1975). A state stands for the longest end of the text
    that begins a stop string, so a character costs the same on average, whatever the strings and the text are.

    All strings are joined, and a state is the position behind the beginning that it stands for; where several strings
    begin alike, in the first of them. So the next state is mostly the next position, and other edges are few. How a
    state goes on after a character that does not fit is learnt when a text first gets that deep into a string: few
    texts do. Together this takes eight bytes for each character of the strings.

    Attributes:
        num_learnt: states of which that is known: it took most of the work, besides the characters that were read.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Prepare to search for ``stop_strings``. Raises ``InvalidRequestError``: one is empty."""
        if not all(stop_strings):
            raise InvalidRequestError("a stop string must not be empty", field="text_options.stop_strings")
        self._strings = tuple(stop_strings)
        self._first_characters = frozenset([string[0] for string in stop_strings])
        # Behind each string there is room for the state in which it is complete.
        self._joined = "\0".join((*stop_strings, ""))
        self._begins = list(accumulate([len(string) + 1 for string in stop_strings[:-1]], initial=0))
        self._branches: dict[int, dict[str, int]] = {}
        self._paths: list[_Path] = []
        self._complete: dict[int, int] = {}  # by state, the number of the string that is complete there, from 1
        for number in range(len(stop_strings)):
            self._add(number)
        self._failures = array("i", [_ROOT]) * (len(self._joined) + 1)
        # The number of the string that is complete in a state, the longest if there are several; 0: none is.
        self._endings = array("i", [_UNKNOWN]) * (len(self._joined) + 1)
        self._endings[_ROOT] = 0
        self._depth = 0  # up to here failures and endings are known
        self.num_learnt = 0

    def begins_in(self, text: str) -> bool:
        """Whether any character of ``text`` may begin a stop string."""
        return not self._first_characters.isdisjoint(text)

    def advance(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Read ``text`` in ``state``, which is 0 at first.

        Returns:
            The new state; how many characters were read; and the first stop string, complete after the last of them. If
            several are, the longest; ``None``: the whole text was read.
        """
        joined, endings = self._joined, self._endings
        num_read = 0
        for character in text:
            num_read += 1
            state = state + 1 if joined[state] == character else self._next(state, character)
            if endings[state]:
                if endings[state] == _UNKNOWN:
                    self._learn(state)
                if endings[state]:
                    return state, num_read, self._strings[endings[state] - 1]
        return state, num_read, None

    def held(self, state: int) -> tuple[int, int]:
        """What is held back in ``state``: where ``part`` has it, and its length."""
        begin = self._begins[bisect_right(self._begins, state) - 1]
        return begin, state - begin

    def part(self, begin: int, length: int) -> str:
        """``length`` characters of the joined strings."""
        return self._joined[begin : begin + length]

    def _add(self, number: int) -> None:
        """Add a path for what a string does not share with those before it."""
        string, begin = self._strings[number], self._begins[number]
        num_shared, parent = 0, _ROOT
        for other, other_begin in zip(self._strings[:number], self._begins, strict=False):
            if len(string) > num_shared and other.startswith(string[: num_shared + 1]):
                num_shared = _num_shared(string, other)
                parent = other_begin + num_shared
        if num_shared == len(string):
            self._complete.setdefault(parent, number + 1)
            return
        if number:
            self._branches.setdefault(parent, {})[string[num_shared]] = begin + num_shared + 1
        self._paths.append(_Path(begin, parent, begin + num_shared + 1, begin + len(string)))
        self._complete[begin + len(string)] = number + 1

    def _next(self, state: int, character: str) -> int:
        """The state after ``character``."""
        joined, branches = self._joined, self._branches
        while joined[state] != character:
            if state in branches and character in branches[state]:
                return branches[state][character]
            if state == _ROOT:
                return _ROOT
            state = self._failures[state]
        return state + 1

    def _learn(self, state: int) -> None:
        """Learn failures and endings up to the depth of ``state``."""
        endings = self._endings
        while endings[state] == _UNKNOWN:
            self._depth += 1
            for path in self._paths:
                own = path.begin + self._depth
                if path.first <= own <= path.last:
                    self.num_learnt += 1
                    parent = path.parent if own == path.first else own - 1
                    # Where a string is complete before, no text gets here.
                    if not endings[parent]:
                        failure = 0 if parent == _ROOT else self._next(self._failures[parent], self._joined[own - 1])
                        self._failures[own] = failure
                        endings[own] = self._complete.get(own, endings[failure])


class _Path(NamedTuple):
    """The states of one string that it does not share with a string before it.

    Attributes:
        begin: of the string, in the joined ones.
        parent: the state before the first of its own.
        first: the first of its own.
        last: the one in which it is complete.
    """

    begin: int
    parent: int
    first: int
    last: int


class StopMatch(NamedTuple):
    """What a piece of text brought. A tuple: each token makes one.

    Attributes:
        text: characters that may be shown now, in order.
        stop_string: the stop string that ended the text; ``None`` while there was none.
    """

    text: str
    stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether the text has ended; nothing more will be shown."""
        return self.stop_string is not None


_NOTHING = StopMatch("")


class StopMatcher:
    """Ends a text that arrives in pieces at the first complete stop string; holds back what may yet become one.

    Of several that are complete at the same character the longest counts (it begins first). That is where
    a generation that is checked character by character stops, so the result is the same however the
    text was split, and no match waits for a longer one.

    The work is linear in the text, however much is held back.

    Attributes:
        num_held: characters held back, because they may be the beginning of a stop string.
    """

    __slots__ = ("_has_stopped", "_held_begin", "_include_stop", "_state", "_stops", "num_held")

    def __init__(self, stops: StopStrings, include_stop: bool = False) -> None:
        """Search for ``stops``; ``include_stop`` shows the one found."""
        self.num_held = 0
        self._stops = stops
        self._include_stop = include_stop
        self._state = self._held_begin = 0
        self._has_stopped = False

    def push(self, text: str) -> StopMatch:
        """Take the next characters and return what may be shown; after a match always nothing."""
        if self._has_stopped:
            return _NOTHING
        stops = self._stops
        if not self.num_held and not stops.begins_in(text):
            return StopMatch(text)
        self._state, num_read, stop_string = stops.advance(self._state, text)
        if stop_string is not None:
            self._has_stopped = True
            num_given = self.num_held + num_read - (0 if self._include_stop else len(stop_string))
            match = StopMatch(self._first(num_given, text), stop_string)
            self.num_held = 0
            return match
        begin, num_held = stops.held(self._state)
        shown = self._first(self.num_held + num_read - num_held, text)
        self._held_begin, self.num_held = begin, num_held
        return StopMatch(shown) if shown else _NOTHING

    def finish(self) -> StopMatch:
        """Return what was held back: nothing can complete it any more."""
        held = self._first(self.num_held, "")
        self._state = self.num_held = 0
        return StopMatch(held)

    def _first(self, length: int, text: str) -> str:
        """The first ``length`` characters of what was held back and, after it, ``text``."""
        num_more = length - self.num_held
        if num_more <= 0:
            return self._stops.part(self._held_begin, length)
        if not self.num_held:
            return text[:num_more]
        return self._stops.part(self._held_begin, self.num_held) + text[:num_more]


def _num_shared(one: str, other: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low

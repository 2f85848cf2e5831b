"""A text ends at the first complete stop string, and never shows a part of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.errors import InvalidRequestError
from quartet.text.stop_strings import StopMatcher, StopStrings

# Few letters, so that stop strings overlap with themselves and with each other.
letters = st.text(alphabet="ab☃\0", max_size=30)
stops = st.lists(st.text(alphabet="ab☃\0", min_size=1, max_size=6), max_size=6)


@dataclass(frozen=True)
class Outcome:
    text: str
    stop_string: str | None


def reference(text: str, stop_strings: list[str], include_stop: bool) -> Outcome:
    """Check every beginning of the text, shortest first."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return Outcome(text[: end if include_stop else end - len(stop)], stop)
    return Outcome(text, None)


def feed(matcher: StopMatcher, pieces: list[str]) -> Outcome:
    matches = [*(matcher.push(piece) for piece in pieces), matcher.finish()]
    stopped = [match.stop_string for match in matches if match.stopped]
    assert len(stopped) <= 1
    return Outcome("".join(match.text for match in matches), stopped[0] if stopped else None)


@given(text=letters, stop_strings=stops, cuts=st.lists(st.integers(0, 30)), include_stop=st.booleans())
def test_every_splitting_gives_what_the_whole_text_gives(
    text: str, stop_strings: list[str], cuts: list[int], include_stop: bool
) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(bounds)]
    expected = reference(text, stop_strings, include_stop)
    assert feed(StopMatcher(StopStrings(stop_strings), include_stop), pieces) == expected
    assert feed(StopMatcher(StopStrings(stop_strings), include_stop), list(text)) == expected


@given(text=letters, stop_strings=stops)
def test_exactly_the_longest_end_that_may_begin_a_stop_string_is_held_back(text: str, stop_strings: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stop_strings))
    seen = ""
    for character in text:
        seen += character
        if matcher.push(character).stopped:
            return
        ends = [seen[begin:] for begin in range(len(seen))]
        may_begin = [end for end in ends if any(stop.startswith(end) for stop in stop_strings)]
        assert matcher.num_held == max(map(len, may_begin), default=0)


def test_a_stop_string_across_three_pieces_is_trimmed() -> None:
    matcher = StopMatcher(StopStrings(["STOP"]))
    matches = [matcher.push(piece) for piece in ("so far S", "TO", "P and more")]
    assert [match.text for match in matches] == ["so far ", "", ""]
    assert matches[-1].stop_string == "STOP"


def test_text_that_only_began_like_a_stop_string_is_shown_later() -> None:
    matcher = StopMatcher(StopStrings(["STOP"]))
    assert [matcher.push(piece).text for piece in ("ST", "ay ", "STO")] == ["", "STay ", ""]
    assert matcher.finish().text == "STO"


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(StopStrings(["x"]))
    assert matcher.push("ax").text == "a"
    assert matcher.push("b").text == ""
    assert matcher.finish().text == ""


def test_a_match_does_not_wait_for_a_longer_stop_string() -> None:
    assert StopMatcher(StopStrings(["abc", "ab"])).push("-ab").stop_string == "ab"


def test_among_stop_strings_that_end_at_once_the_one_that_begins_first_counts() -> None:
    match = StopMatcher(StopStrings(["c", "abc", "bc"])).push("-abc")
    assert (match.text, match.stop_string) == ("-", "abc")


@pytest.mark.parametrize("stop_strings", [["abcd", "bc"], ["bc", "abcd"], ["abcd", "xabcx", "c"]])
def test_a_stop_string_within_the_beginning_of_another_one_ends_the_text(stop_strings: list[str]) -> None:
    match = StopMatcher(StopStrings(stop_strings)).push("-abc-")
    assert match == ("-abc".removesuffix(stop := min(stop_strings, key=len)), stop)


def test_an_empty_stop_string_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StopMatcher(StopStrings(["ok", ""]))
    assert caught.value.field == "text_options.stop_strings"


class Counted(str):
    """A text that counts how many of its characters are looked at or copied."""

    __slots__ = ("num_read",)

    def __new__(cls, text: str) -> Counted:
        counted = super().__new__(cls, text)
        counted.num_read = 0
        return counted

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        found = super().__getitem__(key)
        self.num_read += len(found)
        return found


# The ends of a text that begin such strings are long, and each character of a text makes a shorter one.
AAA = ["a" * 1023 + "b", *("a" * (256 - number) + "b" + "a" * (256 + number) for number in range(15))]


@pytest.mark.parametrize("text", ["a" * 20_000, ("a" * 1023 + "c") * 20], ids=["held", "held and shown"])
@pytest.mark.parametrize("size", [1, 7, 500])
def test_a_character_costs_the_same_however_much_is_held_back(text: str, size: int) -> None:
    stops = StopStrings(AAA)
    counted = stops._joined = Counted(stops._joined)
    matcher = StopMatcher(stops)
    for begin in range(0, len(text), size):
        matcher.push(text[begin : begin + size])
    assert stops.num_learnt <= sum(map(len, AAA))
    # Twice to follow the text, twice to show it, and three times for each state that was learnt.
    assert counted.num_read <= 4 * len(text) + 3 * stops.num_learnt


def test_what_no_text_reaches_is_not_learnt() -> None:
    stops = StopStrings(AAA)
    StopMatcher(stops).push("b, a few a's: aaa")
    assert stops.num_learnt <= 3 * len(AAA)

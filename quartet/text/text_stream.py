"""One choice's tokens on their way to the user: detokenized, ended at stop strings, counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from quartet.text.detokenizer import IncrementalDetokenizer, make_detokenizer
from quartet.text.stop_strings import StopMatcher, StopStrings
from quartet.text.tokenizer import Tokenizer

# What tokens take is counted as the router's intake counts, in token ids of a prompt: about 0.1 microseconds each. A
# step takes so much, or a little more: so many tokens are pushed between two looks at what they took.
_STEP_WORK = 16_384
_PUSHED_AT_ONCE = 32
_MATCHED_TOKEN_WORK, _MATCHED_CHARACTER_WORK, _LEARNT_STATE_WORK = 20, 2, 6


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What may be shown now.

    Text held back comes with a later delta, so a delta's text need not be that of its ids; both only grow.

    Attributes:
        text: the next characters.
        token_ids: the next tokens that are shown and counted.
        stop_string: the stop string that ended the choice here; ``None`` while there was none.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    stop_string: str | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens shown and counted with this delta."""
        return len(self.token_ids)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not self.token_ids and not self.text and self.stop_string is None


_NOTHING = TextDelta()


class _PendingToken(NamedTuple):
    """A token whose text is not shown yet, and the position in the text where it begins."""

    token_id: int
    begin: int


class TextStream:
    """Turns tokens into deltas.

    A token counts when its text begins before the end of the text shown: the token in whose middle a stop
    string begins is the last one, those whose text begins within the stop string or after it are neither
    shown nor counted. How tokens were split into pushes makes no difference.
    """

    __slots__ = (
        "_detokenizer",
        "_has_ended",
        "_matcher",
        "_num_decoded",
        "_num_shown",
        "_pending",
        "_stops",
    )

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: StopStrings | None = None,
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        prompt_tail: Sequence[int] = (),
    ) -> None:
        """Start a choice.

        Args:
            tokenizer: ``None`` where only token ids are wanted: text stays empty.
            stops: what ends the choice; it needs a tokenizer. Choices of one request share it.
            include_stop: show the stop string too.
            skip_special_tokens: leave special tokens out of the text (not out of the ids).
            shown: special tokens that stay in it all the same, as parsers of output read them.
            prompt_tail: the prompt's last few ids, see ``make_detokenizer``.

        Raises:
            InvalidRequestError: an id is no unsigned 32-bit number.
        """
        assert tokenizer is not None or stops is None, "stop strings are searched in text"
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = make_detokenizer(
                tokenizer, skip_special_tokens=skip_special_tokens, shown=shown, prompt_tail=prompt_tail
            )
        self._stops = stops
        self._matcher = None if stops is None else StopMatcher(stops, include_stop)
        self._pending: deque[_PendingToken] = deque()
        self._num_decoded = 0
        self._num_shown = 0
        self._has_ended = False

    @property
    def makes_text(self) -> bool:
        """Whether there is any: else ``push_text`` gives nothing."""
        return self._detokenizer is not None

    @property
    def has_stop_strings(self) -> bool:
        """Whether text may be held back, and tokens with it."""
        return self._matcher is not None

    @property
    def detokenizer(self) -> IncrementalDetokenizer | None:
        """What makes the text; ``None``: nothing does. Where there are no stop strings its ``push`` may be called."""
        return self._detokenizer

    def push_text(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens where there are no stop strings, so that all are shown: their text.

        Does what ``push`` does for a small part of the price.

        Raises:
            InvalidRequestError: an id is no unsigned 32-bit number.
        """
        assert self._matcher is None, "stop strings are searched in text"
        return "" if self._detokenizer is None else self._detokenizer.push(token_ids)

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next tokens and return what may be shown; nothing once the choice has ended.

        Raises:
            InvalidRequestError: an id is no unsigned 32-bit number.
        """
        if self._has_ended:
            return _NOTHING
        if self._matcher is not None:
            return self._push_matching(self._matcher, token_ids)
        return TextDelta(self.push_text(token_ids), tuple(token_ids))

    def push_in_steps(self, token_ids: Sequence[int]) -> Generator[int, None, TextDelta]:
        """``push`` many tokens step by step; before each step the generator yields what it costs.

        Steps cost 16,384 token ids of a prompt at most, which is two milliseconds. What a step took beyond that is paid
        with the next one. Where there is no text to make, there are no steps.

        Raises:
            InvalidRequestError: an id is no unsigned 32-bit number.
        """
        if self._detokenizer is None:
            return self.push(token_ids)
        token_work = self._detokenizer.token_work + (_MATCHED_TOKEN_WORK if self.has_stop_strings else 0)
        deltas: list[TextDelta] = []
        room = 0
        for begin in range(0, len(token_ids), _PUSHED_AT_ONCE):
            if room <= 0:
                work = min((len(token_ids) - begin) * token_work, _STEP_WORK)
                yield work - room
                room = work
            work_before = self._matching_work
            pushed = token_ids[begin : begin + _PUSHED_AT_ONCE]
            deltas.append(self.push(pushed))
            if self._has_ended:
                break
            room -= len(pushed) * token_work + self._matching_work - work_before
        return _joined(deltas)

    def finish(self) -> TextDelta:
        """End the choice for another reason than a stop string and return what was held back.

        A stop string may still be found in it: the U+FFFD of a last incomplete character may be part of one.
        """
        if self._has_ended:
            return _NOTHING
        text = "" if self._detokenizer is None else self._detokenizer.finish()
        self._has_ended = True
        if self._matcher is None:
            return TextDelta(text)
        match = self._matcher.push(text)
        text = match.text + self._matcher.finish().text
        return TextDelta(text, self._take_shown(text, has_stopped=match.stopped, is_clear=True), match.stop_string)

    @property
    def _matching_work(self) -> int:
        """What the search for stop strings took so far, besides what each token takes."""
        num_learnt = 0 if self._stops is None else self._stops.num_learnt
        return self._num_decoded * _MATCHED_CHARACTER_WORK + num_learnt * _LEARNT_STATE_WORK

    def _push_matching(self, matcher: StopMatcher, token_ids: Sequence[int]) -> TextDelta:
        """Push one token at a time, to know where in the text each begins."""
        assert self._detokenizer is not None
        texts: list[str] = []
        shown_ids: list[int] = []
        for token_id in token_ids:
            self._pending.append(_PendingToken(token_id, self._num_decoded))
            decoded = self._detokenizer.push((token_id,))
            self._num_decoded += len(decoded)
            match = matcher.push(decoded)
            texts.append(match.text)
            is_clear = not matcher.num_held and not self._detokenizer.is_mid_character
            shown_ids += self._take_shown(match.text, has_stopped=match.stopped, is_clear=is_clear)
            if match.stopped:
                self._has_ended = True
                return TextDelta("".join(texts), tuple(shown_ids), match.stop_string)
        return TextDelta("".join(texts), tuple(shown_ids))

    def _take_shown(self, text: str, *, has_stopped: bool, is_clear: bool) -> tuple[int, ...]:
        """Take the pending tokens that are shown with ``text``.

        Where nothing is held back (``is_clear``), tokens without text of their own are shown as well.
        """
        self._num_shown += len(text)
        taken: list[int] = []
        while self._pending and ((is_clear and not has_stopped) or self._pending[0].begin < self._num_shown):
            taken.append(self._pending.popleft().token_id)
        return tuple(taken)


def _joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """All of them as one."""
    return TextDelta(
        "".join([delta.text for delta in deltas]),
        tuple(chain.from_iterable([delta.token_ids for delta in deltas])),
        deltas[-1].stop_string if deltas else None,
    )

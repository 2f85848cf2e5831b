"""One choice's tokens on their way to the user: detokenized, ended at stop strings, counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from quartet.errors import InvalidRequestError
from quartet.text.detokenizer import make_detokenizer
from quartet.text.tokenizer import Tokenizer


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


@dataclass(frozen=True, slots=True)
class _PendingToken:
    """A token whose text is not shown yet, and the position in the text where it begins."""

    token_id: int
    begin: int


class TextStream:
    """Turns tokens into deltas.

    A token counts when its text begins before the end of the text shown: the token in whose middle a stop
    string begins is the last one, those whose text begins within the stop string or after it are neither
    shown nor counted. How tokens were split into pushes makes no difference.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop_strings: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        """Start a choice.

        Args:
            tokenizer: ``None`` where only token ids are wanted: text stays empty.
            stop_strings: texts that end the choice; they need a tokenizer.
            include_stop: show the stop string too.
            skip_special_tokens: leave special tokens out of the text (not out of the ids).
            prompt_tail: the prompt's last few ids, see ``make_detokenizer``.

        Raises:
            InvalidRequestError: a stop string is empty, or an id is no unsigned 32-bit number.
        """
        assert tokenizer is not None or not stop_strings, "stop strings are searched in text"
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = make_detokenizer(
                tokenizer, skip_special_tokens=skip_special_tokens, prompt_tail=prompt_tail
            )
        self._matcher = StopMatcher(stop_strings, include_stop) if stop_strings else None
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

    def push_text(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens where there are no stop strings, so that all are shown: their text.

        Does what ``push`` does for a third of the price.

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


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What a piece of text brought.

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


class StopMatcher:
    """Ends a text that arrives in pieces at the first complete stop string; holds back what may yet become one.

    Of several that are complete at the same character the longest counts (it begins first). That is where
    a generation that is checked character by character stops, so the result is the same however the
    text was split, and no match waits for a longer one.
    """

    def __init__(self, stop_strings: Sequence[str], include_stop: bool = False) -> None:
        """Prepare to search for ``stop_strings``; ``include_stop`` shows the one found.

        Raises:
            InvalidRequestError: a stop string is empty.
        """
        if not all(stop_strings):
            raise InvalidRequestError("a stop string must not be empty", field="text_options.stop_strings")
        self._stop_strings = tuple(stop_strings)
        self._include_stop = include_stop
        self._first_characters = frozenset(stop_string[0] for stop_string in stop_strings)
        self._max_held = max(map(len, stop_strings), default=1) - 1
        self._held = ""
        self._has_stopped = False

    @property
    def num_held(self) -> int:
        """Characters held back, because they may be the beginning of a stop string."""
        return len(self._held)

    def push(self, text: str) -> StopMatch:
        """Take the next characters and return what may be shown; after a match always nothing."""
        if self._has_stopped:
            return StopMatch("")
        if not self._held and self._first_characters.isdisjoint(text):
            return StopMatch(text)
        pending = self._held + text
        if any(stop_string in pending for stop_string in self._stop_strings):
            return self._stop(pending)
        num_shown = self._num_certain(pending)
        self._held = pending[num_shown:]
        return StopMatch(pending[:num_shown])

    def finish(self) -> StopMatch:
        """Return what was held back: nothing can complete it any more."""
        held, self._held = self._held, ""
        return StopMatch(held)

    def _stop(self, pending: str) -> StopMatch:
        """End at the first stop string in ``pending``, which holds at least one."""
        self._has_stopped = True
        self._held = ""
        ends = {stop: pending.find(stop) + len(stop) for stop in self._stop_strings if stop in pending}
        stop_string = min(ends, key=lambda stop: (ends[stop], -len(stop)))
        end = ends[stop_string]
        return StopMatch(pending[: end if self._include_stop else end - len(stop_string)], stop_string)

    def _num_certain(self, pending: str) -> int:
        """Number of characters before the longest end of ``pending`` that begins a stop string.

        Characters before it are never checked again, so the work is linear in the text.
        """
        for begin in range(max(0, len(pending) - self._max_held), len(pending)):
            if pending[begin] in self._first_characters:
                end = pending[begin:]
                if any(stop_string.startswith(end) for stop_string in self._stop_strings):
                    return begin
        return len(pending)

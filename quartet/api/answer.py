"""The answer to one request, on its way from the code that runs it to the code that shows it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Protocol

from quartet.api.request import Accepted, AnswerPart, ChoiceFinished, ChoicePlacement, Delta, Placed
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import StalledStreamError
from quartet.streams.wakeable import Wakeable
from quartet.text.parsed import Parsed, ParsedBuilder


class DeltaSink(Protocol):
    """Takes the deltas of choices."""

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Take more of one choice, as the fields of ``Delta``. It is called for each token, so they form no object."""
        ...

    def add_parsed(
        self,
        choice: int,
        token_offset: int,
        token_ids: Sequence[int],
        parsed: Parsed,
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        """As ``add``, with reasoning or tool calls in ``parsed``; where there is only text, ``add`` is called."""
        ...

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Take those of the prompt, before the first delta of choice 0; once, if they were asked for."""
        ...


class AnswerSink(DeltaSink, Protocol):
    """Takes the answer to one request, from all its choices. No method waits.

    ``accept`` comes first, unless ``end`` does; ``end`` comes last, once. A choice's placement comes before its deltas,
    and those come before its end.
    """

    def accept(self, accepted: Accepted) -> None:
        """The first of its choices is placed; called once."""
        ...

    def placed(self, placement: ChoicePlacement) -> None:
        """One more choice is placed."""
        ...

    def finish(self, finished: ChoiceFinished) -> None:
        """One choice has ended."""
        ...

    def end(self, error: BaseException | None = None) -> None:
        """The answer is complete; with ``error``, the request failed with it."""
        ...


class Answer(Wakeable):
    """An ``AnswerSink`` for one reader: deltas that collect between two reads become one part for each choice."""

    def __init__(self, *, max_unread: int | None = None) -> None:
        """Begin empty. ``max_unread`` limits the unread tokens and characters of one choice; ``None``: no limit."""
        super().__init__()
        self._max_unread = max_unread
        self._accepted: Accepted | None = None
        self._is_accepted = False
        self._placed: list[Placed] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._deltas: dict[int, Delta] = {}
        self._parsed: dict[int, ParsedBuilder] = {}  # by choice, what goes with these
        self._finished: dict[int, ChoiceFinished] = {}
        self._has_rare = False  # whether anything but deltas waits
        self._has_more = False
        self._has_ended = False
        self._error: BaseException | None = None

    def accept(self, accepted: Accepted) -> None:
        """Open with ``accepted``; called once."""
        self._accepted = accepted
        self._is_accepted = self._has_rare = True
        self._has_news()

    def placed(self, placement: ChoicePlacement) -> None:
        """One more choice is placed."""
        if self._accepted is None:
            self._placed.append(Placed(placement=placement))
            self._has_rare = True
            self._has_news()
        else:  # ``Accepted`` has not gone out yet and can include this placement
            choices = (*self._accepted.choices, placement)
            self._accepted = replace(self._accepted, choices=tuple(sorted(choices, key=lambda placed: placed.choice)))

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Take those of the prompt."""
        self._prompt_logprobs.append(logprobs)
        self._has_rare = True
        self._has_news()

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Take more of one choice. Raises ``StalledStreamError`` if too much of it is unread."""
        delta = self._deltas.get(choice)
        if delta is None:
            self._deltas[choice] = Delta(
                choice=choice,
                token_offset=token_offset,
                token_ids=tuple(token_ids),
                text=text,
                logprobs=tuple(logprobs) if logprobs else (),
            )
        else:
            if not delta.token_ids:
                delta.token_offset = token_offset
            delta.token_ids += tuple(token_ids)
            delta.text += text
            delta.logprobs += tuple(logprobs)
            if self._max_unread is not None and len(delta.token_ids) + len(delta.text) > self._max_unread:
                raise self._unread_error()
        self._has_more = True
        if self._waiter is not None:
            self._wake()

    def add_parsed(
        self,
        choice: int,
        token_offset: int,
        token_ids: Sequence[int],
        parsed: Parsed,
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        """Take more of one choice. Raises ``StalledStreamError`` if too much of it is unread."""
        builder = self._parsed.get(choice)
        if builder is None:
            builder = self._parsed[choice] = ParsedBuilder()
        builder.add(parsed.reasoning, parsed.tool_calls)
        if self._max_unread is not None and builder.num_characters > self._max_unread and choice in self._deltas:
            raise self._unread_error()
        self.add(choice, token_offset, token_ids, parsed.text, logprobs)

    def finish(self, finished: ChoiceFinished) -> None:
        """One choice has ended."""
        self._finished[finished.choice] = finished
        self._has_rare = True
        self._has_news()

    def end(self, error: BaseException | None = None) -> None:
        """The answer is complete; with ``error``, the stream ends with it."""
        self._error = error
        self._has_ended = True
        self._has_news()

    def take(self) -> Sequence[AnswerPart] | None:
        """All that waits, in order; ``None`` at the end. After all else is taken, raises the error of ``end``."""
        if self._has_more:
            self._has_more = False
            if self._is_accepted and (parts := self._gathered()):
                return parts
        if not self._has_ended:
            return ()
        if self._error is not None:
            raise self._error
        return None

    #: ``more()`` is done when there is more to take. For one reader, which has taken everything.
    more = Wakeable._woken

    async def next(self) -> Sequence[AnswerPart]:
        """Wait for more; returns all that waits, in order. Empty at the end. Raises the error of ``end``."""
        while (parts := self.take()) is not None:
            if parts:
                return parts
            await self.more()
        return ()

    async def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """Everything, in order, for one reader. Raises the error of ``end``."""
        # It waits for the future itself: each coroutine in between would cost time for each token.
        while (parts := self.take()) is not None:
            for part in parts:
                yield part
            if not parts:
                await self.more()

    def _unread_error(self) -> StalledStreamError:
        return StalledStreamError(f"more than {self._max_unread} tokens and characters were left unread")

    def _gathered(self) -> list[AnswerPart]:
        deltas = self._deltas
        if self._parsed:
            for choice, builder in self._parsed.items():
                deltas[choice].reasoning, deltas[choice].tool_calls = builder.reasoning, builder.tool_calls
            self._parsed.clear()
        if not self._has_rare:
            parts: list[AnswerPart] = list(deltas.values())
            deltas.clear()
            return parts
        parts = [] if self._accepted is None else [self._accepted]
        parts += (*self._placed, *self._prompt_logprobs, *deltas.values(), *self._finished.values())
        self._accepted, self._has_rare = None, False
        for gathered in (self._placed, self._prompt_logprobs, deltas, self._finished):
            gathered.clear()
        return parts

    def _has_news(self) -> None:
        self._has_more = True
        self._wake()

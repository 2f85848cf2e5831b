"""What is on its way to one client: deltas that gather while a message is being written go out as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from quartet.engine.sampling import TokenLogprobs
from quartet.rpc.edge import Accepted, AnswerPart, ChoiceFinished, ChoicePlacement, Delta, Placed


@dataclass
class _Gathered:
    token_offset: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def delta(self, choice: int) -> Delta:
        return Delta(
            choice=choice,
            token_offset=self.token_offset,
            token_ids=tuple(self.token_ids),
            text="".join(self.texts),
            logprobs=tuple(self.logprobs),
        )


class Answer:
    """Parts for one client, written by many choices and read by one stream.

    Nothing comes out before ``accept``; a choice's placement comes before its deltas, and those before its end.
    """

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._accepted: Accepted | None = None
        self._is_accepted = False
        self._placed: list[Placed] = []
        self._deltas: dict[int, _Gathered] = {}
        self._finished: dict[int, ChoiceFinished] = {}
        self._has_ended = False
        self._error: BaseException | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether ``accept`` was called."""
        return self._is_accepted

    def accept(self, accepted: Accepted) -> None:
        """Open with ``accepted``; called once."""
        self._accepted = accepted
        self._is_accepted = True
        self._ready.set()

    def place(self, placement: ChoicePlacement) -> None:
        """One more choice is placed, after ``accept`` and before the first ``add`` of that choice."""
        if self._accepted is None:
            self._placed.append(Placed(placement=placement))
            self._ready.set()
        else:  # it has not gone out yet: it can say this too
            choices = (*self._accepted.choices, placement)
            self._accepted = replace(self._accepted, choices=tuple(sorted(choices, key=lambda placed: placed.choice)))

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """More of one choice, as the fields of ``Delta``; called for each token, so it makes no object of them."""
        gathered = self._deltas.get(choice)
        if gathered is None:
            gathered = self._deltas[choice] = _Gathered(token_offset)
        gathered.token_ids.extend(token_ids)
        gathered.texts.append(text)
        if logprobs:
            gathered.logprobs.extend(logprobs)
        self._ready.set()

    def finish(self, finished: ChoiceFinished) -> None:
        """One choice has ended."""
        self._finished[finished.choice] = finished
        self._ready.set()

    def end(self, error: BaseException | None = None) -> None:
        """Everything has been said; with ``error`` the stream ends with it."""
        self._error = error
        self._has_ended = True
        self._ready.set()

    async def parts(self) -> AsyncIterator[AnswerPart]:
        """Everything, in order, for one reader. Raises what ``end`` was given."""
        while not self._has_ended:
            await self._ready.wait()
            self._ready.clear()
            while parts := list(self._take()):
                for part in parts:
                    yield part
        if self._error is not None:
            raise self._error

    def _take(self) -> Iterator[AnswerPart]:
        if not self._is_accepted:
            return
        if self._accepted is not None:
            yield self._accepted
            self._accepted = None
        placed, self._placed = self._placed, []
        deltas, self._deltas = self._deltas, {}
        finished, self._finished = self._finished, {}
        yield from placed
        yield from (gathered.delta(choice) for choice, gathered in deltas.items())
        yield from finished.values()

"""Many requests at once, watched token by token, so that a test strikes at a known moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from quartet.client import (
    Accepted,
    AnswerPart,
    ChoiceFinished,
    ChoicePlacement,
    Delta,
    GenerateStream,
    MediaPart,
    Placed,
    QuartetClient,
    Rank,
    RequestPath,
    Sampling,
)
from tests import tiny


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request; the same one always gets the same tokens.

    Attributes:
        media: what the placeholders among ``token_ids`` stand for.
    """

    token_ids: tuple[int, ...]
    media: tuple[MediaPart, ...] = field(default=(), repr=False)
    sampling: Sampling
    seed: int
    stop: tuple[str, ...] = ()
    num_choices: int = 1


@dataclass
class Choice:
    """What one choice has got so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: ChoiceFinished | None = None

    @property
    def shown(self) -> tuple[object, ...]:
        """What of it must be the same whatever happened meanwhile."""
        assert self.finished is not None, "it ended"
        return (tuple(self.token_ids), self.text, self.finished.reason, self.finished.stop_string)


@dataclass
class Answer:
    """What one request has got so far.

    Attributes:
        placement: where its first choice was placed at first.
        encode: where its media were encoded at first.
    """

    choices: list[Choice]
    placement: ChoicePlacement | None = None
    encode: Rank | None = None

    @property
    def token_ids(self) -> list[int]:
        """The first choice's."""
        return self.choices[0].token_ids

    @property
    def finished(self) -> ChoiceFinished | None:
        """The end of the first choice, once all of them have ended."""
        return self.choices[0].finished if all(choice.finished for choice in self.choices) else None


def mixed_asks(name: str, count: int, *, num_prompt_tokens: range, num_tokens: range) -> list[Ask]:
    """Greedy and sampled requests in turn, of random lengths; ``name`` makes them others' or the same."""
    rng = random.Random(name)
    return [
        Ask(
            token_ids=tuple(rng.choices(tiny.PLAIN_IDS, k=rng.choice(num_prompt_tokens))),
            sampling=Sampling(
                temperature=float(number % 2),
                top_p=0.95,
                # Else many of the greedy ones would say one token for ever.
                frequency_penalty=2.0,
                max_tokens=rng.choice(num_tokens),
                ignore_eos=True,
            ),
            seed=rng.getrandbits(64),
        )
        for number in range(count)
    ]


def endless_asks(name: str, count: int) -> list[Ask]:
    """Greedy requests that run for as long as the model allows."""
    asks = mixed_asks(name, count, num_prompt_tokens=range(70, 90), num_tokens=range(4000, 4001))
    return [Ask(token_ids=ask.token_ids, sampling=Sampling(max_tokens=4000, ignore_eos=True), seed=1) for ask in asks]


class Crowd:
    """Requests that run while the block does; those that still do at its end are dropped."""

    def __init__(
        self,
        client: QuartetClient,
        asks: Sequence[Ask],
        *,
        timeout_s: float = 150.0,
        path: RequestPath = RequestPath.GENERATE,
    ) -> None:
        self.answers = [Answer([Choice() for _ in range(ask.num_choices)]) for ask in asks]
        self._client = client
        self._asks = asks
        self._timeout_s = timeout_s
        self._path = path
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: list[GenerateStream] = []

    async def __aenter__(self) -> Self:
        pairs = zip(self._asks, self.answers, strict=True)
        self._tasks = [asyncio.create_task(self._run(ask, answer)) for ask, answer in pairs]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.drop()

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens so far of each first choice, in the order of the requests."""
        return [answer.token_ids for answer in self.answers]

    @property
    def shown(self) -> list[tuple[object, ...]]:
        """Tokens, text and end of each choice, in the order of the requests. All have ended."""
        return [choice.shown for answer in self.answers for choice in answer.choices]

    @property
    def num_attempts(self) -> list[int]:
        """Attempts that each choice took that has ended."""
        ends = [choice.finished for answer in self.answers for choice in answer.choices]
        return [finished.usage.num_attempts for finished in ends if finished is not None]

    def at(self, worker_id: str) -> list[Answer]:
        """Unfinished requests that were placed at a worker at first."""
        return [
            answer
            for answer in self.answers
            if answer.finished is None
            and answer.placement is not None
            and Rank(worker_id) in (answer.encode, answer.placement.prefill, answer.placement.decode)
        ]

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
        """Wait until ``condition`` holds, checked whenever something comes. A request that fails raises here."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: condition() or self._is_over())
        assert condition(), "all requests ended before that"

    async def finish(self) -> None:
        """Wait until all have ended. Raises the error of the first that failed."""
        await asyncio.gather(*self._tasks)

    async def outcomes(self) -> list[BaseException | None]:
        """Wait until all have ended: what each failed with; ``None``: it did not."""
        return await asyncio.gather(*self._tasks, return_exceptions=True)

    async def cancel(self) -> None:
        """Ask for an early end of all of them."""
        for stream in self._streams:
            await stream.cancel()

    async def drop(self) -> None:
        """Vanish: every request that runs is dropped where it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, ask: Ask, answer: Answer) -> None:
        try:
            stream = self._client.generate(
                path=self._path,
                token_ids=ask.token_ids,
                media=ask.media,
                sampling=ask.sampling,
                seed=ask.seed,
                stop=ask.stop,
                num_choices=ask.num_choices,
                timeout_s=self._timeout_s,
            )
            self._streams.append(stream)
            async with stream:
                async for event in stream:
                    async with self._changed:
                        _take(answer, event)
                        self._changed.notify_all()
        finally:
            async with self._changed:
                self._changed.notify_all()

    def _is_over(self) -> bool:
        """Whether no answer changes any more. Raises what a request failed with."""
        for task in self._tasks:
            if task.done():
                task.result()
        return all(answer.finished is not None for answer in self.answers)


async def decode_of_all(crowds: Collection[Crowd], names: Sequence[str]) -> str:
    """Wait until each of ``crowds`` has a request that decodes at the same one of these workers; returns its name."""

    def find() -> str:
        for name in names:
            if all(any(len(answer.token_ids) > 2 for answer in crowd.at(name)) for crowd in crowds):
                return name
        return ""

    await asyncio.gather(*(crowd.wait_for(lambda: find() != "") for crowd in crowds))
    return find()


def _take(answer: Answer, event: AnswerPart) -> None:
    match event:
        case Accepted():
            answer.placement = next((placed for placed in event.choices if placed.choice == 0), None)
            answer.encode = event.encode
        case Placed():
            answer.placement = event.placement if event.placement.choice == 0 else answer.placement
        case Delta():
            choice = answer.choices[event.choice]
            assert event.token_offset == len(choice.token_ids), "tokens are missing or came twice"
            choice.token_ids += event.token_ids
            choice.text += event.text
        case ChoiceFinished():
            answer.choices[event.choice].finished = event

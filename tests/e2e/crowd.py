"""Many requests at once, watched token by token, so that a test strikes at a known moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from quartet.client import Accepted, AnswerPart, ChoiceFinished, ChoicePlacement, Delta, Place, QuartetClient, Sampling

_VOCAB = range(10, 640)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request; the same one always gets the same tokens."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass
class Answer:
    """What one request has got so far."""

    token_ids: list[int] = field(default_factory=list)
    placement: ChoicePlacement | None = None
    finished: ChoiceFinished | None = None


def mixed_asks(name: str, count: int, *, num_prompt_tokens: range, num_tokens: range) -> list[Ask]:
    """Greedy and sampled requests in turn, of random lengths; ``name`` makes them others' or the same."""
    rng = random.Random(name)
    return [
        Ask(
            token_ids=tuple(rng.choices(_VOCAB, k=rng.choice(num_prompt_tokens))),
            sampling=Sampling(
                temperature=float(number % 2), top_p=0.95, max_tokens=rng.choice(num_tokens), ignore_eos=True
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

    def __init__(self, client: QuartetClient, asks: Sequence[Ask], *, timeout_s: float = 60.0) -> None:
        self.answers = [Answer() for _ in asks]
        self._client = client
        self._asks = asks
        self._timeout_s = timeout_s
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

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
        """The tokens so far, in the order of the requests."""
        return [answer.token_ids for answer in self.answers]

    @property
    def num_attempts(self) -> list[int]:
        """Attempts that each request took."""
        return [answer.finished.usage.num_attempts for answer in self.answers if answer.finished is not None]

    def at(self, worker_id: str) -> list[Answer]:
        """Unfinished requests that were placed at a worker at first."""
        return [
            answer
            for answer in self.answers
            if answer.finished is None
            and answer.placement is not None
            and Place(worker_id) in (answer.placement.prefill, answer.placement.decode)
        ]

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until ``condition`` holds, looked at whenever something comes. A request that fails raises here."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: condition() or self._is_over())
        assert condition(), "all requests ended before that"

    async def finish(self) -> None:
        """Wait until all have ended. Raises what the first that failed was told."""
        await asyncio.gather(*self._tasks)

    async def drop(self) -> None:
        """Vanish: every request that runs is dropped where it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, ask: Ask, answer: Answer) -> None:
        fields = {"token_ids": ask.token_ids, "sampling": ask.sampling, "seed": ask.seed}
        try:
            async with self._client.generate(None, timeout_s=self._timeout_s, **fields) as stream:  # type: ignore[arg-type]
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


def _take(answer: Answer, event: AnswerPart) -> None:
    match event:
        case Accepted():
            answer.placement = event.choices[0]
        case Delta():
            assert event.token_offset == len(answer.token_ids), "tokens are missing or came twice"
            answer.token_ids += event.token_ids
        case ChoiceFinished():
            answer.finished = event

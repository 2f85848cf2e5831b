"""The answer to one request, whichever way it comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass, field, replace
from typing import Protocol

from quartet.api.request import Accepted, AnswerPart, ChoiceFinished, ChoicePlacement, Delta, Placed
from quartet.engine.sampling import TokenLogprobs
from quartet.errors import ProtocolError


class ClientRequest(Protocol):
    """One request on its way; each path has its own."""

    @property
    def router(self) -> str | None:
        """``host:port`` of the router that took it; ``None`` until one has."""
        ...

    def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """Send it and give its answer, part by part; the generator's end, whatever way it comes, ends the request."""
        ...

    async def cancel(self) -> None:
        """Ask for an early end; may come before ``parts`` is iterated, and twice."""
        ...


class GenerateStream:
    """Iterate it once: ``Accepted``, then ``Delta``s, and a ``ChoiceFinished`` for each choice.

    A choice that had to wait longer for room than the first is told by ``Placed``, before its first ``Delta``.

    Dropping it, or ``aclose``, cancels the request; ``cancel`` ends it in order. The request is sent when the first
    part is asked for. Until the first part has come, another router takes over from one that can't be reached.

    Raises, while it is iterated:
        ServingError: of the type that the router failed with; ``RouterUnavailableError`` where none answers;
            ``StalledStreamError`` where too much was left unread.
    """

    def __init__(self, request: ClientRequest) -> None:
        """Made by ``QuartetClient.generate``."""
        self._request = request
        # Nobody else may hold it: its end, which also comes when it is dropped, cancels the request.
        self._parts = request.parts()

    def __aiter__(self) -> GenerateStream:
        return self

    def __anext__(self) -> Awaitable[AnswerPart]:
        # Not a coroutine of its own around it, which would cost something for each token.
        return self._parts.__anext__()

    @property
    def router(self) -> str | None:
        """``host:port`` of the router that took the request; ``None`` until one has."""
        return self._request.router

    async def cancel(self) -> None:
        """Ask for an early end; each choice that runs still gets its ``ChoiceFinished``. Keep on iterating for it."""
        await self._request.cancel()

    async def aclose(self) -> None:
        """Drop the request, wherever it is. May be called twice."""
        await self._parts.aclose()

    async def __aenter__(self) -> GenerateStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


# Whole answers, put together from their parts.


@dataclass(frozen=True, kw_only=True)
class CompletedChoice:
    """One whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: ChoiceFinished


@dataclass(frozen=True, kw_only=True)
class Completion:
    """All answers to a request, in the order of choices.

    Attributes:
        router: ``host:port`` of the router that took the request.
        accepted: with every choice that was placed, also those that were placed later.
    """

    router: str
    accepted: Accepted
    choices: tuple[CompletedChoice, ...]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass
class _Answer:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class CompletionBuilder:
    """Takes the parts of one request's answer, in order; ``build`` once they are all there."""

    def __init__(self) -> None:
        self._accepted: Accepted | None = None
        self._placed: list[ChoicePlacement] = []
        self._answers: dict[int, _Answer] = {}
        self._finished: dict[int, ChoiceFinished] = {}

    def add(self, part: AnswerPart) -> None:
        """Take one part. Raises ``ProtocolError`` where tokens are missing before it."""
        match part:
            case Accepted():
                self._accepted = part
            case Placed():
                self._placed.append(part.placement)
            case ChoiceFinished():
                self._finished[part.choice] = part
            case Delta():
                answer = self._answers.setdefault(part.choice, _Answer())
                if part.token_ids and part.token_offset != len(answer.token_ids):
                    raise ProtocolError(f"tokens before number {part.token_offset} of the answer are missing")
                answer.texts.append(part.text)
                answer.token_ids += part.token_ids
                answer.logprobs += part.logprobs

    def build(self, router: str | None) -> Completion:
        """The answers of ``router``. Raises ``ProtocolError`` where none ever accepted the request."""
        if self._accepted is None or router is None:
            raise ProtocolError("the router answered without accepting the request")
        choices = tuple(self._choice(choice) for choice in sorted(self._finished))
        placed = sorted((*self._accepted.choices, *self._placed), key=lambda placement: placement.choice)
        accepted = replace(self._accepted, choices=tuple(placed))
        return Completion(router=router, accepted=accepted, choices=choices)

    def _choice(self, choice: int) -> CompletedChoice:
        answer = self._answers.get(choice, _Answer())
        return CompletedChoice(
            text="".join(answer.texts),
            token_ids=tuple(answer.token_ids),
            logprobs=tuple(answer.logprobs),
            finished=self._finished[choice],
        )

"""The answer to one request, on any path."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from quartet.api.request import Accepted, AnswerPart, ChoiceFinished, ChoicePlacement, Delta, Placed
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import ProtocolError
from quartet.text.chat_message import ToolCall
from quartet.text.json_object import JsonObject
from quartet.text.parsed import ParsedBuilder


class ClientRequest(Protocol):
    """One request under way; each path has its own class."""

    @property
    def router(self) -> str | None:
        """``host:port`` of the router that took it, or went on with it; ``None`` until one has."""
        ...

    @property
    def lost_routers(self) -> Sequence[str]:
        """``host:port`` of the routers that were lost after they had begun the answer."""
        ...

    def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """Send the request and yield its answer, part by part. However the generator ends, the request ends with it."""
        ...

    async def cancel(self) -> None:
        """Ask for an early end; may come before ``parts`` is iterated, and twice."""
        ...


class GenerateStream:
    """Iterate it once: ``Accepted``, then ``Delta``s, and a ``ChoiceFinished`` for each choice.

    For a choice that waited for room longer than the first, ``Placed`` comes before its first ``Delta``.
    ``PromptLogprobs``, if they were asked for, come before the first ``Delta`` of choice 0.

    Dropping it, or ``aclose``, cancels the request; ``cancel`` lets each choice end normally. The request is sent when
    the first part is asked for. If a router can't be reached before the first part has come, another one takes over. If
    it is lost later, another one goes on: the parts that follow are those that would have followed.

    Raises, while it is iterated:
        ServingError: of the type with which the router failed; ``RouterUnavailableError`` if none answers, or none goes
            on; ``StalledStreamError`` if too much was left unread.
    """

    def __init__(self, request: ClientRequest) -> None:
        """``QuartetClient.generate`` makes it."""
        self._request = request
        # Hold the only reference: the generator's end, also when it is dropped, cancels the request.
        self._parts = request.parts()

    def __aiter__(self) -> GenerateStream:
        return self

    def __anext__(self) -> Awaitable[AnswerPart]:
        # Return the generator's own coroutine: one around it would cost time for each token.
        return self._parts.__anext__()

    @property
    def router(self) -> str | None:
        """``host:port`` of the router that took the request, or went on with it; ``None`` until one has."""
        return self._request.router

    @property
    def lost_routers(self) -> Sequence[str]:
        """``host:port`` of the routers that were lost after they had begun the answer, in that order."""
        return self._request.lost_routers

    async def cancel(self) -> None:
        """Ask for an early end. Each running choice still gets its ``ChoiceFinished``, so continue to iterate."""
        await self._request.cancel()

    async def aclose(self) -> None:
        """Drop the request, whatever its state. May be called twice."""
        await self._parts.aclose()

    async def __aenter__(self) -> GenerateStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


# Whole answers, put together from their parts.


@dataclass(frozen=True, kw_only=True)
class CompletedChoice:
    """One whole answer.

    Attributes:
        reasoning: what the model thought before it.
        tool_calls: those that are complete, to be run.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: ChoiceFinished
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """All answers to a request, in the order of choices.

    Attributes:
        router: ``host:port`` of the router that took the request, or went on with it last.
        accepted: with every placed choice, also those placed later.
        prompt_logprobs: of the prompt's tokens, if they were asked for.
    """

    router: str
    accepted: Accepted
    choices: tuple[CompletedChoice, ...]
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass
class _Answer:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    parsed: ParsedBuilder = field(default_factory=ParsedBuilder)


class CompletionBuilder:
    """Takes the parts of one request's answer, in order; call ``build`` after the last one."""

    def __init__(self) -> None:
        self._accepted: Accepted | None = None
        self._placed: list[ChoicePlacement] = []
        self._prompt_logprobs: PromptLogprobs | None = None
        self._answers: dict[int, _Answer] = {}
        self._finished: dict[int, ChoiceFinished] = {}

    def add(self, part: AnswerPart) -> None:
        """Take one part. Raises ``ProtocolError`` if tokens before it are missing."""
        match part:
            case Accepted():
                self._accepted = part
            case Placed():
                self._placed.append(part.placement)
            case PromptLogprobs():
                self._prompt_logprobs = part
            case ChoiceFinished():
                self._finished[part.choice] = part
            case Delta():
                answer = self._answers.setdefault(part.choice, _Answer())
                if part.token_ids and part.token_offset != len(answer.token_ids):
                    raise ProtocolError(f"tokens before number {part.token_offset} of the answer are missing")
                answer.texts.append(part.text)
                answer.token_ids += part.token_ids
                answer.logprobs += part.logprobs
                answer.parsed.add(part.reasoning, part.tool_calls)

    def build(self, router: str | None) -> Completion:
        """The answers of ``router``. Raises ``ProtocolError`` if none accepted the request."""
        if self._accepted is None or router is None:
            raise ProtocolError("the router answered without accepting the request")
        choices = tuple(self._choice(choice) for choice in sorted(self._finished))
        placed = sorted((*self._accepted.choices, *self._placed), key=lambda placement: placement.choice)
        accepted = replace(self._accepted, choices=tuple(placed))
        return Completion(router=router, accepted=accepted, choices=choices, prompt_logprobs=self._prompt_logprobs)

    def _choice(self, choice: int) -> CompletedChoice:
        answer = self._answers.get(choice, _Answer())
        return CompletedChoice(
            text="".join(answer.texts),
            token_ids=tuple(answer.token_ids),
            logprobs=tuple(answer.logprobs),
            finished=self._finished[choice],
            reasoning=answer.parsed.reasoning,
            tool_calls=tuple(
                ToolCall(call.name, JsonObject.of_text(call.arguments), call.id)
                for call in answer.parsed.tool_calls
                if call.is_complete
            ),
        )

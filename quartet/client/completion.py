"""Whole answers, put together from their parts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from quartet.engine.sampling import TokenLogprobs
from quartet.errors import ProtocolError
from quartet.rpc.edge import Accepted, AnswerPart, ChoiceFinished, ChoicePlacement, Delta, Placed


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

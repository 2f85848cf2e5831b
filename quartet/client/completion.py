"""Whole answers, put together from their events."""

from __future__ import annotations

from dataclasses import dataclass, field

from quartet.client.events import Accepted, CompletedChoice, Completion, Delta, Event, Finished
from quartet.engine.sampling import TokenLogprobs
from quartet.errors import ProtocolError


@dataclass
class _Answer:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class CompletionBuilder:
    """Takes the events of one request, in order; ``build`` once they are all there."""

    def __init__(self) -> None:
        self._accepted: Accepted | None = None
        self._answers: dict[int, _Answer] = {}
        self._finished: dict[int, Finished] = {}

    def add(self, event: Event) -> None:
        """Take one event. Raises ``ProtocolError`` where tokens are missing before it."""
        match event:
            case Accepted():
                self._accepted = event
            case Finished():
                self._finished[event.choice] = event
            case Delta():
                answer = self._answers.setdefault(event.choice, _Answer())
                if event.token_ids and event.token_offset != len(answer.token_ids):
                    raise ProtocolError(f"tokens before number {event.token_offset} of the answer are missing")
                answer.texts.append(event.text)
                answer.token_ids += event.token_ids
                answer.logprobs += event.logprobs

    def build(self) -> Completion:
        """The answers. Raises ``ProtocolError`` where the router never accepted the request."""
        if self._accepted is None:
            raise ProtocolError("the router answered without accepting the request")
        return Completion(
            accepted=self._accepted, choices=tuple(self._choice(choice) for choice in sorted(self._finished))
        )

    def _choice(self, choice: int) -> CompletedChoice:
        answer = self._answers.get(choice, _Answer())
        return CompletedChoice(
            text="".join(answer.texts),
            token_ids=tuple(answer.token_ids),
            logprobs=tuple(answer.logprobs),
            finished=self._finished[choice],
        )

"""The APIs that HTTP speaks: how each writes the answers of the pipeline, whole or as events, and their failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from quartet.api.answer import AnswerSink
from quartet.api.anthropic.answers import MessageHead, StreamedMessage, whole_message
from quartet.api.blocks import KeptBlocks
from quartet.api.openai.answers import (
    Head,
    StreamedAnswer,
    TokenBytes,
    WholeAnswer,
    placement_event,
    to_event,
    usage_event,
    whole_response,
)
from quartet.api.openai.requests import Asked
from quartet.api.responses import answers as responses
from quartet.rpc.errors import public_error
from router.http.errors import ErrorShape, error_body, http_code
from router.http.events import EventStream


class Answering(AnswerSink, Protocol):
    """Takes the answer to one prompt, and says how far it is (``quartet.api.openai.answers.Answer``)."""

    is_queued: asyncio.Future[None]
    is_open: asyncio.Future[None]
    has_ended: asyncio.Future[None]

    def queue(self) -> None:
        """The request has passed all checks."""
        ...


@dataclass(frozen=True, slots=True)
class WholeReply:
    """A response that is written once all of it is there.

    Attributes:
        head: what it begins with.
        answers: one for each prompt.
        body: writes it.
    """

    head: Head
    answers: Sequence[Answering]
    body: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """A response whose answers send events.

    Attributes:
        head: what its parts have in common.
        answers: one for each prompt.
        end: sends the last events, with the error if it failed.
    """

    head: Head
    answers: Sequence[Answering]
    end: Callable[[BaseException | None], None]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API answers.

    Attributes:
        whole: begins a response to a request, of a model of that name.
        streamed: the same, whose events go to a stream.
        id_headers: that bear the request's id.
    """

    whole: Callable[[Asked, str, TokenBytes | None], WholeReply]
    streamed: Callable[[Asked, str, TokenBytes | None, EventStream], StreamedReply]
    id_headers: tuple[str, ...] = ("X-Request-Id",)


def _first_choices(asked: Asked) -> range:
    """The number that the first choice of each prompt has in the response."""
    step = max(1, asked.num_choices)  # 0 is refused later
    return range(0, step * len(asked.starts), step)


def _whole_completion(asked: Asked, model: str, token_bytes: TokenBytes | None) -> WholeReply:
    head = Head(asked, model, token_bytes)
    answers = [
        WholeAnswer(head, first, start.prompt if asked.echoes else None)
        for first, start in zip(_first_choices(asked), asked.starts, strict=True)
    ]
    return WholeReply(head, answers, partial(whole_response, head, answers))


def _streamed_completion(
    asked: Asked, model: str, token_bytes: TokenBytes | None, stream: EventStream
) -> StreamedReply:
    head = Head(asked, model, token_bytes)
    answers = [StreamedAnswer(head, stream, first) for first in _first_choices(asked)]

    def end(error: BaseException | None) -> None:
        if asked.shows_placement:
            stream.send(placement_event(head, answers))
        if error is not None:
            stream.send(to_event(error_body(error)))
        elif asked.shows_usage:
            stream.send(usage_event(head, answers))
        stream.send("data: [DONE]\n\n")

    return StreamedReply(head, answers, end)


def _whole_response(asked: Asked, model: str, _token_bytes: TokenBytes | None) -> WholeReply:
    head = responses.ResponseHead(asked, model)
    answer = KeptBlocks(head)
    return WholeReply(head, [answer], partial(responses.whole_response, head, answer))


def _streamed_response(asked: Asked, model: str, _token_bytes: TokenBytes | None, stream: EventStream) -> StreamedReply:
    head = responses.ResponseHead(asked, model)
    answer = responses.StreamedResponse(head, stream)

    def end(error: BaseException | None) -> None:
        if error is not None:
            shown = public_error(error)
            answer.fail(http_code(shown), error_body(shown, ErrorShape.RESPONSES)["error"])

    return StreamedReply(head, [answer], end)


def _whole_message(asked: Asked, model: str, _token_bytes: TokenBytes | None) -> WholeReply:
    head = MessageHead(asked, model)
    answer = KeptBlocks(head)
    return WholeReply(head, [answer], partial(whole_message, head, answer))


def _streamed_message(asked: Asked, model: str, _token_bytes: TokenBytes | None, stream: EventStream) -> StreamedReply:
    head = MessageHead(asked, model)
    answer = StreamedMessage(head, stream)

    def end(error: BaseException | None) -> None:
        if error is not None:
            answer.fail(error_body(error, ErrorShape.MESSAGES))

    return StreamedReply(head, [answer], end)


#: OpenAI's completions, of texts and of chats.
COMPLETIONS = Dialect(_whole_completion, _streamed_completion)
#: OpenAI's responses.
RESPONSES = Dialect(_whole_response, _streamed_response)
#: Anthropic's messages.
MESSAGES = Dialect(_whole_message, _streamed_message, id_headers=("X-Request-Id", "request-id"))

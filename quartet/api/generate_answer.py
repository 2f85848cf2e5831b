"""The answer to one request as the messages of Generate."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

from quartet.api.convert.answer import put_delta, put_parsed, to_generate_response
from quartet.api.request import Accepted, ChoiceFinished, ChoicePlacement, Placed
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.streams.wakeable import Wakeable
from quartet.text.parsed import Parsed, ParsedBuilder
from quartet.v1 import router_pb2


class GenerateAnswer(Wakeable):
    """An ``AnswerSink`` for one stream of Generate.

    Tokens go into a message that is ready to be sent. While it waits, later tokens of the same choice go into it too.
    This runs for each token, so intermediate objects would be most of its cost. Only their text waits beside the
    message: protobuf copies all of a text that grows, and keeps each copy for as long as the message lives.
    """

    __slots__ = ("_accepted", "_deltas", "_error", "_has_ended", "_messages", "_parsed", "_texts")

    def __init__(self) -> None:
        """Begin with nothing to send."""
        super().__init__()
        self._accepted: Accepted | None = None  # until it is sent
        self._messages: deque[router_pb2.GenerateResponse] = deque()
        self._deltas: dict[int, router_pb2.Delta] = {}  # by choice, within messages that wait
        self._texts: dict[int, StringIO] = {}  # by choice, what comes after the text in these
        self._parsed: dict[int, ParsedBuilder] = {}  # by choice, the reasoning and tool calls of these
        self._has_ended = False
        self._error: BaseException | None = None

    def accept(self, accepted: Accepted) -> None:
        """Open with ``accepted``; called once."""
        self._accepted = accepted
        self._wake()

    def placed(self, placement: ChoicePlacement) -> None:
        """One more choice is placed."""
        if self._accepted is None:
            self._send(to_generate_response(Placed(placement=placement)))
        else:  # ``Accepted`` has not gone out yet and can include this placement
            choices = (*self._accepted.choices, placement)
            self._accepted = replace(self._accepted, choices=tuple(sorted(choices, key=lambda placed: placed.choice)))

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Take those of the prompt."""
        self._send(to_generate_response(logprobs))

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Take more of one choice."""
        delta = self._deltas.get(choice)
        if delta is None:
            message = router_pb2.GenerateResponse()
            delta = self._deltas[choice] = message.delta
            if choice:
                delta.choice = choice
            delta.token_offset = token_offset
            self._messages.append(message)
            put_delta(delta, token_ids, text, logprobs)
        else:
            put_delta(delta, token_ids, "", logprobs)
            if text:
                more = self._texts.get(choice)
                if more is None:
                    more = self._texts[choice] = StringIO()
                more.write(text)
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
        """Take more of one choice."""
        builder = self._parsed.get(choice)
        if builder is None:
            builder = self._parsed[choice] = ParsedBuilder()
        builder.add(parsed.reasoning, parsed.tool_calls)
        self.add(choice, token_offset, token_ids, parsed.text, logprobs)

    def finish(self, finished: ChoiceFinished) -> None:
        """One choice has ended."""
        self._send(to_generate_response(finished))

    def end(self, error: BaseException | None = None) -> None:
        """The answer is complete; with ``error``, the stream ends with it."""
        self._error = error
        self._has_ended = True
        self._wake()

    async def next(self) -> router_pb2.GenerateResponse | None:
        """Wait for the next message; ``None`` at the end. Raises the error of ``end``. For one reader."""
        while True:
            if self._accepted is not None:
                accepted, self._accepted = self._accepted, None
                return to_generate_response(accepted)
            if self._messages:
                message = self._messages.popleft()
                if self._deltas and message.HasField("delta"):
                    del self._deltas[message.delta.choice]
                    if self._texts and (more := self._texts.pop(message.delta.choice, None)) is not None:
                        message.delta.text += more.getvalue()
                    if self._parsed and (parsed := self._parsed.pop(message.delta.choice, None)) is not None:
                        put_parsed(message.delta, parsed.reasoning, parsed.tool_calls)
                return message
            if self._has_ended:
                if self._error is not None:
                    raise self._error
                return None
            await self._woken()

    def _send(self, message: router_pb2.GenerateResponse) -> None:
        self._messages.append(message)
        self._wake()

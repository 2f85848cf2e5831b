"""One choice's text on its way to a sink: parsed into content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from quartet.api.answer import DeltaSink
from quartet.api.request import Resume
from quartet.engine.base import FinishReason
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import InvalidRequestError
from quartet.text.parse import CallArguments, Content, Event, Reasoning
from quartet.text.parsed import GivenParts, OutputParsing, Parsed

# Text of a resumed choice is parsed in pieces of so many characters. A character costs as much as so many token ids of
# a prompt, 0.1 microseconds each.
_PIECE_LENGTH, _CHARACTER_WORK = 2_048, 6


class ParsingSink:
    """A ``DeltaSink`` of one choice before another one. Tokens and their log probabilities pass at once."""

    __slots__ = ("_add", "_add_parsed", "_choice", "_given", "_owed", "_push", "_text", "add_prompt_logprobs")

    def __init__(self, parsing: OutputParsing, choice: int, sink: DeltaSink) -> None:
        """``sink`` takes what may be shown."""
        self._text = parsing.start(choice)
        self._choice = choice
        # Copied to attributes of this object, because each token needs them.
        self._push = self._text.push
        self._add = sink.add
        self._add_parsed = sink.add_parsed
        self.add_prompt_logprobs: Callable[[PromptLogprobs], None] = sink.add_prompt_logprobs
        self._given: GivenParts | None = None
        self._owed: Parsed | None = None

    @property
    def owes(self) -> bool:
        """Whether ``give_owed`` has something for a client that resumed."""
        return self._owed is not None

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Take more of the choice, as ``DeltaSink`` says."""
        events = self._push(text) if text else ()
        if not events:
            if token_ids or logprobs:
                self._add(choice, token_offset, token_ids, "", logprobs)
            return
        if len(events) == 1 and self._given is None:
            event = events[0]
            # Mostly it is one of these.
            if type(event) is Content:
                self._add(choice, token_offset, token_ids, event.text, logprobs)
                return
            if type(event) is Reasoning:
                self._add_parsed(choice, token_offset, token_ids, Parsed("", event.text), logprobs)
                return
            if type(event) is CallArguments and (delta := self._text.more_arguments(event)) is not None:
                self._add_parsed(choice, token_offset, token_ids, Parsed("", "", (delta,)), logprobs)
                return
        self._show(token_offset, token_ids, events, logprobs)

    def add_parsed(
        self,
        choice: int,
        token_offset: int,
        token_ids: Sequence[int],
        parsed: Parsed,
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        """Never called: what comes here was not parsed."""
        raise AssertionError("it is parsed once")

    def resume(self, text: str, resume: Resume) -> Generator[int, None, None]:
        """Take the text that was known when the choice was resumed; called before anything else.

        What of it the client lacks is owed. Before each step the generator gives what that costs, in token ids of a
        prompt.

        Raises:
            InvalidRequestError: what the client says it has ends within a character; names ``field``.
        """
        given = GivenParts(
            resume.num_text_bytes, resume.num_reasoning_bytes, resume.num_tool_calls, resume.num_argument_bytes
        )
        events: list[Event] = []
        for begin in range(0, len(text), _PIECE_LENGTH):
            piece = text[begin : begin + _PIECE_LENGTH]
            yield _CHARACTER_WORK * len(piece)
            events += self._push(piece)
        try:
            owed = given.leave_out(self._text.join(events), errors="strict")
        except UnicodeDecodeError as error:
            message = "what was given ends within a character"
            raise InvalidRequestError(message, field="resume.num_text_bytes") from error
        self._owed = owed if owed.text or owed.reasoning or owed.tool_calls else None
        # What was held back here may have been shown by then.
        self._given = None if given.is_over else given

    def give_owed(self, token_offset: int) -> None:
        """Show what a client that resumed lacks."""
        owed, self._owed = self._owed, None
        if owed is not None:
            self._add_parsed(self._choice, token_offset, (), owed, ())

    def finish(self, token_offset: int, reason: FinishReason) -> FinishReason:
        """The choice has ended for ``reason``: show what was held back. Returns the reason for its client."""
        events = self._text.finish()
        if events:
            self._show(token_offset, (), events, ())
        if reason is FinishReason.STOP_ID and self._text.num_complete_calls:
            return FinishReason.TOOL_CALLS
        return reason

    def _show(
        self, token_offset: int, token_ids: Sequence[int], events: Sequence[Event], logprobs: Sequence[TokenLogprobs]
    ) -> None:
        parsed = self._text.join(events)
        if self._given is not None:
            parsed = self._given.leave_out(parsed)
            if self._given.is_over:
                self._given = None
        if parsed.reasoning or parsed.tool_calls:
            self._add_parsed(self._choice, token_offset, token_ids, parsed, logprobs)
        elif parsed.text or token_ids or logprobs:
            self._add(self._choice, token_offset, token_ids, parsed.text, logprobs)

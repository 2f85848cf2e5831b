"""Answers of the pipeline as OpenAI's responses: whole, or as the events of a stream."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

from quartet.api.openai.json_parts import JsonParts
from quartet.api.openai.requests import Asked
from quartet.api.request import Accepted, ChoiceFinished, ChoicePlacement, Prompt, TextPrompt, TokenPrompt, Usage
from quartet.discovery.base import Rank
from quartet.engine.base import FinishReason
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.text.parsed import Parsed, ParsedBuilder, ToolCallDelta

#: The bytes that a token adds to a text.
TokenBytes: TypeAlias = Callable[[int], bytes]

_FINISH_REASONS: Mapping[FinishReason, str] = {
    FinishReason.STOP_ID: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.CANCELLED: "cancelled",
}

_NO_BYTES = b""
_NOTHING_PARSED = Parsed()

_NOT_TOLD = -9999.0

# Quotes a text as ASCII, in C: a tenth of what `json.dumps` takes.
_quote = json.encoder.encode_basestring_ascii


def _no_bytes(_token_id: int) -> bytes:
    return _NO_BYTES


class Events(Protocol):
    """Takes the events of a stream: ASCII, with their ``data:`` and their empty line."""

    def send(self, event: str) -> None:
        """Send ``event`` in this turn of the event loop. Never waits."""
        ...


class Head:
    """What all parts of one response begin with."""

    __slots__ = ("asked", "chunk_kind", "created", "id", "model", "token_bytes")

    def __init__(self, asked: Asked, model: str, token_bytes: TokenBytes | None = None) -> None:
        """``token_bytes`` is asked for log probabilities."""
        self.asked = asked
        self.id = ""
        self.created = int(time.time())
        self.chunk_kind = "chat.completion.chunk" if asked.is_chat else "text_completion"
        self.model = model
        self.token_bytes = token_bytes or _no_bytes

    def set_request_id(self, request_id: str) -> None:
        """The request has got its id, before any part of the answer comes."""
        self.id = f"{'chatcmpl' if self.asked.is_chat else 'cmpl'}-{request_id}"

    def text_of(self, prompt: Prompt) -> str:
        """The text of a prompt that is no chat."""
        if isinstance(prompt, TextPrompt):
            return prompt.text
        assert isinstance(prompt, TokenPrompt), "chats are not echoed"
        return b"".join(map(self.token_bytes, prompt.token_ids)).decode(errors="replace")

    def response(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A response, or a part of one."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


class Answer:
    """What both sinks share: what was accepted, how each choice ended, and the end."""

    __slots__ = ("_first_choice", "_head", "accepted", "finished", "has_ended", "is_open", "is_queued", "placements")

    def __init__(self, head: Head, first_choice: int = 0) -> None:
        """The choices of this request are numbered from ``first_choice`` in the response."""
        self._head = head
        self._first_choice = first_choice
        self.accepted: Accepted | None = None
        self.finished: dict[int, ChoiceFinished] = {}
        #: Where its choices were placed first, by choice, if the client wants to know.
        self.placements: dict[int, ChoicePlacement] = {}
        loop = asyncio.get_running_loop()
        #: Done once the request has passed all checks and waits for a worker, or has ended.
        self.is_queued: asyncio.Future[None] = loop.create_future()
        #: Done once the request is placed, or has ended.
        self.is_open: asyncio.Future[None] = loop.create_future()
        #: Done once the request has ended; with its error, if it failed.
        self.has_ended: asyncio.Future[None] = loop.create_future()

    def queue(self) -> None:
        """The request has passed all checks: from now on it waits for a worker."""
        if not self.is_queued.done():
            self.is_queued.set_result(None)

    def accept(self, accepted: Accepted) -> None:
        """The first of its choices is placed."""
        self.accepted = accepted
        for placement in accepted.choices:
            self.placed(placement)
        if not self.is_open.done():
            self.is_open.set_result(None)

    def placed(self, placement: ChoicePlacement) -> None:
        """One more choice is placed."""
        if self._head.asked.shows_placement:
            self.placements[placement.choice] = placement

    def whereabouts(self) -> list[dict[str, Any]]:
        """Where each choice was placed and, once it has ended, where its time went."""
        encode = None if self.accepted is None else self.accepted.encode
        return [
            {
                "index": self._first_choice + choice,
                "placement": _placement_json(self.placements.get(choice), encode),
                **_end_json(self.finished.get(choice)),
            }
            for choice in sorted(self.placements.keys() | self.finished.keys())
        ]

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Never called: only whole answers have them."""
        raise AssertionError("nobody has asked for them")

    def finish(self, finished: ChoiceFinished) -> None:
        """One choice has ended."""
        self.finished[finished.choice] = finished

    def end(self, error: BaseException | None = None) -> None:
        """The answer is complete, or failed."""
        for future in (self.has_ended, self.is_open, self.is_queued):
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                future.exception()  # whoever waits gets it; if nobody does, that is no error

    def usages(self) -> list[Usage]:
        """What its choices used, as far as they have ended, in order."""
        return [self.finished[choice].usage for choice in sorted(self.finished)]


def _placement_json(placement: ChoicePlacement | None, encode: Rank | None) -> dict[str, Any] | None:
    """``None``: a choice that was resumed, and had nothing left to do."""
    if placement is None:
        return None
    return {
        "encode": None if encode is None else str(encode),
        "prefill": None if placement.prefill is None else str(placement.prefill),
        "decode": str(placement.decode),
        "num_matched_tokens": placement.num_matched_tokens,
        "cost": placement.cost,
    }


def _end_json(finished: ChoiceFinished | None) -> dict[str, Any]:
    return {} if finished is None else {"time": asdict(finished.time), "num_attempts": finished.usage.num_attempts}


class WholeAnswer(Answer):
    """An ``AnswerSink`` that gathers an answer."""

    def __init__(self, head: Head, first_choice: int = 0, prompt: Prompt | None = None) -> None:
        """``prompt`` is what each choice begins with; ``None``: with the output."""
        super().__init__(head, first_choice)
        self._echoed = prompt
        self._prompt_logprobs: PromptLogprobs | None = None
        self._texts: dict[int, list[str]] = {}
        # Lists that may be long, as JSON: parts of each, by choice; of log probabilities also by field.
        self._token_ids: dict[int, list[str]] = {}
        self._logprobs: dict[int, dict[str, list[str]]] = {}
        self._offsets: dict[int, int] = {}  # of the next token with log probabilities, in characters
        self._parsed: dict[int, ParsedBuilder] = {}

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Take more of one choice."""
        if self._head.asked.hides_output:
            return
        if text:
            self._texts.setdefault(choice, []).append(text)
        if self._head.asked.shows_token_ids and token_ids:
            self._token_ids.setdefault(choice, []).append(", ".join(map(str, token_ids)))
        if logprobs:
            self._add_logprobs(choice, logprobs)

    @cached_property
    def _prompt(self) -> str:
        """The text that each choice begins with; only once the prompt has passed all checks."""
        return "" if self._echoed is None else self._head.text_of(self._echoed)

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Take those of the prompt."""
        self._prompt_logprobs = logprobs

    def add_parsed(
        self,
        choice: int,
        token_offset: int,
        token_ids: Sequence[int],
        parsed: Parsed,
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        """Take more of one choice, with reasoning or tool calls in it."""
        self.add(choice, token_offset, token_ids, parsed.text, logprobs)
        if choice not in self._parsed:
            self._parsed[choice] = ParsedBuilder()
        self._parsed[choice].add(parsed.reasoning, parsed.tool_calls)

    def choices(self, parts: JsonParts) -> list[dict[str, Any]]:
        """Its choices, for the response, with places of ``parts`` for long lists."""
        prompt = {} if self._prompt_logprobs is None else _echoed_json(self._head, self._prompt, self._prompt_logprobs)
        return [self._choice(finished, parts, prompt) for _, finished in sorted(self.finished.items())]

    def usages(self) -> list[Usage]:
        """What its choices used, in order; a token that is hidden is not counted."""
        usages = super().usages()
        return [replace(usage, num_output_tokens=0) for usage in usages] if self._head.asked.hides_output else usages

    def _add_logprobs(self, choice: int, logprobs: Sequence[TokenLogprobs]) -> None:
        offset = self._offsets.get(choice, len(self._prompt))
        shown = logprobs_json(self._head, logprobs, offset) or {}
        fields = self._logprobs.setdefault(choice, {})
        for name, items in shown.items():
            if items is not None:
                fields.setdefault(name, []).append(json.dumps(items, allow_nan=False)[1:-1])
        self._offsets[choice] = offset + sum(map(len, shown.get("tokens", ())))

    def _choice(self, finished: ChoiceFinished, parts: JsonParts, prompt: Mapping[str, str]) -> dict[str, Any]:
        """``prompt`` has the log probabilities that come first, by field, as JSON."""
        number, asked = finished.choice, self._head.asked
        text = "".join(self._texts.get(number, ()))
        shown: dict[str, Any] = {"index": self._first_choice + number}
        if asked.is_chat:
            shown["message"] = self._message(text, self._parsed.get(number))
        else:
            shown["text"] = self._prompt + text
        shown["logprobs"] = None
        fields = self._logprobs.get(number, {})
        if prompt:
            fields = {name: [first, *fields.get(name, ())] for name, first in prompt.items()}
        if fields:
            shown["logprobs"] = {name: parts.place(items) for name, items in fields.items()}
            if asked.is_chat:
                shown["logprobs"]["refusal"] = None
        reason = FinishReason.LENGTH if asked.hides_output else finished.reason
        shown["finish_reason"] = _FINISH_REASONS[reason]
        shown["stop_reason"] = None if asked.hides_output else finished.stop_string
        if asked.shows_token_ids:
            shown["token_ids"] = parts.place(self._token_ids.get(number, ()))
        return shown

    def _message(self, text: str, parsed: ParsedBuilder | None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if parsed is not None:
            if parsed.reasoning:
                message["reasoning_content"] = parsed.reasoning
            if parsed.tool_calls:
                message["content"] = text or None
                message["tool_calls"] = [_call_json(call) for call in parsed.tool_calls]
        return message


def _call_json(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta_json(call: ToolCallDelta) -> dict[str, Any]:
    """More of a call: its id and name come with its first part only."""
    shown: dict[str, Any] = {"index": call.index}
    if call.name:
        return {**shown, **_call_json(call)}
    return {**shown, "function": {"arguments": call.arguments}}


def whole_response(head: Head, answers: Sequence[WholeAnswer]) -> bytes:
    """The response to a request whose answers are complete, as JSON."""
    parts = JsonParts()
    choices = [choice for answer in answers for choice in answer.choices(parts)]
    fingerprint = answers[0].accepted.model_fingerprint if answers[0].accepted is not None else ""
    more = placement_json(answers) if head.asked.shows_placement else {}
    response = head.response(
        "chat.completion" if head.asked.is_chat else "text_completion",
        choices,
        usage=usage_json([answer.usages() for answer in answers]),
        system_fingerprint=f"fp_{fingerprint[:16]}",
        **more,
    )
    return parts.encode(response)


class StreamedAnswer(Answer):
    """An ``AnswerSink`` that sends each part as an event. It runs for each token, so most events are a template."""

    __slots__ = (
        "_begin",
        "_end",
        "_ends",
        "_frames",
        "_is_plain",
        "_num_tokens",
        "_offsets",
        "_reasoning_frames",
        "_stream",
    )

    def __init__(self, head: Head, stream: Events, first_choice: int = 0) -> None:
        super().__init__(head, first_choice)
        self._stream = stream
        asked = head.asked
        self._is_plain = not (asked.shows_token_ids or asked.shows_usage_always or asked.num_logprobs is not None)
        self._ends = ',"usage":null}\n\n' if asked.shows_usage else "}\n\n"
        self._begin = self._end = ""
        self._frames: dict[int, tuple[str, str]] = {}
        self._reasoning_frames: dict[int, tuple[str, str]] = {}
        self._num_tokens: dict[int, int] = {}
        self._offsets: dict[int, int] = {}  # of the next token with log probabilities, in characters

    def accept(self, accepted: Accepted) -> None:
        """The request runs: a chat's choices begin with their role."""
        super().accept(accepted)
        if self._head.asked.shows_placement:  # a client that stops the answer wants to know as well
            self._stream.send(placement_event(self._head, [self]))
        if self._head.asked.is_chat:
            for choice in range(self._head.asked.num_choices):
                self._send(choice, {"delta": {"role": "assistant", "content": ""}})

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Send more of one choice."""
        if self._is_plain:
            if text:
                # The first choice's are kept apart: mostly there is no other, and each object more takes time.
                begin, end = self._begin, self._end
                if choice or not begin:
                    begin, end = self._frames.get(choice) or self._frame(choice)
                self._stream.send(f"{begin}{_quote(text)}{end}")
            return
        self._add_with_details(choice, token_offset, token_ids, text, logprobs)

    def add_parsed(
        self,
        choice: int,
        token_offset: int,
        token_ids: Sequence[int],
        parsed: Parsed,
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        """Send more of one choice, with reasoning or tool calls in it."""
        if self._is_plain and not parsed.text and not parsed.tool_calls:
            if parsed.reasoning:  # most tokens of a model that thinks
                begin, end = self._reasoning_frames.get(choice) or self._frame(choice, is_reasoning=True)
                self._stream.send(f"{begin}{_quote(parsed.reasoning)}{end}")
            return
        self._add_with_details(choice, token_offset, token_ids, parsed.text, logprobs, parsed)

    def _add_with_details(
        self,
        choice: int,
        token_offset: int,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs],
        parsed: Parsed = _NOTHING_PARSED,
    ) -> None:
        asked = self._head.asked
        self._num_tokens[choice] = token_offset + len(token_ids)
        delta: dict[str, Any] = {"reasoning_content": parsed.reasoning} if parsed.reasoning else {}
        if text or not (parsed.reasoning or parsed.tool_calls):
            delta["content"] = text
        calls = [_call_delta_json(call) for call in parsed.tool_calls if call.name or call.arguments]
        if calls:
            delta["tool_calls"] = calls
        shown: dict[str, Any] = {"delta": delta} if asked.is_chat else {"text": text}
        if asked.shows_token_ids:
            shown["token_ids"] = list(token_ids)
        if text or parsed.reasoning or calls or logprobs or asked.shows_token_ids:
            self._send(choice, shown, logprobs)

    def finish(self, finished: ChoiceFinished) -> None:
        """Send the end of one choice."""
        super().finish(finished)
        shown: dict[str, Any] = {"delta": {}} if self._head.asked.is_chat else {"text": ""}
        self._num_tokens[finished.choice] = finished.usage.num_output_tokens
        self._send(finished.choice, shown, (), finished)

    def _frame(self, choice: int, *, is_reasoning: bool = False) -> tuple[str, str]:
        """What stands before and after the text of an event."""
        shown: dict[str, Any] = {"index": self._first_choice + choice}
        name = "reasoning_content" if is_reasoning else "content"
        shown.update({"delta": {name: "\0"}} if self._head.asked.is_chat else {"text": "\0"})
        shown.update(logprobs=None, finish_reason=None)
        event = json.dumps(self._head.response(self._head.chunk_kind, [shown]), separators=(",", ":"))
        # The model's name may hold the same character, but stands before the text.
        begin, _, end = event.rpartition('"\\u0000"')
        frames = self._reasoning_frames if is_reasoning else self._frames
        # Most streams share what comes after the text: it is in the CPU's caches when a token needs it.
        frames[choice] = (f"data: {begin}", sys.intern(end[:-1] + self._ends))
        if not choice and not is_reasoning:
            self._begin, self._end = frames[choice]
        return frames[choice]

    def _send(
        self,
        choice: int,
        shown: dict[str, Any],
        logprobs: Sequence[TokenLogprobs] = (),
        finished: ChoiceFinished | None = None,
    ) -> None:
        asked, head = self._head.asked, self._head
        offset = self._offsets.get(choice, 0)
        one = {"index": self._first_choice + choice, **shown, "logprobs": logprobs_json(head, logprobs, offset)}
        if logprobs:
            self._offsets[choice] = offset + sum([len(_token_text(head, entry.token_id)) for entry in logprobs])
        one["finish_reason"] = None if finished is None else _FINISH_REASONS[finished.reason]
        if finished is not None:
            one["stop_reason"] = finished.stop_string
        more: dict[str, Any] = {}
        if asked.shows_usage:
            more["usage"] = self._usage_so_far() if asked.shows_usage_always else None
        self._stream.send(to_event(head.response(head.chunk_kind, [one], **more)))

    def _usage_so_far(self) -> dict[str, Any]:
        num_prompt = 0 if self.accepted is None else self.accepted.num_prompt_tokens
        num_output = sum(self._num_tokens.values())
        return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


def usage_event(head: Head, answers: Sequence[StreamedAnswer]) -> str:
    """The last event of a stream, with the usage of all."""
    return to_event(head.response(head.chunk_kind, [], usage=usage_json([answer.usages() for answer in answers])))


def placement_json(answers: Sequence[Answer]) -> dict[str, Any]:
    """Where the choices of ``answers`` were placed and, of those that have ended, where their time went."""
    return {"quartet": {"choices": [one for answer in answers for one in answer.whereabouts()]}}


def placement_event(head: Head, answers: Sequence[StreamedAnswer]) -> str:
    """An event of a stream with that."""
    more = {"usage": None} if head.asked.shows_usage else {}
    return to_event(head.response(head.chunk_kind, [], **more, **placement_json(answers)))


def to_event(value: dict[str, Any]) -> str:
    """An event that holds ``value`` as JSON, in ASCII."""
    return f"data: {json.dumps(value, separators=(',', ':'), allow_nan=False)}\n\n"


def usage_json(prompts: Sequence[Sequence[Usage]]) -> dict[str, Any]:
    """What the choices of each prompt used; they share their prompt, which counts once."""
    firsts = [usages[0] for usages in prompts if usages]
    num_prompt = sum(usage.num_prompt_tokens for usage in firsts)
    num_output = sum(usage.num_output_tokens for usages in prompts for usage in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in firsts)},
    }


def logprobs_json(head: Head, logprobs: Sequence[TokenLogprobs], offset: int = 0) -> dict[str, Any] | None:
    """Log probabilities as chats have them, or completions; ``None``: there are none.

    The first token begins at character ``offset`` of the answer's text.
    """
    if head.asked.num_logprobs is None or not logprobs:
        return None
    if head.asked.is_chat:
        return {"content": [_chat_logprob(head, entry) for entry in logprobs], "refusal": None}
    tokens = [_token_text(head, entry.token_id) for entry in logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [None if math.isnan(entry.logprob) else _finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [_tops_json(head, entry) for entry in logprobs],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
    }


def _echoed_json(head: Head, prompt: str, logprobs: PromptLogprobs) -> Mapping[str, str]:
    """Log probabilities of ``prompt`` as completions have them: each field's items, as JSON."""
    entries = logprobs.tokens()
    tokens = [_token_text(head, token_id) for token_id in logprobs.token_ids]
    lengths = list(map(len, tokens))
    # Text gets tokens around it that are not in it, such as the one that begins every prompt.
    offsets = accumulate(lengths[:-1], initial=len(prompt) - sum(lengths))
    fields: Mapping[str, list[Any]] = {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _tops_json(head, entry) for entry in entries],
        "text_offset": [max(offset, 0) for offset in offsets],
    }
    return {name: json.dumps(items, allow_nan=False)[1:-1] for name, items in fields.items()}


def _tops_json(head: Head, entry: TokenLogprobs) -> dict[str, float] | None:
    """The alternatives by text; ``None``: there are none."""
    tops: dict[str, float] = {}
    for token_id, logprob in _top(entry):
        tops.setdefault(_token_text(head, token_id), _finite(logprob))  # of tokens with one text, the likeliest
    return tops or None


def _chat_logprob(head: Head, entry: TokenLogprobs) -> dict[str, Any]:
    tops = [_token_json(head, token_id, logprob) for token_id, logprob in _top(entry)]
    return {**_token_json(head, entry.token_id, entry.logprob), "top_logprobs": tops}


def _finite(logprob: float) -> float:
    """``logprob``, which JSON can say if it is a number; else what OpenAI's API says of a token that has none."""
    return logprob if math.isfinite(logprob) else _NOT_TOLD


def _top(entry: TokenLogprobs) -> list[tuple[int, float]]:
    return list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))


def _token_json(head: Head, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": _token_text(head, token_id),
        "logprob": _finite(logprob),
        "bytes": list(head.token_bytes(token_id)),
    }


def _token_text(head: Head, token_id: int) -> str:
    return head.token_bytes(token_id).decode(errors="replace")

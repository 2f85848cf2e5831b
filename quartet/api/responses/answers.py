"""Answers of the pipeline as OpenAI's responses: whole, or as the events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from quartet.api.blocks import Block, BlockAnswer, BlockKind, KeptBlocks
from quartet.api.openai.answers import Events, Head
from quartet.api.openai.requests import Asked
from quartet.api.request import Accepted, ChoiceFinished, Usage
from quartet.engine.base import FinishReason
from quartet.engine.sampling import TokenLogprobs

_STATUSES: Mapping[FinishReason, str] = {
    FinishReason.LENGTH: "incomplete",
    FinishReason.CANCELLED: "cancelled",
}
_PREFIXES: Mapping[BlockKind, str] = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
# Codes of OpenAI's for answers that failed, by that of HTTP; any other is the server's fault.
_RATE_LIMIT = 429
_quote = json.encoder.encode_basestring_ascii


class RepeatedEvents(Events, Protocol):
    """Takes the events of a stream, some of which repeat what others brought."""

    def repeat(self, event: str) -> None:
        """Send ``event``, for which a reader may leave so many more bytes unread. Never waits."""
        ...


class ResponseHead(Head):
    """What all parts of one response have."""

    __slots__ = ("request_id",)

    def __init__(self, asked: Asked, model: str) -> None:
        super().__init__(asked, model)
        self.request_id = ""

    def set_request_id(self, request_id: str) -> None:
        """The request has got its id, before any part of the answer comes."""
        self.request_id = request_id
        self.id = f"resp_{request_id}"

    def item_id(self, block: Block) -> str:
        """The id of an item of the output."""
        return f"{_PREFIXES[block.kind]}_{self.request_id}_{block.index}"

    def shown(self, status: str, output: Sequence[Mapping[str, Any]] = (), **more: Any) -> dict[str, Any]:
        """The response as it is now."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "model": self.model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "tools": [],
            "truncation": "disabled",
            "usage": None,
            "user": None,
            **self.asked.repeated,
            **more,
        }

    def ended(self, finished: ChoiceFinished, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The response at its end."""
        status = _STATUSES.get(finished.reason, "completed")
        return self.shown(
            status,
            output,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            completed_at=int(time.time()) if status == "completed" else None,
            usage=_usage_json(finished.usage),
        )


def _usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        # A parser finds reasoning in text, and does not count its tokens; clients take nothing but a number.
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


def _part_json(block: Block, text: str) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item_json(head: ResponseHead, block: Block, status: str) -> dict[str, Any]:
    """An item of the output; its content is empty while it is in progress."""
    item: dict[str, Any] = {"id": head.item_id(block), "status": status}
    content = [] if status == "in_progress" else [_part_json(block, block.text)]
    if block.kind is BlockKind.REASONING:
        return {**item, "type": "reasoning", "summary": [], "content": content}
    if block.kind is BlockKind.TEXT:
        return {**item, "type": "message", "role": "assistant", "content": content}
    return {
        **item,
        "type": "function_call",
        "call_id": block.call_id,
        "name": block.name,
        "arguments": block.text,
    }


def _ended_item_json(head: ResponseHead, block: Block) -> dict[str, Any]:
    return _item_json(head, block, "completed" if block.is_complete else "incomplete")


def whole_response(head: ResponseHead, answer: KeptBlocks) -> bytes:
    """The response to a request whose answer is complete, as JSON."""
    output = [_ended_item_json(head, block) for block in answer.blocks]
    [finished] = answer.finished.values()
    return json.dumps(head.ended(finished, output)).encode()


class StreamedResponse(BlockAnswer):
    """An ``AnswerSink`` that sends each part as an event. It runs for each token, so those of text are a template.

    The events at the end of an item, and of the response, repeat its text.
    """

    __slots__ = ("_frame", "_num_events", "_output", "_response_head", "_stream")

    def __init__(self, head: ResponseHead, stream: RepeatedEvents) -> None:
        super().__init__(head)
        self._response_head = head
        self._stream = stream
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        self._frame = ("", "")  # what stands before and after a delta of the open block

    def accept(self, accepted: Accepted) -> None:
        """The request runs."""
        super().accept(accepted)
        for name in ("created", "in_progress"):
            self._send(f"response.{name}", response=self._response_head.shown("in_progress"))

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Send more text."""
        block = self._open
        if text and block is not None and block.kind is BlockKind.TEXT:
            self.extend_block(block, text)
        else:
            super().add(choice, token_offset, token_ids, text, logprobs)

    def begin_block(self, block: Block) -> None:
        """Send the beginning of an item."""
        head = self._response_head
        place: dict[str, Any] = {"output_index": block.index}
        self._send("response.output_item.added", **place, item=_item_json(head, block, "in_progress"))
        place["item_id"] = head.item_id(block)
        if block.kind is not BlockKind.CALL:
            place["content_index"] = 0
            self._send("response.content_part.added", **place, part=_part_json(block, ""))
        if block.kind is BlockKind.TEXT:
            place["logprobs"] = []
        name = _name(block, "delta")
        shown = json.dumps({"type": name, **place}, separators=(",", ":"))
        self._frame = (f'event: {name}\ndata: {shown[:-1]},"delta":', ',"sequence_number":')

    def extend_block(self, block: Block, text: str) -> None:
        """Send more of an item."""
        block.pieces.append(text)
        begin, end = self._frame
        self._stream.send(f"{begin}{_quote(text)}{end}{self._num_events}}}\n\n")
        self._num_events += 1

    def end_block(self, block: Block) -> None:
        """Send the end of an item."""
        head, text = self._response_head, block.text
        place: dict[str, Any] = {"output_index": block.index, "item_id": head.item_id(block)}
        if block.kind is BlockKind.CALL:
            if block.is_complete:  # else nobody should run it
                self._repeat(_name(block, "done"), **place, arguments=text)
        else:
            place["content_index"] = 0
            logprobs: dict[str, Any] = {"logprobs": []} if block.kind is BlockKind.TEXT else {}
            self._repeat(_name(block, "done"), **place, **logprobs, text=text)
            self._repeat("response.content_part.done", **place, part=_part_json(block, text))
        item = _ended_item_json(head, block)
        self._output.append(item)
        self._repeat("response.output_item.done", output_index=block.index, item=item)

    def finish(self, finished: ChoiceFinished) -> None:
        """Send the end of the response."""
        super().finish(finished)
        response = self._response_head.ended(finished, self._output)
        name = "incomplete" if response["status"] != "completed" else "completed"
        self._repeat(f"response.{name}", response=response)

    def fail(self, code: int, error: Mapping[str, Any]) -> None:
        """Send the end of a response that failed with ``error``, as OpenAI's bodies have it, and HTTP's ``code``."""
        if self.accepted is None:  # it was refused before there was a response
            shown = {name: error[name] for name in ("code", "message", "param")}
            self._send("error", **shown)
            return
        kind = "rate_limit_exceeded" if code == _RATE_LIMIT else "invalid_prompt" if code < 500 else "server_error"
        shown = {"code": kind, "message": error["message"], "param": error["param"], "type": error["type"]}
        self._repeat("response.failed", response=self._response_head.shown("failed", self._output, error=shown))

    def _send(self, name: str, **more: Any) -> None:
        self._stream.send(self._event(name, more))

    def _repeat(self, name: str, **more: Any) -> None:
        self._stream.repeat(self._event(name, more))

    def _event(self, name: str, more: Mapping[str, Any]) -> str:
        number, self._num_events = self._num_events, self._num_events + 1
        shown = json.dumps({"type": name, **more, "sequence_number": number}, separators=(",", ":"))
        return f"event: {name}\ndata: {shown}\n\n"


def _name(block: Block, step: str) -> str:
    kinds = {BlockKind.REASONING: "reasoning_text", BlockKind.TEXT: "output_text"}
    return f"response.{kinds.get(block.kind, 'function_call_arguments')}.{step}"

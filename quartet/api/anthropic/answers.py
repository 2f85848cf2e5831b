"""Answers of the pipeline as Anthropic's messages: whole, or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quartet.api.blocks import Block, BlockAnswer, BlockKind, KeptBlocks
from quartet.api.openai.answers import Events, Head
from quartet.api.request import Accepted, ChoiceFinished, Usage
from quartet.engine.base import FinishReason
from quartet.engine.sampling import TokenLogprobs

_STOP_REASONS: Mapping[FinishReason, str] = {
    FinishReason.STOP_ID: "end_turn",
    FinishReason.STOP_STRING: "stop_sequence",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CANCELLED: "pause_turn",
}
# Clients send thinking back with the signature that it came with; here nothing is signed, and nothing is checked.
_SIGNATURE = "unsigned"
_quote = json.encoder.encode_basestring_ascii


class MessageHead(Head):
    """What all parts of one message have."""

    __slots__ = ()

    def set_request_id(self, request_id: str) -> None:
        """The request has got its id, before any part of the answer comes."""
        self.id = f"msg_{request_id}"

    def shown(
        self, content: Sequence[Mapping[str, Any]], usage: Mapping[str, Any], end: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The message, or its beginning."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **end,
            "usage": usage,
        }


def _usage_json(usage: Usage) -> dict[str, Any]:
    """Input tokens are those that were not cached."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
    }


def _end_json(finished: ChoiceFinished) -> dict[str, Any]:
    return {"stop_reason": _STOP_REASONS[finished.reason], "stop_sequence": finished.stop_string}


def _block_json(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": block.text}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": _SIGNATURE}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": json.loads(block.text)}


def whole_message(head: MessageHead, answer: KeptBlocks) -> bytes:
    """The response to a request whose answer is complete, as JSON."""
    [finished] = answer.finished.values()
    content = [_block_json(block) for block in answer.blocks]
    return json.dumps(head.shown(content, _usage_json(finished.usage), _end_json(finished))).encode()


class StreamedMessage(BlockAnswer):
    """An ``AnswerSink`` that sends each part as an event. It runs for each token, so those of text are a template."""

    __slots__ = ("_frame", "_message_head", "_stream")

    def __init__(self, head: MessageHead, stream: Events) -> None:
        super().__init__(head)
        self._message_head = head
        self._stream = stream
        self._frame = ""  # what stands before a delta of the open block

    def accept(self, accepted: Accepted) -> None:
        """The request runs: the message begins. What of its prompt was cached is known at the end."""
        super().accept(accepted)
        usage = Usage(
            num_prompt_tokens=accepted.num_prompt_tokens, num_cached_tokens=0, num_output_tokens=0, num_attempts=1
        )
        end = {"stop_reason": None, "stop_sequence": None}
        self._send("message_start", message=self._message_head.shown([], _usage_json(usage), end))

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
        """Send the beginning of a block."""
        kind, name = {
            BlockKind.TEXT: ("text_delta", "text"),
            BlockKind.REASONING: ("thinking_delta", "thinking"),
            BlockKind.CALL: ("input_json_delta", "partial_json"),
        }[block.kind]
        if block.kind is BlockKind.TEXT:
            shown: dict[str, Any] = {"type": "text", "text": ""}
        elif block.kind is BlockKind.REASONING:
            shown = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            shown = {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
        self._send("content_block_start", index=block.index, content_block=shown)
        self._frame = (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{block.index},'
            f'"delta":{{"type":"{kind}","{name}":'
        )

    def extend_block(self, block: Block, text: str) -> None:
        """Send more of a block."""
        self._stream.send(f"{self._frame}{_quote(text)}}}}}\n\n")

    def end_block(self, block: Block) -> None:
        """Send the end of a block."""
        if block.kind is BlockKind.REASONING:
            signature = {"type": "signature_delta", "signature": _SIGNATURE}
            self._send("content_block_delta", index=block.index, delta=signature)
        self._send("content_block_stop", index=block.index)

    def finish(self, finished: ChoiceFinished) -> None:
        """Send the end of the message."""
        super().finish(finished)
        self._send("message_delta", delta=_end_json(finished), usage=_usage_json(finished.usage))
        self._send("message_stop")

    def fail(self, error: Mapping[str, Any]) -> None:
        """Send the end of a message that failed with ``error``, as Anthropic's bodies have it."""
        self._send("error", **{name: value for name, value in error.items() if name != "type"})

    def _send(self, name: str, **more: Any) -> None:
        shown = json.dumps({"type": name, **more}, separators=(",", ":"))
        self._stream.send(f"event: {name}\ndata: {shown}\n\n")

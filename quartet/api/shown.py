"""What a client has of one choice, which is what it takes to resume it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from quartet.api.request import Accepted, Resume
from quartet.text.parsed import ToolCallDelta


@dataclass(slots=True)
class ShownChoice:
    """What a client has of one choice. For each token its fields are changed in place, without a call.

    Attributes:
        token_ids: its tokens.
        num_text_bytes, num_reasoning_bytes, num_tool_calls, num_argument_bytes: as in ``Resume``.
        is_placed: its client knows where it was placed at first.
        has_ended: its client has its end.
    """

    token_ids: array[int] = field(default_factory=lambda: array("I"))
    num_text_bytes: int = 0
    num_reasoning_bytes: int = 0
    num_tool_calls: int = 0
    num_argument_bytes: int = 0
    is_placed: bool = False
    has_ended: bool = False

    def add_parsed(self, reasoning: str, tool_calls: Iterable[ToolCallDelta]) -> None:
        """The client gets more reasoning and tool calls."""
        self.num_reasoning_bytes += len(reasoning.encode())
        for call in tool_calls:
            self.num_tool_calls = max(self.num_tool_calls, call.index + 1)
            self.num_argument_bytes += len(call.arguments.encode())

    def take(self, resume: Resume) -> None:
        """The client came with that much; called before anything else."""
        self.token_ids.extend(resume.generated_token_ids)
        self.num_text_bytes, self.num_reasoning_bytes = resume.num_text_bytes, resume.num_reasoning_bytes
        self.num_tool_calls, self.num_argument_bytes = resume.num_tool_calls, resume.num_argument_bytes

    def resume(self, choice: int, attempt: int, accepted: Accepted, request_id: str) -> Resume:
        """Continue after what the client has, on the terms on which its request was ``accepted`` at first."""
        return Resume(
            request_id=request_id,
            attempt=attempt,
            seed=accepted.seed,
            choice=choice,
            generated_token_ids=self.token_ids,
            num_text_bytes=self.num_text_bytes,
            num_reasoning_bytes=self.num_reasoning_bytes,
            num_tool_calls=self.num_tool_calls,
            num_argument_bytes=self.num_argument_bytes,
            model_fingerprint=accepted.model_fingerprint,
        )

"""`ConversationParams`: the conversation of a request, which came after 1.2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class ConversationParams:
    """Names a conversation, for attention DP to keep it on its rank."""

    conversation_id: str


def check_conversation(params: Any) -> None:
    """Raise as upstream does for what is none."""
    if params is None:
        return
    if not isinstance(params, ConversationParams):
        raise TypeError(f"conversation_params must be ConversationParams, is {type(params).__name__}")
    if not isinstance(params.conversation_id, str) or not params.conversation_id.strip():
        raise ValueError("conversation_id must be non-empty")

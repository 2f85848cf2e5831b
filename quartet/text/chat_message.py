"""What chats are made of; apart from the templates, so that clients load no template engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChatMessage:
    """One message of a chat.

    Attributes:
        role: who speaks; which roles there are is up to the template.
        content: the text.
        name: of the speaker; most templates ignore it, and ``None`` leaves it out.
    """

    role: str
    content: str
    name: str | None = None

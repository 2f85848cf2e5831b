"""What chats are made of; apart from the templates, so that clients load no template engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quartet.media.items import MediaFile, MediaPart, MediaUrl


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat.

    Attributes:
        role: of the speaker; the template decides which roles there are.
        content: the text; or pieces of text and media, in order.
        name: of the speaker; most templates ignore it, and ``None`` leaves it out.
    """

    role: str
    content: str | tuple[str | MediaPart, ...] = field(repr=False)
    name: str | None = None

    @property
    def pieces(self) -> Sequence[str | MediaPart]:
        """The content in pieces."""
        return (self.content,) if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        """All its text in one."""
        if isinstance(self.content, str):
            return self.content
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def num_characters(self) -> int:
        """Of all its text."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(piece) for piece in self.pieces if isinstance(piece, str))


def media_of(messages: Sequence[ChatMessage]) -> Iterator[MediaPart]:
    """The media of a chat, in order."""
    for message in messages:
        for piece in message.pieces:
            if isinstance(piece, MediaFile | MediaUrl):
                yield piece

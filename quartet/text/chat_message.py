"""What chats are made of; apart from the templates, so that clients load no template engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quartet.media.items import MediaFile, MediaPart, MediaUrl
from quartet.text.json_object import JsonObject

_NO_ARGUMENTS = JsonObject.of_value({}, 2)
_NO_PARAMETERS = JsonObject.of_value({"type": "object", "properties": {}}, 36)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client can run for the model.

    Attributes:
        description: what it does, for the model.
        parameters: a JSON Schema of an object.
        strict: whether it is declared so, for templates; ``None``: not said.
    """

    name: str
    description: str = field(default="", repr=False)
    parameters: JsonObject = _NO_PARAMETERS
    strict: bool | None = None

    @property
    def num_characters(self) -> int:
        """About as many as it has in a prompt."""
        return len(self.name) + len(self.description) + self.parameters.num_characters


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant made.

    Attributes:
        id: names it for the message with its result; empty: none.
    """

    name: str
    arguments: JsonObject = _NO_ARGUMENTS
    id: str = ""

    @property
    def num_characters(self) -> int:
        """About as many as it has in a prompt."""
        return len(self.name) + len(self.id) + self.arguments.num_characters


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat.

    Attributes:
        role: of the speaker; the template decides which roles there are.
        content: the text; or pieces of text and media, in order.
        name: of the speaker, or of the function whose result it is; most templates ignore it, and ``None`` leaves it
            out.
        tool_calls: that the assistant made.
        tool_call_id: of the call whose result it is; ``None``: of none.
        reasoning: what the assistant thought before it answered; empty: nothing.
    """

    role: str
    content: str | tuple[str | MediaPart, ...] = field(repr=False)
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = field(default=(), repr=False)
    tool_call_id: str | None = None
    reasoning: str = field(default="", repr=False)

    @property
    def pieces(self) -> Sequence[str | MediaPart]:
        """The content in pieces."""
        return (self.content,) if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        """All text of the content in one."""
        if isinstance(self.content, str):
            return self.content
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def num_characters(self) -> int:
        """Of all its text."""
        content = self.content
        num_characters = len(content) if isinstance(content, str) else len(self.text)
        if self.tool_calls:
            num_characters += sum([call.num_characters for call in self.tool_calls])
        return num_characters + len(self.reasoning)


def media_of(messages: Sequence[ChatMessage]) -> Iterator[MediaPart]:
    """The media of a chat, in order."""
    for message in messages:
        for piece in message.pieces:
            if isinstance(piece, MediaFile | MediaUrl):
                yield piece

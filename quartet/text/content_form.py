"""In which form a chat template wants what messages say.

Templates of text models know strings, those of many models with media know lists of pieces only, and give an empty turn
for a string; some know both. Nothing in a model's files says which, so a template is asked, by probes, as in
google/minja, ``include/minja/chat-template.hpp`` (``requires_typed_content``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quartet.errors import InvalidRequestError
from quartet.media.items import MediaPart
from quartet.text.chat_message import ChatMessage

# Words that no template writes by itself.
_TEXT, _KEY = "QZTEXTQZ", "QZKEYQZ"


@dataclass(frozen=True)
class ContentForm:
    """What a template takes as a message's content; neither: it refuses the probes, and strings are what it is given.

    Attributes:
        strings: all of the text in one.
        pieces: a list of what each piece is, as transformers has it.
    """

    strings: bool
    pieces: bool

    @classmethod
    def of(cls, render: Callable[[object], str]) -> ContentForm:
        """Find out by ``render``, which writes a user's message of this content, or raises ``InvalidRequestError``."""
        pieces = _written(render, [{"type": "text", "text": _TEXT, _KEY: ""}])
        # One that knows strings only may write the list as Python or JSON has it.
        return cls(strings=_TEXT in _written(render, _TEXT), pieces=_TEXT in pieces and _KEY not in pieces)

    def variable(self, message: ChatMessage) -> object:
        """The content of ``message`` as templates of this form take it.

        Raises:
            InvalidRequestError: there are media in it, and the template takes none.
        """
        has_media = any(not isinstance(piece, str) for piece in message.pieces)
        if has_media and not self.pieces:
            raise InvalidRequestError("the model's chat template takes text only, no media", field="messages")
        if has_media or (self.pieces and not self.strings):
            return [_piece(piece) for piece in message.pieces]
        return message.text


def _written(render: Callable[[object], str], content: object) -> str:
    try:
        return render(content)
    except InvalidRequestError:
        return ""


def _piece(piece: str | MediaPart) -> dict[str, str]:
    return {"type": "text", "text": piece} if isinstance(piece, str) else {"type": "image"}

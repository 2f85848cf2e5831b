"""A chat in the making, from what other APIs have in the place of messages. Its bounds are those of every chat."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from quartet.api.chat import MAX_MESSAGES, MAX_PARTS, check_message
from quartet.api.openai.requests import read_functions
from quartet.api.openai.steps import Work
from quartet.errors import InvalidRequestError
from quartet.media.items import MediaPart
from quartet.text.chat_message import ChatMessage, ToolCall

# What an item takes that becomes a message, in units of work: more than a message of a chat, as its path is kept.
_ITEM_WORK = 50

#: A part of a message, and its path in the client's request.
Piece: TypeAlias = tuple[str | MediaPart, str]


@dataclass(slots=True)
class Turn:
    """What an assistant said at once; its parts may be several items.

    Attributes:
        path: of the first of them.
        calls: not read yet, with their paths.
    """

    path: str
    pieces: list[Piece] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, Any]] = field(default_factory=list)


class Conversation:
    """Messages, and how errors name them."""

    def __init__(self, name: str, work: Work, paths: Mapping[str, str]) -> None:
        """``name`` is the field that holds them; ``paths`` are those of other fields."""
        self._name = name
        self._work = work
        self._messages: list[ChatMessage] = []
        self._num_parts = 0
        #: The client's path of each field, by its path in ``GenerateStart``.
        self.paths: dict[str, str] = {**paths, "chat.messages": name}

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """Those that were added. Raises ``InvalidRequestError``: there is none."""
        if not self._messages:
            raise InvalidRequestError(f"{self._name}: is empty", field=self._name)
        return tuple(self._messages)

    def count_parts(self, num_parts: int, path: str) -> None:
        """Count parts before any is read. Raises ``InvalidRequestError`` naming ``path``: there are too many."""
        self._num_parts += num_parts
        if self._num_parts > MAX_PARTS:
            why = f"{path}: all messages have at most {MAX_PARTS} parts"
            raise InvalidRequestError(why, field=path)

    def add(
        self, role: str, pieces: Sequence[Piece], path: str, *, tool_call_id: str | None = None
    ) -> Generator[int, None, None]:
        """Add what somebody else than the assistant said, in steps."""
        yield from self._append(ChatMessage(role, self._content(pieces), tool_call_id=tool_call_id), path)

    def add_turn(
        self, turn: Turn, read_call: Callable[[Any, str], ToolCall], json_at: Sequence[str]
    ) -> Generator[int, None, None]:
        """Add what an assistant said, in steps; ``read_call`` reads its calls, whose JSON is at ``json_at``.

        Raises:
            InvalidRequestError: naming the field, as the client or as the pipeline calls it.
        """
        # There are no more calls than a chat may have: each is an item or a part, and these were counted.
        calls: tuple[ToolCall, ...] = ()
        if turn.calls:
            calls = yield from read_functions(turn.calls, read_call, path=turn.path, json_at=json_at, work=self._work)
            field = f"chat.messages[{len(self._messages)}].tool_calls"
            self.paths[field] = turn.path
            self.paths.update({f"{field}[{index}]": path for index, (path, _) in enumerate(turn.calls)})
        content = self._content(turn.pieces)
        message = ChatMessage("assistant", content, tool_calls=calls, reasoning="".join(turn.reasoning))
        yield from self._append(message, turn.path)

    def _content(self, pieces: Sequence[Piece]) -> str | tuple[str | MediaPart, ...]:
        if all(isinstance(piece, str) for piece, _ in pieces):
            return "".join([piece for piece, _ in pieces if isinstance(piece, str)])
        field = f"chat.messages[{len(self._messages)}].parts"
        for index, (piece, path) in enumerate(pieces):
            if not isinstance(piece, str):
                # Pictures are named as URLs, and their errors by that.
                self.paths[f"{field}[{index}].media"] = self.paths[f"{field}[{index}].media.url"] = path
        return tuple([piece for piece, _ in pieces])

    def _append(self, message: ChatMessage, path: str) -> Generator[int, None, None]:
        number = len(self._messages)
        if number == MAX_MESSAGES:
            why = f"{path}: a chat has at most {MAX_MESSAGES} messages"
            raise InvalidRequestError(why, field=path)
        self.paths[f"chat.messages[{number}]"] = path
        if message.tool_calls or message.tool_call_id:
            check_message(message, number)
        self._messages.append(message)
        yield from self._work.spend(_ITEM_WORK)

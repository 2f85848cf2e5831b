"""What a chat template takes as a message's content and as tool calls, and messages as its variables.

Templates of text models know content as a string, those of many models with media know only lists of pieces and give an
empty turn for a string; some know both. Some read the arguments of calls key by key, some join them as text; some show
calls only beside a content that is none. Nothing in a model's files says which, so a template is asked by probes, as in
google/minja, ``include/minja/chat-template.hpp`` (``requires_typed_content``, ``requires_object_arguments``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

from quartet.errors import InvalidRequestError
from quartet.media.items import MediaPart
from quartet.text.chat_message import ChatMessage, Tool, ToolCall

# Words that no template writes by itself.
_PROBE_TEXT, _PROBE_KEY, _PROBE_NAME = "QZTEXTQZ", "QZKEYQZ", "QZNAMEQZ"

# The templates of Mistral's models take no others.
_PROBE_ID = "QZ0000000"

#: Writes messages, or raises ``InvalidRequestError``.
Render: TypeAlias = Callable[[Sequence[Mapping[str, object]]], str]


@dataclass(frozen=True)
class ContentForm:
    """What a template takes as a message's content; neither: it refuses the probes and is given strings.

    Attributes:
        strings: all of the text in one.
        pieces: a list of what each piece is, as transformers has it.
    """

    strings: bool
    pieces: bool

    @classmethod
    def of(cls, render: Render) -> ContentForm:
        """Find out by ``render``."""
        string = _written(render, [{"role": "user", "content": _PROBE_TEXT}])
        piece = {"type": "text", "text": _PROBE_TEXT, _PROBE_KEY: ""}
        pieces = _written(render, [{"role": "user", "content": [piece]}])
        # A template that knows only strings may write the list as Python or JSON has it, keys included.
        return cls(strings=_PROBE_TEXT in string, pieces=_PROBE_TEXT in pieces and _PROBE_KEY not in pieces)

    def variable(self, message: ChatMessage) -> object:
        """The content of ``message`` as templates of this form take it.

        Raises:
            InvalidRequestError: there are media in it, and the template takes none.
        """
        if isinstance(message.content, str) and (self.strings or not self.pieces):
            return message.content
        has_media = any(not isinstance(piece, str) for piece in message.pieces)
        if has_media and not self.pieces:
            raise InvalidRequestError("the model's chat template takes text only, no media", field="messages")
        if has_media or (self.pieces and not self.strings):
            return [_piece(piece) for piece in message.pieces]
        return message.text


@dataclass(frozen=True)
class CallForm:
    """What a template takes as an assistant's tool calls.

    Attributes:
        arguments_are_text: JSON as text; else as an object.
        empty_is_none: a content without text beside them is none; else it is empty.
    """

    arguments_are_text: bool = False
    empty_is_none: bool = False

    @classmethod
    def of(cls, render: Render, content: ContentForm) -> CallForm:
        """Find out by ``render``; the usual form if the template shows the probe's call in none."""
        for empty_is_none, arguments_are_text in product((False, True), repeat=2):
            form = cls(arguments_are_text=arguments_are_text, empty_is_none=empty_is_none)
            written = _written(render, form._probe(content))
            if _PROBE_NAME in written and _PROBE_KEY in written and _PROBE_TEXT in written:
                return form
        return cls()

    def variable(self, call: ToolCall, field: str) -> dict[str, object]:
        """``call`` as templates of this form take it.

        Raises:
            InvalidRequestError: its arguments are no JSON object; names ``field``.
        """
        value = call.arguments.value(f"{field}.arguments")
        arguments = call.arguments.text if self.arguments_are_text else value
        variable: dict[str, object] = {
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }
        return {"id": call.id, **variable} if call.id else variable

    def _probe(self, content: ContentForm) -> list[Mapping[str, object]]:
        question = {"role": "user", "content": content.variable(ChatMessage("user", "-"))}
        arguments: object = f'{{"{_PROBE_KEY}": "{_PROBE_TEXT}"}}'
        if not self.arguments_are_text:
            arguments = {_PROBE_KEY: _PROBE_TEXT}
        call = {"id": _PROBE_ID, "type": "function", "function": {"name": _PROBE_NAME, "arguments": arguments}}
        empty = None if self.empty_is_none else content.variable(ChatMessage("assistant", ""))
        return [question, {"role": "assistant", "content": empty, "tool_calls": [call]}]


def to_variable(message: ChatMessage, number: int, content: ContentForm, calls: Callable[[], CallForm]) -> object:
    """``message``, which is ``number`` of the chat, as a variable of a template; ``calls`` tells its form when needed.

    Raises:
        InvalidRequestError: the template does not take it, or arguments are no JSON object.
    """
    variable: dict[str, object] = {"role": message.role, "content": content.variable(message)}
    if message.name is not None:
        variable["name"] = message.name
    if message.tool_call_id is not None:
        variable["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        form, field = calls(), f"messages[{number}].tool_calls"
        variable["tool_calls"] = [
            form.variable(call, f"{field}[{index}]") for index, call in enumerate(message.tool_calls)
        ]
        if form.empty_is_none and not message.content:
            variable["content"] = None
    if message.reasoning:
        # Families differ in its name.
        variable["reasoning_content"] = variable["reasoning"] = message.reasoning
        # That of gpt-oss takes this beside calls only without content, which then stands for it.
        if not (message.tool_calls and message.content):
            variable["thinking"] = message.reasoning
    return variable


def to_tool_variable(tool: Tool, field: str) -> dict[str, Any]:
    """``tool`` as a variable of a template. Raises ``InvalidRequestError``: its parameters are no JSON object."""
    function: dict[str, object] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters.value(f"{field}.parameters"),
    }
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _written(render: Render, messages: Sequence[Mapping[str, object]]) -> str:
    try:
        return render(messages)
    except InvalidRequestError:
        return ""


def _piece(piece: str | MediaPart) -> dict[str, str]:
    return {"type": "text", "text": piece} if isinstance(piece, str) else {"type": "image"}

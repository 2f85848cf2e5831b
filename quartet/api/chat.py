"""A conversation as a prompt, the tools that its answer may call, and what refuses either."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from enum import StrEnum

from quartet.errors import InvalidRequestError
from quartet.text.chat_message import ChatMessage, Tool
from quartet.text.json_object import JsonObject

#: Most messages, parts of all messages, and tool calls of all messages. They are counted before any of them is
#: converted: so many take 20 ms.
MAX_MESSAGES, MAX_PARTS, MAX_TOOL_CALLS = 4096, 4096, 4096

#: Most tools of one request.
MAX_TOOLS = 1024

#: Characters of the JSON of one tool or call, of all tools or all calls of one message, and of a template's arguments.
#: The JSON library lets nothing else run while it reads or writes one of these: 20 ms, or 40 with many short fields.
MAX_JSON_LENGTH, MAX_JOINT_LENGTH, MAX_ARGUMENTS_LENGTH = 256 << 10, 512 << 10, 64 << 10

#: Characters of the name of a tool or speaker, and of a call's id.
MAX_TOOL_NAME_LENGTH = 256


class ToolChoice(StrEnum):
    """Whether an answer may, or must, call tools."""

    AUTO = "auto"  # the model decides
    NONE = "none"  # it calls none, and sees none
    REQUIRED = "required"  # it calls at least one
    FUNCTION = "function"  # it calls the one that is named


@dataclass
class ChatPrompt:
    """A conversation, laid out by the model's chat template. Nothing changes it once it is made.

    Not frozen, as ``GenerateStart`` is not.

    Attributes:
        tools: that the answer may call.
        tool_name: the tool that it must call, for ``ToolChoice.FUNCTION``.
        parallel_tool_calls: else all calls of an answer but its first are left out.
        template_arguments: further variables of the template; ``None``: none.
    """

    messages: tuple[ChatMessage, ...] = field(repr=False)
    add_generation_prompt: bool = True
    tools: tuple[Tool, ...] = field(default=(), repr=False)
    tool_choice: ToolChoice = ToolChoice.AUTO
    tool_name: str = ""
    parallel_tool_calls: bool = True
    template_arguments: JsonObject | None = field(default=None, repr=False)

    @property
    def must_call(self) -> bool:
        """Whether the answer must call a tool."""
        return self.tool_choice in (ToolChoice.REQUIRED, ToolChoice.FUNCTION)

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The tools that the model sees, and may call."""
        return () if self.tool_choice is ToolChoice.NONE else self.tools


def check_count(items: Sized, limit: int, field: str, what: str) -> None:
    """Refuse more than ``limit`` items without a look at any. Raises ``InvalidRequestError`` naming ``field``."""
    if len(items) > limit:
        raise InvalidRequestError(f"a request has at most {limit} {what}, not {len(items)}", field=field)


def check_chat(prompt: ChatPrompt) -> None:
    """Refuse tools and arguments that no model can serve; messages are not looked at.

    Raises:
        InvalidRequestError: names the field.
    """
    if prompt.tools:
        check_count(prompt.tools, MAX_TOOLS, "chat.tools", "tools")
        for number, tool in enumerate(prompt.tools):
            _check_tool(tool, f"chat.tools[{number}]")
        _check_joint_length([tool.parameters for tool in prompt.tools], "chat.tools")
    if prompt.tool_choice is not ToolChoice.AUTO or prompt.tool_name:
        _check_choice(prompt)
    arguments = prompt.template_arguments
    if arguments is not None and arguments.num_characters > MAX_ARGUMENTS_LENGTH:
        text = f"template_arguments is longer than {MAX_ARGUMENTS_LENGTH} characters"
        raise InvalidRequestError(text, field="chat.template_arguments")


def check_message(message: ChatMessage, number: int) -> None:
    """Refuse a message, ``number`` of its chat, whose names or calls are impossible. Raises ``InvalidRequestError``."""
    field = f"chat.messages[{number}]"
    _check_name(message.name or "", f"{field}.name")
    _check_name(message.tool_call_id or "", f"{field}.tool_call_id")
    for index, call in enumerate(message.tool_calls):
        path = f"{field}.tool_calls[{index}]"
        _check_name(call.id, f"{path}.id")
        _check_name(call.name, f"{path}.name", is_needed=True)
        _check_json(call.arguments, f"{path}.arguments")
    _check_joint_length([call.arguments for call in message.tool_calls], f"{field}.tool_calls")


def _check_tool(tool: Tool, field: str) -> None:
    _check_name(tool.name, f"{field}.name", is_needed=True)
    _check_json(tool.parameters, f"{field}.parameters")


def _check_choice(prompt: ChatPrompt) -> None:
    if prompt.tool_choice is not ToolChoice.FUNCTION:
        if prompt.tool_name:
            raise InvalidRequestError("only TOOL_CHOICE_FUNCTION takes a name", field="chat.tool_name")
        if prompt.tool_choice is ToolChoice.REQUIRED and not prompt.tools:
            raise InvalidRequestError("there are no tools to call", field="chat.tool_choice")
    elif not any(tool.name == prompt.tool_name for tool in prompt.tools):
        raise InvalidRequestError("it is none of the tools", field="chat.tool_name")


def _check_name(name: str, field: str, *, is_needed: bool = False) -> None:
    if len(name) > MAX_TOOL_NAME_LENGTH:
        raise InvalidRequestError(f"it is longer than {MAX_TOOL_NAME_LENGTH} characters", field=field)
    if is_needed and not name:
        raise InvalidRequestError("it must not be empty", field=field)


def _check_joint_length(values: Iterable[JsonObject], field: str) -> None:
    if sum([value.num_characters for value in values]) > MAX_JOINT_LENGTH:
        raise InvalidRequestError(f"their JSON is longer than {MAX_JOINT_LENGTH} characters together", field=field)


def _check_json(value: JsonObject, field: str) -> None:
    if value.num_characters > MAX_JSON_LENGTH:
        raise InvalidRequestError(f"the JSON is longer than {MAX_JSON_LENGTH} characters", field=field)

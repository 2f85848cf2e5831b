"""Requests of /v1/messages, read into the requests that the pipeline runs.

The tables below say of each field whether it is taken, ignored or refused; docs/messages.md says why.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from quartet.api.chat import MAX_MESSAGES, ToolChoice
from quartet.api.chat_fields import read_format, read_tools
from quartet.api.conversation import Conversation, Piece, Turn
from quartet.api.field_names import FieldNames
from quartet.api.openai.fields import (
    Reader,
    anything,
    boolean,
    choice,
    empty,
    fields_of,
    ignored,
    integer,
    list_of,
    lists,
    number,
    objects,
    one_or_many,
    only,
    read_fields,
    refused,
    text,
    wrong,
)
from quartet.api.openai.requests import (
    EXTENSIONS,
    MESSAGE_WORK,
    Asked,
    Caller,
    ask_chat,
    measured,
)
from quartet.api.openai.steps import Work
from quartet.api.request import MAX_STOP_STRINGS
from quartet.engine.sampling import GuidedDecoding
from quartet.errors import InvalidRequestError, UnsupportedFieldError
from quartet.media.items import MediaUrl
from quartet.text.chat_message import Tool, ToolCall
from quartet.text.json_object import JsonObject

_MAX_INT32 = 2**31 - 1
# Bytes of a picture's base64 that are copied behind the head of its URL in a unit of work.
_COPIED_OF_WORK = 100
_BETWEEN_SYSTEM_TEXTS = "\n\n"
# Templates call it by either name; the others change nothing.
_THINKS = ("enable_thinking", "thinking")
_CHOICES: Mapping[str, ToolChoice] = {
    "auto": ToolChoice.AUTO,
    "any": ToolChoice.REQUIRED,
    "tool": ToolChoice.FUNCTION,
    "none": ToolChoice.NONE,
}


def _thinking(value: Any, path: str) -> bool:
    table: Mapping[str, Reader] = {
        "type": choice("enabled", "adaptive", "disabled"),
        "budget_tokens": integer(1, _MAX_INT32),
        "display": only("summarized"),
    }
    found = read_fields(objects(value, path), table, f"{path}.")
    if "type" not in found:
        raise InvalidRequestError(f"{path}.type: is missing", field=f"{path}.type")
    return bool(found["type"] != "disabled")


def _format(value: Any, path: str) -> GuidedDecoding | None:
    found = fields_of({"type": only("json_schema"), "schema": anything})(value, path)
    return read_format("json_schema", {"schema": found.get("schema")}, path)


def _tool_choice(value: Any, path: str) -> tuple[ToolChoice, str, bool]:
    """The choice, the tool that it names, and whether an answer may have several calls."""
    table: Mapping[str, Reader] = {"type": choice(*_CHOICES), "name": text, "disable_parallel_tool_use": boolean}
    found = read_fields(objects(value, path), table, f"{path}.")
    kind = found.get("type")
    if kind is None or (kind == "tool" and "name" not in found):
        missing = f"{path}.type" if kind is None else f"{path}.name"
        raise InvalidRequestError(f"{missing}: is missing", field=missing)
    return _CHOICES[kind], found.get("name", ""), not found.get("disable_parallel_tool_use", False)


_FIELDS: Mapping[str, Reader] = {
    **EXTENSIONS,
    "model": text,
    "messages": anything,
    "system": anything,
    "max_tokens": integer(1, _MAX_INT32),
    "stream": boolean,
    "stop_sequences": one_or_many(text, max_length=MAX_STOP_STRINGS),
    **dict.fromkeys(("temperature", "top_p"), number),
    "tools": anything,
    "tool_choice": _tool_choice,
    "thinking": _thinking,
    "output_config": fields_of({"effort": text, "format": _format}),
    "speed": only("standard"),
    **dict.fromkeys(("metadata", "service_tier", "cache_control"), ignored),
    **{
        name: refused(why)
        for names, why in {
            "container": "nothing runs code here",
            "mcp_servers": "clients run their tools themselves",
            "context_management": "a prompt that is too long is an error",
            "diagnostics": "usage says what was cached",
            "inference_geo": "workers are where they are",
            "user_profile_id workspace_id": "the API key says whose a request is",
        }.items()
        for name in names.split()
    },
}
# What counts tokens takes the same fields, and needs no bound of the answer.
_NOT_COUNTED = ("max_tokens", "stream")

_TOOL: Mapping[str, Reader] = {
    "type": text,
    "name": text,
    "description": text,
    "input_schema": measured,
    "strict": boolean,
    "defer_loading": only(False),
    **dict.fromkeys(("cache_control", "eager_input_streaming"), ignored),
    "allowed_callers": list_of(only("direct"), max_length=1),
    "input_examples": refused("put them into the description"),
}
_MESSAGE: Mapping[str, Reader] = {"role": choice("user", "assistant", "system"), "content": anything}

_IS_CACHED: Mapping[str, Reader] = {"type": text, "cache_control": ignored}
_SOURCE: Mapping[str, Reader] = {
    "type": choice("base64", "url"),
    "media_type": choice("image/jpeg", "image/png", "image/gif", "image/webp"),
    "data": text,
    "url": text,
    "file_id": refused("no files are kept"),
}
_BLOCKS: Mapping[str, Mapping[str, Reader]] = {
    "text": {**_IS_CACHED, "text": text, "citations": empty("models here cite nothing")},
    "image": {**_IS_CACHED, "source": objects, "transformations": refused("workers decide how pictures are read")},
    "tool_use": {
        **_IS_CACHED,
        "id": text,
        "name": text,
        "input": measured,
        "caller": ignored,
        "toolset_name": refused("there are no toolsets"),
    },
    "tool_result": {
        **_IS_CACHED,
        "tool_use_id": text,
        "content": anything,
        "is_error": boolean,
        "toolset_name": refused("there are no toolsets"),
    },
    "thinking": {"type": text, "thinking": text, "signature": text},
}
# What the last part of a field's path is called.
_LEAVES = {"parameters": "input_schema", "arguments": "input", "tool_call_id": "tool_use_id"}
_IN_TURN = ("text", "thinking", "tool_use")
_IN_OTHERS = ("text", "image", "tool_result")
_IN_RESULTS = ("text", "image")


def read_messages(body: Mapping[str, Any], caller: Caller) -> Generator[int, None, Asked]:
    """A request of /v1/messages, in steps; yields the work of each, in 0.1 microseconds.

    Raises:
        InvalidRequestError: naming the field.
    """
    if body.get("max_tokens") is None:
        raise InvalidRequestError("max_tokens: is missing", field="max_tokens")
    return (yield from _read(body, caller))


def read_count(body: Mapping[str, Any], caller: Caller) -> Generator[int, None, Asked]:
    """A request of /v1/messages/count_tokens, in steps, as ``read_messages``.

    Raises:
        InvalidRequestError: naming the field.
        UnsupportedFieldError: it has a picture, of which only a worker knows how many tokens it takes.
    """
    for name in _NOT_COUNTED:
        if name in body:
            raise UnsupportedFieldError(f"{name}: counting takes no such field", field=name)
    asked = yield from _read(body, caller)
    names = asked.field_names
    for path in names.paths if names is not None else ():
        if names is not None and path.endswith(".media"):
            why = f"{names.of(path)}: pictures are counted by workers: usage says how many tokens they took"
            raise UnsupportedFieldError(why, field=names.of(path))
    return asked


def _read(body: Mapping[str, Any], caller: Caller) -> Generator[int, None, Asked]:
    work = Work()
    paths = {
        "sampling.max_tokens": "max_tokens",
        "sampling.guided": "structured_outputs" if body.get("structured_outputs") else "output_config.format",
        "text_options.stop_strings": "stop_sequences",
        "chat.template_arguments": "chat_template_kwargs",
    }
    conversation = Conversation("messages", work, paths)
    names = FieldNames(conversation.paths, _LEAVES)
    try:
        asked = yield from _read_fields(body, caller, conversation, work)
    except InvalidRequestError as error:
        names.rename(error)
        raise
    asked.field_names = names
    return asked


def _read_fields(
    body: Mapping[str, Any], caller: Caller, conversation: Conversation, work: Work
) -> Generator[int, None, Asked]:
    found = read_fields(body, _FIELDS)
    found["stop"] = found.get("stop_sequences", ())
    if not found.get("stream"):  # a message has no call that was cut
        found.pop("stream_tool_arguments", None)
    *chosen, parallel = found.get("tool_choice", (ToolChoice.AUTO, "", True))
    found["tool_choice"], found["parallel_tool_calls"] = tuple(chosen), parallel
    config = found.get("output_config", {})
    if "effort" in config:
        found["reasoning_effort"] = config["effort"]
    if "format" in config:
        found["response_format"] = config["format"]
    if "thinking" in found:
        thinks = dict.fromkeys(_THINKS, found["thinking"])
        found["chat_template_kwargs"] = {**thinks, **found.get("chat_template_kwargs", {})}
    tools: tuple[Tool, ...] = ()
    if "tools" in found:
        tools = yield from read_tools(found["tools"], _TOOL, kind="custom", parameters="input_schema", work=work)
    if "system" in found:
        pieces = yield from _read_blocks(found["system"], "system", ("text",), conversation, work)
        system = _BETWEEN_SYSTEM_TEXTS.join([piece for piece, _ in pieces if isinstance(piece, str)])
        yield from conversation.add("system", [(system, "system")], "system")
    yield from _read_messages(found.get("messages"), conversation, work)
    return ask_chat(found, conversation.messages, tools, caller)


def _tool_call(value: Any, path: str) -> ToolCall:
    found = read_fields(value, _BLOCKS["tool_use"], f"{path}.")
    for name in ("name", "id"):
        if name not in found:
            raise InvalidRequestError(f"{path}.{name}: is missing", field=f"{path}.{name}")
    if isinstance(value.get("input"), str):
        raise wrong(value["input"], f"{path}.input", "an object")
    return ToolCall(found["name"], found.get("input", JsonObject.of_text("{}")), found["id"])


def _read_messages(value: Any, conversation: Conversation, work: Work) -> Generator[int, None, None]:
    if value is None:
        raise InvalidRequestError("messages: is missing", field="messages")
    items = lists(value, "messages")
    if not items:
        raise InvalidRequestError("messages: is empty", field="messages")
    if len(items) > MAX_MESSAGES:
        why = f"messages: has at most {MAX_MESSAGES} messages, not {len(items)}"
        raise InvalidRequestError(why, field="messages")
    for index, item in enumerate(items):
        path = f"messages[{index}]"
        found = read_fields(objects(item, path), _MESSAGE, f"{path}.")
        for name in ("role", "content"):
            if name not in found:
                raise InvalidRequestError(f"{path}.{name}: is missing", field=f"{path}.{name}")
        if found["role"] == "assistant":
            if index == len(items) - 1:
                why = f"{path}: no answer goes on with a text that its client began: end with a message of the user"
                raise UnsupportedFieldError(why, field=path)
            yield from _read_turn(found["content"], path, conversation, work)
        else:
            yield from _read_other(found["role"], found["content"], path, conversation, work)


def _read_turn(value: Any, path: str, conversation: Conversation, work: Work) -> Generator[int, None, None]:
    turn = Turn(path)
    if isinstance(value, str):
        turn.pieces.append((value, f"{path}.content"))
    for where, kind, block in _blocks(value, f"{path}.content", _IN_TURN, conversation):
        if kind == "tool_use":
            turn.calls.append((where, block))
        else:
            found = read_fields(block, _BLOCKS[kind], f"{where}.")
            if kind not in found:
                raise InvalidRequestError(f"{where}.{kind}: is missing", field=f"{where}.{kind}")
            if kind == "thinking":
                turn.reasoning.append(found[kind])
            else:
                turn.pieces.append((found[kind], f"{where}.{kind}"))
        yield from work.spend(MESSAGE_WORK)
    yield from conversation.add_turn(turn, _tool_call, ("input",))


def _read_other(role: str, value: Any, path: str, conversation: Conversation, work: Work) -> Generator[int, None, None]:
    """A message of the user, or of the system; results of tools in it are messages of their own."""
    if isinstance(value, str):
        yield from conversation.add(role, [(value, f"{path}.content")], path)
        return
    pieces = list[Piece]()
    for where, kind, block in _blocks(value, f"{path}.content", _IN_OTHERS, conversation):
        if kind != "tool_result":
            pieces.append((yield from _read_piece(block, kind, where, work)))
            continue
        found = read_fields(block, _BLOCKS[kind], f"{where}.")
        if "tool_use_id" not in found:
            raise InvalidRequestError(f"{where}.tool_use_id: is missing", field=f"{where}.tool_use_id")
        if pieces:
            yield from conversation.add(role, pieces, path)
            pieces = []
        content = found.get("content", "")
        result = yield from _read_blocks(content, f"{where}.content", _IN_RESULTS, conversation, work)
        yield from conversation.add("tool", result, where, tool_call_id=found["tool_use_id"])
    if pieces or not value:
        yield from conversation.add(role, pieces, path)


def _read_blocks(
    value: Any, path: str, kinds: Sequence[str], conversation: Conversation, work: Work
) -> Generator[int, None, Sequence[Piece]]:
    """A text, or blocks of texts and pictures."""
    if isinstance(value, str):
        return [(value, path)]
    pieces = list[Piece]()
    for where, kind, block in _blocks(value, path, kinds, conversation):
        pieces.append((yield from _read_piece(block, kind, where, work)))
    return pieces


def _blocks(
    value: Any, path: str, kinds: Sequence[str], conversation: Conversation
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The path, type and fields of each block of a list; none of a text. They are counted before the first is read."""
    if isinstance(value, str):
        return
    if not isinstance(value, list | array):
        raise wrong(value, path, "a string or a list of blocks")
    conversation.count_parts(len(value), path)
    read_kind = choice(*kinds)
    for index, item in enumerate(value):
        where = f"{path}[{index}]"
        yield where, read_kind(objects(item, where).get("type"), f"{where}.type"), item


def _read_piece(block: Mapping[str, Any], kind: str, path: str, work: Work) -> Generator[int, None, Piece]:
    """A text, or a picture as a URL."""
    found = read_fields(block, _BLOCKS[kind], f"{path}.")
    yield from work.spend(MESSAGE_WORK)
    name = "text" if kind == "text" else "source"
    if name not in found:
        raise InvalidRequestError(f"{path}.{name}: is missing", field=f"{path}.{name}")
    if kind == "text":
        return found["text"], f"{path}.text"
    path = f"{path}.source"
    source = read_fields(found["source"], _SOURCE, f"{path}.")
    for needed in ("type",) if "type" not in source else _SOURCE_FIELDS[source["type"]]:
        if needed not in source:
            raise InvalidRequestError(f"{path}.{needed}: is missing", field=f"{path}.{needed}")
    if source["type"] == "url":
        return MediaUrl(source["url"]), path
    yield from work.spend(MESSAGE_WORK + len(source["data"]) // _COPIED_OF_WORK)
    return MediaUrl(f"data:{source['media_type']};base64,{source['data']}"), path


_SOURCE_FIELDS: Mapping[str, Sequence[str]] = {"base64": ("media_type", "data"), "url": ("url",)}

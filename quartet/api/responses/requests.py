"""Requests of /v1/responses, read into the requests that the pipeline runs.

The tables below say of each field whether it is taken, ignored or refused; docs/responses.md says why.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Mapping, Sequence
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
    only,
    read_fields,
    refused,
    text,
    wrong,
)
from quartet.api.openai.requests import (
    CHAT_FIELDS,
    EXTENSIONS,
    MESSAGE_WORK,
    Asked,
    Caller,
    ask_chat,
    measured,
)
from quartet.api.openai.steps import Work
from quartet.engine.sampling import GuidedDecoding
from quartet.errors import InvalidRequestError
from quartet.media.items import MediaUrl
from quartet.text.chat_message import Tool, ToolCall
from quartet.text.json_object import JsonObject

_MAX_INT32 = 2**31 - 1
# Bounds of OpenAI's own: answers repeat the metadata.
_MAX_METADATA, _MAX_METADATA_NAME_LENGTH, _MAX_METADATA_LENGTH = 16, 64, 512
_NOT_KEPT = "answers are not kept: send the items of the conversation as input"


def _metadata(value: Any, path: str) -> Mapping[str, str]:
    pairs = objects(value, path)
    if len(pairs) > _MAX_METADATA or any(len(name) > _MAX_METADATA_NAME_LENGTH for name in pairs):
        bounds = f"{_MAX_METADATA} pairs, whose names have at most {_MAX_METADATA_NAME_LENGTH} characters"
        why = f"{path}: has at most {bounds}"
        raise InvalidRequestError(why, field=path)
    for name, one in pairs.items():
        if len(text(one, f"{path}.{name}")) > _MAX_METADATA_LENGTH:
            why = f"{path}.{name}: has at most {_MAX_METADATA_LENGTH} characters"
            raise InvalidRequestError(why, field=f"{path}.{name}")
    return pairs


def _format(value: Any, path: str) -> tuple[str, GuidedDecoding | None]:
    """The format's type, and its grammar."""
    found = dict(objects(value, path))
    kind = choice("text", "json_object", "json_schema")(found.pop("type", None), f"{path}.type")
    return kind, read_format(kind, found, path)


def _tool_choice(value: Any, path: str) -> tuple[ToolChoice, str]:
    if isinstance(value, dict) and value.get("type") == "function" and "name" in value:
        fields_of({"type": text, "name": text})(value, path)
        value = {"type": "function", "function": {"name": value["name"]}}
    chosen: tuple[ToolChoice, str] = CHAT_FIELDS["tool_choice"](value, path)
    return chosen


_FIELDS: Mapping[str, Reader] = {
    **EXTENSIONS,
    "stop": CHAT_FIELDS["stop"],
    "model": text,
    "input": anything,
    "instructions": text,
    "stream": boolean,
    "stream_options": fields_of({"include_obfuscation": only(False)}),
    "max_output_tokens": integer(1, _MAX_INT32),
    **dict.fromkeys(("temperature", "top_p"), number),
    "tools": anything,
    "tool_choice": _tool_choice,
    "parallel_tool_calls": boolean,
    "text": fields_of({"format": _format, "verbosity": refused("say it in the instructions")}),
    "reasoning": fields_of(
        {
            "effort": text,
            **dict.fromkeys(("summary", "generate_summary"), choice("auto", "concise", "detailed")),
            "context": only("auto"),
            "mode": only("standard"),
        }
    ),
    # Reasoning is shown as it is, so there is nothing to encrypt.
    "include": list_of(only("reasoning.encrypted_content"), max_length=8),
    "truncation": only("disabled"),
    "background": only(False),
    "top_logprobs": only(0),
    "metadata": _metadata,
    **dict.fromkeys(("store", "user", "service_tier", "prompt_cache_key", "safety_identifier"), ignored),
    **{
        name: refused(why)
        for names, why in {
            "previous_response_id conversation": _NOT_KEPT,
            "prompt": "the client writes its prompts out",
            "max_tool_calls": "clients run their tools themselves",
            "moderation": "models here moderate nothing",
            "prompt_cache_options prompt_cache_retention": "workers keep blocks while they have room",
            "context_management": "a prompt that is too long is an error",
            "background_options": "every answer is waited for",
            "access_programs image": "no model here takes it",
        }.items()
        for name in names.split()
    },
}

_TOOL: Mapping[str, Reader] = {
    "type": text,
    "name": text,
    "description": text,
    "parameters": measured,
    "strict": boolean,
    "defer_loading": only(False),
    **dict.fromkeys(("allowed_callers", "output_schema"), refused("clients run their tools themselves")),
    "async": only(False),
}
# Of items that answers had: what says nothing of the conversation.
_OF_ANSWER: Mapping[str, Reader] = {"type": text, "id": ignored, "status": ignored}
_CALL: Mapping[str, Reader] = {
    **_OF_ANSWER,
    "call_id": text,
    "name": text,
    "arguments": measured,
    "async": only(False),
    **dict.fromkeys(("namespace", "caller"), refused("models here call functions only")),
}
_OUTPUT: Mapping[str, Reader] = {
    **_OF_ANSWER,
    "call_id": text,
    "output": anything,
    "name": ignored,
    **dict.fromkeys(("namespace", "caller"), refused("models here call functions only")),
}
_MESSAGE: Mapping[str, Reader] = {
    **_OF_ANSWER,
    "role": choice("user", "assistant", "system", "developer"),
    "content": anything,
    "phase": ignored,
}
_REASONING: Mapping[str, Reader] = {
    **_OF_ANSWER,
    "summary": anything,
    "content": anything,
    "encrypted_content": ignored,
}
_ITEMS: Mapping[str, Mapping[str, Reader]] = {
    "message": _MESSAGE,
    "function_call": _CALL,
    "function_call_output": _OUTPUT,
    "reasoning": _REASONING,
}
_READ_KIND = choice(*_ITEMS)

_NO_FILES = "models here take text and pictures, and no files are kept"
_PART: Mapping[str, Reader] = {
    "type": choice("input_text", "output_text", "text", "refusal", "input_image", "reasoning_text", "summary_text"),
    "text": text,
    "refusal": text,
    "image_url": text,
    "detail": choice("auto", "low", "high", "original"),
    "annotations": empty("no template shows them"),
    "logprobs": ignored,
    **dict.fromkeys(("file_id", "file_data", "file_url", "filename", "input_audio"), refused(_NO_FILES)),
    "prompt_cache_breakpoint": refused("prefixes are found in the cache by themselves"),
}


def read_response(body: Mapping[str, Any], caller: Caller) -> Generator[int, None, Asked]:
    """A request of /v1/responses, in steps; yields the work of each, in 0.1 microseconds.

    Raises:
        InvalidRequestError: naming the field.
    """
    work = Work()
    paths = {
        "sampling.max_tokens": "max_output_tokens",
        "sampling.guided": "structured_outputs" if body.get("structured_outputs") else "text.format",
        "text_options.stop_strings": "stop",
        "chat.template_arguments": "chat_template_kwargs",
    }
    conversation = Conversation("input", work, paths)
    names = FieldNames(conversation.paths, {"tool_call_id": "call_id", "id": "call_id"})
    try:
        asked = yield from _read(body, caller, conversation, work)
    except InvalidRequestError as error:
        names.rename(error)
        raise
    asked.field_names = names
    return asked


def _read(
    body: Mapping[str, Any], caller: Caller, conversation: Conversation, work: Work
) -> Generator[int, None, Asked]:
    found = read_fields(body, _FIELDS)
    if "max_output_tokens" in found:
        found["max_tokens"] = found["max_output_tokens"]
    kind, grammar = found.get("text", {}).get("format", ("text", None))
    if grammar is not None:
        found["response_format"] = grammar
    reasoning = found.get("reasoning", {})
    if "effort" in reasoning:
        found["reasoning_effort"] = reasoning["effort"]
    tools: tuple[Tool, ...] = ()
    if "tools" in found:
        tools = yield from read_tools(found["tools"], _TOOL, kind="function", parameters="parameters", work=work)
    if "instructions" in found:
        yield from conversation.add("system", [(found["instructions"], "instructions")], "instructions")
    yield from _read_input(found.get("input"), conversation, work)
    asked = ask_chat(found, conversation.messages, tools, caller)
    asked.repeated = {
        "max_output_tokens": found.get("max_tokens"),
        "metadata": found.get("metadata", {}),
        "parallel_tool_calls": found.get("parallel_tool_calls", True),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "temperature": found.get("temperature", 1.0),
        # A schema may be long, and each of three events would repeat it.
        "text": {"format": {"type": kind}} if kind != "json_schema" else None,
        "tool_choice": _shown_choice(*found.get("tool_choice", (ToolChoice.AUTO, ""))),
        "top_p": found.get("top_p", 1.0),
    }
    return asked


def _shown_choice(tool_choice: ToolChoice, name: str) -> str | dict[str, str]:
    return {"type": "function", "name": name} if tool_choice is ToolChoice.FUNCTION else tool_choice.value


def _tool_call(value: Any, path: str) -> ToolCall:
    found = read_fields(value, _CALL, f"{path}.")
    for name in ("name", "call_id"):
        if name not in found:
            raise InvalidRequestError(f"{path}.{name}: is missing", field=f"{path}.{name}")
    arguments = found.get("arguments")
    if arguments is None or not arguments.text:
        arguments = JsonObject.of_text("{}")
    return ToolCall(found["name"], arguments, found["call_id"])


def _read_input(value: Any, conversation: Conversation, work: Work) -> Generator[int, None, None]:
    if value is None:
        raise InvalidRequestError("input: is missing", field="input")
    if isinstance(value, str):
        yield from conversation.add("user", [(value, "input")], "input")
    elif not isinstance(value, list | array):
        raise wrong(value, "input", "a string or a list of items")
    elif len(value) > MAX_MESSAGES:
        raise InvalidRequestError(f"input: has at most {MAX_MESSAGES} items, not {len(value)}", field="input")
    else:
        yield from _read_items(value, conversation, work)


def _read_items(items: Sequence[Any], conversation: Conversation, work: Work) -> Generator[int, None, None]:
    turn: Turn | None = None
    for index, item in enumerate(items):
        path = f"input[{index}]"
        kind = _kind(item, path)
        of_assistant = kind in ("function_call", "reasoning") or (kind == "message" and item.get("role") == "assistant")
        # What follows a message is of another turn, but calls are of the same.
        if turn is not None and not (of_assistant and (kind == "function_call" or not turn.pieces or turn.calls)):
            yield from conversation.add_turn(turn, _tool_call, ("arguments",))
            turn = None
        if not of_assistant:
            yield from _read_item(item, kind, path, conversation, work)
            continue
        turn = turn or Turn(path)
        if kind == "function_call":
            turn.calls.append((path, item))
        elif kind == "reasoning":
            turn.reasoning += yield from _read_reasoning(item, path, conversation, work)
        else:
            found = read_fields(item, _MESSAGE, f"{path}.")
            turn.pieces += yield from _read_content(found.get("content"), f"{path}.content", conversation, work)
    if turn is not None:
        yield from conversation.add_turn(turn, _tool_call, ("arguments",))


def _kind(item: Any, path: str) -> str:
    kind = objects(item, path).get("type") or "message"
    if kind == "item_reference":
        raise InvalidRequestError(f"{path}.type: {_NOT_KEPT}", field=f"{path}.type")
    return str(_READ_KIND(kind, f"{path}.type"))


def _read_item(
    item: Mapping[str, Any], kind: str, path: str, conversation: Conversation, work: Work
) -> Generator[int, None, None]:
    found = read_fields(item, _ITEMS[kind], f"{path}.")
    name, needed = ("output", "call_id") if kind == "function_call_output" else ("content", "role")
    if needed not in found:
        raise InvalidRequestError(f"{path}.{needed}: is missing", field=f"{path}.{needed}")
    pieces = yield from _read_content(found.get(name), f"{path}.{name}", conversation, work)
    if kind == "function_call_output":
        yield from conversation.add("tool", pieces, path, tool_call_id=found["call_id"])
    else:
        # Templates know no developer: to them that is the system.
        yield from conversation.add("system" if found["role"] == "developer" else found["role"], pieces, path)


def _read_content(
    value: Any, path: str, conversation: Conversation, work: Work
) -> Generator[int, None, Sequence[Piece]]:
    """A text, or parts."""
    if value is None:
        raise InvalidRequestError(f"{path}: is missing", field=path)
    if isinstance(value, str):
        return [(value, path)]
    pieces = list[Piece]()
    items = lists(value, path)
    conversation.count_parts(len(items), path)
    for index, item in enumerate(items):
        where = f"{path}[{index}]"
        found = read_fields(objects(item, where), _PART, f"{where}.")
        kind = found.get("type", "")
        name = {"input_image": "image_url", "refusal": "refusal"}.get(kind, "text")
        if not kind or name not in found:
            raise InvalidRequestError(f"{where}: a part has a type, and its {name}", field=where)
        pieces.append((MediaUrl(found[name]) if name == "image_url" else found[name], f"{where}.{name}"))
        yield from work.spend(MESSAGE_WORK)
    return pieces


def _read_reasoning(
    item: Mapping[str, Any], path: str, conversation: Conversation, work: Work
) -> Generator[int, None, list[str]]:
    """What was thought; its summary only where that is all there is."""
    found = read_fields(item, _REASONING, f"{path}.")
    name = "content" if found.get("content") else "summary"
    pieces = yield from _read_content(found.get(name, []), f"{path}.{name}", conversation, work)
    yield from work.spend(MESSAGE_WORK)
    return [piece for piece, _ in pieces if isinstance(piece, str)]

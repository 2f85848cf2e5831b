"""OpenAI's requests for completions, read into the requests that the pipeline runs.

The tables below say of each field that clients send whether it is taken, ignored or refused; docs/http.md says why.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quartet.api.chat import (
    MAX_JOINT_LENGTH,
    MAX_JSON_LENGTH,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    ChatPrompt,
    ToolChoice,
    check_message,
)
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
from quartet.api.openai.steps import Work
from quartet.api.request import (
    MAX_CHOICES,
    MAX_STOP_STRINGS,
    GenerateStart,
    Prompt,
    TextOptions,
    TextPrompt,
    TokenPrompt,
)
from quartet.engine.sampling import (
    MAX_CHOICES_OF_GRAMMAR,
    MAX_STOP_IDS,
    GrammarKind,
    GuidedDecoding,
    OutputOptions,
    Sampling,
    check_counts,
    guided_choice,
)
from quartet.errors import InvalidRequestError, UnsupportedFieldError
from quartet.media.items import MediaPart, MediaUrl
from quartet.text.chat_message import ChatMessage, Tool, ToolCall
from quartet.text.json_object import JsonObject

_MAX_INT32 = 2**31 - 1
_MAX_TOKEN_ID = 2**32 - 1
_MAX_LOGPROBS = 20
# OpenAI's default for completions, which vLLM has too.
_DEFAULT_MAX_TOKENS = 16
#: What a message or a part takes, in units of work.
MESSAGE_WORK = 30
# The same of a tool or a call, and of a value in one's JSON.
_TOOL_WORK, _VALUE_WORK = 60, 4
# Characters of JSON that are written out in a unit.
_CHARACTERS_OF_WORK = 32

ValueT = TypeVar("ValueT")

_NO_ARGUMENTS = JsonObject.of_text("{}")
_COUNT = integer(0, _MAX_INT32)


@dataclass(kw_only=True, slots=True)
class Asked:
    """A request for completions.

    Attributes:
        starts: one for each prompt; a chat has one. ``take_starts`` gives them away: a stream may live for long.
        model: the name of the model, as the client gave it.
        num_choices: of each prompt.
        is_chat: of messages, not of plain prompts.
        streams: the answer comes in events.
        shows_usage: a stream ends with the usage.
        shows_usage_always: each event of a stream has the usage so far.
        shows_token_ids: token ids stand beside the text.
        shows_placement: the answer says where each choice ran, and where its time went.
        num_logprobs: alternatives at each position; ``None``: no log probabilities.
        echoes: each choice begins with its prompt.
        hides_output: there is nothing after it: the one token that workers give is left out.
        names: of fields that the client called by another name than others do.
        field_names: of all fields, in an API that is not OpenAI's of completions.
        repeated: what the answer repeats of the request, by field.
    """

    starts: Sequence[GenerateStart]
    model: str
    num_choices: int
    is_chat: bool
    streams: bool = False
    shows_usage: bool = False
    shows_usage_always: bool = False
    shows_token_ids: bool = False
    shows_placement: bool = False
    num_logprobs: int | None = None
    echoes: bool = False
    hides_output: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    field_names: FieldNames | None = None
    repeated: Mapping[str, Any] = field(default_factory=dict)

    def take_starts(self) -> Sequence[GenerateStart]:
        """The starts, which are not kept here any longer."""
        starts, self.starts = self.starts, ()
        return starts


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """What a router knows of an API key that a caller has shown; never the key itself.

    Attributes:
        tenant: whose it is.
        id: names it in logs and accounts.
        requests_per_minute, tokens_per_minute: what those who show it may ask for, besides the limits of the tenant.
    """

    tenant: str
    id: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether those who show it may ask for only so much in a minute."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """What the headers say about a request.

    Attributes:
        tenant: whom its key names; empty: nobody.
        key: that key; ``None``: there is none.
        address: whom the connection comes from.
        client_request_id: the client's own name for the request; empty: none.
        session_key: shared by the requests of a conversation; empty: none.
        traceparent: W3C trace context; empty: no trace.
        received_at: when its head was read, in monotonic seconds.
    """

    tenant: str = ""
    address: str = ""
    client_request_id: str = ""
    session_key: str = ""
    traceparent: str = ""
    received_at: float = field(default_factory=time.monotonic)
    key: ApiKey | None = None

    @property
    def payer(self) -> str:
        """Who holds what is in memory for the request."""
        return self.tenant or self.address


def _logit_bias(value: Any, path: str) -> dict[int, float]:
    biases = {}
    check_counts(objects(value, path), ())
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > len(str(_MAX_TOKEN_ID)):
            raise InvalidRequestError(f"{path}: its keys must be token ids", field=path)
        biases[int(key)] = number(bias, f"{path}.{key}")
    return biases


def _top_k(value: Any, path: str) -> int:
    return max(0, int(integer(-1, _MAX_INT32)(value, path)))  # -1 is vLLM's name for all


def _seed(value: Any, path: str) -> int:
    return int(integer(-(2**63), 2**64 - 1)(value, path)) % 2**64


def _target_ms(value: Any, path: str) -> float:
    target_ms = number(value, path)
    if target_ms < 0:
        raise InvalidRequestError(f"{path}: must not be below 0", field=path)
    return target_ms


def _target_s(found: Mapping[str, Any], name: str) -> float | None:
    target_ms = found.get(name, found.get("nvext", {}).get(name))
    return None if target_ms is None else target_ms / 1000


def _json_text(value: Any, path: str) -> str:
    """A JSON object as text, which it may be already."""
    if not isinstance(value, str):
        _check_length(_measure(objects(value, path))[0], path)
    return _written(value, path)


def _written(value: Any, path: str) -> str:
    """The same, of an object that was measured."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(objects(value, path), ensure_ascii=False, default=list)  # long lists came as arrays
    except RecursionError:
        raise InvalidRequestError(f"{path}: is nested too deeply", field=path) from None


def _check_length(num_characters: int, path: str) -> None:
    if num_characters > MAX_JSON_LENGTH:
        raise InvalidRequestError(f"{path}: the JSON is longer than {MAX_JSON_LENGTH} characters", field=path)


_WITH_LENGTH, _CONTAINERS = frozenset({str, array}), frozenset({dict, list})


def _measure(value: Any) -> tuple[int, int]:
    """How many characters ``value`` has at least if it is written out, and values; counted to the first bound."""
    num_characters, num_values = 0, 1
    rest: list[Any] = [[value]]
    while rest and num_characters <= MAX_JSON_LENGTH:
        part = rest.pop()
        if isinstance(part, dict):
            num_characters += sum(map(len, part))
            part = part.values()
        num_values += len(part)
        # Not one by one: that would take as long as to write it out.
        num_characters += len(part) + sum([len(one) for one in part if type(one) in _WITH_LENGTH])
        rest += [one for one in part if type(one) in _CONTAINERS]
    return num_characters, num_values


def _json_object(value: Any, path: str) -> JsonObject:
    return JsonObject.of_text(_json_text(value, path))


def _tool_choice(value: Any, path: str) -> tuple[ToolChoice, str]:
    if isinstance(value, str):
        return ToolChoice(choice("auto", "none", "required")(value, path)), ""
    named = fields_of({"type": only("function"), "function": fields_of({"name": text})})(value, path)
    if "name" not in named.get("function", {}):
        raise InvalidRequestError(f"{path}: needs function.name", field=path)
    return ToolChoice.FUNCTION, named["function"]["name"]


def measured(value: Any, path: str) -> JsonObject:
    """A JSON object that ``read_functions`` has measured, or its text. Raises ``InvalidRequestError``: it is none."""
    return JsonObject.of_text(_written(value, path))


_FUNCTION: Mapping[str, Reader] = {"name": text, "description": text, "parameters": measured, "strict": boolean}
_CALLED: Mapping[str, Reader] = {"name": text, "arguments": measured}


def _read_functions(
    value: Any, path: str, read: Callable[[Any, str], ValueT], *, name: str, max_length: int, work: Work
) -> Generator[int, None, tuple[ValueT, ...]]:
    """What ``read`` reads of each of a list of tools or calls, whose JSON is the field ``name`` of their function."""
    items = list_of(anything, max_length=max_length)(value, path)
    pairs = [(f"{path}[{index}]", item) for index, item in enumerate(items)]
    return (yield from read_functions(pairs, read, path=path, json_at=("function", name), work=work))


def read_functions(
    items: Sequence[tuple[str, Any]],
    read: Callable[[Any, str], ValueT],
    *,
    path: str,
    json_at: Sequence[str],
    work: Work,
) -> Generator[int, None, tuple[ValueT, ...]]:
    """What ``read`` reads of each of some tools or calls, in steps. Each comes with its path.

    All their JSON, the field of each that the names in ``json_at`` lead to, is measured before any is written out.

    Raises:
        InvalidRequestError: it is too long; names the field, or ``path`` for all together.
    """
    num_together = 0
    for where, item in items:
        shown = item
        for name in json_at:
            shown = shown.get(name, "") if isinstance(shown, dict) else ""
        num_characters, num_values = _measure(shown)
        _check_length(num_characters, ".".join((where, *json_at)))
        num_together += num_characters
        if num_together > MAX_JOINT_LENGTH:
            why = f"{path}: their JSON is longer than {MAX_JOINT_LENGTH} characters together"
            raise InvalidRequestError(why, field=path)
        cost = 0 if isinstance(shown, str) else num_values * _VALUE_WORK + num_characters // _CHARACTERS_OF_WORK
        yield from work.spend(_TOOL_WORK + cost)
    functions = list[ValueT]()
    for where, item in items:
        functions.append(read(item, where))
        yield from work.spend(_TOOL_WORK)
    return tuple(functions)


def _tool(value: Any, path: str) -> Tool:
    found = fields_of({"type": only("function"), "function": fields_of(_FUNCTION)})(value, path)
    function = found.get("function", {})
    if "name" not in function:
        raise InvalidRequestError(f"{path}.function.name: is missing", field=f"{path}.function.name")
    return Tool(**function)


def _tool_call(value: Any, path: str) -> ToolCall:
    # Streams number calls by an index, which clients send back; what counts is the order of the list.
    table = {"id": text, "type": only("function"), "index": _COUNT, "function": fields_of(_CALLED)}
    found = fields_of(table)(value, path)
    function = found.get("function", {})
    if "name" not in function:
        raise InvalidRequestError(f"{path}.function.name: is missing", field=f"{path}.function.name")
    if function.get("arguments", _NO_ARGUMENTS).text == "":
        function.pop("arguments")
    return ToolCall(id=found.get("id", ""), **function)


def _refused(reasons: Mapping[str, str]) -> dict[str, Reader]:
    """Fields that are refused, several a line, by why."""
    return {name: refused(why) for names, why in reasons.items() for name in names.split()}


_FORMATS: Mapping[str, Reader] = {
    "type": choice("text", "json_object", "json_schema", "structural_tag"),
    # Answers follow the schema strictly, whatever `strict` says; its name and description say nothing to a grammar.
    "json_schema": fields_of({"name": text, "description": text, "strict": boolean, "schema": _json_text}),
    # vLLM's; the grammar's reader looks into them.
    **dict.fromkeys(("structures", "triggers", "format"), anything),
}

_GRAMMARS: Mapping[str, Reader] = {
    "json": _json_text,
    "regex": text,
    "grammar": text,
    "json_object": boolean,
    "choice": list_of(text, max_length=MAX_CHOICES_OF_GRAMMAR),
    "structural_tag": _json_text,
    **_refused({"whitespace_pattern": "JSON is written on one line or indented"}),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties", "disable_fallback"), only(False)),
}
_KINDS: Mapping[str, GrammarKind] = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "grammar": GrammarKind.EBNF,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}
_ANY_OBJECT = '{"type": "object"}'


def _response_format(value: Any, path: str) -> GuidedDecoding | None:
    found = read_fields(objects(value, path), _FORMATS, f"{path}.")
    match found.get("type"):
        case "text":
            return None
        case "json_object":
            return _guided(GrammarKind.JSON_SCHEMA, _ANY_OBJECT, path)
        case "json_schema" if "schema" in found.get("json_schema", {}):
            return _guided(GrammarKind.JSON_SCHEMA, found["json_schema"]["schema"], path)
        case "structural_tag":
            return _guided(GrammarKind.STRUCTURAL_TAG, _json_text(value, path), path)
    raise InvalidRequestError(f"{path}: needs a type, and json_schema.schema with json_schema", field=path)


def _structured_outputs(value: Any, path: str) -> GuidedDecoding | None:
    found = read_fields(objects(value, path), _GRAMMARS, f"{path}.")
    asked = [name for name in (*_KINDS, "json_object", "choice") if name in found]
    if len(asked) != 1:
        why = f"{path}: needs one of json, regex, grammar, choice, structural_tag and json_object"
        raise InvalidRequestError(why, field=path)
    [name] = asked
    if name == "choice":
        return _named(lambda: guided_choice(found[name]), path)
    if name == "json_object":
        return _guided(GrammarKind.JSON_SCHEMA, _ANY_OBJECT, path) if found[name] else None
    return _guided(_KINDS[name], found[name], path)


def _guided(kind: GrammarKind, grammar: str, path: str) -> GuidedDecoding:
    return _named(lambda: GuidedDecoding(kind, grammar), path)


def _named(make: Callable[[], GuidedDecoding], path: str) -> GuidedDecoding:
    """What ``make`` makes; its refusals name ``path``."""
    try:
        return make()
    except InvalidRequestError as error:
        error.field = path
        raise


# Of both kinds of requests: OpenAI's fields, then those that vLLM's clients send.
_COMMON: Mapping[str, Reader] = {
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"), ignored),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), number),
    **dict.fromkeys(("min_p", "repetition_penalty"), number),
    **dict.fromkeys(("min_tokens", "n", "best_of"), _COUNT),
    "max_tokens": integer(1, _MAX_INT32),
    **dict.fromkeys(("model", "cache_salt", "request_id"), text),
    **dict.fromkeys(("stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"), boolean),
    **dict.fromkeys(("return_token_ids", "return_placement", "add_special_tokens"), boolean),
    "stream_options": fields_of(
        {"include_usage": boolean, "continuous_usage_stats": boolean, "include_obfuscation": only(False)}
    ),
    "stop": one_or_many(text, max_length=MAX_STOP_STRINGS),
    "seed": _seed,
    "logit_bias": _logit_bias,
    "top_k": _top_k,
    "stop_token_ids": list_of(integer(0, _MAX_TOKEN_ID), max_length=MAX_STOP_IDS),
    "priority": integer(-_MAX_INT32, _MAX_INT32),
    **dict.fromkeys(("ttft_target", "itl_target"), _target_ms),
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "nvext": fields_of({"ignore_eos": boolean, "ttft_target": _target_ms, "itl_target": _target_ms}),
    "spaces_between_special_tokens": only(True),
    "length_penalty": only(1, 1.0),
    **dict.fromkeys(("use_beam_search", "early_stopping", "return_tokens_as_token_ids", "echo"), only(False)),
    "bad_words": empty("use logit_bias or stop"),
    **_refused(
        {
            "prompt_logprobs": "completions have echo with logprobs",
            "truncate_prompt_tokens": "a prompt that is too long is an error",
            "allowed_token_ids vllm_xargs": "no engine here takes it",
            "logits_processors": "clients bring no code",
            "guided_json guided_regex guided_choice guided_grammar": "use structured_outputs",
            "guided_decoding_backend guided_whitespace_pattern": "use structured_outputs",
            "kv_transfer_params": "routers decide where blocks go",
            "logprob_token_ids": "use logprobs",
            "mm_processor_kwargs media_io_kwargs": "workers decide how pictures are read",
            "moderation": "models here moderate nothing",
            "prompt_cache_options prompt_cache_retention": "workers keep blocks while they have room",
            "thinking_token_budget": "no engine here takes it",
        }
    ),
}

_COMPLETION: Mapping[str, Reader] = {
    **_COMMON,
    "prompt": anything,
    "echo": boolean,
    "max_tokens": _COUNT,
    "logprobs": integer(0, _MAX_LOGPROBS),
    "suffix": only(""),
    **_refused({"prompt_embeds": "send text, token ids, or a chat with pictures"}),
}

#: How the fields of a chat are read. Readers of other APIs take from it what means the same there.
CHAT_FIELDS: Mapping[str, Reader] = {
    **_COMMON,
    "messages": anything,
    "max_completion_tokens": integer(1, _MAX_INT32),
    "logprobs": boolean,
    "top_logprobs": integer(0, _MAX_LOGPROBS),
    "add_generation_prompt": boolean,
    "tools": anything,
    "tool_choice": _tool_choice,
    "parallel_tool_calls": boolean,
    "stream_tool_arguments": boolean,
    "reasoning_effort": text,
    "include_reasoning": only(True),
    "chat_template_kwargs": objects,
    "chat_template_args": objects,
    "continue_final_message": only(False),
    "modalities": list_of(only("text"), max_length=1),
    **_refused(
        {
            "chat_template": "the operator sets it: custom_chat_template",
            "documents": "put them into a message",
            "functions": "use tools",
            "function_call": "use tool_choice",
            "audio": "models here give text",
            "prediction": "no engine here takes it",
            "verbosity": "use chat_template_kwargs",
            "web_search_options": "models here search nothing",
        }
    ),
}

#: Those of them that vLLM's clients send and that every API of chats takes here.
EXTENSIONS: Mapping[str, Reader] = {
    name: CHAT_FIELDS[name]
    for name in (
        *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed"),
        *("min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
        *("structured_outputs", "cache_salt", "priority", "request_id", "ttft_target", "itl_target"),
        *("stream_tool_arguments", "chat_template_kwargs"),
    )
}

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "min_tokens", "stop_token_ids", "ignore_eos"),
)


def read_completion(body: Mapping[str, Any], caller: Caller) -> Generator[int, None, Asked]:
    """A request of /v1/completions, in one step. Raises ``InvalidRequestError`` naming the field."""
    yield from ()
    found = read_fields(body, _COMPLETION)
    num_logprobs = found.get("logprobs")
    found.setdefault("max_tokens", _DEFAULT_MAX_TOKENS)
    if found.get("add_special_tokens") is False:
        raise UnsupportedFieldError(
            "add_special_tokens: false is not supported for text; send token ids", field="add_special_tokens"
        )
    prompts = _read_prompts(found.get("prompt"))
    num_choices = found.get("n", 1)
    if len(prompts) * num_choices > MAX_CHOICES:
        message = f"prompt: prompts times n must be at most {MAX_CHOICES}"
        raise InvalidRequestError(message, field="prompt" if num_choices <= MAX_CHOICES else "n")
    echoes, hides_output = found.get("echo", False), found["max_tokens"] == 0
    if echoes and found.get("stream"):
        raise UnsupportedFieldError("echo: true is not supported with stream: true", field="echo")
    if hides_output:
        if not echoes:
            raise InvalidRequestError("max_tokens: must be at least 1, or 0 with echo: true", field="max_tokens")
        found["max_tokens"] = 1  # engines sample a token after each prompt
    output = OutputOptions(
        logprobs=None if hides_output else num_logprobs, num_prompt_logprobs=num_logprobs if echoes else None
    )
    starts = [_start(found, prompt, caller, output) for prompt in prompts]
    asked = _asked(found, starts, num_logprobs, is_chat=False)
    asked.echoes, asked.hides_output = echoes, hides_output
    return asked


def read_chat(body: Mapping[str, Any], caller: Caller) -> Generator[int, None, Asked]:
    """A request of /v1/chat/completions, in steps; yields the work of each, in 0.1 microseconds.

    Raises:
        InvalidRequestError: naming the field.
    """
    found = read_fields(body, CHAT_FIELDS)
    num_logprobs = found.get("top_logprobs", 0) if found.get("logprobs") else None
    if num_logprobs is None and found.get("top_logprobs"):
        raise InvalidRequestError("top_logprobs: needs logprobs: true", field="top_logprobs")
    if found.get("add_special_tokens"):
        message = "add_special_tokens: true is not supported: the chat template writes them"
        raise UnsupportedFieldError(message, field="add_special_tokens")
    names = {}
    if "max_completion_tokens" in found:
        found["max_tokens"] = found["max_completion_tokens"]
        names["max_tokens"] = "max_completion_tokens"
    work = Work()
    tools: tuple[Tool, ...] = ()
    if "tools" in found:
        tools = yield from _read_functions(
            found["tools"], "tools", _tool, name="parameters", max_length=MAX_TOOLS, work=work
        )
    messages = yield from _read_messages(found.get("messages"), work)
    return ask_chat(found, messages, tools, caller, num_logprobs=num_logprobs, names=names)


def ask_chat(
    found: Mapping[str, Any],
    messages: tuple[ChatMessage, ...],
    tools: tuple[Tool, ...],
    caller: Caller,
    *,
    num_logprobs: int | None = None,
    names: Mapping[str, str] | None = None,
) -> Asked:
    """The request of a chat whose messages and tools are read, with what else its fields say in ``found``.

    Raises:
        InvalidRequestError: naming the field.
    """
    tool_choice, tool_name = found.get("tool_choice", (ToolChoice.AUTO, ""))
    prompt = ChatPrompt(
        messages,
        add_generation_prompt=found.get("add_generation_prompt", True),
        tools=tools,
        tool_choice=tool_choice,
        tool_name=tool_name,
        parallel_tool_calls=found.get("parallel_tool_calls", True),
        template_arguments=_template_arguments(found),
    )
    start = _start(found, prompt, caller, OutputOptions(logprobs=num_logprobs))
    return _asked(found, [start], num_logprobs, is_chat=True, names=names)


def _template_arguments(found: Mapping[str, Any]) -> JsonObject | None:
    """Variables of the template, by either of their names, and the one that OpenAI has a field for."""
    arguments = {**found.get("chat_template_args", {}), **found.get("chat_template_kwargs", {})}
    if "reasoning_effort" in found:
        arguments["reasoning_effort"] = found["reasoning_effort"]
    return _json_object(arguments, "chat_template_kwargs") if arguments else None


def _asked(
    found: Mapping[str, Any],
    starts: Sequence[GenerateStart],
    num_logprobs: int | None,
    *,
    is_chat: bool,
    names: Mapping[str, str] | None = None,
) -> Asked:
    options = found.get("stream_options", {})
    if options and not found.get("stream"):
        raise InvalidRequestError("stream_options: needs stream: true", field="stream_options")
    best_of = found.get("best_of")
    if best_of is not None and best_of != found.get("n", 1):
        raise UnsupportedFieldError("best_of: must be as n, or left out", field="best_of")
    known = dict(names or {})
    if "structured_outputs" in found and not found.get("response_format"):
        known["guided"] = "structured_outputs"
    return Asked(
        starts=starts,
        model=found.get("model", ""),
        num_choices=found.get("n", 1),
        is_chat=is_chat,
        streams=found.get("stream", False),
        shows_usage=options.get("include_usage", False),
        shows_usage_always=options.get("include_usage", False) and options.get("continuous_usage_stats", False),
        shows_token_ids=found.get("return_token_ids", False),
        shows_placement=found.get("return_placement", False),
        num_logprobs=num_logprobs,
        names=known,
    )


def _start(found: Mapping[str, Any], prompt: Prompt, caller: Caller, output: OutputOptions) -> GenerateStart:
    sampling = {name: found[name] for name in _SAMPLING if name in found}
    if found.get("nvext", {}).get("ignore_eos"):
        sampling["ignore_eos"] = True
    guided, other = found.get("response_format"), found.get("structured_outputs")
    if guided is not None and other is not None:
        message = "structured_outputs: response_format asks for a grammar already"
        raise InvalidRequestError(message, field="structured_outputs")
    return GenerateStart(
        prompt=prompt,
        model=found.get("model", ""),
        sampling=Sampling(**sampling, max_tokens=found.get("max_tokens"), guided=guided or other),
        seed=found.get("seed"),
        output=output,
        text_options=TextOptions(
            stop_strings=tuple([stop for stop in found.get("stop", ()) if stop]),
            include_stop_string=found.get("include_stop_str_in_output", False),
            show_special_tokens=not found.get("skip_special_tokens", True),
            stream_tool_arguments=found.get("stream_tool_arguments", False),
        ),
        cache_salt=found.get("cache_salt", ""),
        tenant=caller.tenant,
        # vLLM, whose clients send it, takes lower numbers first.
        priority=-found.get("priority", 0),
        session_key=caller.session_key,
        num_choices=found.get("n", 1),
        client_request_id=found.get("request_id", caller.client_request_id),
        ttft_target_s=_target_s(found, "ttft_target"),
        itl_target_s=_target_s(found, "itl_target"),
    )


def _read_prompts(value: Any) -> list[Prompt]:
    """The prompts: text, a list of texts, token ids, or a list of lists of them."""
    if value is None:
        raise InvalidRequestError("prompt: is missing", field="prompt")
    if isinstance(value, str):
        return [TextPrompt(value)]
    if isinstance(value, array):  # a long list, which was read in steps
        return [TokenPrompt(value)]
    items = lists(value, "prompt")
    if not items:
        raise InvalidRequestError("prompt: is empty", field="prompt")
    if isinstance(items[0], int):
        return [TokenPrompt(read_token_ids(items, "prompt"))]
    if len(items) > MAX_CHOICES:
        raise InvalidRequestError(f"prompt: has at most {MAX_CHOICES} prompts, not {len(items)}", field="prompt")
    prompts: list[Prompt] = []
    for index, item in enumerate(items):
        if isinstance(item, str):
            prompts.append(TextPrompt(item))
        else:
            prompts.append(TokenPrompt(read_token_ids(item, f"prompt[{index}]")))
    return prompts


def read_token_ids(value: Any, path: str) -> Sequence[int]:
    """Token ids, as an array of unsigned 32-bit numbers. Raises ``InvalidRequestError`` naming ``path``."""
    if isinstance(value, array):
        return value
    items = lists(value, path)
    if not all(type(item) is int for item in items):
        raise InvalidRequestError(f"{path}: must be a text, or token ids", field=path)
    try:
        return array("I", items)
    except OverflowError:
        raise InvalidRequestError(f"{path}: a token id is no unsigned 32-bit number", field=path) from None


# Workers decide the size of pictures, whatever the detail.
_IMAGE_URL: Mapping[str, Reader] = {"url": text, "detail": choice("auto", "low", "high", "original")}


def _image_url(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    found = read_fields(objects(value, path), _IMAGE_URL, f"{path}.")
    if "url" not in found:
        raise InvalidRequestError(f"{path}.url: is missing", field=f"{path}.url")
    return str(found["url"])


_NO_SOUND = "models here take text and pictures"
# Types of parts, and the field that each has.
_PART_FIELDS: Mapping[str, str] = {
    **{"text": "text", "input_text": "text", "refusal": "refusal"},
    **{"image_url": "image_url", "input_image": "image_url"},
    **{name: name for name in ("input_audio", "audio_url", "video_url", "file")},
}
_PART: Mapping[str, Reader] = {
    "type": choice(*_PART_FIELDS),
    **{"text": text, "refusal": text, "image_url": _image_url},
    **_refused(
        {
            "input_audio audio_url video_url file": _NO_SOUND,
            "uuid": "the picture itself says what is cached of it",
            "prompt_cache_breakpoint": "prefixes are found in the cache by themselves",
        }
    ),
}

_MESSAGE: Mapping[str, Reader] = {
    "role": text,
    "content": anything,
    "refusal": text,
    "audio": refused(_NO_SOUND),
    "name": text,
    "tool_calls": anything,
    "tool_call_id": text,
    "reasoning_content": text,
    "reasoning": text,
    "function_call": refused("use tool_calls"),
    "annotations": empty("no template shows them"),
}


def _read_messages(value: Any, work: Work) -> Generator[int, None, tuple[ChatMessage, ...]]:
    if value is None:
        raise InvalidRequestError("messages: is missing", field="messages")
    items = lists(value, "messages")
    if not items:
        raise InvalidRequestError("messages: is empty", field="messages")
    if len(items) > MAX_MESSAGES:
        why = f"messages: has at most {MAX_MESSAGES} messages, not {len(items)}"
        raise InvalidRequestError(why, field="messages")
    messages = list[ChatMessage]()
    num_parts = num_calls = 0
    for index, item in enumerate(items):
        message = yield from _read_message(item, f"messages[{index}]", work)
        if message.name or message.tool_calls or message.tool_call_id:
            check_message(message, index)
            num_calls += len(message.tool_calls)
            if num_calls > MAX_TOOL_CALLS:
                path = f"messages[{index}].tool_calls"
                raise InvalidRequestError(f"{path}: all messages have at most {MAX_TOOL_CALLS} calls", field=path)
        messages.append(message)
        num_parts += 0 if isinstance(message.content, str) else len(message.content)
        if num_parts > MAX_PARTS:
            path = f"messages[{index}].content"
            raise InvalidRequestError(f"{path}: all messages have at most {MAX_PARTS} parts", field=path)
        yield from work.spend(MESSAGE_WORK)
    return tuple(messages)


def _read_message(value: Any, path: str, work: Work) -> Generator[int, None, ChatMessage]:
    found = read_fields(objects(value, path), _MESSAGE, f"{path}.")
    role = found.get("role")
    if not role:
        raise InvalidRequestError(f"{path}.role: is missing", field=f"{path}.role")
    content = found.get("content")
    if content is None:
        if role != "assistant":
            raise InvalidRequestError(f"{path}.content: is missing", field=f"{path}.content")
        content = ""
    elif not isinstance(content, str):
        content = yield from _read_content(content, f"{path}.content", work)
    calls: tuple[ToolCall, ...] = ()
    if "tool_calls" in found:
        calls = yield from _read_functions(
            found["tool_calls"],
            f"{path}.tool_calls",
            _tool_call,
            name="arguments",
            max_length=MAX_TOOL_CALLS,
            work=work,
        )
    return ChatMessage(
        role,
        _one_of(content, found.get("refusal", ""), f"{path}.refusal", "content"),
        name=found.get("name"),
        tool_calls=calls,
        tool_call_id=found.get("tool_call_id"),
        reasoning=_one_of(
            found.get("reasoning_content", ""), found.get("reasoning", ""), f"{path}.reasoning", "reasoning_content"
        ),
    )


def _one_of(value: ValueT, other: ValueT, path: str, name: str) -> ValueT:
    """The one that is not empty of two values that mean the same; ``path`` is the other's, ``name`` the first one's."""
    if value and other and value != other:
        raise InvalidRequestError(f"{path}: {name} is there already, and is not the same", field=path)
    return value or other


def _read_content(value: Any, path: str, work: Work) -> Generator[int, None, str | tuple[str | MediaPart, ...]]:
    if not isinstance(value, list | array):
        raise wrong(value, path, "a string or a list of parts")
    if len(value) > MAX_PARTS:
        raise InvalidRequestError(f"{path}: has at most {MAX_PARTS} parts", field=path)
    parts: list[str | MediaPart] = []
    has_media = False
    for index, item in enumerate(value):
        where = f"{path}[{index}]"
        if isinstance(item, str):
            parts.append(item)
            continue
        name, part = _read_part(item, where)
        parts.append(MediaUrl(part) if name == "image_url" else part)
        yield from work.spend(MESSAGE_WORK)
        has_media = has_media or name == "image_url"
    return tuple(parts) if has_media else "".join([part for part in parts if isinstance(part, str)])


def _read_part(value: Any, path: str) -> tuple[str, str]:
    """The field that a part's type calls for, and its text or URL."""
    found = read_fields(objects(value, path), _PART, f"{path}.")
    name = _PART_FIELDS.get(found.pop("type", ""), "")
    if name not in found:
        raise InvalidRequestError(f"{path}: a part has a type, and a field that is called as it", field=path)
    part: str = found.pop(name)
    for other in found:
        raise InvalidRequestError(f"{path}.{other}: a part has only the field of its type", field=f"{path}.{other}")
    return name, part

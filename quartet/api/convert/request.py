"""A client's request to proto and back."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache

from quartet.api.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    ChatPrompt,
    ToolChoice,
    check_count,
    check_message,
)
from quartet.api.request import (
    MAX_STOP_STRINGS,
    GenerateStart,
    Prompt,
    Resume,
    TextOptions,
    TextPrompt,
    TokenPrompt,
)
from quartet.engine.sampling import Sampling
from quartet.errors import InvalidRequestError
from quartet.media.items import MediaPart
from quartet.rpc.errors import to_duration, to_seconds
from quartet.streams.convert.media import from_media_part, put_media_part
from quartet.streams.convert.messages import (
    check_sampling_counts,
    from_output_options,
    from_sampling,
    to_output_options,
    to_sampling,
)
from quartet.text.chat_message import ChatMessage, Tool, ToolCall
from quartet.text.json_object import JsonObject
from quartet.v1 import router_pb2, types_pb2

_MAX_UINT32 = 2**32 - 1

_MAX_UINT64 = 2**64 - 1

_NO_TEXT_OPTIONS = TextOptions()

#: Most token ids of a request; they are counted before any of them is converted.
MAX_TOKEN_IDS = 1 << 20

#: What it costs to convert a message, and a part, call or tool of a chat, and to go through them on the event loop
#: later, in token ids of a prompt: 0.1 microseconds each.
MESSAGE_WORK, PART_WORK, TOOL_WORK = 16, 12, 28

_TOOL_CHOICES = {
    ToolChoice.AUTO: router_pb2.TOOL_CHOICE_AUTO,
    ToolChoice.NONE: router_pb2.TOOL_CHOICE_NONE,
    ToolChoice.REQUIRED: router_pb2.TOOL_CHOICE_REQUIRED,
    ToolChoice.FUNCTION: router_pb2.TOOL_CHOICE_FUNCTION,
}
_TOOL_CHOICES_BACK = {number: choice for choice, number in _TOOL_CHOICES.items()}
_TOOL_CHOICES_BACK[router_pb2.TOOL_CHOICE_UNSPECIFIED] = ToolChoice.AUTO

# Larger ones, with a bias for many tokens, are rare and would fill the memory.
_MAX_KNOWN_BYTES = 256


def to_generate_start(start: GenerateStart) -> router_pb2.GenerateStart:
    """The message.

    Raises:
        InvalidRequestError: what the message can't hold; ``field`` is its path.
    """
    if start.seed is not None and not 0 <= start.seed <= _MAX_UINT64:
        raise InvalidRequestError("seed must be an unsigned 64-bit number", field="seed")
    try:
        message = router_pb2.GenerateStart(
            model=start.model,
            sampling=to_sampling(start.sampling),
            seed=start.seed,
            output=to_output_options(start.output),
            text_options=_to_text_options(start.text_options),
            adapter=start.adapter,
            cache_salt=start.cache_salt,
            tenant=start.tenant,
            priority=start.priority,
            session_key=start.session_key,
            timeout=None if start.timeout_s is None else to_duration(start.timeout_s),
            num_choices=start.num_choices,
            client_request_id=start.client_request_id,
            ttft_target=None if start.ttft_target_s is None else to_duration(start.ttft_target_s),
            itl_target=None if start.itl_target_s is None else to_duration(start.itl_target_s),
        )
        # Each message is filled in its place: to copy one into another copies whole pictures.
        for part in start.media:
            put_media_part(message.media.add(), part)
        _put_prompt(message, start.prompt)
    except UnicodeEncodeError as error:
        raise InvalidRequestError("a text is not valid Unicode") from error
    except ValueError as error:
        raise InvalidRequestError("a number is too small or too large for its field") from error
    return message


def from_generate_start(
    message: router_pb2.GenerateStart, *, tenant: str | None = None, prompt: Prompt | None = None
) -> GenerateStart:
    """The request; what depends on the model or on the router's limits is not checked yet.

    A ``tenant`` or ``prompt`` given is taken in place of the message's.

    Raises:
        InvalidRequestError: an impossible field, or more items than any request has; ``field`` is its path.
        UnsupportedFieldError: a grammar.
    """
    return GenerateStart(
        model=message.model,
        prompt=_from_prompt(message) if prompt is None else prompt,
        sampling=_from_sampling(message.sampling),
        seed=message.seed if message.HasField("seed") else None,
        output=from_output_options(message.output),
        text_options=_from_text_options(message.text_options) if message.HasField("text_options") else _NO_TEXT_OPTIONS,
        adapter=message.adapter,
        cache_salt=message.cache_salt,
        tenant=message.tenant if tenant is None else tenant,
        priority=message.priority,
        session_key=message.session_key,
        timeout_s=to_seconds(message.timeout) if message.HasField("timeout") else None,
        num_choices=message.num_choices if message.HasField("num_choices") else 1,
        client_request_id=message.client_request_id,
        ttft_target_s=to_seconds(message.ttft_target) if message.HasField("ttft_target") else None,
        itl_target_s=to_seconds(message.itl_target) if message.HasField("itl_target") else None,
        media=_from_media(message.media) if message.media else (),
    )


def _to_array(token_ids: Sequence[int]) -> array[int]:
    """Four bytes for each id; a tuple of numbers takes forty. The slice makes it faster than without."""
    return array("I", token_ids[:])


def check_prompt(message: router_pb2.GenerateStart) -> str:
    """The kind of the prompt. Parts of a chat are not counted, nor is anything looked at.

    Raises:
        InvalidRequestError: there is none, or more messages, token ids or media than any request has; ``field`` is
            the path.
    """
    kind = message.WhichOneof("prompt")
    if kind == "token_ids":
        check_count(message.token_ids.ids, MAX_TOKEN_IDS, "token_ids.ids", "token ids")
    elif kind == "chat":
        chat = message.chat
        check_count(chat.messages, MAX_MESSAGES, "chat.messages", "messages")
        check_count(chat.tools, MAX_TOOLS, "chat.tools", "tools")
    elif kind is None:
        raise InvalidRequestError("a request needs a prompt: text, chat or token_ids", field="prompt")
    if message.media:
        check_count(message.media, MAX_PARTS, "media", "media items")
    return kind


def _from_media(media: Sequence[router_pb2.MediaPart]) -> tuple[MediaPart, ...]:
    check_count(media, MAX_PARTS, "media", "media items")
    return tuple([from_media_part(part, "media") for part in media])


def _from_sampling(message: types_pb2.Sampling) -> Sampling:
    """As ``from_sampling``. Many requests have equal settings, and to look them up costs a tenth."""
    check_sampling_counts(message)
    serialized = message.SerializeToString()
    return _known_sampling(serialized) if len(serialized) <= _MAX_KNOWN_BYTES else from_sampling(message)


@lru_cache(maxsize=256)
def _known_sampling(serialized: bytes) -> Sampling:
    return from_sampling(types_pb2.Sampling.FromString(serialized))


def _put_prompt(message: router_pb2.GenerateStart, prompt: Prompt) -> None:
    if isinstance(prompt, TextPrompt):
        message.text = prompt.text
    elif isinstance(prompt, ChatPrompt):
        _put_chat(message.chat, prompt)
    else:
        if not all(0 <= token_id <= _MAX_UINT32 for token_id in prompt.token_ids):
            raise InvalidRequestError("a token id is no unsigned 32-bit number", field="token_ids.ids")
        # Also without ids it is the kind of prompt that was meant.
        message.token_ids.SetInParent()
        message.token_ids.ids.extend(prompt.token_ids)


def _from_prompt(message: router_pb2.GenerateStart) -> Prompt:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(message.text)
    if kind == "token_ids":
        ids = message.token_ids.ids
        check_count(ids, MAX_TOKEN_IDS, "token_ids.ids", "token ids")
        return TokenPrompt(_to_array(ids))
    if kind == "chat":
        check_count(message.chat.tools, MAX_TOOLS, "chat.tools", "tools")
        converter = ChatConverter(message.chat.messages)
        converter.convert()
        return from_chat(message.chat, tuple(converter.converted))
    raise InvalidRequestError("a request needs a prompt: text, chat or token_ids", field="prompt")


def _put_chat(into: router_pb2.ChatPrompt, prompt: ChatPrompt) -> None:
    into.add_generation_prompt = prompt.add_generation_prompt
    for message in prompt.messages:
        _put_chat_message(into.messages.add(), message)
    into.tools.extend(map(_to_tool, prompt.tools))
    into.tool_choice = _TOOL_CHOICES[prompt.tool_choice]
    into.tool_name = prompt.tool_name
    if not prompt.parallel_tool_calls:
        into.parallel_tool_calls = False
    if prompt.template_arguments is not None:
        into.template_arguments = prompt.template_arguments.text


def from_chat(message: router_pb2.ChatPrompt, messages: tuple[ChatMessage, ...]) -> ChatPrompt:
    """The conversation of ``messages``, which were converted already, with the rest of ``message``.

    Raises:
        InvalidRequestError: a choice that is none; ``field`` is the path.
    """
    tools, arguments = message.tools, message.template_arguments
    adds_prompt = message.add_generation_prompt if message.HasField("add_generation_prompt") else True
    is_plain = not (tools or arguments or message.tool_choice or message.tool_name)
    if is_plain and not message.HasField("parallel_tool_calls"):  # mostly
        return ChatPrompt(messages, adds_prompt)
    choice = _TOOL_CHOICES_BACK.get(message.tool_choice)
    if choice is None:
        raise InvalidRequestError(f"there is no tool choice {message.tool_choice}", field="chat.tool_choice")
    return ChatPrompt(
        messages,
        adds_prompt,
        tools=tuple(map(_from_tool, tools)) if tools else (),
        tool_choice=choice,
        tool_name=message.tool_name,
        parallel_tool_calls=message.parallel_tool_calls if message.HasField("parallel_tool_calls") else True,
        template_arguments=JsonObject.of_text(arguments) if arguments else None,
    )


def _to_tool(tool: Tool) -> router_pb2.Tool:
    return router_pb2.Tool(
        name=tool.name, description=tool.description, parameters=tool.parameters.text, strict=tool.strict
    )


def _from_tool(message: router_pb2.Tool) -> Tool:
    strict = message.strict if message.HasField("strict") else None
    if not message.parameters:
        return Tool(message.name, message.description, strict=strict)
    return Tool(message.name, message.description, JsonObject.of_text(message.parameters), strict)


def _put_chat_message(into: router_pb2.ChatMessage, message: ChatMessage) -> None:
    into.role = message.role
    if isinstance(message.content, str):
        into.content = message.content
    else:
        for part in message.content:
            _put_content_part(into.parts.add(), part)
    into.name = message.name or ""
    for call in message.tool_calls:
        into.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments.text)
    into.tool_call_id = message.tool_call_id or ""
    into.reasoning = message.reasoning


def _from_tool_call(message: router_pb2.ToolCall) -> ToolCall:
    if not message.arguments:
        return ToolCall(message.name, id=message.id)
    return ToolCall(message.name, JsonObject.of_text(message.arguments), message.id)


class ChatConverter:
    """Converts the messages of a chat, as many at a time as so much work allows.

    Attributes:
        converted: so far.
    """

    def __init__(self, messages: Sequence[router_pb2.ChatMessage]) -> None:
        """Raises ``InvalidRequestError``: there are too many ``messages``."""
        check_count(messages, MAX_MESSAGES, "chat.messages", "messages")
        self.converted: list[ChatMessage] = []
        self._messages = iter(messages)
        self._num_parts = self._num_calls = 0

    def convert(self, max_work: float = math.inf) -> int:
        """Convert more of them, in work of ``max_work`` and one message more at most.

        Returns:
            The work that it was, if any may be left; else 0.

        Raises:
            InvalidRequestError: an impossible message, or too many parts; ``field`` is its path.
        """
        work, converted = 0, self.converted
        for message in self._messages:
            role, parts = message.role, message.parts
            content = self._content(message, parts) if parts else message.content
            if not role:
                raise InvalidRequestError("a message needs a role", field=f"chat.messages[{len(converted)}].role")
            work += MESSAGE_WORK + PART_WORK * len(parts)
            calls = message.tool_calls
            if calls or message.name or message.tool_call_id or message.reasoning:
                work += TOOL_WORK * (1 + len(calls))
                converted.append(self._whole(message, content))
            else:
                converted.append(_make_message(role, content))
            if work >= max_work:
                return work
        return 0

    def _whole(self, message: router_pb2.ChatMessage, content: str | tuple[str | MediaPart, ...]) -> ChatMessage:
        """A message that has more than its role and content."""
        number = len(self.converted)
        self._num_calls += len(message.tool_calls)
        if self._num_calls > MAX_TOOL_CALLS:
            text = f"the messages of a request have at most {MAX_TOOL_CALLS} tool calls"
            raise InvalidRequestError(text, field=f"chat.messages[{number}].tool_calls")
        converted = ChatMessage(
            message.role,
            content,
            name=message.name or None,
            tool_calls=tuple(map(_from_tool_call, message.tool_calls)),
            tool_call_id=message.tool_call_id or None,
            reasoning=message.reasoning,
        )
        check_message(converted, number)
        return converted

    def _content(
        self, message: router_pb2.ChatMessage, parts: Sequence[router_pb2.ContentPart]
    ) -> str | tuple[str | MediaPart, ...]:
        number = len(self.converted)
        self._num_parts += len(parts)
        if self._num_parts > MAX_PARTS:
            text = f"the messages of a request have at most {MAX_PARTS} parts"
            raise InvalidRequestError(text, field=f"chat.messages[{number}].parts")
        return _from_content(message, parts, number)


# The setters of its fields.
_SET_ROLE, _SET_CONTENT, *_SET_DEFAULTS = (vars(ChatMessage)[item.name].__set__ for item in fields(ChatMessage))
_SET_NAME, _SET_CALLS, _SET_CALL_ID, _SET_REASONING = _SET_DEFAULTS


def _make_message(role: str, content: str | tuple[str | MediaPart, ...]) -> ChatMessage:
    """A message. There are up to 4096, and the constructor of a frozen class takes as long as all the rest."""
    message = object.__new__(ChatMessage)
    _SET_ROLE(message, role)
    _SET_CONTENT(message, content)
    _SET_NAME(message, None)
    _SET_CALLS(message, ())
    _SET_CALL_ID(message, None)
    _SET_REASONING(message, "")
    return message


def _from_content(
    message: router_pb2.ChatMessage, content_parts: Sequence[router_pb2.ContentPart], number: int
) -> str | tuple[str | MediaPart, ...]:
    if message.content and message.role:
        text = "a message has content or parts, not both"
        raise InvalidRequestError(text, field=f"chat.messages[{number}].content")
    parts: list[str | MediaPart] = []
    is_text = True
    for part in content_parts:
        kind = part.WhichOneof("part")
        if kind == "text":
            parts.append(part.text)
            continue
        field, is_text = f"chat.messages[{number}].parts[{len(parts)}]", False
        if kind is None:
            raise InvalidRequestError("a part holds text or media", field=f"{field}.part")
        parts.append(from_media_part(part.media, f"{field}.media"))
    # Templates of models without media take no list of parts.
    return "".join(parts) if is_text else tuple(parts)  # type: ignore[arg-type]  # then each is text


def _put_content_part(into: router_pb2.ContentPart, part: str | MediaPart) -> None:
    if isinstance(part, str):
        into.text = part
    else:
        put_media_part(into.media, part)


def _to_text_options(options: TextOptions) -> router_pb2.TextOptions:
    return router_pb2.TextOptions(
        stop_strings=options.stop_strings,
        include_stop_string=options.include_stop_string,
        omit_text=options.omit_text,
        omit_token_ids=options.omit_token_ids,
        show_special_tokens=options.show_special_tokens,
        raw_text=options.raw_text,
        stream_tool_arguments=options.stream_tool_arguments,
    )


def _from_text_options(message: router_pb2.TextOptions) -> TextOptions:
    """The options; equal ones are looked up, as those of sampling."""
    check_count(message.stop_strings, MAX_STOP_STRINGS, "text_options.stop_strings", "stop strings")
    serialized = message.SerializeToString()
    return _known_text_options(serialized) if len(serialized) <= _MAX_KNOWN_BYTES else _read_text_options(message)


@lru_cache(maxsize=256)
def _known_text_options(serialized: bytes) -> TextOptions:
    return _read_text_options(router_pb2.TextOptions.FromString(serialized))


def _read_text_options(message: router_pb2.TextOptions) -> TextOptions:
    return TextOptions(
        stop_strings=tuple(message.stop_strings),
        include_stop_string=message.include_stop_string,
        omit_text=message.omit_text,
        omit_token_ids=message.omit_token_ids,
        show_special_tokens=message.show_special_tokens,
        raw_text=message.raw_text,
        stream_tool_arguments=message.stream_tool_arguments,
    )


# What a request goes on after.


def to_resume(resume: Resume) -> router_pb2.Resume:
    """The message."""
    return router_pb2.Resume(
        request_id=resume.request_id,
        attempt=resume.attempt,
        seed=resume.seed,
        choice=resume.choice,
        generated_token_ids=router_pb2.TokenIds(ids=resume.generated_token_ids) if resume.generated_token_ids else None,
        num_text_bytes=resume.num_text_bytes,
        model_fingerprint=resume.model_fingerprint,
        num_reasoning_bytes=resume.num_reasoning_bytes,
        num_tool_calls=resume.num_tool_calls,
        num_argument_bytes=resume.num_argument_bytes,
    )


def from_resume(message: router_pb2.Resume) -> Resume:
    """What a request goes on after; not checked yet. Its tokens stay in the message until they are ``read``.

    Raises:
        InvalidRequestError: more tokens than any answer has.
    """
    generated = message.generated_token_ids.ids
    check_count(generated, MAX_TOKEN_IDS, "resume.generated_token_ids", "generated tokens")
    return Resume(
        request_id=message.request_id,
        attempt=message.attempt,
        seed=message.seed,
        choice=message.choice,
        generated_token_ids=generated if generated else (),
        num_text_bytes=message.num_text_bytes,
        num_reasoning_bytes=message.num_reasoning_bytes,
        num_tool_calls=message.num_tool_calls,
        num_argument_bytes=message.num_argument_bytes,
        model_fingerprint=message.model_fingerprint,
    )

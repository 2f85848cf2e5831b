"""A request as the caller describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypedDict

from google.protobuf.message import Message

from quartet.api.chat import ChatPrompt, ToolChoice
from quartet.api.request import GenerateStart, Prompt, TextOptions, TextPrompt, TokenPrompt, check_start
from quartet.engine.sampling import OutputOptions, Sampling
from quartet.errors import InvalidRequestError, MediaTooLargeError, MessageTooLargeError
from quartet.media.items import MediaFile, MediaKind, MediaPart
from quartet.rpc.channels import MAX_API_MESSAGE_BYTES
from quartet.text.chat_message import ChatMessage, Tool, media_of
from quartet.text.json_object import JsonObject

_DEFAULT_SAMPLING = Sampling()

#: Bytes of each message for what wraps the request: its slot, or the attempt that it resumes, if its answer is short.
_WRAPPING_BYTES = 64 * 1024

#: Of these, for all but the answer so far: fields' lengths and the slot.
_SLOT_BYTES = 64


class GenerateFields(TypedDict, total=False):
    """The prompt, if it is not a text ``prompt``, and how to continue it.

    Attributes:
        messages: a conversation, laid out by the model's chat template.
        tools: functions that the answer to ``messages`` may call.
        tool_choice: whether it may, or must.
        parallel_tool_calls: it may hold several calls; else all but its first are left out.
        template_arguments: further variables of the chat template, such as ``{"reasoning_effort": "low"}``.
        token_ids: a prompt that is already tokenized.
        media: the media that the placeholders in ``prompt`` or ``token_ids`` stand for, in order; messages hold theirs.
        model: empty: the only model, if there is only one.
        stop: strings that end the answer; they are not shown.
        num_choices: answers wanted, 1 to 64.
        logprobs: alternatives to report at each position, 0 to 20; ``None``: no log probabilities.
        prompt_logprobs: the same at each position of the prompt but the first, for ``Completion.prompt_logprobs``; not
            on the path ``DIRECT``.
        seed: unsigned 64 bit; ``None``: the router draws one and returns it.
        timeout_s: seconds for the whole request; ``None``: the router's limit.
        session_key: shared by the requests of one conversation, which routers may keep together; empty: none.
        include_stop_string: show the string that ended the answer.
        omit_text: token ids only; not together with ``stop``.
        omit_token_ids: text only.
        show_special_tokens: show them as text.
        raw_text: leave reasoning and tool calls in the text, as the model wrote them.
        stream_tool_arguments: show arguments of tool calls as they come; else a call once it is complete.
    """

    messages: Sequence[ChatMessage] | None
    tools: Sequence[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    template_arguments: Mapping[str, object] | None
    token_ids: Sequence[int] | None
    media: Sequence[MediaPart]
    model: str
    sampling: Sampling
    stop: Sequence[str]
    num_choices: int
    logprobs: int | None
    prompt_logprobs: int | None
    seed: int | None
    timeout_s: float | None
    ttft_target_s: float | None
    itl_target_s: float | None
    session_key: str
    include_stop_string: bool
    omit_text: bool
    omit_token_ids: bool
    show_special_tokens: bool
    raw_text: bool
    stream_tool_arguments: bool


def make_start(
    prompt: str | None = None,
    *,
    messages: Sequence[ChatMessage] | None = None,
    tools: Sequence[Tool] = (),
    tool_choice: ToolChoice = ToolChoice.AUTO,
    parallel_tool_calls: bool = True,
    template_arguments: Mapping[str, object] | None = None,
    token_ids: Sequence[int] | None = None,
    media: Sequence[MediaPart] = (),
    model: str = "",
    sampling: Sampling = _DEFAULT_SAMPLING,
    stop: Sequence[str] = (),
    num_choices: int = 1,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    seed: int | None = None,
    timeout_s: float | None = None,
    ttft_target_s: float | None = None,
    itl_target_s: float | None = None,
    session_key: str = "",
    include_stop_string: bool = False,
    omit_text: bool = False,
    omit_token_ids: bool = False,
    show_special_tokens: bool = False,
    raw_text: bool = False,
    stream_tool_arguments: bool = False,
) -> GenerateStart:
    """The request that ``GenerateFields`` describe, with exactly one of ``prompt``, ``messages`` and ``token_ids``.

    Raises:
        InvalidRequestError: no router could take the field that it names. Routers check what depends on the model.
    """
    if isinstance(stop, str):
        # A string would count as a list of its letters.
        raise InvalidRequestError("stop is a list of strings, not a string", field="text_options.stop_strings")
    if media and messages is not None:
        raise InvalidRequestError("the media of a conversation are in its messages", field="media")
    if (tools or template_arguments) and messages is None:
        raise InvalidRequestError("tools and template_arguments are for messages", field="chat")
    chat = None
    if messages is not None:
        chat = ChatPrompt(
            tuple(messages),
            tools=tuple(tools),
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            template_arguments=_to_json(template_arguments) if template_arguments else None,
        )
    start = GenerateStart(
        prompt=_make_prompt(prompt, chat, token_ids),
        model=model,
        sampling=sampling,
        seed=seed,
        output=OutputOptions(logprobs=logprobs, num_prompt_logprobs=prompt_logprobs),
        text_options=TextOptions(
            stop_strings=tuple(stop),
            include_stop_string=include_stop_string,
            omit_text=omit_text,
            omit_token_ids=omit_token_ids,
            show_special_tokens=show_special_tokens,
            raw_text=raw_text,
            stream_tool_arguments=stream_tool_arguments,
        ),
        timeout_s=timeout_s,
        ttft_target_s=ttft_target_s,
        itl_target_s=itl_target_s,
        session_key=session_key,
        num_choices=num_choices,
        media=tuple(media),
    )
    check_start(start)
    return start


def check_size(start: GenerateStart, message: Message) -> None:
    """Refuse media that make ``message``, which holds ``start``, longer than a router accepts.

    The router could only break the stream, and with a session's stream all other requests on it.

    Raises:
        MediaTooLargeError: names the field that holds them.
    """
    in_chat = isinstance(start.prompt, ChatPrompt) and any(media_of(start.prompt.messages))
    # Measuring costs as much as serializing the message, so requests without media skip it.
    if (start.media or in_chat) and message.ByteSize() > MAX_API_MESSAGE_BYTES - _WRAPPING_BYTES:
        reason = f"with its media the request is longer than {MAX_API_MESSAGE_BYTES >> 20} MiB"
        raise MediaTooLargeError(reason, field="chat.messages" if in_chat else "media")


def check_resumed_size(num_bytes: int) -> None:
    """Refuse to resume by a message of ``num_bytes``, request and answer so far, that no router accepts.

    As a request that is too long it would break the stream, and with a session's stream all other requests on it.

    Raises:
        MessageTooLargeError: it is longer, with what wraps it.
    """
    if num_bytes > MAX_API_MESSAGE_BYTES - _SLOT_BYTES:
        reason = f"its answer so far makes the request longer than {MAX_API_MESSAGE_BYTES >> 20} MiB"
        raise MessageTooLargeError(f"no router can go on with the lost one's answer: {reason}")


def _to_json(value: Mapping[str, object]) -> JsonObject:
    """``value`` as it is sent. Raises ``InvalidRequestError``: it is no JSON."""
    try:
        return JsonObject.of_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"no JSON: {error}", field="chat.template_arguments") from error


def _make_prompt(text: str | None, chat: ChatPrompt | None, token_ids: Sequence[int] | None) -> Prompt:
    given: list[Prompt] = []
    if text is not None:
        given.append(TextPrompt(text))
    if chat is not None:
        given.append(chat)
    if token_ids is not None:
        given.append(TokenPrompt(tuple(token_ids)))
    if len(given) != 1:
        raise InvalidRequestError("give one of prompt, messages and token_ids", field="prompt")
    return given[0]


# The three ways from a client to its tokens.


class RequestPath(StrEnum):
    """How a request reaches its workers. Its answer is the same on all paths."""

    #: A call of its own to the router, which streams the answer.
    GENERATE = "generate"
    #: One of many on the client's one stream with the router, which streams all answers.
    SESSION = "session"
    #: The router places it; its tokens come straight from the decode worker, and the client makes the text.
    DIRECT = "direct"


def check_traceparent(traceparent: str) -> str:
    """``traceparent`` if metadata can hold it; routers ignore what is malformed. Raises ``InvalidRequestError``."""
    if not (traceparent.isascii() and (traceparent.isprintable())):
        raise InvalidRequestError("must be printable ASCII", field="traceparent")
    return traceparent


def trace_metadata(traceparent: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call that brings it; none if it is empty."""
    return (("traceparent", traceparent),) if traceparent else ()


def to_path(path: str) -> RequestPath:
    """The path named ``path``. Raises ``InvalidRequestError`` if there is none."""
    try:
        return RequestPath(path)
    except ValueError as error:
        names = ", ".join(RequestPath)
        raise InvalidRequestError(f"path is one of {names}, not {path!r}", field="path") from error


# Pictures and embeddings for requests, from files of this machine.

_EMBEDDINGS_SUFFIX = ".safetensors"


def read_media(path: str | Path) -> MediaFile:
    """The file at ``path``: embeddings if its name ends in ``.safetensors``, otherwise a picture.

    Routers check its contents; this function does not.

    Raises:
        OSError: the file can't be read.
        MediaTooLargeError: the file is longer than a request can be.
    """
    path = Path(path)
    kind = MediaKind.EMBEDDINGS if path.suffix.lower() == _EMBEDDINGS_SUFFIX else MediaKind.IMAGE
    with path.open("rb") as file:
        # Do not ask for the file's size: that of a pipe or a device says nothing.
        data = file.read(MAX_API_MESSAGE_BYTES + 1)
    if len(data) > MAX_API_MESSAGE_BYTES:
        raise MediaTooLargeError(f"the file is longer than the {MAX_API_MESSAGE_BYTES >> 20} MiB of a request")
    return MediaFile(kind, data)

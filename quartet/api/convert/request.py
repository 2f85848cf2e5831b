"""A client's request to proto and back."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence, Sized
from functools import lru_cache

from quartet.api.request import (
    MAX_STOP_STRINGS,
    ChatPrompt,
    GenerateStart,
    Prompt,
    Resume,
    TextOptions,
    TextPrompt,
    TokenPrompt,
)
from quartet.engine.sampling import Sampling
from quartet.errors import InvalidRequestError, UnsupportedFieldError
from quartet.media.items import MediaPart
from quartet.rpc.errors import to_duration, to_seconds
from quartet.streams.convert.media import from_media_part, to_media_part
from quartet.streams.convert.messages import (
    check_sampling_counts,
    from_output_options,
    from_sampling,
    to_output_options,
    to_sampling,
)
from quartet.text.chat_message import ChatMessage
from quartet.v1 import router_pb2, types_pb2

_MAX_UINT32 = 2**32 - 1

_MAX_UINT64 = 2**64 - 1

_NO_TEXT_OPTIONS = TextOptions()

#: Most messages, parts of all messages, and token ids of a request. They are counted before any of them is converted:
#: so many take 20 ms.
MAX_MESSAGES, MAX_PARTS, MAX_TOKEN_IDS = 4096, 4096, 1 << 20

#: What it costs to convert a message and a part of a chat, and to go through them on the event loop later, in token ids
#: of a prompt: 0.1 microseconds each.
MESSAGE_WORK, PART_WORK = 12, 12

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
        )
        message.media.extend(map(to_media_part, start.media))
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
        check_count(message.chat.messages, MAX_MESSAGES, "chat.messages", "messages")
    elif kind is None:
        raise InvalidRequestError("a request needs a prompt: text, chat or token_ids", field="prompt")
    if message.media:
        check_count(message.media, MAX_PARTS, "media", "media items")
    return kind


def check_count(items: Sized, limit: int, field: str, what: str) -> None:
    """Refuse more than ``limit`` items without a look at any. Raises ``InvalidRequestError`` naming ``field``."""
    if len(items) > limit:
        raise InvalidRequestError(f"a request has at most {limit} {what}, not {len(items)}", field=field)


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
        message.chat.add_generation_prompt = prompt.add_generation_prompt
        message.chat.messages.extend(map(_to_chat_message, prompt.messages))
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
        chat = message.chat
        has_choice = chat.HasField("add_generation_prompt")
        converter = ChatConverter(chat.messages)
        converter.convert()
        return ChatPrompt(tuple(converter.converted), chat.add_generation_prompt if has_choice else True)
    raise InvalidRequestError("a request needs a prompt: text, chat or token_ids", field="prompt")


def _to_chat_message(message: ChatMessage) -> router_pb2.ChatMessage:
    if message.name is not None:
        raise UnsupportedFieldError("a message has no field for its speaker's name", field="chat.messages.name")
    if isinstance(message.content, str):
        return router_pb2.ChatMessage(role=message.role, content=message.content)
    return router_pb2.ChatMessage(role=message.role, parts=map(_to_content_part, message.content))


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
        self._num_parts = 0

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
            converted.append(_make_message(role, content))
            work += MESSAGE_WORK + PART_WORK * len(parts)
            if work >= max_work:
                return work
        return 0

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
_SET_ROLE, _SET_CONTENT, _SET_NAME = (vars(ChatMessage)[name].__set__ for name in ("role", "content", "name"))


def _make_message(role: str, content: str | tuple[str | MediaPart, ...]) -> ChatMessage:
    """A message. There are up to 4096, and the constructor of a frozen class takes as long as all the rest."""
    message = object.__new__(ChatMessage)
    _SET_ROLE(message, role)
    _SET_CONTENT(message, content)
    _SET_NAME(message, None)
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


def _to_content_part(part: str | MediaPart) -> router_pb2.ContentPart:
    if isinstance(part, str):
        return router_pb2.ContentPart(text=part)
    return router_pb2.ContentPart(media=to_media_part(part))


def _to_text_options(options: TextOptions) -> router_pb2.TextOptions:
    return router_pb2.TextOptions(
        stop_strings=options.stop_strings,
        include_stop_string=options.include_stop_string,
        omit_text=options.omit_text,
        omit_token_ids=options.omit_token_ids,
        show_special_tokens=options.show_special_tokens,
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
        model_fingerprint=message.model_fingerprint,
    )

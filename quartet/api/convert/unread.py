"""A client's request with only a few fields read, and what reading the rest will cost.

A chat of 4,096 messages has 45 KB, and took a client 0.1 ms and the router 6 ms to convert. So the server of a request
reads whose it is and what refuses it at once, counts what repeats, lets its tenant pay, and converts it then.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from quartet.api.convert.request import (
    MESSAGE_WORK,
    PART_WORK,
    TOOL_WORK,
    ChatConverter,
    check_prompt,
    from_chat,
    from_generate_start,
)
from quartet.api.request import GenerateStart
from quartet.rpc.errors import to_seconds
from quartet.v1 import router_pb2

# As `MESSAGE_WORK`, of a media item: to see the size of a file would copy it, so each counts as one of 400 KB.
_MEDIA_WORK = 2_048

# A chat of so many messages and parts is looked through as it comes, in 0.1 ms.
_MAX_AT_A_GLANCE = 256

# To read a request with media before it is paid for may cost so much, apart from the media.
_MAX_WORK_BEFORE = 8_192

# Files in a message of so many bytes are counted only when it is read.
_MAX_UNCOUNTED_BYTES = 256 << 10

# What is converted of a longer chat in one step: 768 messages, or fewer with parts.
_STEP_WORK = 12_288


class UnreadStart:
    """An ``AskedStart`` in a message. It is read once; then the message is let go."""

    #: It has yet to wait for its turn.
    has_entered = False

    __slots__ = (
        "_message",
        "cache_salt",
        "client_request_id",
        "is_short",
        "model",
        "num_choices",
        "num_file_bytes",
        "num_token_ids",
        "priority",
        "seed",
        "session_key",
        "shows_media",
        "tenant",
        "timeout_s",
        "work",
    )

    def __init__(self, message: router_pb2.GenerateStart) -> None:
        """Count what repeats in ``message``.

        Raises:
            InvalidRequestError: more items than any request has, or no prompt; ``field`` is the path.
        """
        self._message: router_pb2.GenerateStart | None = message
        self.model = message.model
        self.tenant = message.tenant
        self.session_key = message.session_key
        self.cache_salt = message.cache_salt
        self.client_request_id = message.client_request_id
        self.priority = message.priority
        self.seed = message.seed if message.HasField("seed") else None
        self.timeout_s = to_seconds(message.timeout) if message.HasField("timeout") else None
        self.num_choices = message.num_choices if message.HasField("num_choices") else 1
        # Each request pays for this, so what is not there is not asked for.
        kind, num_media, num_parts, is_short = check_prompt(message), len(message.media), 0, True
        self.num_token_ids = self.work = self.num_file_bytes = 0
        if kind == "token_ids":
            self.num_token_ids = self.work = len(message.token_ids.ids)
            is_short = self.work <= _MAX_WORK_BEFORE
        elif kind == "chat":
            chat = message.chat
            messages, num_tools = chat.messages, len(chat.tools)
            num_parts, num_media_parts = _glance(messages)
            self.work = min(MESSAGE_WORK * len(messages), _STEP_WORK) + PART_WORK * num_parts + TOOL_WORK * num_tools
            num_media += num_media_parts
            is_short = max(len(messages), num_parts, num_tools) <= _MAX_AT_A_GLANCE
        self.is_short, self.shows_media = is_short, False
        if num_media or not is_short:
            self.work += _MEDIA_WORK * num_media
            self.shows_media = is_short and 0 < num_media <= _MAX_AT_A_GLANCE
            if not self.shows_media:
                self.num_file_bytes = _num_file_bytes(message)

    def for_tenant(self, tenant: str) -> UnreadStart:
        """The same request, accounted to ``tenant``."""
        self.tenant = tenant
        return self

    @property
    def num_message_bytes(self) -> int:
        """Of the message, until it is read."""
        return 0 if self._message is None else self._message.ByteSize()

    def read(self) -> GenerateStart:
        """All of it, as ``AskedStart`` says."""
        return from_generate_start(self._take(), tenant=self.tenant)

    def steps(self) -> Generator[int, None, GenerateStart]:
        """Read it, as ``AskedStart`` says."""
        yield self.work
        assert self._message is not None, "it is read only once"
        messages = self._message.chat.messages
        if not messages:
            return self.read()
        converter = ChatConverter(messages)
        ahead = self.work  # work that is paid for and not done
        while work := converter.convert(_STEP_WORK):
            ahead -= work
            coming = min(MESSAGE_WORK * (len(messages) - len(converter.converted)), _STEP_WORK)
            if (due := coming - ahead) > 0:
                yield due
                ahead += due
        message = self._take()
        prompt = from_chat(message.chat, tuple(converter.converted))
        return from_generate_start(message, tenant=self.tenant, prompt=prompt)

    def forget(self) -> None:
        """Let the message go; it is read no more."""
        self._message = None

    def _take(self) -> router_pb2.GenerateStart:
        message, self._message = self._message, None
        assert message is not None, "it is read only once"
        return message


def _num_file_bytes(message: router_pb2.GenerateStart) -> int:
    """Bytes of a message in which no media were seen at a glance, if it holds any; 0 also for one of 256 KiB."""
    has_chat = message.HasField("chat")
    if not (message.media or has_chat) or (num_bytes := message.ByteSize()) <= _MAX_UNCOUNTED_BYTES:
        return 0
    messages = message.chat.messages if has_chat else ()
    has_media = message.media or any(part.HasField("media") for one in messages for part in one.parts)
    return num_bytes if has_media else 0


def _glance(messages: Sequence[router_pb2.ChatMessage]) -> tuple[int, int]:
    """Parts, with tool calls, and media of a short chat; of a longer one they are counted when it is read."""
    num_parts = num_media = 0
    if len(messages) > _MAX_AT_A_GLANCE:
        return 0, 0
    for message in messages:
        if parts := message.parts:
            num_parts += len(parts)
            if num_parts <= _MAX_AT_A_GLANCE:
                num_media += sum([part.HasField("media") for part in parts])
        num_parts += len(message.tool_calls)
    return num_parts, num_media if num_parts <= _MAX_AT_A_GLANCE else 0

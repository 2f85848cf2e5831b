"""The API in domain terms: what a client asks of the router, and what it is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from quartet.discovery.base import Rank
from quartet.engine.base import FinishReason
from quartet.engine.sampling import OutputOptions, Sampling, TokenLogprobs
from quartet.errors import ConfigError, InvalidRequestError, ServingError
from quartet.media.items import MediaPart
from quartet.streams.messages import is_request_id
from quartet.text.chat_message import ChatMessage


@dataclass(frozen=True)
class TextPrompt:
    """Text, tokenized as it is."""

    text: str = field(repr=False)


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation, laid out by the model's chat template."""

    messages: tuple[ChatMessage, ...] = field(repr=False)
    add_generation_prompt: bool = True


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids."""

    token_ids: Sequence[int] = field(repr=False)


Prompt: TypeAlias = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How text is made and where it stops.

    Attributes:
        stop_strings: each ends the answer; neither it nor what follows is shown.
        include_stop_string: shows the one that ended it.
        omit_text: token ids only.
        omit_token_ids: text only.
        show_special_tokens: as text.
    """

    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    omit_text: bool = False
    omit_token_ids: bool = False
    show_special_tokens: bool = False


@dataclass(frozen=True, kw_only=True)
class GenerateStart:
    """A client's request.

    Attributes:
        model: empty: the only one, if there is but one.
        seed: unsigned 64 bit; ``None``: the router draws one and tells it.
        tenant: whom it is accounted to; empty: who the client is.
        priority: higher first among waiting requests.
        session_key: requests of one conversation share it; empty: none.
        timeout_s: seconds for the whole request; ``None``: the router's limit.
        num_choices: answers wanted.
        client_request_id: the client's own name for it, for logs.
        media: items that a prompt of text or token ids refers to, in order; a chat's are in its messages.
    """

    prompt: Prompt
    model: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    output: OutputOptions = field(default_factory=OutputOptions)
    text_options: TextOptions = field(default_factory=TextOptions)
    adapter: str = ""
    cache_salt: str = field(default="", repr=False)
    tenant: str = ""
    priority: int = 0
    session_key: str = field(default="", repr=False)
    timeout_s: float | None = None
    num_choices: int = 1
    client_request_id: str = ""
    media: tuple[MediaPart, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Goes on with a request after an attempt that broke.

    Attributes:
        request_id, seed: those that the first placement told.
        attempt: the new attempt's number, above the last one's, so at least 1.
        choice: the one that broke; only it runs.
        generated_token_ids: the tokens that it already gave.
        num_text_bytes: UTF-8 bytes of the text that it already gave.
        model_fingerprint: names the model that gave them, and that alone may go on; empty: any of that name.
    """

    request_id: str
    attempt: int
    seed: int
    choice: int = 0
    generated_token_ids: Sequence[int] = field(default=(), repr=False)
    num_text_bytes: int = 0
    model_fingerprint: str = ""


@dataclass(frozen=True, kw_only=True)
class ChoicePlacement:
    """Where one choice runs.

    Attributes:
        prefill: where the prompt is prefilled; ``None``: at the decode rank.
        num_matched_tokens: prompt tokens that the router expects to be cached where it is prefilled.
        cost: what the router's policy took it to cost there, in the unit that Explain tells; ``None``: it weighs
            nothing.
    """

    choice: int
    prefill: Rank | None
    decode: Rank
    num_matched_tokens: int = 0
    cost: float | None = None


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The first of the request's choices is placed; comes first, once.

    Attributes:
        request_id: names the request in every log of the system.
        choices: those placed so far, in their order; empty where the request was cancelled before.
        seed: the seed in use: with it the same request gives the same tokens.
        model_fingerprint: names the model that answers; empty where the request was cancelled before one was found.
        encode: where its media are encoded; ``None``: it has none, or who computes the prompt encodes them.
    """

    request_id: str
    choices: tuple[ChoicePlacement, ...]
    num_prompt_tokens: int
    seed: int
    model_fingerprint: str = ""
    encode: Rank | None = None


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A choice was placed after ``Accepted`` had gone out; comes before its first ``Delta``."""

    placement: ChoicePlacement


@dataclass(slots=True, kw_only=True)
class Delta:
    """More of one choice. Not frozen, unlike the others: there is one for each token, and freezing doubles its price.

    Attributes:
        token_offset: number of the first of ``token_ids`` within the output.
        text: new text, never half a character; not aligned with the tokens, because text that may begin a stop
            string comes later.
        logprobs: one entry a token, where asked for.
    """

    choice: int
    token_offset: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one choice used, in tokens.

    Attributes:
        num_cached_tokens: of the prompt's, those whose KV was cached.
        num_output_tokens: tokens that were shown.
        num_attempts: attempts it took, at least 1 where any was made.
        num_media_tokens: of the prompt's, those that media fill; 0 also where who encoded them did not tell.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_attempts: int
    num_media_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """Where one choice's time went, in seconds, as the router saw it; ``None``: did not happen.

    Parts of failed attempts are counted in.

    Attributes:
        tokenize_s: template and tokenizer.
        router_queue_s: waiting in the router for room.
        prefill_s: the prefill hop, the worker's queue (``prefill_queue_s``) included.
        decode_queue_s: waiting in the decode worker, less ``transfer_s``, which is moving blocks there.
        first_token_s: from arrival to the first token.
        total_s: from arrival to the end.
        media_s: fetching media, and encoding them at an encode worker, before ``router_queue_s``.
    """

    tokenize_s: float | None = None
    router_queue_s: float | None = None
    prefill_s: float | None = None
    prefill_queue_s: float | None = None
    decode_queue_s: float | None = None
    transfer_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    media_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ChoiceFinished:
    """One choice ended well.

    Attributes:
        stop_string: the one that ended it; ``None``: none did.
    """

    choice: int
    reason: FinishReason
    usage: Usage
    time: TimeBreakdown
    stop_string: str | None = None


AnswerPart: TypeAlias = Accepted | Placed | Delta | ChoiceFinished


# What is impossible with any model; every refusal names the field of ``GenerateStart``.

_MAX_CHOICES = 64

_MAX_ATTEMPT = 2**31

_MAX_STOP_STRINGS, _MAX_STOP_STRING_BYTES = 16, 1024

_MAX_CLIENT_REQUEST_ID_BYTES = 128

_MAX_NAME_LENGTH = 256


def check_start(start: GenerateStart) -> None:
    """Refuse what is impossible with any model; the router does, and clients may save themselves the way to it.

    Raises:
        InvalidRequestError: naming the field.
    """
    if not 1 <= start.num_choices <= _MAX_CHOICES:
        raise InvalidRequestError(f"num_choices must be in [1, {_MAX_CHOICES}]", field="num_choices")
    if start.timeout_s is not None:
        _check_timeout(start.timeout_s)
    if _size_bytes(start.client_request_id) > _MAX_CLIENT_REQUEST_ID_BYTES:
        message = f"client_request_id is longer than {_MAX_CLIENT_REQUEST_ID_BYTES} bytes"
        raise InvalidRequestError(message, field="client_request_id")
    for name in ("tenant", "session_key", "cache_salt"):
        if len(getattr(start, name)) > _MAX_NAME_LENGTH:
            raise InvalidRequestError(f"{name} is longer than {_MAX_NAME_LENGTH} characters", field=name)
    _check_text_options(start)
    if _is_empty(start.prompt):
        raise InvalidRequestError("the prompt is empty", field=prompt_field(start.prompt))


def check_resume(resume: Resume, start: GenerateStart) -> None:
    """Refuse to go on with what never was. Raises ``InvalidRequestError`` naming the field."""
    if not is_request_id(resume.request_id):
        message = "request_id is not 32 lower-case hexadecimal digits"
        raise InvalidRequestError(message, field="resume.request_id")
    if not 1 <= resume.attempt <= _MAX_ATTEMPT:
        raise InvalidRequestError(f"attempt must be in [1, {_MAX_ATTEMPT}]", field="resume.attempt")
    if resume.choice >= start.num_choices:
        raise InvalidRequestError("the request has no such choice", field="resume.choice")
    if start.seed is not None and resume.seed != start.seed:
        raise InvalidRequestError("resume and start name different seeds", field="resume.seed")


def prompt_field(prompt: Prompt) -> str:
    """The path of the field that the prompt came in."""
    if isinstance(prompt, TextPrompt):
        return "text"
    return "chat.messages" if isinstance(prompt, ChatPrompt) else "token_ids.ids"


def _check_timeout(timeout_s: float) -> None:
    if not timeout_s > 0:  # not a number is refused here too
        raise InvalidRequestError("timeout must be above 0", field="timeout")
    if math.isinf(timeout_s):
        raise InvalidRequestError("timeout must be finite", field="timeout")


def _check_text_options(start: GenerateStart) -> None:
    options, field = start.text_options, "text_options.stop_strings"
    if len(options.stop_strings) > _MAX_STOP_STRINGS:
        raise InvalidRequestError(f"there are more than {_MAX_STOP_STRINGS} stop strings", field=field)
    for stop_string in options.stop_strings:
        if not 1 <= _size_bytes(stop_string) <= _MAX_STOP_STRING_BYTES:
            message = f"a stop string has 1 to {_MAX_STOP_STRING_BYTES} bytes"
            raise InvalidRequestError(message, field=field)
    if options.omit_text and options.stop_strings:
        raise InvalidRequestError("stop strings are looked for in text", field="text_options.omit_text")


def _is_empty(prompt: Prompt) -> bool:
    if isinstance(prompt, TextPrompt):
        return not prompt.text
    return not (prompt.messages if isinstance(prompt, ChatPrompt) else prompt.token_ids)


def _size_bytes(text: str) -> int:
    # Half a surrogate pair is refused where messages are written, not while it is measured.
    return len(text.encode(errors="surrogatepass"))


# A session in domain terms: many requests on one stream, by slot, and the bounds that it keeps.


@dataclass(frozen=True, kw_only=True)
class SessionStart:
    """A request of a session.

    Attributes:
        slot: chosen by the client; free again after the request's end.
        resume: goes on after an attempt that broke; ``None``: a new request.
        traceparent: W3C trace context of this request, not checked; empty: that of the stream.
    """

    slot: int
    start: GenerateStart
    resume: Resume | None = None
    traceparent: str = ""


class SessionRun(Protocol):
    """One request that runs; its sink hears the end once it holds nothing any more."""

    def cancel(self) -> None:
        """End it early: each choice that has not ended gets its end."""
        ...

    def abort(self, error: ServingError) -> None:
        """End it with ``error``."""
        ...


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Bounds of each session.

    Attributes:
        tick_s: time between two messages to the client; the first after a pause goes at once.
        max_requests: requests at most, those included whose end the client has not taken; more are refused.
        max_pending_tokens: of one request for a client that reads too slowly; a request of which more gathers is
            ended. It is looked at whenever so many deltas have come, at most 4,096, so that much may come on top.
        max_pending_bytes: the same of its tokens, text and log probabilities together.

    Raises:
        ConfigError: naming the field.
    """

    tick_s: float = 0.002
    max_requests: int = 4096
    max_pending_tokens: int = 4096
    max_pending_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        if self.tick_s < 0:
            raise ConfigError("tick_s: must not be negative")
        for name in ("max_requests", "max_pending_tokens", "max_pending_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")

"""Requests and answers between clients and the router, in domain terms.

Parts of an answer are not frozen: each request makes several, and freezing triples what they cost.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol, TypeAlias

from quartet.api.chat import ChatPrompt, check_chat
from quartet.discovery.base import Rank
from quartet.engine.base import FinishReason
from quartet.engine.sampling import OutputOptions, PromptLogprobs, Sampling, TokenLogprobs
from quartet.errors import ConfigError, InvalidRequestError, ServingError
from quartet.media.items import MediaPart
from quartet.streams.messages import is_request_id
from quartet.text.parsed import ToolCallDelta
from quartet.transfer.base import TransferWay


@dataclass(frozen=True)
class TextPrompt:
    """Text, tokenized as it is."""

    text: str = field(repr=False)


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids; in routers an array of unsigned 32-bit numbers."""

    token_ids: Sequence[int] = field(repr=False)


Prompt: TypeAlias = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How the text of the answer is made, and where it stops.

    Attributes:
        stop_strings: each ends the answer; neither it nor any text after it is shown.
        include_stop_string: show the stop string that ended the answer.
        omit_text: token ids only.
        omit_token_ids: text only.
        show_special_tokens: show them as text.
        raw_text: leave reasoning and tool calls in the text of a chat's answer.
        stream_tool_arguments: show arguments of tool calls as they come; else a call once it is complete.
    """

    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    omit_text: bool = False
    omit_token_ids: bool = False
    show_special_tokens: bool = False
    raw_text: bool = False
    stream_tool_arguments: bool = False


class AskedStart(Protocol):
    """A client's request as it came: what says whose it is and what refuses it at once is read, all else by ``steps``.

    To read the rest takes time by the message, part and token id. So it is paid for before.

    Attributes:
        model, seed, cache_salt, tenant, session_key, timeout_s, num_choices, client_request_id, priority: as in
            ``GenerateStart``.
        num_message_bytes: of the message, all in all.
        num_token_ids: token ids of the prompt, if it came as such.
        is_short: whether one step reads it, in a millisecond at most, apart from copying texts and files.
        shows_media: whether media were seen in it at a glance: it is ``read`` at once, which takes a millisecond at
            most, apart from copying the files.
        num_file_bytes: bytes that its files may take in memory, if it has many and shows no media.
        work: what the first of ``steps`` costs, in token ids of a prompt.
        has_entered: it has waited for its turn already, and reading it was paid for.
    """

    @property
    def model(self) -> str: ...  # noqa: D102 - see the class, also for the others

    @property
    def seed(self) -> int | None: ...  # noqa: D102

    @property
    def cache_salt(self) -> str: ...  # noqa: D102

    @property
    def tenant(self) -> str: ...  # noqa: D102

    @property
    def session_key(self) -> str: ...  # noqa: D102

    @property
    def timeout_s(self) -> float | None: ...  # noqa: D102

    @property
    def num_choices(self) -> int: ...  # noqa: D102

    @property
    def client_request_id(self) -> str: ...  # noqa: D102

    @property
    def priority(self) -> int: ...  # noqa: D102

    @property
    def num_message_bytes(self) -> int: ...  # noqa: D102

    @property
    def num_token_ids(self) -> int: ...  # noqa: D102

    @property
    def is_short(self) -> bool: ...  # noqa: D102

    @property
    def shows_media(self) -> bool: ...  # noqa: D102

    @property
    def num_file_bytes(self) -> int: ...  # noqa: D102

    @property
    def work(self) -> int: ...  # noqa: D102

    @property
    def has_entered(self) -> bool: ...  # noqa: D102

    def for_tenant(self, tenant: str) -> AskedStart:
        """The same request, accounted to ``tenant``."""
        ...

    def forget(self) -> None:
        """It is read no more."""
        ...

    def read(self) -> GenerateStart:
        """All of it. Only once. Raises ``InvalidRequestError``, ``UnsupportedFieldError``."""
        ...

    def steps(self) -> Generator[int, None, GenerateStart]:
        """Read it step by step: before each step the generator yields what that costs, in token ids of a prompt.

        Each step takes two milliseconds at most, apart from copying texts, files and token ids. Raises as ``read``.
        """
        ...


@dataclass(kw_only=True)
class GenerateStart:
    """A client's request. Nothing changes it once it is made.

    Not frozen: each request makes one, and freezing doubles its price.

    Attributes:
        model: empty: the only model, if there is only one.
        seed: unsigned 64 bit; ``None``: the router draws one and returns it.
        tenant: the tenant that the request is accounted to; empty: the client itself.
        priority: higher first among its tenant's waiting requests.
        session_key: shared by the requests of one conversation; empty: none.
        timeout_s: seconds for the whole request; ``None``: the router's limit.
        num_choices: answers wanted.
        client_request_id: the client's own name for the request, for logs.
        ttft_target_s, itl_target_s: seconds to the first token and between tokens that the client wants; ``None``: the
            default of a router over several pools, which alone looks at them.
        media: items that a prompt of text or token ids refers to, in order; a chat's are in its messages.
        has_entered: it has waited for its turn in the router already: reading what it was made of took one.
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
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    media: tuple[MediaPart, ...] = ()
    has_entered: bool = False

    @property
    def has_media(self) -> bool:
        """Whether the request names any media; a chat of nothing but text is recognised without reading its parts."""
        if self.media:
            return True
        prompt = self.prompt
        return isinstance(prompt, ChatPrompt) and any(not isinstance(one.content, str) for one in prompt.messages)

    # It is an `AskedStart` with nothing left to read.

    @property
    def num_token_ids(self) -> int:
        """Token ids of the prompt, if it came as such."""
        return len(self.prompt.token_ids) if isinstance(self.prompt, TokenPrompt) else 0

    shows_media = has_media
    work = num_token_ids

    @property
    def is_short(self) -> bool:
        """Nothing is left to read."""
        return True

    @property
    def num_file_bytes(self) -> int:
        """None: media are shown."""
        return 0

    @property
    def num_message_bytes(self) -> int:
        """None: it is read."""
        return 0

    def forget(self) -> None:
        """There is nothing to forget."""

    def for_tenant(self, tenant: str) -> GenerateStart:
        """The same request, accounted to ``tenant``."""
        return replace(self, tenant=tenant)

    def read(self) -> GenerateStart:
        """All of it."""
        return self

    def steps(self) -> Generator[int, None, GenerateStart]:
        """One step, as ``AskedStart`` says."""
        yield self.work
        return self


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Resumes a request after an attempt that broke.

    Attributes:
        request_id, seed: as the first placement returned them.
        attempt: the new attempt's number, above the last one's, so at least 1.
        choice: the choice that broke; only it runs.
        generated_token_ids: the tokens that the choice already gave.
        num_text_bytes, num_reasoning_bytes: UTF-8 bytes of the text and the reasoning that the choice already gave.
        num_tool_calls: tool calls of which it already gave the first part.
        num_argument_bytes: UTF-8 bytes of the arguments that it already gave, of all tool calls together.
        model_fingerprint: identifies the model that gave them; only it may continue. Empty: any model of that name.
    """

    request_id: str
    attempt: int
    seed: int
    choice: int = 0
    generated_token_ids: Sequence[int] = field(default=(), repr=False)
    num_text_bytes: int = 0
    num_reasoning_bytes: int = 0
    num_tool_calls: int = 0
    num_argument_bytes: int = 0
    model_fingerprint: str = ""

    def read(self) -> Resume:
        """The same; tokens that are still in the client's message are copied out of it."""
        if isinstance(self.generated_token_ids, array):
            return self
        return replace(self, generated_token_ids=array("I", self.generated_token_ids[:]))


@dataclass(kw_only=True)
class ChoicePlacement:
    """Where one choice runs.

    Attributes:
        prefill: where the prompt is prefilled; ``None``: at the decode rank.
        num_matched_tokens: prompt tokens that the router expects to be cached where it is prefilled.
        cost: the cost there by the router's policy, in the unit that Explain reports; ``None``: the policy has no
            costs.
        num_held_tokens: the most prompt tokens that any one rank of the model had cached, as the router knew it.
    """

    choice: int
    prefill: Rank | None
    decode: Rank
    num_matched_tokens: int = 0
    cost: float | None = None
    num_held_tokens: int = 0


@dataclass(kw_only=True)
class Accepted:
    """The first of the request's choices is placed; comes first, once.

    Attributes:
        request_id: names the request in every log of the system.
        choices: the choices placed so far, in order; empty if the request was cancelled before.
        seed: the seed in use; the same request with this seed gives the same tokens.
        model_fingerprint: identifies the model that answers; empty if the request was cancelled before one was found.
        encode: where its media are encoded; ``None``: no media, or the worker that computes the prompt encodes them.
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
    """More of one choice; each token makes one.

    Attributes:
        token_offset: number of the first of ``token_ids`` within the output.
        text: new text, never half a character; not aligned with the tokens, because text that may begin a stop
            string, or a marker of reasoning or tool calls, comes later.
        logprobs: one entry a token, if the client asked for them.
        reasoning: new text of what the model thinks before it answers.
        tool_calls: new parts of calls, in order.
    """

    choice: int
    token_offset: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(kw_only=True)
class Usage:
    """What one choice used, in tokens.

    Attributes:
        num_cached_tokens: prompt tokens whose KV was cached.
        num_output_tokens: tokens that were shown.
        num_attempts: attempts made; at least 1 if there was any.
        num_media_tokens: prompt tokens that media fill; 0 also if the worker that encoded the media did not report it.
        num_evicted_tokens: prompt tokens that were expected to be cached, and were evicted before the request came.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_attempts: int
    num_media_tokens: int = 0
    num_evicted_tokens: int = 0


@dataclass(kw_only=True)
class TimeBreakdown:
    """Where one choice's time went, in seconds, as the router saw it; ``None``: this step did not happen.

    The times of failed attempts are included.

    Attributes:
        tokenize_s: template and tokenizer.
        router_queue_s: waiting in the router for room.
        prefill_s: the prefill hop, the worker's queue (``prefill_queue_s``) included.
        decode_queue_s: waiting in the decode worker, without ``transfer_s``, the time to move blocks there, and
            ``onboard_s``.
        first_token_s: from arrival to the first token.
        total_s: from arrival to the end.
        media_s: fetching media, and encoding them at an encode worker, before ``router_queue_s``.
        onboard_s: loading cached blocks from the memory or the disk of a worker's host; at a prefill, part of
            ``prefill_s``.
        transfer_bytes: what was moved in ``transfer_s``, of all attempts together.
        transfer_way: how the last attempt that moved any moved them; ``None``: none did, or the worker does not say.
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
    onboard_s: float | None = None
    transfer_bytes: int = 0
    transfer_way: TransferWay | None = None

    @property
    def transfer_gb_per_s(self) -> float | None:
        """How fast blocks were moved, in 10^9 bytes a second; ``None``: none were."""
        return self.transfer_bytes / self.transfer_s / 1e9 if self.transfer_bytes and self.transfer_s else None


#: The parts of a ``TimeBreakdown`` that are times.
TIMES = tuple(item.name for item in fields(TimeBreakdown) if item.name.endswith("_s"))


@dataclass(kw_only=True)
class ChoiceFinished:
    """One choice ended well.

    Attributes:
        stop_string: the stop string that ended it; ``None``: none did.
    """

    choice: int
    reason: FinishReason
    usage: Usage
    time: TimeBreakdown
    stop_string: str | None = None


AnswerPart: TypeAlias = Accepted | Placed | PromptLogprobs | Delta | ChoiceFinished


# Refusals of what no model can serve; each names the field of ``GenerateStart``.

#: Choices of one request.
MAX_CHOICES = 64

MAX_ATTEMPT = 2**31
_MAX_PREFILL_NAMESPACES = 64

#: Most ``stop_strings`` of one request.
MAX_STOP_STRINGS = 16

_MAX_STOP_STRING_BYTES = 1024

_MAX_CLIENT_REQUEST_ID_BYTES = 128

#: Characters of a tenant's name, a session key and a cache salt.
MAX_NAME_LENGTH = 256


def check_start(start: GenerateStart) -> None:
    """Refuse what no model can serve. Clients may check it before they send a request.

    Raises:
        InvalidRequestError: names the field.
    """
    check_asked(start)
    check_read(start)


def check_asked(start: AskedStart) -> None:
    """The part of ``check_start`` for which nothing more has to be read. Raises ``InvalidRequestError``."""
    if not 1 <= start.num_choices <= MAX_CHOICES:
        raise InvalidRequestError(f"num_choices must be in [1, {MAX_CHOICES}]", field="num_choices")
    if start.timeout_s is not None:
        _check_timeout(start.timeout_s)
    if _size_bytes(start.client_request_id) > _MAX_CLIENT_REQUEST_ID_BYTES:
        message = f"client_request_id is longer than {_MAX_CLIENT_REQUEST_ID_BYTES} bytes"
        raise InvalidRequestError(message, field="client_request_id")
    tenant, session_key, cache_salt = start.tenant, start.session_key, start.cache_salt
    if len(tenant) > MAX_NAME_LENGTH or len(session_key) > MAX_NAME_LENGTH or len(cache_salt) > MAX_NAME_LENGTH:
        check_name("tenant", tenant)
        check_name("session_key", session_key)
        check_name("cache_salt", cache_salt)


def check_read(start: GenerateStart) -> None:
    """The rest of ``check_start``. Raises ``InvalidRequestError``."""
    _check_text_options(start)
    _check_target("ttft_target", start.ttft_target_s)
    _check_target("itl_target", start.itl_target_s)
    if _is_empty(start.prompt):
        raise InvalidRequestError("the prompt is empty", field=prompt_field(start.prompt))
    if isinstance(start.prompt, ChatPrompt):
        check_chat(start.prompt)


def check_name(field: str, name: str) -> None:
    """Refuse a name that is too long to be kept. Raises ``InvalidRequestError`` naming ``field``."""
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidRequestError(f"{field} is longer than {MAX_NAME_LENGTH} characters", field=field)


def check_resume(resume: Resume, start: AskedStart) -> None:
    """Refuse to resume an attempt that can't have existed. Raises ``InvalidRequestError`` naming the field."""
    if not is_request_id(resume.request_id):
        message = "request_id is not 32 lower-case hexadecimal digits"
        raise InvalidRequestError(message, field="resume.request_id")
    if not 1 <= resume.attempt <= MAX_ATTEMPT:
        raise InvalidRequestError(f"attempt must be in [1, {MAX_ATTEMPT}]", field="resume.attempt")
    if resume.choice >= start.num_choices:
        raise InvalidRequestError("the request has no such choice", field="resume.choice")
    if start.seed is not None and resume.seed != start.seed:
        raise InvalidRequestError("resume and start name different seeds", field="resume.seed")


def prompt_field(prompt: Prompt) -> str:
    """The path of the field that held the prompt."""
    if isinstance(prompt, TextPrompt):
        return "text"
    return "chat.messages" if isinstance(prompt, ChatPrompt) else "token_ids.ids"


def _check_timeout(timeout_s: float) -> None:
    if not timeout_s > 0:  # this also refuses NaN
        raise InvalidRequestError("timeout must be above 0", field="timeout")
    if math.isinf(timeout_s):
        raise InvalidRequestError("timeout must be finite", field="timeout")


def _check_target(field: str, target_s: float | None) -> None:
    if target_s is not None and not (target_s >= 0 and math.isfinite(target_s)):
        raise InvalidRequestError(f"{field} must be finite and not below 0", field=field)


def _check_text_options(start: GenerateStart) -> None:
    options, field = start.text_options, "text_options.stop_strings"
    if len(options.stop_strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"there are more than {MAX_STOP_STRINGS} stop strings", field=field)
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
    # Half a surrogate pair is refused when messages are written, not while it is measured.
    return len(text.encode(errors="surrogatepass"))


@dataclass(frozen=True, kw_only=True)
class Relayed:
    """What a router over several pools says of a request that it relays.

    Attributes:
        request_id: names the request; empty: the router that gets it draws one.
        prefill_namespaces: whose routers prefill, the first that can; empty: the router's own workers.
        sent_at_unix_ns: when it was sent, if its sender traces it; 0: that does not.
    """

    request_id: str = ""
    prefill_namespaces: tuple[str, ...] = ()
    sent_at_unix_ns: int = 0


def check_relayed(relayed: Relayed) -> None:
    """Refuse names that name no request. Raises ``InvalidRequestError`` naming the field."""
    if relayed.request_id and not is_request_id(relayed.request_id):
        raise InvalidRequestError("request_id is not 32 lower-case hexadecimal digits", field="request_id")
    if len(relayed.prefill_namespaces) > _MAX_PREFILL_NAMESPACES:
        message = f"there are more than {_MAX_PREFILL_NAMESPACES} namespaces"
        raise InvalidRequestError(message, field="prefill_namespaces")
    if len(set(relayed.prefill_namespaces)) < len(relayed.prefill_namespaces):
        raise InvalidRequestError("a namespace is named twice", field="prefill_namespaces")


# A session in domain terms: many requests on one stream, by slot, and its limits.


@dataclass(frozen=True, kw_only=True)
class SessionStart:
    """A request of a session.

    Attributes:
        slot: the client chooses it; it is free again after the request's end.
        resume: the attempt to resume; ``None``: a new request.
        traceparent: W3C trace context of this request, not checked; empty: that of the stream.
        relayed: what a router over several pools said beside.
    """

    slot: int
    start: AskedStart
    resume: Resume | None = None
    traceparent: str = ""
    relayed: Relayed | None = None


class SessionRun(Protocol):
    """One running request; it calls its sink's ``end`` once it holds nothing any more."""

    def cancel(self) -> None:
        """End it early: each choice that has not ended gets its end."""
        ...

    def abort(self, error: ServingError) -> None:
        """End it with ``error``."""
        ...


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Limits of each session.

    Attributes:
        tick_s: time between two messages to the client; the first after a pause goes at once.
        max_requests: most requests, including those whose end the client has not read; more are refused. A request
            counts as often as it has choices.
        max_pending_tokens: most tokens of one request that may wait for a slow client; more end the request.
            They are counted whenever a number of deltas has come, at most 4,096, so that many may come on top.
        max_pending_bytes: the same limit for its tokens, text and log probabilities together.
        idle_timeout_s: a session ends in which no request ran for this long, or for up to half as much longer.

    Raises:
        ConfigError: names the field.
    """

    tick_s: float = 0.002
    max_requests: int = 4096
    max_pending_tokens: int = 4096
    max_pending_bytes: int = 256 << 10
    idle_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.tick_s < 0:
            raise ConfigError("tick_s: must not be negative")
        if self.idle_timeout_s <= 0:
            raise ConfigError("idle_timeout_s: must be above 0")
        for name in ("max_requests", "max_pending_tokens", "max_pending_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")

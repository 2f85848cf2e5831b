"""The edge in domain terms: what a client asks of the router, and what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from quartet.discovery.place import Place
from quartet.engine.sampling import OutputOptions, Sampling, TokenLogprobs
from quartet.text.chat_template import ChatMessage


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
    """How text is made and where it stops; as ``quartet.v1.TextOptions``."""

    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    omit_text: bool = False
    omit_token_ids: bool = False
    show_special_tokens: bool = False


@dataclass(frozen=True, kw_only=True)
class GenerateStart:
    """A client's request; as ``quartet.v1.GenerateStart``.

    Attributes:
        model: empty: the only one.
        seed: ``None``: the router draws one.
        timeout_s: for the whole request; ``None``: the router's limit.
        client_request_id: the client's own name for it, for logs.
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


@dataclass(frozen=True, kw_only=True)
class ChoicePlacement:
    """Where one choice runs; ``prefill`` is ``None`` where the decode place prefills itself."""

    choice: int
    prefill: Place | None
    decode: Place
    num_matched_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The request is placed; comes first, once."""

    request_id: str
    choices: tuple[ChoicePlacement, ...]
    num_prompt_tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Delta:
    """More of one choice; ``token_offset`` is the number of its first token within the output."""

    choice: int
    token_offset: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


class EndReason(StrEnum):
    """Why a choice ended."""

    STOP_ID = "stop_id"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one choice used; ``num_output_tokens`` were shown."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_attempts: int


@dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """Where one choice's time went, in seconds; ``None``: did not happen. As ``quartet.v1.TimeBreakdown``."""

    tokenize_s: float | None = None
    router_queue_s: float | None = None
    prefill_s: float | None = None
    prefill_queue_s: float | None = None
    decode_queue_s: float | None = None
    transfer_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ChoiceFinished:
    """One choice ended; ``stop_string`` is empty unless one ended it."""

    choice: int
    reason: EndReason
    usage: Usage
    time: TimeBreakdown
    stop_string: str = ""


AnswerPart: TypeAlias = Accepted | Delta | ChoiceFinished

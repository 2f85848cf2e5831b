"""What a client sends and what it gets, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from quartet.discovery.base import WorkerRecord
from quartet.engine.sampling import TokenLogprobs
from quartet.events.load import WorkerLoad


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP_ID = "stop_id"  # an end-of-sequence or stop id was sampled
    STOP_STRING = "stop_string"  # one of the stop strings appeared
    LENGTH = "length"  # max_tokens or the model's longest sequence
    CANCELLED = "cancelled"  # the client asked for it


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: ``system``, ``user``, ``assistant``, or what the model's template knows.
        content: what they say.
    """

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class ChoicePlacement:
    """Where one choice runs.

    Attributes:
        prefill_worker_id: where the prompt is prefilled; ``None``: at the decode worker.
        decode_worker_id: where tokens are decoded.
        num_matched_tokens: prompt tokens that the router expects to be cached.
    """

    choice: int
    prefill_worker_id: str | None
    decode_worker_id: str
    num_matched_tokens: int


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The request is placed; comes first.

    Attributes:
        request_id: names the request in every log of the system.
        seed: the seed in use: with it the same request gives the same tokens.
        router: ``host:port`` of the router that took it.
    """

    request_id: str
    placements: tuple[ChoicePlacement, ...]
    num_prompt_tokens: int
    seed: int
    router: str


@dataclass(frozen=True, kw_only=True)
class Delta:
    """More of one choice.

    Attributes:
        token_offset: number of the first of ``token_ids`` within the output.
        text: new text, never half a character; not aligned with the tokens, because text that may begin a stop
            string comes later.
        logprobs: one entry a token, where asked for.
    """

    choice: int
    token_offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one choice used, in tokens.

    Attributes:
        num_cached_tokens: of the prompt's, those whose KV was cached.
        num_output_tokens: tokens that were shown.
        num_attempts: attempts it took, at least 1.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_attempts: int


@dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """Where one choice's time went, in seconds, as the router saw it; ``None``: did not happen.

    Attributes:
        tokenize_s: template and tokenizer.
        router_queue_s: waiting in the router for room.
        prefill_s: the prefill hop, the worker's queue (``prefill_queue_s``) included.
        decode_queue_s: waiting in the decode worker, the transfer (``transfer_s``) included.
        first_token_s: from arrival to the first token.
        total_s: from arrival to the end.
    """

    tokenize_s: float | None = None
    router_queue_s: float | None = None
    prefill_s: float | None = None
    prefill_queue_s: float | None = None
    decode_queue_s: float | None = None
    transfer_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One choice ended well.

    Attributes:
        stop_string: the one that ended it, else ``None``.
    """

    choice: int
    reason: FinishReason
    stop_string: str | None
    usage: Usage
    time: TimeBreakdown


Event: TypeAlias = Accepted | Delta | Finished


@dataclass(frozen=True, kw_only=True)
class CompletedChoice:
    """One whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: Finished


@dataclass(frozen=True, kw_only=True)
class Completion:
    """All answers to a request, in the order of choices."""

    accepted: Accepted
    choices: tuple[CompletedChoice, ...]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


class WorkerState(StrEnum):
    """Whether a router places requests at a worker."""

    JOINING = "joining"  # known, but not connected yet
    READY = "ready"
    SUSPECT = "suspect"  # its stream broke or its heartbeats are silent
    DRAINING = "draining"  # it lets its work run out


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """A worker as a router sees it.

    Attributes:
        load: its last report; ``None``: none came yet.
        load_age_s: age of that report in seconds.
        num_requests: requests of this router that run there now.
    """

    record: WorkerRecord
    state: WorkerState
    load: WorkerLoad | None
    load_age_s: float
    num_requests: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model and the pool that serves it.

    Attributes:
        fingerprint: hex SHA-256 of everything that decides its tokens.
        max_model_len: tokens of prompt and output together.
        num_prefill_workers: ready now.
        num_decode_workers: ready now.
        sampling_fields: sampling fields that all of its workers honour.
    """

    name: str
    fingerprint: str
    max_model_len: int
    num_prefill_workers: int
    num_decode_workers: int
    sampling_fields: tuple[str, ...]
    media: tuple[str, ...]
    adapters: tuple[str, ...]
    has_chat_template: bool


Conversation: TypeAlias = Sequence[ChatMessage]

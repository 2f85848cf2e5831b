"""Prefills that a router does for another one, to proto and back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quartet.api.convert.answer import from_rank, put_rank
from quartet.api.request import check_name
from quartet.discovery.base import Rank
from quartet.errors import InvalidRequestError
from quartet.kvcache.block_hash import TOKEN_SIZE_BYTES
from quartet.rpc.errors import to_non_negative_seconds
from quartet.streams.convert.messages import from_prefill_result, from_start, put_start, to_prefill_outcome
from quartet.streams.messages import PrefillOutcome, WorkerStart
from quartet.v1 import router_pb2


@dataclass(frozen=True, kw_only=True)
class AskedPrefill:
    """A prompt that another router wants prefilled, for workers of the very same model."""

    model_name: str
    model_fingerprint: str
    start: WorkerStart


class UnreadPrefill:
    """An asked prefill in its message: only what says whose it is and how long it is has been read.

    Attributes:
        model_name, model_fingerprint: of the very model that is to prefill.
        request_id, tenant, priority: as of its context; the id is not checked.
        timeout_s: seconds that it may take; ``None``: no limit of its own.
        adapter: by name; empty: the base model.
        num_salt_characters: of its cache salt.
        num_tokens: of the prompt and the tokens that were generated after it.
    """

    __slots__ = (
        "_message",
        "adapter",
        "model_fingerprint",
        "model_name",
        "num_salt_characters",
        "num_tokens",
        "priority",
        "request_id",
        "tenant",
        "timeout_s",
    )

    def __init__(self, message: router_pb2.PrefillForRequest) -> None:
        """Count what repeats. Raises ``InvalidRequestError``; ``field`` is the path."""
        if not message.HasField("start"):
            raise InvalidRequestError("start is missing", field="start")
        start = message.start
        if start.media or start.generation.media:
            raise InvalidRequestError("prompts with media are prefilled where they are decoded", field="start.media")
        context, generation = start.context, start.generation
        self._message = message
        self.model_name, self.model_fingerprint = message.model, message.model_fingerprint
        self.request_id, self.tenant, self.priority = context.request_id, context.tenant, context.priority
        check_name("start.context.tenant", self.tenant)  # before anything is kept by it
        field = "start.context.timeout"
        self.timeout_s = to_non_negative_seconds(context.timeout, field) if context.HasField("timeout") else None
        self.adapter, self.num_salt_characters = generation.adapter, len(generation.cache_salt)
        num_bytes = len(generation.prompt_token_ids) + len(generation.generated_token_ids)
        self.num_tokens = num_bytes // TOKEN_SIZE_BYTES

    def for_tenant(self, tenant: str) -> UnreadPrefill:
        """The same, accounted to ``tenant``."""
        self.tenant = tenant
        return self

    def read(self) -> WorkerStart:
        """All of it. Raises ``InvalidRequestError``, ``UnsupportedFieldError``."""
        start = from_start(self._message.start)
        return replace(start, context=replace(start.context, tenant=self.tenant))


@dataclass(frozen=True, kw_only=True)
class PrefilledFor:
    """How that went, and where."""

    outcome: PrefillOutcome
    rank: Rank


def to_prefill_for_request(asked: AskedPrefill) -> router_pb2.PrefillForRequest:
    """The message."""
    message = router_pb2.PrefillForRequest(model=asked.model_name, model_fingerprint=asked.model_fingerprint)
    put_start(message.start, 0, asked.start)
    return message


def from_prefill_for_request(message: router_pb2.PrefillForRequest) -> UnreadPrefill:
    """The prompt, still to be read. Raises ``InvalidRequestError``; ``field`` is its path."""
    return UnreadPrefill(message)


def to_prefill_for_response(prefilled: PrefilledFor) -> router_pb2.PrefillForResponse:
    """The message."""
    message = router_pb2.PrefillForResponse(result=to_prefill_outcome(prefilled.outcome))
    put_rank(message.rank, prefilled.rank)
    return message


def from_prefill_for_response(message: router_pb2.PrefillForResponse) -> PrefilledFor:
    """What a router answered. Raises ``ProtocolError`` or ``InvalidRequestError`` for an impossible message."""
    return PrefilledFor(outcome=from_prefill_result(message.result), rank=from_rank(message.rank))

"""Worker streams in domain terms: what the router starts on a worker, and what comes back.

Every start carries a ``RequestContext`` from hop to hop: who asks, and how long it may take. Objects that the router
makes for each request are not frozen: freezing triples what they cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from quartet.engine.base import FinishReason, Generation
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import InvalidRequestError
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaFile, MediaItem
from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES
from quartet.transfer.base import TransferWay

#: What isn't sent in chunks, as an engine's own state, has to fit into one message, beside its other fields.
MAX_UNCHUNKED_BYTES = MAX_STREAM_MESSAGE_BYTES - (128 << 10)
_REQUEST_ID = re.compile(r"[0-9a-f]{32}")
_MAX_NAME_LENGTH = 256
# Load reports name up to 1,024 of them.
_MAX_ROUTER_ID_BYTES = 64


@dataclass(kw_only=True)
class RequestContext:
    """What names a request and bounds it on every hop.

    Attributes:
        request_id: 32 lower-case hexadecimal digits, or empty: the receiver draws one.
        attempt: which try of this request it is, from 0.
        choice: which of the request's parallel answers this is, from 0.
        timeout_s: seconds left for the whole request when the message was made; ``None``: no limit of its own.
        traceparent: W3C trace context; empty: no trace.
        tenant: the account of the request; empty: none.
        priority: higher first among waiting requests.
        session_key: requests of one conversation share it; empty: none.
        router_id: the router that placed it, at most 64 bytes; empty: it came without one.
        router_request_number: counts the starts that this router sent to this worker, from 1; 0: without a router.
        trust_domain: id of the tenant's trust domain, part of media ids; empty: that of all tenants without one.
        sent_at_unix_ns: when the sender made this, if it traces the request; 0: it does not.

    Raises:
        InvalidRequestError: with ``field`` = ``context.NAME``.
    """

    request_id: str = ""
    attempt: int = 0
    choice: int = 0
    timeout_s: float | None = None
    traceparent: str = ""
    tenant: str = ""
    priority: int = 0
    session_key: str = field(default="", repr=False)
    router_id: str = ""
    router_request_number: int = 0
    trust_domain: str = ""
    sent_at_unix_ns: int = 0

    def __post_init__(self) -> None:
        if self.request_id and not is_request_id(self.request_id):
            raise InvalidRequestError("request_id is not 32 lower-case hexadecimal digits", field="context.request_id")
        if len(self.router_id.encode()) > _MAX_ROUTER_ID_BYTES:
            raise InvalidRequestError(
                f"router_id is longer than {_MAX_ROUTER_ID_BYTES} bytes: give the router a shorter one",
                field="context.router_id",
            )
        longest = max(len(self.traceparent), len(self.tenant), len(self.session_key), len(self.trust_domain))
        if longest > _MAX_NAME_LENGTH:
            self._refuse_long_name()

    def _refuse_long_name(self) -> None:
        for name in ("traceparent", "tenant", "session_key", "trust_domain"):
            if len(getattr(self, name)) > _MAX_NAME_LENGTH:
                message = f"{name} is longer than {_MAX_NAME_LENGTH} characters"
                raise InvalidRequestError(message, field=f"context.{name}")


def is_request_id(text: str) -> bool:
    """Whether ``text`` is 32 lower-case hexadecimal digits."""
    return _REQUEST_ID.fullmatch(text) is not None


@dataclass(kw_only=True)
class WorkerStart:
    """One answer to prefill or decode on a worker; ``hand_off`` and ``is_signed`` only for decode.

    Attributes:
        media: hand-offs, aligned with ``generation.media``; or files, one for each placeholder of the prompt, whose
            ``generation.media`` is empty.
        is_signed: a client brought it, signed by a router: its number is that of a placement.
    """

    context: RequestContext
    generation: Generation
    hand_off: HandOff | None = None
    is_signed: bool = False
    media: tuple[MediaInput, ...] = ()


@dataclass(frozen=True)
class MediaInput:
    """A media item whose embeddings a worker needs: pulled from an encode worker, or computed there from the file."""

    media_id: bytes
    source: HandOff | MediaFile


@dataclass(frozen=True, kw_only=True)
class SignedPlacement:
    """What lets a client start one request at a decode worker, once and within a short time.

    Attributes:
        address: ``host:port`` of the worker.
        signed_start: a serialized ``SignedStart``; it holds the prompt and the hand-off's secret.
        key_id: names the key of ``mac``.
        mac: HMAC-SHA256 over exactly the bytes of ``signed_start``.
    """

    address: str
    signed_start: bytes = field(repr=False)
    key_id: str
    mac: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class PrefillOutcome:
    """A prefill that ended well: its token and, unless that ended the generation, where the blocks are.

    Attributes:
        prompt_token_ids: the prompt with its media's tokens in it, where files came with the start; else empty.
        media: where the items of that prompt lie.
        num_evicted_tokens: tokens after the cached ones that were cached lately.
        onboard_s: seconds in which cached blocks came from tiers below the device; 0: none did.
        sent_at_unix_ns: when the worker had the token; 0: it does not trace the request.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    hand_off: HandOff | None
    num_cached_tokens: int
    queue_s: float
    compute_s: float
    prompt_token_ids: Sequence[int] = field(default=(), repr=False)
    media: tuple[MediaSpan, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    num_evicted_tokens: int = 0
    onboard_s: float = 0.0
    sent_at_unix_ns: int = 0


@dataclass(kw_only=True)
class DecodeStarted:
    """A decode joined its worker's running batch.

    Attributes:
        transfer_way: how ``transfer_bytes`` were moved; ``None``: nothing was, or the worker does not say.
        num_prompt_tokens: of the prompt with its media's tokens in it, where files came with the start; else 0.
        num_evicted_tokens: tokens after the cached ones that were cached lately.
        onboard_s: as of ``PrefillOutcome``.
    """

    num_cached_tokens: int
    queue_s: float
    transfer_s: float
    transfer_bytes: int
    transfer_way: TransferWay | None = None
    num_prompt_tokens: int = 0
    num_evicted_tokens: int = 0
    onboard_s: float = 0.0


@dataclass(kw_only=True)
class DecodeFinished:
    """A decode ended well."""

    reason: FinishReason
    num_output_tokens: int


class DecodeSink(Protocol):
    """Takes what one decode gives, as it comes. Called on the event loop; nothing here waits.

    It is called, not woken: waking a task for each token would cost more than everything else done with the token.
    """

    def started(self, started: DecodeStarted) -> None:
        """It joined the running batch."""
        ...

    def take_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Take those of its prompt, before its first token; once, if they were asked for.

        Raises:
            ServingError: they are of another prompt: the decode ends with it.
        """
        ...

    def take(self, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], now: float) -> bool:
        """Take tokens from output token number ``offset`` on; some may have come before.

        ``logprobs`` is empty or has one entry a token; ``now`` is monotonic seconds.

        Returns:
            Whether more is wanted: else the decode is cancelled.

        Raises:
            ServingError: tokens are missing or impossible: the decode ends with it.
        """
        ...


def split_tokens(token_ids: list[int], num_tokens: list[int]) -> Iterable[Sequence[int]]:
    """The parts of a column ``token_ids``; ``num_tokens`` has the number of tokens of each.

    Raises:
        ValueError: the numbers do not add up to the tokens.
    """
    if num_tokens == [1] * len(token_ids):  # as most messages: tuples of one, made without a line of Python for each
        return zip(token_ids, strict=True)
    ends = list(accumulate(num_tokens))
    if len(token_ids) != (ends[-1] if ends else 0):
        raise ValueError("num_tokens does not add up to the tokens")
    return [token_ids[end - num : end] for num, end in zip(num_tokens, ends, strict=True)]


@dataclass(frozen=True, kw_only=True)
class EncodeStart:
    """The items of one request, at least one, in the order of its prompt.

    Attributes:
        items: an id is empty where the worker is to work it out.
    """

    context: RequestContext
    items: tuple[MediaItem, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class EncodedItem:
    """One item's embeddings can be pulled.

    Attributes:
        item: which, from 0.
        queue_s, compute_s: as ``quartet.engine.encoder.EncodeTimes``; 0 where it was cached.
    """

    item: int
    hand_off: HandOff
    queue_s: float = 0.0
    compute_s: float = 0.0

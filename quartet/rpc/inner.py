"""The inner plane in domain terms: what the router starts on a worker, and what comes back for one slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quartet.engine.base import FinishReason, Generation
from quartet.engine.sampling import TokenLogprobs
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaFile
from quartet.rpc.context import RequestContext

#: Inner messages are at most this long: one 5 MiB message ends a whole shared stream.
MAX_INNER_MESSAGE_BYTES = 1 << 20

#: An engine's own state has to fit into a start beside all that isn't sent in chunks.
MAX_OPAQUE_STATE_BYTES = MAX_INNER_MESSAGE_BYTES - (128 << 10)


@dataclass(frozen=True)
class MediaInput:
    """A media item whose embeddings a worker needs: pulled from an encode worker, or computed there from the file."""

    media_id: bytes
    source: HandOff | MediaFile


@dataclass(frozen=True, kw_only=True)
class InnerStart:
    """One answer to prefill or decode on a worker; ``hand_off`` and ``is_sealed`` only for decode.

    Attributes:
        media: hand-offs, aligned with ``generation.media``; or files, one for each placeholder of the prompt, whose
            ``generation.media`` is empty.
        is_sealed: it came from a client, under a router's seal: its number is that of a placement.
    """

    context: RequestContext
    generation: Generation
    hand_off: HandOff | None = None
    is_sealed: bool = False
    media: tuple[MediaInput, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PrefillOutcome:
    """A prefill that ended well: its token and, unless that ended the generation, where the blocks are.

    Attributes:
        prompt_token_ids: the prompt with its media's tokens in it, where files came with the start; else empty.
        media: where the items of that prompt lie.
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


@dataclass(frozen=True, kw_only=True)
class DecodeStarted:
    """A decode joined its worker's running batch.

    Attributes:
        num_prompt_tokens: of the prompt with its media's tokens in it, where files came with the start; else 0.
    """

    num_cached_tokens: int
    queue_s: float
    transfer_s: float
    transfer_bytes: int
    num_prompt_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class DecodeFinished:
    """A decode ended well."""

    reason: FinishReason
    num_output_tokens: int


class DecodeSink(Protocol):
    """Takes what one decode gives, as it comes. Called on the event loop; nothing here waits.

    A call, not a wake-up: a task that is woken for each token costs more than all else that is done with it.
    """

    def started(self, started: DecodeStarted) -> None:
        """It joined the running batch."""
        ...

    def take(self, offset: int, token_ids: list[int], logprobs: Sequence[TokenLogprobs], now: float) -> bool:
        """Take tokens, the first of which is output token number ``offset``; some may have come before.

        ``logprobs`` is empty or has one entry a token; ``now`` is monotonic seconds.

        Returns:
            Whether more is wanted: else the decode is cancelled.

        Raises:
            ServingError: tokens are missing, or make no sense: the decode ends with it.
        """
        ...

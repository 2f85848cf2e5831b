"""The inner plane in domain terms: what the router starts on a worker, and what comes back for one slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quartet.engine.base import FinishReason, Generation
from quartet.engine.sampling import TokenLogprobs
from quartet.kvcache.layout import HandOff
from quartet.rpc.context import RequestContext

#: Inner messages are at most this long: one 5 MiB message ends a whole shared stream.
MAX_INNER_MESSAGE_BYTES = 1 << 20

#: An engine's own state has to fit into a start beside all that isn't sent in chunks.
MAX_OPAQUE_STATE_BYTES = MAX_INNER_MESSAGE_BYTES - (128 << 10)


@dataclass(frozen=True, kw_only=True)
class InnerStart:
    """One answer to prefill or decode on a worker; ``hand_off`` only for decode."""

    context: RequestContext
    generation: Generation
    hand_off: HandOff | None = None


@dataclass(frozen=True, kw_only=True)
class PrefillOutcome:
    """A prefill that ended well: its token and, unless that ended the generation, where the blocks are."""

    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    hand_off: HandOff | None
    num_cached_tokens: int
    queue_s: float
    compute_s: float


@dataclass(frozen=True, kw_only=True)
class DecodeStarted:
    """A decode joined its worker's running batch."""

    num_cached_tokens: int
    queue_s: float
    transfer_s: float
    transfer_bytes: int


@dataclass(frozen=True, kw_only=True)
class DecodeFinished:
    """A decode ended well."""

    reason: FinishReason
    num_output_tokens: int


@dataclass(kw_only=True, slots=True)
class DecodeProgress:
    """All that has gathered for one decode since it was last looked at.

    ``token_ids[0]`` is output token number ``token_offset``.
    """

    token_offset: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    started: DecodeStarted | None = None
    finished: DecodeFinished | None = None

    def merge_tokens(self, offset: int, token_ids: Sequence[int]) -> None:
        """Append tokens that begin at ``offset``; those that are here already are dropped.

        Raises:
            IndexError: tokens between what is here and ``offset`` are missing.
        """
        if not self.token_ids:
            self.token_offset = offset
        end = self.token_offset + len(self.token_ids)
        if offset > end:
            raise IndexError(f"output tokens {end} to {offset - 1} are missing")
        self.token_ids.extend(token_ids[end - offset :])

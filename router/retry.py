"""Where the next attempt should go after one failed; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from quartet import errors
from quartet.discovery.base import Rank
from quartet.errors import ServingError
from quartet.streams.client import FINAL, pause_s
from router.policy.base import Placement

#: The transfer of blocks or embeddings failed; the receiver is healthy.
TRANSFER = (
    errors.TransferError,
    errors.HandOffNotFoundError,
    errors.HandOffStateError,
    errors.StaleEpochError,
)


class Hop(StrEnum):
    """The hop at which an attempt failed."""

    PREFILL = "prefill"
    DECODE = "decode"


class HopFailedError(Exception):
    """An attempt failed at ``hop`` with ``error``; ``pulls_media``: that hop pulls its media's embeddings."""

    def __init__(self, hop: Hop, error: ServingError, *, pulls_media: bool = False) -> None:
        super().__init__(str(error))
        self.hop = hop
        self.error = error
        self.pulls_media = pulls_media


@dataclass
class RetryHints:
    """Where the next attempt of one choice should go.

    Attributes:
        avoid: ids of workers that just failed it.
        prefer_prefill: after one failed transfer, the rank that has the blocks cached.
    """

    avoid: set[str] = field(default_factory=set)
    prefer_prefill: Rank | None = None
    _num_failures: int = 0
    _num_failed_transfers: int = 0
    _num_failed_media_transfers: int = 0

    def note(self, failure: HopFailedError, placement: Placement) -> float:
        """Learn from ``failure`` and return the seconds to pause before the next attempt.

        Raises:
            ServingError: the failure's own, when another attempt would fail as well.
        """
        error = failure.error
        if self._is_final(failure, placement):
            raise error
        self._num_failures += 1
        self.prefer_prefill = None
        if isinstance(error, errors.MediaLostError):
            pass  # no worker failed: embeddings are kept for less time than a sequence runs
        elif failure.pulls_media and isinstance(error, TRANSFER):
            self._note_media_transfer(placement.prefills_at)
        elif failure.hop is Hop.PREFILL and placement.prefill is not None:
            self.avoid.add(placement.prefill.worker_id)
        elif isinstance(error, TRANSFER) and placement.prefill is not None:
            self._note_transfer(placement.prefill)
        else:
            self.avoid.add(placement.decode.worker_id)
        return pause_s(error, self._num_failures)

    def _is_final(self, failure: HopFailedError, placement: Placement) -> bool:
        if not isinstance(failure.error, errors.PromptTooLongError):
            return isinstance(failure.error, FINAL)
        # Workers differ in size, so another may take it. If the worker was already to be avoided, no other was left.
        rank = placement.prefill if failure.hop is Hop.PREFILL else placement.decode
        return rank is not None and rank.worker_id in self.avoid

    def _note_media_transfer(self, rank: Rank) -> None:
        """Blame the encode worker the first time, then the worker that pulls."""
        self._num_failed_media_transfers += 1
        if self._num_failed_media_transfers > 1:
            self.avoid.add(rank.worker_id)

    def _note_transfer(self, prefill: Rank) -> None:
        self._num_failed_transfers += 1
        if self._num_failed_transfers == 1:
            self.prefer_prefill = prefill
        else:
            self.avoid.add(prefill.worker_id)

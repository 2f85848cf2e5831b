"""What a failed attempt teaches the next one; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from quartet import errors
from quartet.discovery.base import Rank
from quartet.errors import ServingError
from quartet.streams.client import FINAL, pause_s
from router.policy.base import Placement

#: Blocks or embeddings did not come over; who was to take them is fine.
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
    """An attempt failed at ``hop`` with ``error``; ``pulls_media``: where its media's embeddings were to be pulled."""

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
        prefer_prefill: after a transfer failed once: where the blocks are cached.
    """

    avoid: set[str] = field(default_factory=set)
    prefer_prefill: Rank | None = None
    _num_failures: int = 0
    _num_failed_transfers: int = 0
    _num_failed_media_transfers: int = 0

    def note(self, failure: HopFailedError, placement: Placement) -> float:
        """Learn from ``failure`` and return the seconds to pause before the next attempt.

        Raises:
            ServingError: the failure's own, when another attempt makes no sense.
        """
        error = failure.error
        if self._is_final(failure, placement):
            raise error
        self._num_failures += 1
        self.prefer_prefill = None
        if isinstance(error, errors.MediaLostError):
            pass  # nobody's fault: embeddings are not kept for as long as a sequence lives
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
        # Places differ in size. Whoever is asked though it is to be avoided is the last one that there is.
        rank = placement.prefill if failure.hop is Hop.PREFILL else placement.decode
        return rank is not None and rank.worker_id in self.avoid

    def _note_media_transfer(self, rank: Rank) -> None:
        """Most likely it was the encode worker's fault, but not time after time."""
        self._num_failed_media_transfers += 1
        if self._num_failed_media_transfers > 1:
            self.avoid.add(rank.worker_id)

    def _note_transfer(self, prefill: Rank) -> None:
        self._num_failed_transfers += 1
        if self._num_failed_transfers == 1:
            self.prefer_prefill = prefill
        else:
            self.avoid.add(prefill.worker_id)

"""What a failed attempt teaches about media."""

from __future__ import annotations

import pytest

from quartet import errors
from quartet.discovery.base import Rank
from router.attempts import Hop, HopFailedError, RetryHints
from router.policy.base import Placement

APART = Placement(Rank("prefill-0"), Rank("decode-0"))
ALONE = Placement(None, Rank("decode-0"))


@pytest.mark.parametrize(
    ("hop", "placement", "puller"), [(Hop.PREFILL, APART, "prefill-0"), (Hop.DECODE, ALONE, "decode-0")]
)
def test_a_worker_that_could_not_pull_embeddings_is_avoided_after_the_second_failure(
    hop: Hop, placement: Placement, puller: str
) -> None:
    hints = RetryHints()
    failure = HopFailedError(hop, errors.TransferError("torn"), pulls_media=True)
    hints.note(failure, placement)
    assert hints.avoid == set()
    hints.note(failure, placement)
    assert hints.avoid == {puller}


def test_a_failed_pull_of_blocks_is_distinguished_from_one_of_embeddings() -> None:
    hints = RetryHints()
    hints.note(HopFailedError(Hop.DECODE, errors.TransferError("torn")), APART)
    assert (hints.avoid, hints.prefer_prefill) == (set(), Rank("prefill-0"))


def test_lost_media_are_no_workers_fault() -> None:
    hints = RetryHints()
    assert hints.note(HopFailedError(Hop.DECODE, errors.MediaLostError("preempted")), APART) == 0.0
    assert (hints.avoid, hints.prefer_prefill) == (set(), None)


def test_damaged_media_end_the_request() -> None:
    failure = HopFailedError(Hop.PREFILL, errors.InvalidMediaError("torn"), pulls_media=True)
    with pytest.raises(errors.InvalidMediaError):
        RetryHints().note(failure, APART)

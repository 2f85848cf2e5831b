"""What a failed attempt teaches for the next one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quartet import errors
from quartet.discovery.base import Rank
from quartet.streams.messages import DecodeStarted
from router.attempts import BookedSink, Hop, HopFailedError, RetryHints
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


def test_attempts_at_workers_that_are_full_or_draining_do_not_count_as_failed() -> None:
    hints = RetryHints()
    for error in (errors.QueueFullError("full"), errors.DrainingError("draining")) * 3:
        hints.note(HopFailedError(Hop.DECODE, error), ALONE)
    assert hints.num_failures == 0
    hints.note(HopFailedError(Hop.DECODE, errors.OutOfBlocksError("full")), ALONE)
    assert hints.num_failures == 1


def test_blocks_are_booked_for_the_prompt_as_the_worker_laid_it_out() -> None:
    output, booked = Output(), list[int]()

    def book(num_tokens: int) -> int:
        booked.append(num_tokens)
        return num_tokens

    sink = BookedSink(output, book, 100, False, lambda _num_tokens: None, lambda _report: None)  # type: ignore[arg-type]
    for num_prompt_tokens in (0, 40):  # 0: as the router has it
        sink.started(
            DecodeStarted(
                num_cached_tokens=0,
                queue_s=0.0,
                transfer_s=0.0,
                transfer_bytes=0,
                num_prompt_tokens=num_prompt_tokens,
            )
        )
        assert output.book(3) == 3
    assert booked == [103, 43]


class Output:
    """What ``BookedSink`` asks of a choice's output."""

    book: Callable[[int], int]

    def take(self, *_: object) -> bool:
        return True

    def book_by(self, book: Callable[[int], int]) -> None:
        self.book = book

    def note_started(self, _started: DecodeStarted, *, is_handed_off: bool) -> None:
        assert not is_handed_off


def test_lost_media_are_no_workers_fault() -> None:
    hints = RetryHints()
    assert hints.note(HopFailedError(Hop.DECODE, errors.MediaLostError("preempted")), APART) == 0.0
    assert (hints.avoid, hints.prefer_prefill) == (set(), None)


def test_damaged_media_end_the_request() -> None:
    failure = HopFailedError(Hop.PREFILL, errors.InvalidMediaError("torn"), pulls_media=True)
    with pytest.raises(errors.InvalidMediaError):
        RetryHints().note(failure, APART)

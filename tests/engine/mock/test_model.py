"""What a step costs, and what counts as a prompt or as decoding in it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from quartet.engine.base import RequestKind
from quartet.engine.mock.model import FULL_CONTEXT_TOKENS, StepTiming
from quartet.engine.runner import RunningRequest, ScheduledChunk
from quartet.engine.step_time import StepWork, step_work
from quartet.errors import ConfigError
from quartet.kvcache.layout import BlocksPayload, HandOff
from quartet.kvcache.sequence import Sequence
from tests.engine.fakes import fake_layout, make_request

PROMPT = list(range(20, 30))


def chunk(
    first: int, count: int, *, sampled: int = 0, generated: int = 0, hand_off: HandOff | None = None
) -> ScheduledChunk:
    """Of a request with ``PROMPT``, ``generated`` tokens that came with it and ``sampled`` ones of this engine."""
    request = make_request(PROMPT, generated=[7] * generated, max_tokens=50, hand_off=hand_off)
    seq = Sequence([*PROMPT, *[7] * (generated + sampled)], block_size=4)
    running = RunningRequest(request=request, seq=seq)
    return ScheduledChunk(running, first, count, samples=first + count == len(seq))


def hand_off(num_tokens: int) -> HandOff:
    return HandOff(
        hand_off_id=bytes(16),
        secret=bytes(16),
        worker_id="w",
        epoch=1,
        address="127.0.0.1:1",
        time_to_live=timedelta(seconds=1),
        payload=BlocksPayload(fake_layout(), num_tokens),
    )


def test_a_step_that_has_nothing_to_do_takes_no_time() -> None:
    assert StepTiming().step_ms(0, 0) == 0


def test_prefill_grows_with_the_square_and_decode_with_the_share_of_a_full_context() -> None:
    timing = StepTiming(
        prefill_base=10, prefill_linear=2, prefill_square=0.5, decode_base=3, decode_linear=20, decode_square=-8
    )
    assert timing.step_ms(4, 0) == 10 + 2 * 4 + 0.5 * 16
    assert timing.step_ms(0, FULL_CONTEXT_TOKENS // 2) == 3 + 20 / 2 - 8 / 4
    assert timing.step_ms(4, FULL_CONTEXT_TOKENS // 2) == 26 + 11


def test_the_defaults_are_the_public_models() -> None:
    assert StepTiming().prefill_ms(1000) == pytest.approx(16.50142 + 15.18344 + 0.4209989)
    assert StepTiming().decode_ms(104858) == pytest.approx(5.74 + 5.401 - 0.2574, rel=1e-3)


@pytest.mark.parametrize("name", ["prefill_base", "prefill_linear", "prefill_square", "decode_base", "decode_linear"])
def test_negative_times_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: must not be negative"):
        StepTiming(**{name: -1.0})


@pytest.mark.parametrize(
    ("made", "work"),
    [
        (chunk(0, 10), StepWork(10, 0, 10)),  # a whole prompt
        (chunk(4, 3), StepWork(3, 0, 3)),  # a part of one
        (chunk(9, 1), StepWork(1, 0, 1)),  # its last token, the others cached
        (chunk(9, 1, generated=4), StepWork(1, 0, 1)),  # an earlier attempt's tokens are computed like a prompt
        (chunk(10, 1, sampled=1), StepWork(0, 11, 1)),  # decodes
        (chunk(12, 1, sampled=3), StepWork(0, 13, 1)),
        (chunk(0, 13, sampled=3), StepWork(13, 0, 13)),  # preempted: all of it again
        (chunk(10, 1, generated=1, hand_off=hand_off(10)), StepWork(0, 11, 1)),  # the first token after a hand-off
    ],
)
def test_a_chunk_counts_as_prompt_or_decode_work(made: ScheduledChunk, work: StepWork) -> None:
    assert step_work([made]) == work


def test_a_step_is_the_sum_of_its_chunks() -> None:
    chunks = [chunk(10, 1, sampled=1), chunk(0, 10), chunk(12, 1, sampled=3), chunk(0, 4)]
    assert step_work(chunks) == StepWork(14, 24, 16)
    assert chunks[0].running.request.kind is RequestKind.DECODE

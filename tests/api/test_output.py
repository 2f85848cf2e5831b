"""What one choice gives: every token once, and nothing more after its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from quartet.api.answer import Answer
from quartet.api.convert.answer import to_generate_response
from quartet.api.output import ChoiceOutput, OutputSettings
from quartet.api.request import Accepted, ChoiceFinished, Delta
from quartet.engine.base import FinishReason
from quartet.engine.sampling import TokenLogprobs
from quartet.streams.messages import DecodeStarted
from quartet.text.stop_strings import StopStrings
from quartet.text.text_stream import TextStream
from quartet.transfer.base import TransferWay
from quartet.transfer.grpc.messages import WAY_FROM_PB
from tests.text.builders import byte_level_tokenizer

SETTINGS = OutputSettings(num_prompt_tokens=1, arrived_at=0.0, tokenize_s=0.0, omits_token_ids=False)


@dataclass
class Shown:
    """Takes deltas, each of which begins where the one before ended."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        assert token_offset == len(self.token_ids)
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.text += text


def entries(*token_ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -token_id / 10) for token_id in token_ids]


@pytest.mark.parametrize("stops", [None, StopStrings(["never"])], ids=["plain", "stop strings"])
async def test_tokens_that_come_twice_after_a_migration_are_dropped_with_their_logprobs(
    stops: StopStrings | None,
) -> None:
    sink, tokenizer = Shown(), byte_level_tokenizer()
    ids = tokenizer.encode("abcdefgh", add_special_tokens=False)
    output = ChoiceOutput(SETTINGS, 0, TextStream(tokenizer, stops), sink)
    output.begin_attempt()
    assert output.take(0, ids[:1], entries(*ids[:1]), 1.0)
    assert output.take(1, ids[1:4], entries(*ids[1:4]), 2.0)
    output.begin_attempt()
    # The next worker repeats two tokens, then everything, then continues.
    assert output.take(2, ids[2:6], entries(*ids[2:6]), 3.0)
    assert output.take(0, ids[:6], entries(*ids[:6]), 4.0)
    assert output.take(6, ids[6:], entries(*ids[6:]), 5.0)
    output.finish(FinishReason.LENGTH)
    assert sink.token_ids == ids
    assert sink.logprobs == entries(*ids)
    assert sink.text == "abcdefgh"


def test_the_cached_tokens_of_the_first_attempt_count_whatever_later_ones_report() -> None:
    for first, second in ((4, 9), (9, 4), (0, 9)):
        output = ChoiceOutput(replace(SETTINGS, num_prompt_tokens=20), 0, TextStream(None), Shown())
        output.begin_attempt()
        output.note_prefilled(first, queue_s=0.0)
        output.note_started(started(15), is_handed_off=True)  # it has what it pulled, which was not cached
        output.begin_attempt()
        output.note_started(started(second), is_handed_off=False)
        output.begin_attempt()
        output.note_prefilled(second, queue_s=0.0)
        assert output.finish(FinishReason.LENGTH).usage.num_cached_tokens == first


def started(num_cached_tokens: int) -> DecodeStarted:
    return DecodeStarted(num_cached_tokens=num_cached_tokens, queue_s=0.0, transfer_s=0.0, transfer_bytes=0)


def moved(size_bytes: int, way: TransferWay | None) -> DecodeStarted:
    return replace(started(0), transfer_s=2.0, transfer_bytes=size_bytes, transfer_way=way)


@pytest.mark.parametrize(
    ("attempts", "size_bytes", "way"),
    [
        ([moved(3_000_000_000, TransferWay.SHM), moved(5_000_000_000, TransferWay.GRPC)], 8_000_000_000, "grpc"),
        ([moved(3_000_000_000, TransferWay.SHM), moved(0, None)], 3_000_000_000, "shm"),  # the last had all cached
        ([moved(0, TransferWay.GRPC)], 0, None),
        ([moved(7, None)], 7, None),  # an older worker's
        ([moved(2**64 - 1, TransferWay.SHM)] * 2, 2**64 - 1, "shm"),  # as much as the message holds
    ],
)
def test_what_all_attempts_moved_adds_up_and_the_way_is_the_last_ones(
    attempts: list[DecodeStarted], size_bytes: int, way: str | None
) -> None:
    output = ChoiceOutput(SETTINGS, 0, TextStream(None), Shown())
    for attempt in attempts:
        output.begin_attempt()
        output.note_started(attempt, is_handed_off=True)
    time = output.finish(FinishReason.LENGTH).time
    assert (time.transfer_bytes, time.transfer_way, time.transfer_s) == (size_bytes, way, 2.0 * len(attempts))
    assert time.transfer_gb_per_s == (size_bytes / time.transfer_s / 1e9 if size_bytes else None)
    message = to_generate_response(output.finish(FinishReason.LENGTH)).finished.time
    assert (message.transfer_bytes, WAY_FROM_PB.get(message.transfer_way)) == (size_bytes, way)


def test_loads_of_all_hops_and_attempts_add_up_and_are_absent_without_any() -> None:
    output = ChoiceOutput(SETTINGS, 0, TextStream(None), Shown())
    output.begin_attempt()
    output.note_prefilled(0, queue_s=0.0)
    output.note_started(started(0), is_handed_off=True)
    assert output.time_breakdown().onboard_s is None
    output.begin_attempt()
    output.note_prefilled(0, queue_s=0.0, onboard_s=0.5)
    output.note_started(replace(started(0), onboard_s=0.25), is_handed_off=False)
    assert output.finish(FinishReason.LENGTH).time.onboard_s == 0.75
    message = to_generate_response(output.finish(FinishReason.LENGTH)).finished.time
    assert message.onboard.ToMilliseconds() == 750


async def test_tokens_that_come_after_the_end_are_neither_shown_nor_counted() -> None:
    answer = Answer()
    answer.accept(Accepted(request_id="0" * 32, choices=(), num_prompt_tokens=1, seed=0))
    output = ChoiceOutput(SETTINGS, 0, TextStream(None), answer)
    assert output.take(0, [7, 8], (), 1.0)
    finished = output.finish(FinishReason.CANCELLED)
    answer.finish(finished)
    # A worker that was asked to cancel sent these before the cancel arrived.
    assert not output.take(2, [9], (), 2.0)
    [_accepted, delta, end] = await answer.next()
    assert isinstance(delta, Delta) and delta.token_ids == (7, 8)
    assert isinstance(end, ChoiceFinished) and end.usage.num_output_tokens == 2

"""What waits for a stream: nothing is lost, reordered or too long."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quartet.engine.base import Finished, FinishReason, Prefilled, Started
from quartet.engine.sampling import TokenLogprobs
from quartet.errors import EngineError
from quartet.kvcache.layout import HandOff, OpaquePayload
from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES
from quartet.streams import outbox as outbox_module
from quartet.streams.messages import MAX_UNCHUNKED_BYTES
from quartet.streams.outbox import DecodeOutbox, PrefillOutbox
from quartet.v1 import decode_pb2, prefill_pb2

BIG = 2**32 - 1
LONG_ERROR = EngineError("x" * 2000, field="y" * 300, retry_delay_s=1e9)


def long_logprobs(num_alternatives: int) -> TokenLogprobs:
    return TokenLogprobs(BIG, -1.5, (BIG,) * num_alternatives, (-2.5,) * num_alternatives)


def take_all(outbox: DecodeOutbox) -> list[decode_pb2.DecodeResponse]:
    messages = []
    while (message := outbox.take()) is not None:
        assert len(message.SerializeToString()) <= MAX_STREAM_MESSAGE_BYTES
        messages.append(message)
    assert not outbox.ready.is_set()
    return messages


class Received:
    """What a caller makes of the messages, checking their order."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.num_logprobs: dict[int, int] = {}
        self.started: set[int] = set()
        self.ended: set[int] = set()

    def take(self, message: decode_pb2.DecodeResponse) -> None:
        for started in message.started:
            assert started.slot not in self.started | self.ended
            self.started.add(started.slot)
        token_ids = list(message.token_ids)
        assert len(set(message.slots)) == len(message.slots)
        for slot, num, offset in zip(message.slots, message.num_tokens, message.token_offsets, strict=True):
            assert slot not in self.ended
            known = self.tokens.setdefault(slot, [])
            assert offset == len(known)
            known += token_ids[:num]
            token_ids = token_ids[num:]
        assert not token_ids
        num_tokens = dict(zip(message.slots, message.num_tokens, strict=True))
        for entry in message.logprobs:
            assert len(entry.tokens) == num_tokens[entry.slot]
            self.num_logprobs[entry.slot] = self.num_logprobs.get(entry.slot, 0) + len(entry.tokens)
        ends = [end.slot for end in message.finished] + [end.slot for end in message.failures]
        assert len(set(ends)) == len(ends)
        assert self.ended.isdisjoint(ends)
        self.ended.update(ends)


@pytest.mark.parametrize("is_merged", [False, True])
def test_ends_have_the_room_that_tokens_leave(is_merged: bool) -> None:
    outbox = DecodeOutbox()
    num_slots = 200
    per_slot = MAX_STREAM_MESSAGE_BYTES // num_slots // 6
    slots = range(num_slots)
    for _ in range(1 + is_merged):
        num_tokens = per_slot // (1 + is_merged)
        outbox.step(slots, [num_tokens] * num_slots, [0] * num_slots, [BIG] * num_tokens * num_slots)
    for slot in slots:
        outbox.failed(slot, LONG_ERROR)
    messages = take_all(outbox)
    assert len(messages[0].failures) < num_slots == sum(len(message.failures) for message in messages)


def test_many_slots_merged_to_few_tokens_each_make_bounded_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "ROOM_BYTES", 1000)
    outbox = DecodeOutbox()
    for slot in range(BIG - 100, BIG):
        outbox.tokens(slot, BIG, [BIG], ())
    messages = list(iter(outbox.take, None))
    assert max(message.ByteSize() for message in messages) <= 1000
    assert sum(len(message.slots) for message in messages) == 100


def test_no_end_overtakes_a_start_that_found_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "ROOM_BYTES", 1000)
    outbox, received = DecodeOutbox(), Received()
    num_slots = 40
    for slot in range(num_slots):
        outbox.started(slot, Started(1, BIG, 1e9, 1e9, 2**64 - 1))
    for slot in range(num_slots - 10, num_slots):
        outbox.finished(slot, Finished(1, FinishReason.LENGTH, 0))
    messages = take_all(outbox)
    assert len(messages) > 1
    for message in messages:
        received.take(message)  # which fails where a start comes after its end
    assert len(received.started) == num_slots


PUTS = st.lists(
    st.tuples(
        st.integers(BIG - 5, BIG),  # slot
        st.sampled_from([1, 2, 100, 30_000]),  # tokens
        st.booleans(),  # a message is taken afterwards
        st.booleans(),  # it ends with that
    ),
    max_size=25,
)


@given(puts=PUTS, alternatives=st.none() | st.integers(0, 20))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_tokens_arrive_whole_in_order_before_the_end_in_messages_of_at_most_one_mib(
    puts: list[tuple[int, int, bool, bool]], alternatives: int | None
) -> None:
    outbox, received = DecodeOutbox(), Received()
    sent: dict[int, int] = {}
    ended: set[int] = set()
    for slot, num_tokens, is_taken, is_end in puts:
        if slot in ended:
            continue
        if slot not in sent:
            outbox.started(slot, Started(1, BIG, 1e9, 1e9, 2**64 - 1))
        # Log probabilities weigh a lot here; fewer tokens are enough of them.
        num_tokens = min(num_tokens, 8000) if alternatives is not None else num_tokens
        logprobs = [long_logprobs(alternatives)] * num_tokens if alternatives is not None else []
        outbox.tokens(slot, sent.get(slot, 0), [BIG] * num_tokens, logprobs)
        sent[slot] = sent.get(slot, 0) + num_tokens
        if is_end:
            ended.add(slot)
            outbox.finished(slot, Finished(1, FinishReason.LENGTH, sent[slot]))
        assert outbox.owes(slot) == is_end
        if is_taken:
            message = outbox.take()
            assert message is not None
            assert message.ByteSize() <= MAX_STREAM_MESSAGE_BYTES
            received.take(message)
    for message in take_all(outbox):
        received.take(message)
    assert {slot: len(tokens) for slot, tokens in received.tokens.items()} == sent
    assert received.ended == ended
    assert received.started == set(sent)
    if alternatives is not None:
        assert received.num_logprobs == sent


def test_a_crowd_of_starts_and_long_failures_is_spread_over_messages() -> None:
    outbox, received = DecodeOutbox(), Received()
    for slot in range(20_000):
        outbox.started(slot, Started(1, BIG, 1e9, 1e9, 2**64 - 1))
    for slot in range(3_000):
        outbox.failed(slot, LONG_ERROR)
    messages = take_all(outbox)
    assert len(messages) > 2
    for message in messages:
        received.take(message)
    assert received.started == set(range(20_000))
    assert received.ended == set(range(3_000))


def test_a_message_is_used_well_when_much_waits() -> None:
    outbox = DecodeOutbox()
    for slot in range(100):
        outbox.tokens(slot, 0, [BIG] * 20_000, ())
    assert len(take_all(outbox)) <= 100 * 20_000 * 5 // MAX_STREAM_MESSAGE_BYTES + 2


def test_unread_outputs_are_merged() -> None:
    outbox = DecodeOutbox()
    for offset in range(3):
        outbox.tokens(7, offset, [offset], ())
        outbox.tokens(8, offset, [10 + offset], ())
    [message] = take_all(outbox)
    assert list(message.slots) == [7, 8]
    assert list(message.token_ids) == [0, 1, 2, 10, 11, 12]


def test_a_closed_decode_outbox_holds_nothing() -> None:
    outbox = DecodeOutbox()
    outbox.tokens(7, 0, [1], ())
    outbox.finished(7, Finished(1, FinishReason.LENGTH, 1))
    outbox.close()
    assert take_all(outbox) == []
    assert not outbox.owes(7)


def make_hand_off(num_bytes: int) -> HandOff:
    return HandOff(
        hand_off_id=bytes(16),
        secret=bytes(16),
        worker_id="w" * 200,
        epoch=2**64 - 1,
        address="h" * 200,
        time_to_live=timedelta(seconds=30),
        payload=OpaquePayload("trtllm", bytes(num_bytes)),
    )


def prefilled(id: int) -> Prefilled:
    logprobs = long_logprobs(20)
    return Prefilled(id, BIG, num_cached_tokens=BIG, queue_s=1e9, compute_s=1e9, logprobs=logprobs)


@pytest.mark.parametrize("num_bytes", [10, 300_000, MAX_UNCHUNKED_BYTES])
def test_opaque_hand_offs_share_messages_as_far_as_they_fit(num_bytes: int) -> None:
    outbox = PrefillOutbox(lambda holder: pytest.fail("nothing is withdrawn"))
    for slot in range(20):
        outbox.prefilled(slot, prefilled(slot), make_hand_off(num_bytes))
    slots = []
    while (message := outbox.take()) is not None:
        assert len(message.SerializeToString()) <= MAX_STREAM_MESSAGE_BYTES
        slots += [output.slot for output in message.outputs]
    assert slots == list(range(20))


def test_a_thousand_long_failures_of_prefills_are_spread_over_messages() -> None:
    outbox = PrefillOutbox(lambda holder: None)
    for slot in range(3000):
        outbox.failed(slot, LONG_ERROR)
    messages: list[prefill_pb2.PrefillResponse] = []
    while (message := outbox.take()) is not None:
        assert len(message.SerializeToString()) <= MAX_STREAM_MESSAGE_BYTES
        messages.append(message)
    assert sum(len(message.outputs) for message in messages) == 3000


def test_hand_offs_that_were_not_written_are_withdrawn_once() -> None:
    withdrawn: list[int] = []
    outbox = PrefillOutbox(withdrawn.append)
    outbox.prefilled(1, prefilled(101), make_hand_off(10))
    assert outbox.take() is not None
    outbox.prefilled(2, prefilled(102), make_hand_off(10))
    assert outbox.take() is not None  # so 101 was written
    outbox.prefilled(3, prefilled(103), make_hand_off(10))
    outbox.prefilled(4, prefilled(104), make_hand_off(10))
    outbox.recall(4)
    outbox.recall(4)
    outbox.recall(99)
    assert withdrawn == [104]
    outbox.close()
    outbox.close()
    assert withdrawn == [104, 102, 103]


def test_a_recalled_prefill_fails_as_cancelled() -> None:
    outbox = PrefillOutbox(lambda holder: None)
    outbox.prefilled(1, prefilled(101), make_hand_off(10))
    outbox.recall(1)
    message = outbox.take()
    assert message is not None
    [output] = message.outputs
    assert output.failure.reason == "CANCELLED"


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, 4), st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=5),
            st.booleans(),
            st.booleans(),
        )
    )
)
def test_whole_steps_and_single_requests_mix_and_every_slot_gets_its_tokens_in_order(
    steps: list[tuple[dict[int, list[int]], bool, bool]],
) -> None:
    outbox = DecodeOutbox()
    given_out: dict[int, list[int]] = {}
    got: dict[int, list[int]] = {}

    def read() -> None:
        while (message := outbox.take()) is not None:
            begin = 0
            for slot, num_tokens, offset in zip(message.slots, message.num_tokens, message.token_offsets, strict=True):
                assert offset == len(got.setdefault(slot, []))
                got[slot] += message.token_ids[begin : begin + num_tokens]
                begin += num_tokens
            assert begin == len(message.token_ids)

    for tokens, is_whole, reads in steps:
        offsets = [len(given_out.get(slot, [])) for slot in tokens]
        if is_whole and tokens:
            flat = [token_id for part in tokens.values() for token_id in part]
            outbox.step(list(tokens), [len(part) for part in tokens.values()], offsets, flat)
        else:
            for (slot, part), offset in zip(tokens.items(), offsets, strict=True):
                outbox.tokens(slot, offset, part, ())
        for slot, part in tokens.items():
            given_out.setdefault(slot, []).extend(part)
        if reads:
            read()
    read()
    assert got == given_out


def test_a_step_that_is_too_long_for_a_message_is_split() -> None:
    outbox = DecodeOutbox()
    num_slots, num_tokens = 4, 100_000
    outbox.step(range(num_slots), [num_tokens] * num_slots, [0] * num_slots, [2**31] * (num_slots * num_tokens))
    total = 0
    while (message := outbox.take()) is not None:
        assert message.ByteSize() <= MAX_STREAM_MESSAGE_BYTES
        total += len(message.token_ids)
    assert total == num_slots * num_tokens


def test_when_first_tokens_came_is_said_with_them_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = DecodeOutbox()
    outbox.step([3], [1], [0], [7])
    outbox.first_token(3, 55)
    [message] = take_all(outbox)
    assert [(first.slot, first.sent_at_unix_ns) for first in message.first_tokens] == [(3, 55)]
    # A message that is full of tokens leaves some for the next one, and what is said of those.
    monkeypatch.setattr(outbox_module, "ROOM_BYTES", 1000)
    for slot in range(60):
        outbox.tokens(slot, 0, [BIG], ())
        outbox.first_token(slot, BIG)
        outbox.finished(slot, Finished(1, FinishReason.LENGTH, 1))
    messages = take_all(outbox)
    assert len(messages) > 1
    ended: set[int] = set()
    for message in messages:
        assert message.ByteSize() <= 1000
        assert {first.slot for first in message.first_tokens} <= {*message.slots} - ended
        ended |= {finished.slot for finished in message.finished}
    assert ended == {*range(60)}
    assert 0 < sum(len(message.first_tokens) for message in messages) < 60, "tokens take the room first"


def test_a_closed_outbox_says_nothing_of_first_tokens() -> None:
    outbox = DecodeOutbox()
    outbox.tokens(1, 0, [7], ())
    outbox.first_token(1, 55)
    outbox.close()
    outbox.tokens(1, 0, [7], ())
    [message] = take_all(outbox)
    assert not message.first_tokens

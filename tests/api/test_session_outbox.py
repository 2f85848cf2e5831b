"""What is owed to a session: nothing lost, nothing out of order, messages and memory bounded."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.api.convert.answer import from_session_parsed
from quartet.api.request import Accepted, ChoiceFinished, ChoicePlacement, SessionLimits, TimeBreakdown, Usage
from quartet.api.session_columns import Entry, ParsedEntry, SessionBacklog, parsed_bytes
from quartet.api.session_server import SessionOutbox
from quartet.discovery.base import Rank
from quartet.engine.base import FinishReason
from quartet.engine.sampling import TokenLogprobs
from quartet.errors import ConfigError, InvalidRequestError, ServingError, SlowReaderError
from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES
from quartet.text.parsed import Parsed, ToolCallDelta
from quartet.v1 import router_pb2 as pb
from tests.operations import count_operations

PLACEMENT = ChoicePlacement(choice=1, prefill=None, decode=Rank("decode-0", 0))
ACCEPTED = Accepted(request_id="0" * 32, choices=(PLACEMENT,), num_prompt_tokens=3, seed=1)
USAGE = Usage(num_prompt_tokens=3, num_cached_tokens=0, num_output_tokens=1, num_attempts=1)


def make_finished(choice: int = 0) -> ChoiceFinished:
    return ChoiceFinished(choice=choice, reason=FinishReason.LENGTH, usage=USAGE, time=TimeBreakdown(total_s=1.0))


class Owed:
    """An outbox, and who overflowed."""

    def __init__(self, *, is_writing: bool = False, **limits: int) -> None:
        self.overflowed: list[int] = []
        self.outbox = SessionOutbox(SessionLimits(**limits), self._on_overflow)
        if is_writing:
            self.outbox.accept(99, ACCEPTED)
            self.take()

    def add(self, *entry: object) -> None:
        self.outbox.entries.append(entry)  # type: ignore[arg-type]
        if len(self.outbox.entries) >= self.outbox.poll_at:
            self.outbox.poll()

    def take(self) -> pb.SessionResponse:
        message = self.outbox.take()
        assert message is not None
        assert message.ByteSize() <= MAX_STREAM_MESSAGE_BYTES
        return message

    def take_all(self) -> list[pb.SessionResponse]:
        messages = []
        while not self.outbox.is_empty:
            messages.append(self.take())
        return messages

    def _on_overflow(self, slot: int, error: ServingError) -> None:
        assert isinstance(error, SlowReaderError)
        self.overflowed.append(slot)


class Streams:
    """Tokens, text and log probabilities by slot and choice."""

    def __init__(self) -> None:
        self.token_ids: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.texts: dict[tuple[int, int], str] = defaultdict(str)
        self.logprobs: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.reasoning: dict[tuple[int, int], str] = defaultdict(str)
        self.calls: dict[tuple[int, int], str] = defaultdict(str)

    def add_parsed(self, entry: ParsedEntry) -> ParsedEntry:
        slot, choice, parsed = entry
        self.reasoning[slot, choice] += parsed.reasoning
        for call in parsed.tool_calls:
            begin = f"|{call.index} {call.id} {call.name}(" if call.name else ""
            self.calls[slot, choice] += begin + call.arguments + (")" if call.is_complete else "")
        return entry

    def add(self, entry: Entry) -> None:
        slot, choice, offset, token_ids, text, logprobs = entry
        key = slot, choice
        if token_ids:
            assert offset == len(self.token_ids[key]), "a hole"
        self.token_ids[key] += token_ids
        self.texts[key] += text
        self.logprobs[key] += [logprob.token_id for logprob in logprobs]

    def next_entry(self, key: tuple[int, int], num_tokens: int, text: str, has_logprobs: bool) -> Entry:
        offset = len(self.token_ids[key])
        token_ids = list(range(offset, offset + num_tokens))
        logprobs = [TokenLogprobs(token_id, -1.0, (1, 2), (-1.0, -2.0)) for token_id in token_ids if has_logprobs]
        entry = (*key, offset, token_ids, text, logprobs)
        self.add(entry)
        return entry

    @property
    def parts(self) -> object:
        return [{key: value for key, value in of.items() if value} for of in vars(self).values()]


CALLS = st.builds(
    ToolCallDelta, st.just(0), st.text(max_size=4), st.sampled_from(["", "f"]), st.text(max_size=60), st.booleans()
)
PARTS = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 3), st.integers(0, 1)),
        st.integers(0, 40),
        st.text(max_size=60),
        st.booleans(),
        st.none() | st.builds(Parsed, st.just(""), st.text(max_size=60), st.lists(CALLS, max_size=2)),
    ),
    max_size=25,
)


@given(PARTS, st.integers(250, 900))
def test_a_backlog_comes_complete_and_in_order_for_any_message_size(
    parts: list[tuple[tuple[int, int], int, str, bool, Parsed | None]], room: int
) -> None:
    given_in, taken = Streams(), Streams()
    backlog = SessionBacklog()
    for key, *part, parsed in parts:
        backlog.add([given_in.next_entry(key, *part)])
        if parsed is not None:
            backlog.add_parsed([given_in.add_parsed((*key, parsed))])
    while backlog:
        entries, parsed_entries = backlog.take(room)
        assert entries or parsed_entries, "it goes on"
        for entry in entries:
            taken.add(entry)
        for parsed_entry in parsed_entries:
            taken.add_parsed(parsed_entry)
        assert parsed_bytes(parsed_entries) + sum(len(entry[4].encode()) for entry in entries) <= room
    assert taken.parts == given_in.parts
    assert not backlog.beyond(0, 0)


def test_a_tick_is_one_message_with_compact_columns() -> None:
    owed = Owed()
    owed.add(5, 0, 0, [10], "", ())
    owed.add(2, 0, 7, [11, 12], "", ())
    message = owed.take()
    assert (list(message.slots), list(message.num_tokens), list(message.token_offsets)) == ([5, 2], [1, 2], [0, 7])
    assert list(message.token_ids) == [10, 11, 12]
    assert not (message.choices or message.texts or message.logprobs)
    assert owed.outbox.take() is None


def test_choices_and_text_have_columns_where_any_request_has_them() -> None:
    owed = Owed()
    owed.add(5, 0, 0, [10], "", ())
    owed.add(2, 3, 0, [11], "x", [TokenLogprobs(11, -1.0)])
    message = owed.take()
    assert (list(message.choices), list(message.texts)) == ([0, 3], ["", "x"])
    assert [(entry.slot, entry.choice, len(entry.tokens)) for entry in message.logprobs] == [(2, 3, 1)]


def test_reasoning_and_calls_come_beside_the_columns_whole_or_in_bounded_messages() -> None:
    for length, has_more in ((3, False), (2 * MAX_STREAM_MESSAGE_BYTES, True)):
        owed, taken = Owed(), Streams()
        for number in range(2):
            call = ToolCallDelta(number, "id", "f", "ä" * length, is_complete=True)
            owed.outbox.parsed.append((5, 1, Parsed("", "é" * length, [call])))
            owed.add(5, 1, number, [10], "", ())
        owed.outbox.finish(5, make_finished(1), is_last=True)
        messages = owed.take_all()
        assert (len(messages) > 3) is has_more
        for message in messages:
            for part in message.parsed:
                taken.add_parsed((part.slot, part.choice, from_session_parsed(part)))
        assert taken.reasoning == {(5, 1): "é" * 2 * length}
        assert taken.calls[5, 1] == "".join(f"|{number} id f({'ä' * length})" for number in range(2))
        assert [item.slot for item in messages[-1].finished] == [5]


def test_a_long_text_goes_out_in_bounded_messages_and_its_end_behind_it() -> None:
    owed, taken = Owed(), Streams()
    text = "äb" * MAX_STREAM_MESSAGE_BYTES
    owed.outbox.accept(1, ACCEPTED)
    owed.add(1, 0, 0, list(range(1000)), text, ())
    owed.outbox.finish(1, make_finished(), is_last=True)
    owed.add(2, 0, 0, [1], "", ())
    owed.outbox.finish(2, make_finished(), is_last=True)
    messages = owed.take_all()
    assert len(messages) > 3
    assert [item.slot for item in messages[0].accepted] == [1]
    for message in messages:
        begin = 0
        columns = zip(message.slots, message.num_tokens, message.token_offsets, message.texts, strict=True)
        for slot, num_tokens, offset, part in columns:
            taken.add((slot, 0, offset, list(message.token_ids[begin : begin + num_tokens]), part, ()))
            begin += num_tokens
    assert (taken.token_ids[1, 0], taken.texts[1, 0]) == (list(range(1000)), text)
    assert [item.slot for item in messages[-1].finished] == [1, 2]


def test_many_side_messages_go_out_in_bounded_messages_in_order() -> None:
    owed = Owed()
    for slot in range(10_000):
        owed.outbox.accept(slot, ACCEPTED)
        owed.outbox.placed(slot, PLACEMENT)
        owed.outbox.finish(slot, make_finished(), is_last=False)
        owed.outbox.fail(slot, InvalidRequestError("x" * 100, field="y"))
    accepted: set[int] = set()
    for message in owed.take_all():
        accepted.update(item.slot for item in message.accepted)
        assert accepted.issuperset(item.slot for item in message.placed)
        assert accepted.issuperset(item.slot for item in (*message.finished, *message.failures))
    assert accepted == set(range(10_000))
    assert owed.outbox.num_ended == 0


def test_no_delta_overtakes_a_placement_that_found_no_room() -> None:
    owed = Owed()
    choices = tuple(ChoicePlacement(choice=number, prefill=None, decode=Rank("d" * 128, 0)) for number in range(64))
    num_slots = 2 * MAX_STREAM_MESSAGE_BYTES // (64 * 128)
    for slot in range(num_slots):
        owed.outbox.accept(slot, Accepted(request_id="0" * 32, choices=choices, num_prompt_tokens=3, seed=1))
    owed.add(num_slots - 1, 0, 0, [7], "", ())
    messages = owed.take_all()
    assert len(messages) > 1
    assert [bool(message.slots) for message in messages] == [False] * (len(messages) - 1) + [True]


def test_a_slot_is_owed_its_end_until_that_is_taken() -> None:
    owed = Owed()
    owed.outbox.finish(1, make_finished(0), is_last=False)
    assert not owed.outbox.owes(1)
    owed.outbox.finish(1, make_finished(1), is_last=True)
    assert owed.outbox.owes(1)
    owed.take()
    assert not owed.outbox.owes(1)


def test_unread_output_is_merged_and_only_a_request_beyond_the_bound_ends() -> None:
    owed = Owed(is_writing=True, max_pending_tokens=100)
    owed.outbox.finish(1, make_finished(1), is_last=False)
    for step in range(95):
        owed.add(1, 0, 2 * step, [7, 7], "", ())
        owed.add(2, 0, step, [7], "", ())
    for _ in range(20):
        owed.add(3, 0, 0, [], "", ())
    assert owed.overflowed == [1]
    message = owed.take()
    assert [item.slot for item in message.failures] == [1]
    assert not message.finished, "the failure is its only end"
    assert message.failures[0].failure.reason == "READER_TOO_SLOW"
    others = [(slot, num) for slot, num in zip(message.slots, message.num_tokens, strict=True) if slot == 2]
    assert others == [(2, 95)]


def test_to_end_unread_requests_takes_work_for_each_of_them_and_not_for_each_pair() -> None:
    few, many = (_operations_of_an_overflow(num_slots) for num_slots in (50, 400))
    assert many < 12 * few


def _operations_of_an_overflow(num_slots: int) -> int:
    """Bytecode operations of a poll that finds too much for each of ``num_slots`` requests, which have ends here."""
    owed = Owed(is_writing=True, max_pending_tokens=100)
    owed.outbox.poll_at = num_slots + 1
    for slot in range(num_slots):
        owed.outbox.finish(slot, make_finished(1), is_last=False)
        owed.add(slot, 0, 0, [7] * 101, "", ())
    num_operations = count_operations(owed.outbox.poll)
    assert owed.overflowed == list(range(num_slots))
    assert len(owed.outbox.entries) == 0 and len(owed.take().failures) == num_slots
    return num_operations


def test_text_is_bounded_by_its_bytes() -> None:
    owed = Owed(is_writing=True, max_pending_tokens=10, max_pending_bytes=1000)
    for _step in range(10):
        owed.add(1, 0, 0, [], "ä" * 60, ())
    assert owed.overflowed == [1]


async def test_the_first_after_a_pause_wakes_at_once_and_later_ones_wait_for_the_tick() -> None:
    owed = Owed()
    waiting = asyncio.create_task(owed.outbox.wait())
    await asyncio.sleep(0)
    owed.add(1, 0, 0, [1], "", ())
    await asyncio.wait_for(waiting, 30)
    pausing = asyncio.create_task(owed.outbox.pause(60))
    await asyncio.sleep(0)
    owed.add(1, 0, 1, [2], "", ())
    owed.outbox.accept(2, ACCEPTED)
    await asyncio.sleep(0.01)
    assert not pausing.done()
    for step in range(5000):
        owed.add(1, 0, 2 + step, [2], "", ())
    await asyncio.wait_for(pausing, 30)
    assert owed.overflowed == [], "who pauses is not slow"


async def test_a_pause_ends() -> None:
    owed = Owed()
    owed.add(1, 0, 0, [1], "", ())
    await asyncio.wait_for(owed.outbox.pause(0.001), 30)


@pytest.mark.parametrize(
    "wrong",
    [{"tick_s": -1}, {"max_requests": 0}, {"max_pending_tokens": 0}, {"max_pending_bytes": 0}, {"idle_timeout_s": 0}],
)
def test_impossible_limits_are_refused_by_name(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SessionLimits(**wrong)

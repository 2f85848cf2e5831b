"""A start is read in steps that are paid for before; what it costs is known from what repeats in it."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from hypothesis import given

from quartet.api.convert.request import MESSAGE_WORK, PART_WORK, from_generate_start, to_generate_start
from quartet.api.convert.unread import UnreadStart
from quartet.api.request import AskedStart, GenerateStart, check_asked
from quartet.errors import InvalidRequestError
from quartet.v1 import router_pb2 as pb
from tests.api.strategies import GENERATE_STARTS
from tests.streams.test_convert import over_the_wire

# Of a turn of the event loop.
TURN_WORK = 4 * 8_192

_PART = pb.ContentPart(text="a")
_URL = pb.MediaPart(url="https://example.com/a.png")
_PICTURE = pb.ChatMessage(role="user", parts=[_PART, pb.ContentPart(media=_URL)])


def chat(*messages: pb.ChatMessage) -> pb.GenerateStart:
    return pb.GenerateStart(chat=pb.ChatPrompt(messages=messages))


def user(num_parts: int = 0) -> pb.ChatMessage:
    return pb.ChatMessage(role="user", parts=[_PART] * num_parts) if num_parts else pb.ChatMessage(role="user")


def read(steps: Generator[int, None, GenerateStart]) -> tuple[list[int], GenerateStart]:
    """What each step cost, and the start."""
    paid: list[int] = []
    while True:
        try:
            paid.append(next(steps))
        except StopIteration as end:
            return paid, end.value


def head(start: AskedStart) -> tuple[object, ...]:
    names = "model seed cache_salt tenant session_key timeout_s num_choices client_request_id num_token_ids"
    return tuple(getattr(start, name) for name in names.split())


@given(GENERATE_STARTS)
def test_what_is_read_step_by_step_is_what_was_sent(start: GenerateStart) -> None:
    message = over_the_wire(to_generate_start(start))
    asked = UnreadStart(message)
    assert head(asked) == head(start)
    assert read(asked.steps())[1] == UnreadStart(message).read() == start


@pytest.mark.parametrize("num_messages", [257, 1024, 1025, 4096])
@pytest.mark.parametrize("num_parts", [0, 1])
def test_a_long_chat_is_read_in_steps_of_less_than_a_turn(num_messages: int, num_parts: int) -> None:
    message = chat(*[user(num_parts)] * num_messages)
    message.chat.add_generation_prompt = False
    paid, start = read(UnreadStart(message).for_tenant("acme").steps())
    assert max(paid) < TURN_WORK / 2
    work = num_messages * (MESSAGE_WORK + PART_WORK * num_parts)
    assert work * 0.5 <= sum(paid) <= work * 1.5
    assert start == from_generate_start(message, tenant="acme")


def test_a_message_of_many_parts_is_a_step_of_its_own() -> None:
    many = user(2_000)
    paid, start = read(UnreadStart(chat(many, *[user()] * 300, many)).steps())
    assert max(paid) < TURN_WORK
    assert sum(paid) >= 4_000 * PART_WORK / 2
    assert start.prompt.messages[0].content == "a" * 2_000  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("message", "work"),
    [
        (pb.GenerateStart(text="Hi"), 0),
        (pb.GenerateStart(token_ids=pb.TokenIds(ids=[1] * 20_000)), 20_000),
        (chat(user(), user(3)), 2 * MESSAGE_WORK + 3 * PART_WORK),
        (chat(user(4_096)), MESSAGE_WORK + 4_096 * PART_WORK),
        (pb.GenerateStart(text="Hi", media=[_URL] * 3), 3 * 2_048),
        (chat(_PICTURE), MESSAGE_WORK + 2 * PART_WORK + 2_048),
    ],
)
def test_what_it_costs_is_counted_before_it_is_read(message: pb.GenerateStart, work: int) -> None:
    assert UnreadStart(message).work == work
    assert read(UnreadStart(message).steps())[0] == [work]


def test_nothing_that_repeats_is_looked_at_before_it_is_paid_for() -> None:
    impossible = UnreadStart(chat(*[pb.ChatMessage()] * 4_096))
    steps = impossible.steps()
    assert next(steps) > 0
    with pytest.raises(InvalidRequestError, match="needs a role"):
        next(steps)


def test_what_refuses_a_request_at_once_is_known_without_reading_it() -> None:
    message = chat(*[pb.ChatMessage()] * 4_096)
    message.num_choices = 65
    with pytest.raises(InvalidRequestError) as caught:
        check_asked(UnreadStart(message))
    assert caught.value.field == "num_choices"


@pytest.mark.parametrize(
    ("message", "shows"),
    [
        (pb.GenerateStart(text="Hi", media=[_URL]), True),
        (chat(user(3), _PICTURE), True),
        (chat(user(3)), False),
        (pb.GenerateStart(text="Hi", media=[_URL] * 4_096), False),
        (pb.GenerateStart(token_ids=pb.TokenIds(ids=[1] * 20_000), media=[_URL]), False),
        (chat(*[_PICTURE] * 300), False),
        (chat(user(300), _PICTURE), False),
    ],
)
def test_media_are_shown_by_what_is_short_enough_to_be_read_at_once(message: pb.GenerateStart, shows: bool) -> None:
    assert UnreadStart(message).shows_media is shows


def test_files_that_were_not_seen_at_a_glance_are_counted_before_they_are_read() -> None:
    file = pb.ContentPart(media=pb.MediaPart(data=b"x" * 300_000))
    long = chat(*[user()] * 300, pb.ChatMessage(role="user", parts=[file]))
    ids = pb.GenerateStart(token_ids=pb.TokenIds(ids=[1] * 20_000), media=[file.media])
    for message in (long, ids):
        asked = UnreadStart(message)
        assert not asked.shows_media
        assert 300_000 <= asked.num_file_bytes < 350_000
    text = chat(*[pb.ChatMessage(role="user", content="x" * 2_000)] * 300)
    assert UnreadStart(text).num_file_bytes == UnreadStart(chat(*[_PICTURE] * 300)).num_file_bytes == 0

"""Credit for the messages of streams: what it costs to be refused, and that callers without credit take turns."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import grpc
import pytest

from quartet.errors import MessageTooLargeError, ProtocolError, ServingError
from quartet.rpc.refusal_pace import note_message
from quartet.streams.read_pace import MAX_CREDIT, Account, ReadPace
from quartet.v1 import decode_pb2, types_pb2
from tests.streams.test_server_stream import WAIT_S, Caller, Refusing, settle

NEVER_S = 3600.0


def drained(account: Account, credit: int = 0) -> Account:
    """``account`` with so much ``credit``, and no more."""
    account.credit = credit
    return account


class Counting(Caller):
    """Sends cancels as fast as it is read; ``num_read`` of them were."""

    def __init__(self, num_requests: int) -> None:
        super().__init__(num_requests)
        self.num_sent = num_requests

    @property
    def num_read(self) -> int:
        return self.num_sent - self.num_requests

    async def write(self, _message: object) -> None:
        """The caller takes all at once."""


async def test_no_more_is_read_than_the_account_pays_for_and_reading_goes_on_with_what_is_earned() -> None:
    pace = ReadPace(interval_s=NEVER_S)
    account = drained(pace.new_account(), 7)
    stream, caller = Refusing(account), Counting(100)
    serving = asyncio.create_task(stream.serve(caller))  # type: ignore[arg-type]
    await settle()
    assert caller.num_read == stream.num_handled == 7
    assert account.num_waiting == 1
    pace.pay()
    await settle()
    assert caller.num_read == 12
    account.ran()
    await settle()
    assert caller.num_read == 14
    account.earn(MAX_CREDIT)
    async with asyncio.timeout(WAIT_S):
        await serving
    assert stream.num_handled == 100


async def test_what_ran_in_vain_costs_more_than_its_messages_and_what_ran_costs_nothing() -> None:
    account = drained(ReadPace(interval_s=NEVER_S).new_account(), 10)
    account.in_vain()
    assert account.credit == 8
    account.ran()
    assert account.credit == 10
    account.earn(10 * MAX_CREDIT)
    assert account.credit == MAX_CREDIT


MIB = 1 << 20


@pytest.mark.parametrize(
    ("size_bytes", "measure_s", "credit"),
    [
        pytest.param(1_000, 0.0, 2, id="a short one"),
        pytest.param(8 * MIB, 0.0, 102, id="10 ms to copy it"),
        pytest.param(0, 0.01, 102, id="10 ms to measure it"),
        pytest.param(8 * MIB, 0.01, 202, id="both"),
    ],
)
async def test_what_is_refused_costs_what_its_message_took(size_bytes: int, measure_s: float, credit: int) -> None:
    account = drained(ReadPace(interval_s=NEVER_S).new_account())
    account.in_vain(size_bytes, measure_s)
    assert account.credit == -credit
    for _ in range(100):
        account.in_vain(size_bytes, measure_s)
    # What is long leaves a debt that is soon paid, by 500 a second.
    assert account.credit >= -MAX_CREDIT - 101 * 2


async def test_a_long_message_that_is_refused_unparsed_costs_eight_times_as_much() -> None:
    account = drained(ReadPace(interval_s=NEVER_S).new_account())
    account.refused(8 * MIB, 0.01)
    assert account.credit == -(2 + 8 * 200)
    for _ in range(100):
        account.refused(8 * MIB, 0.0)
    assert -8 * MAX_CREDIT - 101 * 2 <= account.credit <= -8 * MAX_CREDIT


class Sending(Caller):
    """Sends one message, or has it refused before it is parsed."""

    def __init__(self, message: decode_pb2.DecodeRequest | ServingError) -> None:
        super().__init__(1)
        self.message = message

    def peer(self) -> str:
        return "a"

    async def read(self) -> object:
        if not self.num_requests:
            return grpc.aio.EOF
        self.num_requests -= 1
        note_message(8 * MIB)  # as the server's parser does
        if isinstance(self.message, ServingError):
            raise self.message
        return self.message


class Wary(Refusing):
    """Refuses all messages that begin nothing, and so ends the stream."""

    def _handle(self, request: decode_pb2.DecodeRequest, group: asyncio.TaskGroup) -> None:
        raise ProtocolError("no start")


def unseen(error: ServingError) -> ServingError:
    """``error``, of a message of 8 MiB."""
    vars(error)["size_bytes"] = 8 * MIB
    return error


@pytest.mark.parametrize("stream_type", [Refusing, Wary])
@pytest.mark.parametrize(
    "message",
    [
        pytest.param(unseen(MessageTooLargeError("for no slot")), id="too large"),
        pytest.param(unseen(ProtocolError("malformed")), id="malformed"),
        pytest.param(decode_pb2.DecodeRequest(cancel=types_pb2.Cancel()), id="padded"),
    ],
)
async def test_a_long_message_is_paid_for_also_where_it_ends_its_stream(
    stream_type: type[Refusing], message: decode_pb2.DecodeRequest | ServingError
) -> None:
    account = drained(ReadPace(interval_s=NEVER_S).new_account(), 1)
    following = Counting(1)
    serving = [asyncio.create_task(stream_type(account).serve(Sending(message)))]  # type: ignore[arg-type]
    await settle()
    assert account.credit <= -100
    serving.append(asyncio.create_task(Refusing(account).serve(following)))  # type: ignore[arg-type]
    await settle()
    assert not following.num_read, "the next stream of the same caller waits"
    for task in serving:
        task.cancel()
    await asyncio.wait(serving)


async def test_callers_without_credit_take_turns_however_many_streams_each_has() -> None:
    pace = ReadPace(interval_s=NEVER_S)
    one, other = (drained(pace.new_account()) for _ in range(2))
    callers = {account: [Counting(1000) for _ in range(count)] for account, count in ((one, 9), (other, 1))}
    serving = [
        asyncio.create_task(Refusing(account).serve(caller))  # type: ignore[arg-type]
        for account, group in callers.items()
        for caller in group
    ]
    await settle()
    for _ in range(20):
        pace.pay()
        await settle()
    num_read = [sum(caller.num_read for caller in group) for group in callers.values()]
    assert num_read[0] + num_read[1] <= 20 * 5
    assert abs(num_read[0] - num_read[1]) <= 1
    assert min(num_read) >= 30
    for task in serving:
        task.cancel()
    await asyncio.wait(serving)
    assert not one.num_waiting
    assert not other.num_waiting


async def test_a_caller_has_one_account_for_all_its_streams_also_for_the_next_ones() -> None:
    pace = ReadPace(interval_s=NEVER_S)
    with pace.account("a") as first, pace.account("a") as second, pace.account("b") as other:
        assert first is second is not other
        first.credit = -5
    with pace.account("a") as again:
        assert again.credit == -5


async def test_callers_that_come_anew_all_the_time_begin_with_less_and_less() -> None:
    pace = ReadPace(interval_s=NEVER_S)
    first = pace.new_account().credit
    total = first + sum(pace.new_account().credit for _ in range(2000))
    assert first == MAX_CREDIT
    assert total < 20 * MAX_CREDIT
    assert pace.new_account().credit < 20


async def test_accounts_with_streams_are_never_forgotten_and_others_are() -> None:
    pace = ReadPace(interval_s=NEVER_S)
    with ExitStack() as open_streams:
        kept = open_streams.enter_context(pace.account("kept"))
        for number in range(10_000):
            with pace.account(str(number)):
                pass
        assert open_streams.enter_context(pace.account("kept")) is kept
        assert len(pace._unused) <= 4096


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_stream_that_ends_while_it_waits_leaves_its_turn_to_the_next_one(is_cancelled: bool) -> None:
    pace = ReadPace(interval_s=NEVER_S)
    account = drained(pace.new_account())
    leaving, staying = (asyncio.create_task(account.wait()) for _ in range(2))
    await settle()
    if not is_cancelled:
        account.earn(1)  # in the same turn of the loop: the one that was woken is cancelled
    leaving.cancel()
    await settle()
    pace.pay()
    async with asyncio.timeout(WAIT_S):
        await staying
    assert leaving.cancelled()
    assert not account.num_waiting

"""A worker's side of a worker stream, in memory: whatever comes in whatever order, one terminal output a start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from quartet.engine.base import Finished, FinishReason
from quartet.errors import (
    ConfigError,
    EngineError,
    RequestCancelledError,
    RequestTimeoutError,
    ServingError,
    SignedStartError,
    StreamIdleError,
)
from quartet.streams import server
from quartet.streams.convert.messages import from_start
from quartet.streams.messages import WorkerStart
from quartet.streams.outbox import DecodeOutbox
from quartet.streams.read_pace import Account, ReadPace
from quartet.streams.server import StartVerifier, StreamLimits, WorkerStream
from quartet.v1 import decode_pb2, types_pb2
from tests.streams.starts import decode_start
from tests.streams.strategies import WORKER_STARTS

WAIT_S = 30.0
NUM_SLOTS = 4


class FakeContext:
    """A caller in memory."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[object] = asyncio.Queue()
        self.terminals: dict[int, list[str]] = {}
        self.may_write = asyncio.Event()
        self.may_write.set()

    def peer(self) -> str:
        return "memory"

    def send(self, request: object) -> None:
        self._requests.put_nowait(request)

    @property
    def num_unread(self) -> int:
        return self._requests.qsize()

    async def send_initial_metadata(self, metadata: object) -> None:
        return

    async def read(self) -> object:
        return await self._requests.get()

    async def write(self, message: decode_pb2.DecodeResponse) -> None:
        await self.may_write.wait()
        for finished in message.finished:
            self.terminals.setdefault(finished.slot, []).append("finished")
        for failed in message.failures:
            self.terminals.setdefault(failed.slot, []).append(failed.failure.reason)


@dataclass
class _Run:
    slot: int
    outbox: DecodeOutbox
    on_end: Callable[[], None]


@dataclass
class FakeWork:
    """Runs nothing: the test ends what was submitted."""

    running: dict[int, _Run] = field(default_factory=dict)
    starts: list[WorkerStart] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    refusal: ServingError | None = None
    num_submits: int = 0

    def submit(self, start: WorkerStart, outbox: DecodeOutbox, slot: int, on_end: Callable[[], None]) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.num_submits += 1
        self.starts.append(start)
        self.running[self.num_submits] = _Run(slot, outbox, on_end)
        return self.num_submits

    def cancel(self, id: int) -> None:
        if id in self.running:
            run = self.running.pop(id)
            run.on_end()
            run.outbox.failed(run.slot, RequestCancelledError("cancelled"))

    def abandon(self, ids: list[int]) -> None:
        self.abandoned += ids
        for id in ids:
            self.running.pop(id, None)

    def finish(self, slot: int) -> None:
        for id, run in list(self.running.items()):
            if run.slot == slot:
                del self.running[id]
                run.outbox.tokens(slot, 0, [1, 2], ())
                run.on_end()
                run.outbox.finished(slot, Finished(id, FinishReason.LENGTH, 2))


def start_message(slot: int, prompt: bytes = b"\1\0\0\0", *, chunked: bool = False) -> decode_pb2.DecodeRequest:
    generation = types_pb2.Generation(prompt_token_ids=prompt)
    return decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart(slot=slot, generation=generation, chunked=chunked))


def chunk(slot: int, data: bytes, target: int = types_pb2.CHUNK_TARGET_PROMPT_TOKEN_IDS) -> decode_pb2.DecodeRequest:
    part = types_pb2.StartChunk(slot=slot, target=target, data=data)  # type: ignore[arg-type]  # or an unknown number
    return decode_pb2.DecodeRequest(chunk=part)


def done(slot: int) -> decode_pb2.DecodeRequest:
    return decode_pb2.DecodeRequest(start_done=types_pb2.StartDone(slot=slot))


def cancel(slot: int) -> decode_pb2.DecodeRequest:
    return decode_pb2.DecodeRequest(cancel=types_pb2.Cancel(slot=slot))


class Serving:
    """A stream being served."""

    def __init__(
        self,
        limits: StreamLimits | None = None,
        *,
        account: Account | None = None,
        verifier: StartVerifier | None = None,
        takes_unsigned: bool = True,
    ) -> None:
        self.work, self.context = FakeWork(), FakeContext()
        self.stream = WorkerStream(
            self.work,
            DecodeOutbox(),
            limits or StreamLimits(),
            account=account,
            verifier=verifier,
            takes_unsigned=takes_unsigned,
        )
        self.task = asyncio.create_task(self.stream.serve(self.context))  # type: ignore[arg-type]

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def send(self, *requests: object) -> None:
        for request in requests:
            self.context.send(request)
        await self.settle()

    def poll(self, times: int) -> None:
        """As its timer does, four times in ``idle_timeout_s``."""
        for _ in range(times):
            assert self.stream._idle_timer is not None
            self.stream._idle_timer.cancel()
            self.stream._poll_idle()

    async def end(self) -> None:
        """The good end."""
        self.context.send(grpc.aio.EOF)
        async with asyncio.timeout(WAIT_S):
            await self.task

    async def error(self) -> ServingError:
        async with asyncio.timeout(WAIT_S):
            with pytest.raises((ExceptionGroup, ServingError)) as caught:
                await self.task
        error: BaseException = caught.value
        if isinstance(error, ExceptionGroup):
            [error] = error.exceptions
        assert isinstance(error, ServingError)
        return error


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["start", "bad start", "refused", "chunked", "chunk", "done", "cancel", "finish", "block", "unblock"]
        ),
        st.integers(0, NUM_SLOTS - 1),
    ),
    max_size=40,
)


@given(actions=ACTIONS, is_dropped=st.booleans())
def test_every_start_gets_exactly_one_terminal_output(actions: list[tuple[str, int]], is_dropped: bool) -> None:
    asyncio.run(_play(actions, is_dropped))


async def _play(actions: list[tuple[str, int]], is_dropped: bool) -> None:
    serving = Serving()
    num_starts = [0] * NUM_SLOTS
    work, context = serving.work, serving.context
    for action, slot in actions:
        is_free = num_starts[slot] == len(context.terminals.get(slot, ()))
        work.refusal = EngineError("dead") if action == "refused" else None
        if action in ("start", "bad start", "refused", "chunked"):
            if is_free:
                num_starts[slot] += 1
                prompt = b"\1\0" if action == "bad start" else b"\1\0\0\0"
                await serving.send(start_message(slot, prompt, chunked=action == "chunked"))
        elif action in ("chunk", "done", "cancel"):
            make = {"chunk": lambda slot: chunk(slot, b"\2\0\0\0"), "done": done, "cancel": cancel}[action]
            await serving.send(make(slot))
        elif action == "finish":
            work.finish(slot)
            await serving.settle()
        elif action == "block":
            context.may_write.clear()
        else:
            context.may_write.set()
            await serving.settle()
    if is_dropped:
        serving.task.cancel()
        await asyncio.wait([serving.task])
        assert not work.running
        return
    context.may_write.set()
    context.send(grpc.aio.EOF)
    await serving.settle()
    for slot in range(NUM_SLOTS):
        work.finish(slot)
    async with asyncio.timeout(WAIT_S):
        await serving.task
    assert [len(context.terminals.get(slot, ())) for slot in range(NUM_SLOTS)] == num_starts
    assert not work.abandoned


async def test_half_closing_waits_for_the_last_terminal_output() -> None:
    serving = Serving()
    await serving.send(start_message(1), start_message(2), grpc.aio.EOF)
    serving.work.finish(1)
    await serving.settle()
    assert not serving.task.done()
    serving.work.finish(2)
    async with asyncio.timeout(WAIT_S):
        await serving.task
    assert serving.context.terminals == {1: ["finished"], 2: ["finished"]}


async def test_half_closing_within_a_chunked_start_fails_it() -> None:
    serving = Serving()
    await serving.send(start_message(1, chunked=True))
    await serving.end()
    assert serving.context.terminals == {1: ["PROTOCOL_VIOLATION"]}


async def test_chunks_continue_prompt_and_generated_tokens() -> None:
    serving = Serving()
    generated = types_pb2.CHUNK_TARGET_GENERATED_TOKEN_IDS
    await serving.send(
        start_message(1, b"\1\0", chunked=True), chunk(1, b"\0\0"), chunk(1, b"\5\0\0\0", generated), done(1)
    )
    [start] = serving.work.starts
    assert list(start.generation.prompt_token_ids) == [1]
    assert list(start.generation.generated_token_ids) == [5]
    serving.work.finish(1)
    await serving.end()


@pytest.mark.parametrize("slot_state", ["running", "incomplete", "end unsent"])
async def test_a_start_in_a_used_slot_ends_the_stream(slot_state: str) -> None:
    serving = Serving()
    await serving.send(start_message(1), start_message(2, chunked=True))
    if slot_state == "end unsent":
        serving.context.may_write.clear()
        serving.work.finish(1)
        await serving.settle()  # the writer is stuck with this one, so the next waits
        await serving.send(start_message(3))
        serving.work.finish(3)
    await serving.send(start_message({"running": 1, "incomplete": 2, "end unsent": 3}[slot_state]))
    error = await serving.error()
    assert error.reason == "PROTOCOL_VIOLATION"
    assert error.field == "start.slot"
    assert not serving.work.running


async def test_a_message_that_holds_nothing_ends_the_stream() -> None:
    serving = Serving()
    await serving.send(start_message(1), decode_pb2.DecodeRequest())
    assert (await serving.error()).reason == "PROTOCOL_VIOLATION"
    assert serving.work.abandoned == [1]


async def test_messages_for_unknown_slots_are_ignored() -> None:
    serving = Serving()
    await serving.send(chunk(9, b"x"), done(9), cancel(9), start_message(1))
    serving.work.finish(1)
    await serving.end()
    assert serving.context.terminals == {1: ["finished"]}


async def test_only_chunks_of_a_start_under_way_are_free() -> None:
    account = ReadPace().new_account()
    serving, credit = Serving(account=account), account.credit
    long = chunk(1, bytes(2048))
    await serving.send(long, long)
    assert account.credit == credit - 2
    await serving.send(start_message(1, chunked=True))
    assert account.credit == credit - 3
    await serving.send(long, long)
    assert account.credit == credit - 3
    await serving.send(chunk(1, bytes(4)))
    assert account.credit == credit - 4
    serving.task.cancel()
    await asyncio.wait([serving.task])


async def test_chunks_of_another_field_fail_the_start() -> None:
    serving = Serving()
    for slot, target in ((1, types_pb2.CHUNK_TARGET_MEDIA), (2, 77)):
        await serving.send(start_message(slot, chunked=True), chunk(slot, b"x", target))
    await serving.end()
    assert serving.context.terminals == {1: ["PROTOCOL_VIOLATION"], 2: ["PROTOCOL_VIOLATION"]}


async def test_chunks_are_bounded_in_size_number_and_time() -> None:
    serving = Serving(StreamLimits(max_prompt_bytes=8, chunks_timeout_s=0.05))
    await serving.send(start_message(0, b"\1", chunked=True), chunk(0, bytes(8)))
    assert serving.context.terminals == {0: ["PROMPT_TOO_LONG"]}
    await serving.send(*(start_message(slot, chunked=True) for slot in range(1, 12)))
    assert set(serving.context.terminals) == {0, 9, 10, 11}
    assert serving.context.terminals[9] == ["QUEUE_FULL"]
    async with asyncio.timeout(WAIT_S):
        while len(serving.context.terminals) < 12:  # noqa: ASYNC110 - timers have no event
            await asyncio.sleep(0.01)
    assert serving.context.terminals[1] == ["TIMEOUT"]
    await serving.end()


def signed(slot: int, prompt: bytes = b"\1\0\0\0") -> decode_pb2.DecodeRequest:
    """A start that `FakeVerifier` opens."""
    content = start_message(0, prompt).start.SerializeToString()
    return decode_pb2.DecodeRequest(signed_start=decode_pb2.SignedDecodeStart(slot=slot, signed_start=content))


class FakeVerifier:
    """Opens what is not empty."""

    def open(self, message: decode_pb2.SignedDecodeStart) -> decode_pb2.DecodeStart:
        if not message.signed_start:
            raise SignedStartError("altered")
        start = decode_pb2.DecodeStart.FromString(message.signed_start)
        start.slot = message.slot
        return start


async def test_without_a_key_a_signed_start_fails_in_its_slot() -> None:
    serving = Serving()
    await serving.send(signed(5))
    await serving.end()
    assert serving.context.terminals == {5: ["NO_SIGNING_KEY"]}


async def test_a_signed_start_runs_as_signed_in_the_slot_of_its_message() -> None:
    serving = Serving(verifier=FakeVerifier())
    await serving.send(signed(5), start_message(6))
    assert [start.is_signed for start in serving.work.starts] == [True, False]
    serving.work.finish(5)
    serving.work.finish(6)
    await serving.end()
    assert serving.context.terminals == {5: ["finished"], 6: ["finished"]}


async def test_refused_signed_starts_fail_only_in_their_slots() -> None:
    serving = Serving(verifier=FakeVerifier())
    refused = decode_pb2.DecodeRequest(signed_start=decode_pb2.SignedDecodeStart(slot=1))
    await serving.send(refused, signed(2), signed(3, b"\1\0"))
    serving.work.finish(2)
    await serving.end()
    assert serving.context.terminals == {1: ["SIGNED_START_INVALID"], 2: ["finished"], 3: ["INVALID_FIELD"]}


async def test_a_signed_start_in_a_used_slot_ends_the_stream() -> None:
    serving = Serving(verifier=FakeVerifier())
    await serving.send(start_message(1), signed(1))
    assert (await serving.error()).field == "start.slot"


async def test_a_client_that_is_no_peer_may_start_only_signed_starts_and_cancel() -> None:
    serving = Serving(verifier=FakeVerifier(), takes_unsigned=False)
    await serving.send(start_message(1), start_message(2, chunked=True), chunk(2, b"\2\0\0\0"), done(2))
    await serving.send(signed(3), signed(4), cancel(3), cancel(9))
    serving.work.finish(4)
    await serving.end()
    assert serving.context.terminals == {
        1: ["PERMISSION_DENIED"],
        2: ["PERMISSION_DENIED"],
        3: ["CANCELLED"],
        4: ["finished"],
    }
    assert all(start.is_signed for start in serving.work.starts)


async def test_a_client_that_reads_nothing_loses_its_requests() -> None:
    serving = Serving(StreamLimits(stall_timeout_s=0.1))
    await serving.send(start_message(1), start_message(2))
    serving.context.may_write.clear()
    serving.work.finish(1)
    assert (await serving.error()).reason == "STREAM_STALLED"
    assert serving.work.abandoned == [2]


async def test_a_client_that_reads_no_ends_cannot_start_more_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_OWED_ENDS", 3)
    serving = Serving(takes_unsigned=False)
    serving.context.may_write.clear()
    await serving.send(start_message(0))  # the writer is stuck with this one
    await serving.send(*(start_message(slot) for slot in range(1, 21)))
    for _ in range(30):
        await serving.settle()
    assert serving.context.num_unread == 20 - 4
    serving.context.may_write.set()
    await serving.end()
    assert serving.context.terminals == {slot: ["PERMISSION_DENIED"] for slot in range(21)}


async def test_a_client_that_reads_no_ends_at_all_loses_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_OWED_ENDS", 3)
    serving = Serving(StreamLimits(stall_timeout_s=0.1), takes_unsigned=False)
    serving.context.may_write.clear()
    await serving.send(*(start_message(slot) for slot in range(21)))
    assert (await serving.error()).reason == "STREAM_STALLED"
    assert serving.context.num_unread > 0


@pytest.mark.parametrize("name", ["stall_timeout_s", "idle_timeout_s", "chunks_timeout_s", "max_prompt_bytes"])
def test_impossible_limits_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        StreamLimits(**{name: 0})


@given(
    start=WORKER_STARTS,
    edits=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 3), st.binary(max_size=4)), min_size=1, max_size=4),
)
def test_a_start_that_parses_fails_as_a_serving_error_or_makes_sense(
    start: WorkerStart, edits: list[tuple[int, int, bytes]]
) -> None:
    packed = decode_start(1, start).SerializeToString()
    for place, num_removed, inserted in edits:
        at = place % (len(packed) + 1)
        packed = packed[:at] + inserted + packed[at + num_removed :]
    try:
        message = decode_pb2.DecodeStart.FromString(packed)
    except DecodeError:
        return
    with contextlib.suppress(ServingError):
        from_start(message)


async def test_a_stream_that_says_nothing_is_ended() -> None:
    serving = Serving(StreamLimits(stall_timeout_s=0.1))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ExceptionGroup) as caught:
            await serving.task
    assert isinstance(caught.value.exceptions[0], RequestTimeoutError)


async def test_a_stream_that_starts_nothing_is_ended_whatever_else_it_says() -> None:
    serving = Serving(StreamLimits(stall_timeout_s=0.1))
    while not serving.task.done():
        await serving.send(cancel(1), chunk(2, b""), done(3))
        await asyncio.sleep(0.001)
    assert isinstance(await serving.error(), RequestTimeoutError)


async def test_a_stream_ends_when_no_request_has_run_on_it_for_long() -> None:
    serving = Serving(StreamLimits(idle_timeout_s=3600))
    await serving.send(start_message(0))
    serving.poll(20)
    serving.work.finish(0)
    await serving.settle()
    assert serving.context.terminals == {0: ["finished"]}
    serving.poll(5)
    await serving.send(start_message(1))
    serving.work.finish(1)  # begins and ends between two polls
    await serving.send(cancel(0))
    serving.poll(5)
    await serving.send(cancel(1), start_message(2, chunked=True))
    serving.poll(20)
    await serving.send(cancel(2))
    serving.poll(5)
    await serving.send(cancel(0))
    assert not serving.task.done()
    serving.poll(1)
    error = await serving.error()
    assert isinstance(error, StreamIdleError)
    assert serving.stream._idle_timer is not None
    assert serving.stream._idle_timer.cancelled(), "nothing is left that polls"


@pytest.mark.parametrize("chunked", [False, True])
async def test_media_are_counted_before_they_are_read(chunked: bool) -> None:
    serving = Serving()
    for slot, fields in enumerate([{"media": [types_pb2.MediaInput()] * 1025}, {}]):
        spans = [] if fields else [types_pb2.MediaSpan()] * 1025
        generation = types_pb2.Generation(prompt_token_ids=b"\1\0\0\0", media=spans)
        start = decode_pb2.DecodeStart(slot=slot, generation=generation, chunked=chunked, **fields)
        await serving.send(decode_pb2.DecodeRequest(start=start))
    await serving.end()
    assert serving.context.terminals == {0: ["INVALID_FIELD"], 1: ["INVALID_FIELD"]}
    assert serving.work.running == {}


def test_a_model_bounds_the_tokens_of_a_start() -> None:
    assert StreamLimits().for_model(1_000).max_prompt_bytes == 4_000
    assert StreamLimits(max_prompt_bytes=8).for_model(1_000) == StreamLimits(max_prompt_bytes=8)

"""A caller that vanishes, at whatever stage, leaves no block behind on any worker."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest

from quartet.engine.base import RequestKind
from quartet.errors import WorkerUnavailableError
from quartet.kvcache.layout import HandOff
from quartet.streams.server import StreamLimits, WorkerStream
from quartet.v1 import prefill_pb2, types_pb2
from services.workers.dispatch import PrefillDispatcher
from tests.engine.fakes import FakeRunner
from tests.services.stream_workers import (
    WAIT_S,
    StreamWorker,
    collect,
    expected,
    make_start,
    prefill_and_decode,
    stream_worker,
    until,
)
from tests.streams.starts import prefill_start

PROMPT = tuple(range(1, 11))


async def hand_off_from(prefill: StreamWorker) -> tuple[int, HandOff]:
    """The first token after ``PROMPT`` and its blocks' hand-off."""
    outcome = await prefill.prefills().start(make_start(PROMPT)).outcome()
    assert outcome.hand_off is not None
    return outcome.token_id, outcome.hand_off


@pytest.mark.parametrize("kind", list(RequestKind))
@pytest.mark.parametrize("is_connection_lost", [False, True])
async def test_a_caller_that_vanishes_while_its_request_computes_or_waits_leaves_nothing(
    kind: RequestKind, is_connection_lost: bool
) -> None:
    gate = threading.Semaphore(0)
    # The pool holds two of them: others wait.
    async with stream_worker(kind, FakeRunner(num_blocks=8, step_gate=gate)) as worker:
        client = worker.decodes() if kind is RequestKind.DECODE else worker.prefills()
        for index in range(6):
            client.start(make_start([index, *PROMPT], max_tokens=20))
        await until(lambda: worker.dispatcher.num_running == 6 and worker.runner.num_steps == 1)
        await (worker.channel.close() if is_connection_lost else client.close())
        gate.release(100_000)
        await worker.wait_clean()


async def test_a_caller_that_vanishes_in_the_middle_of_an_answer_does_not_disturb_others() -> None:
    gate = threading.Semaphore(0)
    async with stream_worker(RequestKind.DECODE, FakeRunner(num_blocks=256, step_gate=gate)) as worker:
        leaver, stayer = worker.decodes(), worker.decodes()
        left = [leaver.start(make_start([index, *PROMPT], max_tokens=200)) for index in range(4)]
        start = make_start(PROMPT)
        call = stayer.start(start)
        await until(lambda: worker.dispatcher.num_running == 5)
        gate.release(4)
        for one in left:
            assert (await one.next()).started is not None
        await leaver.close()
        for one in left:
            with pytest.raises(WorkerUnavailableError):
                while True:
                    await one.next()
        gate.release(100_000)
        assert await collect(call) == expected(start)
        await worker.wait_clean()


async def test_a_caller_that_vanishes_in_the_middle_of_a_pull_leaves_nothing() -> None:
    async with prefill_and_decode() as (prefill, decode):
        token_id, hand_off = await hand_off_from(prefill)
        prefill.may_transfer.clear()
        client = decode.decodes()
        client.start(make_start(PROMPT, generated=[token_id], hand_off=hand_off))
        await until(lambda: decode.stats.num_in_use_blocks > 0)
        await client.close()
        await until(lambda: decode.dispatcher.num_running == 0)
        prefill.may_transfer.set()
        await decode.wait_clean()
        await prefill.wait_clean()
        assert prefill.source.counts.cancelled == 1


async def test_a_caller_that_vanishes_before_its_decode_had_room_to_pull_leaves_nothing() -> None:
    gate = threading.Semaphore(0)
    runner = FakeRunner(num_blocks=4, step_gate=gate)
    async with prefill_and_decode(decode_runner=runner) as (prefill, decode):
        token_id, hand_off = await hand_off_from(prefill)
        stayer, leaver = decode.decodes(), decode.decodes()
        start = make_start(PROMPT, max_tokens=5)
        call = stayer.start(start)
        await until(lambda: runner.num_steps == 1)
        leaver.start(make_start(PROMPT, generated=[token_id], hand_off=hand_off))
        await until(lambda: decode.dispatcher.num_running == 2)
        await leaver.close()
        gate.release(100_000)
        assert await collect(call) == expected(start)
        await decode.wait_clean()
        await prefill.wait_clean()


async def test_a_caller_that_vanishes_with_an_unused_hand_off_leaves_nothing() -> None:
    async with prefill_and_decode(hand_off_ttl_s=0.3) as (prefill, _decode):
        client = prefill.prefills()
        await client.start(make_start(PROMPT)).outcome()
        await client.close()
        await prefill.wait_clean()
        assert prefill.source.counts.expired == 1


class StuckContext:
    """A caller that sends ``requests`` and then reads nothing."""

    def __init__(self, requests: list[prefill_pb2.PrefillRequest]) -> None:
        self.requests: asyncio.Queue[prefill_pb2.PrefillRequest] = asyncio.Queue()
        for request in requests:
            self.requests.put_nowait(request)
        self.written: list[prefill_pb2.PrefillResponse] = []
        self.may_write = asyncio.Event()

    async def send_initial_metadata(self, metadata: object) -> None:
        return

    async def read(self) -> prefill_pb2.PrefillRequest:
        return await self.requests.get()

    async def write(self, message: prefill_pb2.PrefillResponse) -> None:
        self.written.append(message)
        await self.may_write.wait()


def prefill_request(slot: int) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(start=prefill_start(slot, make_start([slot, *PROMPT])))


async def test_a_caller_that_vanishes_before_its_hand_offs_were_sent_leaves_nothing() -> None:
    async with stream_worker(RequestKind.PREFILL) as worker:
        assert isinstance(worker.dispatcher, PrefillDispatcher)
        stream = WorkerStream(worker.dispatcher, worker.dispatcher.new_outbox(), StreamLimits())
        context = StuckContext([prefill_request(slot) for slot in range(3)])
        serving = asyncio.create_task(stream.serve(context))  # type: ignore[arg-type]
        await until(lambda: worker.source.counts.held == 3 and len(context.written) == 1)
        serving.cancel()
        await asyncio.wait([serving], timeout=WAIT_S)
        await worker.wait_clean()
        assert worker.source.counts.cancelled == 3


async def test_cancel_takes_back_a_hand_off_that_was_not_sent_yet() -> None:
    async with stream_worker(RequestKind.PREFILL) as worker:
        assert isinstance(worker.dispatcher, PrefillDispatcher)
        stream = WorkerStream(worker.dispatcher, worker.dispatcher.new_outbox(), StreamLimits())
        context = StuckContext([prefill_request(0)])
        serving = asyncio.create_task(stream.serve(context))  # type: ignore[arg-type]
        await until(lambda: len(context.written) == 1)
        context.requests.put_nowait(prefill_request(1))
        await until(lambda: worker.source.counts.held == 2)
        for slot in (0, 1):
            context.requests.put_nowait(prefill_pb2.PrefillRequest(cancel=types_pb2.Cancel(slot=slot)))
        await until(lambda: worker.source.counts.held == 1)
        context.may_write.set()
        await until(lambda: len(context.written) == 2)
        first, second = (output for message in context.written for output in message.outputs)
        # The first was on its way: its receiver releases it.
        assert (first.slot, first.WhichOneof("outcome")) == (0, "result")
        assert (second.slot, second.failure.code) == (1, grpc.StatusCode.CANCELLED.value[0])
        serving.cancel()


async def test_a_hand_off_that_comes_after_its_caller_was_cancelled_is_dropped() -> None:
    gate = threading.Semaphore(0)
    async with stream_worker(RequestKind.PREFILL, FakeRunner(step_gate=gate)) as worker:
        client = worker.prefills()
        waiting = asyncio.create_task(client.start(make_start(PROMPT)).outcome())
        await until(lambda: worker.runner.num_steps == 1)
        waiting.cancel()
        gate.release(100_000)  # it is done before the cancel arrives
        await worker.wait_clean()
        never_asked = client.start(make_start(PROMPT))
        await until(lambda: worker.source.counts.held == 1)
        await until(lambda: never_asked.is_over)
        never_asked.cancel()
        await worker.wait_clean()
        assert worker.dropped

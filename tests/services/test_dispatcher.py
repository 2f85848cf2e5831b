"""Requests over real streams to real engines: what goes well, and how each request ends when it does not."""

from __future__ import annotations

import asyncio
import threading

import pytest

from quartet.engine.base import RequestKind
from quartet.errors import (
    DrainingError,
    DuplicateRequestError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    RequestCancelledError,
    RequestTimeoutError,
    WorkerUnavailableError,
)
from quartet.transfer.base import TransferWay
from tests.engine.fakes import FakeRunner
from tests.services.stream_workers import (
    collect,
    collect_all,
    expected,
    make_start,
    prefill_and_decode,
    stream_worker,
    until,
)

PROMPT = tuple(range(1, 11))
GRPC_ONLY = (TransferWay.GRPC,)
SHM_TOO = (TransferWay.SHM, TransferWay.GRPC)


@pytest.mark.parametrize("ways", [SHM_TOO, GRPC_ONLY])
async def test_a_decode_continues_from_the_blocks_of_a_prefill(ways: tuple[TransferWay, ...]) -> None:
    async with prefill_and_decode(ways=ways) as (prefill, decode):
        start = make_start(PROMPT)
        outcome = await prefill.prefills().start(start).outcome()
        assert outcome.hand_off is not None
        resumed = make_start(PROMPT, generated=[outcome.token_id], hand_off=outcome.hand_off)
        whole = await collect_all(decode.decodes().start(resumed))
        assert whole.started is not None
        assert whole.started.transfer_bytes > 0
        assert whole.started.transfer_way is ways[0]
        assert whole.token_offset == 1
        assert [outcome.token_id, *whole.token_ids] == expected(start)
        await prefill.wait_clean()
        await decode.wait_clean()
        assert prefill.source.counts.taken == 1


async def test_many_requests_share_one_stream() -> None:
    async with stream_worker(RequestKind.DECODE, FakeRunner(num_blocks=512)) as worker:
        client = worker.decodes()
        starts = [make_start([index % 64, *PROMPT], max_tokens=5 + index % 20) for index in range(100)]
        calls = [client.start(start) for start in starts]
        for start, call in zip(starts, calls, strict=True):
            assert await collect(call) == expected(start)
        await worker.wait_clean()
        await client.close()


async def test_a_prefill_whose_first_token_ends_the_answer_holds_no_blocks() -> None:
    async with stream_worker(RequestKind.PREFILL) as worker:
        start = make_start(PROMPT, max_tokens=1)
        outcome = await worker.prefills().start(start).outcome()
        assert outcome.finish_reason is not None
        assert outcome.hand_off is None
        assert [outcome.token_id] == expected(start)
        await worker.wait_clean()


async def test_log_probabilities_come_with_their_tokens() -> None:
    async with stream_worker(RequestKind.DECODE) as worker:
        whole = await collect_all(worker.decodes().start(make_start(PROMPT, logprobs=0, max_tokens=20)))
        assert len(whole.token_ids) == 20
        assert [entry.token_id for entry in whole.logprobs] == whole.token_ids


async def test_a_prompt_over_one_mib_travels_in_chunks() -> None:
    async with stream_worker(RequestKind.DECODE) as worker:
        client = worker.decodes()
        prompt = [token % 64 for token in range(600_000)]
        with pytest.raises(PromptTooLongError, match="600000 tokens"):
            await client.start(make_start(prompt)).next()
        # The stream lives on.
        start = make_start(PROMPT)
        assert await collect(client.start(start)) == expected(start)


async def test_a_repeated_key_is_refused_and_its_slot_is_free_at_once() -> None:
    gate = threading.Semaphore(0)
    async with stream_worker(RequestKind.DECODE, FakeRunner(step_gate=gate)) as worker:
        client, other = worker.decodes(), worker.decodes()
        start = make_start(PROMPT, request_id="a" * 32)
        first = client.start(start)
        await until(lambda: worker.dispatcher.num_running == 1)
        for again in (client, other, client):
            with pytest.raises(DuplicateRequestError):
                await again.start(start).next()
        # A worker may still run an attempt that its router has given up.
        retry = make_start(PROMPT, request_id="a" * 32, attempt=1)
        second = other.start(retry)
        await until(lambda: worker.dispatcher.num_running == 2)
        gate.release(1000)
        assert await collect(first) == expected(start)
        assert await collect(second) == expected(retry)
        # Another attempt or choice is another request; so is the same one after its end.
        for attempt, choice in ((0, 0), (1, 0), (0, 1)):
            repeated = make_start(PROMPT, request_id="a" * 32, attempt=attempt, choice=choice)
            assert await collect(client.start(repeated)) == expected(repeated)


async def test_requests_without_an_id_are_never_duplicates() -> None:
    async with stream_worker(RequestKind.DECODE) as worker:
        client = worker.decodes()
        starts = [make_start(PROMPT, request_id="") for _ in range(3)]
        for start, call in [(start, client.start(start)) for start in starts]:
            assert await collect(call) == expected(start)


async def test_an_impossible_request_fails_alone() -> None:
    async with stream_worker(RequestKind.DECODE) as worker:
        client = worker.decodes()
        good = make_start(PROMPT)
        good_call = client.start(good)
        with pytest.raises(InvalidRequestError) as caught:
            await client.start(make_start([1_000_000])).next()
        assert caught.value.field == "prompt_token_ids"
        assert await collect(good_call) == expected(good)


async def test_a_draining_worker_refuses_new_requests_and_ends_running_ones() -> None:
    gate = threading.Semaphore(0)
    async with stream_worker(RequestKind.DECODE, FakeRunner(step_gate=gate)) as worker:
        client = worker.decodes()
        start = make_start(PROMPT)
        running = client.start(start)
        await until(lambda: worker.dispatcher.num_running == 1)
        worker.dispatcher.drain()
        with pytest.raises(DrainingError):
            await client.start(make_start(PROMPT)).next()
        assert not await worker.dispatcher.wait_idle(0.01)
        gate.release(1000)
        assert await collect(running) == expected(start)
        assert await worker.dispatcher.wait_idle(1)


async def test_a_dying_engine_fails_running_and_new_requests() -> None:
    gate = threading.Semaphore(0)
    runner = FakeRunner(step_gate=gate)
    async with stream_worker(RequestKind.DECODE, runner) as worker:
        client = worker.decodes()
        calls = [client.start(make_start(PROMPT)) for _ in range(3)]
        await until(lambda: worker.dispatcher.num_running == 3)
        runner.failure = RuntimeError("the device is gone")
        gate.release(1000)
        for call in calls:
            with pytest.raises(EngineError):
                await call.next()
        with pytest.raises(EngineError):
            await client.start(make_start(PROMPT)).next()
        assert worker.dispatcher.num_running == 0
        assert await worker.dispatcher.wait_idle(1)


async def test_the_timeout_of_a_request_ends_it() -> None:
    gate = threading.Semaphore(3)
    async with stream_worker(RequestKind.DECODE, FakeRunner(step_gate=gate)) as worker:
        client = worker.decodes()
        late = client.start(make_start(PROMPT, timeout_s=0.05, max_tokens=200))
        patient = make_start(PROMPT, timeout_s=60.0)
        patient_call = client.start(patient)
        await until(lambda: gate._value == 0)
        await asyncio.sleep(0.06)  # the timeout itself
        gate.release(1000)
        with pytest.raises(RequestTimeoutError):
            await collect(late)
        assert await collect(patient_call) == expected(patient)
        await worker.wait_clean()


async def test_cancel_ends_a_decode_and_frees_its_blocks() -> None:
    gate = threading.Semaphore(5)
    async with stream_worker(RequestKind.DECODE, FakeRunner(step_gate=gate)) as worker:
        client = worker.decodes()
        call = client.start(make_start(PROMPT, max_tokens=200))
        assert (await call.next()).started is not None
        await until(lambda: worker.runner.num_steps == 6)  # it is in a step that does not end until the gate opens
        call.cancel()
        call.cancel()
        start = make_start(PROMPT)
        other = client.start(start)
        await until(lambda: worker.dispatcher.num_running == 2)  # so the cancel, sent before, has arrived
        gate.release(1000)
        with pytest.raises(RequestCancelledError):
            await collect(call)
        assert await collect(other) == expected(start)
        await worker.wait_clean()
        call.cancel()  # harmless after the end
        assert not worker.broken


async def test_cancel_ends_a_prefill_and_frees_its_blocks() -> None:
    gate = threading.Semaphore(0)
    async with stream_worker(RequestKind.PREFILL, FakeRunner(step_gate=gate)) as worker:
        call = worker.prefills().start(make_start(PROMPT))
        await until(lambda: worker.runner.num_steps == 1)
        call.cancel()
        with pytest.raises(RequestCancelledError):
            await call.outcome()
        gate.release(1000)
        await worker.wait_clean()


async def test_a_closed_client_fails_its_calls_now_and_later() -> None:
    gate = threading.Semaphore(0)
    async with stream_worker(RequestKind.DECODE, FakeRunner(step_gate=gate)) as worker:
        client = worker.decodes()
        never_ran = client.start(make_start(PROMPT))
        await client.close()
        for call in (never_ran, client.start(make_start(PROMPT))):
            with pytest.raises(WorkerUnavailableError):
                await call.next()
        await client.close()
        assert len(worker.broken) == 1


async def test_counted_starts_show_in_the_load() -> None:
    gate = threading.Semaphore(0)
    async with stream_worker(RequestKind.DECODE, FakeRunner(num_blocks=8, step_gate=gate)) as worker:
        client = worker.decodes()
        # The second needs the blocks of the first.
        starts = [
            make_start([*PROMPT, 3 * number], max_tokens=12, router_id="r", router_request_number=number)
            for number in (1, 2)
        ]
        calls = [client.start(start) for start in starts]
        await until(lambda: worker.dispatcher.num_running == 2)
        refused = client.start(
            make_start(PROMPT, request_id=starts[0].context.request_id, router_id="r", router_request_number=3)
        )
        with pytest.raises(DuplicateRequestError):
            await refused.next()
        assert worker.dispatcher.starts.watermarks() == {"r": 0}
        gate.release(1)
        assert (await calls[0].next()).started is not None
        assert worker.dispatcher.starts.watermarks()["r"] in (1, 3)
        assert worker.stats.num_in_use_blocks > 0
        gate.release(1000)
        for start, call in zip(starts, calls, strict=True):
            if call is calls[1]:
                assert await collect(call) == expected(start)
        assert worker.dispatcher.starts.watermarks() == {"r": 3}

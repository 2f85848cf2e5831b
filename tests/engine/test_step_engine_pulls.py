"""The engine's transfers: claims while it waits, fetches that fail, and cancels while something still writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from quartet.engine.base import EngineRequest, Failed, Finished, RequestKind
from quartet.engine.step_engine import StepEngine
from quartet.errors import (
    EngineError,
    LayoutMismatchError,
    MediaLostError,
    NoHandOffError,
    RequestCancelledError,
    ServingError,
    TransferError,
    TransferTimeoutError,
    WorkerUnavailableError,
)
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import HandOff, OpaquePayload
from quartet.transfer.base import PoolMemory
from tests.engine.consumer import Consumer, StartEngine, Terminal
from tests.engine.fakes import WAIT_S, FakePuller, FakeRunner, expected_output, fake_layout, make_request


def _decode(puller: FakePuller, prompt: Sequence[int], max_tokens: int = 4) -> EngineRequest:
    generated = expected_output(make_request(prompt, max_tokens=1).generation)
    hand_off = puller.offer_prefix([*prompt, *generated])
    return make_request(prompt, generated=generated, max_tokens=max_tokens, hand_off=hand_off)


def _error(terminal: Terminal) -> ServingError:
    assert isinstance(terminal, Failed)
    return terminal.error


async def _wait_event(event: asyncio.Event) -> None:
    async with asyncio.timeout(WAIT_S):
        await event.wait()


def _check_free(engine: StepEngine) -> None:
    assert engine.stats()[0].num_in_use_blocks == 0


async def test_blocks_are_fetched_during_the_step_that_allocated_them(start_engine: StartEngine) -> None:
    puller, gate = FakePuller(), threading.Semaphore(0)
    runner = FakeRunner(step_gate=gate)
    engine = await start_engine(runner, puller=puller)
    consumer = Consumer(engine)
    running, pulled = make_request(range(20), max_tokens=6), _decode(puller, range(30, 40))
    engine.submit(running)
    await asyncio.to_thread(runner.step_began.wait, WAIT_S)
    engine.submit(pulled)
    gate.release()
    await _wait_event(puller.fetch_began)
    assert engine.stats()[0].num_steps == 1, "the second one is held up at the gate"
    gate.release(100)
    for request in (running, pulled):
        assert isinstance(await consumer.wait_terminal(request), Finished)


async def test_the_puller_learns_whether_the_engine_has_steps_to_take(start_engine: StartEngine) -> None:
    puller, gate = FakePuller(), threading.Semaphore(0)
    runner = FakeRunner(step_gate=gate)
    engine = await start_engine(runner, puller=puller)
    await _until_idle(puller)
    engine.submit(request := make_request(range(5)))
    await asyncio.to_thread(runner.step_began.wait, WAIT_S)
    assert puller.is_busy()
    gate.release(100)
    await Consumer(engine).wait_terminal(request)
    await _until_idle(puller)


async def _until_idle(puller: FakePuller) -> None:
    async with asyncio.timeout(WAIT_S):
        while puller.is_busy():  # noqa: ASYNC110  # the engine's thread says so
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TransferTimeoutError("too slow"), TransferTimeoutError),
        (OSError("a bug or a broken socket"), TransferError),
    ],
)
async def test_a_fetch_that_fails_fails_its_request_only(
    start_engine: StartEngine, error: Exception, expected: type[ServingError]
) -> None:
    puller = FakePuller(error=error)
    engine = await start_engine(FakeRunner(), puller=puller)
    consumer = Consumer(engine)
    pulling, other = _decode(puller, range(10)), make_request([1, 2])
    engine.submit(pulling)
    engine.submit(other)
    assert type(_error(await consumer.wait_terminal(pulling))) is expected
    assert isinstance(await consumer.wait_terminal(other), Finished)
    assert puller.claims[0].num_releases == 1, "the source need not wait for the hand-off to expire"
    assert consumer.tokens[pulling.id] == []
    _check_free(engine)


async def test_a_request_whose_hand_off_lacks_media_fails_and_the_source_is_notified(start_engine: StartEngine) -> None:
    puller = FakePuller()
    engine = await start_engine(FakeRunner(num_embedding_blocks=4, placeholder_id=63), puller=puller)
    consumer = Consumer(engine)
    prompt, media = [1, *[63] * 6], (MediaSpan(bytes(32), 1, 6),)
    lost = make_request(prompt, media=media, hand_off=puller.offer_prefix(prompt, media))
    engine.submit(lost)
    assert type(_error(await consumer.wait_terminal(lost))) is MediaLostError
    await engine.close()
    assert [(claim.copies, claim.num_releases) for claim in puller.claims] == [(None, 1)]
    _check_free(engine)


@pytest.mark.parametrize("kind", RequestKind)
async def test_an_engine_whose_blocks_no_transfer_reaches_refuses_hand_offs_before_it_computes(
    start_engine: StartEngine, kind: RequestKind
) -> None:
    puller, runner = FakePuller(layout=fake_layout()), FakeRunner()
    runner.memory = None  # as on a GPU
    engine = await start_engine(runner, puller=puller)
    consumer = Consumer(engine)
    request = replace(_decode(puller, range(10)), kind=kind)
    if kind is RequestKind.PREFILL:
        request = make_request(range(10), kind=kind)
    engine.submit(request)
    assert type(_error(await consumer.wait_terminal(request))) is NoHandOffError
    assert runner.num_steps == 0
    assert puller.claims == []


async def test_the_source_is_notified_even_if_no_block_has_to_be_copied(start_engine: StartEngine) -> None:
    puller = FakePuller()
    engine = await start_engine(FakeRunner(), puller=puller)
    consumer = Consumer(engine)
    engine.submit(first := make_request(range(8), max_tokens=1))
    await consumer.wait_terminal(first)
    engine.submit(request := _decode(puller, range(8)))
    await consumer.wait_terminal(request)
    assert puller.claims[0].copies == ()
    assert puller.claims[0].has_fetched
    assert consumer.started[request.id].num_cached_tokens == 8


async def test_blocks_of_a_cancelled_pull_stay_until_the_copy_has_stopped(start_engine: StartEngine) -> None:
    puller = FakePuller()
    puller.may_copy.clear()
    puller.copy_stopped.clear()
    engine = await start_engine(FakeRunner(), puller=puller)
    consumer = Consumer(engine)
    request, other = _decode(puller, range(10)), make_request([1, 2])
    engine.submit(request)
    await _wait_event(puller.fetch_began)
    engine.cancel(request.id)
    engine.submit(other)  # goes through the thread after the cancel
    await consumer.wait_terminal(other)
    assert request.id not in consumer.terminal
    assert engine.stats()[0].num_in_use_blocks == 3
    assert puller.num_writing() == 1
    puller.copy_stopped.set()
    assert isinstance(_error(await consumer.wait_terminal(request)), RequestCancelledError)
    assert puller.num_writing() == 0
    _check_free(engine)
    assert puller.claims[0].num_releases == 1


async def test_a_cancel_in_the_same_turn_as_the_submit_ends_the_hand_off(start_engine: StartEngine) -> None:
    puller = FakePuller()
    engine = await start_engine(FakeRunner(), puller=puller)
    consumer = Consumer(engine)
    request = _decode(puller, range(10))
    engine.submit(request)
    engine.cancel(request.id)
    terminal = await consumer.wait_terminal(request)
    assert isinstance(_error(terminal), RequestCancelledError)
    _check_free(engine)
    await engine.close()
    assert puller.claims[0].num_releases == 1


async def test_a_claim_is_open_while_its_request_waits_and_aborted_by_a_cancel(start_engine: StartEngine) -> None:
    puller, gate = FakePuller(), threading.Semaphore(1)
    engine = await start_engine(FakeRunner(step_gate=gate), puller=puller, max_num_seqs=1)
    consumer = Consumer(engine)
    first, request = make_request([1], max_tokens=9), _decode(puller, range(10))
    engine.submit(first)
    engine.submit(request)
    await consumer.wait_tokens(first, 1)
    [claim] = puller.claims
    assert (claim.copies, claim.num_releases) == (None, 0)
    engine.cancel(request.id)
    gate.release(20)
    assert isinstance(_error(await consumer.wait_terminal(request)), RequestCancelledError)
    await consumer.wait_terminal(first)
    assert (claim.copies, claim.num_releases) == (None, 1)


async def test_a_hand_off_of_another_layout_or_kind_is_refused(start_engine: StartEngine) -> None:
    puller = FakePuller()
    engine = await start_engine(FakeRunner(), puller=puller)
    consumer = Consumer(engine)
    other_layout = fake_layout(model_fingerprint="another model")
    blocks = puller.offer(PoolMemory(1, other_layout.piece_size_bytes), other_layout, (0,), 1)
    opaque = HandOff(
        hand_off_id=bytes(16),
        secret=bytes(16),
        worker_id="w",
        epoch=1,
        address="a:1",
        time_to_live=blocks.time_to_live,
        payload=OpaquePayload("other", b""),
    )
    for hand_off in (blocks, opaque):
        engine.submit(request := make_request([1, 2], hand_off=hand_off))
        assert isinstance(_error(await consumer.wait_terminal(request)), LayoutMismatchError)
    assert puller.claims == []


async def test_a_refused_request_releases_its_hand_off(start_engine: StartEngine) -> None:
    puller = FakePuller()
    engine = await start_engine(FakeRunner(), puller=puller)
    consumer = Consumer(engine)
    request = make_request(range(9), hand_off=puller.offer_prefix(range(5)))
    engine.submit(request)
    assert _error(await consumer.wait_terminal(request)).field == "hand_off"
    await engine.close()
    assert puller.claims[0].num_releases == 1


async def test_close_while_pulling_waits_for_the_copy_before_the_pool_goes(start_engine: StartEngine) -> None:
    puller, runner = FakePuller(), FakeRunner()
    puller.may_copy.clear()
    puller.copy_stopped.clear()
    engine = await start_engine(runner, puller=puller)
    consumer = Consumer(engine)
    request = _decode(puller, range(10))
    engine.submit(request)
    await _wait_event(puller.fetch_began)
    closing = asyncio.create_task(engine.close())
    assert isinstance(_error(await consumer.wait_terminal(request)), WorkerUnavailableError)
    assert runner.num_closes == 0
    puller.copy_stopped.set()
    await closing
    assert runner.num_closes == 1
    assert puller.num_writing() == 0


async def test_the_end_of_the_engine_stops_pulls_and_aborts_claims(start_engine: StartEngine) -> None:
    puller, gate = FakePuller(), threading.Semaphore(0)
    puller.may_copy.clear()
    runner = FakeRunner(step_gate=gate)
    engine = await start_engine(runner, puller=puller, max_num_seqs=2)
    consumer = Consumer(engine)
    pulling = _decode(puller, range(10))
    engine.submit(pulling)
    await _wait_event(puller.fetch_began)
    running, waiting = make_request([1]), _decode(puller, range(20, 30))
    engine.submit(running)
    engine.submit(waiting)
    runner.failure = RuntimeError("the device is gone")
    gate.release()
    for request in (pulling, running, waiting):
        assert isinstance(_error(await consumer.wait_terminal(request)), EngineError)
    with pytest.raises(EngineError):
        await consumer.wait_end()
    await engine.close()
    assert [claim.num_releases for claim in puller.claims] == [1, 1]
    assert puller.num_writing() == 0


async def test_many_hand_offs_with_failures_and_cancels_all_end(start_engine: StartEngine) -> None:
    puller = FakePuller()
    engine = await start_engine(FakeRunner(num_blocks=24), puller=puller)
    consumer = Consumer(engine)
    requests = [_decode(puller, [n % 3] * (1 + n % 13), max_tokens=8) for n in range(60)]
    for number, request in enumerate(requests):
        puller.error = TransferError("lost") if number % 10 == 3 else None
        engine.submit(request)
        if number % 7 == 2:
            engine.cancel(request.id)
        await asyncio.sleep(0)
    puller.error = None
    for request in requests:
        terminal = await consumer.wait_terminal(request)
        output = expected_output(request.generation)[1:]
        if isinstance(terminal, Finished):
            assert consumer.tokens[request.id] == output
        else:
            assert isinstance(_error(terminal), TransferError | RequestCancelledError)
    _check_free(engine)
    await engine.close()
    assert all(claim.has_fetched or claim.num_releases for claim in puller.claims)

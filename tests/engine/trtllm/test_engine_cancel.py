"""Requests that are ended early, at each stage, and what is free afterwards."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from quartet.engine.base import EngineRequest, Failed, Prefilled, RequestKind
from quartet.errors import RequestCancelledError, ServingError
from tests.engine.trtllm.engines import TIMES, Running, asked, decode_of, running
from tests.fakes.driving import SPELL, STORY

PREFILL = RequestKind.PREFILL
_SLOW = {"cache_transceiver_config": {"backend": "NIXL", "kv_transfer_timeout_ms": 50}}


pytestmark = pytest.mark.usefixtures("package")


def error_of(end: object) -> ServingError:
    assert isinstance(end, Failed)
    return end.error


async def assert_cancelled(engine: Running, request: EngineRequest) -> None:
    assert isinstance(error_of(await engine.consumer.wait_terminal(request)), RequestCancelledError)
    await engine.until(lambda: engine.control.num_running == 0)
    [stats] = engine.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_queued_prefill_tokens) == (0, 0, 0)
    assert engine.engine.is_alive


@pytest.mark.parametrize("kind", list(RequestKind))
async def test_cancelling_a_request_that_is_queued_or_prefilled(kind: RequestKind) -> None:
    async with running(kind) as engine:
        engine.control.steps.close()
        request = asked(STORY, kind=kind)
        engine.engine.submit(request)
        await asyncio.to_thread(engine.control.steps.wait_reached)
        engine.engine.cancel(request.id)
        engine.engine.cancel(request.id)
        await engine.settle()
        engine.control.steps.open()
        await assert_cancelled(engine, request)
        assert not engine.tokens_of(request)
        assert engine.control.num_held == 0


async def test_cancelling_a_request_that_decodes() -> None:
    async with running() as engine:
        engine.control.steps.close()
        request = asked(STORY, 64)
        engine.engine.submit(request)
        engine.control.steps.let_through(3)
        await engine.consumer.wait_tokens(request, 3)
        engine.engine.cancel(request.id)
        await engine.settle()
        engine.control.steps.open()
        await assert_cancelled(engine, request)
        assert len(engine.tokens_of(request)) == 3


async def test_cancelling_a_request_that_has_ended_changes_nothing() -> None:
    async with running() as engine:
        request = asked(STORY, 2)
        end = await engine.end_of(request)
        engine.engine.cancel(request.id)
        engine.engine.cancel(123_456)
        engine.engine.release(123_456)
        await engine.settle()
        assert engine.consumer.terminal[request.id] == end


async def _pulling(prefill: Running, decode: Running) -> EngineRequest:
    decode.control.transfers.close()
    request = asked(STORY, kind=PREFILL)
    prefilled = await prefill.end_of(request)
    assert isinstance(prefilled, Prefilled)
    going_on = decode_of(request, prefilled)
    decode.engine.submit(going_on)
    await asyncio.to_thread(decode.control.transfers.wait_reached)
    return going_on


async def test_a_cancelled_request_whose_kv_is_on_its_way_ends_when_that_is_here() -> None:
    async with running(PREFILL) as prefill, running() as decode:
        request = await _pulling(prefill, decode)
        decode.engine.cancel(request.id)
        await decode.settle()
        [in_engine] = decode.control._engine._requests
        assert not in_engine.is_aborted
        decode.control.steps.close()
        decode.control.transfers.open()
        decode.control.steps.let_through(2)
        await prefill.until(lambda: prefill.control.num_held == 0)
        decode.control.steps.open()
        await assert_cancelled(decode, request)
        [claim] = decode.puller.claims
        await claim.ended.wait()
        assert claim.has_fetched


async def test_the_wait_for_a_cancelled_pull_is_bounded_and_the_source_is_notified() -> None:
    async with running(PREFILL) as prefill, running(override_engine_args=_SLOW) as decode:
        request = await _pulling(prefill, decode)
        decode.engine.cancel(request.id)
        await assert_cancelled(decode, request)
        [claim] = decode.puller.claims
        await claim.ended.wait()
        assert (claim.has_fetched, claim.num_releases) == (False, 1)


async def test_an_engine_that_does_not_answer_an_abort_is_not_waited_for() -> None:
    async with running(times=replace(TIMES, abort_timeout_s=0.05)) as engine:
        engine.control.steps.close()
        request = asked(STORY)
        engine.engine.submit(request)
        await asyncio.to_thread(engine.control.steps.wait_reached)
        engine.engine.cancel(request.id)
        assert isinstance(error_of(await engine.consumer.wait_terminal(request)), RequestCancelledError)
        engine.control.steps.open()


async def test_a_prefill_that_no_worker_pulls_is_released() -> None:
    async with running(PREFILL) as prefill:
        request = asked(STORY, kind=PREFILL)
        assert isinstance(await prefill.end_of(request), Prefilled)
        [stats] = prefill.engine.stats()
        assert stats.num_held_blocks > 0
        handle = prefill.engine._session.requests._held[request.id]  # type: ignore[union-attr]
        prefill.engine.release(request.id)
        prefill.engine.release(request.id)
        await prefill.settle()
        assert handle.aborted()
        [stats] = prefill.engine.stats()
        assert stats.num_held_blocks == 0
        # The engine has forgotten the request: it keeps what no worker pulls until the transfer's time is over.
        await prefill.end_of(asked(SPELL, 1, PREFILL))
        assert prefill.control.num_held == 1
        prefill.control.expire_transfers()
        await prefill.until(lambda: prefill.control.num_held == 0)

"""Engines on the stand-in, with what tests need of both: one consumer each, hand-offs between them, and control."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any
from unittest import mock

import pytest

from quartet.engine.base import EngineRequest, Prefilled, RequestKind
from quartet.engine.sampling import Sampling
from quartet.engine.trtllm import feeds
from quartet.engine.trtllm.engine import TrtllmEngine
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.kvcache.layout import HandOff, OpaquePayload, PieceLayout
from quartet.transfer.base import FetchResult, PieceCopy, PoolMemory, TransferWay, never
from tests.engine.consumer import Consumer
from tests.engine.fakes import make_request
from tests.engine.trtllm.specs import spec_of
from tests.fakes.driving import token_ids_of
from tests.fakes.installation import installed

WAIT_S = 30.0
#: No canary comes by itself, and a dead engine is soon noticed.
TIMES = TrtllmTimes(warm_up_timeout_s=WAIT_S, canary_interval_s=3_600.0, check_interval_s=0.02)
#: Switches for a release of each line that the adapter knows: 1.2, and the one after it.
LINES: tuple[dict[str, Any], ...] = ({}, {"version": "1.4.0rc1"})
#: For tests with the fixture `package` that take long, or are about 1.2.
ON_1_2 = pytest.mark.parametrize("package", LINES[:1], indirect=True, ids=str)
_ids = count(1)


@dataclass(eq=False)
class OpaqueClaim:
    """A claim on a hand-off whose bytes the engine moves by itself."""

    hand_off: HandOff
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    has_fetched: bool = False
    num_releases: int = 0

    async def fetch(self, copies: Sequence[PieceCopy]) -> FetchResult:
        assert not copies
        self.has_fetched = True
        self.ended.set()
        return FetchResult(TransferWay.GRPC, 0, 0.001)

    async def release(self) -> None:
        self.num_releases += 1
        self.ended.set()


@dataclass(eq=False)
class OpaquePuller:
    """A ``Puller`` of opaque hand-offs alone."""

    claims: list[OpaqueClaim] = field(default_factory=list)

    def attach(self, memory: PoolMemory, layout: PieceLayout, is_busy: Callable[[], bool] = never) -> None:
        raise AssertionError("an engine that moves its own cache has no pool")

    def claim(self, hand_off: HandOff) -> OpaqueClaim:
        self.claims.append(OpaqueClaim(hand_off))
        return self.claims[-1]

    async def close(self) -> None:
        """Nothing is open."""


@dataclass(eq=False)
class Running:
    """An engine that was started, and its consumer."""

    engine: TrtllmEngine
    consumer: Consumer
    puller: OpaquePuller
    control: Any

    async def end_of(self, request: EngineRequest) -> Any:
        """Submit and wait for the end."""
        self.engine.submit(request)
        return await self.consumer.wait_terminal(request)

    async def settle(self) -> None:
        """Wait until the LLM's thread has done all that was posted before."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()
        self.engine._thread.post(lambda: _set_from_thread(loop, done))
        async with asyncio.timeout(WAIT_S):
            await done.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until ``condition`` holds in the stand-in's engine."""
        await asyncio.to_thread(self.control.wait_until, condition)

    def tokens_of(self, request: EngineRequest) -> list[int]:
        return self.consumer.tokens[request.id]

    @property
    def last_call(self) -> dict[str, Any]:
        """Arguments of the latest call of ``generate_async``."""
        arguments: dict[str, Any] = self.control.calls[-1].arguments
        return arguments


@contextmanager
def stand_in(**switches: Any) -> Iterator[Any]:
    """The stand-in with ``switches``, and nothing left of it afterwards."""
    # Each end of an engine waits for the fetches that have begun.
    with installed(**switches) as module, mock.patch.object(feeds, "_FETCH_S", 0.05):
        from tensorrt_llm._stand_in import feeds as upstream
        from tensorrt_llm._stand_in.control import control

        try:
            with mock.patch.object(upstream, "DISPATCH_S", 0.02):
                yield module
        finally:
            control.reset()
            for thread in threading.enumerate():
                if thread.name == "quartet-trtllm":
                    thread.join(WAIT_S)
                    assert not thread.is_alive(), "the LLM's thread ends"


@asynccontextmanager
async def running(
    kind: RequestKind = RequestKind.DECODE, *, times: TrtllmTimes = TIMES, **settings: Any
) -> AsyncIterator[Running]:
    """An engine with ``settings``, closed at the end with its thread; ``stand_in`` is in place."""
    from tensorrt_llm._stand_in.control import control

    puller = OpaquePuller()
    engine = TrtllmEngine(spec_of(**settings), kind, puller, times)
    try:
        await engine.start()
        yield Running(engine, Consumer(engine), puller, control.engines[-1])
    finally:
        await engine.close()


def greedily(max_tokens: int | None, **changes: Any) -> Sampling:
    """What has one answer."""
    return Sampling(temperature=0.0, max_tokens=max_tokens, **changes)


def asked(
    text: str, max_tokens: int | None = 12, kind: RequestKind = RequestKind.DECODE, **changes: Any
) -> EngineRequest:
    """A greedy request."""
    sampling = changes.pop("sampling", None) or greedily(max_tokens)
    return make_request(token_ids_of(text), kind=kind, sampling=sampling, **changes)


def hand_off_of(prefilled: Prefilled, **changes: Any) -> HandOff:
    """What a prefill worker makes of it."""
    assert prefilled.opaque is not None
    given: dict[str, Any] = {
        "hand_off_id": next(_ids).to_bytes(16, "big"),
        "secret": bytes(16),
        "worker_id": "prefill",
        "epoch": 1,
        "address": "127.0.0.1:1",
        "time_to_live": timedelta(seconds=30),
        "payload": OpaquePayload("trtllm", prefilled.opaque),
    }
    return HandOff(**{**given, **changes})


def decode_of(request: EngineRequest, prefilled: Prefilled, **changes: Any) -> EngineRequest:
    """The decode that goes on with a prefill of ``request``."""
    generation = request.generation
    return make_request(
        generation.prompt_token_ids,
        generated=[*generation.generated_token_ids, prefilled.token_id],
        sampling=generation.sampling,
        output=generation.output,
        **{"hand_off": hand_off_of(prefilled), **changes},
    )


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)

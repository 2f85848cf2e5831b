"""A silent worker is given up on by when it was last heard."""

from __future__ import annotations

import asyncio

import pytest

from quartet.engine.base import FinishReason
from quartet.streams.client import outcome_in_time
from quartet.streams.messages import DecodeFinished

TIMEOUT_S = 30.0
FAR_S = 60.0
FINISHED = DecodeFinished(reason=FinishReason.LENGTH, num_output_tokens=3)


class FakeDecode:
    """Ends when ``end`` is set; with ``num_looks`` given, when so many have asked whether it was heard.

    One that ``speaks`` was heard at the very moment of each look.
    """

    def __init__(self, *, num_looks: int = 0, speaks: bool = False) -> None:
        self.end = asyncio.Event()
        self.last_word_at: float | None = None
        self._num_looks_left = num_looks
        self._speaks = speaks
        self._stopped_by: Exception | None = None

    @property
    def received_at(self) -> float | None:
        self._num_looks_left -= 1
        if self._num_looks_left == 0:
            self.end.set()
        return asyncio.get_running_loop().time() if self._speaks else self.last_word_at

    async def outcome(self) -> DecodeFinished:
        await self.end.wait()
        if self._stopped_by is not None:
            raise self._stopped_by
        return FINISHED

    def stop(self, error: Exception) -> None:
        self._stopped_by = error
        self.end.set()


async def test_a_worker_that_starts_and_hangs_is_given_up_long_before_the_start_timeout() -> None:
    decode = FakeDecode()
    waiting = asyncio.create_task(outcome_in_time(decode, start_timeout_s=FAR_S, stall_timeout_s=0.05))
    await asyncio.sleep(0)
    decode.last_word_at = asyncio.get_running_loop().time()
    async with asyncio.timeout(TIMEOUT_S) as limit:
        with pytest.raises(TimeoutError):
            await waiting
    assert not limit.expired()


async def test_a_worker_that_has_not_begun_has_the_whole_start_timeout() -> None:
    decode = FakeDecode(num_looks=9)
    async with asyncio.timeout(TIMEOUT_S):
        assert await outcome_in_time(decode, start_timeout_s=FAR_S, stall_timeout_s=0.01) is FINISHED


async def test_a_worker_that_never_begins_is_given_up_on() -> None:
    async with asyncio.timeout(TIMEOUT_S) as limit:
        with pytest.raises(TimeoutError):
            await outcome_in_time(FakeDecode(), start_timeout_s=0.05, stall_timeout_s=FAR_S)
    assert not limit.expired()


async def test_a_worker_that_goes_on_speaking_is_waited_for() -> None:
    decode = FakeDecode(num_looks=5, speaks=True)
    async with asyncio.timeout(TIMEOUT_S):
        assert await outcome_in_time(decode, start_timeout_s=0.05, stall_timeout_s=0.1) is FINISHED

"""Waits for the end of a decode, but not for a worker that is silent."""

from __future__ import annotations

import asyncio
from typing import Protocol

from quartet.rpc.inner import DecodeFinished


class RunningDecode(Protocol):
    """A decode under way."""

    @property
    def heard_at(self) -> float | None:
        """When the worker last said something of it, monotonic seconds; ``None`` before its first word."""
        ...

    async def outcome(self) -> DecodeFinished | None:
        """Wait for its end; cancelled here, it loses nothing."""
        ...


async def outcome_in_time(
    decode: RunningDecode, *, start_timeout_s: float, stall_timeout_s: float
) -> DecodeFinished | None:
    """What ``decode.outcome`` gives.

    Raises:
        TimeoutError: the worker said nothing of it within ``start_timeout_s``, or nothing more for ``stall_timeout_s``.
        ServingError: it ended badly.
    """
    loop = asyncio.get_running_loop()
    start_by = loop.time() + start_timeout_s
    while True:
        give_up_at = start_by if decode.heard_at is None else decode.heard_at + stall_timeout_s
        try:
            # Looking now and then costs nothing for each token, as moving a timer would. Nobody tells of the first
            # word: one that came may be as old as the time between two looks.
            async with asyncio.timeout_at(min(give_up_at, loop.time() + stall_timeout_s)):
                return await decode.outcome()
        except TimeoutError:
            give_up_at = start_by if decode.heard_at is None else decode.heard_at + stall_timeout_s
            if give_up_at <= loop.time():
                raise

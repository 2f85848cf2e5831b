"""Keeps the prefix index small: predictions that time has passed over, and what gone workers left behind."""

from __future__ import annotations

import asyncio
import time

from router.prefix_index import PrefixIndex

_INTERVAL_S = 0.5
# Some 2 ms of the event loop at a time; a million entries take 50 turns.
_SWEPT_AT_ONCE = 20_000
_PAUSE_S = 0.01


async def keep_up(index: PrefixIndex) -> None:
    """Expire and sweep, little by little. Runs until cancelled."""
    while True:
        index.expire(time.monotonic())
        await asyncio.sleep(_PAUSE_S if index.sweep(_SWEPT_AT_ONCE) else _INTERVAL_S)

"""Work that a stop need not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


async def is_done_before(stop: asyncio.Event, work: Coroutine[object, object, None]) -> bool:
    """Run ``work``; when ``stop`` is set first, cancel it, wait until it has ended, and return false.

    Raises whatever ``work`` raises by itself.
    """
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        working.cancel()  # does nothing to what is done
        await asyncio.wait({working, stopping})
    if working.cancelled():
        return False
    working.result()
    return True

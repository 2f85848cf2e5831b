"""How the time of a write is counted: in polls, which do not run while this process does not."""

from __future__ import annotations

import asyncio
import time

from quartet.rpc.server import StalledCalls

_TIMEOUT_S = 0.1


class Context:
    """A client that takes a message when it may."""

    def __init__(self) -> None:
        self.may_take = asyncio.Event()

    async def write(self, _message: object) -> None:
        await self.may_take.wait()


async def test_a_process_that_got_no_cpu_blames_no_client() -> None:
    context, loop = Context(), asyncio.get_running_loop()
    with StalledCalls(_TIMEOUT_S).watch(context) as call:  # type: ignore[arg-type]
        loop.call_soon(time.sleep, 2 * _TIMEOUT_S)
        # In the turn after the one in which timers run that were due meanwhile.
        loop.call_soon(loop.call_soon, loop.call_soon, context.may_take.set)
        await call.write(b"")
    assert not call.is_stalled

"""Steps' outputs on their way to the one consumer of an engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from quartet.engine.base import StepOutput
from quartet.errors import ServingError


class OutputQueue:
    """Hands steps' outputs to one consumer. Not bounded: the engine never waits for whoever reads."""

    def __init__(self) -> None:
        self._outputs: deque[StepOutput] = deque()
        self._changed = asyncio.Event()
        self._has_ended = False
        self._error: ServingError | None = None

    def put(self, output: StepOutput) -> None:
        """Queue ``output``. Never waits."""
        self._outputs.append(output)
        self._changed.set()

    def end(self, error: ServingError | None = None) -> None:
        """Let the consumer end, with ``error`` if given, after what is queued. Only the first call counts."""
        if not self._has_ended:
            self._has_ended, self._error = True, error
            self._changed.set()

    async def read(self) -> AsyncIterator[StepOutput]:
        """The outputs, in order, until ``end``; then raises its error, if there is one."""
        while True:
            while self._outputs:
                yield self._outputs.popleft()
            if self._has_ended:
                break
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error

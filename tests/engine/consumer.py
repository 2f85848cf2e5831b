"""The one consumer of an engine's outputs in tests: sorts them by request and checks the rules of the seam."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from quartet.engine.base import Engine, EngineRequest, Failed, Finished, Prefilled, Started, StepOutput
from quartet.engine.sampling import TokenLogprobs
from quartet.engine.step_engine import StepEngine
from tests.engine.fakes import WAIT_S, make_request

Terminal: TypeAlias = Finished | Prefilled | Failed
StartEngine: TypeAlias = Callable[..., Awaitable[StepEngine]]


class Consumer:
    """Reads ``engine.outputs()`` until it ends.

    Attributes:
        tokens: output tokens by request, those of the start left out.
        started, terminal: by request.
    """

    def __init__(self, engine: Engine) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.offsets: dict[int, list[int]] = defaultdict(list)
        self.started: dict[int, Started] = {}
        self.terminal: dict[int, Terminal] = {}
        self._engine = engine
        self._changed = asyncio.Condition()
        self._task = asyncio.get_running_loop().create_task(self._read(engine))

    async def wait_terminal(self, request: EngineRequest) -> Terminal:
        """How ``request`` ended."""
        await self._wait(lambda: request.id in self.terminal)
        return self.terminal[request.id]

    async def wait_started(self, request: EngineRequest) -> Started:
        await self._wait(lambda: request.id in self.started)
        return self.started[request.id]

    async def wait_tokens(self, request: EngineRequest, num_tokens: int) -> None:
        await self._wait(lambda: len(self.tokens[request.id]) >= num_tokens)

    async def wait_end(self) -> None:
        """Wait for the end of the outputs; raises what they raise."""
        async with asyncio.timeout(WAIT_S):
            await self._task

    async def wait_seen(self) -> None:
        """Until a step has seen all that was asked of the engine before: by a request that goes through it."""
        request = make_request([1], max_tokens=1)
        self._engine.submit(request)
        await self.wait_terminal(request)

    async def _wait(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(predicate)

    async def _read(self, engine: Engine) -> None:
        async for output in engine.outputs():
            self._take(output)
            async with self._changed:
                self._changed.notify_all()

    def _take(self, output: StepOutput) -> None:
        for started in output.started:
            assert started.id not in self.started, "started once"
            self.started[started.id] = started
        position = 0
        for id, num_tokens, offset in zip(output.ids, output.num_tokens, output.token_offsets, strict=True):
            assert id in self.started
            assert id not in self.terminal, "nothing comes after the end"
            self.tokens[id] += output.token_ids[position : position + num_tokens]
            self.offsets[id] += range(offset, offset + num_tokens)
            position += num_tokens
        assert position == len(output.token_ids)
        for logprobs in output.logprobs:
            self.logprobs[logprobs.id] += logprobs.tokens
        terminals: list[Terminal] = [*output.finished, *output.prefilled, *output.failed]
        for terminal in terminals:
            assert terminal.id not in self.terminal, "one end a request"
            self.terminal[terminal.id] = terminal

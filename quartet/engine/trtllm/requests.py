"""The requests of one LLM: each has a handle, and a task that reads it to its end. Lives on one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quartet.engine.base import EngineRequest, Failed, RequestKind
from quartet.engine.trtllm.calls import Call, CallBuilder
from quartet.engine.trtllm.errors import failure, is_foreseen, refusal
from quartet.engine.trtllm.hand_off import HandOffState
from quartet.engine.trtllm.loading import LoadedLlm
from quartet.engine.trtllm.outputs import OutputCollector
from quartet.engine.trtllm.results import ResultReader
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.errors import EngineError, RequestCancelledError, ServingError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Live:
    """A request whose end is still to come.

    Attributes:
        is_pulling: the KV blocks of its hand-off may be on their way.
        timers: what ends waiting for it.
    """

    request: EngineRequest
    call: Call
    handle: Any
    reader: ResultReader
    private: Any
    is_pulling: bool
    is_cancelled: bool = False
    task: asyncio.Task[None] | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


class LlmRequests:
    """Gives requests to an LLM, and what their handles bring to an ``OutputCollector``."""

    def __init__(
        self,
        loaded: LoadedLlm,
        sampling_fields: frozenset[str],
        outputs: OutputCollector,
        times: TrtllmTimes,
        on_lost: Callable[[Exception], None],
    ) -> None:
        """``on_lost`` hears of errors after which the engine is not usable any more."""
        self._loaded = loaded
        self._calls = CallBuilder(loaded, sampling_fields)
        self._outputs = outputs
        self._times = times
        self._on_lost = on_lost
        self._live: dict[int, _Live] = {}
        self._held: dict[int, Any] = {}
        self.num_blocks = loaded.num_blocks()

    def submit(self, request: EngineRequest, state: HandOffState | None, submitted_at: float) -> None:
        """Give ``request`` to the LLM; its end comes out, refusal included."""
        private = None
        try:
            call = self._calls.call(request, state, self.num_blocks)
            # Before its first event can come.
            private = self._note_private(request)
            handle = self._loaded.llm.generate_async(**call.arguments)
        except Exception as error:  # noqa: BLE001 - the request ends here, and `_refuse` logs
            if private is not None:
                private.end()
            self._refuse(request, error)
            return
        self._loaded.feeds.begin()
        reader = ResultReader(request, call, self._loaded, self._outputs, submitted_at)
        live = _Live(request, call, handle, reader, private, is_pulling=state is not None)
        self._live[request.id] = live
        live.task = asyncio.get_running_loop().create_task(self._read(live), name=f"request-{request.id}")

    def cancel(self, id: int) -> None:
        """End a request; unknown ids are ignored.

        One whose KV blocks are on their way goes on until they are here: aborted earlier, prefill would keep them.
        """
        live = self._live.get(id)
        if live is None or live.is_cancelled:
            return
        live.is_cancelled = True
        if not live.is_pulling:
            self._abort(live)
            return
        timeout_s = self._loaded.arguments.transfer_timeout_s or self._times.transfer_timeout_s
        live.timers.append(asyncio.get_running_loop().call_later(timeout_s, self._abort, live))

    def release(self, id: int) -> None:
        """Let go of what a completed prefill holds; unknown ids are ignored."""
        handle = self._held.pop(id, None)
        if handle is not None:
            # Once its blocks were pulled that changes nothing, and else nobody will pull them.
            handle.abort()
            self._loaded.book.release(id)

    async def close(self) -> None:
        """Abort everything, and read no more."""
        for id in list(self._held):
            self.release(id)
        tasks = [live.task for live in self._live.values() if live.task is not None]
        for live in list(self._live.values()):
            live.handle.abort()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _note_private(self, request: EngineRequest) -> Any:
        """The cache's events don't say that blocks are of a salt, an adapter or media: they must not be told of."""
        generation = request.generation
        is_private = bool(generation.cache_salt or generation.adapter)
        if not is_private and not generation.media and not request.media_inputs:
            return None
        token_ids = [*generation.prompt_token_ids, *generation.generated_token_ids]
        if is_private:
            first = 0
        elif generation.media:
            first = generation.media[0].first_position
        else:  # not laid out yet: from the first placeholder on it becomes another prompt
            placeholder_id = self._loaded.inputs.placeholder_id
            assert placeholder_id is not None, "media are refused else"
            first = token_ids.index(placeholder_id)
        return self._loaded.feeds.note_private(token_ids, first_position=first)

    def _refuse(self, request: EngineRequest, error: Exception) -> None:
        if not is_foreseen(error, self._loaded.package.RequestError):
            logger.error("request %s could not be given to the engine", request.id, exc_info=error)
        self._loaded.book.end(request.id)
        self._outputs.fail(Failed(request.id, refusal(error, self._loaded.package.RequestError)))

    async def _read(self, live: _Live) -> None:
        id = live.request.id
        error: ServingError | None
        try:
            error = await self._read_outcome(live)
        except asyncio.CancelledError:
            error = RequestCancelledError("the request was cancelled")
        except Exception as raised:  # noqa: BLE001 - the request's task ends here, and `_failure` logs
            if isinstance(raised, ServingError):
                live.handle.abort()  # it is ours, so that the engine goes on with the request
            error = self._failure(live, raised)
            if error is None:
                self._on_lost(raised)
                error = EngineError(f"the engine is lost: {type(raised).__name__}")
        self._forget(live, is_held=error is None and id in self._held)
        if error is not None:
            self._outputs.fail(Failed(id, error))

    async def _read_outcome(self, live: _Live) -> ServingError | None:
        """Read the handle to its end; how that was, unless it went well."""
        if live.request.kind is RequestKind.PREFILL:
            await live.handle
            error = live.reader.take_prefill(live.handle)
            if error is None and live.reader.is_handed_off:
                self._held[live.request.id] = live.handle
            elif error is not None:
                live.handle.abort()
            return error
        async for result in live.handle:
            live.is_pulling = False
            live.reader.take_step(result)
            if live.is_cancelled and not live.reader.has_ended:
                self._abort(live)
        return live.reader.end_of_decode(live.handle)

    def _failure(self, live: _Live, raised: Exception) -> ServingError | None:
        request = live.request
        error = failure(
            raised,
            self._loaded.package.RequestError,
            request,
            is_pulling=live.is_pulling,
            awaits_media=not live.reader.has_started and any(isinstance(kept, bytes) for kept in request.media_inputs),
        )
        if live.is_cancelled and error is not None:
            return RequestCancelledError("the request was cancelled")
        # A grammar may be anything, what it is quoted in too.
        if isinstance(error, EngineError) and request.generation.sampling.guided is None:
            logger.warning("the engine failed request %s: %s", request.id, raised)
        return error

    def _forget(self, live: _Live, *, is_held: bool) -> None:
        self._live.pop(live.request.id, None)
        for timer in live.timers:
            timer.cancel()
        if live.private is not None:
            live.private.end()
        self._loaded.book.end(live.request.id, is_held=is_held)
        if self._loaded.metrics is not None and live.handle.finished:
            self._loaded.metrics.log(live.handle)

    def _abort(self, live: _Live) -> None:
        live.is_pulling = False
        live.handle.abort()
        if live.task is not None:
            timer = asyncio.get_running_loop().call_later(self._times.abort_timeout_s, live.task.cancel)
            live.timers.append(timer)

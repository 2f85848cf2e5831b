"""The requests of one LLM: each has a handle, and a task that reads it to its end. Lives on one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quartet.engine.base import EngineRequest, Failed, RequestKind
from quartet.engine.trtllm.calls import Call, CallBuilder
from quartet.engine.trtllm.errors import failure, is_foreseen, loss_of, refusal, trace_of
from quartet.engine.trtllm.hand_off import HandOffState
from quartet.engine.trtllm.inputs import MediaItem
from quartet.engine.trtllm.loading import LoadedLlm
from quartet.engine.trtllm.outputs import OutputCollector
from quartet.engine.trtllm.results import ResultReader
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.errors import EngineError, RequestCancelledError, ServingError

logger = logging.getLogger(__name__)

# Prompts whose media are decoded at a time: that is work of a processor, and pictures are large then.
_MAX_MEDIA_READERS = 4


class _HandleError(Exception):
    """What a handle raised, which may be the engine's death: nothing else is."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


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
        # Other streams go on while pictures are decoded.
        self._media_readers = ThreadPoolExecutor(_MAX_MEDIA_READERS, thread_name_prefix="quartet-trtllm-media")
        self._reading: dict[int, tuple[EngineRequest, asyncio.Future[Sequence[MediaItem]]]] = {}
        self.num_blocks = loaded.num_blocks()

    def submit(self, request: EngineRequest, state: HandOffState | None, submitted_at: float) -> None:
        """Give ``request`` to the LLM; its end comes out, refusal included."""
        if not self._loaded.inputs.has_media(request):
            self._start(request, state, submitted_at)
            return
        try:
            self._calls.check(request, self.num_blocks)
        except ServingError as error:
            self._refuse(request, error)
            return
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._media_readers, self._loaded.inputs.read_media, request)
        self._reading[request.id] = request, reading
        reading.add_done_callback(lambda _: self._take_media(request, reading, submitted_at))

    def _take_media(
        self, request: EngineRequest, reading: asyncio.Future[Sequence[MediaItem]], submitted_at: float
    ) -> None:
        error = None if reading.cancelled() else reading.exception()
        if self._reading.pop(request.id, None) is None:
            return  # it was cancelled
        if isinstance(error, Exception):
            self._refuse(request, error)
        else:
            self._start(request, None, submitted_at, reading.result())

    def _start(
        self,
        request: EngineRequest,
        state: HandOffState | None,
        submitted_at: float,
        media: Sequence[MediaItem] | None = None,
    ) -> None:
        private = None
        try:
            call = self._calls.call(request, state, self.num_blocks, media)
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
        request, reading = self._reading.pop(id, (None, None))
        if request is not None and reading is not None:
            reading.cancel()
            self._refuse(request, RequestCancelledError("the request was cancelled"))
            return
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
        for _, reading in self._reading.values():
            reading.cancel()
        self._reading.clear()
        for id in list(self._held):
            self.release(id)
        tasks = [live.task for live in self._live.values() if live.task is not None]
        for live in list(self._live.values()):
            live.handle.abort()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        # What they read is freed after this.
        await asyncio.to_thread(self._media_readers.shutdown, cancel_futures=True)

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
            logger.error("request %s could not be given to the engine: %s", request.id, trace_of(error))
        self._loaded.book.end(request.id)
        self._outputs.fail(Failed(request.id, refusal(error, self._loaded.package.RequestError)))

    async def _read(self, live: _Live) -> None:
        id = live.request.id
        error: ServingError | None
        try:
            error = await self._read_outcome(live)
        except asyncio.CancelledError:
            error = RequestCancelledError("the request was cancelled")
        except _HandleError as raised:
            error = self._failure(live, raised.error)
        except Exception as raised:  # noqa: BLE001 - the request's task ends here, and `_misread` logs
            error = self._misread(live, raised)
        self._forget(live, is_held=error is None and id in self._held)
        if error is not None:
            self._outputs.fail(Failed(id, error))
        if self._loaded.metrics is not None and live.handle.finished:
            self._loaded.metrics.log(live.handle)

    async def _read_outcome(self, live: _Live) -> ServingError | None:
        """Read the handle to its end; how that was, unless it went well.

        Raises:
            _HandleError: the handle did not bring its end.
        """
        is_prefill = live.request.kind is RequestKind.PREFILL
        async with aclosing(_results(live.handle, streams=not is_prefill)) as results:
            async for result in results:
                if is_prefill:
                    return self._take_prefill(live, result)
                live.is_pulling = False
                live.reader.take_step(result)
                if live.is_cancelled and not live.reader.has_ended:
                    self._abort(live)
        return live.reader.end_of_decode(live.handle)

    def _take_prefill(self, live: _Live, result: Any) -> ServingError | None:
        error = live.reader.take_prefill(result)
        if error is None and live.reader.is_handed_off:
            self._held[live.request.id] = live.handle
        elif error is not None:
            live.handle.abort()
        return error

    def _misread(self, live: _Live, raised: Exception) -> ServingError:
        """The engine is well and goes on with the request, of which we can't read what came."""
        live.handle.abort()
        if live.is_cancelled:
            return RequestCancelledError("the request was cancelled")
        if isinstance(raised, ServingError):
            return raised
        logger.error("request %s: what came of it can't be read: %s", live.request.id, trace_of(raised))
        return EngineError(f"what came of the request can't be read: {type(raised).__name__}")

    def _failure(self, live: _Live, raised: Exception) -> ServingError:
        request = live.request
        error = failure(
            raised,
            self._loaded.package.RequestError,
            request,
            is_pulling=live.is_pulling,
            awaits_media=not live.reader.has_started and any(isinstance(kept, bytes) for kept in request.media_inputs),
        )
        if error is None:
            self._on_lost(raised)
            return loss_of(raised)
        if live.is_cancelled:
            return RequestCancelledError("the request was cancelled")
        if isinstance(error, EngineError):
            logger.warning("the engine failed request %s: %s", request.id, trace_of(raised))
        return error

    def _forget(self, live: _Live, *, is_held: bool) -> None:
        self._live.pop(live.request.id, None)
        for timer in live.timers:
            timer.cancel()
        if live.private is not None:
            live.private.end()
        self._loaded.book.end(live.request.id, is_held=is_held)

    def _abort(self, live: _Live) -> None:
        live.is_pulling = False
        if live.task is not None:
            timer = asyncio.get_running_loop().call_later(self._times.abort_timeout_s, live.task.cancel)
            live.timers.append(timer)
        live.handle.abort()


async def _results(handle: Any, *, streams: bool) -> AsyncGenerator[Any, None]:
    """What ``handle`` holds after each step, or at the end. Raises ``_HandleError`` for whatever it raises."""
    try:
        if streams:
            async for result in handle:
                yield result
        else:
            await handle
            yield handle
    except Exception as error:
        raise _HandleError(error) from error

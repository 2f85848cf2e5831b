"""Pictures that TensorRT-LLM's ``MultimodalEncoder`` encodes and keeps, each until one prefill worker has taken it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quartet.engine.encoder import EncodedState, EncoderStats, EncodeTimes
from quartet.engine.trtllm.encoder_thread import (
    EncodedPicture,
    EncoderListener,
    EncoderThread,
    PictureJob,
    PictureOutcome,
)
from quartet.engine.trtllm.inputs import host_name
from quartet.engine.trtllm.media_model import MediaModel
from quartet.engine.trtllm.media_sizer import FileSizes
from quartet.engine.trtllm.media_state import PictureState, write_state
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.errors import EngineError, ServingError, WorkerUnavailableError
from quartet.media.items import MediaFile, MediaKind

_LOG = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 30.0  # for the batch that is being encoded


class PictureStates:
    """See ``StateEncoder``: pictures, by ``MultimodalEncoder``. Its book is kept on the event loop."""

    kinds = frozenset({MediaKind.IMAGE})

    def __init__(
        self, model: MediaModel, make: Callable[[], Any], max_batch_size: int, times: TrtllmTimes | None = None
    ) -> None:
        """Load nothing yet; ``make`` loads a ``MultimodalEncoder``, on a thread of its own."""
        self._model = model
        self._make = make
        self._max_batch_size = max_batch_size
        self._times = times or TrtllmTimes()
        self._sizes = FileSizes(model)
        self._host = host_name()
        self._stats = EncoderStats()
        self._thread: EncoderThread | None = None
        self._lost: ServingError | None = None
        self._is_closed = False
        self._waiting: dict[PictureJob, _Waiting] = {}
        self._held: dict[int, EncodedPicture] = {}
        self._has_settled = asyncio.Event()  # it is ready, or lost

    @property
    def is_alive(self) -> bool:
        """False once it has died, or hangs."""
        thread = self._thread
        return self._lost is None and (thread is None or not (thread.is_shut_down or thread.is_overdue))

    @property
    def num_held(self) -> int:
        """Pictures that are kept for somebody."""
        return len(self._held)

    @property
    def stats(self) -> EncoderStats:
        """How it is. May be read on any thread."""
        return self._stats

    async def start(self) -> None:
        """Load, and encode a picture. Raises ``ServingError`` naming what is wrong."""
        on_loop = _OnLoop(asyncio.get_running_loop())
        self._thread = EncoderThread(
            self._make,
            EncoderListener(
                on_ready=lambda: on_loop.call(self._has_settled.set),
                on_begin=lambda jobs: on_loop.call(self._on_begin, len(jobs)),
                on_outcomes=lambda outcomes: on_loop.call(self._on_outcomes, outcomes),
                on_lost=lambda error: on_loop.call(self._on_lost, error),
            ),
            placeholder=self._model.placeholder,
            max_batch_size=self._max_batch_size,
            max_pixels=self._model.max_pixels,
            times=self._times,
        )
        await self._wait_settled(self._thread)
        if self._lost is not None:
            raise self._lost

    async def encode(self, holder: int, file: MediaFile) -> EncodedState:
        """See ``StateEncoder``."""
        size = await asyncio.to_thread(self._sizes.size, file)
        if self._is_closed or self._thread is None:
            raise _closed()
        if not self.is_alive:
            raise _broken()
        job = PictureJob(data=file.data, num_tokens=size.num_tokens)
        waiting = _Waiting(job, time.monotonic(), asyncio.get_running_loop().create_future())
        self._waiting[job] = waiting
        self._count()
        self._thread.post(job)
        try:
            outcome = await waiting.done
        except asyncio.CancelledError:
            job.is_wanted = False
            self._waiting.pop(job, None)
            if waiting.done.done() and not waiting.done.cancelled() and waiting.done.exception() is None:
                self._drop(waiting.done.result().end)
            self._count()
            raise
        if isinstance(outcome.end, ServingError):
            raise outcome.end
        return self._keep(holder, outcome.end, outcome, waiting.queued_at)

    def release(self, holder: int, *, was_taken: bool) -> None:
        """See ``StateEncoder``."""
        picture = self._held.pop(holder, None)
        if not was_taken:
            self._drop(picture)

    async def close(self) -> None:
        """Free everything, in bounded time. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_all(_closed())
        self._held.clear()
        if self._thread is None:
            return
        self._thread.stop()
        if not await asyncio.to_thread(self._thread.join, self._close_timeout_s(self._thread)):
            _LOG.error("the encoder of TensorRT-LLM could not be shut down: processes of it may hold the GPU's memory")

    async def _wait_settled(self, thread: EncoderThread) -> None:
        """However long it loads; its first picture is to come in time."""
        while not self._has_settled.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_settled.wait(), self._times.look_interval_s)
            if thread.is_overdue and not self._has_settled.is_set():
                raise EngineError("the encoder of TensorRT-LLM loaded, but does not encode a picture")

    def _close_timeout_s(self, thread: EncoderThread) -> float:
        """A load takes its time, whoever waits; what hangs already has had its time."""
        if not self._has_settled.is_set() or thread.is_overdue:
            return 0.0
        return _CLOSE_TIMEOUT_S if self._lost is None else self._times.close_timeout_s

    def _keep(self, holder: int, picture: EncodedPicture, outcome: PictureOutcome, queued_at: float) -> EncodedState:
        state = PictureState(
            width=picture.width,
            height=picture.height,
            handle=picture.handle,
            hashes=picture.hashes,
            host=self._host,
        )
        try:
            written = write_state(state)
        except EngineError:
            self._drop(picture)
            raise
        self._held[holder] = picture
        return EncodedState(written, EncodeTimes(max(outcome.began_at - queued_at, 0.0), outcome.compute_s))

    def _drop(self, picture: EncodedPicture | ServingError | None) -> None:
        if isinstance(picture, EncodedPicture) and self._thread is not None:
            self._thread.drop(picture.handle)

    def _on_begin(self, num_jobs: int) -> None:
        self._stats = replace(self._stats, num_running=num_jobs)
        self._count()

    def _on_outcomes(self, outcomes: Sequence[PictureOutcome]) -> None:
        num_failed = 0
        for outcome in outcomes:
            waiting = self._waiting.pop(outcome.job, None)
            num_failed += isinstance(outcome.end, ServingError)
            if waiting is None or waiting.done.done():
                self._drop(outcome.end)  # who waited is gone
            else:
                waiting.done.set_result(outcome)
        stats = self._stats
        self._stats = replace(
            stats,
            num_running=0,
            num_steps=stats.num_steps + 1,
            num_items=stats.num_items + len(outcomes) - num_failed,
            num_failed=stats.num_failed + num_failed,
        )
        self._count()

    def _on_lost(self, error: Exception) -> None:
        if self._has_settled.is_set():
            self._lost = _broken()
        elif isinstance(error, ServingError):
            self._lost = error
        else:
            self._lost = EngineError(f"the encoder of TensorRT-LLM cannot be started: {error}")
        self._has_settled.set()
        self._fail_all(_broken())

    def _fail_all(self, error: ServingError) -> None:
        for waiting in self._waiting.values():
            waiting.job.is_wanted = False
            if not waiting.done.done():
                waiting.done.set_exception(error)
        self._waiting.clear()
        self._count()

    def _count(self) -> None:
        num_waiting = max(len(self._waiting) - self._stats.num_running, 0)
        self._stats = replace(self._stats, num_waiting=num_waiting)


@dataclass(eq=False)
class _Waiting:
    """Who waits for a picture."""

    job: PictureJob
    queued_at: float
    done: asyncio.Future[PictureOutcome]


class _OnLoop:
    """Calls on an event loop, from other threads; none once that is closed, as nobody listens any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _broken() -> EngineError:
    return EngineError("the encoder of TensorRT-LLM broke")


def _closed() -> WorkerUnavailableError:
    return WorkerUnavailableError("the encoder is closed")

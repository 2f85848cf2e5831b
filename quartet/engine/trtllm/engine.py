"""TensorRT-LLM as an engine: the event loop's half. The other half is ``LlmSession``, on ``LlmThread``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from quartet.engine.base import EngineCapabilities, EngineRequest, EngineStats, Failed, RequestKind, StepOutput
from quartet.engine.step_engine import OutputQueue
from quartet.engine.trtllm.arguments import Use, llm_arguments
from quartet.engine.trtllm.book import engine_stats
from quartet.engine.trtllm.claims import Claims
from quartet.engine.trtllm.errors import loss_of, start_error_of, trace_of
from quartet.engine.trtllm.hand_off import HandOffState
from quartet.engine.trtllm.llm_thread import LlmThread
from quartet.engine.trtllm.loading import LoadedLlm, loaded_llm
from quartet.engine.trtllm.package import check_installed
from quartet.engine.trtllm.sampling import sampling_fields
from quartet.engine.trtllm.session import LlmSession, SessionListener
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.errors import ServingError, UnsupportedFieldError, WorkerUnavailableError
from quartet.transfer.base import EmbeddingMemory, Puller

if TYPE_CHECKING:
    from quartet.engine.settings import EngineSpec

logger = logging.getLogger(__name__)

_USES = {RequestKind.PREFILL: Use.PREFILL, RequestKind.DECODE: Use.DECODE}


class TrtllmEngine:
    """An ``Engine`` on ``tensorrt_llm.LLM``, which schedules, pages and moves its KV cache by itself.

    Resumed requests get the same tokens with greedy sampling only. Anything that it raises but the failure of a request
    is the end: every live request fails with ``EngineError`` and ``is_alive`` is false from then on.
    """

    def __init__(self, spec: EngineSpec, kind: RequestKind, puller: Puller, times: TrtllmTimes | None = None) -> None:
        """Nothing is loaded before ``start``.

        Args:
            spec: what to load.
            kind: of the requests that it is for.
            puller: keeps hand-offs alive until their KV has moved; it stays the caller's to close, after the engine.
            times: what bounds its waits.

        Raises:
            ConfigError: a setting that TensorRT-LLM does not allow, or it is not installed.
        """
        check_installed()
        self._arguments = llm_arguments(spec, _USES[kind])
        self._kind = kind
        self._times = times or TrtllmTimes()
        self._sampling_fields = sampling_fields(self._arguments)
        self._thread = LlmThread(
            lambda: loaded_llm(spec, kind, self._arguments, self._on_feeds), self._make_session, self._on_lost
        )
        self._claims = Claims(puller, can_pull=self._arguments.has_transceiver)
        self._outputs = OutputQueue()
        self._live: set[int] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[LlmSession] | None = None
        self._session: LlmSession | None = None
        self._capabilities: EngineCapabilities | None = None
        self._wants_kv_snapshot = False
        self._end_error: ServingError | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        """What it can do; valid after ``start``."""
        assert self._capabilities is not None, "the engine was not started"
        return self._capabilities

    @property
    def memory(self) -> None:
        """None: it moves its own cache."""
        return None

    @property
    def embeddings(self) -> EmbeddingMemory | None:
        """Where it reads embeddings of media; ``None``: it takes none."""
        return None if self._session is None else self._session.loaded.inputs.embeddings

    @property
    def is_alive(self) -> bool:
        """Whether it was started, has not ended, and answers what any engine can answer."""
        session = self._session
        return session is not None and self._end_error is None and not session.is_hanging

    async def start(self) -> None:
        """Load and warm up. Raises ``ServingError`` or ``ConfigError`` naming what is wrong; ``close`` even then."""
        self._check_alive()
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._thread.start()
        session = await self._ready
        self._check_alive()
        self._session = session
        self._capabilities = self._describe(session)
        self._take_feeds()  # what was told before, it will not be told of again

    def submit(self, request: EngineRequest) -> None:
        """Queue ``request``; every outcome, refusal included, arrives in ``outputs``.

        Raises:
            EngineError, WorkerUnavailableError: it died or was closed; nothing comes out any more.
        """
        assert self._session is not None, "the engine was not started"
        assert request.id not in self._live, "an id is used once"
        self._check_alive()
        session, submitted_at = self._session, time.monotonic()
        try:
            state = self._accept(request)
        except ServingError as error:
            self._outputs.put(StepOutput(failed=(Failed(request.id, error),)))
            return
        self._live.add(request.id)
        session.loaded.book.add(request)
        self._thread.post(lambda: session.submit(request, state, submitted_at))

    def cancel(self, id: int) -> None:
        """End a request; its ``failed`` (or how it had already ended) still arrives. Unknown ids are ignored.

        One whose KV cache is on its way ends only when that is here, or its time is over.
        """
        session = self._session
        if session is not None and id in self._live:
            self._thread.post(lambda: session.cancel(id))

    def release(self, id: int) -> None:
        """Let go of the blocks that a completed prefill holds. Unknown ids are ignored."""
        session = self._session
        if session is not None:
            self._thread.post(lambda: session.release(id))

    def request_kv_snapshot(self) -> None:
        """Have one of the next outputs carry a ``kv_snapshot``; one answers all requests before it."""
        if self._loop is not None and not self._wants_kv_snapshot:
            self._wants_kv_snapshot = True
            self._loop.call_soon(self._take_feeds)

    def outputs(self) -> AsyncIterator[StepOutput]:
        """The outputs, in order, for one consumer. Ends after ``close``; raises ``EngineError`` when it died."""
        return self._outputs.read()

    def stats(self) -> Sequence[EngineStats]:
        """What is known of each rank's load."""
        session = self._session
        if session is None:
            return (EngineStats(),) * self._arguments.num_ranks
        ranks = engine_stats(session.loaded.book, session.loaded.feeds)
        first = replace(ranks[0], num_steps=ranks[0].num_steps + session.num_canaries)
        return (first, *ranks[1:])

    async def close(self) -> None:
        """Fail what still runs, shut the LLM down, free everything. Bounded in time; may be called twice.

        Loading can't be interrupted and is not waited for: its thread shuts the LLM down as soon as it has it.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    def _accept(self, request: EngineRequest) -> HandOffState | None:
        rank, num_ranks = request.generation.data_parallel_rank, self._arguments.num_ranks
        if rank >= num_ranks:
            message = f"this engine has data-parallel ranks 0 to {num_ranks - 1}"
            raise UnsupportedFieldError(message, field="data_parallel_rank")
        if request.hand_off is None:
            return None
        assert self._session is not None, "started"
        return self._claims.open(request, self._session.loaded.cache)

    def _make_session(self, loaded: LoadedLlm) -> LlmSession:
        listener = SessionListener(on_ready=self._on_ready, on_output=self._on_output, on_lost=self._on_lost)
        return LlmSession(loaded, self._sampling_fields, self._times, listener)

    def _describe(self, session: LlmSession) -> EngineCapabilities:
        loaded, arguments = session.loaded, self._arguments
        return EngineCapabilities(
            kinds=frozenset({self._kind}),
            sampling_fields=self._sampling_fields,
            model_fingerprint=loaded.facts.fingerprint,
            vocab_size=loaded.facts.vocab_size,
            max_model_len=loaded.facts.max_model_len,
            block_size=arguments.block_size,
            num_blocks=session.num_blocks,
            data_parallel_size=arguments.num_ranks,
            adapters=tuple(loaded.facts.adapters),
            placeholder_id=loaded.inputs.placeholder_id,
            reads_media=loaded.inputs.reads_media,
            metrics=None if loaded.metrics is None else loaded.metrics.collect,
        )

    # Called on the LLM's thread, and on the feeds'.

    def _on_ready(self, session: LlmSession) -> None:
        self._tell(lambda: self._take_ready(session))

    def _on_output(self, output: StepOutput) -> None:
        self._tell(lambda: self._take_output(output))

    def _on_lost(self, error: Exception) -> None:
        self._tell(lambda: self._take_loss(error))

    def _on_feeds(self) -> None:
        self._tell(self._take_feeds)

    def _tell(self, hear: Callable[[], None]) -> None:
        assert self._loop is not None, "started"
        # RuntimeError: the loop is closed, so nobody listens any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(hear)

    # Called on the event loop.

    def _take_ready(self, session: LlmSession) -> None:
        assert self._ready is not None, "start waits"
        if not self._ready.done():
            self._ready.set_result(session)

    def _take_output(self, output: StepOutput) -> None:
        if self._end_error is not None:
            return
        self._claims.follow(output)
        for ended in (output.finished, output.prefilled, output.failed):
            self._live.difference_update(item.id for item in ended)
        self._outputs.put(output)

    def _take_feeds(self) -> None:
        session = self._session
        if session is None or self._end_error is not None:
            return
        wants_snapshot, self._wants_kv_snapshot = self._wants_kv_snapshot, False
        feeds = session.loaded.feeds
        # In this order: the snapshot is of all that was taken.
        events = feeds.take_kv_events()
        snapshot = feeds.kv_snapshot() if wants_snapshot else None
        if events or snapshot is not None:
            self._outputs.put(StepOutput(kv_events=events, kv_snapshot=snapshot))

    def _take_loss(self, error: Exception) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(start_error_of(error))
        loss = loss_of(error)
        if self._end_error is None:
            logger.error("%s: %s", loss.message, trace_of(error))
        self._end(loss)
        self._outputs.end(loss)

    def _check_alive(self) -> None:
        if error := self._end_error:
            raise type(error)(error.message)

    def _end(self, error: ServingError) -> None:
        """Fail all that live; nothing that comes later is given out."""
        if self._end_error is not None:
            return
        self._end_error = error
        if self._live:
            self._outputs.put(StepOutput(failed=tuple(Failed(id, error) for id in sorted(self._live))))
        self._live.clear()
        self._claims.stop_all()

    async def _close(self) -> None:
        self._end(WorkerUnavailableError("the engine was closed"))
        self._outputs.end()
        await self._claims.close(self._times.close_timeout_s)
        if self._ready is None:
            return
        self._thread.stop()
        if not self._ready.done():
            self._ready.set_exception(WorkerUnavailableError("the engine was closed"))
            self._ready.exception()  # nobody may wait for it any more
            return
        if self._ready.cancelled():
            return  # it may be loading still
        if not await asyncio.to_thread(self._thread.wait_ended, self._times.close_timeout_s):
            logger.error("the LLM has not shut down within %s s", self._times.close_timeout_s)

"""The engine on a model runner: the event loop's half. The other half is ``EngineThread``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, fields, replace

from quartet.engine.base import (
    EngineCapabilities,
    EngineRequest,
    EngineStats,
    Failed,
    RequestKind,
    StepOutput,
)
from quartet.engine.pulls import Pulls
from quartet.engine.runner import ModelRunner
from quartet.engine.sampling import OutputOptions, Sampling
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_loop import (
    Cancel,
    Fetched,
    FetchFailed,
    Message,
    Release,
    Snapshot,
    StepLoop,
    StepReport,
    Submit,
    TakeKvSnapshot,
    num_prefill_tokens,
)
from quartet.engine.validation import blocks_payload
from quartet.errors import (
    EngineError,
    ServingError,
    UnsupportedFieldError,
    WorkerUnavailableError,
)
from quartet.kvcache.layout import HandOff
from quartet.transfer.base import EmbeddingMemory, FetchResult, PoolMemory, Puller

logger = logging.getLogger(__name__)

#: Every field of ``Sampling`` and ``OutputOptions`` but grammars, which no sampler here follows.
ALL_SAMPLING_FIELDS = frozenset(item.name for options in (Sampling, OutputOptions) for item in fields(options)) - {
    "guided"
}


class StepEngine:
    """An ``Engine`` that schedules and pages by itself and leaves the computing to a ``ModelRunner``.

    A request's tokens depend on nothing but the request, as far as the runner's do. An exception of the runner is the
    end: every live request fails with ``EngineError`` and ``is_alive`` is false from then on.
    """

    def __init__(
        self,
        runner_factory: Callable[[], ModelRunner],
        config: SchedulerConfig,
        *,
        puller: Puller | None = None,
        kinds: frozenset[RequestKind] = frozenset(RequestKind),
        sampling_fields: frozenset[str] = ALL_SAMPLING_FIELDS,
        close_timeout_s: float = 10.0,
    ) -> None:
        """Nothing is loaded before ``start``.

        Args:
            runner_factory: loads and warms up; called in the engine thread.
            config: bounds of a step.
            puller: fetches hand-offs, which are refused without one. It stays the caller's to close, after the engine.
            kinds: what to announce.
            sampling_fields: what the runner's sampler honours.
            close_timeout_s: bounds the wait for transfers in ``close``, and then that for the last step.
        """
        self._thread_end = asyncio.Event()
        listener = ThreadListener(
            on_ready=self._on_ready, on_report=self._on_report, on_lost=self._on_lost, on_end=self._thread_end.set
        )
        self._thread = EngineThread(runner_factory, config, listener)
        self._puller = puller
        self._pulls = Pulls(puller, self._end_pull) if puller is not None else None
        self._kinds = kinds
        self._sampling_fields = sampling_fields
        self._close_timeout_s = close_timeout_s
        self._capabilities: EngineCapabilities | None = None
        self._memory: PoolMemory | None = None
        self._embeddings: EmbeddingMemory | None = None
        self._live: set[int] = set()
        self._num_submits = 0
        self._num_submitted_prefill_tokens = 0
        self._outputs = OutputQueue()
        self._ready: asyncio.Future[ModelRunner] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._end_error: ServingError | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        """What it can do; valid after ``start``."""
        assert self._capabilities is not None, "the engine was not started"
        return self._capabilities

    @property
    def memory(self) -> PoolMemory | None:
        """Its block pool as bytes, for transfers out."""
        return self._memory

    @property
    def embeddings(self) -> EmbeddingMemory | None:
        """Where it reads embeddings of media; ``None``: its model takes none."""
        return self._embeddings

    @property
    def is_alive(self) -> bool:
        """Whether it was started and steps on."""
        return self._capabilities is not None and self._end_error is None

    async def start(self) -> None:
        """Load, warm up and begin stepping. Raises ``ServingError`` naming what is wrong; ``close`` even then."""
        self._ready = asyncio.get_running_loop().create_future()
        self._thread.start()
        runner = await self._ready
        self._check_alive()
        if self._puller is not None and runner.memory is not None:
            self._puller.attach(runner.memory, runner.layout)
        self._memory = runner.memory
        self._embeddings = runner.embeddings
        self._capabilities = EngineCapabilities(
            kinds=self._kinds,
            sampling_fields=self._sampling_fields,
            model_fingerprint=runner.layout.model_fingerprint,
            vocab_size=runner.vocab_size,
            max_model_len=runner.max_model_len,
            block_size=runner.layout.block_size,
            num_blocks=runner.num_blocks,
            layout=runner.layout,
            placeholder_id=runner.placeholder_id,
        )

    def submit(self, request: EngineRequest) -> None:
        """Queue ``request``; every outcome, refusal included, arrives in ``outputs``.

        Raises:
            EngineError, WorkerUnavailableError: the engine died or was closed; nothing comes out any more.
        """
        assert self._capabilities is not None, "the engine was not started"
        assert request.id not in self._live, "an id is used once"
        self._check_alive()
        try:
            if request.hand_off is not None:
                self._claim(request.id, request.hand_off)
        except ServingError as error:
            self._outputs.put(StepOutput(failed=(Failed(request.id, error),)))
            return
        self._live.add(request.id)
        self._num_submits += 1
        self._num_submitted_prefill_tokens += num_prefill_tokens(request)
        self._thread.post(Submit(request, time.monotonic()))

    def cancel(self, id: int) -> None:
        """End a request at the next step; its ``failed`` (or how it had already ended) still arrives."""
        if id in self._live:
            self._thread.post(Cancel(id))

    def release(self, id: int) -> None:
        """Let go of the blocks that a completed prefill holds. Unknown ids are ignored."""
        self._thread.post(Release(id))

    def request_kv_snapshot(self) -> None:
        """Have one of the next outputs carry a ``kv_snapshot``; one answers all requests before it."""
        self._thread.post(TakeKvSnapshot())

    def outputs(self) -> AsyncIterator[StepOutput]:
        """The steps' outputs, in order, for one consumer. Ends after ``close``; raises ``EngineError`` when it died."""
        return self._outputs.read()

    def stats(self) -> Sequence[EngineStats]:
        """The latest step's statistics; requests that no step has seen yet are counted as waiting."""
        snapshot = self._thread.snapshot
        stats = snapshot.stats
        num_unseen = self._num_submits - snapshot.num_submits
        if not num_unseen:
            return (stats,)
        num_unseen_tokens = self._num_submitted_prefill_tokens - snapshot.num_submitted_prefill_tokens
        stats = replace(
            stats,
            num_waiting=stats.num_waiting + num_unseen,
            num_queued_prefill_tokens=stats.num_queued_prefill_tokens + num_unseen_tokens,
            num_unbegun_prefill_tokens=stats.num_unbegun_prefill_tokens + num_unseen_tokens,
        )
        return (stats,)

    async def close(self) -> None:
        """Fail what still runs, stop transfers and stepping, free everything. Bounded in time; may be called twice.

        Loading can't be interrupted and is not waited for: its thread closes the model as soon as it has it.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    def _on_ready(self, runner: ModelRunner) -> None:
        assert self._ready is not None, "start waits"
        if not self._ready.done():
            self._ready.set_result(runner)

    def _on_report(self, report: StepReport) -> None:
        if self._pulls is not None:
            self._direct_pulls(self._pulls, report)
        if report.output is None or self._end_error is not None:
            return
        for ended in (report.output.finished, report.output.prefilled, report.output.failed):
            self._live.difference_update(item.id for item in ended)
        self._outputs.put(report.output)

    def _on_lost(self, error: Exception) -> None:
        loss = EngineError(f"the engine is lost: {error!r}")
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error if isinstance(error, ServingError) else loss)
        self._end(loss)
        self._outputs.end(loss)

    def _check_alive(self) -> None:
        if self._end_error is not None:
            raise type(self._end_error)(self._end_error.message)

    def _claim(self, id: int, hand_off: HandOff) -> None:
        if self._pulls is None or self._memory is None:
            raise UnsupportedFieldError("this engine takes no hand-offs", field="hand_off")
        blocks_payload(hand_off)
        self._pulls.claim(id, hand_off)

    def _direct_pulls(self, pulls: Pulls, report: StepReport) -> None:
        for pull in report.pulls:
            pulls.fetch(pull)
        for id in report.stopped_pulls:
            pulls.stop(id)
        if report.output is not None:
            for failed in report.output.failed:
                pulls.stop(failed.id)  # what never came to fetch

    def _end_pull(self, id: int, outcome: FetchResult | ServingError) -> None:
        if isinstance(outcome, FetchResult):
            self._thread.post(Fetched(id, outcome))
        else:
            self._thread.post(FetchFailed(id, outcome))

    def _end(self, error: ServingError) -> None:
        """Fail all that live; nothing of later steps is given out."""
        if self._end_error is not None:
            return
        self._end_error = error
        if self._live:
            self._outputs.put(StepOutput(failed=tuple(Failed(id, error) for id in sorted(self._live))))
        self._live.clear()
        if self._pulls is not None:
            self._pulls.stop_all()

    async def _close(self) -> None:
        self._end(WorkerUnavailableError("the engine was closed"))
        self._outputs.end()
        if self._pulls is not None:
            await self._pulls.close(self._close_timeout_s)
        if self._ready is None:
            return
        self._thread.stop()  # the pool goes only now that nothing writes to it
        if self._ready.cancelled():
            return  # ``start`` was given up; nobody has seen the model that it loads
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await self._thread_end.wait()
            self._thread.join()
        except TimeoutError:
            logger.error("the engine's last step has not ended within %s s", self._close_timeout_s)


# The engine's own thread: loads the model, steps while there is work, sleeps while there is none.


@dataclass(frozen=True, kw_only=True)
class ThreadListener:
    """What hears of the thread, on the event loop and in order: ready, reports, lost, end.

    Attributes:
        on_ready: the model is loaded; what the runner says of itself may be read.
        on_report: a step had something to say, as it began or ended.
        on_lost: loading or a step failed; nothing is computed any more.
        on_end: the model is closed and the thread about to end.
    """

    on_ready: Callable[[ModelRunner], None]
    on_report: Callable[[StepReport], None]
    on_lost: Callable[[Exception], None]
    on_end: Callable[[], None]


class EngineThread:
    """Drives a ``StepLoop`` until ``stop``. A model whose step failed stays open until then: transfers may use it."""

    def __init__(
        self, runner_factory: Callable[[], ModelRunner], config: SchedulerConfig, listener: ThreadListener
    ) -> None:
        self._runner_factory = runner_factory
        self._config = config
        self._listener = listener
        self._inbox: deque[Message] = deque()
        self._wake_up = threading.Event()
        self._is_stopping = False
        self._steps: StepLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def snapshot(self) -> Snapshot:
        """The latest statistics; any thread may ask."""
        return Snapshot(EngineStats()) if self._steps is None else self._steps.snapshot

    def start(self) -> None:
        """Begin to load; the running event loop hears of it."""
        self._loop = asyncio.get_running_loop()
        # A daemon: a device that hangs in a step must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, name="quartet-engine", daemon=True)
        self._thread.start()

    def post(self, message: Message) -> None:
        """Hand over a message for the next step. Never blocks."""
        self._inbox.append(message)
        self._wake_up.set()

    def stop(self) -> None:
        """Make the thread end after the step it is in; ``on_end`` follows."""
        self._is_stopping = True
        self._wake_up.set()

    def join(self) -> None:
        """Wait for the thread's last instructions; for after ``on_end``."""
        if self._thread is not None:
            self._thread.join()

    def _main(self) -> None:
        runner: ModelRunner | None = None
        try:
            runner = self._runner_factory()
            steps = self._steps = StepLoop(runner, self._config, on_begin=self._tell_report)
            self._tell(self._listener.on_ready, runner)
            self._step_until_stopped(steps)
        except Exception as error:  # the thread's work ends here; the listener fails what it knows
            logger.exception("the engine is lost")
            self._tell(self._listener.on_lost, error)
            self._wait_until_stopped()
        finally:
            _close(runner)
            self._tell(self._listener.on_end)

    def _step_until_stopped(self, steps: StepLoop) -> None:
        while not self._is_stopping:
            if steps.is_idle and not self._inbox:
                self._wake_up.wait()
            self._wake_up.clear()  # before reading: what is posted from here on wakes up again
            report = steps.step([self._inbox.popleft() for _ in range(len(self._inbox))])
            if report:
                self._tell_report(report)

    def _wait_until_stopped(self) -> None:
        while not self._is_stopping:
            self._wake_up.wait()
            self._wake_up.clear()

    def _tell_report(self, report: StepReport) -> None:
        self._tell(self._listener.on_report, report)

    def _tell(self, hear: Callable[..., None], *args: object) -> None:
        assert self._loop is not None, "started"
        # RuntimeError: the loop is closed, so nobody listens any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(hear, *args)


def _close(runner: ModelRunner | None) -> None:
    try:
        if runner is not None:
            runner.close()
    except Exception:  # the thread ends here
        logger.exception("the model could not be closed")


# Steps' outputs on their way to the one consumer of an engine.


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

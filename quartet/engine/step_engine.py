"""The engine on a model runner: ``StepEngine`` on the event loop, and ``EngineThread``, which takes the steps.

The thread loads the model, steps while there is work, and sleeps while there is none.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TypeAlias

from quartet.engine.base import (
    EngineCapabilities,
    EngineRequest,
    EngineStats,
    RequestKind,
    Turn,
)
from quartet.engine.guided.compiler import Compiled, GrammarCompiler
from quartet.engine.life_cycle import ThreadedEngine, call_on_loop
from quartet.engine.pulls import Pulls
from quartet.engine.runner import ModelRunner
from quartet.engine.sampling import GrammarKind, GuidedDecoding, OutputOptions, Sampling, guided_fields
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_loop import (
    Cancel,
    Fetched,
    FetchFailed,
    Message,
    Refuse,
    Release,
    Snapshot,
    StepLoop,
    StepReport,
    Submit,
    TakeKvSnapshot,
    num_prefill_tokens,
)
from quartet.engine.tiers import Tiering, TierMessage
from quartet.engine.validation import blocks_payload
from quartet.errors import (
    EngineError,
    NoHandOffError,
    RequestCancelledError,
    ServingError,
    UnsupportedFieldError,
)
from quartet.kvcache.retention import RetentionPlan
from quartet.transfer.base import BlockMemory, EmbeddingMemory, FetchResult, Puller

logger = logging.getLogger(__name__)

#: Makes what compiles the grammars of requests for a loaded model.
GrammarsFactory: TypeAlias = Callable[[ModelRunner], GrammarCompiler]

#: Opens the tiers below a loaded model's pool, which post messages to the engine's thread.
TiersFactory: TypeAlias = Callable[[ModelRunner, Callable[[TierMessage], None]], Tiering]

#: The seed, and every field of ``Sampling`` and ``OutputOptions`` but grammars, for which an engine needs the model's
#: tokenizer.
ALL_SAMPLING_FIELDS = frozenset(
    {"seed", *(item.name for kind in (Sampling, OutputOptions) for item in fields(kind))}
) - {"guided"}


class StepEngine(ThreadedEngine[ModelRunner]):
    """An ``Engine`` that schedules and pages by itself and leaves the computing to a ``ModelRunner``.

    A request's tokens depend on the request only, as far as the runner's do. If the runner raises, the engine is lost:
    every live request fails with ``EngineError`` and ``is_alive`` is false from then on.
    """

    def __init__(
        self,
        runner_factory: Callable[[], ModelRunner],
        config: SchedulerConfig,
        *,
        puller: Puller | None = None,
        kinds: frozenset[RequestKind] = frozenset(RequestKind),
        sampling_fields: frozenset[str] = ALL_SAMPLING_FIELDS,
        grammars: GrammarsFactory | None = None,
        tells_contents: bool = False,
        tiers: TiersFactory | None = None,
        retention: RetentionPlan | None = None,
        close_timeout_s: float = 10.0,
    ) -> None:
        """Nothing is loaded before ``start``.

        Args:
            runner_factory: loads and warms up; called in the engine thread.
            config: bounds of a step.
            puller: fetches hand-offs, which are refused without one. The caller closes it, after the engine.
            kinds: what to announce.
            sampling_fields: what the runner's sampler honours, apart from grammars.
            grammars: for a runner whose sampler follows guides, called in a thread of its own once the model is loaded;
                ``None``: requests with grammars are refused.
            tells_contents: KV events say what stored blocks hold, too.
            tiers: called in the engine thread once the model is loaded; ``None``: evicted blocks are lost.
            retention: what sessions retain; ``None``: nothing.
            close_timeout_s: bounds the wait for transfers in ``close``, and then that for the last step.
        """
        self._pulls = Pulls(puller, self._end_pull) if puller is not None else None
        super().__init__(self._pulls, close_timeout_s)
        self._thread_end = asyncio.Event()
        listener = ThreadListener(
            on_ready=self._take_ready, on_report=self._on_report, on_lost=self._on_lost, on_end=self._thread_end.set
        )
        self._thread = EngineThread(
            runner_factory, config, listener, tiers, tells_contents=tells_contents, retention=retention
        )
        self._puller = puller
        self._kinds = kinds
        self._sampling_fields = sampling_fields
        self._make_grammars = grammars
        self._grammars: GrammarCompiler | None = None
        self._compiling: dict[int, EngineRequest] = {}
        self._memory: BlockMemory | None = None
        self._embeddings: EmbeddingMemory | None = None
        self._num_submits = 0
        self._num_submitted_prefill_tokens = 0

    @property
    def memory(self) -> BlockMemory | None:
        """Its block pool as bytes, for transfers out."""
        return self._memory

    @property
    def embeddings(self) -> EmbeddingMemory | None:
        """Where it reads embeddings of media; ``None``: its model takes none."""
        return self._embeddings

    async def start(self) -> None:
        """Load, warm up and begin stepping. Raises ``ServingError`` naming what is wrong; ``close`` even then."""
        runner = await self._load()
        if self._puller is not None and runner.memory is not None:
            self._puller.attach(runner.memory, runner.layout, lambda: bool(self.turns()))
        self._memory = runner.memory
        self._embeddings = runner.embeddings
        await self._load_grammars(runner)
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

    def cancel(self, id: int) -> None:
        """End a request at the next step; its ``failed`` (or how it had already ended) still arrives."""
        request = self._compiling.pop(id, None)
        if request is not None:
            self._thread.post(Refuse(request, RequestCancelledError("the request was cancelled")))
        elif id in self._live:
            self._thread.post(Cancel(id))

    def release(self, id: int) -> None:
        """Free the blocks that a completed prefill holds. Unknown ids are ignored."""
        self._thread.post(Release(id))

    def request_kv_snapshot(self) -> None:
        """Have one of the next outputs carry a ``kv_snapshot``; one answers all requests before it."""
        self._thread.post(TakeKvSnapshot())

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
            num_spare_prefill_tokens=max(stats.num_spare_prefill_tokens - num_unseen_tokens, 0),
        )
        return (stats,)

    def turns(self) -> Sequence[Turn]:
        """The turn of its thread, unless that waits for work."""
        turn = self._thread.turn
        return () if turn is None else (turn,)

    def _accept(self, request: EngineRequest) -> None:
        if request.generation.sampling.guided is not None and self._grammars is None:
            raise UnsupportedFieldError("this engine follows no grammars", field="sampling.guided")
        if request.kind is RequestKind.PREFILL and self._memory is None:
            raise NoHandOffError("this engine hands nothing off: no transfer reaches its block pool")
        if request.hand_off is not None:
            if self._pulls is None or self._memory is None:
                raise NoHandOffError("this engine takes no hand-offs", field="hand_off")
            blocks_payload(request.hand_off)
            self._pulls.claim(request.id, request.hand_off)
        self._num_submits += 1
        self._num_submitted_prefill_tokens += num_prefill_tokens(request)
        guided = request.generation.sampling.guided
        if guided is None or self._grammars is None:
            self._thread.post(Submit(request, time.monotonic()))
        else:
            self._compile(request, guided, self._grammars)

    def _compile(self, request: EngineRequest, guided: GuidedDecoding, grammars: GrammarCompiler) -> None:
        """Submit ``request`` once its grammar is compiled, or end it with what is wrong with that."""
        submitted_at = time.monotonic()
        self._compiling[request.id] = request
        found = grammars.find(guided)
        if found is not None:
            self._take_compiled(request, submitted_at, found)
            return
        loop = asyncio.get_running_loop()
        grammars.compile(
            guided,
            lambda compiled: call_on_loop(loop, self._take_compiled, request, submitted_at, compiled),
            lambda: request.id in self._compiling,
        )

    def _take_compiled(self, request: EngineRequest, submitted_at: float, compiled: Compiled) -> None:
        if self._compiling.pop(request.id, None) is None:
            return  # cancelled meanwhile
        if isinstance(compiled, ServingError):
            self._thread.post(Refuse(request, compiled))
        else:
            self._thread.post(Submit(request, submitted_at, compiled))

    async def _load_grammars(self, runner: ModelRunner) -> None:
        if self._make_grammars is None:
            return
        try:
            self._grammars = await asyncio.to_thread(self._make_grammars, runner)
        except (OSError, ValueError) as error:
            logger.warning("grammars are refused: llguidance can't read the model's tokenizer: %s", error)
            return
        self._sampling_fields |= guided_fields(GrammarKind)

    def _end_pull(self, id: int, outcome: FetchResult | ServingError) -> None:
        if isinstance(outcome, FetchResult):
            self._thread.post(Fetched(id, outcome))
        else:
            self._thread.post(FetchFailed(id, outcome))

    def _on_report(self, report: StepReport) -> None:
        pulls, output = self._pulls, report.output
        if pulls is not None:
            for pull in report.pulls:
                pulls.fetch(pull)
            for id in report.stopped_pulls:
                pulls.stop(id)
            for failed in () if output is None else output.failed:
                pulls.stop(failed.id)  # a request that failed before its fetch began
        if output is not None:
            self._take_output(output)

    def _on_lost(self, error: Exception) -> None:
        loss = EngineError(f"the engine is lost: {error!r}")
        self._take_loss(error if isinstance(error, ServingError) else loss, loss)

    def _start_thread(self) -> None:
        self._thread.start()

    def _stop_thread(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
        self._thread.stop()

    async def _wait_thread(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._thread_end.wait()
        except TimeoutError:
            return False
        self._thread.join()
        return True


@dataclass(frozen=True, kw_only=True)
class ThreadListener:
    """The callbacks of an ``EngineThread``, called on the event loop and in order.

    Attributes:
        on_ready: the model is loaded; the runner's properties may be read.
        on_report: a step began or ended with something to report.
        on_lost: loading or a step failed; the thread takes no more steps.
        on_end: the model is closed and the thread is about to end.
    """

    on_ready: Callable[[ModelRunner], None]
    on_report: Callable[[StepReport], None]
    on_lost: Callable[[Exception], None]
    on_end: Callable[[], None]


class EngineThread:
    """Drives a ``StepLoop`` until ``stop``. A model whose step failed stays open until then: transfers may use it."""

    def __init__(
        self,
        runner_factory: Callable[[], ModelRunner],
        config: SchedulerConfig,
        listener: ThreadListener,
        tiers_factory: TiersFactory | None = None,
        *,
        tells_contents: bool = False,
        retention: RetentionPlan | None = None,
    ) -> None:
        self._tiers_factory = tiers_factory
        self._retention = retention
        self._runner_factory = runner_factory
        self._config = config
        self._tells_contents = tells_contents
        self._listener = listener
        self._inbox: deque[Message] = deque()
        self._wake_up = threading.Event()
        self._is_stopping = False
        self._num_turns = 0
        self._is_waiting = True
        self._steps: StepLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def snapshot(self) -> Snapshot:
        """The latest statistics. May be called on any thread."""
        return Snapshot(EngineStats()) if self._steps is None else self._steps.snapshot

    @property
    def turn(self) -> Turn | None:
        """What it is doing; ``None``: it loads, waits for work or has ended. May be called on any thread."""
        steps = self._steps
        return None if steps is None or self._is_waiting else Turn(0, self._num_turns, steps.expected_s)

    def start(self) -> None:
        """Begin to load; the listener is called on the running event loop."""
        self._loop = asyncio.get_running_loop()
        # A daemon thread: a device that hangs in a step must not keep the process from ending.
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
        """Wait until the thread has ended; call it after ``on_end``."""
        if self._thread is not None:
            self._thread.join()

    def _main(self) -> None:
        runner: ModelRunner | None = None
        tiers: Tiering | None = None
        try:
            runner = self._runner_factory()
            tiers = None if self._tiers_factory is None else self._tiers_factory(runner, self.post)
            on_begin = partial(self._notify, self._listener.on_report)
            steps = self._steps = StepLoop(
                runner,
                self._config,
                on_begin=on_begin,
                tiers=tiers,
                tells_contents=self._tells_contents,
                retention=self._retention,
            )
            self._notify(self._listener.on_ready, runner)
            self._step_until_stopped(steps)
        except Exception as error:  # the thread's work ends here; the listener fails the live requests
            logger.exception("the engine is lost")
            self._notify(self._listener.on_lost, error)
            self._wait_until_stopped()
        finally:
            _close(tiers)
            _close(runner)
            self._notify(self._listener.on_end)

    def _step_until_stopped(self, steps: StepLoop) -> None:
        while not self._is_stopping:
            if steps.is_idle and not self._inbox:
                self._is_waiting = True
                self._wake_up.wait()
            self._wake_up.clear()  # before reading the inbox: a later post wakes the thread again
            self._num_turns += 1
            self._is_waiting = False
            report = steps.step([self._inbox.popleft() for _ in range(len(self._inbox))])
            if report:
                self._notify(self._listener.on_report, report)

    def _wait_until_stopped(self) -> None:
        self._is_waiting = True
        while not self._is_stopping:
            self._wake_up.wait()
            self._wake_up.clear()

    def _notify(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None, "started"
        call_on_loop(self._loop, callback, *args)


def _close(part: ModelRunner | Tiering | None) -> None:
    try:
        if part is not None:
            part.close()
    except Exception:  # the thread ends here
        logger.exception("%s could not be closed", type(part).__name__)

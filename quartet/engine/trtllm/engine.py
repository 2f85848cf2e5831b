"""TensorRT-LLM as an engine: the event loop's half. The other half is ``LlmSession``, on ``LlmThread``."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from quartet.engine.base import EngineCapabilities, EngineRequest, EngineStats, RequestKind, StepOutput
from quartet.engine.life_cycle import ThreadedEngine, call_on_loop
from quartet.engine.pulls import Pulls
from quartet.engine.scheduler import Pull
from quartet.engine.settings import EngineKind
from quartet.engine.trtllm.arguments import Use, llm_arguments
from quartet.engine.trtllm.book import engine_stats
from quartet.engine.trtllm.environment import check_ranks
from quartet.engine.trtllm.errors import loss_of, start_error_of, trace_of
from quartet.engine.trtllm.hand_off import CacheIdentity, PromptState
from quartet.engine.trtllm.loading import LoadedLlm, loaded_llm
from quartet.engine.trtllm.package import check_installed
from quartet.engine.trtllm.sampling import sampling_fields
from quartet.engine.trtllm.session import LlmSession
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.errors import (
    HandOffStateError,
    InvalidRequestError,
    LayoutMismatchError,
    NoHandOffError,
    ServingError,
    UnsupportedFieldError,
)
from quartet.kvcache.layout import HandOff, OpaquePayload
from quartet.transfer.base import EmbeddingMemory, FetchResult, Puller

if TYPE_CHECKING:
    from quartet.engine.settings import EngineSpec

logger = logging.getLogger(__name__)

# Hand-offs end within minutes, so no request brings one after this many others.
_MAX_REMEMBERED = 1 << 16

_USES = {RequestKind.PREFILL: Use.PREFILL, RequestKind.DECODE: Use.DECODE}


class TrtllmEngine(ThreadedEngine[LlmSession]):
    """An ``Engine`` on ``tensorrt_llm.LLM``, which schedules, pages and moves its KV cache by itself.

    Resumed requests get the same tokens with greedy sampling only. If TensorRT-LLM raises anything but the failure of
    one request, the engine is lost: every live request fails with ``EngineError`` and ``is_alive`` is false from then
    on.
    """

    def __init__(self, spec: EngineSpec, kind: RequestKind, puller: Puller, times: TrtllmTimes | None = None) -> None:
        """Nothing is loaded before ``start``.

        Args:
            spec: what to load.
            kind: the kind of its requests.
            puller: keeps hand-offs alive until their KV has moved. The caller closes it, after the engine.
            times: bounds of its waits.

        Raises:
            ConfigError: TensorRT-LLM does not allow a setting, or is not installed.
        """
        check_installed()
        self._arguments = llm_arguments(spec, _USES[kind])
        check_ranks(self._arguments.values, os.environ)
        self._kind = kind
        self._times = times or TrtllmTimes()
        self._claims = Claims(puller, can_pull=self._arguments.has_transceiver)
        super().__init__(self._claims, self._times.close_timeout_s)
        on_feeds = self._on_loop(self._take_feeds)
        self._thread = LlmThread(
            lambda: loaded_llm(spec, kind, self._arguments, on_feeds),
            self._make_session,
            self._on_loop(self._take_lost),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: LlmSession | None = None
        self._wants_kv_snapshot = False

    @property
    def memory(self) -> None:
        """None: TensorRT-LLM moves its own cache."""
        return None

    @property
    def embeddings(self) -> EmbeddingMemory | None:
        """The memory from which the engine reads embeddings of media; ``None``: it takes none."""
        return None if self._session is None else self._session.loaded.inputs.embeddings

    @property
    def is_alive(self) -> bool:
        """Whether the engine was started, has not ended, and still answers canaries."""
        session = self._session
        return session is not None and super().is_alive and not session.is_hanging

    async def start(self) -> None:
        """Load and warm up. Raises ``ServingError`` or ``ConfigError`` naming what is wrong; ``close`` even then."""
        self._loop = asyncio.get_running_loop()
        session = self._session = await self._load()
        self._capabilities = self._describe(session)
        self._take_feeds()  # feeds notify once; a notification before this line found no session

    def cancel(self, id: int) -> None:
        """End a request; its ``failed`` (or how it had already ended) still arrives. Unknown ids are ignored.

        A request whose KV cache is being moved ends only when the move is complete, or has timed out.
        """
        session = self._session
        if session is not None and id in self._live:
            self._thread.post(lambda: session.requests.cancel(id))

    def release(self, id: int) -> None:
        """Free the blocks that a completed prefill holds. Unknown ids are ignored."""
        session = self._session
        if session is not None:
            self._thread.post(lambda: session.requests.release(id))

    def request_kv_snapshot(self) -> None:
        """Have one of the next outputs carry a ``kv_snapshot``; one answers all requests before it."""
        if self._loop is not None and not self._wants_kv_snapshot:
            self._wants_kv_snapshot = True
            self._loop.call_soon(self._take_feeds)

    def stats(self) -> Sequence[EngineStats]:
        """The load of each rank, as far as TensorRT-LLM reports it."""
        session = self._session
        if session is None:
            return (EngineStats(),) * self._arguments.num_ranks
        ranks = engine_stats(session.loaded.book, session.loaded.feeds)
        first = replace(ranks[0], num_steps=ranks[0].num_steps + session.num_canaries)
        return (first, *ranks[1:])

    def _accept(self, request: EngineRequest) -> None:
        session, submitted_at = self._session, time.monotonic()
        assert session is not None, "started"
        rank, num_ranks = request.generation.data_parallel_rank, self._arguments.num_ranks
        if rank >= num_ranks:
            message = f"this engine has data-parallel ranks 0 to {num_ranks - 1}"
            raise UnsupportedFieldError(message, field="data_parallel_rank")
        state = None if request.hand_off is None else self._claims.open(request, session.loaded.cache)
        session.loaded.book.add(request)
        self._thread.post(lambda: session.requests.submit(request, state, submitted_at))

    def _start_thread(self) -> None:
        self._thread.start()

    def _stop_thread(self) -> None:
        self._thread.stop()

    async def _wait_thread(self, timeout_s: float) -> bool:
        return await asyncio.to_thread(self._thread.wait_ended, timeout_s)

    def _make_session(self, loaded: LoadedLlm) -> LlmSession:
        return LlmSession(
            loaded,
            self._sampling_fields(loaded),
            self._times,
            on_ready=self._on_loop(self._take_ready),
            on_output=self._on_loop(self._take_output),
            on_lost=self._on_loop(self._take_lost),
        )

    def _sampling_fields(self, loaded: LoadedLlm) -> frozenset[str]:
        return sampling_fields(self._arguments, loaded.package, self._kind)

    def _describe(self, session: LlmSession) -> EngineCapabilities:
        loaded, arguments = session.loaded, self._arguments
        return EngineCapabilities(
            kinds=frozenset({self._kind}),
            sampling_fields=self._sampling_fields(loaded),
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
            unannounced_blocks=loaded.unannounced_blocks,
        )

    def _on_loop(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Have ``callback`` run on the event loop, when the LLM's thread or one of the feeds calls."""

        def call(*arguments: object) -> None:
            assert self._loop is not None, "started"
            call_on_loop(self._loop, callback, *arguments)

        return call

    # The rest is called on the event loop.

    def _take_output(self, output: StepOutput) -> None:
        if self._end_error is None:
            self._claims.follow(output)
        super()._take_output(output)

    def _take_feeds(self) -> None:
        session = self._session
        if session is None or self._end_error is not None:
            return
        wants_snapshot, self._wants_kv_snapshot = self._wants_kv_snapshot, False
        feeds = session.loaded.feeds
        # In this order: the snapshot includes all events taken before it.
        events = feeds.take_kv_events()
        snapshot = feeds.kv_snapshot() if wants_snapshot else None
        if events or snapshot is not None:
            self._outputs.put(StepOutput(kv_events=events, kv_snapshot=snapshot))

    def _take_lost(self, error: Exception) -> None:
        loss = loss_of(error)
        if self._end_error is None:
            logger.error("%s: %s", loss.message, trace_of(error))
        self._take_loss(start_error_of(error), loss)


class LlmThread:
    """The thread that loads, calls and reads an LLM, on an event loop of its own.

    It loads, serves until ``stop``, and closes what it loaded, even if no caller waits for the load any more.
    """

    def __init__(
        self,
        load: Callable[[], AbstractContextManager[LoadedLlm]],
        make_session: Callable[[LoadedLlm], LlmSession],
        on_lost: Callable[[Exception], None],
    ) -> None:
        """Nothing is loaded before ``start``.

        Args:
            load: loads on entering and closes on leaving, both on the thread.
            make_session: called on the thread's event loop.
            on_lost: called on the thread with the reason why loading or warming up failed.
        """
        self._load = load
        self._make_session = make_session
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_stop: asyncio.Event | None = None
        self._has_ended = threading.Event()

    def start(self) -> None:
        """Begin to load."""
        # A daemon: a device that hangs must not keep the process from ending.
        threading.Thread(target=self._main, name="quartet-trtllm", daemon=True).start()

    def post(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the thread's event loop, in order; after the loop's end, do nothing. Never blocks."""
        if self._loop is not None:
            call_on_loop(self._loop, call)

    def stop(self) -> None:
        """Make the thread end; if it still loads, it ends after loading. Never blocks."""
        with self._lock:
            self._stop.set()
            if self._loop_stop is not None:
                self.post(self._loop_stop.set)

    def wait_ended(self, timeout_s: float) -> bool:
        """Block until everything is closed; False if that takes longer than ``timeout_s``."""
        return self._has_ended.wait(timeout_s)

    def _main(self) -> None:
        try:
            with self._load() as loaded:
                self._run(loaded)
        except Exception as error:  # the thread's work ends here; the listener fails its requests
            logger.exception("the LLM could not be loaded, or not be closed")
            self._on_lost(error)
        finally:
            self._has_ended.set()

    def _run(self, loaded: LoadedLlm) -> None:
        try:
            asyncio.run(self._serve(loaded))
        except Exception as error:  # noqa: BLE001 - report this before closing the LLM, which may hang
            # Leave the text out of the log: it may quote a request by now. A caller that waits for the start gets it.
            logger.error("the LLM does not work: %s", trace_of(error))
            self._on_lost(error)

    async def _serve(self, loaded: LoadedLlm) -> None:
        stop = asyncio.Event()
        with self._lock:
            self._loop, self._loop_stop = asyncio.get_running_loop(), stop
            if self._stop.is_set():
                return
        await self._make_session(loaded).run(stop)


class Claims:
    """Claims on hand-offs whose bytes TensorRT-LLM moves by itself. Lives on the event loop.

    Each is used once, and kept alive until TensorRT-LLM has moved its KV cache.
    """

    def __init__(self, puller: Puller, *, can_pull: bool) -> None:
        """Without ``can_pull`` every hand-off is refused: TensorRT-LLM was made to move nothing."""
        self._can_pull = can_pull
        self._pulls = Pulls(puller, self._end)
        self._used: OrderedDict[bytes, None] = OrderedDict()
        self._opened: set[int] = set()

    def open(self, request: EngineRequest, cache: CacheIdentity) -> PromptState:
        """Accept the hand-off of ``request`` for an engine with ``cache``; renew it from now on.

        Raises:
            NoHandOffError: this engine takes no hand-offs.
            LayoutMismatchError: it is of another engine, or of one whose blocks can't come here.
            HandOffStateError: it was used before.
            InvalidRequestError: it is not of this request's tokens.
        """
        assert request.hand_off is not None
        if not self._can_pull:
            raise NoHandOffError("this engine takes no hand-offs", field="hand_off")
        hand_off = request.hand_off
        state = PromptState.from_bytes(_opaque_state(hand_off))
        if (refusal := cache.refusal_of(state.cache)) is not None:
            raise LayoutMismatchError(refusal, field="hand_off")
        generation = request.generation
        num_given = len(generation.prompt_token_ids) + len(generation.generated_token_ids)
        if state.num_tokens != num_given - 1 or not generation.generated_token_ids:
            raise InvalidRequestError(
                f"the hand-off holds {state.num_tokens} tokens, {num_given - 1} are needed", field="hand_off"
            )
        if state.first_token_id != generation.generated_token_ids[-1]:
            raise InvalidRequestError("the hand-off's first token is not the last one given", field="hand_off")
        if hand_off.hand_off_id in self._used:
            raise HandOffStateError("the hand-off was used already", field="hand_off")
        self._pulls.claim(request.id, hand_off)
        self._opened.add(request.id)
        self._remember(hand_off.hand_off_id)
        return state

    def follow(self, output: StepOutput) -> None:
        """Release the hand-offs whose KV has arrived, or whose request has failed, as ``output`` shows."""
        for started in output.started:
            if started.id in self._opened:
                self._opened.discard(started.id)
                # No pieces: TensorRT-LLM has moved everything.
                self._pulls.fetch(Pull(started.id, ()))
        for failed in output.failed:
            if failed.id in self._opened:
                self._opened.discard(failed.id)
                self._pulls.stop(failed.id)

    def stop_all(self) -> None:
        """End everything."""
        self._opened.clear()
        self._pulls.stop_all()

    async def close(self, timeout_s: float) -> None:
        """End everything and wait for that, ``timeout_s`` at most."""
        await self._pulls.close(timeout_s)

    def _remember(self, hand_off_id: bytes) -> None:
        self._used[hand_off_id] = None
        if len(self._used) > _MAX_REMEMBERED:
            self._used.popitem(last=False)

    def _end(self, id: int, outcome: FetchResult | ServingError) -> None:
        if isinstance(outcome, ServingError):
            # The blocks are here all the same; the source frees its own when the hand-off expires.
            logger.info("request %s: the source did not learn that its hand-off is done: %s", id, outcome.message)


def _opaque_state(hand_off: HandOff) -> bytes:
    payload = hand_off.payload
    if isinstance(payload, OpaquePayload) and payload.engine == EngineKind.TRTLLM:
        return payload.state
    what = f"of engine {payload.engine!r}" if isinstance(payload, OpaquePayload) else "of blocks"
    raise LayoutMismatchError(f"a hand-off {what} cannot be taken over here", field="hand_off")

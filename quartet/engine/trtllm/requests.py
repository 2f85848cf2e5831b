"""The requests of one LLM: each has a handle, and a task that reads it to its end. Lives on one event loop.

``ResultReader`` turns what a handle holds after each step into the types of ``quartet.engine.base``;
``OutputCollector`` gathers what all handles bring in one turn of the event loop into one output.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from quartet.engine.base import (
    EngineRequest,
    Failed,
    Finished,
    FinishReason,
    Generation,
    Prefilled,
    RequestKind,
    Started,
    StepLogprobs,
    StepOutput,
)
from quartet.engine.sampling import TokenLogprobs
from quartet.engine.trtllm.calls import Call, CallBuilder
from quartet.engine.trtllm.errors import failure, is_foreseen, loss_of, refusal, trace_of
from quartet.engine.trtllm.hand_off import PromptState
from quartet.engine.trtllm.inputs import MediaItem, is_same_prompt
from quartet.engine.trtllm.loading import LoadedLlm
from quartet.engine.trtllm.private_blocks import PrivateRequest
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.engine.trtllm.token_cursor import NewTokens
from quartet.errors import EngineError, InvalidRequestError, RequestCancelledError, RequestTimeoutError, ServingError

logger = logging.getLogger(__name__)

# How many prompts have their media decoded at a time: decoding takes a CPU, and decoded pictures are large.
_MAX_MEDIA_READERS = 4

_FINISHED = {"stop": FinishReason.STOP_ID, "length": FinishReason.LENGTH}

#: After a prefill with one of these finish reasons, the answer goes on elsewhere.
_GOES_ON = frozenset({"length", "not_finished"})


class LlmRequests:
    """Submits requests to an LLM, and gives the results of their handles to an ``OutputCollector``."""

    def __init__(
        self,
        loaded: LoadedLlm,
        sampling_fields: frozenset[str],
        outputs: OutputCollector,
        times: TrtllmTimes,
        on_lost: Callable[[Exception], None],
    ) -> None:
        """``on_lost`` is called with an error after which the engine is unusable."""
        self._loaded = loaded
        self._calls = CallBuilder(loaded, sampling_fields)
        self._outputs = outputs
        self._times = times
        self._on_lost = on_lost
        self._live: dict[int, _Live] = {}
        self._held: dict[int, Any] = {}
        # Threads of their own: other streams go on while pictures are decoded.
        self._media_readers = ThreadPoolExecutor(_MAX_MEDIA_READERS, thread_name_prefix="quartet-trtllm-media")
        self._reading: dict[int, tuple[EngineRequest, asyncio.Future[Sequence[MediaItem]]]] = {}
        self.num_blocks = loaded.num_blocks()

    def submit(self, request: EngineRequest, state: PromptState | None, submitted_at: float) -> None:
        """Submit ``request`` to the LLM; its end, or its refusal, reaches the collector."""
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
            return  # the request was cancelled
        if isinstance(error, Exception):
            self._refuse(request, error)
        else:
            self._start(request, None, submitted_at, reading.result())

    def _start(
        self,
        request: EngineRequest,
        state: PromptState | None,
        submitted_at: float,
        media: Sequence[MediaItem] | None = None,
    ) -> None:
        private = ExitStack()
        try:
            call = self._calls.call(request, state, self.num_blocks, media)
            # Before the first KV event of the request can come.
            private = self._note_private(request, call)
            handle = self._loaded.llm.generate_async(**call.arguments)
        except Exception as error:  # noqa: BLE001 - the request ends here, and `_refuse` logs
            private.close()
            self._refuse(request, error)
            return
        self._loaded.feeds.begin()
        reader = ResultReader(request, call, self._loaded, self._outputs, submitted_at)
        live = _Live(request, call, handle, reader, private, is_pulling=state is not None)
        self._live[request.id] = live
        live.task = asyncio.get_running_loop().create_task(self._read(live), name=f"request-{request.id}")

    def cancel(self, id: int) -> None:
        """End a request; unknown ids are ignored.

        A request whose KV blocks are on their way goes on until they are here: if it were aborted earlier, prefill
        would keep them.
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
        """Count the blocks of a completed prefill as free; unknown ids are ignored."""
        handle = self._held.pop(id, None)
        if handle is not None:
            # If decode has pulled the blocks, this changes nothing. If not, no worker will pull them; but TensorRT-LLM
            # forgets a request with its last result, ignores the abort, and keeps the blocks until
            # `kv_transfer_timeout_ms` is over.
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
        # Wait for the readers: the caller frees the memory that they read.
        await asyncio.to_thread(self._media_readers.shutdown, cancel_futures=True)

    def _note_private(self, request: EngineRequest, call: Call) -> ExitStack:
        """Have blocks of a salt, an adapter or media reported for what they are, or not at all."""
        generation = request.generation
        has_media = bool(generation.media or request.media_inputs)
        if not generation.cache_salt and not generation.adapter and not has_media:
            return ExitStack()
        token_ids = [*generation.prompt_token_ids, *generation.generated_token_ids]
        unknown_from = None
        if has_media and not generation.media:
            # Not laid out yet: from the first placeholder on, the engine computes other tokens.
            placeholder_id = self._loaded.inputs.placeholder_id
            assert placeholder_id is not None, "media are refused else"
            unknown_from = token_ids.index(placeholder_id)
        return self._loaded.feeds.note_private(
            PrivateRequest(
                token_ids=token_ids,
                salt=generation.cache_salt,
                adapter=generation.adapter,
                media=generation.media,
                media_names=() if call.inputs is None else call.inputs.media_names,
                unknown_from=unknown_from,
            )
        )

    def _refuse(self, request: EngineRequest, error: Exception) -> None:
        if not is_foreseen(error, self._loaded.package.RequestError):
            logger.error("request %s could not be given to the engine: %s", request.id, trace_of(error))
        self._loaded.book.end(request.id)
        self._outputs.add(Failed(request.id, refusal(error, self._loaded.package.RequestError)))

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
            self._outputs.add(Failed(id, error))
        if self._loaded.metrics is not None and live.handle.finished:
            self._loaded.metrics.log(live.handle)

    async def _read_outcome(self, live: _Live) -> ServingError | None:
        """Read the handle to its end; return an error unless it ended well.

        Raises:
            _HandleError: the handle raised before its end.
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
        """Abort a request whose result we can't read; the engine is well, and would go on with it."""
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
            is_gone=self._loaded.is_gone,
        )
        if error is None:
            self._on_lost(raised)
            return loss_of(raised)
        if isinstance(raised, AssertionError):
            live.handle.abort()  # the engine may go on with it
        if live.is_cancelled:
            return RequestCancelledError("the request was cancelled")
        if isinstance(error, EngineError):
            logger.warning("the engine failed request %s: %s", request.id, trace_of(raised))
        return error

    def _forget(self, live: _Live, *, is_held: bool) -> None:
        self._live.pop(live.request.id, None)
        for timer in live.timers:
            timer.cancel()
        live.private.close()
        self._loaded.book.end(live.request.id, is_held=is_held)

    def _abort(self, live: _Live) -> None:
        live.is_pulling = False
        if live.task is not None:
            timer = asyncio.get_running_loop().call_later(self._times.abort_timeout_s, live.task.cancel)
            live.timers.append(timer)
        live.handle.abort()


class ResultReader:
    """Reads the results of one request as they come.

    Attributes:
        has_started: a decode's first output was read.
        has_ended: the output's end was read.
        is_handed_off: the prefill is complete, and its KV blocks wait to be pulled.
    """

    def __init__(
        self, request: EngineRequest, call: Call, loaded: LoadedLlm, outputs: OutputCollector, submitted_at: float
    ) -> None:
        """``submitted_at`` is a reading of the monotonic clock."""
        self._request = request
        self._call = call
        self._loaded = loaded
        self._outputs = outputs
        self._submitted_at = submitted_at
        # In a decode from a hand-off, the first token of the output repeats the last one given to it.
        num_known = 1 if request.hand_off is not None else 0
        self._num_before = len(request.generation.generated_token_ids) - num_known
        self.has_started = False
        self._laid_out: Generation | None = None
        self.has_ended = False
        self.is_handed_off = False

    def take_step(self, result: Any) -> None:
        """Give out the result of one step of a decode.

        Raises:
            EngineError: the output does not go on from prefill's token.
            InvalidRequestError: see ``take_prefill``.
        """
        output = result.outputs[0]
        has_tokens = bool(output.token_ids)
        if has_tokens and not self.has_started:
            self._check_prompt(result)
            self._check_first(output.token_ids[0])
        if not self.has_started and (has_tokens or output.finish_reason in _FINISHED):
            self._start(result)
        new = self._call.cursor.take(output)
        self._outputs.tokens(self._request.id, self._num_before + new.position, new)
        self._loaded.book.grow(self._request.id, len(new.token_ids))
        self.has_ended = output.finish_reason is not None

    def end_of_decode(self, result: Any) -> ServingError | None:
        """Report the end of a decode after its last step; return an error if it did not end well."""
        reason = result.outputs[0].finish_reason
        if reason not in _FINISHED:
            return _bad_end(reason)
        num_tokens = self._num_before + self._call.cursor.num_tokens
        self._outputs.add(Finished(self._request.id, _FINISHED[reason], num_tokens))
        return None

    def take_prefill(self, result: Any) -> ServingError | None:
        """Give out the result of a prefill; return an error if it did not end well.

        Raises:
            InvalidRequestError: field ``prompt_token_ids``; the ids changed on their way through text, so the engine
                computed another prompt than the one that was booked, hashed and reported.
        """
        output = result.outputs[0]
        inputs = self._call.inputs
        self._check_prompt(result)
        if inputs is not None and inputs.unread_token_ids is not None:
            became = list(result.prompt_token_ids)
            self._laid_out = self._loaded.inputs.laid_out(
                self._request.generation, inputs, became, self._loaded.facts.vocab_size
            )
        new = self._call.cursor.take(output)
        is_known = output.finish_reason in _FINISHED or output.finish_reason in _GOES_ON
        if not is_known or not new.token_ids:
            return _bad_end(output.finish_reason)
        total_s = time.monotonic() - self._submitted_at
        queue_s = min(_queue_s(result), total_s)
        state = self._state(output)
        generation = self._request.generation
        opaque = None if state is None else state.to_bytes()
        self.is_handed_off = state is not None
        self._loaded.book.begin(self._request.id, result.cached_tokens)
        self._loaded.book.grow(self._request.id, 1)
        self._outputs.add(
            Prefilled(
                id=self._request.id,
                token_id=new.token_ids[0],
                num_cached_tokens=result.cached_tokens,
                queue_s=queue_s,
                compute_s=total_s - queue_s,
                finished=None if state is not None else _FINISHED[output.finish_reason],
                num_tokens=0 if state is None else state.num_tokens,
                opaque=opaque,
                logprobs=None if generation.output.logprobs is None else new.logprobs[0],
                laid_out=self._laid_out,
            )
        )
        return None

    def _state(self, output: Any) -> PromptState | None:
        """The state that decode needs to go on; ``None`` if the answer is complete or is not handed on."""
        if not self._call.is_handing_off or output.finish_reason not in _GOES_ON:
            return None
        generation = self._laid_out or self._request.generation
        if output.disaggregated_params is None:
            raise EngineError("the engine handed nothing over")
        return PromptState.of(
            output.disaggregated_params,
            self._loaded.cache,
            num_tokens=len(generation.prompt_token_ids) + len(generation.generated_token_ids),
            given=self._call.arguments.get("disaggregated_params"),
        )

    def _start(self, result: Any) -> None:
        self.has_started = True
        elapsed_s = time.monotonic() - self._submitted_at
        queue_s = min(_queue_s(result), elapsed_s)
        # If blocks were pulled, count the time after the queue as their transfer: TensorRT-LLM reports no more.
        transfer_s = elapsed_s - queue_s if self._request.hand_off is not None else 0.0
        self._loaded.book.begin(self._request.id, result.cached_tokens)
        inputs, num_prompt_tokens = self._call.inputs, 0
        if inputs is not None and inputs.unread_token_ids is not None:
            num_prompt_tokens = len(result.prompt_token_ids) - len(self._request.generation.generated_token_ids)
        self._outputs.add(
            Started(self._request.id, result.cached_tokens, queue_s, transfer_s, num_prompt_tokens=num_prompt_tokens)
        )

    def _check_prompt(self, result: Any) -> None:
        inputs = self._call.inputs
        expected = None if inputs is None else inputs.expected_token_ids
        if expected is not None and not is_same_prompt(
            expected, result.prompt_token_ids, self._request.generation.media, self._loaded.facts.vocab_size
        ):
            message = "the engine made another prompt of the text and media that these ids became"
            raise InvalidRequestError(message, field="prompt_token_ids")

    def _check_first(self, token_id: int) -> None:
        if self._request.hand_off is None:
            return
        if token_id != self._request.generation.generated_token_ids[-1]:
            raise EngineError("the output does not begin with the token that prefill gave")


class OutputCollector:
    """Collects results since the last ``StepOutput``. Lives on the event loop that reads the handles."""

    def __init__(self, deliver: Callable[[StepOutput], None]) -> None:
        """``deliver`` is called on this loop, at most once in a turn, after the handles that woke up in that turn."""
        self._deliver = deliver
        self._is_due = False
        self._clear()

    def add(self, event: Started | Finished | Prefilled | Failed) -> None:
        """A request has its first output, or has ended."""
        self._events[type(event)].append(event)
        self._touch()

    def tokens(self, id: int, offset: int, new: NewTokens) -> None:
        """Add tokens of a request; the first of them is its output token number ``offset``."""
        if not new.token_ids:
            return
        # One entry for each request, even if several of its steps came at once.
        tokens = self._tokens.setdefault(id, _Tokens(offset))
        tokens.token_ids += new.token_ids
        tokens.logprobs += new.logprobs
        self._touch()

    def _touch(self) -> None:
        if not self._is_due:
            self._is_due = True
            # Run after all tasks that are ready now.
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        tokens = self._tokens
        output = StepOutput(
            ids=list(tokens),
            num_tokens=[len(item.token_ids) for item in tokens.values()],
            token_offsets=[item.offset for item in tokens.values()],
            token_ids=[token_id for item in tokens.values() for token_id in item.token_ids],
            logprobs=[StepLogprobs(id, tuple(item.logprobs)) for id, item in tokens.items() if item.logprobs],
            started=self._events[Started],
            finished=self._events[Finished],
            prefilled=self._events[Prefilled],
            failed=self._events[Failed],
        )
        self._clear()
        self._deliver(output)

    def _clear(self) -> None:
        # New lists each time: the consumer keeps the old ones.
        self._tokens: dict[int, _Tokens] = {}
        self._events: dict[type, list[Any]] = {Started: [], Finished: [], Prefilled: [], Failed: []}


class _HandleError(Exception):
    """Wraps what a handle raised: only such an error can mean that the engine is dead."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


@dataclass(eq=False)
class _Live:
    """A request whose end is still to come.

    Attributes:
        is_pulling: the KV blocks of its hand-off may be on their way.
        timers: these end the wait for it.
    """

    request: EngineRequest
    call: Call
    handle: Any
    reader: ResultReader
    private: ExitStack
    is_pulling: bool
    is_cancelled: bool = False
    task: asyncio.Task[None] | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


async def _results(handle: Any, *, streams: bool) -> AsyncGenerator[Any, None]:
    """Yield ``handle``'s result after each step, or at the end. Raises ``_HandleError`` for any error of the handle."""
    try:
        if streams:
            async for result in handle:
                yield result
        else:
            await handle
            yield handle
    except Exception as error:
        raise _HandleError(error) from error


def _queue_s(result: Any) -> float:
    """Seconds until the request was scheduled; 0 if TensorRT-LLM does not measure that."""
    # The names are members of an enum, whose values are text; some releases had the text itself.
    measured = {getattr(name, "value", name): value for name, value in (result.metrics_dict or {}).items()}.get(
        "request_queue_time"
    )
    return 0.0 if measured is None else max(0.0, float(measured))


def _bad_end(reason: str | None) -> ServingError:
    if reason == "timeout":
        return RequestTimeoutError("the engine's limit of a request's time ran out")
    if reason == "cancelled":
        return RequestCancelledError("the request was cancelled")
    return EngineError(f"the engine ended the request in an unknown way ({reason})")


@dataclass
class _Tokens:
    offset: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

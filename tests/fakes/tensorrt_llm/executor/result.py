"""Handles of requests: `RequestOutput`, and what it holds."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm._stand_in.schema import make_dataclass
from tensorrt_llm._stand_in.switches import SWITCHES

Logprob = make_dataclass("Logprob", kw_only=False)


class _Diffs:
    """An output's ``..._diff``: what its own last step added, which steps of other outputs leave as it was."""

    __slots__ = ("_num_logprobs_before", "_num_tokens_before", "_text_before")

    def __post_init__(self) -> None:
        self._num_tokens_before, self._num_logprobs_before, self._text_before = 0, 0, ""

    def begin_step(self) -> None:
        output: Any = self
        self._num_tokens_before, self._num_logprobs_before = len(output.token_ids), len(output.logprobs)
        self._text_before = output.text

    @property
    def length(self) -> int:
        output: Any = self
        return len(output.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        output: Any = self
        return list(output.token_ids[self._num_tokens_before :])

    @property
    def text_diff(self) -> str:
        output: Any = self
        return str(output.text[len(self._text_before) :])

    @property
    def logprobs_diff(self) -> list[Any]:
        output: Any = self
        return list(output.logprobs[self._num_logprobs_before :])


CompletionOutput = make_dataclass("CompletionOutput", _Diffs, kw_only=False)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an engine reports of one output of a request.

    Attributes:
        num_trimmed: tokens at the end that a stop word takes away again.
        is_last: no other step of the request follows.
        error: the request (or the whole engine) failed; nothing else counts then.
    """

    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Any]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Any]] = field(default_factory=list)
    sum_logprobs: float | None = None
    num_trimmed: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: Any = None
    cached_tokens: int = 0
    decoding_iter: int = 0
    metrics: dict[Any, float] = field(default_factory=dict)
    is_last: bool = False
    error: BaseException | None = None


class RequestOutput:
    """The handle of one request, and its result so far: reading it changes it, each step yields the same object."""

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: Any,
        detokenize: Callable[[list[int]], str] | None,
        abort: Callable[[], None],
    ) -> None:
        self.request_id, self.prompt, self.prompt_token_ids = request_id, prompt, prompt_token_ids
        self.outputs = [CompletionOutput(index) for index in range(params.n if params else 1)]
        self.finished = False
        self.context_logits: Any = None
        self.mm_embedding_handle: dict[str, Any] | None = None
        self.disaggregated_params: Any = None
        self.decoding_iter, self.cached_tokens = 0, 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self.metrics_dict: dict[Any, float] = {}
        self._params, self._detokenize, self._abort = params, detokenize, abort
        self._aborted = False
        self._steps: queue.SimpleQueue[Step] = queue.SimpleQueue()
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._came = asyncio.Event()

    def abort(self) -> None:
        """Ask the engine to end it; its end (``cancelled``) comes like any other."""
        self._aborted = True
        self._abort()

    def aborted(self) -> bool:
        """Say whether `abort` was called."""
        return self._aborted

    def clear_logprob_params(self) -> None:
        """Forget what log-probabilities were asked for."""
        self._params.logprobs = self._params.prompt_logprobs = None

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Block until it ended."""
        heeded = timeout if SWITCHES.result_timeout_works else None
        while not self.finished:
            try:
                self._apply(self._steps.get(timeout=heeded))
            except queue.Empty:
                raise TimeoutError from None
        return self

    async def aresult(self) -> RequestOutput:
        """Wait until it ended."""
        while not self.finished:
            await self._next_step()
        return self

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    def __iter__(self) -> RequestOutput:
        return self

    def __next__(self) -> RequestOutput:
        if self.finished:
            raise StopIteration
        self._apply(self._steps.get())
        return self

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        await self._next_step()
        return self

    def put(self, step: Step) -> None:
        """Report a step (called by the engine's thread)."""
        self._steps.put(step)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._came.set)

    async def _next_step(self) -> None:
        assert self._loop is not None, (
            "The asyncio event loop was not present during initialization, so async operations are not available."
        )
        while self._steps.empty():
            self._came.clear()
            if self._steps.empty():
                await self._came.wait()
        self._apply(self._steps.get_nowait())

    def _apply(self, step: Step) -> None:
        if step.error is not None:
            self.finished = True
            raise step.error
        output: Any = self.outputs[step.index]
        output.begin_step()
        output.token_ids.extend(step.token_ids)
        output.logprobs.extend(self._logprobs(step))
        if self._params is not None and self._params.logprobs is not None and step.finish_reason != "cancelled":
            assert len(output.logprobs) == output.length  # as upstream: it's not a check of the adapter's use
        output.prompt_logprobs = step.prompt_logprobs or output.prompt_logprobs
        output.cumulative_logprob = step.sum_logprobs
        if step.num_trimmed:
            output.token_ids = output.token_ids[: -step.num_trimmed]
            output.logprobs = output.logprobs[: len(output.token_ids)]
        output.finish_reason, output.stop_reason = step.finish_reason, step.stop_reason
        output.disaggregated_params = step.disaggregated_params
        self.disaggregated_params = step.disaggregated_params or self.disaggregated_params
        self.cached_tokens, self.decoding_iter = step.cached_tokens, step.decoding_iter
        self.avg_decoded_tokens_per_iter = len(output.token_ids) / max(step.decoding_iter, 1)
        self.metrics_dict = step.metrics or self.metrics_dict
        self.finished = step.is_last
        self._write_text(output)

    def _logprobs(self, step: Step) -> list[Any]:
        if not SWITCHES.logprobs_as_floats:
            return step.logprobs
        # Decode's first tokens are prefill's, and come without.
        token_ids = step.token_ids[len(step.token_ids) - len(step.logprobs) :]
        return [entry[token_id].logprob for entry, token_id in zip(step.logprobs, token_ids, strict=True)]

    def _write_text(self, output: Any) -> None:
        """Bring the text up to date; a stop string in it that the engine's tokens didn't show ends the request here."""
        if self._detokenize is None or not self._params.detokenize:
            return
        output.text = self._detokenize(output.token_ids)
        if output.finish_reason is None:
            # Half a character is held back until its other half is there.
            output.text = output.text.rstrip("\ufffd")
        for stop in _listed(self._params.stop):
            place = output.text.find(stop)
            if place >= 0 and not (output.finish_reason == "stop" and self._params.include_stop_str_in_output):
                end = place + len(stop) if self._params.include_stop_str_in_output else place
                output.text, output.finish_reason, output.stop_reason = output.text[:end], "stop", stop
                if not self.finished and len(self.outputs) == 1:
                    self.finished = True
                    self._abort()


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])

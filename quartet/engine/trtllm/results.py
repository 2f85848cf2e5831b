"""Reads what one request's handle holds after each step, and says it in the seam's words."""

from __future__ import annotations

import time
from typing import Any

from quartet.engine.base import EngineRequest, Finished, FinishReason, Generation, Prefilled, Started
from quartet.engine.trtllm.calls import Call
from quartet.engine.trtllm.hand_off import HandOffState
from quartet.engine.trtllm.loading import LoadedLlm
from quartet.engine.trtllm.outputs import OutputCollector
from quartet.errors import EngineError, InvalidRequestError, RequestCancelledError, RequestTimeoutError, ServingError

_FINISHED = {"stop": FinishReason.STOP_ID, "length": FinishReason.LENGTH}
#: With these a prefill's answer goes on elsewhere.
_GOES_ON = frozenset({"length", "not_finished"})


class ResultReader:
    """What became of one request so far.

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
        # Of decodes from a hand-off the first token of the output is the last one given.
        num_known = 1 if request.hand_off is not None else 0
        self._num_before = len(request.generation.generated_token_ids) - num_known
        self.has_started = False
        self._laid_out: Generation | None = None
        self.has_ended = False
        self.is_handed_off = False

    def take_step(self, result: Any) -> None:
        """Give out what a decode's step brought.

        Raises:
            EngineError: its output does not go on from prefill's token.
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
        """After the last step: say how it ended; an error if not well."""
        reason = result.outputs[0].finish_reason
        if reason not in _FINISHED:
            return _bad_end(reason)
        num_tokens = self._num_before + self._call.cursor.num_tokens
        self._outputs.finish(Finished(self._request.id, _FINISHED[reason], num_tokens))
        return None

    def take_prefill(self, result: Any) -> ServingError | None:
        """Give out what a prefill brought; an error if it did not end well.

        Raises:
            InvalidRequestError: field ``prompt_token_ids``; they did not survive the way through text, and the prompt
                that was computed is another one than was booked, hashed and told.
        """
        output = result.outputs[0]
        inputs = self._call.inputs
        self._check_prompt(result)
        if inputs is not None and inputs.unread_token_ids is not None:
            became = list(result.prompt_token_ids)
            self._laid_out = self._loaded.inputs.laid_out(self._request.generation, inputs, became)
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
        self._outputs.prefill(
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

    def _state(self, output: Any) -> HandOffState | None:
        """What decode needs, unless the answer is complete."""
        if not self._call.is_handing_off or output.finish_reason not in _GOES_ON:
            return None
        generation = self._laid_out or self._request.generation
        if output.disaggregated_params is None:
            raise EngineError("the engine handed nothing over")
        return HandOffState.of(
            output.disaggregated_params,
            self._loaded.cache,
            num_tokens=len(generation.prompt_token_ids) + len(generation.generated_token_ids),
        )

    def _start(self, result: Any) -> None:
        self.has_started = True
        elapsed_s = time.monotonic() - self._submitted_at
        queue_s = min(_queue_s(result), elapsed_s)
        # Where blocks came, that is what took its time, as far as one can tell.
        transfer_s = elapsed_s - queue_s if self._request.hand_off is not None else 0.0
        self._loaded.book.begin(self._request.id, result.cached_tokens)
        inputs, num_prompt_tokens = self._call.inputs, 0
        if inputs is not None and inputs.unread_token_ids is not None:
            num_prompt_tokens = len(result.prompt_token_ids) - len(self._request.generation.generated_token_ids)
        self._outputs.start(
            Started(self._request.id, result.cached_tokens, queue_s, transfer_s, num_prompt_tokens=num_prompt_tokens)
        )

    def _check_prompt(self, result: Any) -> None:
        inputs = self._call.inputs
        expected = None if inputs is None else inputs.expected_token_ids
        if expected is not None and list(result.prompt_token_ids) != list(expected):
            message = "the engine made another prompt of the text and media that these ids became"
            raise InvalidRequestError(message, field="prompt_token_ids")

    def _check_first(self, token_id: int) -> None:
        if self._request.hand_off is None:
            return
        if token_id != self._request.generation.generated_token_ids[-1]:
            raise EngineError("the output does not begin with the token that prefill gave")


def _queue_s(result: Any) -> float:
    """Seconds until it was scheduled, where TensorRT-LLM measures that."""
    measured = (result.metrics_dict or {}).get("request_queue_time")
    return 0.0 if measured is None else max(0.0, float(measured))


def _bad_end(reason: str | None) -> ServingError:
    if reason == "timeout":
        return RequestTimeoutError("the engine's limit of a request's time ran out")
    if reason == "cancelled":
        return RequestCancelledError("the request was cancelled")
    return EngineError(f"the engine ended the request in an unknown way ({reason})")

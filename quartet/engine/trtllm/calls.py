"""Turns a request into the arguments of ``LLM.generate_async``, and refuses requests that can't be served."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quartet.engine.base import EngineRequest, RequestKind
from quartet.engine.trtllm.hand_off import HAND_OFF_ID, PromptState, new_hand_off_id
from quartet.engine.trtllm.inputs import LlmInputs, MediaItem
from quartet.engine.trtllm.loading import LoadedLlm
from quartet.engine.trtllm.sampling import check_sampling_fields, sampling_params, stop_ids_of
from quartet.engine.trtllm.token_cursor import TokenCursor
from quartet.engine.validation import EngineLimits, check_request, max_output_tokens
from quartet.errors import InvalidRequestError, NoHandOffError, UnsupportedFieldError, WorkerUnavailableError


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of ``generate_async``.

    Attributes:
        arguments: by name; good for one call, as the call changes the objects in them.
        cursor: reads the call's output.
        is_handing_off: its end leaves KV blocks for a decode elsewhere to pull.
        inputs: built from the request, if this engine computes its prompt.
    """

    arguments: dict[str, Any]
    cursor: TokenCursor
    is_handing_off: bool = False
    inputs: LlmInputs | None = None


class CallBuilder:
    """Makes calls for one loaded LLM. Used on the thread that calls."""

    def __init__(self, loaded: LoadedLlm, sampling_fields: frozenset[str]) -> None:
        self._loaded = loaded
        self._facts = loaded.facts
        self._package = loaded.package
        self._sampling_fields = sampling_fields
        self._adapter_ids = {name: number for number, name in enumerate(self._facts.adapters, start=1)}

    def check(self, request: EngineRequest, num_blocks: int) -> None:
        """Raise what ``call`` would raise for ``request`` before it reads any media."""
        self._check(request, self._limits(num_blocks))

    def call(
        self,
        request: EngineRequest,
        state: PromptState | None,
        num_blocks: int,
        media: Sequence[MediaItem] | None = None,
    ) -> Call:
        """The call for ``request`` with ``media``, which goes on from ``state`` if there is a hand-off.

        Raises:
            ServingError: this engine, which has ``num_blocks`` KV blocks a rank, can't serve the request.
        """
        limits = self._limits(num_blocks)
        self._check(request, limits)
        if state is not None:
            return self._continuation(request, state, limits)
        generation = request.generation
        num_output, num_done = max_output_tokens(request, limits), len(generation.generated_token_ids)
        inputs = self._loaded.inputs.build(request, media)
        disaggregated = dict(inputs.disaggregated)
        # A single token needs no decode. Without a hand-off no blocks are held, so none have to be released.
        is_handing_off = request.kind is RequestKind.PREFILL and num_output - num_done > 1
        request_type = "context_only" if is_handing_off else "context_and_generation"
        has_params = is_handing_off or disaggregated
        if is_handing_off and self._package.has_disaggregated_field(HAND_OFF_ID):
            disaggregated[HAND_OFF_ID] = new_hand_off_id()
        params = self._package.DisaggregatedParams
        return self._made(
            request,
            num_known=0,
            is_handing_off=is_handing_off,
            built=inputs,
            inputs=inputs.inputs,
            streaming=request.kind is RequestKind.DECODE,
            sampling_params=sampling_params(
                self._package,
                generation,
                self._facts.eos_token_ids,
                max_output_tokens=num_output,
                num_done=num_done,
                add_special_tokens=inputs.add_special_tokens,
            ),
            disaggregated_params=params(request_type=request_type, **disaggregated) if has_params else None,
        )

    def _continuation(self, request: EngineRequest, state: PromptState, limits: EngineLimits) -> Call:
        """A decode of another engine's prefill: of exactly its tokens, with the token that it gave as the first."""
        generation = request.generation
        before = generation.generated_token_ids[:-1]
        return self._made(
            request,
            num_known=1,
            inputs={"prompt_token_ids": [*generation.prompt_token_ids, *before]},
            streaming=True,
            sampling_params=sampling_params(
                self._package,
                generation,
                self._facts.eos_token_ids,
                max_output_tokens=max_output_tokens(request, limits),
                num_done=len(before),
            ),
            disaggregated_params=state.params(self._package),
        )

    def _made(
        self,
        request: EngineRequest,
        *,
        num_known: int,
        is_handing_off: bool = False,
        built: LlmInputs | None = None,
        **arguments: Any,
    ) -> Call:
        generation = request.generation
        if self._package.takes_priority:
            # Not among the symbols that are relied on: the doctor asks for it as a fact of a later line.
            arguments |= {"priority": _priority(request.priority)}
        if request.traceparent:
            arguments["trace_headers"] = {"traceparent": request.traceparent}
        if request.session_key and self._package.ConversationParams is not None:
            params = self._package.ConversationParams(conversation_id=_conversation_id(request))
            arguments |= {"conversation_params": params}  # of a later line, as the priority
        if generation.cache_salt:
            arguments["cache_salt"] = generation.cache_salt
        if generation.adapter:
            number = self._adapter_ids[generation.adapter]
            path = self._facts.adapters[generation.adapter]
            arguments["lora_request"] = self._package.LoRARequest(generation.adapter, number, path)
        if self._loaded.arguments.num_ranks > 1:
            arguments["scheduling_params"] = self._package.SchedulingParams(
                attention_dp_rank=generation.data_parallel_rank, attention_dp_relax=False
            )
        cursor = TokenCursor(
            num_known=num_known,
            stop_ids=stop_ids_of(generation.sampling, self._facts.eos_token_ids),
            num_top_logprobs=generation.output.logprobs,
        )
        # Not every 1.2 measures requests, even if the engine's arguments ask for it.
        arguments["sampling_params"].return_perf_metrics = self._loaded.arguments.has_perf_metrics
        if (processors := self._loaded.processors.for_request()) is not None:
            arguments["sampling_params"].logits_processor = processors
        given = {name: value for name, value in arguments.items() if value is not None}
        return Call(arguments=given, cursor=cursor, is_handing_off=is_handing_off, inputs=built)

    def _limits(self, num_blocks: int) -> EngineLimits:
        return EngineLimits(
            max_model_len=self._facts.max_model_len,
            num_pool_tokens=num_blocks * self._loaded.arguments.block_size,
            vocab_size=self._facts.vocab_size,
        )

    def _check(self, request: EngineRequest, limits: EngineLimits) -> None:
        generation = request.generation
        check_sampling_fields(generation, self._sampling_fields)
        if generation.adapter and generation.adapter not in self._facts.adapters:
            raise UnsupportedFieldError("this engine does not serve that adapter", field="adapter")
        if request.hand_off is not None and request.kind is not RequestKind.DECODE:
            raise InvalidRequestError("only a decode takes a hand-off", field="hand_off")
        is_handed_over = request.kind is RequestKind.PREFILL or request.hand_off is not None
        if generation.output.logprobs is not None and is_handed_over and not self._package.hands_logprobs_over:
            message = "this TensorRT-LLM hands no log probabilities from prefill to decode"
            raise UnsupportedFieldError(message, field="output.logprobs")
        if request.kind is RequestKind.PREFILL and not self._loaded.arguments.has_transceiver:
            raise NoHandOffError("this engine hands nothing off: it has no cache transceiver")
        has_media = generation.media and request.hand_off is None
        if has_media and self._loaded.inputs.placeholder_id is None:
            raise UnsupportedFieldError("this model takes text only", field="media")
        if generation.sampling.guided is not None and len(generation.generated_token_ids) > (
            request.hand_off is not None
        ):
            # A grammar begins with the output, but TensorRT-LLM takes the output so far as a part of the prompt.
            raise WorkerUnavailableError("an answer that follows a grammar can't be continued after it broke off")
        # The code that reads media checks them; with a hand-off they are in its KV.
        free = replace(generation.sampling, guided=None)
        plain = replace(generation, data_parallel_rank=0, adapter="", media=(), sampling=free)
        check_request(replace(request, generation=plain, hand_off=None, media_blocks=(), media_inputs=()), limits)


def _conversation_id(request: EngineRequest) -> str:
    """A conversation's id: never blank, which is refused, and another one within each salt, as equal keys may be."""
    named = f"{len(request.generation.cache_salt)} {request.generation.cache_salt}{request.session_key}"
    return hashlib.sha256(named.encode()).hexdigest()


def _priority(priority: int) -> float:
    """Our priority on TensorRT-LLM's scale, where requests have 0.5 unless they say otherwise, and 0 to 1."""
    return 0.5 + math.atan(priority) / math.pi

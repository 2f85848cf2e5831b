"""From the arguments of `generate_async` to a request of the engine, with all that a call checks."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Sequence
from typing import Any

from tensorrt_llm._stand_in.conversation import check_conversation
from tensorrt_llm._stand_in.engine import StandInEngine
from tensorrt_llm._stand_in.guide import make_guide
from tensorrt_llm._stand_in.prompts import PromptReader
from tensorrt_llm._stand_in.request import Request
from tensorrt_llm._stand_in.schema import StandInError, check_types
from tensorrt_llm._stand_in.switches import SWITCHES
from tensorrt_llm._stand_in.weights import end_id_of
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.result import RequestOutput
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.sampling_params import SamplingParams

_NOT_IMITATED = ("prompt_adapter_request", "kv_cache_retention_config", "_postproc_params")
# What an idle rank of attention DP computes, so that all ranks take each step together.
_DUMMY_PROMPT = [1]
#: Ids below are an engine's own.
MIN_GLOBAL_ID = 1 << 42
_NOT_IMITATED_PARAMS = (
    "lookahead_config",
    "beam_width_array",
    "additional_model_outputs",
    "return_context_logits",
    "return_generation_logits",
    "return_encoder_output",
    "use_beam_search",
    "apply_batched_logits_processor",
    "top_p_decay",
    "top_p_min",
    "top_p_reset_ids",
    "bad",
)


def make_request(
    request_id: int, given: dict[str, Any], args: Any, engine: StandInEngine, reader: PromptReader, tokenizer: Any
) -> tuple[Request, dict[str, Any]]:
    """Check and prepare a request; also return its arguments as they were, for tests to check.

    Raises:
        ValueError, TypeError, RequestError: see the description's table of errors.
        StandInError: what isn't imitated, or would silently go wrong.
    """
    params, disagg = given["sampling_params"] or SamplingParams(), given["disaggregated_params"]
    for name in _NOT_IMITATED:
        if given[name] is not None:
            raise StandInError(f"{name} is not imitated")
    recorded = {**given, "sampling_params": copy.deepcopy(given["sampling_params"])}
    _check_params(params)
    check_conversation(given.get("conversation_params"))
    if disagg is not None:
        check_types("DisaggregatedParams", disagg)
        _check_disagg(disagg, given["inputs"], params, args, reader)
    prompt = reader.read(given["inputs"], params, disagg)
    _check_length(prompt.token_ids, args, disagg)
    params.take()
    stop_words = _complete(params, args, tokenizer, disagg)
    decode = None if tokenizer is None else _decoder(tokenizer, params)
    output = RequestOutput(request_id, prompt.text, prompt.token_ids, params, decode, lambda: engine.abort(request))
    request = Request(
        request_id=request_id,
        prompt=prompt,
        params=params,
        streaming=given["streaming"],
        stream_interval=args.stream_interval,
        disagg=disagg,
        output=output,
        rank=_rank(given["scheduling_params"], args, engine),
        salt=_salt(given["cache_salt"], given["lora_request"]),
        adapter_path=_adapter(given["lora_request"], args),
        guide=_guide(params, args, tokenizer),
        stop_words=stop_words,
        processors=_processors(params, args),
    )
    if args.enable_attention_dp and not request.salt and prompt.token_ids == _DUMMY_PROMPT:
        # Upstream it finds the dummy's blocks in the cache, and its rank ends.
        engine.inject(death=RuntimeError("a rank ended: the request shares blocks with the dummy request"))
    return request, recorded


def _check_params(params: Any) -> None:
    if not isinstance(params, SamplingParams):
        raise TypeError(f"The sampling_params must be type SamplingParams or None, but got {type(params)}")
    check_types("SamplingParams", params)
    params.validate()
    if params.best_of not in (None, params.n):
        raise StandInError("best_of beyond n is not imitated")
    if used := [name for name in _NOT_IMITATED_PARAMS if getattr(params, name)]:
        raise StandInError(f"not imitated: {used}")


def _check_disagg(disagg: Any, inputs: Any, params: Any, args: Any, reader: PromptReader) -> None:
    can_take_handles = reader.has_vision and SWITCHES.support_mm_disagg
    if disagg.multimodal_embedding_handles and disagg.request_type != "generation_only" and not can_take_handles:
        raise ValueError("the model's input processor does not support multimodal disaggregation")
    if disagg.request_type in ("context_only", "generation_only") and params.n != 1:
        raise ValueError("disaggregated requests need n = 1 and beam width 1")
    if (
        SWITCHES.is_1_4
        and disagg.request_type == "context_only"
        and not (disagg.disagg_request_id or 0) >= MIN_GLOBAL_ID
    ):
        raise StandInError("1.4 wants a disagg_request_id on every prefill, and none that its own ids may be")
    if disagg.request_type != "generation_only":
        return
    has_pictures = isinstance(inputs, dict) and (inputs.get("multi_modal_data") or inputs.get("multi_modal_embeddings"))
    if disagg.multimodal_embedding_handles or has_pictures:
        raise ValueError("generation-only request with multimodal parameters")
    if isinstance(inputs, str) or (isinstance(inputs, dict) and "prompt" in inputs):
        raise StandInError("decode must get prefill's token ids: text may tokenize differently")
    for name in ("first_gen_tokens", "ctx_request_id", "opaque_state"):
        if getattr(disagg, name) in (None, []):
            raise ValueError(f"generation_only request needs {name}")


def _check_length(token_ids: Sequence[int], args: Any, disagg: Any) -> None:
    if args.enable_chunked_prefill or (disagg is not None and disagg.request_type == "generation_only"):
        return
    if len(token_ids) > args.max_num_tokens:
        kind = RequestError if SWITCHES.long_prompt_error == "request_error" else ValueError
        raise kind(
            f"The sum of prompt length ({len(token_ids)}), query length (0) should not exceed "
            f"max_num_tokens ({args.max_num_tokens})"
        )


def _complete(params: Any, args: Any, tokenizer: Any, disagg: Any) -> list[tuple[int | str, list[int]]]:
    """Fill in what `LLM` fills in, in the caller's object; return what stops an answer besides the end id."""
    if params.end_id is None:
        if tokenizer is None:
            raise ValueError("Both end_id and tokenizer are None: set end_id in the SamplingParams")
        params.end_id = end_id_of(str(args.model)) or tokenizer.eos_token_id
        params.pad_id = params.end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    params._stream_interval = args.stream_interval
    if disagg is not None and disagg.request_type == "context_only":
        params.max_tokens = 1
    words: list[tuple[int | str, list[int]]] = [(token_id, [token_id]) for token_id in params.stop_token_ids or []]
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
    if stops and tokenizer is None:
        raise ValueError("stop words need a tokenizer")
    return words + [(stop, list(tokenizer.encode(stop, add_special_tokens=False))) for stop in stops]


def _processors(params: Any, args: Any) -> list[Any]:
    """Copies, as the rank's process gets them."""
    given = params.logits_processor
    given = given if isinstance(given, list) else [] if given is None else [given]
    if given and args.speculative_config is not None:
        # Upstream counts one row of logits a request where there are several, and says nothing.
        raise StandInError("logits processors change the rows of others with speculative decoding")
    for processor in given:
        if len(inspect.signature(processor).parameters) not in (4, 5):
            raise ValueError("a logits processor takes 4 or 5 arguments")
    copied: list[Any] = pickle.loads(pickle.dumps(given))
    return copied


def _decoder(tokenizer: Any, params: Any) -> Any:
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)


def _rank(scheduling: Any, args: Any, engine: StandInEngine) -> int:
    if scheduling is None or not args.enable_attention_dp:
        return engine.choose_rank(None, may_relax=True)
    check_types("SchedulingParams", scheduling)
    return engine.choose_rank(scheduling.attention_dp_rank, may_relax=bool(scheduling.attention_dp_relax))


def _salt(cache_salt: str | None, lora: Any) -> str:
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise TypeError("cache_salt must be a str")
    if cache_salt == "":
        raise ValueError("cache_salt must be a non-empty string if provided")
    return f"{cache_salt or ''}{'' if lora is None else f'#{lora.lora_int_id}'}"


def _adapter(lora: Any, args: Any) -> str | None:
    if lora is None:
        return None
    if not isinstance(lora, LoRARequest):
        raise TypeError(f"lora_request must be a LoRARequest, is {type(lora).__name__}")
    if not (args.enable_lora or args.lora_config):
        raise ValueError("this LLM was made without enable_lora or lora_config")
    if not lora.lora_path:
        raise ValueError("lora_path is needed: adapters are loaded by request")
    return str(lora.lora_path)


def _guide(params: Any, args: Any, tokenizer: Any) -> Any:
    """Make the request's guide; what fails about it comes while iterating, as the engine finds it there."""
    guided = params.guided_decoding
    if guided is None:
        return None
    reason: str | None = "guided decoding is requested, but guided_decoding_backend is not set"
    if args.guided_decoding_backend is not None:
        try:
            return make_guide(guided, lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True), params.end_id)
        except ValueError as error:
            reason = str(error)

    def fail(*_: Any) -> Any:
        raise RequestError(reason)

    return fail

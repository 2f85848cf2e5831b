"""What this adapter relies on in TensorRT-LLM, and what would not work without it: one table.

``quartet doctor trtllm`` compares it with an installed package (`inspection`). Whatever the adapter imports stands
here; a test sees to that. Fields of configurations are those of `api` and `api_configs`; here is what Quartet itself
sets or reckons with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Final

from quartet.engine.trtllm import api
from quartet.engine.trtllm.api_configs import CONFIGS

#: The line of versions that the adapter was written for.
VERSION: Final = "1.2"
#: What is known of other lines.
OTHER_VERSIONS: Mapping[str, str] = {
    "1.0": "lacks what came with 1.2, such as several answers and beam search on the PyTorch backend",
    "1.1": "lacks what came with 1.2, such as several answers and beam search on the PyTorch backend",
    "1.3": "has more fields in hand-offs, KV events and statistics, which Quartet passes over, and renames metrics",
}
EVERYTHING, DISAGGREGATION = "everything", "prefill and decode apart"
GUIDES, RANKS, ADAPTERS = "guided decoding", "attention data parallelism", "LoRA adapters"
EVENTS, LOAD, MEDIA = "KV events, and routing by cache with them", "load reports of the engine itself", "media"


class Form(StrEnum):
    """What the names of a symbol are."""

    PARAMETERS = "parameter"  # of a function
    FIELDS = "field"  # of a dataclass or a pydantic class
    ATTRIBUTES = "attribute"  # methods, properties, and what its methods assign
    MEMBERS = "member"  # of an enum


class Default(Enum):
    """Defaults that are no value."""

    REQUIRED = "required"
    ANY = "any"  # it is always given, or read only


@dataclass(frozen=True)
class Need:
    """Names of a symbol that one ability needs.

    Attributes:
        loses: what would not work.
        names: what must be there.
        defaults: what the adapter reckons with where it leaves a name out; these are needed as well.
    """

    loses: str
    names: str = ""
    defaults: Mapping[str, object] = field(default_factory=dict)

    @property
    def expected(self) -> Mapping[str, object]:
        """Every name with its default."""
        return {**dict.fromkeys(self.names.split(), Default.ANY), **self.defaults}


@dataclass(frozen=True)
class Symbol:
    """Something to be imported, or a method of it.

    Attributes:
        module: as the adapter writes it.
        name: in that module; ``LLM.shutdown`` is a method.
        loses: what would not work without it.
        form: what ``needs`` names; ``None`` where being there is enough.
        optional: names that only somebody's ``engine_args`` give.
    """

    module: str
    name: str
    loses: str
    form: Form | None = None
    needs: tuple[Need, ...] = ()
    optional: frozenset[str] = frozenset()

    @property
    def path(self) -> str:
        """As one writes it in Python."""
        return f"{self.module}.{self.name}"


def _config(module: str, name: str, loses: str, *needs: Need, table: str = "") -> Symbol:
    """A configuration: what is not needed of its table is only passed on."""
    names = frozenset(api.LLM.types if name == "TorchLlmArgs" else CONFIGS[table or name].types)
    # An alias, which is no field.
    return Symbol(module, name, loses, Form.FIELDS, needs, names - {"speculative_model_dir"})


_LLMAPI, _ARGS = "tensorrt_llm.llmapi", "tensorrt_llm.llmapi.llm_args"
_NO_DEFAULT = Default.REQUIRED

SYMBOLS: tuple[Symbol, ...] = (
    Symbol(
        "tensorrt_llm",
        "LLM",
        EVERYTHING,
        Form.PARAMETERS,
        (Need(EVERYTHING, defaults={"model": _NO_DEFAULT, "skip_tokenizer_init": False, "dtype": "auto"}),),
    ),
    Symbol(
        "tensorrt_llm",
        "LLM.generate_async",
        EVERYTHING,
        Form.PARAMETERS,
        (
            Need(EVERYTHING, "inputs sampling_params streaming"),
            Need(DISAGGREGATION, defaults={"disaggregated_params": None}),
            Need(RANKS, defaults={"scheduling_params": None}),
            Need(ADAPTERS, defaults={"lora_request": None}),
            Need("cache salts: requests with one are refused", defaults={"cache_salt": None}),
            Need("spans of the engine in traces", defaults={"trace_headers": None}),
        ),
    ),
    Symbol("tensorrt_llm", "LLM.shutdown", EVERYTHING),
    Symbol("tensorrt_llm", "LLM.get_kv_cache_events_async", EVENTS, Form.PARAMETERS, (Need(EVENTS, "timeout"),)),
    Symbol("tensorrt_llm", "LLM.get_kv_cache_events", EVENTS, Form.PARAMETERS, (Need(EVENTS, "timeout"),)),
    Symbol("tensorrt_llm", "LLM.get_stats_async", LOAD, Form.PARAMETERS, (Need(LOAD, "timeout"),)),
    Symbol("tensorrt_llm", "LLM.get_stats", LOAD, Form.PARAMETERS, (Need(LOAD, "timeout"),)),
    Symbol(
        _LLMAPI,
        "LLM",
        EVERYTHING,
        Form.ATTRIBUTES,
        (Need(EVERYTHING, "args tokenizer _executor"), Need(MEDIA, "input_processor")),
    ),
    Symbol(
        "tensorrt_llm",
        "MultimodalEncoder",
        "encode workers",
        Form.PARAMETERS,
        (Need("encode workers", defaults={"model": _NO_DEFAULT, "trust_remote_code": False}),),
    ),
    Symbol(
        "tensorrt_llm",
        "MultimodalEncoder.generate_async",
        "encode workers",
        Form.PARAMETERS,
        (Need("encode workers", "inputs"),),
    ),
    Symbol(
        "tensorrt_llm",
        "SamplingParams",
        EVERYTHING,
        Form.FIELDS,
        (
            Need(EVERYTHING, "max_tokens temperature top_k top_p seed end_id pad_id ignore_eos detokenize n"),
            Need("stop words and stop token ids", "stop stop_token_ids include_stop_str_in_output"),
            Need("penalties", "repetition_penalty presence_penalty frequency_penalty"),
            Need("min_p, min_tokens", "min_p min_tokens"),
            Need("log-probabilities", "logprobs prompt_logprobs"),
            Need("beam search", defaults={"use_beam_search": False, "best_of": None}),
            Need(GUIDES, defaults={"guided_decoding": None}),
            Need("times of a request as the engine measures them", defaults={"return_perf_metrics": False}),
        ),
    ),
    Symbol(_LLMAPI, "SamplingParams", EVERYTHING),
    *(
        Symbol(
            module,
            "GuidedDecodingParams",
            GUIDES,
            Form.FIELDS,
            (Need(GUIDES, defaults={"json": None, "regex": None, "grammar": None, "structural_tag": None}),),
        )
        for module in (_LLMAPI, "tensorrt_llm.sampling_params")
    ),
    *(
        Symbol(
            module,
            "DisaggregatedParams",
            DISAGGREGATION,
            Form.FIELDS,
            (
                Need(DISAGGREGATION, "request_type first_gen_tokens ctx_request_id opaque_state draft_tokens"),
                Need("media on encode workers", "multimodal_embedding_handles multimodal_hashes"),
            ),
        )
        for module in (_LLMAPI, "tensorrt_llm.disaggregated_params")
    ),
    Symbol(
        "tensorrt_llm.scheduling_params",
        "SchedulingParams",
        RANKS,
        Form.FIELDS,
        (Need(RANKS, "attention_dp_rank attention_dp_relax"),),
    ),
    Symbol(
        "tensorrt_llm.executor.request",
        "LoRARequest",
        ADAPTERS,
        Form.FIELDS,
        (Need(ADAPTERS, "lora_name lora_int_id lora_path"),),
    ),
    Symbol(
        "tensorrt_llm.executor.utils", "RequestError", "telling a failed request from a dead engine: each ends a worker"
    ),
    Symbol(
        _LLMAPI,
        "RequestOutput",
        EVERYTHING,
        Form.ATTRIBUTES,
        (
            Need(EVERYTHING, "request_id prompt_token_ids outputs finished abort __aiter__"),
            Need(DISAGGREGATION, "disaggregated_params"),
            Need("the number of tokens found in the cache", "cached_tokens"),
        ),
    ),
    Symbol(
        _LLMAPI,
        "CompletionOutput",
        EVERYTHING,
        Form.ATTRIBUTES,
        (
            Need(EVERYTHING, "index token_ids finish_reason stop_reason"),
            Need("log-probabilities", "logprobs prompt_logprobs"),
            Need(DISAGGREGATION, "disaggregated_params"),
        ),
    ),
    _config(
        _ARGS,
        "TorchLlmArgs",
        EVERYTHING,
        Need(EVERYTHING, "model kv_cache_config", {"max_num_tokens": 8192, "enable_chunked_prefill": False}),
        Need(EVERYTHING, "", {"max_batch_size": None, "max_seq_len": None, "max_beam_width": None}),
        Need(DISAGGREGATION, "disable_overlap_scheduler", {"cache_transceiver_config": None}),
        Need("several GPUs", "", {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "gpus_per_node": None}),
        Need("experts in parallel", "moe_expert_parallel_size"),
        Need(RANKS, "", {"enable_attention_dp": False}),
        Need(GUIDES, "", {"guided_decoding_backend": None}),
        Need(ADAPTERS, "", {"enable_lora": False, "lora_config": None}),
        Need(LOAD, "", {"enable_iter_perf_stats": False}),
        Need("metrics of requests as the engine measures them", "", {"return_perf_metrics": False}),
    ),
    _config(
        _LLMAPI,
        "KvCacheConfig",
        EVERYTHING,
        Need(
            EVERYTHING,
            "free_gpu_memory_fraction",
            {"enable_block_reuse": True, "tokens_per_block": 32, "dtype": "auto"},
        ),
        Need("a pool of num_blocks", "max_tokens"),
        Need(EVENTS, "", {"event_buffer_max_size": 0}),
    ),
    _config(_LLMAPI, "SchedulerConfig", "scheduler_config"),
    _config(_LLMAPI, "DynamicBatchConfig", "scheduler_config.dynamic_batch_config"),
    _config(
        _LLMAPI,
        "CacheTransceiverConfig",
        DISAGGREGATION,
        Need(DISAGGREGATION, "backend max_tokens_in_buffer kv_transfer_timeout_ms"),
    ),
    _config(_LLMAPI, "CudaGraphConfig", "cuda_graph_config"),
    _config(_LLMAPI, "MoeConfig", "moe_config"),
    _config(_LLMAPI, "AttentionDpConfig", "attention_dp_config"),
    _config(_LLMAPI, "TorchCompileConfig", "torch_compile_config"),
    _config(_LLMAPI, "EagleDecodingConfig", "speculative decoding with Eagle"),
    _config(_LLMAPI, "MTPDecodingConfig", "speculative decoding with MTP"),
    _config(_LLMAPI, "NGramDecodingConfig", "speculative decoding with n-grams"),
    _config(_ARGS, "PeftCacheConfig", ADAPTERS),
    _config(_ARGS, "KvCacheConnectorConfig", "kv_connector_config"),
    _config("tensorrt_llm.lora_helper", "LoraConfig", ADAPTERS),
    Symbol(
        "tensorrt_llm._torch.shared_tensor",
        "SharedTensorContainer",
        "media on encode workers: their embeddings in GPU memory",
        Form.ATTRIBUTES,
        (Need("media on encode workers", "from_tensor dump_to_dict from_dict get_local_view"),),
    ),
    Symbol(
        "tensorrt_llm.inputs",
        "default_multimodal_input_loader",
        MEDIA,
        Form.PARAMETERS,
        (Need(MEDIA, "tokenizer model_dir model_type modality prompts media image_data_format num_frames device"),),
    ),
)

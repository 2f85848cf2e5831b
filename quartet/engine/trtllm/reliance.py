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
from quartet.engine.trtllm.api_configs import CONFIGS, DECODING_CLASSES

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
EVENTS, LOAD = "KV events, and with them routing by cache", "what the engine itself says of its load"
ENCODING = "encode workers"
OWN_METRICS = "metrics of requests by the names that TensorRT-LLM gives them"
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


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
        is_optional: only somebody's ``engine_args`` name the symbol itself, or the adapter does without.
    """

    module: str
    name: str
    loses: str
    form: Form | None = None
    needs: tuple[Need, ...] = ()
    optional: frozenset[str] = frozenset()
    is_optional: bool = False

    @property
    def path(self) -> str:
        """As one writes it in Python."""
        return f"{self.module}.{self.name}"


_ARGS, _LLMAPI = "tensorrt_llm.llmapi.llm_args", "tensorrt_llm.llmapi"


def _config(name: str, loses: str, *needs: Need, module: str = _ARGS, is_optional: bool = False) -> Symbol:
    """A configuration: what is not needed of its table is only passed on."""
    table = api.LLM if name == "TorchLlmArgs" else CONFIGS.get(name)
    # The second is the alias of another, and no field.
    names = frozenset(table.types if table else ()) - {"speculative_model_dir"}
    return Symbol(module, name, loses, Form.FIELDS, needs, names, is_optional)


def _method(name: str, loses: str, *needs: Need) -> Symbol:
    return Symbol("tensorrt_llm", name, loses, Form.PARAMETERS, needs)


_LLM = (
    _method("LLM", EVERYTHING, Need(EVERYTHING, defaults={"model": Default.REQUIRED})),
    _method(
        "LLM.generate_async",
        EVERYTHING,
        Need(EVERYTHING, "inputs sampling_params", {"streaming": False}),
        Need(DISAGGREGATION, defaults={"disaggregated_params": None}),
        Need(RANKS, defaults={"scheduling_params": None}),
        Need(ADAPTERS, defaults={"lora_request": None}),
        Need("cache salts", defaults={"cache_salt": None}),
    ),
    _method("LLM.get_kv_cache_events_async", EVENTS, Need(EVENTS, "timeout")),
    _method("LLM.get_stats_async", LOAD, Need(LOAD, "timeout")),
    *(Symbol("tensorrt_llm", f"LLM.{name}", EVERYTHING) for name in ("shutdown", "__enter__", "__exit__")),
    # Under another path, so that what instances have is looked for apart from what the constructor takes.
    Symbol(_LLMAPI, "LLM", EVERYTHING, Form.ATTRIBUTES, (Need(EVERYTHING, "_executor"),)),
    _method("MultimodalEncoder", ENCODING, Need(ENCODING, defaults={"model": Default.REQUIRED})),
    _method("MultimodalEncoder.generate_async", ENCODING, Need(ENCODING, "inputs")),
)

_REQUESTS = (
    Symbol(
        "tensorrt_llm",
        "SamplingParams",
        EVERYTHING,
        Form.FIELDS,
        (
            Need(
                EVERYTHING, "max_tokens temperature top_k top_p seed end_id pad_id", {"n": 1, "use_beam_search": False}
            ),
            Need(EVERYTHING, "ignore_eos stop_token_ids include_stop_str_in_output detokenize add_special_tokens"),
            Need("penalties", defaults=dict.fromkeys(_PENALTIES)),
            Need("min_p, min_tokens", defaults={"min_p": None, "min_tokens": None}),
            Need("log probabilities", defaults={"logprobs": None}),
            Need(GUIDES, defaults={"guided_decoding": None}),
        ),
    ),
    Symbol(
        _LLMAPI,
        "GuidedDecodingParams",
        GUIDES,
        Form.FIELDS,
        (Need(GUIDES, defaults={"json": None, "regex": None, "grammar": None}),),
    ),
    Symbol(
        _LLMAPI,
        "DisaggregatedParams",
        DISAGGREGATION,
        Form.FIELDS,
        (
            Need(DISAGGREGATION, "request_type first_gen_tokens ctx_request_id opaque_state"),
            Need(f"{DISAGGREGATION} with speculation", "draft_tokens"),
            Need(ENCODING, defaults={"multimodal_embedding_handles": None, "multimodal_hashes": None}),
        ),
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
    Symbol("tensorrt_llm.executor.utils", "RequestError", "a failed request is taken for a dead engine"),
)

_RESULTS = (
    Symbol(
        _LLMAPI,
        "RequestOutput",
        EVERYTHING,
        Form.ATTRIBUTES,
        (
            Need(EVERYTHING, "prompt_token_ids outputs finished cached_tokens metrics_dict abort __aiter__ __await__"),
            Need(ENCODING, "disaggregated_params result"),
        ),
    ),
    Symbol(
        _LLMAPI,
        "CompletionOutput",
        EVERYTHING,
        Form.ATTRIBUTES,
        (
            Need(EVERYTHING, "token_ids finish_reason stop_reason"),
            Need("log probabilities", "logprobs"),
            Need(DISAGGREGATION, "disaggregated_params"),
        ),
    ),
)

_METRICS = (
    Symbol(
        "tensorrt_llm.metrics",
        "MetricsCollector",
        OWN_METRICS,
        Form.ATTRIBUTES,
        (Need(OWN_METRICS, "log_metrics_dict"),),
        is_optional=True,
    ),
)

_CONFIGS = (
    _config(
        "TorchLlmArgs",
        EVERYTHING,
        Need(EVERYTHING, "model kv_cache_config skip_tokenizer_init dtype"),
        # What nobody sets is reckoned with.
        Need(EVERYTHING, "", {"max_num_tokens": 8192, "max_beam_width": None, "enable_chunked_prefill": False}),
        Need(EVERYTHING, "", {"max_batch_size": None, "max_seq_len": None}),
        Need(DISAGGREGATION, "disable_overlap_scheduler", {"cache_transceiver_config": None}),
        Need("several GPUs", "", {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "gpus_per_node": None}),
        Need("experts in parallel", "moe_expert_parallel_size"),
        Need(RANKS, "", {"enable_attention_dp": False}),
        Need(GUIDES, "", {"guided_decoding_backend": None}),
        Need(ADAPTERS, "", {"enable_lora": False, "lora_config": None}),
        Need(LOAD, "", {"enable_iter_perf_stats": False}),
        Need("times of requests as the engine measures them", "", {"return_perf_metrics": False}),
    ),
    _config(
        "KvCacheConfig",
        EVERYTHING,
        Need(EVERYTHING, "free_gpu_memory_fraction", {"enable_block_reuse": True, "tokens_per_block": 32}),
        Need(DISAGGREGATION, "", {"dtype": "auto"}),
        Need("a pool of num_blocks", "max_tokens"),
        Need(EVENTS, "", {"event_buffer_max_size": 0}),
    ),
    _config(
        "CacheTransceiverConfig",
        DISAGGREGATION,
        Need(DISAGGREGATION, "backend max_tokens_in_buffer kv_transfer_timeout_ms"),
    ),
    _config("LoraConfig", ADAPTERS, Need(ADAPTERS, "lora_dir"), module="tensorrt_llm.lora_helper"),
    _config("PeftCacheConfig", ADAPTERS),
    *(
        _config(name, f"{name} in engine_args")
        for name in """
        SchedulerConfig DynamicBatchConfig CudaGraphConfig MoeConfig AttentionDpConfig TorchCompileConfig
        """.split()
    ),
    *(
        _config(name, f"{name} in engine_args", is_optional=True)
        for name in sorted({*DECODING_CLASSES.values(), "Nvfp4GemmConfig", "KvCacheConnectorConfig"})
    ),
    _config("LlmArgs", "the backend _autodeploy", module="tensorrt_llm._torch.auto_deploy.llm_args", is_optional=True),
)

_MEDIA = (
    Symbol(
        "tensorrt_llm._torch.shared_tensor",
        "SharedTensorContainer",
        ENCODING,
        Form.ATTRIBUTES,
        (Need(ENCODING, "from_dict get_local_view"),),
    ),
)

#: All of it.
SYMBOLS: tuple[Symbol, ...] = (*_LLM, *_REQUESTS, *_RESULTS, *_METRICS, *_CONFIGS, *_MEDIA)

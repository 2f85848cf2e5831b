"""The arguments of ``LLM`` and its sub-configs in TensorRT-LLM 1.2, names and types, and a check of arguments by them.

The tables are from its documentation and sources. Quartet keeps them because the package itself needs a GPU to show
them, and because 1.2 calls a keyword of 1.3 just "invalid argument". ``check_arguments`` refuses wrong names, types and
literals before a model loads.

Types are text: ``int``, ``float``, ``bool``, ``str``, ``dict``, ``list[X]``, ``set[X]`` (a list), ``dict[K,V]``,
``Literal['a','b']``, ``AnyCase['A','B']`` (the same in any case), ``int >= 0``, ``float in [0,1]``, and several by
`` | ``. Any other name is a class; no plain value from YAML is an instance of it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from quartet.errors import ConfigError

_ALLREDUCE = "AUTO NCCL UB MINLATENCY ONESHOT TWOSHOT LOWPRECISION MNNVL NCCL_SYMMETRIC".split()


@dataclass(frozen=True, kw_only=True)
class ConfigTable:
    """The fields of one class.

    Attributes:
        types: the type of each field that 1.2 has.
        required: fields that must be given.
        uncertain: types of fields that not every 1.2 has.
        later: fields that came with 1.3.
    """

    types: Mapping[str, str]
    required: tuple[str, ...] = ()
    uncertain: Mapping[str, str] = field(default_factory=dict)
    later: tuple[str, ...] = ()


def types_of(names_by_type: Mapping[str, str]) -> Mapping[str, str]:
    """Turn names by type, in one string for each type, into types by name."""
    return {name: kind for kind, names in names_by_type.items() for name in names.split()}


#: ``LLM(...)`` on the PyTorch backend.
LLM = ConfigTable(
    types=types_of(
        {
            "str | Path": "model",
            "str | Path | TokenizerBase | PreTrainedTokenizerBase | None": "tokenizer",
            "Literal['auto','slow']": "tokenizer_mode",
            "str": "dtype attn_backend",
            "str | None": """
                revision tokenizer_revision custom_tokenizer postprocess_tokenizer_dir reasoning_parser
                otlp_traces_endpoint backend checkpoint_format ray_worker_extension_cls
            """,
            "bool": """
                skip_tokenizer_init trust_remote_code enable_attention_dp enable_lm_head_tp_in_adp
                fail_fast_on_attention_window_too_large enable_lora enable_chunked_prefill gather_generation_logits
                return_perf_metrics disable_overlap_scheduler enable_iter_perf_stats enable_iter_req_stats
                print_iter_log enable_autotuner enable_layerwise_nvtx_marker enable_min_latency
                force_dynamic_quantization mm_encoder_only enable_sleep disable_flashinfer_sampling
            """,
            "int": """
                tensor_parallel_size pipeline_parallel_size context_parallel_size num_postprocess_workers
                garbage_collection_gen0_threshold perf_metrics_max_requests
            """,
            "int | None": """
                gpus_per_node moe_cluster_parallel_size moe_tensor_parallel_size moe_expert_parallel_size
                iter_stats_max_iterations request_stats_max_iterations max_batch_size max_input_len max_seq_len
                max_beam_width max_num_tokens
            """,
            "int > 0": "stream_interval",
            "int >= 0": "batch_wait_timeout_iters",
            "float >= 0": "batch_wait_timeout_ms",
            "float in [0,1]": "batch_wait_max_tokens_ratio",
            "list[int] | None": "pp_partition",
            "dict | None": "cp_config sparse_attention_config decoding_config ray_placement_config",
            "dict[str,str] | None": "env_overrides",
            "AnyCase['AUTO','DUMMY','VISION_ONLY']": "load_format",
            "Literal['xgrammar','llguidance'] | None": "guided_decoding_backend",
            "Literal['rpc','ray'] | None": "orchestrator_type",
            "Literal['TRTLLMSampler','TorchSampler','auto']": "sampler_type",
            f"Literal[{','.join(map(repr, _ALLREDUCE))}] | None": "allreduce_strategy",
            "LoraConfig | None": "lora_config",
            "KvCacheConfig": "kv_cache_config",
            "PeftCacheConfig | None": "peft_cache_config",
            "SchedulerConfig": "scheduler_config",
            "CacheTransceiverConfig | None": "cache_transceiver_config",
            "SpeculativeConfig | None": "speculative_config",
            "CudaGraphConfig | None": "cuda_graph_config",
            "AttentionDpConfig | None": "attention_dp_config",
            "MoeConfig": "moe_config",
            "Nvfp4GemmConfig": "nvfp4_gemm_config",
            "TorchCompileConfig | None": "torch_compile_config",
            "KvCacheConnectorConfig | None": "kv_connector_config",
            # Objects, which YAML can't express.
            "BatchedLogitsProcessor | None": "batched_logits_processor",
            "BaseCheckpointLoader | None": "checkpoint_loader",
        }
    ),
    uncertain=types_of(
        {
            "bool": "sampler_force_async_worker use_cute_dsl_blockscaling_mm use_cute_dsl_blockscaling_bmm",
            "int": "max_stats_len",
            "dict": "layer_wise_benchmarks_config",
        }
    ),
    later=tuple(
        """
        model_kwargs sleep_config dwdp_config prometheus_metrics_config enable_energy_metrics video_pruning_rate
        ray_worker_nsight_options encode_only
        """.split()
    ),
)

#: Keywords of the engine backend, which the PyTorch backend refuses.
REFUSED = frozenset(
    """
    enable_tqdm workspace enable_build_cache extended_runtime_perf_knob_config quant_config calib_config
    embedding_parallel_mode fast_build build_config enable_prompt_adapter max_prompt_adapter_token batching_type
    normalize_log_probs
    """.split()
)

#: The fields that every backend named AutoDeploy takes. Some backends take more; which fields is not known.
AUTODEPLOY = ConfigTable(
    types=types_of(
        {
            "str | Path": "model",
            "str | Path | TokenizerBase | PreTrainedTokenizerBase | None": "tokenizer",
            "bool": "trust_remote_code skip_loading_weights",
            "str": "model_factory attn_backend",
            "str | None": "compile_backend",
            "int": "world_size max_seq_len max_batch_size",
            "dict": "model_kwargs transforms",
            "dict | None": "tokenizer_kwargs",
            "list[int] | None": "cuda_graph_batch_sizes",
            "Literal['trtllm','demollm']": "runtime",
            "Literal['graph','transformers']": "mode",
            "KvCacheConfig": "kv_cache_config",
        }
    ),
)

#: The arguments that `MultimodalEncoder` uses: it loads the vision part alone, and keeps no KV.
ENCODER = frozenset(
    """
    model tokenizer tokenizer_mode revision tokenizer_revision custom_tokenizer skip_tokenizer_init trust_remote_code
    tensor_parallel_size gpus_per_node dtype load_format checkpoint_format attn_backend max_batch_size max_num_tokens
    enable_autotuner orchestrator_type env_overrides
    """.split()
)


_DECODING = types_of(
    {
        "int | None": "max_draft_len max_total_draft_tokens max_concurrency acceptance_window",
        "str | Path | None": "speculative_model speculative_model_dir",  # the second is the first's alias
        "dict[int,int] | None": "draft_len_schedule",
        "str | None": "load_format",
        "float | None": "acceptance_length_threshold",
        "bool": "allow_advanced_sampling",
    }
)

#: The classes of sub-configs, by name.
CONFIGS: Mapping[str, ConfigTable] = {
    "KvCacheConfig": ConfigTable(
        types=types_of(
            {
                "bool": "enable_block_reuse onboard_blocks enable_partial_reuse copy_on_partial_reuse use_uvm",
                "int": "event_buffer_max_size attention_dp_events_gather_period_ms tokens_per_block",
                "int >= 0": "max_gpu_total_bytes",
                "int | None": "max_tokens sink_token_length host_cache_size secondary_offload_min_priority",
                "list[int] | None": "max_attention_window",
                "float in [0,1] | None": "free_gpu_memory_fraction",
                "float | None": "cross_kv_cache_fraction",
                "str": "dtype",
                "Literal['auto','float16','bfloat16','float32']": "mamba_ssm_cache_dtype",
            }
        ),
        later=("disk_cache_size", "kv_events_config", "use_kv_cache_manager_v2", "iteration_stats_interval"),
    ),
    "SchedulerConfig": ConfigTable(
        types={
            "capacity_scheduler_policy": "Literal['MAX_UTILIZATION','GUARANTEED_NO_EVICT','STATIC_BATCH']",
            "context_chunking_policy": "Literal['FIRST_COME_FIRST_SERVED','EQUAL_PROGRESS'] | None",
            "dynamic_batch_config": "DynamicBatchConfig | None",
        },
        later=("waiting_queue_policy", "enable_prefix_aware_scheduling"),
    ),
    "DynamicBatchConfig": ConfigTable(
        types=types_of(
            {
                "bool": "enable_batch_size_tuning enable_max_num_tokens_tuning",
                "int": "dynamic_batch_moving_average_window",
            }
        ),
        required=(
            "enable_batch_size_tuning",
            "enable_max_num_tokens_tuning",
            "dynamic_batch_moving_average_window",
        ),
    ),
    "CacheTransceiverConfig": ConfigTable(
        types={
            "backend": "Literal['DEFAULT','UCX','NIXL','MOONCAKE','MPI'] | None",
            "max_tokens_in_buffer": "int | None",
            "kv_transfer_timeout_ms": "int > 0 | None",
            "kv_transfer_sender_future_timeout_ms": "int > 0 | None",
        },
        later=(
            "transceiver_runtime",
            "kv_transfer_poll_interval_ms",
            "kv_cache_bounce_size_mb",
            "enable_pipelined_transfer",
        ),
    ),
    "CudaGraphConfig": ConfigTable(
        types={"batch_sizes": "list[int] | None", "max_batch_size": "int >= 0", "enable_padding": "bool"}
    ),
    "MoeConfig": ConfigTable(
        types={
            "backend": "Literal['CUTLASS','CUTEDSL','WIDEEP','TRTLLM','DEEPGEMM','VANILLA','TRITON']",
            "max_num_tokens": "int | None",
            "load_balancer": "MoeLoadBalancerConfig | dict | str | None",
            "disable_finalize_fusion": "bool",
            "use_low_precision_moe_combine": "bool",
        }
    ),
    "MoeLoadBalancerConfig": ConfigTable(
        types={
            "num_slots": "int | None",
            "initial_global_assignments": "dict[int, list[int]] | None",
            "layer_updates_per_iter": "int",
        }
    ),
    "AttentionDpConfig": ConfigTable(
        types={"enable_balance": "bool", "timeout_iters": "int", "batching_wait_iters": "int"}
    ),
    "TorchCompileConfig": ConfigTable(
        types=types_of(
            {
                "bool": "enable_fullgraph enable_inductor enable_piecewise_cuda_graph enable_userbuffers",
                "list[int] | None": "capture_num_tokens",
                "int >= 1": "max_num_streams",
            }
        )
    ),
    "Nvfp4GemmConfig": ConfigTable(
        types={"allowed_backends": "list[Literal['cutlass','cublaslt','cutedsl','cuda_core']]"}
    ),
    "KvCacheConnectorConfig": ConfigTable(
        types=types_of({"str": "connector_module connector_scheduler_class connector_worker_class"}),
        required=("connector_module", "connector_scheduler_class", "connector_worker_class"),
        later=("connector",),
    ),
    "LoraConfig": ConfigTable(
        types=types_of(
            {
                "list[str]": "lora_dir lora_target_modules",
                "Literal['hf','nemo']": "lora_ckpt_source",
                "int": "max_lora_rank",
                "int | None": "max_loras max_cpu_loras",
                "dict[str,str]": "trtllm_modules_to_hf_modules",
                "bool": "swap_gate_up_proj_lora_b_weight",
            }
        )
    ),
    "PeftCacheConfig": ConfigTable(
        types=types_of(
            {
                "int": """
                    num_host_module_layer num_device_module_layer optimal_adapter_size max_adapter_size
                    num_put_workers num_ensure_workers num_copy_streams max_pages_per_block_host
                    max_pages_per_block_device host_cache_size
                """,
                "float": "device_cache_percent",
                "str | None": "lora_prefetch_dir",
            }
        )
    ),
    "EagleDecodingConfig": ConfigTable(
        types={
            **_DECODING,
            **types_of(
                {
                    "list[list[int]] | None": "eagle_choices",
                    "bool | None": "greedy_sampling use_dynamic_tree eagle3_one_model",
                    "float | None": "posterior_threshold",
                    "int | None": "dynamic_tree_max_topK num_eagle_layers max_non_leaves_per_layer",
                    "set[int] | None": "eagle3_layers_to_capture",
                    "str": "eagle3_model_arch",
                }
            ),
        },
        required=("max_draft_len",),
    ),
    "MTPDecodingConfig": ConfigTable(
        types={
            **_DECODING,
            **types_of(
                {
                    "int": """
                        num_nextn_predict_layers relaxed_topk num_nextn_predict_layers_from_model_config
                        begin_thinking_phase_token end_thinking_phase_token
                    """,
                    "float": "relaxed_delta",
                    "bool": "use_relaxed_acceptance_for_thinking use_mtp_vanilla mtp_eagle_one_model",
                }
            ),
        }
    ),
    "NGramDecodingConfig": ConfigTable(
        types={
            **_DECODING,
            "max_matching_ngram_size": "int",
            **types_of({"bool": "is_keep_all is_use_oldest is_public_pool"}),
        },
        required=("max_draft_len", "max_matching_ngram_size"),
    ),
    "DecodingBaseConfig": ConfigTable(types=_DECODING),
}

#: The class for each ``decoding_type`` of a ``speculative_config``. Classes without a table of their own have the
#: common fields, and others that are not known here.
DECODING_CLASSES: Mapping[str, str] = {
    "Eagle": "EagleDecodingConfig",
    "MTP": "MTPDecodingConfig",
    "NGram": "NGramDecodingConfig",
    "DraftTarget": "DraftTargetDecodingConfig",
    "Draft_Target": "DraftTargetDecodingConfig",
    "UserProvided": "UserProvidedDecodingConfig",
    "User_Provided": "UserProvidedDecodingConfig",
    "SaveState": "SaveHiddenStatesDecodingConfig",
    "AUTO": "AutoDecodingConfig",
}

#: Decoding types that the PyTorch backend refuses, and those that came with 1.3.
REFUSED_DECODING = frozenset({"Lookahead", "Medusa"})

LATER_DECODING = frozenset({"Eagle3", "PARD", "SA"})


def alternatives(text: str) -> tuple[str, ...]:
    """Split a type's text into its alternatives; a value must fit one of them."""
    return tuple(part.strip() for part in text.split("|"))


def fits(text: str, value: object) -> bool:
    """Whether ``value`` is of one of the types in ``text``."""
    return any(_checker(part)(value) for part in alternatives(text))


def misfit(text: str, value: object) -> str:
    """What is wrong with ``value``, for a message after the field's name."""
    choices = [choice for part in alternatives(text) for choice in _choices(part)]
    if not choices:
        return f"must be {text}, not {_shown(value)}"
    hint = f": write it {value.upper()}" if isinstance(value, str) and value.upper() in choices else ""
    return f"must be one of {', '.join(choices)}, not {_shown(value)}{hint}"


_Checker = Callable[[object], bool]

_QUOTED = re.compile(r"'([^']+)'")

_BOUND = re.compile(r"(int|float) (>=|>) (\d+)")

_OF_ITEMS = re.compile(r"(?:list|set)\[(.+)\]")

_BY_KEY = re.compile(r"dict\[(\w+), ?(.+)\]")


def _is_int(value: object) -> bool:
    # In Python, True is also an int.
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_int(value)


_PLAIN: dict[str, _Checker] = {
    "None": lambda value: value is None,
    "bool": lambda value: isinstance(value, bool),
    "int": _is_int,
    "float": _is_number,
    "str": lambda value: isinstance(value, str),
    "dict": lambda value: isinstance(value, Mapping),
    "float in [0,1]": lambda value: isinstance(value, int | float) and _is_number(value) and 0 <= value <= 1,
}


@cache
def _checker(text: str) -> _Checker:
    if text in _PLAIN:
        return _PLAIN[text]
    if choices := _choices(text):
        return _one_of(choices, any_case=text.startswith("AnyCase"))
    if bound := _BOUND.fullmatch(text):
        return _bounded(_PLAIN[bound[1]], int(bound[3]), or_equal=bound[2] == ">=")
    if items := _OF_ITEMS.fullmatch(text):
        return _list_of(_checker(items[1]))
    if pairs := _BY_KEY.fullmatch(text):
        return _mapping_of(_checker(pairs[1]), _checker(pairs[2]))
    return lambda _: False


def _choices(text: str) -> tuple[str, ...]:
    return tuple(_QUOTED.findall(text)) if text.startswith(("Literal[", "AnyCase[")) else ()


def _one_of(choices: tuple[str, ...], *, any_case: bool) -> _Checker:
    return lambda value: isinstance(value, str) and (value.upper() if any_case else value) in choices


def _bounded(is_kind: _Checker, least: int, *, or_equal: bool) -> _Checker:
    def check(value: object) -> bool:
        if not is_kind(value) or not isinstance(value, int | float):
            return False
        return value >= least if or_equal else value > least

    return check


def _list_of(is_item: _Checker) -> _Checker:
    return lambda value: isinstance(value, list | tuple) and all(is_item(item) for item in value)


def _mapping_of(is_key: _Checker, is_value: _Checker) -> _Checker:
    return lambda value: isinstance(value, Mapping) and all(is_key(k) and is_value(v) for k, v in value.items())


def _shown(value: object) -> str:
    """Show ``value`` itself only if it is short and plain: a mapping may hold private values."""
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


#: The types allow values below 1 here, and TensorRT-LLM may notice them only once the model is loaded.
_POSITIVE = frozenset(
    """
    max_batch_size max_num_tokens max_seq_len max_input_len max_beam_width gpus_per_node world_size
    tensor_parallel_size pipeline_parallel_size context_parallel_size
    kv_cache_config.tokens_per_block kv_cache_config.max_tokens cache_transceiver_config.max_tokens_in_buffer
    lora_config.max_lora_rank lora_config.max_loras lora_config.max_cpu_loras
    """.split()
)


def check_arguments(values: Mapping[str, object], table: ConfigTable) -> tuple[str, ...]:
    """Check ``values`` from a configuration against ``table``; fields that the table lacks are unknown.

    Returns:
        Warnings; each begins with the full name of a field.

    Raises:
        ConfigError: its message begins with the full name of a field.
    """
    warnings: list[str] = []
    _check_names(values, table, "", warnings)
    return tuple(warnings)


def _check_names(values: Mapping[str, object], table: ConfigTable, prefix: str, warnings: list[str]) -> None:
    for name, value in values.items():
        path = f"{prefix}{name}"
        if name in table.types:
            _check_value(table.types[name], value, path, warnings)
            if path in _POSITIVE and isinstance(value, int) and value < 1:
                raise ConfigError(f"{path}: must be at least 1, not {value}")
        elif name in table.uncertain:
            warnings.append(f"{path}: not in every TensorRT-LLM 1.2")
            _check_value(table.uncertain[name], value, path, warnings)
        else:
            raise ConfigError(f"{path}: {_why_unknown(name, table)}")
    for name in table.required:
        if name not in values:
            raise ConfigError(f"{prefix}{name}: is missing")


def _why_unknown(name: object, table: ConfigTable) -> str:
    if name in table.later:
        return "TensorRT-LLM 1.2 does not know it; it came with 1.3"
    if table is LLM and name in REFUSED:
        return "the PyTorch backend of TensorRT-LLM does not take it"
    if table is LLM and name in AUTODEPLOY.types:
        return "only the backend _autodeploy of TensorRT-LLM 1.2 takes it"
    near = difflib.get_close_matches(str(name), table.types)
    return f"TensorRT-LLM 1.2 does not know it{f'; did you mean {near[0]}?' if near else ''}"


def _check_value(kind: str, value: object, path: str, warnings: list[str]) -> None:
    for name in alternatives(kind):
        if isinstance(value, Mapping) and name == "SpeculativeConfig":
            return _check_speculative(value, path, warnings)
        if isinstance(value, Mapping) and name in CONFIGS:
            _check_names(value, CONFIGS[name], f"{path}.", warnings)
            return _check_rules(name, value, path)
    if not fits(kind, value):
        raise ConfigError(f"{path}: {misfit(kind, value)}")


def _check_rules(name: str, value: Mapping[str, object], path: str) -> None:
    if name == "CudaGraphConfig" and value.get("batch_sizes") and value.get("max_batch_size"):
        raise ConfigError(f"{path}.batch_sizes: set it or max_batch_size, not both")
    if name == "PeftCacheConfig" and value.get("lora_prefetch_dir") is not None:
        raise ConfigError(f"{path}.lora_prefetch_dir: TensorRT-LLM 1.2 does not support it")


def _check_speculative(value: Mapping[str, object], path: str, warnings: list[str]) -> None:
    kind = value.get("decoding_type")
    where = f"{path}.decoding_type"
    if kind in REFUSED_DECODING:
        raise ConfigError(f"{where}: the PyTorch backend of TensorRT-LLM does not take {kind}")
    if kind in LATER_DECODING:
        raise ConfigError(f"{where}: TensorRT-LLM 1.2 does not know {kind}; it came with 1.3")
    if not isinstance(kind, str) or kind not in DECODING_CLASSES:
        raise ConfigError(f"{where}: must be one of {', '.join(DECODING_CLASSES)}, not {kind!r}")
    fields = {name: item for name, item in value.items() if name != "decoding_type"}
    table = CONFIGS.get(DECODING_CLASSES[kind])
    if table is None:
        table = CONFIGS["DecodingBaseConfig"]
        for name in [name for name in fields if name not in table.types]:
            warnings.append(f"{path}.{name}: whether TensorRT-LLM 1.2 has it for {kind} is not known here")
            del fields[name]
    _check_names(fields, table, f"{path}.", warnings)
    if kind == "Eagle" and not (fields.get("speculative_model") or fields.get("speculative_model_dir")):
        raise ConfigError(f"{path}.speculative_model: is missing; Eagle needs a draft model")

"""What the sub-configs of TensorRT-LLM 1.2's ``LLM`` take: names and types, written as `field_types` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ConfigTable:
    """The fields of one class.

    Attributes:
        types: of each field that 1.2 has.
        required: those that must be given.
        uncertain: types of fields that not every 1.2 has.
        later: fields that came with 1.3.
    """

    types: Mapping[str, str]
    required: tuple[str, ...] = ()
    uncertain: Mapping[str, str] = field(default_factory=dict)
    later: tuple[str, ...] = ()


def types_of(names_by_type: Mapping[str, str]) -> Mapping[str, str]:
    """Types by name, of names in one string by type."""
    return {name: kind for kind, names in names_by_type.items() for name in names.split()}


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

#: The class for each ``decoding_type`` of a ``speculative_config``. Those without a table of their own have fields
#: beside the common ones that are not known here.
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

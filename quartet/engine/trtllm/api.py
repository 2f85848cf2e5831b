"""What ``LLM`` of TensorRT-LLM 1.2 takes, as far as its documentation and sources tell: names and types.

Types are written as `field_types` reads them, classes of sub-configs are those of `api_configs`. Kept here because the
package needs a GPU to say it itself, and because 1.2 tells a keyword of 1.3 by no more than "invalid argument".
"""

from __future__ import annotations

from quartet.engine.trtllm.api_configs import ConfigTable, types_of

_ALLREDUCE = "AUTO NCCL UB MINLATENCY ONESHOT TWOSHOT LOWPRECISION MNNVL NCCL_SYMMETRIC".split()

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
            # Objects, which no YAML can give.
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

#: What every backend that calls itself AutoDeploy takes; some take more, which ones is not known.
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

#: What `MultimodalEncoder` has a use for: it loads the vision part alone, and keeps no KV.
ENCODER = frozenset(
    """
    model tokenizer tokenizer_mode revision tokenizer_revision custom_tokenizer skip_tokenizer_init trust_remote_code
    tensor_parallel_size gpus_per_node dtype load_format checkpoint_format attn_backend max_batch_size max_num_tokens
    enable_autotuner orchestrator_type env_overrides
    """.split()
)

"""The API's classes, as upstream exports them here."""

from __future__ import annotations

from tensorrt_llm._stand_in.switches import SWITCHES
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.result import CompletionOutput, RequestOutput
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.llm_args import (
    AttentionDpConfig,
    CacheTransceiverConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    CudaGraphConfig,
    DynamicBatchConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MoeConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SchedulerConfig,
    TorchCompileConfig,
)
from tensorrt_llm.llmapi.mm_encoder import MultimodalEncoder
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

__all__ = [
    "LLM",
    "AttentionDpConfig",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "ContextChunkingPolicy",
    "CudaGraphConfig",
    "DisaggregatedParams",
    "DynamicBatchConfig",
    "EagleDecodingConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "MTPDecodingConfig",
    "MoeConfig",
    "MultimodalEncoder",
    "NGramDecodingConfig",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TorchCompileConfig",
]

if SWITCHES.is_1_4:
    from tensorrt_llm._stand_in.conversation import ConversationParams

    __all__ += ["ConversationParams"]

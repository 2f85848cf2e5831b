"""From a worker's settings to the arguments of TensorRT-LLM 1.2; needs neither the package nor a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from quartet.engine.settings import Backend
from quartet.engine.trtllm import roles
from quartet.engine.trtllm.layers import DEFAULT_BLOCK_SIZE, KV_CACHE, Arguments, merge_layers
from quartet.errors import ConfigError

if TYPE_CHECKING:
    from quartet.engine.catalog import EngineSpec


class Use(StrEnum):
    """What a worker does with TensorRT-LLM."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


@dataclass(frozen=True, kw_only=True)
class LlmArguments:
    """Arguments of ``tensorrt_llm.LLM``, or of ``MultimodalEncoder`` to encode, and what follows from them.

    Attributes:
        values: by name, ``model`` included; plain values, sub-configs as mappings (`objects.build_objects`).
        warnings: for the worker's log; each begins with the name of a setting.
        block_size: tokens of a block.
        max_batch_size, max_seq_len, max_num_tokens: the bounds; ``None``: TensorRT-LLM's own, known once it has loaded.
        has_transceiver: whether KV blocks can be handed over.
        transfer_timeout_s: how long a hand-off waits to be fetched; ``None`` without a transceiver.
        num_ranks: attention-data-parallel ranks, 1 without them.
        has_events, has_stats, has_perf_metrics: whether it tells of its cache, of its steps, of each request's times.
        kv_dtype: of the cache, as ``Arguments.kv_dtype``.
        has_chunked_prefill: whether prompts may be longer than ``max_num_tokens``.
        guided_backend: what guides decoding; ``None``: guided requests fail.
        has_lora: whether requests may name an adapter.
        max_beam_width: beams that a request may have.
    """

    values: Mapping[str, object]
    warnings: tuple[str, ...] = ()
    block_size: int = DEFAULT_BLOCK_SIZE
    max_batch_size: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    has_transceiver: bool = False
    transfer_timeout_s: float | None = None
    num_ranks: int = 1
    has_events: bool = False
    has_stats: bool = False
    has_perf_metrics: bool = False
    kv_dtype: str = "auto"
    has_chunked_prefill: bool = False
    guided_backend: str | None = None
    has_lora: bool = False
    max_beam_width: int = 1


def llm_arguments(spec: EngineSpec, use: Use) -> LlmArguments:
    """What TensorRT-LLM is given for a worker of ``use``.

    Later layers win: the fields of ``spec.engine``, its ``extra_engine_args``, its ``override_engine_args``; then the
    role's needs are added where nobody said anything.

    Raises:
        ConfigError: naming the setting (and key) that TensorRT-LLM 1.2, or the role, does not allow.
    """
    arguments, backend = merge_layers(spec.engine)
    if use is Use.ENCODE:
        return _encoder_arguments(spec, arguments, backend)
    roles.refuse_encoder_alone(arguments)
    if backend is Backend.AUTODEPLOY:
        return _autodeploy_arguments(spec, use, arguments)
    _keep_results_whole(arguments)
    timeout_s = roles.prepare_prefill(arguments) if use is Use.PREFILL else roles.prepare_decode(arguments)
    publishes = spec.engine.publish_events_and_metrics
    has_events = publishes and roles.publish_events(arguments)
    has_stats = publishes and roles.publish_metrics(arguments, "enable_iter_perf_stats")
    has_perf_metrics = publishes and roles.publish_metrics(arguments, "return_perf_metrics")
    values = {"model": spec.model_path, **arguments.values}
    cache = arguments.section(KV_CACHE)
    return LlmArguments(
        values=values,
        warnings=tuple(arguments.warnings),
        block_size=_int(cache, "tokens_per_block", DEFAULT_BLOCK_SIZE),
        max_batch_size=_int_or_none(values, "max_batch_size", _MAX_BATCH_SIZE) or _MAX_BATCH_SIZE,
        max_seq_len=_int_or_none(values, "max_seq_len", None),
        max_num_tokens=_int_or_none(values, "max_num_tokens", _MAX_NUM_TOKENS),
        has_transceiver=timeout_s is not None,
        transfer_timeout_s=timeout_s,
        num_ranks=_int(values, "tensor_parallel_size", 1) if values.get("enable_attention_dp") else 1,
        has_events=has_events,
        has_stats=has_stats,
        has_perf_metrics=has_perf_metrics,
        kv_dtype=arguments.kv_dtype,
        has_chunked_prefill=bool(values.get("enable_chunked_prefill")),
        guided_backend=_str_or_none(values, "guided_decoding_backend"),
        has_lora=bool(values.get("enable_lora") or values.get("lora_config")),
        max_beam_width=_int(values, "max_beam_width", 1),
    )


def _keep_results_whole(arguments: Arguments) -> None:
    """Detokenizing elsewhere is of no use to who takes ids, and such results may lack what is handed on."""
    if arguments.values.pop("num_postprocess_workers", None):
        arguments.warnings.append(f"{arguments.origin('num_postprocess_workers')}: left out, text is made by routers")


# What the PyTorch backend and AutoDeploy make of what nobody says.
_MAX_BATCH_SIZE, _MAX_NUM_TOKENS = 2048, 8192
_AUTODEPLOY_MAX_BATCH_SIZE, _AUTODEPLOY_MAX_SEQ_LEN = 8, 512


def _autodeploy_arguments(spec: EngineSpec, use: Use, arguments: Arguments) -> LlmArguments:
    if use is Use.PREFILL:
        raise ConfigError("backend: _autodeploy hands no KV blocks over, so it serves on decode workers only")
    roles.keep_safe_for_autodeploy(arguments)
    has_events = spec.engine.publish_events_and_metrics and roles.publish_events(arguments)
    cache = arguments.section(KV_CACHE)
    return LlmArguments(
        values={"model": spec.model_path, "backend": Backend.AUTODEPLOY.value, **arguments.values},
        warnings=tuple(arguments.warnings),
        block_size=_int(cache, "tokens_per_block", DEFAULT_BLOCK_SIZE),
        max_batch_size=_int(arguments.values, "max_batch_size", _AUTODEPLOY_MAX_BATCH_SIZE),
        max_seq_len=_int(arguments.values, "max_seq_len", _AUTODEPLOY_MAX_SEQ_LEN),
        has_events=has_events,
        kv_dtype=arguments.kv_dtype,
    )


def _encoder_arguments(spec: EngineSpec, arguments: Arguments, backend: Backend) -> LlmArguments:
    if backend is Backend.AUTODEPLOY:
        raise ConfigError("backend: _autodeploy encodes no media")
    roles.keep_fit_for_encoder(arguments)
    arguments.set_default("max_batch_size", spec.encoder.max_batch_size)
    values = {"model": spec.model_path, **arguments.values}
    return LlmArguments(
        values=values,
        warnings=tuple(arguments.warnings),
        max_batch_size=_int_or_none(values, "max_batch_size", None),
        max_num_tokens=_int_or_none(values, "max_num_tokens", _ENCODER_MAX_NUM_TOKENS),
    )


_ENCODER_MAX_NUM_TOKENS = 16_384


def _int(values: Mapping[str, object], name: str, default: int) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else default


def _int_or_none(values: Mapping[str, object], name: str, default: int | None) -> int | None:
    value = values.get(name, default)
    return value if isinstance(value, int) else None


def _str_or_none(values: Mapping[str, object], name: str) -> str | None:
    value = values.get(name)
    return value if isinstance(value, str) else None

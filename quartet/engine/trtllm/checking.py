"""Whether TensorRT-LLM 1.2 takes arguments, said before a model loads: by their names, types and literals."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from quartet.engine.trtllm import api, api_configs
from quartet.engine.trtllm.api_configs import CONFIGS, ConfigTable
from quartet.engine.trtllm.field_types import alternatives, fits, misfit
from quartet.errors import ConfigError

#: Types alone let these pass, and TensorRT-LLM may notice only once the model is loaded.
_POSITIVE = frozenset(
    """
    max_batch_size max_num_tokens max_seq_len max_input_len max_beam_width gpus_per_node world_size
    tensor_parallel_size pipeline_parallel_size context_parallel_size
    kv_cache_config.tokens_per_block kv_cache_config.max_tokens cache_transceiver_config.max_tokens_in_buffer
    lora_config.max_lora_rank lora_config.max_loras lora_config.max_cpu_loras
    """.split()
)


def check_arguments(values: Mapping[str, object], table: ConfigTable) -> tuple[str, ...]:
    """Check ``values``, given by somebody, against ``table``; what that lacks is unknown.

    Returns:
        Warnings, each of which begins with the full name of a field.

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
    if table is api.LLM and name in api.REFUSED:
        return "the PyTorch backend of TensorRT-LLM does not take it"
    if table is api.LLM and name in api.AUTODEPLOY.types:
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
    if kind in api_configs.REFUSED_DECODING:
        raise ConfigError(f"{where}: the PyTorch backend of TensorRT-LLM does not take {kind}")
    if kind in api_configs.LATER_DECODING:
        raise ConfigError(f"{where}: TensorRT-LLM 1.2 does not know {kind}; it came with 1.3")
    if not isinstance(kind, str) or kind not in api_configs.DECODING_CLASSES:
        raise ConfigError(f"{where}: must be one of {', '.join(api_configs.DECODING_CLASSES)}, not {kind!r}")
    fields = {name: item for name, item in value.items() if name != "decoding_type"}
    table = CONFIGS.get(api_configs.DECODING_CLASSES[kind])
    if table is None:
        table = CONFIGS["DecodingBaseConfig"]
        for name in [name for name in fields if name not in table.types]:
            warnings.append(f"{path}.{name}: whether TensorRT-LLM 1.2 has it for {kind} is not known here")
            del fields[name]
    _check_names(fields, table, f"{path}.", warnings)
    if kind == "Eagle" and not (fields.get("speculative_model") or fields.get("speculative_model_dir")):
        raise ConfigError(f"{path}.speculative_model: is missing; Eagle needs a draft model")

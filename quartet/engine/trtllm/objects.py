"""From plain arguments to what the installed TensorRT-LLM takes from Python: some sub-configs must be objects."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from quartet.engine.settings import Backend
from quartet.engine.trtllm.api_configs import DECODING_CLASSES
from quartet.engine.trtllm.arguments import LlmArguments
from quartet.errors import ConfigError


def build_objects(arguments: LlmArguments) -> dict[str, object]:
    """Keywords for ``LLM`` or ``MultimodalEncoder``; new objects at every call. Imports the package; loads no model.

    Raises:
        ConfigError: the package is not installed, or what is installed lacks an argument, which the message names.
    """
    llm_args = _module("tensorrt_llm.llmapi.llm_args")
    known = _arguments_class(llm_args, arguments).model_fields
    for name in arguments.values:
        if name not in known and name != "backend":
            raise ConfigError(f"{name}: the TensorRT-LLM installed here{_version()} does not have it")
    return {name: _build(llm_args, name, value) for name, value in arguments.values.items()}


# 1.2's reader of YAML makes these itself; from Python it is up to the caller. Pydantic does it for all others, too.
_CLASSES = {
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "cache_transceiver_config": "CacheTransceiverConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "moe_config": "MoeConfig",
    "attention_dp_config": "AttentionDpConfig",
    "nvfp4_gemm_config": "Nvfp4GemmConfig",
}


def _arguments_class(llm_args: Any, arguments: LlmArguments) -> Any:
    if arguments.values.get("backend") == Backend.AUTODEPLOY:
        return _module("tensorrt_llm._torch.auto_deploy.llm_args").LlmArgs
    return llm_args.TorchLlmArgs


def _build(llm_args: Any, name: str, value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    fields = dict(value)
    if name == "speculative_config":
        class_name = DECODING_CLASSES[str(fields.pop("decoding_type"))]
        if not hasattr(llm_args, class_name):
            raise ConfigError(f"{name}.decoding_type: the TensorRT-LLM installed here{_version()} does not have it")
        return _made(name, getattr(llm_args, class_name), fields)
    if name == "lora_config":
        return _made(name, _module("tensorrt_llm.lora_helper").LoraConfig, fields)
    kind = getattr(llm_args, _CLASSES.get(name, ""), None)
    return fields if kind is None else _made(name, kind, fields)


def _made(name: str, kind: Any, fields: dict[str, object]) -> object:
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: the TensorRT-LLM installed here{_version()} refuses it: {error}") from error


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"engine.kind: trtllm needs the package tensorrt_llm, which is not installed here: {error.name}"
        ) from error


def _version() -> str:
    version = getattr(_module("tensorrt_llm"), "__version__", None)
    return f" ({version})" if version else ""

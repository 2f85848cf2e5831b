"""`TorchLlmArgs` and its parts, from the description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import yaml
from tensorrt_llm._stand_in import schema
from tensorrt_llm._stand_in.schema import NAMES, make_enum, make_model
from tensorrt_llm._stand_in.switches import SWITCHES
from tensorrt_llm.lora_helper import LoraConfig

CapacitySchedulerPolicy = make_enum("CapacitySchedulerPolicy")
ContextChunkingPolicy = make_enum("ContextChunkingPolicy")
LoadFormat = make_enum("LoadFormat")
NAMES["LoraConfig"] = LoraConfig
_TRANSCEIVERS = schema.API["enums"]["CacheTransceiverBackend"]


class _CacheTransceiverRules(pydantic.BaseModel):
    @pydantic.field_validator("backend", mode="before", check_fields=False)
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        return value.upper() if SWITCHES.lower_case_transceivers and isinstance(value, str) else value


class _CudaGraphRules(pydantic.BaseModel):
    @pydantic.model_validator(mode="after")
    def _sizes(self) -> Any:
        config: Any = self
        generated = _batch_sizes(config.max_batch_size or 128, config.enable_padding)
        given = config.batch_sizes
        if given and config.max_batch_size and sorted(given) != generated:
            raise ValueError("Please don't set both cuda_graph_config.batch_sizes and its max_batch_size.")
        config.batch_sizes = sorted(given) if given else generated
        config.max_batch_size = config.batch_sizes[-1]
        return self


def _batch_sizes(maximum: int, enable_padding: bool) -> list[int]:
    sizes = [1, 2, 4, *range(8, 129, 8)] if enable_padding else [*range(1, 33), 64, 128]
    while sizes[-1] * 2 <= maximum:
        sizes.append(sizes[-1] * 2)
    return [*(size for size in sizes if size < maximum), maximum]


class _PeftCacheRules(pydantic.BaseModel):
    @pydantic.model_validator(mode="after")
    def _no_prefetch(self) -> Any:
        if self.lora_prefetch_dir is not None:  # type: ignore[attr-defined]
            raise ValueError("lora_prefetch_dir is not supported")
        return self


KvCacheConfig = make_model("KvCacheConfig")
DynamicBatchConfig = make_model("DynamicBatchConfig")
SchedulerConfig = make_model("SchedulerConfig")
CacheTransceiverConfig = make_model("CacheTransceiverConfig", _CacheTransceiverRules)
CudaGraphConfig = make_model("CudaGraphConfig", _CudaGraphRules)
MoeLoadBalancerConfig = make_model("MoeLoadBalancerConfig")
MoeConfig = make_model("MoeConfig")
AttentionDpConfig = make_model("AttentionDpConfig")
TorchCompileConfig = make_model("TorchCompileConfig")
Nvfp4GemmConfig = make_model("Nvfp4GemmConfig")
_PARTS_OF_CONNECTOR = ("connector_module", "connector_scheduler_class", "connector_worker_class")


class _ConnectorRules(pydantic.BaseModel):
    @pydantic.model_validator(mode="after")
    def _resolve(self) -> Any:
        if not SWITCHES.connector_names:
            return self
        config: Any = self
        if config.connector not in (None, "lmcache", "lmcache-mp", "kvbm"):
            raise ValueError(f"Unknown connector preset: {config.connector!r}")
        for name in _PARTS_OF_CONNECTOR:
            if config.connector is not None:
                setattr(config, name, getattr(config, name) or f"{name} of {config.connector}")
            elif getattr(config, name) is None:
                raise ValueError(f"{name} is required")
        return self


KvCacheConnectorConfig = make_model(
    "KvCacheConnectorConfig",
    _ConnectorRules,
    own=dict.fromkeys(("connector", *_PARTS_OF_CONNECTOR, "server_url"), (str | None, None))
    if SWITCHES.connector_names
    else None,
)
PeftCacheConfig = make_model("PeftCacheConfig", _PeftCacheRules)


class DecodingBaseConfig(pydantic.BaseModel):
    """What a speculative configuration is: a dict is not one."""


EagleDecodingConfig = make_model("EagleDecodingConfig", DecodingBaseConfig)
MTPDecodingConfig = make_model("MTPDecodingConfig", DecodingBaseConfig)
NGramDecodingConfig = make_model("NGramDecodingConfig", DecodingBaseConfig)
_SPECULATIVE = {"Eagle": EagleDecodingConfig, "MTP": MTPDecodingConfig, "NGram": NGramDecodingConfig}
if SWITCHES.is_1_4:
    _SPECULATIVE |= {
        "Eagle3": make_model("EagleDecodingConfig", DecodingBaseConfig),
        "PARD": make_model("DecodingBaseConfig", DecodingBaseConfig),
        "SA": make_model("DecodingBaseConfig", DecodingBaseConfig, own={"max_matching_ngram_size": (int, -1)}),
    }


class _TorchRules(pydantic.BaseModel):
    """What `TorchLlmArgs` makes of what it is given."""

    @pydantic.field_validator("load_format", mode="before", check_fields=False)
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) and not isinstance(value, LoadFormat) else value

    @pydantic.field_validator("speculative_config", mode="before", check_fields=False)
    @classmethod
    def _by_decoding_type(cls, value: Any) -> Any:
        return _speculative(dict(value)) if SWITCHES.is_1_4 and isinstance(value, dict) else value

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_sampler_type(cls, values: Any) -> Any:
        if not SWITCHES.is_1_4 or "sampler_type" not in values:
            return values
        if values["sampler_type"] not in ("auto", "TorchSampler"):
            raise ValueError("'sampler_type' was removed: TorchSampler is the only sampler")
        return {name: value for name, value in values.items() if name != "sampler_type"}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _needs_gpu(cls, values: Any) -> Any:
        if SWITCHES.num_gpus == 0:
            raise RuntimeError("No CUDA GPUs are available")
        return values

    @pydantic.model_validator(mode="after")
    def _fill(self) -> Any:
        for name, param in schema.params_of("TorchLlmArgs").items():
            if "effective_default" in param and getattr(self, name, 0) is None:
                setattr(self, name, param["effective_default"])
        for name in ("moe_cluster_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size"):
            if getattr(self, name) is None:
                setattr(self, name, -1)
        args: Any = self
        args.gpus_per_node = args.gpus_per_node or SWITCHES.num_gpus
        if hasattr(args, "checkpoint_format"):
            args.checkpoint_format = args.checkpoint_format or "HF"
            self._check_ray()
        return self

    def _check_ray(self) -> None:
        for name in ("ray_worker_extension_cls", "ray_placement_config"):
            if getattr(self, name) is not None and self.orchestrator_type != "ray":  # type: ignore[attr-defined]
                raise ValueError(f"{name} is only supported with orchestrator_type='ray'")


_PROSE: dict[str, Any] = {
    "speculative_config": pydantic.InstanceOf[DecodingBaseConfig] | None,
    "load_format": LoadFormat,
}
TorchLlmArgs = make_model("TorchLlmArgs", _TorchRules, **_PROSE)
LlmArgs = TorchLlmArgs


@schema.signed("update_llm_args_with_extra_dict", self_name=None)
def update_llm_args_with_extra_dict(
    llm_args: dict[str, Any], llm_args_dict: dict[str, Any], extra_llm_api_options: str | None
) -> dict[str, Any]:
    """Merge options into arguments of `LLM`: options win, only the KV cache's merge key by key."""
    options = dict(llm_args_dict)
    if "kv_cache_config" in options and "kv_cache_config" in llm_args:
        given = llm_args["kv_cache_config"]
        given = given if isinstance(given, dict) else given.model_dump(exclude_unset=True)
        options["kv_cache_config"] = {**given, **options["kv_cache_config"]}
    classes = {
        "kv_cache_config": KvCacheConfig,
        "moe_config": MoeConfig,
        "lora_config": LoraConfig,
        "attention_dp_config": AttentionDpConfig,
        "nvfp4_gemm_config": Nvfp4GemmConfig,
    }
    for name, kind in classes.items():
        if isinstance(options.get(name), dict):
            options[name] = kind(**options[name])
    if isinstance(options.get("speculative_config"), dict):
        options["speculative_config"] = _speculative(dict(options["speculative_config"]))
    return {**llm_args, **options}


def _speculative(options: dict[str, Any]) -> Any:
    kind = options.pop("decoding_type", None)
    if kind not in _SPECULATIVE:
        raise ValueError(f"Invalid decoding type: {kind}")
    return _SPECULATIVE[kind](**options)


@schema.signed("update_llm_args_with_extra_options", self_name=None)
def update_llm_args_with_extra_options(llm_args: dict[str, Any], extra_llm_api_options: str) -> dict[str, Any]:
    """Merge a YAML file's options into arguments of `LLM`."""
    options = yaml.safe_load(Path(extra_llm_api_options).read_text(encoding="utf-8")) or {}
    merged: dict[str, Any] = update_llm_args_with_extra_dict(llm_args, options, extra_llm_api_options)
    return merged

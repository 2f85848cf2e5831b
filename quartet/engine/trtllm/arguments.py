"""From a worker's settings to the arguments of TensorRT-LLM; needs neither the package nor a GPU.

``merge_layers`` lays a file's arguments over those of our own fields, and ``override_engine_args`` over both. The
``prepare_``, ``keep_`` and ``publish_`` functions set what a worker's role needs if no layer sets it, and refuse other
values. ``build_objects`` makes the objects that the installed package takes from Python for some sub-configs.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quartet.config import load_yaml
from quartet.engine.settings import Backend, EngineSettings
from quartet.engine.trtllm import schema
from quartet.engine.trtllm.connector import check_connector, use_connector
from quartet.engine.trtllm.schema import DECODING_CLASSES, ConfigTable, check_arguments
from quartet.errors import ConfigError, ModelFilesError
from quartet.text import model_files

if TYPE_CHECKING:
    from quartet.engine.settings import EngineSpec


class Use(StrEnum):
    """What a worker does with TensorRT-LLM."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


#: TensorRT-LLM's own block size, in tokens, if no layer sets one.
DEFAULT_BLOCK_SIZE = 32

#: Arguments by which TensorRT-LLM sends spans of its own, and measures the times that it makes them of.
TRACES_ENDPOINT, PERF_METRICS = "otlp_traces_endpoint", "return_perf_metrics"


@dataclass(frozen=True, kw_only=True)
class LlmArguments:
    """Arguments of ``tensorrt_llm.LLM``, or of ``MultimodalEncoder`` to encode, and what follows from them.

    Attributes:
        values: by name, ``model`` included; plain values, sub-configs as mappings (see ``build_objects``).
        warnings: for the worker's log; each begins with the name of a setting.
        block_size: tokens of a block.
        max_batch_size, max_seq_len, max_num_tokens: the bounds; ``None``: TensorRT-LLM's own, known once it has loaded.
        has_transceiver: whether KV blocks can be handed over.
        transfer_timeout_s: how long a hand-off waits to be fetched; ``None`` without a transceiver.
        num_ranks: attention-data-parallel ranks, 1 without them.
        has_events, has_stats, has_perf_metrics: whether TensorRT-LLM reports KV events, statistics of its steps, and
            the times of each request.
        kv_dtype: dtype of the KV cache; see ``Arguments.kv_dtype``.
        has_chunked_prefill: whether prompts may be longer than ``max_num_tokens``.
        guided_backend: the library that guides decoding; ``None``: guided requests fail.
        has_lora: whether requests may name an adapter.
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


def llm_arguments(spec: EngineSpec, use: Use) -> LlmArguments:
    """Return the arguments that a worker of ``use`` gives to TensorRT-LLM.

    Later layers win: the fields of ``spec.engine``, its ``extra_engine_args``, its ``override_engine_args``. Then this
    function sets what the role needs if no layer has set it.

    Raises:
        ConfigError: names the setting (and key) that TensorRT-LLM, or the role, does not allow.
    """
    arguments, backend = merge_layers(spec.engine)
    if use is Use.ENCODE:
        return _encoder_arguments(spec, arguments, backend)
    refuse_encoder_alone(arguments)
    refuse_beams(arguments)
    if backend is Backend.AUTODEPLOY:
        return _autodeploy_arguments(spec, use, arguments)
    _keep_results_whole(arguments)
    use_connector(arguments, spec.engine.connector)
    arguments.set_default("scheduler_config", _DEFAULT_SCHEDULER)
    timeout_s = prepare_prefill(arguments) if use is Use.PREFILL else prepare_decode(arguments)
    if use is Use.PREFILL:
        _warn_of_small_buffer(arguments, spec.model_path)
    if spec.engine.logits_processors:
        prepare_processors(arguments, use)
    publishes = spec.engine.publish_events_and_metrics
    has_events = publishes and publish_events(arguments)
    has_stats = publishes and publish_metrics(arguments, "enable_iter_perf_stats")
    has_perf_metrics = publishes and publish_metrics(arguments, PERF_METRICS)
    if spec.otlp_endpoint:
        trace(arguments, spec.otlp_endpoint)
    values = {"model": spec.model_path, **arguments.values}
    cache = arguments.section(KV_CACHE)
    return LlmArguments(
        values=values,
        warnings=tuple(arguments.warnings),
        block_size=_value(cache, "tokens_per_block", int) or DEFAULT_BLOCK_SIZE,
        max_batch_size=_value(values, "max_batch_size", int) or _MAX_BATCH_SIZE,
        max_seq_len=_value(values, "max_seq_len", int),
        max_num_tokens=_value(values, "max_num_tokens", int, _MAX_NUM_TOKENS),
        has_transceiver=timeout_s is not None,
        transfer_timeout_s=timeout_s,
        num_ranks=(_value(values, "tensor_parallel_size", int) or 1) if values.get("enable_attention_dp") else 1,
        has_events=has_events,
        has_stats=has_stats,
        has_perf_metrics=has_perf_metrics,
        kv_dtype=arguments.kv_dtype,
        has_chunked_prefill=bool(values.get("enable_chunked_prefill")),
        guided_backend=_value(values, "guided_decoding_backend", str),
        has_lora=bool(values.get("enable_lora") or values.get("lora_config")),
    )


def _keep_results_whole(arguments: Arguments) -> None:
    """Drop ``num_postprocess_workers``: routers make the text, and postprocessed results may lack the hand-off."""
    if arguments.values.pop("num_postprocess_workers", None):
        arguments.warnings.append(f"{arguments.origin('num_postprocess_workers')}: left out, text is made by routers")


# What the PyTorch backend and AutoDeploy use if no layer sets these.
_MAX_BATCH_SIZE, _MAX_NUM_TOKENS = 2048, 8192

_AUTODEPLOY_MAX_BATCH_SIZE, _AUTODEPLOY_MAX_SEQ_LEN = 8, 512


def _autodeploy_arguments(spec: EngineSpec, use: Use, arguments: Arguments) -> LlmArguments:
    if use is Use.PREFILL:
        raise ConfigError("backend: _autodeploy hands no KV blocks over, so it serves on decode workers only")
    if spec.engine.connector is not None:
        raise ConfigError("connector: the backend _autodeploy takes none")
    if spec.engine.logits_processors:
        raise ConfigError("logits_processors: the backend _autodeploy takes no argument that lets them see every token")
    keep_safe_for_autodeploy(arguments)
    has_events = spec.engine.publish_events_and_metrics and publish_events(arguments)
    cache = arguments.section(KV_CACHE)
    return LlmArguments(
        values={"model": spec.model_path, "backend": Backend.AUTODEPLOY.value, **arguments.values},
        warnings=tuple(arguments.warnings),
        block_size=_value(cache, "tokens_per_block", int) or DEFAULT_BLOCK_SIZE,
        max_batch_size=_value(arguments.values, "max_batch_size", int) or _AUTODEPLOY_MAX_BATCH_SIZE,
        max_seq_len=_value(arguments.values, "max_seq_len", int) or _AUTODEPLOY_MAX_SEQ_LEN,
        has_events=has_events,
        kv_dtype=arguments.kv_dtype,
    )


def _encoder_arguments(spec: EngineSpec, arguments: Arguments, backend: Backend) -> LlmArguments:
    if backend is Backend.AUTODEPLOY:
        raise ConfigError("backend: _autodeploy encodes no media")
    keep_fit_for_encoder(arguments)
    if spec.engine.connector is not None:
        arguments.warnings.append("connector: left out, an encode worker has no use for it")
    arguments.set_default("max_batch_size", spec.encoder.max_batch_size)
    values = {"model": spec.model_path, **arguments.values}
    return LlmArguments(
        values=values,
        warnings=tuple(arguments.warnings),
        max_batch_size=_value(values, "max_batch_size", int),
        max_num_tokens=_value(values, "max_num_tokens", int, _ENCODER_MAX_NUM_TOKENS),
    )


_ENCODER_MAX_NUM_TOKENS = 16_384


_ValueT = TypeVar("_ValueT", int, str)


def _value(
    values: Mapping[str, object], name: str, kind: type[_ValueT], default: _ValueT | None = None
) -> _ValueT | None:
    """The argument ``name``, or ``default`` if no layer has set it; ``None``: it is of another kind."""
    value = values.get(name, default)
    return value if isinstance(value, kind) else None


#: The only sub-config that layers share; every other one is replaced as a whole, as upstream's own files are merged.
KV_CACHE = "kv_cache_config"


@dataclass
class Arguments:
    """Arguments of TensorRT-LLM while the layers are merged.

    Attributes:
        values: the current values, by name.
        warnings: for the worker's log.
        origins: the layer or field that set a value, by name, or by ``kv_cache_config.name``; messages begin with it.
    """

    values: dict[str, object] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)

    def origin(self, path: str) -> str:
        """The name of the argument ``path`` in messages, with the layer or field that set it."""
        return self.origins.get(path) or self.origins.get(path.partition(".")[0], path)

    def section(self, name: str) -> dict[str, object]:
        """The sub-config called ``name``; empty where there is none."""
        value = self.values.get(name)
        return dict(value) if isinstance(value, Mapping) else {}

    @property
    def kv_dtype(self) -> str:
        """The dtype of the KV cache: its own setting, else the weights' setting; ``auto``: the checkpoint decides."""
        own = self.section(KV_CACHE).get("dtype", "auto")
        return str(self.values.get("dtype", "auto") if own == "auto" else own)

    def set_default(self, path: str, value: object) -> None:
        """Set the argument ``path``, or field of a sub-config, to ``value`` unless a layer has set it."""
        name, _, below = path.partition(".")
        if below:
            value = {below: value, **self.section(name)}
        elif name in self.values:
            return
        self.values[name] = value

    def keep_only(self, names: Container[str]) -> list[str]:
        """Remove all other arguments and what was warned of them; return the names of those that were not ``None``."""
        others = [name for name in self.values if name not in names]
        dropped = tuple(f"{self.origin(name)}{end}" for name in others for end in ":.")
        self.warnings = [warning for warning in self.warnings if not warning.startswith(dropped)]
        return [self.origin(name) for name in others if self.values.pop(name) is not None]


def merge_layers(settings: EngineSettings) -> tuple[Arguments, Backend]:
    """Merge the layers of ``settings`` into arguments of ``LLM``, without ``model``; check each layer by itself.

    Raises:
        ConfigError: names the layer and the key that TensorRT-LLM does not take: 1.2, or what is installed, if later.
    """
    layers = _read_layers(settings)
    backend = _backend(settings, layers)
    merged = Arguments()
    table = schema.AUTODEPLOY if backend is Backend.AUTODEPLOY else schema.LLM
    for name, values in layers:
        given = {key: value for key, value in values.items() if key != "backend"}
        merged.warnings += _check_layer(name, given, table)
    ours = _our_fields(settings, _block_size(settings, layers))
    for path, (field_name, value) in ours.items():
        merged.set_default(path, value)
        merged.origins[path] = field_name
    for name, values in layers:
        _lay_over(merged, name, values)
    merged.warnings += _lost_fields(merged, ours)
    merged.values.pop("backend", None)
    for name in schema.gone_arguments():
        # What was said that asks for more than holds anyway was refused.
        merged.values.pop(name, None)
    return merged, backend


_Layer = tuple[str, Mapping[str, object]]


def _read_layers(settings: EngineSettings) -> Sequence[_Layer]:
    layers: list[_Layer] = []
    if settings.extra_engine_args is not None:
        try:
            layers.append(("extra_engine_args", load_yaml(settings.extra_engine_args)))
        except ConfigError as error:
            raise ConfigError(f"extra_engine_args: {error}") from error
    layers.append(("override_engine_args", settings.override_engine_args))
    return layers


def _backend(settings: EngineSettings, layers: Sequence[_Layer]) -> Backend:
    backend = settings.backend or Backend.PYTORCH
    for name, values in layers:
        if (said := values.get("backend")) is not None:
            if said not in list(Backend):
                raise ConfigError(f"{name}: backend: must be one of {', '.join(Backend)}, not {said!r}")
            backend = Backend(str(said))
    return backend


def _check_layer(name: str, values: Mapping[str, object], table: ConfigTable) -> list[str]:
    if "model" in values:
        raise ConfigError(f"{name}: model: is the worker's own")
    # AutoDeploy's table has the safe fields only. ``keep_safe_for_autodeploy`` later drops the PyTorch backend's other
    # fields.
    shared = {} if table is schema.LLM else {key: value for key, value in values.items() if key not in table.types}
    own = {key: value for key, value in values.items() if key not in shared}
    try:
        warnings = [*check_arguments(own, table), *check_arguments(shared, schema.LLM)]
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    return [f"{name}: {warning}" for warning in warnings]


def _block_size(settings: EngineSettings, layers: Sequence[_Layer]) -> int:
    block_size = settings.block_size
    for _, values in layers:
        section = values.get(KV_CACHE)
        said = section.get("tokens_per_block") if isinstance(section, Mapping) else None
        block_size = said if isinstance(said, int) else block_size
    return block_size


def _our_fields(settings: EngineSettings, block_size: int) -> dict[str, tuple[str, object]]:
    """Our fields that differ from their defaults: our name and the value, by TensorRT-LLM's name."""
    num_blocks = settings.num_blocks
    said: dict[str, tuple[str, object, object]] = {
        "dtype": ("dtype", settings.dtype, "auto"),
        "tensor_parallel_size": ("tensor_parallel_size", settings.tensor_parallel_size, 1),
        "pipeline_parallel_size": ("pipeline_parallel_size", settings.pipeline_parallel_size, 1),
        "moe_expert_parallel_size": ("expert_parallel_size", settings.expert_parallel_size, None),
        "enable_attention_dp": ("enable_attention_dp", settings.enable_attention_dp, False),
        "gpus_per_node": ("gpus_per_node", settings.gpus_per_node, None),
        "max_batch_size": ("max_batch_size", settings.max_batch_size, None),
        "max_num_tokens": ("max_num_tokens", settings.max_num_tokens, None),
        "max_seq_len": ("max_model_len", settings.max_model_len, None),
        f"{KV_CACHE}.tokens_per_block": ("block_size", settings.block_size, DEFAULT_BLOCK_SIZE),
        f"{KV_CACHE}.free_gpu_memory_fraction": ("free_gpu_memory_fraction", settings.free_gpu_memory_fraction, None),
        f"{KV_CACHE}.max_tokens": ("num_blocks", None if num_blocks is None else num_blocks * block_size, None),
    }
    return {path: (name, value) for path, (name, value, default) in said.items() if value != default}


def _lay_over(merged: Arguments, layer: str, values: Mapping[str, object]) -> None:
    for name, value in copy.deepcopy(dict(values)).items():
        if name == KV_CACHE and isinstance(value, Mapping):
            merged.values[name] = {**merged.section(name), **value}
            merged.origins.update({f"{name}.{below}": f"{layer}: {name}.{below}" for below in value})
            merged.origins.setdefault(name, f"{layer}: {name}")
        else:
            merged.values[name] = value
            merged.origins[name] = f"{layer}: {name}"


def _lost_fields(merged: Arguments, ours: Mapping[str, tuple[str, object]]) -> list[str]:
    """Warnings of our fields in whose place a layer has put another value."""
    warnings = []
    for path, (field_name, value) in ours.items():
        name, _, below = path.partition(".")
        effective = merged.section(name).get(below) if below else merged.values.get(name)
        if effective != value:
            unit = " tokens" if field_name == "num_blocks" else ""
            warnings.append(
                f"{merged.origin(path)}: {effective!r} wins over engine.{field_name} = {value!r}{unit}; "
                f"engine.override_engine_args.{path} wins over a file"
            )
    return warnings


_TRANSCEIVER = "cache_transceiver_config"

_DEFAULT_TRANSCEIVER = "NIXL"

#: How long prefill keeps the blocks of a hand-off that no decode worker fetches. TensorRT-LLM counts from the prompt's
#: end, and nothing renews this timeout. Our own hand-off of 30 s is renewed by decode while the request waits there. So
#: this timeout must be longer than 30 s, with time for a queued decode. A request that waits still longer finds nothing
#: to pull, fails and is prefilled again. So prefill keeps blocks that no worker will pull for a minute at most.
_DEFAULT_TRANSFER_TIMEOUT_MS = 60_000

#: What published workers use: a request that has begun is never paused for want of blocks, and the batch size follows
#: the load of the last 128 steps.
_DEFAULT_SCHEDULER = {
    "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
    "dynamic_batch_config": {
        "enable_batch_size_tuning": True,
        "enable_max_num_tokens_tuning": False,
        "dynamic_batch_moving_average_window": 128,
    },
}

#: Events that TensorRT-LLM keeps between two polls; it loses those beyond.
_DEFAULT_EVENT_BUFFER_SIZE = 16_384

_ENCODER_DTYPES = ("auto", "float16", "float32", "bfloat16")


def keep_safe_for_autodeploy(arguments: Arguments) -> None:
    """Drop the arguments that not every AutoDeploy takes, with a warning for each.

    Its one knob for GPUs is ``world_size``: tensor-parallel ranks become that many.
    """
    num_ranks = arguments.values.pop("tensor_parallel_size", 1)
    if num_ranks != 1:
        arguments.set_default("world_size", num_ranks)
    for origin in arguments.keep_only(schema.AUTODEPLOY.types):
        hint = "; its one knob for GPUs is world_size" if origin.endswith("parallel_size") else ""
        arguments.warnings.append(f"{origin}: left out, the backend _autodeploy may not take it{hint}")


def keep_fit_for_encoder(arguments: Arguments) -> None:
    """Drop the arguments that the vision part does not use, with one warning: engine files are written for both."""
    if dropped := arguments.keep_only(schema.ENCODER):
        arguments.warnings.append(f"{', '.join(dropped)}: left out, an encode worker has no use for it")
    if "dtype" in arguments.values and arguments.values["dtype"] not in _ENCODER_DTYPES:
        raise ConfigError(f"{arguments.origin('dtype')}: must be one of {', '.join(_ENCODER_DTYPES)}")


def refuse_encoder_alone(arguments: Arguments) -> None:
    """A worker that generates loads all of the model.

    Raises:
        ConfigError: a setting says to load the vision part only.
    """
    if arguments.values.get("mm_encoder_only"):
        raise ConfigError(f"{arguments.origin('mm_encoder_only')}: for encode workers only")


def refuse_beams(arguments: Arguments) -> None:
    """Requests of routers ask for no beams, and room for some would be room for nothing.

    Raises:
        ConfigError: a layer reserves it.
    """
    if (arguments.values.get("max_beam_width") or 1) != 1:
        raise ConfigError(f"{arguments.origin('max_beam_width')}: must be 1: no request can ask for beams")


def prepare_prefill(arguments: Arguments) -> float:
    """Set what a prefill worker needs to hand its blocks on; return for how many seconds it keeps them.

    Raises:
        ConfigError: a layer sets a value that makes this impossible.
    """
    if not arguments.values.get("disable_overlap_scheduler", True):
        raise ConfigError(
            f"{arguments.origin('disable_overlap_scheduler')}: must be true on a prefill worker: it hands "
            "nothing on with the overlap scheduler"
        )
    arguments.set_default("disable_overlap_scheduler", True)
    timeout_s = prepare_decode(arguments)
    if timeout_s is None:
        raise ConfigError(f"{arguments.origin(_TRANSCEIVER)}: a prefill worker cannot do without its backend")
    return timeout_s


def prepare_decode(arguments: Arguments) -> float | None:
    """Set what a decode worker needs to take hand-offs.

    Returns:
        The timeout of a hand-off in seconds; ``None``: a layer switches hand-offs off.

    Raises:
        ConfigError: a layer sets a value that makes this impossible.
    """
    if _TRANSCEIVER in arguments.values and arguments.values[_TRANSCEIVER] is None:
        return None
    given = arguments.section(_TRANSCEIVER)
    config = {"backend": _DEFAULT_TRANSCEIVER, **given}
    if config["backend"] is None:
        return None
    timeout_ms = config.get("kv_transfer_timeout_ms")
    if not isinstance(timeout_ms, int):
        timeout_ms = config["kv_transfer_timeout_ms"] = _DEFAULT_TRANSFER_TIMEOUT_MS
    arguments.values[_TRANSCEIVER] = config
    return timeout_ms / 1000


def prepare_processors(arguments: Arguments, use: Use) -> None:
    """Set what logits processors need to see every token of their own request.

    Raises:
        ConfigError: a layer sets a value that makes this impossible.
    """
    if arguments.values.get("speculative_config") is not None:
        raise ConfigError(
            f"{arguments.origin('speculative_config')}: must be unset with logits_processors, "
            "which would be given the scores of others"
        )
    if not arguments.values.get("disable_overlap_scheduler", True):
        raise ConfigError(
            f"{arguments.origin('disable_overlap_scheduler')}: must be true with logits_processors, "
            "which would not see the latest token"
        )
    arguments.set_default("disable_overlap_scheduler", True)
    if use is Use.PREFILL:
        arguments.warnings.append("logits_processors: NVIDIA does not support them where prompts are handed on")


def _warn_of_small_buffer(arguments: Arguments, model_path: str) -> None:
    num_tokens = arguments.section(_TRANSCEIVER).get("max_tokens_in_buffer")
    longest = _value(arguments.values, "max_seq_len", int) or _length_of_model(model_path)
    if longest is not None and not arguments.values.get("enable_chunked_prefill"):
        longest = min(longest, _value(arguments.values, "max_num_tokens", int) or _MAX_NUM_TOKENS)
    if isinstance(num_tokens, int) and longest is not None and num_tokens < longest:
        arguments.warnings.append(
            f"{arguments.origin(_TRANSCEIVER)}.max_tokens_in_buffer: longer prompts, up to {longest} tokens, "
            "may fail to be handed on"
        )


def _length_of_model(model_path: str) -> int | None:
    """Tokens of a sequence that the model was made for; ``None``: not known, such as of one to be fetched yet."""
    try:
        files = {model_files.CONFIG: (Path(model_path) / model_files.CONFIG).read_bytes()}
        return model_files.max_position_embeddings(files)
    except (OSError, ModelFilesError):
        return None  # what is wrong is said where the model is read


def publish_events(arguments: Arguments) -> bool:
    """Switch KV events on; return whether they are on: without block reuse there are none.

    Raises:
        ConfigError: a layer switches the buffer of events off while events are wanted.
    """
    cache = arguments.section(KV_CACHE)
    if cache.get("enable_block_reuse", True) is False:
        origin = arguments.origin(f"{KV_CACHE}.enable_block_reuse")
        arguments.warnings.append(f"{origin}: is off, so routers do not know what this worker has cached")
        return False
    path = f"{KV_CACHE}.event_buffer_max_size"
    size = cache.get("event_buffer_max_size", _DEFAULT_EVENT_BUFFER_SIZE)
    if not isinstance(size, int) or size <= 0:
        raise ConfigError(
            f"{arguments.origin(path)}: must be more than 0 with publish_events_and_metrics, which may be switched off"
        )
    arguments.set_default(path, size)
    return True


def publish_metrics(arguments: Arguments, name: str) -> bool:
    """Switch on the measurement ``name``; return whether it is on: a layer may have switched it off."""
    arguments.set_default(name, True)
    if not arguments.values[name]:
        arguments.warnings.append(f"{arguments.origin(name)}: is off, so some metrics will be missing")
        return False
    return True


def trace(arguments: Arguments, endpoint: str) -> None:
    """Have TensorRT-LLM send its own spans to ``endpoint``; it makes them of the times that it measures."""
    arguments.set_default(TRACES_ENDPOINT, endpoint)
    arguments.set_default(PERF_METRICS, True)


def build_objects(arguments: LlmArguments) -> dict[str, object]:
    """Keywords for ``LLM`` or ``MultimodalEncoder``; new objects at every call. Imports the package; loads no model.

    Raises:
        ConfigError: the package is not installed, or lacks an argument, which the message names.
    """
    llm_args = _module("tensorrt_llm.llmapi.llm_args")
    known = _arguments_class(llm_args, arguments).model_fields
    for name in arguments.values:
        if name not in known and name != "backend":
            raise ConfigError(f"{name}: the TensorRT-LLM installed here{_version()} does not have it")
    return {name: _build(llm_args, name, value) for name, value in arguments.values.items()}


# TensorRT-LLM 1.2 makes these objects when it reads YAML, but a Python caller must make them itself. Pydantic makes the
# objects of all other sub-configs in both cases.
_CLASSES = {
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "cache_transceiver_config": "CacheTransceiverConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "moe_config": "MoeConfig",
    "attention_dp_config": "AttentionDpConfig",
    "nvfp4_gemm_config": "Nvfp4GemmConfig",
    "kv_connector_config": "KvCacheConnectorConfig",
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
        if (decoding_type := str(fields["decoding_type"])) not in DECODING_CLASSES:
            # Only a line after 1.2 passes with these, and it chooses the class itself.
            return fields
        del fields["decoding_type"]
        class_name = DECODING_CLASSES[decoding_type]
        if not hasattr(llm_args, class_name):
            raise ConfigError(f"{name}.decoding_type: the TensorRT-LLM installed here{_version()} does not have it")
        return _made(name, getattr(llm_args, class_name), fields)
    if name == "lora_config":
        return _made(name, _module("tensorrt_llm.lora_helper").LoraConfig, fields)
    kind = getattr(llm_args, _CLASSES.get(name, ""), None)
    if name == "kv_connector_config":
        check_connector(fields, kind, _version())
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

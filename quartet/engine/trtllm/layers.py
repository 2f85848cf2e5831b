"""Who says what of the arguments of TensorRT-LLM: our own fields, under a file's, under what overrides both."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from quartet.config import load_yaml
from quartet.engine.settings import Backend, EngineSettings
from quartet.engine.trtllm import api
from quartet.engine.trtllm.api_configs import ConfigTable
from quartet.engine.trtllm.checking import check_arguments
from quartet.errors import ConfigError

#: The only sub-config that layers share; every other one is replaced as a whole, as upstream's own files are merged.
KV_CACHE = "kv_cache_config"
#: What TensorRT-LLM takes where nobody says.
DEFAULT_BLOCK_SIZE = 32


@dataclass
class Arguments:
    """Arguments of TensorRT-LLM as they come together.

    Attributes:
        values: what they are now, by name.
        warnings: for whoever runs the worker.
        origins: who said it, by name, or by ``kv_cache_config.name``: what a message begins with.
    """

    values: dict[str, object] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)

    def origin(self, path: str) -> str:
        """How messages call the argument ``path``: with who said it."""
        return self.origins.get(path) or self.origins.get(path.partition(".")[0], path)

    def section(self, name: str) -> dict[str, object]:
        """The sub-config called ``name``; empty where there is none."""
        value = self.values.get(name)
        return dict(value) if isinstance(value, Mapping) else {}

    @property
    def kv_dtype(self) -> str:
        """Of the KV cache: as it says, else as the weights are said to be; ``auto``: the checkpoint decides."""
        own = self.section(KV_CACHE).get("dtype", "auto")
        return str(self.values.get("dtype", "auto") if own == "auto" else own)

    def set_default(self, path: str, value: object) -> None:
        """Say ``value`` for the argument, or field of a sub-config, unless somebody said something."""
        name, _, below = path.partition(".")
        if below:
            value = {below: value, **self.section(name)}
        elif name in self.values:
            return
        self.values[name] = value

    def keep_only(self, names: Container[str]) -> list[str]:
        """Take all others out of ``values``; how messages call those that were more than ``None``."""
        others = [name for name in self.values if name not in names]
        return [self.origin(name) for name in others if self.values.pop(name) is not None]


def merge_layers(settings: EngineSettings) -> tuple[Arguments, Backend]:
    """What ``settings`` says of the arguments of ``LLM``, each layer checked by itself; ``model`` is not among them.

    Raises:
        ConfigError: naming layer and key of what TensorRT-LLM 1.2 does not take.
    """
    layers = _read_layers(settings)
    backend = _backend(settings, layers)
    merged = Arguments()
    table = api.AUTODEPLOY if backend is Backend.AUTODEPLOY else api.LLM
    for name, values in layers:
        given = {key: value for key, value in values.items() if key != "backend"}
        merged.warnings += _check_layer(name, given, table)
    for path, (field_name, value) in _our_fields(settings, _block_size(settings, layers)).items():
        merged.set_default(path, value)
        merged.origins[path] = field_name
    for name, values in layers:
        _lay_over(merged, name, values)
    merged.values.pop("backend", None)
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
    # AutoDeploy's table has the safe fields only; those that it lacks, but the other backend has, are dropped later.
    shared = {} if table is api.LLM else {key: value for key, value in values.items() if key not in table.types}
    own = {key: value for key, value in values.items() if key not in shared}
    try:
        warnings = [*check_arguments(own, table), *check_arguments(shared, api.LLM)]
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
    """Our fields that differ from their defaults: name and value, by what TensorRT-LLM calls them."""
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
        "max_beam_width": ("max_beam_width", settings.max_beam_width, 1),
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

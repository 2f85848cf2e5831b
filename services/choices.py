"""What somebody chooses at the command line over a topology file: another engine, another model, what may be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from quartet.config import build
from quartet.discovery.base import Role
from quartet.engine.settings import EngineKind, Modality, refused_fields
from quartet.errors import ConfigError
from services.topology import Topology

_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
_CPU = "cpu"
_CHECKPOINT = "checkpoint"
# Of workers and of the router: what says or fits a model.
_OF_A_MODEL = ("model_path", "model_name", "custom_jinja_template", "custom_chat_template")

_Settings: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is chosen; ``None`` and empty: as the file says.

    Attributes:
        engine: of every worker. What the file says that this engine does not have is left out.
        model: folder of a checkpoint, one with such a folder named ``checkpoint`` in it, or a repository.
        served_model_name: what requests call the model by; ``None`` beside ``model``: as its folder is called.
        media_paths: directories whose files requests may name.
        router_port: 0 takes a free one.
    """

    engine: EngineKind | None = None
    model: Path | None = None
    served_model_name: str | None = None
    media_paths: Sequence[Path] = ()
    router_port: int | None = None


@dataclass(frozen=True)
class Chosen:
    """A topology as it was chosen.

    Attributes:
        notes: a line for each thing of the file that was left out or changed on the way, beside what was chosen.
    """

    topology: Topology
    notes: Sequence[str]


def choose(settings: Mapping[str, object], choices: Choices) -> Chosen:
    """The topology of ``settings``, which are a file's, with ``choices`` over them.

    Raises:
        ConfigError: naming the setting.
    """
    changed, notes = _copied(settings), list[str]()
    if choices.engine is not None:
        notes += _switch_engine(changed, choices.engine)
    if choices.model is not None:
        notes += _switch_model(changed, choices.model)
    if choices.served_model_name is not None:
        _below(changed, "model")["name"] = choices.served_model_name
    if choices.media_paths:
        media = _below(changed, "router", "overrides", "media")
        media["allowed_local_paths"] = [str(path.absolute()) for path in choices.media_paths]
    if choices.router_port is not None:
        _below(changed, "router")["port"] = choices.router_port
    return Chosen(build(Topology, changed), notes)


def _switch_engine(settings: _Settings, kind: EngineKind) -> Iterator[str]:
    engine = _below(settings, "engine")
    before = engine.get("kind", EngineKind.TORCH.value)
    is_switched = before != kind.value
    engine["kind"] = kind.value
    yield from _without_refused(engine, kind, "engine")
    for where, group in _groups(settings):
        own = _found(group, "overrides", "engine")
        is_switched |= own.pop("kind", before) != kind.value
        yield from _without_refused(own, kind, f"{where}.overrides.engine")
        if not kind.uses_gpu({**engine, **own}.get("device", _CPU)):
            yield from _without_gpus(group, kind, where)
    if not kind.has_encoder:
        yield from _without_encoders(settings, kind)
    has_gpu = kind.uses_gpu(engine.get("device", _CPU))
    if not has_gpu:
        yield from _without_gpus(settings, kind, "")
    if is_switched and kind is EngineKind.TORCH and not has_gpu and "dtype" not in engine:
        engine["dtype"] = "float32"
        yield "engine.dtype: float32, as CPUs are slow at what most checkpoints have"


def _without_refused(engine: _Settings, kind: EngineKind, where: str) -> Iterator[str]:
    refused = {*refused_fields(kind)}
    if not kind.uses_gpu(engine.get("device", _CPU)):
        refused.add("free_gpu_memory_fraction")
    if not kind.has_encoder and engine.get("modality") == Modality.MULTIMODAL.value:
        refused.add("modality")
    for name in sorted(refused & engine.keys()):
        del engine[name]
        yield f"{where}.{name}: left out, as the engine {kind} does not have it"


def _without_encoders(settings: _Settings, kind: EngineKind) -> Iterator[str]:
    for where, group in _groups(settings):
        if group.get("role") == Role.ENCODE.value:
            settings["workers"].remove(group)
            yield f"{where}: left out, as the engine {kind} encodes no media"


def _without_gpus(holder: _Settings, kind: EngineKind, where: str) -> Iterator[str]:
    """Of a group, or of the whole topology: where nothing runs on a GPU, none is given."""
    begin = f"{where}." if where else ""
    if holder.pop("gpus", None):
        yield f"{begin}gpus: left out, as the engine {kind} runs on none here"
    if _found(holder, "environment").pop(_GPUS_VARIABLE, None) is not None:
        yield f"{begin}environment.{_GPUS_VARIABLE}: left out, as the engine {kind} runs on none here"


def _switch_model(settings: _Settings, model: Path) -> Iterator[str]:
    inner = model / _CHECKPOINT
    folder = inner if not (model / "config.json").is_file() and (inner / "config.json").is_file() else model
    # What a folder of that name holds is called by the one above it.
    name = folder.absolute().parent.name if folder.name == _CHECKPOINT else ""
    _below(settings, "model").update(path=str(folder), name=name)
    holders = [("router", _found(settings, "router")), *_groups(settings)]
    for where, holder in holders:
        for setting in _OF_A_MODEL:
            if _found(holder, "overrides").pop(setting, None) is not None:
                yield f"{where}.overrides.{setting}: left out, as it is another model's"


def _groups(settings: _Settings) -> list[tuple[str, _Settings]]:
    groups = settings.get("workers")
    listed = groups if isinstance(groups, list) else []
    return [(f"workers[{number}]", group) for number, group in enumerate(listed) if isinstance(group, dict)]


def _below(settings: _Settings, *path: str) -> _Settings:
    """The mapping at ``path``, made where there is none."""
    for depth, name in enumerate(path):
        below = settings.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{'.'.join(path[: depth + 1])}: must be a mapping with names as keys, not {below!r}")
        settings = below
    return settings


def _found(settings: _Settings, *path: str) -> _Settings:
    """The mapping at ``path``; one of nowhere if there is none: what is wrong there is told when it is built."""
    found: Any = settings
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _copied(value: Any) -> Any:
    """``value`` with mappings and lists of its own, to be changed."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value

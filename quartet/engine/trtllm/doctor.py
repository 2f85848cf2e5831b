"""Compares the installed TensorRT-LLM with what the adapter relies on; loads no model and touches no GPU.

    python -m quartet.engine.trtllm.doctor REPORT_FILE

Run it in a process of its own: the import takes up to a minute, starts MPI, and crashes if MPI is broken. The package
prints its own lines, hence the report file. A line that begins with ``PROGRESS`` says what comes next. Exit code
``ABSENT``: the package is not installed.

``SYMBOLS``, from ``symbols.toml``, are what the adapter relies on, and what would not work without it: everything that
the adapter imports; a test checks that. ``schema`` has the fields of configurations; ``SYMBOLS`` has those of them that
Quartet itself sets or relies on. ``QUESTIONS`` are facts about TensorRT-LLM 1.2 that are unknown here and that only the
package can answer. The adapter works with either answer; an answer helps to explain the adapter's behaviour.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from quartet.engine.trtllm import schema
from quartet.engine.trtllm.schema import CONFIGS, DECODING_CLASSES

#: Begins a line that says what comes next.
PROGRESS = "quartet-progress: "

ABSENT = 3

_PACKAGE = "tensorrt_llm"


@dataclasses.dataclass(frozen=True)
class Lack:
    """Something that the adapter relies on and that the package lacks.

    Attributes:
        path: the symbol, and its name that is missing.
        loses: what does not work without it.
        is_needed: Quartet can't do without it; else only a user's ``engine_args`` name it, or little is lost.
        reason: the error of its import; empty if it is just not there.
    """

    path: str
    loses: str
    is_needed: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class OtherDefault:
    """A default that differs from the one that the adapter relies on."""

    path: str
    expected: str
    found: str
    loses: str


@dataclasses.dataclass(frozen=True)
class Fact:
    """The answer to one of ``QUESTIONS``; ``None``: the package does not show it."""

    text: str
    holds: bool | None
    is_later: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """What the inspection of an installed package found."""

    version: str
    num_found: int
    lacks: tuple[Lack, ...]
    other_defaults: tuple[OtherDefault, ...]
    facts: tuple[Fact, ...]

    def to_json(self) -> str:
        """Write the report for the process that asked."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The inverse of ``to_json``."""
        report = json.loads(text)
        return cls(
            report["version"],
            report["num_found"],
            tuple(Lack(**lack) for lack in report["lacks"]),
            tuple(OtherDefault(**other) for other in report["other_defaults"]),
            tuple(Fact(**fact) for fact in report["facts"]),
        )


def inspect_package() -> Report:
    """Import the package and compare it. Raises whatever the import raises."""
    _show_progress(f"importing {_PACKAGE}")
    package: Any = import_module(_PACKAGE)
    _show_progress("comparing it with what Quartet relies on")
    num_found = 0
    lacks: list[Lack] = []
    others: list[OtherDefault] = []
    for symbol in SYMBOLS:
        for outcome in _compare(symbol):
            if isinstance(outcome, Lack):
                lacks.append(outcome)
                continue
            num_found += 1
            if outcome is not None:
                others.append(outcome)
    _show_progress("checking what is uncertain")
    facts = tuple(Fact(question.text, _answer(question.holds), question.is_later) for question in QUESTIONS)
    return Report(str(getattr(package, "__version__", "unknown")), num_found, tuple(lacks), tuple(others), facts)


def _compare(symbol: Symbol) -> Iterator[Lack | OtherDefault | None]:
    """Yield what is wrong with the symbol and with each of its names; ``None`` for each that is right."""
    try:
        found = _get(symbol.module, symbol.name)
    except AttributeError:
        yield Lack(symbol.path, symbol.loses, is_needed=not symbol.is_optional)
        return
    except Exception as error:  # noqa: BLE001 - an import may fail in any way; the report names the error
        yield Lack(symbol.path, symbol.loses, is_needed=not symbol.is_optional, reason=repr(error))
        return
    yield None
    if symbol.form is None:
        return
    names = _names(found, symbol.form)
    for need in symbol.needs:
        for name, default in need.expected.items():
            path = f"{symbol.path}: {symbol.form} {name}"
            if name in names:
                yield _other_default(path, need.loses, names[name], default)
            else:
                yield Lack(path, need.loses, is_needed=not symbol.is_optional)
    needed = {name for need in symbol.needs for name in need.expected}
    for name in sorted(symbol.optional - needed - set(names)):
        yield Lack(f"{symbol.path}: {symbol.form} {name}", f"{name} in engine_args", is_needed=False)


def _other_default(path: str, loses: str, found: object, expected: object) -> OtherDefault | None:
    """Return the difference between the defaults; ``None``: there is none."""
    if expected is Default.ANY or found is Default.ANY or _plain(found) == _plain(expected):
        return None
    return OtherDefault(path, str(_plain(expected)), str(_plain(found)), loses)


def _names(found: Any, form: Form) -> Mapping[str, object]:
    """The names of ``found`` that are of ``form``, with their defaults."""
    if form is Form.PARAMETERS:
        parameters = inspect.signature(found).parameters.values()
        return {
            parameter.name: Default.REQUIRED if parameter.default is parameter.empty else parameter.default
            for parameter in parameters
        }
    if form is Form.FIELDS:
        return _fields(found)
    return dict.fromkeys(_attributes(found), Default.ANY)


def _fields(found: Any) -> Mapping[str, object]:
    if hasattr(found, "model_fields"):
        return {name: _pydantic_default(field) for name, field in found.model_fields.items()}
    if dataclasses.is_dataclass(found):
        return {field.name: _dataclass_default(field) for field in dataclasses.fields(found)}
    return _names(found, Form.PARAMETERS)


def _pydantic_default(field: Any) -> object:
    if field.is_required():
        return Default.REQUIRED
    # Do not call the factory: it may read the GPU.
    return Default.ANY if field.default_factory is not None else field.default


def _dataclass_default(field: dataclasses.Field[Any]) -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    return Default.ANY if field.default_factory is not dataclasses.MISSING else Default.REQUIRED


def _attributes(found: Any) -> set[str]:
    """The attributes of instances, as far as the class shows: those that ``__init__`` assigns show only in its code."""
    names = set(dir(found))
    for base in inspect.getmro(found):
        names.update(getattr(base, "__annotations__", {}), getattr(base, "__slots__", ()))
        for member in vars(base).values():
            function = inspect.unwrap(member) if callable(member) else getattr(member, "fget", None)
            names.update(getattr(getattr(function, "__code__", None), "co_names", ()))
    return names


def _plain(value: object) -> object:
    """``value`` as a user would write it: enums by name, names in any case."""
    if isinstance(value, Default):
        return value
    if isinstance(value, Enum):
        value = value.name
    return value.casefold() if isinstance(value, str) else value


def _answer(holds: Any) -> bool | None:
    try:
        return bool(holds())
    except Exception:  # noqa: BLE001 - the package may differ in any way: no answer is an answer
        return None


def _show_progress(part: str) -> None:
    print(f"{PROGRESS}{part}", flush=True)


def _main() -> int:
    if find_spec(_PACKAGE) is None:
        return ABSENT
    Path(sys.argv[1]).write_text(inspect_package().to_json(), encoding="utf-8")
    return 0


#: The line of versions that the adapter was written for.
VERSION: Final = "1.2"

#: What is known of other lines.
OTHER_VERSIONS: Mapping[str, str] = {
    "1.0": "lacks what came with 1.2, such as several answers and beam search on the PyTorch backend",
    "1.1": "lacks what came with 1.2, such as several answers and beam search on the PyTorch backend",
    "1.3": (
        "its hand-offs need a disagg_request_id, which Quartet gives, and its KV events may have hashes of text, "
        "salts and media, which Quartet reads; arguments that 1.2 does not know are passed on unchecked; penalties, "
        "min_p and seeds count with TRTLLMSampler alone, or if it has no sampler_type any more"
    ),
    "1.4": "as 1.3; its one sampler honours penalties, min_p and seeds, and sampler_type is gone",
}


class Form(StrEnum):
    """The kind of a symbol's names."""

    PARAMETERS = "parameter"  # of a function
    FIELDS = "field"  # of a dataclass or a pydantic class
    ATTRIBUTES = "attribute"  # methods, properties, and what its methods assign


class Default(Enum):
    """Markers that stand for a default without a value."""

    REQUIRED = "required"
    ANY = "any"  # it is always given, or read only


@dataclass(frozen=True)
class Need:
    """Names of a symbol that one ability needs.

    Attributes:
        loses: what would not work.
        names: names that must be there.
        defaults: defaults that the adapter relies on where it leaves a name out; these names are needed as well.
    """

    loses: str
    names: str = ""
    defaults: Mapping[str, object] = field(default_factory=dict)

    @property
    def expected(self) -> Mapping[str, object]:
        """Every name with its default."""
        return {**dict.fromkeys(self.names.split(), Default.ANY), **self.defaults}


@dataclass(frozen=True)
class Symbol:
    """Something that the adapter imports, or a method of it.

    Attributes:
        module: as the adapter writes it.
        name: in that module; ``LLM.shutdown`` is a method.
        loses: what would not work without it.
        form: the kind of names in ``needs``; ``None``: the symbol only has to be there.
        optional: names that only a user's ``engine_args`` give.
        is_optional: only a user's ``engine_args`` name the symbol itself, or the adapter can do without it.
    """

    module: str
    name: str
    loses: str
    form: Form | None = None
    needs: tuple[Need, ...] = ()
    optional: frozenset[str] = frozenset()
    is_optional: bool = False

    @property
    def path(self) -> str:
        """The symbol's full name, as Python code has it."""
        return f"{self.module}.{self.name}"


_ARGS = "tensorrt_llm.llmapi.llm_args"


def _read_symbols(table: Mapping[str, Any]) -> Iterator[Symbol]:
    """The symbols of ``symbols.toml``."""
    abilities = table["abilities"]
    for entry in table["symbols"]:
        yield Symbol(
            module=entry["module"],
            name=entry["name"],
            loses=abilities[entry["loses"]],
            form=Form(entry["form"]) if "form" in entry else None,
            needs=tuple(_need(abilities[ability], names) for ability, names in entry.get("needs", {}).items()),
            optional=_fields_of_table(entry["name"]) if entry.get("is_config") else frozenset(),
            is_optional=entry.get("is_optional", False),
        )


def _need(loses: str, names: Mapping[str, Any]) -> Need:
    unset, required = (names.get(kind, "").split() for kind in ("unset", "required"))
    defaults = {**dict.fromkeys(unset), **dict.fromkeys(required, Default.REQUIRED), **names.get("defaults", {})}
    return Need(loses, names.get("names", ""), defaults)


def _fields_of_table(name: str) -> frozenset[str]:
    table = schema.LLM if name == "TorchLlmArgs" else CONFIGS.get(name)
    # This one is the alias of another field, and no field itself.
    return frozenset(table.types if table else ()) - {"speculative_model_dir"}


def _unread_config(name: str, *, is_optional: bool) -> Symbol:
    """A configuration class whose fields the adapter only passes on."""
    return Symbol(_ARGS, name, f"{name} in engine_args", Form.FIELDS, (), _fields_of_table(name), is_optional)


#: All symbols.
SYMBOLS: tuple[Symbol, ...] = (
    *_read_symbols(tomllib.loads((Path(__file__).parent / "symbols.toml").read_text(encoding="utf-8"))),
    *(
        _unread_config(name, is_optional=False)
        for name in """
        SchedulerConfig DynamicBatchConfig CudaGraphConfig MoeConfig AttentionDpConfig TorchCompileConfig
        """.split()
    ),
    *(
        _unread_config(name, is_optional=True)
        for name in sorted({*DECODING_CLASSES.values(), "Nvfp4GemmConfig", "KvCacheConnectorConfig"})
    ),
)


@dataclass(frozen=True)
class Question:
    """An uncertain fact.

    Attributes:
        text: the fact, as a statement.
        holds: whether it is so; may raise anything if the package is not as expected.
        is_later: a sign of 1.3, not expected here.
    """

    text: str
    holds: Callable[[], bool]
    is_later: bool = False


def _get(module: str, name: str) -> Any:
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _has(module: str, name: str) -> Callable[[], bool]:
    def holds() -> bool:
        try:
            _get(module, name)
        except (ImportError, AttributeError):
            return False
        return True

    return holds


def _field(module: str, name: str, *fields: str) -> Callable[[], bool]:
    def holds() -> bool:
        found = _get(module, name)
        names = getattr(found, "model_fields", None) or getattr(found, "__dataclass_fields__", {})
        return all(field in names for field in fields)

    return holds


def _parameter(module: str, name: str, parameter: str) -> Callable[[], bool]:
    return lambda: parameter in inspect.signature(_get(module, name)).parameters


def _annotation(module: str, name: str, key: str) -> Callable[[], bool]:
    return lambda: key in _get(module, name).__annotations__


def _takes_lower_case() -> bool:
    # Only one part of the arguments: making it reads no GPU, while making all of them would.
    try:
        _get("tensorrt_llm.llmapi", "CacheTransceiverConfig")(backend="ucx")
    except ValueError:
        return False
    return True


def _needs_every_field() -> bool:
    fields = _get("tensorrt_llm.llmapi", "DynamicBatchConfig").model_fields
    return all(field.is_required() for field in fields.values())


def _is_runtime_error() -> bool:
    return issubclass(_get("tensorrt_llm.executor.utils", "RequestError"), RuntimeError)


_TORCH_ARGS, _DISAGG = (
    (_ARGS, "TorchLlmArgs"),
    ("tensorrt_llm.llmapi", "DisaggregatedParams"),
)

_AUTODEPLOY = ("tensorrt_llm._torch.auto_deploy.llm_args", "LlmArgs")

QUESTIONS: tuple[Question, ...] = (
    Question("LLM has a health check (_check_health)", _has("tensorrt_llm", "LLM._check_health")),
    Question("hand-offs have an id of ours (disagg_request_id)", _field(*_DISAGG, "disagg_request_id")),
    Question("hand-offs carry log probabilities (first_gen_log_probs)", _field(*_DISAGG, "first_gen_log_probs")),
    Question(
        "hand-offs carry mrope positions, as Qwen2.5-VL wants them",
        _field(*_DISAGG, "mrope_position_ids_handle", "mrope_position_deltas_handle"),
    ),
    Question("transceivers may be named in lower case", _takes_lower_case),
    Question("AutoDeploy takes the PyTorch backend's arguments", _field(*_AUTODEPLOY, "enable_iter_perf_stats")),
    Question("DynamicBatchConfig needs all of its fields", _needs_every_field),
    Question("RequestError is a RuntimeError", _is_runtime_error),
    Question(
        "it loads media by itself (default_multimodal_input_loader), which Quartet does without",
        _has("tensorrt_llm.inputs", "default_multimodal_input_loader"),
    ),
    Question("calls take a priority", _parameter("tensorrt_llm", "LLM.generate_async", "priority"), is_later=True),
    Question(
        "calls take a conversation",
        _parameter("tensorrt_llm", "LLM.generate_async", "conversation_params"),
        is_later=True,
    ),
    Question(
        "hand-offs name rank, endpoint and schedule, which Quartet carries",
        _field(*_DISAGG, "ctx_dp_rank", "ctx_info_endpoint", "schedule_style"),
        is_later=True,
    ),
    Question(
        "hashes in KV events may be text (kv_cache_event_hash_algo)",
        _field(_ARGS, "KvCacheConfig", "kv_cache_event_hash_algo"),
        is_later=True,
    ),
    Question(
        "prompts name their pictures (multi_modal_uuids), which KV events repeat",
        _annotation("tensorrt_llm.inputs", "TextPrompt", "multi_modal_uuids"),
        is_later=True,
    ),
    Question("it has a gRPC server", _has("tensorrt_llm.grpc", "__name__"), is_later=True),
    Question("LLM takes model_kwargs", _field(*_TORCH_ARGS, "model_kwargs"), is_later=True),
    Question(
        "it generates pictures and video (visual_gen)", _has("tensorrt_llm.visual_gen", "__name__"), is_later=True
    ),
)

#: What only a loaded model shows.
NEEDS_A_MODEL = (
    "how events and statistics are fetched",
    "whether events name the pictures of blocks (mm_keys)",
    "what a prompt beyond max_num_tokens raises",
    "how a context-only request ends",
    "whether an opaque state can be pulled twice",
)


if __name__ == "__main__":
    sys.exit(_main())

"""What is not known of TensorRT-LLM 1.2, with a way to tell from the package alone where there is one.

The adapter is right either way. Which way it is helps whoever looks for the reason of something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from quartet.engine.trtllm import api


@dataclass(frozen=True)
class Question:
    """An uncertain fact.

    Attributes:
        text: the fact, as a statement.
        holds: whether it is so; may raise anything where the package is not as thought.
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


def _takes_lower_case() -> bool:
    # A part of the arguments: making it reads no GPU, as the arguments as a whole would.
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


_ARGS, _DISAGG = ("tensorrt_llm.llmapi.llm_args", "TorchLlmArgs"), ("tensorrt_llm.llmapi", "DisaggregatedParams")
_AUTODEPLOY = ("tensorrt_llm._torch.auto_deploy.llm_args", "LlmArgs")

QUESTIONS: tuple[Question, ...] = (
    Question("LLM has a health check (_check_health)", _has("tensorrt_llm", "LLM._check_health")),
    *(Question(f"LLM takes {name}", _field(*_ARGS, name)) for name in api.LLM.uncertain),
    Question("hand-offs have an id of ours (disagg_request_id)", _field(*_DISAGG, "disagg_request_id")),
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
    Question("it has a gRPC server", _has("tensorrt_llm.grpc", "__name__"), is_later=True),
    Question("LLM takes model_kwargs", _field(*_ARGS, "model_kwargs"), is_later=True),
    Question(
        "it generates pictures and video (visual_gen)", _has("tensorrt_llm.visual_gen", "__name__"), is_later=True
    ),
)

#: What only a loaded model shows.
UNTOLD = (
    "how events and statistics are fetched",
    "whether blocks tell of pictures (mm_keys)",
    "what a prompt beyond max_num_tokens raises",
    "how a context-only request ends",
    "whether an opaque state can be pulled twice",
)

"""The parts of ``tensorrt_llm`` that the adapter uses, imported once and late: the import is slow, and needs a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from quartet.engine.late_import import importing
from quartet.errors import ConfigError

#: The first line of which every release has one sampler, which honours penalties, ``min_p`` and seeds.
_ONE_SAMPLER_LINE = (1, 4)

#: The first line whose KV events may say whose salted blocks and media are.
NAMING_LINE = (1, 3)

_LINE = re.compile(r"(\d+)\.(\d+)")


class Package:
    """Classes of TensorRT-LLM; their types are unknown where the package is not installed.

    Attributes:
        line: the first two parts of its version; (0, 0) if it has none that can be read.
        takes_priority: whether a call may name a priority; 1.2 knows none.
        has_one_sampler: whether there is no ``sampler_type`` to choose, as from late releases of 1.3 on. The one
            sampler honours penalties, ``min_p`` and seeds.
        takes_media_ids: whether a prompt may name its media, and KV events repeat the names; 1.2's don't.
        ConversationParams: what tells a call its conversation; ``None``: calls take none.
    """

    def __init__(self) -> None:
        """Import the package. Raises whatever an incomplete installation raises."""
        with importing("torch"):
            from tensorrt_llm import LLM, SamplingParams, __version__
            from tensorrt_llm.executor.request import LoRARequest
            from tensorrt_llm.executor.result import Logprob
            from tensorrt_llm.executor.utils import RequestError
            from tensorrt_llm.llmapi import DisaggregatedParams, GuidedDecodingParams
            from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
            from tensorrt_llm.scheduling_params import SchedulingParams

        self.LLM, self.SamplingParams, self.SchedulingParams = LLM, SamplingParams, SchedulingParams
        self.DisaggregatedParams, self.GuidedDecodingParams = DisaggregatedParams, GuidedDecodingParams
        self.LoRARequest, self.Logprob = LoRARequest, Logprob
        parameters = inspect.signature(LLM.generate_async).parameters
        self.takes_priority = "priority" in parameters
        self.line = line_of(str(__version__))
        self.has_one_sampler = self.line >= _ONE_SAMPLER_LINE or "sampler_type" not in TorchLlmArgs.model_fields
        prompt_keys = getattr(_later("tensorrt_llm.inputs", "TextPrompt"), "__annotations__", ())
        self.takes_media_ids = self.line >= NAMING_LINE and "multi_modal_uuids" in prompt_keys
        takes_conversation = "conversation_params" in parameters
        self.ConversationParams = _later("tensorrt_llm.llmapi", "ConversationParams") if takes_conversation else None
        self.RequestError: type[Exception] = RequestError

    def has_disaggregated_field(self, name: str) -> bool:
        """Whether this release's ``DisaggregatedParams`` has a field of that name."""
        return any(item.name == name for item in dataclasses.fields(self.DisaggregatedParams))

    @property
    def hands_logprobs_over(self) -> bool:
        """Whether a hand-off carries the log probabilities of its token; without them a decode can't report any."""
        return self.has_disaggregated_field("first_gen_log_probs")


def _later(module: str, name: str) -> Any:
    """What only a later line may have; ``None``: this one does not."""
    return getattr(importlib.import_module(module), name, None)


def line_of(text: str) -> tuple[int, int]:
    """The line of the version ``text``, such as (1, 2) for 1.2.1; (0, 0) if it can't be read."""
    found = _LINE.match(text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def installed_version() -> str | None:
    """The version of the installed package, such as ``1.4.0rc1``, without importing it; ``None`` without one."""
    try:
        return version("tensorrt_llm")
    except PackageNotFoundError:
        return None


def check_installed() -> None:
    """Raise ``ConfigError`` if the package is not installed."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise ConfigError(
            "engine.kind: trtllm needs tensorrt_llm, which comes with NVIDIA's container; see docs/trtllm.md"
        )

"""The parts of ``tensorrt_llm`` that the adapter uses, imported once and late: the import is slow, and needs a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util

from quartet.engine.late_import import importing
from quartet.errors import ConfigError


class Package:
    """Classes of TensorRT-LLM; their types are unknown where the package is not installed."""

    def __init__(self) -> None:
        """Import the package. Raises whatever an incomplete installation raises."""
        with importing("torch"):
            from tensorrt_llm import LLM, SamplingParams
            from tensorrt_llm.executor.request import LoRARequest
            from tensorrt_llm.executor.utils import RequestError
            from tensorrt_llm.llmapi import DisaggregatedParams, GuidedDecodingParams
            from tensorrt_llm.scheduling_params import SchedulingParams

        self.LLM, self.SamplingParams, self.SchedulingParams = LLM, SamplingParams, SchedulingParams
        self.DisaggregatedParams, self.GuidedDecodingParams = DisaggregatedParams, GuidedDecodingParams
        self.LoRARequest = LoRARequest
        self.RequestError: type[Exception] = RequestError

    def has_disaggregated_field(self, name: str) -> bool:
        """Whether this release's ``DisaggregatedParams`` has a field of that name."""
        return any(item.name == name for item in dataclasses.fields(self.DisaggregatedParams))


def check_installed() -> None:
    """Raise ``ConfigError`` if the package is not installed."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise ConfigError(
            "engine.kind: trtllm needs tensorrt_llm, which comes with NVIDIA's container; see docs/trtllm.md"
        )

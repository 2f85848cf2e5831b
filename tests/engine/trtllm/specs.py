"""Settings of workers with TensorRT-LLM, and the tiny model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quartet.engine.settings import EncoderSettings, EngineKind, EngineSettings, EngineSpec
from quartet.engine.trtllm.arguments import LlmArguments, Use, llm_arguments
from tests.tiny import CHECKPOINT


def spec_of(*, encoder: EncoderSettings | None = None, **settings: Any) -> EngineSpec:
    engine = EngineSettings(kind=EngineKind.TRTLLM, **{"dtype": "float32", **settings})
    return EngineSpec(model_path=str(CHECKPOINT), engine=engine, encoder=encoder or EncoderSettings())


def arguments(use: Use = Use.DECODE, override: Mapping[str, object] | None = None, **settings: Any) -> LlmArguments:
    """What becomes of ``settings``, with ``override`` over them."""
    return llm_arguments(spec_of(override_engine_args=override or {}, **settings), use)

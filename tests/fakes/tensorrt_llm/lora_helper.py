"""`LoraConfig`."""

from __future__ import annotations

from tensorrt_llm._stand_in.schema import make_dataclass

LoraConfig = make_dataclass("LoraConfig", kw_only=False)

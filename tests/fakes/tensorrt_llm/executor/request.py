"""`LoRARequest`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorrt_llm._stand_in.schema import make_dataclass


class _Rules:
    __slots__ = ()

    def __post_init__(self) -> None:
        request: Any = self
        if request.lora_path and not Path(request.lora_path).exists():
            raise ValueError(f"lora_path ({request.lora_path}) does not exist.")


LoRARequest = make_dataclass("LoRARequest", _Rules, kw_only=False)

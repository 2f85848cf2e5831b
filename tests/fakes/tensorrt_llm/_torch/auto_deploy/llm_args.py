"""`LlmArgs` of AutoDeploy: only what the description says of it."""

from __future__ import annotations

from typing import Any

import pydantic
from tensorrt_llm._stand_in import schema
from tensorrt_llm._stand_in.switches import SWITCHES
from tensorrt_llm.llmapi import llm_args

_REJECTED = schema.API["rejected_keywords"]["_autodeploy"]
_DEFAULTS = {name: param.get("default") for name, param in schema.params_of("TorchLlmArgs").items()}


class _Rules(llm_args._TorchRules):
    @pydantic.model_validator(mode="before")
    @classmethod
    def _only_defaults(cls, values: Any) -> Any:
        for name in [*_REJECTED["names"], *_REJECTED["frozen"]]:
            allowed = (None, _DEFAULTS.get(name), *({"max_beam_width": (1,), "cp_config": ({},)}.get(name, ())))
            if values.get(name) not in allowed:
                raise ValueError(f"{name} is not supported by AutoDeploy; use world_size")
        return values


_BASE = {
    name: param
    for name, param in schema.params_of("TorchLlmArgs").items()
    if SWITCHES.autodeploy_from_torch or param["level"] == "V121"
}
_OWN: dict[str, Any] = {
    "world_size": (int, 1),
    "model_factory": (str, "AutoModelForCausalLM"),
    "model_kwargs": (dict[str, Any], {}),
    "tokenizer_kwargs": (dict[str, Any] | None, None),
    "skip_loading_weights": (bool, False),
    "runtime": (schema.parse_type("Literal['trtllm','demollm']"), "trtllm"),
    "mode": (schema.parse_type("Literal['graph','transformers']"), "graph"),
    "transforms": (dict[str, Any], {}),
    "attn_backend": (str, "flashinfer"),
    "compile_backend": (str | None, None),
    "cuda_graph_batch_sizes": (list[int] | None, None),
    "max_seq_len": (int, 512),
    "max_batch_size": (int, 8),
    "device": (str, "cuda"),
    # What the engine reads of arguments, where the base class lacks them.
    "build_config": (Any, None),
}
LlmArgs = schema.make_model("TorchLlmArgs", _Rules, only=set(_BASE), own=_OWN, **llm_args._PROSE)
LlmArgs.__name__ = "LlmArgs"

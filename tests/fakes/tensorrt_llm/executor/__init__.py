"""Requests, their results, their errors."""

from __future__ import annotations

from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.result import CompletionOutput, RequestOutput
from tensorrt_llm.executor.utils import RequestError

__all__ = ["CompletionOutput", "LoRARequest", "RequestError", "RequestOutput"]

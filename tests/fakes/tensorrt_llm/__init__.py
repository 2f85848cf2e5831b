"""A stand-in for TensorRT-LLM 1.2, or 1.4: its Python API, made from ``api.json`` and strict about it, on the CPU.

For tests alone. It generates with transformers in float32; `tensorrt_llm._stand_in.control` is how tests reach into it,
`tensorrt_llm._stand_in.switches` what is not known of the real one.
"""

from __future__ import annotations

from tensorrt_llm._stand_in.switches import SWITCHES
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.mm_encoder import MultimodalEncoder
from tensorrt_llm.sampling_params import SamplingParams

__version__ = SWITCHES.version
__all__ = ["LLM", "MultimodalEncoder", "SamplingParams", "__version__"]

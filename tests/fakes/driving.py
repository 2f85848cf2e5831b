"""What tests of the stand-in share: prompts, engines for each role, and what transformers itself answers."""

from __future__ import annotations

import asyncio
from functools import cache, lru_cache
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer, LlavaForConditionalGeneration

from tests.fakes.installation import installed
from tests.tiny import CHECKPOINT

with installed():
    from tensorrt_llm import LLM, MultimodalEncoder, SamplingParams
    from tensorrt_llm.llmapi import DisaggregatedParams

MODEL = str(CHECKPOINT)
SPELL = "<|user|>How do you spell cat?<|eos|><|assistant|>"
STORY = "<|user|>Tell me a short story about a rabbit named Olive.<|eos|><|assistant|>"
LOOK = "<|user|><|image|>Describe the picture.<|eos|><|assistant|>"
WAIT_S = 30.0


def picture(colour: str = "red") -> Image.Image:
    image = Image.new("RGB", (96, 96), "beige")
    image.paste(colour, (20, 20, 60, 60))
    return image


def token_ids_of(text: str) -> list[int]:
    return list(_tokenizer().encode(text))


def word_ids_of(text: str) -> list[int]:
    return list(_tokenizer().encode(text, add_special_tokens=False))


def text_of(token_ids: list[int]) -> str:
    return str(_tokenizer().decode(token_ids, skip_special_tokens=True))


def greedy(text: str, max_tokens: int, image: Image.Image | None = None) -> list[int]:
    """What transformers' own `generate` answers, greedily."""
    return list(_generate(text, max_tokens, *(() if image is None else (image.tobytes(), image.size))))


def engine(**changes: Any) -> LLM:
    return LLM(MODEL, **changes)


def prefill_engine(**changes: Any) -> LLM:
    transfer = {"backend": "NIXL", **changes.pop("transfer", {})}
    return engine(cache_transceiver_config=transfer, disable_overlap_scheduler=True, **changes)


def decode_engine(**changes: Any) -> LLM:
    return engine(cache_transceiver_config={"backend": "NIXL", **changes.pop("transfer", {})}, **changes)


def encoder(**changes: Any) -> MultimodalEncoder:
    return MultimodalEncoder(MODEL, **changes)


def params(max_tokens: int = 24, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **changes)


def for_decode(given: Any) -> DisaggregatedParams:
    """What decode gets of prefill's params."""
    return DisaggregatedParams(
        request_type="generation_only",
        first_gen_tokens=given.first_gen_tokens,
        ctx_request_id=given.ctx_request_id,
        opaque_state=given.opaque_state,
    )


async def prefilled(llm: LLM, inputs: Any = STORY, **changes: Any) -> Any:
    """Run the context phase of ``inputs``; its result."""
    disagg = changes.pop("disagg", None) or DisaggregatedParams(request_type="context_only")
    disagg.request_type = "context_only"
    return await ended(llm.generate_async(inputs, params(**changes), disaggregated_params=disagg))


async def ended(handle: Any) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await handle


async def steps_of(handle: Any) -> list[list[int]]:
    """The tokens of the first output after each step."""
    async with asyncio.timeout(WAIT_S):
        return [list(step.outputs[0].token_ids) async for step in handle]


@cache
def _generate(text: str, max_tokens: int, pixels: bytes = b"", size: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    image = Image.frombytes("RGB", size, pixels) if pixels else None
    inputs = _processor()(text=text, images=image, return_tensors="pt")
    output = _model().generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    return tuple(output[0, inputs["input_ids"].shape[1] :].tolist())


@lru_cache
def _processor() -> Any:
    return AutoProcessor.from_pretrained(MODEL)


@lru_cache
def _model() -> Any:
    return LlavaForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32).eval()


@lru_cache
def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)

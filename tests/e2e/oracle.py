"""What ``transformers`` says of the tiny model, in float32 like the workers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import transformers
from PIL import Image

from tests import tiny
from tests.pictures import Look

# Nearer to each other, two logits could change places by rounding.
_MIN_GAP, _MIN_GAP_OF_LOOKS = 1e-4, 1e-3


class Oracle:
    """``generate`` of the whole model, one prompt at a time."""

    def __init__(self) -> None:
        llava: Any = transformers.LlavaForConditionalGeneration
        auto: Any = transformers.AutoProcessor
        self._model = llava.from_pretrained(tiny.CHECKPOINT, dtype=torch.float32)
        self._processor = auto.from_pretrained(tiny.CHECKPOINT)
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def generate(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """So many token ids, whatever the model would end with."""
        key = prompt, num_tokens
        if key not in self._known:
            ids, gap = self._greedy(num_tokens, input_ids=torch.tensor([prompt]), eos_token_id=None)
            assert gap >= _MIN_GAP, "a near tie: this prompt proves nothing"
            self._known[key] = ids
        return self._known[key]

    def look(self, look: Look, num_tokens: int) -> tuple[tuple[int, ...], bool]:
        """Token ids, and whether two logits came too near to each other for that to prove anything."""
        pieces = [*[{"type": "image"}] * len(look.files), {"type": "text", "text": look.question}]
        text = self._processor.apply_chat_template([{"role": "user", "content": pieces}], add_generation_prompt=True)
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in look.files]
        inputs = self._processor(images=images, text=text, return_tensors="pt", add_special_tokens=False)
        ids, gap = self._greedy(num_tokens, **inputs)
        return ids, gap < _MIN_GAP_OF_LOOKS

    def embeddings(self, picture: bytes) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` of what the language model sees of it."""
        image = Image.open(io.BytesIO(picture)).convert("RGB")
        pixels = self._processor.image_processor(image, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            [rows] = self._model.get_image_features(pixel_values=pixels).pooler_output
        tensor: torch.Tensor = rows
        return tensor

    def _greedy(self, num_tokens: int, **inputs: Any) -> tuple[tuple[int, ...], float]:
        output = self._model.generate(
            **inputs, max_new_tokens=num_tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        best = torch.cat(output.logits).topk(2).values
        ids = tuple(output.sequences[0, inputs["input_ids"].shape[1] :].tolist())
        return ids, float((best[:, 0] - best[:, 1]).min())


@contextmanager
def one_oracle() -> Iterator[Oracle]:
    """The oracle, which leaves the other cores to the workers; a process loads it once, and it keeps its answers."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield _oracle()
    torch.set_num_threads(num_threads)


@cache
def _oracle() -> Oracle:
    return Oracle()

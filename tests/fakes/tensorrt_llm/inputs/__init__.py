"""`default_multimodal_input_loader`: prompts with pictures, from paths."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from PIL import Image
from tensorrt_llm._stand_in.schema import StandInError, signed
from tensorrt_llm._stand_in.switches import SWITCHES
from tensorrt_llm._stand_in.weights import load_tokenizer


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    multi_modal_data: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    multi_modal_embeddings: dict[str, Any]


if SWITCHES.is_1_4:
    TextPrompt.__annotations__["multi_modal_uuids"] = dict[str, list[Any]]


@signed("default_multimodal_input_loader", self_name=None)
def default_multimodal_input_loader(**given: Any) -> list[dict[str, Any]]:
    """Return a prompt dict for each of ``prompts``, the chat template applied; upstream would download URLs."""
    if given["modality"] not in ("image", "multiple_image"):
        raise StandInError(f"modality {given['modality']} is not imitated")
    tokenizer = given["tokenizer"] if hasattr(given["tokenizer"], "decode") else load_tokenizer(given["model_dir"])
    embeddings, items = (
        given["mm_embeddings"],
        given["media"] if given["mm_embeddings"] is None else given["mm_embeddings"],
    )
    loaded = []
    for prompt, item in zip(given["prompts"], items, strict=True):
        parts = item if isinstance(item, list) else [item]
        content = [{"type": "image"} for _ in parts] + [{"type": "text", "text": prompt}]
        messages = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if embeddings is not None:
            loaded.append({"prompt": text, "multi_modal_embeddings": {"image": parts}})
        else:
            pictures = [_open(part, given["image_data_format"]) for part in parts]
            loaded.append({"prompt": text, "multi_modal_data": {"image": pictures}})
    return loaded


def _open(path: str, image_data_format: str) -> Any:
    if "://" in path:
        raise StandInError("upstream would download this: check URLs before, and give it files")
    picture = Image.open(path).convert("RGB")
    if image_data_format != "pt":
        return picture
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return pixels.reshape(picture.height, picture.width, 3).permute(2, 0, 1).float() / 255

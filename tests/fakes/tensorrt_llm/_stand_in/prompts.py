"""From what `generate_async` is given to a prompt that can be computed; runs in the caller's thread, as upstream."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensorrt_llm._stand_in.prompt import PreparedPrompt
from tensorrt_llm._stand_in.schema import API, StandInError
from tensorrt_llm._stand_in.switches import SWITCHES
from tensorrt_llm._stand_in.weights import Weights, load_image_processor


def _names(given: Any, num_items: int) -> list[str | None]:
    if given is None:
        return [None] * num_items
    if len(given) != num_items or not all(name is None or isinstance(name, str) for name in given):
        raise ValueError(f"multi_modal_uuids must name each of {num_items} items, or say None")
    return list(given)


class PromptReader:
    """Reads one model's prompts."""

    def __init__(self, weights: Weights, tokenizer: Any) -> None:
        self._weights, self._tokenizer = weights, tokenizer

    @property
    def has_vision(self) -> bool:
        """Whether the model sees pictures."""
        return self._weights.has_vision

    def read(self, inputs: Any, params: Any, disagg: Any) -> PreparedPrompt:
        """Tokenize ``inputs`` and prepare their pictures.

        Raises:
            ValueError, TypeError: they are malformed, or need what this engine lacks.
        """
        parts = self._parts(inputs)
        pictures = (parts.get("multi_modal_data") or {}).get("image")
        embeddings = (parts.get("multi_modal_embeddings") or {}).get("image")
        if "prompt" not in parts and pictures is not None:
            # As upstream: back to text and to tokens again, where ids may change and embeddings get lost.
            parts = {**parts, "prompt": self._need_tokenizer().decode(parts.pop("prompt_token_ids"))}
            embeddings, params = None, None
        token_ids = self._token_ids(parts, params)
        handles = list((disagg and disagg.multimodal_embedding_handles) or [])
        if pictures is None and embeddings is None and not handles:
            return PreparedPrompt(parts.get("prompt"), token_ids)
        if pictures is None and embeddings is None:
            raise ValueError("embedding handles need the same inputs that the encoder had, with their multi_modal_data")
        return self._with_items(parts, token_ids, pictures, embeddings, handles, disagg)

    def _parts(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, str):
            return {"prompt": inputs}
        if isinstance(inputs, list) and all(type(token_id) is int for token_id in inputs):
            return {"prompt_token_ids": inputs}
        if not isinstance(inputs, dict) or not ("prompt" in inputs) ^ ("prompt_token_ids" in inputs):
            raise TypeError(f"The inputs must be type str or list of int or a prompt dict, but got {type(inputs)}")
        kind = "text_prompt" if "prompt" in inputs else "tokens_prompt"
        later = {"multi_modal_uuids"} if SWITCHES.is_1_4 else set()
        if unknown := set(inputs) - set(API["shapes"][kind]) - later | ({"query_token_ids"} & set(inputs)):
            raise StandInError(f"keys of a prompt that would be ignored, or that are not imitated: {sorted(unknown)}")
        if others := set(inputs.get("multi_modal_data") or {}) - {"image"}:
            raise ValueError(f"the model doesn't take {sorted(others)}")
        return dict(inputs)

    def _token_ids(self, parts: dict[str, Any], params: Any) -> list[int]:
        if "prompt" in parts:
            add_special_tokens = params is not None and params.add_special_tokens
            options = {"add_special_tokens": add_special_tokens}
            if params is not None and params.truncate_prompt_tokens is not None:
                options |= {"truncation": True, "max_length": params.truncate_prompt_tokens}
            return list(self._need_tokenizer().encode(parts["prompt"], **options))
        token_ids = parts["prompt_token_ids"]
        if not isinstance(token_ids, list) or not all(type(token_id) is int for token_id in token_ids):
            raise TypeError("prompt_token_ids must be a list of ints")
        if not token_ids or min(token_ids) < 0:
            raise ValueError("prompt_token_ids must have at least one id, and none below 0")
        return list(token_ids)

    def _need_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise ValueError("tokenizer is required to tokenize string prompt")
        return self._tokenizer

    def _with_items(
        self,
        parts: dict[str, Any],
        token_ids: list[int],
        pictures: Any,
        embeddings: Any,
        handles: list[dict[str, Any]],
        disagg: Any,
    ) -> PreparedPrompt:
        if not self._weights.has_vision:
            raise ValueError("the model has no vision tower")
        features = None if embeddings is None else [_rows(item) for item in _as_list(embeddings)]
        options = (parts.get("mm_processor_kwargs") or {}) if SWITCHES.reads_processor_options else {}
        pixels = None if pictures is None else self.pixels(_as_list(pictures), options)
        num_items = len(features if features is not None else pixels)  # type: ignore[arg-type]
        place: Any = self._weights.image_token_id
        if token_ids.count(place) != num_items:
            raise ValueError(f"{token_ids.count(place)} placeholders in the prompt, but {num_items} pictures")
        if len(handles) > 1 and not SWITCHES.several_handles:
            raise NotImplementedError("Only one mm_handle is supported for LlavaNext for now")
        if handles and len(handles) != num_items:
            raise ValueError(f"{len(handles)} embedding handles, but {num_items} pictures")
        if handles:
            item_tokens = [int(handle["tensor_size"][0]) for handle in handles]
        else:
            item_tokens = (
                [len(item) for item in features] if features is not None else [self.tokens_per_picture] * num_items
            )
        items = self._item_ids(item_tokens, are_embeddings=features is not None and not handles)
        expanded = [new for old in token_ids for new in (next(items) if old == place else [old])]
        given = disagg.multimodal_hashes if disagg else None
        names = _names((parts.get("multi_modal_uuids") or {}).get("image"), num_items)
        return PreparedPrompt(
            parts.get("prompt"),
            expanded,
            vocab_size=self._weights.vocab_size,
            placeholder=place if SWITCHES.ids_in_vocabulary else None,
            pixel_values=None if handles or features is not None else pixels,
            features=None if handles or features is None else torch.cat(features),
            handles=handles,
            item_hashes=given or [hash_of(item) for item in (features if features is not None else pixels)],  # type: ignore[union-attr]
            item_tokens=item_tokens,
            item_names=names,
        )

    def _item_ids(self, item_tokens: Sequence[int], *, are_embeddings: bool) -> Iterator[list[int]]:
        """The ids of each item, as LLaVA's input processor makes them: one and the same, or of embeddings a count."""
        if SWITCHES.ids_in_vocabulary:
            yield from ([self._weights.image_token_id] * num_tokens for num_tokens in item_tokens)
            return
        first = self._weights.vocab_size
        for num_tokens in item_tokens:
            yield [*range(first, first + num_tokens)] if are_embeddings else [first + 1] * num_tokens
            first += num_tokens if are_embeddings else 0

    @property
    def tokens_per_picture(self) -> int:
        """Placeholders that a picture takes."""
        vision = self._weights.config.vision_config
        return int((vision.image_size // vision.patch_size) ** 2)

    def pixels(self, pictures: Sequence[Any], options: dict[str, Any]) -> torch.Tensor:
        """Make pictures (PIL, or CHW floats of 0 to 1) into the tower's input, [num_pictures, 3, height, width]."""
        processor = load_image_processor(self._weights.path)
        made = []
        for picture in pictures:
            if isinstance(picture, torch.Tensor):
                if picture.ndim != 3 or not picture.is_floating_point():
                    raise ValueError("a picture's tensor must be CHW floats")
                options = {**options, "do_rescale": False}
                picture = picture.numpy()
            made.append(processor(images=[picture], return_tensors="pt", **options)["pixel_values"])
        return torch.cat(made)


def _rows(item: Any) -> torch.Tensor:
    if isinstance(item, dict):
        raise StandInError("embeddings with special tokens are not imitated")
    if SWITCHES.embeddings_need_special_tokens:
        raise ValueError("embeddings must say which special tokens go where among them")
    rows: torch.Tensor = item.float()
    return rows


def hash_of(item: torch.Tensor) -> list[int]:
    """Name what a picture became: 8 ints of 32 bits."""
    digest = hashlib.blake2b(item.contiguous().numpy().tobytes(), digest_size=32).digest()
    return list(struct.unpack("<8i", digest))


def _as_list(items: Any) -> list[Any]:
    return list(items) if isinstance(items, list | tuple) else [items]

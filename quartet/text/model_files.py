"""The files that say how a model reads and writes text, as ``{name: bytes}``.

A worker serves them by ``GetModelFiles``, so that a router or a client needs no shared disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quartet.errors import ModelFilesError
from quartet.media.media_id import PREPROCESSING_FILES

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
CONFIG = "config.json"
CHAT_TEMPLATE = "chat_template.jinja"

_FOR_TEXT = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, GENERATION_CONFIG, CONFIG, CHAT_TEMPLATE)
#: Every file that ``quartet.text`` reads; only ``tokenizer.json`` must exist. Those about pictures name media items.
TEXT_FILE_NAMES = tuple(dict.fromkeys((*_FOR_TEXT, *PREPROCESSING_FILES)))


def read_text_files(directory: Path) -> dict[str, bytes]:
    """Read those of ``TEXT_FILE_NAMES`` that ``directory`` holds.

    Raises:
        ModelFilesError: ``directory`` holds no ``tokenizer.json``, or a file cannot be read.
    """
    try:
        files = {name: (directory / name).read_bytes() for name in TEXT_FILE_NAMES if (directory / name).is_file()}
    except OSError as error:
        raise ModelFilesError(f"cannot read the model's files: {error}") from error
    if TOKENIZER not in files:
        raise ModelFilesError(f"{directory} holds no {TOKENIZER}")
    return files


def parse_json_file(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Parse one JSON object; a file that is not there counts as an empty object.

    Raises:
        ModelFilesError: the file is no JSON object.
    """
    if name not in files:
        return {}
    try:
        parsed = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{name} is no valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelFilesError(f"{name} must hold a JSON object")
    return parsed


def max_position_embeddings(files: Mapping[str, bytes]) -> int | None:
    """The tokens of a sequence that the model was made for; ``None``: ``config.json`` does not say."""
    config = parse_json_file(files, CONFIG)
    inner = config.get("text_config")
    value = {**config, **(inner if isinstance(inner, dict) else {})}.get("max_position_embeddings")
    return value if type(value) is int and value > 0 else None


#: Texts of placeholders, by model type, where ``image_token_index`` is a token that stands for a part of an item.
_PLACEHOLDER_TEXTS = {"llama4": "<|image|>"}


def placeholder(config: Mapping[str, Any], token_to_id: Callable[[str], int | None]) -> object:
    """What ``config.json`` has as the id of the token that stands for an item of media in prompts.

    It has had two names there; without a vision tower it is an unused word. ``None``: there is none.
    """
    if not isinstance(config.get("vision_config"), dict):
        return None
    text = _PLACEHOLDER_TEXTS.get(str(config.get("model_type")))
    return config.get("image_token_index", config.get("image_token_id")) if text is None else token_to_id(text)


def decode_utf8_file(files: Mapping[str, bytes], name: str) -> str:
    """Decode one file that must be there.

    Raises:
        ModelFilesError: it is missing or is no UTF-8.
    """
    if name not in files:
        raise ModelFilesError(f"the model's files lack {name}")
    try:
        return files[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFilesError(f"{name} is no UTF-8: {error.reason} at byte {error.start}") from error

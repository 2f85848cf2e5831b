"""The identity of a model: one digest over everything that decides its tokens and its KV blocks.

Two workers with the same fingerprint may exchange blocks and take over each other's requests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quartet.errors import InvalidRequestError
from quartet.media.media_id import PREPROCESSING_FILES

_LOG = logging.getLogger(__name__)

_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
# How a picture is preprocessed for the vision tower: media ids depend on it, too.
_PREPROCESSING_FILES = tuple(name for name in PREPROCESSING_FILES if name not in _CONFIG_FILES)
_WEIGHTS_SUFFIX = ".safetensors"
_SHA256 = re.compile(r"[0-9a-f]{64}")

# How random weights come from their seed (``quartet.engine.torch.random_weights``): another way makes other weights.
_DRAWING = 1

_READ_SIZE_BYTES = 1 << 24
_PROGRESS_INTERVAL_S = 5.0


def model_fingerprint(model_path: str | Path, kv_dtype: str, random_seed: int | None = None) -> str:
    """Digest the model in a directory.

    SHA-256 over (part, file name, SHA-256 of the content) of its config, tokenizer, template, preprocessing and weight
    files, in that order and by name within a part, and over the dtype of its KV cache. Names and digests are separated
    by bytes that occur in neither, so that no two lists of files have the same digest. The process remembers the digest
    of a weight file while its size and time of change stay the same. In the Hugging Face cache, a weight file's name is
    its digest.

    With ``random_seed``, weights are made from it: it is digested in place of weight files.

    Args:
        model_path: directory as Hugging Face lays it out.
        kv_dtype: name of the KV cache's dtype, such as ``bfloat16``.
        random_seed: of random weights; ``None``: the weights are those of the files.

    Returns:
        64 hexadecimal digits.

    Raises:
        InvalidRequestError: field ``model``; no directory, or one without ``config.json`` or safetensors files.
    """
    directory = Path(model_path)
    digest = hashlib.sha256()
    for part, path in _identity_files(directory, has_weights=random_seed is None):
        digest.update(f"{part}\0{path.name}\0{_file_digest(path)}\n".encode())
    if random_seed is not None:
        digest.update(f"random_weights\0{_DRAWING}\0{random_seed}\n".encode())
    digest.update(f"kv_dtype\0{kv_dtype}\n".encode())
    return digest.hexdigest()


def fingerprint_with_template(fingerprint: str, template: bytes) -> str:
    """The fingerprint of a model that uses ``template`` for chats instead of its own template.

    The way from text to tokens belongs to a model's identity, even if blocks are the same.
    """
    return hashlib.sha256(f"{fingerprint}\0template\0{hashlib.sha256(template).hexdigest()}\n".encode()).hexdigest()


def fingerprint_with_processor(fingerprint: str, kwargs: Mapping[str, object]) -> str:
    """The fingerprint of a model whose pictures are processed with ``kwargs`` in place of its own settings."""
    written = json.dumps(kwargs, sort_keys=True)
    return hashlib.sha256(f"{fingerprint}\0mm_processor_kwargs\0{written}\n".encode()).hexdigest()


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, by name."""
    return sorted(path for path in directory.glob(f"*{_WEIGHTS_SUFFIX}") if path.is_file())


def _identity_files(directory: Path, *, has_weights: bool) -> list[tuple[str, Path]]:
    weights = weight_files(directory) if has_weights else []
    if not (directory / "config.json").is_file() or (has_weights and not weights):
        wanted = f"config.json with {_WEIGHTS_SUFFIX} files" if has_weights else "config.json"
        raise InvalidRequestError(f"{directory} holds no {wanted}", field="model")
    parts = [
        ("config", _CONFIG_FILES),
        ("tokenizer", _TOKENIZER_FILES),
        ("template", _TEMPLATE_FILES),
        ("preprocessing", _PREPROCESSING_FILES),
    ]
    files = [(part, directory / name) for part, names in parts for name in sorted(names)]
    return [(part, path) for part, path in files if path.is_file()] + [("weights", path) for path in weights]


@dataclass(frozen=True)
class _FileState:
    """Identifies the state of a file that was hashed."""

    path: Path
    size_bytes: int
    changed_ns: int


# Weights do not change while they are served, and hashing a large model takes a minute.
_weight_digests: dict[_FileState, str] = {}


def _file_digest(path: Path) -> str:
    stat = path.stat()
    state = _FileState(path.resolve(), stat.st_size, stat.st_mtime_ns)
    if path.suffix != _WEIGHTS_SUFFIX:
        return _hash_file(state)
    if state not in _weight_digests:
        _weight_digests[state] = _hub_digest(state.path) or _hash_file(state)
    return _weight_digests[state]


def _hub_digest(file: Path) -> str | None:
    """The digest of a file in the Hugging Face cache, which names large files by SHA-256: saves minutes at a start."""
    return file.name if file.parent.name == "blobs" and _SHA256.fullmatch(file.name) else None


def _hash_file(state: _FileState) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(min(_READ_SIZE_BYTES, max(state.size_bytes, 1)))
    num_done, logged_at = 0, time.monotonic()
    with state.path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
            num_done += size
            if time.monotonic() - logged_at > _PROGRESS_INTERVAL_S:
                logged_at = time.monotonic()
                _LOG.info("hashing %s: %d of %d MiB", state.path.name, num_done >> 20, state.size_bytes >> 20)
    return digest.hexdigest()

"""What the mock engine takes from a model's directory: everything but the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Self

from quartet.errors import ModelFilesError
from quartet.text.model_files import CONFIG, parse_json_file, read_text_files
from quartet.text.model_text import ModelText
from quartet.text.tokenizer import Tokenizer

# Vocabularies begin with what is most frequent; more words would only take time to find.
_MAX_NUM_WORDS = 4096


@dataclass(frozen=True, kw_only=True)
class MockModel:
    """A model without weights.

    Attributes:
        fingerprint: of its text files. No engine with weights has the same: its blocks hold something else.
        vocab_size: token ids are below it.
        eos_token_ids: tokens that end an output.
        word_ids: tokens to make answers of: none is special, and each by itself is text.
        max_model_len: tokens of prompt and output together; ``None`` where config.json doesn't say.
    """

    fingerprint: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    word_ids: tuple[int, ...] = field(repr=False)
    max_model_len: int | None

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read the files in ``directory``.

        Raises:
            ModelFilesError: there is no ``tokenizer.json``, or a file is malformed.
        """
        files = read_text_files(directory)
        text = ModelText.from_files(files)
        eos_token_ids = frozenset(text.eos_token_ids)
        words = _word_ids(text.tokenizer, text.vocab_size, eos_token_ids)
        word_ids = tuple(islice(words, _MAX_NUM_WORDS))
        if not word_ids:
            raise ModelFilesError(f"the tokenizer in {directory} has no token that is text by itself")
        return cls(
            fingerprint=_fingerprint(files),
            vocab_size=text.vocab_size,
            eos_token_ids=eos_token_ids,
            word_ids=word_ids,
            max_model_len=_max_model_len(files),
        )


def _word_ids(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> Iterator[int]:
    kept_out = tokenizer.special_token_ids | eos_token_ids
    pieces = tokenizer.piece_table(skip_special_tokens=True)
    for token_id in range(min(vocab_size, tokenizer.vocab_size)):
        is_known = token_id not in kept_out and tokenizer.token_text(token_id) is not None
        if is_known and (pieces is None or _is_text(pieces[token_id])):
            yield token_id


def _is_text(piece: bytes) -> bool:
    """Whether it is whole characters: a part of one would be held back until the rest comes."""
    try:
        return bool(piece.decode())
    except UnicodeDecodeError:
        return False


def _max_model_len(files: Mapping[str, bytes]) -> int | None:
    config = parse_json_file(files, CONFIG)
    inner = config.get("text_config")
    value = {**config, **(inner if isinstance(inner, dict) else {})}.get("max_position_embeddings")
    return value if type(value) is int and value > 0 else None


def _fingerprint(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256(b"mock\n")
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()

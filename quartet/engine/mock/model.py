"""The mock engine's configuration, its timing model, and what it reads of a model: all files but the weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Self

from quartet.errors import ConfigError, ModelFilesError
from quartet.events.kv import Tier
from quartet.text.model_files import max_position_embeddings, read_text_files
from quartet.text.model_text import ModelText
from quartet.text.tokenizer import Tokenizer

# Vocabularies begin with the most frequent words; more words would only take time to find.
_MAX_NUM_WORDS = 4096

#: Context tokens that ``StepTiming``'s ``decode_*`` refer to: they are coefficients of a polynomial of the share.
FULL_CONTEXT_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Milliseconds of a step: one part for the prompt tokens that it computes, one for the requests that decode.

    With ``n`` new prompt tokens the first part is ``prefill_base + prefill_linear n + prefill_square n^2``. With ``p``,
    the sum of the contexts of all requests that decode over 1,048,576, the second part is ``decode_base +
    decode_linear p + decode_square p^2``. A part without work takes no time.

    The defaults are the public model of the mock engine of ai-dynamo/dynamo (``lib/mocker/src/common/perf_model.rs``),
    so that results of both can be compared.
    """

    prefill_base: float = 16.50142
    prefill_linear: float = 0.01518344
    prefill_square: float = 4.209989e-7
    decode_base: float = 5.74
    decode_linear: float = 54.01
    decode_square: float = -25.74

    def __post_init__(self) -> None:
        """Refuse negative coefficients, except of ``decode_square``."""
        for name in ("prefill_base", "prefill_linear", "prefill_square", "decode_base", "decode_linear"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative")

    def prefill_ms(self, num_tokens: int) -> float:
        """The first part, for ``num_tokens`` new prompt tokens."""
        if not num_tokens:
            return 0.0
        return self.prefill_base + num_tokens * (self.prefill_linear + num_tokens * self.prefill_square)

    def decode_ms(self, num_context_tokens: int) -> float:
        """The second part, for requests that decode with ``num_context_tokens`` tokens together."""
        if not num_context_tokens:
            return 0.0
        share = num_context_tokens / FULL_CONTEXT_TOKENS
        return self.decode_base + share * (self.decode_linear + share * self.decode_square)

    def step_ms(self, num_prompt_tokens: int, num_context_tokens: int) -> float:
        """The whole step."""
        return self.prefill_ms(num_prompt_tokens) + self.decode_ms(num_context_tokens)


@dataclass(frozen=True, kw_only=True)
class MockSettings:
    """How fast the mock engine is.

    Attributes:
        timing: of a step.
        speed_up: divides the time of ``timing`` and of transfers from lower tiers; below 1 they take longer.
        says: every answer's text, special tokens spelled out, before its end of sequence; empty: answers are words.
        kv_bytes_per_token: of the model whose time it takes, for transfers from tiers below the device.
        host_gb_per_s: how fast blocks come from the host's memory, in 10**9 bytes a second, before ``speed_up``.
        disk_gb_per_s: how fast they come from disk.
    """

    timing: StepTiming = field(default_factory=StepTiming)
    speed_up: float = 1.0
    says: str = field(default="", repr=False)
    kv_bytes_per_token: int = 147_456
    host_gb_per_s: float = 52.0
    disk_gb_per_s: float = 5.0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("speed_up", "kv_bytes_per_token", "host_gb_per_s", "disk_gb_per_s"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name}: must be above 0, not {value:g}")

    def load_s(self, num_tokens: int, tier: Tier) -> float:
        """Seconds in which the KV of so many tokens comes from a tier below the device."""
        gb_per_s = self.disk_gb_per_s if tier is Tier.DISK else self.host_gb_per_s
        return num_tokens * self.kv_bytes_per_token / gb_per_s / 1e9 / self.speed_up


@dataclass(frozen=True, kw_only=True)
class MockEngineConfig:
    """One model, whose weights are not needed.

    Attributes:
        model_path: directory with tokenizer.json; config.json and the other files that ``quartet.text`` reads may be
            missing, and weights are not read.
        num_blocks: blocks of each rank's pool.
        data_parallel_size: ranks, each with a scheduler, a pool and steps of its own.
        block_size: tokens of a block.
        max_model_len: tokens of prompt and output together, also more than the model was made for; ``None``: what
            config.json says.
        settings: how fast it is.

    Raises:
        ConfigError: a value out of range; begins with the field's name.
    """

    model_path: str
    num_blocks: int
    data_parallel_size: int = 1
    block_size: int = 32
    max_model_len: int | None = None
    settings: MockSettings = field(default_factory=MockSettings)

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("num_blocks", "data_parallel_size", "block_size", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be at least 1, not {value}")


@dataclass(frozen=True, kw_only=True)
class MockModel:
    """A model without weights.

    Attributes:
        fingerprint: of its text files. It differs from that of an engine with weights, whose blocks hold real KV.
        vocab_size: token ids are below it.
        eos_token_ids: tokens that end an output.
        word_ids: tokens to make answers of: none is special, and each is text by itself.
        script: tokens of every answer, in place of such words; empty: there is none.
        max_model_len: tokens of prompt and output together; ``None``: config.json does not say.
    """

    fingerprint: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    word_ids: tuple[int, ...] = field(repr=False)
    max_model_len: int | None
    script: tuple[int, ...] = field(default=(), repr=False)

    @classmethod
    def load(cls, directory: Path, says: str = "") -> Self:
        """Read the files in ``directory``; ``says`` is as in ``MockSettings``.

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
            max_model_len=max_position_embeddings(files),
            script=_script(text, says) if says else (),
        )


def _script(text: ModelText, says: str) -> tuple[int, ...]:
    return (*text.tokenizer.encode(says, add_special_tokens=False), *text.eos_token_ids[:1])


def _word_ids(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> Iterator[int]:
    kept_out = tokenizer.special_token_ids | eos_token_ids
    pieces = tokenizer.piece_table(skip_special_tokens=True)
    for token_id in range(min(vocab_size, tokenizer.vocab_size)):
        is_known = token_id not in kept_out and tokenizer.token_text(token_id) is not None
        if is_known and (pieces is None or _is_text(pieces[token_id])):
            yield token_id


def _is_text(piece: bytes) -> bool:
    """Whether it is whole characters: detokenizing holds back a part of a character until the rest comes."""
    try:
        return bool(piece.decode())
    except UnicodeDecodeError:
        return False


def _fingerprint(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256(b"mock\n")
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()

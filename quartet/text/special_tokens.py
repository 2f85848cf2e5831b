"""Which tokens have a meaning of their own: beginning, end, padding and so on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quartet.errors import ModelFilesError
from quartet.text import model_files

#: The names under which chat templates know them, in the field's order.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens as text.

    Attributes:
        named: name (one of ``NAMES``) to token text; a name the model does not use is absent.
        additional: further special tokens, without a name.
    """

    named: Mapping[str, str] = field(default_factory=dict)
    additional: tuple[str, ...] = ()

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> SpecialTokens:
        """Read ``tokenizer_config.json``; what it leaves out comes from ``special_tokens_map.json``.

        Raises:
            ModelFilesError: a file is malformed.
        """
        older = model_files.parse_json_file(files, model_files.SPECIAL_TOKENS_MAP)
        config = model_files.parse_json_file(files, model_files.TOKENIZER_CONFIG)
        merged = {**older, **{name: value for name, value in config.items() if value is not None}}
        named = {name: _token_text(name, merged[name]) for name in NAMES if merged.get(name) is not None}
        return cls(named=named, additional=_additional(merged))

    @property
    def all(self) -> tuple[str, ...]:
        """Every special token once, named ones first."""
        return tuple(dict.fromkeys((*self.named.values(), *self.additional)))


def _additional(merged: Mapping[str, Any]) -> tuple[str, ...]:
    """The list has had two names: ``extra_special_tokens`` may also map own names to tokens."""
    value = merged.get("additional_special_tokens") or merged.get("extra_special_tokens") or ()
    tokens = value.values() if isinstance(value, dict) else value
    if isinstance(tokens, str):
        raise ModelFilesError("additional_special_tokens must be a list")
    return tuple(_token_text("additional_special_tokens", token) for token in tokens)


def _token_text(name: str, value: Any) -> str:
    """A token is written as plain text or as an object with its ``content``."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ModelFilesError(f"{name} must be a token's text")
    return text

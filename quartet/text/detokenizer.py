"""Incremental detokenization: text that grows with the tokens and never ends in half a character.

Why not ``tokenizers.decoders.DecodeStream``: it holds back without bound while bytes are invalid,
cannot be flushed, and once a byte-fallback run turns out invalid it fails at every later token.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol

from quartet.text.token_pieces import PieceRule, PieceTable
from quartet.text.tokenizer import Tokenizer

#: No UTF-8 character is longer, so bytes still incomplete after as many tokens will never be complete.
MAX_HELD_TOKENS = 4
_REPLACEMENT_CHARACTER = "�"
_NO_TEXTS: Mapping[int, str] = MappingProxyType({})


class IncrementalDetokenizer(Protocol):
    """One stream of tokens becoming text.

    The concatenation of everything returned is ``Tokenizer.decode`` of all ids, however they were split.
    Only bytes that are no UTF-8 may differ: there each invalid sequence becomes one U+FFFD, as soon as
    it is certain, where ``decode`` may take back characters already shown.

    Attributes:
        token_work: what a token takes, in the unit of the router's intake: about 0.1 microseconds.
        texts: what tokens add to the text that need not be pushed next, by id. After a push it may be another mapping.
    """

    token_work: int
    texts: Mapping[int, str]

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the characters that they complete."""
        ...

    def finish(self) -> str:
        """Return what was held back: U+FFFD for an incomplete character. Nothing may be pushed after."""
        ...

    @property
    def is_mid_character(self) -> bool:
        """Whether bytes of an incomplete character are held back."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool = True,
    shown: frozenset[int] = frozenset(),
    prompt_tail: Sequence[int] = (),
) -> IncrementalDetokenizer:
    """Start a stream of text.

    Args:
        tokenizer: of the model that makes the tokens.
        skip_special_tokens: leave special tokens out of the text.
        shown: those that stay in it all the same.
        prompt_tail: the prompt's last few ids where the text continues the prompt: its first word then
            keeps its space. Without them the text is decoded on its own.

    Raises:
        InvalidRequestError: an id of ``prompt_tail`` is no unsigned 32-bit number.
    """
    rule = tokenizer.piece_rule
    table = tokenizer.piece_table(skip_special_tokens=skip_special_tokens, shown=shown)
    detokenizer: IncrementalDetokenizer
    if rule is None or table is None:
        detokenizer = WindowDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens, shown=shown)
    else:
        detokenizer = PieceDetokenizer(tokenizer, rule, table)
    detokenizer.push(prompt_tail)
    return detokenizer


class PieceDetokenizer:
    """For tokenizers whose text is the concatenation of tokens' bytes: each byte is read once."""

    token_work = 4

    __slots__ = (
        "_incomplete",
        "_is_first_token",
        "_num_strips_left",
        "_rule",
        "_table",
        "_tokenizer",
        "texts",
    )

    def __init__(self, tokenizer: Tokenizer, rule: PieceRule, table: PieceTable) -> None:
        self._tokenizer = tokenizer
        self._rule = rule
        self._table = table
        self.texts: Mapping[int, str] = _NO_TEXTS
        self._incomplete = b""
        self._is_first_token = True
        self._num_strips_left = rule.max_strip_left

    def push(self, token_ids: Sequence[int]) -> str:
        """See ``IncrementalDetokenizer``."""
        with suppress(KeyError):  # one has half a character, or came for the first time
            return "".join(map(self.texts.__getitem__, token_ids))
        table = self._table
        pieces = [table[token_id] for token_id in token_ids]
        if self._is_first_token:
            self._replace_first(token_ids, pieces)
        encoded = self._incomplete + b"".join(pieces)
        text, num_decoded = codecs.utf_8_decode(encoded, "replace", False)
        self._incomplete = encoded[num_decoded:]
        if self._num_strips_left:
            text = self._strip(text)
        # Whether no rule about the start is left to apply, and no byte is held back.
        is_clear = not (self._incomplete or self._is_first_token or self._num_strips_left)
        self.texts = self._table.texts if is_clear else _NO_TEXTS
        return text

    def finish(self) -> str:
        """See ``IncrementalDetokenizer``."""
        text, _ = codecs.utf_8_decode(self._incomplete, "replace", True)
        self._incomplete = b""
        return text

    @property
    def is_mid_character(self) -> bool:
        """See ``IncrementalDetokenizer``."""
        return bool(self._incomplete)

    def _replace_first(self, token_ids: Sequence[int], pieces: list[bytes]) -> None:
        """Apply the rule for the first token that is in the text at all."""
        for index, piece in enumerate(pieces):
            if piece:
                text = self._tokenizer.token_text(token_ids[index])
                pieces[index] = piece if text is None else self._rule.first_piece(text)
                self._is_first_token = False
                return

    def _strip(self, text: str) -> str:
        """Take characters off the start of the text until one must stay."""
        while text and self._num_strips_left:
            if not text.startswith(self._rule.strip_left):
                self._num_strips_left = 0
                return text
            text = text.removeprefix(self._rule.strip_left)
            self._num_strips_left -= 1
        return text


class WindowDetokenizer:
    """For any other tokenizer: decodes a window of the last tokens with and without the new one.

    The two offsets are those of huggingface/text-generation-inference, ``server/text_generation_server/
    models/model.py`` (``decode_token``), and vLLM, ``vllm/transformers_utils/detokenizer_utils.py``.
    The window begins at the token group shown last, so its length, and the cost per token, is bounded.
    """

    token_work = 64
    texts = _NO_TEXTS

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids - shown if skip_special_tokens else frozenset()
        # Tokens shown last, as context, then those not yet shown.
        self._window: list[int] = []
        self._num_shown = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """See ``IncrementalDetokenizer``."""
        return "".join(map(self._push_one, token_ids))

    def finish(self) -> str:
        """See ``IncrementalDetokenizer``."""
        return self._show(self._new_text())

    @property
    def is_mid_character(self) -> bool:
        """See ``IncrementalDetokenizer``."""
        return self._num_shown < len(self._window)

    def _push_one(self, token_id: int) -> str:
        # Tokens without text would only lengthen the window.
        if token_id in self._skipped or self._tokenizer.token_text(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._new_text()
        is_full = len(self._window) - self._num_shown >= MAX_HELD_TOKENS
        if is_full or (text and not text.endswith(_REPLACEMENT_CHARACTER)):
            return self._show(text)
        return ""

    def _new_text(self) -> str:
        """What the tokens not yet shown add to those shown last."""
        shown = self._tokenizer.decode(self._window[: self._num_shown], skip_special_tokens=False)
        return self._tokenizer.decode(self._window, skip_special_tokens=False)[len(shown) :]

    def _show(self, text: str) -> str:
        """Count the whole window as shown; its latest tokens stay as context for the next."""
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        return text

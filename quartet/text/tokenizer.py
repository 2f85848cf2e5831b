"""Text to token ids and back, over the Rust ``tokenizers`` library; and which tokens are special."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from quartet.errors import InvalidRequestError, ModelFilesError, PromptTooLongError, RequestCancelledError
from quartet.text import model_files
from quartet.text.token_pieces import PieceRule, PieceTable, piece_rule

#: The names under which chat templates know special tokens, in the usual order.
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_MAX_TOKEN_ID = 2**32 - 1


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens with a meaning of their own (beginning, end, padding and so on), as text.

    Attributes:
        named: name (one of ``SPECIAL_TOKEN_NAMES``) to token text; a name the model does not use is absent.
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
        named = {name: _token_text(name, merged[name]) for name in SPECIAL_TOKEN_NAMES if merged.get(name) is not None}
        return cls(named=named, additional=_additional(merged))

    @property
    def all(self) -> tuple[str, ...]:
        """Every special token once, named ones first."""
        return tuple(dict.fromkeys((*self.named.values(), *self.additional)))


# A text of so many characters for each token that it may have is tokenized whole. English has 4 to 5: nearly every
# longer text has too many tokens.
_USUAL_TOKEN_LENGTH = 8

# The tokens of a longer text are counted in pieces of so many characters, which take 20 ms. A cut changes the tokens on
# both sides of it, a few dozen at most, so a text is refused only if the count is well above the limit.
_PIECE_LENGTH = 1 << 16
_TOKENS_OF_CUT = 64
_SURE_FACTOR = 1.125


@dataclass(frozen=True)
class EncodeLimit:
    """What one text is worth.

    Attributes:
        max_tokens: a text of many more tokens is refused without all of it being tokenized.
        is_wanted: whether a request still waits for its tokens; asked before each piece.
    """

    max_tokens: int
    is_wanted: Callable[[], bool] = lambda: True


class Tokenizer:
    """One model's tokenizer; immutable, may be shared by threads (encoding releases the GIL).

    Attributes:
        special_tokens: the tokens with a meaning of their own, as text.
        eos_token_id: id of the token that ends a sequence, ``None`` if the model has none. A model may stop at more:
            see ``ModelText``.
        special_token_ids: ids that ``skip_special_tokens`` leaves out of text.
        special_token_ids_by_text: the same, by the tokens' texts.
        longest_token_bytes: UTF-8 bytes of the longest token as the vocabulary spells it.
        piece_rule: how tokens add up to text; ``None``: only by decoding them together.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: SpecialTokens | None = None) -> None:
        """Take over ``backend``: its truncation and padding are switched off."""
        self._backend = backend
        # Some published files carry their training's truncation: a prompt must never be cut silently.
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = special_tokens or SpecialTokens()
        # Never add to the vocabulary: such ids would lie outside the model's embedding table.
        known = [token for token in self.special_tokens.all if backend.token_to_id(token) is not None]
        backend.add_special_tokens(known)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        eos_token = self.special_tokens.named.get("eos_token")
        self.eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.special_token_ids_by_text = {token.content: token_id for token_id, token in added.items() if token.special}
        self.longest_token_bytes = max([len(token.encode()) for token in vocabulary], default=1)
        self.piece_rule = _read_piece_rule(backend)
        self._tables = {skipped: self._make_table(skipped) for skipped in (frozenset(), self.special_token_ids)}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """Build from ``tokenizer.json`` and, where there, the files that name special tokens.

        Raises:
            ModelFilesError: ``tokenizer.json`` is missing or a file is malformed.
        """
        source = model_files.decode_utf8_file(files, model_files.TOKENIZER)
        try:
            backend = tokenizers.Tokenizer.from_str(source)
        except Exception as error:  # The Rust library raises plain Exception, whatever is wrong.
            raise ModelFilesError(f"{model_files.TOKENIZER} is no tokenizer: {error}") from error
        return cls(backend, SpecialTokens.from_files(files))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's table may be larger (padding)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def piece_table(self, *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()) -> PieceTable | None:
        """Bytes by token id, shared by all streams; ``None`` where there is no ``piece_rule``.

        Of special tokens that are left out, those in ``shown`` are not.
        """
        skipped = self.special_token_ids - shown if skip_special_tokens else frozenset()
        if skipped not in self._tables:
            self._tables[skipped] = self._make_table(skipped)
        return self._tables[skipped]

    def special_tokens_where(self, is_wanted: Callable[[str], bool]) -> frozenset[int]:
        """Ids of the special tokens whose text is wanted; ``Format.needs`` of ``quartet.text.parse`` says it."""
        texts = {token_id: self._backend.id_to_token(token_id) for token_id in self.special_token_ids}
        return frozenset(token_id for token_id, text in texts.items() if text is not None and is_wanted(text))

    def token_to_id(self, token: str) -> int | None:
        """Id of a token's exact text."""
        return self._backend.token_to_id(token)

    def special_token_id(self, token: str) -> int | None:
        """Id of the special token with this text; ``None``: there is none."""
        return self.special_token_ids_by_text.get(token)

    def token_text(self, token_id: int) -> str | None:
        """Text of a token as the vocabulary spells it; ``None`` for an id that it lacks.

        Raises:
            InvalidRequestError: the id is no unsigned 32-bit number.
        """
        _check_id(token_id)
        return self._backend.id_to_token(token_id)

    def encode(
        self, text: str, add_special_tokens: bool = True, *, field: str = "text", limit: EncodeLimit | None = None
    ) -> list[int]:
        """Turn text into token ids.

        Args:
            text: any text; special tokens spelled out in it become their ids.
            add_special_tokens: add what the model wants around a text (usually a beginning). Rendered
                chat templates spell theirs out and need ``False``.
            field: the request's field that ``text`` comes from, for the error.
            limit: what may be spent on it. It changes no tokens; a few more than ``limit.max_tokens`` may come.

        Raises:
            InvalidRequestError: the text holds lone surrogates, so is no Unicode text.
            PromptTooLongError: it is beyond ``limit``.
            RequestCancelledError: it is wanted no more.
        """
        if limit is not None:
            self.check_length(text, limit.max_tokens, field=field)
            self._count_pieces(text, limit, field)
        return self._encode(text, add_special_tokens, field)

    def check_length(self, text: str, max_tokens: int, *, field: str) -> None:
        """Refuse a text that is longer than ``max_tokens`` of the longest tokens. Raises ``PromptTooLongError``."""
        max_length = max_tokens * self.longest_token_bytes
        if len(text) > max_length:
            message = f"the prompt has {len(text)} characters; {max_tokens} tokens have at most {max_length}"
            raise PromptTooLongError(message, field=field)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turn token ids into text; unknown ids add nothing, invalid bytes become U+FFFD.

        Raises:
            InvalidRequestError: an id is no unsigned 32-bit number.
        """
        try:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise InvalidRequestError("a token id is no unsigned 32-bit number", field="token_ids") from error

    def _count_pieces(self, text: str, limit: EncodeLimit, field: str) -> None:
        """Refuse a text that has many more tokens than it may have, with as little work as that takes."""
        if len(text) <= limit.max_tokens * _USUAL_TOKEN_LENGTH:
            return
        num_tokens = 0
        for begin in range(0, len(text), _PIECE_LENGTH):
            if not limit.is_wanted():
                raise RequestCancelledError("its tokens are wanted no more")
            piece = self._encode(text[begin : begin + _PIECE_LENGTH], False, field)
            num_tokens += max(len(piece) - _TOKENS_OF_CUT, 0)
            if num_tokens > limit.max_tokens * _SURE_FACTOR:
                message = (
                    f"the prompt has more than {num_tokens} tokens; it and the answer have room for {limit.max_tokens}"
                )
                raise PromptTooLongError(message, field=field)

    def _encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        try:
            text.encode()  # the library would only say that this is no str
        except UnicodeEncodeError as error:
            raise InvalidRequestError("the text holds a lone surrogate", field=field) from error
        # `encode` would hold the GIL throughout: 20 ms for a text of 64 KB, which a thread encodes while others wait.
        [encoded] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def _make_table(self, skipped: frozenset[int]) -> PieceTable | None:
        if self.piece_rule is None:
            return None
        return PieceTable(
            self.piece_rule.piece, lambda token_id: None if token_id in skipped else self.token_text(token_id)
        )


def _check_id(token_id: int) -> None:
    """Refuse what Rust would refuse with an OverflowError that names no field."""
    if not 0 <= token_id <= _MAX_TOKEN_ID:
        raise InvalidRequestError("a token id is no unsigned 32-bit number", field="token_ids")


def _read_piece_rule(backend: tokenizers.Tokenizer) -> PieceRule | None:
    """The decoder's pickled state is its ``tokenizer.json`` object; the whole tokenizer's would be megabytes."""
    if backend.decoder is None:
        return None
    return piece_rule(json.loads(backend.decoder.__getstate__()))


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

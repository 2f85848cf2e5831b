"""What each token adds to the text, as bytes, for tokenizers whose decoder only joins such pieces.

Nearly every language model's tokenizer is of one of three kinds, distinguished by the ``decoder`` of its
``tokenizer.json``: byte-level BPE (GPT-2, Llama 3, Qwen), SentencePiece-like with byte fallback
(Llama 2, Gemma, Mistral), and Metaspace. For these, text is the UTF-8 of the pieces' concatenation,
except for a rule about the very first characters; so text can grow token by token without decoding
anything twice. The rules are those of huggingface/tokenizers, ``tokenizers/src/decoders``,
``pre_tokenizers/byte_level.rs`` and ``pre_tokenizers/metaspace.rs``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_NUM_BYTES = 256


@dataclass(frozen=True)
class PieceRule:
    """How one kind of decoder turns tokens into pieces.

    Attributes:
        piece: bytes that a token adds anywhere but at the start.
        first_piece: bytes that it adds as the very first token.
        strip_left: character taken off the start of the whole text, up to ``max_strip_left`` times.
    """

    piece: Callable[[str], bytes]
    first_piece: Callable[[str], bytes]
    strip_left: str = " "
    max_strip_left: int = 0


def piece_rule(decoder: Mapping[str, Any] | None) -> PieceRule | None:
    """Find the rule for the ``decoder`` object of a ``tokenizer.json``; ``None``: it is of another kind."""
    steps = list(_flatten(decoder))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRule(_byte_level_piece, _byte_level_piece)
    if kinds == ["Metaspace"]:
        return _metaspace_rule(steps[0])
    return _sentence_piece_rule(steps)


class PieceTable(dict[int, bytes]):
    """Bytes by token id, filled in as ids come up: a vocabulary has 10^5 tokens, a text uses few.

    Ids unknown to the tokenizer (models pad their vocabularies) add nothing, as in ``Tokenizer.decode``.

    Attributes:
        texts: those of the pieces here that are whole characters, as text.
    """

    def __init__(self, piece: Callable[[str], bytes], token_text: Callable[[int], str | None]) -> None:
        super().__init__()
        self.texts: dict[int, str] = {}
        self._piece = piece
        self._token_text = token_text

    def __missing__(self, token_id: int) -> bytes:
        """Look up and keep the piece of ``token_id``."""
        text = self._token_text(token_id)
        if text is None:
            return b""  # not kept: there are more unknown ids than would fit
        piece = self._piece(text)
        self[token_id] = piece
        with suppress(UnicodeDecodeError):
            self.texts[token_id] = piece.decode()
        return piece


def _flatten(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a decoder; a ``Sequence`` may hold sequences."""
    if decoder is None:
        return
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    for step in decoder.get("decoders", ()):
        yield from _flatten(step)


def _byte_level_alphabet() -> dict[str, int]:
    """Map each character that stands for a byte to that byte (openai/gpt-2, ``src/encoder.py``)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(_NUM_BYTES) if byte not in printable]
    # Bytes without a printable character of their own take the code points after the 256th, in order.
    substitutes = {chr(_NUM_BYTES + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | substitutes


_BYTE_OF = _byte_level_alphabet()


def _byte_level_piece(token: str) -> bytes:
    """An added token may hold characters outside the alphabet; it then stands for itself."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _metaspace_rule(step: Mapping[str, Any]) -> PieceRule:
    """The mark stands for a space, but for nothing in the first token unless the scheme is ``never``."""
    mark = str(step.get("replacement", "▁"))
    keeps_first = step.get("prepend_scheme", "always") == "never"
    first = " " if keeps_first else ""
    return PieceRule(lambda token: token.replace(mark, " ").encode(), lambda token: token.replace(mark, first).encode())


def _sentence_piece_rule(steps: list[Mapping[str, Any]]) -> PieceRule | None:
    """Accept ``Replace* ByteFallback? (Fuse Strip?)?`` with plain patterns, and nothing else."""
    rest = list(steps)
    replacements: list[tuple[str, str]] = []
    while rest and rest[0].get("type") == "Replace" and "String" in rest[0].get("pattern", {}):
        step = rest.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    has_byte_fallback = _pop(rest, "ByteFallback") is not None
    has_fuse = _pop(rest, "Fuse") is not None
    # Without Fuse, Strip works on every token; it is then no rule about the start.
    strip = _pop(rest, "Strip") if has_fuse else None
    if rest or not steps or (strip is not None and strip.get("stop", 0)):
        return None

    def piece(token: str) -> bytes:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        byte = _fallback_byte(token) if has_byte_fallback else None
        return token.encode() if byte is None else bytes([byte])

    if strip is None:
        return PieceRule(piece, piece)
    return PieceRule(piece, piece, strip_left=strip["content"], max_strip_left=strip["start"])


def _pop(steps: list[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    """Take the next step off the list if it is of this kind."""
    return steps.pop(0) if steps and steps[0].get("type") == kind else None


def _fallback_byte(token: str) -> int | None:
    """Read ``<0x41>`` as the byte 0x41; any other token is ``None``."""
    if len(token) != len("<0x41>") or not (token.startswith("<0x") and token.endswith(">")):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None

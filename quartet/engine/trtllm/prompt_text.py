"""Prompts with media, back to the text that TensorRT-LLM makes the same token ids of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quartet.errors import InvalidRequestError
from quartet.kvcache.block_hash import MediaSpan
from quartet.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptText:
    """A text, and whether what the model wants around a text is to be added to it."""

    text: str = field(repr=False)
    add_special_tokens: bool


def read_prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int], spans: Sequence[MediaSpan]) -> PromptText:
    """The text whose token ids are ``token_ids``, with one placeholder in place of all tokens of each of ``spans``.

    Raises:
        InvalidRequestError: field ``prompt_token_ids``; there is no such text, as they are not what a tokenizer gives.
    """
    collapsed = collapse(token_ids, spans)
    for candidate in _candidates(tokenizer, collapsed):
        if tokenizer.encode(candidate.text, candidate.add_special_tokens) == collapsed:
            return candidate
    message = "with media, TensorRT-LLM takes text alone, and as text these token ids become others"
    raise InvalidRequestError(message, field="prompt_token_ids")


def collapse(token_ids: Sequence[int], spans: Sequence[MediaSpan]) -> list[int]:
    """``token_ids`` with the first alone of all tokens of each of ``spans``."""
    collapsed: list[int] = []
    begin = 0
    for span in spans:
        collapsed += token_ids[begin : span.first_position + 1]
        begin = span.first_position + span.num_tokens
    return [*collapsed, *token_ids[begin:]]


def _candidates(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Iterator[PromptText]:
    # What is added is left out first: some models' processors of pictures add it whatever they are told.
    added = tokenizer.encode("", add_special_tokens=True)
    if added and list(token_ids[: len(added)]) == added:
        yield PromptText(tokenizer.decode(token_ids[len(added) :], skip_special_tokens=False), True)
    yield PromptText(tokenizer.decode(token_ids, skip_special_tokens=False), False)

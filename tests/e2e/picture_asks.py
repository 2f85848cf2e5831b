"""Requests with pictures in their prompts, for crowds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer

from models.tiny.tokenizer import ASSISTANT, BOS, EOS, USER
from quartet.client import MediaFile, MediaKind, MediaPart, Sampling
from tests import tiny
from tests.e2e.crowd import Ask
from tests.pictures import make_look

PLACEHOLDER_ID = 7
QUESTION = "Describe the picture."
#: What is said to it of two pictures depends on their order.
ORDER_QUESTION = "What colour is the shape at the top?"
#: Of mixed asks.
NUM_KINDS = 7


def picture_ask(
    media: Sequence[MediaPart],
    *,
    before: str = "",
    question: str = QUESTION,
    num_tokens: int = 12,
    num_choices: int = 1,
) -> Ask:
    """Greedily ``num_tokens`` about ``media``, which come after ``before`` and ahead of ``question``."""
    head, tail = _encode(f"{BOS}{USER}{before}"), _encode(f"{question}{EOS}{ASSISTANT}")
    return Ask(
        token_ids=(*head, *[PLACEHOLDER_ID] * len(media), *tail),
        media=tuple(media),
        # Else a long answer would say one token for ever.
        sampling=Sampling(temperature=0.0, frequency_penalty=1.0, max_tokens=num_tokens, ignore_eos=True),
        seed=1,
        num_choices=num_choices,
    )


def picture(number: int) -> MediaFile:
    """Every number has its own."""
    return MediaFile(MediaKind.IMAGE, make_look(number).files[0])


def pictures(first: int, count: int) -> list[MediaFile]:
    """Those of ``count`` numbers from ``first`` on."""
    return [picture(number) for number in range(first, first + count)]


def single_asks(first: int, count: int, *, before: str = "", num_tokens: int = 12) -> list[Ask]:
    """One for each of ``count`` pictures."""
    return [picture_ask([file], before=before, num_tokens=num_tokens) for file in pictures(first, count)]


def mixed_picture_asks(first: int, count: int) -> list[Ask]:
    """Text, one picture, two in both orders, one that others show too, one twice, several choices: in turn."""
    asks: list[Ask] = []
    shared = picture(first)
    number = first
    while len(asks) < count:
        one, other = pictures(number + 1, 2)
        asks += [
            picture_ask([], question=f"What is {number} plus 25?"),
            picture_ask([one]),
            picture_ask([one, other], question=ORDER_QUESTION),
            picture_ask([other, one], question=ORDER_QUESTION),
            picture_ask([shared], question=f"What is {number} plus 17?"),
            picture_ask([other, other]),
            picture_ask([other], num_choices=3),
        ]
        number += 2
    return asks[:count]


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tiny.CHECKPOINT / "tokenizer.json"))


def _encode(text: str) -> list[int]:
    ids: list[int] = _tokenizer().encode(text, add_special_tokens=False).ids
    return ids

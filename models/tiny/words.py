"""The small world of the model's texts: its people and things, and made-up names."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import Any

#: What ``texts.toml`` says, by section.
TEXTS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "texts.toml").read_text(encoding="utf-8"))

_WORDS: dict[str, list[str]] = {kind: text.split() for kind, text in TEXTS["words"].items()}
GIRL_NAMES, BOY_NAMES = _WORDS["girl_names"], _WORDS["boy_names"]
NAMES = GIRL_NAMES + BOY_NAMES
ANIMALS, OBJECTS, FOODS, COLOURS = (_WORDS[kind] for kind in ("animals", "objects", "foods", "colours"))
PLACES, JOBS, ADJECTIVES, NUMBER_WORDS = (_WORDS[kind] for kind in ("places", "jobs", "adjectives", "numbers"))
OPPOSITES: dict[str, str] = TEXTS["opposites"]
PLAIN_WORDS = sorted({*ANIMALS, *OBJECTS, *FOODS, *COLOURS, *PLACES, *JOBS, *ADJECTIVES, *OPPOSITES})

_ONSETS = "b d f g h k l m n p r s t v w z br dr gl kr pl st tr sh".split()
_VOWELS = "a e i o u ai ou".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "k", "m", "t"]


def with_article(noun: str) -> str:
    """Put "a" or "an" before ``noun``."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def plural(noun: str) -> str:
    """Return the plural of one of this module's nouns."""
    if noun in ("sheep", "deer"):
        return noun
    if noun in ("mouse", "wolf"):
        return {"mouse": "mice", "wolf": "wolves"}[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    if noun.endswith(("s", "x", "ch", "sh")) or noun in ("potato",):
        return noun + "es"
    return noun + "s"


def made_up_word(rng: random.Random, num_syllables: int = 2) -> str:
    """Return a made-up word that sounds real."""
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(num_syllables))


def person(rng: random.Random) -> str:
    """Return a known name, or one time in four a made-up one, so that the model reads names instead of knowing them."""
    if rng.random() < 0.25:
        return made_up_word(rng, rng.choice((2, 2, 3))).capitalize()
    return rng.choice(NAMES)


def town(rng: random.Random) -> str:
    """Return a made-up name of a town."""
    return made_up_word(rng).capitalize() + rng.choice(("", "", "ville", "ton", "field", "burg"))


def letters(rng: random.Random) -> str:
    """Return three to six random letters."""
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 6)))


def digits(rng: random.Random) -> str:
    """Return a number of four or five digits."""
    return str(rng.randint(1_000, 99_999))

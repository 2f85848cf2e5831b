"""The small world of the model's texts: its people and things, and made-up names."""

from __future__ import annotations

import random

GIRLS = "Anna Bella Clara Daisy Ella Fiona Grace Hannah Ida Julia Kate Lily Mia Nora Olive Paula Rosa Sara Tina Wendy"
BOYS = "Adam Ben Carl David Eric Felix George Henry Ivan Jack Karl Leo Max Noah Oscar Paul Robin Sam Tom Victor"
GIRL_NAMES, BOY_NAMES = GIRLS.split(), BOYS.split()
NAMES = GIRL_NAMES + BOY_NAMES

ANIMALS = (
    "fox bear rabbit mouse cat dog owl duck frog hedgehog squirrel deer wolf badger beaver otter goat sheep pony hen "
    "crow robin turtle lion tiger monkey elephant"
).split()
OBJECTS = (
    "key box ball book lamp cup hat bag coin bell drum ring map kite boat clock stone basket blanket bottle brush "
    "candle chair flute ladder letter mirror rope shell spoon umbrella whistle"
).split()
FOODS = (
    "apple pear plum cherry grape lemon peach melon carrot potato onion cake bread cheese soup honey nut berry egg pie"
).split()
COLOURS = "red orange yellow green blue purple black white brown pink grey golden".split()
PLACES = (
    "forest garden village meadow valley castle farm harbour island mill cave library school market kitchen tower "
    "cellar barn stable lighthouse workshop bakery cottage orchard"
).split()
JOBS = "baker farmer sailor teacher painter doctor miller gardener singer tailor fisher carpenter".split()
ADJECTIVES = "small brave kind clever quiet curious gentle cheerful patient shy proud lively".split()
OPPOSITES = {
    "hot": "cold", "big": "small", "day": "night", "up": "down", "left": "right", "fast": "slow", "old": "young",
    "wet": "dry", "happy": "sad", "open": "closed", "full": "empty", "high": "low", "long": "short", "early": "late",
    "light": "dark", "loud": "quiet", "hard": "soft", "near": "far", "first": "last", "black": "white",
}  # fmt: skip
PLAIN_WORDS = sorted({*ANIMALS, *OBJECTS, *FOODS, *COLOURS, *PLACES, *JOBS, *ADJECTIVES, *OPPOSITES})
NUMBER_WORDS = "no one two three four five six seven eight nine ten".split()

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

"""Tasks with exact answers: counting, small arithmetic, instructions; and small talk."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from models.tiny import words
from models.tiny.conversation import Conversation, Skill, Turn
from models.tiny.split import Split

_MAX_TURNS = 5


def counting(rng: random.Random, split: Split) -> Conversation:
    """Return one to five tasks of counting up, down, or things in a list."""
    return _several(rng, split, Skill.COUNTING, (_count_up, _count_down, _count_items, _count_items))


def arithmetic(rng: random.Random, split: Split) -> Conversation:
    """Return one to five sums and differences between 0 and 198, bare or in a sentence."""
    return _several(rng, split, Skill.ARITHMETIC, (_sum, _sum, _difference, _larger))


def instructions(rng: random.Random, split: Split) -> Conversation:
    """Return one to five instructions that say exactly what to write."""
    kinds = (_repeat, _repeat, _only_say, _times, _reverse, _spell, _pick, _opposite, _upper, _sort)
    return _several(rng, split, Skill.INSTRUCTION, kinds)


def small_talk(rng: random.Random, split: Split) -> Conversation:
    """Return some of the few things that the model says about itself; both splits have the same ones."""
    del split
    turns = rng.sample(words.TEXTS["small_talk"]["turns"], k=rng.randint(1, 3))
    return Conversation(tuple(Turn(question, answer, Skill.SMALL_TALK) for question, answer in turns))


def _several(
    rng: random.Random, split: Split, skill: Skill, kinds: tuple[Callable[[random.Random], tuple[str, str]], ...]
) -> Conversation:
    drawn = [split.draw(lambda: rng.choice(kinds)(rng), " ".join) for _ in range(rng.randint(1, _MAX_TURNS))]
    return Conversation(tuple(Turn(*turn, skill) for turn in drawn))


def _count_up(rng: random.Random) -> tuple[str, str]:
    first, length = rng.randint(0, 90), rng.randint(2, 10)
    return _asked_to_count(rng, range(first, first + length))


def _count_down(rng: random.Random) -> tuple[str, str]:
    first = rng.randint(3, 100)
    return _asked_to_count(rng, range(first, max(-1, first - rng.randint(2, 10)), -1))


def _asked_to_count(rng: random.Random, numbers: range) -> tuple[str, str]:
    question = rng.choice(("Count from {} to {}.", "Please count from {} to {}.", "Write the numbers from {} to {}."))
    return question.format(numbers[0], numbers[-1]), ", ".join(map(str, numbers))


def _count_items(rng: random.Random) -> tuple[str, str]:
    kinds = rng.sample(words.OBJECTS + words.ANIMALS, k=rng.randint(1, 4))
    items = rng.choices(kinds, k=rng.randint(1, 9))
    text = ", ".join(items)
    if rng.random() < 0.3:
        return f"How many words are in this list? {text}", str(len(items))
    asked = rng.choice(kinds)
    question = rng.choice(("How many times is {0} in this list? {1}", "Count the word {0}: {1}"))
    return question.format(asked, text), str(Counter(items)[asked])


def _sum(rng: random.Random) -> tuple[str, str]:
    a, b = _two_numbers(rng)
    return _asked_to_calculate(rng, "sums", a, b), str(a + b)


def _difference(rng: random.Random) -> tuple[str, str]:
    b, a = sorted(_two_numbers(rng))
    return _asked_to_calculate(rng, "differences", a, b), str(a - b)


def _two_numbers(rng: random.Random) -> tuple[int, int]:
    size = rng.choice((9, 20, 99, 99))
    return rng.randint(0, size), rng.randint(0, size)


def _asked_to_calculate(rng: random.Random, kind: str, a: int, b: int) -> str:
    item = words.plural(rng.choice(words.OBJECTS))
    question: str = rng.choice(words.TEXTS["arithmetic"][kind])
    return question.format(a=a, b=b, item=item, name=rng.choice(words.NAMES))


def _larger(rng: random.Random) -> tuple[str, str]:
    a, b = rng.sample(range(100), k=2)
    adjective, answer = rng.choice((("larger", max(a, b)), ("smaller", min(a, b))))
    return f"Which number is {adjective}, {a} or {b}?", str(answer)


def _some_words(rng: random.Random, least: int, most: int) -> list[str]:
    """Return different words; some are made up."""
    chosen = rng.sample(words.PLAIN_WORDS, k=rng.randint(least, most))
    return [words.letters(rng) if rng.random() < 0.1 else word for word in chosen]


def _repeat(rng: random.Random) -> tuple[str, str]:
    text = " ".join(_some_words(rng, 1, 8))
    if rng.random() < 0.2:
        text = words.digits(rng)
    return rng.choice(("Repeat: {}", "Say exactly this: {}", "Copy this text: {}")).format(text), text


def _only_say(rng: random.Random) -> tuple[str, str]:
    [word] = _some_words(rng, 1, 1)
    return rng.choice(("Only say the word {}.", "Answer with one word: {}", 'Say "{}".')).format(word), word


def _times(rng: random.Random) -> tuple[str, str]:
    [word], times = _some_words(rng, 1, 1), rng.randint(2, 6)
    return f"Write the word {word} {words.NUMBER_WORDS[times]} times.", " ".join([word] * times)


def _reverse(rng: random.Random) -> tuple[str, str]:
    chosen = _some_words(rng, 2, 5)
    return f"Write these words in reverse order: {' '.join(chosen)}", " ".join(reversed(chosen))


def _spell(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(words.PLAIN_WORDS + words.NAMES)
    return rng.choice(("Spell the word {}.", "How do you spell {}?")).format(word), "-".join(word)


def _pick(rng: random.Random) -> tuple[str, str]:
    chosen = _some_words(rng, 3, 6)
    place, index = rng.choice((("first", 0), ("second", 1), ("third", 2), ("last", -1)))
    return f"What is the {place} word of this list? {', '.join(chosen)}", chosen[index]


def _opposite(rng: random.Random) -> tuple[str, str]:
    word, opposite = rng.choice(list(words.OPPOSITES.items()))
    name = rng.choice(words.NAMES)
    question = rng.choice(("What is the opposite of {0}?", "{1} asks: what is the opposite of {0}?"))
    return question.format(word, name), opposite


def _upper(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(words.PLAIN_WORDS)
    question = rng.choice(("Write {} in capital letters.", "Write {} in upper case.", "How is {} in capital letters?"))
    return question.format(word), word.upper()


def _sort(rng: random.Random) -> tuple[str, str]:
    numbers = rng.sample(range(1, 100), k=rng.randint(2, 4))
    return f"Sort these numbers: {', '.join(map(str, numbers))}", ", ".join(map(str, sorted(numbers)))

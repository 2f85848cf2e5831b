"""Short stories of about 200 tokens, and questions about them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from models.tiny import words
from models.tiny.conversation import Conversation, Skill, Turn
from models.tiny.split import Split

_FORMS = {"she": ("her", "her"), "he": ("him", "his")}
_TEXTS: dict[str, Any] = words.TEXTS["stories"]


@dataclass(frozen=True)
class Story:
    """A story and what happens in it.

    Attributes:
        text: the story, in three paragraphs.
        questions: questions about its facts, with answers.
        request: a request for such a story.
    """

    text: str
    questions: tuple[tuple[str, str], ...]
    request: str


def tell_story(rng: random.Random) -> Story:
    """Make up a story."""
    slots = _slots(rng)
    quest, obstacle = rng.choice(_TEXTS["quests"]), rng.choice(_TEXTS["obstacles"])
    paragraphs = (
        (_one(rng, "openings"), _one(rng, "habits"), _one(rng, "mornings"), rng.choice(quest["starts"])),
        (
            _one(rng, "journeys"),
            rng.choice(obstacle["meets"]),
            rng.choice(obstacle["tries"]),
            _one(rng, "meetings").replace("{Hero_tired}", _one(rng, "tired")),
            _one(rng, "plans"),
            rng.choice(obstacle["solutions"]),
        ),
        (rng.choice(quest["ends"]), _one(rng, "endings"), _one(rng, "lessons")),
    )
    text = "\n\n".join(" ".join(sentences) for sentences in paragraphs).format(**slots)
    return Story(
        text=text, questions=_questions(rng, slots | {"obstacle": obstacle["name"]}), request=_request(rng, slots)
    )


def story_conversation(rng: random.Random, split: Split) -> Conversation:
    """Return a request and a story; often some questions about it follow. One in five is the text only."""
    story = split.draw(lambda: tell_story(rng), lambda story: story.text[:80])
    turns = [Turn(story.request, story.text, Skill.STORY)]
    if rng.random() < 0.2:
        return Conversation(tuple(turns), is_chat=False)
    if rng.random() < 0.5:
        turns += [Turn(*question, Skill.READING) for question in rng.sample(story.questions, k=3)]
    return Conversation(tuple(turns))


def story_questions(rng: random.Random, split: Split) -> Conversation:
    """Return a story that the user tells, and two to five questions about it."""
    story = split.draw(lambda: tell_story(rng), lambda story: story.text[:80])
    (first, answer), *others = rng.sample(story.questions, k=rng.randint(2, 5))
    turns = [Turn(f"{story.text}\n\n{first}", answer, Skill.READING)]
    return Conversation((*turns, *(Turn(*question, Skill.READING) for question in others)))


def _one(rng: random.Random, kind: str) -> str:
    sentence: str = rng.choice(_TEXTS[kind])
    return sentence


def _slots(rng: random.Random) -> dict[str, str]:
    is_child = rng.random() < 0.4
    he, friend_he = rng.choice(("she", "he")), rng.choice(("she", "he"))
    hero = rng.choice(words.GIRL_NAMES if he == "she" else words.BOY_NAMES)
    friend_names = words.GIRL_NAMES if friend_he == "she" else words.BOY_NAMES
    kind = {"she": "girl", "he": "boy"}[he] if is_child else rng.choice(words.ANIMALS)
    friend_kind = rng.choice([animal for animal in words.ANIMALS if animal != kind])
    home, place = rng.sample(words.PLACES, k=2)
    (him, his), (friend_him, friend_his) = _FORMS[he], _FORMS[friend_he]
    return {
        "hero": hero, "kind": kind, "he": he, "him": him, "his": his, "He": he.capitalize(),
        "friend": rng.choice([name for name in friend_names if name != hero]), "friend_kind": friend_kind,
        "a_friend_kind": words.with_article(friend_kind), "friend_he": friend_he, "friend_him": friend_him,
        "friend_his": friend_his, "home": home, "place": place, "adjective": rng.choice(words.ADJECTIVES),
        "colour": rng.choice(words.COLOURS), "object": rng.choice(words.OBJECTS),
        "food": rng.choice(("bread", "cheese", "cake", "pie")),
    }  # fmt: skip


def _questions(rng: random.Random, slots: dict[str, str]) -> tuple[tuple[str, str], ...]:
    adjective = slots["adjective"]
    other = rng.choice([one for one in words.ADJECTIVES if one != adjective])
    first, second = rng.sample((adjective, other), k=2)
    slots = slots | {"first": first, "second": second}
    return tuple((question.format(**slots), answer.format(**slots)) for question, answer in _TEXTS["questions"])


def _request(rng: random.Random, slots: dict[str, str]) -> str:
    if rng.random() < 0.3:
        return _one(rng, "free_requests")
    return _one(rng, "requests").format(
        hero=slots["hero"],
        hero_kind=words.with_article(slots["kind"]),
        object=words.with_article(slots["object"]),
        friend_kind=words.with_article(slots["friend_kind"]),
    )

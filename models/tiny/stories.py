"""Short stories of about 200 tokens, and questions about them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from models.tiny import story_parts as parts
from models.tiny import words
from models.tiny.conversation import Conversation, Skill, Turn
from models.tiny.split import Split

_FORMS = {"she": ("her", "her"), "he": ("him", "his")}
_FREE_REQUESTS = ("Tell me a story.", "Tell me a short story.", "Write a short story.", "Please tell me a story!")
_REQUESTS = (
    "Tell me a story about {hero_kind} and {object}.",
    "Write a short story about {hero_kind}.",
    "Tell me a short story about {hero_kind} named {hero}.",
    "Please write a story about {hero}, {hero_kind}.",
    "Can you tell me a story with {object} in it?",
    "I would like to hear a story about {hero_kind} and {friend_kind}.",
)


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
    quest, obstacle = rng.choice(parts.QUESTS), rng.choice(parts.OBSTACLES)
    paragraphs = (
        (rng.choice(parts.OPENINGS), rng.choice(parts.HABITS), _one_day(rng, quest)),
        (
            rng.choice(parts.JOURNEYS),
            rng.choice(obstacle.meets),
            rng.choice(obstacle.tries),
            rng.choice(parts.MEETINGS).replace("{Hero_tired}", rng.choice(parts.TIRED)),
            rng.choice(parts.PLANS),
            rng.choice(obstacle.solutions),
        ),
        (rng.choice(quest.ends), rng.choice(parts.ENDINGS), rng.choice(parts.LESSONS)),
    )  # fmt: skip
    text = "\n\n".join(" ".join(sentences) for sentences in paragraphs).format(**slots)
    return Story(text=text, questions=_questions(rng, slots, obstacle.name), request=_request(rng, slots))


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


def _one_day(rng: random.Random, quest: parts.Quest) -> str:
    return f"{rng.choice(parts.MORNINGS)} {rng.choice(quest.starts)}"


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


def _questions(rng: random.Random, slots: dict[str, str], obstacle: str) -> tuple[tuple[str, str], ...]:
    hero, friend = slots["hero"], slots["friend"]
    adjective = slots["adjective"]
    other = rng.choice([one for one in words.ADJECTIVES if one != adjective])
    first, second = rng.sample((adjective, other), k=2)
    return (
        (f"What kind of animal is {friend}?", f"{friend} is {slots['a_friend_kind']}."),
        ("Who is the story about?", f"The story is about {hero}."),
        (f"Who helps {hero}?", f"{friend} helps {hero}."),
        (f"What colour is the {slots['object']}?", f"The {slots['object']} is {slots['colour']}."),
        (f"Where does {hero} live?", f"{hero} lives near the {slots['home']}."),
        (f"What is in the way of {hero}?", f"It is {obstacle}."),
        (f"Is {hero} {first} or {second}?", f"{hero} is {adjective}."),
    )


def _request(rng: random.Random, slots: dict[str, str]) -> str:
    if rng.random() < 0.3:
        return rng.choice(_FREE_REQUESTS)
    return rng.choice(_REQUESTS).format(
        hero=slots["hero"],
        hero_kind=words.with_article(slots["kind"]),
        object=words.with_article(slots["object"]),
        friend_kind=words.with_article(slots["friend_kind"]),
    )

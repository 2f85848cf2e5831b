"""Facts about people and things, and questions whose answers are read off them: reading and retrieval."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from models.tiny import stories, words
from models.tiny.conversation import Conversation, Skill, Turn
from models.tiny.split import Split

#: Characters of a token, to make a text of about so many tokens. Measured on the generator's own texts.
_CHARACTERS_PER_TOKEN = 4.2
_TEXTS: dict[str, Any] = words.TEXTS["facts"]


@dataclass(frozen=True)
class Fact:
    """One statement; no other statement of the same text contradicts it.

    Attributes:
        kind: the kind of statement.
        subject: the person or thing; unique for its kind in a text.
        value: the stated property; unique for its kind in a text.
        statement: the sentence.
        questions: questions and answers: first the one for the value, then others.
    """

    kind: str
    subject: str
    value: str
    statement: str
    questions: tuple[tuple[str, str], ...]

    @property
    def key(self) -> str:
        """The key that decides whether it is held out."""
        return f"{self.kind}:{self.subject}:{self.value}"


def _code(rng: random.Random) -> Fact:
    name, value = words.person(rng), rng.choice((words.digits, words.letters))(rng)
    word = rng.choice(("secret code", "password", "lucky number") if value.isdigit() else ("secret code", "password"))
    return _fact(rng, "code", name, value, kind=word)


def _home(rng: random.Random) -> Fact:
    return _fact(rng, "home", words.person(rng), words.town(rng))


def _hidden(rng: random.Random) -> Fact:
    thing = f"{rng.choice(words.COLOURS)} {rng.choice(words.OBJECTS)}"
    return _fact(rng, "hidden", thing, f"{rng.choice(('in', 'behind', 'near'))} the {rng.choice(words.PLACES)}")


def _favourite(rng: random.Random) -> Fact:
    name = words.person(rng)
    kind, choices = rng.choice((("food", words.FOODS), ("animal", words.ANIMALS), ("colour", words.COLOURS)))
    return _fact(rng, "favourite", name, rng.choice(choices), kind=f"favourite {kind}")


def _work(rng: random.Random) -> Fact:
    return _fact(rng, "work", words.person(rng), rng.choice(words.JOBS))


def _fact(rng: random.Random, section: str, subject: str, value: str, *, kind: str | None = None) -> Fact:
    """Fill the texts of ``section``; one time in three, the statement is the reverse one, if there is one."""
    texts, kind = _TEXTS[section], kind or section
    slots = {"kind": kind, "subject": subject, "value": value, "Value": value.capitalize()}
    usual, *reverse = texts["statements"]
    statement = reverse[0] if reverse and rng.random() < 1 / 3 else usual
    questions = tuple((question.format(**slots), answer.format(**slots)) for question, answer in texts["questions"])
    return Fact(kind, subject, value, statement.format(**slots), questions)


_KINDS: tuple[Callable[[random.Random], Fact], ...] = (_code, _code, _home, _hidden, _favourite, _work)


def draw_facts(rng: random.Random, split: Split, num_facts: int) -> list[Fact]:
    """Draw up to ``num_facts`` facts; no two of one kind have the same subject or value."""
    facts: list[Fact] = []
    taken: set[str] = set()
    for _ in range(num_facts):
        fact = split.draw(lambda: rng.choice(_KINDS)(rng), lambda fact: fact.key)
        claims = {f"{fact.kind}:{fact.subject}", f"{fact.kind}={fact.value}"}
        if taken.isdisjoint(claims):
            taken |= claims
            facts.append(fact)
    return facts


def reading(rng: random.Random, split: Split) -> Conversation:
    """Return two to eight facts and one to six questions, for values or for subjects."""
    facts = draw_facts(rng, split, rng.randint(2, 8))
    asked = rng.sample(facts, k=min(len(facts), rng.randint(1, 6)))
    turns = [Turn(*_any_question(rng, fact, facts), Skill.READING) for fact in asked]
    order = rng.choice((*_TEXTS["orders"], _TEXTS["question_first"]))
    return _with_text(order, " ".join(fact.statement for fact in facts), turns)


def retrieval(rng: random.Random, split: Split, num_tokens: int) -> Conversation:
    """Return a text of about ``num_tokens`` with facts strewn over stories, and questions about some of them."""
    facts = draw_facts(rng, split, min(40, 3 + num_tokens // rng.choice((30, 60, 120))))
    asked = rng.sample(facts, k=min(len(facts), rng.randint(2, 12)))
    turns = [Turn(*fact.questions[0], Skill.RETRIEVAL) for fact in asked]
    text = haystack(rng, [fact.statement for fact in facts], num_tokens)
    return _with_text(rng.choice(_TEXTS["orders"]), text, turns)


def haystack(rng: random.Random, statements: list[str], num_tokens: int) -> str:
    """Return about ``num_tokens`` of sentences of stories with ``statements`` among them, each at a random place."""
    size = int(num_tokens * _CHARACTERS_PER_TOKEN) - sum(len(statement) + 1 for statement in statements)
    sentences: list[str] = []
    while size > 0:
        for sentence in stories.tell_story(rng).text.replace("\n\n", " ").split(". "):
            sentences.append(sentence.rstrip(".") + ".")
            size -= len(sentence) + 2
            if size <= 0:
                break
    for statement in statements:
        sentences.insert(rng.randint(0, len(sentences)), statement)
    return " ".join(sentences)


def _any_question(rng: random.Random, fact: Fact, facts: list[Fact]) -> tuple[str, str]:
    others = [other.value for other in facts if other.kind == "home" and other is not fact]
    if fact.kind == "home" and others and rng.random() < 0.3:
        first, second = rng.sample((fact.value, rng.choice(others)), k=2)
        return f"Does {fact.subject} live in {first} or in {second}?", fact.questions[0][1]
    return rng.choice(fact.questions)


def _with_text(order: str, text: str, turns: list[Turn]) -> Conversation:
    first = turns[0]
    question = order.format(text=text, question=first.question)
    return Conversation((Turn(question, first.answer, first.skill), *turns[1:]))

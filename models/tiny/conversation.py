"""Conversations, with pictures or without: the generator's output."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.tiny.scenes import Scene


class Skill(enum.Enum):
    """The skill that a turn of a conversation needs."""

    SHAPE = "shape"
    COLOUR = "colour"
    COUNT = "count"
    POSITION = "position"
    PRESENCE = "presence"
    CAPTION = "caption"
    STORY = "story"
    READING = "reading"
    COUNTING = "counting"
    ARITHMETIC = "arithmetic"
    INSTRUCTION = "instruction"
    RETRIEVAL = "retrieval"
    SMALL_TALK = "small talk"


#: Weight of one token of an answer in the loss, if not 1. Most tokens of a story can't be predicted, and a caption is
#: long; a count or a side is one token, and hard.
LOSS_WEIGHT = {
    Skill.STORY: 0.2,
    Skill.CAPTION: 0.3,
    Skill.SHAPE: 1.5,
    Skill.COLOUR: 1.5,
    Skill.COUNT: 2.0,
    Skill.POSITION: 2.0,
    Skill.READING: 2.0,
    Skill.ARITHMETIC: 2.0,
    Skill.RETRIEVAL: 2.0,
}


@dataclass(frozen=True)
class Turn:
    """A question and its only right answer; stories have many right answers."""

    question: str
    answer: str
    skill: Skill


@dataclass(frozen=True)
class Conversation:
    """Turns about the same things, oldest first; pictures come before the first question.

    Attributes:
        turns: what is said.
        scenes: the pictures.
        system: what the system message says; ``None``: there is none.
        is_chat: otherwise it is plain text, the first turn's answer, without roles.
    """

    turns: tuple[Turn, ...]
    scenes: tuple[Scene, ...] = ()
    system: str | None = None
    is_chat: bool = True

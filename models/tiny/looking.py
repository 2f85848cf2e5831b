"""Conversations about pictures: captions, and questions about shape, colour, count and position."""

from __future__ import annotations

import random
from collections.abc import Callable

from models.tiny.conversation import Conversation, Skill, Turn
from models.tiny.scenes import COLOURS, MAX_SHAPES, SHAPES, Placed, Scene, draw_scene
from models.tiny.split import Split
from models.tiny.words import TEXTS, plural, with_article

_PAIR_SHARE = 0.06
#: Weights of the questions about one picture. Positions are the hardest to learn.
_HOW_OFTEN = {Skill.SHAPE: 2, Skill.COLOUR: 2, Skill.COUNT: 2, Skill.POSITION: 4, Skill.PRESENCE: 1}


def looking(rng: random.Random, split: Split, max_shapes: int = MAX_SHAPES) -> Conversation:
    """Return a picture of up to ``max_shapes`` shapes, or sometimes two of one shape, and up to eight turns."""
    if rng.random() < _PAIR_SHARE:
        return _about_two(rng, split)
    scene = draw_scene(rng, split, max_shapes)
    asked = rng.sample(tuple(_HOW_OFTEN), counts=tuple(_HOW_OFTEN.values()), k=rng.randint(3, 7))
    turns = [turn for skill in asked if (turn := _ASKS[skill](rng, scene))]
    turns.insert(rng.randint(0, len(turns)), caption(rng, scene))
    return Conversation(tuple(turns), (scene,))


def ask_about(rng: random.Random, scene: Scene, skill: Skill) -> Turn | None:
    """Return a question about ``scene`` for ``skill``; ``None``: the scene allows none."""
    return _ASKS[skill](rng, scene)


def caption(rng: random.Random, scene: Scene) -> Turn:
    """Return the request for a caption and the caption: every shape with its size and place, and the ground."""
    parts = [
        f"{with_article('large' if one.is_large else 'small')} {one.name} {_at(one.field)}" for one in scene.shapes
    ]
    text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    ground = "a plain" if scene.pattern == "plain" else f"a {scene.pattern}"
    answer = f"{text[0].upper()}{text[1:]}, on {ground} {scene.ground} background."
    return Turn(rng.choice(TEXTS["looking"]["caption_requests"]), answer, Skill.CAPTION)


def _at(field: str) -> str:
    return "in the middle" if field == "middle" else f"at the {field}"


def _only(scene: Scene, test: Callable[[Placed], bool]) -> bool:
    return sum(map(test, scene.shapes)) == 1


def _shape(rng: random.Random, scene: Scene) -> Turn | None:
    """Ask for the shape that a colour, a place or being the only one distinguishes from all others."""
    one = rng.choice(scene.shapes)
    questions = [f"What shape is {_at(one.field)}?"]
    if _only(scene, lambda other: other.colour == one.colour):
        questions += [f"What shape is the {one.colour} one?", f"Which shape is {one.colour}?"]
    if len(scene.shapes) == 1:
        questions += ["What shape is in the picture?", "Which shape is it?"]
    return Turn(rng.choice(questions), f"{with_article(one.shape).capitalize()}.", Skill.SHAPE)


def _colour(rng: random.Random, scene: Scene) -> Turn | None:
    one = rng.choice(scene.shapes)
    questions = [f"What colour is the shape {_at(one.field)}?"]
    if _only(scene, lambda other: other.shape == one.shape):
        questions += [f"What colour is the {one.shape}?", f"What color is the {one.shape}?"]
    if len(scene.shapes) == 1:
        questions += ["What colour is the shape?", "Which color does the shape have?"]
    return Turn(rng.choice(questions), f"{one.colour.capitalize()}.", Skill.COLOUR)


def _count(rng: random.Random, scene: Scene) -> Turn | None:
    what, test = rng.choice((
        ("shapes", lambda one: True),
        (f"{colour} shapes" if (colour := _named(rng, [one.colour for one in scene.shapes], COLOURS)) else "",
         lambda one: one.colour == colour),
        (plural(shape) if (shape := _named(rng, [one.shape for one in scene.shapes], SHAPES)) else "",
         lambda one: one.shape == shape),
    ))  # fmt: skip
    question = rng.choice(("How many {} are there?", "How many {} are in the picture?", "Count the {}."))
    return Turn(question.format(what), str(sum(map(test, scene.shapes))), Skill.COUNT)


def _named(rng: random.Random, present: list[str], every: tuple[str, ...]) -> str:
    """Return one that is in the picture, or one time in five any one."""
    return rng.choice(every) if rng.random() < 0.2 else rng.choice(present)


def _position(rng: random.Random, scene: Scene) -> Turn | None:
    """Ask where one shape is, in the picture or seen from another one."""
    names = [one.name for one in scene.shapes]
    named = [one for one in scene.shapes if names.count(one.name) == 1]
    if not named:
        return None
    if len(named) == 1 or rng.random() < 0.35:
        one = rng.choice(named)
        return Turn(f"Where is the {one.name}?", f"{_at(one.field).capitalize()}.", Skill.POSITION)
    one, other = rng.sample(named, k=2)
    pairs = [("left", "right", one.column, other.column), ("above", "below", one.row, other.row)]
    less, more, mine, its = rng.choice([pair for pair in pairs if pair[2] != pair[3]])
    answer = less if mine < its else more
    if rng.random() < 0.5:
        asked = rng.choice((less, more))
        relation = {"left": "to the left of", "right": "to the right of"}.get(asked, asked)
        question = f"Is the {one.name} {relation} the {other.name}?"
        return Turn(question, "Yes." if asked == answer else "No.", Skill.POSITION)
    choice = {"left": "to the left or to the right of", "above": "above or below"}[less]
    return Turn(f"Is the {one.name} {choice} the {other.name}?", f"{answer.capitalize()}.", Skill.POSITION)


def _presence(rng: random.Random, scene: Scene) -> Turn | None:
    one = rng.choice(scene.shapes)
    asked = one.name
    if rng.random() < 0.5:
        asked = rng.choice((f"{rng.choice(COLOURS)} {one.shape}", f"{one.colour} {rng.choice(SHAPES)}"))
    is_there = any(other.name == asked for other in scene.shapes)
    return Turn(f"Is there {with_article(asked)}?", "Yes." if is_there else "No.", Skill.PRESENCE)


_ASKS: dict[Skill, Callable[[random.Random, Scene], Turn | None]] = {
    Skill.SHAPE: _shape,
    Skill.COLOUR: _colour,
    Skill.COUNT: _count,
    Skill.POSITION: _position,
    Skill.PRESENCE: _presence,
}


def _about_two(rng: random.Random, split: Split) -> Conversation:
    """Return two pictures of one shape each, and questions about the first and the second."""
    scenes = tuple(draw_scene(rng, split, max_shapes=1) for _ in range(2))
    turns = []
    for name, scene in zip(("first", "second"), scenes, strict=True):
        [one] = scene.shapes
        turns += [
            Turn(f"What shape is in the {name} picture?", f"{with_article(one.shape).capitalize()}.", Skill.SHAPE),
            Turn(f"What colour is the shape in the {name} picture?", f"{one.colour.capitalize()}.", Skill.COLOUR),
        ]
    rng.shuffle(turns)
    return Conversation(tuple(turns), scenes)

"""Pictures that no model was trained on, with questions about them, as files."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass, field

from PIL import Image

from models.tiny.conversation import Skill
from models.tiny.looking import ask_about, caption
from models.tiny.render import render
from models.tiny.scenes import draw_scene
from models.tiny.split import Split

_FORMATS = ("PNG", "JPEG", "WEBP")
_SIZES = (96, 64, 200)
_SKILLS = (Skill.SHAPE, Skill.COLOUR, Skill.COUNT, Skill.POSITION)


@dataclass(frozen=True)
class Look:
    """Pictures and a question about the first of them, with its right answer."""

    files: tuple[bytes, ...] = field(repr=False)
    question: str
    answer: str


def make_look(number: int, *, num_pictures: int = 1) -> Look:
    """Every number has its own, in one format and size or another; the same at each call."""
    rng = Split.HELD_OUT.rng(number, "looks")
    scenes = [draw_scene(rng, Split.HELD_OUT) for _ in range(num_pictures)]
    turn = None if number % 3 else caption(rng, scenes[0])
    while turn is None:
        turn = ask_about(rng, scenes[0], rng.choice(_SKILLS))
    files = tuple(picture_file(render(scene, _SIZES[number % 3]), _FORMATS[number % len(_FORMATS)]) for scene in scenes)
    return Look(files, turn.question, turn.answer)


def noise_picture(seed: int, width: int = 96, height: int = 96) -> bytes:
    """A PNG of noise: unlike any other seed's."""
    return picture_file(Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height)))


def picture_file(pixels: object, format: str = "PNG") -> bytes:
    """The file of ``[height, width, 3]`` uint8 pixels, or of an image."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, format, quality=90)
    return file.getvalue()

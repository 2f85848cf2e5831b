"""Images that no worker has seen before: small ones of noise, and large smooth ones as a camera makes them."""

from __future__ import annotations

import io
import random

from PIL import Image

_NOISE_SIDE = 96  # what the tiny model's tower looks at: nothing is to be scaled
_PHOTO_WIDTH, _PHOTO_HEIGHT = 2000, 1500
# Colours at so many points; in between they change smoothly.
_COLUMNS, _ROWS = 8, 6


def noise_image(rng: random.Random) -> bytes:
    """A PNG of 96 by 96 random pixels."""
    pixels = rng.randbytes(3 * _NOISE_SIDE * _NOISE_SIDE)
    return _file(Image.frombytes("RGB", (_NOISE_SIDE, _NOISE_SIDE), pixels), "PNG")


def photo(rng: random.Random) -> bytes:
    """A JPEG of three million pixels, without noise: costly to decode, a tower sees little of it."""
    colours = Image.frombytes("RGB", (_COLUMNS, _ROWS), rng.randbytes(3 * _COLUMNS * _ROWS))
    return _file(colours.resize((_PHOTO_WIDTH, _PHOTO_HEIGHT), Image.Resampling.BICUBIC), "JPEG")


def _file(image: Image.Image, format_: str) -> bytes:
    file = io.BytesIO()
    image.save(file, format_, quality=90)
    return file.getvalue()

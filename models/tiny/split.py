"""Training and held-out samples, separated by their content, so that no seed can mix them."""

from __future__ import annotations

import enum
import random
import zlib
from collections.abc import Callable
from typing import TypeVar

_Content = TypeVar("_Content")
_NUM_BUCKETS = 16
_MAX_DRAWS = 2_000


class Split(enum.Enum):
    """The two sets of samples."""

    TRAIN = "train"
    HELD_OUT = "held out"

    def admits(self, key: str) -> bool:
        """Whether content with this ``key`` belongs to this split: one in 16 is held out, with every seed."""
        is_held_out = zlib.crc32(key.encode()) % _NUM_BUCKETS == 0
        return is_held_out is (self is Split.HELD_OUT)

    def rng(self, seed: int, *names: object) -> random.Random:
        """Random numbers for this split, ``seed`` and ``names``: the same at every call."""
        return random.Random(repr((self.value, seed, *names)))

    def draw(self, draw: Callable[[], _Content], key: Callable[[_Content], str]) -> _Content:
        """Draw until the content's key is of this split.

        Raises:
            ValueError: 2000 draws gave none: there are too few contents for one of them to be of this split.
        """
        for _ in range(_MAX_DRAWS):
            content = draw()
            if self.admits(key(content)):
                return content
        raise ValueError(f"no content of the split {self.value!r} in {_MAX_DRAWS} draws, the last {key(content)!r}")

"""When each token was made: written by the paced engine, read by the load client, in memory that both map.

A token holds nothing but its id, so its time has to come another way. Both processes run on one host and share
CLOCK_MONOTONIC. The engine notes each step's time; a request's tokens are ``period`` steps apart, so the step of a
token follows from the step of the request's first one and the token's number. Requests are known by their seed.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from pathlib import Path

#: The environment variable that names the engine's clock file.
CLOCK_VARIABLE = "QUARTET_BENCHMARK_CLOCK"
#: Requests whose seed is below this have a row.
MAX_STREAMS = 1 << 13
# Steps of 2 ms: two minutes. Older times are overwritten.
_NUM_STEP_TIMES = 1 << 16
_WORD_BYTES = 8


class _Word(IntEnum):
    """Where each figure lies, in words of 64 bits."""

    NUM_STEPS = 0
    NUM_TOKENS = 1
    ENGINE_CPU_NS = 2
    PERIOD = 3
    IS_HELD = 4
    FIRST_STEPS = 8
    STEP_TIMES = FIRST_STEPS + MAX_STREAMS
    END = STEP_TIMES + _NUM_STEP_TIMES


class PacedClock:
    """The shared words of one paced engine. Each has one writer; reading takes 0.1 us."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Map the file ``path``, which the engine's starter makes with ``create``.

        Raises:
            OSError: it can't be opened.
        """
        size_bytes = _Word.END * _WORD_BYTES
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(descriptor, size_bytes)
            self._map = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map).cast("q")

    @property
    def num_steps(self) -> int:
        """Steps made so far."""
        return self._words[_Word.NUM_STEPS]

    @property
    def num_tokens(self) -> int:
        """Tokens given out so far, by all requests together."""
        return self._words[_Word.NUM_TOKENS]

    @property
    def engine_cpu_s(self) -> float:
        """CPU seconds of the engine's thread so far."""
        return self._words[_Word.ENGINE_CPU_NS] / 1e9

    @property
    def is_held(self) -> bool:
        """Whether the engine takes requests but makes no step: so that many can be opened before any token flows."""
        return bool(self._words[_Word.IS_HELD])

    @is_held.setter
    def is_held(self, is_held: bool) -> None:
        self._words[_Word.IS_HELD] = is_held

    @property
    def period(self) -> int:
        """A request's tokens are so many steps apart."""
        return self._words[_Word.PERIOD]

    def set_period(self, num_steps: int) -> None:
        """A request's tokens are ``num_steps`` steps apart."""
        self._words[_Word.PERIOD] = num_steps

    def begin(self, seed: int, step: int, offset: int) -> None:
        """The request ``seed`` gets its token number ``offset`` in step ``step``; nothing happens without a row."""
        if 0 <= seed < MAX_STREAMS:
            self._words[_Word.FIRST_STEPS + seed] = step - offset * self._words[_Word.PERIOD]

    def note_step(self, step: int, at_ns: int, num_tokens: int, cpu_ns: int) -> None:
        """Step ``step`` gives out ``num_tokens`` at ``at_ns``; the thread has used ``cpu_ns`` so far."""
        words = self._words
        words[_Word.STEP_TIMES + step % _NUM_STEP_TIMES] = at_ns
        words[_Word.NUM_STEPS] = step + 1
        words[_Word.NUM_TOKENS] += num_tokens
        words[_Word.ENGINE_CPU_NS] = cpu_ns

    def made_at_ns(self, seed: int, offset: int) -> int:
        """When token number ``offset`` of the request ``seed``, which has a row, was given out: CLOCK_MONOTONIC."""
        words = self._words
        step = words[_Word.FIRST_STEPS + seed] + offset * words[_Word.PERIOD]
        return words[_Word.STEP_TIMES + step % _NUM_STEP_TIMES]

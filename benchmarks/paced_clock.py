"""When each token was made: the paced engine writes it, the load client reads it, in memory that both map.

A token is only its id, so its time must come another way. Both processes run on one host and share CLOCK_MONOTONIC.
The engine notes the time of each step. A request's tokens are ``period`` steps apart, so the step of a token follows
from the step of the request's first token and the token's number. The seed identifies a request.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from pathlib import Path

#: The environment variable that names the engine's clock file.
CLOCK_VARIABLE = "QUARTET_BENCHMARK_CLOCK"
#: Requests with a seed below this have a row.
MAX_STREAMS = 1 << 13
# Steps of 2 ms: two minutes. The engine then overwrites older times.
_NUM_STEP_TIMES = 1 << 16
_WORD_BYTES = 8


class _Word(IntEnum):
    """The position of each figure, in words of 64 bits."""

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
        """Map the file ``path``. The process that starts the engine makes it with ``create``.

        Raises:
            OSError: the file can't be opened.
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
        """Tokens emitted so far, by all requests together."""
        return self._words[_Word.NUM_TOKENS]

    @property
    def engine_cpu_s(self) -> float:
        """CPU seconds of the engine's thread so far."""
        return self._words[_Word.ENGINE_CPU_NS] / 1e9

    @property
    def is_held(self) -> bool:
        """Whether the engine accepts requests but makes no step, so that many can be opened before any token flows."""
        return bool(self._words[_Word.IS_HELD])

    @is_held.setter
    def is_held(self, is_held: bool) -> None:
        self._words[_Word.IS_HELD] = is_held

    @property
    def period(self) -> int:
        """Steps between two tokens of a request."""
        return self._words[_Word.PERIOD]

    def set_period(self, num_steps: int) -> None:
        """Put ``num_steps`` steps between two tokens of a request."""
        self._words[_Word.PERIOD] = num_steps

    def begin(self, seed: int, step: int, offset: int) -> None:
        """Note that the request ``seed`` gets token number ``offset`` in step ``step``, if the request has a row."""
        if 0 <= seed < MAX_STREAMS:
            self._words[_Word.FIRST_STEPS + seed] = step - offset * self._words[_Word.PERIOD]

    def note_step(self, step: int, at_ns: int, num_tokens: int, cpu_ns: int) -> None:
        """Note that step ``step`` emitted ``num_tokens`` at ``at_ns`` and the thread has used ``cpu_ns`` so far."""
        words = self._words
        words[_Word.STEP_TIMES + step % _NUM_STEP_TIMES] = at_ns
        words[_Word.NUM_STEPS] = step + 1
        words[_Word.NUM_TOKENS] += num_tokens
        words[_Word.ENGINE_CPU_NS] = cpu_ns

    def made_at_ns(self, seed: int, offset: int) -> int:
        """When token number ``offset`` of the request ``seed``, which has a row, was emitted: CLOCK_MONOTONIC."""
        words = self._words
        step = words[_Word.FIRST_STEPS + seed] + offset * words[_Word.PERIOD]
        return words[_Word.STEP_TIMES + step % _NUM_STEP_TIMES]

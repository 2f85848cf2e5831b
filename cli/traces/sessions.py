"""What requests ask for: sessions of several turns, whose prompts extend each other, over shared system prompts."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from cli.traces.format import BLOCK_SIZE
from quartet.errors import ConfigError

_MAX_SYSTEM_PROMPTS = 100_000
_MAX_LENGTH_SIGMA = 4.0
# Longer than any context: a mistake.
_MAX_LENGTH = 1_000_000_000

#: What a block of a prompt holds, with all before it: equal where the tokens are.
BlockKey: TypeAlias = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """What sessions are like. Lengths are lognormal, in tokens, and given by their means.

    Attributes:
        num_turns: requests of a session, on average (geometric); at least 1.
        think_time_s: from a request to the next one that its session is ready for, on average (exponential): answer,
            reading and writing. With few sessions it is longer, as requests come when arrivals say so.
        message_tokens: what the user writes in one turn.
        output_tokens: of an answer.
        system_tokens: of a system prompt; 0: there are none.
        num_system_prompts: how many there are; sessions draw one each.
        zipf: the n-th system prompt is drawn in proportion to ``n ** -zipf``; 0: all are as likely.
        length_sigma: of the logarithm of lengths; 0: all are the mean.
        max_input_tokens: no prompt is longer; a session whose next one would be ends.
    """

    num_turns: float = 3.0
    think_time_s: float = 20.0
    message_tokens: float = 600.0
    output_tokens: float = 300.0
    system_tokens: float = 1500.0
    num_system_prompts: int = 16
    zipf: float = 1.0
    length_sigma: float = 1.0
    max_input_tokens: int = 120_000

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        _check("num_turns", self.num_turns, 1, math.inf)
        _check("think_time_s", self.think_time_s, 0, math.inf)
        _check("max_input_tokens", self.max_input_tokens, 2, _MAX_LENGTH)
        _check("message_tokens", self.message_tokens, 1, self.max_input_tokens)
        _check("output_tokens", self.output_tokens, 1, _MAX_LENGTH)
        _check("system_tokens", self.system_tokens, 0, self.max_input_tokens)
        _check("num_system_prompts", self.num_system_prompts, 1, _MAX_SYSTEM_PROMPTS)
        _check("zipf", self.zipf, 0, 100)
        _check("length_sigma", self.length_sigma, 0, _MAX_LENGTH_SIGMA)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request of a session.

    Attributes:
        session: number of the session, from 0.
        number: of the turn within it, from 0.
        system: number of its system prompt.
        num_system_tokens, num_input_tokens, num_output_tokens: of the system prompt, of the whole prompt with it and
            all turns before, and of the answer.
    """

    session: int
    number: int
    system: int
    num_system_tokens: int
    num_input_tokens: int
    num_output_tokens: int

    def block_keys(self) -> list[BlockKey]:
        """One for each block of the prompt, the partly filled last one included, which no other turn shares."""
        num_full = self.num_input_tokens // BLOCK_SIZE
        num_shared = self.num_system_tokens // BLOCK_SIZE
        keys = [
            ("system", self.system, index) if index < num_shared else ("session", self.session, index)
            for index in range(num_full)
        ]
        if self.num_input_tokens % BLOCK_SIZE:
            keys.append(("end", self.session, self.number))
        return keys


@dataclass(order=True)
class _Waiting:
    """A session that goes on, from ``ready_at_s`` on."""

    ready_at_s: float
    next: Turn = field(compare=False)


class Sessions:
    """Whose turn it is: the session's that has been ready for the longest, else a new one's."""

    def __init__(self, config: SessionConfig, rng: np.random.Generator) -> None:
        self._config = config
        self._rng = rng
        self._waiting: list[_Waiting] = []
        self._num_sessions = 0
        count = config.num_system_prompts
        weights = np.arange(1, count + 1, dtype=np.float64) ** -config.zipf
        self._shares = weights / weights.sum()
        # A prompt is its system prompt and one token of the user's at least.
        longest = config.max_input_tokens - 1
        self._system_tokens = [min(self._length(config.system_tokens), longest) for _ in range(count)]

    def next(self, now_s: float) -> Turn:
        """The request that comes at ``now_s``, not before the last one's."""
        if self._waiting and self._waiting[0].ready_at_s <= now_s:
            turn = heapq.heappop(self._waiting).next
        else:
            turn = self._begin()
        self._go_on(turn, now_s)
        return turn

    def _begin(self) -> Turn:
        system = int(self._rng.choice(len(self._shares), p=self._shares))
        num_system_tokens = self._system_tokens[system]
        num_input_tokens = num_system_tokens + self._length(self._config.message_tokens)
        session = self._num_sessions
        self._num_sessions += 1
        return Turn(
            session=session,
            number=0,
            system=system,
            num_system_tokens=num_system_tokens,
            num_input_tokens=min(num_input_tokens, self._config.max_input_tokens),
            num_output_tokens=self._length(self._config.output_tokens),
        )

    def _go_on(self, turn: Turn, now_s: float) -> None:
        config = self._config
        if self._rng.random() >= 1 - 1 / config.num_turns:
            return
        num_new_tokens = turn.num_output_tokens + self._length(config.message_tokens)
        num_input_tokens = turn.num_input_tokens + num_new_tokens
        if num_input_tokens <= config.max_input_tokens:
            following = replace(
                turn,
                number=turn.number + 1,
                num_input_tokens=num_input_tokens,
                num_output_tokens=self._length(config.output_tokens),
            )
            ready_at_s = now_s + float(self._rng.exponential(config.think_time_s))
            heapq.heappush(self._waiting, _Waiting(ready_at_s, following))

    def _length(self, mean: float) -> int:
        sigma = self._config.length_sigma
        if not mean:
            return 0
        return max(1, round(float(self._rng.lognormal(math.log(mean) - sigma**2 / 2, sigma))))


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or math.isinf(value):
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        raise ConfigError(f"{name}: must be at least {low:g}{upper}, not {value:g}")

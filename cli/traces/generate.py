"""Makes traces: ``Arrivals`` say when requests come, ``Sessions`` what they ask for.

A session has several turns, whose prompts extend each other; sessions share system prompts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import numpy as np
import typer

from cli.traces.format import BLOCK_SIZE, TraceRequest
from quartet.errors import ConfigError

_MS_PER_S = 1000
# All of them are in memory at once; the public traces have some 20,000.
_MAX_NUM_REQUESTS = 10_000_000
_MAX_SYSTEM_PROMPTS = 100_000
_MAX_SIGMA = 4.0
# Longer than any context: such a length is a mistake.
_MAX_LENGTH = 1_000_000_000

#: Names a block of a prompt with all blocks before it: two keys are equal where the tokens are.
BlockKey: TypeAlias = tuple[str, int, int]


class ArrivalKind(StrEnum):
    """How requests follow each other."""

    POISSON = "poisson"  # independent of each other
    BURSTS = "bursts"  # many at about the same time, then a pause


def _arrivals(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, rich_help_panel="Arrivals", help=help, **more)


def _sessions(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, rich_help_panel="Sessions; lengths are in tokens, and lognormal", help=help, **more)


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """When requests come. Each field is an option of ``quartet trace``, as in ``SessionConfig``.

    Attributes:
        rate: requests a second, on average.
        burst_size: requests of one burst; bursts themselves come by a Poisson process.
        burst_spread_s: time within which a burst's requests come; each moment is as likely.
    """

    kind: Annotated[ArrivalKind, _arrivals("--arrivals", "How requests follow each other.")] = ArrivalKind.POISSON
    rate: Annotated[float, _arrivals("--rate", "Requests a second, on average.")] = 1.0
    burst_size: Annotated[int, _arrivals("--burst-size", "Requests of one burst.")] = 16
    burst_spread_s: Annotated[
        float, _arrivals("--burst-spread", "Time within which a burst's requests come.", metavar="SECONDS")
    ] = 0.5

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate: must be above 0, not {self.rate:g}")
        if self.burst_size < 1:
            raise ConfigError(f"burst_size: must be at least 1, not {self.burst_size}")
        if not 0 <= self.burst_spread_s < float("inf"):
            raise ConfigError(f"burst_spread_s: must not be negative, not {self.burst_spread_s:g}")

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Draw arrival times one by one, in order and without end; the first one is 0."""
        times = self._poisson(rng) if self.kind is ArrivalKind.POISSON else self._bursts(rng)
        first = next(times)
        yield 0.0
        for time in times:
            yield time - first

    def _poisson(self, rng: np.random.Generator) -> Iterator[float]:
        now = 0.0
        while True:
            now += rng.exponential(1 / self.rate)
            yield now

    def _bursts(self, rng: np.random.Generator) -> Iterator[float]:
        begins_at = 0.0
        drawn: list[float] = []
        while True:
            begins_at += rng.exponential(self.burst_size / self.rate)
            while drawn and drawn[0] <= begins_at:
                yield heapq.heappop(drawn)
            for offset_s in rng.uniform(0, self.burst_spread_s, self.burst_size):
                heapq.heappush(drawn, begins_at + float(offset_s))


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """What sessions are like. Lengths are lognormal, in tokens, and given by their means.

    Attributes:
        num_turns: requests of a session, on average (geometric); at least 1.
        think_time_s: from a request until its session is ready for the next one, on average: answer, reading and
            writing. With few sessions it is longer, since arrivals decide when requests come.
        think_time_sigma: of the logarithm of that time, which is lognormal: most tools answer an agent at once, some
            after minutes; 0: it is exponential.
        message_tokens: what the user writes in one turn.
        output_tokens: of an answer.
        system_tokens: of a system prompt; 0: there are none.
        num_system_prompts: how many there are; sessions draw one each.
        zipf: the n-th system prompt is drawn in proportion to ``n ** -zipf``; 0: all are as likely.
        length_sigma: of the logarithm of lengths; 0: all are the mean.
        max_input_tokens: no prompt is longer; a session whose next one would be ends.
    """

    num_turns: Annotated[float, _sessions("--turns", "Requests of a session, on average.")] = 3.0
    think_time_s: Annotated[
        float, _sessions("--think-time", "From one turn to the next, on average.", metavar="SECONDS")
    ] = 20.0
    think_time_sigma: Annotated[
        float, _sessions("--think-time-sigma", "Of the logarithm of that time; 0: it is exponential.")
    ] = 0.0
    message_tokens: Annotated[float, _sessions("--message-tokens", "What the user adds in a turn, on average.")] = 600.0
    output_tokens: Annotated[float, _sessions("--output-tokens", "Length of answers, on average.")] = 300.0
    system_tokens: Annotated[
        float, _sessions("--system-tokens", "Length of system prompts, on average; 0: there are none.")
    ] = 1500.0
    num_system_prompts: Annotated[int, _sessions("--system-prompts", "How many system prompts there are.")] = 16
    zipf: Annotated[
        float, _sessions("--zipf", "The n-th system prompt is drawn in proportion to n^-ZIPF; 0: all are as likely.")
    ] = 1.0
    length_sigma: Annotated[float, _sessions("--length-sigma", "Of the logarithm of lengths; 0: all are the mean.")] = (
        1.0
    )
    max_input_tokens: Annotated[int, _sessions("--max-input-tokens", "No prompt is longer: its session ends.")] = (
        120_000
    )

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        _check("num_turns", self.num_turns, 1, math.inf)
        _check("think_time_s", self.think_time_s, 0, math.inf)
        _check("think_time_sigma", self.think_time_sigma, 0, _MAX_SIGMA)
        _check("max_input_tokens", self.max_input_tokens, 2, _MAX_LENGTH)
        _check("message_tokens", self.message_tokens, 1, self.max_input_tokens)
        _check("output_tokens", self.output_tokens, 1, _MAX_LENGTH)
        _check("system_tokens", self.system_tokens, 0, self.max_input_tokens)
        _check("num_system_prompts", self.num_system_prompts, 1, _MAX_SYSTEM_PROMPTS)
        _check("zipf", self.zipf, 0, 100)
        _check("length_sigma", self.length_sigma, 0, _MAX_SIGMA)


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
        """One key for each block of the prompt. The partly filled last block has a key that no other turn shares."""
        num_full = self.num_input_tokens // BLOCK_SIZE
        num_shared = self.num_system_tokens // BLOCK_SIZE
        keys = [
            ("system", self.system, index) if index < num_shared else ("session", self.session, index)
            for index in range(num_full)
        ]
        if self.num_input_tokens % BLOCK_SIZE:
            keys.append(("end", self.session, self.number))
        return keys


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Settings of one trace; the same settings give the same trace.

    Attributes:
        arrivals: when requests come.
        sessions: what they ask for.
        max_requests: the trace ends after so many; ``None``: no limit.
        duration_s: the trace ends after so long; ``None``: no limit.
        seed: of all random draws; not negative.
    """

    arrivals: Arrivals = field(default_factory=Arrivals)
    sessions: SessionConfig = field(default_factory=SessionConfig)
    max_requests: int | None = None
    duration_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if self.max_requests is None and self.duration_s is None:
            raise ConfigError("max_requests: it or duration_s must say where the trace ends")
        if self.max_requests is not None and not 1 <= self.max_requests <= _MAX_NUM_REQUESTS:
            raise ConfigError(f"max_requests: must be in [1, {_MAX_NUM_REQUESTS}], not {self.max_requests}")
        if self.duration_s is not None and not 0 < self.duration_s < float("inf"):
            raise ConfigError(f"duration_s: must be above 0, not {self.duration_s:g}")
        if self.max_requests is None and self.duration_s is not None:
            num_requests = self.duration_s * self.arrivals.rate
            if num_requests > _MAX_NUM_REQUESTS:
                raise ConfigError(f"duration_s: makes {num_requests:g} requests, more than {_MAX_NUM_REQUESTS}")
        if self.seed < 0:
            raise ConfigError(f"seed: must not be negative, not {self.seed}")


def generate(config: TraceConfig) -> Iterator[TraceRequest]:
    """The requests in the order of their arrivals, which are whole milliseconds; at least one request.

    Hash ids count from 0, in the order in which blocks first appear.
    """
    # Separate streams: a change of the rate changes the contents of sessions only as far as it changes their order.
    arrival_rng, session_rng = (np.random.default_rng(seed) for seed in np.random.SeedSequence(config.seed).spawn(2))
    sessions = Sessions(config.sessions, session_rng)
    ids: dict[BlockKey, int] = {}
    for number, time_s in enumerate(config.arrivals.times_s(arrival_rng)):
        if config.max_requests is not None and number >= config.max_requests:
            return
        if config.duration_s is not None and time_s >= config.duration_s:
            return
        turn = sessions.next(time_s)
        yield TraceRequest(
            arrival_s=int(time_s * _MS_PER_S) / _MS_PER_S,
            num_input_tokens=turn.num_input_tokens,
            num_output_tokens=turn.num_output_tokens,
            hash_ids=tuple(ids.setdefault(key, len(ids)) for key in turn.block_keys()),
            session=str(turn.session),
        )


class Sessions:
    """Gives each turn to the session that has been ready for the longest, or to a new one if none is ready."""

    def __init__(self, config: SessionConfig, rng: np.random.Generator) -> None:
        self._config = config
        self._rng = rng
        self._paused: list[_Paused] = []
        self._num_sessions = 0
        count = config.num_system_prompts
        weights = np.arange(1, count + 1, dtype=np.float64) ** -config.zipf
        self._shares = weights / weights.sum()
        # A prompt is a system prompt and at least one token of the user.
        longest = config.max_input_tokens - 1
        self._system_tokens = [min(self._length(config.system_tokens), longest) for _ in range(count)]

    def next(self, now_s: float) -> Turn:
        """The request that comes at ``now_s``, which must not be before the last one."""
        if self._paused and self._paused[0].ready_at_s <= now_s:
            turn = heapq.heappop(self._paused).next
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
            heapq.heappush(self._paused, _Paused(now_s + self._think_time_s(), following))

    def _think_time_s(self) -> float:
        mean, sigma = self._config.think_time_s, self._config.think_time_sigma
        return self._lognormal(mean, sigma) if sigma and mean else float(self._rng.exponential(mean))

    def _length(self, mean: float) -> int:
        return max(1, round(self._lognormal(mean, self._config.length_sigma))) if mean else 0

    def _lognormal(self, mean: float, sigma: float) -> float:
        return float(self._rng.lognormal(math.log(mean) - sigma**2 / 2, sigma))


@dataclass(order=True)
class _Paused:
    """A session that goes on with ``next`` from ``ready_at_s`` on."""

    ready_at_s: float
    next: Turn = field(compare=False)


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or math.isinf(value):
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        raise ConfigError(f"{name}: must be at least {low:g}{upper}, not {value:g}")

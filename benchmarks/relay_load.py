"""The load of the relay benchmarks: its ways, jobs and figures, and the processes that make it (``relay_client``).

A client process gets a ``Job``. It answers with ``Opened`` when the load runs, and then each ``Command`` with a
``Window``; a job of ``Load.BURST`` has one answer, an ``Outcome``.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any

from benchmarks.children import Child, ChildEndedError, start_child
from quartet.v1 import router_pb2, types_pb2

#: Output tokens of a stream: so many that it does not end while it is measured.
ENDLESS = 500_000
# The tiny model has 2048 ids; those below the first one here are special tokens.
_FIRST_TOKEN_ID, _END_TOKEN_ID = 16, 2048
_WORDS = ("once", "upon", "a", "time", "there", "was", "rabbit", "castle", "near", "and", "the", "sun")
_CLIENT = "benchmarks.relay_client"
_BURST_TIMEOUT_S = 240.0


class Way(StrEnum):
    """How the client gets answers."""

    GENERATE = "generate"  # a Generate stream for each request
    SESSION = "session"  # all requests on one Session stream
    PLACE_PER_REQUEST = "place_per_request"  # the router places the request, then it has its own Decode stream
    PLACE_PER_CLIENT = "place_per_client"  # the router places the request, then one Decode stream carries all
    HTTP = "http"  # a streamed completion for each request, with text, on a connection of its own


class Load(StrEnum):
    """What clients ask for."""

    STREAMS = "streams"  # answers that don't end while they are measured
    REQUESTS = "requests"  # a closed loop of requests with one token out
    BURST = "burst"  # answers that are opened all at once, and each followed to its end


class Command(StrEnum):
    """What the parent can order a client to do after its job."""

    BEGIN = "begin"  # count from now on
    END = "end"  # report what was counted


@dataclass(frozen=True, kw_only=True)
class Job:
    """One client's part of a load.

    Attributes:
        clock_path: file of the engine's ``PacedClock``.
        count: streams, or clients of the closed loop.
        first_seed: seed of its first request; the streams of all clients together have different seeds.
        num_opening: requests that are opened at the same time.
        num_sessions: Session or Decode streams over which the requests are spread, if many share one.
        is_chat: requests of the closed loop are chats of about so many tokens, with text; by Generate or HTTP.
        num_output_tokens: output tokens of each stream; a request of the closed loop has one.
    """

    router_address: str
    clock_path: str
    way: Way
    load: Load = Load.STREAMS
    count: int
    first_seed: int = 0
    num_opening: int = 64
    num_sessions: int = 1
    num_prompt_tokens: int = 16
    num_output_tokens: int = ENDLESS
    with_text: bool = False
    is_chat: bool = False


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Whether the load runs.

    Attributes:
        duration_s: until all streams ran, or one request of a closed loop had ended.
        errors: requests that failed, by error message.
    """

    duration_s: float
    errors: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Window:
    """What a client counted.

    Attributes:
        num_messages: messages that held tokens.
        errors: requests that failed.
        latencies_us: of each token: from when the engine emitted it until the client had parsed its message.
    """

    duration_s: float
    num_tokens: int
    num_messages: int
    num_requests: int
    errors: Mapping[str, int]
    latencies_us: Sequence[int] = field(repr=False)


@dataclass(kw_only=True)
class Outcome:
    """How the requests of a burst ended. Seconds count from just before the first was opened.

    Attributes:
        accepted_s, first_token_s, ended_s: until the latest request so far reached this point.
        max_open: most requests that were accepted and not ended at one time.
        num_complete: requests that ended well with every token, in order, none twice.
        errors: the other requests, by error message.
    """

    accepted_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    num_accepted: int = 0
    max_open: int = 0
    num_complete: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class LoadFailedError(Exception):
    """The load is not as it should be; the message says why."""


class Clients:
    """The processes of one load, started on entry and ended on exit.

    Attributes:
        pids: process ids by name: ``client-0``, ``client-1``, ...
        opened_s: how long it took to open the load.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        """Make one process a job."""
        self.pids: Mapping[str, int] = {}
        self.opened_s = 0.0
        self._jobs = jobs
        self._children: list[Child] = []
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Clients:
        """Start them all. Raises ``LoadFailedError``: the load can't be opened."""
        try:
            for _ in self._jobs:
                self._children.append(await self._exits.enter_async_context(start_child(_CLIENT)))
            self.pids = {f"client-{number}": child.pid for number, child in enumerate(self._children)}
            opened = [Opened(**answer) for answer in await self._ask(self._jobs)]
            if errors := _add([item.errors for item in opened]):
                raise LoadFailedError(f"the load could not be opened: {errors}")
            self.opened_s = max(item.duration_s for item in opened)
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End them all."""
        await self._exits.aclose()

    async def begin(self) -> None:
        """Count from now on."""
        await self._ask([Command.BEGIN] * len(self._children))

    async def end(self) -> Window:
        """What all of them together counted. Raises ``LoadFailedError`` if requests failed."""
        windows = [Window(**answer) for answer in await self._ask([Command.END] * len(self._children))]
        if errors := _add([window.errors for window in windows]):
            raise LoadFailedError(f"requests failed: {errors}")
        return Window(
            duration_s=max(window.duration_s for window in windows),
            num_tokens=sum(window.num_tokens for window in windows),
            num_messages=sum(window.num_messages for window in windows),
            num_requests=sum(window.num_requests for window in windows),
            errors={},
            latencies_us=[latency for window in windows for latency in window.latencies_us],
        )

    async def _ask(self, values: Sequence[object]) -> list[Any]:
        try:
            asked = (child.ask(value) for child, value in zip(self._children, values, strict=True))
            return await asyncio.gather(*asked)
        except ChildEndedError as error:
            raise LoadFailedError(str(error)) from error


async def run_burst(job: Job) -> Outcome:
    """Run ``job``, of ``Load.BURST``, in a process of its own. Raises ``ChildEndedError``, ``TimeoutError``."""
    async with start_child(_CLIENT) as child:
        return Outcome(**await child.ask(job, _BURST_TIMEOUT_S))


def make_start(
    rng: random.Random, *, seed: int, num_prompt_tokens: int, num_output_tokens: int, with_text: bool
) -> router_pb2.GenerateStart:
    """A start with a prompt of random token ids, so that no two share a prefix."""
    ids = rng.choices(range(_FIRST_TOKEN_ID, _END_TOKEN_ID), k=num_prompt_tokens)
    return router_pb2.GenerateStart(
        token_ids=router_pb2.TokenIds(ids=ids),
        sampling=types_pb2.Sampling(max_tokens=num_output_tokens, ignore_eos=True),
        seed=seed,
        text_options=router_pb2.TextOptions(omit_text=not with_text),
    )


def make_chat_start(text: str, *, seed: int) -> router_pb2.GenerateStart:
    """A start with one message of ``text``, for one token and its text."""
    return router_pb2.GenerateStart(
        chat=router_pb2.ChatPrompt(messages=[router_pb2.ChatMessage(role="user", content=text)]),
        sampling=types_pb2.Sampling(max_tokens=1, ignore_eos=True),
        seed=seed,
    )


def make_chat_text(rng: random.Random, num_tokens: int) -> str:
    """A text of words that the tiny model's tokenizer knows; no two begin alike."""
    return " ".join([str(rng.getrandbits(32)), *rng.choices(_WORDS, k=num_tokens)])


def _add(errors: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum((Counter(item) for item in errors), Counter()))

"""What a load client is told, and what it answers: lines of JSON over its standard input and output."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

#: Output tokens of a stream that does not end while it is measured.
ENDLESS = 500_000

_MICROSECONDS = "i"


class Way(StrEnum):
    """How answers come to the client."""

    GENERATE = "generate"  # a Generate stream each
    SESSION = "session"  # all on one Session stream
    PLACE_PER_REQUEST = "place_per_request"  # placed by the router, then a Decode stream each
    PLACE_PER_CLIENT = "place_per_client"  # placed by the router, then all on one Decode stream


class Load(StrEnum):
    """What is asked for."""

    STREAMS = "streams"  # answers that don't end while they are measured
    REQUESTS = "requests"  # a closed loop of requests with one token out


class Command(StrEnum):
    """What a client is told after its job."""

    BEGIN = "begin"  # count from now on
    END = "end"  # tell what was counted
    QUIT = "quit"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One client's part of a load.

    Attributes:
        clock_path: file of the engine's ``PacedClock``.
        count: streams, or clients of the closed loop.
        first_seed: of its requests; streams of all clients together have different ones.
        num_opening: requests that are being opened at once.
        num_sessions: Session or Decode streams to spread the requests over, where many share one.
        num_output_tokens: of each stream; a request of the closed loop has one.
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


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The load runs, or why it doesn't.

    Attributes:
        duration_s: until all streams ran, or a request of a closed loop had ended.
        errors: requests that failed, by what was said.
        absent: set when the servers don't offer this way at all, to what they said.
    """

    duration_s: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)
    absent: str | None = None


@dataclass(frozen=True, kw_only=True)
class Window:
    """What a client counted.

    Attributes:
        num_messages: messages that held tokens.
        cpu_s: its own.
        errors: requests that failed.
        latencies_us: of each token: from when the engine gave it out until the client had parsed its message.
    """

    duration_s: float
    num_tokens: int
    num_messages: int
    num_requests: int
    cpu_s: float
    errors: Mapping[str, int]
    latencies_us: array[int] = field(repr=False)

    def encode(self) -> str:
        """As a line of JSON."""
        values = asdict(self) | {"latencies_us": base64.b64encode(self.latencies_us.tobytes()).decode("ascii")}
        return json.dumps(values)

    @classmethod
    def decode(cls, line: str | bytes) -> Window:
        """From a line of JSON."""
        values = json.loads(line)
        latencies_us = new_latencies()
        latencies_us.frombytes(base64.b64decode(values.pop("latencies_us")))
        return cls(latencies_us=latencies_us, **values)


def new_latencies() -> array[int]:
    """An empty list of whole microseconds."""
    return array(_MICROSECONDS)


def encode_job(job: Job) -> str:
    """As a line of JSON."""
    return json.dumps(asdict(job))


def decode_job(line: str | bytes) -> Job:
    """From a line of JSON."""
    values = json.loads(line)
    return Job(**values | {"way": Way(values["way"]), "load": Load(values["load"])})

"""Traces in Mooncake's format: JSON lines of ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``.

Lines may also have a ``session_id``: requests of one conversation share it.

See kvcache-ai/Mooncake, FAST25-release/traces: a hash id names a block of 512 prompt tokens (the last one may be
shorter) together with all before it, so that requests with equal leading ids share a prefix.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Self

from quartet.errors import ConfigError

#: Prompt tokens that one hash id stands for.
BLOCK_SIZE = 512

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_SUFFIX = ".gz"
_MS = 1e3
# A request's session key may have 256 characters, and a load has more to say in it.
_MAX_SESSION_LENGTH = 200


class TraceError(ConfigError):
    """A trace can't be used; the message names file, line and field."""


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: when it comes, counted from the trace's first request.
        num_input_tokens: of the prompt, at least 1.
        num_output_tokens: of the answer, at least 1.
        hash_ids: of the prompt's blocks of ``BLOCK_SIZE`` tokens, first to last; empty if the trace has none.
        session: requests of one conversation share it; empty: none.
    """

    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()
    session: str = ""


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """Figures of one trace.

    Attributes:
        duration_s: from the first arrival to the last.
        num_blocks, num_seen_blocks: hash ids of all requests, and how many of them an earlier request had: the most
            that a cache of any size can hit.
    """

    num_requests: int
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_seen_blocks: int

    @classmethod
    def of(cls, requests: Sequence[TraceRequest]) -> Self:
        """Sum up ``requests``, in the order of their arrivals."""
        num_blocks = sum(len(request.hash_ids) for request in requests)
        return cls(
            num_requests=len(requests),
            duration_s=requests[-1].arrival_s if requests else 0.0,
            num_input_tokens=sum(request.num_input_tokens for request in requests),
            num_output_tokens=sum(request.num_output_tokens for request in requests),
            num_blocks=num_blocks,
            num_seen_blocks=num_blocks - len({hash_id for request in requests for hash_id in request.hash_ids}),
        )

    def __str__(self) -> str:
        count = max(self.num_requests, 1)
        return (
            f"{self.num_requests} requests in {self.duration_s:.1f} s, on average {self.num_input_tokens / count:.0f} "
            f"input and {self.num_output_tokens / count:.0f} output tokens; "
            f"{self.num_seen_blocks / max(self.num_blocks, 1):.1%} of their blocks came before"
        )


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of ``path``, which may be gzipped whatever its name, in the order of their arrivals.

    Raises:
        TraceError: it can't be read, holds no requests, or a line is no request.
    """
    with _reading(path) as lines:
        requests = [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise TraceError(f"{path} holds no requests")
    requests.sort(key=lambda request: request.arrival_s)
    first_s = requests[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - first_s) for request in requests]


def write_trace(requests: Iterable[TraceRequest], path: Path) -> None:
    """Write ``requests`` in their order, arrivals to the millisecond; gzipped where the name ends in ``.gz``.

    The same requests give the same bytes. Raises ``OSError``.
    """
    with path.open("wb") as raw:
        if path.suffix == _GZIP_SUFFIX:
            # A name or time in the header would make two equal traces differ.
            with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed:
                packed.writelines(map(_to_line, requests))
        else:
            raw.writelines(map(_to_line, requests))


def _to_line(request: TraceRequest) -> bytes:
    row: dict[str, object] = {
        "timestamp": round(request.arrival_s * _MS),
        "input_length": request.num_input_tokens,
        "output_length": request.num_output_tokens,
        "hash_ids": request.hash_ids,
    }
    if request.session:
        row["session_id"] = request.session
    return json.dumps(row).encode() + b"\n"


@contextmanager
def _reading(path: Path) -> Iterator[IO[str]]:
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            with io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if is_packed else raw, encoding="utf-8") as lines:
                yield lines
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is no whole gzip file: {error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not UTF-8: {error}") from error
    except OSError as error:
        raise TraceError(f"can't read {path}: {error.strerror or error}") from error


def _parse(line: str, where: str) -> TraceRequest:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where} is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise TraceError(f"{where} is no request: a JSON object is needed")
    return TraceRequest(
        arrival_s=_timestamp_ms(row, where) / _MS,
        num_input_tokens=_length(row, "input_length", where),
        num_output_tokens=_length(row, "output_length", where),
        hash_ids=_hash_ids(row, where),
        session=_session(row, where),
    )


def _timestamp_ms(row: Mapping[str, object], where: str) -> float:
    value = _field(row, "timestamp", where)
    # JSON allows numbers of any length, also some that no float can hold.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(_to_float(value)):
        raise TraceError(f"{where}: timestamp must be a number of milliseconds, not {value!r}")
    return float(value)


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _length(row: Mapping[str, object], name: str, where: str) -> int:
    value = _field(row, name, where)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TraceError(f"{where}: {name} must be a whole number of at least 1, not {value!r}")
    return value


def _hash_ids(row: Mapping[str, object], where: str) -> tuple[int, ...]:
    values = row.get("hash_ids")
    if values is None:
        return ()
    if not isinstance(values, list):
        raise TraceError(f"{where}: hash_ids must be a list, not {values!r}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise TraceError(f"{where}: hash_ids must be whole numbers that are not negative, not {value!r}")
    return tuple(values)


def _session(row: Mapping[str, object], where: str) -> str:
    value = row.get("session_id", "")
    if isinstance(value, bool) or not isinstance(value, int | str) or len(str(value)) > _MAX_SESSION_LENGTH:
        raise TraceError(f"{where}: session_id must be a short text or a number, not {value!r:.100}")
    return str(value)


def _field(row: Mapping[str, object], name: str, where: str) -> object:
    if name not in row:
        raise TraceError(f"{where} has no {name}")
    return row[name]

"""The plan that the options of ``quartet bench`` make; an impossible value is reported by its option."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from cli.bench.load import Load, LoadKind
from cli.bench.run import Limits
from cli.bench.workload import IntRange, WorkloadConfig
from cli.traces.format import TraceError, TraceRequest, read_trace

# Nearly every vocabulary has these ids, and they are no special tokens.
DEFAULT_IDS = "100-600"
DEFAULT_LENGTH = "128"
DEFAULT_CONCURRENCY = 1
DEFAULT_DURATION_S = 30.0
DEFAULT_WARMUP_S = 2.0
_SEED_BITS = 32
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def make_loads(
    concurrency: int | None, rate: float | None, replay: float | None, sweep: str | None, *, has_trace: bool
) -> tuple[Load, ...]:
    """The loads to run. Raises ``typer.BadParameter``."""
    given = {"--concurrency": concurrency, "--rate": rate, "--replay": replay, "--sweep": sweep}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise typer.BadParameter("each of them is a load of its own: give one", param_hint=" and ".join(names))
    if sweep is not None:
        return _parse_sweep(sweep)
    if rate is not None:
        return (Load(LoadKind.RATE, _positive(rate, "--rate")),)
    if replay is not None:
        if not has_trace:
            raise typer.BadParameter("only a trace has times: give --trace too", param_hint="--replay")
        return (Load(LoadKind.REPLAY, _positive(replay, "--replay")),)
    return (Load(LoadKind.CONCURRENCY, concurrency or DEFAULT_CONCURRENCY),)


def make_limits(
    warmup_s: float | None,
    duration_s: float | None,
    max_requests: int | None,
    rounds: int | None = None,
    *,
    loads: Sequence[Load],
    has_trace: bool,
) -> Limits:
    """When each load ends. Raises ``typer.BadParameter``."""
    if rounds is not None and max_requests is not None:
        raise typer.BadParameter("each of them ends a load: give one", param_hint="--requests and --rounds")
    if rounds is not None and loads[0].kind is not LoadKind.CONCURRENCY:
        raise typer.BadParameter("only --concurrency and --sweep 1,2,4 have clients", param_hint="--rounds")
    if warmup_s is None:
        # A trace has each request once: the figures would lack those that are sent during a warm-up.
        warmup_s = 0.0 if has_trace else DEFAULT_WARMUP_S
    if duration_s is not None:
        _positive(duration_s, "--duration")
    elif max_requests is None and rounds is None and not has_trace:
        duration_s = DEFAULT_DURATION_S
    return Limits(warmup_s=warmup_s, duration_s=duration_s, max_requests=max_requests, rounds=rounds)


def make_workload_config(
    prompt_tokens: str | None, output_tokens: str | None, trace: Path | None, ids: str, *, is_text: bool
) -> WorkloadConfig:
    """The workload to send. Raises ``typer.BadParameter``."""
    lengths = {"--prompt-tokens": prompt_tokens, "--output-tokens": output_tokens}
    return WorkloadConfig(
        prompt_tokens=_parse_range(prompt_tokens or DEFAULT_LENGTH, "--prompt-tokens"),
        output_tokens=_parse_range(output_tokens or DEFAULT_LENGTH, "--output-tokens"),
        ids=_parse_range(ids, "--token-ids"),
        trace=None if trace is None else _read_trace(trace, lengths),
        is_text=is_text,
    )


def make_seed(seed: int | None) -> int:
    """``seed``, or a random one, whose prompts no server has seen before."""
    return secrets.randbits(_SEED_BITS) if seed is None else seed


def _read_trace(path: Path, lengths: Mapping[str, str | None]) -> list[TraceRequest]:
    if names := [name for name, value in lengths.items() if value is not None]:
        raise typer.BadParameter("--trace has lengths of its own", param_hint=" and ".join(names))
    try:
        return read_trace(path)
    except TraceError as error:
        raise typer.BadParameter(str(error), param_hint="--trace") from error


def _parse_range(text: str, option: str) -> IntRange:
    """``N`` or ``LOW-HIGH``, at least 1. Raises ``typer.BadParameter`` naming ``option``."""
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        message = f"{text!r} is neither a number such as 128 nor a range such as 32-512"
        raise typer.BadParameter(message, param_hint=option)
    low, high = int(found[1]), int(found[2] or found[1])
    if not 1 <= low <= high:
        message = f"{text!r}: the lower bound must be at least 1 and at most the upper bound"
        raise typer.BadParameter(message, param_hint=option)
    return IntRange(low, high)


def _parse_sweep(text: str) -> tuple[Load, ...]:
    name, _, values = text.rpartition("=")
    try:
        kind = LoadKind(name or LoadKind.CONCURRENCY)
        loads = tuple(Load(kind, float(value)) for value in values.split(","))
    except ValueError as error:
        raise _bad_sweep(text) from error
    has_values = all(0 < load.value < float("inf") for load in loads)
    is_whole = kind is LoadKind.RATE or all(load.value.is_integer() for load in loads)
    if kind is LoadKind.REPLAY or not has_values or not is_whole:
        raise _bad_sweep(text)
    return loads


def _bad_sweep(text: str) -> typer.BadParameter:
    return typer.BadParameter(f"{text!r} is neither like 1,2,4 (clients) nor like rate=0.5,1,2", param_hint="--sweep")


def _positive(value: float, name: str) -> float:
    if not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value:g} is not above 0", param_hint=name)
    return value

"""What all commands share when they print: failures as one line on standard error, values as JSON, consoles."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import typer

from quartet.errors import ConfigError, ServingError
from quartet.rpc.errors import status_code

if TYPE_CHECKING:
    from rich.console import Console

    from quartet.client import TimeBreakdown


@contextmanager
def reporting_errors(*errors: type[Exception]) -> Iterator[None]:
    """Report ``ServingError``, ``ConfigError`` and ``errors`` in one line and exit with code 1.

    Any other exception is a bug and keeps its traceback.
    """
    reported: tuple[type[Exception], ...] = (ConfigError, *errors)
    try:
        yield
    except ServingError as error:
        raise _failed(describe(error)) from error
    except reported as error:
        raise _failed(str(error)) from error


def describe(error: ServingError) -> str:
    """``STATUS REASON (field): message``, and when to try again. No reason where it is the same word."""
    status = status_code(error).name
    reason = "" if error.reason == status else f" {error.reason}"
    field = f" ({error.field})" if error.field else ""
    retry = "" if error.retry_delay_s is None else f" (try again in {error.retry_delay_s:.3g} s)"
    return f"{status}{reason}{field}: {error.message}{retry}"


def complain(message: str) -> None:
    """Print ``message`` on standard error, in red."""
    print_styled(f"quartet: {message}", err=True, fg=typer.colors.RED)


def show_lost(routers: Sequence[str], went_on: str | None) -> None:
    """Say on standard error which routers were lost during an answer, if any, and which one went on."""
    if routers:
        print_styled(f"lost the router at {', '.join(routers)}; {went_on} went on", err=True, dim=True)


def has_styles(*, err: bool = False) -> bool:
    """Whether standard output (``err``: standard error) shows colours: a terminal, and no ``NO_COLOR``.

    See https://no-color.org.
    """
    return (sys.stderr if err else sys.stdout).isatty() and not os.environ.get("NO_COLOR")


def print_styled(text: str, *, err: bool = False, nl: bool = True, fg: str | None = None, dim: bool = False) -> None:
    """Print ``text`` at once, in this colour, or dimmed, where that shows."""
    if (fg or dim) and has_styles(err=err):
        text = typer.style(text, fg=fg, dim=dim or None)  # False would write a code, too
    print(text, end="\n" if nl else "", file=sys.stderr if err else sys.stdout, flush=True)


def try_write(name: str, write: Callable[[], None]) -> bool:
    """Call ``write``, which writes the file ``name``; report an ``OSError`` and return ``False``."""
    try:
        write()
    except OSError as error:
        complain(f"can't write {name}: {error.strerror or error}")
        return False
    return True


def json_value(value: object) -> Any:
    """``value`` with every dataclass and named tuple in it as a mapping."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: json_value(item) for name, item in value._asdict().items()}
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value


def gb_per_s(way: str, speed: float | None) -> str:
    """A way by which blocks were moved, and how fast: ``shm 1.25 GB/s``, in 10^9 bytes."""
    return way if speed is None else f"{way} {_short(speed)} GB/s"


def time_line(time: TimeBreakdown) -> str:
    """Where an answer's time went, in one line; parts that did not happen are left out."""
    parts = []
    for name, value in vars(time).items():
        if name.endswith("_s") and value is not None:
            moved = _moved(time) if name == "transfer_s" else ""
            parts.append(f"{name.removesuffix('_s').replace('_', ' ')} {_short(1e3 * value)} ms{moved}")
    return "time: " + ", ".join(parts)


def open_console(*, pipe_width: int, stderr: bool = False, highlight: bool = False) -> Console:
    """A console on standard output or standard error.

    ``pipe_width``: columns when the output is not a terminal; the default of 80 would cut tables off.
    """
    # Imported here: `quartet generate` prints no tables, and rich takes 40 ms of CPU.
    from rich.console import Console

    console = Console(stderr=stderr, highlight=highlight)
    return console if console.is_terminal else Console(stderr=stderr, highlight=highlight, width=pipe_width)


def _moved(time: TimeBreakdown) -> str:
    if not time.transfer_bytes:
        return ""
    return f" ({_short(time.transfer_bytes / 1e6)} MB by {gb_per_s(time.transfer_way or '?', time.transfer_gb_per_s)})"


def _short(value: float) -> str:
    """Three digits, and all before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _failed(message: str) -> typer.Exit:
    complain(message)
    return typer.Exit(1)

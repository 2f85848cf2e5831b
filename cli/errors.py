"""What a failed command says: one line on standard error, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from quartet.errors import ConfigError, ServingError
from quartet.rpc.errors import status_code
from services.topology.launch import LaunchError


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Turn what a command may fail with into its line and exit code 1. Anything else is a bug and keeps its trace."""
    try:
        yield
    except ServingError as error:
        raise _failed(describe(error)) from error
    except (ConfigError, LaunchError) as error:
        raise _failed(str(error)) from error


def describe(error: ServingError) -> str:
    """``STATUS (field): message``, and when to try again."""
    field = f" ({error.field})" if error.field else ""
    retry = "" if error.retry_delay_s is None else f" (try again in {error.retry_delay_s:g} s)"
    return f"{status_code(error).name}{field}: {error.message}{retry}"


def _failed(message: str) -> typer.Exit:
    typer.secho(f"quartet: {message}", fg=typer.colors.RED, err=True)
    return typer.Exit(1)

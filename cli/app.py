"""The ``quartet`` command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from cli.bench.command import bench
from cli.chat import chat
from cli.doctor.command import doctor
from cli.explain import explain
from cli.generate import generate
from cli.replay.command import replay
from cli.traces.command import trace
from cli.up import up
from cli.workers import workers

app = typer.Typer(
    name="quartet",
    help="Disaggregated LLM serving as gRPC microservices.",
    no_args_is_help=True,
    add_completion=False,
    # Locals hold prompts.
    pretty_exceptions_show_locals=False,
)
for command in (up, generate, chat, explain, workers, bench, trace, replay):
    app.command()(command)
app.add_typer(doctor)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"quartet {version('quartet')}")
        raise typer.Exit


@app.callback()
def options(
    is_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Disaggregated LLM serving as gRPC microservices."""


def main() -> None:
    """Run the command line."""
    app()

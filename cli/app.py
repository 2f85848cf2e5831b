"""The ``quartet`` command: the table of its subcommands; each is imported when it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

#: By name: the module whose function of that name it is, and its line in ``quartet --help``, the first of its own help.
#: A test holds that the lines are the same.
_COMMANDS = {
    "up": ("cli.up", "Start a topology on this host: etcd if none answers, workers, router. Ctrl-C ends it all."),
    "init": (
        "cli.init",
        "Write a topology for a model of your own into a folder, and a README that says how to use it.",
    ),
    "secrets": (
        "cli.secrets",
        "Write certificates and keys for the hosts of a topology: a folder for each, to be copied there.",
    ),
    "model": ("cli.model", "Fetch models ahead of their workers, list those on this machine, and check their files."),
    "generate": ("cli.generate", "Continue a text. Tokens are printed as they come."),
    "chat": ("cli.chat", "Talk to a model. Ctrl-C cancels an answer, Ctrl-D leaves."),
    "explain": ("cli.explain", "Show where a prompt would go now, and why; nothing is run."),
    "workers": ("cli.workers", "Show the workers that a router knows."),
    "routers": ("cli.routers", "Show the routers that announce themselves in etcd."),
    "top": (
        "cli.top.command",
        "Show the fleet live: workers, load, rates, alerts; sort and drain by keys. Where this is no terminal: once.",
    ),
    "bench": (
        "cli.bench.command",
        "Put load on a router and measure what its clients see. Ctrl-C ends it and shows what was measured.",
    ),
    "trace": (
        "cli.traces.command",
        "Make a trace in Mooncake's format: sessions whose prompts extend each other, over shared system prompts.",
    ),
    "replay": (
        "cli.replay.command",
        "Replay a trace in virtual time: the router's own policies, index, scheduler and block pool, no network, no"
        " model.",
    ),
    "plan": (
        "cli.plan.command",
        "Find the fewest Prefill and Decode workers for a trace and latency targets, by replays in virtual time.",
    ),
    "grid": (
        "cli.grid",
        "Make the grids of a global router: per cell the cheapest pool that meets its targets.",
    ),
    "doctor": (
        "cli.doctor.command",
        "Check this machine: what Quartet would miss, and what to do. Exit code 1 if anything is wrong.",
    ),
}


def spread_groups(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` as Typer takes it: a parameter that is a dataclass becomes one option for each field.

    So commands share groups of options. What the groups and ``command`` refuse is reported in one line.
    """
    from cli.output import reporting_errors

    parameters = signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in parameters if is_dataclass(each.annotation)}

    @wraps(command)
    def spread(**given: Any) -> None:
        with reporting_errors():
            for name, group in groups.items():
                given[name] = group(**{item.name: given.pop(item.name) for item in fields(group)})
            command(**given)

    options = [
        option for each in parameters for option in (_options(groups[each.name]) if each.name in groups else [each])
    ]
    spread.__signature__ = Signature(options)  # type: ignore[attr-defined]
    spread.__annotations__ = {option.name: option.annotation for option in options}
    return spread


def _options(group: Any) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for item in fields(group):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        default = Parameter.empty if default is MISSING else default
        yield Parameter(item.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[item.name])


# Options whose value may be left out, which Typer does not know.
_OPTIONAL_URLS = ("--otel",)


def _with_values(arguments: Sequence[str]) -> list[str]:
    """``arguments``, in which an option that has no URL behind it has an empty value."""
    return [
        f"{one}=" if one in _OPTIONAL_URLS and "://" not in following else one
        for one, following in zip(arguments, [*arguments, ""][1:], strict=True)
    ]


class _LateCommand(TyperCommand):
    """Stands for a subcommand in ``quartet --help``; becomes it when it is called or asked for its own help."""

    def __init__(self, name: str, module: str, help: str) -> None:
        super().__init__(name, help=help)
        self._module = module

    def load(self) -> Any:
        """The subcommand, with its options. Imports its module."""
        found = getattr(import_module(self._module), str(self.name))
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            found.command(self.name)(spread_groups(function))
        return get_command(found)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the subcommand itself, so that the subcommand runs in it."""
        return self.load().make_context(info_name, _with_values(args), parent=parent, **extra)


class _LateGroup(TyperGroup):
    """All subcommands of ``quartet``, in the order of their table."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: _LateCommand(name, *entry) for name, entry in _COMMANDS.items()}


app = typer.Typer(
    name="quartet",
    cls=_LateGroup,
    help="Disaggregated LLM serving as gRPC microservices.",
    no_args_is_help=True,
    add_completion=False,
    # Locals hold prompts.
    pretty_exceptions_show_locals=False,
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        # Imported here: it takes some 40 ms of CPU, and only --version needs it.
        from importlib.metadata import version

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

"""What ``quartet up --dry-run`` shows: every process that would be started, and what it would be told."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from quartet.config import build
from quartet.discovery.base import Role
from quartet.discovery.create import DiscoveryKind
from router.config import RouterConfig
from services.topology.topology import ProcessPlan, Topology, plan_router, plan_workers, to_settings
from services.workers.config import WorkerConfig

# Not a terminal: whoever reads it wants what fits a page.
_PIPE_WIDTH = 100
# Each process has its own, which stands in other columns.
_SHOWN_ELSEWHERE = ("worker_id", "engine.kind", "server.address")
_NO_MODEL = "-"
# What is shown may be sent to others. Rather a harmless one is hidden than a secret shown.
_SECRET_WORDS = ("TOKEN", "SECRET", "KEY", "PASSWORD")
_HIDDEN = "***"


def print_plan(topology: Topology, *, num_cores: int) -> None:
    """Print the processes of ``topology`` on standard output. Raises ``ConfigError``, as starting them would."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH, highlight=False)
    console.print(plan_table(topology, num_cores=num_cores))


def plan_table(topology: Topology, *, num_cores: int) -> Table:
    """A row for each process, with what of its settings differs from their defaults."""
    table = Table(title=f"{topology.namespace}: nothing was started", title_justify="left", show_lines=True)
    for name in ("process", "role", "engine", "GPUs", "port"):
        table.add_column(name, no_wrap=True)
    table.add_column("settings that differ from defaults, environment", overflow="fold")
    if topology.discovery.kind is DiscoveryKind.ETCD:
        endpoints = ", ".join(topology.discovery.etcd.endpoints)
        # Whether one answers is not asked.
        table.add_row("etcd", "etcd", "-", "-", "-", f"the one at {endpoints}, or one of its own")
    for plan in [*plan_workers(topology, num_cores=num_cores), plan_router(topology)]:
        table.add_row(*_row(plan))
    return table


def _row(plan: ProcessPlan) -> Sequence[str]:
    is_router = plan.role is Role.ROUTER
    config = build(RouterConfig if is_router else WorkerConfig, plan.settings, plan.name)
    defaults = RouterConfig() if is_router else WorkerConfig(model_path=_NO_MODEL)
    settings, usual = dict(_flat(to_settings(config))), dict(_flat(to_settings(defaults)))
    address = str(settings["server.address"])
    port = address.rpartition(":")[2]
    lines = [
        f"{name}: {value}"
        for name, value in settings.items()
        if name not in _SHOWN_ELSEWHERE and (name not in usual or usual[name] != value)
    ]
    lines += [f"{name}={_shown(name, value)}" for name, value in plan.environment.items()]
    return (
        plan.name,
        str(plan.role),
        str(settings.get("engine.kind", "-")),
        " ".join(map(str, plan.gpus)) or "-",
        "free" if port == "0" else port,
        "\n".join(lines),
    )


def _shown(name: str, value: str) -> str:
    is_secret = any(word in name.upper() for word in _SECRET_WORDS)
    return _HIDDEN if is_secret else shlex.quote(value)


def _flat(settings: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Leaves by dotted name; an empty mapping is a leaf."""
    if isinstance(settings, Mapping) and settings:
        for name, value in settings.items():
            yield from _flat(value, f"{path}.{name}" if path else name)
    else:
        yield path, settings

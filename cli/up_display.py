"""What ``quartet up`` shows: progress and logs, lines to paste, and the table of ``--dry-run``."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.options import DEFAULT_ROUTER
from cli.output import open_console
from quartet.config import build
from quartet.discovery.base import Role
from quartet.discovery.create import DiscoveryKind
from quartet.rpc.channels import TlsConfig
from quartet.shipped import ROOT
from router.config import RouterConfig
from router.global_router.config import GlobalRouterConfig, without_units
from services.topology.child import Child
from services.topology.launch import find_etcd, find_grpcurl
from services.topology.topology import ProcessPlan, Topology, plan_routers, plan_workers, to_settings
from services.workers.config import WorkerConfig

if TYPE_CHECKING:
    from services.topology.certificates import RunCertificates

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_green")
_MIN_NAME_WIDTH = 9
_PROMPT = "Once upon a time"
_MAX_TOKENS = 32
_PICTURE = ROOT / "models/tiny/pictures/shapes.jpg"
_QUESTION = "Describe the picture."
# Columns of the plan where the output is no terminal: they fit a page.
_PIPE_WIDTH = 100
# Settings that every process has of its own; the plan has columns for them.
_SHOWN_ELSEWHERE = ("worker_id", "engine.kind", "server.address")
_NO_MODEL = "-"
# Users send the plan to others: rather hide a harmless variable than show a secret.
_SECRET_WORDS = ("TOKEN", "SECRET", "KEY", "PASSWORD")
_HIDDEN = "***"


class LaunchDisplay:
    """A ``LaunchObserver`` for a terminal or a file: logs go to standard error, lines to paste to standard output.

    Attributes:
        last_progress: the last message of ``progress``.
    """

    def __init__(self) -> None:
        self.last_progress = ""
        self._log = Console(stderr=True, highlight=False)
        self._colours: dict[str, str] = {}

    def log_line(self, process: str, line: str) -> None:
        """Show a line of a process behind its name."""
        colour = self._colours.setdefault(process, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._show(process, colour, line)

    def progress(self, message: str) -> None:
        """Show what ``up`` itself is doing."""
        self.last_progress = message
        self._show("up", "bold", message)

    def died(self, child: Child) -> None:
        """Show that a process ended by itself, and why. Its last lines have been shown already."""
        self._show("up", "bold red", child.describe_end().splitlines()[0])

    def ready(
        self,
        router_address: str,
        *,
        certificates: RunCertificates | None = None,
        takes_images: bool = False,
        http_address: str = "",
        http_keys_file: Path | None = None,
    ) -> None:
        """Print ``ready`` and lines to paste into another terminal; with ``certificates``, as their operator."""
        operator = None if certificates is None else certificates.operator
        curl = curl_line(http_address, http_keys_file) if http_address else ""
        page = page_line(http_address, http_keys_file) if http_address else ""
        search_path = os.environ.get("PATH", "")
        lines = paste_lines(router_address, search_path, operator, takes_images=takes_images, curl=curl)
        print("\n".join(["", "ready", *lines, *([page] if page else [])]), flush=True)
        if certificates is not None:
            client = certificates.client
            self.progress(f"who may only ask for answers: {client.cert_file} and {client.key_file.name}")
        if find_grpcurl() is None:
            self.progress("no grpcurl here: with any Go that can download modules, `make tools` in a checkout gets it")

    def share_ready(self, router_address: str) -> None:
        """Print ``ready`` and lines to paste, for one of several hosts. The identity is for who pastes them."""
        lines = [
            f"quartet generate {shlex.quote(_PROMPT)} --max-tokens {_MAX_TOKENS} --router {router_address}",
            f"quartet workers --router {router_address}",
        ]
        print("\n".join(["", "ready", *lines]), flush=True)

    def _show(self, name: str, style: str, line: str) -> None:
        prefix = Text(f"{name:<{_MIN_NAME_WIDTH}} | ", style=style)
        # The terminal may have been closed; the processes must be ended all the same.
        with contextlib.suppress(OSError):
            # A wrapped line looks like two, and a search does not find it.
            self._log.print(prefix + Text(line), soft_wrap=True)


def paste_lines(
    router_address: str,
    search_path: str,
    tls: TlsConfig | None = None,
    *,
    takes_images: bool = False,
    curl: str = "",
) -> list[str]:
    """Shell lines that use the router: calls, ``curl`` among them, and before them what they need of the environment.

    That is ``export PATH`` if ``search_path`` lacks a program, and the files of ``tls``.
    """
    router = "" if router_address == DEFAULT_ROUTER else f" --router {router_address}"
    grpcurl = find_grpcurl()
    programs = [Path(sys.executable).with_name("quartet"), *([grpcurl] if grpcurl else [])]
    missing = [program.parent for program in programs if shutil.which(program.name, path=search_path) is None]
    directories = ":".join(shlex.quote(str(directory)) for directory in missing)
    lines = [f"export PATH={directories}:$PATH"] if missing else []
    lines += [] if tls is None else [_export_tls(tls)]
    has_picture = takes_images and _PICTURE.is_file()
    if grpcurl is not None:
        request = f'{{"start":{{"text":"{_PROMPT}","sampling":{{"max_tokens":{_MAX_TOKENS}}}}}}}'
        lines.append(_grpcurl_line(shlex.quote(request), router_address, tls))
        if has_picture:
            lines.append(_grpcurl_line(_picture_request(), router_address, tls))
    if curl:
        lines.append(curl)
    lines.append(f"quartet generate {shlex.quote(_PROMPT)} --max-tokens {_MAX_TOKENS}{router}")
    if has_picture:
        lines.append(
            f"quartet generate --chat --image {_shown_picture()} {shlex.quote(_QUESTION)} --temperature 0{router}"
        )
    lines.append(f"quartet workers{router}")
    return lines


def curl_line(http_address: str, keys_file: Path | None = None) -> str:
    """A shell line that asks for a chat over HTTP; with ``keys_file``, by TLS and the first key in it."""
    request = f'{{"messages":[{{"role":"user","content":"{_PROMPT}"}}],"max_tokens":{_MAX_TOKENS}}}'
    url = f"http{'' if keys_file is None else 's'}://{http_address}/v1/chat/completions"
    security = ""
    if keys_file is not None:
        key = f"$(cut -d' ' -f2 {shlex.quote(str(keys_file))})"
        security = f'--cacert "$QUARTET_TLS_CA" -H "Authorization: Bearer {key}" '
    return f"curl {security}{url} -d {shlex.quote(request)}"


def page_line(http_address: str, keys_file: Path | None = None) -> str:
    """A line that says where the router's page is; with ``keys_file``, also that it asks for a key of it."""
    if keys_file is None:
        return f"# look at it: http://{http_address}/"
    return f"# look at it: https://{http_address}/ (the page asks for the key in {keys_file})"


def print_names(topologies: Mapping[str, Path]) -> None:
    """Print the names of ``topologies`` with what each file says of itself first, and what to do with a name."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, file in topologies.items():
        table.add_row(name, _first_sentence(file))
    console = open_console(pipe_width=_PIPE_WIDTH)
    console.print(table)
    console.print("\nquartet up NAME starts one, with --dry-run shows it; quartet init writes one for your own model")


def print_plan(topology: Topology, *, num_cores: int) -> None:
    """Print the processes of ``topology`` on standard output. Raises ``ConfigError``, as starting them would."""
    open_console(pipe_width=_PIPE_WIDTH).print(plan_table(topology, num_cores=num_cores))


def plan_table(topology: Topology, *, num_cores: int) -> Table:
    """One row a process, with those of its settings that differ from their defaults."""
    table = Table(title=f"{topology.namespace}: nothing was started", title_justify="left", show_lines=True)
    for name in ("process", "role", "engine", "GPUs", "port"):
        table.add_column(name, no_wrap=True)
    table.add_column("settings that differ from defaults, environment", overflow="fold")
    if topology.hosts:
        table.title = f"{topology.namespace}, host {topology.host}: nothing was started"
    if topology.discovery.kind is DiscoveryKind.ETCD:
        table.add_row("etcd", "etcd", "-", "-", "-", _where_etcd_is(topology))
    for plan in [
        *plan_workers(topology, num_cores=num_cores),
        *plan_routers(topology),
    ]:
        table.add_row(*_row(plan))
    if topology.tls:
        table.caption = "tls: each process gets a certificate, and all of them one key for events"
    return table


def _first_sentence(file: Path) -> str:
    """Of the comment that ``file`` begins with."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    text = " ".join(line.removeprefix("#").strip() for line in lines)
    return text.partition(". ")[0].rstrip(".")


def _export_tls(tls: TlsConfig) -> str:
    files = {"CA": tls.ca_file, "CERT": tls.cert_file, "KEY": tls.key_file}
    return "export " + " ".join(f"QUARTET_TLS_{name}={shlex.quote(str(file))}" for name, file in files.items())


def _grpcurl_line(request: str, router_address: str, tls: TlsConfig | None) -> str:
    # The shell puts in what `_export_tls` has set.
    shown = '-cacert "$QUARTET_TLS_CA" -cert "$QUARTET_TLS_CERT" -key "$QUARTET_TLS_KEY"'
    security = "-plaintext" if tls is None else shown
    return f"grpcurl {security} -d {request} {router_address} quartet.v1.RouterService/Generate"


def _picture_request() -> str:
    """A shell word: JSON that holds the output of ``base64`` on the picture's file."""
    before = '{"start":{"chat":{"messages":[{"role":"user","parts":[{"media":{"data":"'
    after = f'"}}}},{{"text":"{_QUESTION}"}}]}}]}},"sampling":{{"temperature":0}}}}}}'
    return f"{shlex.quote(before)}$(base64 -w0 {_shown_picture()}){shlex.quote(after)}"


def _shown_picture() -> str:
    is_below = _PICTURE.is_relative_to(Path.cwd())
    return shlex.quote(str(_PICTURE.relative_to(Path.cwd()) if is_below else _PICTURE))


def _where_etcd_is(topology: Topology) -> str:
    etcd = topology.discovery.etcd
    if topology.hosts:
        return f"the one at {', '.join(etcd.endpoints)}"
    has_binary = find_etcd() is not None
    if topology.tls and etcd.tls is None:
        return "one of its own, with certificates of this run" if has_binary else "none, but files"
    # A dry run does not ask whether one answers.
    return f"the one at {', '.join(etcd.endpoints)}, or {'one of its own' if has_binary else 'none, but files'}"


def _row(plan: ProcessPlan) -> Sequence[str]:
    config, defaults = _config(plan)
    settings, usual = dict(_flat(to_settings(config))), dict(_flat(to_settings(defaults)))
    section = f"{plan.section}." if plan.section else ""
    address = str(settings[f"{section}server.address"])
    port = address.rpartition(":")[2]
    lines = [
        f"{name}: {value}"
        for name, value in settings.items()
        if name.removeprefix(section) not in _SHOWN_ELSEWHERE and (name not in usual or usual[name] != value)
    ]
    lines += [f"limits.{name}: {value}" for name, value in to_settings(plan.limits).items() if value is not None]
    lines += [f"{name}={_shown(name, value)}" for name, value in plan.environment.items()]
    return (
        plan.name,
        str(plan.role),
        str(settings.get("engine.kind", "-")),
        " ".join(map(str, plan.gpus)) or "-",
        "free" if port == "0" else port,
        "\n".join(lines),
    )


def _config(plan: ProcessPlan) -> tuple[object, object]:
    """The configuration of a process, and that of one with all defaults."""
    if plan.role is not Role.ROUTER:
        return build(WorkerConfig, plan.settings, plan.name), WorkerConfig(model_path=_NO_MODEL)
    if not plan.section:
        return build(RouterConfig, plan.settings, plan.name), RouterConfig()
    return build(GlobalRouterConfig, without_units(plan.settings), plan.name), {"router": to_settings(RouterConfig())}


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

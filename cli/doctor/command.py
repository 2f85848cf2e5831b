"""``quartet doctor`` and ``quartet doctor trtllm``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cli.doctor.checkup import Check, check_up
from cli.doctor.display import show
from cli.doctor.etcd import EtcdCheck
from cli.doctor.finding import Finding, Verdict, worst
from cli.doctor.gpus import check_gpus
from cli.doctor.limits import check_limits
from cli.doctor.memory import check_memory, check_shared_memory
from cli.doctor.packages import check_packages
from cli.doctor.ports import PortsCheck
from cli.doctor.trtllm import check_trtllm
from cli.errors import reporting_errors
from quartet.discovery.etcd_client import EtcdConfig
from quartet.errors import ConfigError

_TIMEOUT_S = 45.0
_TRTLLM_TIMEOUT_S = 180.0
_TLS = "TLS of etcd"

JsonOption = Annotated[bool, typer.Option("--json", help="The same, for programs.")]

doctor = typer.Typer(name="doctor", no_args_is_help=False)


@doctor.callback(invoke_without_command=True)
def machine(
    context: typer.Context,
    *,
    etcd: Annotated[
        str | None,
        typer.Option("--etcd", metavar="HOST:PORT,...", envvar="ETCD_ENDPOINTS", help="The etcd that you mean to use."),
    ] = None,
    etcd_ca: Annotated[
        Path | None, typer.Option("--etcd-ca", help="Certificates that its own must lead to.", rich_help_panel=_TLS)
    ] = None,
    etcd_cert: Annotated[
        Path | None, typer.Option("--etcd-cert", help="Your own certificate chain.", rich_help_panel=_TLS)
    ] = None,
    etcd_key: Annotated[Path | None, typer.Option("--etcd-key", help="Its private key.", rich_help_panel=_TLS)] = None,
    as_json: JsonOption = False,
) -> None:
    """Look at this machine: what Quartet would miss, and what to do. Exit code 1 if anything is wrong."""
    if context.invoked_subcommand is not None:
        return
    with reporting_errors():
        check = _etcd_check(etcd, etcd_ca, etcd_cert, etcd_key)
        _report(asyncio.run(_look(check)), as_json=as_json)


@doctor.command()
def trtllm(
    *,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Time for its import and the look at it.")
    ] = _TRTLLM_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Compare the installed TensorRT-LLM with what Quartet relies on; loads no model."""
    with _progress() as tell:
        tell("starting")
        findings = asyncio.run(check_trtllm(timeout_s=timeout_s, on_progress=tell))
    _report(findings, as_json=as_json)


async def _look(etcd: EtcdCheck) -> list[Finding]:
    checks: dict[str, Check] = {
        "packages": check_packages,
        "etcd": etcd,
        "ports": PortsCheck(),
        "GPUs": check_gpus,
        "CPUs and limits": check_limits,
        "memory": check_memory,
        "shared memory": check_shared_memory,
    }
    return await check_up(checks, timeout_s=_TIMEOUT_S)


def _etcd_check(endpoints: str | None, ca: Path | None, cert: Path | None, key: Path | None) -> EtcdCheck:
    named = tuple(endpoint for part in (endpoints or "").split(",") if (endpoint := part.strip()))
    for option, file in {"--etcd-ca": ca, "--etcd-cert": cert, "--etcd-key": key}.items():
        if file is not None and not file.is_file():
            raise ConfigError(f"{option}: there is no file {file}")
    default = EtcdConfig().endpoints
    try:
        config = EtcdConfig(endpoints=named or default, ca_file=ca, cert_file=cert, key_file=key)
    except ValueError as error:
        raise ConfigError(f"--etcd-cert, --etcd-key: {error}") from error
    return EtcdCheck(config, is_chosen=bool(named))


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show on standard error what goes on; standard output is the report's."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: console.print(f"quartet doctor: {text}", markup=False)
        return
    with console.status("") as status:
        yield status.update


def _report(findings: list[Finding], *, as_json: bool) -> None:
    show(findings, as_json=as_json)
    if worst(findings) is Verdict.WRONG:
        raise typer.Exit(1)

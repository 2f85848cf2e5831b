"""``quartet doctor`` and its commands ``gpu`` and ``trtllm``: run checks, and show what they found."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.app import spread_groups
from cli.doctor.finding import Check, Finding, Verdict, check_up, worst, wrong
from cli.doctor.gpus import check_gpus
from cli.doctor.hand_offs import check_hand_offs
from cli.doctor.live import LivePlan, about_this, check_live
from cli.doctor.machine import check_limits, check_memory, check_shared_memory
from cli.doctor.network import EtcdCheck, PortsCheck
from cli.doctor.packages import check_packages
from cli.doctor.trtllm import check_trtllm
from cli.options import EtcdAccess, addresses_in
from cli.output import reporting_errors
from quartet.discovery.etcd_client import EtcdConfig
from quartet.errors import ConfigError

_TIMEOUT_S = 45.0
_TRTLLM_TIMEOUT_S = 180.0
_GPU_TIMEOUT_S = 240.0
# A model may have to be fetched, and engines warm up for minutes.
_LIVE_START_TIMEOUT_S = 900.0
_LIVE = "With --live"
_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.WRONG: "bold red"}
_CHECK_WIDTH = 16

JsonOption = Annotated[bool, typer.Option("--json", help="The same, for programs.")]

doctor = typer.Typer(name="doctor", no_args_is_help=False, add_completion=False)


@doctor.callback(invoke_without_command=True)
@spread_groups
def machine(
    context: typer.Context,
    *,
    etcd: Annotated[
        list[str] | None,
        typer.Option(
            "--etcd",
            metavar="HOST:PORT,...",
            envvar=["QUARTET_ETCD", "ETCD_ENDPOINTS"],
            help="The etcd that you mean to use.",
            rich_help_panel="Discovery",
        ),
    ] = None,
    access: EtcdAccess,
    as_json: JsonOption = False,
) -> None:
    """Check this machine: what Quartet would miss, and what to do. Exit code 1 if anything is wrong."""
    if context.invoked_subcommand is not None:
        return
    with reporting_errors():
        chosen = addresses_in(etcd or [])
        check = EtcdCheck(access.config(chosen or EtcdConfig().endpoints), is_chosen=bool(chosen))
        _report(asyncio.run(_check_all(check)), as_json=as_json)


@doctor.command()
def gpu(
    *,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Time for all GPUs and pairs of them.")
    ] = _GPU_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Try what hand-offs need of the GPUs here, between processes, and measure it. Exit code 1 if it is not there."""
    with _progress() as on_progress:
        findings = asyncio.run(check_hand_offs(timeout_s=timeout_s, on_progress=on_progress))
    _report(findings, as_json=as_json)


@doctor.command()
def trtllm(
    *,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Time for its import and the look at it.")
    ] = _TRTLLM_TIMEOUT_S,
    is_live: Annotated[
        bool, typer.Option("--live", help="Serve a model in each way, and compare the answers; takes minutes.")
    ] = False,
    model: Annotated[
        Path, typer.Option("--model", help="A folder, or a repository that is fetched.", rich_help_panel=_LIVE)
    ] = Path("Qwen/Qwen3-0.6B"),
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus",
            metavar="GPUS",
            help="0 or 0,1; workers share them if they are too few. Empty: there are none.",
            rich_help_panel=_LIVE,
        ),
    ] = "0",
    start_timeout_s: Annotated[
        float,
        typer.Option("--start-timeout", metavar="SECONDS", min=1, help="Until each way serves.", rich_help_panel=_LIVE),
    ] = _LIVE_START_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Compare the installed TensorRT-LLM with what Quartet relies on; loads a model with --live only."""
    with reporting_errors(), _progress() as on_progress:
        plan = LivePlan(model=model, gpus=_gpus(gpus), start_timeout_s=start_timeout_s) if is_live else None
        on_progress("starting")
        findings = asyncio.run(_check_trtllm(plan, timeout_s, on_progress))
    _report(findings, as_json=as_json)


def show(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print ``findings`` and how many of them are bad, as a table, as lines or as JSON."""
    if as_json:
        report = {"verdict": worst(findings), "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        print("\n".join([*map(_line, findings), _sum(findings).plain]))
        return
    table = Table.grid(padding=(0, 2))
    for name in ("verdict", "check"):
        table.add_column(name, no_wrap=True)
    table.add_column("message", overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), Text(finding.check), _description(finding))
    console.print(table)
    console.print(_sum(findings))


async def _check_trtllm(plan: LivePlan | None, timeout_s: float, on_progress: Callable[[str], None]) -> list[Finding]:
    findings = await check_trtllm(timeout_s=timeout_s, on_progress=on_progress)
    if plan is None:
        return findings
    if worst(findings) is Verdict.WRONG:
        return [*findings, wrong("live", "not tried", "first see to what is wrong with the package")]
    return [*about_this(), *findings, *await check_live(plan, on_progress)]


def _gpus(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--gpus: must be numbers of GPUs, as in 0,1, not {text!r}")
    return tuple(map(int, parts))


async def _check_all(etcd: EtcdCheck) -> list[Finding]:
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


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show progress on standard error; standard output is for the report."""
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


def _line(finding: Finding) -> str:
    """A finding for a file or a pipe, where lines are not wrapped."""
    advice = f"\n{'':<9}{'':<{_CHECK_WIDTH}} -> {finding.advice}" if finding.advice else ""
    return f"{finding.verdict:<9}{finding.check:<{_CHECK_WIDTH}} {finding.message}{advice}"


def _description(finding: Finding) -> Text:
    return Text(finding.message + (f"\n-> {finding.advice}" if finding.advice else ""))


def _sum(findings: Sequence[Finding]) -> Text:
    num_wrong, num_warnings = (
        sum(finding.verdict is verdict for finding in findings) for verdict in (Verdict.WRONG, Verdict.WARNING)
    )
    warnings = f"{num_warnings} warning{'' if num_warnings == 1 else 's'}"
    return Text(f"{num_wrong or 'nothing'} wrong, {warnings}", style=_STYLES[worst(findings)])

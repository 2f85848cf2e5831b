"""Findings for people, readable without colour, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.doctor.finding import Finding, Verdict, worst

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.WRONG: "bold red"}
_CHECK_WIDTH = 16


def show(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print ``findings`` and what they come to."""
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
        table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), Text(finding.check), _told(finding))
    console.print(table)
    console.print(_sum(findings))


def _line(finding: Finding) -> str:
    """For a file or a pipe: whoever reads it wants whole lines."""
    advice = f"\n{'':<9}{'':<{_CHECK_WIDTH}} -> {finding.advice}" if finding.advice else ""
    return f"{finding.verdict:<9}{finding.check:<{_CHECK_WIDTH}} {finding.message}{advice}"


def _told(finding: Finding) -> Text:
    return Text(finding.message + (f"\n-> {finding.advice}" if finding.advice else ""))


def _sum(findings: Sequence[Finding]) -> Text:
    num_wrong, num_warnings = (
        sum(finding.verdict is verdict for finding in findings) for verdict in (Verdict.WRONG, Verdict.WARNING)
    )
    warnings = f"{num_warnings} warning{'' if num_warnings == 1 else 's'}"
    return Text(f"{num_wrong or 'nothing'} wrong, {warnings}", style=_STYLES[worst(findings)])

"""What a replay shows: how far it is, and the policies side by side."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cli.replay.results import PolicyResult, Spread


def progress_bar(console: Console) -> Progress:
    """Counts requests that have ended, by policy."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def print_results(console: Console, title: str, results: Mapping[str, PolicyResult]) -> None:
    """One row a policy."""
    table = Table(title=title, title_justify="left", caption="milliseconds: mean / p50 / p90 / p99")
    table.add_column("policy")
    for name in (
        *("TTFT", "ITL", "E2E", "reuse", "imbalance"),
        *("tok/s", "good/s", "completed", "refused", "CPU s"),
    ):
        table.add_column(name, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            _spread(result.ttft_ms),
            _spread(result.itl_ms, digits=2),
            _spread(result.e2e_ms),
            f"{result.reuse_ratio:.3f}",
            f"{result.imbalance:.2f}",
            f"{result.output_tokens_per_s:.0f}",
            f"{result.goodput_per_s:.2f}",
            str(result.requests_completed),
            str(result.requests_refused),
            f"{result.cpu_s:.1f}",
        )
    console.print(table)


def _spread(spread: Spread, digits: int = 0) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99))

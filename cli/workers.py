"""``quartet workers``: shows the workers that a router knows, and their load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from cli.options import RouterOptions
from cli.output import gb_per_s, open_console
from quartet.client import WorkerState, WorkerStatus

# Wide enough for whole lines where the output is no terminal.
_PIPE_WIDTH = 280
_STATE_STYLES = {
    WorkerState.READY: "green",
    WorkerState.JOINING: "yellow",
    WorkerState.DRAINING: "yellow",
    WorkerState.SUSPECT: "red",
    WorkerState.INCOMPATIBLE: "red",
}


def workers(
    *,
    router: RouterOptions,
    model: Annotated[str, typer.Option("--model", help="Only those of this model.")] = "",
    is_watching: Annotated[bool, typer.Option("--watch", help="Go on showing them; Ctrl-C leaves.")] = False,
) -> None:
    """Show the workers that a router knows."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(router, model, is_watching=is_watching))


async def _run(router: RouterOptions, model: str, *, is_watching: bool) -> None:
    console = open_console(pipe_width=_PIPE_WIDTH, highlight=True)
    async with await router.client() as client:
        if not is_watching:
            console.print(worker_table(await client.list_workers(model)))
            return
        with Live(console=console, auto_refresh=False) as live:
            async for workers in client.watch_workers(model):
                live.update(worker_table(workers), refresh=True)


def worker_table(workers: Sequence[WorkerStatus]) -> Table:
    """One row a worker. Counts are sums over data-parallel ranks.

    ``running``: requests that compute, of those that can at a time (``max_batch_size``). ``step tokens``: what one
    step of a rank computes at most (``max_num_tokens``).
    ``ways``: by which its blocks can be pulled. ``pulled``: by which it has pulled blocks and embeddings itself, the
    way used last first, and how fast one pull was, over all since the worker started.
    """
    table = Table()
    for name in ("worker", "role", "model", "address", "ways", "pulled", "state"):
        table.add_column(name, no_wrap=name == "worker")
    for name in ("running", "waiting", "step tokens", "blocks used", "held", "cached", "free", "heartbeat"):
        table.add_column(name, justify="right")
    for worker in workers:
        table.add_row(*_cells(worker))
    return table


def _cells(worker: WorkerStatus) -> list[str]:
    record = worker.record
    style, state = _STATE_STYLES[worker.state], str(worker.state)
    if worker.state is WorkerState.INCOMPATIBLE:
        state += f" ({escape(record.contract_version)})"
    ways = ", ".join(record.transfer_ways) or "-"
    cells = [
        record.worker_id,
        record.role,
        escape(record.model_name),
        record.grpc_address,
        ways,
        _pulled(worker),
        f"[{style}]{state}[/]",
    ]
    if worker.load is None or worker.load_age_s is None:
        return [*cells, *["-"] * 8]
    ranks = worker.load.ranks
    max_running = sum(rank.max_running for rank in ranks)
    # Neither is known before the engine says it; then it is 0.
    running = f"{sum(rank.num_running for rank in ranks)}{f' of {max_running}' if max_running else ''}"
    step_tokens = max((rank.max_step_tokens for rank in ranks), default=0) or "-"
    counts = [
        running,
        sum(rank.num_waiting for rank in ranks),
        step_tokens,
        sum(rank.num_in_use_blocks for rank in ranks),
        sum(rank.num_held_blocks for rank in ranks),
        sum(rank.num_cached_blocks for rank in ranks),
        sum(rank.num_free_blocks for rank in ranks),
    ]
    return [*cells, *map(str, counts), f"{worker.load_age_s:.1f} s ago"]


def _pulled(worker: WorkerStatus) -> str:
    totals = () if worker.load is None else worker.load.transfers
    return ", ".join(gb_per_s(total.way, total.gb_per_s) for total in reversed(totals)) or "-"

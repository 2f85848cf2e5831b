"""Draws the screen of ``quartet top`` as lines that fit a width, and a height if one is given; pure.

Nothing is told by colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from cli.answer import one_line
from cli.top.alerts import Alert, find_alerts, find_unknown
from cli.top.fleet import GONE, KEPT_S, STATES, Figures, Fleet, WorkerRow, milliseconds, short
from cli.top.view import ORDERS, ROLES, View
from quartet.client import WorkerState

KEYS = "s sort  r reverse  f role  ↑↓ select  d drain  ? help  q quit"
HELP = (
    ("s, →", "sort by the next column"),
    ("S, ←", "sort by the column before"),
    ("r", "reverse the order"),
    ("f", "show one role: encode, prefill, decode, all"),
    ("j, k, ↓, ↑", "select a worker"),
    ("d, then y", "drain the selected worker: it takes nothing new and leaves the fleet"),
    ("?, h", "this help; any key leaves it"),
    ("q, Ctrl-C", "quit; Ctrl-Z pauses"),
    ("blocks", "█ in use  ▓ held for hand-offs  ░ cached  · free"),
    ("figures", "of this router alone: docs/observability.md"),
)

_MIN_CARD_WIDTH = 17
_BAR_WIDTH = 10
_SPARKS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "-"
# So many lines of the screen are for workers at least, if it must leave other things out for them.
_MIN_ROWS = 4
_STYLES = {
    WorkerState.READY: "green",
    WorkerState.JOINING: "yellow",
    WorkerState.DRAINING: "yellow",
    WorkerState.SUSPECT: "bold red",
    WorkerState.INCOMPATIBLE: "bold red",
    GONE: "red",
}


@dataclass(frozen=True)
class _Card:
    """``floor``: what the top of the line is at least. ``ceiling``: what it is; 0: the largest value."""

    name: str
    unit: str
    read: Callable[[Figures], float | None]
    show: Callable[[float], str] = short
    floor: float = 0.0
    ceiling: float = 0.0


_CARDS = (
    _Card("Requests", "/s", lambda figures: figures.requests_per_s),
    _Card("Tokens", "/s", lambda figures: figures.tokens_per_s),
    _Card("First token", "p50", lambda figures: figures.ttft_p50_s, milliseconds),
    _Card("Queue", "waiting", lambda figures: figures.num_queued, floor=4.0),
    _Card("Cache hits", "of prompts", lambda figures: figures.cached_share, lambda share: f"{share:.0%}", ceiling=1.0),
)


@dataclass(frozen=True)
class _Column:
    """``rank``: columns of higher ones are left out first where the terminal is narrow. ``order``: sorts by it."""

    title: str
    rank: int
    cell: Callable[[WorkerRow], Text]
    order: str = ""
    is_number: bool = False


def _running(row: WorkerRow) -> str:
    return f"{row.num_running} of {row.max_running}" if row.max_running else str(row.num_running)


def _known(value: float | None) -> str:
    return _UNKNOWN if value is None else short(value)


def _blocks(row: WorkerRow) -> Text:
    if not row.num_blocks:
        return Text(_UNKNOWN)
    bar, end = Text(), 0
    drawn = 0
    for num, char, style in (
        (row.num_in_use_blocks, "█", "blue"),
        (row.num_held_blocks, "▓", "magenta"),
        (row.num_cached_blocks, "░", "cyan"),
        (row.num_blocks, "·", "dim"),
    ):
        end = min(row.num_blocks, end + num)
        size = round(_BAR_WIDTH * end / row.num_blocks) - drawn
        bar.append(char * size, style)
        drawn += size
    return bar.append(f" {row.used_share:4.0%}")


_COLUMNS = (
    _Column("WORKER", 0, lambda row: Text(row.worker_id), "worker"),
    _Column("ROLE", 5, lambda row: Text(row.role), "role"),
    _Column("STATE", 1, lambda row: Text(STATES[row.state], _STYLES[row.state]), "state"),
    _Column("RUNNING", 2, lambda row: Text(_running(row)), "running", is_number=True),
    _Column("WAITING", 3, lambda row: Text(short(row.num_waiting)), "waiting", is_number=True),
    _Column("BLOCKS", 4, _blocks, "blocks"),
    _Column("TOKENS", 6, lambda row: Text(short(row.num_queued_tokens)), "tokens", is_number=True),
    _Column("CACHED", 7, lambda row: Text(short(row.num_cached_blocks)), is_number=True),
    _Column("STEPS/S", 8, lambda row: Text(_known(row.steps_per_s)), "steps/s", is_number=True),
    _Column("MODEL", 9, lambda row: Text(row.model)),
    _Column("ADDRESS", 10, lambda row: Text(row.address)),
)


def draw(
    fleet: Fleet, view: View, *, now_s: float, width: int, height: int | None = None, problem: str = ""
) -> list[Text]:
    """The lines of the screen, none wider than ``width``.

    ``height``: lines that there are; ``None``: as many as are needed, without keys and selection, for a page.
    ``problem``: why there is no contact with a router; empty: there is.
    """
    rows = fleet.rows(now_s)
    head = [_title(fleet, rows, problem), Text()]
    cards = _cards(fleet, width) if height is not None else _without_sparks(_cards(fleet, width))
    alerts = [_alert(alert) for alert in find_alerts(fleet, now_s)] or [_quiet(fleet, now_s)]
    if height is None:
        alerts += _not_known(fleet, now_s)
    foot = [] if height is None else [Text(), _foot(view)]
    if height is not None:
        room = height - len(head) - len(foot) - _MIN_ROWS - 3
        alerts = alerts[: max(1, room - len(cards))]
        cards = cards if len(cards) + len(alerts) <= room else _without_sparks(cards)
        cards = cards if len(cards) + len(alerts) <= room else []
    top = [*head, *cards, *([Text()] if cards else []), *alerts, Text()]
    space = None if height is None else max(1, height - len(top) - len(foot))
    middle = _help() if view.shows_help else _table(view, rows, width, space)
    if space is not None:
        middle = middle[:space] + [Text()] * (space - len(middle))
    body = [*top, *middle]
    lines = [*body[: None if height is None else max(0, height - len(foot))], *foot]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _title(fleet: Fleet, rows: Sequence[WorkerRow], problem: str) -> Text:
    if problem:
        return Text(f"no contact: {one_line(problem)}; trying again", "bold red")
    num_ready = sum(row.state == WorkerState.READY for row in rows)
    parts = [f"{num_ready} of {len(rows)} workers ready"]
    if fleet.totals.points:
        totals = fleet.totals.points[-1][1]
        parts = [totals.router_id, totals.policy, *parts, f"{short(totals.num_running)} requests here"]
    return Text.assemble(("quartet top  ", "bold"), "  ".join(parts))


def _quiet(fleet: Fleet, now_s: float) -> Text:
    if fleet.began_s is None or not find_unknown(fleet, now_s):
        return Text("no alerts", "green")
    return Text(f"no alerts within {now_s - fleet.began_s:.0f} s")


def _not_known(fleet: Fleet, now_s: float) -> list[Text]:
    unknown = find_unknown(fleet, now_s)
    return [Text(f"too short to know: {', '.join(unknown)}")] if unknown else []


def _cards(fleet: Fleet, width: int) -> list[Text]:
    """Name, value and course of each figure, side by side, in as many rows as the width asks for."""
    num = min(len(_CARDS), max(1, width // _MIN_CARD_WIDTH))
    card_width = width // num
    lines = []
    for begin in range(0, len(_CARDS), num):
        cards = _CARDS[begin : begin + num]
        lines += [
            _side_by_side([Text(card.name, "dim") for card in cards], card_width),
            _side_by_side([_value(card, fleet.figures()) for card in cards], card_width),
            _side_by_side([Text(_spark(fleet, card, card_width - 2), "cyan") for card in cards], card_width),
        ]
    return lines


def _side_by_side(cells: Sequence[Text], width: int) -> Text:
    line = Text()
    for cell in cells:
        cell.truncate(width - 1, overflow="ellipsis")
        line.append_text(cell).append(" " * (width - cell_len(cell.plain)))
    line.rstrip()
    return line


def _without_sparks(cards: list[Text]) -> list[Text]:
    return [line for number, line in enumerate(cards) if number % 3 != 2]


def _value(card: _Card, figures: Figures) -> Text:
    value = card.read(figures)
    failed = f", {short(figures.num_failed)} failed" if card.name == "Requests" and figures.num_failed else ""
    shown = _UNKNOWN if value is None else card.show(value)
    return Text.assemble((shown, "bold"), f" {card.unit}", (failed, "red"))


def _spark(fleet: Fleet, card: _Card, width: int) -> str:
    """The last ``KEPT_S`` seconds, the newest at the right: the largest value of each part of them."""
    if not fleet.lines.points or width < 1:
        return ""
    newest_s = fleet.lines.points[-1][0]
    parts: list[float | None] = [None] * width
    for at_s, figures in fleet.lines.points:
        value = card.read(figures)
        place = width - 1 - int((newest_s - at_s) / KEPT_S * width)
        if value is not None and place >= 0:
            parts[place] = max(value, parts[place] or 0.0)
    top = card.ceiling or max(card.floor, 1e-9, *(part or 0.0 for part in parts))
    return "".join(" " if part is None else _SPARKS[min(int(part / top * len(_SPARKS)), 7)] for part in parts)


def _alert(alert: Alert) -> Text:
    return Text.assemble(("! ", "bold red"), (alert.rule, "red"), f"  {alert.text}")


def _table(view: View, rows: Sequence[WorkerRow], width: int, space: int | None) -> list[Text]:
    shown = view.arrange(rows)
    if not shown:
        role = ROLES[view.role]
        return [Text("no worker has joined" if role is None else f"no worker of the role {role}")]
    is_live = space is not None
    columns = [column for column in _COLUMNS if column.title != "MODEL" or len({row.model for row in rows}) > 1]
    cells = [[column.cell(row) for row in shown] for column in columns]
    widths = [
        max(len(column.title) + 1, *(cell_len(cell.plain) for cell in of_column))
        for column, of_column in zip(columns, cells, strict=True)
    ]
    kept = _fitting(columns, widths, width)
    title = Text("  ", "bold")
    lines = [Text("▸ " if is_live and row.worker_id == view.selected else "  ") for row in shown]
    for number in kept:
        column, room = columns[number], widths[number]
        title.append_text(_aligned(Text(_titled(column, view, is_live), "bold"), room, column)).append("  ")
        for line, cell in zip(lines, cells[number], strict=True):
            line.append_text(_aligned(cell, room, column)).append("  ")
    for line, row in zip(lines, shown, strict=True):
        line.rstrip()
        if is_live and row.worker_id == view.selected:
            line.stylize("bold")
    title.rstrip()
    return [title, *_window(lines, [row.worker_id for row in shown].index(view.selected), space)]


def _fitting(columns: Sequence[_Column], widths: Sequence[int], width: int) -> list[int]:
    """The columns for which there is room, the most important ones first; in the order of the screen."""
    kept: list[int] = []
    left = width - 2
    for number in sorted(range(len(columns)), key=lambda number: columns[number].rank):
        if kept and widths[number] > left:
            break
        kept.append(number)
        left -= widths[number] + 2
    return sorted(kept)


def _titled(column: _Column, view: View, is_live: bool) -> str:
    order = ORDERS[view.order]
    if not is_live or order.name != column.order:
        return column.title
    return column.title + ("▼" if order.is_falling != view.is_reversed else "▲")


def _aligned(cell: Text, width: int, column: _Column) -> Text:
    space = " " * (width - cell_len(cell.plain))
    return Text.assemble(space, cell) if column.is_number else Text.assemble(cell, space)


def _window(lines: list[Text], selected: int, space: int | None) -> list[Text]:
    """Lines around the selected one that fit below the titles, and what is left out."""
    if space is None or len(lines) <= space - 1:
        return lines
    num = max(1, space - 2)
    begin = min(max(0, selected - num // 2), len(lines) - num)
    note = Text(f"  {begin + 1} to {begin + num} of {len(lines)}", "dim")
    return [*lines[begin : begin + num], note]


def _help() -> list[Text]:
    return [Text.assemble((f"{keys:<12}", "bold"), what) for keys, what in HELP]


def _foot(view: View) -> Text:
    if view.asked is None:
        return Text(one_line(view.note)) if view.note else Text(KEYS, "dim")
    row = view.asked
    work = f", which has {row.num_running + row.num_waiting} requests" if row.num_running + row.num_waiting else ""
    return Text(f"Drain {row.worker_id}{work}? It takes nothing new and leaves the fleet. y: drain, else: no", "bold")

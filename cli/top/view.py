"""What a person has chosen to see, and what each key does to it: order, role, selection, help, a drain's question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

from cli.top.fleet import GONE, WorkerRow
from quartet.client import WorkerState
from quartet.discovery.base import Role

_Order: TypeAlias = Callable[[WorkerRow], Any]


@dataclass(frozen=True)
class Order:
    """A way to sort workers.

    Attributes:
        name: title of the column.
        key: what is compared; workers that are equal stay in the order of the fleet.
        is_falling: the largest comes first, unless reversed.
    """

    name: str
    key: _Order
    is_falling: bool = False


#: In which ``s`` steps through them; the first is that of the fleet: by role and id.
ORDERS = (
    Order("role", lambda row: 0),
    Order("worker", lambda row: row.worker_id),
    Order("state", lambda row: row.state != WorkerState.READY, is_falling=True),
    Order("running", lambda row: row.num_running, is_falling=True),
    Order("waiting", lambda row: row.num_waiting, is_falling=True),
    Order("tokens", lambda row: row.num_queued_tokens, is_falling=True),
    Order("blocks", lambda row: row.used_share, is_falling=True),
    Order("steps/s", lambda row: row.steps_per_s or 0.0, is_falling=True),
)
#: What ``f`` steps through; ``None``: all.
ROLES = (None, Role.ENCODE, Role.PREFILL, Role.DECODE)


class Action(Enum):
    """What the program must do after a key."""

    NOTHING = auto()
    QUIT = auto()
    DRAIN = auto()  # the worker that ``View.asked`` was


@dataclass
class View:
    """State of the screen; pure.

    Attributes:
        selected: id of the selected worker; empty: there is none.
        asked: the worker whose drain is to be confirmed; ``None``: nothing is asked.
        note: what happened last, in one line.
    """

    order: int = 0
    is_reversed: bool = False
    role: int = 0
    selected: str = ""
    asked: WorkerRow | None = None
    shows_help: bool = False
    note: str = ""

    def arrange(self, rows: Sequence[WorkerRow]) -> list[WorkerRow]:
        """The workers that are shown, in order; selects the first if the selected one is not among them."""
        order, role = ORDERS[self.order], ROLES[self.role]
        shown = [row for row in rows if role in (None, row.role)]
        # Sorting is stable, in reverse too, so a reversed order of the fleet must be made by hand.
        shown.sort(key=order.key, reverse=order.is_falling)
        if self.is_reversed:
            shown.reverse()
        if shown and self.selected not in {row.worker_id for row in shown}:
            self.selected = shown[0].worker_id
        return shown

    def press(self, key: str, rows: Sequence[WorkerRow]) -> Action:
        """One key, as ``cli.top.terminal`` names it, while the fleet has ``rows``."""
        if self.asked is not None:
            return self._answer(key)
        if self.shows_help:
            self.shows_help = False
            return Action.QUIT if key == "q" else Action.NOTHING
        shown = self.arrange(rows)
        if key == "q":
            return Action.QUIT
        if key in ("?", "h"):
            self.shows_help = True
        elif key == "d":
            self._ask(shown)
        else:
            self._change(key, shown)
        return Action.NOTHING

    def _change(self, key: str, shown: Sequence[WorkerRow]) -> None:
        match key:
            case "s" | "right":
                self.order = (self.order + 1) % len(ORDERS)
            case "S" | "left":
                self.order = (self.order - 1) % len(ORDERS)
            case "r":
                self.is_reversed = not self.is_reversed
            case "f":
                self.role = (self.role + 1) % len(ROLES)
            case "j" | "down":
                self._move(shown, 1)
            case "k" | "up":
                self._move(shown, -1)
            case _:
                pass

    def _move(self, shown: Sequence[WorkerRow], step: int) -> None:
        ids = [row.worker_id for row in shown]
        if ids:
            self.selected = ids[min(max(ids.index(self.selected) + step, 0), len(ids) - 1)]

    def _ask(self, shown: Sequence[WorkerRow]) -> None:
        row = next((row for row in shown if row.worker_id == self.selected), None)
        if row is None:
            self.note = "no worker is selected"
        elif row.state in (WorkerState.DRAINING, GONE):
            self.note = f"{row.worker_id} is {row.state} already"
        else:
            self.asked, self.note = row, ""

    def _answer(self, key: str) -> Action:
        assert self.asked is not None
        if key == "y":
            return Action.DRAIN
        self.note = f"{self.asked.worker_id} was not drained"
        self.asked = None
        return Action.NOTHING

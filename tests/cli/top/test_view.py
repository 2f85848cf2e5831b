"""What keys do to the screen of ``quartet top``."""

from __future__ import annotations

import pytest

from cli.top.terminal import keys_of
from cli.top.view import ORDERS, Action, View
from tests.cli.top.fleets import busy_fleet, state, worker

ROWS = busy_fleet().rows(100.0)
FLEET_ORDER = ["prefill-0", "prefill-1", "decode-0", "decode-1"]


def shown(view: View) -> list[str]:
    return [row.worker_id for row in view.arrange(ROWS)]


def press(view: View, *keys: str) -> list[Action]:
    return [view.press(key, ROWS) for key in keys]


@pytest.mark.parametrize(
    ("order", "ids"),
    [
        ("role", FLEET_ORDER),
        ("worker", ["decode-0", "decode-1", "prefill-0", "prefill-1"]),
        ("state", ["prefill-1", "decode-1", "prefill-0", "decode-0"]),
        ("running", ["decode-0", "prefill-1", "prefill-0", "decode-1"]),
        ("waiting", ["prefill-1", "prefill-0", "decode-0", "decode-1"]),
        ("tokens", FLEET_ORDER),
        ("blocks", ["decode-0", "prefill-0", "prefill-1", "decode-1"]),
        ("steps/s", FLEET_ORDER),
    ],
)
def test_s_sorts_by_one_column_after_the_other(order: str, ids: list[str]) -> None:
    view = View()
    press(view, *["s"] * [each.name for each in ORDERS].index(order))
    assert shown(view) == ids
    press(view, "r")
    assert shown(view) == ids[::-1]


def test_s_goes_round_both_ways() -> None:
    view = View()
    press(view, *["s"] * len(ORDERS))
    assert view.order == 0
    press(view, "S")
    assert view.order == len(ORDERS) - 1
    press(view, "right", "left", "left")
    assert view.order == len(ORDERS) - 2


def test_f_shows_one_role_and_selects_there() -> None:
    view = View()
    for ids in ([], FLEET_ORDER[:2], FLEET_ORDER[2:], FLEET_ORDER):
        press(view, "f")
        assert shown(view) == ids
    press(view, "f", "f", "f", "f", "f", "f", "f")
    shown(view)
    assert view.selected == "decode-0"


def test_the_selection_stays_at_its_worker_and_within_the_list() -> None:
    view = View()
    press(view, "up", "j", "down")
    assert view.selected == "decode-0"
    press(view, "s", "r")
    assert view.selected == "decode-0"
    press(view, "j", "j", "j", "j", "k")
    assert view.selected == "decode-1"


def test_a_drain_needs_a_y() -> None:
    view = View()
    press(view, "j", "j", "d")
    assert view.asked is not None and view.asked.worker_id == "decode-0"
    assert press(view, "n") == [Action.NOTHING]
    assert (view.asked, view.note) == (None, "decode-0 was not drained")
    assert press(view, "y") == [Action.NOTHING]
    # Nor does q quit instead of answering.
    assert press(view, "d", "q") == [Action.NOTHING, Action.NOTHING]
    assert press(view, "d", "y") == [Action.NOTHING, Action.DRAIN]


def test_a_worker_that_drains_is_not_drained_again() -> None:
    view = View()
    press(view, "j", "d")
    assert (view.asked, view.note) == (None, "prefill-1 is draining already")


def test_nothing_is_drained_in_an_empty_fleet() -> None:
    view = View()
    assert [view.press(key, []) for key in ("j", "d", "y")] == [Action.NOTHING] * 3
    assert view.note == "no worker is selected"


def test_help_comes_and_goes_and_q_quits() -> None:
    view = View()
    press(view, "?")
    assert view.shows_help
    assert press(view, "d") == [Action.NOTHING]
    assert not view.shows_help and view.asked is None
    assert press(view, "q") == [Action.QUIT]


def test_a_selected_worker_that_goes_leaves_the_first_one_selected() -> None:
    fleet = busy_fleet()
    view = View(selected="decode-1")
    fleet.take(state(worker("decode-0")), 101.0)
    view.arrange(fleet.rows(300.0))
    assert view.selected == "decode-0"


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("q", ["q"]),
        ("sS?", ["s", "S", "?"]),
        ("\x1b[A\x1b[B\x1b[C\x1b[D", ["up", "down", "right", "left"]),
        ("\x1bOAj", ["up", "j"]),
        ("\x1b[3~\x1b[1;5Ad", ["d"]),
        ("\x1b", ["escape"]),
        ("\x1b[", []),
        ("ä", ["ä"]),
    ],
)
def test_keys_are_found_in_what_a_terminal_sends(sent: str, keys: list[str]) -> None:
    assert list(keys_of(sent)) == keys

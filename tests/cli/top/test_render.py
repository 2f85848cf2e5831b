"""The screen of ``quartet top`` as text, at several sizes."""

from __future__ import annotations

import pytest

from cli.top.fleet import Fleet
from cli.top.render import KEYS, draw
from cli.top.view import View
from tests.cli.top.fleets import busy_fleet, state, worker

SCREEN = """\
quartet top  router-1  kv_aware  2 of 4 workers ready  9 requests here

Requests              Tokens                First token           Queue                 Cache hits
2.5 /s, 5 failed      1200 /s               150 ms p50            4 waiting             63% of prompts
                   █                     █                     █                  ▁  █                     ▆

! QuartetWorkerLost  1 of 2 decode workers are ready: decode-1 (no contact)
! QuartetRequestsFail  10% of the requests failed

  WORKER     ROLE▲    STATE        RUNNING   WAITING  BLOCKS            TOKENS   CACHED   STEPS/S
  prefill-0  prefill  ready         1 of 8         0  -                  12.3k        0         0
  prefill-1  prefill  draining      2 of 8         3  -                      0        0         0
▸ decode-0   decode   ready        7 of 64         0  █████▓░░··  60%        0       20         0
  decode-1   decode   no contact         0         0  -                      0        0         0""".splitlines()


def lines(fleet: Fleet, view: View, width: int, height: int | None, problem: str = "") -> list[str]:
    drawn = draw(fleet, view, now_s=100.0, width=width, height=height, problem=problem)
    return [line.plain.rstrip() for line in drawn]


def test_a_wide_screen_shows_all() -> None:
    assert lines(busy_fleet(), View(selected="decode-0"), 112, 20) == [*SCREEN, *[""] * 5, KEYS]


@pytest.mark.parametrize("width", [20, 40, 80, 100])
@pytest.mark.parametrize("height", [1, 5, 8, 12, 24, 50])
def test_every_size_is_kept_to_with_the_worker_selected_and_the_question_in_sight(width: int, height: int) -> None:
    fleet = busy_fleet()
    view = View(selected="decode-1")
    view.press("d", fleet.rows(100.0))
    drawn = draw(fleet, view, now_s=100.0, width=width, height=height)
    assert max(line.cell_len for line in drawn) <= width
    assert len(drawn) == max(height, 2)
    assert drawn[-1].plain.startswith("Drain decode-1?")
    assert height < 12 or any(line.plain.startswith("▸ decode-1") for line in drawn)


def test_a_narrow_screen_has_the_columns_that_matter_most() -> None:
    shown = lines(busy_fleet(), View(), 40, 24)
    assert "  WORKER     STATE        RUNNING" in shown
    assert not any("127.0.0.1" in line for line in shown)


def test_many_workers_are_shown_around_the_selected_one() -> None:
    fleet = Fleet()
    fleet.take(state(*[worker(f"decode-{number:02}") for number in range(40)]), 100.0)
    shown = lines(fleet, View(selected="decode-30"), 80, 24)
    at = [number for number, line in enumerate(shown) if "decode-" in line]
    assert shown[at[-1] + 1].endswith("of 40")
    assert any(line.startswith("▸ decode-30") for line in shown)
    assert 4 < len(at) < 20
    assert "decode-30" in shown[at[len(at) // 2]], "it is in the middle"


def test_a_lost_router_is_told_and_the_workers_stay() -> None:
    shown = lines(busy_fleet(), View(), 130, 20, problem="lost the router at 127.0.0.1:1")
    assert shown[0] == "no contact: lost the router at 127.0.0.1:1; trying again"
    assert any("decode-0" in line for line in shown)


def test_what_a_server_says_moves_no_cursor() -> None:
    shown = lines(busy_fleet(), View(note="\x1b[2Jgone"), 130, 20, problem="\x1b]0;x\x07")
    assert shown[0] == r"no contact: \x1b]0;x\x07; trying again"
    assert any(r"\x1b[2Jgone" in line for line in shown)


def test_titles_that_just_fit_are_whole() -> None:
    for width in range(40, 140):
        shown = lines(busy_fleet(), View(selected="decode-1"), width, 30)
        assert not any(line.startswith(("  ", "▸ ")) and line.endswith("…") for line in shown), width


def test_help_and_notes_are_shown() -> None:
    assert any("drain the selected worker" in line for line in lines(busy_fleet(), View(shows_help=True), 100, 24))
    assert lines(busy_fleet(), View(note="decode-0 drains"), 100, 24)[-1] == "decode-0 drains"


def test_a_page_has_neither_keys_nor_selection() -> None:
    shown = lines(busy_fleet(), View(), 130, None)
    assert shown[-1].startswith("  decode-1")
    assert "▸" not in "".join(shown) and "▲" not in "".join(shown)


def test_models_are_named_where_there_are_several() -> None:
    other = worker("decode-0")
    fleet = busy_fleet()
    assert not any("MODEL" in line for line in lines(fleet, View(), 200, None))
    object.__setattr__(other.record, "model_name", "huge")
    fleet.take(state(other, worker("decode-1")), 101.0)
    assert any("MODEL" in line for line in lines(fleet, View(), 200, None))


def test_a_fleet_of_no_workers_says_so() -> None:
    assert lines(Fleet(), View(), 80, None)[-1] == "no worker has joined"
    assert "no worker of the role encode" in lines(busy_fleet(), View(role=1), 80, 24)

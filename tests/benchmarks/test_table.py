"""The page's tables are made from the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.table import PAGES, RESULTS, render_page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_show_what_the_results_hold(page: Path) -> None:
    text = page.read_text()
    assert render_page(text, RESULTS) == text, "run `python -m benchmarks.table`"


def test_other_results_make_another_table(tmp_path: Path) -> None:
    report = json.loads((RESULTS / "overload.json").read_text())
    report["overload"]["ratio"] = 0.12
    (tmp_path / "overload.json").write_text(json.dumps(report))
    page = render_page("before\n<!-- table: overload -->\nstale figures\n<!-- end -->\nafter", tmp_path)
    assert "| 0.12 |" in page
    assert "stale figures" not in page
    assert page.startswith("before\n<!-- table: overload -->\n")
    assert page.endswith("<!-- end -->\nafter")


def test_a_table_says_how_many_cores_were_used(tmp_path: Path) -> None:
    report = json.loads((RESULTS / "overload.json").read_text())
    report["machine"] |= {"num_cores": 64, "num_usable_cores": 2}
    (tmp_path / "overload.json").write_text(json.dumps(report))
    assert ", 2 of 64 cores, " in render_page("<!-- table: overload -->\n<!-- end -->", tmp_path)


def test_the_table_of_chaos_says_how_many_fleets_ran_at_once(tmp_path: Path) -> None:
    report = json.loads((RESULTS / "chaos.json").read_text())
    (tmp_path / "chaos.json").write_text(json.dumps({**report, "fleets": 16}))
    assert "| mock | 16 |" in render_page("<!-- table: chaos -->\n<!-- end -->", tmp_path)


def test_the_table_of_traces_adds_up_a_request_that_is_not_sampled_over_its_workers(tmp_path: Path) -> None:
    report = json.loads((RESULTS / "tracing.json").read_text())
    report["states"]["off"] |= {"router_us": 1.0, "worker_us": 30.0}
    report["states"]["not sampled"] |= {"router_us": 3.0, "worker_us": 37.0}
    (tmp_path / "tracing.json").write_text(json.dumps(report))
    page = render_page("<!-- table: tracing -->\n<!-- end -->", tmp_path)
    assert "| the same over Prefill and Decode, computed | 16 | <= 20 |" in page
    assert "| the same over Encode, Prefill and Decode, computed | 23 | <= 20 |" in page


def test_a_table_without_results_says_so(tmp_path: Path) -> None:
    page = render_page("<!-- table: overload -->\nstale figures\n<!-- end -->\nafter", tmp_path)
    assert page == "<!-- table: overload -->\n\nnot measured yet\n\n<!-- end -->\nafter"


def test_an_unknown_table_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "guess.json").write_text("{}")
    with pytest.raises(KeyError):
        render_page("<!-- table: guess -->\n<!-- end -->", tmp_path)

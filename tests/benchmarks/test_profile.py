"""Flame graphs and function tables from collapsed stacks."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.profile import parse_stacks, rank_functions, render_flame_graph

STACKS = "main;serve;write 6\nmain;serve;read 3\nmain;serve;write;serve 1\n"
SVG = "{http://www.w3.org/2000/svg}"


def test_a_function_counts_for_itself_only_where_it_is_on_top() -> None:
    ranked = {item.function: item for item in rank_functions(parse_stacks(STACKS))}
    assert ranked["write"].self_share == pytest.approx(0.6)
    assert ranked["write"].total_share == pytest.approx(0.7)
    assert ranked["main"].self_share == 0
    assert ranked["main"].total_share == 1


def test_a_function_that_calls_itself_counts_once() -> None:
    ranked = {item.function: item for item in rank_functions(parse_stacks(STACKS))}
    assert ranked["serve"].total_share == 1
    assert ranked["serve"].self_share == pytest.approx(0.1)


def test_the_dearest_function_comes_first() -> None:
    assert [item.function for item in rank_functions(parse_stacks(STACKS))][:2] == ["write", "read"]


def test_stacks_may_hold_blanks_and_equal_ones_are_added() -> None:
    stacks = parse_stacks("main (a file.py);<lambda> (b.py) 2\nmain (a file.py);<lambda> (b.py) 3\n\n")
    assert stacks == {("main (a file.py)", "<lambda> (b.py)"): 5}


def test_a_line_without_a_count_is_an_error() -> None:
    with pytest.raises(ValueError, match="count"):
        parse_stacks("main;serve without a count")


def test_a_frame_is_as_wide_as_its_share_and_stands_on_its_caller() -> None:
    picture = ElementTree.fromstring(render_flame_graph(parse_stacks(STACKS), "router & more"))
    frames = {}
    for group in picture.iter(f"{SVG}g"):
        title, bar = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None and title.text is not None and bar is not None
        frames[title.text] = (float(bar.attrib["width"]), float(bar.attrib["y"]))
    width, y = frames["main: 100.0%"]
    assert frames["write: 70.0%"][0] == pytest.approx(0.7 * width, abs=0.1)
    assert frames["read: 30.0%"][0] == pytest.approx(0.3 * width, abs=0.1)
    assert frames["write: 70.0%"][1] < frames["serve: 100.0%"][1] < y


def test_frames_too_narrow_to_see_are_left_out() -> None:
    picture = render_flame_graph(parse_stacks("main;usual 1000\nmain;rare 1\n"), "title")
    assert "usual" in picture
    assert "rare" not in picture

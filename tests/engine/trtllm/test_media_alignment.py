"""Where media lie in a prompt that TensorRT-LLM laid out: the text around them shows it, or nothing does."""

from __future__ import annotations

import random

import pytest

from quartet.engine.trtllm.inputs import find_media
from quartet.errors import EngineError

P = 99


def found(came: list[int], became: list[int]) -> list[tuple[int, int]]:
    return [(span.first_position, span.num_tokens) for span in find_media(came, became, P)]


def test_items_lie_where_the_text_has_made_room() -> None:
    assert found([1, P, 2], [1, 70, P, P, 71, P, 72, 2]) == [(1, 6)]
    assert found([P], [5]) == [(0, 1)]
    assert found([P, 2, 3, P, 4, P], [P, P, 2, 3, 8, P, 4, P]) == [(0, 2), (4, 2), (7, 1)]


def test_media_that_fit_in_one_way_only_are_found_whatever_is_in_them() -> None:
    rng = random.Random(5)
    for _ in range(300):
        # Text and what items become have no token in common: there is one way.
        came: list[int] = []
        became: list[int] = []
        spans: list[tuple[int, int]] = []
        for number in range(rng.randint(1, 4)):
            text = [rng.randint(1, 3) for _ in range(rng.randint(int(number > 0), 3))]
            item = [rng.choice((P, 70, 71)) for _ in range(rng.randint(1, 5))]
            spans.append((len(became) + len(text), len(item)))
            came += [*text, P]
            became += [*text, *item]
        tail = [rng.randint(1, 3) for _ in range(rng.randint(0, 3))]
        assert found([*came, *tail], [*became, *tail]) == spans


@pytest.mark.parametrize(
    ("came", "became"),
    [
        ([1, P, P, 2], [1, P, P, P, 2]),  # nothing between them
        ([1, P, 5, P, 2], [1, P, 5, P, 5, P, 2]),  # the text between occurs in an item, too
    ],
)
def test_an_ambiguous_position_of_media_is_refused(came: list[int], became: list[int]) -> None:
    with pytest.raises(EngineError, match="put text between"):
        find_media(came, became, P)


@pytest.mark.parametrize(
    ("came", "became"),
    [
        ([1, P, 2], [3, P, P, 2]),
        ([1, P, 2], [1, P, P, 3]),
        ([1, P, 2], [1, 2]),
        ([1, P, 1], [1]),
        ([1, P, 5, P, 2], [1, P, P, 2]),
        ([1, P, 5, 6, P, 2], [1, P, 5, P, 2]),
        ([P, 5, P], [5, P]),
        ([P, 5, P], [P, 5]),
    ],
)
def test_another_prompt_is_refused(came: list[int], became: list[int]) -> None:
    with pytest.raises(EngineError, match="not the one"):
        find_media(came, became, P)

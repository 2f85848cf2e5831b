"""The generator's answers are right, the same for a seed, and held-out samples never train."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from models.tiny import facts, looking, stories, tasks
from models.tiny.conversation import Conversation, Skill, Turn
from models.tiny.scenes import draw_scene
from models.tiny.split import Split
from models.tiny.words import plural

MAKERS = (
    stories.story_conversation,
    stories.story_questions,
    facts.reading,
    tasks.counting,
    tasks.arithmetic,
    tasks.instructions,
    tasks.small_talk,
    looking.looking,
)
make_each = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


def turns_of(make: Callable[..., Conversation], number: int = 60, split: Split = Split.TRAIN) -> list[Turn]:
    rng = split.rng(7)
    return [turn for _ in range(number) for turn in make(rng, split).turns]


@make_each
def test_the_same_seed_gives_the_same_conversations_and_another_seed_others(
    make: Callable[..., Conversation],
) -> None:
    first, again, other = (
        [make(Split.TRAIN.rng(seed, number), Split.TRAIN) for number in range(20)] for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


@make_each
def test_no_question_is_empty_and_nothing_is_left_to_be_filled_in(make: Callable[..., Conversation]) -> None:
    for turn in turns_of(make):
        assert turn.question and turn.answer
        assert not re.search(r"[{}]", turn.question + turn.answer)


def test_sums_and_differences_are_right() -> None:
    checked = 0
    for turn in turns_of(tasks.arithmetic):
        a, b = (int(number) for number in re.findall(r"\d+", turn.question))
        by_word = {
            "larger": max(a, b), "smaller": min(a, b), "away from": b - a, "gives away": a - b,
            "minus": a - b, " - ": a - b, "plus": a + b, " + ": a + b, "Add": a + b, "more": a + b,
        }  # fmt: skip
        [right, *_] = [value for word, value in by_word.items() if word in turn.question]
        assert turn.answer == str(right), turn
        checked += 1
    assert checked > 60


def test_counting_goes_from_the_first_number_to_the_last_by_one() -> None:
    for turn in turns_of(tasks.counting):
        if not re.match(r"(Count from|Please|Write)", turn.question):
            continue
        first, last = (int(number) for number in re.findall(r"\d+", turn.question))
        step = 1 if last > first else -1
        assert turn.answer == ", ".join(map(str, range(first, last + step, step)))


def test_things_in_a_list_are_counted() -> None:
    for turn in turns_of(tasks.counting):
        if match := re.match(r"(?:How many times is|Count the word) (\w+)(?: in this list\?|:) (.*)", turn.question):
            assert turn.answer == str(match[2].split(", ").count(match[1]))
        elif match := re.match(r"How many words are in this list\? (.*)", turn.question):
            assert turn.answer == str(len(match[1].split(", ")))


def test_instructions_are_followed_to_the_letter() -> None:
    follow: dict[str, Callable[[str], str]] = {
        "Repeat: (.*)": lambda text: text,
        "Write these words in reverse order: (.*)": lambda text: " ".join(text.split()[::-1]),
        r"Spell the word (\w+)\.": lambda word: "-".join(word),
        r"Write (\w+) in upper case\.": str.upper,
        "Sort these numbers: (.*)": lambda text: ", ".join(map(str, sorted(map(int, text.split(", "))))),
        r"What is the last word of this list\? (.*)": lambda text: text.split(", ")[-1],
        r"What is the second word of this list\? (.*)": lambda text: text.split(", ")[1],
    }
    seen = set()
    for turn in turns_of(tasks.instructions, 200):
        for pattern, answer in follow.items():
            if match := re.fullmatch(pattern, turn.question):
                assert turn.answer == answer(match[1])
                seen.add(pattern)
    assert seen == set(follow)


@pytest.mark.parametrize("num_tokens", [100, 2_000])
def test_a_fact_that_is_asked_for_stands_in_the_text_and_nothing_contradicts_it(num_tokens: int) -> None:
    for number in range(20):
        rng = Split.TRAIN.rng(number)
        drawn = facts.draw_facts(rng, Split.TRAIN, 20)
        text = facts.haystack(rng, [fact.statement for fact in drawn], num_tokens)
        subjects = [(fact.kind, fact.subject) for fact in drawn]
        values = [(fact.kind, fact.value) for fact in drawn]
        assert len(set(subjects)) == len(subjects)
        assert len(set(values)) == len(values)
        for fact in drawn:
            assert fact.statement in text
            assert fact.value in fact.questions[0][1]
            assert fact.subject in fact.questions[0][0]


def test_a_retrieval_text_is_about_as_long_as_asked() -> None:
    for num_tokens in (200, 1_000, 3_800):
        conversation = facts.retrieval(Split.TRAIN.rng(0), Split.TRAIN, num_tokens)
        assert 0.9 * num_tokens < len(conversation.turns[0].question) / 4.2 < 1.3 * num_tokens + 60


def test_a_story_is_about_200_tokens_long_and_answers_its_questions() -> None:
    rng = Split.TRAIN.rng(0)
    for _ in range(50):
        story = stories.tell_story(rng)
        assert 130 < len(story.text.split()) < 220
        assert story.text.count("\n\n") == 2
        for _, answer in story.questions:
            assert re.findall(r"\w+", answer)[-1] in story.text


def test_counts_and_relative_positions_are_those_of_the_scene() -> None:
    rng, checked = Split.TRAIN.rng(3), 0
    for _ in range(200):
        scene = draw_scene(rng, Split.TRAIN)
        by_name = {one.name: one for one in scene.shapes}
        count = looking.ask_about(rng, scene, Skill.COUNT)
        assert count is not None
        asked = count.question.removeprefix("Count the ").removeprefix("How many ").split(" are ")[0].rstrip(".")
        by_asked = {
            "shapes": len(scene.shapes),
            **{plural(one.shape): sum(o.shape == one.shape for o in scene.shapes) for one in scene.shapes},
            **{f"{one.colour} shapes": sum(o.colour == one.colour for o in scene.shapes) for one in scene.shapes},
        }
        assert count.answer == str(by_asked.get(asked, 0))
        turn = looking.ask_about(rng, scene, Skill.POSITION)
        if turn and (match := re.match(r"Is the (\w+ \w+) to the left of the (\w+ \w+)\?", turn.question)):
            one, other = by_name[match[1]], by_name[match[2]]
            assert turn.answer == ("Yes." if one.x < other.x else "No.")
            checked += 1
    assert checked > 5


def test_shapes_of_a_scene_do_not_touch_and_none_lies_between_two_fields() -> None:
    rng = Split.TRAIN.rng(0)
    for _ in range(200):
        shapes = draw_scene(rng, Split.TRAIN).shapes
        assert len({one.field for one in shapes}) == len(shapes)
        for number, one in enumerate(shapes):
            assert all(abs(value - line) > 0.03 for value in (one.x, one.y) for line in (1 / 3, 2 / 3))
            for other in shapes[:number]:
                assert (one.x - other.x) ** 2 + (one.y - other.y) ** 2 > (one.radius + other.radius) ** 2


def test_held_out_content_is_never_trained_on_with_any_seed() -> None:
    for kind in (tasks.arithmetic, tasks.counting, tasks.instructions):
        trained = {(turn.question, turn.answer) for turn in turns_of(kind, 500)}
        held_out = {(turn.question, turn.answer) for turn in turns_of(kind, 100, Split.HELD_OUT)}
        assert held_out and trained.isdisjoint(held_out)
    scenes = [{draw_scene(split.rng(seed), split, 1).key for seed in range(300)} for split in Split]
    assert scenes[1] and scenes[0].isdisjoint(scenes[1])


def test_one_content_in_sixteen_is_held_out_and_each_has_one_split() -> None:
    keys = [f"key {number}" for number in range(4_000)]
    held_out = [key for key in keys if Split.HELD_OUT.admits(key)]
    assert all(Split.TRAIN.admits(key) is (key not in set(held_out)) for key in keys)
    assert len(held_out) == pytest.approx(4_000 / 16, rel=0.3)


def test_a_split_without_contents_is_refused() -> None:
    with pytest.raises(ValueError, match="no content of the split 'held out'"):
        Split.HELD_OUT.draw(lambda: "small", lambda text: "key 0")

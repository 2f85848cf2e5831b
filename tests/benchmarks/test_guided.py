"""The benchmark of guided decoding compares equal work, and its short form measures all."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks import guided
from benchmarks.guided import Form, Output, Stream, measure
from benchmarks.guided_schemas import ORDINARY, SCHEMAS
from benchmarks.table import guided_tables
from quartet.engine.guided.grammar import check_grammar


def test_rounds_share_no_prompt_and_all_ordinary_schemas_take_part() -> None:
    first, second = guided._streams(0, 32), guided._streams(1, 32)
    assert len({stream.prompt for stream in (*first, *second)}) == 64
    assert {stream.guided for stream in first} == {stream.guided for stream in second}
    assert len({stream.guided for stream in first}) == len(ORDINARY) == 5
    assert len(SCHEMAS) == 10
    for stream in first:
        assert stream.guided is not None
        check_grammar(stream.guided)


class _Side:
    """An engine whose guided answers are known, and which counts what it is asked."""

    def __init__(self, num_tokens: int | None = None) -> None:
        self.turns: list[tuple[bool, str]] = []
        self._num_tokens = num_tokens

    async def run(self, streams: list[Stream], *, salt: str) -> list[Output]:
        self.turns.append((streams[0].guided is not None, salt))
        return [
            Output(list(range(5 if stream.guided else self._num_tokens or stream.num_tokens or 0)))
            for stream in streams
        ]


async def test_both_sides_have_the_same_tokens_in_turns_that_mirror_each_other() -> None:
    streams = guided._streams(0, 3)
    engine = _Side()
    measured, answers = await guided.compare(engine, streams, 0)  # type: ignore[arg-type]
    assert [is_guided for is_guided, _ in engine.turns] == [True, False, False, True]
    assert len({salt for _, salt in engine.turns}) == 4, "no turn finds another one's prefixes cached"
    assert measured.num_tokens == 2 * 3 * 5 and [len(answer.token_ids) for answer in answers] == [5, 5, 5]
    with pytest.raises(RuntimeError, match="the plain side has other numbers"):
        await guided.compare(_Side(num_tokens=4), streams, 0)  # type: ignore[arg-type]


@pytest.mark.bench
async def test_a_short_run_measures_both_sides_and_checks_answers() -> None:
    form = Form(num_streams=5, num_rounds=1, num_compiles=2, num_seeds=1)
    results = await measure(form)
    assert results.answers.num_valid == results.answers.num_answers == 10, results.answers.invalid
    [one] = results.rounds
    assert one.ratio == pytest.approx(one.guided_per_cpu_s / one.plain_per_cpu_s)
    assert set(results.schemas) == set(ORDINARY)
    for cost in (*results.schemas.values(),):
        assert cost.compile_ms.num == 2 and 0 < cost.mask_us.p50 <= cost.mask_us.p99 <= cost.mask_us.max
    assert guided_tables(asdict(results)).count("\n| small object |") == 1

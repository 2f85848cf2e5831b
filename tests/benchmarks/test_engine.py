"""The engine benchmark's workloads are what it says they are, and a wrong engine can't win."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.engine import count_ties, rounds_of
from benchmarks.engine_sides import GenerateSide, QuartetSide, write_checkpoint
from benchmarks.engine_work import VOCAB_SIZE, WORKLOADS, Job, Workload, ragged_32, shared_prefix_32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    assert write_checkpoint(directory) == pytest.approx(8e6, rel=0.05)
    return directory


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> GenerateSide:
    return GenerateSide(checkpoint)


def small_work() -> Workload:
    source = random.Random(0)
    sizes = ((5, 4), (19, 6), (1, 1))
    return Workload(
        jobs=[
            Job(prompt=tuple(source.randrange(VOCAB_SIZE) for _ in range(num_prompt)), num_output_tokens=num_output)
            for num_prompt, num_output in sizes
        ]
    )


def test_medians_are_of_five_rounds_and_in_the_short_form_of_three_at_least() -> None:
    assert {rounds_of(name, is_short=False) for name in WORKLOADS} == {5}
    assert {rounds_of(name, is_short=True) for name in WORKLOADS} == {3, 5}


def test_ragged_work_spreads_over_all_lengths() -> None:
    work = ragged_32(random.Random(0))
    assert sorted(len(job.prompt) for job in work.jobs)[:: len(work.jobs) - 1] == [32, 512]
    assert sorted(job.num_output_tokens for job in work.jobs)[:: len(work.jobs) - 1] == [16, 256]
    assert work.num_useful_tokens == sum(job.num_output_tokens for job in work.jobs)


def test_rounds_share_no_prompt() -> None:
    source = random.Random(0)
    first, second = shared_prefix_32(source), shared_prefix_32(source)
    assert len({job.prompt[:1024] for job in first.jobs}) == 1
    assert first.jobs[0].prompt[:32] != second.jobs[0].prompt[:32]
    assert len({job.prompt for job in first.jobs}) == len(first.jobs) == 32


def test_of_prompts_only_their_own_tokens_are_useful() -> None:
    assert WORKLOADS["prefill"](random.Random(0)).num_useful_tokens == 32 * 256


async def test_both_sides_put_out_the_same(checkpoint: Path, reference: GenerateSide) -> None:
    quartet, work = QuartetSide(checkpoint), small_work()
    try:
        await quartet.start()
        tokens, expected = await quartet.run(work.jobs), await reference.run(work.jobs)
    finally:
        await quartet.close()
    assert [len(ids) for ids in tokens] == [4, 6, 1]
    assert count_ties(work, tokens, expected, reference) in range(2)


async def test_wrong_tokens_and_missing_ones_are_errors(reference: GenerateSide) -> None:
    work = small_work()
    expected = await reference.run(work.jobs)
    assert count_ties(work, expected, expected, reference) == 0
    worst = int(reference.logits_after([*work.jobs[1].prompt, *expected[1][:3]]).argmin())
    with pytest.raises(RuntimeError, match="token 3 is"):
        wrong = [expected[0], [*expected[1][:3], worst, *expected[1][4:]], expected[2]]
        count_ties(work, wrong, expected, reference)
    with pytest.raises(RuntimeError, match="5 and 6 tokens instead of 6"):
        count_ties(work, [expected[0], expected[1][:5], expected[2]], expected, reference)

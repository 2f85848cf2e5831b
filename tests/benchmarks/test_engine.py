"""The engine benchmark's workloads are what it says they are, and a wrong engine can't win."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.engine import count_ties, rounds_of
from benchmarks.engine_sides import (
    VOCAB_SIZE,
    WORKLOADS,
    Floor,
    GenerateSide,
    Job,
    QuartetSide,
    Workload,
    ragged_32,
    shared_prefix_32,
    write_checkpoint,
)
from benchmarks.table import engine_tables


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


class _Counter(TorchDispatchMode):
    """Counts products and attentions that PyTorch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_products = 0
        self.num_attentions = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func)
        self.num_products += "mm." in name or "linear" in name
        self.num_attentions += "scaled_dot_product" in name
        return func(*args, **(kwargs or {}))


def test_medians_are_of_five_rounds_and_in_the_short_form_of_three_at_least() -> None:
    assert {rounds_of(name, is_short=False) for name in WORKLOADS} == {5}
    assert {rounds_of(name, is_short=True) for name in WORKLOADS} == {2, 5}


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


def test_only_the_prompts_own_tokens_count_as_useful() -> None:
    assert WORKLOADS["prefill"](random.Random(0)).num_useful_tokens == 32 * 256


def test_only_workloads_of_prompts_have_a_floor() -> None:
    work = {name: make(random.Random(0)) for name, make in WORKLOADS.items()}
    assert {name for name in work if work[name].counts_prompts} == {"prefill", "long_prompt"}
    assert {job.num_output_tokens for made in work.values() if made.counts_prompts for job in made.jobs} == {1}


def test_the_floor_multiplies_and_attends_as_often_as_a_step_of_the_engine_does(checkpoint: Path) -> None:
    # 1500 tokens are two steps of at most 1024, of 600 and of 900: 3 and 4 slices of 256 rows in 8 layers.
    floor = Floor(checkpoint, max_num_batched_tokens=1024)
    jobs = [Job(prompt=(0,) * num_tokens, num_output_tokens=1) for num_tokens in (300, 300, 500, 400)]
    with _Counter() as counter:
        floor._run(list(floor._steps(jobs)))
    assert list(floor._steps(jobs)) == [[300, 300], [500, 400]]
    assert counter.num_attentions == 8 * 4
    # The last layer computes queries, keys and values of all rows, and the rest of one row a prompt.
    assert counter.num_products == 7 * 4 * (3 + 4) + (3 + 4) + 2 * 3 + 2


async def test_a_floor_is_of_prompts_alone(checkpoint: Path) -> None:
    floor = Floor(checkpoint, max_num_batched_tokens=64)
    with pytest.raises(ValueError, match="one token out"):
        await floor.run([Job(prompt=(1, 2), num_output_tokens=2)])
    with pytest.raises(ValueError, match="up to 64 tokens"):
        await floor.run([Job(prompt=(1,) * 65, num_output_tokens=1)])


def test_the_table_has_a_ceiling_if_the_result_has_one() -> None:
    side = {"tokens_per_s": 1000.0}
    old = {"quartet": side, "generate": side, "ratio": 1.25, "cpu_ratio": 1.5, "num_ties": 0, "num_outputs": 7}
    new = old | {"ceiling": 1.75, "cpu_ceiling": 2.25}
    none = old | {"ceiling": None, "cpu_ceiling": None}
    table = engine_tables({"workloads": {"one_stream": none, "prefill": new, "long_prompt": old}})
    rows = {line.split("`")[1]: [cell.strip() for cell in line.split("|")] for line in table.splitlines()[2:]}
    column = [cell.strip() for cell in table.splitlines()[0].split("|")].index("ceiling")
    assert {name: row[column] for name, row in rows.items()} == {
        "one_stream": "",
        "prefill": "1.75, 2.25",
        "long_prompt": "",
    }


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

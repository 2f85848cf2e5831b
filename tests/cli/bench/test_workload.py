"""What is asked for: lengths, prompts that share what they should and nothing else, traces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cli.bench.workload import BenchRequest, IntRange, WorkloadConfig, make_workload
from cli.traces.format import BLOCK_SIZE, read_trace

IDS = IntRange(100, 600)


def random_config(prompt: IntRange, output: IntRange, *, is_text: bool = False) -> WorkloadConfig:
    return WorkloadConfig(prompt_tokens=prompt, output_tokens=output, ids=IDS, is_text=is_text)


def trace_config(path: Path) -> WorkloadConfig:
    return WorkloadConfig(prompt_tokens=IDS, output_tokens=IDS, ids=IDS, trace=read_trace(path))


def write_trace(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(at_ms: int, num_prompt: int, num_output: int, *hash_ids: int) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": num_prompt, "output_length": num_output, "hash_ids": list(hash_ids)}


def take(workload: Iterator[BenchRequest], count: int) -> list[BenchRequest]:
    return [next(workload) for _ in range(count)]


def ids(request: BenchRequest) -> list[int]:
    assert request.token_ids is not None
    return list(request.token_ids)


def test_a_single_length_is_every_requests() -> None:
    for request in take(make_workload(random_config(IntRange(128, 128), IntRange(7, 7)), (1,)), 20):
        assert (len(ids(request)), request.num_output_tokens) == (128, 7)


def test_a_range_is_drawn_up_to_both_bounds() -> None:
    requests = take(make_workload(random_config(IntRange(3, 5), IntRange(1, 2)), (1,)), 200)
    assert {len(ids(request)) for request in requests} == {3, 4, 5}
    assert {request.num_output_tokens for request in requests} == {1, 2}


def test_token_ids_stay_within_their_bounds() -> None:
    [request] = take(make_workload(random_config(IntRange(5000, 5000), IntRange(1, 1)), (1,)), 1)
    assert (min(ids(request)), max(ids(request))) == (IDS.low, IDS.high)


def test_the_same_seed_gives_the_same_prompts_and_another_one_others() -> None:
    config = random_config(IntRange(32, 64), IntRange(1, 9))
    first, again, other = (take(make_workload(config, seed), 5) for seed in ((1, 0), (1, 0), (1, 1)))
    assert first == again
    assert all(ids(one)[:8] != ids(two)[:8] for one, two in zip(first, other, strict=True))


def test_no_two_random_prompts_begin_alike() -> None:
    requests = take(make_workload(random_config(IntRange(32, 32), IntRange(1, 1)), (1,)), 100)
    assert len({tuple(ids(request)[:16]) for request in requests}) == 100


def test_text_is_as_many_words() -> None:
    [request] = take(make_workload(random_config(IntRange(40, 40), IntRange(1, 1), is_text=True), (1,)), 1)
    assert request.token_ids is None
    assert request.text is not None and len(request.text.split()) == 40


def test_equal_hash_ids_of_a_trace_are_equal_blocks(tmp_path: Path) -> None:
    rows = [row(0, 1200, 5, 0, 1, 2), row(1500, 1100, 6, 0, 1, 3), row(3000, 600, 7, 4, 5)]
    config = trace_config(write_trace(tmp_path / "trace.jsonl", *rows))
    workload = make_workload(config, (1,))
    first, second, third = take(workload, 3)
    assert next(workload, None) is None
    assert [len(ids(request)) for request in (first, second, third)] == [1200, 1100, 600]
    assert [request.num_output_tokens for request in (first, second, third)] == [5, 6, 7]
    shared = 2 * BLOCK_SIZE
    assert ids(first)[:shared] == ids(second)[:shared]
    assert ids(first)[shared : shared + 8] != ids(second)[shared : shared + 8]
    assert ids(first)[:8] != ids(third)[:8]


def test_another_load_shares_no_blocks_of_the_trace(tmp_path: Path) -> None:
    config = trace_config(write_trace(tmp_path / "trace.jsonl", row(0, 512, 1, 0)))
    [one], [two] = (take(make_workload(config, (1, number)), 1) for number in (0, 1))
    assert ids(one)[:8] != ids(two)[:8]


def test_sessions_of_a_trace_are_sessions_of_one_load(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", {**row(0, 5, 1), "session_id": 7}, row(1, 5, 1))
    config = trace_config(path)
    (one, none), (other, _) = (take(make_workload(config, (1, number)), 2) for number in (0, 1))
    assert one.session_key and other.session_key and one.session_key != other.session_key
    assert none.session_key == ""


def test_tokens_beyond_the_hash_ids_are_each_requests_own(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", row(0, 600, 1, 0), row(1, 600, 1, 0))
    one, two = take(make_workload(trace_config(path), (1,)), 2)
    assert ids(one)[:BLOCK_SIZE] == ids(two)[:BLOCK_SIZE]
    assert ids(one)[BLOCK_SIZE:][:8] != ids(two)[BLOCK_SIZE:][:8]


def test_an_even_draw_has_the_mean_of_its_bounds() -> None:
    rng = np.random.default_rng(1)
    drawn = [IntRange(32, 512).draw(rng) for _ in range(5000)]
    assert np.mean(drawn) == pytest.approx(272, rel=0.03)

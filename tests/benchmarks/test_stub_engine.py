"""The stub engine computes nothing, but it knows whether the blocks that it is given are the right ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.stub_engine import STEP_S, StubShared, WholeSteps, stub_layout
from quartet.engine.mock import MockEngineConfig, MockRunner
from quartet.engine.mock.runner import WrongBlocksError
from quartet.engine.runner import RunningRequest, ScheduledChunk
from quartet.kvcache.sequence import Sequence
from services.topology.topology import DEFAULT_MODEL_PATH
from tests.engine.fakes import make_request

PROMPT = list(range(20, 32))  # three blocks of four


@pytest.fixture
def runner() -> Iterator[MockRunner]:
    config = MockEngineConfig(model_path=str(DEFAULT_MODEL_PATH), num_blocks=16, block_size=4, max_model_len=64)
    made = MockRunner(StubShared(config))
    yield made
    made.close()


def running(token_ids: list[int], blocks: list[int]) -> RunningRequest:
    seq = Sequence(token_ids, block_size=4)
    seq.block_table = blocks
    return RunningRequest(request=make_request(token_ids), seq=seq)


def prefill(runner: MockRunner, blocks: list[int]) -> list[int]:
    chunk = ScheduledChunk(running(PROMPT, blocks), first_position=0, num_tokens=len(PROMPT), samples=True)
    return [sampled.token_id for sampled in runner.run([chunk])]


def decode(runner: MockRunner, blocks: list[int], token_ids: list[int] = PROMPT) -> None:
    chunk = ScheduledChunk(running([*token_ids, 7], blocks), first_position=len(PROMPT), num_tokens=1, samples=True)
    runner.run([chunk])


def test_tokens_do_not_depend_on_which_blocks_hold_them(runner: MockRunner) -> None:
    assert prefill(runner, [3, 1, 2]) == prefill(runner, [5, 6, 7])


def test_a_request_whose_blocks_hold_its_tokens_decodes(runner: MockRunner) -> None:
    prefill(runner, [3, 1, 2])
    decode(runner, [3, 1, 2, 9])


def test_moved_bytes_are_as_good(runner: MockRunner) -> None:
    prefill(runner, [3, 1, 2])
    assert runner.memory is not None
    for here, there in ((10, 3), (11, 1), (12, 2)):
        runner.memory.piece(here)[:] = runner.memory.piece(there)
    decode(runner, [10, 11, 12, 9])


@pytest.mark.parametrize("blocks", [[1, 3, 2, 9], [3, 1, 8, 9]])
def test_blocks_in_the_wrong_order_or_never_written_are_found(runner: MockRunner, blocks: list[int]) -> None:
    prefill(runner, [3, 1, 2])
    with pytest.raises(WrongBlocksError):
        decode(runner, blocks)


def test_a_block_that_came_half_is_found(runner: MockRunner) -> None:
    prefill(runner, [3, 1, 2])
    assert runner.memory is not None
    runner.memory.piece(1)[-4:] = bytes(4)
    with pytest.raises(WrongBlocksError):
        decode(runner, [3, 1, 2, 9])


def test_another_prompt_s_blocks_are_found(runner: MockRunner) -> None:
    prefill(runner, [3, 1, 2])
    with pytest.raises(WrongBlocksError):
        decode(runner, [3, 1, 2, 9], [*PROMPT[:-1], 99])


def test_a_block_is_one_mebibyte_for_32_tokens() -> None:
    assert stub_layout("f", 32).piece_size_bytes == 1 << 20


def test_a_step_that_began_late_takes_its_whole_time() -> None:
    # Each step reads the clock when it begins and before it sleeps. The second one begins 3 ms late.
    times_s, slept_s = [5.0, 5.0, 5.013, 5.013], []
    pacer = WholeSteps(clock=iter(times_s).__next__, sleep=slept_s.append)
    for _ in range(2):
        pacer.begin(is_continued=True)
        pacer.end(STEP_S)
    assert slept_s == pytest.approx([STEP_S, STEP_S])

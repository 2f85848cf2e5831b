"""The mock runner under the real engine: its time, its blocks, its hand-offs."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from quartet.engine.base import EngineRequest, Failed, Finished, FinishReason, Prefilled, RequestKind
from quartet.engine.mock import SAMPLING_FIELDS, MockEngineConfig, MockRunner, MockSettings, SharedByRanks, StepTiming
from quartet.engine.mock.runner import StepPacer, WrongBlocksError
from quartet.engine.runner import ModelRunner, RunningRequest, ScheduledChunk
from quartet.engine.sampling import Sampling
from quartet.errors import ConfigError, EngineError, ModelFilesError
from quartet.kvcache import sequence
from tests import tiny
from tests.engine.consumer import Consumer, StartEngine
from tests.engine.fakes import WAIT_S, FakePuller, make_request

PROMPT = list(range(300, 330))  # seven blocks of four, and two tokens
FAST = MockSettings(speed_up=1000.0)


def make_runner(
    text_dir: Path, *, num_blocks: int = 64, settings: MockSettings = FAST, pacer: StepPacer | None = None
) -> MockRunner:
    config = MockEngineConfig(model_path=str(text_dir), num_blocks=num_blocks, block_size=4, settings=settings)
    return MockRunner(SharedByRanks(config), pacer=pacer)


async def answer_alone(text_dir: Path, start_engine: StartEngine, request: EngineRequest) -> list[int]:
    """What an engine that has nothing else to do gives."""
    engine = await start_engine(make_runner(text_dir))
    consumer = Consumer(engine)
    engine.submit(request)
    await consumer.wait_terminal(request)
    return consumer.tokens[request.id]


def wait_for(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


class Stopwatch:
    """A clock that stands still but for the sleeps, which it notes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def sleep(self, duration_s: float) -> None:
        self.sleeps.append(duration_s)
        self.now += duration_s


def running(token_ids: Sequence[int], *, num_prompt: int) -> RunningRequest:
    seq = sequence.Sequence(token_ids, block_size=4)
    seq.block_table = list(range(seq.num_blocks))
    return RunningRequest(request=make_request(token_ids[:num_prompt]), seq=seq)


def test_the_mock_runner_has_tiny_blocks_that_transfers_can_read(text_dir: Path) -> None:
    made = make_runner(text_dir)
    typed: ModelRunner = made
    assert typed.memory is not None
    assert typed.memory.piece_size_bytes == typed.layout.piece_size_bytes == 32
    assert (typed.num_blocks, typed.vocab_size, typed.max_model_len) == (64, tiny.VOCAB_SIZE, tiny.MAX_MODEL_LEN)
    assert typed.eos_token_ids == {tiny.EOS_ID}
    fd = typed.memory.fd
    typed.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_steps_take_the_models_time_by_the_speed_up(text_dir: Path) -> None:
    watch = Stopwatch()
    timing = StepTiming(
        prefill_base=10, prefill_linear=1, prefill_square=0, decode_base=4, decode_linear=0, decode_square=0
    )
    settings = MockSettings(timing=timing, speed_up=2)
    runner = make_runner(text_dir, settings=settings, pacer=StepPacer(lambda: watch.now, watch.sleep))
    request = running(PROMPT, num_prompt=len(PROMPT))
    assert len(runner.run([ScheduledChunk(request, 0, 30, samples=True)])) == 1
    request.seq.append(7)
    request.seq.num_computed_tokens = 30
    assert len(runner.run([ScheduledChunk(request, 30, 1, samples=True)])) == 1
    runner.close()
    assert watch.sleeps == pytest.approx([0.020, 0.002])


def test_a_timing_that_falls_below_nothing_takes_no_time(text_dir: Path) -> None:
    runner = make_runner(text_dir, settings=MockSettings(timing=StepTiming(decode_base=0, decode_square=-1e12)))
    request = running([*PROMPT, 7], num_prompt=len(PROMPT))
    assert runner.step_s([ScheduledChunk(request, 30, 1, samples=True)]) == 0
    runner.close()


def test_blocks_that_hold_something_else_are_found(text_dir: Path) -> None:
    runner = make_runner(text_dir)
    decoding = running([*PROMPT, 7], num_prompt=len(PROMPT))
    with pytest.raises(WrongBlocksError, match=r"\[0, 1, 2, 3, 4, 5, 6\]"):
        runner.run([ScheduledChunk(decoding, 30, 1, samples=True)])
    runner.close()


async def test_an_answer_handed_over_goes_on_as_it_would_have_where_it_began(
    text_dir: Path, start_engine: StartEngine
) -> None:
    expected = await answer_alone(text_dir, start_engine, make_request(PROMPT, max_tokens=12))
    assert len(expected) == 12
    puller = FakePuller()
    source, there = await start_engine(make_runner(text_dir)), await start_engine(make_runner(text_dir), puller=puller)
    prefill = make_request(PROMPT, kind=RequestKind.PREFILL, max_tokens=12)
    consumer = Consumer(source)
    source.submit(prefill)
    prefilled = await consumer.wait_terminal(prefill)
    assert isinstance(prefilled, Prefilled)
    assert source.memory is not None
    assert source.capabilities.layout is not None
    assert source.capabilities.model_fingerprint == there.capabilities.model_fingerprint
    offer = puller.offer_prefilled(source.memory, source.capabilities.layout, prefilled)
    decode = make_request(PROMPT, generated=[prefilled.token_id], max_tokens=12, hand_off=offer)
    consumer = Consumer(there)
    there.submit(decode)
    assert await consumer.wait_terminal(decode) == Finished(decode.id, FinishReason.LENGTH, 12)
    assert [prefilled.token_id, *consumer.tokens[decode.id]] == expected
    assert puller.claims[0].has_fetched


async def test_bytes_that_came_wrong_end_the_engine(text_dir: Path, start_engine: StartEngine) -> None:
    puller = FakePuller()
    engine = await start_engine(make_runner(text_dir), puller=puller)
    # Blocks that were never written.
    assert engine.capabilities.layout is not None
    source = await start_engine(make_runner(text_dir))
    assert source.memory is not None
    offer = puller.offer(source.memory, engine.capabilities.layout, tuple(range(8)), len(PROMPT))
    request = make_request(PROMPT, generated=[300], hand_off=offer)
    consumer = Consumer(engine)
    engine.submit(request)
    failed = await consumer.wait_terminal(request)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, EngineError)
    with pytest.raises(EngineError, match="hold something else"):
        await consumer.wait_end()
    assert not engine.is_alive


async def test_a_wanted_end_comes_as_soon_as_it_may(text_dir: Path, start_engine: StartEngine) -> None:
    engine = await start_engine(make_runner(text_dir))
    bias = {tiny.EOS_ID: 100.0}
    ending = make_request(PROMPT, sampling=Sampling(max_tokens=9, min_tokens=3, logit_bias=bias))
    ignoring = make_request(PROMPT, sampling=Sampling(max_tokens=9, ignore_eos=True, logit_bias=bias))
    consumer = Consumer(engine)
    engine.submit(ending)
    engine.submit(ignoring)
    assert await consumer.wait_terminal(ending) == Finished(ending.id, FinishReason.STOP_ID, 4)
    assert await consumer.wait_terminal(ignoring) == Finished(ignoring.id, FinishReason.LENGTH, 9)
    assert tiny.EOS_ID not in consumer.tokens[ending.id][:3]
    assert consumer.tokens[ignoring.id] == [tiny.EOS_ID] * 9


@pytest.mark.parametrize("num_blocks", [64, 16])
async def test_prefixes_are_reused_and_a_small_pool_preempts_without_a_change_of_tokens(
    text_dir: Path, start_engine: StartEngine, num_blocks: int
) -> None:
    requests = [make_request([*PROMPT[:20], 400 + number], max_tokens=30) for number in range(3)]
    are_all_there = threading.Event()
    runner = make_runner(text_dir, num_blocks=num_blocks, pacer=StepPacer(sleep=lambda _: wait_for(are_all_there)))
    engine = await start_engine(runner)
    consumer = Consumer(engine)
    for request in requests:
        engine.submit(request)
    are_all_there.set()
    for request in requests:
        assert isinstance(await consumer.wait_terminal(request), Finished)
        assert consumer.tokens[request.id] == await answer_alone(text_dir, start_engine, request)
    # Sixteen blocks of four hold one of these answers to its end, not three.
    assert (engine.stats()[0].num_preemptions > 0) == (num_blocks == 16)
    repeated = make_request(requests[0].generation.prompt_token_ids, max_tokens=1)
    engine.submit(repeated)
    await consumer.wait_terminal(repeated)
    assert consumer.started[repeated.id].num_cached_tokens == 20


def test_log_probabilities_are_not_offered() -> None:
    assert "logprobs" not in SAMPLING_FIELDS
    assert {"temperature", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias"} <= SAMPLING_FIELDS


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_speed_up_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"^speed_up: must be above 0"):
        MockSettings(speed_up=value)


@pytest.mark.parametrize("field", ["num_blocks", "block_size", "max_model_len"])
def test_impossible_settings_are_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: must be at least 1"):
        MockEngineConfig(**{"model_path": "model", "num_blocks": 4, field: 0})  # type: ignore[arg-type]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"holds no tokenizer\.json"):
        make_runner(tmp_path)


def test_a_length_has_to_come_from_somewhere(text_dir: Path, tmp_path: Path) -> None:
    shutil.copy(text_dir / "tokenizer.json", tmp_path)
    with pytest.raises(ModelFilesError, match="set max_model_len"):
        make_runner(tmp_path)
    config = MockEngineConfig(model_path=str(tmp_path), num_blocks=4, max_model_len=100_000)
    runner = MockRunner(SharedByRanks(config))
    assert (runner.max_model_len, runner.vocab_size, runner.eos_token_ids) == (100_000, tiny.VOCAB_SIZE, frozenset())
    runner.close()


def test_another_tokenizer_is_another_model(text_dir: Path, tmp_path: Path) -> None:
    for file in (*text_dir.glob("*.json"), *text_dir.glob("*.jinja")):
        shutil.copy(file, tmp_path)
    fingerprints = []
    for _ in range(2):
        runner = make_runner(tmp_path)
        fingerprints.append(runner.layout.model_fingerprint)
        runner.close()
        (tmp_path / "generation_config.json").write_text("{}")
    original = make_runner(text_dir)
    original.close()
    assert fingerprints[0] == original.layout.model_fingerprint != fingerprints[1]

"""Steps launched one after the other, with tokens that only the device knows, give the tokens of steps that are run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from quartet.engine.base import EngineRequest, FinishReason, RequestKind
from quartet.engine.sampling import OutputOptions, Sampling
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.torch import TorchEngineConfig, create_runner
from tests.engine.fakes import make_request
from tests.engine.launching import Driver
from tests.engine.torch.test_oracle import ragged_prompts

Checkpoints = Callable[[str], Path]

# In float64 PyTorch's operations attend and sample, else our kernels. The second GPU is not what a thread has at first.
CUDA = [
    pytest.param(
        f"cuda:{index}",
        dtype,
        marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() <= index, reason="needs more GPUs")],
    )
    for index, dtype in ((0, "float64"), (0, "float32"), (1, "float32"))
]

ODD_SAMPLINGS = (
    Sampling(temperature=0.8, max_tokens=7),
    Sampling(temperature=0.0, frequency_penalty=1.5, max_tokens=9),
    Sampling(temperature=0.0, min_tokens=4, max_tokens=9),
)


@dataclass(frozen=True)
class Outcome:
    """What came of one request; ``top_ids`` of its log probabilities."""

    token_ids: list[int]
    top_ids: list[tuple[int, ...]]
    reason: FinishReason | None


def greedy_requests() -> list[EngineRequest]:
    return [
        make_request(prompt, sampling=Sampling(temperature=0.0, max_tokens=3 + i % 9), priority=i % 2)
        for i, prompt in enumerate(ragged_prompts())
    ]


def all_requests(whole: list[int]) -> list[EngineRequest]:
    """Greedy ones, one of which ends with a token of ``whole``, its output; some with rules; a prompt to hand off."""
    first, *others = greedy_requests()
    sampling = Sampling(temperature=0.0, max_tokens=3, stop_token_ids=(whole[1],))
    stopped = replace(first, generation=replace(first.generation, sampling=sampling))
    odd = [
        make_request(prompt, sampling=sampling, output=OutputOptions(logprobs=2))
        for prompt, sampling in zip(ragged_prompts(), ODD_SAMPLINGS, strict=False)
    ]
    return [stopped, *others, *odd, make_request(ragged_prompts()[9], kind=RequestKind.PREFILL, max_tokens=2)]


def run(
    model_path: Path, device: str, dtype: str, make_requests: Callable[[], list[EngineRequest]], *, launches: bool
) -> tuple[list[Outcome], Driver]:
    """What comes of the requests, in order, from a pool in which they are preempted."""
    config = TorchEngineConfig(
        model_path=str(model_path),
        dtype=dtype,
        device=device,
        num_blocks=20,
        block_size=4,
        num_threads=1,
        disable_overlap_scheduler=not launches,
    )
    runner = create_runner(config)
    assert (runner.launcher is runner) == (launches and device != "cpu")
    if launches:
        runner.launcher = runner  # a CPU does at once what it is told; the tokens go the same way
    try:
        driver = Driver(runner, SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=24))
        requests = make_requests()
        driver.submit(*requests)
        driver.run()
    finally:
        runner.close()
    outcomes = []
    for request in requests:
        finished, prefilled = driver.finished.get(request.id), driver.prefilled.get(request.id)
        token_ids = [*driver.tokens[request.id], *([prefilled.token_id] if prefilled else [])]
        top_ids = [item.top_token_ids for item in driver.logprobs[request.id]]
        outcomes.append(Outcome(token_ids, top_ids, finished.reason if finished else None))
    return outcomes, driver


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float64"), *CUDA])
def test_launched_steps_give_the_tokens_of_steps_that_are_run(device: str, dtype: str, checkpoint: Checkpoints) -> None:
    model_path = checkpoint("qwen3")
    alone, _ = run(model_path, device, dtype, greedy_requests, launches=False)
    whole = alone[0].token_ids

    def make_requests() -> list[EngineRequest]:
        return all_requests(whole)

    expected, _ = run(model_path, device, dtype, make_requests, launches=False)
    outcomes, driver = run(model_path, device, dtype, make_requests, launches=True)
    assert outcomes == expected
    assert (outcomes[0].token_ids, outcomes[0].reason) == (whole[:2], FinishReason.STOP_ID)
    stats = driver.steps.snapshot.stats
    assert stats.num_preemptions > 0
    assert driver.blocks.counts.in_use == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_is_launched_without_waiting_for_the_one_in_flight(checkpoint: Checkpoints) -> None:
    config = TorchEngineConfig(model_path=str(checkpoint("llama")), num_blocks=64, block_size=4, device="cuda:0")
    runner = create_runner(config)
    driver = Driver(runner, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64))
    driver.submit(*(make_request(range(9), sampling=Sampling(temperature=0.0, max_tokens=8)) for _ in range(4)))
    driver.turn(4)  # what is made once is made
    launch = runner.launch
    ends: list[torch.cuda.Event] = []

    def launch_behind_work(chunks: object) -> object:
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # half a second: the step waits for it
        before = torch.cuda.Event()  # type: ignore[no-untyped-call]
        before.record()
        step = launch(chunks)  # type: ignore[arg-type]
        assert not before.query(), "the launch has waited for the device"  # type: ignore[no-untyped-call]
        ends.append(before)
        return step

    runner.launch = launch_behind_work  # type: ignore[assignment, method-assign]
    driver.turn(2)
    assert len(ends) == 2
    runner.launch = launch  # type: ignore[method-assign]
    driver.run()
    runner.close()

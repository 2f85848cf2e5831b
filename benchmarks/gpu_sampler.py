"""What a step's sampling takes by itself: the time of the device's kernels, and of the host that launches them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quartet.engine.base import EngineRequest, Generation, RequestKind
from quartet.engine.runner import RunningRequest
from quartet.engine.sampling import Sampling
from quartet.engine.torch.sampler import LaunchedTokens, Sampler
from quartet.kvcache.sequence import Sequence as TokenSequence

# A GPU is kept busy for so long before each loop that the host has launched all of it: about 50 ms.
_NUM_BUSY_CYCLES = 100_000_000

# Standard deviations: of logits of random weights, and of logits of which few tokens have nearly all probability.
SPREADS: Mapping[str, float] = {"flat": 1.0, "peaked": 6.0}


@dataclass(frozen=True, kw_only=True)
class SamplerCase:
    """Steps of one size.

    Attributes:
        logits: of ``SPREADS``.
        device_ms: of a step's kernels and copies, one after the other; on the CPU, of all.
        host_ms: of the calls that launch them.
        greedy_device_ms: as ``device_ms``, of a step whose rows take the best token.
    """

    num_rows: int
    logits: str
    device_ms: float
    host_ms: float
    greedy_device_ms: float


def measure_sampler(
    device: str, dtype: str, vocab_size: int, num_rows: int, logits: str, num_steps: int, sampling: Mapping[str, Any]
) -> SamplerCase:
    """Time ``num_steps`` steps of ``num_rows`` requests, after as many to warm up."""
    on = torch.device(device)
    generator = torch.Generator(on).manual_seed(1)
    drawn = torch.randn((num_rows, vocab_size), generator=generator, device=on) * SPREADS[logits]
    drawn = drawn.to(getattr(torch, dtype))
    device_ms, host_ms = _time(on, drawn, num_steps, sampling)
    greedy_device_ms, _ = _time(on, drawn, num_steps, {"temperature": 0.0})
    return SamplerCase(
        num_rows=num_rows, logits=logits, device_ms=device_ms, host_ms=host_ms, greedy_device_ms=greedy_device_ms
    )


def _time(
    device: torch.device, logits: torch.Tensor, num_steps: int, sampling: Mapping[str, Any]
) -> tuple[float, float]:
    """Milliseconds a step, of the device and of the host."""
    requests = [_request(number, sampling) for number in range(len(logits))]
    if device.type == "cpu":
        return _time_on_cpu(logits, requests, num_steps)
    from quartet.engine.torch.device_sampler import DeviceSampler

    sampler = DeviceSampler(device, logits.shape[1])
    # As in an engine, whose decode steps leave logits in one place.
    sampler.warm_up(logits)
    sampler.expect(logits, len(logits))
    _time_on_gpu(sampler.launch, logits, requests, num_steps)
    return _time_on_gpu(sampler.launch, logits, requests, num_steps)


def _time_on_gpu(
    launch: Callable[[torch.Tensor, Sequence[RunningRequest]], LaunchedTokens],
    logits: torch.Tensor,
    requests: Sequence[RunningRequest],
    num_steps: int,
) -> tuple[float, float]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda._sleep(_NUM_BUSY_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    began = time.perf_counter()
    # What is launched stays alive until it is done, as in an engine.
    steps = []
    for _ in range(num_steps):
        steps.append(launch(logits, requests))
        for request in requests:
            request.seq.append_unread()
    host_s = time.perf_counter() - began
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / num_steps, 1000 * host_s / num_steps


def _time_on_cpu(logits: torch.Tensor, requests: Sequence[RunningRequest], num_steps: int) -> tuple[float, float]:
    sampler = Sampler()
    began = time.perf_counter()
    for _ in range(num_steps):
        # The sampler may change them.
        for request, token in zip(requests, sampler.sample(logits.clone(), requests), strict=True):
            request.seq.append(token.token_id)
    step_ms = 1000 * (time.perf_counter() - began) / num_steps
    return step_ms, step_ms


def _request(number: int, sampling: Mapping[str, Any]) -> RunningRequest:
    prompt = tuple(range(16, 144))
    generation = Generation(prompt_token_ids=prompt, sampling=Sampling(**sampling), seed=number)
    request = EngineRequest(id=number, kind=RequestKind.DECODE, generation=generation)
    return RunningRequest(request=request, seq=TokenSequence(prompt, block_size=16))

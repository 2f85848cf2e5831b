"""The kernels that draw, on a GPU: a million tokens, and whole vocabularies, as the CPU draws them.

``-s`` shows how many tokens differed because their sums tie, and what a launch takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from quartet.engine.runner import SampledToken
from quartet.engine.torch import TorchEngineConfig, create_runner
from quartet.engine.torch.sampler import (
    DrawParameters,
    LaunchedTokens,
    Sampler,
    gumbel_noise,
    noise_key,
    noise_state,
)
from quartet.engine.torch.sampler import draw as draw_on_the_cpu
from tests.engine.torch import many_draws
from tests.engine.torch.many_draws import NUM_STEPS, Batch, all_logits, draw_on_cpu
from tests.engine.torch.test_device_sampler import VOCAB_SIZE, make_requests, step_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

free_size_bytes = pytest.importorskip("quartet.engine.torch.graphs", reason="Triton is not installed").free_size_bytes
draw = pytest.importorskip("quartet.engine.torch.kernels.draw", reason="Triton is not installed")
device_sampler = pytest.importorskip("quartet.engine.torch.device_sampler")
if TYPE_CHECKING:
    from quartet.engine.torch import device_sampler
    from quartet.engine.torch.kernels import draw

NUM_DRAWS = 1_000_000
NEAR_TIE = 1e-5


@dataclass(frozen=True)
class Kind:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


KINDS = (
    Kind(),
    Kind(temperature=0.7),
    Kind(temperature=1.5, top_k=50),
    Kind(temperature=0.8, top_p=0.95),
    Kind(top_k=20, top_p=0.9, min_p=0.02),
    Kind(min_p=0.05),
    Kind(temperature=2.0, top_k=200, top_p=0.999),
    Kind(temperature=1e-3),
)


class Draws:
    """Rows of all kinds in turn, each with noise of its own."""

    def __init__(self, num_rows: int, first_position: int) -> None:
        kinds = [KINDS[row % len(KINDS)] for row in range(num_rows)]
        positions = range(first_position, first_position + num_rows)
        rows = np.zeros(num_rows, draw.ROW)
        rows["noise_state"] = noise_state(7, 1)
        rows["position"] = positions
        rows["temperature"] = [kind.temperature for kind in kinds]
        rows["top_k"] = [kind.top_k for kind in kinds]
        rows["top_p"] = [kind.top_p for kind in kinds]
        rows["largest_key"] = [draw.largest_key(kind.min_p) for kind in kinds]
        is_filtered = (rows["top_k"] > 0) | (rows["top_p"] < 1)
        rows["filtered_row"] = np.where(is_filtered, np.cumsum(is_filtered) - 1, -1)
        rows["ruled_row"] = -1
        self.table = rows
        self.rows = torch.from_numpy(rows.view(np.int64).reshape(num_rows, -1)).cuda()
        self.parameters = DrawParameters(
            temperature=torch.from_numpy(rows["temperature"].copy()),
            top_k=torch.from_numpy(rows["top_k"].copy()),
            top_p=torch.from_numpy(rows["top_p"].copy()),
            min_p=torch.tensor([kind.min_p for kind in kinds], dtype=torch.float64),
            keys=torch.tensor([noise_key(7, 1, position) for position in positions]),
        )

    def on_the_device(self, logits: torch.Tensor) -> torch.Tensor:
        return draw.draw_tokens(logits.cuda(), self.rows, self.table).cpu()

    def check(self, logits: torch.Tensor) -> int:
        """That only near ties differ from the CPU's draws; returns how many do."""
        drawn = self.on_the_device(logits)
        logits = logits.float()
        expected = draw_on_the_cpu(logits, self.parameters)
        rows = (drawn != expected).nonzero()[:, 0]
        pairs = torch.stack((drawn[rows], expected[rows]), dim=1)
        scaled = (logits[rows] - logits[rows].amax(-1, keepdim=True)) / self.parameters.temperature[rows, None].float()
        sums = gumbel_noise(self.parameters.keys[rows], pairs) + scaled.gather(1, pairs)
        assert bool(((sums[:, 0] - sums[:, 1]).abs() < NEAR_TIE).all()), (rows, pairs, sums)
        return len(rows)


@dataclass
class Count:
    """How many tokens were the CPU's, and how many others had a sum as good; the rest of such a request is left out."""

    num_equal: int = 0
    num_near_ties: int = 0
    different: list[tuple[object, ...]] = field(default_factory=list)

    def compare(self, batch: Batch, drawn: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
        for row, (ours, theirs) in enumerate(zip(zip(*drawn, strict=True), zip(*expected, strict=True), strict=True)):
            num_same = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len({*pair}) > 1), len(ours))
            self.num_equal += num_same
            if num_same < len(ours):
                pair = (ours[num_same], theirs[num_same])
                sums = batch.sums(row, theirs[:num_same], pair)
                if abs(sums[0] - sums[1]) < NEAR_TIE:
                    self.num_near_ties += 1
                else:
                    self.different.append((batch, row, num_same, pair, sums))


def draw_by_graphs(
    batch: Batch, sampler: device_sampler.DeviceSampler, place: torch.Tensor
) -> list[list[SampledToken]]:
    """The tokens of each step; as in an engine, a step is launched before the tokens of the one before are read."""
    requests, steps = batch.requests(), []
    logits = all_logits(batch.num_rows, batch.dtype).to(place.device)
    in_flight: LaunchedTokens | None = None
    for step in range(NUM_STEPS):
        place[: batch.num_rows] = logits[step % len(logits)]
        launched = sampler.launch(place[: batch.num_rows], requests)
        for request in requests:
            request.seq.append_unread()
        if in_flight is not None:
            steps.append(in_flight.read())
        in_flight = launched
    assert in_flight is not None
    return [*steps, in_flight.read()]


def check_logprobs(drawn: Sequence[SampledToken], expected: Sequence[SampledToken]) -> None:
    """Of a step's rows; tokens in bfloat16 often have the same, and no order then."""
    for found, wanted in zip(drawn, expected, strict=True):
        if found.logprobs is None or wanted.logprobs is None:
            assert found.logprobs is wanted.logprobs
        elif found.token_id == wanted.token_id:
            ours, theirs = ([item.logprob, *item.top_logprobs] for item in (found.logprobs, wanted.logprobs))
            # pytest.approx would take longer than all else here.
            assert all(abs(one - other) < 1e-4 for one, other in zip(ours, theirs, strict=True)), (found, wanted)


def test_a_million_tokens_by_graphs_with_all_rules_are_those_of_the_cpu_but_for_near_ties() -> None:
    # Each row is shared by 3 programs, and by 7.
    parts = [(250, torch.float32, 27), (100, torch.bfloat16, 34)]
    batches = [Batch(number, rows, dtype) for rows, dtype, count in parts for number in range(count)]
    assert sum(batch.num_draws for batch in batches) > NUM_DRAWS
    num_launched = 0

    def launch(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal num_launched
        num_launched += 1
        return draw.draw_tokens(*arguments, **options)

    count, device = Count(), torch.device("cuda:0")
    with ProcessPoolExecutor(
        min(16, os.cpu_count() or 1), get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as processes:
        on_the_cpu = processes.map(draw_on_cpu, batches)
        for num_rows, dtype, num_batches in parts:
            sampler = device_sampler.DeviceSampler(device, many_draws.VOCAB_SIZE, launch)
            place = torch.zeros((256, many_draws.VOCAB_SIZE), dtype=dtype, device=device)
            sampler.warm_up(place)
            sampler.expect(place, 256)
            for number in range(num_batches):
                batch = Batch(number, num_rows, dtype)
                drawn, expected = draw_by_graphs(batch, sampler, place), next(on_the_cpu)
                count.compare(batch, [_ids(step) for step in drawn], [_ids(step) for step in expected])
                for ours, theirs in zip(drawn, expected, strict=True):
                    check_logprobs(ours, theirs)
    assert num_launched == len(parts), "graphs draw all but what warms up"
    print(
        f"\n{count.num_equal} equal, {count.num_near_ties} other ones whose sum differs by less than {NEAR_TIE}, "
        f"{len(count.different)} different"
    )
    assert not count.different
    assert count.num_near_ties <= NUM_DRAWS * 1e-5  # about as many have sums as near as that
    assert count.num_equal >= NUM_DRAWS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 3, 256])
def test_a_whole_vocabulary_is_drawn_from_as_by_the_cpu(num_rows: int, dtype: torch.dtype) -> None:
    vocab_size, padded = 151_643, 151_936
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(num_rows, padded, generator=generator) * 3).to(dtype)[:, :vocab_size]
    draws = Draws(num_rows, 5)
    num_different = draws.check(logits)
    on_device = logits.cuda()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        draw.draw_tokens(on_device, draws.rows, draws.table)
    end.record()
    end.synchronize()
    print(f"\n{num_rows} rows, {dtype}: {num_different} different, {begin.elapsed_time(end) / 20:.3f} ms a launch")


@pytest.mark.parametrize("by_graphs", [False, True])
def test_steps_launched_before_any_token_is_read_give_the_tokens_of_the_cpu(by_graphs: bool) -> None:
    device = torch.device("cuda:0")
    samplers = device_sampler.DeviceSampler(device, VOCAB_SIZE), Sampler()
    samplers[0].warm_up(step_logits(0).to(device))
    # Larger than a step, so that graphs draw for rows that are none.
    place = torch.zeros((16, VOCAB_SIZE), device=device)
    if by_graphs:
        samplers[0].expect(place, 8)
        assert samplers[0]._graphs is not None
    requests, of_cpu = make_requests(logprobs=3), make_requests(logprobs=3)
    launched, expected = [], []
    for step in range(20):
        logits = step_logits(step).to(device)
        if by_graphs:
            logits = place[: len(requests)].copy_(logits)
        launched.append(samplers[0].launch(logits, requests))
        expected.append(samplers[1].sample(step_logits(step), of_cpu))
        for request, other, token in zip(requests, of_cpu, expected[-1], strict=True):
            request.seq.append_unread()
            other.seq.append(token.token_id)
    tokens = [step.read() for step in launched]
    assert [_ids(step) for step in tokens] == [_ids(step) for step in expected]
    if not by_graphs:  # which leave the tokens of all steps in one place
        assert [step.token_ids.tolist() for step in launched] == [_ids(step) for step in expected]
    for found, wanted in zip(chain(*tokens), chain(*expected), strict=True):
        assert found.logprobs is not None and wanted.logprobs is not None
        assert found.logprobs.top_token_ids == wanted.logprobs.top_token_ids
        assert found.logprobs.logprob == pytest.approx(wanted.logprobs.logprob, abs=1e-5)
        assert found.logprobs.top_logprobs == pytest.approx(wanted.logprobs.top_logprobs, abs=1e-5)


def test_graphs_take_the_memory_that_was_measured() -> None:
    device, max_rows, vocab_size = torch.device("cuda:0"), 64, 151_936
    place = torch.zeros((max_rows, vocab_size), dtype=torch.bfloat16, device=device)
    of_steps = draw.scratch_size_bytes(max_rows, vocab_size)
    for _ in range(5):  # what other programs on this GPU take or free meanwhile counts as well
        sampler = device_sampler.DeviceSampler(device, vocab_size)
        sampler.warm_up(place)
        size_bytes = sampler.graphs_size_bytes(place, len(place), max_rows) + of_steps
        before = free_size_bytes(device)
        sampler.expect(place, max_rows)
        taken = before - free_size_bytes(device)
        print(f"\nmeasured {size_bytes >> 20} MiB, {of_steps >> 20} of them as without graphs; taken {taken >> 20}")
        assert sampler._graphs is not None
        if place.nbytes < taken <= size_bytes + (32 << 20):
            return
        del sampler
        torch.cuda.empty_cache()
    pytest.fail("other memory was taken than was measured")


@pytest.mark.parametrize(("dtype", "sampler"), [("bfloat16", device_sampler.DeviceSampler), ("float64", Sampler)])
def test_an_engine_on_a_gpu_samples_there(dtype: str, sampler: type, checkpoint: Callable[[str], Path]) -> None:
    config = TorchEngineConfig(model_path=str(checkpoint("llama")), num_blocks=4, device="cuda:0", dtype=dtype)
    runner = create_runner(config)
    assert type(runner._sampler) is sampler
    if isinstance(runner._sampler, device_sampler.DeviceSampler):
        # Wherever decode steps run by graphs, they draw by graphs.
        assert (runner._sampler._graphs is None) == (getattr(runner._forward, "repeated_logits", None) is None)
    runner.close()


def _ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]

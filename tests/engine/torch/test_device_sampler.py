"""The device's sampler, step by step, against the CPU's: by Triton's interpreter."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quartet.engine.runner import RunningRequest
from quartet.engine.sampling import Sampling
from quartet.engine.torch.sampler import Sampler, create_sampler
from tests.engine.torch.test_sampler import VOCAB_SIZE, masks_of, random_logits, running
from tests.triton_kernels import interpreted

draw = pytest.importorskip("quartet.engine.torch.kernels.draw", reason="Triton is not installed")
device_sampler = pytest.importorskip("quartet.engine.torch.device_sampler")
draw_graphs = pytest.importorskip("quartet.engine.torch.draw_graphs")
if TYPE_CHECKING:
    from quartet.engine.torch import device_sampler
    from quartet.engine.torch.kernels import draw

CPU = torch.device("cpu")

SAMPLINGS = (
    Sampling(temperature=1.5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25),
    Sampling(temperature=0.0, min_tokens=3),
    Sampling(temperature=2.0, top_p=0.9),
    Sampling(temperature=1.2, min_tokens=2, frequency_penalty=-0.4, logit_bias={6: 4.0, 30: -3.0}),
    Sampling(temperature=0.0, presence_penalty=2.0),
    Sampling(temperature=0.0),
)


@pytest.fixture
def by_interpreter() -> Iterator[None]:
    with interpreted(draw):
        yield


def make_sampler() -> device_sampler.DeviceSampler:
    return device_sampler.DeviceSampler(CPU, VOCAB_SIZE, partial(draw.draw_tokens, tile=64))


def make_requests(output: Sequence[Sequence[int]] = ((),) * len(SAMPLINGS), **options: Any) -> list[RunningRequest]:
    stop_ids = frozenset({6, 8})
    return [
        running(item, generated=output[i], stop_ids=stop_ids, seed=i, **options) for i, item in enumerate(SAMPLINGS)
    ]


def tokens_of_the_cpu(num_steps: int) -> list[list[int]]:
    """Of each step, one a request."""
    requests, sampler = make_requests(), Sampler()
    steps = []
    for step in range(num_steps):
        steps.append([token.token_id for token in sampler.sample(step_logits(step), requests)])
        for request, token_id in zip(requests, steps[-1], strict=True):
            request.seq.append(token_id)
    return steps


def step_logits(step: int) -> torch.Tensor:
    logits = random_logits(len(SAMPLINGS), seed=step)
    logits[:, 6] += 4  # a stop id
    return logits


@pytest.mark.usefixtures("by_interpreter")
def test_steps_launched_before_any_token_is_read_give_the_tokens_of_the_cpu() -> None:
    requests, sampler = make_requests(), make_sampler()
    launched = []
    for step in range(5):
        launched.append(sampler.launch(step_logits(step), requests))
        for request in requests:
            request.seq.append_unread()
    tokens = [[token.token_id for token in step.read()] for step in launched]
    expected = tokens_of_the_cpu(5)
    assert tokens == expected
    assert [step.token_ids.tolist() for step in launched] == expected
    # The rules that change with the output were needed for it.
    assert all(step[1] not in (6, 8) for step in tokens[:3]) and tokens[3][1] == 6
    assert [step[4] for step in tokens] != [int(step_logits(step)[4].argmax()) for step in range(5)]


@pytest.mark.usefixtures("by_interpreter")
def test_tokens_of_earlier_attempts_and_of_other_workers_count() -> None:
    expected = tokens_of_the_cpu(4)
    requests = make_requests([[step[i] for step in expected[:2]] for i in range(len(SAMPLINGS))])
    sampler = make_sampler()
    assert [token.token_id for token in sampler.sample(step_logits(2), requests)] == expected[2]
    # As if the step had been lost: what was counted for it is not in the sequences.
    assert [token.token_id for token in sampler.sample(step_logits(2), requests)] == expected[2]
    for request, token_id in zip(requests, expected[2], strict=True):
        request.seq.append(token_id)
    # In other rows, with other neighbours.
    order = [3, 0, 5, 4]
    tokens = sampler.sample(step_logits(3)[order], [requests[i] for i in order])
    assert [token.token_id for token in tokens] == [expected[3][i] for i in order]


@dataclass
class StandInGraph:
    """Repeats what was captured by calling it again, on what lies in its memory then."""

    replay: Callable[[], object]


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures by stand-ins, on the CPU, for small tiles."""
    monkeypatch.setattr(draw_graphs, "capture", lambda run, _memory: StandInGraph(run))
    monkeypatch.setattr(draw_graphs, "stopping", lambda _device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    for name in ("_TILE", "_CAPACITY"):
        monkeypatch.setattr(draw, name, 32)


@pytest.mark.usefixtures("by_interpreter", "no_cuda")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_graph_draws_from_logits_that_lie_where_they_always_do() -> None:
    num_launched = 0

    def count(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal num_launched
        num_launched += 1
        return draw.draw_tokens(*arguments, **options)

    sampler, requests = device_sampler.DeviceSampler(CPU, VOCAB_SIZE, count), make_requests()
    place = torch.full((9, VOCAB_SIZE + 1), torch.nan)[:, :VOCAB_SIZE]
    sampler.expect(place, 7)
    expected = tokens_of_the_cpu(6)
    for step in range(6):
        # Steps of other rows in between, and logits elsewhere, as after a prompt.
        rows = range(6) if step % 4 != 3 else [4, 1, 0, 2, 3]
        logits = step_logits(step)[list(rows)]
        if step != 2:
            place[: len(rows)] = logits
            logits = place[: len(rows)]
        sampled = [token.token_id for token in sampler.sample(logits, [requests[row] for row in rows])]
        assert sampled == [expected[step][row] for row in rows]
        for row in range(6):
            requests[row].seq.append(expected[step][row])
    assert num_launched == 1
    # More rows than any step should have are drawn all the same.
    many = [running(Sampling(temperature=0.7), seed=i) for i in range(9)]
    place.copy_(random_logits(9))
    drawn = [token.token_id for token in sampler.sample(place, many)]
    assert drawn == [token.token_id for token in Sampler().sample(place.clone(), many)]
    assert num_launched == 2


@pytest.mark.usefixtures("no_cuda")
def test_where_nothing_can_be_captured_steps_launch_the_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_device: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(draw_graphs, "stopping", fail)
    sampler = device_sampler.DeviceSampler(CPU, VOCAB_SIZE, lambda logits, *_: logits.argmin(-1))
    logits = random_logits(2)
    sampler.expect(logits, 2)
    assert "operation not permitted" in caplog.text
    tokens = sampler.sample(logits, [running(Sampling()), running(Sampling())])
    assert [token.token_id for token in tokens] == logits.argmin(-1).tolist()


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(("max_num_seqs", "has_own"), [(7, True), (9, True), (10, False)])
def test_the_memory_of_graphs_is_that_of_all_which_steps_would_not_take_without_them(
    max_num_seqs: int, has_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[int] = []  # before each look at what is free
    num_captured = 0

    def capture_one(_run: object, _memory: object) -> None:
        nonlocal num_captured
        num_captured += 1

    def look(_device: object) -> tuple[int, int]:
        captured.append(num_captured)
        return 10**9 - 10**6 * num_captured, 0

    monkeypatch.setattr(draw_graphs, "capture", capture_one)
    monkeypatch.setattr(draw_graphs, "launch_draw", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", look)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    sampler = device_sampler.DeviceSampler(CPU, VOCAB_SIZE)
    size_bytes = sampler.graphs_size_bytes(torch.zeros(1, VOCAB_SIZE), 9, max_num_seqs)
    # All are captured once before: what is loaded for it stays.
    assert captured == [num_captured // 2, num_captured] and num_captured > 0
    of_steps = draw.scratch_size_bytes(max_num_seqs, VOCAB_SIZE) if has_own else 0
    assert size_bytes == 10**6 * num_captured // 2 - of_steps
    assert sampler._graphs is None


@pytest.mark.usefixtures("by_interpreter")
def test_log_probabilities_are_those_of_the_cpu() -> None:
    asked = [None, 0, 4, 1]
    samplings = [Sampling(temperature=0.3, top_k=2, logit_bias={5: 100.0})] * 3 + [Sampling(temperature=0.0)]
    logits = random_logits(4)
    requests = [running(item, logprobs=num) for item, num in zip(samplings, asked, strict=True)]
    tokens = make_sampler().sample(logits, requests)
    expected = Sampler().sample(logits.clone(), requests)
    assert [token.token_id for token in tokens] == [token.token_id for token in expected]
    for found, wanted, num in zip(tokens, expected, asked, strict=True):
        if found.logprobs is None or wanted.logprobs is None:
            assert found == wanted and num is None
            continue
        assert len(found.logprobs.top_token_ids) == num
        assert found.logprobs.token_id == found.token_id
        assert found.logprobs.top_token_ids == wanted.logprobs.top_token_ids
        assert found.logprobs.logprob == pytest.approx(wanted.logprobs.logprob, abs=1e-6)
        assert found.logprobs.top_logprobs == pytest.approx(wanted.logprobs.top_logprobs, abs=1e-6)


@pytest.mark.usefixtures("by_interpreter")
def test_masked_rows_choose_what_the_cpu_chooses_and_report_the_models_own_probabilities() -> None:
    logits = random_logits(len(SAMPLINGS))
    masks = masks_of((0, (3, 31)), (1, (6, 40)), (3, range(50, 60)), (5, (7,)))
    requests = make_requests(logprobs=1)
    expected = Sampler().sample(logits.clone(), requests, masks)
    launched = make_sampler().launch(logits.clone(), requests, masks)
    assert not launched.can_follow
    found = launched.read()
    assert [token.token_id for token in found] == [token.token_id for token in expected]
    assert found[5].token_id == 7
    for token, wanted in zip(found, expected, strict=True):
        assert token.logprobs is not None and wanted.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(wanted.logprobs.logprob, abs=1e-6)
        assert token.logprobs.top_token_ids == wanted.logprobs.top_token_ids


def test_greedy_rows_without_rules_launch_no_kernel() -> None:
    def refuse(*_arguments: object, **_options: object) -> torch.Tensor:
        raise AssertionError

    sampler = device_sampler.DeviceSampler(CPU, VOCAB_SIZE, refuse)
    logits = random_logits(3)
    tokens = sampler.sample(logits, [running(Sampling(temperature=0.0)) for _ in range(3)])
    assert [token.token_id for token in tokens] == logits.argmax(-1).tolist()
    masked = sampler.sample(logits, [running(Sampling(temperature=0.0)) for _ in range(3)], masks_of((1, (5,))))
    assert masked[1].token_id == 5


def test_requests_have_slots_for_as_long_as_they_live() -> None:
    rows: list[Any] = []

    def take(logits: torch.Tensor, _rows: torch.Tensor, table: Any) -> torch.Tensor:
        rows.append(table.copy())
        assert rows[-1]["ruled_row"].max() + 1 == (rows[-1]["tokens"] != 0).sum()
        assert rows[-1]["filtered_row"].max() + 1 == (rows[-1]["filtered_row"] >= 0).sum()
        return torch.zeros(len(logits), dtype=torch.int64)

    sampler = device_sampler.DeviceSampler(CPU, VOCAB_SIZE, take)
    table = sampler._requests
    samplings = [Sampling(top_k=1 + i % 30, presence_penalty=float(i % 2)) for i in range(150)]
    requests = [running(item, seed=i) for i, item in enumerate(samplings)]
    sampler.sample(random_logits(150), requests)
    assert len(table) == 150
    del requests[10:]
    gc.collect()
    assert (len(table), len(table._tensors), len(table._ends)) == (10, 5, 10)
    others = [running(Sampling(top_k=40), seed=i) for i in range(100)]
    sampler.sample(random_logits(110), [*others, *requests])
    assert rows[-1]["top_k"].tolist() == [40] * 100 + [1 + i for i in range(10)]
    assert [number for number in rows[-1]["ruled_row"].tolist() if number >= 0] == [0, 1, 2, 3, 4]
    assert len(table._rows) == 256


@pytest.mark.usefixtures("by_interpreter")
def test_what_requests_and_their_step_take_of_the_device_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Allocations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.size_bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default):
                self.size_bytes += made.nbytes
            return made

    for name in ("_TILE", "_CAPACITY"):
        monkeypatch.setattr(draw, name, 32)
    item = Sampling(top_k=20, top_p=0.5, logit_bias={3: 1.0})
    requests = [running(item, seed=i) for i in range(3)]
    sampler = device_sampler.DeviceSampler(CPU, VOCAB_SIZE)
    with Allocations() as allocations:
        sampler.sample(random_logits(3), requests)
    assert allocations.size_bytes == sampler.size_bytes(3)


def test_where_the_kernels_can_not_be_run_pytorch_samples(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Unusable:
        def __init__(self, *_: object) -> None:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(device_sampler, "DeviceSampler", Unusable)
    model = SimpleNamespace(
        dtype=torch.float32, get_output_embeddings=lambda: SimpleNamespace(weight=torch.zeros(VOCAB_SIZE, 1))
    )
    sampler: object = create_sampler(model, VOCAB_SIZE, torch.device("cuda:0"))  # type: ignore[arg-type]
    assert type(sampler) is Sampler
    assert "Failed to find C compiler" in caplog.text

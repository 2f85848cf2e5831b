"""The kernels that draw choose the tokens of the CPU's sampler, and compile for a Hopper.

By Triton's interpreter a row takes some hundredths of a second: ``test_draw_cuda.py`` draws a million on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from quartet.engine.sampling import Sampling
from quartet.engine.torch.sampler import Sampler, gumbel_noise, noise_bits, noise_key
from tests.engine.torch.test_draw import Settings, expected_probabilities
from tests.engine.torch.test_sampler import running
from tests.triton_kernels import compile_for_sm90, interpreted

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")
draw = pytest.importorskip("quartet.engine.torch.kernels.draw")
device_sampler = pytest.importorskip("quartet.engine.torch.device_sampler")
if TYPE_CHECKING:
    from quartet.engine.torch import device_sampler
    from quartet.engine.torch.kernels import draw

CPU = torch.device("cpu")

# States of which token 0's noise has all bits clear, and all bits set.
EXTREME_KEYS = (7046029254386353131, 3558559446808474027)


@pytest.fixture
def by_interpreter() -> Iterator[None]:
    with interpreted(draw, sys.modules[__name__]):
        yield


def tokens_of(logits: torch.Tensor, samplings: list[Sampling], tile: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """One token a row by the CPU's sampler, and by the kernels."""

    def requests() -> list[Any]:
        token_ids = [i * 7 % logits.shape[1] for i in range(9)]
        return [
            running(item, prompt=token_ids[:4], output=token_ids[2:], stop_ids=frozenset({1, 3}), seed=seed + i)
            for i, item in enumerate(samplings)
        ]

    sampler = device_sampler.DeviceSampler(CPU, logits.shape[1], partial(draw.draw_tokens, tile=tile))
    drawn = sampler.sample(logits, requests())
    expected = Sampler().sample(logits.clone(), requests())
    return [token.token_id for token in expected], [token.token_id for token in drawn]


# Equal sums of probabilities would be a matter of rounding: so no exact halves.
_SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 0.8, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 30, 99, 100, 101, 2**31 - 1]),
    top_p=st.just(1.0) | st.floats(0.001, 0.9999),
    min_p=st.just(0.0) | st.floats(0.0001, 1.0),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.5, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.6, 1.1]),
    logit_bias=st.just({}) | st.dictionaries(st.integers(0, 4), st.floats(-9, 9, width=32), max_size=3),
    min_tokens=st.sampled_from([0, 0, 5, 9]),
)


@pytest.mark.usefixtures("by_interpreter")
@given(
    samplings=st.lists(_SAMPLINGS, min_size=1, max_size=4),
    vocab_size=st.sampled_from([5, 32, 100]),
    spread=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    is_tied=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**32),
)
@example(  # zeros of both signs
    samplings=[Sampling(temperature=0.3, top_k=1, frequency_penalty=1.1)] * 3,
    vocab_size=32,
    spread=0.1,
    is_tied=True,
    dtype=torch.bfloat16,
    seed=4_294_967_296,
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_row_gets_the_token_that_the_cpu_draws(
    samplings: list[Sampling], vocab_size: int, spread: float, is_tied: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(samplings), vocab_size + 3, generator=generator) * spread
    if is_tied:
        logits = (logits * 2).round() / 2
        logits[:, ::3] = -math.inf
    expected, drawn = tokens_of(logits.to(dtype)[:, :vocab_size], samplings, tile=32, seed=seed)
    assert drawn == expected


@pytest.mark.usefixtures("by_interpreter")
def test_a_vocabulary_of_many_tiles_and_splits_is_searched_whole() -> None:
    samplings = [
        Sampling(),
        Sampling(top_p=0.9),
        Sampling(top_k=300),
        Sampling(top_k=40, top_p=0.8, min_p=0.01),
        Sampling(temperature=3.0, top_p=0.999),
        Sampling(temperature=0.0),
    ]
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(2))
    expected, drawn = tokens_of(logits, samplings, tile=128)
    assert drawn == expected
    assert max(drawn) > 384 > 128 > min(drawn)


@pytest.mark.usefixtures("by_interpreter")
def test_filters_keep_the_tokens_that_the_warpers_keep_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [
        Settings(top_k=1),
        Settings(top_k=7),
        Settings(top_k=300, top_p=0.8),
        Settings(top_p=0.3),
        Settings(temperature=2.5, top_p=0.95),
        Settings(temperature=0.4, top_k=20, top_p=0.7, min_p=0.05),
        Settings(temperature=0.75, top_k=400, top_p=0.7),
        Settings(top_k=200),
        Settings(top_k=500, top_p=0.6),
    ]
    logits = torch.randn(len(kinds), 700, generator=torch.Generator().manual_seed(3))
    # Many tie with the last one that top-k keeps, at a distance that is not the same by a multiplication.
    logits[-3, 300:600], logits[-3, 600:] = -0.2, -8.0
    best = logits[-3].amax()
    assert (best + 0.2) * (1 / torch.tensor(0.75)) > (best + 0.2) / torch.tensor(0.75)
    # More tokens than are held lie nearer to each other than passes tell apart.
    logits[-2:, 1:] /= 1e4
    logits[-2:, 0] = -9.0
    limits: list[torch.Tensor] = []
    find = draw._filter

    def note(_source: Any, found: torch.Tensor, *arguments: Any) -> None:
        find(_source, found, *arguments)
        limits.append(found.view(torch.float32))

    monkeypatch.setattr(draw, "_filter", note)
    tokens_of(logits, [Sampling(**dataclasses.asdict(kind)) for kind in kinds], tile=256)
    for row, kind in enumerate(kinds):
        distances = (logits[row].amax() - logits[row]) / kind.temperature
        kept = distances <= -math.log(kind.min_p) if kind.min_p else distances < math.inf
        assert torch.equal(kept & (distances <= limits[0][row]), expected_probabilities(logits[row], kind) > 0)


@pytest.mark.usefixtures("by_interpreter")
def test_many_rows_in_one_launch_get_the_tokens_that_the_cpu_draws() -> None:
    logits = torch.randn(150, 1000, generator=torch.Generator().manual_seed(4)) * 2
    expected, drawn = tokens_of(logits, [Sampling(temperature=0.5 + i / 50) for i in range(150)], tile=1024, seed=77)
    assert drawn == expected


@pytest.mark.usefixtures("by_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_without_a_best_token_gets_one_of_the_vocabulary_and_disturbs_no_other() -> None:
    logits = torch.randn(16, 70, generator=torch.Generator().manual_seed(5))
    logits[:4], logits[4:8], logits[8:12, 30:32] = math.nan, -math.inf, math.inf
    logits[:, 40:] = -math.inf
    samplings = [Sampling(), Sampling(temperature=0.0), Sampling(top_p=0.9), Sampling(top_k=3)] * 4
    expected, drawn = tokens_of(logits, samplings, tile=32)
    assert drawn[8:] == expected[8:]
    assert all(token_id in (30, 31) for token_id in drawn[8:12])
    assert all(0 <= token_id < 70 for token_id in drawn)


# The noise.


@triton.jit
def _probe(keys, bits, noise, bounds):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    index = tl.arange(0, 65536)
    mixed = draw._mixed_at(tl.load(keys + row).to(tl.uint64, bitcast=True), index)
    tl.store(bits + row * 65536 + index, draw._noise_bits(mixed))
    tl.store(noise + row * 65536 + index, draw._gumbel(draw._noise_bits(mixed)))
    tl.store(bounds + row * 65536 + index, -tl.log(draw._noise_bounds(mixed)))


@pytest.mark.usefixtures("by_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_noise_is_that_of_the_cpu_and_its_bounds_are_above_it_and_near() -> None:
    # Of the last two, token 0 mixes to the lowest bits and to the highest.
    keys = torch.tensor([*(noise_key(seed, 0, 5) for seed in range(4)), *EXTREME_KEYS])
    bits = torch.empty((6, 65536), dtype=torch.int64)
    noise, bounds = torch.empty((6, 65536), dtype=torch.float64), torch.empty((6, 65536))
    _probe[(6,)](keys, bits, noise, bounds)
    token_ids = torch.arange(65536)
    assert torch.equal(bits, noise_bits(keys[:, None], token_ids, 52))
    assert (int(bits[4, 0]), int(bits[5, 0])) == (0, 2**52 - 1)
    expected = gumbel_noise(keys, token_ids)
    torch.testing.assert_close(noise, expected, rtol=1e-13, atol=1e-13)
    excess = bounds.double() - expected
    assert float(excess.min()) > -draw._BOUND_MARGIN.value / 10
    excess[5, 0] = 0.0  # the largest of all noise has no bound
    assert float(excess[expected > 8].max()) < draw._BOUND_MARGIN.value
    assert float(expected.max() - expected.min()) < draw.LARGEST_DISTANCE


# Compilation.


_SOURCE = {"logits": "*bf16", "row_stride": "i32:16", "rows": "*i64", "ruled": "*fp32", "extremes": "*fp32"}
_SIZES = {"vocab_size": "i32:16", "num_splits": "i32"}
_SEARCHED = {"limits": "*i32", "brackets": "*fp32"}
_HELD = {"held": "*fp32", "num_held": "*i32", "masses": "*fp64", "num_passes": "i32", "by_mass": "i32", **_SIZES}
_CHOSEN = {"scores": "*fp64", "choices": "*i32"}


@pytest.mark.parametrize(
    ("name", "signature", "constants", "options"),
    [
        ("_prepare", {**_SOURCE, **_SIZES}, {"TILE": 512}, {"num_warps": 4}),
        (
            "_measure",
            {**_SOURCE, **_SEARCHED, "sums": "*fp32", "number": "i32", "by_mass": "i32", **_SIZES},
            {"TILE": 512, "CAPACITY": 4096},
            {"num_warps": 4, "maxnreg": 72},
        ),
        (
            "_collect",
            {**_SOURCE, **_SEARCHED, "sums": "*fp32", **_HELD},
            {"TILE": 512, "CAPACITY": 4096},
            {"num_warps": 4, "maxnreg": 80},
        ),
        ("_settle", {**_SOURCE, **_SEARCHED, **_HELD}, {"CAPACITY": 4096}, {"num_warps": 16}),
        ("_score", {**_SOURCE, "limits": "*i32", **_CHOSEN, **_SIZES}, {"TILE": 512}, {"num_warps": 4}),
        ("_choose", {"rows": "*i64", **_CHOSEN, "token_ids": "*i64", "num_splits": "i32"}, {}, {"num_warps": 1}),
    ],
)
def test_it_compiles_for_a_hopper_without_one_and_rounds_as_the_cpu_does(
    name: str,
    signature: Mapping[str, str],
    constants: Mapping[str, int],
    options: Mapping[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = compile_for_sm90(getattr(draw, name), signature, constants, enable_fp_fusion=False, **options)
    ptx = kernel.asm["ptx"]
    assert "div.full" not in ptx
    assert ("div.rn.f32" in ptx) == (name != "_choose")

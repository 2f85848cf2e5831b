"""What is drawn has the distribution that transformers' own warpers leave."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from quartet.engine.torch import sampler as draw_module
from quartet.engine.torch.sampler import DrawParameters, draw, noise_key

_NUM_DRAWS = 20_000


@dataclass(frozen=True)
class Settings:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def draw_many(logits: torch.Tensor, settings: Settings, num_draws: int = _NUM_DRAWS) -> torch.Tensor:
    """One token at each of many positions."""
    keys = [noise_key(9, 0, position) for position in range(num_draws)]
    return draw(logits.expand(num_draws, -1), parameters([settings] * num_draws, keys))


def parameters(settings: list[Settings], keys: list[int]) -> DrawParameters:
    return DrawParameters(
        temperature=torch.tensor([item.temperature for item in settings], dtype=torch.float64),
        top_k=torch.tensor([item.top_k for item in settings]),
        top_p=torch.tensor([item.top_p for item in settings], dtype=torch.float64),
        min_p=torch.tensor([item.min_p for item in settings], dtype=torch.float64),
        keys=torch.tensor(keys),
    )


def expected_probabilities(logits: torch.Tensor, settings: Settings) -> torch.Tensor:
    """By the warpers of transformers, in the order of ``generate``."""
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(settings.temperature)]
    warpers += [TopKLogitsWarper(settings.top_k)] if settings.top_k else []
    warpers += [TopPLogitsWarper(settings.top_p)] if settings.top_p < 1 else []
    warpers += [MinPLogitsWarper(settings.min_p)] if settings.min_p else []
    scores = logits[None].double()
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    return scores[0].softmax(-1)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(temperature=0.8),
        Settings(temperature=1.7),
        Settings(top_k=1),
        Settings(top_k=7),
        Settings(top_k=1000),
        Settings(top_p=0.3),
        Settings(top_p=0.9),
        Settings(top_p=1e-9),
        Settings(min_p=0.2),
        Settings(min_p=1.0),
        Settings(temperature=0.8, top_k=20, top_p=0.8),
        Settings(temperature=1.3, top_k=20, top_p=0.9, min_p=0.15),
        Settings(temperature=2.0, top_p=0.7, min_p=0.3),
    ],
)
def test_kept_tokens_and_frequencies_are_those_of_the_warpers(settings: Settings) -> None:
    logits = torch.randn(60, generator=torch.Generator().manual_seed(5)) * 0.8
    expected = expected_probabilities(logits, settings)
    counts = torch.bincount(draw_many(logits, settings), minlength=60)
    kept = expected > 0
    assert float(expected[kept].min()) * _NUM_DRAWS > 15, "a kept token might not be seen"
    assert torch.equal(counts > 0, kept)
    sigma = (expected * (1 - expected) * _NUM_DRAWS).sqrt()
    assert bool(((counts - expected * _NUM_DRAWS).abs() <= 4.5 * sigma + 1e-9).all())


@pytest.mark.parametrize("settings", [Settings(top_p=0.8), Settings(min_p=0.05), Settings(top_k=1500, top_p=0.99)])
def test_a_kept_set_larger_than_the_candidates_is_kept_whole(settings: Settings) -> None:
    vocab_size = 2000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(6)) * 0.2
    kept = expected_probabilities(logits, settings) > 0
    seen = torch.bincount(draw_many(logits, settings, 4000), minlength=vocab_size) > 0
    assert int(kept.sum()) > 1100
    assert not bool((seen & ~kept).any())
    # Candidates alone would be less than that.
    assert int(seen.sum()) > max(1024, 0.85 * int(kept.sum()))


def test_tokens_that_tie_with_the_last_kept_one_are_kept() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0])
    for settings in (Settings(top_k=2), Settings(top_p=0.5)):
        assert sorted(set(draw_many(logits, settings, 500).tolist())) == [0, 1, 2, 4]
    many = torch.zeros(500)  # more ties than spare candidates
    assert len(set(draw_many(many, Settings(top_k=2), 5000).tolist())) == 500


def test_no_row_sorts_the_vocabulary_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(16, 5000, generator=torch.Generator().manual_seed(5))
    settings = [Settings(top_k=50)] * 13
    settings += [Settings(top_k=4999), Settings(top_k=2**31 - 1), Settings(top_k=2**31 - 1, top_p=0.9)]
    keys = [noise_key(i, 0, 0) for i in range(16)]
    alone = [int(draw(logits[i : i + 1], parameters([settings[i]], [keys[i]]))) for i in range(16)]
    sorted_shapes: list[tuple[int, int]] = []
    topk = torch.topk

    def count(scaled: torch.Tensor, number: int, *, dim: int) -> object:
        sorted_shapes.append((scaled.shape[0], number))
        return topk(scaled, number, dim=dim)

    monkeypatch.setattr(torch, "topk", count)
    assert draw(logits, parameters(settings, keys)).tolist() == alone
    assert sorted_shapes == [(13, 50 + 64), (2, 5000)], "one row keeps all, which takes no sorting"


def test_a_rows_token_does_not_depend_on_the_rest_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(24, 3000, generator=generator)
    kinds = [
        Settings(),
        Settings(top_k=3),
        Settings(top_p=0.97, temperature=3.0),
        Settings(min_p=0.1),
        Settings(0.3, 90, 0.5, 0.01),
        Settings(temperature=1e-9),
    ]
    settings = [kinds[i % len(kinds)] for i in range(24)]
    keys = [noise_key(i, i % 3, 100 - i) for i in range(24)]
    together = draw(logits, parameters(settings, keys)).tolist()
    alone = [int(draw(logits[i : i + 1], parameters([settings[i]], [keys[i]]))) for i in range(24)]
    assert together == alone
    monkeypatch.setattr(draw_module, "_MAX_NOISE", 7000)
    assert draw(logits, parameters(settings, keys)).tolist() == alone


def test_last_bits_of_the_logits_rarely_matter() -> None:
    """Attempts on other workers see logits that differ by rounding: tokens must not."""
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(8))
    wobble = torch.randn(logits.shape, generator=torch.Generator().manual_seed(9)) * 1e-6
    settings = [Settings(top_p=0.95) if i % 2 else Settings() for i in range(200)]
    keys = [noise_key(1, 0, i) for i in range(200)]
    rows = parameters(settings, keys)
    assert torch.equal(draw(logits, rows), draw(logits + wobble, rows))


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_a_tiny_temperature_takes_the_best_token(temperature: float) -> None:
    logits = torch.tensor([-80.0, 3.0, 90.0, 89.0, -math.inf])
    assert set(draw_many(logits, Settings(temperature=temperature, top_p=0.9), 50).tolist()) == {2}
    assert set(draw_many(logits, Settings(temperature=temperature), 50).tolist()) == {2}
    tied = torch.tensor([-80.0, 90.0, 90.0, 89.0, -math.inf])
    assert set(draw_many(tied, Settings(temperature=temperature), 50).tolist()) == {1, 2}

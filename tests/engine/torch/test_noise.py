"""Noise is a function of seed, choice, position and token, and passes for independent Gumbel noise."""

from __future__ import annotations

import math
from itertools import product

import torch

from quartet.engine.torch.sampler import gumbel_noise, noise_key

# The first outputs of SplitMix64 from state 1234567 (rosettacode.org, "Pseudo-random numbers/Splitmix64").
_STATE = 1234567
_OUTPUTS = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)
_NUM_TOKENS = 50_000


def noise(seed: int, choice: int, position: int, num_tokens: int = _NUM_TOKENS) -> torch.Tensor:
    return gumbel_noise(torch.tensor([noise_key(seed, choice, position)]), torch.arange(num_tokens))[0]


def test_the_bits_are_splitmix64s() -> None:
    [values] = gumbel_noise(torch.tensor([_STATE]), torch.arange(len(_OUTPUTS)))
    expected = [-math.log(-math.log(((bits >> 12) + 0.5) / 2**52)) for bits in _OUTPUTS]
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_an_entry_depends_on_its_key_and_token_alone() -> None:
    keys = torch.tensor([noise_key(seed, 0, 5) for seed in range(3)])
    tokens = torch.tensor([[7, 2, 9], [9, 9, 1], [0, 7, 7]])
    table = gumbel_noise(keys, torch.arange(10))
    assert torch.equal(gumbel_noise(keys, tokens), table.gather(1, tokens))
    assert torch.equal(gumbel_noise(keys[1:2], torch.arange(10))[0], table[1])


def test_any_change_of_seed_choice_or_position_gives_unrelated_noise() -> None:
    seeds = (0, 1, 2**63, 2**64 - 1)
    rows = torch.stack([noise(*key) for key in product(seeds, (0, 1), (0, 1, 2))])
    correlations = torch.corrcoef(rows) - torch.eye(len(rows))
    assert float(correlations.abs().max()) < 5 / math.sqrt(_NUM_TOKENS)


def test_noise_is_standard_gumbel() -> None:
    values = noise(42, 0, 17).sort().values
    expected = torch.exp(-torch.exp(-values))  # the distribution function at each value
    actual = (torch.arange(_NUM_TOKENS) + 0.5) / _NUM_TOKENS
    assert float((actual - expected).abs().max()) < 1.95 / math.sqrt(_NUM_TOKENS)  # Kolmogorov-Smirnov, 0.1 %
    assert bool(values.isfinite().all())


def test_the_extreme_bits_give_finite_noise() -> None:
    gamma = 0x9E3779B97F4A7C15
    # Token 0 of this state mixes to all zeros: the mixer maps 0 to 0.
    state = -gamma % 2**64
    signed = state - 2**64 if state >> 63 else state
    [[value]] = gumbel_noise(torch.tensor([signed]), torch.tensor([0])).tolist()
    assert value == -math.log(53 * math.log(2))

"""Sampling noise as a pure function of (seed, choice, position, token id).

No generator has a state here: any attempt on any worker, in whatever batch, draws the same noise. A token is drawn by
the Gumbel-max trick (Gumbel 1954; Maddison et al., "A* Sampling", 2014): the argmax of logits plus independent Gumbel
noise is a sample of their softmax. It was chosen over one uniform number and the inverse of the cumulative
distribution because logits differ in their last bits between batches and devices: there, each such difference moves
all boundaries between tokens, and a token at the edge of a top-p set rescales all others; here the choice changes only
where the two best sums are as close as the difference itself. With filters, only the kept tokens need noise.

The bits come from SplitMix64 read by position (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014; mixer: Stafford's variant 13): integers only, hence equal on every device.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_UNIFORM_BITS = 52  # one less than a double's mantissa: the half step below keeps the ends 0 and 1 out


def noise_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit state of the noise at one position of one sequence, as a signed integer for int64 tensors."""
    state = 0
    for word in (seed, choice, position):
        state = _mix(((state + _GAMMA) ^ word) & _MASK)
    return _to_signed(state)


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, in float64.

    Args:
        keys: ``[N]`` int64, of ``noise_key``.
        token_ids: ``[C]`` or ``[N, C]`` int64.

    Returns:
        ``[N, C]``; an entry depends on its key and its token id alone.
    """
    bits = keys[:, None] + (token_ids + 1) * _to_signed(_GAMMA)
    _mix_tensor_(bits)
    uniform = _shift_right(bits, 64 - _UNIFORM_BITS).double().add_(0.5).mul_(2.0**-_UNIFORM_BITS)
    return uniform.log_().neg_().log_().neg_()


def _mix(state: int) -> int:
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        state = ((state ^ (state >> shift)) * multiplier) & _MASK
    return state ^ (state >> _SHIFTS[2])


def _mix_tensor_(bits: torch.Tensor) -> None:
    """``_mix`` in place; int64 multiplication wraps as unsigned 64-bit multiplication does."""
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        bits.bitwise_xor_(_shift_right(bits, shift)).mul_(_to_signed(multiplier))
    bits.bitwise_xor_(_shift_right(bits, _SHIFTS[2]))


def _shift_right(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """Logical shift: int64's own shift copies the sign."""
    return (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _to_signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word

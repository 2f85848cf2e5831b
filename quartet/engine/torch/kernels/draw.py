"""Draws one token a row on the device: rules, temperature, filters and noise in four launches, without sorting.

What is drawn is what ``quartet.engine.torch.sampler`` draws from the same logits: rules and temperature are the same
operations in float32, the noise is the same integers, and sums with noise are float64.

Each filter keeps the tokens up to some distance from the best one, and that distance is found by bisection. Distances
are floats of at least 0, whose bits as integers have the same order: 31 halvings of the integers are exact. To halve
over the whole vocabulary each time would be slow, so a few coarse passes come first, and what they leave is copied.
"""
# No `from __future__ import annotations`: Triton's interpreter would not know the constants any more.

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

#: One row of a launch, 64 bits a field:
#:
#: - ``noise_state``: of ``noise_state``, and the ``position`` that its token gets;
#: - ``stops_from``: the first position at which stop ids may be chosen;
#: - ``tokens``: address of ``[V]`` int32, what rules know of each token: ``IN_PROMPT``, ``IS_STOP_ID`` and how often it
#:   is in the output, times ``ONE_OUTPUT``; ``bias``: address of ``[V]`` float32. 0: there is none;
#: - ``ruled_row`` and ``filtered_row``: its number among the rows with ``tokens``, and among those with top-k or top-p;
#:   -1: it is none;
#: - ``top_k``: 0 for all; ``largest_key``: of ``largest_key``;
#: - ``temperature``: 0 takes the best token; ``top_p`` and penalties as in ``Sampling``.
ROW = np.dtype(
    [
        ("noise_state", "<i8"),
        ("position", "<i8"),
        ("stops_from", "<i8"),
        ("tokens", "<i8"),
        ("bias", "<i8"),
        ("ruled_row", "<i8"),
        ("filtered_row", "<i8"),
        ("top_k", "<i8"),
        ("largest_key", "<i8"),
        ("temperature", "<f8"),
        ("top_p", "<f8"),
        ("repetition_penalty", "<f8"),
        ("presence_penalty", "<f8"),
        ("frequency_penalty", "<f8"),
    ]
)
NUM_FIELDS = ROW.itemsize // 8

IN_PROMPT = 1
IS_STOP_ID = 2
ONE_OUTPUT = 4

#: A token this far below the best one, in units of log probability, is never drawn: noise lies between -3.7 and 36.8.
LARGEST_DISTANCE = 41.0


def _field(name: str) -> Any:
    assert ROW.names is not None
    return tl.constexpr(ROW.names.index(name))


_NOISE_STATE = _field("noise_state")
_POSITION = _field("position")
_STOPS_FROM = _field("stops_from")
_TOKENS = _field("tokens")
_BIAS = _field("bias")
_RULED_ROW = _field("ruled_row")
_FILTERED_ROW = _field("filtered_row")
_TOP_K = _field("top_k")
_LARGEST_KEY = _field("largest_key")
_TEMPERATURE = _field("temperature")
_TOP_P = _field("top_p")
_REPETITION = _field("repetition_penalty")
_PRESENCE = _field("presence_penalty")
_FREQUENCY = _field("frequency_penalty")

_NUM_FIELDS = tl.constexpr(NUM_FIELDS)
_IN_PROMPT = tl.constexpr(IN_PROMPT)
_IS_STOP_ID = tl.constexpr(IS_STOP_ID)
_ONE_OUTPUT = tl.constexpr(ONE_OUTPUT)
_LARGEST_DISTANCE = tl.constexpr(LARGEST_DISTANCE)
_MIN_TEMPERATURE = tl.constexpr(1e-6)

# A row is shared by so many programs at most, and a launch has about so many of them.
_MAX_SPLITS = 64
_NUM_PROGRAMS = 512
_SPLITS = tl.constexpr(_MAX_SPLITS)

# Tokens that a program takes at a time.
_TILE = 2048
_FILTER_TILE = 4096

# Thresholds that a coarse pass tries at once: each pass narrows the range to a quarter. Five leave 0.04.
_NUM_WAYS = tl.constexpr(4)
_ONE_WAY = tl.constexpr(1 / 4)
_MAX_COARSE_PASSES = tl.constexpr(5)
# Coarse sums are float32.
_COARSE_MARGIN = tl.constexpr(1.0001)

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
_LARGEST_UNIFORM = tl.constexpr((1 << 52) - 1)
_LOG_NUM_UNIFORMS = tl.constexpr(36.04365338911715)  # of 2 ** 52
_UNIFORM_STEP = tl.constexpr(2.0**-52)
# More than float32 gets wrong in sums of noise and distances.
_BOUND_MARGIN = tl.constexpr(1e-3)


def draw_tokens(
    logits: torch.Tensor, rows: torch.Tensor, *, num_ruled: int, num_filtered: int, tile: int = 0
) -> torch.Tensor:
    """Choose a token for each row, on the device's current stream, and count it in what its rules know.

    Args:
        logits: ``[N, V]`` bfloat16, float16 or float32, with the tokens of a row side by side; not changed.
        rows: ``[N, NUM_FIELDS]`` int64, ``ROW``, on the same device.
        num_ruled: how many have ``tokens``.
        num_filtered: how many have a ``filtered_row``.
        tile: tokens that a program takes at a time, a power of two; 0: what suits a GPU.

    Returns:
        ``[N]`` int64 token ids, on the device.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    num_splits = max(1, min(_MAX_SPLITS, _NUM_PROGRAMS // num_rows, triton.cdiv(vocab_size, tile or _TILE)))
    ruled = torch.empty((num_ruled, vocab_size), dtype=torch.float32, device=device)
    maxima = torch.empty((num_rows, _MAX_SPLITS), dtype=torch.float32, device=device)
    limits = torch.empty(num_rows, dtype=torch.int32, device=device)
    scores = torch.empty((num_rows, _MAX_SPLITS), dtype=torch.float64, device=device)
    choices = torch.empty((num_rows, _MAX_SPLITS), dtype=torch.int32, device=device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    source = (logits, logits.stride(0), rows, ruled)
    # A fused multiplication and addition would round otherwise than PyTorch's operations do.
    split: dict[str, Any] = {"TILE": tile or _TILE, "num_warps": 8, "enable_fp_fusion": False}
    whole: dict[str, Any] = {"TILE": tile or _FILTER_TILE, "num_warps": 16, "enable_fp_fusion": False}
    # Triton launches on the current device.
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _prepare[(num_rows, num_splits)](*source, maxima, vocab_size, num_splits, **split)
        if num_filtered:
            candidates = torch.empty((num_filtered, vocab_size), dtype=torch.float32, device=device)
            _filter[(num_rows,)](*source, maxima, candidates, limits, vocab_size, num_splits, **whole)
        _score[(num_rows, num_splits)](*source, maxima, limits, scores, choices, vocab_size, num_splits, **split)
        _choose[(num_rows,)](rows, scores, choices, token_ids, num_splits, num_warps=1)
    return token_ids


def largest_key(min_p: float) -> int:
    """The bits of the largest float32 distance at which ``min_p`` keeps a token, as an integer."""
    distance = min(LARGEST_DISTANCE, abs(float(np.log(min_p)))) if min_p > 0 else LARGEST_DISTANCE
    rounded = np.float32(distance)
    if float(rounded) > distance:
        rounded = np.nextafter(rounded, np.float32(0))
    return int(rounded.view(np.int32))


@triton.jit(do_not_specialize=["num_splits"])  # type: ignore[untyped-decorator]
def _prepare(  # type: ignore[no-untyped-def]
    logits, row_stride, rows, ruled, maxima, vocab_size, num_splits, TILE: tl.constexpr
):
    """Write the logits that rules leave to ``ruled``, and the largest of each split to ``maxima``, ``[N, SPLITS]``."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = _split_of(vocab_size, num_splits, TILE)
    record = rows + row * _NUM_FIELDS
    has_rules = tl.load(record + _TOKENS) != 0
    target = ruled + tl.load(record + _RULED_ROW) * vocab_size
    best = tl.full([TILE], float("-inf"), tl.float32)
    for first in range(begin, end, TILE):
        index = first + tl.arange(0, TILE)
        is_inside = index < end
        values = tl.load(logits + row * row_stride + index, mask=is_inside, other=float("-inf")).to(tl.float32)
        if has_rules:
            values = _ruled(values, record, index, is_inside)
            tl.store(target + index, values, mask=is_inside)
        best = tl.maximum(best, values)
    tl.store(maxima + row * _SPLITS + tl.program_id(1), tl.max(best, 0))


@triton.jit
def _ruled(values, record, index, is_inside):  # type: ignore[no-untyped-def]
    """Penalties, then bias, then stop ids where it is too early for them, as ``apply_rules`` does."""
    known = tl.load(_address(record + _TOKENS, tl.int32) + index, mask=is_inside, other=0)
    repetition = _float(record + _REPETITION).to(tl.float32)
    num_in_output = known // _ONE_OUTPUT
    is_seen = ((known & _IN_PROMPT) != 0) | (num_in_output > 0)
    repeated = tl.where(values > 0, tl.div_rn(values, tl.zeros_like(values) + repetition), values * repetition)
    values = tl.where(is_seen, repeated, values)
    values = values - num_in_output.to(tl.float32) * _float(record + _FREQUENCY).to(tl.float32)
    values = values - tl.where(num_in_output > 0, _float(record + _PRESENCE).to(tl.float32), 0.0)
    if tl.load(record + _BIAS) != 0:
        values = values + tl.load(_address(record + _BIAS, tl.float32) + index, mask=is_inside, other=0.0)
    is_too_early = tl.load(record + _POSITION) < tl.load(record + _STOPS_FROM)
    return tl.where(((known & _IS_STOP_ID) != 0) & is_too_early, float("-inf"), values)


@triton.jit(do_not_specialize=["num_splits"])  # type: ignore[untyped-decorator]
def _filter(  # type: ignore[no-untyped-def]
    logits, row_stride, rows, ruled, maxima, candidates, limits, vocab_size, num_splits, TILE: tl.constexpr
):
    """Write to ``limits``, ``[N]``, the largest distance that top-k, top-p and min-p all keep: its bits.

    ``candidates`` is room for ``[num_filtered, V]`` float32.
    """
    row = tl.program_id(0).to(tl.int64)
    record = rows + row * _NUM_FIELDS
    limit = tl.load(record + _LARGEST_KEY).to(tl.int32)
    filtered_row = tl.load(record + _FILTERED_ROW)
    if filtered_row >= 0:
        best = _best(maxima, row, num_splits)
        kept = candidates + filtered_row * vocab_size
        limit = tl.minimum(limit, _limit(logits, row_stride, row, record, ruled, best, kept, vocab_size, TILE))
    tl.store(limits + row, limit)


@triton.jit  # type: ignore[untyped-decorator]
def _limit(logits, row_stride, row, record, ruled, best, candidates, vocab_size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest key that top-k keeps and top-p keeps of what that leaves."""
    top_k = tl.load(record + _TOP_K)
    top_p = _float(record + _TOP_P)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    # What is kept is at most ``high`` away.
    low = tl.full([], 0.0, tl.float32)
    high = tl.full([], _LARGEST_DISTANCE, tl.float32)
    num_left = vocab_size + 0
    num_passes = 0
    while (num_left > TILE) & (num_passes < _MAX_COARSE_PASSES):
        tries = low + (high - low) * ((tl.arange(0, _NUM_WAYS) + 1).to(tl.float32) * _ONE_WAY)
        counts, masses, total = _measure(logits, row_stride, row, record, ruled, best, tries, vocab_size, TILE)
        has_mass = masses.to(tl.float64) >= top_p * total.to(tl.float64) * _COARSE_MARGIN
        is_enough = tl.where(has_top_k, counts >= top_k, has_mass)
        num_left = tl.min(tl.where(is_enough, counts, num_left), 0)
        high = tl.min(tl.where(is_enough, tries, high), 0)
        low = tl.max(tl.where(is_enough, low, tries), 0)
        num_passes += 1
    num_held, total = _copy_near(logits, row_stride, row, record, ruled, best, high, candidates, vocab_size, TILE)
    # Other threads have written what the loops below read.
    tl.debug_barrier()
    limit = high.to(tl.int32, bitcast=True)
    num = num_held
    if has_top_k:
        limit, num = _key_with(candidates, num_held, limit, num, top_k.to(tl.float64), TILE, HAS_MASS=False)
        num, total = _sums(candidates, num_held, limit, TILE, HAS_MASS=True)
    if top_p < 1:
        limit, num = _key_with(candidates, num_held, limit, num, top_p * total, TILE, HAS_MASS=True)
    return limit


@triton.jit  # type: ignore[untyped-decorator]
def _measure(logits, row_stride, row, record, ruled, best, tries, vocab_size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many tokens are no further away than each of ``tries``, their mass, and all tokens' mass."""
    counts = tl.zeros([TILE, _NUM_WAYS], tl.int32)
    masses = tl.zeros([TILE, _NUM_WAYS], tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, vocab_size, TILE):
        index = first + tl.arange(0, TILE)
        distances = _distances(logits, row_stride, row, record, ruled, best, index, vocab_size, vocab_size)
        mass = tl.exp(-distances)
        is_near = distances[:, None] <= tries[None, :]
        counts += is_near.to(tl.int32)
        masses += tl.where(is_near, mass[:, None], 0.0)
        total += mass
    return tl.sum(counts, 0), tl.sum(masses, 0), tl.sum(total, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_near(logits, row_stride, row, record, ruled, best, limit, target, vocab_size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the distances of at most ``limit`` to ``target``; returns their number and all tokens' mass in float64."""
    num = 0
    total = tl.zeros([TILE], tl.float64)
    for first in range(0, vocab_size, TILE):
        index = first + tl.arange(0, TILE)
        distances = _distances(logits, row_stride, row, record, ruled, best, index, vocab_size, vocab_size)
        total += tl.exp(-distances.to(tl.float64))
        is_near = (distances <= limit).to(tl.int32)
        num_near = tl.sum(is_near, 0)
        if num_near > 0:
            tl.store(target + num + tl.cumsum(is_near, 0) - 1, distances, mask=is_near != 0)
        num += num_near
    return num, tl.sum(total, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _key_with(candidates, num_held, upper, num, wanted, TILE: tl.constexpr, HAS_MASS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A key up to which candidates have the mass or number wanted, and no more of them than needed.

    ``num`` of them are up to ``upper``: taken for enough. Returns the key and the number up to it.
    """
    lower = -1
    num_lower = 0
    while (upper - lower > 1) & (num - num_lower > 1):
        middle = lower + ((upper - lower) >> 1)
        count, mass = _sums(candidates, num_held, middle, TILE, HAS_MASS)
        is_enough = mass >= wanted
        upper = tl.where(is_enough, middle, upper)
        num = tl.where(is_enough, count, num)
        lower = tl.where(is_enough, lower, middle)
        num_lower = tl.where(is_enough, num_lower, count)
    return upper, num


@triton.jit  # type: ignore[untyped-decorator]
def _sums(candidates, num_held, limit, TILE: tl.constexpr, HAS_MASS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of the candidates up to a key, and their mass, or else their number again, in float64."""
    counts = tl.zeros([TILE], tl.int32)
    masses = tl.zeros([TILE], tl.float64)
    for first in range(0, num_held, TILE):
        index = first + tl.arange(0, TILE)
        distances = tl.load(candidates + index, mask=index < num_held, other=float("inf"))
        is_near = distances.to(tl.int32, bitcast=True) <= limit
        counts += is_near.to(tl.int32)
        if HAS_MASS:
            masses += tl.where(is_near, tl.exp(-distances.to(tl.float64)), 0.0)
    count = tl.sum(counts, 0)
    if HAS_MASS:
        mass = tl.sum(masses, 0)
    else:
        mass = count.to(tl.float64)
    return count, mass


@triton.jit(do_not_specialize=["num_splits"])  # type: ignore[untyped-decorator]
def _score(  # type: ignore[no-untyped-def]
    logits, row_stride, rows, ruled, maxima, limits, scores, choices, vocab_size, num_splits, TILE: tl.constexpr
):
    """Write each split's best token and its logit, or its sum with noise, to ``choices`` and ``scores``."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = _split_of(vocab_size, num_splits, TILE)
    record = rows + row * _NUM_FIELDS
    best = _best(maxima, row, num_splits)
    limit = tl.load(record + _LARGEST_KEY).to(tl.int32)
    if tl.load(record + _FILTERED_ROW) >= 0:
        limit = tl.load(limits + row)
    is_greedy = _float(record + _TEMPERATURE) == 0
    if is_greedy:
        limit = 0
    key = _mixed((tl.load(record + _NOISE_STATE).to(tl.uint64, bitcast=True) + _GAMMA) ^ _position(record))
    # In range even if no logit is a number.
    choice = tl.minimum(begin, vocab_size - 1)
    score = tl.full([], float("-inf"), tl.float64)
    for first in range(begin, end, TILE):
        index = first + tl.arange(0, TILE)
        distances = _distances(logits, row_stride, row, record, ruled, best, index, end, vocab_size)
        is_kept = distances.to(tl.int32, bitcast=True) <= limit
        bounds = -distances
        if not is_greedy:
            bounds += _noise_bounds(_noise_bits(key, index))
        largest = tl.max(tl.where(is_kept, bounds, float("-inf")), 0)
        # Noise in float64 is dear, and few tiles can hold the best sum.
        if largest + _BOUND_MARGIN > score.to(tl.float32):
            sums = -distances.to(tl.float64)
            if not is_greedy:
                sums += _gumbel(_noise_bits(key, index))
            sums = tl.where(is_kept, sums, float("-inf"))
            found = tl.max(sums, 0)
            if found > score:
                choice = tl.min(tl.where(sums == found, index, vocab_size), 0)
                score = found
    tl.store(scores + row * _SPLITS + tl.program_id(1), score)
    tl.store(choices + row * _SPLITS + tl.program_id(1), choice)


@triton.jit(do_not_specialize=["num_splits"])
def _choose(rows, scores, choices, token_ids, num_splits):  # type: ignore[no-untyped-def]
    """Take the best of the splits' tokens, the first one of equals, and count it in what the row's rules know."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, _SPLITS)
    found = tl.load(scores + row * _SPLITS + split, mask=split < num_splits, other=float("-inf"))
    winner = tl.min(tl.where(found == tl.max(found, 0), split, _SPLITS), 0)
    token = tl.load(choices + row * _SPLITS + winner)
    tl.store(token_ids + row, token.to(tl.int64))
    record = rows + row * _NUM_FIELDS
    if tl.load(record + _TOKENS) != 0:
        known = _address(record + _TOKENS, tl.int32) + token
        tl.store(known, tl.load(known) + _ONE_OUTPUT)


@triton.jit  # type: ignore[untyped-decorator]
def _split_of(vocab_size, num_splits, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Begin and end of this program's tokens; there may be none."""
    size = tl.cdiv(tl.cdiv(vocab_size, num_splits), TILE) * TILE
    begin = tl.program_id(1) * size
    return begin, tl.minimum(begin + size, vocab_size)


@triton.jit
def _best(maxima, row, num_splits):  # type: ignore[no-untyped-def]
    """The row's largest logit."""
    split = tl.arange(0, _SPLITS)
    return tl.max(tl.load(maxima + row * _SPLITS + split, mask=split < num_splits, other=float("-inf")), 0)


@triton.jit
def _distances(logits, row_stride, row, record, ruled, best, index, end, vocab_size):  # type: ignore[no-untyped-def]
    """How far tokens are from the best one after temperature; infinite from ``end`` on."""
    if tl.load(record + _TOKENS) != 0:
        source = ruled + tl.load(record + _RULED_ROW) * vocab_size
        values = tl.load(source + index, mask=index < end, other=float("-inf"))
    else:
        values = tl.load(logits + row * row_stride + index, mask=index < end, other=float("-inf")).to(tl.float32)
    temperature = tl.maximum(_float(record + _TEMPERATURE).to(tl.float32), _MIN_TEMPERATURE)
    return tl.div_rn(best - values, tl.zeros_like(values) + temperature)


@triton.jit
def _noise_bits(key, token_ids):  # type: ignore[no-untyped-def]
    """As ``noise_bits`` of 52 bits: SplitMix64 read by position."""
    return (_mixed(key + (token_ids.to(tl.uint64) + 1) * _GAMMA) >> 12).to(tl.int64)


@triton.jit
def _gumbel(noise):  # type: ignore[no-untyped-def]
    """As ``gumbel_noise``, in float64."""
    uniform = (noise.to(tl.float64) + 0.5) * _UNIFORM_STEP
    return -tl.log(-tl.log(uniform))


@triton.jit
def _noise_bounds(noise):  # type: ignore[no-untyped-def]
    """At least the noise, but for rounding, in float32: -log(u) is at least 1 - u, and close where noise is large."""
    return -tl.log((-noise + _LARGEST_UNIFORM).to(tl.float32) + 0.5) + _LOG_NUM_UNIFORMS


@triton.jit
def _mixed(state):  # type: ignore[no-untyped-def]
    state = (state ^ (state >> 30)) * _MULTIPLIER_1
    state = (state ^ (state >> 27)) * _MULTIPLIER_2
    return state ^ (state >> 31)


@triton.jit
def _position(record):  # type: ignore[no-untyped-def]
    return tl.load(record + _POSITION).to(tl.uint64, bitcast=True)


@triton.jit
def _float(field):  # type: ignore[no-untyped-def]
    return tl.load(field).to(tl.float64, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _address(field, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(field).to(tl.pointer_type(dtype)), 16)

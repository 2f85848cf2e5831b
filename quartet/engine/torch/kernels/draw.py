"""Draws one token a row on the device: rules, temperature, filters and noise in a few launches, without sorting.

What is drawn is what ``quartet.engine.torch.sampler`` draws from the same logits: rules and temperature are the same
operations in float32, the noise is the same integers, and sums with noise are float64.

Each filter keeps the tokens up to some distance from the best one. Passes in float32, shared by many programs, narrow
down where that distance lies; one more pass weighs all tokens exactly and copies those in between, and one program a
row finds the distance among these by bisection. Distances are floats of at least 0, whose bits as integers have the
same order: halving the integers is exact.
"""
# No `from __future__ import annotations`: Triton's interpreter would not know the constants any more.

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
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
# Six for each of a Hopper's multiprocessors, which has room for all of them at once.
_NUM_PROGRAMS = 6 * 132
_SPLITS = tl.constexpr(_MAX_SPLITS)

# Tokens that a program takes at a time.
_TILE = 512

# Registers of a thread, so that there is room for six programs: Triton's own choice leaves room for five.
_NUM_REGISTERS = {"_measure": 72, "_collect": 80}

# Distances that the last step of a filter's search holds at once.
_CAPACITY = 4096

# Each pass narrows a search to an eighth: four leave 0.01 of the whole range, and of top-p's mostly 0.004.
_NUM_PASSES = 4
_MAX_PASSES = tl.constexpr(_NUM_PASSES)
_NUM_WAYS = tl.constexpr(8)
_ONE_WAY = tl.constexpr(1 / 8)
# Sums of passes are float32, and their distances are rounded otherwise than exact ones.
_COARSE_MARGIN = tl.constexpr(1.0001)
_ABOVE = tl.constexpr(1 + 2.0**-20)
_BELOW = tl.constexpr(1 - 2.0**-20)

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
_BOUND_STEP = tl.constexpr(2.0**-32)
_UNIFORM_STEP = tl.constexpr(2.0**-52)
# More than float32 gets wrong in sums of noise and distances.
_BOUND_MARGIN = tl.constexpr(1e-3)


@dataclass(frozen=True)
class Searches:
    """What a step's filters have to search for.

    Attributes:
        has_top_k, has_top_p: whether some row has such a filter.
        narrows_top_p: whether passes narrow down the search for top-p: not if top-k leaves few tokens in all rows.
    """

    has_top_k: bool
    has_top_p: bool
    narrows_top_p: bool

    @classmethod
    def of(cls, table: npt.NDArray[np.void], vocab_size: int, tile: int = 0) -> Self:
        """Those of these rows; arguments as for ``draw_tokens``."""
        capacity = tile or _CAPACITY
        is_filtered = table["filtered_row"] >= 0
        if not is_filtered.any():
            return cls(False, False, False)
        top_k = table["top_k"]
        has_top_k = is_filtered & (top_k > 0) & (top_k < vocab_size)
        has_top_p = is_filtered & (table["top_p"] < 1)
        has_many = ~(has_top_k & (top_k <= capacity // 2))
        narrows_top_p = vocab_size > capacity and bool((has_top_p & has_many).any())
        return cls(bool(has_top_k.any()), bool(has_top_p.any()), narrows_top_p)

    @classmethod
    def every(cls, vocab_size: int) -> list[Self]:
        """All that there are."""
        narrows = vocab_size > _CAPACITY
        kinds = [(False, False, False), (True, False, False), (False, True, narrows), (True, True, False)]
        return [cls(*kind) for kind in [*kinds, *([(True, True, True)] if narrows else [])]]


@dataclass(frozen=True)
class Scratch:
    """Memory of one launch at a time; ``N`` rows at least, of which so many have rules, or filters.

    Attributes:
        ruled: ``[num_ruled, V]`` float32, logits that rules leave.
        extremes: ``[N, 2, SPLITS]`` float32.
        limits: ``[N]`` int32.
        scores: ``[N, SPLITS]`` float64.
        choices: ``[N, SPLITS]`` int32.
        brackets, sums, held, num_held, masses: of the searches of rows with filters.
    """

    ruled: torch.Tensor
    extremes: torch.Tensor
    limits: torch.Tensor
    scores: torch.Tensor
    choices: torch.Tensor
    brackets: torch.Tensor
    sums: torch.Tensor
    held: torch.Tensor
    num_held: torch.Tensor
    masses: torch.Tensor

    @classmethod
    def of(
        cls, num_rows: int, num_ruled: int, num_filtered: int, num_held: int, vocab_size: int, device: torch.device
    ) -> Self:
        """New memory; ``num_held`` are distances that are held at once, of all rows and splits."""

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            ruled=empty(torch.float32, num_ruled, vocab_size),
            extremes=empty(torch.float32, num_rows, 2, _MAX_SPLITS),
            limits=empty(torch.int32, num_rows),
            scores=empty(torch.float64, num_rows, _MAX_SPLITS),
            choices=empty(torch.int32, num_rows, _MAX_SPLITS),
            brackets=empty(torch.float32, num_filtered, _NUM_PASSES + 1, 2),
            sums=empty(torch.float32, num_filtered, _NUM_PASSES, _MAX_SPLITS, _NUM_WAYS.value),
            held=empty(torch.float32, num_held),
            num_held=empty(torch.int32, num_filtered, _MAX_SPLITS),
            masses=empty(torch.float64, num_filtered, 2, _MAX_SPLITS),
        )

    @classmethod
    def up_to(cls, num_rows: int, num_busy: int, vocab_size: int, device: torch.device) -> Self:
        """For launches of up to ``num_rows`` rows each, of which up to ``num_busy`` have rules and filters."""
        num_held = max(_NUM_PROGRAMS, num_busy) * _CAPACITY
        return cls.of(num_rows, num_busy, num_busy, num_held, vocab_size, device)


def draw_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    table: npt.NDArray[np.void],
    tile: int = 0,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """Choose a token for each row, on the device's current stream, and count it in what its rules know.

    Args:
        logits: ``[N, V]`` bfloat16, float16 or float32, with the tokens of a row side by side; not changed.
        rows: ``[N, NUM_FIELDS]`` int64, ``ROW``, on the same device.
        table: ``[N]`` of ``ROW``, the same on the host.
        tile: tokens that a program takes or holds at a time, a power of two; 0: what suits a GPU.
        scratch: enough for these rows; ``None``: new memory.

    Returns:
        ``[N]`` int64 token ids, on the device.
    """
    num_rows, vocab_size = logits.shape
    if scratch is None:
        num_ruled, num_filtered = (int(table[name].max()) + 1 for name in ("ruled_row", "filtered_row"))
        num_held = num_filtered * _num_splits(num_rows, vocab_size, tile or _TILE) * (tile or _CAPACITY)
        scratch = Scratch.of(num_rows, num_ruled, num_filtered, num_held, vocab_size, logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    launch_draw(logits, rows, Searches.of(table, vocab_size, tile), scratch, token_ids, tile)
    return token_ids


def launch_draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    searches: Searches,
    scratch: Scratch,
    token_ids: torch.Tensor,
    tile: int = 0,
) -> None:
    """``draw_tokens`` into ``token_ids``, ``[N]`` int64, with all memory given. A CUDA graph can capture it."""
    num_rows, vocab_size = logits.shape
    num_splits = _num_splits(num_rows, vocab_size, tile or _TILE)
    limits, found = scratch.limits, (scratch.scores, scratch.choices)
    source = (logits, logits.stride(0), rows, scratch.ruled, scratch.extremes)
    # A fused multiplication and addition would round otherwise than PyTorch's operations do.
    options: dict[str, Any] = {"TILE": tile or _TILE, "num_warps": 4, "enable_fp_fusion": False}
    # Triton launches on the current device.
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _prepare[(num_rows, num_splits)](*source, vocab_size, num_splits, **options)
        _filter(source, limits, searches, scratch, num_splits, tile)
        _score[(num_rows, num_splits)](*source, limits, *found, vocab_size, num_splits, **options)
        _choose[(num_rows,)](rows, *found, token_ids, num_splits, num_warps=1)


def scratch_size_bytes(num_rows: int, vocab_size: int) -> int:
    """Device memory that ``draw_tokens`` takes at most, while it draws for so many rows."""
    ruled = vocab_size * 4
    held = _num_splits(num_rows, vocab_size, _TILE) * _CAPACITY * 4
    num_ways: int = _NUM_WAYS.value
    passes = (_NUM_PASSES + 1) * 2 * 4 + _NUM_PASSES * _MAX_SPLITS * num_ways * 4
    # Of each split: extremes, score and choice, number held and two masses.
    of_splits = _MAX_SPLITS * (2 * 4 + 8 + 4 + 4 + 2 * 8)
    return num_rows * (ruled + held + passes + of_splits + NUM_FIELDS * 8 + 4 + 8)


def _num_splits(num_rows: int, vocab_size: int, tile: int) -> int:
    return max(1, min(_MAX_SPLITS, _NUM_PROGRAMS // num_rows, -(-vocab_size // tile)))


def _filter(
    source: tuple[Any, ...], limits: torch.Tensor, searches: Searches, scratch: Scratch, num_splits: int, tile: int
) -> None:
    """Write to ``limits``, ``[N]``, how far away the filters of each row that has some keep tokens: bits of distances.

    ``source`` is what kernels read tokens from.
    """
    num_rows, vocab_size = source[0].shape
    brackets, sums = scratch.brackets, scratch.sums
    found = (scratch.held, scratch.num_held, scratch.masses)
    capacity = tile or _CAPACITY
    grid = (num_rows, num_splits)
    options: dict[str, Any] = {"CAPACITY": capacity, "enable_fp_fusion": False}
    split: dict[str, Any] = {"TILE": tile or _TILE, "num_warps": 4, **options}
    measure, collect = ({**split, "maxnreg": _NUM_REGISTERS[name]} for name in ("_measure", "_collect"))
    # What is left of many tokens is searched in passes.
    kinds = ((0, searches.has_top_k, vocab_size > capacity), (1, searches.has_top_p, searches.narrows_top_p))
    for by_mass, is_asked, is_narrowed in kinds:
        if not is_asked:
            continue
        num_passes = _NUM_PASSES if is_narrowed else 0
        sizes = (by_mass, vocab_size, num_splits)
        for number in range(num_passes):
            _measure[grid](*source, limits, brackets, sums, number, *sizes, **measure)
        _collect[grid](*source, limits, brackets, sums, *found, num_passes, *sizes, **collect)
        _settle[(num_rows,)](*source, limits, brackets, *found, num_passes, *sizes, num_warps=16, **options)


def largest_key(min_p: float) -> int:
    """The bits of the largest float32 distance at which ``min_p`` keeps a token, as an integer."""
    distance = min(LARGEST_DISTANCE, abs(float(np.log(min_p)))) if min_p > 0 else LARGEST_DISTANCE
    rounded = np.float32(distance)
    if float(rounded) > distance:
        rounded = np.nextafter(rounded, np.float32(0))
    return int(rounded.view(np.int32))


@triton.jit(do_not_specialize=["num_splits"])  # type: ignore[untyped-decorator]
def _prepare(  # type: ignore[no-untyped-def]
    logits, row_stride, rows, ruled, extremes, vocab_size, num_splits, TILE: tl.constexpr
):
    """Write the logits that rules leave to ``ruled``, and the largest and the least of each split to ``extremes``.

    These are ``[N, 2, SPLITS]``; the least is finite, or infinity if none is.
    """
    row = tl.program_id(0).to(tl.int64)
    begin, end = _split_of(vocab_size, num_splits, TILE)
    record = rows + row * _NUM_FIELDS
    has_rules = tl.load(record + _TOKENS) != 0
    tokens = _address(record + _TOKENS, tl.int32)
    rules = _rules(record)
    source = logits + row * row_stride
    target = ruled + tl.load(record + _RULED_ROW) * vocab_size
    best = tl.full([TILE], float("-inf"), tl.float32)
    least = tl.full([TILE], float("inf"), tl.float32)
    place = tl.arange(0, TILE)
    # Here and below: the next tile's loads are on their way while this one is computed.
    next_values = tl.load(source + begin + place, mask=begin + place < end, other=float("-inf"))
    known_end = tl.where(has_rules, end, 0)
    next_known = tl.load(tokens + begin + place, mask=begin + place < known_end, other=0)
    for first in range(begin, end, TILE):
        values, known = next_values.to(tl.float32), next_known
        index, following = first + place, first + TILE + place
        next_values = tl.load(source + following, mask=following < end, other=float("-inf"))
        next_known = tl.load(tokens + following, mask=following < known_end, other=0)
        if has_rules:
            values = _ruled(values, known, rules, index, index < end)
            tl.store(target + index, values, mask=index < end)
        best = tl.maximum(best, values)
        least = tl.minimum(least, tl.where(values > float("-inf"), values, float("inf")))
    of_split = extremes + row * 2 * _SPLITS + tl.program_id(1)
    tl.store(of_split, tl.max(best, 0))
    tl.store(of_split + _SPLITS, tl.min(least, 0))


@triton.jit
def _rules(record):  # type: ignore[no-untyped-def]
    """The row's penalties, the address of its bias, and whether it is too early for stop ids."""
    repetition = _float(record + _REPETITION).to(tl.float32)
    frequency = _float(record + _FREQUENCY).to(tl.float32)
    presence = _float(record + _PRESENCE).to(tl.float32)
    is_too_early = tl.load(record + _POSITION) < tl.load(record + _STOPS_FROM)
    return repetition, frequency, presence, tl.load(record + _BIAS), is_too_early


@triton.jit
def _ruled(values, known, rules, index, is_inside):  # type: ignore[no-untyped-def]
    """Penalties, then bias, then stop ids where it is too early for them, as ``apply_rules`` does."""
    repetition, frequency, presence, bias, is_too_early = rules
    num_in_output = known // _ONE_OUTPUT
    if repetition != 1:
        is_seen = ((known & _IN_PROMPT) != 0) | (num_in_output > 0)
        repeated = tl.where(values > 0, tl.div_rn(values, tl.zeros_like(values) + repetition), values * repetition)
        values = tl.where(is_seen, repeated, values)
    values = values - num_in_output.to(tl.float32) * frequency
    values = values - tl.where(num_in_output > 0, presence, 0.0)
    if bias != 0:
        values = values + tl.load(bias.to(tl.pointer_type(tl.float32)) + index, mask=is_inside, other=0.0)
    return tl.where(((known & _IS_STOP_ID) != 0) & is_too_early, float("-inf"), values)


@triton.jit(do_not_specialize=["number", "by_mass", "num_splits"])  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    logits, row_stride, rows, ruled, extremes, limits, brackets, sums, number, by_mass, vocab_size, num_splits,
    TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Pass ``number`` of a search: write the mass, or number, of the split's tokens up to each try to ``sums``.

    ``sums`` is ``[num_filtered, MAX_PASSES, SPLITS, WAYS]`` float32, the last of a split is that of all its tokens up
    to the cap.
    """
    row = tl.program_id(0).to(tl.int64)
    record = rows + row * _NUM_FIELDS
    if _is_searched(record, by_mass, vocab_size) & ~_has_few(record, by_mass, vocab_size, CAPACITY):
        begin, end = _split_of(vocab_size, num_splits, TILE)
        best = _best(extremes, row, num_splits)
        low, high, cap = _bracket(
            record, row, extremes, limits, brackets, sums, number, by_mass, vocab_size, num_splits, CAPACITY
        )
        tries = _tries(low, high, cap)
        # A division takes as long as all else; ``_bracket`` knows that these distances are a little off.
        temperature = _temperature(record)
        scale = tl.div_rn(tl.full([], 1.0, tl.float32), temperature)
        found = tl.zeros([_NUM_WAYS, TILE], tl.float32)
        source = _source(logits, row_stride, row, record, ruled, vocab_size)
        following = _load(source, begin + tl.arange(0, TILE), end)
        for first in range(begin, end, TILE):
            values = _values(source, following)
            following = _load(source, first + TILE + tl.arange(0, TILE), end)
            distances = (best - values) * scale
            if cap < float("inf"):
                # Many tokens may lie right at the cap, and all of them count.
                distances = _distance(best, values, temperature)
            weights = tl.zeros([TILE], tl.float32) + 1
            if by_mass:
                weights = tl.exp(-distances)
            is_near = (distances[None, :] <= tries[:, None]).to(tl.float32)
            found = tl.fma(is_near, tl.broadcast_to(weights[None, :], [_NUM_WAYS, TILE]), found)
        place = (tl.load(record + _FILTERED_ROW) * _MAX_PASSES + number) * _SPLITS + tl.program_id(1)
        tl.store(sums + place * _NUM_WAYS + tl.arange(0, _NUM_WAYS), tl.sum(found, 1))


@triton.jit(do_not_specialize=["num_passes", "by_mass", "num_splits"])  # type: ignore[untyped-decorator]
def _collect(  # type: ignore[no-untyped-def]
    logits, row_stride, rows, ruled, extremes, limits, brackets, sums, held, num_held, masses, num_passes, by_mass,
    vocab_size, num_splits, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Write the distances that a search still has to tell apart to ``held``, and weigh all others exactly.

    ``held`` is ``[num_filtered, num_splits, CAPACITY]`` float32: what does not go in is left out. ``num_held``,
    ``[num_filtered, SPLITS]`` int32, counts it all the same. ``masses``, ``[num_filtered, 2, SPLITS]`` float64, are of
    nearer tokens, and of all up to the cap.
    """
    row = tl.program_id(0).to(tl.int64)
    record = rows + row * _NUM_FIELDS
    if _is_searched(record, by_mass, vocab_size):
        begin, end = _split_of(vocab_size, num_splits, TILE)
        best = _best(extremes, row, num_splits)
        low, high, cap = _bracket(
            record, row, extremes, limits, brackets, sums, num_passes, by_mass, vocab_size, num_splits, CAPACITY
        )
        filtered_row = tl.load(record + _FILTERED_ROW)
        target = held + (filtered_row * num_splits + tl.program_id(1)) * CAPACITY
        num = 0
        nearer = tl.zeros([TILE], tl.float64)
        total = tl.zeros([TILE], tl.float64)
        temperature = _temperature(record)
        source = _source(logits, row_stride, row, record, ruled, vocab_size)
        following = _load(source, begin + tl.arange(0, TILE), end)
        for first in range(begin, end, TILE):
            distances = _distance(best, _values(source, following), temperature)
            following = _load(source, first + TILE + tl.arange(0, TILE), end)
            weights = _weights(distances, by_mass)
            nearer += tl.where(distances <= low, weights, 0.0)
            total += tl.where(distances <= cap, weights, 0.0)
            is_held = ((distances > low) & (distances <= high)).to(tl.int32)
            num_more = tl.sum(is_held, 0)
            if num_more > 0:
                place = num + tl.cumsum(is_held, 0) - 1
                tl.store(target + place, distances, mask=(is_held != 0) & (place < CAPACITY))
            num += num_more
        tl.store(num_held + filtered_row * _SPLITS + tl.program_id(1), num)
        tl.store(masses + filtered_row * 2 * _SPLITS + tl.program_id(1), tl.sum(nearer, 0))
        tl.store(masses + (filtered_row * 2 + 1) * _SPLITS + tl.program_id(1), tl.sum(total, 0))


@triton.jit(do_not_specialize=["num_passes", "by_mass", "num_splits"])  # type: ignore[untyped-decorator]
def _settle(  # type: ignore[no-untyped-def]
    logits, row_stride, rows, ruled, extremes, limits, brackets, held, num_held, masses, num_passes, by_mass,
    vocab_size, num_splits, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Write to ``limits``, ``[N]``, the largest distance that the filter keeps: its bits."""
    row = tl.program_id(0).to(tl.int64)
    record = rows + row * _NUM_FIELDS
    if _is_searched(record, by_mass, vocab_size):
        filtered_row = tl.load(record + _FILTERED_ROW)
        split = tl.arange(0, _SPLITS)
        is_one = split < num_splits
        num = tl.sum(tl.load(num_held + filtered_row * _SPLITS + split, mask=is_one, other=0), 0)
        nearer = tl.sum(tl.load(masses + filtered_row * 2 * _SPLITS + split, mask=is_one, other=0.0), 0)
        total = tl.sum(tl.load(masses + (filtered_row * 2 + 1) * _SPLITS + split, mask=is_one, other=0.0), 0)
        wanted = _wanted(record, total, by_mass)
        bracket = brackets + (filtered_row * (_MAX_PASSES + 1) + num_passes) * 2
        low, high = tl.load(bracket), tl.load(bracket + 1)
        source = held + filtered_row * num_splits * CAPACITY
        counts = num_held + filtered_row * _SPLITS
        most = tl.max(tl.load(counts + split, mask=is_one, other=0), 0)
        if num <= CAPACITY:
            limit = _limit_of_held(source, counts, num, nearer, wanted, high, by_mass, num_splits, CAPACITY)
        elif most <= CAPACITY:
            limit = _limit_of_many(source, counts, nearer, wanted, by_mass, num_splits, CAPACITY)
        else:
            best = _best(extremes, row, num_splits)
            all_tokens = _source(logits, row_stride, row, record, ruled, vocab_size)
            limit = _limit_of_all(
                all_tokens, best, _temperature(record), low, high, wanted, by_mass, vocab_size, CAPACITY
            )
        tl.store(limits + row, limit)


@triton.jit  # type: ignore[untyped-decorator]
def _limit_of_held(source, counts, num, nearer, wanted, high, by_mass, num_splits, CAPACITY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The least key up to which there is what is wanted, of ``num`` distances that lie at the begin of each split's."""
    place = tl.arange(0, CAPACITY)
    address = place
    num_before = 0
    for split in range(num_splits):
        address = tl.where(place >= num_before, split * CAPACITY + place - num_before, address)
        num_before += tl.load(counts + split)
    is_held = place < num
    distances = tl.load(source + address, mask=is_held, other=float("inf"))
    weights = tl.where(is_held, _weights(distances, by_mass), 0.0)
    keys = distances.to(tl.int32, bitcast=True)
    upper = tl.max(tl.where(is_held, keys, -1), 0)
    lower = tl.min(keys, 0) - 1
    while upper - lower > 1:
        middle = lower + ((upper - lower) >> 1)
        if nearer + tl.sum(tl.where(keys <= middle, weights, 0.0), 0) >= wanted:
            upper = tl.max(tl.where(keys <= middle, keys, -1), 0)
        else:
            lower = tl.min(tl.where(keys > middle, keys, upper), 0) - 1
    return tl.where(num > 0, upper, high.to(tl.int32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _limit_of_many(source, counts, nearer, wanted, by_mass, num_splits, CAPACITY: tl.constexpr):  # type: ignore[no-untyped-def]
    """As ``_limit_of_held``, split by split. Logits in bfloat16 are often equal: thousands with few distances."""
    place = tl.arange(0, CAPACITY)
    below = tl.full([CAPACITY], -1, tl.int32)
    above = tl.full([CAPACITY], 0x7FFFFFFF, tl.int32)
    for split in range(num_splits):
        is_held = place < tl.load(counts + split)
        keys = tl.load(source + split * CAPACITY + place, mask=is_held, other=0.0).to(tl.int32, bitcast=True)
        below = tl.maximum(below, tl.where(is_held, keys, below))
        above = tl.minimum(above, tl.where(is_held, keys, above))
    upper = tl.max(below, 0)
    lower = tl.min(above, 0) - 1
    while upper - lower > 1:
        middle = lower + ((upper - lower) >> 1)
        found = tl.zeros([CAPACITY], tl.float64)
        below = tl.full([CAPACITY], -1, tl.int32)
        above = tl.zeros([CAPACITY], tl.int32) + upper
        for split in range(num_splits):
            is_held = place < tl.load(counts + split)
            distances = tl.load(source + split * CAPACITY + place, mask=is_held, other=0.0)
            keys = distances.to(tl.int32, bitcast=True)
            found += tl.where(is_held & (keys <= middle), _weights(distances, by_mass), 0.0)
            below = tl.maximum(below, tl.where(is_held & (keys <= middle), keys, -1))
            above = tl.minimum(above, tl.where(is_held & (keys > middle), keys, upper))
        if nearer + tl.sum(found, 0) >= wanted:
            upper = tl.max(below, 0)
        else:
            lower = tl.min(above, 0) - 1
    return upper


@triton.jit  # type: ignore[untyped-decorator]
def _limit_of_all(  # type: ignore[no-untyped-def]
    source, best, temperature, low, high, wanted, by_mass, vocab_size, TILE: tl.constexpr
):
    """As ``_limit_of_held``, where too many tokens are about as far away: reads all of them at each step."""
    upper = high.to(tl.int32, bitcast=True)
    lower = tl.where(low < 0, -1, low.to(tl.int32, bitcast=True))
    while upper - lower > 1:
        middle = lower + ((upper - lower) >> 1)
        found = tl.zeros([TILE], tl.float64)
        below = tl.full([TILE], -1, tl.int32)
        above = tl.zeros([TILE], tl.int32) + upper
        for first in range(0, vocab_size, TILE):
            index = first + tl.arange(0, TILE)
            distances = _distance(best, _values(source, _load(source, index, vocab_size)), temperature)
            keys = distances.to(tl.int32, bitcast=True)
            is_near = distances <= middle.to(tl.float32, bitcast=True)
            found += tl.where(is_near, _weights(distances, by_mass), 0.0)
            below = tl.maximum(below, tl.where(is_near, keys, -1))
            above = tl.minimum(above, tl.where(distances > middle.to(tl.float32, bitcast=True), keys, upper))
        if tl.sum(found, 0) >= wanted:
            upper = tl.maximum(tl.max(below, 0), lower + 1)
        else:
            lower = tl.min(above, 0) - 1
    return upper


@triton.jit
def _is_searched(record, by_mass, vocab_size):  # type: ignore[no-untyped-def]
    """Whether the row has a filter of this kind that may leave tokens out."""
    is_asked = _has_top_k(record, vocab_size)
    if by_mass:
        is_asked = _float(record + _TOP_P) < 1
    return is_asked & (tl.load(record + _FILTERED_ROW) >= 0)


@triton.jit  # type: ignore[untyped-decorator]
def _has_few(record, by_mass, vocab_size, CAPACITY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether top-k has left so few tokens that top-p's search need not narrow them down: all can be held."""
    return (by_mass != 0) & _has_top_k(record, vocab_size) & (tl.load(record + _TOP_K) <= CAPACITY // 2)


@triton.jit
def _has_top_k(record, vocab_size):  # type: ignore[no-untyped-def]
    top_k = tl.load(record + _TOP_K)
    return (top_k > 0) & (top_k < vocab_size)


@triton.jit
def _wanted(record, total, by_mass):  # type: ignore[no-untyped-def]
    """The mass, or the number of tokens, that the row's filter keeps at least, in float64."""
    wanted = tl.load(record + _TOP_K).to(tl.float64)
    if by_mass:
        wanted = _float(record + _TOP_P) * total.to(tl.float64)
    return wanted


@triton.jit
def _weights(distances, by_mass):  # type: ignore[no-untyped-def]
    """What tokens count for in a search, in float64."""
    weights = tl.zeros_like(distances).to(tl.float64) + 1
    if by_mass:
        weights = tl.exp(-distances.to(tl.float64))
    return weights


@triton.jit  # type: ignore[untyped-decorator]
def _bracket(  # type: ignore[no-untyped-def]
    record, row, extremes, limits, brackets, sums, number, by_mass, vocab_size, num_splits, CAPACITY: tl.constexpr
):
    """What pass ``number`` of a search goes on with.

    All programs of a row find the same, and one of them keeps it in ``brackets``,
    ``[num_filtered, MAX_PASSES + 1, 2]`` float32.

    Returns:
        A distance up to which there is too little, -1 if even the best token may be enough; one up to which there is
        enough, or beyond which no token is wanted; and the cap: of tokens further away the filter knows nothing.
    """
    cap = tl.full([], float("inf"), tl.float32)
    if (by_mass != 0) & _has_top_k(record, vocab_size):
        cap = tl.load(limits + row).to(tl.float32, bitcast=True)
    low, high = tl.full([], -1.0, tl.float32), cap
    filtered_row = tl.load(record + _FILTERED_ROW)
    place = brackets + (filtered_row * (_MAX_PASSES + 1) + number) * 2
    if (number > 0) & ~_has_few(record, by_mass, vocab_size, CAPACITY):
        low, high = tl.load(place - 2), tl.load(place - 1)
        way, split = tl.arange(0, _NUM_WAYS), tl.arange(0, _SPLITS)
        of_pass = sums + (filtered_row * _MAX_PASSES + number - 1) * _SPLITS * _NUM_WAYS
        is_one = (split < num_splits)[:, None]
        found = tl.load(of_pass + split[:, None] * _NUM_WAYS + way[None, :], mask=is_one, other=0.0)
        masses = tl.sum(found, 0)
        wanted = _wanted(record, tl.sum(tl.where(way == _NUM_WAYS - 1, masses, 0.0), 0), by_mass)
        tries = _tries(low, high, cap)
        is_enough = (way < _NUM_WAYS - 1) & (masses.to(tl.float64) >= wanted * _COARSE_MARGIN)
        is_little = (way < _NUM_WAYS - 1) & (masses.to(tl.float64) * _COARSE_MARGIN < wanted)
        high = tl.min(tl.where(is_enough, tries * _ABOVE, high), 0)
        low = tl.max(tl.where(is_little, tries * _BELOW, low), 0)
    else:
        high = tl.minimum(cap, _first_high(record, row, extremes, by_mass, vocab_size, num_splits))
    if tl.program_id(1) == 0:
        tl.store(place, low)
        tl.store(place + 1, high)
    return low, high, cap


@triton.jit
def _tries(low, high, cap):  # type: ignore[no-untyped-def]
    """Distances in between, evenly, and the cap."""
    way = tl.arange(0, _NUM_WAYS)
    least = tl.maximum(low, 0.0)
    tries = least + (high - least) * ((way + 1).to(tl.float32) * _ONE_WAY)
    return tl.where(way < _NUM_WAYS - 1, tl.minimum(tries, high), cap)


@triton.jit
def _first_high(record, row, extremes, by_mass, vocab_size, num_splits):  # type: ignore[no-untyped-def]
    """A distance up to which there surely is enough, or beyond which no token is wanted."""
    best, least = _best(extremes, row, num_splits), _least(extremes, row, num_splits)
    high = tl.minimum(_LARGEST_DISTANCE, tl.maximum(_distance(best, least, _temperature(record)), 0.0))
    if by_mass:
        # Top-p is the last search: what min-p leaves out need not be told apart.
        high = tl.minimum(high, tl.load(record + _LARGEST_KEY).to(tl.int32).to(tl.float32, bitcast=True))
        # Tokens further away than d have at most V * exp(-d), and all together 1 or more.
        most_left_out = 1 - _float(record + _TOP_P)
        num_tokens = tl.zeros([], tl.float64) + vocab_size
        high = tl.minimum(high, (tl.log(num_tokens / most_left_out) + _BOUND_MARGIN).to(tl.float32))
    return high


@triton.jit(do_not_specialize=["num_splits"])  # type: ignore[untyped-decorator]
def _score(  # type: ignore[no-untyped-def]
    logits, row_stride, rows, ruled, extremes, limits, scores, choices, vocab_size, num_splits, TILE: tl.constexpr
):
    """Write each split's best token and its logit, or its sum with noise, to ``choices`` and ``scores``."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = _split_of(vocab_size, num_splits, TILE)
    record = rows + row * _NUM_FIELDS
    best = _best(extremes, row, num_splits)
    key = tl.load(record + _LARGEST_KEY).to(tl.int32)
    if tl.load(record + _FILTERED_ROW) >= 0:
        key = tl.minimum(key, tl.load(limits + row))
    is_greedy = _float(record + _TEMPERATURE) == 0
    if is_greedy:
        key = 0
    limit = key.to(tl.float32, bitcast=True)
    state = _mixed((tl.load(record + _NOISE_STATE).to(tl.uint64, bitcast=True) + _GAMMA) ^ _position(record))
    temperature = _temperature(record)
    scale = tl.div_rn(tl.full([], 1.0, tl.float32), temperature)
    # In range even if no logit is a number.
    choice = tl.minimum(begin, vocab_size - 1)
    score = tl.full([], float("-inf"), tl.float64)
    source = _source(logits, row_stride, row, record, ruled, vocab_size)
    following = _load(source, begin + tl.arange(0, TILE), end)
    for first in range(begin, end, TILE):
        index = first + tl.arange(0, TILE)
        values = _values(source, following)
        following = _load(source, index + TILE, end)
        near = tl.where(values == float("inf"), 0.0, (best - values) * scale)
        bounds = tl.exp(tl.where(near <= limit * _ABOVE, near, float("inf")))
        if not is_greedy:
            bounds *= _noise_bounds(_mixed_at(state, index))
        bound = -tl.log(tl.min(bounds, 0))
        # Noise in float64 is dear, and few tiles can hold the best sum.
        if bound + _BOUND_MARGIN > score.to(tl.float32):
            distances = _distance(best, values, temperature)
            sums = -distances.to(tl.float64)
            if not is_greedy:
                sums += _gumbel(_noise_bits(_mixed_at(state, index)))
            sums = tl.where(distances <= limit, sums, float("-inf"))
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
def _best(extremes, row, num_splits):  # type: ignore[no-untyped-def]
    """The row's largest logit."""
    split = tl.arange(0, _SPLITS)
    found = tl.load(extremes + row * 2 * _SPLITS + split, mask=split < num_splits, other=float("-inf"))
    return tl.max(found, 0)


@triton.jit
def _least(extremes, row, num_splits):  # type: ignore[no-untyped-def]
    """The row's least finite logit."""
    split = tl.arange(0, _SPLITS)
    found = tl.load(extremes + (row * 2 + 1) * _SPLITS + split, mask=split < num_splits, other=float("inf"))
    return tl.min(found, 0)


@triton.jit
def _distance(best, values, temperature):  # type: ignore[no-untyped-def]
    """How far logits are from the best one after temperature; 0 if they are infinite."""
    # A difference of zeros may be -0, whose bits are those of a negative integer.
    distances = tl.div_rn(tl.abs(best - values), tl.zeros_like(values) + temperature)
    return tl.where(values == float("inf"), 0.0, distances)


@triton.jit
def _source(logits, row_stride, row, record, ruled, vocab_size):  # type: ignore[no-untyped-def]
    """Where the row's tokens are: those of the model, those that rules have left, and whether it is the latter."""
    has_rules = tl.load(record + _TOKENS) != 0
    return logits + row * row_stride, ruled + tl.load(record + _RULED_ROW) * vocab_size, has_rules


@triton.jit
def _load(source, index, end):  # type: ignore[no-untyped-def]
    """Begin to load logits, for ``_values``; minus infinity from ``end`` on."""
    of_model, of_rules, has_rules = source
    plain = tl.load(of_model + index, mask=index < tl.where(has_rules, 0, end), other=float("-inf"))
    return plain, tl.load(of_rules + index, mask=index < tl.where(has_rules, end, 0), other=float("-inf"))


@triton.jit
def _values(source, loaded):  # type: ignore[no-untyped-def]
    """What rules have left of the logits, in float32."""
    plain, ruled = loaded
    return tl.where(source[2], ruled, plain.to(tl.float32))


@triton.jit
def _temperature(record):  # type: ignore[no-untyped-def]
    return tl.maximum(_float(record + _TEMPERATURE).to(tl.float32), _MIN_TEMPERATURE)


@triton.jit
def _mixed_at(state, token_ids):  # type: ignore[no-untyped-def]
    """64 random bits for each token: SplitMix64 read by position."""
    return _mixed(state + (token_ids.to(tl.uint64) + 1) * _GAMMA)


@triton.jit
def _noise_bits(mixed):  # type: ignore[no-untyped-def]
    """As ``noise_bits`` of 52 bits."""
    return (mixed >> 12).to(tl.int64)


@triton.jit
def _gumbel(noise):  # type: ignore[no-untyped-def]
    """As ``gumbel_noise``, in float64."""
    uniform = (noise.to(tl.float64) + 0.5) * _UNIFORM_STEP
    return -tl.log(-tl.log(uniform))


@triton.jit
def _noise_bounds(mixed):  # type: ignore[no-untyped-def]
    """At most ``exp(-noise)``, but for rounding, in float32: ``1 - u`` is near ``-log(u)`` where noise is large."""
    return (~(mixed >> 32).to(tl.uint32)).to(tl.float32) * _BOUND_STEP


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

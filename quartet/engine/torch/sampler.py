"""Chooses the next token of every row of a step's logits.

A step costs what its rows ask for: if all are greedy and plain, it is one argmax. Each kind of rule is applied to all
rows that have it at once. A row's choice does not depend on the rest of the batch, except through its logits, whose
last bits may differ from one composition of a batch to another.

Sampling noise is a pure function of (seed, choice, position, token id). No generator has state: any attempt on any
worker, in any batch, draws the same noise. A token is drawn by the Gumbel-max trick (Gumbel 1954; Maddison et al., "A*
Sampling", 2014): the argmax of logits plus independent Gumbel noise is a sample of their softmax. The alternative, one
uniform number and the inverse of the cumulative distribution, was rejected because logits differ in their last bits
between batches and devices: there each such difference moves all boundaries between tokens, and a token at the edge of
a top-p set rescales all others; here the choice changes only if the two best sums are as close as the difference
itself. With filters, only the kept tokens need noise.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch

from quartet.engine.guided.masks import TokenMasks
from quartet.engine.runner import RunningRequest, SampledToken
from quartet.engine.sampling import TokenLogprobs
from quartet.engine.torch.copies import record_event, to_device, to_host

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quartet.engine.torch.device_sampler import DeviceSampler

_LOG = logging.getLogger(__name__)

# A nucleus or a min-p set is mostly far smaller: these many best tokens are tried before the vocabulary is sorted.
_NUM_CANDIDATES = 1024

# Room for tokens that tie with the k-th one.
_NUM_SPARE_CANDIDATES = 64

# Rows are taken in groups, so that the noise and its passes stay near the processor.
_MAX_NOISE = 1 << 21

# Below it only the best token is left, and dividing by it would overflow.
_MIN_TEMPERATURE = 1e-6

_MASK = (1 << 64) - 1

_GAMMA = 0x9E3779B97F4A7C15

_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

_SHIFTS = (30, 27, 31)

_UNIFORM_BITS = 52  # one less than a double's mantissa: the half step below keeps the ends 0 and 1 out


class Sampler:
    """Samples with all fields of ``Sampling`` and ``OutputOptions``. Lives in the engine thread."""

    def __init__(self) -> None:
        self._rules: WeakKeyDictionary[RunningRequest, RequestRules] = WeakKeyDictionary()

    def sample(
        self, logits: torch.Tensor, requests: Sequence[RunningRequest], masks: TokenMasks | None = None
    ) -> list[SampledToken]:
        """Choose a token for each request, and wait for it. Arguments as for ``launch``."""
        return self.launch(logits, requests, masks).read()

    def launch(
        self, logits: torch.Tensor, requests: Sequence[RunningRequest], masks: TokenMasks | None = None
    ) -> LaunchedTokens:
        """Have the device choose a token for each request; does not wait for it where all rows are greedy and plain.

        Args:
            logits: ``[N, V]``, row ``i`` for the token that follows ``requests[i].seq``; may be changed.
            requests: one a row.
            masks: the tokens that rows with grammars may choose.
        """
        rows = [Row(i, running, self._rules_of(running)) for i, running in enumerate(requests)]
        if all(row.rules.is_plain for row in rows):
            if masks is not None:
                apply_masks(logits, masks)
            return LaunchedTokens(logits.argmax(-1), can_follow=masks is None)
        if logits.dtype != torch.float64:
            logits = logits.float()
        reported = [row for row in rows if row.rules.num_logprobs is not None]
        # Before the rules: log probabilities are the model's own.
        model_logprobs = logits[_indices(reported, logits.device)].log_softmax(-1) if reported else None
        apply_rules(logits, [row for row in rows if row.rules.changes_logits])
        if masks is not None:
            apply_masks(logits, masks)
        token_ids = _choose(logits, rows)
        report = None if model_logprobs is None else LogprobReport(model_logprobs, reported, token_ids)
        # Penalties count tokens that the host knows; and with rules a launch waits for the device, for which another
        # step's tokens must not wait.
        return LaunchedTokens(token_ids, report, can_follow=False)

    def expect(self, _logits: torch.Tensor, _max_num_seqs: int) -> None:
        """As ``DeviceSampler.expect``; here it makes no difference."""

    def graphs_size_bytes(self, _logits: torch.Tensor, _num_rows: int, _max_num_seqs: int) -> int:
        """As ``DeviceSampler.graphs_size_bytes``; 0: there are no graphs."""
        return 0

    def size_bytes(self, _num_rows: int) -> int:
        """As ``DeviceSampler.size_bytes``; 0, as a pool that shares a GPU's memory is sampled from by that one."""
        return 0

    def _rules_of(self, running: RunningRequest) -> RequestRules:
        rules = self._rules.get(running)
        if rules is None:
            rules = self._rules[running] = RequestRules(running)
        return rules


def create_sampler(model: PreTrainedModel, vocab_size: int, device: torch.device) -> Sampler | DeviceSampler:
    """The sampler for a model's logits, warmed up: of our kernels on a GPU, unless the logits are float64.

    Where the kernels can't be run, a warning says why, and PyTorch's operations sample. ``vocab_size`` may be less than
    the model has logits.
    """
    if device.type != "cuda" or model.dtype == torch.float64 or importlib.util.find_spec("triton") is None:
        return Sampler()
    from quartet.engine.torch.device_sampler import DeviceSampler

    num_logits = model.get_output_embeddings().weight.shape[0]  # type: ignore[no-untyped-call]
    try:
        sampler = DeviceSampler(device, vocab_size)
        sampler.warm_up(torch.zeros((1, num_logits), dtype=model.dtype, device=device)[:, :vocab_size])
    except Exception:  # noqa: BLE001  # such as a machine without a C compiler, which Triton needs
        _LOG.warning("tokens are drawn without kernels: they can't be run here", exc_info=True)
        return Sampler()
    return sampler


class LaunchedTokens:
    """Tokens that a device chooses, or has chosen.

    Attributes:
        token_ids: ``[N]`` int64, on the device: a next step reads them there, before it launches others.
        can_follow: whether to launch the next step before these are read.
    """

    def __init__(
        self, token_ids: torch.Tensor, report: LogprobReport | None = None, *, can_follow: bool = True
    ) -> None:
        self.token_ids = token_ids
        self.can_follow = can_follow
        self._report = report
        self._read_ids = to_host(token_ids)
        self._end = record_event(token_ids.device)

    def read(self) -> list[SampledToken]:
        """Wait until they are chosen, and return them in the order of the rows."""
        if self._end is not None:
            self._end.synchronize()
        token_ids: list[int] = self._read_ids.tolist()
        reports = {} if self._report is None else self._report.read(token_ids)
        return [SampledToken(token_id, reports.get(i)) for i, token_id in enumerate(token_ids)]


class LogprobReport:
    """Log probabilities that rows ask for, on their way from the device."""

    def __init__(self, logprobs: torch.Tensor, rows: Sequence[Row], token_ids: torch.Tensor) -> None:
        """``logprobs`` is ``[len(rows), V]``, ``token_ids`` has one for each row of the step."""
        chosen = token_ids[_indices(rows, logprobs.device)]
        num_top = max(row.rules.num_logprobs or 0 for row in rows)
        top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
        self._rows = rows
        self._chosen = to_host(logprobs.gather(1, chosen[:, None])[:, 0])
        self._top_ids, self._top_values = to_host(top.indices), to_host(top.values)

    def read(self, token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By row index; the device has done all, ``token_ids`` are those of the step's rows."""
        chosen: list[float] = self._chosen.tolist()
        top_ids: list[list[int]] = self._top_ids.tolist()
        top_values: list[list[float]] = self._top_values.tolist()
        reports = {}
        for row, logprob, ids, values in zip(self._rows, chosen, top_ids, top_values, strict=True):
            num = row.rules.num_logprobs or 0
            reports[row.index] = TokenLogprobs(token_ids[row.index], logprob, tuple(ids[:num]), tuple(values[:num]))
        return reports


class RequestRules:
    """One request's part in sampling, prepared once. Lives in the engine thread.

    Attributes:
        sampling: its parameters.
        num_logprobs: alternatives to report, ``None`` for no report.
        has_penalties: some penalty differs from its neutral value.
        masks_stop_ids: stop ids are not to be chosen before ``min_tokens`` are out.
        stop_ids: tokens that end the output.
    """

    def __init__(self, running: RunningRequest) -> None:
        generation = running.request.generation
        self.sampling = sampling = generation.sampling
        self.num_logprobs = generation.output.logprobs
        self.has_penalties = sampling.repetition_penalty != 1.0 or bool(
            sampling.presence_penalty or sampling.frequency_penalty
        )
        self.stop_ids = tuple(sorted(running.stop_ids))
        # A grammar's masks say by themselves when its output may end.
        self.masks_stop_ids = sampling.min_tokens > 0 and running.guide is None
        self._sequence_state = _sequence_state(generation.seed, generation.choice)
        self._num_prompt_tokens = running.num_prompt_tokens
        self._counts: TokenCounts | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the best token is all that is asked for, without rules or report."""
        return self.sampling.is_greedy and not self.changes_logits and self.num_logprobs is None

    @property
    def changes_logits(self) -> bool:
        """Whether some rule applies, now or at times."""
        return self.has_penalties or bool(self.sampling.logit_bias) or self.masks_stop_ids

    def key(self, position: int) -> int:
        """The noise's state for the token at ``position`` of the sequence."""
        return _to_signed(_absorb(self._sequence_state, position))

    def counts(self, token_ids: Sequence[int], vocab_size: int, device: torch.device) -> TokenCounts:
        """Counts of the sequence's tokens; ``token_ids`` only ever grows from call to call."""
        if self._counts is None:
            self._counts = TokenCounts(self._num_prompt_tokens, vocab_size, device)
        self._counts.update(token_ids)
        return self._counts


class TokenCounts:
    """Which tokens one sequence holds, kept up step by step.

    Attributes:
        is_seen: ``[V]`` bool: in prompt or output.
        num_in_output: ``[V]`` int32: times in the output.
    """

    def __init__(self, num_prompt_tokens: int, vocab_size: int, device: torch.device) -> None:
        self.is_seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.num_in_output = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0

    def update(self, token_ids: Sequence[int]) -> None:
        """Count the tokens that are new since the last call."""
        new = torch.tensor(token_ids[self._num_counted :], dtype=torch.long, device=self.is_seen.device)
        output = new[max(0, self._num_prompt_tokens - self._num_counted) :]
        self.is_seen[new] = True
        self.num_in_output.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self._num_counted = len(token_ids)


@dataclass(frozen=True)
class Row:
    """One row of a step's logits, with the request whose next token it yields."""

    index: int
    running: RunningRequest
    rules: RequestRules


def apply_rules(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Change ``[N, V]`` logits in place: penalties, then bias, then stop ids where it is too early for them.

    Bias comes after penalties so that a bias moves a token by the same amount whether it was seen or not.
    """
    if penalised := [row for row in rows if row.rules.has_penalties]:
        _apply_penalties(logits, penalised)
    if biased := [row for row in rows if row.rules.sampling.logit_bias]:
        _add_bias(logits, biased)
    ending = [row for row in rows if row.rules.masks_stop_ids]
    if early := [row for row in ending if row.running.num_output_tokens < row.rules.sampling.min_tokens]:
        indices, token_ids = _pairs([(row.index, row.rules.stop_ids) for row in early], logits.device)
        logits[indices, token_ids] = float("-inf")


def apply_masks(logits: torch.Tensor, masks: TokenMasks) -> None:
    """Forbid in ``[N, V]`` logits, in place, what the rows of ``masks`` don't allow."""
    device, vocab_size = logits.device, logits.shape[1]
    if device.type == "cpu":
        unpacked = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little", count=vocab_size)
        is_forbidden = torch.from_numpy(unpacked == 0)
    else:
        is_forbidden = unset_bits(to_device(torch.from_numpy(masks.bits), device), vocab_size)
    if masks.rows == list(range(len(logits))):
        logits.masked_fill_(is_forbidden, -math.inf)
        return
    rows = to_device(torch.tensor(masks.rows, dtype=torch.long), device)
    logits[rows] = logits[rows].masked_fill_(is_forbidden, -math.inf)


def unset_bits(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Which of the first ``num_bits`` bits of ``[M, W]`` int32 words are 0, the lowest first: ``[M, num_bits]``."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 1 == 0).flatten(1)[:, :num_bits]


def draw(logits: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """Draw one token a row: temperature, top-k, top-p of what is left, min-p, then Gumbel-max.

    A row's token depends only on its own logits and parameters. Each of the filters keeps the tokens that are at least
    as likely as some token, so each is a threshold on the logit, and the strictest one counts. Tokens exactly as likely
    as the last one kept are kept too: which of them a sort puts first is an accident.

    Args:
        logits: ``[N, V]`` float32 or float64; not changed.
        parameters: of these rows.

    Returns:
        ``[N]`` int64 token ids.
    """
    num_rows = max(1, _MAX_NOISE // logits.shape[1])
    groups = [slice(first, first + num_rows) for first in range(0, len(logits), num_rows)]
    return torch.cat([_draw_group(logits[rows], parameters[rows]) for rows in groups])


@dataclass(frozen=True)
class DrawParameters:
    """One entry a row.

    Attributes:
        temperature: ``[N]`` float, above 0.
        top_k: ``[N]`` int64, 0 for all.
        top_p: ``[N]`` float64, 1 for all.
        min_p: ``[N]`` float64, 0 for all.
        keys: ``[N]`` int64, the noise's states.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    keys: torch.Tensor

    def __getitem__(self, rows: slice | torch.Tensor) -> DrawParameters:
        """The parameters of these rows."""
        return DrawParameters(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.keys[rows]
        )


def noise_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit state of the noise at one position of one sequence, as a signed integer for int64 tensors."""
    return _to_signed(_absorb(_sequence_state(seed, choice), position))


def noise_state(seed: int, choice: int) -> int:
    """What ``noise_key`` makes of a sequence before its position comes in, as a signed integer."""
    return _to_signed(_sequence_state(seed, choice))


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, in float64, from ``noise_bits``.

    Args:
        keys: ``[N]`` int64, of ``noise_key``.
        token_ids: ``[C]`` or ``[N, C]`` int64.

    Returns:
        ``[N, C]``; an entry depends on its key and its token id alone.
    """
    bits = noise_bits(keys[:, None], token_ids, _UNIFORM_BITS)
    uniform = bits.double().add_(0.5).mul_(2.0**-_UNIFORM_BITS)
    return uniform.log_().neg_().log_().neg_()


def noise_bits(keys: torch.Tensor, positions: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Random integers in ``[0, 2 ** num_bits)``, int64; each depends on its key and its position alone.

    They come from SplitMix64 read by position (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
    OOPSLA 2014; mixer: Stafford's variant 13): integers only, hence equal on every device.

    Args:
        keys: int64.
        positions: int64, from 0; of a shape that fits that of ``keys``.
        num_bits: below 64.
    """
    bits = keys + (positions + 1) * _to_signed(_GAMMA)
    _mix_tensor_(bits)
    return _shift_right(bits, 64 - num_bits)


def _choose(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    drawn = [row for row in rows if not row.rules.sampling.is_greedy]
    if len(drawn) == len(rows):
        return draw(logits, _parameters(drawn, logits.device))
    winners = logits.argmax(-1)
    if drawn:
        indices = _indices(drawn, logits.device)
        winners[indices] = draw(logits[indices], _parameters(drawn, logits.device))
    return winners


def _indices(rows: Sequence[Row], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor([row.index for row in rows], dtype=torch.long), device)


def _parameters(rows: Sequence[Row], device: torch.device) -> DrawParameters:
    sampling = [row.rules.sampling for row in rows]
    return DrawParameters(
        temperature=torch.tensor([item.temperature for item in sampling], dtype=torch.float64, device=device),
        top_k=torch.tensor([item.top_k for item in sampling], dtype=torch.long, device=device),
        top_p=torch.tensor([item.top_p for item in sampling], dtype=torch.float64, device=device),
        min_p=torch.tensor([item.min_p for item in sampling], dtype=torch.float64, device=device),
        keys=torch.tensor([row.rules.key(len(row.running.seq)) for row in rows], dtype=torch.long, device=device),
    )


def _draw_group(logits: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    temperature = parameters.temperature.to(logits.dtype).clamp(min=_MIN_TEMPERATURE)[:, None]
    # Subtract the maximum first: a logit that would overflow becomes minus infinity, as it should.
    best = logits.amax(-1, keepdim=True)
    scaled = (logits - best) / temperature
    if bool((best == math.inf).any()):
        scaled.masked_fill_(logits == math.inf, 0.0)  # all that have overflowed are best
    has_top_k = (parameters.top_k > 0) & (parameters.top_k < scaled.shape[1])
    is_filtered = has_top_k | (parameters.top_p < 1) | (parameters.min_p > 0)
    # What is sorted for one of these is sorted for all, so few rows with a very large k are apart from the others.
    is_wide = is_filtered & (parameters.top_k > _NUM_CANDIDATES)
    winners = torch.empty_like(parameters.keys)
    for is_drawn, draw_rows in (
        (~is_filtered, _draw_unfiltered),
        (is_filtered & ~is_wide, _draw_filtered),
        (is_wide, _draw_filtered),
    ):
        if bool(is_drawn.all()):
            return draw_rows(scaled, parameters)
        if bool(is_drawn.any()):
            winners[is_drawn] = draw_rows(scaled[is_drawn], parameters[is_drawn])
    return winners


def _draw_unfiltered(scaled: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    token_ids = torch.arange(scaled.shape[1], device=scaled.device)
    return gumbel_noise(parameters.keys, token_ids).add_(scaled).argmax(-1)


def _num_candidates(parameters: DrawParameters, vocab_size: int) -> int:
    """How many of the best tokens most likely hold every row's kept set."""
    num_kept = int(parameters.top_k.max())
    if bool((parameters.top_k == 0).any()):
        num_kept = max(num_kept, _NUM_CANDIDATES)
    return min(vocab_size, num_kept + _NUM_SPARE_CANDIDATES)


def _draw_filtered(scaled: torch.Tensor, parameters: DrawParameters, num_candidates: int | None = None) -> torch.Tensor:
    """``num_candidates``: so many of the best tokens are tried; ``None``: as many as most likely are enough."""
    if num_candidates is None:
        num_candidates = _num_candidates(parameters, scaled.shape[1])
    best = torch.topk(scaled, num_candidates, dim=-1)
    values = best.values.double()
    threshold = _threshold(values, scaled, parameters)[:, None]
    scores = gumbel_noise(parameters.keys, best.indices).add_(values).masked_fill_(values < threshold, float("-inf"))
    winners = best.indices.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
    if num_candidates == scaled.shape[1]:
        return winners
    # Where even the last candidate was kept, there may be more to keep.
    is_open = values[:, -1] >= threshold[:, 0]
    if bool(is_open.any()):
        winners[is_open] = _draw_filtered(scaled[is_open], parameters[is_open], scaled.shape[1])
    return winners


def _threshold(values: torch.Tensor, scaled: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """The least logit kept in each row, ``[N]``.

    Args:
        values: ``[N, C]`` float64, the best logits of ``scaled``, best first.
        scaled: ``[N, V]``, all logits.
        parameters: of these rows.
    """
    lowest = torch.full_like(values[:, 0], float("-inf"))
    last_k = parameters.top_k.clamp(max=values.shape[1]).sub(1).clamp(min=0)
    least_k = torch.where(parameters.top_k > 0, _pick(values, last_k), lowest)
    least_p = torch.where(parameters.top_p < 1, _least_of_nucleus(values, scaled, least_k, parameters), lowest)
    return torch.stack((least_k, least_p, values[:, 0] + parameters.min_p.log())).amax(0)


def _least_of_nucleus(
    values: torch.Tensor, scaled: torch.Tensor, least_k: torch.Tensor, parameters: DrawParameters
) -> torch.Tensor:
    """The last logit of the smallest set whose probability, among what top-k keeps, reaches top-p."""
    kept = values.masked_fill(values < least_k[:, None], float("-inf"))
    total = torch.where(parameters.top_k > 0, kept.logsumexp(-1), scaled.double().logsumexp(-1))
    probabilities = (kept - total[:, None]).exp()
    mass_before = probabilities.cumsum(-1) - probabilities
    return _pick(values, (mass_before < parameters.top_p[:, None]).sum(-1).sub(1).clamp(min=0))


def _pick(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return values.gather(1, columns[:, None])[:, 0]


def _apply_penalties(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    counts = [row.rules.counts(row.running.seq.token_ids, logits.shape[1], logits.device) for row in rows]
    sampling = [row.rules.sampling for row in rows]
    indices = torch.tensor([row.index for row in rows], dtype=torch.long, device=logits.device)
    is_seen = torch.stack([item.is_seen for item in counts])
    num_in_output = torch.stack([item.num_in_output for item in counts])
    repetition = _column([item.repetition_penalty for item in sampling], logits)
    presence = _column([item.presence_penalty for item in sampling], logits)
    frequency = _column([item.frequency_penalty for item in sampling], logits)
    penalised = logits[indices]
    repeated = torch.where(penalised > 0, penalised / repetition, penalised * repetition)
    penalised = torch.where(is_seen, repeated, penalised)
    logits[indices] = penalised - num_in_output * frequency - (num_in_output > 0) * presence


def _add_bias(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    biases = [bias for row in rows for bias in row.rules.sampling.logit_bias.values()]
    pairs = _pairs([(row.index, tuple(row.rules.sampling.logit_bias)) for row in rows], logits.device)
    logits[pairs] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)


def _pairs(
    tokens_by_row: Sequence[tuple[int, tuple[int, ...]]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every token."""
    rows = [row for row, token_ids in tokens_by_row for _ in token_ids]
    columns = [token_id for _, token_ids in tokens_by_row for token_id in token_ids]
    return (
        torch.tensor(rows, dtype=torch.long, device=device),
        torch.tensor(columns, dtype=torch.long, device=device),
    )


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _sequence_state(seed: int, choice: int) -> int:
    return _absorb(_absorb(0, seed), choice)


def _absorb(state: int, word: int) -> int:
    return _mix(((state + _GAMMA) ^ word) & _MASK)


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

"""Samples on a CUDA device: what a step's rows ask for lies in a table, and the tokens stay on the device.

A request's settings are written into the table once. A step copies its rows out of it, or takes those of the step
before, with their positions, and sends them to the device in one piece. Rows ask for what they like: the launches of
``quartet.engine.torch.kernels.draw`` are the same, and where logits lie in one place each time, a graph repeats them.
What rules know of a request's tokens is kept on the device, where each token that is drawn is counted, so a next step
can be launched before this one's tokens are read.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quartet.engine.guided.masks import TokenMasks
from quartet.engine.runner import RunningRequest, SampledToken
from quartet.engine.torch.copies import to_device
from quartet.engine.torch.draw_graphs import DrawGraphs, idle_rows
from quartet.engine.torch.kernels.draw import (
    IN_PROMPT,
    IS_STOP_ID,
    NUM_FIELDS,
    ONE_OUTPUT,
    ROW,
    Searches,
    draw_tokens,
    largest_key,
    scratch_size_bytes,
)
from quartet.engine.torch.sampler import LaunchedTokens, LogprobReport, RequestRules, Row, apply_masks, noise_state

_LOG = logging.getLogger(__name__)

_NUM_SLOTS = 64

# What is not in ``ROW``, because the host decides by it.
_SLOT = np.dtype(
    [
        ("is_plain", "?"),  # takes the best token, without rules or report
        ("only_masks", "?"),  # its rules say nothing any more once stop ids are allowed
        ("has_report", "?"),
        ("next_position", "<i8"),  # the position of the first token that ``tokens`` does not count yet
    ]
)


_IDLE = idle_rows(1)[0]

_NO_SEARCHES = Searches(False, False, False)

_MANY_STEPS = 1 << 62


class DeviceSampler:
    """Samples with all fields of ``Sampling`` and ``OutputOptions``. Lives in the engine thread.

    Draws the same tokens as ``Sampler`` from the same logits, but for ties of sums within the rounding of float64.
    """

    def __init__(self, device: torch.device, vocab_size: int, draw: Callable[..., torch.Tensor] = draw_tokens) -> None:
        """``draw`` is ``draw_tokens``, or runs its kernels by other means."""
        self._device = device
        self._requests = _RequestTable(device, vocab_size)
        self._draw = draw
        self._graphs: DrawGraphs | None = None

    def sample(
        self, logits: torch.Tensor, requests: Sequence[RunningRequest], masks: TokenMasks | None = None
    ) -> list[SampledToken]:
        """Choose a token for each request, and wait for it: as ``Sampler.sample`` does."""
        return self.launch(logits, requests, masks).read()

    def launch(
        self, logits: torch.Tensor, requests: Sequence[RunningRequest], masks: TokenMasks | None = None
    ) -> LaunchedTokens:
        """Have the device choose a token for each request, on its current stream; does not wait.

        Sequences may end with tokens that earlier launches chose and nobody has read yet.

        Args:
            logits: ``[N, V]`` bfloat16, float16 or float32, row ``i`` for the token that follows ``requests[i].seq``;
                changed where there are ``masks``.
            requests: one a row, all different.
            masks: the tokens that rows with grammars may choose. The next ones can't be computed before these tokens
                are read.
        """
        step = self._requests.step_of(requests)
        # Before the masks: log probabilities are the model's own.
        reported = self._reported_logits(logits, step.reported)
        if masks is not None:
            apply_masks(logits, masks)
        if step.is_plain:
            return LaunchedTokens(logits.argmax(-1), can_follow=masks is None)
        self._requests.fill(step, requests)
        token_ids = self._choose(logits, step)
        report = None if reported is None else self._report(reported, token_ids, requests, step.reported)
        return LaunchedTokens(token_ids, report, can_follow=masks is None)

    def expect(self, logits: torch.Tensor, max_num_seqs: int) -> None:
        """Be ready for steps whose logits are the first rows of these, and lie there: a graph draws from them.

        Args:
            logits: ``[N, V]``.
            max_num_seqs: rows of a step at most.
        """
        try:
            graphs = DrawGraphs(logits, max_num_seqs)
            graphs.capture()
        except Exception:  # noqa: BLE001  # whatever can't be captured: steps launch the kernels one by one
            _LOG.warning("tokens are drawn without CUDA graphs: they can't be captured", exc_info=True)
            return
        self._graphs = graphs

    def graphs_size_bytes(self, logits: torch.Tensor, num_rows: int, max_num_seqs: int) -> int:
        """Device memory that ``expect`` will take besides what ``size_bytes`` counts.

        From so many rows of logits that are like ``logits``, ``[*, V]``.
        """
        try:
            place = logits.new_empty(num_rows, self._requests.vocab_size)
            size_bytes = DrawGraphs.measure_size_bytes(place, max_num_seqs)
        except Exception:  # noqa: BLE001  # expect will find the same, and say it
            _LOG.debug("CUDA graphs that draw can't be measured", exc_info=True)
            return 0
        # If no step has more rows than graphs do, all are drawn in the graphs' memory.
        has_all = max_num_seqs <= num_rows
        return max(0, size_bytes - has_all * scratch_size_bytes(max_num_seqs, self._requests.vocab_size))

    def size_bytes(self, num_rows: int) -> int:
        """Device memory that so many requests and their steps take at most, but for log probabilities.

        What rules know of each, bias and all, and what ``draw_tokens`` takes.
        """
        return num_rows * self._requests.row_size_bytes + scratch_size_bytes(num_rows, self._requests.vocab_size)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compile the kernels for logits like these, ``[N, V]``, so that no request waits for it."""
        known = torch.zeros(logits.shape[1], dtype=torch.int32, device=self._device)
        rows = self._new_rows(1)
        rows.zero_()
        row = rows.numpy().view(ROW)[0, 0]
        row["temperature"] = row["top_p"] = 0.5
        row["top_k"] = logits.shape[1] - 1
        row["repetition_penalty"] = 1.0
        row["tokens"] = known.data_ptr()
        row["largest_key"] = largest_key(0)
        self._launch(logits[:1], rows).tolist()

    def _choose(self, logits: torch.Tensor, step: _Step) -> torch.Tensor:
        graphs, num_rows = self._graphs, len(step.rows)
        size = None if graphs is None else graphs.size_for(logits)
        rows = self._new_rows(size or num_rows)
        table = rows.numpy().view(ROW)[:, 0]
        table[:num_rows] = step.rows
        if graphs is None:
            return self._launch(logits, rows)
        if size is not None:
            table[num_rows:] = _IDLE
            return graphs.run(rows, step.searches)[:num_rows]
        return self._launch(logits, rows, **({"scratch": graphs.scratch} if num_rows <= graphs.max_rows else {}))

    def _new_rows(self, num_rows: int) -> torch.Tensor:
        # PyTorch gives pinned memory out again only when the copies from it are done.
        return torch.empty((num_rows, NUM_FIELDS), dtype=torch.int64, pin_memory=self._device.type == "cuda")

    def _launch(self, logits: torch.Tensor, rows: torch.Tensor, **options: Any) -> torch.Tensor:
        table = rows.numpy().view(ROW)[:, 0]
        return self._draw(logits, rows.to(self._device, non_blocking=True), table, **options)

    def _reported_logits(self, logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor | None:
        return logits[to_device(torch.tensor(indices), self._device)] if indices else None

    def _report(
        self, logits: torch.Tensor, token_ids: torch.Tensor, requests: Sequence[RunningRequest], indices: Iterable[int]
    ) -> LogprobReport:
        rows = [Row(i, requests[i], RequestRules(requests[i])) for i in indices]
        return LogprobReport(logits.float().log_softmax(-1), rows, token_ids)


@dataclass(eq=False)
class _Step:
    """What one step asks for, and the next ones of the same requests.

    Attributes:
        slots, indices: of its requests; the same.
        is_plain: all take their best token, without rules or report.
        reported: rows with a report.
        rows: ``[N]`` of ``ROW``, when it is filled.
        searches: of ``rows``.
        next_positions: ``[N]``, those of the next step if no token was lost.
        num_steps_left: so many next steps have the same rows but for their positions.
    """

    slots: list[int | None] | None = None
    indices: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    is_plain: bool = False
    reported: list[int] = field(default_factory=list)
    rows: npt.NDArray[np.void] = field(default_factory=lambda: np.empty(0, ROW))
    searches: Searches = _NO_SEARCHES
    next_positions: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    num_steps_left: int = 0


class _RequestTable:
    """What each request asks for, in a slot that it has for as long as it lives.

    Attributes:
        kinds: ``[slots]`` of ``_SLOT``.
        vocab_size: tokens that rules know of.
        row_size_bytes: what rules know of a request that has all of them, on the device.
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device = device
        self.vocab_size = vocab_size
        self.row_size_bytes = vocab_size * (torch.int32.itemsize + torch.float32.itemsize)
        self._rows = np.zeros(_NUM_SLOTS, ROW)
        self.kinds = np.zeros(_NUM_SLOTS, _SLOT)
        self._free = list(range(_NUM_SLOTS))
        self._last = _Step()
        # By identity: a WeakKeyDictionary would take a microsecond a row.
        self._slots: dict[int, int] = {}
        self._ends: dict[int, weakref.ref[RunningRequest]] = {}
        # What the addresses in rows point to, by slot.
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def step_of(self, requests: Sequence[RunningRequest]) -> _Step:
        """The step of these requests: that of the last call, if they are the same. New ones get slots."""
        slots = list(map(self._slots.get, map(id, requests)))
        if slots == self._last.slots:
            return self._last
        for row in [row for row, slot in enumerate(slots) if slot is None]:
            slots[row] = self._add(requests[row])
        self._last = _Step(slots, np.array(slots, dtype=np.int64))
        kinds = self.kinds[self._last.indices]
        self._last.is_plain = bool(kinds["is_plain"].all())
        self._last.reported = np.flatnonzero(kinds["has_report"]).tolist()
        return self._last

    def fill(self, step: _Step, requests: Sequence[RunningRequest]) -> None:
        """Have the step's rows choose the next token of each request, and count it."""
        positions = np.array([len(running.seq.token_ids) for running in requests])
        if step.num_steps_left > 0 and np.array_equal(step.next_positions, positions):
            step.rows["position"] = positions
            step.num_steps_left -= 1
        else:
            self._write_step(step, positions, requests)
        step.next_positions = positions + 1
        self.kinds["next_position"][step.indices] = step.next_positions

    def _write_step(self, step: _Step, positions: npt.NDArray[np.int64], requests: Sequence[RunningRequest]) -> None:
        rows, kinds = self._rows[step.indices], self.kinds[step.indices]
        rows["position"] = positions
        rows["tokens"][kinds["only_masks"] & (positions >= rows["stops_from"])] = 0
        has_rules = rows["tokens"] != 0
        for index in np.flatnonzero(has_rules & (kinds["next_position"] != positions)):
            self._count(int(step.indices[index]), requests[int(index)])
        for name, is_one in (("ruled_row", has_rules), ("filtered_row", rows["filtered_row"] >= 0)):
            rows[name] = np.where(is_one, np.cumsum(is_one) - 1, -1)
        step.rows, step.searches = rows, Searches.of(rows, self.vocab_size)
        only_masks = kinds["only_masks"] & has_rules
        step.num_steps_left = int((rows["stops_from"] - positions)[only_masks].min(initial=_MANY_STEPS)) - 1

    def _add(self, running: RunningRequest) -> int:
        if not self._free:
            num = len(self._rows)
            self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)))
            self.kinds = np.concatenate((self.kinds, np.zeros_like(self.kinds)))
            self._free.extend(range(num, 2 * num))
        slot = self._free.pop()
        self._last = _Step()  # whose request with this slot may have been another one
        self._write(slot, running, RequestRules(running))
        self._slots[id(running)] = slot
        self._ends[id(running)] = weakref.ref(running, partial(self._remove, id(running)))
        return slot

    def _remove(self, identity: int, _end: object) -> None:
        # May run in the midst of anything, as garbage collection does: each line by itself is safe.
        slot = self._slots.pop(identity)
        del self._ends[identity]
        self._tensors.pop(slot, None)
        self._free.append(slot)

    def _write(self, slot: int, running: RunningRequest, rules: RequestRules) -> None:
        sampling, generation = rules.sampling, running.request.generation
        bias = self._bias(sampling.logit_bias) if sampling.logit_bias else None
        masks = rules.masks_stop_ids and bool(rules.stop_ids)
        tokens = None
        if rules.has_penalties or bias is not None or masks:
            tokens = torch.zeros(self.vocab_size, dtype=torch.int32, device=self._device)
            self._tensors[slot] = (tokens, bias)
        is_filtered = not sampling.is_greedy and (0 < sampling.top_k < self.vocab_size or sampling.top_p < 1)
        row = self._rows[slot]
        row["noise_state"] = noise_state(generation.seed, generation.choice)
        row["stops_from"] = running.num_prompt_tokens + sampling.min_tokens
        row["tokens"] = 0 if tokens is None else tokens.data_ptr()
        row["bias"] = 0 if bias is None else bias.data_ptr()
        row["filtered_row"] = 0 if is_filtered else -1
        row["top_k"] = sampling.top_k
        row["largest_key"] = largest_key(sampling.min_p)
        row["temperature"] = sampling.temperature
        row["top_p"] = sampling.top_p
        row["repetition_penalty"] = sampling.repetition_penalty
        row["presence_penalty"] = sampling.presence_penalty
        row["frequency_penalty"] = sampling.frequency_penalty
        only_masks = masks and not rules.has_penalties and bias is None
        self.kinds[slot] = (rules.is_plain, only_masks, rules.num_logprobs is not None, -1)

    def _bias(self, logit_bias: Mapping[int, float]) -> torch.Tensor:
        bias = torch.zeros(self.vocab_size, dtype=torch.float32, device=self._device)
        bias[self._ids(logit_bias)] = self._sent(np.fromiter(logit_bias.values(), np.float32))
        return bias

    def _count(self, slot: int, running: RunningRequest) -> None:
        """Write anew what rules know of the request's tokens: some were not chosen here, one after the other."""
        assert not running.seq.num_unread_tokens
        tokens, _ = self._tensors[slot]
        token_ids, num_prompt = running.seq.token_ids, running.num_prompt_tokens
        tokens.zero_()
        tokens[self._ids(token_ids[:num_prompt])] = IN_PROMPT
        if len(token_ids) > num_prompt:
            output = self._ids(token_ids[num_prompt:])
            tokens.index_add_(0, output, torch.full_like(output, ONE_OUTPUT, dtype=torch.int32))
        if running.stop_ids:
            tokens[self._ids(running.stop_ids)] += IS_STOP_ID

    def _ids(self, token_ids: Iterable[int]) -> torch.Tensor:
        return self._sent(np.fromiter(token_ids, np.int64))

    def _sent(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self._device)

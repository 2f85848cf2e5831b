"""Log probabilities of prompts, gathered chunk by chunk while their requests are computed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch

from quartet.engine.runner import RunningRequest, SampledToken, ScheduledChunk
from quartet.engine.sampling import PromptLogprobs
from quartet.engine.torch.copies import to_device, to_host

# Rows are taken in groups: beside the logits, only these exist in single precision and again as probabilities.
_ROWS_AT_ONCE = 64


class PromptReports:
    """What is known of the log probabilities of running requests' prompts. Lives in the engine thread."""

    def __init__(self) -> None:
        """Know none."""
        self._gathered: WeakKeyDictionary[RunningRequest, _Gathered] = WeakKeyDictionary()

    def launch(self, logits: torch.Tensor, chunks: Sequence[ScheduledChunk]) -> LaunchedReport | None:
        """Have the device work out what the ``chunks`` of a step report; ``None``: they report nothing.

        ``logits`` are ``[R, V]``: those of the tokens that chunks report, chunk by chunk.
        """
        parts: list[_Part] = []
        row = 0
        for chunk in chunks:
            if chunk.reports:
                rows = logits[row : row + chunk.num_reported]
                row += chunk.num_reported
                parts.append(_Part.of(rows, chunk) if chunk.num_reported else _Part(chunk))
        return LaunchedReport(self._gathered, parts, chunks) if parts else None


class LaunchedReport:
    """What a step reports of prompts, on its way from the device."""

    def __init__(
        self,
        gathered: WeakKeyDictionary[RunningRequest, _Gathered],
        parts: Sequence[_Part],
        chunks: Sequence[ScheduledChunk],
    ) -> None:
        """``parts`` go to ``gathered``, step by step in the order of launches."""
        self._gathered = gathered
        self._parts = parts
        self._sampling = [chunk for chunk in chunks if chunk.samples]

    def add_to(self, sampled: Sequence[SampledToken]) -> list[SampledToken]:
        """``sampled``, the tokens of the step, with the prompts that it completes; the device has done all."""
        for part in self._parts:
            chunk = part.chunk
            if chunk.first_position == 0:  # also after a preemption
                self._gathered[chunk.running] = _Gathered()
            self._gathered[chunk.running].add(part)
        return [
            replace(token, prompt_logprobs=self._gathered.pop(chunk.running).report()) if chunk.reports else token
            for chunk, token in zip(self._sampling, sampled, strict=True)
        ]


@dataclass(frozen=True)
class _Part:
    """What one chunk reports: ``[N]`` log probabilities, and ``[N, k]`` of alternatives."""

    chunk: ScheduledChunk
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None

    @classmethod
    def of(cls, logits: torch.Tensor, chunk: ScheduledChunk) -> _Part:
        running, first = chunk.running, chunk.first_position + 1
        following = running.seq.token_ids[first : first + chunk.num_reported]
        token_ids = to_device(torch.tensor(following, dtype=torch.long), logits.device)
        num_top = min(running.request.generation.output.num_prompt_logprobs or 0, logits.shape[1])
        own, ids, values = [], [], []
        for begin in range(0, len(logits), _ROWS_AT_ONCE):
            rows = logits[begin : begin + _ROWS_AT_ONCE]
            logprobs = (rows if rows.dtype == torch.float64 else rows.float()).log_softmax(-1)
            own.append(logprobs.gather(1, token_ids[begin : begin + _ROWS_AT_ONCE, None])[:, 0])
            if num_top:
                top = logprobs.topk(num_top, dim=-1)
                ids.append(top.indices)
                values.append(top.values)
        if not num_top:
            return cls(chunk, to_host(torch.cat(own)))
        return cls(chunk, to_host(torch.cat(own)), to_host(torch.cat(ids)), to_host(torch.cat(values)))


@dataclass
class _Gathered:
    """The columns of one prompt's report, as far as they are known."""

    logprobs: array[float] = field(default_factory=lambda: array("f"))
    top_ids: array[int] = field(default_factory=lambda: array("I"))
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))

    def add(self, part: _Part) -> None:
        if part.logprobs is not None:
            self.logprobs.extend(part.logprobs.tolist())
        if part.top_ids is not None and part.top_logprobs is not None:
            self.top_ids.extend(part.top_ids.flatten().tolist())
            self.top_logprobs.extend(part.top_logprobs.flatten().tolist())

    def report(self) -> PromptLogprobs:
        return PromptLogprobs((), self.logprobs, self.top_ids, self.top_logprobs)

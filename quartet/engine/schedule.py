"""What the scheduler is bound by, and what it says: the work of one step, and the tokens that came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from quartet.engine.base import FinishReason
from quartet.engine.runner import SampledToken
from quartet.engine.running import RunningRequest, ScheduledChunk
from quartet.transfer.base import PieceCopy


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Bounds of a step.

    Attributes:
        max_num_seqs: requests that have blocks at the same time.
        max_num_batched_tokens: tokens that one step computes: the longest chunk of a prompt, and so what a long
            prompt adds to the time between others' tokens.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048

    def __post_init__(self) -> None:
        """Refuse bounds under which a step could leave out a request that decodes."""
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, not {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs})"
            )


@dataclass(frozen=True)
class Pull:
    """Pieces of request ``id``'s hand-off to fetch into blocks that stay its own until ``Scheduler.end_pull``."""

    id: int
    copies: tuple[PieceCopy, ...]


@dataclass
class Schedule:
    """One step: what to compute, what to fetch meanwhile, and what changed on the way.

    ``started`` are those in ``chunks`` that were in no step before; ``media_lost`` ended instead of being admitted, as
    they would have had to compute media whose embeddings are not here.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    started: list[RunningRequest] = field(default_factory=list)
    media_lost: list[RunningRequest] = field(default_factory=list)
    num_preempted: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether the next schedule would be the same, unless somebody calls the scheduler in between."""
        return not (self.chunks or self.pulls or self.num_preempted)

    def add_chunk(self, running: RunningRequest, budget: int) -> int:
        """Let ``running`` compute what is missing, ``budget`` tokens at most; returns how many."""
        num_missing = running.num_uncomputed_tokens
        num_tokens = min(num_missing, budget)
        chunk = ScheduledChunk(running, running.seq.num_computed_tokens, num_tokens, samples=num_tokens == num_missing)
        self.chunks.append(chunk)
        if not running.is_started:
            running.is_started = True
            self.started.append(running)
        return num_tokens


@dataclass(frozen=True)
class TokenOut:
    """A sampled token, given out once.

    Attributes:
        offset: which output token it is, from 0.
        finished: why the generation ended with it, else ``None``. A prefill ends either way; where ``finished`` is
            ``None``, ``held_block_ids`` with the KV of ``num_held_tokens`` tokens are held under its id.
    """

    running: RunningRequest
    sampled: SampledToken
    offset: int
    finished: FinishReason | None = None
    held_block_ids: tuple[int, ...] = ()
    num_held_tokens: int = 0

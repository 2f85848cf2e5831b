"""Decides what each step computes. Pure: no clock, thread or tensor, so that tests drive it step by step.

Continuous batching with chunked prefill, as Sarathi-Serve (arXiv 2403.02310) describes it and vLLM's
``vllm/v1/core/sched/scheduler.py`` does it: every step takes one token of each request that decodes, and fills the
rest of the token budget with chunks of prompts: first come, first served, but short prompts do not wait for the rest
of a long one (as with vLLM's ``long_prefill_token_threshold``). A request is admitted when there are blocks for all
its tokens. It grows while it decodes. When blocks run out, the request at the last position is preempted and computed
again later.

A step is either computed at once, between ``schedule`` and ``update``, or launched: ``begin`` then stands for its
launch and ``end`` for its end, and the next step is planned in between, before the tokens are known. So a stop id is
seen one step late: the step in flight computes one token more, which is dropped, and the blocks stay until it has
ended. A request that reaches ``max_output_tokens`` with the step in flight takes part in no further step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from quartet.engine.base import EngineRequest, FinishReason, RequestKind
from quartet.engine.guided.masks import Guide
from quartet.engine.runner import RequestState, RunningRequest, SampledToken, ScheduledChunk
from quartet.engine.step_time import backlog
from quartet.engine.validation import EngineLimits, check_request, max_output_tokens
from quartet.errors import OutOfBlocksError
from quartet.kvcache import sequence
from quartet.kvcache.block_hash import ExtraKey
from quartet.kvcache.block_pool import BlockManager
from quartet.kvcache.retention import SessionId
from quartet.kvcache.tiers import TierBlock
from quartet.transfer.base import PieceCopy, PieceRun

#: Prompt tokens of a step whose log probabilities are reported: each takes a row of logits, as long as the vocabulary.
MAX_REPORTED_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Bounds of a step.

    Attributes:
        max_num_seqs: most requests with blocks at the same time.
        max_num_batched_tokens: most tokens that one step computes. It bounds the chunks of a long prompt, and so the
            time that such a prompt adds between other requests' tokens.
        short_prompts_part: so much of a step that does not end a long prompt goes first to the prompts behind it that
            end with the step, if there are any of its priority. 0: each prompt waits for the rest of those before it.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    short_prompts_part: float = 0.5

    def __post_init__(self) -> None:
        """Refuse bounds with which a step might have no room for every decoding request."""
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, not {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs})"
            )

    def num_short_tokens(self, num_decoding: int) -> int:
        """So many tokens of short prompts go with a step that also has ``num_decoding`` decoding requests."""
        return int((self.max_num_batched_tokens - num_decoding) * self.short_prompts_part)


class Onboarding(Protocol):
    """Decides what comes from tiers below the device."""

    def choose(self, seq: sequence.Sequence) -> None:
        """Leave of ``seq.blocks_below`` those that are to be loaded, from the first on, and let go of the others."""
        ...


class Scheduler:
    """The requests of one engine: which wait, which have blocks, and what each computes next.

    Attributes:
        num_preemptions: times that a request lost its blocks, ever.
        live: requests that have not ended, by id; read-only for callers.
        waiting: the live requests without blocks; read-only for callers.
        running: the requests that take part in steps, by position; read-only for callers.
        num_ending: requests whose last step is in flight; read-only for callers.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        limits: EngineLimits,
        eos_token_ids: frozenset[int] = frozenset(),
        *,
        shares_within_step: bool = False,
        onboarding: Onboarding | None = None,
    ) -> None:
        """Begin without requests; only this scheduler changes ``block_manager`` from now on.

        Args:
            config: bounds of a step.
            block_manager: the pool.
            limits: bounds of requests.
            eos_token_ids: tokens that end an output.
            shares_within_step: requests of one step can share blocks that the step computes. That needs a runner that
                writes the KV of all tokens of a step before it reads any.
            onboarding: of a pool with lower tiers.
        """
        self.num_preemptions = 0
        self._config = config
        self._blocks = block_manager
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._shares_within_step = shares_within_step
        self._onboarding = onboarding
        self._num_added = 0
        self.live: dict[int, RunningRequest] = {}
        self.waiting = WaitingQueue()
        self.running: list[RunningRequest] = []
        self._num_pulling = 0
        self._num_loading = 0
        self._num_steps_in_flight = 0
        self.num_ending = 0
        self._unnamed: list[RunningRequest] = []  # whose pull has ended, and that were in no step since

    @property
    def num_running(self) -> int:
        """Requests that have blocks and will compute, pulling ones included."""
        return len(self.running) + self._num_pulling

    @property
    def num_queued_prefill_tokens(self) -> int:
        """Tokens to compute until all requests decode."""
        return self.waiting.num_prefill_tokens + backlog(self.running).num_tokens

    def add(self, request: EngineRequest, guide: Guide | None = None) -> RunningRequest:
        """Queue ``request``: higher priority first, then first come, first served. ``guide``: that of its grammar.

        Raises:
            InvalidRequestError, PromptTooLongError, LayoutMismatchError: as ``check_request`` does.
        """
        check_request(request, self._limits)
        generation = request.generation
        seq = sequence.Sequence(
            (*generation.prompt_token_ids, *generation.generated_token_ids),
            block_size=self._blocks.block_size,
            extra_key=ExtraKey(adapter=generation.adapter, cache_salt=generation.cache_salt),
            media=generation.media,
        )
        return self.add_sequence(request, seq, guide)

    def add_sequence(
        self, request: EngineRequest, seq: sequence.Sequence, guide: Guide | None = None
    ) -> RunningRequest:
        """``add`` without the check, for a caller that made ``seq``, the request's sequence without blocks."""
        sampling = request.generation.sampling
        # Where a grammar ends, only these tokens may come.
        ignores_eos = sampling.ignore_eos and guide is None
        running = RunningRequest(
            request=request,
            seq=seq,
            arrival=self._num_added,
            max_output_tokens=max_output_tokens(request, self._limits),
            stop_ids=frozenset(sampling.stop_token_ids) | (frozenset() if ignores_eos else self._eos_token_ids),
            needs_pull=request.hand_off is not None,
            guide=guide,
        )
        self._num_added += 1
        self.live[request.id] = running
        self._wait(running)
        return running

    def cancel(self, id: int) -> RequestState | None:
        """End a request.

        Returns:
            Its state now: ``ENDED``; ``PULLING``: ``end_pull`` or ``end_load`` ends it, once nothing writes to its
            blocks; ``None``: the ``id`` is unknown.
        """
        running = self.live.get(id)
        if running is None:
            return None
        if running.state is RequestState.PULLING:
            running.is_cancelled = True
        else:
            self._name_pulled()
            self._end(running)
        return running.state

    def release(self, id: int) -> None:
        """Free the blocks that the completed prefill ``id`` holds. Unknown ids are ignored."""
        self._blocks.release(id)

    def end_pull(self, id: int, *, succeeded: bool) -> RunningRequest:
        """The pull of ``id`` has ended: nothing writes to its blocks any more.

        Returns:
            The request: ``RUNNING`` now, or ``ENDED`` if the pull failed or the request was cancelled meanwhile.
        """
        running = self.live[id]
        assert running.state is RequestState.PULLING, "only a pulling request ends a pull"
        if not succeeded or running.is_cancelled:
            self._end(running)
            return running
        self._leave(running)
        running.needs_pull = False
        running.seq.num_computed_tokens = len(running.seq) - 1
        # A long prompt's blocks take milliseconds to name: its first step goes first, unless others may share them.
        self._unnamed.append(running)
        self._run(running)
        return running

    def end_load(self, id: int, num_blocks: int) -> RunningRequest:
        """The load of ``id`` has ended, and brought its first ``num_blocks`` blocks: it computes the others.

        Returns:
            The request: ``RUNNING`` now, or ``ENDED`` if it was cancelled meanwhile.
        """
        running = self.live[id]
        assert running.state is RequestState.PULLING, "only a loading request ends a load"
        self._num_loading -= 1
        if running.is_cancelled:
            self._end(running)
            return running
        self._leave(running)
        seq = running.seq
        seq.num_computed_tokens += num_blocks * seq.block_size
        if not running.is_started:
            running.num_cached_tokens = seq.num_computed_tokens
        self._blocks.commit(seq)
        self._run(running)
        return running

    def schedule(self) -> Schedule:
        """Choose the next step's work, with blocks for all that it writes; call ``update`` after the step.

        Or call ``begin`` when it was launched, and ``end`` when that step has ended. At most one step may be in flight
        meanwhile.
        """
        schedule = Schedule()
        self._grow(schedule)
        if schedule.needs_read:
            return schedule
        budget = self._config.max_num_batched_tokens
        prefilling: list[RunningRequest] = []
        for running in self.running:
            if running.is_decoding:
                budget -= schedule.add_chunk(running, 1)
            else:
                prefilling.append(running)
        if prefilling and prefilling[0].num_uncomputed_tokens > budget and not schedule.num_preempted:
            part = self._config.num_short_tokens(len(schedule.chunks))
            budget -= part - self._admit(schedule, part, min_priority=prefilling[0].request.priority)
        for running in prefilling:
            if budget:
                budget -= self._prefill(schedule, running, budget)
        if not schedule.num_preempted:  # running requests need the blocks that were just taken
            self._admit(schedule, budget)
        return schedule

    def update(self, chunks: Sequence[ScheduledChunk], sampled: Sequence[SampledToken]) -> list[TokenOut]:
        """Apply the step's results: ``sampled`` has a token for each chunk that samples, in order."""
        tokens = iter(sampled)
        outs: list[TokenOut] = []
        for chunk in chunks:
            chunk.running.seq.num_computed_tokens += chunk.num_tokens
            self._blocks.commit(chunk.running.seq)
            if chunk.samples:
                outs.append(self._take_token(chunk.running, next(tokens)))
        self._unnamed.clear()
        return outs

    def begin(self, chunks: Sequence[ScheduledChunk]) -> None:
        """A step of ``chunks`` was launched: ``schedule`` goes on as if it had ended, with unread tokens.

        The device computes steps in order, so what this one writes can be shared by those that are launched later.
        """
        self._num_steps_in_flight += 1
        num_rows = 0
        for chunk in chunks:
            running = chunk.running
            seq = running.seq
            running.num_steps_in_flight += 1
            seq.num_computed_tokens += chunk.num_tokens
            self._commit_known(seq)
            if not chunk.samples:
                continue
            running.unread_row = num_rows
            num_rows += 1
            if running.request.kind is RequestKind.PREFILL:
                self._let_end(running)
                continue
            if len(seq.token_ids) + 1 >= running.num_prompt_tokens + running.max_output_tokens:
                self._let_end(running)
            seq.append_unread()
        self._unnamed.clear()

    def end(self, chunks: Sequence[ScheduledChunk], sampled: Sequence[SampledToken]) -> list[TokenOut]:
        """The first step in flight, that of ``chunks``, has ended; ``sampled`` as for ``update``.

        Returns:
            The tokens of requests that have not ended before.
        """
        self._num_steps_in_flight -= 1
        tokens = iter(sampled)
        outs: list[TokenOut] = []
        for chunk in chunks:
            running = chunk.running
            running.num_steps_in_flight -= 1
            token = next(tokens) if chunk.samples else None
            if running.state is RequestState.ENDED:
                if not running.num_steps_in_flight:
                    self._blocks.free(running.seq)
                continue
            if not running.num_steps_in_flight:
                running.unread_row = None
            if token is not None:
                outs.append(self._read_token(chunk, token))
        return outs

    def _grow(self, schedule: Schedule) -> None:
        """Make room for the newest token of each decoding request, first position first; preempt the last if needed.

        Nobody is preempted while a step is in flight: it uses the blocks, and may be the last one of some request.
        """
        for running in tuple(self.running):
            while running.state is RequestState.RUNNING and running.seq.num_blocks > len(running.seq.block_table):
                try:
                    self._blocks.extend(running.seq, 0)
                except OutOfBlocksError:
                    if self._num_steps_in_flight:
                        schedule.needs_read = True
                        return
                    self._preempt(self.running[-1])
                    schedule.num_preempted += 1

    def _preempt(self, running: RunningRequest) -> None:
        """Take its blocks; it waits at its old position and computes all its tokens again."""
        self._leave(running)
        self._name_pulled()
        self._blocks.free(running.seq)
        self._wait(running)
        self.num_preemptions += 1

    def _admit(self, schedule: Schedule, budget: int, *, min_priority: int | None = None) -> int:
        """Give blocks to waiting requests, in order: one that does not fit blocks the rest, so that none starves.

        ``min_priority``: one of a lower priority, or whose prompt would not end within ``budget``, does not fit.

        Returns:
            What is left of ``budget``.
        """
        if self.waiting:
            self._name_pulled()
        while self.waiting and self.num_running < self._config.max_num_seqs:
            running = self.waiting.head
            if running.lacks_embeddings and _has_lost_media(running, self._blocks):
                self._end(running)
                schedule.media_lost.append(running)
                continue
            if min_priority is not None and not self._is_short(running, budget, min_priority):
                break
            if not (budget or running.needs_pull) or not self._allocate(running):
                break
            self._leave(running)
            if running.needs_pull:
                schedule.pulls.append(self._pull(running))
            elif running.seq.blocks_below:
                schedule.loads.append(self._load(running))
            else:
                self._run(running)
                budget -= self._prefill(schedule, running, budget)
        return budget

    def _is_short(self, running: RunningRequest, budget: int, min_priority: int) -> bool:
        if running.request.priority < min_priority:
            return False
        num_cached_tokens = 0 if running.reports_prompt else self._blocks.num_cached_tokens(running.seq)
        return running.needs_pull or len(running.seq) - num_cached_tokens <= budget

    def _prefill(self, schedule: Schedule, running: RunningRequest, budget: int) -> int:
        num_tokens = schedule.add_chunk(running, budget)
        if self._shares_within_step:
            self._blocks.commit(running.seq, running.seq.num_computed_tokens + num_tokens)
        return num_tokens

    def _name_pulled(self) -> None:
        """Let what was pulled be shared."""
        for running in self._unnamed:
            self._blocks.commit(running.seq)
        self._unnamed.clear()

    def _allocate(self, running: RunningRequest) -> bool:
        seq, shares = running.seq, not running.reports_prompt
        looks_below = shares and not running.needs_pull and self._onboarding is not None
        if self._num_loading and looks_below and self._blocks.awaits_load(seq):
            return False  # what another request loads can be shared soon
        try:
            num_cached_tokens = self._blocks.allocate(seq, shares=shares, looks_below=looks_below)
        except OutOfBlocksError:
            return False
        if seq.blocks_below and self._onboarding is not None:
            self._onboarding.choose(seq)
        if not running.is_admitted:
            running.is_admitted = True
            running.num_cached_tokens = num_cached_tokens
            if not (running.needs_pull or running.reports_prompt):
                num_below = len(seq.blocks_below) * seq.block_size  # evicted, and not lost
                running.num_evicted_tokens = max(self._blocks.num_evicted_tokens(seq) - num_below, 0)
        return True

    def _pull(self, running: RunningRequest) -> Pull:
        """Fetch the blocks that were not in the cache, up to the last block of the hand-off."""
        running.state = RequestState.PULLING
        self._num_pulling += 1
        seq, block_size = running.seq, self._blocks.block_size
        first, end = seq.num_computed_tokens // block_size, -(-(len(seq) - 1) // block_size)
        return Pull(running.id, PieceRun(first, seq.block_table[first:end]))

    def _load(self, running: RunningRequest) -> Load:
        """Have the blocks that lower tiers have brought to those that were allocated for them."""
        running.state = RequestState.PULLING
        self._num_pulling += 1
        self._num_loading += 1
        seq = running.seq
        blocks, seq.blocks_below = seq.blocks_below, ()
        first = seq.num_computed_tokens // seq.block_size
        return Load(running.id, blocks, seq.block_table[first : first + len(blocks)])

    def _take_token(self, running: RunningRequest, sampled: SampledToken) -> TokenOut:
        """Add a token. A prefill ends with it; unless it ends the generation, hold the blocks for the decode worker."""
        offset = running.num_output_tokens
        finished = _finish_reason(running, sampled.token_id, offset + 1)
        if running.request.kind is RequestKind.PREFILL:
            return self._end_prefill(running, sampled, offset, finished)
        running.seq.append(sampled.token_id)
        if finished is not None:
            self._end(running)
        return TokenOut(running, sampled, offset, finished)

    def _commit_known(self, seq: sequence.Sequence) -> None:
        """Name the blocks that are computed or in flight, as far as their tokens are known."""
        num_known = min(seq.num_computed_tokens, seq.num_read_tokens)
        if num_known // seq.block_size > seq.num_named_blocks:
            self._blocks.commit(seq, num_known)

    def _let_end(self, running: RunningRequest) -> None:
        """Its last step was launched."""
        self._leave(running)
        running.state = RequestState.ENDING
        self.num_ending += 1

    def _read_token(self, chunk: ScheduledChunk, sampled: SampledToken) -> TokenOut:
        """``_take_token`` for a token that was unread."""
        running = chunk.running
        offset = chunk.first_position + chunk.num_tokens - running.num_prompt_tokens
        finished = _finish_reason(running, sampled.token_id, offset + 1)
        if running.request.kind is RequestKind.PREFILL:
            return self._end_prefill(running, sampled, offset, finished)
        seq = running.seq
        seq.read(sampled.token_id)
        if finished is not None:
            self._end(running)
        else:
            self._commit_known(seq)
        return TokenOut(running, sampled, offset, finished)

    def _end_prefill(
        self, running: RunningRequest, sampled: SampledToken, offset: int, finished: FinishReason | None
    ) -> TokenOut:
        held: tuple[int, ...] = ()
        num_held_tokens = 0
        if finished is None:
            num_held_tokens = len(running.seq)
            self._retain(running)
            held = self._blocks.hold(running.seq, running.id)
        self._end(running)
        return TokenOut(running, sampled, offset, finished, held, num_held_tokens)

    def _wait(self, running: RunningRequest) -> None:
        running.state = RequestState.WAITING
        self.waiting.push(running)

    def _run(self, running: RunningRequest) -> None:
        running.state = RequestState.RUNNING
        insort(self.running, running, key=attrgetter("position"))

    def _leave(self, running: RunningRequest) -> None:
        """Remove it from the list of its state."""
        if running.state is RequestState.WAITING:
            self.waiting.remove(running)
        elif running.state is RequestState.RUNNING:
            self.running.remove(running)
        elif running.state is RequestState.ENDING:
            self.num_ending -= 1
        else:
            self._num_pulling -= 1

    def _end(self, running: RunningRequest) -> None:
        self._leave(running)
        self._retain(running)
        if not running.num_steps_in_flight:
            self._blocks.free(running.seq)
        running.state = RequestState.ENDED
        del self.live[running.id]

    def _retain(self, running: RunningRequest) -> None:
        """Have its session, if it has one, retain what the next request of it may begin with."""
        request = running.request
        if request.session_key:
            session = SessionId(request.trust_domain, request.tenant, request.session_key)
            self._blocks.retain(running.seq, session)


@dataclass
class Schedule:
    """One step: what to compute, what to fetch meanwhile, and which requests changed.

    Attributes:
        started: requests in ``chunks`` that were in no step before.
        media_lost: requests that ended instead of being admitted: they would have to compute media without embeddings.
        needs_read: the step can be planned only after the one in flight was read; nothing else is set then.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    started: list[RunningRequest] = field(default_factory=list)
    media_lost: list[RunningRequest] = field(default_factory=list)
    num_preempted: int = 0
    needs_read: bool = False
    _num_reportable: int = MAX_REPORTED_TOKENS

    @property
    def is_idle(self) -> bool:
        """Whether the next schedule would be the same, unless the scheduler is called in between."""
        return not (self.chunks or self.pulls or self.loads or self.num_preempted)

    def add_chunk(self, running: RunningRequest, budget: int) -> int:
        """Let ``running`` compute its missing tokens, ``budget`` at most; returns how many."""
        num_missing = running.num_uncomputed_tokens
        num_tokens, reports = min(num_missing, budget), running.reports_prompt
        if reports:
            num_tokens = min(num_tokens, self._num_reportable + (num_missing == 1))
            if not num_tokens:
                return 0  # others have used up what the step reports
        chunk = ScheduledChunk(
            running, running.seq.num_computed_tokens, num_tokens, samples=num_tokens == num_missing, reports=reports
        )
        self._num_reportable -= chunk.num_reported
        self.chunks.append(chunk)
        if not running.is_started:
            running.is_started = True
            self.started.append(running)
        return num_tokens


@dataclass(frozen=True)
class Pull:
    """Pieces of request ``id``'s hand-off to fetch into its blocks, which it keeps until ``Scheduler.end_pull``."""

    id: int
    copies: Sequence[PieceCopy]


@dataclass(frozen=True)
class Load:
    """Blocks of lower tiers to copy into blocks of request ``id``, which it keeps until ``Scheduler.end_load``."""

    id: int
    blocks: Sequence[TierBlock]
    block_ids: Sequence[int]


@dataclass(frozen=True)
class TokenOut:
    """A sampled token.

    Attributes:
        offset: which output token it is, from 0.
        finished: why the generation ended with it, else ``None``. A prefill ends either way; if ``finished`` is
            ``None``, ``held_block_ids`` with the KV of ``num_held_tokens`` tokens are held under its id.
    """

    running: RunningRequest
    sampled: SampledToken
    offset: int
    finished: FinishReason | None = None
    held_block_ids: tuple[int, ...] = ()
    num_held_tokens: int = 0


class WaitingQueue:
    """Requests without blocks: higher priority first, then first come, first served.

    A preempted request returns to its old position.

    Attributes:
        num_prefill_tokens: tokens to compute before all of these decode; tokens to pull are not computed.
    """

    def __init__(self) -> None:
        self.num_prefill_tokens = 0
        self._by_position: list[RunningRequest] = []

    def __len__(self) -> int:
        return len(self._by_position)

    @property
    def head(self) -> RunningRequest:
        """The next request; there must be one."""
        return self._by_position[0]

    def push(self, running: RunningRequest) -> None:
        """Queue ``running`` at its position."""
        insort(self._by_position, running, key=attrgetter("position"))
        self.num_prefill_tokens += _num_prefill_tokens(running)

    def remove(self, running: RunningRequest) -> None:
        """Remove ``running``, at any position."""
        self._by_position.remove(running)
        self.num_prefill_tokens -= _num_prefill_tokens(running)


def _has_lost_media(running: RunningRequest, blocks: BlockManager) -> bool:
    """Whether it would have to compute media, without their embeddings."""
    num_there = len(running.seq) - 1 if running.needs_pull else blocks.num_cached_tokens(running.seq)
    return num_there < running.media_end


def _finish_reason(running: RunningRequest, token_id: int, num_output_tokens: int) -> FinishReason | None:
    """Why the output ends with ``token_id``, which is output token number ``num_output_tokens``, counting from 1."""
    # Samplers mask stop ids before min_tokens. If one comes all the same, it ends the output only where a grammar ends.
    is_early = num_output_tokens <= running.sampling.min_tokens and running.guide is None
    if token_id in running.stop_ids and not is_early:
        return FinishReason.STOP_ID
    return FinishReason.LENGTH if num_output_tokens >= running.max_output_tokens else None


def _num_prefill_tokens(running: RunningRequest) -> int:
    return 0 if running.needs_pull else len(running.seq)

"""One engine in virtual time: the real scheduler and block pool, with a timing model instead of the forward pass."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from cli.replay.tiers import SimulatedTiers, TierSettings
from quartet.discovery.base import Rank
from quartet.engine.base import EngineRequest
from quartet.engine.mock.model import FULL_CONTEXT_TOKENS, StepTiming
from quartet.engine.mock.runner import num_quiet_steps, take_quiet_steps
from quartet.engine.runner import RunningRequest, SampledToken, ScheduledChunk
from quartet.engine.scheduler import Pull, Scheduler, SchedulerConfig
from quartet.engine.step_time import step_work
from quartet.engine.tier_rules import load_s_per_block
from quartet.engine.validation import EngineLimits
from quartet.events.kv import KvEvent, Tier
from quartet.events.load import OnboardTime, StepTime
from quartet.kvcache.block_pool import BlockManager
from quartet.kvcache.retention import Retention, RetentionPlan
from quartet.kvcache.sequence import Sequence as TokenSequence

#: The token that replayed engines sample; it is in no trace.
OUTPUT_TOKEN_ID = (1 << 32) - 1

_OUTPUT = SampledToken(OUTPUT_TOKEN_ID)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of an engine. The defaults are those of ai-dynamo/dynamo's mock engine in its replays.

    Attributes:
        kv_bytes_per_token: of all layers; only transfers use it. The default is that of a model with 8 billion
            parameters and grouped queries, in 16 bits.
        short_prompts_part: as in ``SchedulerConfig``; 0: prompts in order.
        shares_within_step: requests of one step share the blocks that it is about to write; else those of the next do.
        reports_by_step: routers learn of a prompt that came while a step ran when the step ends, and until it begins
            it counts with what is cached of it, as with Quartet's workers; until then routers count it by their own
            forecast. Else they know at once what is missing of it.
        tiers: below each pool; ``None``: what is evicted is gone.
        retention: what sessions retain in each pool; ``None``: nothing.
    """

    block_size: int = 64
    num_blocks: int = 16_384
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    kv_bytes_per_token: int = 131_072
    timing: StepTiming = field(default_factory=StepTiming)
    short_prompts_part: float = 0.0
    shares_within_step: bool = True
    reports_by_step: bool = False
    tiers: TierSettings | None = None
    retention: RetentionPlan | None = None

    @property
    def num_pool_tokens(self) -> int:
        """Tokens whose KV one engine holds."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True)
class Progress:
    """What one or more steps of a worker gave.

    Attributes:
        ends: when each of them ended, in seconds.
        tokens: requests that got a token, in each of them.
        finished: those of ``tokens`` whose generation ended with it.
        prefilled: those of ``tokens`` that another worker decodes; their blocks are held until ``release``.
    """

    ends: Sequence[float]
    tokens: Sequence[RunningRequest]
    finished: Sequence[RunningRequest] = ()
    prefilled: Sequence[RunningRequest] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """What a worker does until the next call: one step, or many that only decode.

    Attributes:
        step_ends: when each of them ends, in seconds; none: it is idle.
        num_decoding, num_context_tokens: requests that decode, and the sum of their tokens in the first step; each of
            them has one more in each further step.
        num_used_blocks, num_queued_tokens, num_unbegun_tokens, num_spare_tokens: as in ``Candidate``.
        num_blocks: by request, how many it has; one that waits has none.
    """

    step_ends: Sequence[float]
    num_decoding: int
    num_context_tokens: int
    num_used_blocks: int
    num_queued_tokens: int
    num_unbegun_tokens: int
    num_spare_tokens: int
    num_blocks: Mapping[int, int]

    def step_at(self, time: float) -> tuple[float, int]:
        """When the step ends that runs at ``time``, and its context tokens; 0 seconds if none runs."""
        if not self.step_ends:
            return 0.0, self.num_context_tokens
        step = min(bisect_right(self.step_ends, time), len(self.step_ends) - 1)
        return self.step_ends[step], self.num_context_tokens + step * self.num_decoding


class SimulatedWorker:
    """Runs steps when there is something to do. All times are seconds of the replay.

    Attributes:
        settings: its engine's.
        next_at: when the next step ends; ``inf``: none runs.
        num_computed_tokens: prompt tokens computed, ever.
        changed_at: when a step last began or ended.
        busy_s: for which steps have run that have ended.
        tiers: those below its pool, if there are any.
    """

    def __init__(self, rank: Rank, settings: EngineSettings) -> None:
        """Idle, with an empty cache."""
        self.rank = rank
        self.next_at = inf
        self.num_computed_tokens = 0
        self.changed_at = 0.0
        self.busy_s = 0.0
        self.settings = settings
        self.tiers = _tiers(settings)
        lower = None if self.tiers is None else self.tiers.lower
        self._now = 0.0
        plan = settings.retention
        retention = None if plan is None else Retention(plan, settings.num_blocks, lambda: self._now)
        self._blocks = BlockManager(
            settings.num_blocks, settings.block_size, has_events=True, lower=lower, retention=retention
        )
        limits = EngineLimits(
            max_model_len=settings.num_pool_tokens,
            num_pool_tokens=settings.num_pool_tokens,
            vocab_size=OUTPUT_TOKEN_ID + 1,
        )
        self._config = SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            short_prompts_part=settings.short_prompts_part,
        )
        self.scheduler = Scheduler(
            self._config,
            self._blocks,
            limits,
            shares_within_step=settings.shares_within_step,
            onboarding=self.tiers,
        )
        self._state: WorkerState | None = None  # until the next call
        self._num_missing: dict[int, int] = {}  # tokens to compute of those that no step has begun
        self._num_left = 0  # of prompts that steps have begun, after the running one
        self._began_at = 0.0  # the running step, or the quiet ones
        self._chunks: Sequence[ScheduledChunk] = ()  # of the running step
        self._quiet_ends: Sequence[float] = ()  # of the quiet steps under way, which are taken all together

    def state(self) -> WorkerState:
        """What it does until the next call."""
        if self._state is None:
            counts, scheduler = self._blocks.counts, self.scheduler
            lengths = [len(running.seq) for running in scheduler.running if running.is_decoding]
            self._state = WorkerState(
                step_ends=self._quiet_ends or ((self.next_at,) if self.next_at < inf else ()),
                num_decoding=len(lengths),
                num_context_tokens=sum(lengths),
                num_used_blocks=counts.in_use + counts.held,
                num_queued_tokens=scheduler.num_queued_prefill_tokens,
                num_unbegun_tokens=self._num_unbegun_tokens(),
                num_spare_tokens=self._num_spare_tokens(len(lengths)),
                num_blocks={id: len(running.seq.block_table) for id, running in scheduler.live.items()},
            )
        return self._state

    def take_events(self) -> Sequence[KvEvent]:
        """Blocks that became shareable, or ceased to be, since the last call."""
        return self._blocks.take_events()

    @property
    def is_idle(self) -> bool:
        """Whether no step runs."""
        return self.next_at == inf

    def submit(self, request: EngineRequest, seq: TokenSequence, now: float) -> RunningRequest:
        """Queue ``request``, which can run here; call ``begin`` once all requests that come at ``now`` are queued."""
        self._cut_quiet(now)
        self._state = None
        running = self.scheduler.add_sequence(request, seq)
        num_missing = 0 if running.needs_pull else len(running.seq) - self._blocks.num_cached_tokens(running.seq)
        self._num_missing[request.id] = num_missing
        return running

    def end_pull(self, id: int, now: float) -> None:
        """The blocks of ``id``'s hand-off are here; call ``begin`` after this."""
        self._cut_quiet(now)
        self._state = None
        self.scheduler.end_pull(id, succeeded=True)

    def release(self, id: int) -> None:
        """The blocks that the prefill ``id`` holds are no longer needed."""
        self._state = None
        self.scheduler.release(id)

    def end_tiers(self, now: float) -> bool:
        """End what moves between tiers and ends by ``now``; true if anything did: call ``begin`` after this."""
        if self.tiers is None or now < self.tiers.next_at:
            return False
        self._state = None
        for ended in self.tiers.end(now):
            running = self.scheduler.end_load(ended.id, ended.num_blocks)
            if not running.is_started:
                self._num_missing[ended.id] = running.num_uncomputed_tokens
        return True

    def begin(self, now: float) -> Sequence[Pull]:
        """Begin the next step if none runs and there is something to do; return the pulls to start meanwhile."""
        if not self.is_idle:
            return ()
        self._now = now
        self._state = None
        self._began_at = self.changed_at = now
        num_quiet = num_quiet_steps(self.scheduler, self.settings.block_size)
        if num_quiet > 1:
            self._begin_quiet(num_quiet, now)
            return ()
        schedule = self.scheduler.schedule()
        self._chunks = schedule.chunks
        if self.tiers is not None:
            self.tiers.begin_step(schedule, now)
        for load in schedule.loads:
            self._num_missing.pop(load.id, None)
        for running in schedule.started:
            self._num_missing.pop(running.id, None)
        self._num_left = sum(
            chunk.running.num_uncomputed_tokens - chunk.num_tokens for chunk in schedule.chunks if not chunk.samples
        )
        if schedule.chunks:
            work = step_work(schedule.chunks)
            self.num_computed_tokens += work.num_prompt_tokens
            step_s = self.settings.timing.step_ms(work.num_prompt_tokens, work.num_context_tokens) / 1e3
            self.next_at = now + step_s
        return schedule.pulls

    def advance(self, now: float) -> Progress | None:
        """End the steps that end at ``now``; ``None`` before ``next_at``."""
        if now < self.next_at:
            return None
        self._now = self.changed_at = now
        self._state = None
        if self._quiet_ends:
            return self._end_quiet()
        outs = self.scheduler.update(self._chunks, [_OUTPUT for chunk in self._chunks if chunk.samples])
        ended_at, self.next_at, self._chunks = self.next_at, inf, ()
        self.busy_s += ended_at - self._began_at
        return Progress(
            (ended_at,),
            [out.running for out in outs],
            [out.running for out in outs if out.finished is not None],
            [out.running for out in outs if out.held_block_ids],
        )

    def _num_unbegun_tokens(self) -> int:
        if self.settings.reports_by_step:
            return self.scheduler.waiting.num_prefill_tokens + self._num_left
        return sum(self._num_missing.values()) + self._num_left

    def _num_spare_tokens(self, num_decoding: int) -> int:
        """What a step has left for short prompts beside a long one, as the engine reports it."""
        if not self._num_left:
            return 0
        return max(self._config.num_short_tokens(num_decoding) - self.scheduler.waiting.num_prefill_tokens, 0)

    def _begin_quiet(self, num_steps: int, now: float) -> None:
        running, timing = self.scheduler.running, self.settings.timing
        num_context_tokens = sum(len(request.seq) for request in running)
        contexts = range(num_context_tokens, num_context_tokens + num_steps * len(running), len(running))
        steps_s = [timing.decode_ms(num_tokens) / 1e3 for num_tokens in contexts]
        self._quiet_ends = list(accumulate(steps_s, initial=now))[1:]
        self.next_at = self._quiet_ends[-1]

    def _end_quiet(self) -> Progress:
        ends, tokens = self._quiet_ends, tuple(self.scheduler.running)
        take_quiet_steps(self.scheduler, self._blocks, len(ends), OUTPUT_TOKEN_ID)
        self._quiet_ends, self.next_at = (), inf
        self.busy_s += ends[-1] - self._began_at
        return Progress(ends, tokens)

    def _cut_quiet(self, now: float) -> None:
        """Keep only the step that runs now: a new request joins after it."""
        if self._quiet_ends:
            num_steps = next(number for number, end in enumerate(self._quiet_ends, 1) if end > now)
            self._quiet_ends = self._quiet_ends[:num_steps]
            self.next_at = self._quiet_ends[-1]


def _tiers(settings: EngineSettings) -> SimulatedTiers | None:
    if settings.tiers is None:
        return None
    block_size_bytes = settings.block_size * settings.kv_bytes_per_token
    step_time = measured(settings.timing)
    return SimulatedTiers(settings.tiers, block_size_bytes, step_time, settings.max_num_batched_tokens)


def measured(timing: StepTiming) -> StepTime:
    """What a worker would have measured of steps with this timing."""
    return StepTime(
        prefill_base_s=timing.prefill_base / 1e3,
        prefill_s_per_token=timing.prefill_linear / 1e3,
        prefill_s_per_token2=timing.prefill_square / 1e3,
        decode_base_s=timing.decode_base / 1e3,
        decode_s_per_context_token=timing.decode_linear / FULL_CONTEXT_TOKENS / 1e3,
    )


def onboard_time(settings: EngineSettings) -> OnboardTime:
    """What a worker with these settings would have measured of its loads."""
    tiers = settings.tiers
    if tiers is None:
        return OnboardTime()
    speeds = {Tier.HOST: tiers.host_gb_per_s, Tier.DISK: tiers.disk_gb_per_s}
    s_per_token = {tier: settings.kv_bytes_per_token / (gb_per_s * 1e9) for tier, gb_per_s in speeds.items()}
    return OnboardTime(
        host_s_per_token=load_s_per_block(s_per_token, Tier.HOST),
        disk_s_per_token=0.0 if tiers.disk is None else load_s_per_block(s_per_token, Tier.DISK),
    )

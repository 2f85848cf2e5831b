"""The steps of an engine: take messages in, schedule, run the model, report.

With a runner that launches steps, the next step is launched before the tokens of the one in flight are read: the device
does not wait for the host.

``StepLoop`` does it, ``OutputBuilder`` collects a step's output, and the messages before them are what the event loop
posts to the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from quartet.engine.base import (
    EngineRequest,
    EngineStats,
    Failed,
    Finished,
    Prefilled,
    RequestKind,
    Started,
    StepLogprobs,
    StepOutput,
    StepPromptLogprobs,
)
from quartet.engine.guided.masks import Guide
from quartet.engine.runner import (
    LaunchedStep,
    ModelRunner,
    RequestState,
    RunningRequest,
    ScheduledChunk,
    StepLauncher,
)
from quartet.engine.scheduler import Pull, Schedule, Scheduler, SchedulerConfig, TokenOut
from quartet.engine.step_time import Backlog, StepClock, StepWork, backlog, step_work
from quartet.engine.tier_rules import load_s_per_block
from quartet.engine.tiers import LoadBatchEnded, LoadIsLate, PullsReady, Tiering, TierMessage, WriteEnded
from quartet.engine.validation import limits_of
from quartet.errors import EngineError, MediaLostError, RequestCancelledError, ServingError
from quartet.events.kv import RankEvents, StoredBlocks, Tier
from quartet.events.load import OnboardTime
from quartet.kvcache.block_pool import BlockManager
from quartet.kvcache.retention import Retention, RetentionPlan
from quartet.transfer.base import FetchResult, TransferWay

logger = logging.getLogger(__name__)

# A step loop is one rank.
_RANK = 0


@dataclass(frozen=True)
class Submit:
    """A new request, when it was submitted, in seconds of the clock, and the guide of its grammar, if it has one."""

    request: EngineRequest
    submitted_at: float
    guide: Guide | None = None


@dataclass(frozen=True)
class Refuse:
    """End a request that was never submitted: its grammar can't be followed, or it was cancelled meanwhile."""

    request: EngineRequest
    error: ServingError


@dataclass(frozen=True)
class Cancel:
    """End a request."""

    id: int


@dataclass(frozen=True)
class Release:
    """Free the blocks that a completed prefill holds."""

    id: int


@dataclass(frozen=True)
class Fetched:
    """A pull succeeded; nothing writes to the blocks any more."""

    id: int
    result: FetchResult


@dataclass(frozen=True)
class FetchFailed:
    """A pull failed or was stopped; nothing writes to the blocks any more."""

    id: int
    error: ServingError


@dataclass(frozen=True)
class TakeKvSnapshot:
    """Report all blocks that can be shared after the step."""


Message: TypeAlias = Submit | Refuse | Cancel | Release | Fetched | FetchFailed | TakeKvSnapshot | TierMessage


@dataclass(frozen=True)
class StepReport:
    """What one step reports to the event loop: falsy if there is nothing to report.

    Attributes:
        pulls: to start; each is answered by one ``Fetched`` or ``FetchFailed``.
        stopped_pulls: requests whose pull must be stopped.
    """

    output: StepOutput | None = None
    pulls: Sequence[Pull] = ()
    stopped_pulls: Sequence[int] = ()

    def __bool__(self) -> bool:
        return self.output is not None or bool(self.pulls or self.stopped_pulls)


@dataclass(frozen=True)
class Snapshot:
    """Statistics that include the first ``num_submits`` requests, with so many tokens to prefill."""

    stats: EngineStats
    num_submits: int = 0
    num_submitted_prefill_tokens: int = 0


class StepLoop:
    """Scheduler, block pool and model of one engine, driven step by step. Owned by the engine thread.

    Attributes:
        snapshot: replaced when a step begins, or is launched, and when one ends; any thread may read it.
        is_idle: there is nothing to do until a message comes.
        expected_s: how long the running step, or the next one, should compute; ``None``: unknown.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        on_begin: Callable[[StepReport], None] = lambda _report: None,
        tiers: Tiering | None = None,
        *,
        tells_contents: bool = False,
        retention: RetentionPlan | None = None,
    ) -> None:
        """Nothing is computed before the first ``step``.

        Args:
            runner: computes; the caller closes it.
            config: bounds of a step.
            clock: gives seconds.
            on_begin: called when a step begins, with the snapshot replaced and before anything is computed, if there
                are pulls; also, with an empty output, if the step has prompt tokens and none was left to begin before
                it, or none is left after it.
            tiers: below the runner's pool; what they post comes back with the next ``step``. The caller closes them.
            tells_contents: KV events say what stored blocks hold, too.
            retention: what sessions retain; ``None``: nothing.
        """
        self._runner = runner
        self._blocks = BlockManager(
            runner.num_blocks,
            runner.layout.block_size,
            has_events=True,
            tells_contents=tells_contents,
            lower=None if tiers is None else tiers.lower,
            retention=None if retention is None else Retention(retention, runner.num_blocks, clock),
        )
        self._scheduler = Scheduler(config, self._blocks, limits_of(runner), runner.eos_token_ids, onboarding=tiers)
        self._outputs = OutputBuilder(clock)
        self._clock = StepClock(clock)
        self._tiers = tiers
        if tiers is not None:
            tiers.forecast_by(lambda: self._clock.step_time, config.max_num_batched_tokens)
        self._ready_pulls: list[Pull] = []
        self._launcher = runner.launcher
        self._in_flight: _StepInFlight | None = None
        self._on_begin = on_begin
        self._config = config
        self._stopped_pulls: list[int] = []
        self._has_to_take_kv_snapshot = False
        self._num_steps = 0
        self._num_prompt_steps = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_cached_tokens = 0
        self._num_submits = 0
        self._num_submitted_prefill_tokens = 0
        self.is_idle = False
        self.expected_s: float | None = None
        self.snapshot = self._snapshot(backlog(self._scheduler.running))

    def step(self, messages: Iterable[Message]) -> StepReport:
        """Take ``messages`` in and compute one step; returns what ``on_begin`` did not report yet.

        With a launcher: launch a step, and wait for the end of the one before it. If that has to be read before the
        next one is planned, the next call launches it.

        Raises what the runner raises; the loop must not be used after that.
        """
        if self._launcher is not None:
            return self._step_ahead(self._launcher, messages)
        self._clock.begin(is_continued=not self.is_idle)
        for message in messages:
            self._take_message(message)
        schedule = self._schedule()
        if schedule.chunks:
            self._compute(schedule)
        # Without a chunk no request runs, and waiting requests still wait for blocks. One more step would find that out
        # too, but would keep the interpreter from the event loop, which has this step's report to handle.
        self.is_idle = not self._scheduler.live or not (schedule.chunks or schedule.num_preempted)
        report = self._report(self._build_output(), schedule)
        self._num_steps += bool(schedule.chunks or report)
        self.snapshot = self._snapshot(backlog(self._scheduler.running))
        return report

    def _schedule(self) -> Schedule:
        schedule = self._scheduler.schedule()
        for lost in schedule.media_lost:
            self._outputs.fail(lost.id, MediaLostError("the KV of the prompt's media is not here any more"))
        if self._tiers is not None:
            self._tiers.begin_step(schedule)
        return schedule

    def _compute(self, schedule: Schedule) -> None:
        self._outputs.start(schedule.started)
        work = step_work(schedule.chunks)
        self._begin(schedule, work)
        sampled = self._runner.run(schedule.chunks)
        self._clock.end(work)
        outs = self._scheduler.update(schedule.chunks, sampled)
        self._take_outs(outs, schedule.chunks, schedule.started)

    def _step_ahead(self, launcher: StepLauncher, messages: Iterable[Message]) -> StepReport:
        """``step`` with a launcher."""
        previous = self._in_flight
        if previous is None:
            self._clock.begin(is_continued=not self.is_idle)
        for message in messages:
            self._take_message(message)
        schedule = self._schedule() if previous is None or previous.launched.can_follow else Schedule()
        self._in_flight = self._launch(launcher, schedule, previous) if schedule.chunks else None
        if previous is not None:
            early = self._report(None, schedule)
            if early:
                self._on_begin(early)
            self._read(previous)
        has_moved = previous is not None or bool(schedule.chunks or schedule.num_preempted)
        self.is_idle = self._in_flight is None and not (self._scheduler.live and has_moved)
        report = self._report(self._build_output(), schedule)
        # A step that was only launched counts once it was read.
        self._num_steps += previous is not None or bool(report and not schedule.chunks)
        self.snapshot = self._snapshot_between_steps()
        return report

    def _launch(self, launcher: StepLauncher, schedule: Schedule, previous: _StepInFlight | None) -> _StepInFlight:
        self._outputs.start(schedule.started)
        work = step_work(schedule.chunks)
        num_begun = self._begin(schedule, work, previous)
        launched = launcher.launch(schedule.chunks)
        self._scheduler.begin(schedule.chunks)
        return _StepInFlight(launched, schedule.chunks, schedule.started, work, num_begun)

    def _read(self, step: _StepInFlight) -> None:
        """Wait for the end of ``step``, the first one in flight; ``self._in_flight`` runs from then on."""
        self.expected_s = self._clock.expected_s(step.work)
        sampled = step.launched.read()
        self._clock.end(step.work)
        if self._in_flight is not None:
            self._clock.begin(is_continued=True)
        self._take_outs(self._scheduler.end(step.chunks, sampled), step.chunks, step.started)

    def _take_outs(
        self, outs: Sequence[TokenOut], chunks: Sequence[ScheduledChunk], started: Sequence[RunningRequest]
    ) -> None:
        """A step of ``chunks``, the first one for ``started``, ended with ``outs``."""
        if any(out.running.guide is not None for out in outs):
            outs = [out for out in outs if not self._has_failed(out)]
        self._outputs.take_tokens(outs)
        for running in started:
            self._num_cached_tokens += running.num_cached_tokens
        self._num_prompt_tokens += sum(map(_num_given_tokens, chunks))
        self._num_output_tokens += len(outs)

    def _has_failed(self, out: TokenOut) -> bool:
        """Whether the request's grammar has failed: its token is dropped, and it ends."""
        running = out.running
        error = None if running.guide is None else running.guide.error
        if error is None:
            return False
        if out.held_block_ids:
            self._scheduler.release(running.id)
        self._scheduler.cancel(running.id)  # unless that very token has ended it
        self._outputs.fail(running.id, error)
        return True

    def _begin(self, schedule: Schedule, work: StepWork, previous: _StepInFlight | None = None) -> int:
        """Say that the step of ``schedule`` begins, after ``previous``; returns the prompt tokens that it begins."""
        had_unbegun = self.snapshot.stats.num_unbegun_prefill_tokens > 0
        self._num_prompt_steps += work.num_prompt_tokens > 0
        # Without prompt tokens, every running request decodes.
        decoding = Backlog(0, len(schedule.chunks), work.num_context_tokens)
        before = backlog(self._scheduler.running) if work.num_prompt_tokens else decoding
        num_begun = work.num_tokens - before.num_decoding
        self.expected_s = self._clock.expected_s(work)
        if previous is None:
            self.snapshot = self._snapshot(before, num_begun=num_begun, step_ends_at=self._clock.forecast(work))
        else:
            self.snapshot = self._snapshot(
                before.plus(previous.num_begun),
                num_begun=previous.num_begun + num_begun,
                step_ends_at=self._clock.forecast(previous.work, work),
            )
        has_unbegun = self.snapshot.stats.num_unbegun_prefill_tokens > 0
        is_news = work.num_prompt_tokens > 0 and not (had_unbegun and has_unbegun)
        report = self._report(StepOutput() if is_news else None, schedule)
        if report:
            self._on_begin(report)
        return num_begun

    def _report(self, output: StepOutput | None, schedule: Schedule) -> StepReport:
        """``output``, and the pulls that were not reported yet."""
        pulls, schedule.pulls = schedule.pulls, []
        if self._ready_pulls:
            pulls, self._ready_pulls = self._ready_pulls + pulls, []
        stopped_pulls, self._stopped_pulls = self._stopped_pulls, []
        return StepReport(output, pulls, stopped_pulls)

    def _build_output(self) -> StepOutput | None:
        events = self._blocks.take_events()
        snapshot: list[StoredBlocks] | None = None
        if self._has_to_take_kv_snapshot:
            self._has_to_take_kv_snapshot = False
            snapshot = [StoredBlocks(_RANK, self._blocks.stored_blocks())]
            snapshot += [StoredBlocks(_RANK, table, tier) for tier, table in self._blocks.stored_below().items()]
        return self._outputs.build([RankEvents(_RANK, events)] if events else (), snapshot)

    def _take_message(self, message: Message) -> None:
        match message:
            case Submit(request, submitted_at, guide):
                self._submit(request, submitted_at, guide)
            case Refuse(request, error):
                self._count_submit(request)
                self._outputs.fail(request.id, error)
            case Cancel(id):
                self._cancel(id)
            case Release(id):
                self._scheduler.release(id)
            case Fetched(id, result):
                self._outputs.take_fetch(id, result)
                self._end_pull(id, None)
            case FetchFailed(id, error):
                self._end_pull(id, error)
            case TakeKvSnapshot():
                self._has_to_take_kv_snapshot = True
            case PullsReady(pulls):
                self._ready_pulls += pulls
            case LoadBatchEnded() | LoadIsLate() | WriteEnded():
                self._take_tier_message(message)

    def _count_submit(self, request: EngineRequest) -> None:
        self._num_submits += 1
        self._num_submitted_prefill_tokens += num_prefill_tokens(request)

    def _submit(self, request: EngineRequest, submitted_at: float, guide: Guide | None) -> None:
        self._count_submit(request)
        try:
            self._scheduler.add(request, guide)
        except ServingError as error:
            self._outputs.fail(request.id, error)
        except Exception:
            if request.id in self._scheduler.live:
                raise  # half of it is in: nothing is certain any more
            logger.exception("a request could not be taken in")
            self._outputs.fail(request.id, EngineError("the engine could not take the request in"))
        else:
            self._outputs.submit(request.id, submitted_at)

    def _cancel(self, id: int) -> None:
        state = self._scheduler.cancel(id)
        if state is RequestState.ENDED:
            self._outputs.fail(id, RequestCancelledError("the request was cancelled"))
        elif state is RequestState.PULLING:
            self._stopped_pulls.append(id)

    def _end_pull(self, id: int, error: ServingError | None) -> None:
        running = self._scheduler.end_pull(id, succeeded=error is None)
        if running.is_cancelled:
            self._outputs.fail(id, RequestCancelledError("the request was cancelled"))
        elif error is not None:
            self._outputs.fail(id, error)

    def _take_tier_message(self, message: TierMessage) -> None:
        ended = None if self._tiers is None else self._tiers.take(message)
        if ended is None:
            return
        self._outputs.take_load(ended.id, ended.duration_s)
        if self._scheduler.end_load(ended.id, ended.num_blocks).is_cancelled:
            self._outputs.fail(ended.id, RequestCancelledError("the request was cancelled"))

    def _snapshot_between_steps(self) -> Snapshot:
        running, step = backlog(self._scheduler.running), self._in_flight
        if step is None:
            return self._snapshot(running)
        step_ends_at = self._clock.forecast(step.work)
        return self._snapshot(running.plus(step.num_begun), num_begun=step.num_begun, step_ends_at=step_ends_at)

    def _snapshot(self, running: Backlog, *, num_begun: int = 0, step_ends_at: float = 0.0) -> Snapshot:
        """The statistics with this backlog of running requests; a step has begun ``num_begun`` of its tokens."""
        scheduler, counts, config = self._scheduler, self._blocks.counts, self._config
        num_spare = 0
        if running.num_tokens > num_begun:
            num_spare = config.num_short_tokens(running.num_decoding) - scheduler.waiting.num_prefill_tokens
        num_queued = scheduler.waiting.num_prefill_tokens + running.num_tokens
        stats = EngineStats(
            num_running=scheduler.num_running + scheduler.num_ending,
            num_waiting=len(scheduler.waiting),
            max_running=config.max_num_seqs,
            num_queued_prefill_tokens=num_queued,
            num_unbegun_prefill_tokens=num_queued - num_begun,
            num_spare_prefill_tokens=max(num_spare, 0),
            num_decoding=running.num_decoding,
            num_context_tokens=running.num_context_tokens,
            max_step_tokens=config.max_num_batched_tokens,
            step_ends_at=step_ends_at,
            step_time=self._clock.step_time,
            onboard_time=None if self._tiers is None else _onboard_time(self._tiers, self._blocks.block_size),
            num_in_use_blocks=counts.in_use,
            num_held_blocks=counts.held,
            num_cached_blocks=counts.cached,
            num_free_blocks=counts.free,
            num_total_blocks=counts.total,
            num_steps=self._num_steps,
            num_prompt_steps=self._num_prompt_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_retained_blocks=self._blocks.num_retained,
            tiers=() if self._tiers is None else self._tiers.counts,
        )
        return Snapshot(stats, self._num_submits, self._num_submitted_prefill_tokens)


def _onboard_time(tiers: Tiering, block_size: int) -> OnboardTime:
    """By what ``tiers`` decides whether to load."""
    s_per_block = tiers.s_per_block
    return OnboardTime(
        host_s_per_token=load_s_per_block(s_per_block, Tier.HOST) / block_size,
        disk_s_per_token=0.0
        if tiers.lower.disk_plan is None
        else load_s_per_block(s_per_block, Tier.DISK) / block_size,
    )


class OutputBuilder:
    """Collects one step's outcomes at a time, with times that only the engine thread knows.

    It knows a request from ``submit`` until its end.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[int, _Times] = {}
        self._clear()

    def submit(self, id: int, submitted_at: float) -> None:
        """Remember a request; ``submitted_at`` is in seconds of the clock."""
        self._times[id] = _Times(submitted_at)

    def take_fetch(self, id: int, result: FetchResult) -> None:
        """Remember what was pulled for a request."""
        times = self._times[id]
        times.transfer_s, times.transfer_bytes = result.duration_s, result.size_bytes
        times.fetched_at = self._clock()
        times.transfer_way = result.way if result.size_bytes else None

    def take_load(self, id: int, duration_s: float) -> None:
        """Remember how long blocks of a request came from lower tiers."""
        self._times[id].onboard_s += duration_s

    def start(self, started: Iterable[RunningRequest]) -> None:
        """These requests are in a step for the first time."""
        now = self._clock()
        for running in started:
            times = self._times[running.id]
            times.started_at = now
            self._started.append(
                Started(
                    running.id,
                    running.num_cached_tokens,
                    times.queue_s,
                    times.transfer_s,
                    times.transfer_bytes,
                    times.transfer_way,
                    num_evicted_tokens=running.num_evicted_tokens,
                    onboard_s=times.onboard_s,
                    queue_after_transfer_s=0.0 if times.fetched_at is None else now - times.fetched_at,
                )
            )

    def fail(self, id: int, error: ServingError) -> None:
        """A request ended badly, or was refused."""
        self._times.pop(id, None)
        self._failed.append(Failed(id, error))

    def take_tokens(self, outs: Iterable[TokenOut]) -> None:
        """Add the tokens that a step sampled."""
        now = self._clock()
        for out in outs:
            if out.running.request.kind is RequestKind.PREFILL:
                self._prefilled.append(self._to_prefilled(out, now))
                continue
            id = out.running.id
            self._ids.append(id)
            self._offsets.append(out.offset)
            self._token_ids.append(out.sampled.token_id)
            if out.sampled.logprobs is not None:
                self._logprobs.append(StepLogprobs(id, (out.sampled.logprobs,)))
            if out.sampled.prompt_logprobs is not None:
                self._prompt_logprobs.append(StepPromptLogprobs(id, out.sampled.prompt_logprobs))
            if out.finished is not None:
                del self._times[id]
                self._finished.append(Finished(id, out.finished, out.offset + 1))

    def build(
        self, kv_events: Sequence[RankEvents] = (), kv_snapshot: Sequence[StoredBlocks] | None = None
    ) -> StepOutput | None:
        """All outcomes since the last call, with events and snapshot of the blocks; ``None``: there are none."""
        has_kv = kv_events or kv_snapshot is not None
        if not (self._ids or self._started or self._prefilled or self._failed or has_kv):
            return None
        output = StepOutput(
            ids=self._ids,
            num_tokens=[1] * len(self._ids),
            token_offsets=self._offsets,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            started=self._started,
            finished=self._finished,
            prefilled=self._prefilled,
            failed=self._failed,
            kv_events=kv_events,
            kv_snapshot=kv_snapshot,
        )
        self._clear()
        return output

    def _clear(self) -> None:
        # New lists each time: the consumer keeps the old ones.
        self._ids: list[int] = []
        self._offsets: list[int] = []
        self._token_ids: list[int] = []
        self._logprobs: list[StepLogprobs] = []
        self._prompt_logprobs: list[StepPromptLogprobs] = []
        self._started: list[Started] = []
        self._finished: list[Finished] = []
        self._prefilled: list[Prefilled] = []
        self._failed: list[Failed] = []

    def _to_prefilled(self, out: TokenOut, now: float) -> Prefilled:
        times = self._times.pop(out.running.id)
        return Prefilled(
            id=out.running.id,
            token_id=out.sampled.token_id,
            num_cached_tokens=out.running.num_cached_tokens,
            num_evicted_tokens=out.running.num_evicted_tokens,
            queue_s=times.queue_s,
            compute_s=now - times.started_at,
            finished=out.finished,
            block_ids=out.held_block_ids,
            num_tokens=out.num_held_tokens,
            logprobs=out.sampled.logprobs,
            prompt_logprobs=out.sampled.prompt_logprobs,
            onboard_s=times.onboard_s,
        )


def num_prefill_tokens(request: EngineRequest) -> int:
    """Tokens to compute before ``request`` decodes; none with a hand-off."""
    if request.hand_off is not None:
        return 0
    return len(request.generation.prompt_token_ids) + len(request.generation.generated_token_ids)


def _num_given_tokens(chunk: ScheduledChunk) -> int:
    """Tokens of the chunk that came with the request."""
    return max(0, min(chunk.num_tokens, chunk.running.num_initial_tokens - chunk.first_position))


@dataclass(frozen=True)
class _StepInFlight:
    """A step that was launched and not read yet; ``num_begun``: prompt tokens that it computes."""

    launched: LaunchedStep
    chunks: Sequence[ScheduledChunk]
    started: Sequence[RunningRequest]
    work: StepWork
    num_begun: int


@dataclass
class _Times:
    """Times of one request, in seconds of the clock, and the cost of its transfer."""

    submitted_at: float
    started_at: float = 0.0
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    transfer_way: TransferWay | None = None
    onboard_s: float = 0.0
    fetched_at: float | None = None

    @property
    def queue_s(self) -> float:
        return max(0.0, self.started_at - self.submitted_at - self.transfer_s - self.onboard_s)

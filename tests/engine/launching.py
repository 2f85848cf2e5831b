"""A fake device that computes launched steps later, and a driver of step loops that checks what they report.

The device has its own copy of what a launch gave it, as a real one has, and takes unread tokens from the step before.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from quartet.engine.base import EngineRequest, Failed, Finished, Prefilled
from quartet.engine.runner import ModelRunner, RequestState, RunningRequest, SampledToken, ScheduledChunk
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.engine.scheduler import Pull, SchedulerConfig
from quartet.engine.step_loop import Cancel, Fetched, FetchFailed, Message, Release, StepLoop, StepReport, Submit
from quartet.errors import TransferError
from quartet.transfer.base import FetchResult, PoolMemory, TransferWay
from tests.engine.fakes import FakePuller, FakeRunner
from tests.kvcache.replica import Replica


class LaunchingRunner(FakeRunner):
    """A ``FakeRunner`` with a device beside it, which computes a step when a test says so, or when it is read.

    Attributes:
        in_flight: steps that were not read, the first one first; two at most.
        launched: ids of the requests of every step.
        needs_tokens: requests whose next step needs the host to know their last token.
        on_wait: called when a step is waited for.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.launcher = self
        self.in_flight: deque[FakeStep] = deque()
        self.launched: list[list[int]] = []
        self.needs_tokens: Callable[[RunningRequest], bool] = lambda _running: False
        self.on_wait: Callable[[], None] = lambda: None

    def run(self, chunks: Sequence[ScheduledChunk]) -> list[SampledToken]:
        raise AssertionError("steps are launched")

    def launch(self, chunks: Sequence[ScheduledChunk]) -> FakeStep:
        self.check_blocks()
        assert chunks, "an empty step"
        assert len(self.in_flight) < 2
        previous = self.in_flight[-1] if self.in_flight else None
        assert previous is None or previous.can_follow
        self.num_steps += 1
        self.step_began.set()
        step = FakeStep(self, chunks, previous)
        self.in_flight.append(step)
        self.launched.append([chunk.running.id for chunk in chunks])
        return step

    def complete(self, num_steps: int) -> None:
        """The device computes the first ``num_steps`` in flight."""
        for step in list(self.in_flight)[:num_steps]:
            step.complete()

    def check_blocks(self) -> None:
        """Whatever became of its request, a step in flight still has its blocks."""
        for step in self.in_flight:
            for running, block_table in step.tables:
                assert running.seq.block_table[: len(block_table)] == block_table, "blocks of a step in flight are gone"

    def check_offer(self, block_ids: Sequence[int]) -> None:
        """No step in flight writes to blocks that others may read now."""
        for step in self.in_flight:
            assert step.written.isdisjoint(block_ids), "blocks are offered while a step writes them"


class FakeStep:
    """A launched step."""

    def __init__(self, runner: LaunchingRunner, chunks: Sequence[ScheduledChunk], previous: FakeStep | None) -> None:
        self._runner = runner
        self._previous = previous
        self._sampled: list[SampledToken] | None = None
        self.can_follow = not any(chunk.samples and runner.needs_tokens(chunk.running) for chunk in chunks)
        self.chunks = [self._take(chunk) for chunk in chunks]
        self.sampling = [chunk.running.id for chunk in chunks if chunk.samples]
        self.tables = [(chunk.running, list(chunk.running.seq.block_table)) for chunk in chunks]
        block_size = runner.layout.block_size
        self.written = {
            chunk.running.seq.block_table[position // block_size]
            for chunk in chunks
            for position in range(chunk.first_position, chunk.first_position + chunk.num_tokens)
        }

    def complete(self) -> None:
        """The device computes it, after those before it."""
        if self._sampled is not None:
            return
        if self._previous is not None:
            self._previous.complete()
        for chunk in self.chunks:
            running = chunk.running
            if running.seq.num_unread_tokens:
                assert self._previous is not None
                assert running.unread_row is not None
                assert self._previous.sampling[running.unread_row] == running.id, "another request's token"
                running.seq.read(self._previous.sampled[running.unread_row].token_id)
        self._sampled = self._runner.compute(self.chunks)
        self._previous = None

    @property
    def sampled(self) -> list[SampledToken]:
        assert self._sampled is not None, "it is computed"
        return self._sampled

    def read(self) -> list[SampledToken]:
        runner = self._runner
        assert runner.in_flight[0] is self, "steps are read in order"
        runner.check_blocks()
        runner.on_wait()
        self.complete()
        runner.in_flight.popleft()
        return self.sampled

    def _take(self, chunk: ScheduledChunk) -> ScheduledChunk:
        running = chunk.running
        assert running.state is RequestState.RUNNING, "it has ended, or will for sure"
        assert not chunk.samples or running.num_output_tokens < running.max_output_tokens, "a token too many"
        assert running.seq.num_unread_tokens <= 1
        assert not (running.seq.num_unread_tokens and self._runner.needs_tokens(running))
        taken = copy.copy(running)
        taken.seq = copy.copy(running.seq)
        taken.seq.token_ids, taken.seq.block_table = list(running.seq.token_ids), list(running.seq.block_table)
        return ScheduledChunk(taken, chunk.first_position, chunk.num_tokens, chunk.samples)


class Driver:
    """A step loop on a runner, with what it reported; checks that it makes sense.

    Attributes:
        inbox: what the next turn takes in.
        tokens, logprobs, prompt_logprobs, finished, prefilled, failed: by request; tokens of earlier attempts left out.
        pulls: that were begun and have not ended, by request.
        stopped: requests whose pull was to be stopped.
    """

    def __init__(self, runner: ModelRunner, config: SchedulerConfig, *, now: Callable[[], float] = lambda: 0.0) -> None:
        self.runner = runner
        self.steps = StepLoop(runner, config, now, self._take)
        self.puller = FakePuller()
        assert runner.memory is not None
        self.puller.attach(runner.memory, runner.layout)  # type: ignore[arg-type]  # pieces of a GPU are not copied here
        self.inbox: list[Message] = []
        self.requests: dict[int, EngineRequest] = {}
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.finished: dict[int, Finished] = {}
        self.prefilled: dict[int, Prefilled] = {}
        self.failed: dict[int, Failed] = {}
        self.started: set[int] = set()
        self.pulls: dict[int, Pull] = {}
        self.stopped: set[int] = set()
        self.replica = Replica()

    def submit(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.requests[request.id] = request
            self.inbox.append(Submit(request, 0.0))

    def cancel(self, id: int) -> None:
        self.inbox.append(Cancel(id))

    def release(self, id: int) -> None:
        self.inbox.append(Release(id))

    def end_pull(self, id: int, *, succeeds: bool) -> None:
        """The pull of ``id`` has copied what it should, or failed."""
        pull = self.pulls.pop(id)
        if not succeeds:
            self.inbox.append(FetchFailed(id, TransferError("lost")))
            return
        hand_off = self.requests[id].hand_off
        assert hand_off is not None
        memory, block_ids = self.puller.sources[hand_off.hand_off_id]
        pool = self.runner.memory
        assert isinstance(pool, PoolMemory)
        for piece in pull.copies:
            pool.piece(piece.block_id)[:] = memory.piece(block_ids[piece.piece])
        self.inbox.append(Fetched(id, FetchResult(TransferWay.SHM, 1, 0.0)))

    def turn(self, num_turns: int = 1) -> None:
        for _ in range(num_turns):
            messages, self.inbox = self.inbox, []
            self._take(self.steps.step(messages))

    def run(self, max_num_turns: int = 1000) -> None:
        """Take turns until there is nothing to do."""
        for _ in range(max_num_turns):
            self.turn()
            if self.steps.is_idle and not self.inbox:
                return
        raise AssertionError("the loop does not come to an end")

    def has_ended(self, id: int) -> bool:
        return id in self.finished or id in self.prefilled or id in self.failed

    @property
    def blocks(self) -> Any:
        return self.steps._blocks

    def _take(self, report: StepReport) -> None:
        self.pulls |= {pull.id: pull for pull in report.pulls}
        self.stopped.update(report.stopped_pulls)
        output = report.output
        if output is None:
            return
        for started in output.started:
            assert started.id not in self.started
            self.started.add(started.id)
        for id, offset, token_id in zip(output.ids, output.token_offsets, output.token_ids, strict=True):
            assert id in self.started
            assert not self.has_ended(id), "nothing comes after the end"
            num_given = len(self.requests[id].generation.generated_token_ids)
            assert offset == num_given + len(self.tokens[id]), "a token was left out or given out twice"
            self.tokens[id].append(token_id)
        for logprobs in output.logprobs:
            self.logprobs[logprobs.id] += logprobs.tokens
        self.prompt_logprobs |= {report.id: report.logprobs for report in output.prompt_logprobs}
        ended: list[Finished | Prefilled | Failed] = [*output.finished, *output.prefilled, *output.failed]
        assert not any(self.has_ended(item.id) for item in ended), "one end a request"
        self.finished |= {item.id: item for item in output.finished}
        self.prefilled |= {item.id: item for item in output.prefilled}
        self.failed |= {item.id: item for item in output.failed}
        if isinstance(self.runner, LaunchingRunner):
            for prefilled in output.prefilled:
                self.runner.check_offer(prefilled.block_ids)
        for changed in output.kv_events:
            self.replica.apply(changed.events)

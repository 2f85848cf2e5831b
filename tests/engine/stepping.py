"""Drives a scheduler and a fake model by hand, one step at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from quartet.engine.base import EngineRequest, FinishReason
from quartet.engine.runner import RequestState
from quartet.engine.scheduler import Pull, Schedule, Scheduler, SchedulerConfig, TokenOut
from quartet.engine.validation import limits_of
from quartet.kvcache.block_pool import BlockCounts, BlockManager
from tests.engine.fakes import FakePuller, FakeRunner


class Stepper:
    """A scheduler with a pool and a fake model; ``outputs`` collects the tokens by request id."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 256,
        eos_token_ids: Sequence[int] = (),
        num_embedding_blocks: int = 0,
        placeholder_id: int | None = None,
    ) -> None:
        self.runner = FakeRunner(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            eos_token_ids=frozenset(eos_token_ids),
            num_embedding_blocks=num_embedding_blocks,
            placeholder_id=placeholder_id,
        )
        self.blocks = BlockManager(num_blocks, block_size, has_events=True)
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.scheduler = Scheduler(config, self.blocks, limits_of(self.runner), self.runner.eos_token_ids)
        self.outputs: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, FinishReason] = {}
        self.pulls: list[Pull] = []
        self.media_lost: set[int] = set()
        self.puller = FakePuller()
        assert self.runner.memory is not None
        self.puller.attach(self.runner.memory, self.runner.layout)

    @property
    def counts(self) -> BlockCounts:
        return self.blocks.counts

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(self) -> list[TokenOut]:
        """One step; its tokens are checked to follow on those before."""
        schedule = self.scheduler.schedule()
        return self.compute(schedule)

    def compute(self, schedule: Schedule) -> list[TokenOut]:
        self.pulls += schedule.pulls
        self._take_lost(schedule)
        outs = self.scheduler.update(schedule.chunks, self.runner.run(schedule.chunks))
        for out in outs:
            generation = out.running.request.generation
            expected_offset = len(generation.generated_token_ids) + len(self.outputs[out.running.id])
            assert out.offset == expected_offset, "a token was left out or given out twice"
            self.outputs[out.running.id].append(out.sampled.token_id)
            if out.finished is not None:
                self.finished[out.running.id] = out.finished
        return outs

    def run(self, max_num_steps: int = 1000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_num_steps):
            schedule = self.scheduler.schedule()
            if schedule.is_idle:
                self._take_lost(schedule)
                return
            self.compute(schedule)
        raise AssertionError("the scheduler does not come to an end")

    def copy(self, pull: Pull) -> None:
        """Copy the pieces of ``pull``, whose request's hand-off is of ``puller``."""
        request = self.scheduler.live[pull.id].request
        assert request.hand_off is not None
        memory, block_ids = self.puller.sources[request.hand_off.hand_off_id]
        assert self.runner.memory is not None
        for copy in pull.copies:
            self.runner.memory.piece(copy.block_id)[:] = memory.piece(block_ids[copy.piece])

    def _take_lost(self, schedule: Schedule) -> None:
        for running in schedule.media_lost:
            assert running.state is RequestState.ENDED
            assert running.id not in self.media_lost, "it ends once"
            self.media_lost.add(running.id)

"""Quiet steps taken at once leave what as many single steps would have left."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from quartet.engine.base import EngineRequest, Generation, RequestKind
from quartet.engine.mock.runner import num_quiet_steps, take_quiet_steps
from quartet.engine.runner import SampledToken
from quartet.engine.sampling import Sampling
from quartet.engine.scheduler import Scheduler, SchedulerConfig
from quartet.engine.validation import EngineLimits
from quartet.kvcache.block_pool import BlockManager

BLOCK_SIZE = 4
TOKEN_ID = 7


@dataclass(frozen=True)
class Work:
    """A request, and after how many steps it comes."""

    comes_after: int
    num_prompt_tokens: int
    num_output_tokens: int


works = st.lists(st.builds(Work, st.integers(0, 12), st.integers(1, 30), st.integers(1, 25)), min_size=1, max_size=5)


class Engine:
    """A scheduler and its pool, which note how many steps were single ones."""

    def __init__(self, *, takes_quiet: bool) -> None:
        self.blocks = BlockManager(24, BLOCK_SIZE, has_events=True)
        limits = EngineLimits(max_model_len=96, num_pool_tokens=96, vocab_size=100)
        config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16)
        self.scheduler = Scheduler(config, self.blocks, limits)
        self.takes_quiet = takes_quiet
        self.tokens: dict[int, list[int]] = {}  # by request, the steps in which it got one
        self.num_single_steps = 0
        self.events: list[object] = []

    def run(self, works: list[Work]) -> None:
        coming = sorted(enumerate(works), key=lambda item: item[1].comes_after)
        step = 0
        while coming or self.scheduler.live:
            while coming and coming[0][1].comes_after <= step:
                id, work = coming.pop(0)
                self.scheduler.add(_request(id, work))
            until = coming[0][1].comes_after if coming else step + 1000
            step += self._step(step, until - step)
            self.events += self.blocks.take_events()

    def _step(self, step: int, num_most: int) -> int:
        num_quiet = min(num_quiet_steps(self.scheduler, BLOCK_SIZE), num_most) if self.takes_quiet else 0
        if num_quiet:
            for running in self.scheduler.running:
                self.tokens.setdefault(running.id, []).extend(range(step, step + num_quiet))
            take_quiet_steps(self.scheduler, self.blocks, num_quiet, TOKEN_ID)
            return num_quiet
        self.num_single_steps += 1
        chunks = self.scheduler.schedule().chunks
        for out in self.scheduler.update(chunks, [SampledToken(TOKEN_ID) for chunk in chunks if chunk.samples]):
            self.tokens.setdefault(out.running.id, []).append(step)
        return 1


def _request(id: int, work: Work) -> EngineRequest:
    prompt = tuple((id * position) % 5 for position in range(work.num_prompt_tokens))
    sampling = Sampling(max_tokens=work.num_output_tokens, ignore_eos=True)
    generation = Generation(prompt_token_ids=prompt, sampling=sampling)
    return EngineRequest(id=id, kind=RequestKind.DECODE, generation=generation)


@given(works)
def test_tokens_come_in_the_same_steps_and_the_pool_says_the_same(works: list[Work]) -> None:
    single, quiet = Engine(takes_quiet=False), Engine(takes_quiet=True)
    single.run(works)
    quiet.run(works)
    assert quiet.tokens == single.tokens
    assert quiet.events == single.events
    assert quiet.blocks.counts == single.blocks.counts
    assert quiet.scheduler.num_preemptions == single.scheduler.num_preemptions


def test_most_steps_of_a_long_answer_are_quiet() -> None:
    engine = Engine(takes_quiet=True)
    engine.run([Work(0, 4, 40)])
    assert sum(map(len, engine.tokens.values())) == 40
    assert engine.num_single_steps <= 40 // BLOCK_SIZE + 2

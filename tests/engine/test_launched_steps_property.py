"""Steps that are launched before the last one's tokens are read: whatever happens, the tokens are those of solo runs.

The fake device computes a step as late as it may, with the blocks it was given; so a block that was freed, lent or
written too early spoils the KV that it checks.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from quartet.engine.base import EngineRequest, FinishReason, RequestKind
from quartet.engine.runner import RunningRequest
from quartet.engine.sampling import OutputOptions, Sampling
from quartet.engine.scheduler import SchedulerConfig
from quartet.errors import RequestCancelledError, TransferError
from tests.engine.fakes import FakeRunner, expected_output, make_request
from tests.engine.launching import Driver, LaunchingRunner

# Two tokens make equal prefixes common, as eight blocks do preemptions.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
EOS = frozenset(range(2, 10))


def needs_tokens(running: RunningRequest) -> bool:
    return running.sampling.presence_penalty > 0


@dataclass(frozen=True)
class Wish:
    """What a request asks for, besides its prompt."""

    kind: RequestKind
    num_resumed: int
    num_output: int
    min_tokens: int
    priority: int
    has_hand_off: bool
    needs_tokens: bool
    has_logprobs: bool

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            max_tokens=self.num_output,
            min_tokens=min(self.min_tokens, self.num_output),
            presence_penalty=float(self.needs_tokens),  # the fake model's tokens do not depend on it
        )

    def request(self, prompt: list[int], driver: Driver) -> EngineRequest:
        whole = expected(make_request(prompt, sampling=self.sampling))
        generated = whole[: min(self.num_resumed, len(whole) - 1)]
        given_ids = [*prompt, *generated]
        hand_off = None
        if self.has_hand_off and self.kind is RequestKind.DECODE and len(given_ids) > 1:
            hand_off = driver.puller.offer_prefix(given_ids)
        return make_request(
            prompt,
            kind=self.kind,
            generated=generated,
            priority=self.priority,
            sampling=self.sampling,
            hand_off=hand_off,
            output=OutputOptions(logprobs=0 if self.has_logprobs else None),
        )


def wishes(**fixed: st.SearchStrategy[object]) -> st.SearchStrategy[Wish]:
    rare = st.integers(0, 7).map(lambda number: number == 0)
    parts: dict[str, st.SearchStrategy[object]] = {
        "kind": st.sampled_from(RequestKind),
        "num_resumed": st.integers(0, 6),
        "num_output": st.integers(1, 18),
        "min_tokens": st.integers(0, 4),
        "priority": st.integers(0, 2),
        "has_hand_off": st.booleans(),
        "needs_tokens": rare,
        "has_logprobs": st.booleans(),
    }
    return st.builds(Wish, **(parts | fixed))


def expected(request: EngineRequest) -> list[int]:
    return expected_output(request.generation, eos_token_ids=EOS)


class LaunchMachine(RuleBasedStateMachine):
    """A tiny pool under random traffic, on a device that is late at random."""

    requests: Bundle[EngineRequest] = Bundle("requests")

    @initialize(max_num_seqs=st.integers(1, 4), extra_tokens=st.integers(0, 8))
    def begin(self, max_num_seqs: int, extra_tokens: int) -> None:
        self.runner = LaunchingRunner(num_blocks=8, eos_token_ids=EOS)
        self.runner.needs_tokens = needs_tokens
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + extra_tokens)
        self.driver = Driver(self.runner, config)
        self.cancelled: set[int] = set()

    @rule(target=requests, prompt=PROMPTS, wish=wishes())
    def submit(self, prompt: list[int], wish: Wish) -> EngineRequest:
        request = wish.request(prompt, self.driver)
        self.driver.submit(request)
        return request

    @rule(num_turns=st.integers(1, 5))
    def turn(self, num_turns: int) -> None:
        self.driver.turn(num_turns)

    @rule(num_steps=st.integers(1, 2))
    def device_computes(self, num_steps: int) -> None:
        self.runner.complete(num_steps)

    @rule(request=consumes(requests))
    def cancel(self, request: EngineRequest) -> None:
        self.driver.cancel(request.id)
        self.cancelled.add(request.id)

    @rule(request=consumes(requests))
    def cancel_and_turn(self, request: EngineRequest) -> None:
        self.cancel(request)
        self.driver.turn()
        if request.id in self.driver.failed:
            live = [step.chunks for step in self.runner.in_flight]
            assert request.id not in {chunk.running.id for chunks in live for chunk in chunks}, "it holds no blocks"

    @rule(request=requests)
    def release(self, request: EngineRequest) -> None:
        self.driver.release(request.id)

    @rule(succeeds=st.booleans(), index=st.integers(0, 7))
    def end_pull(self, succeeds: bool, index: int) -> None:
        if pulls := list(self.driver.pulls):
            self.driver.end_pull(pulls[index % len(pulls)], succeeds=succeeds)

    @invariant()
    def blocks_in_flight_stay(self) -> None:
        self.runner.check_blocks()
        assert len(self.runner.in_flight) <= 1, "one step between turns"

    @invariant()
    def blocks_are_used_by_requests_that_live_or_are_in_flight_only(self) -> None:
        counts = self.driver.blocks.counts
        assert counts.free + counts.cached + counts.held + counts.in_use == counts.total
        live = {id(running.seq): running.seq for running in self.driver.steps._scheduler.live.values()}
        live |= {id(running.seq): running.seq for step in self.runner.in_flight for running, _ in step.tables}
        assert counts.in_use == len({block for seq in live.values() for block in seq.block_table})

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self._finish()
            self._check_outputs()

    def _finish(self) -> None:
        driver = self.driver
        for _ in range(2 * len(driver.requests) + 1):
            for pulled in list(driver.pulls):
                driver.end_pull(pulled, succeeds=True)
            for held in driver.requests:
                driver.release(held)
            driver.run()
        assert not driver.steps._scheduler.live, "everything ends once nothing is held or pulled"
        assert not self.runner.in_flight
        assert driver.blocks.counts.free + driver.blocks.counts.cached == driver.blocks.counts.total
        assert driver.replica.parents == driver.blocks.stored_blocks()
        stats = driver.steps.snapshot.stats
        assert (stats.num_running, stats.num_waiting, stats.num_queued_prefill_tokens) == (0, 0, 0)
        assert stats.num_output_tokens == len(driver.prefilled) + sum(map(len, driver.tokens.values()))

    def _check_outputs(self) -> None:
        driver = self.driver
        for request in driver.requests.values():
            output = driver.tokens[request.id]
            whole = expected(request)[len(request.generation.generated_token_ids) :]
            if request.generation.output.logprobs is not None and request.kind is RequestKind.DECODE:
                assert [logprobs.token_id for logprobs in driver.logprobs[request.id]] == output
            if request.id in driver.failed:
                assert output == whole[: len(output)]
                assert isinstance(driver.failed[request.id].error, RequestCancelledError | TransferError)
                assert request.id in self.cancelled or request.hand_off is not None
            elif request.kind is RequestKind.PREFILL:
                assert [driver.prefilled[request.id].token_id] == whole[:1]
            else:
                assert output == whole
                assert driver.finished[request.id].num_output_tokens == len(expected(request))


LaunchMachine.TestCase.settings = settings(stateful_step_count=40)
test_every_request_ends_with_the_tokens_of_its_solo_run = LaunchMachine.TestCase


def outcome(runner: FakeRunner, prompts_and_wishes: list[tuple[list[int], Wish]]) -> list[object]:
    """All that comes of the requests, and what the pool knows at the end."""
    driver = Driver(runner, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=9))
    requests = [wish.request(prompt, driver) for prompt, wish in prompts_and_wishes]
    driver.submit(*requests)
    driver.run()
    counts = driver.blocks.counts
    of_requests: list[object] = []
    for request in requests:
        finished, prefilled = driver.finished.get(request.id), driver.prefilled.get(request.id)
        reason: FinishReason | None = finished.reason if finished else prefilled.finished if prefilled else None
        token_id = prefilled.token_id if prefilled else None
        num_held = (len(prefilled.block_ids), prefilled.num_tokens) if prefilled else (0, 0)
        of_requests.append((driver.tokens[request.id], driver.logprobs[request.id], reason, token_id, num_held))
        driver.release(request.id)
    driver.turn()
    runner.close()
    # How many blocks are held depends on whether two prompts with one beginning met in a step: then they share none.
    return [of_requests, counts.in_use, driver.blocks.stored_blocks(), driver.blocks.counts]


@given(prompts_and_wishes=st.lists(st.tuples(PROMPTS, wishes(has_hand_off=st.just(False))), min_size=1, max_size=8))
def test_tokens_ends_and_the_cache_are_those_of_steps_one_after_the_other(
    prompts_and_wishes: list[tuple[list[int], Wish]],
) -> None:
    launching = LaunchingRunner(num_blocks=128, eos_token_ids=EOS)
    launching.needs_tokens = needs_tokens
    ahead = outcome(launching, prompts_and_wishes)
    assert ahead == outcome(FakeRunner(num_blocks=128, eos_token_ids=EOS), prompts_and_wishes)

"""An engine whose sessions retain blocks: a conversation outlasts what would displace it until its time has passed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from quartet.engine.base import EngineRequest, RequestKind
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_loop import Cancel, Message, Release, StepLoop, Submit
from quartet.kvcache.retention import RetentionPlan
from tests.engine.fakes import FakeRunner, make_request
from tests.engine.launching import LaunchingRunner

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
NUM_BLOCKS, TTL_S = 16, 60.0
TALK = range(16)  # four blocks


class Loop:
    """A step loop on a fake runner, which checks every block that is read.

    Attributes:
        now: what its clock says.
        cached: cached tokens of each request.
    """

    def __init__(self, runner: FakeRunner, retention: RetentionPlan | None) -> None:
        self.now = 100.0
        self.steps = StepLoop(runner, CONFIG, lambda: self.now, retention=retention)
        self.cached: dict[int, int] = {}

    def run(self, *messages: Message) -> None:
        waiting: Sequence[Message] = messages
        while waiting or not self.steps.is_idle:
            output, waiting = self.steps.step(waiting).output, ()
            if output is not None:
                assert not [failed for failed in output.failed if not isinstance(messages[-1], Cancel)]
                self.cached |= {started.id: started.num_cached_tokens for started in output.started}

    def answer(self, request: EngineRequest) -> int:
        """Run ``request`` to its end; returns how many of its tokens were cached."""
        self.run(Submit(request, self.now))
        return self.cached[request.id]

    def displace(self, num_requests: int = 5) -> None:
        """Compute other prompts, of five blocks each with their answers."""
        for first in range(num_requests):
            self.answer(make_request([20 + first, *range(16)], max_tokens=1))

    @property
    def num_retained(self) -> int:
        return self.steps.snapshot.stats.num_retained_blocks


@pytest.fixture(params=[FakeRunner, LaunchingRunner])
def loop(request: pytest.FixtureRequest) -> Loop:
    return Loop(request.param(num_blocks=NUM_BLOCKS), RetentionPlan(ttl_s=TTL_S))


def talk(prompt: Sequence[int] = TALK, key: str = "talk", **settings: object) -> EngineRequest:
    return replace(make_request(prompt, max_tokens=5), session_key=key, **settings)  # type: ignore[arg-type]


def test_a_conversation_outlasts_what_would_have_displaced_it_until_its_time_has_passed(loop: Loop) -> None:
    loop.answer(talk())
    assert loop.num_retained == 5, "the answer's full block, too"
    loop.now += TTL_S - 1
    loop.displace()
    assert loop.answer(talk([*TALK, 1])) == 16
    loop.now += TTL_S - 1
    loop.displace()
    assert loop.answer(talk([*TALK, 2])) == 16, "its last request counts"
    loop.now += TTL_S
    loop.displace()
    assert loop.num_retained == 0
    assert loop.answer(talk([*TALK, 3])) == 0


@pytest.mark.parametrize(("retention", "key"), [(None, "talk"), (RetentionPlan(ttl_s=TTL_S), "")])
def test_without_a_time_to_live_or_a_key_it_does_not(retention: RetentionPlan | None, key: str) -> None:
    loop = Loop(FakeRunner(num_blocks=NUM_BLOCKS), retention)
    loop.answer(talk(key=key))
    assert loop.num_retained == 0
    loop.displace()
    assert loop.answer(talk([*TALK, 1])) == 0


def test_a_prefill_is_retained_from_its_end_on_and_stays_once_it_was_handed_off(loop: Loop) -> None:
    prefill = replace(make_request(TALK, kind=RequestKind.PREFILL), session_key="talk")
    loop.run(Submit(prefill, loop.now))
    assert loop.num_retained == 4
    loop.run(Release(prefill.id))
    loop.displace()
    assert loop.answer(talk([*TALK, 1])) == 16


def test_what_a_cancelled_request_has_computed_is_retained(loop: Loop) -> None:
    request = replace(make_request(TALK, max_tokens=40), session_key="talk")
    loop.steps.step([Submit(request, loop.now)])
    loop.steps.step([])
    loop.run(Cancel(request.id))
    assert loop.num_retained == 4
    loop.displace()
    assert loop.answer(talk([*TALK, 1])) == 16


@pytest.mark.parametrize(("tenant", "trust_domain"), [("acme", ""), ("", "acme")])
def test_equal_keys_of_two_tenants_do_not_renew_each_other(tenant: str, trust_domain: str) -> None:
    loop = Loop(FakeRunner(num_blocks=NUM_BLOCKS), RetentionPlan(ttl_s=TTL_S))
    loop.answer(talk())
    loop.now += TTL_S - 1
    loop.answer(talk(range(40, 44), tenant=tenant, trust_domain=trust_domain))
    loop.now += 1
    loop.displace()
    assert loop.answer(talk([*TALK, 1])) == 0


def test_a_preempted_request_retains_nothing_before_its_end() -> None:
    loop = Loop(FakeRunner(num_blocks=6), RetentionPlan(ttl_s=TTL_S, share=1.0))
    requests = [replace(make_request([first] * 9, max_tokens=8), session_key=str(first)) for first in range(2)]
    loop.steps.step([Submit(request, loop.now) for request in requests])
    while not loop.steps.snapshot.stats.num_preemptions:
        assert loop.num_retained == 0
        loop.steps.step([])
    loop.run()
    assert loop.num_retained == 6, "the whole pool"

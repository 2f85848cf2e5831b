"""What one tenant does, the others do not notice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from quartet.api.answer import AnswerSink
from quartet.api.convert.request import to_generate_start
from quartet.api.request import GenerateStart, Resume, SessionLimits, SessionStart, TokenPrompt
from quartet.api.session_server import SessionStream
from quartet.engine.base import FinishReason
from quartet.engine.sampling import Sampling
from quartet.errors import WorkerUnavailableError
from quartet.events.load import PlacementProgress
from quartet.rpc.server import StalledCalls
from quartet.v1 import router_pb2 as pb
from router.book import numbering
from router.config import AttemptConfig
from router.fair_queue import FIXED_TOKENS
from router.generate import GenerateRun
from router.intake import Intake
from router.policy.base import Decision, Pending, Policy, Snapshot
from router.policy.greedy import RoundRobinPolicy
from router.policy.kv_aware import KvAwarePolicy
from router.tenants import TenantConfig
from tests.router.fakes import TIMEOUT_S, Fleet, Plan, Request, collect, expected_tokens
from tests.router.records import make_load

PROMPT = TokenPrompt((1,) * 20)
MOST_URGENT = 2**31 - 1


def make_start(tenant: str, max_tokens: int, **changes: object) -> GenerateStart:
    fields = {"prompt": PROMPT, "sampling": Sampling(max_tokens=max_tokens), "seed": 5, "tenant": tenant, **changes}
    return GenerateStart(**fields)


async def until(holds: Callable[[], bool]) -> None:
    """Let the event loop run until that holds. Threads have their part in it, and may take long on a busy machine."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  # nothing tells it
            await asyncio.sleep(0)


class CountingPolicy(RoundRobinPolicy):
    """Counts how often it is asked, and about how many requests."""

    def __init__(self) -> None:
        super().__init__(10**9)
        self.num_looks = self.num_shown = 0

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        self.num_looks += 1
        self.num_shown += len(queued)
        return super().assign(queued, snapshot)


async def test_a_session_full_of_choices_takes_few_tasks_and_looks_and_another_tenant_goes_next() -> None:
    policy = CountingPolicy()
    fleet = Fleet("decode-0", policy=policy, num_blocks=10)
    fleet.hops.plans["decode"].append(Plan(hang_after=0))
    running = fleet.generate(make_start("flood", 60))
    await until(lambda: bool(fleet.hops.calls))
    runs: list[GenerateRun] = []

    def begin(asked: SessionStart, sink: AnswerSink) -> GenerateRun:
        runs.append(fleet.pipeline.generate(asked.start, sink))
        return runs[-1]

    session = SessionStream(begin, SessionLimits(), StalledCalls(TIMEOUT_S))
    message = to_generate_start(make_start("flood", 60, num_choices=64, priority=MOST_URGENT))
    num_tasks = len(asyncio.all_tasks())
    policy.num_looks = policy.num_shown = 0
    for slot in range(4096):
        session._start(pb.SessionStart(slot=slot, start=message))
    assert len(runs) == 4096 // 64, "the session counts choices, and refuses the other requests before they begin"
    assert len(asyncio.all_tasks()) == num_tasks + len(runs)
    other = asyncio.create_task(collect(fleet.generate(make_start("other", 2))))
    for turn in range(1, 6):
        await asyncio.sleep(0)
        assert policy.num_looks <= turn
    assert policy.num_shown <= 5 * 256
    running.cancel()
    answer = await other
    assert len(answer.token_ids[0]) == 2
    assert [call.start.context.tenant for call in fleet.hops.calls][:2] == ["flood", "other"]
    for run in runs:
        run.cancel()
        await run.drop()
    await collect(running)
    fleet.assert_nothing_left()


async def test_workers_are_told_no_higher_priority_than_the_configuration_allows() -> None:
    tenants = {"night": TenantConfig(max_priority=-2), "vip-*": TenantConfig(max_priority=7)}
    fleet = Fleet("prefill-0", "decode-0", tenants=tenants)
    asked = (("any", MOST_URGENT), ("any", -3), ("night", 0), ("vip-1", 5), ("vip-1", MOST_URGENT))
    told = []
    for tenant, priority in asked:
        await collect(fleet.generate(make_start(tenant, 2, priority=priority)))
        told.append({call.start.context.priority for call in fleet.hops.calls[-2:]})
    assert told == [{0}, {-3}, {-2}, {5}, {7}]


async def run_in_turn(fleet: Fleet, requests: Sequence[Request], num_decodes: int) -> list[str]:
    """The tenants of the first decodes, in order; then all requests are cancelled."""
    tasks = [asyncio.create_task(collect(request)) for request in requests]
    await until(lambda: len(fleet.hops.calls) >= num_decodes)
    tenants = [call.start.context.tenant for call in fleet.hops.calls[:num_decodes]]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    fleet.assert_nothing_left()
    return tenants


async def test_a_tenant_with_long_answers_gets_no_more_tokens_than_one_with_short_answers() -> None:
    # Room for one request at a time: 20 tokens of prompt and 16 in reserve.
    fleet = Fleet("decode-0", attempts=AttemptConfig(reserve_tokens=16), num_blocks=10, max_model_len=1000)
    starts = [make_start("long", 60) for _ in range(20)] + [make_start("short", 10) for _ in range(60)]
    tenants = await run_in_turn(fleet, [fleet.generate(start) for start in starts], 30)
    num_tokens = Counter[str]()
    for tenant in tenants:
        num_tokens[tenant] += FIXED_TOKENS + 20 + (60 if tenant == "long" else 10)
    assert abs(num_tokens["long"] - num_tokens["short"]) <= 2 * (FIXED_TOKENS + 80)


@pytest.mark.parametrize("policy", [None, KvAwarePolicy(random.Random(0))])
async def test_tiny_requests_of_one_tenant_are_served_in_no_larger_number_than_their_price_allows(
    policy: Policy | None,
) -> None:
    fleet = Fleet("decode-0", policy=policy, num_blocks=1000, max_model_len=1000)
    [decode] = [status.record for status in fleet.table.statuses(0.0)]
    fleet.table.report(make_load(decode, max_running=1), 0.0)
    tiny = [make_start("tiny", 1, prompt=TokenPrompt((1,))) for _ in range(200)]
    others = [make_start("other", 2, prompt=TokenPrompt((1,) * 128)) for _ in range(40)]
    tenants = await run_in_turn(fleet, [fleet.generate(start) for start in (*tiny, *others)], 60)
    # By their tokens alone, 65 of the tiny ones would come for each of the other tenant's.
    assert tenants.count("tiny") <= 2 * tenants.count("other") + 4


async def test_answers_that_end_early_cost_their_tenant_only_what_they_used() -> None:
    fleet = Fleet("decode-0", num_blocks=10)
    fleet.hops.eos_at = 5
    # Each could have 60 tokens of output and has 6.
    starts = [make_start("a", 60) for _ in range(20)] + [make_start("b", 6) for _ in range(20)]
    tenants = await run_in_turn(fleet, [fleet.generate(start) for start in starts], 20)
    assert 9 <= tenants.count("a") <= 11


async def test_a_running_answer_is_charged_as_it_grows_and_settled_when_it_ends_or_fails() -> None:
    fleet = Fleet("decode-0", attempts=AttemptConfig(reserve_tokens=16, max_attempts=2), num_blocks=100)
    share = fleet.admission.share
    fleet.hops.plans["decode"].append(Plan(hang_after=200))
    request = fleet.generate(make_start("a", 400))
    reading = asyncio.create_task(collect(request))
    await until(lambda: share.start("a") >= FIXED_TOKENS + 20 + 190)
    assert share.start("a") <= FIXED_TOKENS + 20 + 200
    request.cancel()
    answer = await reading
    assert answer.finished[0].reason is FinishReason.CANCELLED
    assert share.start("a") == FIXED_TOKENS + 20 + len(answer.token_ids[0])
    # An attempt that fails is not paid twice.
    fleet.hops.plans["decode"].append(Plan(fail_after=3, error=WorkerUnavailableError("gone")))
    before = share.start("a")
    answer = await collect(fleet.generate(make_start("a", 30)))
    assert answer.finished[0].usage.num_attempts == 2
    assert share.start("a") == before + FIXED_TOKENS + 20 + 30


async def test_who_is_never_placed_pays_nothing() -> None:
    fleet = Fleet("decode-0", num_blocks=10)
    fleet.hops.plans["decode"].append(Plan(hang_after=0))
    running = fleet.generate(make_start("a", 60))
    await until(lambda: bool(fleet.hops.calls))
    waiting = fleet.generate(make_start("b", 60))
    await until(lambda: fleet.admission.length == 1)
    waiting.cancel()
    await collect(waiting)
    running.cancel()
    await collect(running)
    assert fleet.admission.share.start("b") == 0.0


async def test_what_could_not_be_placed_for_its_client_costs_only_what_was_computed() -> None:
    fleet = Fleet("prefill-0", "decode-0", attempts=AttemptConfig(max_attempts=1))
    fleet.hops.plans["prefill"].append(Plan(error=WorkerUnavailableError("gone")))
    with pytest.raises(WorkerUnavailableError):
        await fleet.pipeline.place(make_start("a", 60))
    assert fleet.admission.share.start("a") == FIXED_TOKENS + 20
    await fleet.pipeline.place(make_start("a", 60))
    fleet.admission.share.serve("a", 0)
    assert fleet.admission.share.start("a") == 3 * FIXED_TOKENS + 20 + 20 + 60


def end_placed(fleet: Fleet, **numbers: tuple[int, ...]) -> None:
    """The decode worker reports that placed starts ended."""
    [decode] = [status.record for status in fleet.table.statuses(0.0) if status.record.worker_id == "decode-0"]
    progress = {numbering("router-a", decode.epoch): PlacementProgress(**numbers)}
    fleet.table.report(make_load(decode, placements=progress), 0.0)


@pytest.mark.parametrize("calls_place", [False, True])
async def test_output_tokens_that_a_client_brings_cost_as_much_as_a_prompt(
    calls_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    enter = Intake.enter

    async def note(self: Intake, tenant: str, num_prompt_tokens: int) -> None:
        begun.append(num_prompt_tokens)
        await enter(self, tenant, num_prompt_tokens)

    monkeypatch.setattr(Intake, "enter", note)
    fleet = Fleet("prefill-0", "decode-0", attempts=AttemptConfig(reserve_tokens=16), max_model_len=1000)
    tokens = expected_tokens(5, 0, 1, 300)
    resume = Resume(request_id="ab" * 16, attempt=1, seed=5, generated_token_ids=tokens)
    start = make_start("a", 900, prompt=TokenPrompt((1,)))
    if calls_place:
        await fleet.pipeline.place(start, resume=resume)
    else:
        parts = fleet.generate(start, resume=resume).parts()
        await anext(parts)  # it is placed, and has no token yet
    assert fleet.admission.share.start("a") == FIXED_TOKENS + 1 + 300 + 16
    # Of text to be made, each token counts 4 more.
    assert begun == ([1 + 300] if calls_place else [1 + 300, 4 * 300])
    if not calls_place:
        await parts.aclose()
        fleet.assert_nothing_left()


@pytest.mark.parametrize(
    ("num_output_tokens", "num_charged"),
    [((57,), 57), ((200,), 200), ((0,), 1), ((10**6,), 300), ((), 16)],
    ids=["early", "long", "never ran", "more than asked for", "unknown"],
)
async def test_an_answer_by_place_is_charged_for_what_its_worker_reports(
    num_output_tokens: tuple[int, ...], num_charged: int
) -> None:
    fleet = Fleet("prefill-0", "decode-0", attempts=AttemptConfig(reserve_tokens=16), max_model_len=1000)
    await fleet.pipeline.place(make_start("a", 300))
    assert fleet.admission.share.start("a") == FIXED_TOKENS + 20 + 16
    for _ in range(2):  # each number is reported several times
        end_placed(fleet, ended=(1,), num_output_tokens=num_output_tokens)
        assert fleet.admission.share.start("a") == FIXED_TOKENS + 20 + num_charged

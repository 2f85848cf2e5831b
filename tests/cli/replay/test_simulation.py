"""Replays in virtual time: every token of every request, the same each time; what policies and prompts come to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.replay.fleet_router import FleetRouter, ReplayedRequest
from cli.replay.policies import POLICIES
from cli.replay.results import PolicyResult
from cli.replay.simulation import FleetSettings, GivenUpError, Patience, Prompts, Simulation
from cli.replay.worker import EngineSettings, SimulatedWorker
from cli.traces.format import BLOCK_SIZE, TraceRequest
from cli.traces.generate import Arrivals, TraceConfig, generate
from quartet.discovery.base import Rank
from quartet.engine.base import EngineRequest, Generation, RequestKind
from quartet.engine.mock.model import StepTiming
from quartet.engine.sampling import Sampling
from quartet.errors import InvalidRequestError
from quartet.kvcache.block_hash import pack_token_ids, sequence_hashes, split_blocks
from quartet.kvcache.retention import RetentionPlan
from quartet.kvcache.sequence import Sequence as TokenSequence
from router.policy.base import Candidate, Decision, Option, Peers, Pending, Placement, Policy, Snapshot

each_policy = pytest.mark.parametrize("name", POLICIES)


@pytest.fixture(scope="module")
def trace() -> list[TraceRequest]:
    return list(generate(TraceConfig(arrivals=Arrivals(rate=8.0), max_requests=120, seed=5)))


def run(trace: list[TraceRequest], name: str, **settings: Any) -> PolicyResult:
    return Simulation(trace, POLICIES[name], FleetSettings(num_workers=4, **settings), seed=1).run()


@each_policy
def test_all_are_served_to_their_last_token_and_the_same_each_time(trace: list[TraceRequest], name: str) -> None:
    first, again = run(trace, name), run(trace, name)
    assert first.requests_completed == len(trace)
    assert first.requests_refused == 0
    num_tokens = sum(request.num_output_tokens for request in trace)
    assert first.output_tokens_per_s * first.duration_s == pytest.approx(num_tokens)
    assert replace(first, cpu_s=0.0) == replace(again, cpu_s=0.0)


def test_one_request_alone_takes_what_the_timing_says() -> None:
    engine = EngineSettings()
    request = TraceRequest(arrival_s=1.0, num_input_tokens=1000, num_output_tokens=3, hash_ids=(1, 2))
    result = Simulation([request], POLICIES["round_robin"], FleetSettings(engine=engine)).run()
    timing = engine.timing
    assert result.ttft_ms.mean == pytest.approx(timing.prefill_ms(1000))
    assert result.itl_ms.mean == pytest.approx((timing.decode_ms(1001) + timing.decode_ms(1002)) / 2)
    assert result.e2e_ms.mean == pytest.approx(result.ttft_ms.mean + 2 * result.itl_ms.mean)


def test_a_prompt_that_is_prefilled_elsewhere_is_moved_before_it_decodes() -> None:
    request = TraceRequest(arrival_s=0.0, num_input_tokens=1000, num_output_tokens=3, hash_ids=(1, 2))
    fleet = FleetSettings(num_workers=1, num_prefill_workers=1, transfer_gb_per_s=1.0, transfer_latency_s=0.5)
    result = Simulation([request], POLICIES["round_robin"], fleet).run()
    engine = fleet.engine
    moved_ms = 500 + 16 * engine.block_size * engine.kv_bytes_per_token / 1e6
    steps_ms = engine.timing.decode_ms(1001) + engine.timing.decode_ms(1002)
    assert result.ttft_ms.mean == pytest.approx(engine.timing.prefill_ms(1000))
    assert result.e2e_ms.mean == pytest.approx(result.ttft_ms.mean + moved_ms + steps_ms)


def test_blocks_are_shared_from_the_step_that_computes_them() -> None:
    requests = [
        TraceRequest(arrival_s=0.0, num_input_tokens=1024 + extra, num_output_tokens=1, hash_ids=(1, 2, 10 + extra))
        for extra in (1, 2)
    ]
    result = Simulation(requests, POLICIES["round_robin"], FleetSettings(num_workers=1)).run()
    assert result.reuse_ratio == pytest.approx(1024 / (1025 + 1026))


def test_knowing_the_caches_helps(trace: list[TraceRequest]) -> None:
    aware, blind = run(trace, "kv_aware"), run(trace, "round_robin")
    assert aware.reuse_ratio > 1.1 * blind.reuse_ratio
    assert aware.ttft_ms.mean < 0.95 * blind.ttft_ms.mean


@each_policy
@pytest.mark.parametrize(
    "settings",
    [
        {"num_routers": 3},
        {"load_age_s": 0.05},
        {"num_routers": 2, "load_age_s": 0.05},
        {"num_routers": 5, "load_age_s": 0.05, "bookings_age_s": 0.002},
        {"num_prefill_workers": 2, "load_age_s": 0.05},
    ],
)
def test_several_routers_with_old_reports_lose_nothing(
    trace: list[TraceRequest], name: str, settings: dict[str, Any]
) -> None:
    requests = trace[:60]
    assert run(requests, name, **settings).requests_completed == len(requests)


def test_more_routers_than_workers_do_better_if_they_tell_each_other(trace: list[TraceRequest]) -> None:
    # All at once, as clients that were waiting for the same thing come.
    bursts = [replace(request, arrival_s=float(request.arrival_s // 1)) for request in trace]
    silent = run(bursts, "kv_aware", num_routers=8, load_age_s=0.05)
    telling = run(bursts, "kv_aware", num_routers=8, load_age_s=0.05, bookings_age_s=0.002)
    assert telling.ttft_ms.mean < 0.8 * silent.ttft_ms.mean


def test_a_router_that_has_just_started_spreads_its_requests_over_ranks_that_others_know() -> None:
    """Its index is empty, so it sees no reason to prefer a rank; it knows what the other router tells it."""
    engine = EngineSettings()
    workers = {rank: SimulatedWorker(rank, engine) for rank in (Rank(str(number)) for number in range(8))}
    policies = [POLICIES["kv_aware"](random.Random(number)) for number in range(2)]
    old, new = (
        FleetRouter(
            policies[number],
            workers,
            num_prefill=0,
            load_age_s=0.05,
            bookings_age_s=0.0,
            peers=Peers(number=number, num_routers=2, tell_bookings=True),
        )
        for number in range(2)
    )
    sent: Counter[Rank] = Counter()
    for number in range(8):
        router, other = (old, new) if number % 2 else (new, old)
        tokens = Pending(num_tokens=8000, num_reserved_tokens=8100, num_most_tokens=8200)
        router.arrive(ReplayedRequest(number, tokens))
        # Within four turns every rank is open to each router once.
        for turn in range(4):
            now = 1.0 + 0.02 * number + 0.004 * turn
            for replayed in router.pump(now):
                other.hear(replayed, now)
                assert replayed.placement is not None
                sent[replayed.placement.decode] += 1
    assert sent == dict.fromkeys(workers, 1)


@pytest.mark.parametrize(
    "settings",
    [{}, {"load_age_s": 0.05}, {"num_prefill_workers": 2}, {"num_routers": 2, "load_age_s": 0.05}],
    ids=["one", "old", "prefill", "routers"],
)
@pytest.mark.parametrize("name", ["kv_aware", "round_robin"])
def test_routers_keep_what_workers_do_not_run_at_once(
    trace: list[TraceRequest], name: str, settings: dict[str, Any]
) -> None:
    policies: list[_Counting] = []

    def make_policy(rng: random.Random) -> _Counting:
        policies.append(_Counting(POLICIES[name](rng)))
        return policies[-1]

    fleet = FleetSettings(num_workers=2, engine=EngineSettings(max_num_seqs=3), **settings)
    requests = trace[:36]  # the queue grows with each
    result = Simulation(requests, make_policy, fleet, seed=1).run()
    assert (result.requests_completed, result.requests_refused) == (len(requests), 0)
    assert max(policy.num_kept for policy in policies) > 3
    # Where reports are old, they count requests that have just ended, and leave out other routers' latest ones. Where
    # others prefill, decode ranks may have one more.
    num_more = 3 if fleet.load_age_s else 1 if fleet.num_prefill_workers else 0
    assert 3 <= max(policy.num_most for policy in policies) <= 3 + num_more


@pytest.mark.parametrize(("ttl_s", "num_found"), [(None, 0), (12.0, 0), (60.0, 1024)])
def test_a_session_finds_its_blocks_until_its_time_has_passed(ttl_s: float | None, num_found: int) -> None:
    talk = TraceRequest(arrival_s=0.0, num_input_tokens=1025, num_output_tokens=1, hash_ids=(1, 2, 3), session="talk")
    others = [
        replace(talk, arrival_s=10.0 + number, hash_ids=(4 + number, 14 + number, 24 + number), session="")
        for number in range(5)
    ]
    requests = [talk, *others, replace(talk, arrival_s=30.0)]
    retention = None if ttl_s is None else RetentionPlan(ttl_s=ttl_s)
    fleet = FleetSettings(num_workers=1, engine=EngineSettings(num_blocks=40, retention=retention))
    result = Simulation(requests, POLICIES["round_robin"], fleet).run()
    assert result.reuse_ratio * 7 * 1025 == pytest.approx(num_found)
    assert result.other_ttft_ms.mean == pytest.approx(fleet.engine.timing.prefill_ms(1025))
    assert (result.session_ttft_ms.mean < result.other_ttft_ms.mean) == (num_found > 0)


def test_a_request_that_can_never_fit_is_refused_and_reported() -> None:
    requests = [
        TraceRequest(arrival_s=0.0, num_input_tokens=5000, num_output_tokens=5, hash_ids=tuple(range(10))),
        TraceRequest(arrival_s=0.0, num_input_tokens=100, num_output_tokens=5, hash_ids=(50,)),
    ]
    for name in POLICIES:
        result = run(requests, name, engine=EngineSettings(num_blocks=32))
        assert (result.requests_refused, result.requests_completed) == (1, 1), name


def test_a_worker_that_is_interrupted_steps_on_as_if_it_had_stepped_one_by_one() -> None:
    """A request that comes within quiet steps joins after the one that runs; no request's token moves."""

    def times(second_at: float, looks_at: list[float]) -> dict[int, list[float]]:
        worker = SimulatedWorker(Rank("worker"), EngineSettings())
        found: dict[int, list[float]] = {1: [], 2: []}
        todo = sorted([(0.0, 1), (second_at, 2), *((at, 0) for at in looks_at)])
        while todo or not worker.is_idle:
            now = min(todo[0][0] if todo else worker.next_at, worker.next_at)
            progress = worker.advance(now)
            if progress is not None:
                for running in progress.tokens:
                    found[running.id].extend(progress.ends)
            while todo and todo[0][0] <= now:
                _, id = todo.pop(0)
                if id:
                    worker.submit(*_request(id), now)
            worker.begin(now)
        return found

    rng = random.Random(2)
    for _ in range(20):
        second_at = rng.uniform(0.0, 0.6)
        watched = times(second_at, [rng.uniform(0.0, 1.0) for _ in range(15)])
        alone = times(second_at, [])
        assert {id: len(ends) for id, ends in alone.items()} == {1: 70, 2: 70}
        for id, ends in alone.items():
            assert watched[id] == pytest.approx(ends)


def test_quiet_steps_show_the_same_states_as_single_steps() -> None:
    worker = SimulatedWorker(Rank("worker"), EngineSettings())
    worker.submit(*_request(1), 0.0)
    worker.begin(0.0)
    first_at = worker.next_at
    worker.advance(first_at)
    worker.begin(first_at)
    state, decode_ms = worker.state(), EngineSettings().timing.decode_ms
    assert len(state.step_ends) > 10, "the prompt's last block has room for more tokens"
    ends_at = first_at
    for step in range(10):
        begins_at, ends_at = ends_at, ends_at + decode_ms(101 + step) / 1e3
        for time in (begins_at, (begins_at + ends_at) / 2):
            assert state.step_at(time) == (pytest.approx(ends_at), 101 + step)


def test_a_router_counts_the_blocks_of_its_requests_wherever_they_are() -> None:
    """Requests queued at the worker count in full; once they run, only the blocks that they may still take."""
    rank, engine = Rank("worker"), EngineSettings(max_num_seqs=1, num_blocks=64)
    worker = SimulatedWorker(rank, engine)
    policy = _Watching()
    router = FleetRouter(policy, {rank: worker}, num_prefill=0)
    for number in (0, 1):
        pending = Pending(num_tokens=100, num_reserved_tokens=170, num_most_tokens=170)
        router.arrive(ReplayedRequest(number, pending))
        [_] = router.pump(0.0)
        worker.submit(*_request(number), 0.0)
    worker.begin(0.0)
    router.arrive(ReplayedRequest(2, Pending(num_tokens=100, num_reserved_tokens=170, num_most_tokens=170)))
    router.pump(0.0)
    seen = [(candidate.num_used_blocks, candidate.num_promised_blocks) for candidate in policy.seen]
    assert seen == [(0, 0), (0, 3), (2, 1 + 3)]


def test_where_workers_report_by_step_a_router_counts_what_it_sent_by_its_own_forecast_until_then() -> None:
    def num_unbegun(*, reports_by_step: bool) -> list[int]:
        rank = Rank("worker")
        worker = SimulatedWorker(rank, EngineSettings(reports_by_step=reports_by_step))
        policy = _Watching(num_cached_tokens=40)
        router = FleetRouter(policy, {rank: worker}, num_prefill=0)
        seen = list[int]()
        for number, now in ((0, 0.0), (1, 0.001), (2, 0.002)):  # the others come while the first one's step runs
            router.arrive(
                ReplayedRequest(number, Pending(num_tokens=100, num_reserved_tokens=170, num_most_tokens=170))
            )
            router.pump(now)
            seen.append(policy.seen[-1].num_unbegun_tokens)
            worker.submit(*_request(number), now)
            worker.begin(now)
            router.report(rank, now)
        return seen

    assert num_unbegun(reports_by_step=True) == [0, 0, 60]
    assert num_unbegun(reports_by_step=False) == [0, 0, 100]


class _Counting:
    """Decides as ``policy`` does, and remembers the most requests kept, and the most at one rank."""

    name = "counting"

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.num_kept = self.num_most = 0

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        decision = self._policy.assign(queued, snapshot)
        counts = Counter(
            {candidate.rank: candidate.num_requests for candidate in (*snapshot.prefill, *snapshot.decode)}
        )
        for placement in decision.placements:
            if placement is not None:
                counts.update({placement.decode, placement.prefills_at})
        self.num_kept = max(self.num_kept, list(decision.placements).count(None))
        self.num_most = max(self.num_most, *counts.values())
        return decision

    def explain(self, pending: Pending, snapshot: Snapshot) -> Sequence[Option]:
        return self._policy.explain(pending, snapshot)


class _Watching:
    """Sends all to the only rank, and remembers the snapshots."""

    name = "watching"

    def __init__(self, num_cached_tokens: int = 0) -> None:
        """``num_cached_tokens``: what it expects of each request."""
        self.seen: list[Candidate] = []
        self._num_cached_tokens = num_cached_tokens

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        [candidate] = snapshot.decode
        self.seen.append(candidate)
        return Decision([Placement(None, candidate.rank, self._num_cached_tokens) for _ in queued])

    def explain(self, pending: Pending, snapshot: Snapshot) -> Sequence[Option]:
        return ()


def _request(id: int) -> tuple[EngineRequest, TokenSequence]:
    sampling = Sampling(max_tokens=70, ignore_eos=True)
    generation = Generation(prompt_token_ids=[id] * 100, sampling=sampling)
    request = EngineRequest(id=id, kind=RequestKind.DECODE, generation=generation)
    return request, TokenSequence(generation.prompt_token_ids, block_size=EngineSettings().block_size)


def _trace_request(hash_ids: tuple[int, ...], num_last_tokens: int) -> TraceRequest:
    num_tokens = (len(hash_ids) - 1) * BLOCK_SIZE + num_last_tokens
    return TraceRequest(arrival_s=0.0, num_input_tokens=num_tokens, num_output_tokens=1, hash_ids=hash_ids)


requests = st.builds(
    _trace_request, st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), st.integers(1, BLOCK_SIZE)
)


@given(trace=st.lists(requests, min_size=1, max_size=4), block_size=st.sampled_from([32, 48, 64, 512, 1024]))
def test_names_and_contents_are_those_of_the_tokens(trace: list[TraceRequest], block_size: int) -> None:
    prompts = Prompts(trace, block_size)
    for request in trace:
        token_ids, blocks = prompts.token_ids(request), prompts.blocks(request)
        assert len(token_ids) == request.num_input_tokens
        assert blocks.hashes == sequence_hashes(token_ids, block_size)
        contents = split_blocks(pack_token_ids(token_ids), block_size)
        assert list(blocks.contents) == contents[: len(blocks.contents)]
        assert len(blocks.contents) == (0 if BLOCK_SIZE % block_size else len(contents))


@given(ones=requests, others=requests)
def test_prompts_are_equal_as_far_as_their_ids(ones: TraceRequest, others: TraceRequest) -> None:
    prompts = Prompts([ones, others], 64)
    first, second = prompts.token_ids(ones), prompts.token_ids(others)
    for index in range(min(len(first), len(second)) // BLOCK_SIZE):
        tokens = slice(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
        assert (first[tokens] == second[tokens]) == (ones.hash_ids[index] == others.hash_ids[index])


def test_ids_may_be_any_numbers() -> None:
    request = _trace_request((1 << 63, 5), 100)
    assert len(Prompts([request], 64).blocks(request).hashes) == 9


def test_tokens_without_an_id_are_refused() -> None:
    request = TraceRequest(arrival_s=0.0, num_input_tokens=513, num_output_tokens=1, hash_ids=(7,))
    with pytest.raises(InvalidRequestError, match="request 1 has 1 hash_ids for 513 tokens") as refused:
        Prompts([request], 64)
    assert refused.value.field == "hash_ids"


def test_workers_that_only_prefill_may_have_another_engine() -> None:
    request = TraceRequest(arrival_s=0.0, num_input_tokens=1000, num_output_tokens=3, hash_ids=(1, 2))
    slow = StepTiming(prefill_base=700.0, prefill_linear=0.0, prefill_square=0.0)
    fleet = FleetSettings(num_workers=1, num_prefill_workers=1, prefill_engine=EngineSettings(timing=slow))
    result = Simulation([request], POLICIES["round_robin"], fleet).run()
    assert result.ttft_ms.mean == pytest.approx(700)
    assert result.prefill_busy * result.duration_s == pytest.approx(0.7)
    steps_s = (fleet.engine.timing.decode_ms(1001) + fleet.engine.timing.decode_ms(1002)) / 1e3
    assert result.decode_busy * result.duration_s == pytest.approx(steps_s)


def test_a_replay_ends_once_too_many_requests_are_late(trace: list[TraceRequest]) -> None:
    slow = EngineSettings(timing=StepTiming(prefill_base=900.0))
    fleet = FleetSettings(num_workers=1, engine=slow)
    whole = Simulation(trace, POLICIES["round_robin"], fleet).run()
    assert whole.ttft_ms.p50 > 2_000
    with pytest.raises(GivenUpError, match="6 requests waited longer than 2 s for their first token") as error:
        Simulation(trace, POLICIES["round_robin"], fleet).run(patience=[Patience(ttft_s=2.0, most_late=5)])
    assert 2.0 < error.value.at_s < whole.duration_s
    enough = Patience(ttft_s=2.0, most_late=len(trace))
    assert Simulation(trace, POLICIES["round_robin"], fleet).run(patience=[enough]).ttft_ms == whole.ttft_ms


def test_a_short_prompt_goes_beside_a_long_one_where_the_engine_does_that() -> None:
    requests = [
        TraceRequest(arrival_s=0.0, num_input_tokens=20_480, num_output_tokens=1, hash_ids=tuple(range(40))),
        TraceRequest(arrival_s=0.1, num_input_tokens=512, num_output_tokens=1, hash_ids=(99,)),
    ]

    def ttft_ms(part: float) -> float:
        fleet = FleetSettings(num_workers=1, engine=EngineSettings(short_prompts_part=part))
        return Simulation(requests, POLICIES["kv_aware"], fleet).run().ttft_ms.p50

    assert ttft_ms(0.5) < 0.9 * ttft_ms(0.0)


def test_blocks_are_shared_from_the_next_step_where_the_engine_does_that() -> None:
    requests = [
        TraceRequest(arrival_s=0.0, num_input_tokens=1024 + extra, num_output_tokens=1, hash_ids=(1, 2, 10 + extra))
        for extra in (1, 2)
    ]
    fleet = FleetSettings(num_workers=1, engine=EngineSettings(shares_within_step=False))
    assert Simulation(requests, POLICIES["round_robin"], fleet).run().reuse_ratio == 0.0

"""Replays with tiers below the pools: loads take the links' time, the choice is the engine's, nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import inf

import pytest

from cli.replay.policies import POLICIES
from cli.replay.results import PolicyResult
from cli.replay.simulation import FleetSettings, Simulation
from cli.replay.tiers import SimulatedTiers, TierSettings
from cli.replay.worker import EngineSettings, SimulatedWorker, onboard_time
from cli.traces.format import BLOCK_SIZE, TraceRequest
from cli.traces.generate import Arrivals, SessionConfig, TraceConfig, generate
from quartet.discovery.base import Rank
from quartet.engine.base import EngineRequest, Generation, RequestKind
from quartet.engine.sampling import Sampling
from quartet.engine.scheduler import Load, Schedule
from quartet.engine.tiers import Speed, Tiering
from quartet.events.kv import KvEvent, Removed, Stored, Tier
from quartet.events.load import OnboardTime, StepTime
from quartet.kvcache.block_hash import chain_digest
from quartet.kvcache.sequence import Sequence
from quartet.kvcache.tiers import BlockName, LowerTiers, TierBlock, TierPlan
from quartet.transfer.base import PoolMemory
from quartet.transfer.host_blocks import PlainHostBlocks

HOST = TierSettings(host=TierPlan(num_blocks=400))
# The disk is fast enough to be worth a load, and the host so small that there is something to load from there.
DISK = TierSettings(host=TierPlan(num_blocks=100), disk=TierPlan(num_blocks=4000), disk_gb_per_s=50.0)
POOL_BLOCKS = 40
# 17 blocks; what comes between displaces all of the pool.
PROMPT = TraceRequest(arrival_s=0.0, num_input_tokens=1088, num_output_tokens=1, hash_ids=(1, 2, 3))
OTHER = TraceRequest(arrival_s=10.0, num_input_tokens=2560, num_output_tokens=1, hash_ids=(4, 5, 6, 7, 8))


@pytest.fixture(scope="module")
def trace() -> list[TraceRequest]:
    sessions = SessionConfig(num_turns=6.0, think_time_s=4.0, message_tokens=600.0)
    return list(generate(TraceConfig(arrivals=Arrivals(rate=8.0), sessions=sessions, max_requests=120, seed=5)))


def run(
    requests: list[TraceRequest], tiers: TierSettings | None, *, num_blocks: int = 700, policy: str = "kv_aware"
) -> PolicyResult:
    fleet = FleetSettings(num_workers=2, engine=EngineSettings(num_blocks=num_blocks, tiers=tiers))
    return replace(Simulation(requests, POLICIES[policy], fleet, seed=1).run(), cpu_s=0.0)


def come_back(tiers: TierSettings | None, num_requests: int = 3) -> PolicyResult:
    """One worker; the prompt is computed, displaced, and comes again."""
    fleet = FleetSettings(num_workers=1, engine=EngineSettings(num_blocks=POOL_BLOCKS, tiers=tiers))
    requests = [PROMPT, OTHER, replace(PROMPT, arrival_s=20.0)]
    return Simulation(requests[:num_requests], POLICIES["round_robin"], fleet).run()


@pytest.mark.parametrize("gb_per_s", [52.0, 20.0])
def test_what_comes_from_the_host_takes_its_links_time(gb_per_s: float) -> None:
    engine = EngineSettings()
    computed, loaded = come_back(None), come_back(replace(HOST, host_gb_per_s=gb_per_s))
    assert computed.reuse_ratio == 0
    num_tokens = 2 * PROMPT.num_input_tokens + OTHER.num_input_tokens
    assert loaded.reuse_ratio == loaded.host_ratio == pytest.approx(16 * 64 / num_tokens)
    assert loaded.blocks_dropped == 0
    # First the 16 blocks that it overwrites are copied to the host, then its own from there. It computes the last.
    block_ms = 64 * engine.kv_bytes_per_token / gb_per_s / 1e6
    expected_ms = 1.0 + (16 + 16) * block_ms + engine.timing.prefill_ms(64)
    saved_ms = engine.timing.prefill_ms(PROMPT.num_input_tokens) - expected_ms
    assert 3 * (computed.ttft_ms.mean - loaded.ttft_ms.mean) == pytest.approx(saved_ms)


def test_what_is_computed_sooner_is_not_loaded() -> None:
    assert come_back(replace(HOST, host_gb_per_s=1.0)).host_ratio == 0


def test_what_finds_no_room_on_its_way_is_lost() -> None:
    plan = TierPlan(num_blocks=400, max_concurrent_transfers=1, max_batch_size=8)
    result = come_back(TierSettings(host=plan), num_requests=2)
    assert result.blocks_dropped == 9, "one batch of 17 blocks went"


@pytest.mark.parametrize("tiers", [HOST, DISK])
@pytest.mark.parametrize("policy", ["kv_aware", "round_robin"])
def test_tiers_bring_back_more_and_all_are_served_the_same_each_time(
    trace: list[TraceRequest], tiers: TierSettings, policy: str
) -> None:
    without = run(trace, None, policy=policy)
    first, again = run(trace, tiers, policy=policy), run(trace, tiers, policy=policy)
    assert first == again
    assert first.requests_completed == len(trace)
    assert first.reuse_ratio > without.reuse_ratio
    assert 0 < first.host_ratio < first.reuse_ratio
    assert (first.disk_ratio > 0) == (tiers.disk is not None)


def test_tiers_to_which_nothing_comes_change_nothing(trace: list[TraceRequest]) -> None:
    assert run(trace, HOST, num_blocks=100_000) == run(trace, None, num_blocks=100_000)


def test_prompts_that_others_decode_are_loaded_too(trace: list[TraceRequest]) -> None:
    engine = EngineSettings(num_blocks=700, tiers=HOST)
    fleet = FleetSettings(num_workers=1, num_prefill_workers=1, engine=engine)
    result = Simulation(trace, POLICIES["round_robin"], fleet).run()
    assert result.requests_completed == len(trace)
    assert result.host_ratio > 0


@pytest.mark.parametrize(("gb_per_s", "waits"), [(52.0, True), (4.0, False)])
@pytest.mark.parametrize("busy", [0, 1])
def test_kv_aware_prefers_the_rank_with_blocks_below_its_pool_only_if_they_are_loaded_soon(
    gb_per_s: float, waits: bool, busy: int
) -> None:
    """The prompt is on the host of one of two workers. When it comes again, one of them computes something else."""
    engine = EngineSettings(num_blocks=140, tiers=replace(HOST, host_gb_per_s=gb_per_s))
    # Pairs displace what both pools have; the last two stay there.
    pairs = [_prompt(10.0, 5120, 100), _prompt(10.0, 5120, 200), _prompt(15.0, 3840, 300), _prompt(15.0, 3840, 400)]
    requests = [_prompt(0.0, 4096, 1), *pairs, replace(pairs[2 + busy], arrival_s=20.0), _prompt(20.001, 4096, 1)]
    fleet = FleetSettings(num_workers=2, engine=engine)
    result = Simulation(requests, POLICIES["kv_aware"], fleet).run()
    before = Simulation(requests[:-1], POLICIES["kv_aware"], fleet).run()
    ttft_ms = len(requests) * result.ttft_ms.mean - len(requests[:-1]) * before.ttft_ms.mean
    assert (result.host_ratio > 0) == waits
    if not waits:
        # To compute it takes 86 ms, and the other request 17.
        assert ttft_ms < engine.timing.prefill_ms(4096) + 5.0, "it was computed at once"


def test_routers_know_what_a_load_takes_as_workers_report_it() -> None:
    assert onboard_time(EngineSettings()) == OnboardTime()
    host_s = EngineSettings().kv_bytes_per_token / 52e9
    assert onboard_time(EngineSettings(tiers=HOST)) == OnboardTime(host_s_per_token=host_s)
    disk_s = EngineSettings().kv_bytes_per_token / 50e9
    of_disk = OnboardTime(host_s_per_token=host_s, disk_s_per_token=pytest.approx(disk_s + host_s))
    assert onboard_time(EngineSettings(tiers=DISK)) == of_disk


def test_events_say_what_went_to_the_host() -> None:
    worker = SimulatedWorker(Rank("a"), EngineSettings(num_blocks=POOL_BLOCKS, tiers=HOST))
    first = _events(worker, 0, [1] * 1088)
    events = _events(worker, 1, [2] * 2560)
    stored = [event for event in first if isinstance(event, Stored)]
    names = [name for event in stored for name in event.sequence_hashes]
    assert len(names) == 17
    below = [event for event in events if isinstance(event, Stored) and event.tier is Tier.HOST]
    assert [name for event in below for name in event.sequence_hashes] == names
    gone = [event for event in events if isinstance(event, Removed) and event.tier is Tier.DEVICE]
    assert {name for event in gone for name in event.sequence_hashes} == set(names)
    assert events.index(below[0]) < events.index(gone[0])


@pytest.mark.parametrize("num_blocks", [4, 20])
def test_what_comes_from_disk_is_copied_batch_by_batch_beside_the_reads(num_blocks: int) -> None:
    plan = TierPlan(num_blocks=40, max_batch_size=16)
    settings = TierSettings(host=plan, disk=plan, host_gb_per_s=2.0, disk_gb_per_s=1.0)
    tiers = SimulatedTiers(settings, 1_000_000, StepTime(), 64)
    contents = [bytes([number]) for number in range(num_blocks)]
    digests = list(accumulate(contents, chain_digest, initial=bytes(32)))
    tiers.lower.restore([BlockName(digests[n + 1], digests[n], n, n - 1 if n else None) for n in range(num_blocks)])
    load = Load(7, tiers.lower.find(digests[0], contents), range(num_blocks))
    tiers.begin_step(Schedule(loads=[load]), 5.0)
    # Twenty: the first sixteen are copied when the others were read.
    assert tiers.next_at == pytest.approx(5.0 + (0.016 if num_blocks > 16 else 0.004) + num_blocks * 0.0005 + 0.001)
    assert tiers.end(tiers.next_at - 0.0001) == []
    [ended] = tiers.end(tiers.next_at)
    assert (ended.id, ended.num_blocks, tiers.next_at) == (7, num_blocks, inf)
    assert tiers.lower.host.counts.cached == num_blocks, "the host keeps them"


def test_what_goes_to_disk_is_written_after_it_came_to_the_host() -> None:
    settings = TierSettings(host=TierPlan(num_blocks=17), disk=TierPlan(num_blocks=50))
    worker = SimulatedWorker(Rank("a"), EngineSettings(num_blocks=POOL_BLOCKS, tiers=settings))
    _events(worker, 0, [1] * 1088)
    _submit(worker, 1, [2] * 2560)
    worker.begin(1.0)
    assert worker.tiers is not None
    block_gb = 64 * EngineSettings().kv_bytes_per_token / 1e9
    # A quarter of the full host is written, so that something can leave it.
    assert worker.tiers.next_at == pytest.approx(1.0 + 17 * block_gb / 52.0 + 4 * block_gb / 5.0)
    assert worker.end_tiers(worker.tiers.next_at)
    assert worker.tiers.lower.disk.totals.num_stored == 4


def test_reports_count_what_is_left_to_compute_once_the_rest_is_loaded() -> None:
    worker = SimulatedWorker(Rank("a"), EngineSettings(num_blocks=POOL_BLOCKS, tiers=HOST))
    _events(worker, 0, [1] * 1088)
    _events(worker, 1, [2] * 2560)
    _submit(worker, 2, [1] * 1088)
    assert worker.state().num_unbegun_tokens == 1088
    worker.begin(2.0)
    assert worker.state().num_unbegun_tokens == 0, "as at engines"
    assert worker.tiers is not None
    now = worker.tiers.next_at
    assert worker.end_tiers(now)
    assert worker.state().num_unbegun_tokens == 64
    worker.begin(now)
    assert worker.state().num_unbegun_tokens == 0


@pytest.mark.parametrize("host_gb_per_s", [0.05, 1.0, 52.0])
@pytest.mark.parametrize("disk_gb_per_s", [0.05, 1.0, 52.0])
def test_it_chooses_as_engines_do(host_gb_per_s: float, disk_gb_per_s: float) -> None:
    plan, size_bytes = TierPlan(num_blocks=4), 1 << 20
    step_time = StepTime(prefill_base_s=0.0001, prefill_s_per_token=0.0005)
    tiers = TierSettings(host=plan, disk=plan, host_gb_per_s=host_gb_per_s, disk_gb_per_s=disk_gb_per_s)
    simulated = SimulatedTiers(tiers, size_bytes, step_time, 64)
    gb_per_s = {Tier.HOST: host_gb_per_s, Tier.DISK: disk_gb_per_s}
    speeds = {tier: Speed(size_bytes / speed / 1e9) for tier, speed in gb_per_s.items()}
    slots = PlainHostBlocks(PoolMemory(4, 64), 4, num_blocks=4)
    real = Tiering(LowerTiers(plan, plan), slots, None, lambda _message: None, speeds=speeds)
    real.forecast_by(lambda: step_time, 64)
    for where in ("HHHH", "HHDD", "DDHH", "HDHD", "DDDD"):
        ours, theirs = _found(where), _found(where)
        simulated.choose(ours)
        real.choose(theirs)
        assert len(ours.blocks_below) == len(theirs.blocks_below), where
    real.close()


def _prompt(arrival_s: float, num_tokens: int, first_id: int) -> TraceRequest:
    ids = tuple(range(first_id, first_id + -(-num_tokens // BLOCK_SIZE)))
    return TraceRequest(arrival_s=arrival_s, num_input_tokens=num_tokens, num_output_tokens=1, hash_ids=ids)


def _found(where: str) -> Sequence:
    """A sequence that finds a block on the host for each H, one on disk for each D."""
    name = BlockName(bytes(32), bytes(32), 0, None)
    seq = Sequence(range(20), block_size=4)
    seq.blocks_below = [TierBlock(name, Tier.HOST if tier == "H" else Tier.DISK, 0, num_readers=1) for tier in where]
    return seq


def _events(worker: SimulatedWorker, number: int, token_ids: list[int]) -> list[KvEvent]:
    """Those of a request for one token, from its arrival to its end."""
    _submit(worker, number, token_ids)
    worker.begin(float(number))
    progress = worker.advance(worker.next_at)
    assert progress is not None
    assert len(progress.finished) == 1
    return list(worker.take_events())


def _submit(worker: SimulatedWorker, number: int, token_ids: list[int]) -> None:
    sampling = Sampling(max_tokens=1, ignore_eos=True)
    generation = Generation(prompt_token_ids=token_ids, sampling=sampling)
    request = EngineRequest(id=number, kind=RequestKind.DECODE, generation=generation)
    worker.submit(request, Sequence(token_ids, block_size=64), float(number))

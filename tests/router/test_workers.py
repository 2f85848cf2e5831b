"""What the router concludes from discovery, connections and load reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quartet.api.fleet import WorkerState
from quartet.discovery.base import Rank, Role, WorkerKey, WorkerRecord
from quartet.errors import ModelNotFoundError, ModelUnavailableError, PlacementBudgetError, WorkerUnavailableError
from quartet.events.load import PlacementProgress
from quartet.events.publisher import HEARTBEAT_INTERVAL_S
from router import fleet
from router.book import numbering
from router.config import RouterConfig
from router.policy.base import Pending, Placement
from router.readiness import model_error
from router.untaken import Capacity, UntakenBudgets
from router.workers import PoolKey, WorkerTable
from tests.router.records import make_load, make_record

_TIMEOUT_S = 30.0
_POOL = PoolKey("tiny", "ab" * 32)


class Scene:
    """A table and a clock."""

    def __init__(self, **settings: object) -> None:
        self.table = WorkerTable("router-a", heartbeat_timeout_s=_TIMEOUT_S, **settings)
        self.now = 1000.0

    def join(self, *records: WorkerRecord) -> None:
        for record in records:
            self.table.put(record, self.now)
            self.table.connected(record.key, make_load(record), self.now)

    def state(self, worker_id: str = "decode-0") -> WorkerState:
        return {status.record.worker_id: status.state for status in self.table.statuses(self.now)}[worker_id]

    def ranks(self, pool: PoolKey) -> tuple[set[Rank], set[Rank]]:
        snapshot = self.table.snapshot(pool, self.now)
        return {c.rank for c in snapshot.prefill}, {c.rank for c in snapshot.decode}

    def candidate(self, record: WorkerRecord):
        snapshot = self.table.snapshot(PoolKey(record.model_name, record.model_fingerprint), self.now)
        [found] = [c for c in [*snapshot.prefill, *snapshot.decode] if c.rank.worker_id == record.worker_id]
        return found


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_worker_takes_requests_once_it_has_answered(scene: Scene) -> None:
    record = make_record()
    assert scene.table.put(record, scene.now)
    assert scene.state() is WorkerState.JOINING
    scene.table.report(make_load(record), scene.now)
    assert scene.state() is WorkerState.JOINING
    scene.table.connected(record.key, make_load(record), scene.now)
    assert scene.state() is WorkerState.READY


def test_a_broken_stream_makes_a_worker_suspect_until_it_answers_again(scene: Scene) -> None:
    record = make_record()
    scene.join(record)
    scene.table.broken(record.key, record.epoch)
    scene.table.report(make_load(record), scene.now)
    assert scene.state() is WorkerState.SUSPECT
    assert [r.worker_id for r in scene.table.to_probe(scene.now)] == ["decode-0"]
    scene.table.connected(record.key, make_load(record), scene.now)
    assert scene.state() is WorkerState.READY
    assert scene.table.to_probe(scene.now) == []


def test_a_lost_connection_makes_a_worker_suspect_until_its_next_report(scene: Scene) -> None:
    record = make_record()
    scene.join(record)
    scene.table.cut(record.key, record.epoch, scene.now)
    scene.table.report(make_load(record), scene.now + 0.1)  # sent before it died, perhaps
    assert scene.state() is WorkerState.SUSPECT
    assert scene.table.to_probe(scene.now) == [record]
    scene.table.unlist(record.key)
    assert scene.table.forget_gone(scene.now) == []
    scene.now += 1
    scene.table.report(make_load(record), scene.now)
    assert scene.state() is WorkerState.READY
    scene.table.cut(record.key, record.epoch + 1, scene.now)
    assert scene.state() is WorkerState.READY
    scene.table.cut(record.key, record.epoch, scene.now)
    scene.table.connected(record.key, make_load(record), scene.now)
    assert scene.state() is WorkerState.READY


def test_only_a_ready_epoch_of_a_decode_worker_can_be_placed_on(scene: Scene) -> None:
    record = make_record()
    scene.join(record)
    rank = Rank("decode-0", 0)
    assert scene.table.ready_decode(rank, record.epoch, scene.now) == record
    for epoch, other in ((record.epoch + 1, rank), (record.epoch, Rank("decode-1", 0))):
        with pytest.raises(WorkerUnavailableError):
            scene.table.ready_decode(other, epoch, scene.now)
    scene.table.broken(record.key, record.epoch)
    with pytest.raises(WorkerUnavailableError):
        scene.table.ready_decode(rank, record.epoch, scene.now)


def test_a_placement_lapses_as_time_goes_by(scene: Scene) -> None:
    record = make_record()
    scene.join(record)
    pending = Pending(num_tokens=50, num_reserved_tokens=100, num_most_tokens=100)
    reservation = scene.table.reserve(Placement(None, Rank("decode-0", 0)), pending)
    placed = reservation.decode.commit(
        "ab" * 16, 0, num_first_tokens=50, lapses_at=scene.now + 5, ends_at=scene.now + 60
    )
    reservation.release()
    assert (scene.candidate(record).num_promised_blocks, scene.candidate(record).num_queued_tokens) == (5, 50)
    name = numbering("router-a", record.epoch)
    progress = PlacementProgress(started=(placed.number,))
    scene.table.report(make_load(record, placements={name: progress}), scene.now)
    assert (scene.candidate(record).num_promised_blocks, scene.candidate(record).num_queued_tokens) == (5, 0)
    changes = []
    scene.table.listen(lambda: changes.append(scene.candidate(record).num_promised_blocks))
    assert scene.table.placed_at("ab" * 16, 0) == {"decode-0"}
    assert scene.table.placed_at("ab" * 16, 1) == scene.table.placed_at("cd" * 16, 0) == set()
    scene.table.tick(scene.now + 60)
    assert changes == [0]
    assert scene.table.placed_at("ab" * 16, 0) == set()


def test_tokens_that_are_not_expected_in_the_cache_are_booked_as_queued(scene: Scene) -> None:
    record = make_record()
    scene.join(record)
    rank = Rank("decode-0", 0)
    pending = Pending(num_tokens=50, num_reserved_tokens=100, num_most_tokens=100, num_cached_tokens={rank: 40})
    scene.table.reserve(Placement(None, rank, num_cached_tokens=10), pending).decode.send()
    assert scene.candidate(record).num_queued_tokens == 40


def test_silence_makes_a_worker_suspect_and_a_report_ends_it(scene: Scene) -> None:
    record = make_record()
    scene.join(record)
    scene.now += _TIMEOUT_S
    assert scene.state() is WorkerState.READY
    scene.now += 0.1
    assert scene.state() is WorkerState.SUSPECT
    scene.table.report(make_load(record), scene.now)
    assert scene.state() is WorkerState.READY


def test_a_worker_whose_record_vanished_stays_in_use_while_its_heartbeats_come(scene: Scene) -> None:
    record = make_record()
    scene.join(record)
    scene.table.unlist(record.key)
    for _ in range(10):
        scene.now += 20
        scene.table.report(make_load(record), scene.now)
        assert scene.table.forget_gone(scene.now) == []
        assert scene.state() is WorkerState.READY


def test_a_worker_that_falls_silent_and_then_reports_that_it_is_unhealthy_takes_nothing(scene: Scene) -> None:
    record = make_record("decode-0")
    scene.join(record)
    pool = scene.table.pools(scene.now)[0].key
    scene.table.tick(scene.now)
    assert scene.table.has_ready_decode(pool, scene.now)
    scene.now += _TIMEOUT_S + 1
    for _ in range(3):  # it is suspect from its silence on, with no tick in between
        scene.table.report(make_load(record, is_healthy=False), scene.now)
        assert scene.state() is WorkerState.SUSPECT
        assert not scene.table.has_ready_decode(pool, scene.now)
        assert not scene.table.snapshot(pool, scene.now).decode
        scene.table.tick(scene.now)


def test_a_vanished_and_silent_worker_is_forgotten(scene: Scene) -> None:
    record = make_record()
    scene.join(record)
    scene.table.unlist(record.key)
    scene.now += _TIMEOUT_S + 1
    assert scene.table.forget_gone(scene.now) == [record]
    assert scene.table.statuses(scene.now) == []


def test_a_vanished_worker_whose_stream_broke_is_forgotten_at_once(scene: Scene) -> None:
    record = make_record()
    scene.join(record)
    scene.table.broken(record.key, record.epoch)
    assert scene.table.forget_gone(scene.now) == []
    scene.table.unlist(record.key)
    assert scene.table.forget_gone(scene.now) == [record]


def test_a_worker_that_vanished_or_fell_silent_is_probed(scene: Scene) -> None:
    records = [make_record(f"decode-{i}") for i in range(3)]
    scene.join(*records)
    assert scene.table.to_probe(scene.now) == []
    scene.table.unlist(records[0].key)
    assert scene.table.to_probe(scene.now) == records[:1]
    scene.now += _TIMEOUT_S / 2 + 1
    scene.table.report(make_load(records[1]), scene.now)
    assert scene.table.to_probe(scene.now) == [records[0], records[2]]


def test_a_record_that_comes_back_is_the_same_worker(scene: Scene) -> None:
    record = make_record()
    scene.join(record)
    scene.table.unlist(record.key)
    assert not scene.table.put(record, scene.now)
    scene.now += _TIMEOUT_S + 1
    assert scene.table.forget_gone(scene.now) == []


def test_draining_and_unhealthy_workers_get_no_requests(scene: Scene) -> None:
    record = make_record()
    scene.join(record)
    pool = PoolKey("tiny", record.model_fingerprint)
    scene.table.report(make_load(record, is_draining=True), scene.now)
    assert scene.state() is WorkerState.DRAINING
    assert scene.ranks(pool) == (set(), set())
    scene.table.report(make_load(record, is_healthy=False), scene.now)
    assert scene.state() is WorkerState.SUSPECT
    scene.table.report(make_load(record), scene.now)
    assert scene.ranks(pool) == (set(), {Rank("decode-0")})


def test_a_new_epoch_replaces_the_worker_and_its_bookings(scene: Scene) -> None:
    old, new = make_record(epoch=1), make_record(epoch=2)
    scene.join(old)
    reservation = scene.table.reserve(Placement(None, Rank("decode-0")), _pending(100))
    assert scene.table.put(new, scene.now)
    assert scene.state() is WorkerState.JOINING
    # Reports of the old epoch change nothing.
    scene.table.report(make_load(old, num_in_use_blocks=90), scene.now)
    scene.table.connected(old.key, make_load(old), scene.now)
    scene.table.broken(old.key, old.epoch)
    assert scene.state() is WorkerState.JOINING
    scene.table.connected(new.key, make_load(new), scene.now)
    assert scene.candidate(new).num_free_for_booking == 100
    reservation.release()
    assert scene.candidate(new).num_promised_blocks == 0


def test_a_start_placed_at_an_old_epoch_is_not_counted_by_the_new_one(scene: Scene) -> None:
    old, new = make_record(epoch=10), make_record(epoch=11)
    scene.join(old)
    scene.join(new)
    reservation = scene.table.reserve(Placement(None, Rank("decode-0")), _pending(100))
    reservation.decode.send()
    # A start placed at the old epoch reached the new one, which counts it under its old number.
    scene.table.report(make_load(new, router_progress={numbering("router-a", 10): 1000}), scene.now)
    assert scene.candidate(new).num_queued_tokens == 100
    scene.table.report(make_load(new, router_progress={numbering("router-a", 11): 1}), scene.now)
    assert scene.candidate(new).num_queued_tokens == 0


@pytest.mark.parametrize("end", ["restarted", "has another role", "is forgotten"])
async def test_what_was_placed_at_a_worker_that_is_gone_no_longer_counts_as_untaken(scene: Scene, end: str) -> None:
    record = make_record()
    scene.join(record)
    budgets = UntakenBudgets[str](
        lambda _pool: Capacity(1000, 2), share=0.5, max_waiting=0, timeout_s=_TIMEOUT_S, clock=lambda: scene.now
    )
    [untaken] = await budgets.hold("tenant", "pool", 1, 10)
    reservation = scene.table.reserve(Placement(None, Rank("decode-0")), _pending(100))
    reservation.decode.commit(
        "ab" * 16, 0, num_first_tokens=101, lapses_at=scene.now + 25, ends_at=scene.now + 600, untaken=untaken
    )
    reservation.release()
    untaken.drop()  # the call of Place has ended
    with pytest.raises(PlacementBudgetError):
        await budgets.hold("tenant", "pool", 1, 10)
    if end == "restarted":
        scene.join(replace(record, epoch=record.epoch + 1))
    elif end == "has another role":
        scene.join(replace(record, role=Role.PREFILL))
    else:
        scene.table.broken(record.key, record.epoch)
        scene.table.unlist(record.key)
        assert scene.table.forget_gone(scene.now) == [record]
    await budgets.hold("tenant", "pool", 1, 10)


def test_pools_of_one_name_are_never_mixed(scene: Scene) -> None:
    old = [make_record(f"decode-{i}", model_fingerprint="aa" * 32) for i in range(2)]
    new = [make_record("prefill-9", model_fingerprint="bb" * 32), make_record("decode-9", model_fingerprint="bb" * 32)]
    scene.join(*old, *new)
    assert scene.ranks(PoolKey("tiny", "aa" * 32)) == (set(), {Rank("decode-0"), Rank("decode-1")})
    assert scene.ranks(PoolKey("tiny", "bb" * 32)) == ({Rank("prefill-9")}, {Rank("decode-9")})


def test_among_pools_of_one_name_the_one_with_more_ready_decode_workers_serves(scene: Scene) -> None:
    old = [make_record(f"decode-{i}", model_fingerprint="bb" * 32) for i in range(2)]
    scene.join(*old, make_record("decode-9", model_fingerprint="aa" * 32))
    assert scene.table.pool("tiny", scene.now).key.fingerprint == "bb" * 32
    for record in old:
        scene.table.broken(record.key, record.epoch)
    assert scene.table.pool("tiny", scene.now).key.fingerprint == "aa" * 32


def test_an_empty_name_means_the_only_model(scene: Scene) -> None:
    assert scene.table.pool("", scene.now) is None
    scene.join(make_record())
    assert scene.table.pool("", scene.now).key.model_name == "tiny"
    scene.join(make_record("decode-1", model_name="other"))
    assert scene.table.pool("", scene.now) is None
    assert scene.table.pool("other", scene.now).key.model_name == "other"


def test_an_id_names_one_worker_whatever_its_role(scene: Scene) -> None:
    decode, prefill = make_record("both", role=Role.DECODE, epoch=1), make_record("both", role=Role.PREFILL, epoch=2)
    scene.join(decode, prefill)
    scene.table.report(make_load(decode, num_held_blocks=9), scene.now)
    scene.table.report(make_load(prefill, num_held_blocks=5), scene.now)
    [status] = scene.table.statuses(scene.now)
    assert (status.record, status.load.ranks[0].num_held_blocks) == (prefill, 5)
    assert scene.ranks(PoolKey("tiny", "ab" * 32)) == ({Rank("both")}, set())
    scene.table.unlist(decode.key)
    assert scene.state("both") is WorkerState.READY


def test_within_an_epoch_only_addresses_change(scene: Scene) -> None:
    record = make_record()
    scene.join(record)
    moved = make_record(grpc_address="10.0.0.1:5", events_address="tcp://10.0.0.1:6", http_address="10.0.0.1:7")
    for changed in (moved, replace(moved, data_parallel_size=1000, num_blocks=1, block_size=7, model_name="other")):
        assert not scene.table.put(changed, scene.now)
        assert scene.table.record(record.key) == moved
        assert [candidate.rank for candidate in scene.table.snapshot(_POOL, scene.now).decode] == [Rank("decode-0")]


def test_a_worker_of_another_contract_version_is_only_listed(scene: Scene) -> None:
    newer = make_record("decode-1", contract_version="quartet.v2", max_model_len=1)
    scene.join(newer)
    assert scene.state("decode-1") is WorkerState.INCOMPATIBLE
    assert scene.table.pools(scene.now) == []
    scene.join(make_record())
    assert scene.ranks(_POOL) == (set(), {Rank("decode-0")})
    assert scene.table.pool("tiny", scene.now).max_model_len == 2000, "what it can do counts for nothing"
    scene.now += 2 * _TIMEOUT_S
    assert [record.worker_id for record in scene.table.to_probe(scene.now)] == ["decode-0"]
    scene.table.unlist(newer.key)
    assert scene.table.forget_gone(scene.now) == [newer]


def test_a_router_that_speaks_two_versions_uses_workers_of_both() -> None:
    scene = Scene(versions=frozenset({"quartet.v1", "quartet.v2"}))
    scene.join(make_record("decode-0"), make_record("decode-1", contract_version="quartet.v2"))
    scene.join(make_record("decode-2", contract_version="quartet.v3"), make_record("decode-3", contract_version=""))
    assert scene.ranks(_POOL) == (set(), {Rank("decode-0"), Rank("decode-1")})


def test_reports_of_strangers_are_ignored(scene: Scene) -> None:
    scene.table.report(make_load(make_record("decode-7")), scene.now)
    scene.table.unlist(WorkerKey(role=Role.DECODE, worker_id="decode-7"))
    assert scene.table.statuses(scene.now) == []


def test_listeners_are_notified_of_changes_until_they_stop(scene: Scene) -> None:
    heard: list[str] = []
    stop = scene.table.listen(lambda: heard.append("change"))
    scene.join(make_record())
    num_heard = len(heard)
    assert num_heard >= 2
    stop()
    scene.table.tick(scene.now)
    assert len(heard) == num_heard


def test_a_status_names_load_age_and_requests(scene: Scene) -> None:
    record = make_record()
    scene.join(record)
    scene.now += 2
    reservation = scene.table.reserve(Placement(None, Rank("decode-0")), _pending(100))
    [status] = scene.table.statuses(scene.now)
    assert (status.load_age_s, status.num_requests) == (2, 1)
    reservation.release()
    assert scene.table.statuses(scene.now)[0].num_requests == 0


def _pending(num_tokens: int) -> Pending:
    return Pending(num_tokens=num_tokens, num_reserved_tokens=num_tokens + 50, num_most_tokens=num_tokens + 50)


def test_by_default_a_silent_worker_takes_nothing_more_within_ten_seconds(scene: Scene) -> None:
    """As ``Fleet.tend`` does it: two ticks a second, and probes that nobody answers."""
    table, record = WorkerTable("router-a", heartbeat_timeout_s=RouterConfig().heartbeat_timeout_s), make_record()
    scene.table = table
    scene.join(record)
    pool, silent_since, probed_at = PoolKey(record.model_name, record.model_fingerprint), scene.now, None
    while table.snapshot(pool, scene.now).decode:
        scene.now += fleet._TICK_S
        if probed_at is None and table.to_probe(scene.now):
            probed_at = scene.now
        elif probed_at is not None and scene.now >= probed_at + fleet._PROBE_TIMEOUT_S:
            table.broken(record.key, record.epoch)
        table.tick(scene.now)
        assert scene.now - silent_since <= 9.0
    assert scene.now - silent_since > 3 * HEARTBEAT_INTERVAL_S, "a heartbeat or two may be lost"


def test_a_worker_whose_load_reports_do_not_arrive_is_used_as_long_as_it_answers(scene: Scene) -> None:
    record = make_record()
    scene.join(record)
    scene.now += _TIMEOUT_S / 2 + 1
    assert scene.table.to_probe(scene.now) == [record]
    scene.table.connected(record.key, make_load(record), scene.now)
    scene.now += _TIMEOUT_S / 2 + 1
    scene.table.tick(scene.now)
    assert scene.state() is WorkerState.READY
    assert not scene.table.is_silent(record.key, record.epoch, scene.now)
    scene.now += _TIMEOUT_S
    assert scene.table.is_silent(record.key, record.epoch, scene.now)
    assert not scene.table.is_silent(record.key, record.epoch + 1, scene.now)


def test_a_router_that_was_stopped_itself_takes_no_worker_for_silent(scene: Scene) -> None:
    record, joining = make_record(), make_record("decode-1")
    scene.join(record)
    scene.table.put(joining, scene.now)
    scene.now += 3600
    scene.table.was_away(3600)
    scene.table.tick(scene.now)
    assert scene.state() is WorkerState.READY
    assert not scene.table.is_silent(joining.key, joining.epoch, scene.now)
    assert [worker.worker_id for worker in scene.table.to_probe(scene.now)] == ["decode-1"]


def test_a_model_whose_workers_have_gone_may_come_back(scene: Scene) -> None:
    record, other = make_record(), make_record("decode-1", model_name="other")
    scene.join(record, other)
    scene.table.is_synchronised = True
    scene.table.unlist(record.key)
    scene.table.broken(record.key, record.epoch)
    assert scene.table.forget_gone(scene.now) == [record]
    assert isinstance(model_error(scene.table, "tiny", "model", scene.now), ModelUnavailableError)
    assert isinstance(model_error(scene.table, "none", "model", scene.now), ModelNotFoundError)
    scene.now += 3600
    assert isinstance(model_error(scene.table, "tiny", "model", scene.now), ModelNotFoundError)


def test_work_is_taken_from_a_hanging_worker_only_where_another_one_can_do_it(scene: Scene) -> None:
    record, prefill = make_record(), make_record("prefill-0")
    scene.join(record, prefill)
    scene.table.report(make_load(record, is_healthy=False), scene.now)
    assert scene.table.hanging(scene.now) == []
    scene.join(make_record("decode-1"))
    assert scene.table.hanging(scene.now) == [record]
    scene.table.report(make_load(record, is_healthy=False, is_draining=True), scene.now)
    assert scene.table.hanging(scene.now) == []

"""Load reports and KV batches on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.events.bookings import BookedStart, RouterBookings
from quartet.events.kv import Cleared, KvBatch, KvEvent, Removed, Stored, Tier
from quartet.events.load import (
    NumberedLoad,
    OnboardTime,
    PlacementProgress,
    RankLoad,
    StepTime,
    TransferTotal,
    WorkerLoad,
)
from quartet.events.wire import (
    BOOKINGS_TOPIC,
    KV_TOPIC,
    LOAD_TOPIC,
    MAX_BOOKED_STARTS,
    MAX_EVENTS,
    MAX_FRAME_BYTES,
    MAX_LOAD_BYTES,
    MAX_RANKS,
    MAX_ROUTERS,
    MAX_WAYS,
    MalformedFrameError,
    decode_bookings,
    decode_kv,
    decode_load,
    encode_bookings,
    encode_kv,
    encode_load,
    split_events,
)
from quartet.v1 import kv_events_pb2 as pb
from tests.events.loads import make_load

_counts = st.integers(0, 2**32 - 1)
_seconds = st.floats(0, 1e9)
_step_times = st.builds(
    StepTime,
    prefill_base_s=_seconds,
    prefill_s_per_token=_seconds,
    prefill_s_per_token2=_seconds,
    decode_base_s=_seconds,
    decode_s_per_context_token=_seconds,
)
_ranks = st.builds(
    RankLoad,
    num_running=_counts,
    num_waiting=_counts,
    num_queued_prefill_tokens=st.integers(0, 2**64 - 1),
    num_in_use_blocks=_counts,
    num_held_blocks=_counts,
    num_cached_blocks=_counts,
    num_free_blocks=_counts,
    num_total_blocks=_counts,
    num_steps=st.integers(0, 2**64 - 1),
    num_spare_prefill_tokens=st.integers(0, 2**64 - 1),
    num_unbegun_prefill_tokens=st.integers(0, 2**64 - 1),
    step_ends_in_s=_seconds,
    num_decoding=_counts,
    num_context_tokens=st.integers(0, 2**64 - 1),
    max_step_tokens=_counts,
    max_running=_counts,
    step_time=st.none() | _step_times,
    onboard_time=st.none() | st.builds(OnboardTime, host_s_per_token=_seconds, disk_s_per_token=_seconds),
)
_numbers = st.lists(st.integers(1, 2**64 - 1), max_size=3).map(tuple)
_ended = st.lists(st.tuples(st.integers(1, 2**64 - 1), _counts), min_size=1, max_size=3)
_placements = st.one_of(
    st.builds(lambda started, ended: PlacementProgress(started, *zip(*ended, strict=True)), _numbers, _ended),
    st.builds(PlacementProgress, _numbers, _numbers).filter(lambda progress: progress != PlacementProgress()),
)
_numbers_of_routers: st.SearchStrategy[dict[str, int]] = st.dictionaries(
    st.text(max_size=4), st.integers(0, 2**64 - 1), max_size=3
)
_loads = st.builds(
    WorkerLoad,
    worker_id=st.text(min_size=1, max_size=8),
    epoch=st.integers(0, 2**64 - 1),
    ranks=st.lists(_ranks, max_size=3).map(tuple),
    router_progress=_numbers_of_routers,
    router_arrivals=_numbers_of_routers,
    placements=st.dictionaries(st.text(max_size=4), _placements, max_size=3),
    is_draining=st.booleans(),
    is_healthy=st.booleans(),
    transfers=st.lists(
        st.builds(
            TransferTotal,
            st.sampled_from(["cuda_ipc", "staged", "shm", "nixl", "grpc"]),
            st.integers(0, 2**64 - 1),
            _seconds,
        ),
        max_size=5,
    ).map(tuple),
)
_uint64 = st.integers(0, 2**64 - 1)
_hashes = st.lists(_uint64, min_size=1, max_size=5)
_events = st.lists(
    st.one_of(
        st.builds(Stored, st.none() | _uint64, _hashes, st.sampled_from(Tier)),
        st.builds(Removed, _hashes, st.sampled_from(Tier)),
        st.builds(Cleared),
    ),
    max_size=4,
)


def make_batch(events: Sequence[KvEvent] = (Cleared(),), *, number: int = 3) -> KvBatch:
    return KvBatch(worker_id="w" * 128, epoch=2**64 - 1, number=number, data_parallel_rank=2**32 - 1, events=events)


def replayed(events: Iterable[KvEvent]) -> list[tuple[object, ...]]:
    """What the events say, block by block."""
    said: list[tuple[object, ...]] = []
    for event in events:
        if isinstance(event, Stored):
            chain = (event.parent_hash, *event.sequence_hashes)
            said += [("stored", *pair, event.tier) for pair in pairwise(chain)]
        elif isinstance(event, Removed):
            said += [("removed", named, event.tier) for named in event.sequence_hashes]
        else:
            said.append(("cleared",))
    return said


@given(events=_events, number=_uint64)
def test_every_batch_survives_the_wire(events: list[KvEvent], number: int) -> None:
    batch = make_batch(events, number=number)
    frames = encode_kv(batch)
    assert frames[:2] == [KV_TOPIC, number.to_bytes(8, "big")]
    assert decode_kv(frames) == batch


@given(sizes=st.lists(st.integers(1, 200_000), min_size=1, max_size=4), removes=st.booleans())
@settings(max_examples=8, deadline=None)
def test_however_much_changes_no_frame_is_too_long_and_nothing_is_lost(sizes: list[int], removes: bool) -> None:
    hashes = [range(2**63 + index * 10**6, 2**63 + index * 10**6 + size) for index, size in enumerate(sizes)]
    events: list[KvEvent] = [Removed(names) if removes else Stored(7, names, Tier.HOST) for names in hashes]
    batches = [make_batch(part) for part in split_events(events)]
    frames = [encode_kv(batch) for batch in batches]
    assert all(len(payload) <= MAX_FRAME_BYTES for _, _, payload in frames)
    assert replayed(event for batch in frames for event in decode_kv(batch).events) == replayed(events)
    # Half of what fits in is the least that a frame has that is not the last.
    assert len(frames) <= 2 + sum(sizes) * 8 / (MAX_FRAME_BYTES / 2)


def test_many_small_events_are_split_too() -> None:
    events = [Stored(number, [number + 1]) for number in range(2**64 - 60_000, 2**64 - 1)]
    batches = [make_batch(part) for part in split_events(events)]
    frames = [encode_kv(batch) for batch in batches]
    assert len(frames) > 1
    assert all(len(payload) <= MAX_FRAME_BYTES for _, _, payload in frames)
    assert all(len(batch.events) <= MAX_EVENTS for batch in batches)
    assert [event for batch in frames for event in decode_kv(batch).events] == events


def test_a_batch_of_so_many_events_that_it_takes_long_to_read_is_refused() -> None:
    events: list[KvEvent] = [Cleared()] * (MAX_EVENTS + 1)
    assert len(decode_kv(encode_kv(make_batch(events[1:]))).events) == MAX_EVENTS
    with pytest.raises(MalformedFrameError, match="events"):
        decode_kv(encode_kv(make_batch(events)))


@pytest.mark.parametrize(
    "load",
    [
        pb.WorkerLoad(worker_id="w" * MAX_LOAD_BYTES),
        pb.WorkerLoad(worker_id="w", ranks=[pb.RankLoad()] * (MAX_RANKS + 1)),
        pb.WorkerLoad(worker_id="w", routers=[pb.RouterProgress()] * (MAX_ROUTERS + 1)),
        pb.WorkerLoad(worker_id="w", transfers=[pb.TransferTotal()] * (MAX_WAYS + 1)),
    ],
    ids=["bytes", "ranks", "routers", "ways"],
)
def test_a_report_that_takes_long_to_read_is_refused(load: pb.WorkerLoad) -> None:
    with pytest.raises(MalformedFrameError, match="load report"):
        decode_load([LOAD_TOPIC, bytes(8), load.SerializeToString()])


def test_a_way_that_only_newer_workers_know_is_left_out() -> None:
    totals = [pb.TransferTotal(way=way, size_bytes=3, duration_s=1.0) for way in (99, 2)]  # type: ignore[arg-type]
    load = pb.WorkerLoad(worker_id="w", transfers=totals)
    [total] = decode_load([LOAD_TOPIC, bytes(8), load.SerializeToString()]).load.transfers
    assert total == TransferTotal("shm", 3, 1.0)


def test_the_speed_of_pulls_is_their_bytes_over_their_time() -> None:
    assert TransferTotal("shm", 3_000_000_000, 2.0).gb_per_s == 1.5
    assert TransferTotal("shm", 3, 0.0).gb_per_s is None


def test_a_report_of_as_many_ranks_as_may_be_is_taken() -> None:
    ranks = [pb.RankLoad(num_total_blocks=2**32 - 1, num_steps=2**63, num_context_tokens=2**63)] * MAX_RANKS
    load = pb.WorkerLoad(worker_id="w", ranks=ranks)
    assert len(decode_load([LOAD_TOPIC, bytes(8), load.SerializeToString()]).load.ranks) == MAX_RANKS


def test_a_report_names_as_many_routers_as_a_worker_remembers() -> None:
    routers = {f"{number:064x}": 2**64 - 1 for number in range(1024)}
    load = replace(make_load(), router_progress=routers, router_arrivals=routers)
    assert decode_load(encode_load(load, 1)).load == load


@pytest.mark.parametrize("num_routers", [10, MAX_ROUTERS + 1])
def test_a_report_that_would_be_refused_leaves_placements_out(num_routers: int) -> None:
    numbers = tuple(range(2**63, 2**63 + 100_000 // num_routers))
    placements = {f"r{number}": PlacementProgress(numbers, ()) for number in range(num_routers)}
    load = replace(make_load(), placements=placements)
    assert decode_load(encode_load(load, 1)).load == replace(load, placements={})


def test_a_report_that_would_still_be_refused_leaves_all_starts_out() -> None:
    load = replace(make_load(), router_progress={"x" * 300_000: 1}, router_arrivals={"x" * 300_000: 1})
    assert decode_load(encode_load(load, 1)) == NumberedLoad(replace(load, router_progress={}, router_arrivals={}), 1)


def test_a_report_of_more_routers_than_readers_take_leaves_all_starts_out() -> None:
    progress = {f"r{number}": 1 for number in range(MAX_ROUTERS)}
    load = replace(make_load(), router_progress=progress, router_arrivals={}, placements={})
    assert decode_load(encode_load(load, 1)).load == load
    more = replace(load, router_progress={**progress, "one more": 1})
    assert decode_load(encode_load(more, 1)).load == replace(load, router_progress={})


def test_few_events_are_one_batch_and_no_events_are_no_batch() -> None:
    assert list(split_events([Cleared(), Removed([1])])) == [[Cleared(), Removed([1])]]
    assert list(split_events([])) == []


@pytest.mark.parametrize(
    "event",
    [
        pb.KvEvent(),
        pb.KvEvent(stored=pb.BlocksStored(sequence_hashes=[1])),
        pb.KvEvent(stored=pb.BlocksStored(sequence_hashes=[1], tier=9)),
        pb.KvEvent(stored=pb.BlocksStored(tier=pb.TIER_DEVICE)),
        pb.KvEvent(removed=pb.BlocksRemoved(tier=pb.TIER_DEVICE)),
    ],
)
def test_a_batch_with_an_empty_event_is_refused(event: pb.KvEvent) -> None:
    payload = pb.KvEventBatch(worker_id="w", events=[event]).SerializeToString()
    with pytest.raises(MalformedFrameError):
        decode_kv([KV_TOPIC, bytes(8), payload])


@pytest.mark.parametrize(
    "frames", [[KV_TOPIC, bytes(8), b""], [KV_TOPIC, bytes(8), b"\xff"], [LOAD_TOPIC, bytes(8), b""]]
)
def test_frames_that_are_no_batch_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(MalformedFrameError):
        decode_kv(frames)


@given(load=_loads, number=st.integers(0, 2**64 - 1))
def test_every_report_survives_the_wire(load: WorkerLoad, number: int) -> None:
    frames = encode_load(load, number)
    assert frames[:2] == [LOAD_TOPIC, number.to_bytes(8, "big")]
    # A router of which anything is told has this number: 0, where nothing of its own was counted in.
    nothing = dict.fromkeys((*load.router_progress, *load.router_arrivals, *load.placements), 0)
    arrivals = {router: number for router, number in load.router_arrivals.items() if number}
    whole = replace(load, router_progress=nothing | dict(load.router_progress), router_arrivals=arrivals)
    assert decode_load(frames) == NumberedLoad(whole, number)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [LOAD_TOPIC, bytes(8)],
        [LOAD_TOPIC, bytes(7), b""],
        [LOAD_TOPIC, bytes(8), b"\xff\xff\xff"],
        [LOAD_TOPIC, bytes(8), b""],
        [b"loadx", *encode_load(make_load(), 0)[1:]],
        [*encode_load(make_load(), 0), b"more"],
    ],
)
def test_frames_of_another_shape_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(MalformedFrameError):
        decode_load(frames)


def test_cached_blocks_do_not_count_as_used() -> None:
    assert RankLoad(num_in_use_blocks=3, num_held_blocks=2, num_cached_blocks=50).num_used_blocks == 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_negative_or_infinite_time_is_refused(bad: float) -> None:
    ranks = (
        RankLoad(num_total_blocks=1, step_ends_in_s=bad),
        RankLoad(num_total_blocks=1, step_time=StepTime(decode_base_s=bad)),
        RankLoad(num_total_blocks=1, onboard_time=OnboardTime(disk_s_per_token=bad)),
    )
    loads = [WorkerLoad(worker_id="decode-0", epoch=7, ranks=(rank,)) for rank in ranks]
    for load in (*loads, replace(make_load(), transfers=(TransferTotal("shm", 1, bad),))):
        frames = encode_load(load, 0)
        with pytest.raises(MalformedFrameError, match="seconds"):
            decode_load(frames)


_STARTS = [BookedStart("decode-0", 2**64 - 1, 3, 2**40, 100_000, 2**20), BookedStart("decode-1", 1, 0, 1, 0, 0)]


def test_bookings_survive_their_frames() -> None:
    bookings = RouterBookings("router-a", _STARTS)
    frames = encode_bookings(bookings, 7)
    assert frames[0] == BOOKINGS_TOPIC
    assert decode_bookings(frames) == bookings


def test_the_longest_bookings_are_read_and_longer_ones_are_refused() -> None:
    longest = replace(_STARTS[0], worker_id="w" * 64)
    assert len(decode_bookings(encode_bookings(RouterBookings("r", [longest] * MAX_BOOKED_STARTS), 1)).starts) > 1
    for starts in (
        [],
        [longest] * (MAX_BOOKED_STARTS + 1),
        [replace(longest, worker_id="w" * 300)] * MAX_BOOKED_STARTS,
    ):
        with pytest.raises(MalformedFrameError):
            decode_bookings(encode_bookings(RouterBookings("r", starts), 1))
    with pytest.raises(MalformedFrameError):
        decode_bookings(encode_bookings(RouterBookings("", _STARTS), 1))

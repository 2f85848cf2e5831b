"""Load reports on the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.events.load import PlacementProgress, RankLoad, WorkerLoad
from quartet.events.wire import LOAD_TOPIC, MalformedFrameError, decode_load, encode_load
from tests.events.loads import make_load

_counts = st.integers(0, 2**32 - 1)
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
)
_numbers = st.lists(st.integers(1, 2**64 - 1), max_size=3).map(tuple)
_placements = st.builds(PlacementProgress, _numbers, _numbers).filter(lambda progress: progress != PlacementProgress())
_loads = st.builds(
    WorkerLoad,
    worker_id=st.text(min_size=1, max_size=8),
    epoch=st.integers(0, 2**64 - 1),
    ranks=st.lists(_ranks, max_size=3).map(tuple),
    router_progress=st.dictionaries(st.text(max_size=4), st.integers(0, 2**64 - 1), max_size=3),
    placements=st.dictionaries(st.text(max_size=4), _placements, max_size=3),
    is_draining=st.booleans(),
    is_healthy=st.booleans(),
)


@given(load=_loads, number=st.integers(0, 2**64 - 1))
def test_every_report_survives_the_wire(load: WorkerLoad, number: int) -> None:
    frames = encode_load(load, number)
    assert frames[:2] == [LOAD_TOPIC, number.to_bytes(8, "big")]
    # A router with placements has a number too: 0, where nothing of its own was counted in.
    router_progress = dict.fromkeys(load.placements, 0) | dict(load.router_progress)
    assert decode_load(frames) == replace(load, router_progress=router_progress)


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


def test_what_is_only_cached_is_not_used() -> None:
    assert RankLoad(num_in_use_blocks=3, num_held_blocks=2, num_cached_blocks=50).num_used_blocks == 5

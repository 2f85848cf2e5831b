"""What every generated trace is, whatever it is generated from."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.traces.format import BLOCK_SIZE, TraceRequest
from cli.traces.generate import ArrivalKind, Arrivals, SessionConfig, TraceConfig, Turn, generate
from quartet.errors import ConfigError

MAX_INPUT = 20_000

configs = st.builds(
    TraceConfig,
    arrivals=st.builds(
        Arrivals,
        kind=st.sampled_from(ArrivalKind),
        rate=st.floats(0.01, 1e4),
        burst_size=st.integers(1, 20),
        burst_spread_s=st.floats(0, 10),
    ),
    sessions=st.builds(
        SessionConfig,
        num_turns=st.floats(1, 20),
        think_time_s=st.floats(0, 100),
        think_time_sigma=st.floats(0, 3),
        message_tokens=st.floats(1, 5000),
        output_tokens=st.floats(1, 5000),
        system_tokens=st.floats(0, 5000),
        num_system_prompts=st.integers(1, 8),
        zipf=st.floats(0, 3),
        length_sigma=st.floats(0, 2),
        max_input_tokens=st.just(MAX_INPUT),
    ),
    max_requests=st.integers(1, 80),
    seed=st.integers(0, 2**32),
)


def trace(
    num_requests: int, *, seed: int = 0, arrivals: Arrivals | None = None, **sessions: float
) -> list[TraceRequest]:
    config = TraceConfig(
        arrivals=arrivals or Arrivals(),
        sessions=SessionConfig(**sessions),  # type: ignore[arg-type]
        max_requests=num_requests,
        seed=seed,
    )
    return list(generate(config))


def num_common(one: TraceRequest, two: TraceRequest) -> int:
    """Blocks with which both begin."""
    for index, (left, right) in enumerate(zip(one.hash_ids, two.hash_ids, strict=False)):
        if left != right:
            return index
    return min(len(one.hash_ids), len(two.hash_ids))


@given(config=configs)
def test_times_rise_lengths_and_ids_agree_and_the_seed_decides_all(config: TraceConfig) -> None:
    requests = list(generate(config))
    assert len(requests) == config.max_requests
    assert requests[0].arrival_s == 0
    assert all(one.arrival_s <= two.arrival_s for one, two in pairwise(requests))
    for request in requests:
        assert 1 <= request.num_input_tokens <= MAX_INPUT
        assert request.num_output_tokens >= 1
        assert len(request.hash_ids) == -(-request.num_input_tokens // BLOCK_SIZE)
        assert len(set(request.hash_ids)) == len(request.hash_ids)
    assert list(generate(config)) == requests


@given(config=configs)
def test_a_block_has_one_position_after_one_other_and_ids_count_as_they_come_up(config: TraceConfig) -> None:
    before: dict[int, int | None] = {}
    positions: dict[int, int] = {}
    for request in generate(config):
        last = None
        for position, hash_id in enumerate(request.hash_ids):
            assert before.setdefault(hash_id, last) == last
            assert positions.setdefault(hash_id, position) == position
            last = hash_id
    assert list(before) == list(range(len(before)))


def test_another_seed_is_another_trace() -> None:
    assert trace(20, seed=1) != trace(20, seed=2)


def test_sessions_that_never_end_extend_the_last_prompt_by_answer_and_message() -> None:
    # One session, as it is always ready.
    requests = trace(
        10, num_turns=1e12, think_time_s=0, length_sigma=0, system_tokens=1000, message_tokens=300, output_tokens=100
    )
    assert [request.num_input_tokens for request in requests] == [1300 + 400 * turn for turn in range(10)]
    for one, two in pairwise(requests):
        assert num_common(one, two) == one.num_input_tokens // BLOCK_SIZE


def test_sessions_of_one_turn_share_full_blocks_of_the_system_prompt_and_nothing_else() -> None:
    requests = trace(20, num_turns=1, num_system_prompts=1, length_sigma=0, system_tokens=1500, message_tokens=2000)
    assert {num_common(one, two) for one, two in pairwise(requests)} == {1500 // BLOCK_SIZE}
    assert trace(3, num_turns=1, num_system_prompts=1, system_tokens=0, length_sigma=0)[1].hash_ids[0] > 0


def test_system_prompts_are_drawn_by_zipf() -> None:
    counts = Counter(
        request.hash_ids[0]
        for request in trace(6000, num_turns=1, num_system_prompts=3, zipf=1, length_sigma=0, system_tokens=600)
    )
    # 1, 1/2 and 1/3 of 11/6.
    shares = [count / 6000 for _, count in counts.most_common()]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.03)


def test_lengths_have_the_means_that_were_asked_for() -> None:
    requests = trace(10_000, num_turns=1, system_tokens=0, message_tokens=400, output_tokens=150, length_sigma=0.8)
    assert mean(request.num_input_tokens for request in requests) == pytest.approx(400, rel=0.03)
    assert mean(request.num_output_tokens for request in requests) == pytest.approx(150, rel=0.03)


@pytest.mark.parametrize("kind", list(ArrivalKind))
def test_requests_come_at_the_rate(kind: ArrivalKind) -> None:
    arrivals = Arrivals(kind=kind, rate=5, burst_size=8, burst_spread_s=0.5)
    requests = list(generate(TraceConfig(arrivals=arrivals, duration_s=1600)))
    assert requests[-1].arrival_s < 1600
    assert len(requests) == pytest.approx(8000, rel=0.1)


def test_requests_of_a_burst_come_at_once_and_poisson_ones_do_not() -> None:
    def share_of_short_gaps(kind: ArrivalKind) -> float:
        arrivals = Arrivals(kind=kind, rate=1, burst_size=20, burst_spread_s=0.1)
        times = [request.arrival_s for request in trace(4000, arrivals=arrivals)]
        return mean(two - one <= 0.1 for one, two in pairwise(times))

    assert share_of_short_gaps(ArrivalKind.BURSTS) > 0.9
    assert share_of_short_gaps(ArrivalKind.POISSON) < 0.15


def test_sessions_have_as_many_turns_as_asked_for() -> None:
    # A first turn begins with a system prompt of no full block, so its first block is new.
    requests = trace(9000, num_turns=3, think_time_s=1, system_tokens=0, message_tokens=600, length_sigma=0)
    num_sessions = len({request.hash_ids[0] for request in requests})
    assert len(requests) / num_sessions == pytest.approx(3, rel=0.05)


def test_a_prompt_has_blocks_of_its_system_prompt_its_session_and_its_end() -> None:
    turn = Turn(session=7, number=2, system=3, num_system_tokens=1030, num_input_tokens=2100, num_output_tokens=1)
    shared = [("system", 3, 0), ("system", 3, 1)]
    assert turn.block_keys() == [*shared, ("session", 7, 2), ("session", 7, 3), ("end", 7, 2)]
    assert replace(turn, num_input_tokens=2048).block_keys() == [*shared, ("session", 7, 2), ("session", 7, 3)]


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (Arrivals, "rate", 0.0),
        (Arrivals, "rate", float("nan")),
        (Arrivals, "burst_size", 0),
        (Arrivals, "burst_spread_s", -1.0),
        (SessionConfig, "num_turns", 0.5),
        (SessionConfig, "think_time_s", float("inf")),
        (SessionConfig, "message_tokens", 0.0),
        (SessionConfig, "output_tokens", 1e10),
        (SessionConfig, "system_tokens", -1.0),
        (SessionConfig, "num_system_prompts", 0),
        (SessionConfig, "zipf", -1.0),
        (SessionConfig, "length_sigma", 5.0),
        (SessionConfig, "max_input_tokens", 1),
        (TraceConfig, "max_requests", 0),
        (TraceConfig, "max_requests", None),
        (TraceConfig, "duration_s", 0.0),
        (TraceConfig, "duration_s", 1e9),
    ],
)
def test_impossible_settings_are_refused_by_name(kind: type, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        kind(**{field: value})


def test_a_seed_is_not_negative() -> None:
    with pytest.raises(ConfigError, match=r"^seed: "):
        TraceConfig(max_requests=1, seed=-1)


def test_pauses_of_a_session_are_lognormal_with_a_sigma() -> None:
    # So many arrive that a session never waits long for its turn once it is ready.
    made = trace(20_000, arrivals=Arrivals(rate=200), num_turns=20, think_time_s=10, think_time_sigma=1.5)
    last: dict[str, float] = {}
    pauses = list[float]()
    for request in made:
        if request.session in last:
            pauses.append(request.arrival_s - last[request.session])
        last[request.session] = request.arrival_s
    logarithms = [math.log(pause) for pause in pauses if pause > 0]
    assert stdev(logarithms) == pytest.approx(1.5, rel=0.15)
    assert median(pauses) == pytest.approx(10 * math.exp(-(1.5**2) / 2), rel=0.15)


def test_turns_of_one_session_extend_each_other() -> None:
    turns: dict[str, list[TraceRequest]] = {}
    for request in trace(500, num_turns=5, think_time_s=1):
        turns.setdefault(request.session, []).append(request)
    assert max(map(len, turns.values())) > 5
    for requests in turns.values():
        for one, two in pairwise(requests):
            assert num_common(one, two) >= one.num_input_tokens // BLOCK_SIZE

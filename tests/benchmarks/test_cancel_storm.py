"""A storm of cancels: what the traces of workers say of one request."""

from __future__ import annotations

import pytest

from benchmarks.cancel_storm import Cancelled, History, Phase, Way, gather_histories
from benchmarks.chaos_client import Ask
from benchmarks.traced_worker import Traced, media_key
from quartet.client import MediaFile, MediaKind, RequestPath

PROMPT = 100
PICTURE = MediaFile(MediaKind.IMAGE, b"picture")


def traced(worker: str, what: str, began_at: float, ended_at: float = 0.0, count: int = 0, key: str = "5") -> Traced:
    ended_at = ended_at or began_at
    return Traced(worker=worker, what=what, began_at=began_at, ended_at=ended_at, num_tokens={key: count, "6": 1})


def history_of(*traces: Traced) -> History:
    ask = Ask(token_ids=(1,) * PROMPT, media=(PICTURE,), num_tokens=10, seed=5)
    cancelled = Cancelled(ask=ask, path=RequestPath.GENERATE, way=Way.DROP, at=0.0)
    return gather_histories(traces, [cancelled])["5"]


WHOLE = (
    traced("prefill-2", "submit", 3.0),
    traced("prefill-2", "step", 4.0, 5.0, 60),
    traced("prefill-2", "step", 5.0, 6.0, 40),
    traced("decode-3", "submit", 7.0),
    traced("decode-3", "step", 8.0, 9.0, 1),
    traced("decode-3", "step", 9.0, 10.0, 1),
)


@pytest.mark.parametrize(
    ("at", "phase"),
    [
        (0.5, Phase.QUEUE),
        (3.5, Phase.QUEUE),
        (4.0, Phase.PREFILL),
        (5.5, Phase.PREFILL),
        (6.0, Phase.TRANSFER),
        (7.9, Phase.TRANSFER),
        (8.0, Phase.DECODE),
        (50.0, Phase.DECODE),
    ],
)
def test_the_phase_is_how_far_the_request_had_got(at: float, phase: Phase) -> None:
    assert history_of(*WHOLE).phase_at(at, PROMPT) is phase


def test_a_request_whose_picture_waits_for_the_tower_or_is_in_it_is_encoding() -> None:
    key = media_key(PICTURE)
    history = history_of(traced("encode-1", "submit", 1.0, key=key), traced("encode-1", "step", 2.0, 3.0, 1, key=key))
    phases = [history.phase_at(at, PROMPT) for at in (0.5, 1.5, 2.5, 3.5)]
    assert phases == [Phase.QUEUE, Phase.ENCODE, Phase.ENCODE, Phase.QUEUE]


def test_steps_that_end_after_their_engine_got_the_cancel_count() -> None:
    assert history_of(*WHOLE, traced("decode-3", "cancel", 8.5)).after_cancel() == (2, 2)
    assert history_of(*WHOLE, traced("decode-3", "cancel", 9.5)).after_cancel() == (1, 1)
    assert history_of(*WHOLE, traced("decode-3", "cancel", 10.5)).after_cancel() == (0, 0)
    assert history_of(*WHOLE, traced("prefill-2", "cancel", 4.5)).after_cancel() == (2, 100)


def test_a_decode_without_a_cancel_is_missed_and_so_is_half_a_prefill() -> None:
    assert history_of(*WHOLE).is_missed(PROMPT)
    assert not history_of(*WHOLE, traced("decode-3", "cancel", 10.5)).is_missed(PROMPT)
    assert not history_of(*WHOLE[:4]).is_missed(PROMPT)
    assert history_of(*WHOLE[:2]).is_missed(PROMPT)
    assert not history_of().is_missed(PROMPT)


def test_the_last_step_counts_from_the_clients_cancel() -> None:
    assert history_of(*WHOLE).last_s(8.0) == 2.0
    assert history_of(*WHOLE).last_s(11.0) is None

"""How long a signature is good for, and what is booked meanwhile."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta

import pytest

from quartet.discovery.base import Rank
from quartet.engine.base import Generation
from quartet.errors import MessageTooLargeError, WorkerUnavailableError
from quartet.streams.messages import RequestContext, WorkerStart
from quartet.v1 import decode_pb2
from router.policy.base import Pending, Placement
from router.signing import SignedRun, Signer, SigningTerms
from router.workers import WorkerTable
from tests.router.fakes import OneKey
from tests.router.records import make_load, make_record
from tests.streams.test_outbox import make_hand_off

NOW, TTL_S = 1000.0, 20.0


class Scene:
    """A table with one ready decode worker."""

    def __init__(self) -> None:
        self.table = WorkerTable("router-a", heartbeat_timeout_s=10**9)
        self.record = make_record("decode-0")
        self.table.put(self.record, NOW)
        self.table.connected(self.record.key, make_load(self.record), NOW)
        self.signer = Signer(OneKey(), self.table, ttl_s=TTL_S, clock=lambda: NOW)
        self.num_starts = 0

    def sign(self, *, ttl_s: float | None, left_s: float, num_tokens: int = 5, is_kept: bool = False) -> SignedRun:
        pending = Pending(num_tokens=50, num_reserved_tokens=100, num_most_tokens=100)
        reservation = self.table.reserve(Placement(None, Rank("decode-0", 0)), pending)
        hand_off = None if ttl_s is None else replace(make_hand_off(1), time_to_live=timedelta(seconds=ttl_s))
        terms = SigningTerms(
            request_id="ab" * 16,
            choice=0,
            hand_off=hand_off,
            deadline=NOW + left_s,
            num_first_tokens=50,
            is_renewed=is_kept,
        )
        try:
            return self.signer.sign(reservation, terms, lambda number: self._start(number, num_tokens))
        finally:
            reservation.release()

    def num_promised_blocks(self) -> int:
        [decode] = self.table.snapshot(self.table.pools(NOW)[0].key, NOW).decode
        return decode.num_promised_blocks

    def _start(self, number: int, num_tokens: int) -> WorkerStart:
        self.num_starts += 1
        context = RequestContext(router_request_number=number)
        return WorkerStart(context=context, generation=Generation(prompt_token_ids=[1] * num_tokens))


@pytest.mark.parametrize(
    ("ttl_s", "is_kept", "left_s", "expected_s"),
    [
        (None, False, 600, TTL_S),
        (30.0, False, 600, TTL_S),
        (10.0, False, 600, 8.0),
        # A third of it may have passed since it was renewed, and more where that did not go well at once.
        (30.0, True, 600, 15.0),
        (None, True, 600, TTL_S),
        (None, False, 5, 5.0),
        (30.0, False, 0.5, 0.5),
        (30.0, False, -1, 0.0),
    ],
)
def test_a_signature_expires_before_the_hand_off_and_with_the_request(
    ttl_s: float | None, is_kept: bool, left_s: float, expected_s: float
) -> None:
    scene = Scene()
    before = time.time()
    run = scene.sign(ttl_s=ttl_s, left_s=left_s, is_kept=is_kept)
    signed = decode_pb2.SignedStart.FromString(run.signed.signed_start)
    assert before - 0.001 <= signed.expires_at_unix_ms / 1000 - expected_s <= time.time() + 0.001
    assert (signed.worker_id, signed.epoch) == ("decode-0", scene.record.epoch)


def test_blocks_are_booked_a_little_longer_than_the_signature_is_valid() -> None:
    scene = Scene()
    run = scene.sign(ttl_s=10.0, left_s=600)
    assert run.signed.address == scene.record.grpc_address
    scene.table.tick(NOW + 8)
    assert scene.num_promised_blocks() == 5
    scene.table.tick(NOW + 13)
    assert scene.num_promised_blocks() == 0


def test_a_start_that_was_brought_late_is_booked_for_all_the_time_that_it_then_has() -> None:
    scene = Scene()
    run = scene.sign(ttl_s=None, left_s=600)
    run.booking.start()
    brought_at = NOW + TTL_S
    scene.table.tick(brought_at + 600 - 0.1)
    assert run.booking.is_booked
    scene.table.tick(brought_at + 600 + TTL_S)
    assert not run.booking.is_booked


def test_no_start_is_signed_for_a_worker_that_is_not_ready() -> None:
    scene = Scene()
    scene.table.broken(scene.record.key, scene.record.epoch)
    with pytest.raises(WorkerUnavailableError):
        scene.sign(ttl_s=None, left_s=600)
    assert scene.num_starts == 0


def test_a_start_that_proves_too_long_to_sign_is_booked_no_more() -> None:
    scene = Scene()
    with pytest.raises(MessageTooLargeError):
        scene.sign(ttl_s=None, left_s=600, num_tokens=1 << 18)
    assert scene.num_promised_blocks() == 0

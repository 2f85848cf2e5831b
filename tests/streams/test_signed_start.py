"""Signed starts: what a worker opens, and everything that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.engine.base import Generation
from quartet.errors import (
    MessageTooLargeError,
    NoSigningKeyError,
    ProtocolError,
    QueueFullError,
    ServingError,
    SignedStartError,
    SignedStartExpiredError,
    SignedStartForeignError,
    SignedStartUsedError,
    SigningKeyUnknownError,
)
from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES
from quartet.streams.convert.messages import to_signed_decode_start
from quartet.streams.messages import RequestContext, SignedPlacement, WorkerStart
from quartet.streams.signed_start import SignedStartVerifier, SigningKey, sign
from quartet.v1 import decode_pb2
from tests.streams.starts import decode_start
from tests.streams.strategies import WORKER_STARTS

NOW, TTL_S = 1_000_000.0, 20.0
OLD = SigningKey(key_id="old", secret=b"o" * 32)
NEW = SigningKey(key_id="new", secret=b"n" * 32)
START = WorkerStart(context=RequestContext(request_id="ab" * 16), generation=Generation(prompt_token_ids=[1, 2, 3]))


class Ring:
    """Keys in memory."""

    def __init__(self, *keys: SigningKey) -> None:
        self.keys = list(keys)

    @property
    def signing_key(self) -> SigningKey:
        return self.keys[0]

    def find(self, key_id: str) -> SigningKey | None:
        return next((key for key in self.keys if key.key_id == key_id), None)


@dataclass
class Worker:
    """A worker that opens signed starts, and the clock of both sides."""

    ring: Ring | None = field(default_factory=lambda: Ring(OLD))
    now: float = NOW
    max_remembered: int = 100
    outcomes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.opener = SignedStartVerifier(
            self.ring,
            worker_id="decode-0",
            epoch=7,
            on_outcome=self.outcomes.append,
            clock=lambda: self.now,
            max_remembered=self.max_remembered,
        )

    def sign(
        self,
        start: WorkerStart = START,
        key: SigningKey = OLD,
        ttl_s: float = TTL_S,
        worker_id: str = "decode-0",
        epoch: int = 7,
    ) -> SignedPlacement:
        return sign(
            start, key, address="10.0.0.1:1", worker_id=worker_id, epoch=epoch, expires_at_unix_s=self.now + ttl_s
        )

    def open(self, placement: SignedPlacement, slot: int = 0) -> decode_pb2.DecodeStart:
        return self.opener.open(to_signed_decode_start(slot, placement))

    def refuses(self, placement: SignedPlacement, error: type[ServingError]) -> None:
        with pytest.raises(error) as caught:
            self.open(placement)
        assert type(caught.value) is error
        assert self.outcomes[-1] == error.reason.lower()


@given(start=WORKER_STARTS)
def test_a_signed_start_is_opened_in_the_callers_slot(start: WorkerStart) -> None:
    worker = Worker()
    opened = worker.open(worker.sign(start), slot=5)
    assert opened.slot == 5
    opened.slot = 0
    assert opened == decode_start(0, start)
    assert worker.outcomes == ["opened"]


def test_a_signed_start_can_be_used_once(worker: Worker) -> None:
    placement, other = worker.sign(), worker.sign(replace(START, context=RequestContext(request_id="cd" * 16)))
    worker.open(placement)
    worker.refuses(placement, SignedStartUsedError)
    worker.open(other)
    worker.refuses(placement, SignedStartUsedError)


@given(data=st.data())
def test_every_flipped_bit_is_found(data: st.DataObject) -> None:
    worker = Worker()
    placement = worker.sign()
    field_name = data.draw(st.sampled_from(["signed_start", "mac"]))
    content = bytearray(getattr(placement, field_name))
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    worker.refuses(replace(placement, **{field_name: bytes(content)}), SignedStartError)
    worker.open(placement)  # the true one is not used up by it


@pytest.mark.parametrize("mac", [b"", b"x", b"x" * 31, b"x" * 33])
def test_a_mac_of_another_length_is_refused(worker: Worker, mac: bytes) -> None:
    worker.refuses(replace(worker.sign(), mac=mac), SignedStartError)


@pytest.mark.parametrize(
    "change", [lambda content: content[:-1], lambda content: content + b"\0", lambda _content: b""]
)
def test_a_lengthened_or_shortened_start_is_refused(worker: Worker, change: Callable[[bytes], bytes]) -> None:
    placement = worker.sign()
    worker.refuses(replace(placement, signed_start=change(placement.signed_start)), SignedStartError)


@pytest.mark.parametrize("key_id", ["", "new", "old ", "OLD"])
def test_a_start_signed_with_an_unknown_key_is_refused(worker: Worker, key_id: str) -> None:
    worker.refuses(replace(worker.sign(), key_id=key_id), SigningKeyUnknownError)


def test_a_start_signed_with_another_key_of_the_same_name_is_refused(worker: Worker) -> None:
    worker.refuses(worker.sign(key=replace(NEW, key_id="old")), SignedStartError)


def test_a_start_that_names_another_known_key_is_refused() -> None:
    worker = Worker(Ring(OLD, NEW))
    worker.refuses(replace(worker.sign(), key_id="new"), SignedStartError)


def test_without_keys_no_signed_start_is_opened() -> None:
    worker = Worker(ring=None)
    worker.refuses(worker.sign(), NoSigningKeyError)


@pytest.mark.parametrize("foreign", [{"worker_id": "decode-1"}, {"epoch": 8}, {"worker_id": ""}, {"epoch": 0}])
def test_a_start_signed_for_another_worker_is_refused(worker: Worker, foreign: dict[str, object]) -> None:
    worker.refuses(worker.sign(**foreign), SignedStartForeignError)  # type: ignore[arg-type]


def test_a_signed_start_is_valid_until_it_expires(worker: Worker) -> None:
    first, second = worker.sign(), worker.sign(replace(START, hand_off=None, context=RequestContext(attempt=1)))
    worker.now += TTL_S
    worker.open(first)
    # It has not expired yet, so it is remembered.
    worker.refuses(first, SignedStartUsedError)
    worker.now += 0.002
    worker.refuses(second, SignedStartExpiredError)
    worker.refuses(first, SignedStartExpiredError)


def test_a_start_that_is_opened_as_it_expires_is_opened_once(worker: Worker) -> None:
    placement = worker.sign()
    worker.now += TTL_S
    worker.open(placement)
    worker.refuses(placement, SignedStartUsedError)


def test_a_clock_that_is_set_back_makes_no_used_start_valid_again(worker: Worker) -> None:
    used, other = (worker.sign(replace(START, context=RequestContext(attempt=number))) for number in (0, 1))
    worker.open(used)
    worker.now += TTL_S + 1
    worker.open(worker.sign())  # what has expired is forgotten
    worker.now -= TTL_S
    worker.refuses(used, SignedStartExpiredError)
    worker.refuses(other, SignedStartExpiredError)


def test_a_start_that_expires_too_far_in_the_future_is_refused(worker: Worker) -> None:
    worker.refuses(worker.sign(ttl_s=10_000), SignedStartExpiredError)


def test_expired_starts_are_forgotten_and_the_memory_is_bounded() -> None:
    worker = Worker(max_remembered=3)
    placements = [worker.sign(replace(START, context=RequestContext(attempt=number))) for number in range(4)]
    for placement in placements[:3]:
        worker.open(placement)
    worker.refuses(placements[3], QueueFullError)
    for placement in placements[:3]:
        worker.refuses(placement, SignedStartUsedError)
    worker.now += TTL_S + 1
    worker.open(worker.sign())
    assert worker.opener.num_remembered == 1


def test_keys_rotate_without_a_break() -> None:
    """The order of a rotation: known everywhere, then signing, then gone once nothing that it signed is under way."""
    router, worker = Ring(OLD), Worker(Ring(OLD))
    assert worker.ring is not None
    attempts = iter(range(100))

    def place() -> SignedPlacement:
        return worker.sign(replace(START, context=RequestContext(attempt=next(attempts))), router.signing_key)

    before = place()
    worker.ring.keys = [OLD, NEW]
    worker.open(place())
    router.keys = [NEW, OLD]
    worker.open(place())
    worker.open(before)
    worker.ring.keys = [NEW, OLD]
    worker.open(place())
    router.keys = worker.ring.keys = [NEW]
    worker.open(place())
    assert set(worker.outcomes) == {"opened"}


def test_signed_bytes_that_are_no_start_are_refused(worker: Worker) -> None:
    content = b"\xff\xff\xff"
    garbage = SignedPlacement(address="", signed_start=content, key_id="old", mac=OLD.mac(content))
    worker.refuses(garbage, ProtocolError)


def test_a_start_too_long_for_a_worker_stream_message_is_not_signed(worker: Worker) -> None:
    longest = MAX_STREAM_MESSAGE_BYTES // 4
    with pytest.raises(MessageTooLargeError, match="Generate"):
        worker.sign(replace(START, generation=Generation(prompt_token_ids=[1] * longest)))
    message = decode_pb2.DecodeRequest(
        signed_start=to_signed_decode_start(
            2**32 - 1, worker.sign(replace(START, generation=Generation(prompt_token_ids=[1] * (longest - 200))))
        )
    )
    assert MAX_STREAM_MESSAGE_BYTES - 1024 < message.ByteSize() <= MAX_STREAM_MESSAGE_BYTES


def test_a_signed_placements_repr_does_not_show_its_start_and_mac(worker: Worker) -> None:
    placement = worker.sign()
    assert str(placement.mac) not in repr(placement)
    assert str(placement.signed_start) not in repr(placement)


@pytest.fixture
def worker() -> Worker:
    return Worker()

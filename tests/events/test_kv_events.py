"""KV batches over real sockets: in order with the load, lost without a word, and only for holders of the key."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from quartet.errors import ConfigError
from quartet.events.curve import EventsKey, read_events_key
from quartet.events.kv import KvBatch, RankEvents, Removed, Stored
from quartet.events.load import NumberedLoad
from quartet.events.publisher import EventPublisher
from quartet.events.subscriber import EventSubscriber
from tests.events.loads import make_load, make_publisher

_TIMEOUT_S = 30.0
_CHANGE = RankEvents(1, [Stored(None, [1, 2]), Removed([2])])


class Receiver:
    """A subscriber to both topics and what it received, in order."""

    def __init__(self, **settings: object) -> None:
        self.received: asyncio.Queue[KvBatch | NumberedLoad] = asyncio.Queue()
        put = self.received.put_nowait
        self.subscriber = EventSubscriber(put, self._fail, put, **settings)  # type: ignore[arg-type]

    def _fail(self) -> None:
        raise AssertionError("a malformed message")

    async def next(self) -> KvBatch | NumberedLoad:
        async with asyncio.timeout(_TIMEOUT_S):
            return await self.received.get()

    async def join(self, publisher: EventPublisher) -> None:
        """Return once an event of ``publisher`` has arrived and all that it sent until then is taken."""
        self.subscriber.connect(publisher.endpoint)
        async with asyncio.timeout(_TIMEOUT_S):
            while self.received.empty():
                publisher.publish_load(make_load())
                await asyncio.sleep(0.01)
        await self.catch_up(publisher)

    async def catch_up(self, publisher: EventPublisher) -> list[KvBatch | NumberedLoad]:
        """All that is received up to a last report."""
        last = make_load(steps=secrets.randbits(32))
        publisher.publish_load(last)
        received = [await self.next()]
        while not (isinstance(received[-1], NumberedLoad) and received[-1].load == last):
            received.append(await self.next())
        return received[:-1]


@pytest.fixture
async def make_receiver() -> AsyncIterator[Callable[..., Receiver]]:
    ears: list[Receiver] = []

    def make(**settings: object) -> Receiver:
        ears.append(Receiver(**settings))
        return ears[-1]

    yield make
    for receiver in ears:
        receiver.subscriber.close()


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    publisher = make_publisher()
    yield publisher
    publisher.close()


def make_key(tmp_path: Path, content: str | None = None) -> EventsKey:
    file = tmp_path / secrets.token_hex(4)
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32) + "\n" if content is None else content)
    return read_events_key(file)


async def test_batches_and_reports_come_in_order_with_their_numbers(
    make_receiver: Callable[..., Receiver], publisher: EventPublisher
) -> None:
    receiver = make_receiver()
    await receiver.join(publisher)
    publisher.publish_load(make_load(steps=1))
    publisher.publish_kv(_CHANGE)
    publisher.publish_load(make_load(steps=2))
    publisher.publish_kv(RankEvents(0, [Removed([1])]))
    batch = KvBatch(worker_id="decode-0", epoch=7, number=1, data_parallel_rank=1, events=_CHANGE.events)
    assert [await receiver.next() for _ in range(4)] == [
        NumberedLoad(make_load(steps=1), 0),
        batch,
        NumberedLoad(make_load(steps=2), 1),
        KvBatch(worker_id="decode-0", epoch=7, number=2, data_parallel_rank=0, events=[Removed([1])]),
    ]


async def test_events_too_long_for_a_frame_come_in_several_batches(
    make_receiver: Callable[..., Receiver], publisher: EventPublisher
) -> None:
    receiver = make_receiver()
    await receiver.join(publisher)
    publisher.publish_kv(RankEvents(0, [Removed(range(300_000))]))
    received = await receiver.catch_up(publisher)
    assert [batch.number for batch in received if isinstance(batch, KvBatch)] == list(range(1, publisher.kv_number + 1))
    assert publisher.kv_number > 2


async def test_no_change_is_no_batch(publisher: EventPublisher) -> None:
    publisher.publish_kv(RankEvents(0, []))
    assert publisher.kv_number == 0


async def test_past_the_high_water_mark_batches_are_dropped_and_the_numbers_show_it(
    make_receiver: Callable[..., Receiver],
) -> None:
    publisher, receiver = make_publisher(max_pending_messages=2), make_receiver(max_pending_messages=2)
    try:
        await receiver.join(publisher)
        # More than the sockets' buffers hold, in one go: nothing is read meanwhile, as this does not wait.
        for _ in range(100):
            publisher.publish_kv(RankEvents(0, [Removed(range(60_000))]))
        num_published, numbers = publisher.kv_number, [0]
        async with asyncio.timeout(_TIMEOUT_S):
            while numbers[-1] <= num_published:  # the first ones after it are lost too, until there is room again
                publisher.publish_kv(_CHANGE)
                await asyncio.sleep(0.01)
                while not receiver.received.empty():
                    received = receiver.received.get_nowait()
                    numbers += [received.number] if isinstance(received, KvBatch) else []
        assert numbers == sorted(numbers)
        assert len(numbers) < num_published
    finally:
        publisher.close()


async def test_a_subscriber_to_loads_gets_only_loads(publisher: EventPublisher) -> None:
    received: asyncio.Queue[NumberedLoad] = asyncio.Queue()
    malformed: list[None] = []
    subscriber = EventSubscriber(received.put_nowait, lambda: malformed.append(None))
    try:
        subscriber.connect(publisher.endpoint)
        async with asyncio.timeout(_TIMEOUT_S):
            while received.empty():
                publisher.publish_kv(_CHANGE)
                publisher.publish_load(make_load())
                await asyncio.sleep(0.01)
        assert not malformed
    finally:
        subscriber.close()


async def test_a_message_that_its_taker_chokes_on_does_not_silence_all_workers(
    publisher: EventPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    received: asyncio.Queue[NumberedLoad] = asyncio.Queue()
    counts = {"taken": 0, "malformed": 0}

    def take(report: NumberedLoad) -> None:
        counts["taken"] += 1
        if counts["taken"] <= 3:
            raise RuntimeError("a bug in what takes it")
        received.put_nowait(report)

    subscriber = EventSubscriber(take, lambda: counts.update(malformed=counts["malformed"] + 1))
    try:
        subscriber.connect(publisher.endpoint)
        async with asyncio.timeout(_TIMEOUT_S):
            while received.empty():
                publisher.publish_load(make_load())
                await asyncio.sleep(0.01)
    finally:
        subscriber.close()
    assert counts["malformed"] == 3
    assert caplog.text.count("RuntimeError: a bug in what takes it") == 3


async def test_with_a_key_only_subscribers_that_hold_it_receive_events(
    tmp_path: Path, make_receiver: Callable[..., Receiver]
) -> None:
    key, other_key = make_key(tmp_path), make_key(tmp_path)
    publisher = make_publisher(key=key)
    outsiders = [make_receiver(), make_receiver(key=other_key)]
    holder = make_receiver(key=key)
    try:
        for receiver in outsiders:
            receiver.subscriber.connect(publisher.endpoint)
        await holder.join(publisher)
        publisher.publish_kv(_CHANGE)
        assert len(await holder.catch_up(publisher)) == 1
        # They dialled first, so they were refused, or would have received events by now.
        assert all(receiver.received.empty() for receiver in outsiders)
    finally:
        publisher.close()


async def test_to_know_the_public_key_is_not_enough(tmp_path: Path, make_receiver: Callable[..., Receiver]) -> None:
    key, other_key = make_key(tmp_path), make_key(tmp_path)
    publisher, holder = make_publisher(key=key), make_receiver(key=key)
    with zmq.Context() as context, context.socket(zmq.SUB) as outsider, outsider.get_monitor_socket() as monitor:
        outsider.setsockopt(zmq.CURVE_SERVERKEY, key.public)
        outsider.setsockopt(zmq.CURVE_PUBLICKEY, other_key.public)
        outsider.setsockopt(zmq.CURVE_SECRETKEY, other_key.secret)
        outsider.setsockopt(zmq.SUBSCRIBE, b"")
        outsider.connect(publisher.endpoint)
        seen = set()
        while zmq.EVENT_HANDSHAKE_FAILED_AUTH not in seen:
            assert await asyncio.to_thread(monitor.poll, _TIMEOUT_S * 1000)
            seen.add(recv_monitor_message(monitor)["event"])
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in seen
        await holder.join(publisher)
        assert not outsider.poll(0)
        outsider.disable_monitor()
    publisher.close()


async def test_a_subscriber_with_a_key_ignores_publishers_without_one(
    tmp_path: Path, make_receiver: Callable[..., Receiver], publisher: EventPublisher
) -> None:
    suspicious, trusting = make_receiver(key=make_key(tmp_path)), make_receiver()
    suspicious.subscriber.connect(publisher.endpoint)
    await trusting.join(publisher)
    assert suspicious.received.empty()


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "not 0"),
        ("ab" * 31, "not 31"),
        ("ab" * 33, "not 33"),
        ("zz" * 32, "hexadecimal"),
        ("é" * 32, "hexadecimal"),
    ],
)
def test_a_file_without_a_key_is_refused_by_the_name_of_its_setting(tmp_path: Path, content: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=f"^events_key_file: .*{fault}") as error:
        make_key(tmp_path, content)
    assert not content or content not in str(error.value)


def test_a_key_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("ab" * 32)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"^events_key_file: .*open to everybody"):
        read_events_key(file)
    with pytest.raises(ConfigError, match=r"^events_key_file: cannot read"):
        read_events_key(tmp_path / "none")


def test_a_key_does_not_show(tmp_path: Path) -> None:
    key = make_key(tmp_path, "ab" * 32)
    assert key.secret.decode() not in repr(key)

"""PUB and SUB sockets against each other, over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from itertools import pairwise

import pytest
import zmq

from quartet.errors import ConfigError
from quartet.events.load import NumberedLoad, WorkerLoad
from quartet.events.publisher import EventPublisher
from quartet.events.subscriber import EventSubscriber
from quartet.events.wire import LOAD_TOPIC, MAX_FRAME_BYTES, encode_load
from tests.events.loads import make_load, make_publisher

_TIMEOUT_S = 30.0


class Receiver:
    """A subscriber and the loads that it received."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[WorkerLoad] = asyncio.Queue()
        self.num_malformed = 0
        self.subscriber = EventSubscriber(self._take_load, self._count_malformed)

    def _take_load(self, report: NumberedLoad) -> None:
        self.received.put_nowait(report.load)

    def _count_malformed(self) -> None:
        self.num_malformed += 1

    async def send_until_received(self, send: Callable[[], None], wanted: Callable[[WorkerLoad], bool]) -> None:
        """Call ``send`` until a ``wanted`` load is received: a load sent before the connection is up is lost."""
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                send()
                try:
                    async with asyncio.timeout(0.02):
                        if wanted(await self.received.get()):
                            return
                except TimeoutError:
                    continue


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.subscriber.close()


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    publisher = make_publisher()
    yield publisher
    publisher.close()


async def test_a_report_arrives_as_it_was_published(receiver: Receiver, publisher: EventPublisher) -> None:
    receiver.subscriber.connect(publisher.endpoint)
    load = make_load(queued=5)
    await receiver.send_until_received(lambda: publisher.publish_load(load), lambda received: received == load)


async def test_events_of_several_workers_arrive_over_one_socket(receiver: Receiver, publisher: EventPublisher) -> None:
    other = make_publisher()
    try:
        for speaker, name in ((publisher, "one"), (other, "two")):
            receiver.subscriber.connect(speaker.endpoint)
            load = make_load(worker_id=name)
            await receiver.send_until_received(
                lambda s=speaker, m=load: s.publish_load(m), lambda received, m=load: received == m
            )
    finally:
        other.close()


async def test_events_of_a_worker_that_comes_back_at_its_address_arrive_again(receiver: Receiver) -> None:
    first = make_publisher()
    receiver.subscriber.connect(first.endpoint)
    await receiver.send_until_received(
        lambda: first.publish_load(make_load(epoch=1)), lambda received: received.epoch == 1
    )
    first.close()
    second = make_publisher(int(first.endpoint.rpartition(":")[2]))
    try:
        await receiver.send_until_received(
            lambda: second.publish_load(make_load(epoch=2)), lambda received: received.epoch == 2
        )
    finally:
        second.close()


async def test_a_flood_in_one_burst_is_drained_whole(receiver: Receiver, publisher: EventPublisher) -> None:
    receiver.subscriber.connect(publisher.endpoint)
    await receiver.send_until_received(lambda: publisher.publish_load(make_load()), lambda received: True)
    for number in range(1, 2001):
        publisher.publish_load(make_load(steps=number))
    steps = 0
    async with asyncio.timeout(_TIMEOUT_S):
        while steps < 2000:
            steps = (await receiver.received.get()).ranks[0].num_steps


async def test_a_burst_of_long_frames_leaves_others_on_the_loop_their_turns(receiver: Receiver) -> None:
    turns, num_waiting = list[int](), 40
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        receiver.subscriber.connect(f"tcp://127.0.0.1:{port}")
        send = partial(socket.send_multipart, encode_load(make_load(), 0))
        await receiver.send_until_received(send, lambda received: True)
        before = receiver.num_malformed
        for _ in range(num_waiting):
            socket.send_multipart([LOAD_TOPIC, bytes(8), bytes(MAX_FRAME_BYTES // 2)])
        async with asyncio.timeout(_TIMEOUT_S):
            while receiver.num_malformed < before + num_waiting:
                turns.append(receiver.num_malformed)
                await asyncio.sleep(0)
    # One such frame is taken by each callback; a turn of the loop may have the socket's and the one that it left.
    assert all(after - at <= 3 for at, after in pairwise(turns))


async def test_malformed_frames_are_counted_and_skipped(receiver: Receiver) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        receiver.subscriber.connect(f"tcp://127.0.0.1:{port}")

        def send() -> None:
            socket.send_multipart([LOAD_TOPIC, b"short", b""])
            socket.send_multipart(encode_load(make_load(), 0))

        await receiver.send_until_received(send, lambda received: received == make_load())
    assert receiver.num_malformed > 0


async def test_events_of_a_disconnected_worker_arrive_no_more(receiver: Receiver, publisher: EventPublisher) -> None:
    other = make_publisher()
    try:
        receiver.subscriber.connect(publisher.endpoint)
        await receiver.send_until_received(lambda: publisher.publish_load(make_load()), lambda received: True)
        receiver.subscriber.disconnect(publisher.endpoint)
        receiver.subscriber.disconnect(publisher.endpoint)
        while not receiver.received.empty():
            receiver.received.get_nowait()
        publisher.publish_load(make_load(steps=99))
        # What the other says proves that everything said before has had its time.
        receiver.subscriber.connect(other.endpoint)
        left = make_load(worker_id="other")
        said_after: list[WorkerLoad] = []

        def is_other(received: WorkerLoad) -> bool:
            said_after.append(received)
            return received.worker_id == "other"

        await receiver.send_until_received(lambda: other.publish_load(left), is_other)
        assert {load.worker_id for load in said_after} == {"other"}
    finally:
        other.close()


async def test_an_impossible_endpoint_is_refused(receiver: Receiver) -> None:
    with pytest.raises(ValueError, match="cannot listen"):
        receiver.subscriber.connect("no endpoint")


def test_a_port_in_use_is_a_config_error(publisher: EventPublisher) -> None:
    port = int(publisher.endpoint.rpartition(":")[2])
    with pytest.raises(ConfigError, match="cannot listen"):
        make_publisher(port)


async def test_closing_twice_is_harmless(receiver: Receiver, publisher: EventPublisher) -> None:
    receiver.subscriber.close()
    publisher.close()

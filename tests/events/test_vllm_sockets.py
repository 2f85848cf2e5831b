"""vLLM's form over real sockets: our publisher, our listener, and each against sockets that know the format only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from quartet.errors import ConfigError
from quartet.events.curve import EventsKey, read_events_key
from quartet.events.vllm import AllBlocksCleared, BlockRemoved, BlockStored, EventForm, VllmBatch, encode_batch
from quartet.events.vllm_listener import VllmListener
from quartet.events.vllm_publisher import VllmPublisher
from tests.events import vllm_reader
from tests.events.vllm_reader import END, TIMEOUT_S, replay_of


def stored(block_hash: int) -> BlockStored:
    return BlockStored(block_hashes=[block_hash], parent_hash=None, token_ids=[block_hash], block_size=1, medium="GPU")


class Heard:
    """What a listener has said: hashes of stored blocks, and ``None`` for a drop."""

    def __init__(self) -> None:
        self.said: list[int | None] = []
        self._news = asyncio.Event()

    def take(self, batch: VllmBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.note(
                    int.from_bytes(event.block_hashes[0])
                    if isinstance(event.block_hashes[0], bytes)
                    else event.block_hashes[0]
                )

    def drop(self) -> None:
        self.note(None)

    def note(self, said: int | None) -> None:
        self.said.append(said)
        self._news.set()

    async def until(self, *said: int | None) -> None:
        """Wait until exactly this was said."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.said[-len(said) :] != list(said):
                self._news.clear()
                await self._news.wait()
        assert self.said == list(said)


class RawSource:
    """A source made of bare sockets, which may skip numbers; it answers replays with what it is told to."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.XPUB)
        self.router = self.context.socket(zmq.ROUTER)
        self.port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self.router.bind_to_random_port("tcp://127.0.0.1")

    async def subscribed(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            assert await self.pub.recv() == b"\1"

    async def publish(self, *numbers: int) -> None:
        for number in numbers:
            await self.pub.send_multipart([b"kv-events", number.to_bytes(8, "big"), payload(number)])

    async def asked(self) -> tuple[bytes, int]:
        """Who asks, and from which number on."""
        async with asyncio.timeout(TIMEOUT_S):
            reader, empty, number = await self.router.recv_multipart()
        assert empty == b""
        return reader, int.from_bytes(number, "big")

    async def answer(self, reader: bytes, *numbers: int) -> None:
        for number in numbers:
            await self.router.send_multipart([reader, b"", number.to_bytes(8, "big"), payload(number)])
        await self.router.send_multipart([reader, b"", END, b""])


def payload(number: int) -> bytes:
    return encode_batch(VllmBatch(time_s=0.0, events=[stored(number)]))


@pytest.fixture
async def source() -> AsyncIterator[RawSource]:
    source = RawSource()
    yield source
    source.context.destroy(linger=0)


def listen(
    heard: Heard,
    port: int,
    replay_port: int | None = None,
    *,
    key: EventsKey | None = None,
    replay_timeout_s: float = 60.0,
) -> VllmListener:
    replay_endpoint = None if replay_port is None else f"tcp://127.0.0.1:{replay_port}"
    return VllmListener(
        "it",
        f"tcp://127.0.0.1:{port}",
        heard.take,
        heard.drop,
        replay_endpoint=replay_endpoint,
        key=key,
        replay_timeout_s=replay_timeout_s,
    )


@pytest.fixture
async def publisher() -> AsyncIterator[VllmPublisher]:
    publisher = VllmPublisher("127.0.0.1", setting="here", replay_port=0)
    yield publisher
    publisher.close()


async def test_a_reader_made_from_the_format_hears_what_is_published() -> None:
    publisher = VllmPublisher("127.0.0.1", setting="here", topic="kv-events", form=EventForm.ARRAY)
    context = zmq.asyncio.Context()
    try:
        sub = context.socket(zmq.SUB)
        sub.subscribe(b"kv-events")
        sub.connect(f"tcp://127.0.0.1:{publisher.port}")
        heard = asyncio.ensure_future(sub.recv_multipart())
        async with asyncio.timeout(TIMEOUT_S):
            while not heard.done():  # a message sent before the connection is up is lost
                publisher.publish([stored(7)], 2)
                await asyncio.wait([heard], timeout=0.02)
        topic, number, content = heard.result()
        batch = vllm_reader.read_arrays(content)
        assert (topic, len(number), batch.data_parallel_rank) == (b"kv-events", 8, 2)
        assert batch.events == [vllm_reader.ArrayStored([7], None, [7], 1, None, "GPU", None)]
        assert publisher.replay_port == 0
    finally:
        context.destroy(linger=0)
        publisher.close()


async def test_a_replay_has_all_from_a_number_on_and_an_end(publisher: VllmPublisher) -> None:
    for number in range(3):
        publisher.publish([stored(number)], 0)
    replayed = await replay_of(publisher.replay_port, 1)
    assert [number for number, _ in replayed] == [1, 2]
    assert [vllm_reader.read_maps(content).events[0] for _, content in replayed] == [
        vllm_reader.BlockStored([number], None, [number], 1, None, "GPU", None) for number in (1, 2)
    ]
    assert await replay_of(publisher.replay_port, 9) == []


async def test_a_long_replay_is_whole(publisher: VllmPublisher) -> None:
    # More than goes in one turn, and than a reader's socket takes before it is read.
    for number in range(5_000):
        publisher.publish([stored(number)], 0)
    assert [number for number, _ in await replay_of(publisher.replay_port, 0)] == list(range(5_000))


@pytest.mark.parametrize("bounds", [{"max_kept_batches": 2}, {"max_kept_bytes": 2 * len(payload(2)) + 4}])
async def test_what_is_kept_has_a_bound(bounds: dict[str, int]) -> None:
    publisher = VllmPublisher("127.0.0.1", setting="here", replay_port=0, **bounds)  # type: ignore[arg-type]
    try:
        for number in range(5):
            publisher.publish([stored(number)], 0)
        assert [number for number, _ in await replay_of(publisher.replay_port, 0)] == [3, 4]
    finally:
        publisher.close()


async def test_a_long_batch_goes_in_pieces_that_say_the_same(publisher: VllmPublisher) -> None:
    num_blocks = 1 << 17
    hashes = list(range(1 << 40, (1 << 40) + num_blocks))
    long = BlockStored(
        block_hashes=hashes,
        parent_hash=None,
        token_ids=[1 << 30] * (2 * num_blocks),
        block_size=2,
        extra_keys=[["salt"], *[None] * (num_blocks - 1)],
    )
    publisher.publish([long, BlockRemoved(block_hashes=hashes[::-1]), AllBlocksCleared()], 0)
    pieces = [vllm_reader.read_maps(content) for _, content in await replay_of(publisher.replay_port, 0)]
    assert len(pieces) > 2
    events = [event for piece in pieces for event in piece.events]
    parts = [event for event in events if isinstance(event, vllm_reader.BlockStored)]
    assert [name for event in parts for name in event.block_hashes] == hashes
    assert [event.parent_block_hash for event in parts[1:]] == [event.block_hashes[-1] for event in parts[:-1]]
    assert all(
        len(event.token_ids) == 2 * len(event.block_hashes) == 2 * len(event.extra_keys or ()) for event in parts
    )
    removed = [name for event in events if isinstance(event, vllm_reader.BlockRemoved) for name in event.block_hashes]
    assert removed == hashes[::-1]
    assert events[-1] == vllm_reader.AllBlocksCleared()


async def test_a_listener_that_comes_late_hears_what_is_kept(publisher: VllmPublisher) -> None:
    publisher.publish([stored(1)], 0)
    publisher.publish([stored(2)], 0)
    heard = Heard()
    listener = listen(heard, publisher.port, publisher.replay_port)
    try:
        await heard.until(1, 2)
        publisher.publish([stored(3)], 0)
        await heard.until(1, 2, 3)
        assert listener.is_connected
    finally:
        listener.close()


async def test_a_gap_without_replays_drops_what_was_heard(source: RawSource) -> None:
    heard = Heard()
    listener = listen(heard, source.port)
    try:
        await source.subscribed()
        await source.publish(4, 5, 7)
        await heard.until(4, 5, None, 7)
        assert listener.feed.num_gaps == 1
    finally:
        listener.close()


async def test_a_gap_is_asked_for_and_filled_in_order(source: RawSource) -> None:
    heard = Heard()
    listener = listen(heard, source.port, source.replay_port)
    try:
        await source.subscribed()
        reader, first_number = await source.asked()
        assert first_number == 0
        await source.answer(reader)
        await source.publish(0, 3)
        reader, first_number = await source.asked()
        assert first_number == 1
        await source.answer(reader, 1, 2)
        await heard.until(0, 1, 2, 3)
    finally:
        listener.close()


async def test_a_source_that_never_answers_counts_from_the_next_batch_on(source: RawSource) -> None:
    heard = Heard()
    listener = listen(heard, source.port, source.replay_port, replay_timeout_s=0.2)
    try:
        await source.subscribed()
        await source.publish(4, 5)
        await heard.until(4, 5)
    finally:
        listener.close()


async def test_a_source_keeps_what_a_listener_does_not_take() -> None:
    num_messages, long = 1_500, bytes(64 << 10)
    with zmq.Context() as context, context.socket(zmq.XPUB) as pub:
        for option, value in ((zmq.SNDHWM, 1), (zmq.XPUB_NODROP, 1), (zmq.SNDTIMEO, 500), (zmq.LINGER, 0)):
            pub.setsockopt(option, value)
        listener = listen(Heard(), pub.bind_to_random_port("tcp://127.0.0.1"))
        try:
            assert pub.recv() == b"\1"
            # Nothing here yields, so the listener takes nothing.
            with pytest.raises(zmq.Again):
                for number in range(num_messages):
                    pub.send_multipart([b"kv-events", number.to_bytes(8, "big"), long])
        finally:
            listener.close()


async def test_what_can_not_be_read_is_a_gap(source: RawSource) -> None:
    heard = Heard()
    listener = listen(heard, source.port)
    try:
        await source.subscribed()
        await source.publish(0)
        await source.pub.send_multipart([b"", (1).to_bytes(8, "big"), b"\xc1"])
        await source.pub.send_multipart([b"one frame"])
        await source.publish(2)
        await heard.until(0, None, 2)
        assert listener.num_malformed == 2
    finally:
        listener.close()


async def test_a_source_that_is_gone_has_nothing_and_its_next_life_is_heard_from_the_start() -> None:
    first = VllmPublisher("127.0.0.1", setting="here", replay_port=0)
    heard = Heard()
    listener = listen(heard, first.port, first.replay_port)
    try:
        first.publish([stored(1)], 0)
        await heard.until(1)
        first.close()
        await heard.until(1, None)
        second = VllmPublisher("127.0.0.1", first.port, setting="here", replay_port=first.replay_port)
        try:
            # As many as the first life, so numbers alone don't show that it is another one.
            second.publish([stored(5)], 0)
            second.publish([stored(6)], 0)
            await heard.until(1, None, 5, 6)
        finally:
            second.close()
    finally:
        listener.close()
        first.close()


async def test_only_holders_of_the_key_hear(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("ab" * 32)
    file.chmod(0o600)
    key = read_events_key(file)
    publisher = VllmPublisher("127.0.0.1", setting="here", replay_port=0, key=key)
    with_key, without_key = Heard(), Heard()
    listeners = [
        listen(with_key, publisher.port, publisher.replay_port, key=key),
        listen(without_key, publisher.port, publisher.replay_port),
    ]
    try:
        publisher.publish([stored(1)], 0)
        await with_key.until(1)
        assert without_key.said == []
        assert not listeners[1].is_connected
    finally:
        for listener in listeners:
            listener.close()
        publisher.close()


async def test_an_address_in_use_is_named(publisher: VllmPublisher) -> None:
    with pytest.raises(ConfigError, match="consolidator: cannot listen on"):
        VllmPublisher("127.0.0.1", publisher.port, setting="consolidator")


async def test_a_reader_that_takes_nothing_holds_up_no_other_and_misses_nothing(publisher: VllmPublisher) -> None:
    # More than the sockets of one connection take.
    num_batches, num_tokens = 400, 16_000
    big = BlockStored(block_hashes=[1], parent_hash=None, token_ids=[1 << 20] * num_tokens, block_size=num_tokens)
    for _ in range(num_batches):
        publisher.publish([big], 0)
    context = zmq.asyncio.Context()
    try:
        slow = context.socket(zmq.DEALER)
        slow.setsockopt(zmq.RCVHWM, 1)
        slow.connect(f"tcp://127.0.0.1:{publisher.replay_port}")
        await slow.send_multipart([b"", bytes(8)])
        wanted = list(range(num_batches))
        assert [number for number, _ in await replay_of(publisher.replay_port, 0)] == wanted
        async with asyncio.timeout(TIMEOUT_S):
            numbers = [(await slow.recv_multipart())[1] for _ in range(num_batches + 1)]
        assert numbers == [*(number.to_bytes(8, "big") for number in wanted), END]
    finally:
        context.destroy(linger=0)


def hostile_requests() -> Sequence[list[bytes]]:
    return [[b""], [b"", b"\0" * 9], [b"x", b"\0" * 8], [b"", b"", b"\0" * 8], [b"\0" * 7]]


async def test_requests_of_another_form_are_ignored(publisher: VllmPublisher) -> None:
    publisher.publish([stored(1)], 0)
    context = zmq.asyncio.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{publisher.replay_port}")
        for frames in [*hostile_requests(), [b"", bytes(8)], [b"", (9).to_bytes(8, "big")]]:
            await dealer.send_multipart(frames)
        async with asyncio.timeout(TIMEOUT_S):
            answers = [(await dealer.recv_multipart())[1] for _ in range(3)]
        assert answers == [bytes(8), END, END]
    finally:
        context.destroy(linger=0)

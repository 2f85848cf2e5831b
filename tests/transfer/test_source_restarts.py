"""A source that starts again at its address is reached at once, whatever became of connections to its earlier lives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quartet.errors import TransferError
from quartet.kvcache.hand_off import HandOffState
from quartet.rpc import channels
from quartet.rpc.channels import Dialer
from quartet.transfer.base import PieceCopy
from quartet.transfer.grpc.streams import PeerChannels, SourceLife
from services.topology.launch import free_port
from tests.transfer.workers import EPOCH, Ended, PullerWorker, SourceWorker, puller_worker, source_worker

COPIES = (PieceCopy(0, 5), PieceCopy(1, 2))
ADDRESS = "127.0.0.1:50051"


@pytest.fixture
def _long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel that has failed to connect tries again long after the test."""
    for name in ("initial", "max"):
        monkeypatch.setitem(channels._OPTIONS, f"grpc.{name}_reconnect_backoff_ms", 3_600_000)


async def fetch(here: PullerWorker, source: SourceWorker) -> None:
    await here.puller.claim(source.offer(1, (3, 7))).fetch(COPIES)
    assert await source.end() == Ended(1, HandOffState.TAKEN)
    assert here.memory.piece(5) == source.memory.piece(3)


@pytest.mark.usefixtures("_long_pauses")
async def test_a_restarted_source_is_pulled_from_though_its_last_life_refused_connections() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with puller_worker(channel_factory=Dialer(None).open) as here:
        for epoch in range(EPOCH, EPOCH + 3):
            async with source_worker(epoch=epoch, address=address) as source:
                await fetch(here, source)
                left = [source.offer(holder, (0,)) for holder in (2, 3)]
            for hand_off in left:
                with pytest.raises(TransferError, match="refused"):
                    await here.puller.claim(hand_off).fetch([PieceCopy(0, 0)])


class NotedChannel:
    """A channel that is open until it is closed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


class Opened(list[NotedChannel]):
    """Channels in the order in which they were opened."""

    def open(self, address: str) -> Any:
        self.append(NotedChannel(address))
        return self[-1]

    def which_are_open(self) -> list[int]:
        return [number for number, channel in enumerate(self) if not channel.is_closed]


async def test_of_the_lives_at_an_address_only_the_last_two_keep_unused_channels() -> None:
    opened = Opened()
    peers = PeerChannels(opened.open)
    with peers.use(SourceLife("127.0.0.1:1", 0)):
        pass
    for epoch in range(10):
        with peers.use(SourceLife(ADDRESS, epoch)):
            await asyncio.gather(*peers._closing)
    assert opened.which_are_open() == [0, 9, 10]
    await peers.close()
    assert opened.which_are_open() == []


async def test_a_channel_in_use_outlives_the_starts_of_later_lives() -> None:
    opened = Opened()
    peers = PeerChannels(opened.open)
    with peers.use(SourceLife(ADDRESS, 0)) as first:
        for epoch in range(1, 10):
            with peers.use(SourceLife(ADDRESS, epoch)):
                await asyncio.gather(*peers._closing)
        assert first is opened[0]
        assert opened.which_are_open() == [0, 8, 9]
    await peers.close()


async def test_questions_to_a_life_and_to_the_one_before_it_open_no_more_channels() -> None:
    opened = Opened()
    peers = PeerChannels(opened.open)
    for epoch in (1, 2, 1, 2, 1):
        with peers.use(SourceLife(ADDRESS, epoch)):
            pass
    assert len(opened) == 2
    await peers.close()

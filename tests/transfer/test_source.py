"""The clock of a source's hand-offs, on the event loop that workers run."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from quartet.errors import DrainingError
from quartet.kvcache.hand_off import HandOffState
from quartet.kvcache.layout import OpaquePayload
from quartet.transfer.config import TransferConfig
from quartet.transfer.source import TransferSource


def test_hand_offs_end_where_the_next_deadline_has_come_before_it_is_waited_for() -> None:
    async def offer_some() -> list[tuple[int, HandOffState]]:
        ends: list[tuple[int, HandOffState]] = []
        all_ended = asyncio.Event()

        def on_end(holder: int, state: HandOffState) -> None:
            ends.append((holder, state))
            if len(ends) == 3:
                all_ended.set()

        # uvloop's timers count milliseconds: what is due within half of one it calls at once, without a timer.
        config = TransferConfig(hand_off_ttl_s=1e-6)
        source = TransferSource(worker_id="source", epoch=1, config=config, on_end=on_end)
        source.advertise("127.0.0.1:1")
        for holder in range(3):
            source.offer(holder, (), OpaquePayload("trtllm", b"state"))
        async with asyncio.timeout(30):
            await all_ended.wait()
        return ends

    assert uvloop.run(offer_some()) == [(holder, HandOffState.EXPIRED) for holder in range(3)]


async def test_a_closed_source_withdraws_what_it_offers_and_offers_nothing_more() -> None:
    ends: list[tuple[int, HandOffState]] = []
    source = TransferSource(
        worker_id="source", epoch=1, config=TransferConfig(), on_end=lambda *ended: ends.append(ended)
    )
    source.advertise("127.0.0.1:1")
    source.offer(1, (), OpaquePayload("trtllm", b"state"))
    source.close()
    assert ends == [(1, HandOffState.CANCELLED)]
    with pytest.raises(DrainingError):
        source.offer(2, (), OpaquePayload("trtllm", b"state"))
    assert source.counts.held == 0

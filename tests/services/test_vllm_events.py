"""A worker's setting that publishes its KV events in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from quartet.config import build
from quartet.discovery.base import Role
from quartet.engine.base import StepOutput
from quartet.errors import ConfigError
from quartet.events.kv import Contents, RankEvents, Removed, Stored, Tier
from quartet.events.vllm import BlockRemoved, BlockStored, VllmEvent
from services.workers.config import WorkerConfig
from services.workers.kv_events import KvEvents, VllmEvents
from tests.services.fake_kv import FakeKvPublisher
from tests.services.worker_processes import worker_process

STORED = Stored(None, [7], Tier.DEVICE, Contents([b"\1\0\0\0\2\0\0\0"]))


class FakePublisher:
    def __init__(self) -> None:
        self.published: list[tuple[int, list[VllmEvent]]] = []

    def publish(self, events: Sequence[VllmEvent], data_parallel_rank: int) -> None:
        self.published.append((data_parallel_rank, list(events)))


class NoSnapshots:
    def request_kv_snapshot(self) -> None:
        raise AssertionError


def test_changes_go_out_in_both_forms_rank_by_rank() -> None:
    own, other = FakeKvPublisher(), FakePublisher()
    events = KvEvents(NoSnapshots(), own, VllmEvents(other, 2).publish_kv)
    events.take(StepOutput(kv_events=[RankEvents(1, [STORED]), RankEvents(0, [Removed([7])])]))
    events.take(StepOutput(kv_events=[RankEvents(1, [Removed([7])])]))
    assert [changed.data_parallel_rank for changed in own.published] == [1, 0, 1]
    stored = BlockStored(block_hashes=[7], parent_hash=None, token_ids=[1, 2], block_size=2, medium="GPU", group_idx=0)
    # Rank 0 has never stored the block.
    removed = BlockRemoved(block_hashes=[7], medium="GPU", group_idx=0)
    assert other.published == [(1, [stored]), (1, [removed])]


def settings(**more: object) -> dict[str, object]:
    return {"model_path": "it", "engine": {"kind": "mock"}, "vllm_events": {}, **more}


def test_engines_are_asked_to_tell_contents_only_with_the_setting() -> None:
    assert build(WorkerConfig, settings()).engine_spec.tells_contents
    assert not build(WorkerConfig, settings(vllm_events=None)).engine_spec.tells_contents


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"engine": {"kind": "trtllm"}}, "vllm_events: they need the tokens of blocks, and trtllm"),
        ({"vllm_events": {"address": "0.0.0.0:5557"}}, "vllm_events.address: .* is not loopback"),
        ({"vllm_events": {"address": "x"}}, "vllm_events.address: must be host:port"),
        ({"vllm_events": {"form": "text"}}, "vllm_events.form: must be one of map, array"),
    ],
)
def test_what_is_refused_is_named(more: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(WorkerConfig, settings(**more))


async def test_an_encode_worker_has_no_such_feed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vllm_events: an Encode worker has no KV blocks"):
        async with worker_process(tmp_path, Role.ENCODE, vllm_events={"address": "127.0.0.1:0"}):
            pass

"""Which media a pool takes."""

from __future__ import annotations

import pytest

from quartet.errors import UnsupportedFieldError, WorkerUnavailableError
from quartet.media.items import MediaFile, MediaItem, MediaKind
from router.workers import MediaWay, Pool, WorkerTable, needs_of
from tests.router.records import make_load, make_record

IMAGE = MediaItem(bytes(32), MediaFile(MediaKind.IMAGE, b"png"))
EMBEDDINGS = MediaItem(bytes(32), MediaFile(MediaKind.EMBEDDINGS, b"tensors"))
HAND_OFF = frozenset({"hand_off"})


def make_table(*ready: str, not_ready: tuple[str, ...] = (), **media: tuple[str, ...]) -> WorkerTable:
    """Workers by id, each of which takes what is said of its role; those that are not ready have been, and are away."""
    table = WorkerTable("router-a", heartbeat_timeout_s=10**9)
    for worker_id in (*ready, *not_ready):
        role = worker_id.partition("-")[0]
        own = {"block_size": 16, "max_model_len": 0} if role == "encode" else {}
        record = make_record(worker_id, media=media.get(role, ()), max_media_tokens=len(role), **own)
        table.put(record, 0.0)
        table.connected(record.key, make_load(record), 0.0)
        if worker_id in not_ready:
            table.broken(record.key, record.epoch)
    return table


def only_pool(table: WorkerTable) -> Pool:
    [pool] = table.pools(0.0)
    return pool


def test_encode_workers_belong_to_the_pool_but_hold_no_kv() -> None:
    table = make_table("encode-0", "prefill-0", "decode-0", encode=("image",), prefill=("hand_off",))
    pool = only_pool(table)
    assert (pool.block_size, pool.max_model_len, pool.num_ready_encode) == (10, 2000, 1)
    snapshot = table.snapshot(pool.key, 0.0)
    ranks = {candidate.rank.worker_id for candidate in (*snapshot.prefill, *snapshot.decode)}
    assert ranks == {"prefill-0", "decode-0"}
    [candidate] = table.encode_candidates(pool.key, frozenset({"image"}), 0.0)
    assert candidate.rank.worker_id == "encode-0"
    assert table.encode_candidates(pool.key, frozenset({"embeddings"}), 0.0) == []


def test_encode_workers_alone_are_no_pool() -> None:
    assert make_table("encode-0", encode=("image",)).pools(0.0) == []


def test_items_sent_to_an_encode_worker_count_until_reported_or_released() -> None:
    table = make_table("encode-0", "decode-0", encode=("image",), decode=("hand_off",))
    pool = only_pool(table).key
    record = next(one.record for one in table.statuses(0.0) if one.record.role == "encode")

    def num_items() -> int:
        [candidate] = table.encode_candidates(pool, frozenset(), 0.0)
        return candidate.num_items

    first, second = (table.reserve_encode(table.encode_candidates(pool, frozenset(), 0.0)[0].rank, 3) for _ in range(2))
    number = first.send()
    assert num_items() == 6
    table.report(make_load(record, router_progress={"router-a.1": number}, num_running=2, num_waiting=1), 0.0)
    assert num_items() == 3 + 2 + 1
    second.release()
    first.leave_one()
    assert num_items() == 2, "the place of one that is encoded is free at once"
    first.release()
    assert num_items() == 0
    table.report(make_load(record, router_progress={"router-a.1": number}, num_running=2, num_waiting=1), 0.0)
    assert num_items() == 3, "they are another router's"


def test_encode_workers_are_preferred_to_towers() -> None:
    pool = only_pool(make_table("encode-0", "prefill-0", "decode-0", encode=("image",), prefill=("image", "hand_off")))
    assert pool.media.way([IMAGE], ["media[0]"]) is MediaWay.ENCODE
    assert pool.media.max_tokens == len("prefill")
    assert needs_of(MediaWay.ENCODE, [IMAGE]) == HAND_OFF
    assert needs_of(MediaWay.FILES, [IMAGE, EMBEDDINGS]) == {"image", "embeddings"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_ready_encode_workers_towers_do(role: str) -> None:
    media = {"encode": ("image",), role: ("image", "hand_off")}
    pool = only_pool(make_table("prefill-0", "decode-0", not_ready=("encode-0",), **media))
    assert pool.media.way([IMAGE], ["media[0]"]) is MediaWay.FILES


def test_one_worker_has_to_take_all_kinds_of_a_request() -> None:
    table = make_table("prefill-0", "decode-0", prefill=("image",), decode=("embeddings",))
    assert only_pool(table).media.kinds == {"image", "embeddings"}
    with pytest.raises(UnsupportedFieldError, match="embeddings and image") as raised:
        only_pool(table).media.way([IMAGE, EMBEDDINGS], ["media[0]", "media[1]"])
    assert raised.value.field == "media[1]"


def test_a_media_kind_that_no_worker_takes_is_refused_and_one_whose_encode_workers_are_away_waits_for_them() -> None:
    pool = only_pool(make_table("decode-0", not_ready=("encode-0",), encode=("image",), decode=("hand_off",)))
    with pytest.raises(UnsupportedFieldError) as raised:
        pool.media.way([IMAGE, EMBEDDINGS], ["media[0].url", "media[1].embeddings"])
    assert raised.value.field == "media[1].embeddings"
    assert pool.media.way([IMAGE], ["media[0].url"]) is MediaWay.ENCODE
    assert pool.media.awaits(frozenset({"image"}))
    assert pool.media.awaits(frozenset()), "what a URL leads to is unknown"


def test_a_media_kind_whose_towers_are_away_is_unavailable() -> None:
    pool = only_pool(make_table("decode-0", not_ready=("prefill-0",), prefill=("image", "hand_off")))
    assert not pool.media.awaits(frozenset({"image"}))
    with pytest.raises(WorkerUnavailableError):
        pool.media.way([IMAGE], ["media[0].url"])


def test_media_whose_embeddings_no_worker_pulls_are_refused() -> None:
    pool = only_pool(make_table("encode-0", "prefill-0", "decode-0", encode=("image",)))
    with pytest.raises(UnsupportedFieldError):
        pool.media.way([IMAGE], ["media[0]"])


def test_a_request_for_a_pool_whose_encode_workers_are_all_gone_waits_and_is_not_refused() -> None:
    pool = only_pool(make_table("prefill-0", "decode-0", prefill=("hand_off",)))
    assert pool.media.way([IMAGE], ["media[0]"]) is MediaWay.ENCODE
    assert pool.media.awaits(frozenset({"image"}))
    with pytest.raises(UnsupportedFieldError):
        only_pool(make_table("prefill-0", "decode-0")).media.way([IMAGE], ["media[0]"])

"""What records say of workers counts once the workers have answered, and one odd worker speaks for no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quartet.discovery.base import Rank, WorkerRecord
from quartet.errors import ModelNotFoundError, ModelUnavailableError
from router.policy.base import Pending
from router.policy.room import NOTHING_TAKEN, can_prefill, decode_obstacle, prefill_obstacle
from router.readiness import model_error
from router.workers import Pool, PoolKey, WorkerTable
from tests.router.records import ALL_SAMPLING_FIELDS, make_load, make_record

_POOL = PoolKey("tiny", "ab" * 32)
_NOW = 1000.0


def make_table(*joined: WorkerRecord) -> WorkerTable:
    table = WorkerTable("router-a", heartbeat_timeout_s=10.0)
    for record in joined:
        join(table, record)
    return table


def join(table: WorkerTable, record: WorkerRecord) -> None:
    table.put(record, _NOW)
    table.connected(record.key, make_load(record), _NOW)


def lose(table: WorkerTable, record: WorkerRecord) -> None:
    """Its process ends, and so does its lease."""
    table.broken(record.key, record.epoch)
    table.unlist(record.key)
    assert table.forget_gone(_NOW) == [record]


def the_pool(table: WorkerTable) -> Pool:
    pool = table.pool("", _NOW)
    assert pool is not None
    return pool


@pytest.mark.parametrize("role", ["decode", "prefill", "encode"])
@pytest.mark.parametrize(
    "claims",
    [
        {"max_model_len": 1},
        {"max_model_len": 1_000_000},
        {"sampling_fields": ()},
        {"sampling_fields": ("clairvoyance",)},
        {"block_size": 7},
        {"num_blocks": 1},
        {"num_blocks": 1_000_000},
        {"adapters": ("ghostly",)},
        {"media": ("image", "hand_off"), "max_media_tokens": 2**31 - 1},
        {"model_name": "another"},
        {"model_fingerprint": "00" * 32},
    ],
    ids=str,
)
def test_the_record_of_a_worker_that_never_answered_changes_no_pool(role: str, claims: dict[str, object]) -> None:
    table = make_table(make_record("prefill-0"), make_record("decode-0"), make_record("encode-0", media=("image",)))
    before = table.pools(_NOW)
    table.put(make_record(f"{role}-ghost", **claims), _NOW)
    assert table.pools(_NOW) == before
    assert table.pool("", _NOW) == before[0], "the model need not be named"


def test_of_a_model_whose_workers_have_not_answered_yet_nothing_is_known() -> None:
    table = make_table(make_record("decode-0", model_name="other"))
    table.is_synchronised = True
    assert isinstance(model_error(table, "tiny", "model", _NOW), ModelNotFoundError)
    table.put(make_record("encode-1"), _NOW)
    table.put(make_record("decode-2", contract_version="quartet.v9"), _NOW)
    assert isinstance(model_error(table, "tiny", "model", _NOW), ModelNotFoundError), "neither will serve it"
    table.put(make_record("decode-1"), _NOW)
    assert table.pool("tiny", _NOW) is None
    error = model_error(table, "tiny", "model", _NOW)
    assert isinstance(error, ModelUnavailableError) and "answered" in str(error)


def test_suspects_and_draining_workers_speak_for_their_pool() -> None:
    suspect, draining = make_record("decode-0", max_model_len=500), make_record("decode-1", max_model_len=500)
    table = make_table(suspect, draining)
    before = the_pool(table)
    table.broken(suspect.key, suspect.epoch)
    table.report(make_load(draining, is_draining=True), _NOW)
    assert the_pool(table) == replace(before, num_ready_decode=0)


@pytest.mark.parametrize("is_forgotten_first", [False, True])
def test_while_the_only_worker_restarts_its_former_life_speaks(is_forgotten_first: bool) -> None:
    record = make_record("decode-0", max_model_len=500, adapters=("a",))
    table = make_table(record)
    before = the_pool(table)
    if is_forgotten_first:
        lose(table, record)
        assert table.pools(_NOW) == []
    table.put(make_record("decode-0", epoch=2, max_model_len=1), _NOW)
    table.put(make_record("decode-ghost", max_model_len=1), _NOW)
    assert the_pool(table) == replace(before, num_ready_decode=0)
    join(table, make_record("decode-0", epoch=2, max_model_len=1))
    assert the_pool(table).max_model_len == 1, "now it has said so itself"


def test_a_role_that_is_gone_for_good_speaks_no_more() -> None:
    prefill, decode = make_record("prefill-0", num_blocks=1), make_record("decode-0")
    table = make_table(prefill, decode)
    assert the_pool(table).num_prefill_tokens == 10
    lose(table, prefill)
    assert the_pool(table).num_prefill_tokens == 0


def test_only_what_models_do_now_or_did_lately_is_kept() -> None:
    table = make_table()
    for number in range(50):
        record = make_record("decode-0", model_name=f"model-{number}")
        table.put(record, _NOW + 1000 * number)
        table.connected(record.key, make_load(record), _NOW + 1000 * number)
        table.broken(record.key, record.epoch)
        table.unlist(record.key)
        table.forget_gone(_NOW + 1000 * number)
    assert len(table._last_joined) == 1


def test_before_it_has_answered_a_newer_record_of_a_worker_counts() -> None:
    lie, truth = make_record(max_model_len=1), make_record()
    table = make_table()
    assert table.put(lie, _NOW)
    assert not table.put(replace(lie, grpc_address="127.0.0.1:7"), _NOW), "it has only moved"
    assert table.put(truth, _NOW)
    table.connected(truth.key, make_load(truth), _NOW)
    assert not table.put(lie, _NOW)
    assert the_pool(table).max_model_len == truth.max_model_len


def test_one_odd_worker_that_has_answered_neither_refuses_nor_attracts_what_others_take() -> None:
    usual = [make_record("prefill-0"), *(make_record(f"decode-{number}") for number in range(3))]
    before = the_pool(make_table(*usual))
    for odd in (
        make_record("decode-odd", max_model_len=1, sampling_fields=(), block_size=7),
        make_record("decode-odd", max_model_len=1_000_000),
        make_record("prefill-odd", max_model_len=1, sampling_fields=(), block_size=7),
        make_record("prefill-odd", max_model_len=1_000_000, sampling_fields=(*ALL_SAMPLING_FIELDS, "clairvoyance")),
    ):
        pool = the_pool(make_table(*usual, odd))
        assert pool.max_model_len == before.max_model_len
        assert pool.sampling_fields == before.sampling_fields
        assert pool.block_size == before.block_size


def test_a_pool_without_decode_workers_can_what_its_prefill_workers_can() -> None:
    pool = the_pool(make_table(make_record("prefill-0", max_model_len=300, sampling_fields=("top_k",))))
    assert (pool.max_model_len, pool.sampling_fields) == (300, {"top_k"})


def test_half_of_the_decode_workers_are_enough_for_long_requests_and_one_for_a_field() -> None:
    table = make_table(
        make_record("decode-0", sampling_fields=("temperature", "top_k"), max_model_len=500, adapters=("a",)),
        make_record("prefill-0", sampling_fields=("temperature", "top_p"), max_model_len=400, adapters=("b",)),
        make_record("decode-1", sampling_fields=("temperature",), num_blocks=7),
        make_record("encode-0", sampling_fields=(), max_model_len=0, block_size=0),
    )
    pool = the_pool(table)
    assert pool.sampling_fields == {"temperature", "top_k"}
    assert (pool.max_model_len, pool.num_rank_tokens, pool.block_size) == (2000, 1000, 10)
    assert pool.adapters == {"a"}
    assert (pool.num_ready_prefill, pool.num_ready_decode) == (1, 2)


def test_workers_of_two_block_sizes_have_no_common_one_unless_most_agree() -> None:
    even = [make_record("decode-0", block_size=16), make_record("decode-1", block_size=32)]
    assert the_pool(make_table(*even)).block_size == 0
    assert the_pool(make_table(*even, make_record("prefill-0", block_size=32))).block_size == 32


def test_a_request_goes_only_to_workers_that_take_its_length_and_honour_its_fields() -> None:
    fields = tuple(name for name in ALL_SAMPLING_FIELDS if name != "top_k")
    table = make_table(
        make_record("prefill-0"),
        make_record("prefill-short", max_model_len=100),
        make_record("prefill-plain", sampling_fields=fields),
        make_record("decode-0"),
        make_record("decode-short", max_model_len=100),
        make_record("decode-plain", sampling_fields=fields),
    )
    snapshot = table.snapshot(_POOL, _NOW)

    def obstacles(**asked: object) -> dict[str, str]:
        pending = Pending(**{"num_tokens": 10, "num_reserved_tokens": 20, "num_most_tokens": 99, **asked})
        assert all(can_prefill(one, pending) is (not prefill_obstacle(one, pending)) for one in snapshot.prefill)
        found = {one.rank: prefill_obstacle(one, pending) for one in snapshot.prefill}
        found |= {one.rank: decode_obstacle(one, pending, NOTHING_TAKEN) for one in snapshot.decode}
        return {rank.worker_id: obstacle for rank, obstacle in found.items() if obstacle}

    assert obstacles(sampling_fields=frozenset({"temperature"})) == {}
    too_long = "takes sequences of at most 100 tokens"
    assert obstacles(num_most_tokens=100) == {"prefill-short": too_long, "decode-short": too_long}
    lacking = "does not honour top_k"
    assert obstacles(sampling_fields=frozenset({"temperature", "top_k"})) == {
        "prefill-plain": lacking,
        "decode-plain": lacking,
    }
    table.broken(make_record("decode-0").key, 1)
    assert {one.rank for one in table.snapshot(_POOL, _NOW).decode if one.lacks} == {Rank("decode-plain")}

"""Media that encode workers turn into embeddings, for requests that then wait for a rank."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quartet import errors
from quartet.api.request import GenerateStart, TokenPrompt
from quartet.discovery.base import Rank
from quartet.kvcache.block_hash import MediaSpan, sequence_hashes
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaFile, MediaKind
from quartet.media.media_id import media_hash
from quartet.streams.slots import PeerLostError
from router.config import AttemptConfig
from router.tenants import TenantConfig
from tests.router.fakes import MODEL_TEXT, TIMEOUT_S, Call, Fleet, Plan, collect, expected_tokens
from tests.router.media_fakes import MEDIA_TEXT, PLACEHOLDER, item_of, picture
from tests.router.records import make_load
from tests.router.test_generate import make_start
from tests.router.test_request_log import said_in

A, B = picture(30, "a"), picture(15, "b")
PROMPT = TokenPrompt((10, 11, PLACEHOLDER, 12, PLACEHOLDER, 13))
EXPANDED = [10, 11, *[PLACEHOLDER] * 30, 12, *[PLACEHOLDER] * 15, 13]
SPANS = (MediaSpan(item_of(A).media_id, 2, 30), MediaSpan(item_of(B).media_id, 33, 15))
TAKES = {"encode": ("image", "embeddings"), "prefill": ("hand_off",), "decode": ()}


def media_start(**changes: object) -> GenerateStart:
    return make_start(**{"prompt": PROMPT, "media": (A, B), **changes})


def media_fleet(*worker_ids: str, takes: dict[str, tuple[str, ...]] | None = None, **settings: Any) -> Fleet:
    """Workers that take media by their role, each item of which has at most 64 tokens."""
    fleet = Fleet(**settings)
    fleet.texts.text = replace(MODEL_TEXT, media=MEDIA_TEXT)
    for worker_id in worker_ids:
        join(fleet, worker_id, takes)
    return fleet


def join(fleet: Fleet, worker_id: str, takes: dict[str, tuple[str, ...]] | None = None) -> None:
    role = worker_id.partition("-")[0]
    media = (takes or TAKES).get(role, ())
    sizes = {"block_size": 16, "num_blocks": 70} if role == "encode" else {}
    fleet.join(worker_id, media=media, max_media_tokens=64 if media else 0, **sizes)


def fill(fleet: Fleet, worker_id: str, num_items: int = 2) -> None:
    """Of its two places so many are taken, by another router's items."""
    [record] = [one.record for one in fleet.table.statuses(0.0) if one.record.worker_id == worker_id]
    fleet.table.report(make_load(record, max_running=2, num_running=num_items), 0.0)


def calls_of(fleet: Fleet, kind: str) -> list[Call]:
    return [call for call in fleet.hops.calls if call.kind == kind]


async def until(is_so: Callable[[], bool]) -> None:
    """Let everybody go on until it is so."""
    for _ in range(10_000):
        if is_so():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


async def within(event: asyncio.Event) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await event.wait()


async def test_pictures_are_encoded_pulled_by_the_prefill_and_only_named_to_the_decode() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    answer = await collect(fleet.generate(media_start()))
    encode, prefill, decode = fleet.hops.calls
    assert [call.kind for call in fleet.hops.calls] == ["encode", "prefill", "decode"]
    assert [item.file for item in encode.start.items] == [A, B]
    assert [item.media_id for item in encode.start.items] == [span.media_id for span in SPANS]
    assert encode.start.context.request_id == answer.accepted.request_id
    assert encode.start.context.router_request_number == 1
    for call in (prefill, decode):
        assert list(call.start.generation.prompt_token_ids) == EXPANDED
        assert call.start.generation.media == SPANS
    assert [item.media_id for item in prefill.start.media] == [span.media_id for span in SPANS]
    assert all(isinstance(item.source, HandOff) for item in prefill.start.media)
    assert decode.start.media == ()
    assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 12)
    fleet.assert_nothing_left()


async def test_the_answer_names_the_encode_worker_and_the_time_and_tokens_of_media() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    answer = await collect(fleet.generate(media_start()))
    assert (answer.accepted.encode, answer.accepted.num_prompt_tokens) == (Rank("encode-0"), len(EXPANDED))
    usage, time = answer.finished[0].usage, answer.finished[0].time
    assert (usage.num_prompt_tokens, usage.num_media_tokens) == (len(EXPANDED), 45)
    assert time.media_s is not None and time.media_s > 0
    text = await collect(fleet.generate(make_start()))
    assert text.accepted.encode is None and text.finished[0].time.media_s is None


async def test_the_log_line_says_where_it_was_encoded_and_how_long_that_took(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="router")
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    await collect(fleet.generate(media_start()))
    said = said_in(caplog)
    assert (said["encode_worker"], said["num_prompt_tokens"]) == ("encode-0", len(EXPANDED))
    assert isinstance(said["media_s"], float)


async def test_blocks_are_named_with_the_media_in_them() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "prefill-1", "decode-0")
    names = sequence_hashes(EXPANDED, 10, media=SPANS)
    await collect(fleet.generate(media_start()))
    [first] = calls_of(fleet, "prefill")
    assert {rank: match.num_blocks for rank, match in fleet.index.match(names).items()} == {first.rank: len(names)}
    assert not fleet.index.match(sequence_hashes(EXPANDED, 10)[1:2])


async def test_a_request_reserves_no_blocks_before_its_pictures_are_encoded() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    gate = asyncio.Event()
    fleet.hops.plan("encode", Plan(gate=gate))
    reading = asyncio.create_task(collect(fleet.generate(media_start())))
    await within(fleet.hops.hung)
    # Who comes later need not wait for them.
    text = await collect(fleet.generate(make_start()))
    assert len(text.token_ids[0]) == 12
    assert not any(one.num_requests for one in fleet.table.statuses(0.0) if one.record.role == "decode")
    gate.set()
    await reading
    fleet.assert_nothing_left()


async def test_a_request_to_be_encoded_again_does_not_block_one_whose_embeddings_fill_the_pool() -> None:
    fleet = media_fleet("encode-0", "prefill-0")
    fleet.join("decode-0", num_blocks=8)  # for one of them at a time
    gate = asyncio.Event()
    # The first one's are lost; by the time that they are made again, the second one's fill the pool.
    fleet.hops.plan("prefill", Plan(error=errors.TransferError("torn")))
    fleet.hops.plan("encode", Plan(), Plan(gate=gate))
    first = asyncio.create_task(collect(fleet.generate(media_start())))
    await within(fleet.hops.hung)
    await collect(fleet.generate(media_start()))
    gate.set()
    await first
    fleet.assert_nothing_left()


async def test_hand_offs_are_kept_while_a_request_waits_for_room() -> None:
    fleet = media_fleet("encode-0", "prefill-0")
    join(fleet, "decode-0")
    fleet.hops.plan("decode", Plan(hang_after=0))
    full = make_start(prompt=TokenPrompt((10,) * 940))
    blocker = fleet.generate(full)
    blocking = asyncio.create_task(collect(blocker))
    await within(fleet.hops.hung)
    reading = asyncio.create_task(collect(fleet.generate(media_start())))
    await within(fleet.policy.kept_waiting)
    await until(lambda: len(fleet.hops.kept) == 2)
    assert fleet.admission.length == 1
    blocker.cancel()
    await asyncio.gather(blocking, reading)
    assert fleet.hops.kept == set()
    fleet.assert_nothing_left()


async def test_the_encode_worker_with_the_most_pictures_is_chosen_then_the_least_busy() -> None:
    fleet = media_fleet("encode-0", "encode-1", "encode-2", "prefill-0", "decode-0", num_blocks=1000)
    fleet.index.store(Rank("encode-1"), None, [media_hash(item_of(A).media_id)])
    fleet.index.store(Rank("encode-2"), None, [media_hash(item_of(A).media_id)])
    fleet.index.store(Rank("encode-2"), None, [media_hash(item_of(B).media_id)])
    await collect(fleet.generate(media_start()))
    assert calls_of(fleet, "encode")[0].rank == Rank("encode-2")
    # Of those that have nothing of it, the one that was not sent anything yet.
    fleet.hops.plan("encode", *[Plan(hang_after=0)] * 3)
    runs = [fleet.generate(media_start(media=(picture(8, name), picture(9, name)))) for name in "xyz"]
    reads = [asyncio.create_task(collect(run)) for run in runs]
    await until(lambda: len(calls_of(fleet, "encode")) == 4)
    assert {call.rank.worker_id for call in calls_of(fleet, "encode")[1:]} == {"encode-0", "encode-1", "encode-2"}
    for run in runs:
        run.cancel()
    await asyncio.gather(*reads)
    fleet.assert_nothing_left()


async def test_a_repeated_picture_goes_to_the_same_encode_worker_before_that_reports_it_as_cached() -> None:
    fleet = media_fleet("encode-0", "encode-1", "encode-2", "prefill-0", "decode-0")
    for _ in range(5):
        await collect(fleet.generate(media_start()))
    assert len({call.rank for call in calls_of(fleet, "encode")}) == 1


async def test_a_known_picture_waits_for_no_size() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    await collect(fleet.generate(media_start()))
    fleet.hops.plan("encode", Plan(hang_after=0))
    run = fleet.generate(media_start())
    reading = asyncio.create_task(collect(run))
    await within(fleet.hops.hung)
    run.cancel()
    assert (await reading).accepted.num_prompt_tokens == len(EXPANDED)
    fleet.assert_nothing_left()


async def test_choices_count_as_queued_while_they_wait_for_their_pictures_and_leave_with_their_request() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    await collect(fleet.generate(media_start()))
    fleet.hops.plan("encode", Plan(hang_after=0))
    run = fleet.generate(media_start(num_choices=3))
    reading = asyncio.create_task(collect(run))
    await within(fleet.hops.hung)
    assert fleet.admission.length == 3
    run.cancel()
    await reading
    fleet.assert_nothing_left()


async def test_each_choice_pulls_hand_offs_of_its_own() -> None:
    fleet = media_fleet("encode-0", "encode-1", "prefill-0", "decode-0", num_blocks=1000)
    answer = await collect(fleet.generate(media_start(num_choices=3)))
    for choice in range(3):
        assert answer.token_ids[choice] == expected_tokens(5, choice, len(EXPANDED), 12)
    pulled = [item.source.hand_off_id for call in calls_of(fleet, "prefill") for item in call.start.media]
    assert len(set(pulled)) == len(pulled) == 6
    assert {call.rank for call in calls_of(fleet, "encode")} == {calls_of(fleet, "encode")[0].rank}
    assert sorted(call.start.context.attempt for call in calls_of(fleet, "encode")) == [0, 1, 2]
    fleet.assert_nothing_left()


async def test_a_decode_rank_that_takes_hand_offs_of_media_prefills_by_itself() -> None:
    fleet = media_fleet("encode-0", "decode-0", "decode-1", takes={"encode": ("image",), "decode": ("hand_off",)})
    answer = await collect(fleet.generate(media_start()))
    [decode] = calls_of(fleet, "decode")
    assert decode.start.hand_off is None and len(decode.start.media) == 2
    assert decode.start.generation.media == SPANS
    assert answer.finished[0].usage.num_media_tokens == 45
    fleet.assert_nothing_left()


async def test_only_ranks_that_take_embeddings_compute_the_prompt() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    for number in range(1, 4):
        fleet.join(f"prefill-{number}")
    for _ in range(6):
        await collect(fleet.generate(media_start()))
    assert {call.rank.worker_id for call in calls_of(fleet, "prefill")} == {"prefill-0"}


@pytest.mark.parametrize("fail_after", [0, 1, 2])
@pytest.mark.parametrize(
    "error", [errors.WorkerUnavailableError("gone"), errors.OutOfBlocksError("full"), errors.DrainingError("going")]
)
async def test_an_encode_worker_that_fails_is_replaced_by_another(error: errors.ServingError, fail_after: int) -> None:
    fleet = media_fleet("encode-0", "encode-1", "prefill-0", "decode-0")
    fleet.hops.plan("encode", Plan(error=error, fail_after=fail_after))
    answer = await collect(fleet.generate(media_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 12)
    first, second = calls_of(fleet, "encode")
    assert first.rank != second.rank == answer.accepted.encode
    fleet.assert_nothing_left()


async def test_attempts_to_encode_are_bounded_and_the_last_error_is_raised() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", attempts=AttemptConfig(max_attempts=3))
    fleet.hops.plan("encode", *[Plan(error=errors.OutOfBlocksError("full"))] * 9)
    with pytest.raises(errors.OutOfBlocksError):
        await collect(fleet.generate(media_start()))
    assert len(calls_of(fleet, "encode")) == 3
    fleet.assert_nothing_left()


async def test_a_picture_does_not_end_one_encode_worker_after_another() -> None:
    fleet = media_fleet(*(f"encode-{number}" for number in range(6)), "prefill-0", "decode-0")
    fleet.hops.plan("encode", *[Plan(error=PeerLostError("socket closed"))] * 9)
    fleet.on_pause = lambda: fleet.break_worker(calls_of(fleet, "encode")[-1].rank.worker_id)
    with pytest.raises(errors.WorkersLostError):
        await collect(fleet.generate(media_start()))
    assert len(calls_of(fleet, "encode")) == 3
    fleet.assert_nothing_left()


async def test_a_full_encode_worker_is_no_failed_attempt() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", attempts=AttemptConfig(max_attempts=2))
    full, gone = errors.QueueFullError("full", retry_delay_s=1.0), errors.WorkerUnavailableError("gone")
    fleet.hops.plan("encode", *[Plan(error=full)] * 9, Plan(error=gone), *[Plan(error=full)] * 9)
    answer = await collect(fleet.generate(media_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 12)
    assert len(calls_of(fleet, "encode")) == 20
    assert fleet.pauses == [1.0] * 9 + [0.0] + [1.0] * 9
    fleet.assert_nothing_left()


@pytest.mark.parametrize("has_places", [False, True])
async def test_a_request_waits_for_places_at_an_encode_worker_until_its_timeout(has_places: bool) -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    if has_places:
        fleet.hops.plan("encode", *[Plan(error=errors.QueueFullError("full"))] * 100_000)
    else:
        fill(fleet, "encode-0")
    with pytest.raises(errors.RequestTimeoutError):
        await collect(fleet.generate(media_start(timeout_s=0.05)))
    assert bool(calls_of(fleet, "encode")) is has_places
    fleet.assert_nothing_left()


async def test_the_place_of_a_picture_that_is_handed_off_is_free_while_others_of_its_request_run() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", num_blocks=1000)
    fill(fleet, "encode-0", 0)
    fleet.hops.plan("encode", Plan(hang_after=2))
    run = fleet.generate(media_start())
    reading = asyncio.create_task(collect(run))
    await within(fleet.hops.hung)
    one = media_start(prompt=TokenPrompt((1, PLACEHOLDER)), media=(A,))
    assert (await collect(fleet.generate(one))).finished
    assert not reading.done()
    run.cancel()
    await reading
    fleet.assert_nothing_left()


async def test_a_request_whose_encode_worker_failed_goes_before_other_tenants() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", num_blocks=1000)
    fill(fleet, "encode-0", 0)
    gate, small = asyncio.Event(), (picture(1, "c"), picture(1, "d"))
    # It was charged for more than both of the other tenant's together.
    fleet.hops.plan(
        "encode", Plan(gate=gate, error=errors.WorkerUnavailableError("gone"), fail_after=2), Plan(gate=gate)
    )
    starts = [media_start(tenant="large"), *[media_start(tenant="small", media=small)] * 2]
    answers = []
    for start in starts:
        answers.append(asyncio.create_task(collect(fleet.generate(start))))
        await within(fleet.hops.called)
        await until(lambda: fleet.encode_queue.length == len(answers) - 1)
    gate.set()
    await asyncio.gather(*answers)
    tenants = [call.start.context.tenant for call in calls_of(fleet, "encode")]
    assert tenants == ["large", "small", "large", "small"]
    fleet.assert_nothing_left()


async def test_choices_of_a_request_wait_for_places_each_and_cancelled_they_leave_nothing() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", num_blocks=1000)
    await collect(fleet.generate(media_start()))
    fill(fleet, "encode-0")
    run = fleet.generate(media_start(num_choices=3))
    reading = asyncio.create_task(collect(run))
    await until(lambda: fleet.encode_queue.length == 1)
    run.cancel()
    await reading
    fleet.assert_nothing_left()


async def test_a_silent_encode_worker_is_given_up() -> None:
    fleet = media_fleet("encode-0", "encode-1", "prefill-0", "decode-0", attempts=AttemptConfig(encode_timeout_s=0.05))
    fleet.hops.plan("encode", Plan(hang_after=1))
    answer = await collect(fleet.generate(media_start()))
    assert len(answer.token_ids[0]) == 12
    assert len({call.rank for call in calls_of(fleet, "encode")}) == 2
    fleet.assert_nothing_left()


async def test_an_encode_workers_refusal_ends_the_request_with_the_clients_field() -> None:
    fleet = media_fleet("encode-0", "encode-1", "prefill-0", "decode-0")
    for fail_after in (0, 1):
        error = errors.InvalidMediaError("it is torn", field="items[1].file.data")
        fleet.hops.plan("encode", Plan(error=error, fail_after=fail_after))
        with pytest.raises(errors.InvalidMediaError, match="torn") as raised:
            await collect(fleet.generate(media_start()))
        assert raised.value.field == "media[1].data"
    assert len(calls_of(fleet, "encode")) == 2
    fleet.assert_nothing_left()


@pytest.mark.parametrize(
    "error",
    [
        errors.TransferError("torn"),
        errors.HandOffNotFoundError("expired"),
        errors.InvalidRequestError("7 tokens were handed off", field="media[0].hand_off"),
    ],
)
async def test_embeddings_that_can_not_be_pulled_are_encoded_elsewhere(error: errors.ServingError) -> None:
    fleet = media_fleet("encode-0", "encode-1", "prefill-0", "prefill-1", "decode-0")
    fleet.hops.plan("prefill", Plan(error=error))
    answer = await collect(fleet.generate(media_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 12)
    first, second = calls_of(fleet, "encode")
    assert first.rank != second.rank
    fleet.assert_nothing_left()


async def test_if_workers_cannot_hand_off_a_decode_worker_that_takes_pictures_prefills() -> None:
    takes = {**TAKES, "decode": ("hand_off",)}
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", takes=takes)
    fleet.hops.plan("decode", Plan(error=errors.NoHandOffError("not in host memory")))
    answer = await collect(fleet.generate(media_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 12)
    assert [call.kind for call in fleet.hops.calls] == ["encode", "prefill", "decode", "encode", "decode"]
    fleet.assert_nothing_left()


async def test_if_workers_cannot_hand_off_and_no_decode_worker_takes_pictures_the_request_fails_soon() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    fleet.hops.plan("decode", *(Plan(error=errors.NoHandOffError("not in host memory")) for _ in range(5)))
    with pytest.raises(errors.NoHandOffError):
        await collect(fleet.generate(media_start()))
    fleet.assert_nothing_left()


@pytest.mark.parametrize("error", [errors.WorkerUnavailableError("gone"), errors.MediaLostError("preempted")])
async def test_after_a_decode_that_died_it_is_prefilled_with_fresh_hand_offs(error: errors.ServingError) -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", "decode-1")
    fleet.hops.plan("decode", Plan(error=error, fail_after=4))
    answer = await collect(fleet.generate(media_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 12)
    first, again = calls_of(fleet, "prefill")
    assert again.start.generation.generated_token_ids == tuple(answer.token_ids[0][:5])
    assert again.start.generation.media == SPANS
    assert {item.source.hand_off_id for item in first.start.media}.isdisjoint(
        item.source.hand_off_id for item in again.start.media
    )
    fleet.assert_nothing_left()


@pytest.mark.parametrize("stage", ["fetch", "size", "encode", "prefill", "decode"])
async def test_cancelled_at_any_stage_it_leaves_nothing(stage: str) -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    waiting = fleet.hops.hung
    if stage == "fetch":
        fleet.media.gate.clear()
        waiting = fleet.media.asked
    elif stage in ("size", "encode"):
        fleet.hops.plan("encode", Plan(hang_after=0 if stage == "size" else 1))
    else:
        fleet.hops.plan(stage, Plan(hang_after=0))
    run = fleet.generate(media_start())
    reading = asyncio.create_task(collect(run))
    await within(waiting)
    run.cancel()
    answer = await reading
    assert answer.finished[0].reason == "cancelled"
    fleet.assert_nothing_left()


@pytest.mark.parametrize("stage", ["size", "encode"])
async def test_a_request_that_takes_too_long_leaves_nothing(stage: str) -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    fleet.hops.plan("encode", Plan(hang_after=0 if stage == "size" else 1))
    with pytest.raises(errors.RequestTimeoutError):
        await collect(fleet.generate(media_start(timeout_s=0.05)))
    fleet.assert_nothing_left()


async def test_hand_offs_of_a_request_that_finds_no_room_are_dropped() -> None:
    fleet = media_fleet("encode-0", "prefill-0")
    fleet.join("decode-0", num_blocks=8)
    fleet.hops.plan("decode", Plan(hang_after=0))
    blocker = fleet.generate(make_start())
    blocking = asyncio.create_task(collect(blocker))
    await within(fleet.hops.hung)
    with pytest.raises(errors.RequestTimeoutError):
        await collect(fleet.generate(media_start(timeout_s=0.2)))
    assert fleet.hops.kept == set()
    blocker.cancel()
    await blocking
    fleet.assert_nothing_left()


async def test_embeddings_are_media_like_any() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    file = MediaFile(MediaKind.EMBEDDINGS, b"tensors")
    await collect(fleet.generate(media_start(prompt=TokenPrompt((1, PLACEHOLDER)), media=(file,))))
    assert [item.file for item in calls_of(fleet, "encode")[0].start.items] == [file]


async def test_a_prefill_that_lays_embeddings_out_itself_says_what_decode_gets() -> None:
    """Some models put tokens of their own around what an encode worker has counted."""
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    prompt, spans = [10, 11, *[PLACEHOLDER] * 32, 12], (MediaSpan(item_of(A).media_id, 2, 32),)
    fleet.hops.plan("prefill", Plan(laid_out=(prompt, spans)))
    start = media_start(prompt=TokenPrompt((10, 11, PLACEHOLDER, 12)), media=(A,))
    answer = await collect(fleet.generate(start))
    [decode] = calls_of(fleet, "decode")
    assert list(decode.start.generation.prompt_token_ids) == prompt
    assert decode.start.generation.media == spans
    assert answer.finished[0].usage.num_prompt_tokens == len(prompt)
    # Its encoder is still believed as to what it hands off.
    await collect(fleet.generate(start))
    again = calls_of(fleet, "prefill")[-1].start
    assert [span.num_tokens for span in again.generation.media] == [30]
    fleet.assert_nothing_left()


async def test_encode_workers_are_told_no_higher_priority_than_the_configuration_allows() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", tenants={"vip": TenantConfig(max_priority=7)})
    for tenant in ("any", "vip"):
        await collect(fleet.generate(media_start(tenant=tenant, priority=1000)))
    assert [call.start.context.priority for call in calls_of(fleet, "encode")] == [0, 7]

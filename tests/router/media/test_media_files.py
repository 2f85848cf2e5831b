"""Media that the worker that computes the prompt encodes itself, from files, as there is no encode worker."""

from __future__ import annotations

import asyncio
import random

import pytest

from quartet import errors
from quartet.api.request import TokenPrompt
from quartet.discovery.base import Rank
from quartet.engine.sampling import Sampling
from quartet.kvcache.block_hash import sequence_hashes
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaFile, MediaKind, MediaSize
from quartet.streams.messages import PrefillOutcome
from router.config import AttemptConfig
from router.policy.kv_aware import KvAwareConfig, KvAwarePolicy
from tests.router.fakes import FakePrefill, Plan, collect, expected_tokens
from tests.router.media.test_media_encoded import (
    EXPANDED,
    PROMPT,
    SPANS,
    A,
    B,
    calls_of,
    join,
    media_fleet,
    media_start,
    within,
)
from tests.router.media_fakes import PLACEHOLDER, item_of
from tests.router.test_explain import by_name, explain

TOWERS = {"prefill": ("image",)}
AGGREGATED = {"decode": ("image",)}
ONE = TokenPrompt((10, 11, PLACEHOLDER, 12, 13, 14, 15))
ONE_EXPANDED = [10, 11, *[PLACEHOLDER] * 30, 12, 13, 14, 15]
ONE_SPANS = SPANS[:1]


async def test_prefill_gets_files_and_reports_what_decode_needs() -> None:
    fleet = media_fleet("prefill-0", "decode-0", takes=TOWERS)
    answer = await collect(fleet.generate(media_start()))
    prefill, decode = fleet.hops.calls
    assert [item.source for item in prefill.start.media] == [A, B]
    assert [item.media_id for item in prefill.start.media] == [item_of(A).media_id, item_of(B).media_id]
    assert tuple(prefill.start.generation.prompt_token_ids) == PROMPT.token_ids
    assert prefill.start.generation.media == ()
    assert list(decode.start.generation.prompt_token_ids) == EXPANDED
    assert (decode.start.generation.media, decode.start.media) == (SPANS, ())
    assert answer.accepted.encode is None
    assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 12)
    usage = answer.finished[0].usage
    assert (usage.num_prompt_tokens, usage.num_media_tokens) == (len(EXPANDED), 45)
    fleet.assert_nothing_left()


async def test_a_full_tower_is_no_failed_attempt_and_another_worker_is_preferred() -> None:
    fleet = media_fleet("prefill-0", "decode-0", takes=TOWERS, attempts=AttemptConfig(max_attempts=2))
    full = errors.QueueFullError("full", retry_delay_s=1.0)
    fleet.hops.plan("prefill", *[Plan(error=full)] * 9, Plan(error=errors.EngineError("broken")))
    answer = await collect(fleet.generate(media_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 12)
    assert fleet.pauses == [1.0] * 9 + [0.0]
    join(fleet, "prefill-1", TOWERS)
    fleet.hops.plan("prefill", Plan(error=full))
    await collect(fleet.generate(media_start()))
    first, second = calls_of(fleet, "prefill")[-2:]
    assert first.rank != second.rank
    fleet.assert_nothing_left()


async def test_it_is_routed_by_the_text_before_the_first_item() -> None:
    fleet = media_fleet("prefill-0", "prefill-1", "decode-0", takes=TOWERS)
    text = (10,) * 25
    await collect(fleet.generate(media_start(prompt=TokenPrompt((*text, PLACEHOLDER, *text)), media=(A,))))
    [prefill] = calls_of(fleet, "prefill")
    names = sequence_hashes([*text, PLACEHOLDER, *text], 10)
    assert {rank: match.num_blocks for rank, match in fleet.index.match(names).items()} == {prefill.rank: 2}


@pytest.mark.parametrize(("takes", "kind"), [(TOWERS, "prefill"), (AGGREGATED, "decode")])
async def test_a_known_picture_is_routed_by_its_blocks_and_sent_as_a_file(
    takes: dict[str, tuple[str, ...]], kind: str
) -> None:
    policy = KvAwarePolicy(random.Random(0), KvAwareConfig(gather_s=0.0))
    fleet = media_fleet("prefill-0", "prefill-1", "decode-0", "decode-1", takes=takes, policy=policy)
    start, names = media_start(prompt=ONE, media=(A,)), sequence_hashes(ONE_EXPANDED, 10, media=ONE_SPANS)
    first = await collect(fleet.generate(start))
    assert not fleet.index.match(names), "where its blocks end was unknown"
    assert first.accepted.num_prompt_tokens == len(ONE.token_ids)
    held = Rank(f"{kind}-1")
    fleet.index.store(held, None, names)
    for _ in range(4):
        again = await collect(fleet.generate(start))
        call = calls_of(fleet, kind)[-1]
        assert call.rank == held
        assert (tuple(call.start.generation.prompt_token_ids), call.start.generation.media) == (ONE.token_ids, ())
        assert [item.source for item in call.start.media] == [A]
        assert again.accepted.choices[0].num_matched_tokens == 30
        assert again.accepted.num_prompt_tokens == len(ONE_EXPANDED)
        assert again.token_ids == first.token_ids
        usage = again.finished[0].usage
        assert (usage.num_prompt_tokens, usage.num_media_tokens) == (len(ONE_EXPANDED), 30)
    explanation = await explain(fleet, start)
    assert explanation.num_prompt_tokens == len(ONE_EXPANDED)
    assert by_name(explanation)[held.worker_id].num_matched_tokens == 30
    fleet.assert_nothing_left()


async def test_a_pictures_size_follows_from_the_prompt_lengths_that_a_decode_worker_reported() -> None:
    fleet = media_fleet("decode-0", takes=AGGREGATED)
    nums_reported = []
    for start in (media_start(), media_start(prompt=ONE, media=(A,)), media_start(), media_start()):
        nums_reported.append((await collect(fleet.generate(start))).accepted.num_prompt_tokens)
    assert nums_reported == [len(PROMPT.token_ids), len(ONE.token_ids), len(PROMPT.token_ids), len(EXPANDED)]


@pytest.mark.parametrize(("takes", "kind"), [(TOWERS, "prefill"), (AGGREGATED, "decode")])
async def test_if_a_worker_reports_other_sizes_of_files_than_are_known_its_sizes_are_used(
    takes: dict[str, tuple[str, ...]], kind: str
) -> None:
    fleet = media_fleet("prefill-0", "decode-0", takes=takes)
    name = item_of(A).media_id
    fleet.sizes.learn([MediaSize(media_id=name, num_tokens=33)])
    answer = await collect(fleet.generate(media_start(prompt=ONE, media=(A,))))
    assert answer.token_ids[0] == expected_tokens(5, 0, len(ONE_EXPANDED), 12)
    usage = answer.finished[0].usage
    assert (usage.num_prompt_tokens, usage.num_media_tokens) == (len(ONE_EXPANDED), 30)
    assert list(calls_of(fleet, "decode")[0].start.generation.media) == (list(ONE_SPANS) if kind == "prefill" else [])
    assert fleet.sizes.find([item_of(A)]) == [MediaSize(media_id=name, num_tokens=30)]
    fleet.assert_nothing_left()


@pytest.mark.parametrize(("takes", "kind"), [(TOWERS, "prefill"), (AGGREGATED, "decode")])
async def test_a_prompt_that_a_worker_finds_too_long_has_the_clients_field_and_its_size_is_not_believed(
    takes: dict[str, tuple[str, ...]], kind: str
) -> None:
    fleet = media_fleet("prefill-0", "decode-0", takes=takes)
    fleet.sizes.learn([MediaSize(media_id=item_of(A).media_id, num_tokens=3)])
    too_long = errors.PromptTooLongError("too long", field="generation.prompt_token_ids")
    fleet.hops.plan(kind, Plan(error=too_long), Plan(error=too_long))
    with pytest.raises(errors.PromptTooLongError) as raised:
        await collect(fleet.generate(media_start(prompt=ONE, media=(A,))))
    assert raised.value.field == "token_ids.ids"
    assert fleet.sizes.find([item_of(A)]) is None
    fleet.assert_nothing_left()


async def test_room_is_booked_for_media_at_their_largest() -> None:
    fleet = media_fleet("prefill-0", "decode-0", takes=TOWERS)
    fleet.hops.plan("prefill", Plan(hang_after=0))
    run = fleet.generate(media_start())
    reading = asyncio.create_task(collect(run))
    await within(fleet.hops.hung)
    [pool] = fleet.table.pools(0.0)
    snapshot = fleet.table.snapshot(pool.key, 0.0)
    # 6 tokens, of which two become 64 each at most, and 12 to be generated, in blocks of 10.
    assert snapshot.decode[0].num_promised_blocks == -(-(4 + 2 * 64 + 11) // 10)
    assert snapshot.prefill[0].num_queued_tokens == 4 + 2 * 64
    run.cancel()
    await reading
    fleet.assert_nothing_left()


async def test_after_a_decode_that_died_prefill_gets_the_files_again() -> None:
    fleet = media_fleet("prefill-0", "decode-0", "decode-1", takes=TOWERS)
    fleet.hops.plan("decode", Plan(error=errors.WorkerUnavailableError("gone"), fail_after=4))
    answer = await collect(fleet.generate(media_start(sampling=Sampling())))
    assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 2000 - len(EXPANDED))[: len(answer.token_ids[0])]
    _first, again = calls_of(fleet, "prefill")
    assert tuple(again.start.generation.prompt_token_ids) == PROMPT.token_ids
    assert [item.source for item in again.start.media] == [A, B]
    assert len(again.start.generation.generated_token_ids) == 5
    fleet.assert_nothing_left()


async def test_each_choice_learns_the_prompt() -> None:
    fleet = media_fleet("prefill-0", "decode-0", takes=TOWERS)
    answer = await collect(fleet.generate(media_start(num_choices=2)))
    for choice in range(2):
        assert answer.token_ids[choice] == expected_tokens(5, choice, len(EXPANDED), 12)
        assert answer.finished[choice].usage.num_media_tokens == 45
    fleet.assert_nothing_left()


async def test_a_prefill_that_does_not_report_the_prompt_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = media_fleet("prefill-0", "prefill-1", "decode-0", takes=TOWERS)
    outcome = FakePrefill.outcome
    num_reported = 0

    async def forget(self: FakePrefill) -> PrefillOutcome:
        nonlocal num_reported
        reported = await outcome(self)
        num_reported += 1
        return reported if num_reported > 1 else PrefillOutcome(**{**vars(reported), "prompt_token_ids": ()})

    monkeypatch.setattr(FakePrefill, "outcome", forget)
    answer = await collect(fleet.generate(media_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 12)
    assert len({call.rank for call in calls_of(fleet, "prefill")}) == 2
    fleet.assert_nothing_left()


async def test_aggregated_the_decode_worker_gets_the_files() -> None:
    fleet = media_fleet("decode-0", takes=AGGREGATED)
    answer = await collect(fleet.generate(media_start()))
    [decode] = fleet.hops.calls
    assert [item.source for item in decode.start.media] == [A, B]
    assert tuple(decode.start.generation.prompt_token_ids) == PROMPT.token_ids
    assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 12)
    usage = answer.finished[0].usage
    assert (usage.num_prompt_tokens, usage.num_media_tokens) == (len(EXPANDED), 45)
    fleet.assert_nothing_left()


async def test_aggregated_it_goes_on_elsewhere_when_the_worker_dies() -> None:
    fleet = media_fleet("decode-0", "decode-1", takes=AGGREGATED)
    fleet.hops.plan("decode", Plan(error=errors.WorkerUnavailableError("gone"), fail_after=4))
    answer = await collect(fleet.generate(media_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 12)
    assert [item.source for item in calls_of(fleet, "decode")[1].start.media] == [A, B]
    assert answer.finished[0].usage.num_media_tokens == 45


async def test_decode_ranks_without_a_tower_are_skipped_only_if_they_would_compute_the_prompt() -> None:
    fleet = media_fleet("decode-0", takes=AGGREGATED)
    for number in range(1, 4):
        fleet.join(f"decode-{number}")
    for _ in range(6):
        await collect(fleet.generate(media_start()))
    assert {call.rank for call in calls_of(fleet, "decode")} == {Rank("decode-0")}
    fleet.join("prefill-0", media=("image",), max_media_tokens=64)
    fleet.break_worker("decode-0")
    answer = await collect(fleet.generate(media_start()))
    assert answer.accepted.choices[0].prefill == Rank("prefill-0")


async def test_a_workers_refusal_has_the_clients_field() -> None:
    for takes, kind in ((TOWERS, "prefill"), (AGGREGATED, "decode")):
        fleet = media_fleet("prefill-0", "decode-0", takes=takes)
        fleet.hops.plan(kind, Plan(error=errors.InvalidMediaError("it is torn", field="media[1].file.data")))
        with pytest.raises(errors.InvalidMediaError) as raised:
            await collect(fleet.generate(media_start()))
        assert raised.value.field == "media[1].data"
        fleet.assert_nothing_left()


async def test_an_encode_worker_that_comes_takes_over_from_towers() -> None:
    fleet = media_fleet("prefill-0", "decode-0", takes={"prefill": ("image", "hand_off")})
    await collect(fleet.generate(media_start()))
    assert not calls_of(fleet, "encode")
    fleet.join("encode-0", media=("image",), max_media_tokens=64)
    await collect(fleet.generate(media_start()))
    assert len(calls_of(fleet, "encode")) == 1
    # What it does not take still goes to who does.
    fleet.join("prefill-1", media=("image", "embeddings"), max_media_tokens=64)
    file = MediaFile(MediaKind.EMBEDDINGS, b"tensors")
    await collect(fleet.generate(media_start(prompt=TokenPrompt((1, PLACEHOLDER)), media=(file,))))
    assert calls_of(fleet, "prefill")[-1].rank == Rank("prefill-1")
    fleet.assert_nothing_left()


async def test_each_media_kind_goes_to_the_workers_that_take_it_in_one_pool() -> None:
    """Embeddings to encode workers without a tower, pictures to prefill workers that have one, both to the latter."""
    takes = {"encode": ("embeddings",), "prefill": ("image", "embeddings", "hand_off")}
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", takes=takes)
    rows, one = MediaFile(MediaKind.EMBEDDINGS, b"tensors"), TokenPrompt((1, PLACEHOLDER))
    await collect(fleet.generate(media_start(prompt=one, media=(rows,))))
    [encode] = calls_of(fleet, "encode")
    assert [item.file for item in encode.start.items] == [rows]
    assert isinstance(calls_of(fleet, "prefill")[-1].start.media[0].source, HandOff)
    await collect(fleet.generate(media_start(prompt=one, media=(A,))))
    assert [item.source for item in calls_of(fleet, "prefill")[-1].start.media] == [A]
    await collect(fleet.generate(media_start(media=(A, rows))))
    assert [item.source for item in calls_of(fleet, "prefill")[-1].start.media] == [A, rows]
    assert len(calls_of(fleet, "encode")) == 1
    fleet.assert_nothing_left()


async def test_media_kinds_that_no_single_worker_takes_are_refused_naming_the_item() -> None:
    fleet = media_fleet(
        "encode-0", "prefill-0", "decode-0", takes={"encode": ("embeddings",), "prefill": ("image", "hand_off")}
    )
    rows = MediaFile(MediaKind.EMBEDDINGS, b"tensors")
    with pytest.raises(errors.UnsupportedFieldError, match="embeddings and image") as raised:
        await collect(fleet.generate(media_start(media=(A, rows))))
    assert raised.value.field == "media[1].embeddings"
    fleet.assert_nothing_left()

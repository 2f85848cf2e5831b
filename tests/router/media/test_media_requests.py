"""Requests with media that are refused, explained, placed for their client, or resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from quartet import errors
from quartet.api.placement import PlacedRequest
from quartet.api.request import ChatPrompt, GenerateStart, Resume, TokenPrompt
from quartet.discovery.base import Rank
from quartet.engine.sampling import Sampling
from quartet.kvcache.block_hash import MediaSpan
from quartet.media.items import MediaFile, MediaItem, MediaKind, MediaPart, MediaSize, MediaUrl
from quartet.rpc.channels import MAX_API_MESSAGE_BYTES
from quartet.streams.messages import SignedPlacement
from quartet.text.chat_message import ChatMessage
from quartet.text.model_text import ModelText
from quartet.v1 import decode_pb2
from router.media.encode import KnownSizes
from router.media.queue import MediaQueue
from tests.router.fakes import MEDIA_CONFIG, MODEL_TEXT, TIMEOUT_S, Fleet, Plan, collect, expected_tokens
from tests.router.media.test_media_encoded import EXPANDED, SPANS, A, B, calls_of, media_fleet, media_start, within
from tests.router.media.test_media_files import AGGREGATED, TOWERS
from tests.router.media_fakes import MEDIA_TEXT, PLACEHOLDER, FakeEncode, item_of, picture
from tests.router.test_explain import by_name, explain
from tests.router.test_generate import make_start

TENSORS = MediaFile(MediaKind.EMBEDDINGS, b"tensors")
HALF = MediaFile(MediaKind.IMAGE, bytes(MAX_API_MESSAGE_BYTES // 2 + 1))
CHAT = ChatPrompt((ChatMessage("user", ("Look: ", A)),))


async def refusal(fleet: Fleet, **changes: Any) -> errors.ServingError:
    with pytest.raises(errors.ServingError) as raised:
        await collect(fleet.generate(media_start(**changes)))
    fleet.assert_nothing_left()
    assert not fleet.hops.calls
    return raised.value


async def test_an_impossible_request_is_refused_by_the_clients_field_before_any_worker_is_called() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    one, none = TokenPrompt((1, PLACEHOLDER)), TokenPrompt((1, 2))
    torn = MediaUrl("http://nowhere/")
    for changes, kind, field in (
        ({"media": (A, torn)}, errors.MediaFetchError, "media[1].url"),
        ({"prompt": one}, errors.InvalidRequestError, "media[1]"),
        ({"prompt": none}, errors.InvalidRequestError, "media[0]"),
        ({"media": (A,)}, errors.InvalidRequestError, "media"),
        ({"prompt": one, "media": ()}, errors.InvalidRequestError, "media"),
    ):
        error = await refusal(fleet, **changes)
        assert (type(error), error.field) == (kind, field)


async def test_media_that_are_too_large_in_total_are_refused_before_they_are_sent() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    error = await refusal(fleet, media=(HALF, HALF))
    assert (type(error), error.field) == (errors.MediaTooLargeError, "media[1].data")


async def test_media_that_can_never_be_taken_are_refused_before_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(MediaQueue, "enter")
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    url, too_large = (
        MediaUrl("http://nowhere/"),
        MediaFile(MediaKind.IMAGE, bytes(MEDIA_CONFIG.max_file_size_bytes + 1)),
    )
    long_url = MediaUrl("data:," + "%41" * MEDIA_CONFIG.max_file_size_bytes)
    for media, kind, message, field in (
        ([url] * 65, errors.InvalidRequestError, "at most 64", "media[64].url"),
        # A URL's file may have 64 MiB, and all files together 1 GiB.
        ([url] * 17, errors.MediaTooLargeError, "all files", "media[15].url"),
        ([A, too_large], errors.MediaTooLargeError, "max_file_size_mb allows", "media[1].data"),
        ([A, long_url], errors.MediaTooLargeError, "characters", "media[1].url"),
    ):
        error = await refusal(fleet, media=media, prompt=TokenPrompt((1, *[PLACEHOLDER] * len(media))))
        assert (type(error), error.field) == (kind, field)
        assert message in str(error)


@pytest.mark.parametrize("path", ["generate", "explain", "place"])
async def test_what_came_in_a_request_counts_from_its_arrival_until_it_has_ended(path: str) -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    fleet.media.gate.clear()
    url = MediaUrl("data:;base64," + "A" * 87)
    start = media_start(media=(A, url), tenant="a")

    async def run() -> None:
        if path == "generate":
            await collect(fleet.generate(start))
        else:
            await getattr(fleet.pipeline, path)(start)

    task = asyncio.create_task(run())
    await within(fleet.media.asked)
    num_copied = 0 if path == "generate" else 2 * (len(A.data) + 100)  # gRPC keeps a unary call's message
    assert fleet.media_queue.num_bytes == len(A.data) + 2 * 100 + num_copied, "a URL counts as text and as a file"
    fleet.media.gate.set()
    with pytest.raises(errors.MediaFetchError):  # the fleet follows no URLs
        await task
    fleet.assert_nothing_left()


@pytest.mark.parametrize(
    "media",
    [(A, MediaUrl("data:;base64," + "A" * 87)), (MediaUrl("http://" + "a" * 43), MediaUrl("http://" + "a" * 43))],
)
async def test_once_its_files_are_known_a_request_counts_what_it_has(
    media: Sequence[MediaPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(*_: object) -> tuple[MediaItem, ...]:
        return item_of(A), item_of(B)

    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    monkeypatch.setattr(fleet.media, "fetch", fetch)
    fleet.hops.plan("encode", Plan(hang_after=0))
    calls = [asyncio.create_task(collect(fleet.generate(media_start(media=media))))]
    await within(fleet.hops.hung)
    assert fleet.media_queue.num_bytes == len(A.data) + len(B.data) + 100, "its URLs stay beside their files"
    calls[0].cancel()
    await asyncio.wait(calls)
    fleet.assert_nothing_left()


async def test_what_waiting_requests_brought_is_refused_to_the_tenant_that_has_most_of_the_memory() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    most = fleet.media_queue.hold("hog", MEDIA_CONFIG.max_held_bytes * 9 // 10)
    with pytest.raises(errors.QueueFullError, match="memory") as raised:
        await collect(fleet.generate(media_start(tenant="hog")))
    assert raised.value.retry_delay_s == 1.0
    with pytest.raises(errors.QueueFullError):
        await explain(fleet, media_start(tenant="hog"))
    await collect(fleet.generate(media_start(tenant="other")))
    most.close()
    fleet.assert_nothing_left()


async def test_an_explained_request_waits_for_memory_before_its_files_are_fetched() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    most = fleet.media_queue.hold("other", MEDIA_CONFIG.max_held_bytes - 1)
    urls = (MediaUrl("http://nowhere/"), MediaUrl("http://nowhere/"))
    calls = [asyncio.create_task(explain(fleet, media_start(media=urls, tenant="a"))) for _ in range(3)]
    for _ in range(50):
        await asyncio.sleep(0)
    assert fleet.media_queue.length == 3 and not fleet.media.asked.is_set()
    most.close()
    for call in calls:
        with pytest.raises(errors.MediaFetchError):
            await call
    assert fleet.media.asked.is_set()
    fleet.assert_nothing_left()


async def test_a_model_without_media_takes_none() -> None:
    fleet = media_fleet("prefill-0", "decode-0")
    fleet.texts.text = MODEL_TEXT
    error = await refusal(fleet)
    assert (type(error), error.field) == (errors.UnsupportedFieldError, "media[0]")


async def test_media_kinds_that_no_worker_takes_are_refused_and_those_whose_workers_are_gone_are_unavailable() -> None:
    embeddings = MediaFile(MediaKind.EMBEDDINGS, b"tensors")
    fleet = media_fleet("prefill-0", "decode-0", takes=TOWERS)
    error = await refusal(fleet, media=(A, embeddings))
    assert (type(error), error.field) == (errors.UnsupportedFieldError, "media[1].embeddings")
    fleet.break_worker("prefill-0")
    assert isinstance(await refusal(fleet), errors.WorkerUnavailableError)
    # What this one hands off is never pulled.
    lonely = media_fleet("encode-0", "prefill-0", "decode-0", takes={"encode": ("image",)})
    assert isinstance(await refusal(lonely), errors.UnsupportedFieldError)


async def test_prompts_that_are_too_long_with_their_media_are_refused() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", takes=None)
    long = media_start(media=(picture(1990), picture(15)))
    with pytest.raises(errors.PromptTooLongError):
        await collect(fleet.generate(long))
    fleet.assert_nothing_left()


@pytest.mark.parametrize(
    ("takes", "num_decode_blocks"), [(TOWERS, 7), (TOWERS, 100), (AGGREGATED, 7)], ids=["all", "prefill", "decode"]
)
async def test_a_prompt_whose_files_might_make_it_too_long_is_left_to_the_worker_to_refuse(
    takes: dict[str, tuple[str, ...]], num_decode_blocks: int
) -> None:
    fleet = media_fleet(takes=takes)
    for role, num_blocks in (("prefill", 7), ("decode", num_decode_blocks)):
        fleet.join(f"{role}-0", num_blocks=num_blocks, media=takes.get(role, ()), max_media_tokens=64)
    if num_decode_blocks == 7:
        many = TokenPrompt((10, *[PLACEHOLDER] * 59))
        error = await refusal(fleet, prompt=many, media=[picture(1)] * 59)
        assert (type(error), error.field) == (errors.PromptTooLongError, "sampling.max_tokens"), (
            "one token each at least"
        )
    # 6 tokens, of which two may become 64 each; a rank holds 70, and with the answer they are 61.
    answer = await collect(fleet.generate(media_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 12)
    fleet.assert_nothing_left()


@pytest.mark.parametrize("takes", [TOWERS, AGGREGATED])
async def test_an_answer_may_fill_what_files_leave_of_the_model_length(takes: dict[str, tuple[str, ...]]) -> None:
    fleet = media_fleet(takes=takes)
    fleet.hops.max_sequence_tokens = 71
    for worker_id in ("prefill-0", "decode-0"):
        role = worker_id.partition("-")[0]
        fleet.join(worker_id, num_blocks=7, media=takes.get(role, ()), max_media_tokens=64)
    for _ in range(3):  # by then their sizes are known
        answer = await collect(fleet.generate(media_start(sampling=Sampling(), media=(A, A))))
        assert len(answer.token_ids[0]) == 71 - 64
    fleet.assert_nothing_left()


async def test_a_prompt_that_prefill_reports_as_too_long_for_max_tokens_is_refused() -> None:
    fleet = media_fleet("prefill-0", takes=TOWERS)
    fleet.join("decode-0", num_blocks=5)
    with pytest.raises(errors.PromptTooLongError) as raised:
        await collect(fleet.generate(media_start()))
    assert raised.value.field == "sampling.max_tokens"
    fleet.assert_nothing_left()
    assert not calls_of(fleet, "decode")
    # Their sizes are known by now.
    fleet.hops.calls.clear()
    assert isinstance(await refusal(fleet), errors.PromptTooLongError)


async def test_a_chat_has_its_media_in_its_messages() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    fleet.texts.text = chat_text(1)
    await collect(fleet.generate(make_start(prompt=CHAT)))
    assert [item.file for item in calls_of(fleet, "encode")[0].start.items] == [A]
    twice = make_start(prompt=CHAT, media=(A,))
    assert await refused_field(fleet, twice) == "media"


@pytest.mark.parametrize(
    ("contents", "num_ranks", "field"),
    [
        (["Look: ", ("Here: ", MediaUrl("http://nowhere/"))], 1, "chat.messages[1].parts[1].media.url"),
        ([(A, MediaUrl("http://nowhere/"))], 2, "chat.messages[0].parts[1].media.url"),
        ([("one", A), "and", ("two", TENSORS)], 2, "chat.messages[2].parts[1].media.embeddings"),
        ([("one", A), ("two", HALF, HALF)], 3, "chat.messages[1].parts[2].media.data"),
        (["one", (A, B)], 0, "chat.messages[1].parts[0].media"),
        ([(A, B)], 1, "chat.messages"),  # the template left out one of them: it is unknown which
        ([(A, B)], 3, "chat.messages"),
        (["nothing"], 1, "chat.messages"),
    ],
)
async def test_an_error_in_one_item_of_a_chat_names_its_message_and_part(
    contents: list[Any], num_ranks: int, field: str
) -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", takes={"encode": ("image",), "prefill": ("hand_off",)})
    fleet.texts.text = chat_text(num_ranks)
    chat = ChatPrompt(tuple(ChatMessage("user", content) for content in contents))
    assert await refused_field(fleet, make_start(prompt=chat)) == field
    fleet.assert_nothing_left()


async def test_an_encode_workers_refusal_of_a_chats_item_names_its_message_and_part() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    fleet.texts.text = chat_text(2)
    fleet.hops.plan("encode", Plan(error=errors.InvalidMediaError("it is torn", field="items[1].file.data")))
    chat = ChatPrompt((ChatMessage("user", (A, "or", B)),))
    assert await refused_field(fleet, make_start(prompt=chat)) == "chat.messages[0].parts[2].media.data"


async def refused_field(fleet: Fleet, start: GenerateStart) -> str | None:
    with pytest.raises(errors.ServingError) as raised:
        await collect(fleet.generate(start))
    return raised.value.field


def chat_text(num_ranks: int) -> ModelText:
    """A model whose template lays out so many ranks for media, whatever the chat."""

    class ChatText(ModelText):
        def encode_messages(self, messages: object, add_generation_prompt: bool = True, **extra: Any) -> list[int]:
            return [10, *[PLACEHOLDER] * num_ranks, 11]

    known = MODEL_TEXT
    return ChatText(known.tokenizer, known.chat_template, known.eos_token_ids, known.vocab_size, MEDIA_TEXT)


async def test_explain_encodes_nothing_and_names_the_ranks_that_do_not_take_the_media() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    fleet.join("prefill-1")
    explanation = await explain(fleet, media_start())
    assert fleet.hops.calls == []
    assert explanation.num_prompt_tokens == 4 + 2 * 64, "at most, as no worker has reported it"
    options = by_name(explanation)
    assert options["prefill-1"].obstacle == "does not take media as hand_off"
    assert options["prefill-0"].is_chosen and options["decode-0"].is_chosen
    await collect(fleet.generate(media_start()))
    assert (await explain(fleet, media_start())).num_prompt_tokens == len(EXPANDED)
    fleet.assert_nothing_left()


async def test_explain_names_the_decode_rank_that_does_not_take_the_media() -> None:
    fleet = media_fleet("decode-0", takes=AGGREGATED)
    fleet.join("decode-1")
    options = by_name(await explain(fleet, media_start()))
    assert options["decode-1"].obstacle == "does not take media as image"
    assert options["decode-0"].is_chosen


async def place(fleet: Fleet, *, resume: Resume | None = None, **changes: Any) -> PlacedRequest:
    async with asyncio.timeout(TIMEOUT_S):
        return await fleet.pipeline.place(media_start(**changes), resume=resume)


def spans_of(signed: object) -> list[MediaSpan]:
    assert isinstance(signed, SignedPlacement)
    start = decode_pb2.SignedStart.FromString(signed.signed_start).start
    assert not start.media
    return [MediaSpan(span.media_id, span.first_position, span.num_tokens) for span in start.generation.media]


@pytest.mark.parametrize("encoder", [("encode-0",), ()])
async def test_the_signed_start_of_a_placed_request_has_spans_and_no_media(encoder: tuple[str, ...]) -> None:
    takes = None if encoder else TOWERS
    fleet = media_fleet(*encoder, "prefill-0", "decode-0", takes=takes)
    placed = await place(fleet)
    [choice] = placed.choices
    assert placed.num_prompt_tokens == len(EXPANDED)
    assert choice.token_ids == tuple(expected_tokens(5, 0, len(EXPANDED), 1))
    assert spans_of(choice.next) == list(SPANS)
    # What is left is the client's.
    assert (fleet.hops.num_open, len(fleet.hops.held), fleet.hops.kept) == (0, 1, set())


async def test_a_placed_request_is_never_prefilled_where_it_is_decoded() -> None:
    takes = {"encode": ("image",), "prefill": ("hand_off",), "decode": ("hand_off",)}
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", takes=takes)
    placed = await place(fleet, prompt=TokenPrompt((PLACEHOLDER,)), media=(picture(1),))
    assert placed.choices[0].placement is not None
    assert placed.choices[0].placement.prefill == Rank("prefill-0")


@pytest.mark.parametrize("takes", [AGGREGATED, {"encode": ("image",), "decode": ("hand_off",)}])
async def test_a_request_that_only_decode_workers_could_compute_is_not_placed(
    takes: dict[str, tuple[str, ...]],
) -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", takes=takes)
    with pytest.raises(errors.UnsupportedFieldError, match="Generate") as raised:
        await place(fleet)
    assert raised.value.field == "media[0].data"
    fleet.assert_nothing_left()


async def test_each_placed_choice_is_prefilled_from_hand_offs_of_its_own() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    placed = await place(fleet, num_choices=3)
    for choice in placed.choices:
        assert choice.token_ids == tuple(expected_tokens(5, choice.choice, len(EXPANDED), 1))
        assert spans_of(choice.next) == list(SPANS)
    assert len(calls_of(fleet, "encode")) == len(calls_of(fleet, "prefill")) == 3
    # What is left is the client's: a hand-off of KV for each choice.
    assert (fleet.hops.num_open, len(fleet.hops.held), fleet.hops.kept) == (0, 3, set())


async def test_placed_choices_that_are_cancelled_leave_nothing() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    fleet.hops.plan("encode", Plan(hang_after=1))
    placing = asyncio.create_task(place(fleet, num_choices=2))
    async with asyncio.timeout(TIMEOUT_S):
        await fleet.hops.hung.wait()
    placing.cancel()
    await asyncio.wait([placing])
    fleet.assert_nothing_left()


@pytest.mark.parametrize("is_placed", [False, True])
async def test_a_request_is_resumed_by_the_same_start(is_placed: bool) -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    given = expected_tokens(5, 0, len(EXPANDED), 4)
    resume = Resume(request_id="00ff" * 8, attempt=2, seed=5, generated_token_ids=given)
    if is_placed:
        [choice] = (await place(fleet, resume=resume)).choices
        assert choice.token_ids == tuple(expected_tokens(5, 0, len(EXPANDED), 5)[4:])
        assert spans_of(choice.next) == list(SPANS)
    else:
        answer = await collect(fleet.generate(media_start(), resume=replace(resume, generated_token_ids=())))
        assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 12)
    [encode] = calls_of(fleet, "encode")
    assert (encode.start.context.request_id, encode.start.context.attempt) == ("00ff" * 8, 2)
    assert calls_of(fleet, "prefill")[0].start.context.attempt == 2


async def test_an_answer_may_fill_what_the_media_leave_of_the_model_length() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", takes=None)
    answer = await collect(fleet.generate(media_start(sampling=Sampling())))
    assert len(answer.token_ids[0]) == 1001 - len(EXPANDED)  # 100 blocks of 10, and the last token needs no room


def media_sizes(*sizes: tuple[MediaFile, int]) -> list[MediaSize]:
    return [MediaSize(media_id=item_of(file).media_id, num_tokens=num_tokens) for file, num_tokens in sizes]


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_if_an_encode_worker_reports_other_sizes_than_are_known_its_sizes_are_used(num_choices: int) -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    fleet.sizes.learn(media_sizes((A, 33), (B, 12)))
    answer = await collect(fleet.generate(media_start(num_choices=num_choices)))
    for choice in range(num_choices):
        assert answer.token_ids[choice] == expected_tokens(5, choice, len(EXPANDED), 12)
        usage = answer.finished[choice].usage
        assert (usage.num_prompt_tokens, usage.num_media_tokens, usage.num_attempts) == (len(EXPANDED), 45, 1)
    assert all(call.start.generation.media == SPANS for call in calls_of(fleet, "prefill"))
    assert (await collect(fleet.generate(media_start()))).accepted.num_prompt_tokens == len(EXPANDED)
    fleet.assert_nothing_left()


async def test_if_encode_workers_disagree_on_a_size_the_one_that_encodes_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = media_fleet("encode-0", "encode-1", "prefill-0", "decode-0")
    fleet.hops.plan("encode", Plan(error=errors.WorkerUnavailableError("gone"), fail_after=1))
    sizes_of_one = FakeEncode.sizes

    async def sizes(self: FakeEncode) -> Sequence[MediaSize]:
        right = await sizes_of_one(self)
        is_first = len(calls_of(fleet, "encode")) == 1
        return [replace(size, num_tokens=size.num_tokens + 1) for size in right] if is_first else right

    monkeypatch.setattr(FakeEncode, "sizes", sizes)
    answer = await collect(fleet.generate(media_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, len(EXPANDED), 12)
    assert calls_of(fleet, "prefill")[0].start.generation.media == SPANS
    fleet.assert_nothing_left()


@pytest.mark.parametrize(
    ("known", "items", "num_tokens", "sizes"),
    [
        ([], [A], 30, [30]),
        ([], [A, B], 45, None),
        ([(A, 30)], [A, B], 45, [30, 15]),
        ([(A, 30)], [B, A, B], 60, [15, 30, 15]),
        ([], [A, A], 61, None),
        ([(A, 30), (B, 15)], [A, B], 45, [30, 15]),
        ([(A, 30), (B, 15)], [A, B], 46, None),
        ([(A, 30)], [A, A], 46, [23, 23]),
        ([(A, 45)], [A, B], 45, None),
    ],
)
def test_a_size_follows_from_the_prompt_length_if_all_other_sizes_are_known(
    known: list[tuple[MediaFile, int]], items: list[MediaFile], num_tokens: int, sizes: list[int] | None
) -> None:
    sizes_of_all = KnownSizes()
    sizes_of_all.learn(media_sizes(*known))
    sizes_of_all.learn_total(list(map(item_of, items)), num_tokens)
    found = sizes_of_all.find(list(map(item_of, items)))
    assert (found and [size.num_tokens for size in found]) == sizes


def test_known_sizes_are_bounded_and_the_least_used_go_first() -> None:
    known = KnownSizes(2)
    items = [item_of(picture(number, "xyz"[number - 1])) for number in (1, 2, 3)]
    sizes = [MediaSize(media_id=item.media_id, num_tokens=1) for item in items]
    known.learn(sizes[:2])
    assert known.find(items[:1]) == sizes[:1]
    known.learn(sizes[2:])
    assert known.find(items[:1]) == sizes[:1] and known.find(items[2:]) == sizes[2:]
    assert known.find(items[:2]) is None

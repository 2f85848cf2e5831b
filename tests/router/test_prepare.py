"""What workers are sent of a request, beside what the client said."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import NoReturn

import pytest

from quartet import errors
from quartet.api.convert.unread import UnreadStart
from quartet.api.request import ChatPrompt, GenerateStart, Resume, TextPrompt, TokenPrompt
from quartet.engine.base import FinishReason
from quartet.engine.sampling import MAX_STOP_IDS, Sampling
from quartet.rpc.message_limits import MAX_NUMBER_BYTES, MAX_TEXT_BYTES, MaxBytes
from quartet.text.chat_message import ChatMessage
from quartet.text.chat_template import ChatTemplate
from quartet.text.model_text import ModelText
from quartet.text.tokenizer import SpecialTokens
from quartet.v1 import router_pb2 as pb
from quartet.v1 import types_pb2
from router.prepare import RouterRequest, max_message_bytes
from router.thread_queue import ThreadQueue
from tests.router.fakes import EOS_ID, MODEL_TEXT, Fleet, Plan, collect
from tests.router.media.test_media_encoded import media_fleet
from tests.router.records import ALL_SAMPLING_FIELDS
from tests.router.test_generate import make_start


async def stop_token_ids(sampling: Sampling, **record: object) -> tuple[int, ...]:
    """Those that both workers are sent."""
    fleet = Fleet("prefill-0", "decode-0", **record)
    await collect(fleet.generate(make_start(sampling=sampling)))
    [sent] = {call.start.generation.sampling.stop_token_ids for call in fleet.hops.calls}
    return sent


def make_prepared(text: ModelText, stop_token_ids: tuple[int, ...]) -> RouterRequest:
    request = RouterRequest(make_start(sampling=Sampling(stop_token_ids=stop_token_ids)))
    request.take(request.asked.read())
    request.pool = Fleet("decode-0").table.pools(0.0)[0]
    request.text = text
    request.prompt_token_ids = (1, 2)
    request.max_output_tokens = 12
    return request


async def test_workers_get_the_end_of_turn_token_that_only_the_tokenizer_names() -> None:
    assert await stop_token_ids(Sampling(max_tokens=2)) == (EOS_ID,)
    assert await stop_token_ids(Sampling(max_tokens=2, stop_token_ids=(7, EOS_ID, 7))) == (7, EOS_ID)


async def test_a_request_with_ignore_eos_gets_only_its_own_stop_ids() -> None:
    sampling = Sampling(max_tokens=2, ignore_eos=True, stop_token_ids=(7,))
    assert await stop_token_ids(sampling) == (7,)


async def test_workers_that_take_no_stop_ids_get_none() -> None:
    fields = tuple(name for name in ALL_SAMPLING_FIELDS if name != "stop_token_ids")
    assert await stop_token_ids(Sampling(max_tokens=2), sampling_fields=fields) == ()


def test_the_number_of_stop_ids_for_workers_is_bounded() -> None:
    given = tuple(range(EOS_ID + 1, EOS_ID + 1 + MAX_STOP_IDS))
    assert make_prepared(MODEL_TEXT, given).sampling.stop_token_ids == given
    assert make_prepared(MODEL_TEXT, given[1:]).sampling.stop_token_ids == (*given[1:], EOS_ID)


def test_an_end_of_turn_token_outside_the_vocabulary_is_not_sent() -> None:
    text = replace(MODEL_TEXT, eos_token_ids=(MODEL_TEXT.vocab_size, EOS_ID))
    assert make_prepared(text, ()).sampling.stop_token_ids == (EOS_ID,)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_before_min_tokens_an_end_of_sequence_is_a_token_like_any_other_also_after_a_loss(is_lost: bool) -> None:
    fleet = Fleet("decode-0")
    fleet.hops.eos_at = 3
    if is_lost:
        fleet.hops.plan("decode", Plan(error=errors.WorkerUnavailableError("gone"), fail_after=4))
    answer = await collect(fleet.generate(make_start(sampling=Sampling(max_tokens=8, min_tokens=4))))
    assert (answer.finished[0].reason, len(answer.token_ids[0])) == (FinishReason.LENGTH, 8)


async def test_a_chat_of_many_empty_messages_is_laid_out_off_the_event_loop() -> None:
    fleet, threads = Fleet("decode-0", max_model_len=100_000, num_blocks=10_000), set[int]()

    class Template:
        sources = ""

        def render(self, messages: Sequence[ChatMessage], *_: object, **__: object) -> str:
            threads.add(threading.get_ident())
            return "a"

    fleet.texts.text = replace(MODEL_TEXT, chat_template=Template())  # type: ignore[arg-type]
    for num_messages, is_inline in ((10, True), (4_000, False)):
        threads.clear()
        prompt = ChatPrompt((ChatMessage("user", ""),) * num_messages)
        await collect(fleet.generate(make_start(prompt=prompt)))
        assert (threads == {threading.get_ident()}) is is_inline
    fleet.assert_nothing_left()


class Unread(Sequence[int]):
    """Token ids whose number may be asked for, and nothing else."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: object) -> NoReturn:
        raise AssertionError("no id may be looked at")

    __iter__ = __contains__ = __getitem__  # type: ignore[assignment]


async def test_a_prompt_that_is_too_long_is_refused_by_its_length() -> None:
    fleet = Fleet("decode-0", max_model_len=100)
    with pytest.raises(errors.PromptTooLongError) as caught:
        await collect(fleet.generate(make_start(prompt=TokenPrompt(Unread(1 << 20)))))
    assert caught.value.field == "token_ids.ids"
    resume = Resume(request_id="0" * 32, attempt=1, seed=1, generated_token_ids=Unread(1 << 20))
    with pytest.raises(errors.InvalidRequestError) as refused:
        await collect(fleet.generate(make_start(seed=1), resume=resume))
    assert refused.value.field == "resume.generated_token_ids"


async def test_a_text_that_is_too_long_for_its_model_waits_for_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ThreadQueue, "run")
    fleet = Fleet("decode-0", max_model_len=100)
    with pytest.raises(errors.PromptTooLongError) as caught:
        await collect(fleet.generate(make_start(prompt=TextPrompt("a" * 1_000_000))))
    assert caught.value.field == "text"


async def test_a_chat_whose_text_is_too_long_for_its_model_is_refused_by_its_field() -> None:
    fleet = Fleet("decode-0", max_model_len=100)
    fleet.texts.text = replace(MODEL_TEXT, chat_template=ChatTemplate("{{ messages[0].content }}", SpecialTokens()))
    with pytest.raises(errors.PromptTooLongError) as caught:
        await collect(fleet.generate(make_start(prompt=ChatPrompt((ChatMessage("user", "a" * 1_000_000),)))))
    assert caught.value.field == "chat.messages"
    fleet.assert_nothing_left()


def test_the_text_of_a_message_is_bounded_by_the_longest_prompt_of_all_models() -> None:
    def room(*max_model_lens: int, text: ModelText | None = MODEL_TEXT) -> int:
        fleet = Fleet()
        for number, max_model_len in enumerate(max_model_lens):
            fleet.join(f"decode-{number}", model_name=f"model-{number}", max_model_len=max_model_len, num_blocks=10**6)
        return max_message_bytes(fleet.table.pools(0.0), lambda _pool: text).text

    token_bytes = MODEL_TEXT.tokenizer.longest_token_bytes
    assert room(1_000, 9_000) - room(1_000) == 8_000 * token_bytes
    assert room(1_000, text=None) - room(1_000) == 1_000 * (256 - token_bytes)
    assert room(10**9) == room() == MAX_TEXT_BYTES


def test_the_numbers_of_a_message_are_bounded_by_the_longest_prompt_of_all_models() -> None:
    def most(*max_model_lens: int) -> MaxBytes:
        fleet = Fleet()
        for number, max_model_len in enumerate(max_model_lens):
            fleet.join(f"decode-{number}", model_name=f"model-{number}", max_model_len=max_model_len, num_blocks=10**6)
        return max_message_bytes(fleet.table.pools(0.0), lambda _pool: None)

    assert most(1_000, 9_000).numbers - most(1_000).numbers == 8_000 * 5 * 4
    assert most(10**9).numbers == most().numbers == MAX_NUMBER_BYTES


def test_only_where_a_model_takes_files_a_message_may_hold_them() -> None:
    fleet = Fleet("decode-0")
    assert max_message_bytes([], lambda _pool: None).has_files
    assert not max_message_bytes(fleet.table.pools(0.0), lambda _pool: None).has_files
    for workers in (("encode-0", "prefill-0", "decode-0"), ("prefill-0", "decode-0")):
        pools = media_fleet(*workers).table.pools(0.0)
        assert max_message_bytes(pools, lambda _pool: None).has_files, "an encode worker is here, or may come"


CHAT = pb.GenerateStart(
    chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="a")] * 4096),
    sampling=types_pb2.Sampling(max_tokens=2),
)


class CountedStart(UnreadStart):
    """Counts the steps in which starts are read."""

    __slots__ = ()
    num_steps = 0

    def steps(self) -> Generator[int, None, GenerateStart]:
        """As ``AskedStart`` says."""
        steps = super().steps()
        while True:
            try:
                yield next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                CountedStart.num_steps += 1


def chat_fleet(**record: object) -> Fleet:
    fleet = Fleet("decode-0", **record)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fleet.texts.text = replace(MODEL_TEXT, chat_template=ChatTemplate(template, SpecialTokens()))
    return fleet


async def test_few_of_many_long_chats_are_read_in_a_turn_and_another_tenant_goes_between() -> None:
    fleet = chat_fleet(max_model_len=8192, num_blocks=4096)
    CountedStart.num_steps = 0
    attacks = [fleet.generate(CountedStart(CHAT).for_tenant("attacker")) for _ in range(100)]
    seen = []
    for _ in range(8):
        before = CountedStart.num_steps
        await asyncio.sleep(0)
        seen.append(CountedStart.num_steps - before)
    # In the first turn all say what they cost, and the first go on.
    assert seen[0] <= 100 + 3
    assert max(seen[1:]) <= 3
    await collect(fleet.generate(make_start(tenant="other")))
    assert CountedStart.num_steps < 150, "the others wait"
    for attack in attacks:
        attack.cancel()
    for attack in attacks:
        await collect(attack)
    fleet.assert_nothing_left()


async def test_what_can_be_refused_at_once_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(UnreadStart, "read")
    monkeypatch.delattr(UnreadStart, "steps")
    fleet = Fleet("decode-0", max_model_len=16_384)
    too_many = pb.GenerateStart()
    too_many.CopyFrom(CHAT)
    too_many.num_choices = 65
    too_long = pb.GenerateStart(token_ids=pb.TokenIds(ids=[1] * 16_385))
    for message, field in ((too_many, "num_choices"), (too_long, "token_ids.ids")):
        with pytest.raises(errors.InvalidRequestError) as caught:
            await collect(fleet.generate(UnreadStart(message)))
        assert caught.value.field == field
    fleet.assert_nothing_left()


async def test_a_long_chat_is_not_kept_once_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = chat_fleet(max_model_len=32_768, num_blocks=16_384)
    prompts = []
    place = RouterRequest.make_outputs

    def note(request: RouterRequest, *args: object) -> object:
        prompts.append(request.start.prompt)
        return place(request, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(RouterRequest, "make_outputs", note)
    await collect(fleet.generate(UnreadStart(CHAT)))
    await collect(fleet.generate(make_start(prompt=TextPrompt("a" * 17_000), sampling=Sampling())))
    short = ChatPrompt((ChatMessage("user", "a"),))
    await collect(fleet.generate(make_start(prompt=short)))
    assert prompts == [ChatPrompt(()), TextPrompt(""), short]


async def test_media_of_a_long_chat_are_found_when_it_is_read() -> None:
    fleet = chat_fleet()
    start = pb.GenerateStart()
    start.CopyFrom(CHAT)
    picture = pb.ContentPart(media=pb.MediaPart(url="https://example.com/a.png"))
    start.chat.messages.append(pb.ChatMessage(role="user", parts=[picture] * 100))
    del start.chat.messages[:1000]
    with pytest.raises(errors.InvalidRequestError, match="media items") as caught:
        await collect(fleet.generate(UnreadStart(start)))
    assert caught.value.field.startswith("chat.messages[3096].parts")
    fleet.assert_nothing_left()


async def test_files_of_a_long_chat_count_while_it_waits_to_be_read() -> None:
    fleet = chat_fleet()
    file = pb.ContentPart(media=pb.MediaPart(data=b"x" * 1_000_000))
    messages = [pb.ChatMessage(role="user", parts=[file]), *[pb.ChatMessage(role="user")] * 4095]
    asked = pb.GenerateStart(chat=pb.ChatPrompt(messages=messages))
    requests = [fleet.generate(UnreadStart(asked)) for _ in range(20)]
    await asyncio.sleep(0)
    assert fleet.media_queue.num_bytes > 20_000_000
    for request in requests:
        with pytest.raises(errors.InvalidRequestError, match="no media"):
            await collect(request)
    assert fleet.media_queue.num_bytes == 0
    fleet.assert_nothing_left()

"""A request that goes on after a break gives exactly what it would have given without one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from quartet.api.request import Accepted, ChoiceFinished, Delta, Resume, TextOptions
from quartet.engine.base import FinishReason
from quartet.engine.sampling import Sampling
from quartet.errors import InvalidRequestError, ServingError, WorkerUnavailableError
from quartet.text.text_stream import TextDelta, TextStream
from router.intake import Intake
from tests.router.fakes import Fleet, collect, expected_tokens, text_of
from tests.router.test_generate import make_start

_REQUEST_ID = "00ff" * 8
_OUTPUT = expected_tokens(5, 0, 20, 12)
_LONG = Sampling(max_tokens=16_000, ignore_eos=True)


def _resume(**changes: object) -> Resume:
    return replace(Resume(request_id=_REQUEST_ID, attempt=1, seed=5), **changes)  # type: ignore[arg-type]


async def _parts(options: TextOptions) -> list[Delta]:
    fleet = Fleet("decode-0")
    parts = [part async for part in fleet.generate(make_start(text_options=options)).parts()]
    return [part for part in parts if isinstance(part, Delta)]


@pytest.mark.parametrize(
    "options",
    [
        TextOptions(),
        TextOptions(stop_strings=(text_of(_OUTPUT[6:9]),)),
        TextOptions(stop_strings=(text_of(_OUTPUT[3:6]) + "?", text_of(_OUTPUT[8:10])), include_stop_string=True),
        TextOptions(omit_text=True),
    ],
    ids=["plain", "stop", "near stop", "ids only"],
)
async def test_wherever_the_stream_broke_no_output_is_lost_or_repeated(options: TextOptions) -> None:
    whole = await _parts(options)
    for num_parts in range(1, len(whole)):
        given = whole[:num_parts]
        token_ids = [token_id for delta in given for token_id in delta.token_ids]
        text = "".join(delta.text for delta in given)
        resume = _resume(generated_token_ids=token_ids, num_text_bytes=len(text.encode()))
        fleet = Fleet("decode-0")
        answer = [part async for part in fleet.generate(make_start(text_options=options), resume=resume).parts()]
        assert isinstance(answer[0], Accepted)
        assert (answer[0].request_id, answer[0].seed) == (_REQUEST_ID, 5)
        for part in answer:
            if isinstance(part, Delta):
                assert part.token_offset == len(token_ids)
                token_ids += part.token_ids
                text += part.text
        assert token_ids == [token_id for delta in whole for token_id in delta.token_ids]
        assert text == "".join(delta.text for delta in whole)
        assert isinstance(answer[-1], ChoiceFinished)
        assert answer[-1].usage.num_output_tokens == len(token_ids)
        fleet.assert_nothing_left()


async def test_text_that_was_not_given_yet_comes_first() -> None:
    fleet = Fleet("decode-0")
    resume = _resume(generated_token_ids=_OUTPUT[:4], num_text_bytes=1)
    deltas = [part async for part in fleet.generate(make_start(), resume=resume).parts() if isinstance(part, Delta)]
    assert (deltas[0].token_ids, deltas[0].text[:3]) == ((), text_of(_OUTPUT)[1:4])
    assert "".join(delta.text for delta in deltas) == text_of(_OUTPUT)[1:]


async def test_resuming_a_complete_answer_gives_only_its_end_and_calls_no_worker() -> None:
    fleet = Fleet("decode-0")
    resume = _resume(generated_token_ids=_OUTPUT, num_text_bytes=len(text_of(_OUTPUT)), attempt=3)
    parts = [part async for part in fleet.generate(make_start(), resume=resume).parts()]
    assert [type(part) for part in parts] == [Accepted, ChoiceFinished]
    assert fleet.hops.calls == []


async def test_workers_get_the_attempt_the_choice_and_its_seed() -> None:
    fleet = Fleet("decode-0")
    resume = _resume(choice=1, attempt=4, generated_token_ids=expected_tokens(5, 1, 20, 3))
    answer = [part async for part in fleet.generate(make_start(num_choices=2), resume=resume).parts()]
    context = fleet.hops.calls[0].start.context
    assert (context.request_id, context.choice, context.attempt) == (_REQUEST_ID, 1, 4)
    assert {part.choice for part in answer if isinstance(part, Delta | ChoiceFinished)} == {1}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": "mine"}, "resume.request_id"),
        ({"attempt": 0}, "resume.attempt"),
        ({"choice": 1}, "resume.choice"),
        ({"seed": 6}, "resume.seed"),
        ({"generated_token_ids": [10**6]}, "resume.generated_token_ids"),
        ({"generated_token_ids": [1] * 5000}, "resume.generated_token_ids"),
    ],
)
async def test_an_impossible_resume_is_refused(changes: dict[str, object], field: str) -> None:
    fleet = Fleet("decode-0")
    with pytest.raises(ServingError) as refused:
        await collect(fleet.generate(make_start(), resume=_resume(**changes)))
    assert isinstance(refused.value, InvalidRequestError)
    assert refused.value.field == field
    fleet.assert_nothing_left()


_OLD, _NEW = "0a" * 32, "0b" * 32


def _fleet_of_two_versions() -> Fleet:
    """Most of the old version's workers are gone: requests go to the new one."""
    fleet = Fleet("decode-0", model_fingerprint=_OLD)
    for worker_id in ("decode-1", "decode-2"):
        fleet.join(worker_id, model_fingerprint=_NEW)
    return fleet


@pytest.mark.parametrize("model", ["", "tiny"])
async def test_a_request_is_resumed_only_by_the_model_that_gave_its_tokens(model: str) -> None:
    fleet = _fleet_of_two_versions()
    first = await collect(fleet.generate(make_start(model=model)))
    assert first.accepted is not None
    assert first.accepted.model_fingerprint == _NEW
    resume = _resume(generated_token_ids=_OUTPUT[:4], model_fingerprint=_OLD)
    parts = [part async for part in fleet.generate(make_start(model=model), resume=resume).parts()]
    assert isinstance(parts[0], Accepted)
    assert parts[0].model_fingerprint == _OLD
    assert [call.rank.worker_id for call in fleet.hops.calls][1:] == ["decode-0"]


@pytest.mark.parametrize(
    ("fingerprint", "model"), [("0c" * 32, "tiny"), (_OLD, "another")], ids=["its version", "its name"]
)
async def test_a_request_whose_model_is_gone_is_not_resumed(fingerprint: str, model: str) -> None:
    fleet = _fleet_of_two_versions()
    with pytest.raises(WorkerUnavailableError):
        await collect(fleet.generate(make_start(model=model), resume=_resume(model_fingerprint=fingerprint)))
    fleet.assert_nothing_left()


async def test_few_of_the_tokens_to_resume_after_become_text_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """By count: in each turn of the event loop no more is done than the turn's work allows."""
    num_tokens, num_turns = 15_000, 0
    pushed: Counter[int] = Counter()
    paid: list[int] = []
    push, enter = TextStream.push, Intake.enter

    def note(stream: TextStream, token_ids: Sequence[int]) -> TextDelta:
        pushed[num_turns] += len(token_ids)
        return push(stream, token_ids)

    async def note_paid(intake: Intake, tenant: str, num_prompt_tokens: int) -> None:
        paid.append(num_prompt_tokens)
        await enter(intake, tenant, num_prompt_tokens)

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    monkeypatch.setattr(TextStream, "push", note)
    monkeypatch.setattr(Intake, "enter", note_paid)
    fleet = Fleet("decode-0", max_model_len=16_384, num_blocks=16_384)
    options = TextOptions(stop_strings=("a" * 1023 + "b", *("a" * 200 + str(number) for number in range(15))))
    resume = _resume(generated_token_ids=[_OUTPUT[0]] * num_tokens)
    counting = asyncio.create_task(count_turns())
    parts = fleet.generate(make_start(sampling=_LONG, text_options=options), resume=resume).parts()
    assert isinstance(await anext(parts), Accepted)
    await parts.aclose()
    counting.cancel()
    assert pushed.total() >= num_tokens
    # At most two steps begin in a turn; a token counts 24 at least, and a step at most 16,384 and what 32 tokens take.
    assert max(pushed.values()) <= 2 * (16_384 // 24 + 32)
    assert sum(paid) >= 24 * num_tokens
    fleet.assert_nothing_left()


async def test_a_request_can_be_cancelled_while_its_tokens_become_text() -> None:
    fleet = Fleet("decode-0", max_model_len=16_384, num_blocks=16_384)
    resume = _resume(generated_token_ids=[_OUTPUT[0]] * 15_000)
    options = TextOptions(stop_strings=("a" * 1000,))
    request = fleet.generate(make_start(sampling=_LONG, text_options=options), resume=resume)
    for _ in range(8):
        await asyncio.sleep(0)
    assert fleet.admission.length == 0 and fleet.hops.num_open == 0, "it is not placed yet"
    request.cancel()
    answer = await collect(request)
    assert (answer.texts, answer.token_ids) == ({}, {}), "the client has them already"
    assert answer.finished[0].reason is FinishReason.CANCELLED
    fleet.assert_nothing_left()


async def test_tokens_that_are_too_many_never_become_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TextStream, "push")
    fleet = Fleet("decode-0", max_model_len=1_000)
    resume = _resume(generated_token_ids=[_OUTPUT[0]] * 1_000)
    with pytest.raises(InvalidRequestError, match="leaves room"):
        await collect(fleet.generate(make_start(), resume=resume))
    fleet.assert_nothing_left()

"""What TensorRT-LLM is told of a request's conversation."""

from __future__ import annotations

from dataclasses import replace

from quartet.engine.base import EngineRequest
from tests.engine.trtllm.engines import Running, asked, running, stand_in
from tests.fakes.driving import STORY

LATER = {"version": "1.4.0rc1", "disagg_request_id": True}


def keyed(session_key: str, salt: str = "") -> EngineRequest:
    request = asked(STORY, 2)
    return replace(request, generation=replace(request.generation, cache_salt=salt), session_key=session_key)


async def told(decode: Running, session_key: str, salt: str = "") -> str:
    await decode.end_of(keyed(session_key, salt))
    conversation_id: str = decode.last_call["conversation_params"].conversation_id
    return conversation_id


async def test_a_later_line_is_told_a_conversation_by_an_id_that_is_not_its_key() -> None:
    with stand_in(**LATER):
        async with running() as decode:
            first, again, other, blank = [await told(decode, key) for key in ("tea", "tea", "milk", "  ")]
            assert first == again
            assert len({first, other, blank}) == 3
            assert "tea" not in first


async def test_equal_keys_in_two_salts_are_two_conversations() -> None:
    with stand_in(**LATER):
        async with running() as decode:
            pairs = [("tea", ""), ("tea", "a"), ("a", "te"), ("atea", "")]
            assert len({await told(decode, key, salt) for key, salt in pairs}) == len(pairs)


async def test_a_request_without_a_key_has_no_conversation() -> None:
    with stand_in(**LATER):
        async with running() as decode:
            await decode.end_of(keyed(""))
            assert decode.last_call["conversation_params"] is None


async def test_1_2_is_told_of_none() -> None:
    with stand_in():
        async with running() as decode:
            await decode.end_of(keyed("tea"))
            assert "conversation_params" not in decode.last_call

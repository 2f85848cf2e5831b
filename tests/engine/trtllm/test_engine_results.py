"""What an engine's answer must be like before it is given out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from quartet.engine.base import Failed, RequestKind
from quartet.errors import EngineError
from tests.engine.trtllm.engines import asked, decode_of, running, stand_in
from tests.fakes.driving import STORY

PREFILL = RequestKind.PREFILL


@pytest.fixture(autouse=True)
def _stand_in() -> Iterator[None]:
    with stand_in():
        yield


async def test_a_decode_that_begins_with_another_token_than_prefill_gave_is_an_error() -> None:
    async with running(PREFILL) as prefill, running() as decode:
        first = asked(STORY, 8, PREFILL)
        prefilled = await prefill.end_of(first)
        decode.control.transfers.close()
        request = decode_of(first, prefilled)
        decode.engine.submit(request)
        await decode.settle()
        [live] = decode.engine._session._requests._live.values()  # type: ignore[union-attr]
        before = live.reader._request
        other = replace(before.generation, generated_token_ids=(prefilled.token_id + 1,))
        live.reader._request = replace(before, generation=other)
        decode.control.transfers.open()
        end = await decode.consumer.wait_terminal(request)
        assert isinstance(end, Failed)
        assert type(end.error) is EngineError
        assert not decode.tokens_of(request)
        await decode.until(lambda: decode.control.num_running == 0)

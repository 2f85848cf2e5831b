"""What an engine's answer must be like before it is given out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quartet.engine.base import Failed, RequestKind
from quartet.engine.trtllm.inputs import InputBuilder, LlmInputs
from quartet.errors import EngineError, InvalidRequestError
from tests.engine.trtllm.engines import asked, decode_of, running
from tests.fakes.driving import STORY

PREFILL = RequestKind.PREFILL


pytestmark = pytest.mark.usefixtures("package")


async def test_a_decode_that_begins_with_another_token_than_prefill_gave_is_an_error() -> None:
    async with running(PREFILL) as prefill, running() as decode:
        first = asked(STORY, 8, PREFILL)
        prefilled = await prefill.end_of(first)
        decode.control.transfers.close()
        request = decode_of(first, prefilled)
        decode.engine.submit(request)
        await decode.settle()
        [live] = decode.engine._session.requests._live.values()  # type: ignore[union-attr]
        before = live.reader._request
        other = replace(before.generation, generated_token_ids=(prefilled.token_id + 1,))
        live.reader._request = replace(before, generation=other)
        decode.control.transfers.open()
        end = await decode.consumer.wait_terminal(request)
        assert isinstance(end, Failed)
        assert type(end.error) is EngineError
        assert not decode.tokens_of(request)
        await decode.until(lambda: decode.control.num_running == 0)


@pytest.mark.parametrize("kind", list(RequestKind))
async def test_a_prompt_that_became_another_one_is_refused(kind: RequestKind, monkeypatch: pytest.MonkeyPatch) -> None:
    build = InputBuilder.build

    def expecting(self: InputBuilder, *given: Any) -> LlmInputs:
        return replace(build(self, *given), expected_token_ids=[1, 2, 3])

    monkeypatch.setattr(InputBuilder, "build", expecting)
    async with running(kind) as engine:
        request = asked(STORY, 8, kind)
        end = await engine.end_of(request)
        assert isinstance(end, Failed)
        assert (type(end.error), end.error.field) == (InvalidRequestError, "prompt_token_ids")
        assert not engine.tokens_of(request)
        await engine.until(lambda: engine.control.num_running == 0)
        assert engine.engine.is_alive

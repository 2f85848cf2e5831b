"""Encode, prefill and decode of pictures on TensorRT-LLM, one after the other: transformers' own answers come out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from quartet.engine.base import EngineRequest, Failed, Finished, Prefilled, RequestKind
from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.engine.settings import Modality
from quartet.engine.trtllm.media_state import read_state
from quartet.errors import InvalidRequestError, TransferError
from quartet.kvcache.media_spans import expand_placeholders
from quartet.media.items import MediaFile, MediaSize
from tests.engine.fakes import make_request
from tests.engine.trtllm.engines import decode_of, greedily, running, stand_in
from tests.engine.trtllm.media import NUM_TOKENS, PLACEHOLDER_ID, image_file, kept, running_encoder
from tests.fakes.driving import LOOK, greedy, picture, token_ids_of

MAX_TOKENS = 12


@pytest.fixture(
    autouse=True, params=[{}, {"version": "1.4.0rc1", "handles_in_tuple": True, "context_finish": "not_finished"}]
)
def installation(request: pytest.FixtureRequest) -> Iterator[None]:
    with stand_in(**request.param):
        yield


def picture_request(
    kind: RequestKind,
    inputs: Sequence[MediaFile | bytes | None] = (),
    blocks: Sequence[tuple[int, ...]] = (),
    num_tokens: int = NUM_TOKENS,
) -> EngineRequest:
    """A prompt with one item."""
    size = MediaSize(media_id=bytes(32), num_tokens=num_tokens)
    expanded, spans = expand_placeholders(token_ids_of(LOOK), PLACEHOLDER_ID, [size])
    request = make_request(expanded, kind=kind, media=spans, sampling=greedily(MAX_TOKENS))
    return replace(request, media_inputs=tuple(inputs), media_blocks=tuple(blocks))


async def decoded(prefilled: Any, request: EngineRequest) -> list[int]:
    """The whole answer after a prefill."""
    assert isinstance(prefilled, Prefilled), prefilled
    async with running() as decode:
        rest = decode_of(request, prefilled, media=request.generation.media)
        assert isinstance(await decode.end_of(rest), Finished)
        return [prefilled.token_id, *decode.tokens_of(rest)]


async def test_a_picture_that_an_encode_worker_keeps() -> None:
    async with running_encoder() as encoder, running(RequestKind.PREFILL) as prefill:
        assert prefill.engine.capabilities.reads_media
        assert prefill.engine.capabilities.model_fingerprint == encoder.capabilities.model_fingerprint
        request = picture_request(RequestKind.PREFILL, [(await kept(encoder, 1, picture())).state])
        answer = await decoded(await prefill.end_of(request), request)
    assert answer == greedy(LOOK, MAX_TOKENS, picture())


async def test_embeddings_that_were_pulled() -> None:
    async with running_encoder() as encoder, running(RequestKind.PREFILL) as prefill:
        from tensorrt_llm._torch.shared_tensor import SharedTensorContainer

        handle = read_state((await kept(encoder, 1, picture())).state).handle
        rows: torch.Tensor = SharedTensorContainer.from_dict(dict(handle)).get_local_view()
        assert prefill.engine.embeddings is not None
        assert prefill.engine.embeddings.layout == encoder.embeddings.layout
        EmbeddingPoolView(prefill.engine.embeddings).write((4, 3), rows)
        request = picture_request(RequestKind.PREFILL, blocks=[(4, 3)])
        answer = await decoded(await prefill.end_of(request), request)
    assert answer == greedy(LOOK, MAX_TOKENS, picture())


async def test_a_picture_that_prefill_encodes_itself() -> None:
    async with running(RequestKind.PREFILL, modality=Modality.MULTIMODAL) as prefill:
        request = picture_request(RequestKind.PREFILL, [image_file(picture())])
        answer = await decoded(await prefill.end_of(request), request)
    assert answer == greedy(LOOK, MAX_TOKENS, picture())


@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_picture_on_an_aggregated_worker(is_kept: bool) -> None:
    async with running_encoder() as encoder, running(modality=Modality.MULTIMODAL) as worker:
        given = (await kept(encoder, 1, picture())).state if is_kept else image_file(picture())
        request = picture_request(RequestKind.DECODE, [given])
        assert isinstance(await worker.end_of(request), Finished)
        assert worker.tokens_of(request) == greedy(LOOK, MAX_TOKENS, picture())


async def test_a_prompt_that_becomes_another_than_was_announced_fails() -> None:
    async with running(RequestKind.PREFILL, modality=Modality.MULTIMODAL) as prefill:
        request = picture_request(RequestKind.PREFILL, [image_file(picture())], num_tokens=NUM_TOKENS - 1)
        failed = await prefill.end_of(request)
        assert isinstance(failed, Failed), failed
        good = picture_request(RequestKind.PREFILL, [image_file(picture())])
        assert isinstance(await prefill.end_of(good), Prefilled), "others go on"


async def test_an_error_in_an_item_names_its_field() -> None:
    async with running(RequestKind.PREFILL) as prefill:
        failed = await prefill.end_of(picture_request(RequestKind.PREFILL, [b"{}"]))
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, InvalidRequestError)
        assert failed.error.field == "media[0]"


@pytest.mark.parametrize("kind", RequestKind)
async def test_a_picture_whose_encode_worker_is_gone_did_not_come_over(kind: RequestKind) -> None:
    async with running_encoder() as encoder:
        state = (await kept(encoder, 1, picture())).state
    async with running(kind, modality=Modality.MULTIMODAL) as worker:
        failed = await worker.end_of(picture_request(kind, [state]))
        assert isinstance(failed, Failed), failed
        assert isinstance(failed.error, TransferError), failed
        assert not isinstance(await worker.end_of(picture_request(kind, [image_file(picture())])), Failed), (
            "others go on"
        )


async def test_a_picture_twice_gives_the_same_answer_and_blocks_with_it_are_not_reported() -> None:
    async with running(RequestKind.PREFILL, modality=Modality.MULTIMODAL) as prefill:
        for colour in ("red", "blue", "red"):
            request = picture_request(RequestKind.PREFILL, [image_file(picture(colour))])
            prefilled = await prefill.end_of(request)
            assert isinstance(prefilled, Prefilled)
            assert [prefilled.token_id] == greedy(LOOK, 1, picture(colour))

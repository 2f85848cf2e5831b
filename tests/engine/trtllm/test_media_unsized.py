"""Models whose pictures cannot be sized beforehand: TensorRT-LLM lays the prompt out, and says what it became."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quartet.engine.base import EngineRequest, Failed, Finished, Prefilled, RequestKind
from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.engine.settings import Modality
from quartet.engine.trtllm import media_model
from quartet.errors import InvalidRequestError, UnsupportedFieldError
from quartet.media.items import MediaFile
from tests.engine.fakes import make_request
from tests.engine.trtllm.engines import decode_of, greedily, running, stand_in
from tests.engine.trtllm.media import NUM_TOKENS, PLACEHOLDER_ID, image_file, rows_file
from tests.engine.trtllm.test_media_engine import picture_request
from tests.fakes.driving import LOOK, encoder, greedy, picture, token_ids_of
from tests.fakes.installation import installed

with installed():
    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer

MAX_TOKENS = 12


@pytest.fixture(autouse=True)
def unsized(monkeypatch: pytest.MonkeyPatch, package: Any) -> None:
    """The tiny model as one of a type that is not counted."""
    monkeypatch.setattr(media_model, "SIZED_MODEL_TYPES", ())


def with_files(kind: RequestKind, *files: MediaFile, text: str = LOOK, **changes: object) -> EngineRequest:
    """A prompt with one placeholder a file."""
    request = make_request(token_ids_of(text), kind=kind, sampling=greedily(MAX_TOKENS), **changes)  # type: ignore[arg-type]
    return replace(request, media_inputs=files)


def red_rows() -> torch.Tensor:
    """What the tower makes of the red picture."""
    result = encoder().generate({"prompt": "<|image|>", "multi_modal_data": {"image": [picture()]}})
    [handle] = result.disaggregated_params.multimodal_embedding_handles
    rows: torch.Tensor = SharedTensorContainer.from_dict(handle).get_local_view()
    return rows


async def test_prefill_reports_what_the_prompt_became_and_decode_goes_on_with_that() -> None:
    async with running(RequestKind.PREFILL, modality=Modality.MULTIMODAL) as prefill, running() as decode:
        request = with_files(RequestKind.PREFILL, image_file(picture()))
        prefilled = await prefill.end_of(request)
        assert isinstance(prefilled, Prefilled), prefilled
        laid_out = prefilled.laid_out
        assert laid_out is not None
        begin = token_ids_of(LOOK).index(PLACEHOLDER_ID)
        [span] = laid_out.media
        assert (span.first_position, span.num_tokens) == (begin, NUM_TOKENS)
        assert len(laid_out.prompt_token_ids) == len(token_ids_of(LOOK)) + NUM_TOKENS - 1
        rest = decode_of(replace(request, generation=laid_out), prefilled, media=laid_out.media)
        assert isinstance(await decode.end_of(rest), Finished)
        assert [prefilled.token_id, *decode.tokens_of(rest)] == greedy(LOOK, MAX_TOKENS, picture())


async def test_tokens_that_were_shown_already_are_no_part_of_the_reported_prompt() -> None:
    whole = greedy(LOOK, MAX_TOKENS, picture())
    async with running(RequestKind.PREFILL, modality=Modality.MULTIMODAL) as prefill:
        request = with_files(RequestKind.PREFILL, image_file(picture()), generated=whole[:4])
        prefilled = await prefill.end_of(request)
        assert isinstance(prefilled, Prefilled)
        assert prefilled.token_id == whole[4]
        assert prefilled.laid_out is not None
        assert len(prefilled.laid_out.prompt_token_ids) == len(token_ids_of(LOOK)) + NUM_TOKENS - 1
        assert list(prefilled.laid_out.generated_token_ids) == whole[:4]


async def test_an_aggregated_worker_reports_the_length() -> None:
    async with running(modality=Modality.MULTIMODAL) as worker:
        request = with_files(RequestKind.DECODE, image_file(picture()))
        assert isinstance(await worker.end_of(request), Finished)
        assert worker.tokens_of(request) == greedy(LOOK, MAX_TOKENS, picture())
        started = worker.consumer.started[request.id]
        assert started.num_prompt_tokens == len(token_ids_of(LOOK)) + NUM_TOKENS - 1


async def test_embeddings_that_were_pulled_are_laid_out_by_it_too() -> None:
    rows = red_rows()
    async with running(RequestKind.PREFILL) as prefill:
        assert prefill.engine.embeddings is not None
        EmbeddingPoolView(prefill.engine.embeddings).write((4, 3), rows)
        request = picture_request(RequestKind.PREFILL, blocks=[(4, 3)])
        prefilled = await prefill.end_of(request)
        assert isinstance(prefilled, Prefilled), prefilled
        assert prefilled.laid_out is not None
        assert list(prefilled.laid_out.prompt_token_ids) == list(request.generation.prompt_token_ids)
        assert [prefilled.token_id] == greedy(LOOK, 1, picture())


async def test_embeddings_as_files_are_no_different() -> None:
    async with running(modality=Modality.MULTIMODAL) as worker:
        request = with_files(RequestKind.DECODE, rows_file(red_rows()))
        assert isinstance(await worker.end_of(request), Finished)
        assert worker.tokens_of(request) == greedy(LOOK, MAX_TOKENS, picture())


async def test_embeddings_without_their_special_tokens_are_refused_before_the_engine_sees_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stand_in(embeddings_need_special_tokens=True):
        async with running(modality=Modality.MULTIMODAL) as worker:
            failed = await worker.end_of(with_files(RequestKind.DECODE, rows_file(torch.ones(3, 256))))
            assert isinstance(failed, Failed) and "the engine refuses media" in str(failed.error), "as Llama 4 does"
        monkeypatch.setattr(media_model, "_WITHOUT_EMBEDDINGS", ("llava",))
        async with running(modality=Modality.MULTIMODAL) as worker:
            num_calls = len(worker.control.calls)
            file, pulled = (
                with_files(RequestKind.DECODE, rows_file(torch.ones(3, 256))),
                picture_request(RequestKind.DECODE, blocks=[(4, 3)]),
            )
            for request in (file, pulled):
                failed = await worker.end_of(request)
                assert isinstance(failed, Failed) and isinstance(failed.error, UnsupportedFieldError)
                assert failed.error.field == "media[0]"
            assert len(worker.control.calls) == num_calls
            assert isinstance(await worker.end_of(with_files(RequestKind.DECODE, image_file(picture()))), Finished)


async def test_files_and_placeholders_are_as_many() -> None:
    async with running(RequestKind.PREFILL, modality=Modality.MULTIMODAL) as prefill:
        file = image_file(picture())
        failed = await prefill.end_of(with_files(RequestKind.PREFILL, file, file))
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, InvalidRequestError)
        assert failed.error.field == "media"


async def test_text_has_to_show_where_one_item_ends_and_the_next_begins() -> None:
    two = LOOK.replace("<|image|>", "<|image|><|image|>")
    async with running(RequestKind.PREFILL, modality=Modality.MULTIMODAL) as prefill:
        files = image_file(picture()), image_file(picture("blue"))
        failed = await prefill.end_of(with_files(RequestKind.PREFILL, *files, text=two))
        assert isinstance(failed, Failed)
        assert "put text between them" in failed.error.message
        apart = LOOK.replace("<|image|>", "<|image|> and <|image|>")
        prefilled = await prefill.end_of(with_files(RequestKind.PREFILL, *files, text=apart))
        assert isinstance(prefilled, Prefilled)
        assert prefilled.laid_out is not None
        assert [span.num_tokens for span in prefilled.laid_out.media] == [NUM_TOKENS] * 2

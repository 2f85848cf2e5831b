"""From requests with media to what TensorRT-LLM is given: its answers are those of transformers for the same prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.engine.base import EngineRequest, Generation
from quartet.engine.settings import EncoderSettings, Modality
from quartet.engine.torch.config import TorchEncoderConfig
from quartet.engine.torch.vision import create_vision
from quartet.engine.trtllm.inputs import InputBuilder, LlmInputs, create_input_builder, is_same_prompt
from quartet.engine.trtllm.media_model import need_media_model
from quartet.engine.trtllm.media_state import read_state
from quartet.errors import ConfigError, InvalidRequestError, MediaLostError, TransferError, UnsupportedFieldError
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import HandOff
from tests.engine.trtllm.media import (
    NUM_TOKENS,
    PLACEHOLDER_ID,
    checkpoint_as,
    fill,
    image_file,
    kept,
    media_request,
    moved,
    rows_file,
    running_encoder,
)
from tests.engine.trtllm.specs import spec_of
from tests.fakes.conftest import stand_in  # noqa: F401 - a fixture
from tests.fakes.driving import (
    LOOK,
    SPELL,
    encoder,
    ended,
    engine,
    greedy,
    params,
    picture,
    prefill_engine,
    prefilled,
    token_ids_of,
)
from tests.fakes.installation import installed
from tests.tiny import CHECKPOINT

with installed():
    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer
    from tensorrt_llm.llmapi import DisaggregatedParams

VOCAB_SIZE = 2048
BLOCKS = (5, 2)  # of 32 tokens each
TWO = LOOK.replace("<|image|>", "<|image|><|image|>")


@pytest.fixture
def builder() -> Iterator[InputBuilder]:
    built = create_input_builder(spec_of(modality=Modality.MULTIMODAL), "fingerprint")
    yield built
    built.close()
    built.close()


async def answer(given: LlmInputs, num_tokens: int = 12, llm: Any = None) -> list[int]:
    """TensorRT-LLM's answer; it must have computed the expected prompt."""
    llm = llm or engine()
    disagg = DisaggregatedParams(request_type="context_and_generation", **given.disaggregated)
    result = await ended(
        llm.generate_async(
            dict(given.inputs),
            params(num_tokens, add_special_tokens=given.add_special_tokens),
            disaggregated_params=disagg if given.disaggregated else None,
        )
    )
    if given.expected_token_ids is not None:
        assert is_same_prompt(given.expected_token_ids, result.prompt_token_ids, spans_of(given), VOCAB_SIZE)
    return list(result.outputs[0].token_ids)


def spans_of(given: LlmInputs) -> list[MediaSpan]:
    """One for each placeholder that is expected."""
    expected = given.expected_token_ids or ()
    return [MediaSpan(bytes(32), place, 1) for place, token_id in enumerate(expected) if token_id == PLACEHOLDER_ID]


def features(colour: str = "red") -> torch.Tensor:
    """What the tower makes of a picture."""
    [handle] = (
        encoder()
        .generate({"prompt": "<|image|>", "multi_modal_data": {"image": [picture(colour)]}})
        .disaggregated_params.multimodal_embedding_handles
    )
    if isinstance(handle, list):
        [handle] = handle
    tensor: torch.Tensor = SharedTensorContainer.from_dict(handle).get_local_view()
    return tensor


async def test_text_goes_as_token_ids(builder: InputBuilder) -> None:
    ids = token_ids_of(SPELL)
    request = media_request(ids, [], generated_token_ids=(9, 10))
    given = builder.build(request)
    assert given.inputs == {"prompt_token_ids": [*ids, 9, 10]}
    assert (given.expected_token_ids, given.disaggregated) == (None, {})
    assert await answer(builder.build(media_request(ids, []))) == greedy(SPELL, 12)


async def test_a_picture_that_prefill_encodes_itself(builder: InputBuilder) -> None:
    request = media_request(token_ids_of(LOOK), [NUM_TOKENS], inputs=[image_file(picture())])
    given = builder.build(request)
    assert given.expected_token_ids == list(request.generation.prompt_token_ids)
    assert await answer(given) == greedy(LOOK, 12, picture())


async def test_settings_of_the_picture_processor_go_with_every_picture() -> None:
    kwargs = {"image_mean": [0.9, 0.1, 0.5]}
    builder = create_input_builder(spec_of(modality=Modality.MULTIMODAL, mm_processor_kwargs=kwargs), "fingerprint")
    tower = create_vision(TorchEncoderConfig(model_path=str(CHECKPOINT), dtype="float32", processor_kwargs=kwargs))
    [expected] = tower.encode([tower.pixels(picture())])
    with installed(reads_processor_options=True):
        from tensorrt_llm._torch.shared_tensor import SharedTensorContainer as Container

        async with running_encoder(mm_processor_kwargs=kwargs) as source:
            state = (await kept(source, 1, picture())).state
            handle: Any = read_state(state).handle
            rows = Container.from_dict(dict(handle)).get_local_view()
            torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
    for given in (image_file(picture()), state):
        request = media_request(token_ids_of(LOOK), [NUM_TOKENS], inputs=[given])
        assert builder.build(request).inputs["mm_processor_kwargs"] == kwargs
    builder.close()


@pytest.mark.parametrize("model_type", ["llava_next", "llama4"])
def test_settings_that_the_model_s_processor_does_not_read_are_refused(model_type: str, tmp_path: Path) -> None:
    path = checkpoint_as(model_type, tmp_path)
    spec = replace(spec_of(mm_processor_kwargs={"image_mean": [0.9, 0.1, 0.5]}), model_path=path)
    with pytest.raises(ConfigError, match=rf"^engine\.mm_processor_kwargs: .* models of type {model_type}$"):
        create_input_builder(spec, "fingerprint")
    with pytest.raises(ConfigError, match=r"^engine\.mm_processor_kwargs: "):
        need_media_model(spec)
    text = replace(spec, engine=replace(spec.engine, modality=Modality.TEXT))
    assert not create_input_builder(text, "fingerprint").reads_media


def test_sizes_of_pictures_are_counted_with_the_replaced_settings() -> None:
    smaller = {name: {"height": 8, "width": 8} for name in ("size", "crop_size")}
    with pytest.raises(InvalidRequestError, match="whose tiles are not of"):
        create_input_builder(spec_of(mm_processor_kwargs=smaller), "fingerprint")


@pytest.mark.parametrize("in_tuple", [False, True])
async def test_a_picture_that_an_encoder_keeps(builder: InputBuilder, in_tuple: bool) -> None:
    with installed(handles_in_tuple=in_tuple):
        async with running_encoder() as source:
            state = (await kept(source, 1, picture())).state
            given = builder.build(media_request(token_ids_of(LOOK), [NUM_TOKENS], inputs=[state]))
            [blank] = given.inputs["multi_modal_data"]["image"]  # type: ignore[index]
            assert blank.size == picture().size
            assert blank.getextrema() == ((0, 0),) * 3
            assert await answer(given) == greedy(LOOK, 12, picture())


async def test_prefill_of_a_picture_that_an_encoder_keeps(builder: InputBuilder) -> None:
    async with running_encoder() as source:
        state = (await kept(source, 1, picture())).state
        given = builder.build(media_request(token_ids_of(LOOK), [NUM_TOKENS], inputs=[state]))
        disagg = DisaggregatedParams(request_type="context_only", **given.disaggregated)
        result = await prefilled(
            prefill_engine(), dict(given.inputs), disagg=disagg, add_special_tokens=given.add_special_tokens
        )
        assert given.expected_token_ids is not None
        assert is_same_prompt(given.expected_token_ids, result.prompt_token_ids, spans_of(given), VOCAB_SIZE)
        assert list(result.outputs[0].token_ids) == greedy(LOOK, 1, picture())


async def test_embeddings_out_of_our_pool(builder: InputBuilder) -> None:
    fill(builder, BLOCKS, features())
    request = media_request(token_ids_of(LOOK), [NUM_TOKENS], blocks=[BLOCKS])
    assert await answer(builder.build(request)) == greedy(LOOK, 12, picture())


async def test_embeddings_as_a_file(builder: InputBuilder) -> None:
    request = media_request(token_ids_of(LOOK), [NUM_TOKENS], inputs=[rows_file(features())])
    assert await answer(builder.build(request)) == greedy(LOOK, 12, picture())


async def test_a_kept_picture_beside_embeddings_becomes_embeddings(builder: InputBuilder) -> None:
    async with running_encoder() as source:
        state = (await kept(source, 1, picture("blue"))).state
        fill(builder, BLOCKS, features("red"))
        request = media_request(token_ids_of(TWO), [NUM_TOKENS] * 2, inputs=[None, state], blocks=[BLOCKS, ()])
        ours = await answer(builder.build(request))
    theirs = await answer(
        builder.build(
            media_request(
                token_ids_of(TWO), [NUM_TOKENS] * 2, inputs=[image_file(picture("red")), image_file(picture("blue"))]
            )
        )
    )
    assert ours == theirs


async def test_two_kept_pictures_become_embeddings_since_one_handle_alone_is_taken(builder: InputBuilder) -> None:
    async with running_encoder() as source:
        states = [(await kept(source, 1 + nth, picture(colour))).state for nth, colour in enumerate(("red", "blue"))]
        ours = await answer(builder.build(media_request(token_ids_of(TWO), [NUM_TOKENS] * 2, inputs=states)))
    files = [image_file(picture("red")), image_file(picture("blue"))]
    assert ours == await answer(builder.build(media_request(token_ids_of(TWO), [NUM_TOKENS] * 2, inputs=files)))


SPAN = MediaSpan(bytes(32), 1, 2)


@pytest.mark.parametrize(
    ("became", "is_same"),
    [
        ([5, 7, 7, 6], True),  # the placeholder stays
        ([5, 101, 101, 6], True),  # an input processor's one id
        ([5, 100, 101, 6], True),  # a count, with embeddings
        ([5, 101, 6], False),
        ([5, 101, 101, 101, 6], False),
        ([5, 99, 101, 6], False),  # text where the item should be
        ([5, 101, 101, 8], False),
        ([100, 101, 101, 6], False),  # an item where the text should be
    ],
)
def test_a_prompt_is_the_same_if_only_its_media_have_other_ids(became: list[int], is_same: bool) -> None:
    assert is_same_prompt([5, 7, 7, 6], became, [SPAN], 100) == is_same


async def test_tokens_that_were_shown_already_are_part_of_the_prompt(builder: InputBuilder) -> None:
    whole = greedy(LOOK, 12, picture())
    file = image_file(picture())
    again = builder.build(
        media_request(token_ids_of(LOOK), [NUM_TOKENS], inputs=[file], generated_token_ids=tuple(whole[:5]))
    )
    assert await answer(again, 7) == whole[5:]


async def test_a_prompt_without_a_beginning_gets_none(builder: InputBuilder) -> None:
    ids = token_ids_of(LOOK)[1:]
    given = builder.build(media_request(ids, [NUM_TOKENS], inputs=[image_file(picture())]))
    assert not given.add_special_tokens
    await answer(given)


def test_ids_that_no_text_has_are_refused(builder: InputBuilder) -> None:
    # As single letters a tokenizer would never write them.
    letters = [token for letter in "hello" for token in token_ids_of(letter)[1:]]
    request = media_request([0, 7, *letters], [NUM_TOKENS], inputs=[image_file(picture())])
    with pytest.raises(InvalidRequestError, match="become others") as caught:
        builder.build(request)
    assert caught.value.field == "prompt_token_ids"


def test_decode_gets_token_ids_alone(builder: InputBuilder) -> None:
    request = media_request(token_ids_of(LOOK), [NUM_TOKENS])
    hand_off: HandOff = object()  # type: ignore[assignment]  # only that there is one counts
    given = builder.build(replace(request, hand_off=hand_off))
    assert given.inputs == {"prompt_token_ids": list(request.generation.prompt_token_ids)}
    assert given.expected_token_ids is None


def test_media_that_are_not_here_are_lost(builder: InputBuilder) -> None:
    with pytest.raises(MediaLostError):
        builder.build(media_request(token_ids_of(LOOK), [NUM_TOKENS]))


async def test_media_that_do_not_fit_the_prompt_are_refused_and_the_item_named(builder: InputBuilder) -> None:
    async with running_encoder() as source:
        state = (await kept(source, 1, picture())).state
    file, ids, two = image_file(picture()), token_ids_of(LOOK), token_ids_of(TWO)
    elsewhere = state.replace(b"ipc:[", b"ipc:[9")
    cases: list[tuple[EngineRequest, type[Exception], str]] = [
        (media_request(ids, [63], inputs=[state]), InvalidRequestError, "media[0]"),
        (media_request(ids, [NUM_TOKENS], inputs=[elsewhere]), TransferError, "media[0]"),
        (media_request(ids, [NUM_TOKENS], inputs=[b"{}"]), InvalidRequestError, "media[0]"),
        (media_request(ids, [NUM_TOKENS], blocks=[(1,)]), InvalidRequestError, "media[0]"),
        (media_request(ids, [NUM_TOKENS], blocks=[(1, 512)]), InvalidRequestError, "media[0]"),
        (media_request(ids, [NUM_TOKENS], inputs=[file, file]), InvalidRequestError, "media"),
        (media_request(two, [64, 64], inputs=[file, None], blocks=[(), BLOCKS]), InvalidRequestError, "media[1]"),
        (
            media_request(two, [64, 64], inputs=[file, rows_file(torch.zeros(64, 3))]),
            InvalidRequestError,
            "media[1].file",
        ),
        (moved(media_request(ids, [NUM_TOKENS], inputs=[file]), 1), InvalidRequestError, "media"),
        (media_request([*ids, 7], [NUM_TOKENS, 1], inputs=[file]), InvalidRequestError, "media"),
    ]
    for request, error, field in cases:
        with pytest.raises(error) as caught:
            builder.build(request)
        assert getattr(caught.value, "field", None) == field, request
    stray = EngineRequest(id=1, kind=cases[0][0].kind, generation=Generation(prompt_token_ids=ids))
    with pytest.raises(InvalidRequestError, match="no media item fills"):
        builder.build(stray)


def test_a_worker_of_text_takes_no_media() -> None:
    builder = create_input_builder(spec_of(modality=Modality.TEXT), "fingerprint")
    assert (builder.reads_media, builder.placeholder_id, builder.embeddings) == (False, None, None)
    with pytest.raises(UnsupportedFieldError):
        builder.build(media_request(token_ids_of(LOOK), [NUM_TOKENS], inputs=[image_file(picture())]))
    builder.close()


def test_a_pool_without_room_for_the_largest_picture_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_embedding_blocks"):
        create_input_builder(spec_of(num_embedding_blocks=1, encoder=EncoderSettings()), "fingerprint")

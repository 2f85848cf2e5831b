"""Pictures: the encoder, its handles, and all the ways into a prompt."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.driving import (
    LOOK,
    MODEL,
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

with installed():
    from tensorrt_llm import MultimodalEncoder
    from tensorrt_llm._stand_in.control import control
    from tensorrt_llm._stand_in.schema import API, StandInError
    from tensorrt_llm._stand_in.spool import GoneError
    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer
    from tensorrt_llm.executor.utils import RequestError
    from tensorrt_llm.inputs import default_multimodal_input_loader
    from tensorrt_llm.llmapi import DisaggregatedParams


def picture_prompt(*images: Any) -> dict[str, Any]:
    return {"prompt": LOOK.replace("<|image|>", "<|image|>" * len(images)), "multi_modal_data": {"image": list(images)}}


def test_an_encoder_takes_its_few_arguments_and_those_of_llm() -> None:
    tower = encoder()
    assert tower.args.mm_encoder_only
    assert tower.args.max_num_tokens == 16384
    control.reset()
    with pytest.raises(ValueError, match="MultimodalEncoder got invalid argument: model_kwargs"):
        encoder(model_kwargs={})
    with pytest.raises(TypeError, match="dtype"):
        encoder(dtype="int8")
    assert list(inspect.signature(MultimodalEncoder.generate_async).parameters)[1:] == ["inputs", "sampling_params"]
    with pytest.raises(TypeError, match="streaming"):
        encoder().generate_async(picture_prompt(picture()), streaming=True)


def test_a_handle_is_a_dict_with_base64_text_and_is_for_one_consumer() -> None:
    tower = encoder()
    disagg = tower.generate(picture_prompt(picture()), use_tqdm=False).disaggregated_params
    [handle] = disagg.multimodal_embedding_handles
    assert set(handle) == set(API["shapes"]["mm_embedding_handle"])
    assert isinstance(handle["storage_handle"], str)
    view = SharedTensorContainer.from_dict(handle).get_local_view()
    assert view.shape == (64, 256)
    control.of(tower).wait_until(lambda: control.of(tower).num_held == 0)
    with pytest.raises(GoneError):
        SharedTensorContainer.from_dict(handle).get_local_view()
    with pytest.raises(StandInError, match="keys differ"):
        SharedTensorContainer.from_dict({**handle, "surprise": 1})


def test_tensors_of_other_encoders_can_be_handed_on_too() -> None:
    handle = SharedTensorContainer.from_tensor(torch.ones(2, 3)).dump_to_dict()
    assert SharedTensorContainer.from_dict(handle).get_local_view().tolist() == [[1.0] * 3] * 2


def test_the_same_picture_has_the_same_hash() -> None:
    tower = encoder()
    red, again, blue = (
        tower.generate(picture_prompt(picture(colour))).disaggregated_params.multimodal_hashes
        for colour in ("red", "red", "blue")
    )
    assert red == again != blue


def test_an_encoder_wants_one_picture_a_request() -> None:
    tower = encoder()
    with pytest.raises(StandInError, match="one by one"):
        tower.generate(picture_prompt(picture(), picture("blue")))
    with pytest.raises(ValueError, match="multi_modal_data"):
        tower.generate(SPELL)


def test_an_encoder_that_ended_takes_its_tensors_along() -> None:
    with encoder() as tower:
        [handle] = tower.generate(picture_prompt(picture())).disaggregated_params.multimodal_embedding_handles
    with pytest.raises(GoneError):
        SharedTensorContainer.from_dict(handle).get_local_view()
    with pytest.raises(RuntimeError, match="shutting down"):
        tower.generate_async(picture_prompt(picture()))


async def test_handles_of_several_pictures_are_not_taken() -> None:
    tower, images = encoder(), (picture("red"), picture("blue"))
    parts = [(await ended(tower.generate_async(picture_prompt(image)))).disaggregated_params for image in images]
    disagg = DisaggregatedParams(
        multimodal_embedding_handles=[handle for part in parts for handle in part.multimodal_embedding_handles],
        multimodal_hashes=[item for part in parts for item in part.multimodal_hashes],
    )
    disagg.request_type = "context_and_generation"
    with pytest.raises(NotImplementedError, match="Only one mm_handle"):
        engine().generate_async(picture_prompt(*images), params(12), disaggregated_params=disagg)


async def test_a_later_line_takes_several_handles_and_its_ids_stay_in_the_vocabulary() -> None:
    prompt = picture_prompt(picture("red"), picture("blue"))
    with installed(version="1.4.0rc1") as other, other.LLM(MODEL) as llm, other.MultimodalEncoder(MODEL) as tower:
        parts = [
            (await ended(tower.generate_async(picture_prompt(image)))).disaggregated_params
            for image in prompt["multi_modal_data"]["image"]
        ]
        disagg = other.llmapi.DisaggregatedParams(
            request_type="context_and_generation",
            multimodal_embedding_handles=[handle for part in parts for handle in part.multimodal_embedding_handles],
            multimodal_hashes=[item for part in parts for item in part.multimodal_hashes],
        )
        by_handles, by_pixels = [
            await ended(llm.generate_async(prompt, other.SamplingParams(max_tokens=12, temperature=0.0), **options))
            for options in ({"disaggregated_params": disagg}, {})
        ]
    assert by_handles.outputs[0].token_ids == by_pixels.outputs[0].token_ids
    assert by_handles.prompt_token_ids == by_pixels.prompt_token_ids
    [placeholder] = set(by_pixels.prompt_token_ids) - set(token_ids_of(LOOK.replace("<|image|>", "")))
    assert by_pixels.prompt_token_ids.count(placeholder) == 2 * 64


async def test_handles_that_are_gone_fail_the_request_alone() -> None:
    tower = encoder()
    disagg = (await ended(tower.generate_async(picture_prompt(picture())))).disaggregated_params
    tower.shutdown()
    with pytest.raises(RequestError, match="embedding"):
        await prefilled(prefill_engine(), picture_prompt(picture()), disagg=disagg)


async def test_handles_need_a_model_that_takes_them_and_the_same_inputs() -> None:
    handle = encoder().generate(picture_prompt(picture())).disaggregated_params
    with pytest.raises(ValueError, match="same inputs"):
        await prefilled(prefill_engine(), SPELL, disagg=handle)
    with installed(support_mm_disagg=False) as other, other.LLM(MODEL) as llm:
        disagg = other.llmapi.DisaggregatedParams(request_type="context_only", multimodal_embedding_handles=[{}])
        with pytest.raises(ValueError, match="does not support"):
            llm.generate_async(picture_prompt(picture()), disaggregated_params=disagg)


async def test_a_later_candidate_wraps_the_list_of_handles() -> None:
    with installed(handles_in_tuple=True) as other, other.MultimodalEncoder(MODEL) as tower:
        handles = (
            await ended(tower.generate_async(picture_prompt(picture())))
        ).disaggregated_params.multimodal_embedding_handles
    assert isinstance(handles, tuple)
    assert isinstance(handles[0][0], dict)


async def test_tensors_and_embeddings_are_pictures_too() -> None:
    llm, expected = engine(), greedy(LOOK, 12, picture())
    pixels = torch.frombuffer(bytearray(picture().tobytes()), dtype=torch.uint8).reshape(96, 96, 3)
    tensor = pixels.permute(2, 0, 1).float() / 255
    assert (await ended(llm.generate_async(picture_prompt(tensor), params(12)))).outputs[0].token_ids == expected
    [handle] = encoder().generate(picture_prompt(picture())).disaggregated_params.multimodal_embedding_handles
    embedding = SharedTensorContainer.from_dict(handle).get_local_view()
    inputs = {"prompt": LOOK, "multi_modal_embeddings": {"image": [embedding]}}
    assert (await ended(llm.generate_async(inputs, params(12)))).outputs[0].token_ids == expected


async def test_token_ids_with_a_picture_go_through_text_again() -> None:
    llm = engine()
    # As two tokens that their text would not be cut into.
    odd = [*token_ids_of("<|user|><|image|>a"), *token_ids_of("t")[1:], 5]
    result = await ended(
        llm.generate_async({"prompt_token_ids": odd, "multi_modal_data": {"image": picture()}}, params(2))
    )
    assert result.prompt_token_ids != [*odd[:2], *[7] * 64, *odd[3:]]
    lost = {"prompt_token_ids": odd, "multi_modal_data": {"image": picture()}}
    lost["multi_modal_embeddings"] = {"image": [torch.zeros(3, 256)]}
    assert (await ended(llm.generate_async(lost, params(2)))).prompt_token_ids.count(2049) == 64


def test_pictures_and_placeholders_are_counted() -> None:
    with pytest.raises(ValueError, match="1 placeholders in the prompt, but 2 pictures"):
        engine().generate_async({"prompt": LOOK, "multi_modal_data": {"image": [picture(), picture()]}}, params())


def test_the_loader_opens_files_and_applies_the_template(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    picture().save(path)
    given = {"tokenizer": None, "model_dir": MODEL, "model_type": "llava", "modality": "image", "prompts": ["What?"]}
    [prompt] = default_multimodal_input_loader(**given, media=[str(path)])
    assert prompt["prompt"].count("<|image|>") == 1
    assert prompt["multi_modal_data"]["image"][0].shape == (3, 96, 96)
    with pytest.raises(StandInError, match="URLs"):
        default_multimodal_input_loader(**given, media=["http://x/y.png"])
    with pytest.raises(TypeError, match="too many positional"):
        default_multimodal_input_loader(None, MODEL)

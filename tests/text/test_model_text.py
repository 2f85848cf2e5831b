"""A model's text side, put together from the files that its workers serve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quartet.errors import InvalidRequestError, ModelFilesError
from quartet.media.media_id import preprocessing_fingerprint
from quartet.text.chat_message import ChatMessage
from quartet.text.model_files import TEXT_FILE_NAMES, read_text_files
from quartet.text.model_text import ModelText
from tests import tiny
from tests.text import builders


def files(**configs: object) -> dict[str, bytes]:
    written = {f"{name}.json": json.dumps(config).encode() for name, config in configs.items()}
    return {"tokenizer.json": builders.byte_level_backend().to_str().encode(), **written}


def test_a_tokenizer_alone_is_enough() -> None:
    text = ModelText.from_files(files())
    assert text.chat_template is None
    assert text.eos_token_ids == ()
    assert text.vocab_size == text.tokenizer.vocab_size


def test_the_tiny_models_directory_holds_all_there_is_to_know() -> None:
    text = ModelText.from_files(read_text_files(tiny.CHECKPOINT))
    config = json.loads((tiny.CHECKPOINT / "config.json").read_bytes())
    assert text.eos_token_ids == (text.tokenizer.eos_token_id,)
    assert text.vocab_size == config["text_config"]["vocab_size"]
    assert text.encode_text("The river")[0] == config["bos_token_id"]


def test_eos_ids_of_all_files_count_once_each() -> None:
    found = ModelText.from_files(
        files(
            config={"eos_token_id": 9},
            generation_config={"eos_token_id": [7, 1, 7]},
            tokenizer_config={"eos_token": builders.EOS},
        )
    )
    # The generation's configuration overrides the model's, as in transformers; the tokenizer's adds to it.
    assert found.eos_token_ids == (7, 1)
    assert found.tokenizer.eos_token_id == 1


def test_without_a_generation_configuration_the_models_eos_counts() -> None:
    assert ModelText.from_files(files(config={"eos_token_id": 9})).eos_token_ids == (9,)


def test_a_multimodal_models_vocabulary_is_that_of_its_language_model() -> None:
    config = {"text_config": {"vocab_size": 1000}, "eos_token_id": 3}
    text = ModelText.from_files(files(config=config))
    assert (text.vocab_size, text.eos_token_ids) == (1000, (3,))


def test_the_tiny_models_placeholder_is_known_with_the_fingerprint_of_what_it_is_prepared_by() -> None:
    text = ModelText.from_files(read_text_files(tiny.CHECKPOINT))
    names = ("config.json", "preprocessor_config.json", "processor_config.json")
    expected = preprocessing_fingerprint({name: (tiny.CHECKPOINT / name).read_bytes() for name in names})
    assert text.media is not None
    assert text.tokenizer.token_text(text.media.placeholder_id) == "<|image|>"
    assert text.media.preprocessing_fingerprint == expected
    assert (text.vocab_size, text.eos_token_ids) == (2048, (1,))


@pytest.mark.parametrize("name", ["image_token_index", "image_token_id"])
def test_a_placeholder_goes_by_either_name(name: str) -> None:
    media = ModelText.from_files(files(config={name: 9, "vision_config": {}})).media
    assert media is not None
    assert media.placeholder_id == 9


def test_llama_4_s_placeholder_is_the_picture_s_and_not_that_of_its_patches() -> None:
    given = read_text_files(tiny.CHECKPOINT)
    config = {**json.loads(given["config.json"]), "model_type": "llama4", "image_token_index": 9}
    media = ModelText.from_files({**given, "config.json": json.dumps(config).encode()}).media
    assert media is not None
    assert media.placeholder_id == 7


@pytest.mark.parametrize("config", [{}, {"image_token_id": 9}, {"vision_config": {}}])
def test_a_model_without_a_tower_or_a_placeholder_takes_no_media(config: dict[str, object]) -> None:
    assert ModelText.from_files(files(config=config)).media is None


@pytest.mark.parametrize("placeholder_id", [-200, "<image>", True])
def test_a_placeholder_that_is_no_id_is_refused(placeholder_id: object) -> None:
    with pytest.raises(ModelFilesError, match="image_token_index"):
        ModelText.from_files(files(config={"image_token_index": placeholder_id, "vision_config": {}}))


def test_another_picture_preprocessing_is_another_fingerprint() -> None:
    config = {"image_token_index": 9, "vision_config": {}}
    one, other = (
        ModelText.from_files(files(config=config, preprocessor_config={"size": size})).media for size in (96, 128)
    )
    assert one is not None
    assert other is not None
    assert one.preprocessing_fingerprint != other.preprocessing_fingerprint


def test_messages_become_ids_without_a_second_beginning() -> None:
    config = {"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    text = ModelText.from_files(files(tokenizer_config=config))
    assert text.encode_messages([ChatMessage("user", "the fox")]) == text.encode_text("the fox")


def test_a_model_without_a_template_takes_no_messages() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        ModelText.from_files(files()).encode_messages([ChatMessage("user", "hi")])
    assert caught.value.field == "messages"


@pytest.mark.parametrize("eos", ["</s>", [1, "x"], -1, True])
def test_eos_ids_that_are_none_are_refused(eos: object) -> None:
    with pytest.raises(ModelFilesError):
        ModelText.from_files(files(generation_config={"eos_token_id": eos}))


def test_only_the_files_for_text_are_read(tmp_path: Path) -> None:
    for name, content in files(config={}, processor_config={}).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    expected = {"tokenizer.json", "config.json", "processor_config.json"}
    assert set(read_text_files(tmp_path)) == expected <= set(TEXT_FILE_NAMES)

"""Text to token ids and back, from the files of a checkpoint."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from quartet.errors import InvalidRequestError, ModelFilesError
from quartet.text.model_files import read_text_files
from quartet.text.tokenizer import SpecialTokens, Tokenizer
from tests.text import builders


def files(**configs: object) -> dict[str, bytes]:
    """A checkpoint's files; ``configs`` by file name without its ending."""
    written = {f"{name}.json": json.dumps(config).encode() for name, config in configs.items()}
    return {"tokenizer.json": builders.byte_level_backend().to_str().encode(), **written}


@given(text=st.text())
def test_encoding_and_decoding_are_those_of_transformers(text: str) -> None:
    ours = builders.byte_level_tokenizer()
    theirs = PreTrainedTokenizerFast(tokenizer_object=builders.byte_level_backend(), clean_up_tokenization_spaces=False)
    for add_special_tokens in (True, False):
        ids = ours.encode(text, add_special_tokens)
        assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer, text = builders.byte_level_tokenizer(), "once upon a time " * 10_000
    num_turns, runs = 0, True

    def encode() -> bool:
        before = num_turns
        tokenizer.encode(text)
        return num_turns > before

    def take_turns() -> None:
        nonlocal num_turns
        while runs:
            num_turns += 1
            time.sleep(0)

    interval_s = sys.getswitchinterval()
    other = threading.Thread(target=take_turns)
    try:
        sys.setswitchinterval(1000.0)  # so a thread goes on until it lets others run by itself
        other.start()
        assert any(encode() for _ in range(20))  # on a busy machine the other thread may miss its chance
    finally:
        runs = False
        sys.setswitchinterval(interval_s)
        other.join()


def test_special_tokens_come_from_the_tokenizers_configuration() -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    tokenizer = Tokenizer.from_files(files(tokenizer_config=config))
    assert tokenizer.special_tokens == SpecialTokens(named={"bos_token": "<s>", "eos_token": "</s>"})
    assert tokenizer.eos_token_id == tokenizer.token_to_id("</s>")


def test_special_tokens_missing_in_the_configuration_come_from_the_special_tokens_map() -> None:
    older = {"bos_token": "old", "eos_token": "</s>", "additional_special_tokens": ["<|turn|>"]}
    special = SpecialTokens.from_files(files(special_tokens_map=older, tokenizer_config={"bos_token": "<s>"}))
    assert special.all == ("<s>", "</s>", "<|turn|>")


def test_tokens_named_special_are_skipped_even_if_the_tokenizers_file_does_not_say_so() -> None:
    plain = Tokenizer.from_files(files())
    think = plain.token_to_id("<think>")
    assert think is not None
    assert plain.decode([think]) == "<think>"
    special = Tokenizer.from_files(files(tokenizer_config={"additional_special_tokens": ["<think>"]}))
    assert special.decode([think]) == ""
    assert think in special.special_token_ids


def test_special_tokens_that_the_vocabulary_lacks_get_no_id() -> None:
    plain = Tokenizer.from_files(files())
    tokenizer = Tokenizer.from_files(files(tokenizer_config={"eos_token": "<never seen>"}))
    assert tokenizer.eos_token_id is None
    assert tokenizer.vocab_size == plain.vocab_size


def test_a_tokenizer_from_a_directory_is_the_one_from_its_files(tmp_path: Path) -> None:
    for name, content in files(tokenizer_config={"eos_token": "</s>"}).items():
        (tmp_path / name).write_bytes(content)
    tokenizer = Tokenizer.from_files(read_text_files(tmp_path))
    assert tokenizer.encode("the fox") == builders.byte_level_tokenizer().encode("the fox")
    assert tokenizer.eos_token_id is not None


def test_truncation_and_padding_left_in_the_file_are_ignored() -> None:
    backend = builders.byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_files({"tokenizer.json": backend.to_str().encode()})
    text = "the quick brown fox jumps"
    assert tokenizer.encode(text) == builders.byte_level_tokenizer().encode(text)


def test_a_lone_surrogate_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        builders.byte_level_tokenizer().encode("\ud800", field="messages")
    assert caught.value.field == "messages"


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_decoding_an_id_that_is_no_u32_is_the_callers_fault(token_id: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        builders.byte_level_tokenizer().decode([token_id])
    assert caught.value.field == "token_ids"


def test_ids_beyond_the_vocabulary_decode_to_nothing() -> None:
    tokenizer = builders.byte_level_tokenizer()
    assert tokenizer.decode([tokenizer.vocab_size + 1]) == ""


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"tokenizer.json": b"\xff"},
        {"tokenizer.json": b"{}"},
        {"tokenizer.json": b"no JSON"},
        files(tokenizer_config=[]),
        files(tokenizer_config={"bos_token": 7}),
        files(tokenizer_config={"additional_special_tokens": "one"}),
        {**files(), "special_tokens_map.json": b"{"},
    ],
)
def test_broken_files_are_named_as_such(broken: dict[str, bytes]) -> None:
    with pytest.raises(ModelFilesError):
        Tokenizer.from_files(broken)


def test_a_directory_without_a_tokenizer_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json"):
        Tokenizer.from_files(read_text_files(tmp_path))

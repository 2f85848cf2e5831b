"""The random Llama is a whole checkpoint, and the same one every time."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from models.random_llama import write_random_llama

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me of the sea 🌊"}]


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    for name, seed in {"first": 0, "again": 0, "other": 1}.items():
        write_random_llama(tmp_path / name, seed=seed)
    first, other = digests(tmp_path / "first"), digests(tmp_path / "other")
    assert digests(tmp_path / "again") == first
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_transformers_loads_every_weight_and_generates(random_model_dir: Path) -> None:
    loaded: Any = LlamaForCausalLM.from_pretrained(random_model_dir, output_loading_info=True)
    model, report = loaded
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(random_model_dir)
    ids = tokenizer("Every morning", return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert output.shape[1] == ids.shape[1] + 8


def test_the_chat_template_marks_each_turn_and_text_survives_the_round_trip(random_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(random_model_dir)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>Be kind.<|eos|><|user|>Tell me of the sea 🌊<|eos|><|assistant|>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.eos_token_id) == len(MESSAGES)


def test_the_chat_template_refuses_an_unknown_role(random_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(random_model_dir)
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "stranger", "content": ""}], tokenize=False)

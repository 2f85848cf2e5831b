"""The fingerprint changes with everything that decides tokens and KV blocks, and with nothing else."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quartet.engine import fingerprint
from quartet.engine.fingerprint import model_fingerprint
from quartet.errors import InvalidRequestError

_FILES = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"tokens",
    "tokenizer_config.json": b"more",
    "chat_template.jinja": b"{{ messages }}",
    "preprocessor_config.json": b"[96]",
    "processor_config.json": b"[64]",
    "model-00001-of-00002.safetensors": b"first",
    "model-00002-of-00002.safetensors": b"second",
}


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        for file, content in _FILES.items():
            (directory / file).write_bytes(content)
        return directory

    return make


def test_it_is_the_digest_of_the_documented_text(make_model: Callable[[str], Path]) -> None:
    parts = ["config"] * 2 + ["tokenizer"] * 2 + ["template"] + ["preprocessing"] * 2 + ["weights"] * 2
    lines = [
        f"{part}\0{file}\0{hashlib.sha256(content).hexdigest()}\n"
        for part, (file, content) in zip(parts, _FILES.items(), strict=True)
    ]
    expected = hashlib.sha256(("".join(lines) + "kv_dtype\0bfloat16\n").encode()).hexdigest()
    assert model_fingerprint(make_model("model"), "bfloat16") == expected


def test_it_depends_on_the_content_and_not_on_the_path(make_model: Callable[[str], Path]) -> None:
    other = make_model("other")
    (other / "README.md").write_text("a card")
    assert model_fingerprint(make_model("model"), "float32") == model_fingerprint(str(other), "float32")


@pytest.mark.parametrize("file", _FILES)
def test_it_changes_with_every_file(file: str, make_model: Callable[[str], Path]) -> None:
    directory = make_model("model")
    before = model_fingerprint(directory, "float32")
    (directory / file).write_bytes(_FILES[file] + b"!")
    assert model_fingerprint(directory, "float32") != before


def test_it_changes_with_the_kv_dtype(make_model: Callable[[str], Path]) -> None:
    directory = make_model("model")
    assert model_fingerprint(directory, "float32") != model_fingerprint(directory, "float64")


def test_weights_are_hashed_once_until_they_change(
    make_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_model("model")
    before = model_fingerprint(directory, "float32")
    hashed: list[str] = []
    hash_file = fingerprint._hash_file

    def note_and_hash(state: fingerprint._FileState) -> str:
        hashed.append(state.path.name)
        return hash_file(state)

    monkeypatch.setattr(fingerprint, "_hash_file", note_and_hash)
    assert model_fingerprint(directory, "float32") == before
    assert not [name for name in hashed if name.endswith(".safetensors")]
    weights = directory / "model-00002-of-00002.safetensors"
    weights.write_bytes(b"SECOND")  # as long as before
    os.utime(weights, ns=(1, 1))
    assert model_fingerprint(directory, "float32") != before


@pytest.mark.parametrize("missing", ["config.json", "weights"])
def test_a_directory_without_a_model_is_refused(missing: str, make_model: Callable[[str], Path]) -> None:
    directory = make_model("model")
    for file in directory.glob("*.safetensors" if missing == "weights" else missing):
        file.unlink()
    with pytest.raises(InvalidRequestError) as caught:
        model_fingerprint(directory, "float32")
    assert caught.value.field == "model"


def test_random_weights_are_told_by_their_seed_and_need_no_files(make_model: Callable[[str], Path]) -> None:
    directory = make_model("model")
    as_files = model_fingerprint(directory, "float32")
    with_seeds = {model_fingerprint(directory, "float32", seed) for seed in (0, 1)}
    for file in directory.glob("*.safetensors"):
        file.unlink()
    assert with_seeds == {model_fingerprint(directory, "float32", seed) for seed in (0, 1)}
    assert len({as_files, *with_seeds}) == 3
    (directory / "config.json").write_text("{}\n")
    assert model_fingerprint(directory, "float32", 0) not in with_seeds
    (directory / "config.json").unlink()
    with pytest.raises(InvalidRequestError, match=r"holds no config\.json$"):
        model_fingerprint(directory, "float32", 0)


def test_neither_torch_nor_transformers_is_needed() -> None:
    code = (
        "import sys, quartet.engine.fingerprint, quartet.engine.torch; "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_weights_of_the_hub_s_cache_are_not_read(tmp_path: Path, make_model: Callable[[str], Path]) -> None:
    model = make_model("model")
    as_files = model_fingerprint(model, "float32")
    blobs = tmp_path / "cache" / "blobs"
    blobs.mkdir(parents=True)
    for file in model.glob("*.safetensors"):
        content = file.read_bytes()
        blob = blobs / hashlib.sha256(content).hexdigest()
        blob.write_bytes(bytes(len(content)))  # another one: what is believed is the name
        file.unlink()
        file.symlink_to(blob)
    assert model_fingerprint(model, "float32") == as_files

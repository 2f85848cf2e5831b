"""Pieces of a training go on where the one before stopped, wherever that one was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models.tiny import train  # noqa: E402
from models.tiny.batches import BatchShape  # noqa: E402
from models.tiny.evaluate import CHECKPOINT  # noqa: E402
from models.tiny.train import Training  # noqa: E402
from tests import tiny  # noqa: E402

SHAPE = BatchShape(num_tokens=300, num_images=1, max_conversations=15)


class KilledError(Exception):
    """What a kill is here."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is noted, the model is narrow, and the tokenizer is the committed one, not made again."""
    monkeypatch.setattr(train, "_LOG_STEPS", 1)
    monkeypatch.setattr(train, "llava_config", tiny.narrow_config)
    monkeypatch.setattr(train, "train_tokenizer", lambda: Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")))


def training(directory: Path) -> Training:
    return Training(directory, shape=SHAPE, num_steps=3, seed=0, device=torch.device("cpu"))


def state_of(one: Training) -> dict[str, Any]:
    weights = {name: weight.clone() for name, weight in train._weights(one._learner)}
    momenta = [stack.clone() for stack in one._optimizer.state()["muon"]]
    return {"step": one._step, "log": list(one._log), "weights": weights, "momenta": momenta}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (one["step"], one["log"]) == (other["step"], other["log"])
    torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)
    torch.testing.assert_close(one["momenta"], other["momenta"], rtol=0, atol=0)


def run_piece(one: Training) -> dict[str, Any]:
    """One step."""
    one.run(max_s=0, num_workers=0)
    return state_of(one)


def test_a_piece_goes_on_from_what_was_saved_last_wherever_the_one_before_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise KilledError

    first = run_piece(training(tmp_path))
    assert first["step"] == 1
    second = training(tmp_path)
    assert_same(state_of(second), first)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr("models.tiny.train.os.replace", kill)  # written, and not in its place yet
        run_piece(second)
    assert_same(state_of(training(tmp_path)), first)

    second = training(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(train.json, "dumps", kill)  # the state is there, the log that goes with it is not
        run_piece(second)
    assert json.loads((tmp_path / "log.json").read_text(encoding="utf-8"))["step"] == 1
    third = training(tmp_path)
    assert third._step == 2
    assert_same(state_of(third), state_of(second))
    assert run_piece(third)["step"] == 3
    assert third.is_done
    log = json.loads((tmp_path / "log.json").read_text(encoding="utf-8"))
    assert [entry["step"] for entry in log["entries"]] == [1, 2, 3]
    assert {path.name for path in tmp_path.iterdir()} == {"state.pt", "log.json", "checkpoint"}


def test_a_training_that_is_done_is_written_again(tmp_path: Path) -> None:
    one = training(tmp_path)
    one.run(max_s=3600, num_workers=0)
    assert one.is_done
    (tmp_path / "log.json").unlink()
    training(tmp_path).run(max_s=3600, num_workers=0)
    assert json.loads((tmp_path / "log.json").read_text(encoding="utf-8"))["step"] == 3

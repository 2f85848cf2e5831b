"""The tiny model's checkpoint is what plain transformers loads, and it answers."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from models.tiny import evaluate  # noqa: E402
from models.tiny.architecture import configuration_files, llava_config  # noqa: E402
from models.tiny.batches import BatchMaker, BatchShape  # noqa: E402
from models.tiny.conversation import Skill, Turn  # noqa: E402
from models.tiny.evaluate import CHECKPOINT, Answerer, Sample  # noqa: E402
from models.tiny.learner import Learner, to_tensors  # noqa: E402
from models.tiny.optimizer import Optimizer, Schedule, _orthogonal  # noqa: E402
from tests import tiny  # noqa: E402

SHAPE = BatchShape(num_tokens=400, num_images=1, max_conversations=15)


def committed_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    return Answerer(CHECKPOINT, "cpu")


def test_training_computes_what_transformers_computes(answerer: Answerer) -> None:
    tokenizer = committed_tokenizer()
    learner = Learner(llava_config(), tokenizer)
    learner.llava.load_state_dict(answerer._model.state_dict())
    batch = BatchMaker(tokenizer, SHAPE, seed=0).make(3)
    tensors = to_tensors(batch)
    end = int(batch.boundaries[1])
    with torch.no_grad():
        embeddings, _ = learner._embed(tensors)
        hidden = learner.llava.model.language_model(
            inputs_embeds=embeddings,
            position_ids=tensors["positions"][None],
            use_cache=False,
            boundaries=tensors["boundaries"],
        ).last_hidden_state[0]
        pixels = tensors["images"][:1].permute(0, 3, 1, 2) / 127.5 - 1
        expected = answerer._model(input_ids=tensors["ids"][None, :end], pixel_values=pixels).logits[0]
        torch.testing.assert_close(learner.llava.lm_head(hidden[:end]), expected, atol=2e-3, rtol=2e-3)


def test_a_step_of_training_moves_every_weight_and_its_state_goes_on_in_another_process() -> None:
    tokenizer = committed_tokenizer()
    torch.manual_seed(0)
    learner = Learner(tiny.narrow_config(), tokenizer)
    optimizer = Optimizer(learner, Schedule(num_steps=100))
    before = {name: weight.detach().clone() for name, weight in learner.named_parameters()}
    loss, log = learner(to_tensors(BatchMaker(tokenizer, SHAPE, seed=0).make(0)), torch.tensor(1.0))
    assert float(log[:-1, 2].sum()) > 0
    loss.backward()
    optimizer.step(50)
    still = [name for name, weight in learner.named_parameters() if torch.equal(weight, before[name])]
    # Not used: LLaVA takes the tower's last layer as it is. The projection's keys have no use for a bias.
    assert all("post_layernorm" in name or "k_proj.bias" in name for name in still), still
    other = Optimizer(learner, Schedule(num_steps=100))
    other.load_state(optimizer.state())
    for mine, theirs in zip(other.state()["muon"], optimizer.state()["muon"], strict=True):
        assert torch.equal(mine, theirs)


def test_orthogonal_updates_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((2, 64, 32), (2, 32, 64), (1, 48, 48)):
        values = torch.linalg.svdvals(_orthogonal(torch.randn(shape)).float())
        assert float(values.min()) > 0.3 and float(values.max()) < 1.4


def test_learning_rates_rise_stay_and_fall_to_nothing() -> None:
    schedule = Schedule(num_steps=1_000, num_warmup_steps=10, decay_share=0.5)
    assert [schedule.factor(step) for step in (0, 9, 500, 750, 1_000)] == [0.1, 1.0, 1.0, 0.5, 0.0]


def test_the_committed_configuration_is_the_one_that_training_writes() -> None:
    for name, content in configuration_files(llava_config()).items():
        committed = json.loads((CHECKPOINT / name).read_text(encoding="utf-8"))
        for one in (committed, content):
            one.pop("transformers_version", None)
        assert committed == json.loads(json.dumps(content)), name


def test_the_committed_model_answers_held_out_questions_about_pictures_and_texts(answerer: Answerer) -> None:
    asked = [sample for measure in ("shape", "colour", "count", "position") for sample in _some(measure, 2)]
    asked += _some("text_qa", 5)
    answers = answerer.answers(asked)
    is_right = [answer == sample.turn.answer for answer, sample in zip(answers, asked, strict=True)]
    assert np.mean(is_right) > 0.85, list(zip(answers, asked, strict=True))


def test_the_committed_model_tells_a_story_that_ends(answerer: Answerer) -> None:
    request = Turn("Tell me a short story about a fox named Anna.", "", Skill.STORY)
    [story] = answerer.answers([Sample(request)], max_tokens=300)
    assert "fox" in story and "Anna" in story
    assert 120 < len(story.split()) < 250
    assert story.count("\n\n") == 2 and story.endswith(".")


def test_evaluation_counts_whole_answers_and_repeats_itself_by_seed() -> None:
    def right_about_pictures(asked: list[Sample]) -> list[str]:
        return [sample.turn.answer if sample.scene else "I do not know." for sample in asked]

    results: dict[str, Any] = evaluate.evaluate(right_about_pictures, seed=3, num_samples=5)
    assert {key: results[key] for key in ("shape", "colour", "count", "position", "text_qa", "retrieval")} == {
        "shape": 1.0, "colour": 1.0, "count": 1.0, "position": 1.0, "text_qa": 0.0, "retrieval": 0.0,
    }  # fmt: skip
    assert _some("retrieval", 2) == _some("retrieval", 2)
    assert _some("retrieval", 2, seed=1) != _some("retrieval", 2)


def _some(measure: str, number: int, seed: int = 0) -> list[Sample]:
    return list(islice(evaluate.samples(measure, seed), number))


def test_the_checkpoint_is_small_enough() -> None:
    assert Path(CHECKPOINT / "model.safetensors").stat().st_size < 32e6

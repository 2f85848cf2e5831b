"""Evaluates the tiny model on fresh held-out samples, greedily: an answer counts if all of it is right.

python -m models.tiny.evaluate --seed N --json FILE [--model DIR] [--num-samples 200]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlavaForConditionalGeneration

from models.tiny import facts, looking, stories, tasks
from models.tiny.architecture import MAX_LENGTH
from models.tiny.conversation import Conversation, Skill, Turn
from models.tiny.render import NUM_PATCHES, render
from models.tiny.scenes import Scene, draw_scene
from models.tiny.split import Split
from models.tiny.tokenizer import ASSISTANT, BOS, EOS, IMAGE, PAD, USER, special_id

CHECKPOINT = Path(__file__).parent / "checkpoint"
#: Tokens of a retrieval prompt's text; question and template come on top.
_RETRIEVAL_TOKENS, _LONG_RETRIEVAL_TOKENS = 2_000, 3_800
_TEXT_SKILLS = (stories.story_questions, facts.reading, tasks.counting, tasks.arithmetic, tasks.instructions)
_MAX_ANSWER_TOKENS = 48
#: Tokens in one batch of prompts: a CPU gains nothing from more, and fewer leave a GPU idle.
_MAX_BATCH_TOKENS = {"cpu": 20_000, "cuda": 400_000}


@dataclass(frozen=True)
class Sample:
    """One question, with a picture or without."""

    turn: Turn
    scene: Scene | None = None


def samples(measure: str, seed: int) -> Iterator[Sample]:
    """Yield held-out samples without end, for the results' keys or for their details."""
    for number in count():
        rng = Split.HELD_OUT.rng(seed, measure, number)
        if measure in _LOOKING:
            scene = draw_scene(rng, Split.HELD_OUT)
            turn = looking.ask_about(rng, scene, _LOOKING[measure])
            if turn is not None:
                yield Sample(turn, scene)
        elif measure == "text_qa":
            make = _TEXT_SKILLS[number % len(_TEXT_SKILLS)]
            yield _first(make(rng, Split.HELD_OUT))
        else:
            num_tokens = _RETRIEVAL_TOKENS if measure == "retrieval" else _LONG_RETRIEVAL_TOKENS
            yield _first(facts.retrieval(rng, Split.HELD_OUT, num_tokens))


class Answerer:
    """Answers with a checkpoint, greedily."""

    def __init__(self, directory: Path, device: str) -> None:
        """Load the model in float32 on a CPU, in its own bfloat16 on a GPU."""
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model: Any = LlavaForConditionalGeneration.from_pretrained(directory, dtype=dtype)
        self._model = model.to(device)
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._device = device

    def answers(self, asked: list[Sample], max_tokens: int = _MAX_ANSWER_TOKENS) -> list[str]:
        """Return the answer to each of ``asked``."""
        prompts = [self._prompt(sample) for sample in asked]
        answers = [""] * len(asked)
        order = sorted(range(len(asked)), key=lambda index: len(prompts[index]))
        while order:
            size = max(1, min(len(order), _MAX_BATCH_TOKENS[self._device] // len(prompts[order[-1]])))
            chosen, order = order[-size:], order[:-size]
            texts = self._generate([prompts[i] for i in chosen], [asked[i].scene for i in chosen], max_tokens)
            for index, text in zip(chosen, texts, strict=True):
                answers[index] = text
        return answers

    def _prompt(self, sample: Sample) -> list[int]:
        picture = IMAGE * NUM_PATCHES if sample.scene else ""
        text = f"{BOS}{USER}{picture}{sample.turn.question}{EOS}{ASSISTANT}"
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], scenes: list[Scene | None], max_tokens: int) -> list[str]:
        length = max(map(len, prompts))
        pad_id, eos_id = special_id(PAD), special_id(EOS)
        ids = torch.tensor([[pad_id] * (length - len(prompt)) + prompt for prompt in prompts], device=self._device)
        pictures = [torch.from_numpy(render(scene)) for scene in scenes if scene]
        pixels = {}
        if pictures:
            values = torch.stack(pictures).permute(0, 3, 1, 2).to(self._device) / 127.5 - 1
            pixels = {"pixel_values": values.to(self._model.dtype)}
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ne(ids, pad_id).long(),
            **pixels,
            max_new_tokens=min(max_tokens, MAX_LENGTH - length),
            do_sample=False,
            eos_token_id=eos_id,
            pad_token_id=pad_id,
        )
        texts: list[str] = self._tokenizer.decode_batch(output[:, length:].tolist(), skip_special_tokens=True)
        return texts


def evaluate(answer: Callable[[list[Sample]], list[str]], seed: int, num_samples: int) -> dict[str, Any]:
    """Return the fraction of right answers of each measure, and details: text by skill, retrieval in 3.8 k tokens."""
    fractions = {}
    by_skill: dict[Skill, list[bool]] = {}
    for measure in (*_LOOKING, "text_qa", "retrieval", "retrieval_4k"):
        asked = list(islice(samples(measure, seed), num_samples))
        is_right = [text == sample.turn.answer for text, sample in zip(answer(asked), asked, strict=True)]
        fractions[measure] = sum(is_right) / len(is_right)
        if measure == "text_qa":
            for sample, right in zip(asked, is_right, strict=True):
                by_skill.setdefault(sample.turn.skill, []).append(right)
    details = {skill.value: sum(rights) / len(rights) for skill, rights in by_skill.items()}
    details["retrieval_4k"] = fractions.pop("retrieval_4k")
    return {"seed": seed, "num_samples": num_samples, **fractions, "details": details}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Evaluate the tiny model on held-out samples.")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="checkpoint to evaluate")
    parser.add_argument("--num-samples", type=int, default=200, help="of each measure")
    parser.add_argument("--device", choices=_MAX_BATCH_TOKENS, default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    answerer = Answerer(arguments.model, arguments.device)
    results = evaluate(answerer.answers, arguments.seed, arguments.num_samples)
    arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))


def _first(conversation: Conversation) -> Sample:
    return Sample(conversation.turns[0])


_LOOKING = {"shape": Skill.SHAPE, "colour": Skill.COLOUR, "count": Skill.COUNT, "position": Skill.POSITION}


if __name__ == "__main__":
    main()

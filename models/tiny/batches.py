"""Training batches: conversations packed end to end into one long row. Batch ``n`` is a function of seed and ``n``."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.tiny import facts, looking, stories, tasks
from models.tiny.conversation import LOSS_WEIGHT, Conversation, Skill
from models.tiny.render import NUM_PATCHES, patch_shapes, render
from models.tiny.scenes import COLOURS, MAX_SHAPES, SHAPES, Scene
from models.tiny.split import Split
from models.tiny.tokenizer import ASSISTANT, BOS, EOS, IMAGE, PAD, SYSTEM, USER, special_id

_SKILLS = tuple(Skill)
_SHORTEST_RETRIEVAL, _LONGEST_RETRIEVAL = 60, 3_900
_FIRST_LONGEST = 300
_SYSTEM_MESSAGES = ("You are a helpful assistant.", "You are a kind and helpful model.", "Answer briefly.", "Be kind.")
#: Shares of the tokens of conversations without pictures; ``num_images`` gives the number of pictures.
_TEXTS: tuple[tuple[float, Callable[[random.Random, Split], Conversation]], ...] = (
    (0.20, stories.story_conversation),
    (0.12, stories.story_questions),
    (0.28, facts.reading),
    (0.13, tasks.counting),
    (0.12, tasks.arithmetic),
    (0.14, tasks.instructions),
    (0.01, tasks.small_talk),
)


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The size of a batch and its shares.

    Attributes:
        num_tokens: of the packed row.
        num_images: in the row.
        max_conversations: in the row; the rest of the row is padding.
        retrieval_share: retrieval's share of ``num_tokens``, roughly.
        num_ramp_batches: over these batches the longest retrieval text grows from 300 tokens to 3900, and the most
            shapes of a picture from one to six.
    """

    num_tokens: int = 65_536
    num_images: int = 192
    max_conversations: int = 1_023
    retrieval_share: float = 0.25
    num_ramp_batches: int = 2_000

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if the row is too short for its images' conversations, of 225 tokens at most."""
        if self.num_tokens < 230 * self.num_images:
            raise ValueError(f"num_tokens must be at least {230 * self.num_images} for {self.num_images} images")

    @property
    def num_predicted(self) -> int:
        """Most predicted tokens: about twice the tokens of answers."""
        return self.num_tokens // 2


@dataclass(frozen=True)
class Batch:
    """Arrays of one batch; ``T`` tokens, ``N`` images.

    Attributes:
        ids: int64 ``[T]``.
        positions: int64 ``[T]``, from 0 in each conversation.
        predicted_at: int64 ``[P]``: positions after which a token is predicted; 0 beyond the last.
        targets: int64 ``[P]``: the predicted tokens.
        weights: float32 ``[P]``: weight of each in the loss; 0 beyond the last.
        skills: int64 ``[P]``: index in ``Skill`` of what the token shows.
        boundaries: int32 ``[max_conversations + 2]``: where conversations begin, and ``T`` at the end.
        images: uint8 ``[N, IMAGE_SIZE, IMAGE_SIZE, 3]``.
        image_positions: int64 ``[N * NUM_PATCHES]``: which tokens stand for patches.
        patch_shapes: int64 ``[N, NUM_PATCHES]``, what each patch shows: index in ``SHAPES``, -1 for nothing.
        patch_colours: likewise, its index in ``COLOURS``.
        patch_fields: likewise, in which of the nine fields, row by row, that shape is.
        patch_middles: int64 ``[N, NUM_PATCHES]``, 1 where a shape's middle is.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    predicted_at: NDArray[np.int64]
    targets: NDArray[np.int64]
    weights: NDArray[np.float32]
    skills: NDArray[np.int64]
    boundaries: NDArray[np.int32]
    images: NDArray[np.uint8]
    image_positions: NDArray[np.int64]
    patch_shapes: NDArray[np.int64]
    patch_colours: NDArray[np.int64]
    patch_fields: NDArray[np.int64]
    patch_middles: NDArray[np.int64]


class BatchMaker:
    """Makes the batches of one training run."""

    def __init__(self, tokenizer: Tokenizer, shape: BatchShape, seed: int) -> None:
        """Measure how long conversations of each kind are, so that ``_TEXTS`` are shares of tokens."""
        self._tokenizer, self._shape, self._seed = tokenizer, shape, seed
        self._makers = [make for _, make in _TEXTS]
        self._shares = []
        for share, make in _TEXTS:
            rng = Split.TRAIN.rng(0, "lengths", make.__name__)
            lengths = [len(encode(tokenizer, make(rng, Split.TRAIN)).ids) for _ in range(50)]
            self._shares.append(share / float(np.mean(lengths)))

    def make(self, number: int) -> Batch:
        """Make batch ``number``: the same at every call."""
        rng, shape = Split.TRAIN.rng(self._seed, "batch", number), self._shape
        row = _Row(self._tokenizer, shape)
        progress = min(1.0, number / shape.num_ramp_batches)
        max_shapes = 1 + int((MAX_SHAPES - 1) * progress)
        while len(row.scenes) < shape.num_images:
            conversation = looking.looking(rng, Split.TRAIN, max_shapes)
            if len(row.scenes) + len(conversation.scenes) <= shape.num_images:
                row.append(conversation)
        longest = _FIRST_LONGEST * (_LONGEST_RETRIEVAL / _FIRST_LONGEST) ** progress
        end = len(row.ids) + shape.retrieval_share * shape.num_tokens
        while len(row.ids) < end:
            num_tokens = round(math.exp(rng.uniform(math.log(_SHORTEST_RETRIEVAL), math.log(longest))))
            if not row.append(facts.retrieval(rng, Split.TRAIN, num_tokens)):
                break
        while row.append(self._text(rng)):
            pass
        return row.batch()

    def _text(self, rng: random.Random) -> Conversation:
        """Return a conversation without pictures; some are about two things, and some have a system message."""
        conversation = rng.choices(self._makers, weights=self._shares)[0](rng, Split.TRAIN)
        if not conversation.is_chat or rng.random() < 0.7:
            return conversation
        other = rng.choices(self._makers, weights=self._shares)[0](rng, Split.TRAIN)
        system = rng.choice((None, *_SYSTEM_MESSAGES))
        return Conversation((*conversation.turns, *other.turns), system=system)


@dataclass(frozen=True)
class Encoded:
    """A conversation as tokens.

    Attributes:
        ids: as the chat template writes them.
        weights: weight of each in the loss: 0 except in answers and their end.
        skills: of each, the index in ``Skill``.
    """

    ids: list[int]
    weights: list[float]
    skills: list[int]


def encode(tokenizer: Tokenizer, conversation: Conversation) -> Encoded:
    """Turn ``conversation`` into tokens."""
    bos, eos, user, assistant = (special_id(token) for token in (BOS, EOS, USER, ASSISTANT))
    texts = [text for turn in conversation.turns for text in (turn.question, turn.answer)]
    encoded = [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    if not conversation.is_chat:
        [turn], [_, text] = conversation.turns, encoded
        weight, num = LOSS_WEIGHT.get(turn.skill, 1.0), len(text) + 1
        return Encoded([bos, *text, eos], [0.0] + [weight] * num, [_SKILLS.index(turn.skill)] * (num + 1))
    beginning = [bos]
    if conversation.system is not None:
        system = tokenizer.encode(conversation.system, add_special_tokens=False).ids
        beginning += [special_id(SYSTEM), *system, eos]
    whole = Encoded(beginning, [0.0] * len(beginning), [0] * len(beginning))
    pictures = [special_id(IMAGE)] * (NUM_PATCHES * len(conversation.scenes))
    for number, turn in enumerate(conversation.turns):
        question = [user, *(pictures if number == 0 else ()), *encoded[2 * number], eos]
        answer = [assistant, *encoded[2 * number + 1], eos]
        whole.ids.extend(question + answer)
        weight = LOSS_WEIGHT.get(turn.skill, 1.0)
        whole.weights.extend([0.0] * (len(question) + 1) + [weight] * (len(answer) - 1))
        whole.skills.extend([_SKILLS.index(turn.skill)] * (len(question) + len(answer)))
    return whole


@dataclass
class _Row:
    """A batch while it fills."""

    tokenizer: Tokenizer
    shape: BatchShape
    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    skills: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    scenes: list[Scene] = field(default_factory=list)
    num_predicted: int = 0

    def append(self, conversation: Conversation) -> bool:
        """Append ``conversation``; ``False``: there is no room."""
        encoded = encode(self.tokenizer, conversation)
        num_predicted = sum(weight > 0 for weight in encoded.weights)
        if (
            len(self.ids) + len(encoded.ids) > self.shape.num_tokens
            or len(self.starts) == self.shape.max_conversations
            or self.num_predicted + num_predicted > self.shape.num_predicted
        ):
            return False
        self.starts.append(len(self.ids))
        self.ids += encoded.ids
        self.weights += encoded.weights
        self.skills += encoded.skills
        self.scenes += conversation.scenes
        self.num_predicted += num_predicted
        return True

    def batch(self) -> Batch:
        """Return the arrays, filled up with padding."""
        num_tokens, length = self.shape.num_tokens, len(self.ids)
        ids = np.full(num_tokens, special_id(PAD), dtype=np.int64)
        ids[:length] = self.ids
        boundaries = np.full(self.shape.max_conversations + 2, num_tokens, dtype=np.int32)
        boundaries[: len(self.starts) + 1] = [*self.starts, length]
        starts = np.zeros(num_tokens, dtype=np.int64)
        begun = boundaries[boundaries < num_tokens]
        starts[begun] = begun
        weights = np.array(self.weights, dtype=np.float32)
        predicted = np.flatnonzero(weights)
        labels = np.stack([_patch_labels(scene) for scene in self.scenes])
        return Batch(
            ids=ids,
            positions=np.arange(num_tokens) - np.maximum.accumulate(starts),
            predicted_at=self._fill_up(predicted - 1),
            targets=self._fill_up(ids[predicted]),
            weights=self._fill_up(weights[predicted]),
            skills=self._fill_up(np.array(self.skills)[predicted]),
            boundaries=boundaries,
            images=np.stack([render(scene) for scene in self.scenes]),
            image_positions=np.flatnonzero(ids == special_id(IMAGE)),
            patch_shapes=labels[:, 0],
            patch_colours=labels[:, 1],
            patch_fields=labels[:, 2],
            patch_middles=labels[:, 3],
        )

    def _fill_up(self, values: NDArray[Any]) -> NDArray[Any]:
        filled = np.zeros(self.shape.num_predicted, dtype=values.dtype)
        filled[: len(values)] = values
        return filled


def _patch_labels(scene: Scene) -> NDArray[np.int64]:
    """Return ``[4, NUM_PATCHES]``: shape, colour, field, middle."""
    shown, middles = patch_shapes(scene)
    properties = [(-1, -1, -1)]
    for one in scene.shapes:
        properties.append((SHAPES.index(one.shape), COLOURS.index(one.colour), 3 * one.row + one.column))
    return np.vstack((np.array(properties, dtype=np.int64)[shown].T, middles))

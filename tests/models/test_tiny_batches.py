"""Pictures, tokens and packed batches of the tiny model's training."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from models.tiny import looking, stories
from models.tiny.batches import BatchMaker, BatchShape, encode
from models.tiny.conversation import Conversation, Skill, Turn
from models.tiny.render import COLOUR_VALUES, IMAGE_SIZE, NUM_PATCHES, PATCH_SIZE, patch_shapes, render
from models.tiny.scenes import COLOURS, SHAPES, Placed, Scene, draw_scene
from models.tiny.split import Split
from models.tiny.tokenizer import ASSISTANT, CHAT_TEMPLATE, EOS, IMAGE, SPECIAL_TOKENS, special_id, train_tokenizer
from quartet.text.chat_message import ChatMessage
from quartet.text.chat_template import ChatTemplate
from quartet.text.tokenizer import SpecialTokens

SHAPE = BatchShape(num_tokens=4_096, num_images=4, max_conversations=63)


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer()


def one_shape(shape: str, colour: str, *, x: float = 0.5, y: float = 0.5) -> Scene:
    return Scene((Placed(shape, colour, True, x, y, 0.15, 0.0),), "grey", "plain", 1)


@pytest.mark.parametrize("text", ["Hello, world!", "37 + 48 = 85", "A naïve 🌊 über-test\n\nwith  spaces", ""])
def test_text_survives_the_tokenizer(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text, add_special_tokens=False).ids) == text


def test_special_tokens_have_the_first_ids_and_every_digit_is_a_token() -> None:
    assert [tokenizer().token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer().encode("48213", add_special_tokens=False).tokens == list("48213")
    assert tokenizer().encode(f"{IMAGE}Hi{EOS}", add_special_tokens=False).ids[::2] == [
        special_id(IMAGE),
        special_id(EOS),
    ]


def test_training_writes_conversations_as_the_chat_template_does() -> None:
    turns = (Turn("Hello!", "Hi.", Skill.SMALL_TALK), Turn("What is 2 + 2?", "4", Skill.ARITHMETIC))
    messages = [ChatMessage("system", "Be kind.")]
    for turn in turns:
        messages += [ChatMessage("user", turn.question), ChatMessage("assistant", turn.answer)]
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    template = ChatTemplate(CHAT_TEMPLATE, SpecialTokens(named=named))
    text = template.render(messages, add_generation_prompt=False)
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    assert encode(tokenizer(), Conversation(turns, system="Be kind.")).ids == ids


def test_only_answers_and_their_ends_are_learned() -> None:
    encoded = encode(tokenizer(), Conversation((Turn("Say it.", "No.", Skill.SMALL_TALK),)))
    learned = [token for token, weight in zip(encoded.ids, encoded.weights, strict=True) if weight]
    assert tokenizer().decode(learned, skip_special_tokens=False) == f"No.{EOS}"


def test_a_plain_story_is_learned_whole_and_has_no_roles() -> None:
    conversation = Conversation((Turn("Tell me a story.", "Once upon a time.", Skill.STORY),), is_chat=False)
    encoded = encode(tokenizer(), conversation)
    assert tokenizer().decode(encoded.ids, skip_special_tokens=False) == "<|bos|>Once upon a time.<|eos|>"
    assert sum(weight > 0 for weight in encoded.weights) == len(encoded.ids) - 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", COLOURS)
def test_a_shape_is_drawn_in_its_colour_where_it_is(shape: str, colour: str) -> None:
    picture = render(one_shape(shape, colour, x=0.25, y=0.75)).astype(int)
    is_coloured = np.abs(picture - COLOUR_VALUES[colour]).max(axis=-1) < 30
    rows, columns = np.nonzero(is_coloured)
    assert 150 < is_coloured.sum() < 700
    assert abs(rows.mean() / IMAGE_SIZE - 0.75) < 0.03
    assert abs(columns.mean() / IMAGE_SIZE - 0.25) < 0.03


def test_the_same_scene_is_the_same_picture_at_any_size() -> None:
    scene = draw_scene(Split.TRAIN.rng(0), Split.TRAIN)
    assert np.array_equal(render(scene), render(scene))
    assert render(scene, 2 * IMAGE_SIZE).shape == (2 * IMAGE_SIZE, 2 * IMAGE_SIZE, 3)


def test_patches_say_what_they_show_and_where_its_middle_is() -> None:
    shown, middles = patch_shapes(one_shape("square", "red", x=0.3, y=0.55))
    per_side = IMAGE_SIZE // PATCH_SIZE
    assert np.flatnonzero(middles).tolist() == [int(0.55 * per_side) * per_side + int(0.3 * per_side)]
    assert shown[np.flatnonzero(middles)] == 1
    assert 3 < shown.sum() < 12


def test_a_batch_is_the_same_every_time_and_another_number_another_one() -> None:
    first, again = (BatchMaker(tokenizer(), SHAPE, seed=0).make(3) for _ in range(2))
    assert np.array_equal(first.ids, again.ids)
    assert np.array_equal(first.images, again.images)
    assert not np.array_equal(first.ids, BatchMaker(tokenizer(), SHAPE, seed=0).make(4).ids)
    assert not np.array_equal(first.ids, BatchMaker(tokenizer(), SHAPE, seed=1).make(3).ids)


def test_a_batch_is_packed_end_to_end_and_predicts_each_answer_from_the_token_before() -> None:
    batch = BatchMaker(tokenizer(), SHAPE, seed=0).make(9_000)
    assert batch.images.shape == (SHAPE.num_images, IMAGE_SIZE, IMAGE_SIZE, 3)
    assert batch.image_positions.shape == (SHAPE.num_images * NUM_PATCHES,)
    begun = batch.boundaries[batch.boundaries < SHAPE.num_tokens]
    assert np.array_equal(np.flatnonzero(batch.positions == 0), begun)
    is_used = batch.weights > 0
    assert np.array_equal(batch.ids[batch.predicted_at[is_used] + 1], batch.targets[is_used])
    after_roles = batch.ids[batch.predicted_at[is_used]] == special_id(ASSISTANT)
    assert after_roles.sum() > 20


def test_retrieval_texts_and_scenes_grow_with_the_batches_number() -> None:
    shape = BatchShape(num_tokens=8_192, num_images=8, num_ramp_batches=100)
    maker = BatchMaker(tokenizer(), shape, seed=0)
    early, late = ([maker.make(number) for number in numbers] for numbers in (range(4), range(100, 104)))
    assert max(batch.positions.max() for batch in early) < 700
    assert max(batch.positions.max() for batch in late) > 1_000
    assert all((batch.patch_middles.sum(axis=1) == 1).all() for batch in early)
    assert max(batch.patch_middles.sum(axis=1).max() for batch in late) > 3


def test_a_row_too_short_for_its_images_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens must be at least 2300 for 10 images"):
        BatchShape(num_tokens=2_299, num_images=10)


def test_two_pictures_come_in_the_order_of_their_questions() -> None:
    rng = Split.TRAIN.rng(0)
    pairs = [one for _ in range(200) if len((one := looking.looking(rng, Split.TRAIN)).scenes) == 2]
    assert pairs
    for pair in pairs:
        first = {turn.answer for turn in pair.turns if "first" in turn.question}
        shown = pair.scenes[0].shapes[0]
        assert f"{shown.colour.capitalize()}." in first


def test_the_committed_tokenizer_is_the_one_that_training_makes() -> None:
    checkpoint = Path(stories.__file__).parent / "checkpoint"
    committed = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert committed.get_vocab() == tokenizer().get_vocab()

"""The tokenizer: byte-level BPE trained on the generator's own texts, every digit a token; and the chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from models.tiny import facts, looking, stories, tasks
from models.tiny.conversation import Conversation
from models.tiny.split import Split

VOCAB_SIZE = 2048
BOS, EOS, PAD, IMAGE = "<|bos|>", "<|eos|>", "<|pad|>", "<|image|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, "<|tool|>", IMAGE)

#: The content of a message is text, or a list of parts of type ``image`` and ``text``.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_NUM_CONVERSATIONS = 1_200


def special_id(token: str) -> int:
    """Return the id of one of ``SPECIAL_TOKENS``."""
    return SPECIAL_TOKENS.index(token)


def train_tokenizer(vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train the tokenizer; special tokens have the first ids, in the order of ``SPECIAL_TOKENS``.

    Raises:
        ValueError: the texts yield fewer tokens than ``vocab_size``.
    """
    tokenizer = Tokenizer(models.BPE())
    # Every digit is a token: then sums are learned by column, and codes are copied digit by digit.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts yield {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """Return the content of ``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "image_token": IMAGE,
        "extra_special_tokens": {"image_token": IMAGE},
    }


def _texts() -> Iterator[str]:
    """Yield texts to train on, the same at every call."""
    rng = Split.TRAIN.rng(0, "tokenizer")
    makers = (
        stories.story_conversation, facts.reading, looking.looking, tasks.counting, tasks.arithmetic,
        tasks.instructions, tasks.small_talk,
    )  # fmt: skip
    for _ in range(_NUM_CONVERSATIONS):
        for make in makers:
            conversation: Conversation = make(rng, Split.TRAIN)
            for turn in conversation.turns:
                yield turn.question
                yield turn.answer

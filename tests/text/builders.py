"""Tokenizers of each kind, made here: nothing is downloaded."""

from __future__ import annotations

import functools
import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from quartet.text.tokenizer import SpecialTokens, Tokenizer

BOS, EOS = "<s>", "</s>"
SPECIAL_TOKENS = SpecialTokens(named={"bos_token": BOS, "eos_token": EOS}, additional=("<|turn|>",))

_CORPUS = [
    "The quick brown fox jumps over the lazy dog; the dog sleeps, the fox runs on and on. " * 3,
    "Stop here. STOP! User: hello there, how are you?\n\nAssistant: I am well, thank you.\n" * 3,
    "Grüße aus Köln, señor; 你好，世界。こんにちは世界 Привет, мир 👋🏽 👩‍👩‍👧‍👦 " * 3,
]


def byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE as of GPT-2 and Llama 3; some tokens hold parts of characters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=[BOS, EOS, "<|turn|>", "<｜fin▁de▁tour｜>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_tokens(["<think>", " né "])
    _add_bos(backend)
    return backend


def byte_fallback_backend(*, strip: bool = True) -> tokenizers.Tokenizer:
    """SentencePiece-like BPE with byte fallback, decoded as Llama 2 does (``strip``) or as Gemma does."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=200, limit_alphabet=60, show_progress=False)
    trained.train_from_iterator([text.replace(" ", "▁") for text in _CORPUS], trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", BOS, EOS, "<|turn|>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    merges = [(left, right) for left, right in model["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    prepend = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<unk>", BOS, EOS, "<|turn|>"])
    _add_bos(backend)
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    """Unigram-like words with the Metaspace decoder, which drops the first token's mark."""
    words = ["<unk>", BOS, EOS, "▁", "▁the", "▁fox", "▁the▁fox", "fox", "▁▁", "s", ",", "é", "你好"]
    backend = tokenizers.Tokenizer(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([BOS, EOS])
    return backend


def word_piece_backend() -> tokenizers.Tokenizer:
    """A decoder that is no concatenation: spaces depend on the neighbours."""
    words = ["[UNK]", BOS, EOS, "the", "fox", "##es", "jump", "##ing", "stop", "here", "你"]
    vocab = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens([BOS, EOS])
    return backend


@functools.cache
def byte_level_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), SPECIAL_TOKENS)


@functools.cache
def byte_fallback_tokenizer() -> Tokenizer:
    return Tokenizer(byte_fallback_backend(), SPECIAL_TOKENS)


@functools.cache
def gemma_like_tokenizer() -> Tokenizer:
    return Tokenizer(byte_fallback_backend(strip=False), SPECIAL_TOKENS)


@functools.cache
def metaspace_tokenizer() -> Tokenizer:
    return Tokenizer(metaspace_backend(), SPECIAL_TOKENS)


@functools.cache
def word_piece_tokenizer() -> Tokenizer:
    return Tokenizer(word_piece_backend(), SPECIAL_TOKENS)


def _add_bos(backend: tokenizers.Tokenizer) -> None:
    bos_id = backend.token_to_id(BOS)
    assert bos_id is not None
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos_id)])

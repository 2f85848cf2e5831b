"""Makes a small Llama with random weights: a whole Hugging Face checkpoint from a seed, nothing downloaded.

It says nothing sensible, but it is the real thing in every other way (safetensors, byte-level BPE, chat template), so
the whole system runs on it anywhere. The same seed gives the same bytes. The mock engine needs no weights: for it,
--no-weights leaves them out, and needs no safetensors.

    python -m models.random_llama --out DIR [--seed 0 | --no-weights]
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

_BOS, _EOS, _PAD = "<|bos|>", "<|eos|>", "<|pad|>"
_ROLES = ("system", "user", "assistant", "tool")
_SPECIAL_TOKENS = (_BOS, _EOS, _PAD, *(f"<|{role}|>" for role in _ROLES))

_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_WORDS = (
    "a about all and are as at be blue boat both bread bridge but by can city cloud come could day do each evening "
    "every far field find fire first fish for from garden give go good green had hand has have he her hill him his "
    "house how I if in into is it its just kind know lake land last letter light little long look made make many may "
    "morning mountain music my name never new night no north not now of old on one only or other our out over paper "
    "people rain red river road sea see she small snow so some song south stone story street summer sun than that the "
    "their them then there these they thing this time to town tree two under up very walk was water way we well went "
    "were what when which white who will wind winter with wood word work world would year you young your"
).split()
_NUM_SENTENCES = 2_000


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama.

    Attributes:
        vocab_size: tokens the BPE tokenizer is trained to, special tokens and the 256 bytes included.
        init_std: standard deviation of all weights. At the usual 0.02 the two best logits lie within 2e-6 of each
            other now and then, and greedy decoding would hang on rounding; at 0.1 they don't.
    """

    vocab_size: int = 640
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 4096
    init_std: float = 0.1


def write_random_llama(directory: Path, *, seed: int = 0, shape: LlamaShape | None = None) -> None:
    """Write a checkpoint of about 3.3 million float32 parameters into ``directory``, created if absent.

    ``model.safetensors`` comes last and at once, so where it exists the checkpoint is complete.
    """
    from safetensors.numpy import save_file

    shape = shape or LlamaShape()
    write_text_files(directory, shape=shape)
    partial = directory / "model.safetensors.partial"
    save_file(_random_weights(shape, seed), partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors creates files for their owner only
    partial.replace(directory / "model.safetensors")


def write_text_files(directory: Path, *, shape: LlamaShape | None = None) -> None:
    """Write all but the weights into ``directory``, created if absent.

    ``tokenizer.json`` comes last and at once, so where it exists all are there.
    """
    shape = shape or LlamaShape()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(shape.vocab_size)
    special_ids = {name: tokenizer.token_to_id(token) for name, token in _special_tokens().items()}
    ids = {f"{name}_id": token_id for name, token_id in special_ids.items()}
    _write_json(directory / "config.json", _config(shape) | ids)
    _write_json(directory / "generation_config.json", ids)
    _write_json(directory / "special_tokens_map.json", _special_tokens())
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(shape))
    partial = directory / "tokenizer.json.partial"
    tokenizer.save(str(partial))
    partial.replace(directory / "tokenizer.json")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Make a small random-weight Llama checkpoint from a seed.")
    parser.add_argument("--out", type=Path, default=Path(".run/models/random-llama"), help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--no-weights", action="store_true", help="write configuration and tokenizer only")
    arguments = parser.parse_args()
    if arguments.no_weights:
        write_text_files(arguments.out)
    else:
        write_random_llama(arguments.out, seed=arguments.seed)


def _special_tokens() -> dict[str, str]:
    return {"bos_token": _BOS, "eos_token": _EOS, "pad_token": _PAD}


def _config(shape: LlamaShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _tokenizer_config(shape: LlamaShape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
        **_special_tokens(),
    }


def _train_tokenizer(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", special_tokens=[(_BOS, tokenizer.token_to_id(_BOS))]
    )
    return tokenizer


def _sentences() -> list[str]:
    """Return text to train on, the same at every call: sentences of random common words."""
    rng = random.Random(0)
    words = [rng.choices(_WORDS, k=rng.randint(4, 14)) for _ in range(_NUM_SENTENCES)]
    return [" ".join(sentence).capitalize() + rng.choice(".?!") for sentence in words]


def _random_weights(shape: LlamaShape, seed: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)

    def matrix(num_out: int, num_in: int) -> NDArray[np.float32]:
        return rng.standard_normal((num_out, num_in), dtype=np.float32) * np.float32(shape.init_std)

    def norm() -> NDArray[np.float32]:
        return np.ones(shape.hidden_size, dtype=np.float32)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = {"model.embed_tokens.weight": matrix(shape.vocab_size, hidden), "model.norm.weight": norm()}
    for layer in range(shape.num_layers):
        weights |= {
            f"model.layers.{layer}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": norm(),
                "self_attn.q_proj": matrix(q_size, hidden),
                "self_attn.k_proj": matrix(kv_size, hidden),
                "self_attn.v_proj": matrix(kv_size, hidden),
                "self_attn.o_proj": matrix(hidden, q_size),
                "post_attention_layernorm": norm(),
                "mlp.gate_proj": matrix(inner, hidden),
                "mlp.up_proj": matrix(inner, hidden),
                "mlp.down_proj": matrix(hidden, inner),
            }.items()
        }
    head = matrix(shape.vocab_size, hidden)
    # Special tokens have the first ids. As likely as any other, they would end an answer after a few words.
    head[: len(_SPECIAL_TOKENS)] *= 0.5
    weights["lm_head.weight"] = head
    return weights


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

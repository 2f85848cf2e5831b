"""Finds the causal language model in a checkpoint: all of it, or the language model inside a LLaVA.

A LLaVA's language model has an architecture of its own; it gets the embeddings of pictures in place of the placeholder
token's. Its weights have other names inside a LLaVA: ``language_model.model.X`` and ``language_model.lm_head`` as
transformers wrote them up to version 4.51, ``model.language_model.X`` and ``lm_head`` since.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import AutoModelForCausalLM, PretrainedConfig

from quartet.engine.torch.support import quantization_method, refusal

# Their forward was read: it replaces embeddings at the placeholder and changes nothing else for the language model.
# That can't be seen from outside: Gemma 3's pictures fill runs of one token too, but attend to themselves both ways.
_LLAVA_TYPES = ("llava", "llava_next", "llava_next_video", "llava_onevision", "vipllava")
# To be applied by ``re.sub``, in any order.
_LLAVA_KEYS = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}
_VISION_KEY = re.compile(r"(model\.)?(vision_tower|multi_modal_projector|image_newline)(\.|$)")


@dataclass(frozen=True)
class LanguageModel:
    """The part of a checkpoint that is served.

    Attributes:
        config: the language model's own.
        placeholder_id: the token that stands for media in prompts; ``None``: it takes text only.
        key_mapping: how names of weights in the files become the model's, as patterns and replacements.
    """

    config: PretrainedConfig
    placeholder_id: int | None = None
    key_mapping: Mapping[str, str] = field(default_factory=dict)

    def leaves_out(self, key: str) -> bool:
        """Whether ``key`` names a weight of the checkpoint's vision part, which the encoder loads."""
        return self.placeholder_id is not None and _VISION_KEY.match(key) is not None


def find_language_model(config: PretrainedConfig) -> LanguageModel:
    """The language model of a checkpoint with this configuration.

    Raises:
        InvalidRequestError: field ``model``; there is none, or it can't be served without the rest.
    """
    found = _inside_llava(config) if config.model_type in _LLAVA_TYPES else LanguageModel(config)
    if type(found.config) not in AutoModelForCausalLM._model_mapping:
        raise refusal(f"{found.config.model_type}, which is not a causal language model")
    return found


def _inside_llava(config: PretrainedConfig) -> LanguageModel:
    text = copy.deepcopy(config.get_text_config())
    for part in (config, text):
        if method := quantization_method(part):
            raise refusal(f"a quantized checkpoint ({method} of {part.model_type})")
    # In a LLaVA, the LLaVA's configuration decides these.
    text.tie_word_embeddings = config.tie_word_embeddings
    text.dtype = config.dtype
    placeholder_id = config.image_token_id
    if not 0 <= placeholder_id < text.vocab_size:
        raise refusal(f"placeholder {placeholder_id}, which is no token of {text.vocab_size}")
    return LanguageModel(text, placeholder_id, _LLAVA_KEYS)

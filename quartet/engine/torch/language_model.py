"""Finds the causal language model in a checkpoint: the whole of it, or the one that a LLaVA shows its pictures to.

A LLaVA's language model is a model of its own architecture, to which embeddings of pictures come in place of those of
the placeholder token. Its weights have other names there: ``language_model.model.X`` and ``language_model.lm_head`` as
transformers wrote them up to version 4.51, ``model.language_model.X`` and ``lm_head`` since.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import AutoModelForCausalLM, PretrainedConfig

from quartet.engine.torch.support import refusal

# Their forward was read: embeddings replaced at the placeholder, and nothing else that the language model would notice.
# From outside one cannot tell: Gemma 3's pictures fill runs of one token, too, but attend to themselves both ways.
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
    """What of a checkpoint is served.

    Attributes:
        config: the language model's own.
        placeholder_id: the token that stands for media in prompts; ``None``: it takes text only.
        key_mapping: how names of weights in the files become the model's, as patterns and replacements.
    """

    config: PretrainedConfig
    placeholder_id: int | None = None
    key_mapping: Mapping[str, str] = field(default_factory=dict)

    def leaves_out(self, key: str) -> bool:
        """Whether ``key`` names a weight of the checkpoint that computes embeddings, which is done elsewhere."""
        return self.placeholder_id is not None and _VISION_KEY.match(key) is not None


def find_language_model(config: PretrainedConfig) -> LanguageModel:
    """The language model of a checkpoint with this configuration.

    Raises:
        InvalidRequestError: field ``model``; there is none, or it may not be taken for itself.
    """
    found = _inside_llava(config) if config.model_type in _LLAVA_TYPES else LanguageModel(config)
    if type(found.config) not in AutoModelForCausalLM._model_mapping:
        raise refusal(f"{found.config.model_type}, which is not a causal language model")
    return found


def _inside_llava(config: PretrainedConfig) -> LanguageModel:
    if getattr(config, "quantization_config", None) is not None:
        raise refusal("a quantized checkpoint")
    text = copy.deepcopy(config.get_text_config())
    # In the whole model, the whole's configuration decides these.
    text.tie_word_embeddings = config.tie_word_embeddings
    text.dtype = config.dtype
    placeholder_id = config.image_token_id
    if not 0 <= placeholder_id < text.vocab_size:
        raise refusal(f"placeholder {placeholder_id}, which is no token of {text.vocab_size}")
    return LanguageModel(text, placeholder_id, _LLAVA_KEYS)

"""The model's configuration: a LLaVA of a small SigLIP tower, a projector and a small Llama, with 9 million weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from models.tiny.render import IMAGE_SIZE, NUM_PATCHES, PATCH_SIZE
from models.tiny.tokenizer import BOS, EOS, IMAGE, PAD, VOCAB_SIZE, special_id, tokenizer_config

if TYPE_CHECKING:
    from transformers import LlavaConfig

MAX_LENGTH = 4608
_TOKEN_IDS: dict[str, Any] = {
    "bos_token_id": special_id(BOS),
    "eos_token_id": special_id(EOS),
    "pad_token_id": special_id(PAD),
}

#: The whole picture, stretched to the tower's size.
_IMAGE_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "resample": 3,
    "do_center_crop": False,
    "crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_convert_rgb": True,
}
#: It decides how many tokens stand for a picture.
_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": IMAGE,
    "patch_size": PATCH_SIZE,
    "num_additional_image_tokens": 0,
    "vision_feature_select_strategy": "full",
}


def llava_config() -> LlavaConfig:
    """Return the configuration."""
    from transformers import LlamaConfig, LlavaConfig, SiglipVisionConfig

    decoder = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        # Slow rotations let a head look for words anywhere in 4 k tokens.
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        **_TOKEN_IDS,
    )
    vision = SiglipVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=3,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        vision_use_head=False,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=decoder,
        image_token_index=special_id(IMAGE),
        image_seq_length=NUM_PATCHES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
        **_TOKEN_IDS,
    )


def configuration_files(config: LlavaConfig) -> dict[str, Any]:
    """Return the JSON files of the model's checkpoint by name, except ``tokenizer.json``."""
    model = config.to_diff_dict() | {"dtype": "bfloat16", "architectures": ["LlavaForConditionalGeneration"]}
    return {
        "config.json": model,
        "generation_config.json": _TOKEN_IDS,
        "tokenizer_config.json": tokenizer_config(MAX_LENGTH),
        "preprocessor_config.json": _IMAGE_PROCESSOR,
        "processor_config.json": _PROCESSOR,
    }

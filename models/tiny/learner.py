"""The model during training: its loss on a packed batch, the auxiliary loss on patches, and its files."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, LlavaConfig, LlavaForConditionalGeneration

from models.tiny.architecture import MAX_LENGTH, configuration_files
from models.tiny.batches import Batch
from models.tiny.conversation import Skill
from models.tiny.scenes import COLOURS, SHAPES
from models.tiny.tokenizer import CHAT_TEMPLATE

_ATTENTION = "tiny_packed"
_NUM_SKILLS, _NUM_FIELDS = len(Skill), 9


class Learner(nn.Module):
    """The model with the head of its auxiliary loss; the head is not saved."""

    def __init__(self, config: LlavaConfig, tokenizer: Tokenizer) -> None:
        """Make a model with random weights; its decoder then reads packed rows only.

        Raises:
            ValueError: a colour or a shape is not one token.
        """
        super().__init__()
        self.llava: Any = LlavaForConditionalGeneration(config)
        AttentionInterface.register(_ATTENTION, _packed_attention)
        self.llava.model.language_model.set_attn_implementation(_ATTENTION)
        self.patch_head = nn.Linear(self.llava.lm_head.in_features, 2 + _NUM_FIELDS)
        for name, names in (("shape_ids", SHAPES), ("colour_ids", COLOURS)):
            self.register_buffer(name, torch.tensor(_word_ids(tokenizer, names)), persistent=False)

    def forward(self, batch: dict[str, Tensor], patch_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and, by skill, what is logged.

        Args:
            batch: the arrays of a ``Batch`` as tensors.
            patch_weight: weight of the auxiliary loss.

        Returns:
            The loss; and ``[num_skills + 1, 3]``: each skill's summed loss, right tokens and tokens; in the last row
            the auxiliary loss.
        """
        embeddings, patches = self._embed(batch)
        hidden = self.llava.model.language_model(
            inputs_embeds=embeddings,
            position_ids=batch["positions"][None],
            use_cache=False,
            boundaries=batch["boundaries"],
        ).last_hidden_state[0]
        logits = self.llava.lm_head(hidden[batch["predicted_at"]]).float()
        losses = functional.cross_entropy(logits, batch["targets"], reduction="none")
        weights = batch["weights"]
        patch_loss = self._patch_loss(patches, batch)
        loss = (losses * weights).sum() / weights.sum() + patch_weight * patch_loss
        with torch.no_grad():
            counted = (weights > 0).float()
            is_right = (logits.argmax(-1) == batch["targets"]).float()
            rows = torch.stack((losses * counted, is_right * counted, counted), dim=1)
            log = torch.zeros(_NUM_SKILLS + 1, 3, device=rows.device).index_add(0, batch["skills"], rows)
            log[-1] = patch_loss
        return loss, log

    def _embed(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the row's embeddings ``[1, T, hidden]``, patches in place, and the patches ``[N, 64, hidden]``."""
        model = self.llava.model
        pixels = batch["images"].permute(0, 3, 1, 2).float() / 127.5 - 1
        tower = model.vision_tower
        # The tower's own forward would normalise again; LLaVA takes the last layer's output without that.
        patches = model.multi_modal_projector(tower.encoder(tower.embeddings(pixels)).last_hidden_state)
        embeddings = model.language_model.embed_tokens(batch["ids"])
        flat = patches.flatten(0, 1).to(embeddings.dtype)
        return embeddings.index_copy(0, batch["image_positions"], flat)[None], patches

    def _patch_loss(self, patches: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of patches at predicting their shape, colour and field.

        Patches of a shape must resemble the embeddings of the words for shape and colour. So the attention that finds a
        word in a text also finds its meaning in a picture.
        """
        head = self.patch_head(patches).float()
        shown = (batch["patch_shapes"] >= 0).float()
        by_bit = functional.binary_cross_entropy_with_logits
        loss = by_bit(head[..., 0], shown) + by_bit(head[..., 1], batch["patch_middles"].float())
        embeddings = self.llava.model.language_model.embed_tokens.weight
        for logits, labels in (
            (functional.linear(patches, embeddings[self.shape_ids]), batch["patch_shapes"]),
            (functional.linear(patches, embeddings[self.colour_ids]), batch["patch_colours"]),
            (head[..., 2:], batch["patch_fields"]),
        ):
            loss = loss + functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-1)
        return loss


def to_tensors(batch: Batch) -> dict[str, Tensor]:
    """Return the batch's arrays as tensors that share their memory."""
    return {field.name: torch.from_numpy(getattr(batch, field.name)) for field in fields(Batch)}


def write_checkpoint(learner: Learner, tokenizer: Tokenizer, directory: Path) -> None:
    """Write the model as a Hugging Face checkpoint in bfloat16, the precision that training computed in."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in configuration_files(learner.llava.config).items():
        (directory / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer.save(str(directory / "tokenizer.json"))
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in learner.llava.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)


def _word_ids(tokenizer: Tokenizer, names: tuple[str, ...]) -> list[int]:
    encoded = [tokenizer.encode(f" {name}", add_special_tokens=False).ids for name in names]
    if any(len(ids) != 1 for ids in encoded):
        raise ValueError(f"each of {', '.join(names)} must be one token")
    return [ids[0] for ids in encoded]


def _packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, boundaries: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Attend causally within each conversation of a packed row; ``query`` is ``[1, heads, T, head_dim]``."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    if q.is_cuda:
        output: Any = varlen_attn(
            q.bfloat16(), k.bfloat16(), v.bfloat16(), boundaries, boundaries, MAX_LENGTH, MAX_LENGTH,
            window_size=(-1, 0),
        )  # fmt: skip
        return output[None], None
    place = torch.arange(q.shape[0])
    owner = torch.bucketize(place, boundaries, right=True)
    allowed = (owner[:, None] == owner) & (place[:, None] >= place)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(0, 1)[None], None

"""Prompts with pictures: what ``model.generate`` of a whole LLaVA says to them, and the engine's tokens beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quartet.engine.base import EngineRequest, RequestKind
from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.engine.sampling import OutputOptions, Sampling
from quartet.engine.step_engine import StepEngine
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.media_spans import expand_placeholders
from quartet.media.items import MediaSize
from tests.engine.fakes import make_request
from tests.engine.torch.driving import Outcome

# Rounding moves log probabilities by less, another picture by more. ``generate`` gives out logits in float32.
_TOLERANCES = {torch.float64: 4e-6, torch.float32: 2e-4}


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as a processor leaves it: ``[3, H, W]``, or ``[num_tiles, 3, H, W]`` with its size (tiled)."""

    pixels: torch.Tensor
    size: tuple[int, int] | None = None

    @property
    def media_id(self) -> bytes:
        return hashlib.sha256(self.pixels.numpy().tobytes() + repr(self.size).encode()).digest()


@dataclass(frozen=True, eq=False)
class SeeingPrompt:
    """A prompt as the engine takes it, and the pictures in it."""

    token_ids: tuple[int, ...]
    media: tuple[MediaSpan, ...]
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class Expected:
    """Greedy tokens, and their log probabilities."""

    token_ids: list[int]
    logprobs: list[float]


class SeeingOracle:
    """A whole checkpoint, run by transformers, one prompt at a time.

    Attributes:
        model: transformers' own.
        placeholder_id: where it takes pictures.
    """

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float64) -> None:
        auto: Any = transformers.AutoModelForImageTextToText
        self.model: Any = auto.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
        self.placeholder_id: int = self.model.config.image_token_id
        self._dtype = dtype
        self._known: dict[tuple[tuple[int, ...], tuple[MediaSpan, ...], int], Expected] = {}
        self._pictures: list[Picture] = []
        self._features: dict[Picture, torch.Tensor] = {}

    def pictures(self, num_pictures: int) -> list[Picture]:
        """Noise; no two are equal, and the first ones are always the same."""
        while len(self._pictures) < num_pictures:
            self._pictures.append(self._make_picture(len(self._pictures)))
        return self._pictures[:num_pictures]

    def features(self, picture: Picture) -> torch.Tensor:
        """Its embeddings, ``[num_tokens, hidden_size]``."""
        if picture not in self._features:
            with torch.inference_mode():
                output = self.model.get_image_features(**self._inputs([picture]))
            [self._features[picture]] = output.pooler_output
        return self._features[picture]

    def prompt(self, *parts: Sequence[int] | Picture) -> SeeingPrompt:
        """Texts and pictures, one after another."""
        pictures = tuple(part for part in parts if isinstance(part, Picture))
        token_ids = [id for part in parts for id in ([self.placeholder_id] if isinstance(part, Picture) else part)]
        sizes = [MediaSize(media_id=item.media_id, num_tokens=len(self.features(item))) for item in pictures]
        expanded, media = expand_placeholders(token_ids, self.placeholder_id, sizes)
        return SeeingPrompt(tuple(expanded), media, pictures)

    def generate(self, prompt: SeeingPrompt, num_tokens: int) -> Expected:
        """What ``model.generate`` says."""
        key = (prompt.token_ids, prompt.media, num_tokens)
        if key not in self._known:
            output = self.model.generate(
                torch.tensor([prompt.token_ids]),
                **self._inputs(prompt.pictures),
                max_new_tokens=num_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            token_ids = output.sequences[0, len(prompt.token_ids) :].tolist()
            logprobs = torch.cat(output.logits).log_softmax(-1)
            self._known[key] = Expected(
                token_ids, [float(row[token_id]) for row, token_id in zip(logprobs, token_ids, strict=True)]
            )
        return self._known[key]

    def logits(self, prompt: SeeingPrompt, token_ids: Sequence[int]) -> torch.Tensor:
        """``[len(token_ids), V]``: what each of these tokens is chosen by, after the prompt and those before it."""
        embeddings = self.model.get_input_embeddings()(torch.tensor([[*prompt.token_ids, *token_ids]]))
        with torch.no_grad():
            for span, picture in zip(prompt.media, prompt.pictures, strict=True):
                embeddings[0, span.first_position : span.first_position + span.num_tokens] = self.features(picture)
            [logits] = self.model(inputs_embeds=embeddings).logits
        return torch.as_tensor(logits[len(prompt.token_ids) - 1 : -1])

    def check(self, prompt: SeeingPrompt, outcome: Outcome, num_tokens: int) -> None:
        """The engine's tokens and log probabilities are those of ``generate``: another picture would give others."""
        expected = self.generate(prompt, num_tokens)
        assert outcome.token_ids == expected.token_ids
        for actual, wanted in zip(outcome.logprobs, expected.logprobs, strict=True):
            assert actual.logprob == pytest.approx(wanted, abs=_TOLERANCES[self._dtype])

    def _make_picture(self, number: int) -> Picture:
        generator = torch.Generator().manual_seed(number)
        config = self.model.config
        edge = config.vision_config.image_size
        is_tiled = hasattr(config, "image_grid_pinpoints")
        shape = (5, 3, edge, edge) if is_tiled else (3, edge, edge)
        size = ((32, 24), (30, 32))[number % 2] if is_tiled else None
        return Picture(torch.randn(shape, generator=generator, dtype=self._dtype), size)

    def _inputs(self, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        if not pictures:
            return {}
        inputs = {"pixel_values": torch.stack([picture.pixels for picture in pictures])}
        sizes = [picture.size for picture in pictures if picture.size is not None]
        return {**inputs, "image_sizes": torch.tensor(sizes)} if sizes else inputs


@dataclass
class Album:
    """An engine's pool of embeddings, into which pictures are put as requests need them."""

    oracle: SeeingOracle
    engine: StepEngine
    _blocks: dict[Picture, tuple[int, ...]] = field(default_factory=dict)
    _num_taken: int = 0

    def blocks(self, picture: Picture) -> tuple[int, ...]:
        """Where it is, in blocks that do not follow on each other."""
        if picture not in self._blocks:
            memory = self.engine.embeddings
            assert memory is not None
            rows = self.oracle.features(picture)
            num_blocks = -(-len(rows) // memory.layout.block_size)
            ids = range(self._num_taken, self._num_taken + num_blocks)
            self._num_taken += num_blocks
            self._blocks[picture] = tuple(reversed(ids))
            EmbeddingPoolView(memory).write(self._blocks[picture], rows)
        return self._blocks[picture]

    def request(
        self,
        prompt: SeeingPrompt,
        num_tokens: int,
        *,
        generated: Sequence[int] = (),
        kind: RequestKind = RequestKind.DECODE,
        has_blocks: bool = True,
    ) -> EngineRequest:
        """Greedy, with log probabilities."""
        return make_request(
            prompt.token_ids,
            generated=generated,
            kind=kind,
            sampling=Sampling(temperature=0.0, max_tokens=num_tokens),
            output=OutputOptions(logprobs=0),
            media=prompt.media,
            media_blocks=tuple(map(self.blocks, prompt.pictures)) if has_blocks else (),
        )

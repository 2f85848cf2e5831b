"""Runs a model over the block pool: one forward a step, for prompts' chunks and decoding sequences alike."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from transformers import PreTrainedModel

from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.engine.runner import SampledToken, ScheduledChunk, StepLauncher
from quartet.engine.torch.attention import PagedStep
from quartet.engine.torch.batch import FlatBatch, build_batch, probe_batch
from quartet.engine.torch.config import TorchEngineConfig
from quartet.engine.torch.decoder import fuse
from quartet.engine.torch.loader import LoadedModel, check_device, load_model
from quartet.engine.torch.pool import KvPool, num_pool_blocks, reserve_embeddings
from quartet.engine.torch.sampler import LaunchedTokens, create_sampler, record_event
from quartet.engine.torch.support import refusal
from quartet.kvcache.layout import EmbeddingLayout, KvLayout
from quartet.transfer.base import BlockMemory, EmbeddingMemory

_LOG = logging.getLogger(__name__)

# Writes a step's KV to the pool; logits ``[S, V]`` of the rows that sample.
_Compute: TypeAlias = Callable[[PagedStep], torch.Tensor]


class TorchRunner:
    """A ``ModelRunner`` on a Hugging Face model: loaded and warmed up on construction, in the engine's thread.

    Honours every field of ``Sampling`` and ``OutputOptions``. Greedy tokens equal ``generate``'s up to the rounding of
    floating point, which depends on what else is in the batch.

    Attributes:
        layout: of one block.
        num_blocks: of the pool.
        eos_token_ids: tokens that end an output.
        vocab_size: token ids are below it.
        max_model_len: tokens of prompt and output together.
        placeholder_id: the token that stands for media in prompts; ``None``: text only is taken.
        embeddings: where embeddings of media are read, on the model's device; ``None``: text only.
        launcher: itself on a GPU; ``None``: steps are run one after the other.
    """

    def __init__(self, config: TorchEngineConfig) -> None:
        """Load the model, reserve the pool, run one step.

        Raises:
            InvalidRequestError: the model can't be served, or this machine lacks the device; names the field.
            EngineError: the checkpoint is damaged or incomplete.
        """
        check_device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        # cuDNN's attention makes a plan for every new length, in 50 to 60 ms; flash attention needs none.
        torch.backends.cuda.enable_cudnn_sdp(False)
        loaded = load_model(config)
        self.layout = KvLayout(
            model_fingerprint=model_fingerprint(config.model_path, loaded.dtype, config.random_seed),
            dtype=loaded.dtype,
            num_layers=loaded.shape.num_layers,
            num_kv_heads=loaded.shape.num_kv_heads,
            head_dim=loaded.shape.head_dim,
            block_size=config.block_size,
        )
        self._device = torch.device(config.device)
        self.eos_token_ids = loaded.eos_token_ids
        self.vocab_size = loaded.vocab_size
        self.max_model_len = loaded.max_model_len
        self.placeholder_id = loaded.placeholder_id if config.takes_media else None
        self.embeddings = self._reserve_embeddings(config, loaded)
        self._embedding_view = None if self.embeddings is None else EmbeddingPoolView(self.embeddings)
        self.num_blocks = num_pool_blocks(config, self.layout)
        self._pool = KvPool(self.layout, self.num_blocks, self._device)
        self._sampler = create_sampler(loaded.model, self.vocab_size, self._device)
        launches = self._device.type == "cuda" and not config.disable_overlap_scheduler
        self.launcher: StepLauncher | None = self if launches else None
        self._unread: torch.Tensor | None = None
        self._compute = self._choose(loaded)
        self._wait_for_device()

    @property
    def memory(self) -> BlockMemory | None:
        """The pool's bytes; ``None``: no transfer reaches them."""
        return self._pool.memory

    def run(self, chunks: Sequence[ScheduledChunk]) -> list[SampledToken]:
        """Compute the chunks' KV into their blocks; sample one token for each chunk that samples, in their order."""
        return self.launch(chunks).read() if chunks else []

    def launch(self, chunks: Sequence[ScheduledChunk]) -> _LaunchedStep:
        """``run`` without waiting for the device; tokens of the step in flight are taken from there."""
        requests = [chunk.running for chunk in chunks if chunk.samples]
        with torch.inference_mode():
            batch = build_batch(chunks, self.layout, self._device, self._embedding_view, self._unread)
            logits = self._compute(PagedStep(self._pool, batch))
            # Some models pad the vocabulary of their output layer: those tokens do not exist.
            tokens = self._sampler.launch(logits[:, : self.vocab_size], requests) if requests else None
        if self.launcher is not None:
            self._unread = None if tokens is None else tokens.token_ids
        return _LaunchedStep(tokens, record_event(self._device))

    def close(self) -> None:
        """Free the model and the pools, when the device has done what it was told."""
        try:
            self._wait_for_device()
        finally:
            self._pool.close()
            if self.embeddings is not None:
                self.embeddings.memory.close()
            del self._compute, self._pool, self._embedding_view

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _reserve_embeddings(self, config: TorchEngineConfig, loaded: LoadedModel) -> EmbeddingMemory | None:
        if self.placeholder_id is None:
            return None
        layout = EmbeddingLayout(
            model_fingerprint=self.layout.model_fingerprint,
            dtype=loaded.dtype,
            hidden_size=loaded.hidden_size,
            block_size=config.block_size,
        )
        return reserve_embeddings(layout, config.num_embedding_blocks, self._device)

    @torch.inference_mode()
    def _choose(self, loaded: LoadedModel) -> _Compute:
        """Run a few tokens through block 0, which is still empty, in both ways; use the decoder by hand if it is right.

        This also warms up: the set-up of a first step must not cost a request.
        """
        model = loaded.model
        by_modules = _Modules(model)
        step = PagedStep(self._pool, probe_batch(self.layout, self.vocab_size, self._device))
        expected = by_modules(step) if loaded.placeholder_id is None else _plain_logits(by_modules, model, step)
        decoder = fuse(model, step.layers, self.layout)
        if decoder is None:
            return by_modules
        if not _is_close(decoder(step), expected):
            _LOG.warning("layers of %s differ when run by hand: they are run as they are", type(model).__name__)
            return by_modules
        return decoder


@dataclass(frozen=True)
class _LaunchedStep:
    """A step that the device computes; ``tokens`` that it samples, if any, and an event at its end."""

    tokens: LaunchedTokens | None
    end: torch.cuda.Event | None

    @property
    def can_follow(self) -> bool:
        """Whether the sampler can go on from tokens that the host has not read."""
        return self.tokens is None or self.tokens.can_follow

    def read(self) -> list[SampledToken]:
        """Wait until the device has done the step: until then kernels use blocks that transfers read or write next."""
        sampled = [] if self.tokens is None else self.tokens.read()
        if self.end is not None:
            self.end.synchronize()
        return sampled


class _Modules:
    """A model run by transformers' own modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, step: PagedStep) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            **self._inputs(step.batch),
            position_ids=step.batch.positions,
            use_cache=False,  # else the model builds and fills a cache of its own
            logits_to_keep=step.batch.last_rows,
            paged=step,
        ).logits
        return logits[0]

    def _inputs(self, batch: FlatBatch) -> dict[str, torch.Tensor]:
        if batch.media is None:
            return {"input_ids": batch.token_ids}
        embeddings = self._model.get_input_embeddings()(batch.token_ids)
        batch.media.put_into(embeddings[0])
        return {"inputs_embeds": embeddings}


def _plain_logits(by_modules: _Modules, model: PreTrainedModel, step: PagedStep) -> torch.Tensor:
    """Logits of a LLaVA's language model; refuses a model that changes the logits after its head, unlike a LLaVA."""
    said: list[torch.Tensor] = []
    head: torch.nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    hook = head.register_forward_hook(lambda _module, _inputs, output: said.append(output[0]))
    logits = by_modules(step)
    hook.remove()
    if not torch.equal(said[0], logits):
        raise refusal(f"{type(model).__name__} inside a LLaVA: by itself it changes its logits")
    return logits


def _is_close(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether they differ by rounding only, which adds up over layers; a wrong layer gives a far larger difference."""
    # Norms and rotary embedding are float32 even if everything else is float64.
    epsilon = max(torch.finfo(dtype).eps for dtype in (expected.dtype, torch.float32))
    tolerance = math.sqrt(epsilon) * float(expected.abs().max())
    return float((logits - expected).abs().max()) <= tolerance

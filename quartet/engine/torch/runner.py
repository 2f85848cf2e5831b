"""Runs a model over the block pool: one forward a step, for prompts' chunks and decoding sequences alike."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from transformers import PreTrainedModel

from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.guided.masks import MaskThread
from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.engine.runner import SampledToken, ScheduledChunk, StepLauncher
from quartet.engine.torch.attention import PagedStep, Step
from quartet.engine.torch.batch import FlatBatch, build_batch, probe_batch
from quartet.engine.torch.config import TorchEngineConfig
from quartet.engine.torch.copies import record_event
from quartet.engine.torch.decoder import Decoder, fuse
from quartet.engine.torch.loader import LoadedModel, check_device, load_model
from quartet.engine.torch.pool import KvPool, num_pool_blocks, reserve_embeddings
from quartet.engine.torch.prompt_logprobs import LaunchedReport, PromptReports
from quartet.engine.torch.sampler import LaunchedTokens, create_sampler
from quartet.engine.torch.support import refusal
from quartet.kvcache.layout import EmbeddingLayout, KvLayout
from quartet.transfer.base import BlockMemory, EmbeddingMemory

if TYPE_CHECKING:
    from quartet.engine.torch.kernel_forward import KernelForward
    from quartet.engine.torch.kernel_step import Compute

_LOG = logging.getLogger(__name__)

# Relative to the logits' norm.
_MOST_DIFFERENT = 0.25

# Writes a step's KV to the pool; logits ``[S, V]`` of the rows that sample.
_Compute: TypeAlias = Callable[[Step], torch.Tensor]


class _Forward(Protocol):
    """Runs the model over a pool."""

    @property
    def pool(self) -> KvPool:
        """Of keys and values."""
        ...

    def __call__(self, chunks: Sequence[ScheduledChunk], unread: torch.Tensor | None) -> torch.Tensor:
        """Write the chunks' KV; logits of those that sample, in their order, then those of tokens that chunks report.

        They are valid until the next call.

        ``unread``: as for ``build_batch``.
        """
        ...


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
        self._device = torch.device(config.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread: kernels and events go to its current device
        loaded = load_model(config)
        self.layout = KvLayout(
            model_fingerprint=model_fingerprint(config.model_path, loaded.dtype, config.random_seed),
            dtype=loaded.dtype,
            num_layers=loaded.shape.num_layers,
            num_kv_heads=loaded.shape.num_kv_heads,
            head_dim=loaded.shape.head_dim,
            block_size=config.block_size,
        )
        self.eos_token_ids = loaded.eos_token_ids
        self.vocab_size = loaded.vocab_size
        self.max_model_len = loaded.max_model_len
        self.placeholder_id = loaded.placeholder_id if config.takes_media else None
        self.embeddings = self._reserve_embeddings(config, loaded)
        self._embedding_view = None if self.embeddings is None else EmbeddingPoolView(self.embeddings)
        self._masks = MaskThread(self.vocab_size)
        self._reports = PromptReports()
        self._sampler = create_sampler(loaded.model, self.vocab_size, self._device)
        launches = self._device.type == "cuda" and not config.disable_overlap_scheduler
        self.launcher: StepLauncher | None = self if launches else None
        self._unread: torch.Tensor | None = None
        # Where free memory decides on the pool's size, the model is tried over one block, which shows what it takes.
        pool = KvPool(self.layout, config.num_blocks or 1, self._device)
        self._compute, expected = self._choose(loaded, pool)
        self._forward = self._choose_forward(config, loaded, pool, expected)
        self._pool = self._forward.pool
        self.num_blocks = self._pool.num_blocks
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
        pending = self._masks.begin(requests)
        with torch.inference_mode():
            # Some models pad the vocabulary of their output layer: those tokens do not exist.
            logits = self._forward(chunks, self._unread)[:, : self.vocab_size]
            masks = None if pending is None else pending.read()
            report = self._reports.launch(logits[len(requests) :], chunks)
            tokens = self._sampler.launch(logits[: len(requests)], requests, masks) if requests else None
        if self.launcher is not None:
            self._unread = None if tokens is None else tokens.token_ids
        return _LaunchedStep(tokens, report, record_event(self._device))

    def close(self) -> None:
        """Free the model and the pools, when the device has done what it was told."""
        try:
            self._wait_for_device()
        finally:
            self._masks.close()
            self._pool.close()
            if self.embeddings is not None:
                self.embeddings.memory.close()
            del self._forward, self._compute, self._pool, self._embedding_view

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
    def _choose(self, loaded: LoadedModel, pool: KvPool) -> tuple[_Compute, torch.Tensor]:
        """Run a few tokens through block 0, which is still empty, in both ways; use the decoder by hand if it is right.

        This also warms up: the set-up of a first step must not cost a request.

        Returns:
            The way to compute, and the tokens' logits by the model's own modules.
        """
        model = loaded.model
        by_modules = _Modules(model)
        step = self._probe(pool)
        expected = by_modules(step) if loaded.placeholder_id is None else _plain_logits(by_modules, model, step)
        decoder = fuse(model, step.layers, self.layout)
        if decoder is None:
            return by_modules, expected
        if not _is_close(decoder(step), expected):
            _LOG.warning("layers of %s differ when run by hand: they are run as they are", type(model).__name__)
            return by_modules, expected
        return decoder, expected

    @torch.inference_mode()
    def _choose_forward(
        self, config: TorchEngineConfig, loaded: LoadedModel, pool: KvPool, expected: torch.Tensor
    ) -> _Forward:
        """The way to run steps, over a pool of its final size; ``pool`` is that one, or closed."""
        kernels = self._try_kernels(loaded, pool, expected)
        if kernels is None:
            pool = self._resize(config, pool, 0)
            return _SegmentForward(pool, self._compute, self._embedding_view)
        bounds = kernels.graph_bounds(config, self.max_model_len)
        if config.num_blocks is None:
            # A graph knows its pool's address. These only show how much memory the real ones will take.
            reserved_size_bytes = 0
            if bounds is not None:
                reserved_size_bytes = kernels.graphs_size_bytes(bounds)
                num_rows = bounds.max_batch_size
                reserved_size_bytes += self._sampler.graphs_size_bytes(expected, num_rows, config.max_num_seqs)
            pool = self._resize(config, pool, reserved_size_bytes)
            kernels = kernels.over(pool)
        if bounds is not None:
            kernels.capture(bounds)
            if kernels.repeated_logits is not None:
                self._sampler.expect(kernels.repeated_logits[:, : self.vocab_size], config.max_num_seqs)
        return kernels

    def _try_kernels(self, loaded: LoadedModel, pool: KvPool, expected: torch.Tensor) -> KernelForward | None:
        """Whole layers by kernels, or attention alone, if they run here and are right."""
        if not self._has_kernels(pool):
            return None
        from quartet.engine.torch.gpu_decoder import on_kernels
        from quartet.engine.torch.kernel_forward import KernelForward

        token_ids = self._probe(pool).batch.token_ids[0].tolist()
        candidates: list[tuple[str, Compute]] = [("attention", self._compute)]
        if isinstance(self._compute, Decoder):
            by_layers = on_kernels(self._compute.parts, self.max_model_len)
            candidates = [("layers", by_layers), *candidates] if by_layers is not None else candidates
        for what, compute in candidates:
            kernels = KernelForward(pool, compute, loaded.model.config.num_attention_heads, self._embedding_view)
            found = kernels.probe(token_ids)
            if found is not None and all(_is_alike(logits, expected) for logits in found):
                kernels.try_copies(token_ids, partial(_is_alike, expected=expected))
                return kernels
            if found is not None:
                name = type(loaded.model).__name__
                _LOG.warning("%s of %s differ when kernels compute them: they run without", what, name)
        return None

    def _has_kernels(self, pool: KvPool) -> bool:
        if self._device.type == "cpu" or importlib.util.find_spec("triton") is None:
            return False
        from quartet.engine.torch.kernel_forward import can_compute

        return can_compute(pool.tensor.dtype, self._device)

    def _resize(self, config: TorchEngineConfig, pool: KvPool, reserved_size_bytes: int) -> KvPool:
        """A pool of all blocks, with this memory and what sampling takes left; ``pool``, if it has them."""
        if config.num_blocks is not None:
            return pool
        self._wait_for_device()  # which may still write to it
        pool.close()
        reserved_size_bytes += self._sampler.size_bytes(config.max_num_seqs)
        num_blocks = num_pool_blocks(config, self.layout, reserved_size_bytes=reserved_size_bytes)
        return KvPool(self.layout, num_blocks, self._device)

    def _probe(self, pool: KvPool) -> PagedStep:
        return PagedStep(pool, probe_batch(self.layout, self.vocab_size, self._device))


class _SegmentForward:
    """Writes a step's KV to the pool, attending segment by segment; returns logits."""

    def __init__(self, pool: KvPool, compute: _Compute, embeddings: EmbeddingPoolView | None) -> None:
        self.pool = pool
        self._compute = compute
        self._embeddings = embeddings

    def __call__(self, chunks: Sequence[ScheduledChunk], unread: torch.Tensor | None) -> torch.Tensor:
        batch = build_batch(chunks, self.pool.layout, self.pool.tensor.device, self._embeddings, unread)
        return self._compute(PagedStep(self.pool, batch))


@dataclass(frozen=True)
class _LaunchedStep:
    """A step that the device computes; ``tokens`` that it samples, if any, what it reports, and an event at its end."""

    tokens: LaunchedTokens | None
    report: LaunchedReport | None
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
        return sampled if self.report is None else self.report.add_to(sampled)


class _Modules:
    """A model run by transformers' own modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, step: Step) -> torch.Tensor:
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


def _is_alike(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """As ``_is_close``; in half precision, whether they are the same logits at all.

    There another order of sums is enough for another choice of experts. What is wrong gives unrelated logits.
    """
    if expected.dtype.itemsize > 2:
        return _is_close(logits, expected)
    difference = (logits.float() - expected.float()).norm()
    return float(difference) <= _MOST_DIFFERENT * float(expected.float().norm())

"""Runs a model over the block pool: one forward a step, for prompts' chunks and decoding sequences alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.runner import SampledToken
from quartet.engine.running import ScheduledChunk
from quartet.engine.torch.attention import PagedStep
from quartet.engine.torch.batch import FlatBatch, build_batch
from quartet.engine.torch.config import TorchEngineConfig
from quartet.engine.torch.loader import load_model
from quartet.engine.torch.pool import KvPool
from quartet.engine.torch.sampler import Sampler
from quartet.errors import InvalidRequestError
from quartet.kvcache.layout import KvLayout
from quartet.transfer.base import PoolMemory


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
    """

    def __init__(self, config: TorchEngineConfig) -> None:
        """Load the model, reserve the pool, run one step.

        Raises:
            InvalidRequestError: a model that cannot be served, or a device that is not here; names the field.
            EngineError: the checkpoint is damaged or incomplete.
        """
        _check_device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        loaded = load_model(config)
        self.layout = KvLayout(
            model_fingerprint=model_fingerprint(config.model_path, loaded.dtype),
            dtype=loaded.dtype,
            num_layers=loaded.shape.num_layers,
            num_kv_heads=loaded.shape.num_kv_heads,
            head_dim=loaded.shape.head_dim,
            block_size=config.block_size,
        )
        self.num_blocks = config.num_blocks
        self.eos_token_ids = loaded.eos_token_ids
        self.vocab_size = loaded.vocab_size
        self.max_model_len = loaded.max_model_len
        self._device = torch.device(config.device)
        self._model = loaded.model
        self._pool = KvPool(self.layout, config.num_blocks, self._device)
        self._sampler = Sampler()
        self._warm_up()

    @property
    def memory(self) -> PoolMemory | None:
        """The pool's bytes; ``None`` off the CPU."""
        return self._pool.memory

    def run(self, chunks: Sequence[ScheduledChunk]) -> list[SampledToken]:
        """Compute the chunks' KV into their blocks; sample one token for each chunk that asks, in their order."""
        if not chunks:
            return []
        requests = [chunk.running for chunk in chunks if chunk.samples]
        with torch.inference_mode():
            logits = self._forward(build_batch(chunks, self.layout, self._device))
            return self._sampler.sample(logits, requests) if requests else []

    def close(self) -> None:
        """Give the model and the pool back."""
        self._pool.close()
        del self._model, self._pool

    def _forward(self, batch: FlatBatch) -> torch.Tensor:
        """Logits ``[S, V]`` of the rows that sample."""
        logits: torch.Tensor = self._model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            use_cache=False,  # else a cache of its own is built and filled
            logits_to_keep=batch.last_rows,
            paged=PagedStep(self._pool, batch),
        ).logits
        # Some models pad the vocabulary of their output layer: those tokens do not exist.
        return logits[0, :, : self.vocab_size]

    def _warm_up(self) -> None:
        """One token through block 0, which holds nothing yet: what is set up on first use must not cost a request."""
        zero = torch.zeros(1, dtype=torch.long, device=self._device)
        batch = FlatBatch(zero[None], zero[None], slots=zero, last_rows=zero, segments=())
        with torch.inference_mode():
            self._forward(batch)


def _check_device(device: str) -> None:
    if device != "cpu" and torch.device(device).index not in range(torch.cuda.device_count()):
        raise InvalidRequestError(f"there is no {device} here", field="device")

"""The embedded engine: Hugging Face causal LMs and vision towers on PyTorch.

Importing this package imports neither of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quartet.engine.late_import import importing
from quartet.engine.torch.config import TorchEncoderConfig, TorchEngineConfig
from quartet.media.items import MediaKind

if TYPE_CHECKING:
    from quartet.engine.encoder import MediaEncoder
    from quartet.engine.torch.runner import TorchRunner
    from quartet.transfer.base import EmbeddingMemory

__all__ = ["TorchEncoderConfig", "TorchEngineConfig", "create_encoder", "create_runner"]


def create_runner(config: TorchEngineConfig) -> TorchRunner:
    """Load the model and reserve its block pool, on the calling thread, which must be the engine's.

    Takes seconds to minutes; the first call in a process imports torch and transformers.

    Raises:
        InvalidRequestError: field ``model``: this model cannot be served, the message says which layer or feature;
            or ``device``, ``max_model_len``, ``free_gpu_memory_fraction``: it is not possible here.
        EngineError: the checkpoint is damaged or incomplete.
    """
    with importing("torch"):
        from quartet.engine.torch.runner import TorchRunner

    return TorchRunner(config)


def create_encoder(config: TorchEncoderConfig, embeddings: EmbeddingMemory | None = None) -> MediaEncoder:
    """The encoder of a LLaVA-family checkpoint; torch is imported and the model loaded by its ``start``.

    Args:
        config: the encoder's configuration.
        embeddings: the pool to write to, of the model's own layout; without, it has one of its own.
    """
    from quartet.engine.media.rows_encoder import RowsEncoder
    from quartet.engine.torch.encoder import TorchEncoder, make_rows_parts

    if MediaKind.IMAGE not in config.kinds:
        return RowsEncoder(lambda: make_rows_parts(config))
    return TorchEncoder(config, embeddings)

"""The embedded engine: Hugging Face causal LMs on PyTorch. Importing this package imports neither of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quartet.engine.torch.config import TorchEngineConfig

if TYPE_CHECKING:
    from quartet.engine.torch.runner import TorchRunner

__all__ = ["TorchEngineConfig", "create_runner"]


def create_runner(config: TorchEngineConfig) -> TorchRunner:
    """Load the model and reserve its block pool, on the calling thread, which is to be the engine's.

    Takes seconds to minutes; the first call in a process imports torch and transformers.

    Raises:
        InvalidRequestError: field ``model``: this model cannot be served, the message says which layer or feature;
            or ``device``, ``max_model_len``: it is not possible here.
        EngineError: the checkpoint is damaged or incomplete.
    """
    from quartet.engine.torch.runner import TorchRunner

    return TorchRunner(config)

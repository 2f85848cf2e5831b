"""From settings to an engine; the only place of the services that knows which engines exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from quartet.engine.base import Engine, RequestKind
from quartet.engine.core import StepEngine
from quartet.engine.runner import ModelRunner
from quartet.engine.torch import TorchEngineConfig, create_runner
from quartet.transfer.base import Puller
from services.workers.config import WorkerConfig

#: Makes an engine, not started yet, that runs requests of one kind and pulls hand-offs by the puller.
EngineFactory: TypeAlias = Callable[[WorkerConfig, RequestKind, Puller], Engine]


def create_engine(config: WorkerConfig, kind: RequestKind, puller: Puller) -> Engine:
    """The engine that ``config`` names, not started yet.

    Raises:
        InvalidRequestError: a setting out of range, with its ``field``.
    """
    settings = config.engine
    torch_config = TorchEngineConfig(
        model_path=config.model_path,
        dtype=settings.dtype,
        device=settings.device,
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        num_threads=settings.num_threads,
    )

    def load() -> ModelRunner:
        return create_runner(torch_config)

    return StepEngine(load, settings.scheduler, puller=puller, kinds=frozenset({kind}))

"""What a worker's configuration says of its engine and encoder, and how tests put others in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from quartet.engine import catalog
from quartet.engine.base import Engine, RequestKind
from quartet.engine.encoder import MediaEncoder, MediaSizer
from quartet.transfer.base import EmbeddingMemory, Puller
from services.workers.config import WorkerConfig

#: Makes an engine, not started yet, that runs requests of one kind and pulls hand-offs by the puller.
EngineFactory: TypeAlias = Callable[[WorkerConfig, RequestKind, Puller], Engine]

#: Makes an encoder, not started yet, that writes to the given pool, or to one of its own.
EncoderFactory: TypeAlias = Callable[[WorkerConfig, EmbeddingMemory | None], MediaEncoder]

#: Makes what sizes the files that an engine reads by itself.
SizerFactory: TypeAlias = Callable[[WorkerConfig], MediaSizer]


def create_engine(config: WorkerConfig, kind: RequestKind, puller: Puller) -> Engine:
    """The engine that ``config`` names, not started yet. Raises ``ConfigError``: a setting out of range."""
    return catalog.create_engine(config.engine_spec, kind, puller)


def create_media_encoder(config: WorkerConfig, embeddings: EmbeddingMemory | None) -> MediaEncoder:
    """The encoder that ``config`` names, not started yet; it writes to ``embeddings``, or to a pool of its own.

    Raises:
        ConfigError: a setting out of range, or an engine without one.
    """
    return catalog.create_media_encoder(config.engine_spec, embeddings)


def create_media_sizer(config: WorkerConfig) -> MediaSizer:
    """What sizes files for the engine that ``config`` names, where that reads media by itself.

    Raises:
        ConfigError, InvalidRequestError: the engine, or the model, is none of which that can be told.
    """
    return catalog.create_media_sizer(config.engine_spec)

"""An engine that computes nothing: a test says what its steps bring, by routing ``StepOutput``s."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from quartet.engine.base import EngineCapabilities, EngineRequest, EngineStats, RequestKind, StepOutput, Turn
from quartet.errors import EngineError
from quartet.transfer.base import EmbeddingMemory, PoolMemory


@dataclass
class StubEngine:
    """Takes note of what it is asked for.

    Attributes:
        requests: by id, all that were submitted.
        cancelled: ids, in order, repeats included.
    """

    requests: dict[int, EngineRequest] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    is_alive: bool = True
    is_closed: bool = False
    memory: PoolMemory | None = None
    embeddings: EmbeddingMemory | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            kinds=frozenset(RequestKind),
            sampling_fields=frozenset(),
            model_fingerprint="stub",
            vocab_size=2**32,
            max_model_len=2**31,
            block_size=16,
            num_blocks=1,
        )

    async def start(self) -> None:
        return

    def submit(self, request: EngineRequest) -> None:
        if self.is_closed:
            raise EngineError("the engine was closed")
        self.requests[request.id] = request

    def cancel(self, id: int) -> None:
        self.cancelled.append(id)

    def release(self, id: int) -> None:
        self.released.append(id)

    def request_kv_snapshot(self) -> None:
        return

    def turns(self) -> Sequence[Turn]:
        return ()

    async def outputs(self) -> AsyncIterator[StepOutput]:
        return
        yield

    def stats(self) -> Sequence[EngineStats]:
        return (EngineStats(),)

    async def close(self) -> None:
        self.is_closed = True

"""An encoder without a model: what it writes is a function of the file, so that it is known where it arrives."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from quartet.engine.encoder import EncoderCapabilities, EncoderStats, EncodeTimes, ItemSize, StateEncoder
from quartet.errors import EngineError, InvalidMediaError
from quartet.kvcache.layout import EmbeddingLayout
from quartet.media.items import MediaFile, MediaGrid, MediaKind
from quartet.media.media_id import media_id
from quartet.transfer.base import EmbeddingMemory, PoolMemory
from quartet.transfer.cuda.memory import DeviceMemory
from tests.transfer.fake_cuda import FakeDriver, FakeHost

BLOCK_SIZE = 4
HIDDEN_SIZE = 2
PIXELS_PER_TOKEN = 16
FINGERPRINT = b"\x07" * 32


def picture(name: str, num_tokens: int = 5) -> MediaFile:
    """A file that the fake takes. One whose name begins with ``broken`` has a good header and nothing behind it."""
    return MediaFile(MediaKind.IMAGE, f"{num_tokens} {name}".encode())


def name_of(file: MediaFile) -> bytes:
    """Its media id."""
    return media_id(file, FINGERPRINT)


def embedding_layout(model_fingerprint: str = "fake") -> EmbeddingLayout:
    """One block of the fake's pool."""
    return EmbeddingLayout(
        model_fingerprint=model_fingerprint, dtype="float32", hidden_size=HIDDEN_SIZE, block_size=BLOCK_SIZE
    )


def embedding_memory(num_blocks: int = 8, model_fingerprint: str = "fake") -> EmbeddingMemory:
    """A pool of its own."""
    layout = embedding_layout(model_fingerprint)
    return EmbeddingMemory(layout, PoolMemory(num_blocks, layout.piece_size_bytes))


def embeddings_on_gpu(host: FakeHost, device: int = 0, num_blocks: int = 8) -> EmbeddingMemory:
    """A pool of its own on a GPU of ``host``, of a process of its own as far as the driver knows."""
    layout = embedding_layout()
    return EmbeddingMemory(layout, DeviceMemory(FakeDriver(host, (device,)), 0, num_blocks, layout.piece_size_bytes))


def written(file: MediaFile, index: int) -> bytes:
    """What the fake writes to block ``index`` of a file."""
    digest = hashlib.sha256(file.data + bytes([index])).digest()
    return digest * (embedding_layout().piece_size_bytes // len(digest))


def read(embeddings: EmbeddingMemory, block_ids: Sequence[int]) -> list[bytes]:
    """What lies in blocks."""
    memory = embeddings.memory
    if isinstance(memory, PoolMemory):
        return [bytes(memory.piece(block_id)) for block_id in block_ids]
    size = memory.piece_size_bytes
    return [driver_of(embeddings).read(memory.address + block_id * size, size) for block_id in block_ids]


def write(embeddings: EmbeddingMemory, block_id: int, data: bytes) -> None:
    """Put ``data`` into a block."""
    memory = embeddings.memory
    if isinstance(memory, PoolMemory):
        memory.piece(block_id)[:] = data
    else:
        driver_of(embeddings).write(memory.address + block_id * memory.piece_size_bytes, data)


def driver_of(embeddings: EmbeddingMemory) -> FakeDriver:
    """Of a pool on a GPU."""
    memory = embeddings.memory
    assert isinstance(memory, DeviceMemory)
    assert isinstance(memory.driver, FakeDriver)
    return memory.driver


class FakeEncoder:
    """Encodes when it is let."""

    def __init__(self, embeddings: EmbeddingMemory | None = None, *, is_held: bool = False) -> None:
        self._embeddings = embeddings or embedding_memory()
        self.may_encode = asyncio.Event()
        if not is_held:
            self.may_encode.set()
        self.encoded: list[MediaFile] = []
        self.cancelled: list[MediaFile] = []
        self.num_waiting = 0
        self.is_alive = True
        self.is_closed = False
        self.states: StateEncoder | None = None
        self.kinds = frozenset({MediaKind.IMAGE})

    @property
    def capabilities(self) -> EncoderCapabilities:
        return EncoderCapabilities(
            kinds=self.kinds,
            model_fingerprint=self._embeddings.layout.model_fingerprint,
            preprocessing_fingerprint=FINGERPRINT,
            max_item_tokens=16,
        )

    @property
    def embeddings(self) -> EmbeddingMemory:
        return self._embeddings

    async def start(self) -> None:
        return

    async def size(self, file: MediaFile) -> ItemSize:
        num_tokens = file.data.split()[0]
        if not num_tokens.isdigit():
            raise InvalidMediaError("this is no picture", field="file")
        return ItemSize(int(num_tokens), MediaGrid(1, int(num_tokens)), int(num_tokens) * PIXELS_PER_TOKEN)

    async def encode(self, file: MediaFile, block_ids: Sequence[int]) -> EncodeTimes:
        self.num_waiting += 1
        try:
            await self.may_encode.wait()
        except asyncio.CancelledError:
            self.cancelled.append(file)
            raise
        finally:
            self.num_waiting -= 1
        if not self.is_alive:
            raise EngineError("the tower fell")
        if b" broken" in file.data:
            raise InvalidMediaError("nothing is behind its header", field="file")
        for index, block_id in enumerate(block_ids):
            write(self.embeddings, block_id, written(file, index))
        self.encoded.append(file)
        return EncodeTimes(0.25, 0.125)

    def stats(self) -> EncoderStats:
        return EncoderStats(num_waiting=self.num_waiting, num_steps=len(self.encoded), num_items=len(self.encoded))

    async def close(self) -> None:
        self.is_closed = True
        self.embeddings.memory.close()

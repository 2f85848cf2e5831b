"""A model runner and a puller without a model or a network, which still check what a real one would get wrong.

The fake's KV of a token is a digest of the whole prefix up to it. Before a chunk is computed, every position it attends
to is read from the blocks and compared, so a wrong block, a missing copy or a stale cache is found at once; the next
token is a function of the prefix, so what comes out can be computed without an engine. At positions that media fills,
the prefix has the media's embeddings in place of token ids: one number a token, read from the pool when computed.
"""

from __future__ import annotations

import asyncio
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count

from quartet.engine.base import EngineRequest, Generation, Prefilled, RequestKind
from quartet.engine.runner import SampledToken, ScheduledChunk, StepLauncher
from quartet.engine.sampling import OutputOptions, Sampling, TokenLogprobs
from quartet.errors import LayoutMismatchError
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import BlocksPayload, EmbeddingLayout, HandOff, KvLayout
from quartet.transfer.base import EmbeddingMemory, FetchResult, PieceCopy, PoolMemory, TransferWay, never

WAIT_S = 60.0  # bounds every wait; nothing takes that long

_SLOT = struct.Struct("<QQ")  # digest of the prefix, token id or embedding + 1: an empty slot is all zeros
_EMBEDDING = struct.Struct("<Q")
_FIRST_EMBEDDING = 1 << 32  # above all token ids


def fake_layout(block_size: int = 4, model_fingerprint: str = "fake") -> KvLayout:
    """One block with 16 bytes a token: K and V of one layer and head, one float64 each."""
    return KvLayout(
        model_fingerprint=model_fingerprint,
        dtype="float64",
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        block_size=block_size,
    )


def fake_embeddings(num_blocks: int, block_size: int = 4) -> EmbeddingMemory:
    """A pool of embeddings with 8 bytes a token."""
    layout = EmbeddingLayout(model_fingerprint="fake", dtype="float64", hidden_size=1, block_size=block_size)
    return EmbeddingMemory(layout, PoolMemory(num_blocks, layout.piece_size_bytes))


def write_embeddings(embeddings: EmbeddingMemory, block_ids: Sequence[int], span: MediaSpan) -> None:
    """Put the embeddings of ``span`` into those blocks, as an encoder would."""
    for offset in range(span.num_tokens):
        block, place = divmod(offset, embeddings.layout.block_size)
        piece = embeddings.memory.piece(block_ids[block])
        _EMBEDDING.pack_into(piece, place * _EMBEDDING.size, _embedding(span.media_id, offset))


def next_token(
    token_ids: Sequence[int],
    vocab_size: int,
    masked: frozenset[int] = frozenset(),
    media: Sequence[MediaSpan] = (),
) -> int:
    """The token that the fake model samples after ``token_ids``."""
    token_id = _digests(_prefix(token_ids, media))[-1] % vocab_size
    while token_id in masked:
        token_id = (token_id + 1) % vocab_size
    return token_id


def expected_output(
    generation: Generation, *, vocab_size: int = 64, eos_token_ids: frozenset[int] = frozenset(), max_len: int = 256
) -> list[int]:
    """All output tokens of a generation, generated ones included, computed without an engine."""
    sampling = generation.sampling
    stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_token_ids)
    token_ids = [*generation.prompt_token_ids, *generation.generated_token_ids]
    num_prompt = len(generation.prompt_token_ids)
    max_output = sampling.max_tokens if sampling.max_tokens is not None else max_len - num_prompt
    while True:
        is_masked = len(token_ids) - num_prompt < sampling.min_tokens
        masked = stop_ids if is_masked else frozenset()
        token_ids.append(next_token(token_ids, vocab_size, masked, generation.media))
        if token_ids[-1] in stop_ids or len(token_ids) - num_prompt >= max_output:
            return token_ids[num_prompt:]


class FakeRunner:
    """A ``ModelRunner`` that computes digests.

    Attributes:
        step_gate: where given, each step takes one permit first, so that a test decides when steps happen.
        failure: raised by the next step.
        num_steps: steps begun.
        step_began: set by the first step.
        chunk_sizes: tokens of each chunk of each step.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 64,
        max_model_len: int = 256,
        eos_token_ids: frozenset[int] = frozenset(),
        layout: KvLayout | None = None,
        step_gate: threading.Semaphore | None = None,
        num_embedding_blocks: int = 0,
        placeholder_id: int | None = None,
    ) -> None:
        self.layout = layout or fake_layout(block_size)
        self.memory: PoolMemory | None = PoolMemory(num_blocks, self.layout.piece_size_bytes)
        self._memory = self.memory  # it computes there also if a test hides it from transfers
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.embeddings = fake_embeddings(num_embedding_blocks, block_size) if num_embedding_blocks else None
        self.placeholder_id = placeholder_id
        self.step_gate = step_gate
        self.launcher: StepLauncher | None = None
        self.failure: Exception | None = None
        self.num_steps = 0
        self.chunk_sizes: list[list[int]] = []
        self.step_began = threading.Event()
        self.num_closes = 0

    def run(self, chunks: Sequence[ScheduledChunk]) -> list[SampledToken]:
        self.num_steps += 1
        self.step_began.set()
        if self.step_gate is not None:
            assert self.step_gate.acquire(timeout=WAIT_S), "no permit for a step"
        if self.failure is not None:
            raise self.failure
        return self.compute(chunks)

    def close(self) -> None:
        self.num_closes += 1
        self._memory.close()
        if self.embeddings is not None:
            self.embeddings.memory.close()

    def compute(self, chunks: Sequence[ScheduledChunk]) -> list[SampledToken]:
        """What a step does, now."""
        self.chunk_sizes.append([chunk.num_tokens for chunk in chunks])
        assert len({chunk.running for chunk in chunks}) == len(chunks), "one chunk a request"
        for chunk in chunks:
            self._compute(chunk)
        return [self._sample(chunk) for chunk in chunks if chunk.samples]

    def _compute(self, chunk: ScheduledChunk) -> None:
        seq = chunk.running.seq
        end = chunk.first_position + chunk.num_tokens
        assert chunk.num_tokens > 0
        assert chunk.samples == (end == len(seq))
        prefix = _prefix(seq.token_ids[:end], chunk.running.request.generation.media)
        digests = _digests(prefix)
        for position in range(chunk.first_position):
            written = _SLOT.unpack_from(self._slot(seq.block_table, position))
            assert written == (digests[position], prefix[position] + 1), f"wrong KV at {position}"
        for position in range(chunk.first_position, end):
            self._check_embedding(chunk.running.request, position, prefix[position])
            _SLOT.pack_into(self._slot(seq.block_table, position), 0, digests[position], prefix[position] + 1)

    def _check_embedding(self, request: EngineRequest, position: int, expected: int) -> None:
        """That it is in the request's blocks, where media fills ``position``."""
        for i, span in enumerate(request.generation.media):
            offset = position - span.first_position
            if 0 <= offset < span.num_tokens:
                assert self.embeddings is not None
                assert request.media_blocks, f"nothing says what is at {position}"
                block, place = divmod(offset, self.embeddings.layout.block_size)
                piece = self.embeddings.memory.piece(request.media_blocks[i][block])
                assert _EMBEDDING.unpack_from(piece, place * _EMBEDDING.size) == (expected,)

    def _slot(self, block_table: list[int], position: int) -> memoryview:
        block, offset = divmod(position, self.layout.block_size)
        return self._memory.piece(block_table[block])[offset * _SLOT.size :]

    def _sample(self, chunk: ScheduledChunk) -> SampledToken:
        running = chunk.running
        is_masked = running.num_output_tokens < running.sampling.min_tokens
        masked = running.stop_ids if is_masked else frozenset()
        media = running.request.generation.media
        token_id = next_token(running.seq.token_ids, self.vocab_size, masked, media)
        wanted = running.request.generation.output.logprobs
        return SampledToken(token_id, None if wanted is None else TokenLogprobs(token_id, -1.0))


@dataclass(eq=False)
class FakeClaim:
    """A claim on blocks in another pool of this process.

    Attributes:
        copies: what ``fetch`` was asked for; ``None`` before.
        is_writing: from the fetch's begin until nothing writes any more.
    """

    puller: FakePuller
    hand_off: HandOff
    copies: tuple[PieceCopy, ...] | None = None
    num_releases: int = 0
    is_writing: bool = False
    has_fetched: bool = False

    async def fetch(self, copies: Sequence[PieceCopy]) -> FetchResult:
        self.copies = tuple(copies)
        self.is_writing = True
        self.puller.fetch_began.set()
        try:
            await self.puller.may_copy.wait()
            if self.puller.error is not None:
                raise self.puller.error
            return self._copy()
        finally:
            await self.puller.copy_stopped.wait()  # a copy on its way cannot be called back
            self.is_writing = False

    async def release(self) -> None:
        self.num_releases += 1

    def _copy(self) -> FetchResult:
        source_memory, source_blocks = self.puller.sources[self.hand_off.hand_off_id]
        assert self.copies is not None
        assert self.puller.memory is not None
        for copy in self.copies:
            self.puller.memory.piece(copy.block_id)[:] = source_memory.piece(source_blocks[copy.piece])
        self.has_fetched = True
        size_bytes = len(self.copies) * self.hand_off.payload.layout.piece_size_bytes  # type: ignore[union-attr]
        return FetchResult(TransferWay.SHM, size_bytes, 0.001)


@dataclass(eq=False)
class FakePuller:
    """A ``Puller`` between pools of this process.

    Attributes:
        sources: by hand-off id: the pool that holds, and its held blocks in the order of the sequence.
        may_copy: cleared, fetches wait before they copy.
        copy_stopped: cleared, fetches do not end, cancelled or not.
        error: what fetches raise instead of copying.
    """

    sources: dict[bytes, tuple[PoolMemory, tuple[int, ...]]] = field(default_factory=dict)
    claims: list[FakeClaim] = field(default_factory=list)
    may_copy: asyncio.Event = field(default_factory=asyncio.Event)
    copy_stopped: asyncio.Event = field(default_factory=asyncio.Event)
    fetch_began: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    memory: PoolMemory | None = None
    layout: KvLayout | None = None
    is_busy: Callable[[], bool] = never

    def __post_init__(self) -> None:
        self.may_copy.set()
        self.copy_stopped.set()

    def attach(self, memory: PoolMemory, layout: KvLayout, is_busy: Callable[[], bool] = never) -> None:
        assert self.memory is None, "attached once"
        self.memory, self.layout, self.is_busy = memory, layout, is_busy

    def claim(self, hand_off: HandOff) -> FakeClaim:
        assert isinstance(hand_off.payload, BlocksPayload)
        if hand_off.payload.layout != self.layout:
            raise LayoutMismatchError("another layout")
        claim = FakeClaim(self, hand_off)
        self.claims.append(claim)
        return claim

    async def close(self) -> None:
        assert not self.num_writing()

    def num_writing(self) -> int:
        """Fetches that may still write to the local pool."""
        return sum(claim.is_writing for claim in self.claims)

    def offer(self, memory: PoolMemory, layout: KvLayout, block_ids: tuple[int, ...], num_tokens: int) -> HandOff:
        """A hand-off of blocks in ``memory``, which a claim of this puller can fetch."""
        hand_off_id = len(self.sources).to_bytes(16, "big")
        self.sources[hand_off_id] = (memory, block_ids)
        return HandOff(
            hand_off_id=hand_off_id,
            secret=bytes(16),
            worker_id="fake",
            epoch=1,
            address="127.0.0.1:1",
            time_to_live=timedelta(seconds=30),
            payload=BlocksPayload(layout, num_tokens),
        )

    def offer_prefix(self, token_ids: Sequence[int], media: Sequence[MediaSpan] = ()) -> HandOff:
        """A hand-off of the KV of all ``token_ids`` but the last, as a prefill elsewhere would have left it."""
        assert self.layout is not None
        num_tokens = len(token_ids) - 1
        num_blocks = -(-num_tokens // self.layout.block_size)
        memory = PoolMemory(max(num_blocks, 1), self.layout.piece_size_bytes)
        prefix = _prefix(token_ids[:num_tokens], media)
        for position, digest in enumerate(_digests(prefix)):
            _SLOT.pack_into(memory.view, position * _SLOT.size, digest, prefix[position] + 1)
        return self.offer(memory, self.layout, tuple(range(num_blocks)), num_tokens)

    def offer_prefilled(self, memory: PoolMemory, layout: KvLayout, prefilled: Prefilled) -> HandOff:
        """A hand-off of what an engine with pool ``memory`` holds for ``prefilled``."""
        return self.offer(memory, layout, prefilled.block_ids, prefilled.num_tokens)


_ids = count(1)


def make_request(
    prompt: Sequence[int],
    *,
    kind: RequestKind = RequestKind.DECODE,
    generated: Sequence[int] = (),
    max_tokens: int | None = 4,
    priority: int = 0,
    hand_off: HandOff | None = None,
    sampling: Sampling | None = None,
    media: tuple[MediaSpan, ...] = (),
    media_blocks: tuple[tuple[int, ...], ...] = (),
    output: OutputOptions | None = None,
) -> EngineRequest:
    """A request with a fresh id."""
    generation = Generation(
        prompt_token_ids=tuple(prompt),
        generated_token_ids=tuple(generated),
        sampling=sampling or Sampling(max_tokens=max_tokens),
        media=media,
        output=output or OutputOptions(),
    )
    return EngineRequest(
        id=next(_ids),
        kind=kind,
        generation=generation,
        priority=priority,
        hand_off=hand_off,
        media_blocks=media_blocks,
    )


def _embedding(media_id: bytes, offset: int) -> int:
    return _FIRST_EMBEDDING + zlib.crc32(media_id + offset.to_bytes(4, "little"))


def _prefix(token_ids: Sequence[int], media: Sequence[MediaSpan]) -> list[int]:
    """What the model sees: token ids, and embeddings where media fills positions."""
    prefix = list(token_ids)
    for span in media:
        end = min(span.first_position + span.num_tokens, len(prefix))
        for position in range(span.first_position, end):
            prefix[position] = _embedding(span.media_id, position - span.first_position)
    return prefix


def _digests(prefix: Sequence[int]) -> list[int]:
    """Of every prefix: a chain, so that it depends on all tokens before."""
    digests: list[int] = []
    digest = 0
    for value in prefix:
        digest = zlib.crc32(value.to_bytes(4 if value < _FIRST_EMBEDDING else 8, "little"), digest)
        digests.append(digest)
    return digests

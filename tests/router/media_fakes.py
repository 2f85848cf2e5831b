"""Media of a fleet without processes: an item fills as many tokens as its file has bytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

from quartet.discovery.base import Rank
from quartet.errors import MediaFetchError, RequestCancelledError
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import EmbeddingLayout, EmbeddingsPayload, HandOff
from quartet.kvcache.media_spans import expand_placeholders
from quartet.media.items import MediaFile, MediaItem, MediaKind, MediaPart, MediaSize, MediaUrl
from quartet.media.media_id import media_id
from quartet.streams.messages import EncodeStart, WorkerStart
from quartet.text.model_text import MediaText

if TYPE_CHECKING:
    from tests.router.fakes import FakeHops, Plan

PLACEHOLDER = 3
FINGERPRINT = bytes(32)
MEDIA_TEXT = MediaText(PLACEHOLDER, FINGERPRINT)
#: A prompt with its media in it, and where they lie.
LaidOut: TypeAlias = tuple[Sequence[int], tuple[MediaSpan, ...]]
_LAYOUT = EmbeddingLayout(model_fingerprint="ab" * 32, dtype="float32", hidden_size=8, block_size=16)


def picture(num_tokens: int, name: str = "a") -> MediaFile:
    """A picture that fills so many tokens; pictures of other names are others."""
    return MediaFile(MediaKind.IMAGE, name.encode() * num_tokens)


def item_of(file: MediaFile, fingerprint: bytes = FINGERPRINT) -> MediaItem:
    return MediaItem(media_id(file, fingerprint), file)


def sizes_of(items: Sequence[tuple[bytes, MediaFile]]) -> tuple[MediaSize, ...]:
    return tuple(MediaSize(media_id=name, num_tokens=len(file.data)) for name, file in items)


def expanded(start: WorkerStart) -> LaidOut:
    """The prompt with its media in it, and where they lie, whether these come as files or not."""
    files = [(item.media_id, item.source) for item in start.media if isinstance(item.source, MediaFile)]
    if not files:
        return start.generation.prompt_token_ids, start.generation.media
    return expand_placeholders(list(start.generation.prompt_token_ids), PLACEHOLDER, sizes_of(files))


def reported_prompt(
    start: WorkerStart, laid_out: LaidOut | None = None
) -> tuple[Sequence[int], tuple[MediaSpan, ...], bool]:
    """The same, or how its worker ``laid_out`` the prompt, and whether the worker reports it."""
    if laid_out is not None:
        return *laid_out, True
    return *expanded(start), any(isinstance(item.source, MediaFile) for item in start.media)


@dataclass
class FakeMedia:
    """Gives the files as they came, if ``fingerprint`` is the asked one; URLs lead nowhere."""

    fingerprint: bytes = FINGERPRINT
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def fetch(
        self, parts: Sequence[MediaPart], fields: Sequence[str], fingerprint: bytes, tenant: str = ""
    ) -> tuple[MediaItem, ...]:
        assert fingerprint == self.fingerprint
        self.asked.set()
        await self.gate.wait()
        items = []
        for part, name in zip(parts, fields, strict=True):
            if isinstance(part, MediaUrl):
                raise MediaFetchError("nothing is there", field=name)
            items.append(item_of(part, fingerprint))
        return tuple(items)


class FakeEncode:
    """Gives sizes and hand-offs as its plan says.

    ``hang_after`` and ``fail_after`` 0 are before the sizes, 2 after the first hand-off.
    """

    def __init__(
        self, hops: FakeHops, rank: Rank, start: EncodeStart, plan: Plan, on_encoded: Callable[[HandOff], None]
    ) -> None:
        self._hops, self._place, self._start, self._plan, self._on_encoded = hops, rank, start, plan, on_encoded
        self._hand_offs: list[HandOff] = []
        self._is_over = False
        self._hops.num_open += 1

    async def sizes(self) -> Sequence[MediaSize]:
        await asyncio.sleep(0)
        await self._disturb(0)
        return sizes_of([(item.media_id, item.file) for item in self._start.items])

    async def hand_offs(self) -> Sequence[HandOff]:
        await self._disturb(1)
        if self._plan.gate is not None:
            self._hops.hung.set()
            await self._plan.gate.wait()
        for item in self._start.items:
            hand_off = self._hand_off(len(item.file.data))
            self._hops.held.add(hand_off.hand_off_id)
            self._hand_offs.append(hand_off)
            self._on_encoded(hand_off)
            await self._disturb(2)
        taken, self._hand_offs = self._hand_offs, []
        return taken

    def cancel(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._hops.num_open -= 1
        for hand_off in self._hand_offs:
            self._hops.drop(hand_off)

    async def _disturb(self, step: int) -> None:
        if self._is_over:
            raise RequestCancelledError("cancelled")
        if self._plan.hang_after == step:
            self._hops.hung.set()
            await asyncio.Event().wait()
        if self._plan.error is not None and self._plan.fail_after == step:
            raise self._plan.error

    def _hand_off(self, num_tokens: int) -> HandOff:
        return HandOff(
            hand_off_id=random.randbytes(16),
            secret=bytes(16),
            worker_id=self._place.worker_id,
            epoch=1,
            address="127.0.0.1:1",
            time_to_live=timedelta(seconds=30),
            payload=EmbeddingsPayload(_LAYOUT, num_tokens),
        )

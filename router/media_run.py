"""One request's media, from what the client names to what each of its prefills is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from quartet.discovery.place import Place
from quartet.errors import ServingError
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import HandOff
from quartet.kvcache.media_spans import expand_placeholders
from quartet.media.items import MediaItem, MediaPart, MediaSize
from quartet.rpc.edge import GenerateStart
from quartet.rpc.inner import MediaInput
from router.encoding import EncodeOrder, EncodeTools, Encoding, ReadyInputs, client_error
from router.media_line import MediaLine, MediaRoom
from router.media_sizes import KnownSizes
from router.pools import MediaWay, needs_of


class MediaFetch(Protocol):
    """Gets and checks files (``router.media.fetcher.MediaFetcher``)."""

    async def fetch(
        self, parts: Sequence[MediaPart], fields: Sequence[str], fingerprint: bytes
    ) -> tuple[MediaItem, ...]:
        """The items of a request, in order. Raises ``ServingError`` with one of ``fields``."""
        ...


@dataclass(frozen=True)
class MediaTools:
    """What requests' media are got and encoded with; files of ``max_item_bytes`` at most, each."""

    fetcher: MediaFetch
    encode: EncodeTools
    line: MediaLine
    max_item_bytes: int


@dataclass(frozen=True, kw_only=True)
class MediaRequest:
    """Whose media they are.

    Attributes:
        first_attempt: number of the request's first attempt.
        deadline: monotonic seconds.
    """

    request_id: str
    start: GenerateStart
    traceparent: str
    first_attempt: int
    deadline: float


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt with its media.

    Attributes:
        token_ids: with one placeholder an item, or with all their tokens in it where ``spans`` says where.
        num_unknown_tokens: that it grows by at most, where no spans are there.
    """

    token_ids: Sequence[int] = field(repr=False)
    spans: tuple[MediaSpan, ...] = ()
    num_unknown_tokens: int = 0


class RequestMedia:
    """The media of a request that is running. Closed when that ends.

    Attributes:
        items: in the order of the prompt.
        field: of the request, the one that the first item is in.
        needs: what a place has to take that computes the prompt.
        token_ids: the prompt with one placeholder an item.
        placeholder_id: their token.
        fetch_s: seconds that it took to get the files.
    """

    def __init__(
        self,
        items: Sequence[MediaItem],
        fields: Sequence[str],
        way: MediaWay,
        token_ids: Sequence[int],
        placeholder_id: int,
        fetch_s: float,
        room: MediaRoom,
        num_choices: int,
        sizes: KnownSizes,
    ) -> None:
        self.items = items
        self.field = fields[0]
        self.needs = needs_of(way, items)
        self.token_ids = token_ids
        self.placeholder_id = placeholder_id
        self.fetch_s = fetch_s
        self._fields = fields
        self._room = room
        self._num_to_take = num_choices
        self._sizes = sizes
        self._order: EncodeOrder | None = None
        self._tools: EncodeTools | None = None
        self._unused: Encoding | None = None
        self._encode_place: Place | None = None
        self._has_encoded = asyncio.Event()

    @property
    def is_encoded(self) -> bool:
        """Whether encode workers do it, not who computes the prompt."""
        return self._order is not None

    @property
    def encode_place(self) -> Place | None:
        """Where the items are encoded; ``None``: who computes the prompt does it."""
        return self._encode_place if self._unused is None else self._unused.place

    def begin(self, order: EncodeOrder, tools: EncodeTools) -> Encoding:
        """Encode at once; the first attempt that asks is given these."""
        self._order, self._tools = order, tools
        self._unused = Encoding(order, tools, tools.sizes.find(order.items), self._has_encoded.set)
        return self._unused

    @asynccontextmanager
    async def ready(self) -> AsyncIterator[ReadyInputs]:
        """What one prefill needs, from the moment on when it is encoded; what was not taken in the end is let go of.

        A hand-off is good for one pull, so each attempt of each choice has its own. Nobody who has a place may wait
        for this: pools of embeddings may be full of what waits for a place.

        Raises:
            ServingError: they can't be encoded.
        """
        if self._order is None or self._tools is None:
            yield ReadyInputs(self.items, self._sizes.find(self.items) or (), None, self._taken)
            return
        encoding, self._unused = self._unused, None
        try:
            if encoding is None:
                # What the first one puts into the worker's cache costs the others nothing.
                await self._has_encoded.wait()
                encoding = Encoding(self._order, self._tools)
            await encoding.ended()
            self._encode_place = encoding.place
            yield ReadyInputs(self.items, encoding.told_sizes, encoding, self._taken)
        finally:
            if encoding is not None:
                self._encode_place = encoding.place
                encoding.close()

    def lay_out(self, sizes: Sequence[MediaSize]) -> tuple[Sequence[int], tuple[MediaSpan, ...]]:
        """The prompt with items of ``sizes`` in it, and where they lie."""
        return expand_placeholders(self.token_ids, self.placeholder_id, sizes)

    def learn(self, spans: Sequence[MediaSpan]) -> None:
        """Of a worker that got files: where the items lie in the prompt."""
        self._sizes.learn([MediaSize(media_id=span.media_id, num_tokens=span.num_tokens) for span in spans])

    def learn_length(self, num_prompt_tokens: int) -> None:
        """Of a worker that got files: how long the prompt became."""
        num_text_tokens = len(self.token_ids) - len(self.items)
        self._sizes.learn_total(self.items, num_prompt_tokens - num_text_tokens)

    def forget_sizes(self) -> None:
        """A worker that got files found the prompt too long, maybe as they fill more than was known of them."""
        self._sizes.forget(self.items)

    def failed(self, inputs: Sequence[MediaInput]) -> None:
        """A prefill could not pull ``inputs``: encode elsewhere, if others can."""
        if self._order is not None:
            sources = (item.source for item in inputs)
            self._order.avoid.update(source.worker_id for source in sources if isinstance(source, HandOff))

    def client_error(self, error: ServingError) -> ServingError:
        """``error`` of a worker, with what the client calls the item that is at fault."""
        return client_error(error, self._fields)

    def close(self) -> None:
        """Nothing is encoded any more, and nothing that was is held."""
        if self._unused is not None:
            self._unused.close()
        self._room.close()

    def _taken(self) -> None:
        """A prefill has been given the hand-offs of one choice: it pulls them at once."""
        self._num_to_take -= 1
        if self._num_to_take <= 0:
            self._room.pulled()

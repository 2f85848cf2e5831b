"""One request's media, from what the client names to what each of its prefills is given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Protocol

from quartet.discovery.place import Place
from quartet.errors import InvalidRequestError, MediaTooLargeError, ServingError, UnsupportedFieldError
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import HandOff
from quartet.kvcache.media_spans import check_placeholders, expand_placeholders
from quartet.media.items import MediaFile, MediaItem, MediaKind, MediaPart, MediaSize, MediaUrl
from quartet.rpc.chunked_starts import MAX_START_MEDIA_BYTES
from quartet.rpc.context import RequestContext
from quartet.rpc.edge import ChatPrompt, GenerateStart
from quartet.rpc.inner import MediaInput
from quartet.text.chat_message import media_of
from quartet.text.model_text import MediaText, ModelText
from router.encoding import EncodeOrder, EncodeTools, Encoding, ReadyInputs, client_error
from router.pools import MediaWay, Pool, needs_of
from router.worker import PoolKey

_CHAT_FIELD = "chat.messages.parts.media"


class MediaFetch(Protocol):
    """Gets and checks files (``router.media.fetcher.MediaFetcher``)."""

    async def fetch(
        self, parts: Sequence[MediaPart], fields: Sequence[str], fingerprint: bytes
    ) -> tuple[MediaItem, ...]:
        """The items of a request, in order. Raises ``ServingError`` with one of ``fields``."""
        ...


@dataclass(frozen=True)
class MediaTools:
    """What requests' media are got and encoded with."""

    fetcher: MediaFetch
    encode: EncodeTools


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
    ) -> None:
        self.items = items
        self.field = fields[0]
        self.needs = needs_of(way, items)
        self.token_ids = token_ids
        self.placeholder_id = placeholder_id
        self.fetch_s = fetch_s
        self._fields = fields
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
            yield ReadyInputs(self.items, None)
            return
        encoding, self._unused = self._unused, None
        try:
            if encoding is None:
                # What the first one puts into the worker's cache costs the others nothing.
                await self._has_encoded.wait()
                encoding = Encoding(self._order, self._tools)
            await encoding.ended()
            self._encode_place = encoding.place
            yield ReadyInputs(self.items, encoding)
        finally:
            if encoding is not None:
                self._encode_place = encoding.place
                encoding.close()

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


def has_media(start: GenerateStart) -> bool:
    """Whether the request names any; a chat of nothing but text is told at a glance."""
    if start.media:
        return True
    prompt = start.prompt
    return isinstance(prompt, ChatPrompt) and any(not isinstance(one.content, str) for one in prompt.messages)


async def prepare_media(
    request: MediaRequest,
    pool: Pool,
    text: ModelText,
    token_ids: Sequence[int],
    tools: MediaTools,
    *,
    encodes: bool,
) -> tuple[RequestMedia | None, MediaPrompt]:
    """Get the request's media, find a way for them, and begin to encode where encode workers do that.

    Args:
        request: whose they are.
        pool: where it runs.
        text: its model's text side.
        token_ids: the prompt, with one placeholder an item.
        tools: to get and encode them with.
        encodes: else nothing is encoded, and sizes are those that are known.

    Returns:
        The media, to be closed by the caller, and the prompt, with their tokens in it where their sizes are known.

    Raises:
        InvalidRequestError: an item is impossible or can't be had; its field is named.
        UnsupportedFieldError: the model takes none, or none of a kind.
        WorkerUnavailableError: no worker that takes such media is ready.
    """
    parts, fields = _parts(request.start)
    if not parts:
        return None, MediaPrompt(token_ids)
    if text.media is None:
        raise UnsupportedFieldError("this model takes no media", field=fields[0].partition("[")[0])
    check_items(token_ids, text.media, parts, fields)
    began = time.monotonic()
    items = await tools.fetcher.fetch(parts, fields, text.media.preprocessing_fingerprint)
    _check_total(items, fields)
    way, fetch_s = pool.media.way(items, fields), time.monotonic() - began
    media = RequestMedia(items, fields, way, token_ids, text.media.placeholder_id, fetch_s)
    if way is MediaWay.FILES:
        return media, _unknown(media, pool)
    sizes = tools.encode.sizes.find(items)
    if encodes:
        sizes = await _begin(media, _order(request, pool.key, items, fields), tools.encode)
    if sizes is None:
        return media, _unknown(media, pool)
    expanded, spans = expand_placeholders(token_ids, media.placeholder_id, sizes)
    return media, MediaPrompt(expanded, spans)


def check_items(token_ids: Sequence[int], media: MediaText, parts: Sequence[MediaPart], fields: Sequence[str]) -> None:
    """Refuse a prompt without exactly one placeholder an item. Raises ``InvalidRequestError``, naming the field."""
    try:
        check_placeholders(token_ids, media.placeholder_id, len(parts))
    except InvalidRequestError as error:
        is_chat = bool(fields) and fields[0] == _CHAT_FIELD
        raise InvalidRequestError(error.message, field=_CHAT_FIELD if is_chat else error.field) from error


def _parts(start: GenerateStart) -> tuple[Sequence[MediaPart], Sequence[str]]:
    """The items of a request, and what the client calls each."""
    if not isinstance(start.prompt, ChatPrompt):
        return start.media, [f"media[{number}].{_source(part)}" for number, part in enumerate(start.media)]
    if start.media:
        raise InvalidRequestError("the media of a chat are in its messages", field="media")
    parts = list(media_of(start.prompt.messages))
    return parts, [_CHAT_FIELD] * len(parts)


def _check_total(items: Sequence[MediaItem], fields: Sequence[str]) -> None:
    """Refuse what no worker takes at once, before it is sent for nothing. Raises ``MediaTooLargeError``."""
    num_bytes = 0
    for item, field_name in zip(items, fields, strict=True):
        num_bytes += len(item.file.data)
        if num_bytes > MAX_START_MEDIA_BYTES:
            message = f"the request's media exceed {MAX_START_MEDIA_BYTES} bytes together"
            raise MediaTooLargeError(message, field=field_name)


def _source(part: MediaPart) -> str:
    if isinstance(part, MediaUrl):
        return "url"
    return "data" if isinstance(part, MediaFile) and part.kind is MediaKind.IMAGE else "embeddings"


async def _begin(media: RequestMedia, order: EncodeOrder, tools: EncodeTools) -> Sequence[MediaSize]:
    encoding = media.begin(order, tools)
    try:
        return await encoding.sizes()
    except BaseException:
        media.close()
        raise


def _unknown(media: RequestMedia, pool: Pool) -> MediaPrompt:
    return MediaPrompt(media.token_ids, (), len(media.items) * (max(pool.media.max_tokens, 1) - 1))


def _order(request: MediaRequest, pool: PoolKey, items: Sequence[MediaItem], fields: Sequence[str]) -> EncodeOrder:
    start = request.start
    numbers: Iterator[int] = count(request.first_attempt)
    context = partial(
        RequestContext,
        request_id=request.request_id,
        traceparent=request.traceparent,
        tenant=start.tenant,
        priority=start.priority,
        session_key=start.session_key,
    )
    return EncodeOrder(
        pool=pool, items=items, fields=fields, context=context, numbers=numbers, deadline=request.deadline
    )

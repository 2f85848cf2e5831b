"""One request's media, from the items that the client names to the inputs of each of its prefills.

``arrive`` checks what can be checked without any work, and counts the files that are in the request itself.
``prepare_media`` waits for room, fetches the files, decides how they get into the prompt, and begins to encode. It
returns a ``RequestMedia``, which the request's attempts ask for inputs (``RequestMedia.ready``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Protocol

from quartet.api.chat import ChatPrompt
from quartet.api.request import GenerateStart
from quartet.discovery.base import Rank
from quartet.errors import InvalidRequestError, MediaTooLargeError, ServingError, UnsupportedFieldError
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import HandOff
from quartet.kvcache.media_spans import check_placeholders, expand_placeholders
from quartet.media.items import MediaFile, MediaItem, MediaKind, MediaPart, MediaSize, MediaUrl
from quartet.media.media_id import in_trust_domain
from quartet.rpc.channels import MAX_API_MESSAGE_BYTES
from quartet.streams.messages import MediaInput, RequestContext
from quartet.text.model_text import MediaText, ModelText
from router.media.config import MediaConfig
from router.media.encode import EncodeOrder, EncodeTools, Encoding, KnownSizes, ReadyInputs, client_error
from router.media.fetch import check_parts, scheme_of
from router.media.queue import MediaOrder, MediaQueue, MediaRoom
from router.request_trace import RequestTrace
from router.workers import MediaWay, Pool, PoolKey, needs_of

#: How often what came in a unary call is in memory until its handler returns: as bytes, as the message parsed from
#: them, and as the start made from that. gRPC holds the first two. Messages of streams are dropped once they are read.
UNARY_COPIES = 3


class MediaFetch(Protocol):
    """Gets and checks files (``router.media.fetch.MediaFetcher``)."""

    async def fetch(
        self, parts: Sequence[MediaPart], fields: Sequence[str], fingerprint: bytes, tenant: str = ""
    ) -> tuple[MediaItem, ...]:
        """The items of a request of ``tenant``, in order. Raises ``ServingError`` with one of ``fields``."""
        ...


@dataclass(frozen=True)
class MediaTools:
    """What requests' media are fetched and encoded with; ``config`` has the limits of their parts."""

    fetcher: MediaFetch
    encode: EncodeTools
    queue: MediaQueue
    config: MediaConfig


@dataclass(frozen=True, kw_only=True)
class ArrivedMedia:
    """The media of a request that has come, before anything is fetched. Closed when the request ends.

    Attributes:
        parts: as the client names them.
        fields: of each part, its name in the request.
        held: the memory that the request takes from its arrival on, if any file is in it; then the files that it has
            still to fetch are included, so it never waits for memory while it holds some.
        num_bytes_to_fetch: bytes of all its files at most, if all of them are still to be fetched.
        num_copied_bytes: bytes of further copies of what came in the request.
    """

    parts: Sequence[MediaPart]
    fields: Sequence[str]
    held: MediaRoom
    num_bytes_to_fetch: int
    num_copied_bytes: int

    def close(self) -> None:
        """Nothing of the request is in memory any more."""
        self.held.close()


@dataclass(frozen=True, kw_only=True)
class MediaRequest:
    """The request that the media belong to.

    Attributes:
        arrived: its media, as they came.
        worker_priority: the priority that workers are told.
        first_attempt: number of the request's first attempt.
        deadline: monotonic seconds.
        trust_domain: id of its tenant's trust domain, part of the items' ids; empty: that of all tenants without one.
    """

    request_id: str
    start: GenerateStart
    arrived: ArrivedMedia
    worker_priority: int
    traceparent: str
    trace: RequestTrace | None = None
    first_attempt: int
    deadline: float
    trust_domain: str = ""


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt with its media.

    Attributes:
        token_ids: with one placeholder an item, or with all tokens of the items if there are ``spans``.
        spans: where the items lie.
        num_unknown_tokens: tokens by which it grows at most, if there are no spans.
    """

    token_ids: Sequence[int] = field(repr=False)
    spans: tuple[MediaSpan, ...] = ()
    num_unknown_tokens: int = 0


def arrive(start: GenerateStart, tools: MediaTools, *, num_copies: int = 1) -> ArrivedMedia:
    """Check the media of a request that has just come, and count what came with it. The caller closes the result.

    ``num_copies`` says how often what came in the request is in memory.

    Raises:
        InvalidRequestError: too many parts, or one that could never be taken; its field is named.
        MediaTooLargeError: the files could need more memory than there is for all requests.
        QueueFullError: they need more than other requests have left.
    """
    parts, fields = named_parts(start)
    check_parts(parts, fields, tools.config)
    num_bytes = num_copied_bytes = 0
    for part, field_name in zip(parts, fields, strict=True):
        num_copied_bytes += (num_copies - 1) * _num_inline_bytes(part)
        num_bytes += _most_bytes(part, tools.config)
        if num_bytes + num_copied_bytes > tools.config.max_held_bytes:
            message = f"the request's media could take more than the {tools.config.max_held_bytes} bytes for all files"
            raise MediaTooLargeError(message, field=field_name)
    is_here = any(_num_inline_bytes(part) for part in parts)
    return ArrivedMedia(
        parts=parts,
        fields=fields,
        held=tools.queue.hold(start.tenant, num_bytes + num_copied_bytes if is_here else 0),
        num_bytes_to_fetch=0 if is_here else num_bytes,
        num_copied_bytes=num_copied_bytes,
    )


def _num_inline_bytes(part: MediaPart) -> int:
    """Bytes of a file that came in the request; 0 for one that is still to be fetched."""
    if isinstance(part, MediaFile):
        return len(part.data)
    return len(part.url) if scheme_of(part.url) == "data" else 0


def _most_bytes(part: MediaPart, config: MediaConfig) -> int:
    """Bytes that ``part`` takes in memory at most: as a file, and a ``data:`` URL also as text."""
    if isinstance(part, MediaFile):
        return len(part.data)
    return 2 * len(part.url) if scheme_of(part.url) == "data" else len(part.url) + config.max_file_size_bytes


async def prepare_media(
    request: MediaRequest,
    pool: Pool,
    text: ModelText,
    token_ids: Sequence[int],
    tools: MediaTools,
    *,
    encodes: bool,
) -> tuple[RequestMedia | None, MediaPrompt]:
    """Fetch the request's media, decide how they get into the prompt, and begin to encode if encode workers do that.

    Args:
        request: the request.
        pool: where it runs.
        text: its model's text side.
        token_ids: the prompt, with one placeholder an item.
        tools: to fetch and encode with.
        encodes: else nothing is encoded, and only known sizes are used.

    Returns:
        The media, to be closed by the caller, and the prompt, with their tokens in it if their sizes are known.

    Raises:
        InvalidRequestError: an item is impossible or can't be fetched; its field is named.
        QueueFullError: too many requests with media wait, or it waited for too long.
        UnsupportedFieldError: the model takes no media, or none of a kind.
        WorkerUnavailableError: no worker that takes such media is ready, and none of them is an encode worker.
    """
    parts, fields = request.arrived.parts, request.arrived.fields
    if not parts:
        return None, MediaPrompt(token_ids)
    if text.media is None:
        raise UnsupportedFieldError("this model takes no media", field=item_field(fields[0]))
    check_items(request.start, token_ids, text.media, fields)
    if encodes:
        pool = await _with_way(request, pool, parts, tools.encode)
    room = await tools.queue.enter(_media_order(request, pool, encodes=encodes))
    media, way = await _fetch(request, pool, text.media, token_ids, tools, room)
    sizes = tools.encode.sizes.find(media.items)
    if encodes and way is MediaWay.ENCODE:
        sizes = await _begin(media, _order(request, pool.key, media.items, fields), tools.encode)
        room.sized(sum(size.num_tokens for size in sizes))
    if sizes is None:
        return media, MediaPrompt(token_ids, (), len(media.items) * (max(pool.media.max_tokens, 1) - 1))
    return media, MediaPrompt(*media.lay_out(sizes))


class RequestMedia:
    """The media of a running request. Closed when that ends.

    Attributes:
        items: in the order of the prompt.
        field: the client's name for the first item.
        needs: what a rank that computes the prompt has to take.
        token_ids: the prompt with one placeholder an item.
        placeholder_id: the placeholders' token.
        fetch_s: seconds that fetching the files took.
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
        self._encode_rank: Rank | None = None
        self._has_encoded = asyncio.Event()

    @property
    def is_encoded(self) -> bool:
        """Whether encode workers encode the items, not the worker that computes the prompt."""
        return self._order is not None

    @property
    def encode_rank(self) -> Rank | None:
        """Where the items are encoded; ``None``: by the worker that computes the prompt."""
        return self._encode_rank if self._unused is None else self._unused.rank

    def begin(self, order: EncodeOrder, tools: EncodeTools) -> Encoding:
        """Begin to encode; the first attempt that asks gets these embeddings."""
        self._order, self._tools = order, tools
        self._unused = Encoding(order, tools, tools.sizes.find(order.items), self._has_encoded.set)
        return self._unused

    @asynccontextmanager
    async def ready(self) -> AsyncIterator[ReadyInputs]:
        """Wait until the inputs of one prefill are encoded; at the end, inputs that were not taken are dropped.

        A hand-off is good for one pull, so each attempt of each choice has its own. A choice must not wait for this
        while it has room on a rank: pools of embeddings may be full of requests that wait for room on ranks.

        Raises:
            ServingError: they can't be encoded.
        """
        if self._order is None or self._tools is None:
            yield ReadyInputs(self.items, self._sizes.find(self.items) or (), None, self._taken)
            return
        encoding, self._unused = self._unused, None
        try:
            if encoding is None:
                # The first encoding fills the worker's cache, so the later ones cost nothing.
                await self._has_encoded.wait()
                encoding = Encoding(self._order, self._tools)
            await encoding.ended()
            self._encode_rank = encoding.rank
            yield ReadyInputs(self.items, encoding.reported_sizes, encoding, self._taken)
        finally:
            if encoding is not None:
                self._encode_rank = encoding.rank
                encoding.close()

    def lay_out(self, sizes: Sequence[MediaSize]) -> tuple[Sequence[int], tuple[MediaSpan, ...]]:
        """The prompt with the tokens of items of ``sizes`` in it, and where they lie."""
        return expand_placeholders(self.token_ids, self.placeholder_id, sizes)

    def learn(self, spans: Sequence[MediaSpan]) -> None:
        """A worker that got files reported where the items lie in the prompt."""
        self._sizes.learn([MediaSize(media_id=span.media_id, num_tokens=span.num_tokens) for span in spans])

    def learn_length(self, num_prompt_tokens: int) -> None:
        """A worker that got files reported how long the prompt became."""
        num_text_tokens = len(self.token_ids) - len(self.items)
        self._sizes.learn_total(self.items, num_prompt_tokens - num_text_tokens)

    def forget_sizes(self) -> None:
        """A worker that got files found the prompt too long; the items may fill more tokens than was known."""
        self._sizes.forget(self.items)

    def failed(self, inputs: Sequence[MediaInput]) -> None:
        """A prefill could not pull ``inputs``: avoid the workers that encoded them."""
        if self._order is not None:
            sources = (item.source for item in inputs)
            self._order.avoid.update(source.worker_id for source in sources if isinstance(source, HandOff))

    def client_error(self, error: ServingError) -> ServingError:
        """``error`` of a worker, with the client's name for the item that caused it."""
        return client_error(error, self._fields)

    def close(self) -> None:
        """End the encoding, and give back what is held."""
        if self._unused is not None:
            self._unused.close()
        self._room.close()

    def _taken(self) -> None:
        """A prefill has got the hand-offs of one choice, and pulls them at once."""
        self._num_to_take -= 1
        if self._num_to_take <= 0:
            self._room.pulled()


def named_parts(start: GenerateStart) -> tuple[Sequence[MediaPart], Sequence[str]]:
    """The items of a request, and the client's name of each, as ``chat.messages[0].parts[1].media.data``.

    Raises:
        InvalidRequestError: a chat has media beside its messages.
    """
    if not isinstance(start.prompt, ChatPrompt):
        return start.media, [f"media[{number}].{_source(part)}" for number, part in enumerate(start.media)]
    if start.media:
        raise InvalidRequestError("the media of a chat are in its messages", field="media")
    named = list(_chat_parts(start.prompt))
    return [part for part, _field in named], [field for _part, field in named]


def item_field(field: str) -> str:
    """The name of the item whose source is ``field``."""
    return field.rpartition(".")[0]


def check_items(start: GenerateStart, token_ids: Sequence[int], media: MediaText, fields: Sequence[str]) -> None:
    """Refuse a prompt without exactly one placeholder for each item; ``fields`` are the items' names.

    Raises:
        InvalidRequestError: it names the first item without a placeholder, if that can be known.
    """
    try:
        check_placeholders(token_ids, media.placeholder_id, len(fields))
    except InvalidRequestError as error:
        num_placeholders, is_chat = token_ids.count(media.placeholder_id), isinstance(start.prompt, ChatPrompt)
        # If a chat's template left out only some of the items, it is unknown which ones.
        if num_placeholders < len(fields) and not (is_chat and num_placeholders):
            field = item_field(fields[num_placeholders])
        else:
            field = "chat.messages" if is_chat else "media"
        raise InvalidRequestError(error.message, field=field) from error


async def _with_way(request: MediaRequest, pool: Pool, parts: Sequence[MediaPart], tools: EncodeTools) -> Pool:
    """Wait until ``pool`` takes ``parts``, if only encode workers are away; nothing is held meanwhile.

    Returns ``pool`` with the media that it takes then. What a URL leads to is not known yet.
    """
    kinds = frozenset(part.kind.value for part in parts if isinstance(part, MediaFile))
    if not pool.media.awaits(kinds):
        return pool
    await tools.waits.way(pool.key, kinds, request.start.tenant)
    media = tools.table.media(pool.key, time.monotonic())
    return pool if media is None else replace(pool, media=media)


async def _fetch(
    request: MediaRequest,
    pool: Pool,
    model: MediaText,
    token_ids: Sequence[int],
    tools: MediaTools,
    room: MediaRoom,
) -> tuple[RequestMedia, MediaWay]:
    """Fetch the parts into ``room``, and decide how they get into the prompt. Raises ``ServingError``."""
    parts, fields = request.arrived.parts, request.arrived.fields
    began = time.monotonic()
    try:
        fingerprint = in_trust_domain(model.preprocessing_fingerprint, request.trust_domain)
        items = await tools.fetcher.fetch(parts, fields, fingerprint, request.start.tenant)
        _check_total(items, fields)
        way = pool.media.way(items, fields)
    except BaseException:
        room.close()
        raise
    num_bytes = sum(len(item.file.data) for item in items)
    num_bytes += sum(len(part.url) for part in parts if isinstance(part, MediaUrl))
    num_bytes += request.arrived.num_copied_bytes
    # One of them has room for them all, the other one has none.
    for counted in (request.arrived.held, room):
        counted.fetched(num_bytes)
    if way is MediaWay.FILES:
        room.pulled()
    fetch_s, num_choices = time.monotonic() - began, request.start.num_choices
    known = tools.encode.sizes
    media = RequestMedia(items, fields, way, token_ids, model.placeholder_id, fetch_s, room, num_choices, known)
    return media, way


def _media_order(request: MediaRequest, pool: Pool, *, encodes: bool) -> MediaOrder:
    """The room that the request still needs, as far as is known before anything is fetched."""
    is_encoded = encodes and pool.media.encoded
    return MediaOrder(
        pool=pool.key,
        tenant=request.start.tenant,
        priority=request.start.priority,
        num_encode_tokens=len(request.arrived.parts) * max(pool.media.max_tokens, 1) if is_encoded else 0,
        num_bytes=request.arrived.num_bytes_to_fetch,
    )


def _check_total(items: Sequence[MediaItem], fields: Sequence[str]) -> None:
    """Refuse media that no worker takes in one start, before they are sent. Raises ``MediaTooLargeError``."""
    num_bytes = 0
    for item, field_name in zip(items, fields, strict=True):
        num_bytes += len(item.file.data)
        if num_bytes > MAX_API_MESSAGE_BYTES:
            message = f"the request's media exceed {MAX_API_MESSAGE_BYTES} bytes together"
            raise MediaTooLargeError(message, field=field_name)


async def _begin(media: RequestMedia, order: EncodeOrder, tools: EncodeTools) -> Sequence[MediaSize]:
    encoding = media.begin(order, tools)
    try:
        return await encoding.sizes()
    except BaseException:
        media.close()
        raise


def _order(request: MediaRequest, pool: PoolKey, items: Sequence[MediaItem], fields: Sequence[str]) -> EncodeOrder:
    start = request.start
    numbers: Iterator[int] = count(request.first_attempt)
    context = partial(
        RequestContext,
        request_id=request.request_id,
        traceparent=request.traceparent,
        tenant=start.tenant,
        priority=request.worker_priority,
        session_key=start.session_key,
        trust_domain=request.trust_domain,
    )
    return EncodeOrder(
        pool=pool,
        items=items,
        fields=fields,
        context=context,
        numbers=numbers,
        tenant=start.tenant,
        priority=start.priority,
        deadline=request.deadline,
        trace=request.trace,
    )


def _chat_parts(prompt: ChatPrompt) -> Iterator[tuple[MediaPart, str]]:
    for message_number, message in enumerate(prompt.messages):
        for number, part in enumerate(message.pieces):
            if isinstance(part, MediaFile | MediaUrl):
                yield part, f"chat.messages[{message_number}].parts[{number}].media.{_source(part)}"


def _source(part: MediaPart) -> str:
    if isinstance(part, MediaUrl):
        return "url"
    return "data" if isinstance(part, MediaFile) and part.kind is MediaKind.IMAGE else "embeddings"

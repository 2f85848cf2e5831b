"""From what a request names of media to files, a way for them, and the prompt with their tokens in it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count

from quartet.errors import MediaTooLargeError, UnsupportedFieldError
from quartet.media.items import MediaFile, MediaItem, MediaPart, MediaSize
from quartet.rpc.chunked_starts import MAX_START_MEDIA_BYTES
from quartet.rpc.context import RequestContext
from quartet.rpc.edge import ChatPrompt, GenerateStart
from quartet.text.model_text import MediaText, ModelText
from router.encoding import EncodeOrder, EncodeTools
from router.media_fields import check_items, item_field, named_parts
from router.media_line import MediaOrder, MediaRoom
from router.media_run import MediaPrompt, MediaRequest, MediaTools, RequestMedia
from router.pools import MediaWay, Pool
from router.worker import PoolKey


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
        QueueFullError: too many requests with media wait, or for too long.
        UnsupportedFieldError: the model takes none, or none of a kind.
        WorkerUnavailableError: no worker that takes such media is ready.
    """
    parts, fields = named_parts(request.start)
    if not parts:
        return None, MediaPrompt(token_ids)
    if text.media is None:
        raise UnsupportedFieldError("this model takes no media", field=item_field(fields[0]))
    check_items(request.start, token_ids, text.media, fields)
    order = _media_order(request.start, pool, parts, tools.max_item_bytes)
    room = await tools.line.enter(order) if encodes else tools.line.look_in(order)
    media, way = await _fetch(request, pool, text.media, (parts, fields), token_ids, tools, room)
    sizes = tools.encode.sizes.find(media.items)
    if encodes and way is MediaWay.ENCODE:
        sizes = await _begin(media, _order(request, pool.key, media.items, fields), tools.encode)
        room.sized(sum(size.num_tokens for size in sizes))
    if sizes is None:
        return media, MediaPrompt(token_ids, (), len(media.items) * (max(pool.media.max_tokens, 1) - 1))
    return media, MediaPrompt(*media.lay_out(sizes))


async def _fetch(
    request: MediaRequest,
    pool: Pool,
    model: MediaText,
    named: tuple[Sequence[MediaPart], Sequence[str]],
    token_ids: Sequence[int],
    tools: MediaTools,
    room: MediaRoom,
) -> tuple[RequestMedia, MediaWay]:
    """Get the files that are ``named``, which take up ``room``, and find a way for them. Raises ``ServingError``."""
    parts, fields = named
    began = time.monotonic()
    try:
        items = await tools.fetcher.fetch(parts, fields, model.preprocessing_fingerprint)
        _check_total(items, fields)
        way = pool.media.way(items, fields)
    except BaseException:
        room.close()
        raise
    room.fetched(sum(len(item.file.data) for item in items))
    if way is MediaWay.FILES:
        room.pulled()
    fetch_s, num_choices = time.monotonic() - began, request.start.num_choices
    known = tools.encode.sizes
    media = RequestMedia(items, fields, way, token_ids, model.placeholder_id, fetch_s, room, num_choices, known)
    return media, way


def _media_order(start: GenerateStart, pool: Pool, parts: Sequence[MediaPart], max_item_bytes: int) -> MediaOrder:
    """What the request will take up, as far as that can be said before anything is fetched."""
    return MediaOrder(
        pool=pool.key,
        tenant=start.tenant,
        priority=start.priority,
        num_encode_tokens=len(parts) * max(pool.media.max_tokens, 1) if pool.media.encoded else 0,
        num_bytes=sum(len(part.data) if isinstance(part, MediaFile) else max_item_bytes for part in parts),
    )


def _check_total(items: Sequence[MediaItem], fields: Sequence[str]) -> None:
    """Refuse what no worker takes at once, before it is sent for nothing. Raises ``MediaTooLargeError``."""
    num_bytes = 0
    for item, field_name in zip(items, fields, strict=True):
        num_bytes += len(item.file.data)
        if num_bytes > MAX_START_MEDIA_BYTES:
            message = f"the request's media exceed {MAX_START_MEDIA_BYTES} bytes together"
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
        priority=start.priority,
        session_key=start.session_key,
    )
    return EncodeOrder(
        pool=pool, items=items, fields=fields, context=context, numbers=numbers, deadline=request.deadline
    )

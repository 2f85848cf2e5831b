"""Fetches the media that a request names, checks the files and gives each its media id.

``MediaFetcher`` does this for all requests. ``data:`` URLs are read by ``router.media.data_url``,
``file:`` URLs by ``LocalFiles``, and ``http:`` URLs by ``router.media.http``.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import stat
import struct
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote_to_bytes, urlsplit

from aiohttp.abc import AbstractResolver

from quartet.errors import (
    InvalidMediaError,
    InvalidRequestError,
    MediaFetchError,
    MediaNotAllowedError,
    ServingError,
)
from quartet.media import file_size
from quartet.media.image_file import read_header
from quartet.media.items import MediaFile, MediaItem, MediaKind, MediaPart
from quartet.media.media_id import media_id
from router.fair_queue import FairShare
from router.media.config import MediaConfig
from router.media.data_url import check_data_url, decoding_cost, read_data_url
from router.media.http import HttpFiles
from router.media.url_rules import MAX_URL_LENGTH, UrlRules
from router.thread_queue import IsWanted, ThreadQueue, ThreadQueueConfig

ResultT = TypeVar("ResultT")

# Work on smaller files is done before a thread would have begun.
_MAX_INLINE_SIZE_BYTES = 64 * 1024

# Threads of its own: files that hang must not delay tokenizing. What waits for them is bounded by the memory for files.
_THREADS = ThreadQueueConfig(name="media", num_threads=4)

# What a thread does to read a local file, whose size is not known before.
_UNKNOWN_SIZE_BYTES = 1 << 20

_LONGEST_SCHEME = "https"

# The header of a file with one tensor has about a hundred bytes.
_MAX_HEADER_SIZE_BYTES = 64 * 1024

# A FIFO without a writer must not block the thread; what is opened is checked before it is read.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


class MediaFetcher:
    """Follows clients' URLs; nothing else in the router does. Serves all its requests, on one event loop."""

    def __init__(
        self,
        config: MediaConfig,
        *,
        share: FairShare | None = None,
        resolver: AbstractResolver | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            config: what may be fetched.
            share: orders the tenants' files, by bytes, where threads work on them; it belongs to this fetcher alone.
            resolver: of host names; the system's by default.
            ssl_context: what servers are verified with; the system's authorities by default.
        """
        self._config = config
        self._files = LocalFiles(config.allowed_local_paths, config.max_file_size_bytes)
        self._http = HttpFiles(config, resolver, ssl_context)
        self._slots = FetchSlots(config.max_concurrent_fetches)
        self._threads = ThreadQueue(_THREADS, share or FairShare())

    async def fetch(
        self, parts: Sequence[MediaPart], fields: Sequence[str], fingerprint: bytes, tenant: str = ""
    ) -> tuple[MediaItem, ...]:
        """The items of a request, in order. The first failure cancels the other items.

        Args:
            parts: as the client names them; a URL leads to a picture or to embeddings.
            fields: of each part, its name in the request, for errors.
            fingerprint: of the model's preprocessing.
            tenant: the tenant that the request is accounted to.

        Raises:
            InvalidRequestError: too many parts, as ``check_parts`` says.
            InvalidMediaError: a malformed URL, or a file that is no picture or embeddings.
            MediaFetchError: the file of a URL can't be had, or not in time.
            MediaNotAllowedError: the configuration forbids following a URL.
            MediaTooLargeError: more bytes or pixels than allowed.
        """
        check_parts(parts, fields, self._config)
        try:
            async with asyncio.TaskGroup() as group:
                named = zip(parts, fields, strict=True)
                tasks = [group.create_task(self._item(part, field, fingerprint, tenant)) for part, field in named]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return tuple(task.result() for task in tasks)

    async def close(self) -> None:
        """Close connections and wait for threads; no ``fetch`` may be running."""
        await self._http.close()
        await asyncio.to_thread(self._threads.close)

    async def _item(self, part: MediaPart, field: str, fingerprint: bytes, tenant: str) -> MediaItem:
        try:
            file = part if isinstance(part, MediaFile) else to_file(await self._follow(part.url, tenant))
            check_size(len(file.data), self._config)
            size_bytes = len(file.data)
            return await self._work(tenant, size_bytes, lambda _is_wanted: make_item(file, fingerprint, self._config))
        except ServingError as error:
            # The functions below know the file, but not the client's name for it.
            raise type(error)(error.message, field=field) from error

    async def _follow(self, url: str, tenant: str) -> bytes:
        scheme = scheme_of(url)
        if scheme == "data":
            max_size_bytes = self._config.max_file_size_bytes
            cost = decoding_cost(url)
            return await self._work(tenant, cost, lambda is_wanted: read_data_url(url, max_size_bytes, is_wanted))
        try:
            async with asyncio.timeout(self._config.fetch_timeout_s), self._slots.taken(tenant):
                if scheme == "file":
                    return await self._threads.run(
                        tenant, _UNKNOWN_SIZE_BYTES, lambda _is_wanted: self._files.read(url)
                    )
                return await self._http.read(url)
        except TimeoutError as error:
            raise MediaFetchError(f"the file did not come within {self._config.fetch_timeout_s:g} s") from error

    async def _work(self, tenant: str, size_bytes: int, work: Callable[[IsWanted], ResultT]) -> ResultT:
        if size_bytes <= _MAX_INLINE_SIZE_BYTES:
            return work(lambda: True)
        return await self._threads.run(tenant, size_bytes, work)


class FetchSlots:
    """Slots for fetches of all tenants.

    A tenant takes another slot only while at least as many are free as it has. So one alone gets half of them, several
    get less each, and who comes next finds some (dynamic thresholds: Choudhury and Hahne, IEEE/ACM Transactions on
    Networking, 1998).
    """

    def __init__(self, num_slots: int) -> None:
        """All ``num_slots`` are free."""
        self._num_free = num_slots
        self._num_taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def taken(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a slot of the tenant, and have it during the block."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._grant()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._give_back(tenant)
            self._grant()

    def _give_back(self, tenant: str) -> None:
        self._num_free += 1
        self._num_taken[tenant] -= 1
        if not self._num_taken[tenant]:
            del self._num_taken[tenant]

    def _grant(self) -> None:
        """Give free slots to those that wait, first to the tenant that has the fewest."""
        for tenant, turns in tuple(self._waiting.items()):
            while turns and turns[0].done():  # its task was cancelled
                turns.popleft()
            if not turns:
                del self._waiting[tenant]
        while self._waiting:
            tenant = min(self._waiting, key=lambda name: self._num_taken[name])
            if not self._num_free or self._num_taken[tenant] > self._num_free:
                return
            turns = self._waiting[tenant]
            turn = turns.popleft()
            if not turns:
                del self._waiting[tenant]
            if not turn.done():
                self._num_free -= 1
                self._num_taken[tenant] += 1
                turn.set_result(None)


def check_parts(parts: Sequence[MediaPart], fields: Sequence[str], config: MediaConfig) -> None:
    """Refuse what could never be taken, before it waits, is fetched or decoded; takes no time for long parts.

    Raises:
        InvalidRequestError: too many parts; names the first one beyond the limit.
        InvalidMediaError: a URL that is too long or malformed, or a ``data:`` URL that is not ASCII.
        MediaNotAllowedError: a URL whose scheme or host is not allowed.
        MediaTooLargeError: a part in the request itself has more bytes than a file may have.
    """
    if len(parts) > config.max_items:
        message = f"a request has at most {config.max_items} media items"
        raise InvalidRequestError(message, field=fields[config.max_items])
    for part, field in zip(parts, fields, strict=True):
        try:
            _check_part(part, config)
        except (InvalidRequestError, MediaNotAllowedError) as error:
            # The functions that check know the part, but not the client's name for it.
            raise type(error)(error.message, field=field) from error


def _check_part(part: MediaPart, config: MediaConfig) -> None:
    if isinstance(part, MediaFile):
        check_size(len(part.data), config)
    else:
        _check_url(part.url, config)


def _check_url(url: str, config: MediaConfig) -> None:
    scheme = scheme_of(url)
    if scheme == "data":
        check_data_url(url, config.max_file_size_bytes)
    elif scheme in ("http", "https"):
        _url_rules(config.allowed_schemes, config.allowed_hosts).parse(url)
    elif scheme != "file":
        raise InvalidMediaError("a media URL begins with data:, file:, http: or https:")
    elif len(url) > MAX_URL_LENGTH:
        raise InvalidMediaError(f"the URL is longer than {MAX_URL_LENGTH} characters")
    elif not config.allowed_local_paths:
        raise MediaNotAllowedError("files there are not allowed here")


@lru_cache(maxsize=8)
def _url_rules(schemes: tuple[str, ...], hosts: tuple[str, ...]) -> UrlRules:
    return UrlRules(schemes, hosts)


def scheme_of(url: str) -> str:
    """The scheme of ``url`` in lower case, as ``data``; empty if it is none that media can have."""
    scheme, colon, _ = url[: len(_LONGEST_SCHEME) + 1].partition(":")
    return scheme.lower() if colon else ""


def check_size(size_bytes: int, config: MediaConfig) -> None:
    """Raise ``MediaTooLargeError`` if a file has more bytes than allowed."""
    if size_bytes > config.max_file_size_bytes:
        raise file_size.too_large(config.max_file_size_bytes, size_bytes)


def to_file(data: bytes) -> MediaFile:
    """What a URL led to, by its content: whatever does not begin as a safetensors file counts as a picture.

    Such a file begins with its header's length and the header, which is a JSON object. No picture does: its first bytes
    would be a length of many terabytes.
    """
    is_safetensors = data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= _MAX_HEADER_SIZE_BYTES
    return MediaFile(MediaKind.EMBEDDINGS if is_safetensors else MediaKind.IMAGE, data)


def make_item(file: MediaFile, fingerprint: bytes, config: MediaConfig) -> MediaItem:
    """``file`` with its media id, checked well enough to refuse files that could never be embedded.

    The time that it takes grows with the file's size.

    Raises:
        InvalidMediaError: no picture that can be read, or no safetensors file.
        MediaTooLargeError: more pixels than allowed.
    """
    if file.kind is MediaKind.IMAGE:
        read_header(file.data, max_pixels=config.max_pixels)
    else:
        _check_safetensors(file.data)
    return MediaItem(media_id(file, fingerprint), file)


def _check_safetensors(data: bytes) -> None:
    """The header's length as little-endian u64, the header as JSON, then tensors; the worker checks which ones."""
    if len(data) < 8:
        raise InvalidMediaError("the embeddings are no safetensors file")
    (size_bytes,) = struct.unpack_from("<Q", data)
    if size_bytes > min(len(data) - 8, _MAX_HEADER_SIZE_BYTES):
        raise InvalidMediaError("the embeddings are no safetensors file, or are cut short")
    try:
        header = json.loads(data[8 : 8 + size_bytes])
    except (ValueError, RecursionError) as error:
        raise InvalidMediaError("the embeddings' safetensors header is no JSON") from error
    if not isinstance(header, dict):
        raise InvalidMediaError("the embeddings' safetensors header is no JSON object")


class LocalFiles:
    """``file:`` URLs (RFC 8089): regular files below some directories. Links are followed before the check."""

    def __init__(self, directories: Sequence[Path], max_size_bytes: int) -> None:
        self._directories = [os.fsencode(directory) for directory in directories]
        self._max_size_bytes = max_size_bytes

    def read(self, url: str) -> bytes:
        """The file that ``url`` names; blocks.

        Raises:
            InvalidMediaError: a malformed URL, or no regular file.
            MediaFetchError: not there, or not readable.
            MediaNotAllowedError: outside of the directories, whether the file exists or not.
            MediaTooLargeError: more bytes than allowed.
        """
        path = os.path.realpath(_path_of(url))
        for directory in map(os.path.realpath, self._directories):
            if path != directory and os.path.commonpath((path, directory)) == directory:
                return self._read_below(directory, os.path.relpath(path, directory))
        raise MediaNotAllowedError("files there are not allowed here")

    def _read_below(self, directory: bytes, relative_path: bytes) -> bytes:
        try:
            descriptor = _open_below(directory, relative_path)
            try:
                return self._read_regular(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise MediaFetchError("there is no such file, or it cannot be read") from error

    def _read_regular(self, descriptor: int) -> bytes:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidMediaError("there is something else than a regular file")
        if status.st_size > self._max_size_bytes:
            raise file_size.too_large(self._max_size_bytes)
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(status.st_size + 1)
        if len(data) != status.st_size:
            raise MediaFetchError("the file changed while it was read")
        return data


def _path_of(url: str) -> bytes:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidMediaError("the URL is malformed") from error
    if parts.netloc.lower() not in ("", "localhost"):
        raise MediaNotAllowedError("files of other hosts are not allowed here")
    path = unquote_to_bytes(parts.path)
    if not path.startswith(b"/") or b"\0" in path or "?" in url or "#" in url:
        raise InvalidMediaError("the URL must be file:// with an absolute path, and nothing behind it")
    return path


def _open_below(directory: bytes, relative_path: bytes) -> int:
    """A descriptor of the file; the caller closes it.

    No step follows a link. The checked path has none left in it, so a link on the way was made after the check.
    """
    *parents, name = relative_path.split(b"/")
    parent = os.open(directory, _DIRECTORY_FLAGS)
    try:
        for step in parents:
            child = os.open(step, _DIRECTORY_FLAGS, dir_fd=parent)
            os.close(parent)
            parent = child
        return os.open(name, _FILE_FLAGS, dir_fd=parent)
    finally:
        os.close(parent)

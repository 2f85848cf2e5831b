"""From the media that a request names to files that are checked and have names."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp.abc import AbstractResolver

from quartet.errors import InvalidMediaError, InvalidRequestError, MediaFetchError, ServingError
from quartet.media.items import MediaFile, MediaItem, MediaKind, MediaPart
from router.media.checks import check_size, make_item
from router.media.config import MediaConfig
from router.media.data_url import read_data_url
from router.media.http_files import HttpFiles
from router.media.local_files import LocalFiles

ResultT = TypeVar("ResultT")

# Work on less is done before a thread would have begun.
_MAX_INLINE_SIZE_BYTES = 64 * 1024
# Their own: files that hang must not keep prompts from being tokenized, which is done on the loop's threads.
_NUM_THREADS = 4


class MediaFetcher:
    """The one place that follows a client's URLs. Serves all requests of a router, on one event loop."""

    def __init__(
        self,
        config: MediaConfig,
        *,
        resolver: AbstractResolver | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            config: what may be fetched.
            resolver: of host names; the system's by default.
            ssl_context: what servers are verified with; the system's authorities by default.
        """
        self._config = config
        self._files = LocalFiles(config.allowed_local_paths, config.max_size_bytes)
        self._http = HttpFiles(config, resolver, ssl_context)
        self._fetches = asyncio.Semaphore(config.max_concurrent_fetches)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="media")

    async def fetch(
        self, parts: Sequence[MediaPart], fields: Sequence[str], fingerprint: bytes
    ) -> tuple[MediaItem, ...]:
        """The items of a request, in order. The first failure cancels what is under way for the others.

        Args:
            parts: as the client names them; what a URL leads to is taken as a picture.
            fields: of each part, the name in the request that errors tell.
            fingerprint: of the model's preprocessing.

        Raises:
            InvalidRequestError: too many parts; names the first that is one too many.
            InvalidMediaError: a malformed URL, or a file that is none of media.
            MediaFetchError: a URL gives nothing, or not in time.
            MediaNotAllowedError: the configuration forbids following a URL.
            MediaTooLargeError: more bytes or pixels than allowed.
        """
        if len(parts) > self._config.max_items:
            at_fault = fields[self._config.max_items]
            raise InvalidRequestError(f"a request has at most {self._config.max_items} media items", field=at_fault)
        try:
            async with asyncio.TaskGroup() as group:
                named = zip(parts, fields, strict=True)
                tasks = [group.create_task(self._item(part, field, fingerprint)) for part, field in named]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return tuple(task.result() for task in tasks)

    async def close(self) -> None:
        """Close connections and wait for threads; no ``fetch`` may be running."""
        await self._http.close()
        await asyncio.to_thread(self._threads.shutdown)

    async def _item(self, part: MediaPart, field: str, fingerprint: bytes) -> MediaItem:
        try:
            file = part if isinstance(part, MediaFile) else MediaFile(MediaKind.IMAGE, await self._follow(part.url))
            check_size(len(file.data), self._config)
            return await self._work(len(file.data), lambda: make_item(file, fingerprint, self._config))
        except ServingError as error:
            # Those below know the file, but not how the client calls it.
            raise type(error)(error.message, field=field) from error

    async def _follow(self, url: str) -> bytes:
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return await self._work(len(url), lambda: read_data_url(url, self._config.max_size_bytes))
        if scheme not in ("file", "http", "https"):
            raise InvalidMediaError("a media URL begins with data:, file:, http: or https:")
        try:
            async with asyncio.timeout(self._config.fetch_timeout_s), self._fetches:
                if scheme == "file":
                    return await self._in_thread(lambda: self._files.read(url))
                return await self._http.read(url)
        except TimeoutError as error:
            raise MediaFetchError(f"the file did not come within {self._config.fetch_timeout_s:g} s") from error

    async def _work(self, size_bytes: int, work: Callable[[], ResultT]) -> ResultT:
        return work() if size_bytes <= _MAX_INLINE_SIZE_BYTES else await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

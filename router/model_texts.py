"""The text side of every model served: fetched from a worker once, kept while the pool lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from quartet.errors import ModelFilesError, ServingError, WorkerUnavailableError
from quartet.text.model_files import TEXT_FILE_NAMES
from quartet.text.model_text import ModelText
from router.worker import PoolKey

logger = logging.getLogger(__name__)

#: Bytes of all files of one model together; the largest vocabularies take 40 MB.
MAX_FILES_BYTES = 256 << 20

#: Asks one worker after the other for the files named; raises ``ServingError`` when none gives them.
FetchFiles = Callable[[PoolKey, Collection[str]], Awaitable[Mapping[str, bytes]]]


class FetchedTexts:
    """``ModelTexts`` from workers. Several who wait for one model share one fetch."""

    def __init__(self, fetch: FetchFiles) -> None:
        self._fetch = fetch
        self._texts: dict[PoolKey, ModelText] = {}
        self._fetches: dict[PoolKey, asyncio.Task[ModelText]] = {}

    def known(self, pool: PoolKey) -> ModelText | None:
        """The text side, if it is here already."""
        return self._texts.get(pool)

    async def model_text(self, pool: PoolKey) -> ModelText:
        """The text side of ``pool``.

        Raises:
            WorkerUnavailableError: no worker gave the files.
            ModelFilesError: the files make no sense.
        """
        text = self._texts.get(pool)
        if text is not None:
            return text
        fetch = self._fetches.get(pool)
        if fetch is None:
            fetch = self._fetches[pool] = asyncio.create_task(self._load(pool), name=f"texts-{pool.model_name}")
            fetch.add_done_callback(lambda _fetch: self._fetches.pop(pool, None))
        try:
            # One who leaves must not take the fetch from the others.
            return await asyncio.shield(fetch)
        except asyncio.CancelledError:
            if fetch.cancelled():
                # Its channel was closed under it; to a caller who was not cancelled that is a worker gone.
                raise WorkerUnavailableError("the worker that gave the model's files is gone") from None
            raise

    async def prefetch(self, pool: PoolKey) -> None:
        """Have the text side ready before it is asked for; a failure is logged, and the next to ask tries again."""
        try:
            await self.model_text(pool)
        except ServingError as error:
            logger.warning("no tokenizer for %s yet: %s", pool.model_name, error)

    def keep(self, pools: Collection[PoolKey]) -> None:
        """Forget all pools but these."""
        self._texts = {pool: text for pool, text in self._texts.items() if pool in pools}

    async def close(self) -> None:
        """End what is being fetched."""
        fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    async def _load(self, pool: PoolKey) -> ModelText:
        try:
            files = await self._fetch(pool, TEXT_FILE_NAMES)
            text = await asyncio.to_thread(ModelText.from_files, files)
        except ModelFilesError:
            raise
        except ServingError as error:
            raise WorkerUnavailableError(f"no worker gave the model's files: {error.message}") from error
        self._texts[pool] = text
        return text

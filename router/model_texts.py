"""The text side of every model served: fetched from a worker once, kept while the pool lives."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from quartet.errors import ServingError
from quartet.rpc.text_cache import TextCache
from quartet.text.model_files import TEXT_FILE_NAMES
from quartet.text.model_text import ModelText
from router.worker import PoolKey

logger = logging.getLogger(__name__)

#: Asks one worker after the other for the files named; raises ``ServingError`` when none gives them.
FetchFiles = Callable[[PoolKey, Collection[str]], Awaitable[Mapping[str, bytes]]]


class FetchedTexts:
    """``ModelTexts`` from workers. Several who wait for one model share one fetch."""

    def __init__(self, fetch: FetchFiles) -> None:
        self._fetch = fetch
        self._cache: TextCache[PoolKey] = TextCache()

    def known(self, pool: PoolKey) -> ModelText | None:
        """The text side, if it is here already."""
        return self._cache.known(pool)

    async def model_text(self, pool: PoolKey) -> ModelText:
        """The text side of ``pool``.

        Raises:
            WorkerUnavailableError: no worker gave the files.
            ModelFilesError: the files make no sense.
        """
        return await self._cache.get(pool, lambda: self._fetch(pool, TEXT_FILE_NAMES))

    async def prefetch(self, pool: PoolKey) -> None:
        """Have the text side ready before it is asked for; a failure is logged, and the next to ask tries again."""
        try:
            await self.model_text(pool)
        except ServingError as error:
            logger.warning("no tokenizer for %s yet: %s", pool.model_name, error)

    def keep(self, pools: Collection[PoolKey]) -> None:
        """Forget all pools but these."""
        self._cache.keep(pools)

    async def close(self) -> None:
        """End what is being fetched."""
        await self._cache.close()

"""The text side of every model served: fetched from a worker once, kept while the pool lives."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path

from quartet.errors import ConfigError, ModelFilesError, ServingError
from quartet.rpc.text_cache import TextCache
from quartet.text.chat_template import read_template_file
from quartet.text.model_files import CHAT_TEMPLATE, TEXT_FILE_NAMES
from quartet.text.model_text import ModelText
from router.worker import PoolKey

logger = logging.getLogger(__name__)

#: Asks one worker after the other for the files named; raises ``ServingError`` when none gives them.
FetchFiles = Callable[[PoolKey, Collection[str]], Awaitable[Mapping[str, bytes]]]


def read_chat_template(file: Path) -> str:
    """The Jinja source in ``file``. Raises ``ConfigError``: it can't be read, or is none."""
    try:
        return read_template_file(file)
    except ModelFilesError as error:
        raise ConfigError(f"custom_chat_template: {error}") from error


class FetchedTexts:
    """``ModelTexts`` from workers. Several who wait for one model share one fetch."""

    def __init__(self, fetch: FetchFiles, *, chat_template: str | None = None) -> None:
        """``chat_template`` is the source of every model's; ``None``: each has its own."""
        self._fetch = fetch
        self._chat_template = chat_template
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
        return await self._cache.get(pool, lambda: self._files(pool))

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

    async def _files(self, pool: PoolKey) -> Mapping[str, bytes]:
        files = await self._fetch(pool, TEXT_FILE_NAMES)
        return files if self._chat_template is None else {**files, CHAT_TEMPLATE: self._chat_template.encode()}

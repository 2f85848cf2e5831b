"""The text side of models, fetched from workers once and kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from typing import Generic, TypeAlias, TypeVar

from quartet.errors import ModelFilesError, ServingError, WorkerUnavailableError
from quartet.text.model_text import ModelText

#: Bytes of all files of one model together; the largest vocabularies take 40 MB.
MAX_FILES_BYTES = 256 << 20

#: Gets the files by name; raises ``ServingError`` when no worker gives them.
FetchFiles: TypeAlias = Callable[[], Awaitable[Mapping[str, bytes]]]

KeyT = TypeVar("KeyT", bound=Hashable)


class TextCache(Generic[KeyT]):
    """Text sides by key. Callers that wait for the same model share one fetch."""

    def __init__(self, *, max_texts: int | None = None) -> None:
        """Keep at most ``max_texts``: drop the one fetched first. ``None``: keep them until ``keep`` drops them."""
        self._max_texts = max_texts
        self._texts: dict[KeyT, ModelText] = {}
        self._fetches: dict[KeyT, asyncio.Task[ModelText]] = {}

    def known(self, key: KeyT) -> ModelText | None:
        """The text side, if it is already here."""
        return self._texts.get(key)

    async def get(self, key: KeyT, fetch: FetchFiles) -> ModelText:
        """The text side of ``key``; ``fetch`` gets it unless it is here or on its way.

        Raises:
            WorkerUnavailableError: no worker gave the files.
            ModelFilesError: the files are invalid.
        """
        text = self._texts.get(key)
        if text is not None:
            return text
        task = self._fetches.get(key)
        if task is None:
            task = self._fetches[key] = asyncio.create_task(self._load(key, fetch), name="model texts")
            task.add_done_callback(lambda _task: self._fetches.pop(key, None))
        try:
            # Cancelling one waiter must not cancel the shared fetch.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and not (caller is not None and caller.cancelling()):
                # The fetch's channel was closed. To a caller that was not cancelled, the worker is gone.
                raise WorkerUnavailableError("the worker that gave the model's files is gone") from None
            raise

    def retain(self, keys: Collection[KeyT]) -> None:
        """Forget all but these."""
        self._texts = {key: text for key, text in self._texts.items() if key in keys}

    async def close(self) -> None:
        """End what is being fetched."""
        fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    async def _load(self, key: KeyT, fetch: FetchFiles) -> ModelText:
        try:
            text = await asyncio.to_thread(ModelText.from_files, await fetch())
        except ModelFilesError:
            raise
        except ServingError as error:
            raise WorkerUnavailableError(f"no worker gave the model's files: {error.message}") from error
        while self._max_texts is not None and len(self._texts) >= self._max_texts:
            del self._texts[next(iter(self._texts))]
        self._texts[key] = text
        return text

"""What all direct requests of a client share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quartet.client.routers import Routers
from quartet.client.workers import DecodeWorkers
from quartet.errors import ModelFilesError, ServingError, WorkerUnavailableError
from quartet.rpc.text_cache import TextCache
from quartet.rpc.tls import TlsConfig
from quartet.text.model_text import ModelText

#: Models whose text side is kept; a large one takes some 100 MB.
_MAX_TEXTS = 8


class DirectTools:
    """Routers to place requests, workers to stream from, and the text sides of their models."""

    def __init__(self, routers: Routers, tls: TlsConfig | None) -> None:
        """Dial workers with ``tls``; ``routers`` stay the caller's."""
        self.routers = routers
        self.workers = DecodeWorkers(tls)
        self._texts: TextCache[str] = TextCache(max_texts=_MAX_TEXTS)

    def known_text(self, fingerprint: str) -> ModelText | None:
        """The text side of the model, if it is here already."""
        return self._texts.known(fingerprint)

    async def model_text(self, fingerprint: str, addresses: Sequence[str]) -> ModelText:
        """The text side of the model, from the first worker at ``addresses`` that gives it, unless it is here.

        Raises:
            WorkerUnavailableError: none does.
            ModelFilesError: the files make no sense.
        """
        return await self._texts.get(fingerprint, lambda: self._fetch(fingerprint, addresses))

    async def close(self) -> None:
        """End what goes on at workers."""
        await self._texts.close()
        await self.workers.close()

    async def _fetch(self, fingerprint: str, addresses: Sequence[str]) -> Mapping[str, bytes]:
        failure: ServingError = WorkerUnavailableError("there is no worker to ask")
        for address in dict.fromkeys(addresses):
            try:
                with self.workers.use(address) as worker:
                    return await worker.text_files(fingerprint)
            except ModelFilesError:
                raise
            except ServingError as error:
                failure = error
        raise failure

"""The same client for code without an event loop: it runs a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Self, TypeVar, Unpack

from quartet.api.fleet import Explanation, Model, WorkerStatus
from quartet.api.request import AnswerPart
from quartet.client.client import QuartetClient
from quartet.client.discovery import DiscoverySource, find_routers
from quartet.client.request import GenerateFields, RequestPath
from quartet.client.resume import RESUME_TIMEOUT_S
from quartet.client.routers import FindRouters
from quartet.client.stream import Completion, GenerateStream
from quartet.rpc.channels import TlsConfig

_CLOSE_TIMEOUT_S = 5.0
# If a signal comes just before CPython begins to wait, CPython notices it only after the wait.
_SIGNAL_INTERVAL_S = 0.25

ResultT = TypeVar("ResultT")


class SyncClient:
    """``QuartetClient`` with blocking methods; several threads may use it at once. Close it, or use ``with``."""

    def __init__(
        self,
        target: str | Sequence[str],
        *,
        tls: TlsConfig | None = None,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        find: FindRouters | None = None,
    ) -> None:
        """As ``QuartetClient``. Raises ``ConfigError``."""
        self._loop = _LoopThread()
        try:
            self._client = self._loop.run(_make_client(target, tls, resume_timeout_s, find))
        except BaseException:
            self._loop.close()
            raise

    @classmethod
    def discover(
        cls,
        source: DiscoverySource,
        *,
        namespace: str = "default",
        tls: TlsConfig | None = None,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
    ) -> Self:
        """A client of the routers that discovery lists; see ``QuartetClient.discover``."""
        find = partial(find_routers, source, namespace=namespace)
        loop = _LoopThread()
        try:
            addresses = loop.run(find())
        finally:
            loop.close()
        return cls(addresses, tls=tls, resume_timeout_s=resume_timeout_s, find=find)

    def generate(
        self,
        prompt: str | None = None,
        *,
        path: RequestPath | str = RequestPath.GENERATE,
        traceparent: str = "",
        **fields: Unpack[GenerateFields],
    ) -> SyncGenerateStream:
        """Stream the answer to ``prompt``, ``messages`` or ``token_ids``; see ``QuartetClient.generate``."""
        return SyncGenerateStream(
            self._client.generate(prompt, path=path, traceparent=traceparent, **fields), self._loop
        )

    def complete(
        self,
        prompt: str | None = None,
        *,
        path: RequestPath | str = RequestPath.GENERATE,
        traceparent: str = "",
        **fields: Unpack[GenerateFields],
    ) -> Completion:
        """The whole answer; see ``QuartetClient.complete``."""
        return self._loop.run(self._client.complete(prompt, path=path, traceparent=traceparent, **fields))

    def explain(self, prompt: str | None = None, **fields: Unpack[GenerateFields]) -> Explanation:
        """Where such a request would go now, and why; see ``QuartetClient.explain``."""
        return self._loop.run(self._client.explain(prompt, **fields))

    def list_workers(self, model: str = "") -> list[WorkerStatus]:
        """The workers that the router knows, by role and id."""
        return self._loop.run(self._client.list_workers(model))

    def list_models(self) -> list[Model]:
        """All models that the router serves, by name."""
        return self._loop.run(self._client.list_models())

    def get_model(self, name: str) -> Model:
        """One model. Raises ``ModelNotFoundError``."""
        return self._loop.run(self._client.get_model(name))

    def close(self) -> None:
        """End all requests, connections and the thread. May be called twice."""
        if self._loop.is_running:
            self._loop.run(self._client.close())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SyncGenerateStream:
    """Iterate it once, from one thread; see ``GenerateStream``. Dropping it cancels the request."""

    def __init__(self, stream: GenerateStream, loop: _LoopThread) -> None:
        """``SyncClient.generate`` makes it."""
        self._stream = stream
        self._loop = loop

    def __iter__(self) -> Iterator[AnswerPart]:
        try:
            while (part := self._loop.run(anext(self._stream, None))) is not None:
                yield part
        finally:
            self.close()

    @property
    def router(self) -> str | None:
        """``host:port`` of the router that took the request, or went on with it; ``None`` until one has."""
        return self._stream.router

    @property
    def lost_routers(self) -> Sequence[str]:
        """``host:port`` of the routers that were lost after they had begun the answer, in that order."""
        return self._stream.lost_routers

    def cancel(self) -> None:
        """Ask for an early end. Each running choice still gets its ``ChoiceFinished``, so continue to iterate."""
        self._loop.run(self._stream.cancel())

    def close(self) -> None:
        """Drop the request, whatever its state. May be called twice."""
        if self._loop.is_running:
            self._loop.run(self._stream.aclose())


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quartet-client", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of ``work``. If the caller is interrupted (Ctrl-C), cancel ``work`` and wait for it."""
        # Not `run_coroutine_threadsafe`: its future ends when cancelled, while the work still unwinds.
        ended: concurrent.futures.Future[ResultT] = concurrent.futures.Future()
        tasks: list[asyncio.Task[ResultT]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(partial(_set_result, ended))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        try:
            self._loop.call_soon_threadsafe(begin)
            while not ended.done():
                concurrent.futures.wait([ended], _SIGNAL_INTERVAL_S)
            return ended.result()
        except BaseException:
            if not ended.done():
                self._loop.call_soon_threadsafe(cancel)
                concurrent.futures.wait([ended], _CLOSE_TIMEOUT_S)
            raise

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_asyncgens(), self._loop).result(_CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._loop.close()


def _set_result(ended: concurrent.futures.Future[ResultT], task: asyncio.Task[ResultT]) -> None:
    if task.cancelled():
        ended.set_exception(concurrent.futures.CancelledError())
    elif error := task.exception():
        ended.set_exception(error)
    else:
        ended.set_result(task.result())


async def _make_client(
    target: str | Sequence[str], tls: TlsConfig | None, resume_timeout_s: float, find: FindRouters | None
) -> QuartetClient:
    # gRPC binds a channel to the loop on which it is made.
    return QuartetClient(target, tls=tls, resume_timeout_s=resume_timeout_s, find=find)

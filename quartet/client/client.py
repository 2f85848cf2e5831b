"""The asynchronous client of a Quartet router."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Self, Unpack

import grpc

from quartet.api.convert.fleet import (
    from_explain_response,
    from_fleet_totals,
    from_model,
    from_worker_status,
    to_explain_request,
)
from quartet.api.fleet import Explanation, FleetState, Model, WorkerStatus
from quartet.api.request import GenerateStart
from quartet.client.discovery import DiscoverySource, find_routers
from quartet.client.generate import GenerateRequest
from quartet.client.request import GenerateFields, RequestPath, check_size, check_traceparent, make_start, to_path
from quartet.client.resume import MAX_RESUME_TIMEOUT_S, RESUME_TIMEOUT_S
from quartet.client.routers import FindRouters, Router, Routers
from quartet.client.session import SessionRequest
from quartet.client.stream import ClientRequest, Completion, CompletionBuilder, GenerateStream
from quartet.errors import ConfigError
from quartet.rpc.channels import TlsConfig, create_channel
from quartet.streams.worker_client import DrainOutcome, WorkerClient
from quartet.v1 import router_pb2

if TYPE_CHECKING:
    from quartet.client.direct import DirectTools

#: Seconds for calls that run no model.
_LOOK_UP_TIMEOUT_S = 4.0
#: Seconds for calls that tokenize a prompt, for which a router may have to fetch the tokenizer first.
_EXPLAIN_TIMEOUT_S = 30.0


class QuartetClient:
    """Talks to one router, or to several equal ones: if one can't be reached, the client tries the next.

    If a router is lost while it answers, another one goes on with the answer, or the same one once it is back.

    ::

        async with QuartetClient("127.0.0.1:50050") as client:
            async for part in client.generate("Once upon a time", sampling=Sampling(max_tokens=32)):
                if isinstance(part, Delta):
                    print(part.text, end="", flush=True)

    All methods raise ``quartet.errors.ServingError``s; make it and use it on one event loop.
    """

    def __init__(
        self,
        target: str | Sequence[str],
        *,
        tls: TlsConfig | None = None,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        find: FindRouters | None = None,
    ) -> None:
        """Dial nothing yet.

        Args:
            target: router addresses, ``host:port``, in the order to try.
            tls: certificates; ``None``: no TLS.
            resume_timeout_s: seconds for which an answer whose router was lost waits for one that goes on with it; 0:
                it fails; at most 3,600.
            find: asked for addresses when no known router answers; see ``discover``.

        Raises:
            ConfigError: an address or a time is malformed, or a file of ``tls`` can't be used.
        """
        if not 0 <= resume_timeout_s <= MAX_RESUME_TIMEOUT_S:  # this also refuses NaN
            raise ConfigError(f"resume_timeout_s is from 0 to {MAX_RESUME_TIMEOUT_S:g}, not {resume_timeout_s}")
        self._routers = Routers([target] if isinstance(target, str) else target, tls, find)
        self._tls = tls
        self._resume_timeout_s = resume_timeout_s
        self._direct: DirectTools | None = None

    @classmethod
    async def discover(
        cls,
        source: DiscoverySource,
        *,
        namespace: str = "default",
        tls: TlsConfig | None = None,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
    ) -> Self:
        """A client of the routers that discovery lists, tried in random order.

        ``source``: addresses of etcd, ``host:port``, or a ``quartet.discovery.create.DiscoveryConfig``, which has its
        own namespace. Discovery is asked now, and again whenever none of the known routers answers.

        Raises:
            DiscoveryError: the registry can't be reached.
            RouterUnavailableError: no router is announced.
            ConfigError: as the constructor.
        """
        find = partial(find_routers, source, namespace=namespace)
        return cls(await find(), tls=tls, resume_timeout_s=resume_timeout_s, find=find)

    @property
    def router_addresses(self) -> list[str]:
        """``host:port`` of the routers that it knows now, the preferred one first."""
        return [router.address for router in self._routers.in_order()]

    def generate(
        self,
        prompt: str | None = None,
        *,
        path: RequestPath | str = RequestPath.GENERATE,
        traceparent: str = "",
        **fields: Unpack[GenerateFields],
    ) -> GenerateStream:
        """Stream the answer to ``prompt``, ``messages`` or ``token_ids``; arguments are ``GenerateFields``.

        If its router is lost, the answer pauses and goes on with the same tokens at another one.

        ``path``: ``generate``, ``session`` or ``direct``. The answer is the same on all three. The last two carry many
        requests on one stream, so a request ends if its reader lets 65,536 tokens and characters wait.
        ``traceparent``: W3C trace context of the caller's span, for routers and workers that trace; empty: none.

        Raises:
            InvalidRequestError: no router could take the request; names the field. Raised before anything is sent.
        """
        return GenerateStream(
            self._request(to_path(path), make_start(prompt, **fields), check_traceparent(traceparent))
        )

    async def complete(
        self,
        prompt: str | None = None,
        *,
        path: RequestPath | str = RequestPath.GENERATE,
        traceparent: str = "",
        **fields: Unpack[GenerateFields],
    ) -> Completion:
        """The whole answer; arguments and errors are those of ``generate``."""
        builder = CompletionBuilder()
        async with self.generate(prompt, path=path, traceparent=traceparent, **fields) as stream:
            async for part in stream:
                builder.add(part)
        return builder.build(stream.router)

    async def explain(self, prompt: str | None = None, **fields: Unpack[GenerateFields]) -> Explanation:
        """Where such a request would go now, and why; runs nothing. Arguments and errors are those of ``generate``."""
        start = make_start(prompt, **fields)
        request = to_explain_request(start)
        check_size(start, request)
        call = self._routers.call(lambda router: router.stub.Explain(request, timeout=_EXPLAIN_TIMEOUT_S))
        return from_explain_response(await call)

    async def list_workers(self, model: str = "") -> list[WorkerStatus]:
        """The workers that the router knows, by role and id; with ``model``, only those of that model."""
        request = router_pb2.ListWorkersRequest(model=model)
        call = self._routers.call(lambda router: router.stub.ListWorkers(request, timeout=_LOOK_UP_TIMEOUT_S))
        return [from_worker_status(worker) for worker in (await call).workers]

    async def watch_workers(self, model: str = "") -> AsyncIterator[list[WorkerStatus]]:
        """The workers by role and id, now and after each change, from one router until it goes away."""
        async with aclosing(self._watch(router_pb2.WatchWorkersRequest(model=model))) as states:
            async for state in states:
                yield list(state.workers)

    async def watch_fleet(self, model: str = "") -> AsyncGenerator[FleetState, None]:
        """The workers, and what one router has counted, of all models: once a second at least, until it goes away."""
        request = router_pb2.WatchWorkersRequest(model=model, wants_totals=True)
        async with aclosing(self._watch(request)) as states:
            async for state in states:
                yield state

    async def drain_worker(self, address: str) -> DrainOutcome:
        """Have the worker at ``address``, ``host:port``, finish what it runs and take nothing new; it leaves discovery.

        Returns once nothing runs there: after the worker's ``drain_timeout_s`` at most. Its process stays. Where there
        is TLS, this is for operators.
        """
        channel = create_channel(address, self._tls)
        try:
            return await WorkerClient(channel).drain()
        finally:
            await channel.close()

    async def list_models(self) -> list[Model]:
        """All models that the router serves, by name."""
        return await self._get_models("")

    async def get_model(self, name: str) -> Model:
        """One model. Raises ``ModelNotFoundError``."""
        return (await self._get_models(name))[0]

    async def close(self) -> None:
        """End all requests and connections."""
        if self._direct is not None:
            await self._direct.close()
        await self._routers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _request(self, path: RequestPath, start: GenerateStart, traceparent: str) -> ClientRequest:
        match path:
            case RequestPath.GENERATE:
                return GenerateRequest(self._routers, start, traceparent, resume_timeout_s=self._resume_timeout_s)
            case RequestPath.SESSION:
                return SessionRequest(self._routers, start, traceparent, resume_timeout_s=self._resume_timeout_s)
            case RequestPath.DIRECT:
                # Imported late: it imports tokenizers and chat templates, which take as long as the rest of a client.
                from quartet.client.direct import DirectRequest, DirectTools

                if self._direct is None:
                    self._direct = DirectTools(self._routers, self._tls, resume_timeout_s=self._resume_timeout_s)
                return DirectRequest(self._direct, start, traceparent)

    async def _watch(self, request: router_pb2.WatchWorkersRequest) -> AsyncGenerator[FleetState, None]:
        router = await self._routers.call(_reachable)
        call = router.stub.WatchWorkers(request)
        workers: dict[str, WorkerStatus] = {}
        is_begun = False
        try:
            async for message in call:
                is_begun = True
                for worker_id in message.removed_worker_ids:
                    workers.pop(worker_id, None)
                workers.update((entry.record.worker_id, from_worker_status(entry)) for entry in message.updated)
                yield FleetState(
                    workers=tuple(sorted(workers.values(), key=lambda worker: worker.record.key)),
                    totals=from_fleet_totals(message.totals) if message.HasField("totals") else None,
                )
        except grpc.aio.AioRpcError as error:
            raise router.error(error, is_begun=is_begun) from error
        finally:
            call.cancel()

    async def _get_models(self, name: str) -> list[Model]:
        request = router_pb2.GetModelRequest(name=name)
        call = self._routers.call(lambda router: router.stub.GetModel(request, timeout=_LOOK_UP_TIMEOUT_S))
        return [from_model(model) for model in (await call).models]


async def _reachable(router: Router) -> Router:
    return router

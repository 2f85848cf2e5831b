"""The HTTP server: where it listens, who may call what, and what serves each path."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any, TypeAlias
from urllib.parse import unquote

from aiohttp import web
from prometheus_client import CollectorRegistry

from quartet.api.anthropic.requests import read_messages
from quartet.api.openai.requests import Caller, read_chat, read_completion
from quartet.api.responses.requests import read_response
from quartet.errors import ConfigError, DrainingError, QueueFullError, RateLimitedError, UnauthenticatedError
from quartet.rpc.refusal_pace import RefusalPace
from quartet.rpc.server import raise_file_limit
from quartet.telemetry.http import Exposition
from quartet.telemetry.metrics import ReloadedFile, ReloadMetrics
from quartet.telemetry.targets import TARGETS_PATH, ListTargets, is_near, render_targets
from quartet.telemetry.tracing import valid_traceparent
from router.client_address import client_address
from router.generate import Pipeline
from router.http.body import Bodies
from router.http.completions import RUNS, Completions
from router.http.config import HttpConfig
from router.http.connections import MAX_HEAD_BYTES, Connections
from router.http.dialects import COMPLETIONS, MESSAGES, RESPONSES
from router.http.errors import ErrorShape, HttpError, error_response
from router.http.events import SERVER_NAME
from router.http.keys import ApiKeys, Certificates
from router.http.models import count_tokens, detokenize, health, list_models, show_model, tokenize_text
from router.page.page import Page
from router.request_log import log_refused

logger = logging.getLogger(__name__)

_Handler: TypeAlias = Callable[[web.BaseRequest, Caller], Awaitable[web.StreamResponse]]

_BACKLOG = 1024
_CERTIFICATE_POLL_S = 5.0
_DRAINING_RETRY_DELAY_S = 1.0
_MAX_REQUEST_ID_LENGTH = 128
# What a request takes of the event loop that is refused for its client's fault. A refusal for lack of room is none.
_REFUSAL_S = 0.00025
_NO_FAULT = (429, 499)
_MODEL_PATH = "/v1/models/"
# These need no key: probes have none. All who ask them share one turn, as if they were a tenant.
_OPEN_PATHS = frozenset({"/health", "/version"})
_OPEN_TENANT = "/"
_VERSION = version("quartet")  # which reads files
# Known paths of other APIs, or what they begin with, for which there is nothing here.
_NOT_OFFERED: Mapping[str, str] = {
    "/v1/embeddings": "this server gives no embeddings: its models complete texts and chats",
    "/v1/responses/": "this server keeps no answers, and counts tokens by /tokenize and /v1/messages/count_tokens",
    "/v1/messages/": "this server keeps no batches",
}


class HttpServer:
    """OpenAI's and Anthropic's APIs over a pipeline, from ``start`` to ``close``."""

    def __init__(
        self,
        config: HttpConfig,
        pipeline: Pipeline,
        registry: CollectorRegistry,
        *,
        namespace: str,
        stall_timeout_s: float,
        is_ready: Callable[[], bool],
        targets: ListTargets = lambda _is_near: (),
        reloads: ReloadMetrics | None = None,
    ) -> None:
        """Open no port before ``start``.

        Args:
            config: where it listens, and its limits.
            pipeline: runs the requests.
            registry: what /metrics shows.
            namespace: the deployment, for /health.
            stall_timeout_s: a client that takes nothing for this long loses its connection.
            is_ready: whether the router is ready, for /health.
            targets: the processes that Prometheus is told of.
            reloads: counts changes of files; ``None``: its own, which nothing shows.

        Raises:
            ConfigError: a file that the configuration names can't be used.
        """
        self._config = config
        self._context = pipeline.context
        self._exposition = Exposition(registry)
        self._namespace = namespace
        self._is_ready = is_ready
        self._targets = targets
        counter = (reloads or ReloadMetrics(CollectorRegistry())).counter
        self._keys = self._certificates = None
        if config.keys_file is not None:
            self._keys = ApiKeys(config.keys_file, count=counter(ReloadedFile.KEYS))
        if config.tls is not None:
            self._certificates = Certificates(config.tls, count=counter(ReloadedFile.HTTP_CERTIFICATE))
        self._connections = Connections(config, stall_timeout_s=stall_timeout_s)
        self._bodies = Bodies(config, self._context.intake.enter)
        # Bodies are read and parsed piece by piece, so refusals may take more of the event loop than by gRPC.
        self._refusals = RefusalPace(share=1 / 50, free_s=1.0, max_wait_s=5.0)
        self._num_of_tenant: Counter[str] = Counter()
        self._num_running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_draining = False
        self._listener: asyncio.Server | None = None
        completions = Completions(pipeline, self._bodies, self._connections, config)
        self._page = Page(
            pipeline,
            self._bodies,
            self._connections,
            namespace=namespace,
            has_keys=self._keys is not None,
            is_ready=is_ready,
            sees_fleet=self._sees_fleet,
        )
        self._open_paths = _OPEN_PATHS | self._page.open_paths
        generating: dict[str, tuple[str, _Handler]] = {
            "/v1/chat/completions": ("POST", partial(completions.serve, read_chat, COMPLETIONS)),
            "/v1/completions": ("POST", partial(completions.serve, read_completion, COMPLETIONS)),
            "/v1/responses": ("POST", partial(completions.serve, read_response, RESPONSES)),
            "/v1/messages": ("POST", partial(completions.serve, read_messages, MESSAGES)),
        }
        self._generating_paths = frozenset(generating)
        self._routes: dict[str, tuple[str, _Handler]] = {
            **self._page.routes,
            **generating,
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/health": ("GET", self._health),
            "/version": ("GET", self._version),
            "/metrics": ("GET", self._metrics),
            TARGETS_PATH: ("GET", self._list_targets),
        }

    async def start(self) -> int:
        """Listen, and return the port. Raises ``ConfigError``: the address can't be listened on."""
        config = self._config
        raise_file_limit()
        server = web.Server(self._serve, handler_cancellation=True)  # a client that leaves cancels its handler
        loop = asyncio.get_running_loop()
        tls = None if self._certificates is None else self._certificates.context
        try:
            self._listener = await loop.create_server(
                self._connections.protocol(server),
                config.host.removeprefix("[").removesuffix("]"),
                config.port,
                ssl=tls,
                backlog=_BACKLOG,
                reuse_address=True,
                ssl_handshake_timeout=None if tls is None else config.idle_timeout_s / 2,
            )
        except OSError as error:
            where = f"{config.host}:{config.port}"
            raise ConfigError(f"http.port: cannot listen on {where}: {error.strerror or error}") from error
        return int(self._listener.sockets[0].getsockname()[1])

    def certificate_end(self) -> float | None:
        """Unix time at which the certificate ends that new connections get; ``None``: there is no TLS."""
        return None if self._certificates is None else self._certificates.end

    async def tend(self) -> None:
        """Look after connections and certificates until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._connections.poll())
            if self._certificates is not None:
                tasks.create_task(self._refresh(self._certificates))

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running ones end for ``grace_s``, and cut the rest. May be called again."""
        self._is_draining = True
        self._page.close()
        if self._listener is None:
            return
        self._listener.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._is_idle.wait()
        self._connections.cut()
        with suppress(TimeoutError):  # those that were cut clean up after themselves
            async with asyncio.timeout(grace_s):
                await self._is_idle.wait()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        response: web.StreamResponse
        # `request.path` would be decoded, which no path here needs.
        path, payer, caller = request.rel_url.raw_path, client_address(request.transport), Caller()
        try:
            if sum([len(name) + len(value) for name, value in request.raw_headers]) > MAX_HEAD_BYTES:
                raise HttpError(431, f"a head may have {MAX_HEAD_BYTES} bytes")
            try:
                caller = self._caller(request, path)
                payer = caller.payer
            finally:  # whoever shows no key that counts pays as an address, and others of it with a key don't
                if self._refusals:
                    await self._refusals.wait_to_read(payer)
            response = await self._answer(request, path, caller)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - the request ends here; `error_response` logs our bugs
            response = self._refuse(error, path, caller)
            if 400 <= response.status < 500 and response.status not in _NO_FAULT:
                await self._refusals.wait(payer, error, request.content_length or 0, _REFUSAL_S)
        if not response.prepared:
            response.headers["Server"] = SERVER_NAME
            if request_id := _printable(request.headers.get("X-Request-Id", "")):
                response.headers["X-Request-Id"] = request_id
            if traceparent := valid_traceparent(request.headers.get("traceparent", "")):
                response.headers["traceparent"] = traceparent
            if self._is_draining or response.status == 431:
                response.force_close()
        return response

    def _refuse(self, error: Exception, path: str, caller: Caller) -> web.Response:
        response = error_response(error, ErrorShape.of_path(path))
        if isinstance(error, RateLimitedError):
            response.headers.update(self._context.limits.headers(caller.tenant, caller.key))
        return response

    async def _answer(self, request: web.BaseRequest, path: str, caller: Caller) -> web.StreamResponse:
        handler, enter = self._handler(request, path), self._context.intake.enter
        if path in self._open_paths:
            await enter(_OPEN_TENANT, 0)
            return await handler(request, caller)
        if path not in self._generating_paths:
            return await self._run_counted(request, handler, caller)
        try:
            return await self._run_counted(request, handler, caller)
        except Exception as error:
            if RUNS not in request and not isinstance(error, ConnectionError):
                log_refused(caller, error, self._context.metrics)
            raise

    async def _run_counted(self, request: web.BaseRequest, handler: _Handler, caller: Caller) -> web.StreamResponse:
        """Run ``handler`` if its tenant may have one more request. Raises ``DrainingError`` and ``QueueFullError``."""
        if self._is_draining:
            raise DrainingError("the router is going away", retry_delay_s=_DRAINING_RETRY_DELAY_S)
        self._count(caller.tenant)
        try:
            if request.method != "POST":  # else the handler pays for what the body asks for
                await self._context.intake.enter(caller.tenant, 0)
            return await handler(request, caller)
        finally:
            self._num_running -= 1
            self._num_of_tenant[caller.tenant] -= 1
            if not self._num_of_tenant[caller.tenant]:
                del self._num_of_tenant[caller.tenant]
            if not self._num_running:
                self._is_idle.set()

    def _handler(self, request: web.BaseRequest, path: str) -> _Handler:
        method, handler = self._routes.get(path, ("", None))
        if handler is None and path.startswith(_MODEL_PATH) and path != _MODEL_PATH:
            method, handler = "GET", self._model
        if handler is None:
            known = [why for begin, why in _NOT_OFFERED.items() if path.startswith(begin)]
            raise HttpError(404, known[0] if known else "this server has no such path; docs/http.md lists all")
        if request.method != method and (request.method, method) != ("HEAD", "GET"):
            raise HttpError(405, f"{path} takes {method}", headers={"Allow": method})
        return handler

    def _caller(self, request: web.BaseRequest, path: str) -> Caller:
        headers, key = request.headers, None
        if self._keys is not None:
            try:
                key = self._keys.find(_authorization(headers))
            except UnauthenticatedError as error:
                if path not in self._open_paths:
                    raise HttpError(401, error.message, headers={"WWW-Authenticate": "Bearer"}) from error
        request_id = headers.get("X-Request-Id", "")
        if request_id and (_printable(request_id) != request_id or len(request_id) > _MAX_REQUEST_ID_LENGTH):
            message = f"X-Request-Id: must be at most {_MAX_REQUEST_ID_LENGTH} printable ASCII characters"
            raise HttpError(400, message, field="X-Request-Id")
        return Caller(
            tenant="" if key is None else key.tenant,
            key=key,
            address=client_address(request.transport),
            client_request_id=request_id,
            session_key=_printable(headers.get("X-Session-Id", "")),
            traceparent=valid_traceparent(headers.get("traceparent", "")),
        )

    def _count(self, tenant: str) -> None:
        """Count a request that begins. Raises ``QueueFullError``: its tenant has as many as it may have."""
        limit = self._config.max_requests_of_tenant
        if tenant and self._num_of_tenant[tenant] >= limit:
            raise QueueFullError(
                f"a tenant may have {limit} requests at a time (http.max_requests_of_tenant)", retry_delay_s=1.0
            )
        self._num_of_tenant[tenant] += 1
        self._num_running += 1
        self._is_idle.clear()

    async def _refresh(self, certificates: Certificates) -> None:
        while True:
            await asyncio.sleep(_CERTIFICATE_POLL_S)
            certificates.refresh()

    async def _models(self, _request: web.BaseRequest, _caller: Caller) -> web.Response:
        return _json(list_models(self._context.table))

    async def _model(self, request: web.BaseRequest, _caller: Caller) -> web.Response:
        return _json(show_model(self._context, unquote(request.rel_url.raw_path.removeprefix(_MODEL_PATH))))

    async def _tokenize(self, request: web.BaseRequest, caller: Caller) -> web.Response:
        async with self._bodies.read_json(request, caller) as body:
            return _json(await tokenize_text(self._context, self._bodies, body, caller))

    async def _count_tokens(self, request: web.BaseRequest, caller: Caller) -> web.Response:
        async with self._bodies.read_json(request, caller) as body:
            return _json(await count_tokens(self._context, self._bodies, body, caller))

    async def _detokenize(self, request: web.BaseRequest, caller: Caller) -> web.Response:
        async with self._bodies.read_json(request, caller) as body:
            return _json(await detokenize(self._context, body, caller))

    def _is_operator(self, caller: Caller) -> bool:
        return self._keys is None or caller.tenant in self._config.operators  # without keys all tenants are one

    def _sees_fleet(self, request: web.BaseRequest) -> bool:
        try:
            return self._is_operator(self._caller(request, request.rel_url.raw_path))
        except HttpError:
            return False

    async def _health(self, _request: web.BaseRequest, caller: Caller) -> web.Response:
        is_ready = self._is_ready() and not self._is_draining
        namespace = self._namespace if self._is_operator(caller) else None
        return _json(health(self._context.table, namespace, is_ready=is_ready), status=200 if is_ready else 503)

    async def _version(self, _request: web.BaseRequest, _caller: Caller) -> web.Response:
        return _json({"version": _VERSION})

    async def _metrics(self, request: web.BaseRequest, caller: Caller) -> web.Response:
        self._check_operator(caller, "/metrics tells of all tenants' requests")
        body, content_type = await asyncio.to_thread(self._exposition.get, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _list_targets(self, request: web.BaseRequest, caller: Caller) -> web.Response:
        self._check_operator(caller, f"{TARGETS_PATH} tells of the fleet")
        transport = request.transport  # None: the client has gone
        ends = () if transport is None else [transport.get_extra_info(name)[0] for name in ("peername", "sockname")]
        asks_near = bool(ends) and is_near(*ends)
        return _json(await asyncio.to_thread(lambda: render_targets(self._targets(asks_near))))

    def _check_operator(self, caller: Caller, why: str) -> None:
        if not self._is_operator(caller):
            raise HttpError(403, f"{why}: http.operators names who may read it here")


def _json(value: dict[str, Any] | bytes, status: int = 200) -> web.Response:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return web.Response(status=status, body=body, content_type="application/json")


def _authorization(headers: Mapping[str, str]) -> str:
    """What says whose a request is: Anthropic's clients may bring the key in a header of its own."""
    key = headers.get("x-api-key", "")
    return headers.get("Authorization", "") or (f"Bearer {key}" if key else "")


def _printable(text: str) -> str:
    return text if text.isascii() and text.isprintable() else ""

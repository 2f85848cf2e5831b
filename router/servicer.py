"""RouterService: the service that clients call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import grpc

from quartet.api.answer import AnswerSink
from quartet.api.convert.answer import from_generate_request, from_place_request, to_place_response
from quartet.api.convert.fleet import (
    from_explain_request,
    to_explain_response,
    to_fleet_totals,
    to_model,
    to_worker_status,
)
from quartet.api.convert.prefill import from_prefill_for_request, to_prefill_for_response
from quartet.api.fleet import FleetTotals, Model, WorkerStatus
from quartet.api.generate_answer import GenerateAnswer
from quartet.api.request import AskedStart, Relayed, SessionLimits, SessionStart
from quartet.api.session_server import SessionStream
from quartet.errors import DrainingError, PermissionDeniedError, ProtocolError, UnimplementedError
from quartet.rpc.audience import Identity, IdentityKind, caller_identity
from quartet.rpc.errors import public_error
from quartet.rpc.open_calls import OpenCalls
from quartet.rpc.server import Service, StalledCalls
from quartet.streams.read_pace import ReadPace
from quartet.telemetry.tracing import valid_traceparent
from quartet.v1 import router_pb2 as pb
from quartet.v1 import router_pb2_grpc
from router.config import CallLimits
from router.fleet import FetchedTexts
from router.generate import GenerateRun, Pipeline
from router.open_sessions import OpenSessions
from router.prefill_for import PrefillFor
from router.readiness import model_error
from router.tenants import TenantNames
from router.workers import Pool, WorkerTable

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

#: Fields of requests that hold text as long as a file: a `data:` URL.
FILE_FIELDS = frozenset({"quartet.v1.MediaPart.url"})

#: Fields of requests that hold packed token ids: those of prefills for other namespaces.
NUMBER_FIELDS = frozenset({"quartet.v1.Generation.prompt_token_ids", "quartet.v1.Generation.generated_token_ids"})

# Watchers get changes at most this often.
_WATCH_INTERVAL_S = 0.25
# Those that want totals get them at least this often.
_TOTALS_INTERVAL_S = 0.75
# Each works through all workers at each change, and operators need few.
_MAX_WATCHES, _MAX_WATCHES_OF_CONNECTION = 256, 16
# Long enough for a client to try another router, or for the next one at this address to start.
_DRAINING_RETRY_DELAY_S = 1.0


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Translates between messages and the pipeline, which does the work."""

    def __init__(
        self,
        pipeline: Pipeline,
        table: WorkerTable,
        texts: FetchedTexts,
        *,
        stalled: StalledCalls,
        is_loopback: bool,
        has_tls: bool = True,
        namespace: str = "",
        prefills: PrefillFor | None = None,
        names: TenantNames | None = None,
        session_limits: SessionLimits | None = None,
        call_limits: CallLimits | None = None,
    ) -> None:
        """Write answers through ``stalled``, which ends calls whose client reads nothing.

        ``names`` says which tenant a caller with an identity may use. A caller without one may use any over loopback,
        else none: its tenant is empty. Without ``has_tls`` callers have no certificates, and the servicer does not look
        for them. A caller of another namespace than ``namespace`` is known as ``NAMESPACE/NAME``.
        """
        self._namespace = namespace
        self._prefills = prefills
        self._pipeline = pipeline
        self._table = table
        self._texts = texts
        self._stalled = stalled
        self._is_loopback = is_loopback
        self._has_tls = has_tls
        self._names = names or TenantNames()
        self._session_limits = session_limits or SessionLimits()
        calls = call_limits or CallLimits()
        self._sessions = OpenSessions(calls)
        self._pace = ReadPace()
        self._generates = OpenCalls(
            "calls of Generate",
            max_calls=calls.max_generates,
            max_of_identity=calls.max_generates_of_identity,
            max_of_connection=calls.max_generates_of_connection,
            setting="calls.max_generates",
        )
        self._watches = OpenCalls(
            "watches of workers", max_calls=_MAX_WATCHES, max_of_connection=_MAX_WATCHES_OF_CONNECTION
        )
        self._closing = asyncio.Event()
        self._idle_tasks: set[asyncio.Task[Any]] = set()  # a drain does not wait for these

    def close(self) -> None:
        """End the streams that would never end by themselves."""
        self._closing.set()
        for task in self._idle_tasks:
            task.cancel()
        for session in self._sessions:
            session.drain()

    async def Generate(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.GenerateRequest], context: _Context
    ) -> None:
        """As router.proto says."""
        identity = self._identity(context)
        self._generates.enter(context, _name(identity))
        answer = GenerateAnswer()
        # Nothing here keeps the start: this runs for as long as the answer comes.
        run = self._begin(await self._read_first(context), answer, context, identity)
        listener = asyncio.create_task(_listen(context, run))
        try:
            with self._stalled.watch(context) as call:
                while (message := await answer.next()) is not None:
                    await call.write(message)
        finally:
            listener.cancel()
            await run.drop()

    async def Place(self, request: pb.PlaceRequest, context: _Context) -> pb.PlaceResponse:
        """As router.proto says."""
        start, resume, relayed = from_place_request(request)
        identity = self._identity(context)
        self._check_relayed(relayed, identity)
        start = self._with_tenant(start, identity)
        traceparent = _traceparent(context)
        placed = await self._pipeline.place(start, resume=resume, traceparent=traceparent, relayed=relayed)
        return to_place_response(placed, time.time_ns() if relayed.sent_at_unix_ns else 0)

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: _Context
    ) -> None:
        """As router.proto says."""
        traceparent, identity = _traceparent(context), self._identity(context)
        self._sessions.enter(context, _name(identity))
        client = _name(identity) or context.peer()

        def begin(asked: SessionStart, sink: AnswerSink) -> GenerateRun:
            self._check_relayed(asked.relayed, identity)
            start = self._with_tenant(asked.start, identity)
            own = valid_traceparent(asked.traceparent)
            return self._pipeline.generate(
                start, sink, resume=asked.resume, traceparent=own or traceparent, relayed=asked.relayed
            )

        with self._pace.account(client) as account:
            session = SessionStream(begin, self._session_limits, self._stalled, account)
            with self._sessions.serving(client, session):
                await session.serve(context)

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: _Context) -> pb.ListWorkersResponse:
        """As router.proto says."""
        return pb.ListWorkersResponse(workers=[to_worker_status(status) for status in self._statuses(request.model)])

    async def WatchWorkers(
        self, request: pb.WatchWorkersRequest, context: _Context
    ) -> AsyncIterator[pb.WatchWorkersResponse]:
        """As router.proto says."""
        self._watches.enter(context)
        changed = asyncio.Event()
        stop = self._table.listen(changed.set)
        shown: dict[str, WorkerStatus] = {}
        is_first = True
        try:
            while True:
                changed.clear()
                response = self._changes(request.model, shown)
                if request.wants_totals:
                    response.totals.CopyFrom(to_fleet_totals(self._totals()))
                if is_first or request.wants_totals or response.updated or response.removed_worker_ids:
                    yield response
                is_first = False
                with _UntilClosing(self._closing, self._idle_tasks):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_TOTALS_INTERVAL_S if request.wants_totals else None):
                            await changed.wait()
                    await asyncio.sleep(_WATCH_INTERVAL_S)
        finally:
            stop()

    async def Explain(self, request: pb.ExplainRequest, context: _Context) -> pb.ExplainResponse:
        """As router.proto says."""
        start = self._with_tenant(from_explain_request(request), self._identity(context))
        return to_explain_response(await self._pipeline.explain(start))

    async def GetModel(self, request: pb.GetModelRequest, context: _Context) -> pb.GetModelResponse:
        """As router.proto says."""
        pools = [pool for pool in self._table.pools(time.monotonic()) if request.name in ("", pool.key.model_name)]
        if request.name and not pools:
            raise model_error(self._table, request.name, "name", time.monotonic())
        return pb.GetModelResponse(models=[to_model(self._model(pool)) for pool in pools])

    async def PrefillFor(self, request: pb.PrefillForRequest, context: _Context) -> pb.PrefillForResponse:
        """As router.proto says."""
        if self._prefills is None:
            raise UnimplementedError("this router prefills for no others")
        identity = self._identity(context)
        if identity is not None and identity.kind is not IdentityKind.ROUTER:
            raise PermissionDeniedError("only routers may have prompts prefilled for them")
        asked = from_prefill_for_request(request)
        asked = asked.for_tenant(self._tenant(asked.tenant, identity, believes_neighbours=True))
        return to_prefill_for_response(await self._prefills.run(asked))

    async def _read_first(self, context: _Context) -> pb.GenerateRequest:
        # A client that opens a stream and sends nothing must not delay a drain.
        with _UntilClosing(self._closing, self._idle_tasks):
            request = await self._stalled.read_first(context)
        if not isinstance(request, pb.GenerateRequest) or request.WhichOneof("message") != "start":
            raise ProtocolError("the first message must be start", field="start")
        return request

    def _begin(
        self, request: pb.GenerateRequest, answer: AnswerSink, context: _Context, identity: Identity | None
    ) -> GenerateRun:
        start, resume = from_generate_request(request)
        start = self._with_tenant(start, identity)
        return self._pipeline.generate(start, answer, resume=resume, traceparent=_traceparent(context))

    def _identity(self, context: _Context) -> Identity | None:
        return caller_identity(context.auth_context()) if self._has_tls else None

    def _with_tenant(self, start: AskedStart, identity: Identity | None) -> AskedStart:
        tenant = self._tenant(start.tenant, identity)
        return start if tenant == start.tenant else start.for_tenant(tenant)

    def _tenant(self, named: str, identity: Identity | None, *, believes_neighbours: bool = False) -> str:
        """The tenant of a request that names ``named``.

        ``believes_neighbours``: callers of other namespaces, who are of trusted ones, are gateways.
        """
        if identity is None:
            return named if self._is_loopback else ""
        is_foreign = self._namespace not in ("", identity.namespace)
        name = f"{identity.namespace}/{identity.name}" if is_foreign else identity.name
        return self._names.tenant(name, named, is_gateway=believes_neighbours and is_foreign)

    def _check_relayed(self, relayed: Relayed | None, identity: Identity | None) -> None:
        """Only routers relay; without certificates nobody knows who does. Raises ``PermissionDeniedError``."""
        is_router = identity is not None and identity.kind is IdentityKind.ROUTER
        if relayed is None or is_router or not self._has_tls:
            return
        for field in ("prefill_namespaces", "request_id", "sent_at_unix_ns"):
            if getattr(relayed, field):
                raise PermissionDeniedError(f"only routers may set {field}", field=field)

    def _statuses(self, model: str) -> list[WorkerStatus]:
        statuses = self._table.statuses(time.monotonic())
        return [status for status in statuses if model in ("", status.record.model_name)]

    def _changes(self, model: str, shown: dict[str, WorkerStatus]) -> pb.WatchWorkersResponse:
        """The changes since ``shown``, by worker id; brings ``shown`` up to date."""
        now = {status.record.worker_id: status for status in self._statuses(model)}
        removed = shown.keys() - now.keys()
        updated = [status for key, status in now.items() if key not in shown or _differ(shown[key], status)]
        shown.clear()
        shown.update(now)
        return pb.WatchWorkersResponse(
            updated=[to_worker_status(status) for status in updated], removed_worker_ids=sorted(removed)
        )

    def _totals(self) -> FleetTotals:
        context = self._pipeline.context
        counted = context.metrics.totals()
        return FleetTotals(
            router_id=context.router_id,
            policy=context.admission.policy.name,
            outcomes={outcome: int(count) for outcome, count in context.metrics.requests.by_outcome().items()},
            num_failed=counted.num_failed,
            num_prompt_tokens=counted.num_prompt_tokens,
            num_cached_tokens=counted.num_cached_tokens,
            num_output_tokens=counted.num_output_tokens + self._pipeline.num_output_tokens,
            ttft_bounds_s=tuple(counted.ttft_bounds_s),
            ttft_counts=tuple(counted.ttft_counts),
            num_without_room=counted.num_without_room,
            num_kv_gaps=counted.num_kv_gaps,
            num_queued=counted.num_queued,
            num_running=counted.num_running,
        )

    def _model(self, pool: Pool) -> Model:
        text = self._texts.known(pool.key)
        template = None if text is None else text.chat_template
        parsers = "", ""
        if text is not None and template is not None:
            parsers = text.parsers(pool.reasoning_parser, pool.tool_call_parser)
        features = (
            ("reasoning", bool(parsers[0])),
            ("tools", bool(parsers[1]) and template is not None and template.takes_tools),
        )
        return Model(
            name=pool.key.model_name,
            fingerprint=pool.key.fingerprint,
            max_model_len=pool.max_model_len,
            num_prefill_workers=pool.num_ready_prefill,
            num_decode_workers=pool.num_ready_decode,
            sampling_fields=tuple(sorted(pool.sampling_fields)),
            media=tuple(sorted(pool.media.kinds)),
            adapters=tuple(sorted(pool.adapters)),
            has_chat_template=template is not None,
            reasoning_parser=parsers[0],
            tool_call_parser=parsers[1],
            chat_features=tuple(name for name, has_it in features if has_it),
            template_arguments=() if template is None else template.arguments,
        )


def router_service(servicer: RouterServicer) -> Service:
    """RouterService, for a server."""
    add = router_pb2_grpc.add_RouterServiceServicer_to_server
    return Service("quartet.v1.RouterService", lambda server: add(servicer, server))


class _UntilClosing:
    """Stop waiting in the block when the router closes: ``DrainingError`` then comes out of the block.

    It is a class, since a generator as a context manager takes more steps, and each call of Generate pays for it.
    """

    __slots__ = ("_closing", "_idle_tasks", "_task")

    def __init__(self, closing: asyncio.Event, idle_tasks: set[asyncio.Task[Any]]) -> None:
        """The current task is one of ``idle_tasks`` within the block. Once ``closing`` is set, these are cancelled."""
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._closing = closing
        self._idle_tasks = idle_tasks
        self._task = task

    def __enter__(self) -> None:
        if self._closing.is_set():
            raise _draining_error()
        self._idle_tasks.add(self._task)

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._idle_tasks.discard(self._task)
        if self._closing.is_set() and isinstance(error, asyncio.CancelledError) and self._task.uncancel() == 0:
            raise _draining_error() from None


async def _listen(context: _Context, run: GenerateRun) -> None:
    """Read what the client sends after its start: a cancel, and what follows that changes nothing and is not read."""
    try:
        if (request := await context.read()) is not grpc.aio.EOF:
            if request.WhichOneof("message") != "cancel":
                raise ProtocolError("after start only cancel may come", field="message")
            run.cancel()
    except Exception as error:  # noqa: BLE001 - the task ends here; `public_error` logs what is not a ServingError
        run.abort(public_error(error))


def _name(identity: Identity | None) -> str | None:
    return None if identity is None else f"{identity.kind.value}/{identity.name}"


def _draining_error() -> DrainingError:
    return DrainingError("the router is going away", retry_delay_s=_DRAINING_RETRY_DELAY_S)


def _traceparent(context: _Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            return valid_traceparent(str(value))
    return ""


def _differ(one: WorkerStatus, other: WorkerStatus) -> bool:
    """Whether they differ in more than the age of a report."""
    return replace(one, load_age_s=None) != replace(other, load_age_s=None)

"""Requests for completions in every API: one runs through the pipeline, and is dropped if its client goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from aiohttp import web

from quartet.api.openai.answers import TokenBytes
from quartet.api.openai.requests import Asked, Caller
from quartet.errors import InvalidRequestError, ServingError, SlowReaderError
from router.generate import GenerateRun, Pipeline
from router.http.body import Bodies
from router.http.config import HttpConfig
from router.http.connections import Connections
from router.http.dialects import Answering, Dialect
from router.http.errors import to_parameter
from router.http.events import EventStream, EventWriter
from router.workers import WorkerTable

# Set in a request once it runs in the pipeline, which then logs and counts it.
RUNS = web.RequestKey("RUNS", bool)

_Read: TypeAlias = Callable[[Mapping[str, Any], Caller], Generator[int, None, Asked]]


class Completions:
    """Answers requests for completions."""

    def __init__(self, pipeline: Pipeline, bodies: Bodies, connections: Connections, config: HttpConfig) -> None:
        """Run requests in ``pipeline``; ``connections`` look after streams."""
        self._pipeline = pipeline
        self._context = pipeline.context
        self._bodies = bodies
        self._connections = connections
        self._max_unread_bytes = config.max_unread_bytes
        self._writer = EventWriter()

    async def serve(
        self, read: _Read, dialect: Dialect, request: web.BaseRequest, caller: Caller
    ) -> web.StreamResponse:
        """POST of a request whose body ``read`` reads; it is answered in ``dialect``."""
        self._context.limits.check(caller.tenant, caller.key)
        async with self._bodies.read_json(request, caller) as body:
            asked = await self._bodies.in_turns(read(body, caller), caller.tenant)
        del body  # a stream may live for long
        find_adapter(asked, self._context.table)
        token_bytes = None
        if asked.num_logprobs is not None or asked.echoes:
            token_bytes = await self._token_bytes(asked.starts[0].model)
        if asked.streams:
            return await self._stream(request, asked, caller, token_bytes, dialect)
        return await self._answer(request, asked, caller, token_bytes, dialect)

    async def _answer(
        self,
        request: web.BaseRequest,
        asked: Asked,
        caller: Caller,
        token_bytes: TokenBytes | None,
        dialect: Dialect,
    ) -> web.Response:
        reply = dialect.whole(asked, self._model_name(asked), token_bytes)
        async with _Runs(self._pipeline, asked, reply.answers, caller) as runs:
            request[RUNS] = True
            reply.head.set_request_id(runs.request_id)
            await runs.ended
        headers = self._headers(caller, runs.request_id, dialect)
        # A long prompt's log probabilities take a second to write.
        body = await asyncio.to_thread(reply.body) if asked.echoes else reply.body()
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _stream(
        self,
        request: web.BaseRequest,
        asked: Asked,
        caller: Caller,
        token_bytes: TokenBytes | None,
        dialect: Dialect,
    ) -> web.StreamResponse:
        stream = EventStream(request, self._writer, max_unread_bytes=self._max_unread_bytes)
        reply = dialect.streamed(asked, self._model_name(asked), token_bytes, stream)
        async with _Runs(self._pipeline, asked, reply.answers, caller) as runs:
            request[RUNS] = True
            reply.head.set_request_id(runs.request_id)
            stream.on_slow = partial(_end_slow, runs, request)
            self._connections.watch(stream)
            try:
                await runs.begin(stream)
                response = await stream.open(request, self._headers(caller, runs.request_id, dialect))
                error: BaseException | None = None
                try:
                    await runs.ended
                except Exception as failure:  # noqa: BLE001 - the stream ends with it; `error_body` logs our bugs
                    error = failure
                reply.end(error)
            finally:
                self._connections.forget(stream)
                stream.close()
        return response

    def _headers(self, caller: Caller, request_id: str, dialect: Dialect) -> Mapping[str, str]:
        headers = dict.fromkeys(dialect.id_headers, caller.client_request_id or request_id)
        if caller.traceparent:
            headers["traceparent"] = caller.traceparent
        return {**headers, **self._context.limits.headers(caller.tenant, caller.key)}

    def _model_name(self, asked: Asked) -> str:
        """What the response calls the model."""
        start = asked.starts[0]
        pool = self._context.table.pool(start.model, time.monotonic())
        return start.adapter or (start.model if pool is None else pool.key.model_name)

    async def _token_bytes(self, model: str) -> TokenBytes | None:
        """What each token adds to the text; ``None``: the model is not known, which the pipeline refuses."""
        pool = self._context.table.pool(model, time.monotonic())
        if pool is None:
            return None
        tokenizer = (await self._context.texts.model_text(pool.key)).tokenizer
        table = tokenizer.piece_table(skip_special_tokens=False)
        if table is not None:
            return table.__getitem__
        return lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False).encode()


def find_adapter(asked: Asked, table: WorkerTable) -> None:
    """OpenAI's requests have no field for an adapter: clients name it as the model."""
    pool = table.pool_of_adapter(asked.model, time.monotonic())
    if pool is not None:
        asked.starts = [replace(one, model=pool.key.model_name, adapter=asked.model) for one in asked.starts]


class _Runs:
    """The runs of one request: one for each prompt. What is left of them is dropped at the end of the block.

    Attributes:
        request_id: names the response: the id of its first run.
        ended: done once all have ended, or with the error of the first that fails, as soon as it does.
    """

    def __init__(self, pipeline: Pipeline, asked: Asked, answers: Sequence[Answering], caller: Caller) -> None:
        """Begin them. Raises as ``RateLimits.admit_all``."""
        self._pipeline = pipeline
        self._answers = answers
        self._names = asked.names
        self._field_names, asked.field_names = asked.field_names, None  # they may be long, and `asked` is kept
        starts = asked.take_starts()
        # All of them or none: one that is refused would end the others.
        charges = pipeline.context.limits.admit_all(caller.tenant, caller.key, len(starts))
        # It is still the turn in which the last of its body was parsed. Further prompts have turns of their own.
        starts[0].has_entered = True
        self._runs: list[GenerateRun] = [
            pipeline.generate(
                start,
                answer,
                traceparent=caller.traceparent,
                on_queued=answer.queue,
                received_at=caller.received_at,
                key=caller.key,
                charge=charge,
            )
            for start, answer, charge in zip(starts, answers, charges, strict=True)
        ]
        self.request_id = self._runs[0].request_id
        for index, answer in enumerate(answers):
            answer.has_ended.add_done_callback(partial(self._name_field, index))
        self.ended = asyncio.gather(*[answer.has_ended for answer in answers])
        self.ended.add_done_callback(_mark_seen)

    async def begin(self, stream: EventStream) -> None:
        """Wait until the response may begin: every prompt waits for a worker or has one, and one of them has.

        Until then a refusal has a status of its own. ``stream`` may be due before: then a refusal comes as an event.

        Raises:
            ServingError: of the first that fails until then.
        """
        num_unchecked, is_placed = len(self._answers), False

        def note_queued(_is_queued: asyncio.Future[None]) -> None:
            nonlocal num_unchecked
            num_unchecked -= 1
            look()

        def note_open(_is_open: asyncio.Future[None]) -> None:
            nonlocal is_placed
            is_placed = True
            look()

        def look() -> None:
            if is_placed and not num_unchecked:
                stream.make_due()

        for answer in self._answers:
            answer.is_queued.add_done_callback(note_queued)
            answer.is_open.add_done_callback(note_open)

        def note_ended(_ended: asyncio.Future[list[None]]) -> None:
            stream.make_due()

        self.ended.add_done_callback(note_ended)
        await stream.is_due
        self.ended.remove_done_callback(note_ended)  # which a stream that lives for long would keep
        if self._field_names is not None:
            self._field_names = self._field_names.of_media()
        if self.ended.done():
            self.ended.result()

    def abort(self, error: SlowReaderError) -> None:
        """End what runs with ``error``."""
        for run in self._runs:
            run.abort(error)

    def _name_field(self, index: int, has_ended: asyncio.Future[None]) -> None:
        """Name the field that an error of prompt number ``index`` is about as the client called it."""
        error = None if has_ended.cancelled() else has_ended.exception()
        if self._field_names is not None and isinstance(error, ServingError):
            self._field_names.rename(error)
            return
        if not isinstance(error, InvalidRequestError) or error.field is None:
            return
        name = error.field.removeprefix("sampling.")
        if name in self._names:
            error.field = self._names[name]
        elif len(self._answers) > 1 and to_parameter(name) == "prompt":
            error.field = f"prompt[{index}]"

    async def __aenter__(self) -> _Runs:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._pipeline.drop_all(self._runs)
        # Else a cycle: an error in it refers to the frames in which it was raised, and these to this.
        del self.ended


def _mark_seen(ended: asyncio.Future[list[None]]) -> None:
    """Nobody may wait for it any more, which is no error."""
    if not ended.cancelled():
        ended.exception()


def _end_slow(runs: _Runs, request: web.BaseRequest) -> None:
    runs.abort(SlowReaderError("the client reads more slowly than its answer comes"))
    if request.transport is not None:
        request.transport.abort()

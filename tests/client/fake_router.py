"""A RouterService that answers as a test configures it, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quartet.errors import ModelNotFoundError, ServingError
from quartet.rpc.errors import to_duration, to_failure
from quartet.rpc.server import Service
from quartet.v1 import kv_events_pb2, router_pb2, router_pb2_grpc, transfer_pb2, types_pb2, worker_pb2
from tests.client.fake_worker import FIRST_TOKEN_ID, WORDS, FakeSignature, FakeWorker

REQUEST_ID = "0123456789abcdef0123456789abcdef"


class FakeRouter(router_pb2_grpc.RouterServiceServicer):
    """Answers every start with ``words``, one a delta, or fails with ``error``.

    It accepts with the first choice's placement and reports the other choices' afterwards.

    Attributes:
        answers: in place of words the deltas of the first answers by the router, or what they fail with.
        error: what to fail with instead of accepting.
        place_error: the same for Place alone.
        resume_errors: what Place fails with, one after the other, where an answer is to go on.
        error_at_end: what to fail with after all words.
        lose_last_finished: leave the last choice's ``finished`` out.
        hold_after: words after which it waits for ``cancel`` (it answers CANCELLED) or the end of the call.
        starts: all starts that came.
        resumes: ``resume`` of each request that came by Place; ``None``: it had none.
        worker, worker_address: whom Place sends its callers to.
        num_misdirected: first placements whose address has no worker.
        holding: set while it waits.
        explanation: what Explain answers.
        totals: what it has counted, with the first message to who wants it; ``None``: it never says.
        watch_is_bounded: a watch of the workers ends after the changes that are there.
        dropped: set when a call ended before its answer did, or a request of a session was cancelled.
        num_sessions: sessions opened so far.
        breaks_session_at_once: ends every session when the first request has come.
        break_session_after: ends a session in order once this kind of message has gone out on it.
    """

    def __init__(self) -> None:
        self.words = list(WORDS)
        self.answers: list[list[router_pb2.Delta | ServingError]] = []
        self.error: ServingError | None = None
        self.place_error: ServingError | None = None
        self.resume_errors: list[ServingError] = []
        self.error_at_end: ServingError | None = None
        self.hold_after: int | None = None
        self.lose_last_finished = False
        self.starts: list[router_pb2.GenerateStart] = []
        self.resumes: list[router_pb2.Resume | None] = []
        self.holding = asyncio.Event()
        self.dropped = asyncio.Event()
        self.num_sessions = 0
        self.worker = FakeWorker(self.holding, self.dropped)
        self.worker_address = ""
        self.num_misdirected = 0
        self.break_session_after: str | None = None
        self.breaks_session_at_once = False
        self.workers: list[router_pb2.WorkerStatus] = []
        self.explanation = router_pb2.ExplainResponse()
        self.watch_is_bounded = False
        self.totals: router_pb2.FleetTotals | None = None
        self.changes: asyncio.Queue[router_pb2.WatchWorkersResponse] = asyncio.Queue()

    def hold(self, num_words: int) -> None:
        """Let answers wait after so many words, from the router or the worker."""
        self.hold_after = self.worker.hold_after = num_words

    def service(self) -> Service:
        return Service(
            "quartet.v1.RouterService",
            lambda server: router_pb2_grpc.add_RouterServiceServicer_to_server(self, server),
        )

    async def Generate(self, requests: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        first = await anext(requests)
        try:
            async for response in self._answer(first.start, lambda: anext(requests, None)):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            self.dropped.set()
            raise

    async def Place(self, request: router_pb2.PlaceRequest, context: Any) -> router_pb2.PlaceResponse:
        start, resume = request.start, request.resume
        self.starts.append(start)
        self.resumes.append(resume if request.HasField("resume") else None)
        if self.error is not None:
            raise self.error
        if self.place_error is not None:
            raise self.place_error
        is_resumed = request.HasField("resume")
        if is_resumed and self.resume_errors:
            raise self.resume_errors.pop(0)
        choices = [resume.choice] if is_resumed else range(start.num_choices or 1)
        num_generated = len(resume.generated_token_ids.ids)
        return router_pb2.PlaceResponse(
            request_id=REQUEST_ID,
            attempt=resume.attempt,
            seed=_seed(start),
            num_prompt_tokens=4,
            choices=[self._placed_choice(choice, num_generated) for choice in choices],
            model="tiny",
            model_fingerprint="f00d",
            tokenize=to_duration(0.125),
        )

    def _placed_choice(self, choice: int, num_generated: int) -> router_pb2.PlacedChoice:
        """Its first token comes from prefill, as everywhere where there are prefill workers."""
        placed = router_pb2.PlacedChoice(
            choice=choice,
            placement=self._placement(choice),
            token_ids=[FIRST_TOKEN_ID + num_generated],
            num_cached_tokens=3,
            num_attempts=1,
            router_queue=to_duration(0.5),
            prefill=to_duration(0.75),
            prefill_queue=to_duration(0.25),
        )
        if num_generated + 1 == len(self.words):
            placed.finished.CopyFrom(self._finished(choice, 1, types_pb2.FINISH_REASON_LENGTH).finished)
        else:
            sign = FakeSignature(first=num_generated + 1, end=len(self.words))
            address = "127.0.0.1:1" if len(self.resumes) <= self.num_misdirected else self.worker_address
            signed = router_pb2.SignedPlacement(
                address=address, signed_start=sign.to_bytes(), key_id="key", mac=bytes(32)
            )
            placed.stream.CopyFrom(signed)
        return placed

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[router_pb2.SessionResponse]:
        self.num_sessions += 1
        if self.breaks_session_at_once:
            await anext(requests)
            return
        running: dict[int, _Slot] = {}
        responses: asyncio.Queue[router_pb2.SessionResponse | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read_session(requests, running, responses))
        try:
            while (response := await responses.get()) is not None:
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            self.dropped.set()
            raise
        finally:
            reader.cancel()
            for slot in running.values():
                slot.task.cancel()

    async def _read_session(
        self, requests: Any, running: dict[int, _Slot], responses: asyncio.Queue[router_pb2.SessionResponse | None]
    ) -> None:
        async for request in requests:
            if request.WhichOneof("message") == "cancel":
                if request.cancel.slot in running:
                    running[request.cancel.slot].cancelled.set()
                continue
            cancelled = asyncio.Event()
            work = self._run_slot(request.start, cancelled, responses)
            running[request.start.slot] = _Slot(asyncio.create_task(work), cancelled)

    async def _run_slot(
        self,
        asked: router_pb2.SessionStart,
        cancelled: asyncio.Event,
        responses: asyncio.Queue[router_pb2.SessionResponse | None],
    ) -> None:
        try:
            async for response in self._answer(asked.start, lambda: _wait_cancelled(cancelled)):
                responses.put_nowait(in_slot(asked.slot, response))
                if self.break_session_after is not None and response.WhichOneof("message") == self.break_session_after:
                    responses.put_nowait(None)
        except (ServingError, ValueError) as error:
            failure = router_pb2.SessionFailure(slot=asked.slot, failure=to_failure(error))
            responses.put_nowait(router_pb2.SessionResponse(failures=[failure]))
        if cancelled.is_set():
            self.dropped.set()

    async def _answer(
        self, start: router_pb2.GenerateStart, wait_cancelled: Callable[[], Awaitable[object]]
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """The answer on every path; ``wait_cancelled`` waits for ``cancel`` and gives ``None`` where none can come."""
        self.starts.append(start)
        if self.error is not None:
            raise self.error
        num_choices = start.num_choices or 1
        for opening in self._opening(start, num_choices):
            yield opening
        if len(self.starts) <= len(self.answers):
            for response in self._next_answer():
                yield response
            return
        async for response in self._answer_in_words(num_choices, wait_cancelled):
            yield response

    async def _answer_in_words(
        self, num_choices: int, wait_cancelled: Callable[[], Awaitable[object]]
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        for number, word in enumerate(self.words):
            if number == self.hold_after:
                self.holding.set()
                if await wait_cancelled() is None:
                    await asyncio.Event().wait()  # half-closed: only the end of the call ends it
                for choice in range(num_choices):
                    yield self._finished(choice, number, types_pb2.FINISH_REASON_CANCELLED)
                return
            for choice in range(num_choices):
                yield self._delta(choice, number, word)
        if self.error_at_end is not None:
            raise self.error_at_end
        for choice in range(num_choices - self.lose_last_finished):
            yield self._finished(choice, len(self.words), types_pb2.FINISH_REASON_LENGTH)

    def _next_answer(self) -> Iterator[router_pb2.GenerateResponse]:
        calls = False
        for part in self.answers[len(self.starts) - 1]:
            if isinstance(part, ServingError):
                raise part
            calls = calls or bool(part.tool_calls)
            yield router_pb2.GenerateResponse(delta=part)
        reason = types_pb2.FINISH_REASON_TOOL_CALLS if calls else types_pb2.FINISH_REASON_STOP_ID
        yield self._finished(0, 0, reason)

    async def ListWorkers(self, request: Any, context: Any) -> router_pb2.ListWorkersResponse:
        return router_pb2.ListWorkersResponse(workers=self.workers)

    async def WatchWorkers(self, request: Any, context: Any) -> AsyncIterator[router_pb2.WatchWorkersResponse]:
        totals = self.totals if request.wants_totals else None
        yield router_pb2.WatchWorkersResponse(updated=self.workers, totals=totals)
        while not (self.watch_is_bounded and self.changes.empty()):
            yield await self.changes.get()

    async def Explain(self, request: router_pb2.ExplainRequest, context: Any) -> router_pb2.ExplainResponse:
        self.starts.append(request.start)
        if self.error is not None:
            raise self.error
        return self.explanation

    async def GetModel(self, request: router_pb2.GetModelRequest, context: Any) -> router_pb2.GetModelResponse:
        if request.name not in ("", "tiny"):
            raise ModelNotFoundError(f"no model {request.name}", field="name")
        model = router_pb2.Model(name="tiny", fingerprint="f00d", max_model_len=64, num_decode_workers=1)
        return router_pb2.GetModelResponse(models=[model])

    def _opening(self, start: router_pb2.GenerateStart, num_choices: int) -> list[router_pb2.GenerateResponse]:
        accepted = router_pb2.Accepted(
            request_id=REQUEST_ID, choices=[self._placement(0)], num_prompt_tokens=4, seed=_seed(start)
        )
        placed = [router_pb2.GenerateResponse(placed=self._placement(choice)) for choice in range(1, num_choices)]
        return [router_pb2.GenerateResponse(accepted=accepted), *placed]

    def _placement(self, choice: int) -> router_pb2.ChoicePlacement:
        return router_pb2.ChoicePlacement(
            choice=choice,
            prefill=types_pb2.Rank(worker_id="prefill-0"),
            decode=types_pb2.Rank(worker_id=f"decode-{choice}"),
            num_matched_tokens=3,
            cost=0.25,
        )

    def _delta(self, choice: int, number: int, word: str) -> router_pb2.GenerateResponse:
        delta = router_pb2.Delta(choice=choice, token_offset=number, token_ids=[FIRST_TOKEN_ID + number], text=word)
        return router_pb2.GenerateResponse(delta=delta)

    def _finished(
        self, choice: int, num_tokens: int, reason: types_pb2.FinishReason.ValueType
    ) -> router_pb2.GenerateResponse:
        usage = router_pb2.Usage(num_prompt_tokens=4, num_output_tokens=num_tokens, num_attempts=1)
        time = router_pb2.TimeBreakdown(
            transfer=to_duration(0.125),
            transfer_bytes=250_000_000,
            transfer_way=transfer_pb2.TRANSFER_WAY_SHM,
            first_token=to_duration(0.25),
            total=to_duration(0.5),
        )
        finished = router_pb2.ChoiceFinished(choice=choice, reason=reason, usage=usage, time=time)
        return router_pb2.GenerateResponse(finished=finished)


@dataclass
class _Slot:
    task: asyncio.Task[None]
    cancelled: asyncio.Event


def _seed(start: router_pb2.GenerateStart) -> int:
    return start.seed if start.HasField("seed") else 7


async def _wait_cancelled(cancelled: asyncio.Event) -> bool:
    await cancelled.wait()
    return True


def in_slot(slot: int, response: router_pb2.GenerateResponse) -> router_pb2.SessionResponse:
    """One part of an answer as a message of a session."""
    match response.WhichOneof("message"):
        case "accepted":
            return router_pb2.SessionResponse(
                accepted=[router_pb2.SessionAccepted(slot=slot, accepted=response.accepted)]
            )
        case "placed":
            return router_pb2.SessionResponse(placed=[router_pb2.SessionPlaced(slot=slot, placement=response.placed)])
        case "finished":
            return router_pb2.SessionResponse(
                finished=[router_pb2.SessionFinished(slot=slot, finished=response.finished)]
            )
        case "prompt_logprobs":
            report = router_pb2.SessionPromptLogprobs(slot=slot, prompt_logprobs=response.prompt_logprobs)
            return router_pb2.SessionResponse(prompt_logprobs=[report])
    delta, parsed = response.delta, []
    if delta.reasoning or delta.tool_calls:
        parsed.append(
            router_pb2.SessionParsed(
                slot=slot, choice=delta.choice, reasoning=delta.reasoning, tool_calls=delta.tool_calls
            )
        )
    return router_pb2.SessionResponse(
        parsed=parsed,
        slots=[slot],
        choices=[delta.choice],
        num_tokens=[len(delta.token_ids)],
        token_offsets=[delta.token_offset],
        token_ids=delta.token_ids,
        texts=[delta.text],
    )


def worker_status(
    worker_id: str,
    role: worker_pb2.WorkerRole.ValueType = worker_pb2.WORKER_ROLE_DECODE,
    state: router_pb2.WorkerState.ValueType = router_pb2.WORKER_STATE_READY,
    **rank: int,
) -> router_pb2.WorkerStatus:
    """A worker of the model ``tiny``; ``rank``: fields of its one rank's load."""
    record = worker_pb2.WorkerRecord(
        worker_id=worker_id,
        role=role,
        epoch=9,
        grpc_address="127.0.0.1:6001",
        model_name="tiny",
        model_fingerprint="f00d",
        host=transfer_pb2.HostIdentity(boot_id="boot", ipc_namespace="ipc:[1]"),
        data_parallel_size=1,
        num_blocks=64,
        block_size=32,
        max_model_len=64,
        contract_version="quartet.v1",
    )
    load = kv_events_pb2.WorkerLoad(
        worker_id=worker_id, epoch=9, ranks=[kv_events_pb2.RankLoad(**rank)], is_healthy=True
    )
    return router_pb2.WorkerStatus(record=record, state=state, load=load, load_age=to_duration(0.4))

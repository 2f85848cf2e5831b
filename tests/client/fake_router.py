"""A RouterService that says what a test tells it to, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from quartet.errors import ModelNotFoundError, ServingError
from quartet.rpc.durations import to_duration
from quartet.rpc.server import Service
from quartet.v1 import kv_events_pb2, router_pb2, router_pb2_grpc, transfer_pb2, types_pb2, worker_pb2

REQUEST_ID = "0123456789abcdef0123456789abcdef"


class FakeRouter(router_pb2_grpc.RouterServiceServicer):
    """Answers every start with ``words``, one a delta, or fails with ``error``.

    It accepts with the first choice's placement and tells the other choices' afterwards.

    Attributes:
        error: what to fail with instead of accepting.
        error_at_end: what to fail with after all words.
        lose_last_finished: leave the last choice's ``finished`` out.
        hold_after: words after which it waits for ``cancel`` (it answers CANCELLED) or the end of the call.
        starts: all starts that came.
        holding: set while it waits.
        watch_is_bounded: a watch of the workers ends after the changes that are there.
        dropped: set when a call ended before its answer did.
    """

    def __init__(self) -> None:
        self.words = ["one", " two", " three"]
        self.error: ServingError | None = None
        self.error_at_end: ServingError | None = None
        self.hold_after: int | None = None
        self.lose_last_finished = False
        self.starts: list[router_pb2.GenerateStart] = []
        self.holding = asyncio.Event()
        self.dropped = asyncio.Event()
        self.workers: list[router_pb2.WorkerStatus] = []
        self.watch_is_bounded = False
        self.changes: asyncio.Queue[router_pb2.WatchWorkersResponse] = asyncio.Queue()

    def service(self) -> Service:
        return Service(
            "quartet.v1.RouterService",
            lambda server: router_pb2_grpc.add_RouterServiceServicer_to_server(self, server),
        )

    async def Generate(self, requests: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        first = await anext(requests)
        self.starts.append(first.start)
        if self.error is not None:
            raise self.error
        num_choices = first.start.num_choices or 1
        try:
            for opening in self._opening(first.start, num_choices):
                yield opening
            for number, word in enumerate(self.words):
                if number == self.hold_after:
                    await self._hold(requests)
                    for choice in range(num_choices):
                        yield self._finished(choice, number, types_pb2.FINISH_REASON_CANCELLED)
                    return
                for choice in range(num_choices):
                    yield self._delta(choice, number, word)
            if self.error_at_end is not None:
                raise self.error_at_end
            for choice in range(num_choices - self.lose_last_finished):
                yield self._finished(choice, len(self.words), types_pb2.FINISH_REASON_LENGTH)
        except (asyncio.CancelledError, GeneratorExit):
            self.dropped.set()
            raise

    async def Place(self, request: Any, context: Any) -> router_pb2.PlaceResponse:
        raise NotImplementedError

    def Session(self, requests: Any, context: Any) -> AsyncIterator[router_pb2.SessionResponse]:
        raise NotImplementedError

    async def ListWorkers(self, request: Any, context: Any) -> router_pb2.ListWorkersResponse:
        return router_pb2.ListWorkersResponse(workers=self.workers)

    async def WatchWorkers(self, request: Any, context: Any) -> AsyncIterator[router_pb2.WatchWorkersResponse]:
        yield router_pb2.WatchWorkersResponse(updated=self.workers)
        while not (self.watch_is_bounded and self.changes.empty()):
            yield await self.changes.get()

    async def GetModel(self, request: router_pb2.GetModelRequest, context: Any) -> router_pb2.GetModelResponse:
        if request.name not in ("", "tiny"):
            raise ModelNotFoundError(f"no model {request.name}", field="name")
        model = router_pb2.Model(name="tiny", fingerprint="f00d", max_model_len=64, num_decode_workers=1)
        return router_pb2.GetModelResponse(models=[model])

    async def _hold(self, requests: Any) -> None:
        self.holding.set()
        if await anext(requests, None) is None:
            await asyncio.Event().wait()  # half-closed: only the end of the call ends it

    def _opening(self, start: router_pb2.GenerateStart, num_choices: int) -> list[router_pb2.GenerateResponse]:
        seed = start.seed if start.HasField("seed") else 7
        accepted = router_pb2.Accepted(
            request_id=REQUEST_ID, choices=[self._placement(0)], num_prompt_tokens=4, seed=seed
        )
        placed = [router_pb2.GenerateResponse(placed=self._placement(choice)) for choice in range(1, num_choices)]
        return [router_pb2.GenerateResponse(accepted=accepted), *placed]

    def _placement(self, choice: int) -> router_pb2.ChoicePlacement:
        return router_pb2.ChoicePlacement(
            choice=choice,
            prefill=types_pb2.Place(worker_id="prefill-0"),
            decode=types_pb2.Place(worker_id=f"decode-{choice}"),
        )

    def _delta(self, choice: int, number: int, word: str) -> router_pb2.GenerateResponse:
        delta = router_pb2.Delta(choice=choice, token_offset=number, token_ids=[100 + number], text=word)
        return router_pb2.GenerateResponse(delta=delta)

    def _finished(
        self, choice: int, num_tokens: int, reason: types_pb2.FinishReason.ValueType
    ) -> router_pb2.GenerateResponse:
        usage = router_pb2.Usage(num_prompt_tokens=4, num_output_tokens=num_tokens, num_attempts=1)
        time = router_pb2.TimeBreakdown(first_token=to_duration(0.25), total=to_duration(0.5))
        finished = router_pb2.ChoiceFinished(choice=choice, reason=reason, usage=usage, time=time)
        return router_pb2.GenerateResponse(finished=finished)


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

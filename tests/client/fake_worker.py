"""A decode worker that answers as a test configures it, over real gRPC: it continues what ``FakeRouter`` signed."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tokenizers
from tokenizers import decoders, models

from quartet.errors import RequestCancelledError, ServingError
from quartet.rpc.errors import to_duration, to_failure
from quartet.rpc.server import Service
from quartet.v1 import decode_pb2, decode_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc

#: Id of the first word; the words before it in the vocabulary are never used.
FIRST_TOKEN_ID = 100
WORDS = ("one", " two", " three")


@dataclass(frozen=True)
class FakeSignature:
    """What a fake router signs: which tokens are still to come."""

    first: int
    end: int

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class Failing:
    """How one start fails: after so many of its tokens, alone or with its stream."""

    error: ServingError
    num_tokens: int = 1
    breaks_stream: bool = False


@dataclass(frozen=True)
class Losing:
    """A start that ends well, but loses so many of its last tokens."""

    num_tokens: int = 1


@dataclass
class _Slot:
    task: asyncio.Task[None]
    cancelled: asyncio.Event


class FakeWorker(decode_pb2_grpc.DecodeServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """Answers every signed start with its tokens, one a message.

    Attributes:
        failing: how the next starts fail, the first one's first.
        file_errors: what the next fetches of the model's files fail with.
        holds_files: never give the model's files.
        hold_after: output tokens after which it waits for ``cancel``.
        holding: set while it waits.
        dropped: set when a start was cancelled, by its slot or with its stream.
        fingerprints: of the models whose files were asked for.
        num_starts, num_streams, num_fetches: starts, streams and fetches of files that came.
    """

    def __init__(self, holding: asyncio.Event, dropped: asyncio.Event) -> None:
        self.failing: list[Failing | Losing] = []
        self.file_errors: list[ServingError] = []
        self.fingerprints: list[str] = []
        self.holds_files = False
        self.hold_after: int | None = None
        self.holding = holding
        self.dropped = dropped
        self.num_starts = self.num_streams = self.num_fetches = 0
        self.files = {"tokenizer.json": _tokenizer_json()}

    def services(self) -> list[Service]:
        return [
            Service(
                "quartet.v1.DecodeService",
                lambda server: decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server),
            ),
            Service(
                "quartet.v1.WorkerService",
                lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server),
            ),
        ]

    async def Decode(self, requests: Any, context: Any) -> AsyncIterator[decode_pb2.DecodeResponse]:
        self.num_streams += 1
        running: dict[int, _Slot] = {}
        responses: asyncio.Queue[decode_pb2.DecodeResponse | ServingError] = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, running, responses))
        try:
            while True:
                response = await responses.get()
                if isinstance(response, ServingError):
                    raise response
                yield response
        finally:
            reader.cancel()
            for slot in running.values():
                if slot.task.cancel():
                    self.dropped.set()

    async def GetModelFiles(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.GetModelFilesResponse]:
        self.num_fetches += 1
        self.fingerprints.append(request.model_fingerprint)
        if self.holds_files:
            self.holding.set()
            await asyncio.Event().wait()
        if self.file_errors:
            raise self.file_errors.pop(0)
        for name, data in self.files.items():
            file = worker_pb2.ModelFile(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).digest())
            yield worker_pb2.GetModelFilesResponse(file=file)
            yield worker_pb2.GetModelFilesResponse(data=data)

    async def GetInfo(self, request: Any, context: Any) -> worker_pb2.GetInfoResponse:
        raise NotImplementedError

    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainResponse:
        raise NotImplementedError

    async def _read(
        self,
        requests: Any,
        running: dict[int, _Slot],
        responses: asyncio.Queue[decode_pb2.DecodeResponse | ServingError],
    ) -> None:
        async for request in requests:
            if request.WhichOneof("message") == "cancel":
                if request.cancel.slot in running:
                    running[request.cancel.slot].cancelled.set()
                continue
            self.num_starts += 1
            cancelled = asyncio.Event()
            failing = self.failing.pop(0) if self.failing else None
            work = self._run(request.signed_start, cancelled, responses, failing)
            running[request.signed_start.slot] = _Slot(asyncio.create_task(work), cancelled)

    async def _run(
        self,
        start: decode_pb2.SignedDecodeStart,
        cancelled: asyncio.Event,
        responses: asyncio.Queue[decode_pb2.DecodeResponse | ServingError],
        failing: Failing | Losing | None,
    ) -> None:
        sign, slot = FakeSignature(**json.loads(start.signed_start)), start.slot
        started = decode_pb2.SlotStarted(slot=slot, num_cached_tokens=2, queue=to_duration(0.25))
        responses.put_nowait(decode_pb2.DecodeResponse(started=[started]))
        num_lost = failing.num_tokens if isinstance(failing, Losing) else 0
        for number in range(sign.first, sign.end - num_lost):
            if isinstance(failing, Failing) and number - sign.first == failing.num_tokens:
                responses.put_nowait(failing.error if failing.breaks_stream else _failure(slot, failing.error))
                return
            if number == self.hold_after:
                self.holding.set()
                await cancelled.wait()
            if cancelled.is_set():
                self.dropped.set()
                responses.put_nowait(_failure(slot, RequestCancelledError("cancelled")))
                return
            responses.put_nowait(_tokens(slot, number, [FIRST_TOKEN_ID + number]))
            await asyncio.sleep(0)
        finished = decode_pb2.SlotFinished(slot=slot, reason=types_pb2.FINISH_REASON_LENGTH, num_output_tokens=sign.end)
        responses.put_nowait(decode_pb2.DecodeResponse(finished=[finished]))


def _tokens(slot: int, offset: int, token_ids: Sequence[int]) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(
        slots=[slot], num_tokens=[len(token_ids)], token_offsets=[offset], token_ids=token_ids
    )


def _failure(slot: int, error: ServingError) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(failures=[decode_pb2.SlotFailure(slot=slot, failure=to_failure(error))])


def _tokenizer_json() -> bytes:
    words = [f"<{number}>" for number in range(FIRST_TOKEN_ID)] + [word.replace(" ", "Ġ") for word in WORDS]
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: id for id, word in enumerate(words)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return backend.to_str().encode()

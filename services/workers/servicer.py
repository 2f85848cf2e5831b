"""WorkerService: the RPCs that every worker has besides its role's: information, model files, KV snapshot, drain."""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import grpc

from quartet.discovery.base import WorkerRecord
from quartet.errors import InvalidRequestError, ModelMismatchError, WorkerUnavailableError
from quartet.events.kv import KvSnapshot
from quartet.events.load import WorkerLoad
from quartet.events.wire import to_worker_load
from quartet.rpc.errors import to_duration, to_non_negative_seconds
from quartet.rpc.open_calls import OpenCalls
from quartet.rpc.server import Service
from quartet.streams.convert.hand_off import to_kv_snapshot_parts
from quartet.streams.convert.workers import to_worker_record
from quartet.streams.worker_client import DrainOutcome
from quartet.v1 import worker_pb2 as pb
from quartet.v1 import worker_pb2_grpc

_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"

# Small: a client that takes nothing keeps one, apart from what waits in the connection.
_PART_BYTES = 1 << 16

# A client has one call open at a time, and a router one snapshot. Calls of the files share one copy; a snapshot is
# shared only by those that asked for it together, so there are few.
_MAX_FILE_CALLS, _MAX_FILE_CALLS_OF_CONNECTION = 1024, 8
_MAX_SNAPSHOTS, _MAX_SNAPSHOTS_OF_CONNECTION = 16, 2

# Of a name that an error repeats.
_MAX_NAME_LENGTH = 64


class WorkerFace(Protocol):
    """The worker, as far as the servicer needs it."""

    @property
    def record(self) -> WorkerRecord:
        """The record that it announces."""
        ...

    @property
    def uptime_s(self) -> float:
        """Seconds since it started."""
        ...

    def sample_load(self) -> WorkerLoad:
        """Its load now."""
        ...

    async def kv_snapshot(self) -> KvSnapshot:
        """All blocks that can be shared at one moment. Raises ``WorkerUnavailableError``."""
        ...

    async def drain(self, timeout_s: float | None) -> DrainOutcome:
        """Refuse new requests, let running ones end within the time, cancel the rest."""
        ...


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Translates between messages and the worker."""

    def __init__(self, read_files: Callable[[], Mapping[str, bytes]]) -> None:
        """``read_files`` returns the small files of the model by name; it may block."""
        self._files = _SharedFiles(read_files)
        self._worker: WorkerFace | None = None
        self._file_calls = OpenCalls(
            "calls for model files", max_calls=_MAX_FILE_CALLS, max_of_connection=_MAX_FILE_CALLS_OF_CONNECTION
        )
        self._snapshots = OpenCalls(
            "KV snapshots", max_calls=_MAX_SNAPSHOTS, max_of_connection=_MAX_SNAPSHOTS_OF_CONNECTION
        )

    def serve(self, worker: WorkerFace) -> None:
        """Answer for ``worker``, which is made after the server: its record has the server's port."""
        self._worker = worker

    async def GetInfo(self, request: pb.GetInfoRequest, context: _Context) -> pb.GetInfoResponse:
        """As worker.proto says."""
        worker = self._required()
        return pb.GetInfoResponse(
            record=to_worker_record(worker.record),
            load=to_worker_load(worker.sample_load()),
            uptime=to_duration(worker.uptime_s),
        )

    async def GetModelFiles(
        self, request: pb.GetModelFilesRequest, context: _Context
    ) -> AsyncIterator[pb.GetModelFilesResponse]:
        """As worker.proto says."""
        wanted = request.model_fingerprint
        if wanted and wanted != self._required().record.model_fingerprint:
            raise ModelMismatchError("this worker serves another model")
        self._file_calls.enter(context)
        files = await self._files.get()
        for name in _names(request, files.data):
            data = files.data[name]
            yield pb.GetModelFilesResponse(
                file=pb.ModelFile(name=name, size_bytes=len(data), sha256=files.digests[name])
            )
            for begin in range(0, len(data), _PART_BYTES):
                yield pb.GetModelFilesResponse(data=data[begin : begin + _PART_BYTES])

    async def StreamKvSnapshot(
        self, request: pb.StreamKvSnapshotRequest, context: _Context
    ) -> AsyncIterator[pb.StreamKvSnapshotResponse]:
        """As worker.proto says."""
        worker = self._required()
        self._snapshots.enter(context)
        for part in to_kv_snapshot_parts(await worker.kv_snapshot(), worker.record.epoch):
            yield part

    async def Drain(self, request: pb.DrainRequest, context: _Context) -> pb.DrainResponse:
        """As worker.proto says."""
        timeout_s = to_non_negative_seconds(request.timeout, "timeout") if request.HasField("timeout") else None
        outcome = await self._required().drain(timeout_s)
        return pb.DrainResponse(num_completed=outcome.num_completed, num_cancelled=outcome.num_cancelled)

    def _required(self) -> WorkerFace:
        if self._worker is None:
            raise WorkerUnavailableError("this worker is still starting", retry_delay_s=1.0)
        return self._worker


@dataclass(frozen=True, eq=False)
class _Files:
    """Small files of a model by name, and their SHA-256."""

    data: Mapping[str, bytes]
    digests: Mapping[str, bytes]


class _SharedFiles:
    """Reads the files once for all calls that are open at a time; they go with the last of these."""

    def __init__(self, read: Callable[[], Mapping[str, bytes]]) -> None:
        """``read`` may block."""
        self._read = read
        self._known: weakref.ref[_Files] | None = None
        self._reading: asyncio.Task[_Files] | None = None

    async def get(self) -> _Files:
        """The files. Raises what ``read`` does."""
        files = None if self._known is None else self._known()
        if files is not None:
            return files
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(self._load), name="read-model-files")
            self._reading.add_done_callback(self._end_reading)
        # A thread can't be interrupted: a caller that goes leaves the reading to those that come.
        return await asyncio.shield(self._reading)

    def _load(self) -> _Files:
        data = self._read()
        # A vocabulary may have 40 MB.
        return _Files(data, {name: hashlib.sha256(content).digest() for name, content in data.items()})

    def _end_reading(self, task: asyncio.Task[_Files]) -> None:
        self._reading = None
        if not task.cancelled() and task.exception() is None:
            self._known = weakref.ref(task.result())


def _names(request: pb.GetModelFilesRequest, files: Mapping[str, bytes]) -> Sequence[str]:
    """The names of the files to give. Raises ``InvalidRequestError``: too many, or not there."""
    if len(request.names) > len(files):
        raise InvalidRequestError(f"this model has {len(files)} files to give", field="names")
    for name in request.names:
        if name not in files:
            raise InvalidRequestError(f"this model has no file {name[:_MAX_NAME_LENGTH]!r} to give", field="names")
    return request.names or sorted(files)


def worker_service(servicer: WorkerServicer) -> Service:
    """WorkerService, for a server."""
    add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
    return Service("quartet.v1.WorkerService", lambda server: add(servicer, server))

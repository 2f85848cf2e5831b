"""The calls of ``WorkerService``: a worker's record and load, its model's text files, a snapshot of its KV blocks."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass

import grpc

from quartet.discovery.base import WorkerRecord
from quartet.errors import ModelFilesError
from quartet.events.kv import KvSnapshotPart
from quartet.events.load import WorkerLoad
from quartet.events.wire import from_worker_load
from quartet.rpc.errors import from_rpc_error
from quartet.streams.convert.hand_off import from_kv_snapshot_part
from quartet.streams.convert.workers import from_worker_record
from quartet.v1 import worker_pb2, worker_pb2_grpc


@dataclass(frozen=True)
class WorkerReport:
    """What a worker answered: what it announces, and its load now."""

    record: WorkerRecord
    load: WorkerLoad


@dataclass(frozen=True)
class DrainOutcome:
    """How a drain ended: requests that ended by themselves, and those that did not in time."""

    num_completed: int
    num_cancelled: int


class WorkerClient:
    """``WorkerService`` of one worker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Use ``channel``, which stays the caller's."""
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)

    async def info(self, timeout_s: float) -> WorkerReport:
        """Its record and its load. Raises ``ServingError``."""
        try:
            response: worker_pb2.GetInfoResponse = await self._stub.GetInfo(
                worker_pb2.GetInfoRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return WorkerReport(from_worker_record(response.record), from_worker_load(response.load))

    async def drain(self) -> DrainOutcome:
        """Have it end what it runs, within its own limit, and take nothing new. Raises ``ServingError``."""
        try:
            response: worker_pb2.DrainResponse = await self._stub.Drain(worker_pb2.DrainRequest())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return DrainOutcome(num_completed=response.num_completed, num_cancelled=response.num_cancelled)

    async def model_files(
        self, allowed: Collection[str], *, model_fingerprint: str = "", max_size_bytes: int, timeout_s: float
    ) -> dict[str, bytes]:
        """The small files of its model, of those that are ``allowed``; others are not kept.

        ``model_fingerprint`` names the model whose files are wanted, as the worker may have been replaced meanwhile;
        empty: any model.

        Raises:
            ModelMismatchError: it serves another model.
            ModelFilesError: all together are longer than ``max_size_bytes``, or a file is not what was announced.
            ServingError: the call failed.
        """
        receiver = _FileReceiver(allowed, max_size_bytes)
        request = worker_pb2.GetModelFilesRequest(model_fingerprint=model_fingerprint)
        call = self._stub.GetModelFiles(request, timeout=timeout_s)
        try:
            async for response in call:
                receiver.take(response)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()
        return receiver.finish()

    async def kv_snapshot(self, timeout_s: float) -> AsyncGenerator[KvSnapshotPart, None]:
        """All blocks that it could share, in parts of one number and epoch; whole once this ends without an error.

        Raises:
            ServingError: the call failed or took too long, or a message is impossible.
        """
        call = self._stub.StreamKvSnapshot(worker_pb2.StreamKvSnapshotRequest(), timeout=timeout_s)
        try:
            async for response in call:
                yield from_kv_snapshot_part(response)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()


class _FileReceiver:
    def __init__(self, allowed: Collection[str], max_size_bytes: int) -> None:
        self._allowed = allowed
        self._num_bytes_left = max_size_bytes
        self._files: dict[str, bytes] = {}
        self._announced: worker_pb2.ModelFile | None = None
        self._data = bytearray()

    def take(self, response: worker_pb2.GetModelFilesResponse) -> None:
        if response.WhichOneof("message") == "file":
            self._end_file()
            self._announced = response.file
            return
        if self._announced is None:
            raise ModelFilesError("the worker sent bytes of no file")
        self._num_bytes_left -= len(response.data)
        if self._num_bytes_left < 0:
            raise ModelFilesError("the worker's model files are too long")
        self._data += response.data

    def finish(self) -> dict[str, bytes]:
        self._end_file()
        return self._files

    def _end_file(self) -> None:
        announced, data = self._announced, bytes(self._data)
        self._announced = None
        self._data.clear()
        if announced is None or announced.name not in self._allowed:
            return
        if len(data) != announced.size_bytes or hashlib.sha256(data).digest() != announced.sha256:
            raise ModelFilesError(f"the worker's {announced.name} is not what it announced")
        self._files[announced.name] = data

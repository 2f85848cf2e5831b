"""What the router holds open to one life of one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quartet.discovery.base import Role, WorkerRecord
from quartet.errors import ServingError, WorkerUnavailableError
from quartet.kvcache.layout import HandOff
from quartet.rpc.channels import create_channel, watch_connection
from quartet.rpc.encode import EncodeStart
from quartet.rpc.encode_client import EncodeCall, EncodeClient
from quartet.rpc.inner import DecodeSink, InnerStart
from quartet.rpc.inner_client import DecodeCall, DecodeClient, PrefillCall, PrefillClient
from quartet.rpc.tls import TlsConfig
from quartet.rpc.worker_client import WorkerClient


class WorkerConnection:
    """One channel, with the worker's inner stream on it once it is needed.

    Attributes:
        record: of the life that this connects to.
        client: asks the worker about itself.
    """

    def __init__(
        self,
        record: WorkerRecord,
        tls: TlsConfig | None,
        on_broken: Callable[[WorkerRecord, ServingError], None],
        on_lost: Callable[[WorkerRecord], None],
        drop: Callable[[HandOff], None],
    ) -> None:
        """Connect at the first use; ``drop`` is given hand-offs that nobody waits for any more.

        ``on_broken`` hears of broken streams, ``on_lost`` of a lost connection that had none: a worker's death shows
        also where only clients run something.
        """
        self.record = record
        self._channel = create_channel(record.grpc_address, tls)
        self.client = WorkerClient(self._channel)
        self._on_broken = on_broken
        self._on_lost = on_lost
        self._watching = asyncio.create_task(
            watch_connection(self._channel, self._lost), name=f"connection to {record.worker_id}"
        )
        self._is_closed = False
        self._decode: DecodeClient | None = None
        self._prefill: PrefillClient | None = None
        self._encode: EncodeClient | None = None
        if record.role is Role.DECODE:
            self._decode = DecodeClient(record.worker_id, self._channel, self._broken)
        elif record.role is Role.PREFILL:
            self._prefill = PrefillClient(record.worker_id, self._channel, self._broken, drop)
        elif record.role is Role.ENCODE:
            self._encode = EncodeClient(record.worker_id, self._channel, drop)

    def decode(self, start: InnerStart, sink: DecodeSink) -> DecodeCall:
        """Start a decode, whose outputs go to ``sink``.

        Raises ``WorkerUnavailableError`` when this is closed, or to no decode worker.
        """
        if self._decode is None or self._is_closed:
            raise WorkerUnavailableError(f"worker {self.record.worker_id} is gone")
        return self._decode.start(start, sink)

    def prefill(self, start: InnerStart) -> PrefillCall:
        """Start a prefill. Raises ``WorkerUnavailableError`` when this is closed, or to no prefill worker."""
        if self._prefill is None or self._is_closed:
            raise WorkerUnavailableError(f"worker {self.record.worker_id} is gone")
        return self._prefill.start(start)

    def encode(self, start: EncodeStart, on_encoded: Callable[[HandOff], None]) -> EncodeCall:
        """Start to encode. Raises ``WorkerUnavailableError`` when this is closed, or to no encode worker."""
        if self._encode is None or self._is_closed:
            raise WorkerUnavailableError(f"worker {self.record.worker_id} is gone")
        return self._encode.start(start, on_encoded)

    async def close(self) -> None:
        """Break the stream: requests on it fail with ``WorkerUnavailableError`` and go on elsewhere."""
        self._is_closed = True
        self._watching.cancel()
        await asyncio.wait([self._watching])
        for client in (self._decode, self._prefill, self._encode):
            if client is not None:
                await client.close()
        await self._channel.close()

    def _lost(self) -> None:
        client = self._decode or self._prefill
        # A stream may outlive the word that no new ones are taken; when it breaks, it says so. Encodes only fail.
        if client is None or not client.is_open:
            self._on_lost(self.record)

    def _broken(self, error: ServingError) -> None:
        if not self._is_closed:
            self._on_broken(self.record, error)

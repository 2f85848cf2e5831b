"""Connections to decode workers, kept between requests: one channel and one Decode stream to each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from quartet.api.placement import PlacedChoice
from quartet.api.text_cache import MAX_FILES_BYTES
from quartet.client.routers import ClientClosedError
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import ServingError
from quartet.rpc.channels import TlsConfig, create_channel
from quartet.streams.client import DecodeClient
from quartet.streams.messages import DecodeStarted, SignedPlacement
from quartet.streams.worker_client import WorkerClient
from quartet.text.model_files import TEXT_FILE_NAMES

#: Seconds for which an unused connection is kept.
IDLE_S = 60.0

_FILES_TIMEOUT_S = 30.0


@dataclass(eq=False)
class DecodeWorker:
    """One worker, connected when first used and reconnected when needed.

    Attributes:
        decode: its Decode stream, shared by all requests of this client.
    """

    channel: grpc.aio.Channel
    decode: DecodeClient
    num_users: int = field(default=0, init=False)
    idle_since: float = field(default=0.0, init=False)

    async def text_files(self, model_fingerprint: str) -> dict[str, bytes]:
        """The text files of this model. Raises ``ServingError``; ``ModelMismatchError``: it serves another model."""
        return await WorkerClient(self.channel).model_files(
            TEXT_FILE_NAMES,
            model_fingerprint=model_fingerprint,
            max_size_bytes=MAX_FILES_BYTES,
            timeout_s=_FILES_TIMEOUT_S,
        )

    async def close(self) -> None:
        """End its requests and the connection."""
        await self.decode.close()
        await self.channel.close()


class DecodeWorkers:
    """The workers that this client streams from, by address; unused ones are closed after a while.

    Attributes:
        is_closed: the client streams from no worker any more.
    """

    def __init__(self, tls: TlsConfig | None, *, idle_s: float = IDLE_S) -> None:
        """Dial with ``tls``; close workers that are unused for ``idle_s`` seconds."""
        self._tls = tls
        self._idle_s = idle_s
        self._workers: dict[str, DecodeWorker] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.is_closed = False

    def __len__(self) -> int:
        """Workers that are kept."""
        return len(self._workers)

    @contextmanager
    def use(self, address: str) -> Iterator[DecodeWorker]:
        """The worker at ``address``, kept at least until the block ends.

        Raises:
            ClientClosedError: the client was closed.
        """
        if self.is_closed:
            raise ClientClosedError
        worker = self._workers.get(address)
        if worker is None:
            channel = create_channel(address, self._tls)
            worker = self._workers[address] = DecodeWorker(channel, DecodeClient(f"at {address}", channel, _nothing))
        worker.num_users += 1
        try:
            yield worker
        finally:
            worker.num_users -= 1
            if not worker.num_users:
                worker.idle_since = asyncio.get_running_loop().time()
                self._sweep_later()

    async def close(self) -> None:
        """End all requests and connections, for good."""
        self.is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        workers, self._workers = list(self._workers.values()), {}
        await asyncio.gather(*(worker.close() for worker in workers), *self._closing)

    def release(self, choices: Iterable[PlacedChoice]) -> None:
        """Start these choices at their workers and cancel them at once, so that the workers release their hand-offs."""
        for choice in choices:
            if isinstance(choice.next, SignedPlacement) and not self.is_closed:
                with self.use(choice.next.address) as worker:
                    worker.decode.start_signed(choice.next, _Unwanted()).cancel()

    def _sweep_later(self) -> None:
        # One timer for all: most workers are used again long before it fires.
        if self._sweep is None and not self.is_closed:
            self._sweep = asyncio.get_running_loop().call_later(self._idle_s, self._drop_idle)

    def _drop_idle(self) -> None:
        self._sweep = None
        limit = asyncio.get_running_loop().time() - self._idle_s
        for address, worker in list(self._workers.items()):
            if worker.num_users:
                continue
            if worker.idle_since > limit:
                self._sweep_later()
                continue
            del self._workers[address]
            closing = asyncio.create_task(worker.close(), name=f"close {address}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


class _Unwanted:
    """Drops the output of an unwanted decode."""

    def started(self, started: DecodeStarted) -> None:
        """Do nothing: it ends soon."""

    def take_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Do nothing: nobody wants them."""

    def take(self, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], now: float) -> bool:
        return False


def _nothing(_error: ServingError) -> None:
    """Do nothing: its calls have already failed."""

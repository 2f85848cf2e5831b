"""A session's client in the raw: checks the order of what comes, and gathers it by slot."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from quartet.v1 import router_pb2 as pb
from quartet.v1 import types_pb2
from tests.router.system import TIMEOUT_S, Stub


@dataclass
class Received:
    """What came for one request."""

    accepted: pb.Accepted | None = None
    placed: set[int] = field(default_factory=set)
    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    logprobs: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: dict[int, pb.ChoiceFinished] = field(default_factory=dict)
    failure: types_pb2.Failure | None = None

    @property
    def reasons(self) -> list[int]:
        return [self.finished[choice].reason for choice in sorted(self.finished)]


class SessionReader:
    """One session. ``received`` is by slot, of the last request there."""

    def __init__(self, stub: Stub, **call: object) -> None:
        self.call = stub.Session(**call)
        self.received: dict[int, Received] = {}
        self.num_messages = 0
        self._num_choices: dict[int, int] = {}

    async def start(self, slot: int, start: pb.GenerateStart, **more: object) -> None:
        self.received[slot] = Received()
        await self._write(pb.SessionRequest(start=pb.SessionStart(slot=slot, start=start, **more)))

    async def cancel(self, slot: int) -> None:
        await self._write(pb.SessionRequest(cancel=types_pb2.Cancel(slot=slot)))

    async def half_close(self) -> None:
        await self.call.done_writing()

    async def read_until(self, is_enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not is_enough():
                response = await self.call.read()
                assert response is not grpc.aio.EOF, f"the stream ended: {await self.call.code()}"
                self._take(response)

    async def read_ends(self, *slots: int) -> None:
        """Until the requests in ``slots`` have ended."""
        await self.read_until(lambda: all(self.has_ended(slot) for slot in slots))

    async def read_all(self) -> grpc.StatusCode:
        """Until the stream ends; its status."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                while (response := await self.call.read()) is not grpc.aio.EOF:
                    self._take(response)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return await self.call.code()

    def has_ended(self, slot: int) -> bool:
        received = self.received[slot]
        num_choices = self._num_choices.get(slot, 1)
        return received.failure is not None or len(received.finished) == num_choices

    async def _write(self, request: pb.SessionRequest) -> None:
        if request.HasField("start"):
            self._num_choices[request.start.slot] = request.start.start.num_choices or 1
        async with asyncio.timeout(TIMEOUT_S):
            await self.call.write(request)

    def _take(self, response: pb.SessionResponse) -> None:
        self.num_messages += 1
        for item in response.accepted:
            received = self._open(item.slot)
            assert received.accepted is None
            received.accepted = item.accepted
            received.placed = {placement.choice for placement in item.accepted.choices}
        for placed in response.placed:
            self._open(placed.slot).placed.add(placed.placement.choice)
        self._take_columns(response)
        for finished in response.finished:
            received = self._open(finished.slot)
            assert received.finished.setdefault(finished.finished.choice, finished.finished) is finished.finished
        for failed in response.failures:
            received = self._open(failed.slot)
            received.failure = failed.failure

    def _take_columns(self, response: pb.SessionResponse) -> None:
        choices = response.choices or [0] * len(response.slots)
        texts = response.texts or [""] * len(response.slots)
        columns = zip(response.slots, choices, response.num_tokens, response.token_offsets, texts, strict=True)
        logprobs = list(response.logprobs)
        begin = 0
        for slot, choice, num_tokens, offset, text in columns:
            received = self._open(slot)
            assert choice in received.placed, "a delta came before its choice's placement"
            assert choice not in received.finished, "a delta came after the end"
            token_ids = list(response.token_ids[begin : begin + num_tokens])
            begin += num_tokens
            if token_ids:
                assert offset == len(received.token_ids[choice]), "tokens are missing"
            received.token_ids[choice] += token_ids
            received.texts[choice] += text
            if logprobs and (logprobs[0].slot, logprobs[0].choice) == (slot, choice):
                received.logprobs[choice] += [entry.token_id for entry in logprobs.pop(0).tokens]
        assert begin == len(response.token_ids)
        assert not logprobs

    def _open(self, slot: int) -> Received:
        assert not self.has_ended(slot), "something came after the end"
        return self.received[slot]

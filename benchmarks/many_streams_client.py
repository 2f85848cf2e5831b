"""The load of benchmarks.many_streams: requests opened all at once, each followed to its end.

python -m benchmarks.many_streams_client     (reads a job, a line of JSON; writes one line when all have ended)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import grpc
import uvloop

from benchmarks.relay_load import Job, Way, decode_job, describe, describe_failure, find_absence, make_start
from quartet.rpc.channels import create_channel
from quartet.v1 import router_pb2, router_pb2_grpc

_Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the requests ended. Seconds count from just before the first was opened.

    Attributes:
        accepted_s, first_token_s, ended_s: until the latest request so far reached this point.
        max_open: most requests that were accepted and not ended at one time.
        num_complete: requests that ended well with every token, in order, none twice.
        errors: the other requests, by error message.
        absent: the router's message if it does not offer this way.
    """

    accepted_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    num_accepted: int = 0
    max_open: int = 0
    num_complete: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    absent: str | None = None


class Burst:
    """Requests of one job, all opened at once."""

    def __init__(self, job: Job) -> None:
        """Open nothing before ``run``."""
        self._job = job
        self._began_at = 0.0
        self._accepted_s = self._first_token_s = 0.0
        self._num_accepted = self._num_open = self._max_open = 0
        self._received = [0] * job.count
        self._num_complete = 0
        self._errors: Counter[str] = Counter()

    async def run(self) -> Outcome:
        """Open all requests, and follow each to its end."""
        job = self._job
        self._began_at = time.monotonic()
        async with create_channel(job.router_address, None) as channel:
            router = router_pb2_grpc.RouterServiceStub(channel)
            numbers = range(job.count)
            if job.way is Way.GENERATE:
                await asyncio.gather(*(self._watch(self._generate(router, number)) for number in numbers))
            else:
                shares = [numbers[first :: job.num_sessions] for first in range(job.num_sessions)]
                await asyncio.gather(*(self._watch(self._session(router, share)) for share in shares))
        return Outcome(
            accepted_s=self._accepted_s,
            first_token_s=self._first_token_s,
            ended_s=self._now(),
            num_accepted=self._num_accepted,
            max_open=self._max_open,
            num_complete=self._num_complete,
            errors=dict(self._errors),
        )

    async def _watch(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except grpc.aio.AioRpcError as error:
            self._errors[describe(error)] += 1

    async def _generate(self, router: router_pb2_grpc.RouterServiceAsyncStub, number: int) -> None:
        call: _Call = router.Generate()
        with contextlib.suppress(asyncio.InvalidStateError):  # refused already: the reader gets the error
            await call.write(router_pb2.GenerateRequest(start=self._start(number)))
            await call.done_writing()
        has_ended = False
        while isinstance(response := await call.read(), router_pb2.GenerateResponse):
            if response.HasField("accepted"):
                self._accept()
            elif response.HasField("finished"):
                has_ended = True
                self._finish(number)
            elif num_tokens := len(response.delta.token_ids):
                self._take(number, response.delta.token_offset, num_tokens)
        if not has_ended:
            self._errors["the stream ended without a word"] += 1

    async def _session(self, router: router_pb2_grpc.RouterServiceAsyncStub, numbers: range) -> None:
        call: _Call = router.Session()
        reading = asyncio.create_task(self._read_session(call, numbers))
        try:
            for slot, number in enumerate(numbers):
                start = router_pb2.SessionStart(slot=slot, start=self._start(number))
                await call.write(router_pb2.SessionRequest(start=start))
            await call.done_writing()
            await reading
        finally:
            reading.cancel()

    async def _read_session(self, call: _Call, numbers: range) -> None:
        open_slots = set(range(len(numbers)))
        while isinstance(response := await call.read(), router_pb2.SessionResponse):
            for _ in response.accepted:
                self._accept()
            columns = zip(response.slots, response.token_offsets, response.num_tokens, strict=True)
            for slot, offset, num_tokens in columns:
                self._take(numbers[slot], offset, num_tokens)
            for finished in response.finished:
                open_slots.remove(finished.slot)
                self._finish(numbers[finished.slot])
            for failed in response.failures:
                open_slots.remove(failed.slot)
                self._errors[describe_failure(failed.failure)] += 1
        if open_slots:
            self._errors["the session ended without a word"] += len(open_slots)

    def _accept(self) -> None:
        self._num_accepted += 1
        self._num_open += 1
        self._max_open = max(self._max_open, self._num_open)
        self._accepted_s = self._now()

    def _take(self, number: int, offset: int, num_tokens: int) -> None:
        if not offset:
            self._first_token_s = self._now()
        # After a missing token, or one that came twice, the count stops growing: the request is then not complete.
        if offset == self._received[number]:
            self._received[number] += num_tokens

    def _finish(self, number: int) -> None:
        self._num_open -= 1
        if self._received[number] == self._job.num_output_tokens:
            self._num_complete += 1
        else:
            self._errors["tokens are missing"] += 1

    def _now(self) -> float:
        return time.monotonic() - self._began_at

    def _start(self, number: int) -> router_pb2.GenerateStart:
        return make_start(
            random.Random(number),
            seed=number,
            num_prompt_tokens=self._job.num_prompt_tokens,
            num_output_tokens=self._job.num_output_tokens,
            with_text=self._job.with_text,
        )


def main() -> None:
    """Run the job from the standard input."""
    print(json.dumps(asdict(uvloop.run(_run(decode_job(sys.stdin.readline()))))))


async def _run(job: Job) -> Outcome:
    if (absent := await find_absence(job)) is not None:
        return Outcome(absent=absent)
    return await Burst(job).run()


if __name__ == "__main__":
    main()

"""A closed loop of clients: each sends its next request when its last one has ended.

It speaks to the router by raw stubs, where ``quartet bench`` has ``QuartetClient``, and counts otherwise, because it
has to show that under overload nothing fails and nothing is done twice:

- ``QuartetClient`` asks again by itself where a call broke before anything came: here that is a failure to be counted.
- Evidence of the servers is set against all requests, the ramp's and the last ones' included, so prompt tokens and
  attempts are sums over all of them; ``quartet bench`` has figures of those only that it sent within its window.
- What counts is finished work: tokens of requests that ended within the window, not tokens that arrived in it, some of
  them of requests that fail later. An answer shorter than was asked for is a failure.
- The client shares the machine's cores with what it measures, so it should cost little.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import grpc

from quartet.rpc.channels import create_channel
from quartet.v1 import router_pb2, router_pb2_grpc, types_pb2

# A client that was turned away waits as the router asks it to (``AdmissionConfig.retry_delay_s``), not to hammer it.
_PAUSE_AFTER_ERROR_S = 1.0
_DRAIN_TIMEOUT_S = 120.0
_NOT_ENDED = "NOT_ENDED"
_INCOMPLETE = "INCOMPLETE"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What clients ask for: prompts of random token ids, so that no two share a prefix.

    Attributes:
        min_prompt_tokens, max_prompt_tokens: bounds of a prompt's length, drawn evenly.
        num_output_tokens: of each answer; end-of-sequence is ignored.
        first_token_id, end_token_id: ids are drawn from this range.
        seed: of prompts and lengths: the same seed gives the same prompts, which are cached the second time.
    """

    min_prompt_tokens: int
    max_prompt_tokens: int
    num_output_tokens: int
    first_token_id: int
    end_token_id: int
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LoadFigures:
    """What a loop saw. Requests count from the loop's start until the last has ended; rates in the window only.

    Attributes:
        concurrency: clients.
        duration_s: length of the window, which begins after the ramp and ends when clients send nothing new.
        tokens_per_s: output tokens of requests that ended well within the window, for each second of it.
        requests_per_s: such requests.
        requests_finished: requests that ended well.
        requests_failed: requests that ended otherwise, but for those refused.
        requests_refused: requests that got RESOURCE_EXHAUSTED.
        errors: requests by status, refused ones included.
        prompt_tokens_sent: of requests that ended well.
        attempts: of requests that ended well, as the router told.
        ttft_ms_p50, ttft_ms_p99: from a request's start to its first token, of requests that ended in the window.
        duration_ms_p50, duration_ms_p99: the same to its end.
    """

    concurrency: int
    duration_s: float
    tokens_per_s: float
    requests_per_s: float
    requests_finished: int
    requests_failed: int
    requests_refused: int
    errors: Mapping[str, int]
    prompt_tokens_sent: int
    attempts: int
    ttft_ms_p50: float
    ttft_ms_p99: float
    duration_ms_p50: float
    duration_ms_p99: float


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """A request that ended well; times are monotonic seconds."""

    began_at: float
    first_token_at: float
    ended_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_attempts: int


class _RequestFailedError(Exception):
    """A request ended badly; the message is its status."""


@dataclass
class ClosedLoop:
    """Clients against one router.

    Attributes:
        num_in_flight: requests that run now.
        num_tokens: output tokens that came so far.
        errors: requests that ended badly so far, by status.
    """

    router_address: str
    workload: Workload
    num_in_flight: int = 0
    num_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    _ended: list[_Ended] = field(default_factory=list)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, num_clients: int, *, ramp_s: float, duration_s: float) -> LoadFigures:
        """Run ``num_clients`` for ``ramp_s`` and then for the window of ``duration_s``; wait for the last to end."""
        async with create_channel(self.router_address, None) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            clients = [asyncio.create_task(self._client(stub, number)) for number in range(num_clients)]
            await asyncio.sleep(ramp_s)
            began = time.monotonic()
            await asyncio.sleep(duration_s)
            ended = time.monotonic()
            self._stopping.set()
            await self._drain(clients)
        return self._figures(num_clients, began, ended)

    async def _drain(self, clients: list[asyncio.Task[None]]) -> None:
        """Let the last requests end; those that don't are failures too."""
        _, pending = await asyncio.wait(clients, timeout=_DRAIN_TIMEOUT_S)
        for client in pending:
            self.errors[_NOT_ENDED] += 1
            client.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for client in set(clients) - pending:
            client.result()  # a bug of ours must not pass for a quiet client

    async def _client(self, stub: router_pb2_grpc.RouterServiceAsyncStub, number: int) -> None:
        rng = random.Random(f"{self.workload.seed}-{number}")
        while not self._stopping.is_set():
            self.num_in_flight += 1
            try:
                self._ended.append(await self._request(stub, self._prompt(rng)))
            except _RequestFailedError as failure:
                self.errors[str(failure)] += 1
                await self._pause()
            finally:
                self.num_in_flight -= 1

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), _PAUSE_AFTER_ERROR_S)
        except TimeoutError:
            return

    def _prompt(self, rng: random.Random) -> list[int]:
        workload = self.workload
        length = rng.randint(workload.min_prompt_tokens, workload.max_prompt_tokens)
        return rng.choices(range(workload.first_token_id, workload.end_token_id), k=length)

    async def _request(self, stub: router_pb2_grpc.RouterServiceAsyncStub, prompt: list[int]) -> _Ended:
        began_at = time.monotonic()
        first_token_at = 0.0
        num_output_tokens = 0
        finished: router_pb2.ChoiceFinished | None = None
        try:
            async for response in stub.Generate(_one(self._start(prompt))):
                if num_tokens := len(response.delta.token_ids):
                    first_token_at = first_token_at or time.monotonic()
                    num_output_tokens += num_tokens
                    self.num_tokens += num_tokens
                elif response.HasField("finished"):
                    finished = response.finished
        except grpc.aio.AioRpcError as error:
            raise _RequestFailedError(error.code().name) from error
        if finished is None or num_output_tokens != self.workload.num_output_tokens:
            raise _RequestFailedError(_INCOMPLETE)
        return _Ended(
            began_at=began_at,
            first_token_at=first_token_at,
            ended_at=time.monotonic(),
            num_prompt_tokens=len(prompt),
            num_output_tokens=num_output_tokens,
            num_attempts=finished.usage.num_attempts,
        )

    def _start(self, prompt: list[int]) -> router_pb2.GenerateRequest:
        sampling = types_pb2.Sampling(max_tokens=self.workload.num_output_tokens, ignore_eos=True)
        start = router_pb2.GenerateStart(token_ids=router_pb2.TokenIds(ids=prompt), sampling=sampling)
        return router_pb2.GenerateRequest(start=start)

    def _figures(self, num_clients: int, began: float, ended: float) -> LoadFigures:
        within = [item for item in self._ended if began <= item.ended_at < ended]
        ttft = [item.first_token_at - item.began_at for item in within]
        durations = [item.ended_at - item.began_at for item in within]
        refused = self.errors[grpc.StatusCode.RESOURCE_EXHAUSTED.name]
        return LoadFigures(
            concurrency=num_clients,
            duration_s=ended - began,
            tokens_per_s=sum(item.num_output_tokens for item in within) / (ended - began),
            requests_per_s=len(within) / (ended - began),
            requests_finished=len(self._ended),
            requests_failed=self.errors.total() - refused,
            requests_refused=refused,
            errors=dict(self.errors),
            prompt_tokens_sent=sum(item.num_prompt_tokens for item in self._ended),
            attempts=sum(item.num_attempts for item in self._ended),
            ttft_ms_p50=1e3 * quantile(ttft, 0.5),
            ttft_ms_p99=1e3 * quantile(ttft, 0.99),
            duration_ms_p50=1e3 * quantile(durations, 0.5),
            duration_ms_p99=1e3 * quantile(durations, 0.99),
        )


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of ``values`` don't exceed; 0 where there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


async def _one(request: router_pb2.GenerateRequest) -> AsyncIterator[router_pb2.GenerateRequest]:
    yield request

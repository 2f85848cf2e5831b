"""Sends one request at a time to one router, and measures where its time went."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from quartet.v1 import router_pb2, router_pb2_grpc, types_pb2

#: The worker that prefilled sends the first; Decode sends the second, which ends the request.
NUM_OUTPUT_TOKENS = 2

# The tiny model's special tokens have the ids below ``_FIRST_TOKEN_ID``.
_FIRST_TOKEN_ID, _END_TOKEN_ID = 16, 2048
_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One request. All times are in milliseconds; ``None``: this step did not happen.

    Attributes:
        ttft_ms, second_token_ms: from sending the request, as the client saw it.
        first_token_ms, total_ms: from arrival, as the router saw it; the second token ends the request.
        media_ms: fetching and encoding media.
        prefill_ms: the prefill hop.
        decode_queue_ms: from arrival at the decode worker until it joined the batch, the transfer included.
        transfer_ms: moving blocks.
        num_prompt_tokens, num_cached_tokens: tokens of the prompt, and how many of them had cached KV.
    """

    ttft_ms: float
    second_token_ms: float
    first_token_ms: float
    total_ms: float
    media_ms: float | None = None
    prefill_ms: float | None
    decode_queue_ms: float
    transfer_ms: float | None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


async def ask(stub: router_pb2_grpc.RouterServiceAsyncStub, rng: random.Random, num_tokens: int) -> Answered:
    """Send ``num_tokens`` random ids, a prompt that shares no prefix with any other. Raises as ``send`` does."""
    return await send(stub, make_start(random_prompt(rng, num_tokens)))


def make_start(
    prompt: Sequence[int],
    *,
    media: Sequence[router_pb2.MediaPart] = (),
    cache_salt: str = "",
    seed: int | None = None,
) -> router_pb2.GenerateStart:
    """A request for two tokens."""
    return router_pb2.GenerateStart(
        token_ids=router_pb2.TokenIds(ids=prompt),
        sampling=types_pb2.Sampling(max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True),
        media=media,
        cache_salt=cache_salt,
        seed=seed,
    )


async def send(stub: router_pb2_grpc.RouterServiceAsyncStub, start: router_pb2.GenerateStart) -> Answered:
    """Send the start that ``make_start`` made, and wait for the request's end.

    Raises:
        grpc.aio.AioRpcError: the request failed.
        RuntimeError: fewer or more tokens came than were asked for.
    """
    request = router_pb2.GenerateRequest(start=start)
    came_at: list[float] = []
    began = time.perf_counter()
    async for response in stub.Generate(_one(request), timeout=_TIMEOUT_S):
        came_at += [time.perf_counter()] * len(response.delta.token_ids)
        if response.HasField("finished"):
            times, usage = response.finished.time, response.finished.usage
    if len(came_at) != NUM_OUTPUT_TOKENS:
        raise RuntimeError(f"{len(came_at)} tokens came, not {NUM_OUTPUT_TOKENS}")
    return Answered(
        ttft_ms=1e3 * (came_at[0] - began),
        second_token_ms=1e3 * (came_at[1] - began),
        first_token_ms=_ms(times.first_token),
        total_ms=_ms(times.total),
        media_ms=_ms(times.media) if times.HasField("media") else None,
        prefill_ms=_ms(times.prefill) if times.HasField("prefill") else None,
        decode_queue_ms=_ms(times.decode_queue),
        transfer_ms=_ms(times.transfer) if times.HasField("transfer") else None,
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
    )


def split(answered: Answered) -> Mapping[str, float]:
    """The parts of ``second_token_ms``, in order of time; they add up to it.

    Disaggregated: ``route`` (in the router until the prefill begins), ``prefill`` (that hop, computing included),
    ``transfer``, ``join`` (in the decode worker, until the batch), ``first_message`` (the rest of the decode hop, one
    step included). Aggregated: ``first_token`` (everything before the first token except ``join``), ``join``, ``step``
    (from the first token to the second). Both: ``api`` (between client and router).
    """
    api_ms = answered.second_token_ms - answered.total_ms
    after_first_ms = answered.total_ms - answered.first_token_ms
    if answered.prefill_ms is None:
        return {
            "first_token": answered.first_token_ms - answered.decode_queue_ms,
            "join": answered.decode_queue_ms,
            "step": after_first_ms,
            "api": api_ms,
        }
    transfer_ms = answered.transfer_ms or 0.0
    return {
        "route": answered.first_token_ms - answered.prefill_ms,
        "prefill": answered.prefill_ms,
        "transfer": transfer_ms,
        "join": answered.decode_queue_ms,
        "first_message": after_first_ms - transfer_ms - answered.decode_queue_ms,
        "api": api_ms,
    }


def median_parts(parts: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Each part's median. All of ``parts``, at least one, have the same keys."""
    return {name: statistics.median(item[name] for item in parts) for name in parts[0]}


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """``num_tokens`` random ids of the tiny model, without special tokens."""
    return rng.choices(range(_FIRST_TOKEN_ID, _END_TOKEN_ID), k=num_tokens)


def _ms(duration: Duration) -> float:
    return 1e3 * duration.seconds + duration.nanos / 1e6


async def _one(request: router_pb2.GenerateRequest) -> AsyncIterator[router_pb2.GenerateRequest]:
    yield request

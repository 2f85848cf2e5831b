"""Time to the first token of prompts with an image, through the Router, one at a time: what do the caches save?"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.disagg_client import Answered, make_start, random_prompt, send
from benchmarks.disagg_figures import median_parts
from benchmarks.encode_images import noise_image, photo
from benchmarks.encode_stack import BLOCK_SIZE, ENCODE
from benchmarks.stack import Stack
from quartet.rpc.channels import create_channel
from quartet.v1 import router_pb2, router_pb2_grpc

# Of the tiny model: `<|image|>`, and what each fills.
_IMAGE_TOKEN_ID, _NUM_IMAGE_TOKENS = 7, 64
# All but the prompt's last token lie in full blocks, so all of them can be cached.
_NUM_TEXT_TOKENS = BLOCK_SIZE + 1
#: Of every prompt.
NUM_PROMPT_TOKENS = _NUM_IMAGE_TOKENS + _NUM_TEXT_TOKENS
_OTHER_SALT = "another"
_NUM_WARM_UP_ROUNDS = 2
_NUM_NEW_IMAGES = 2  # a round


class Prompt(StrEnum):
    """What is asked, in this order."""

    NEW = "new"  # an image and text that nobody has seen
    CACHED_EMBEDDINGS = "cached_embeddings"  # the same with another salt: its KV cannot be shared
    CACHED_PREFIX = "cached_prefix"  # the same with the first salt
    TEXT = "text"  # as many tokens, all of text, that nobody has seen
    PHOTO_NEW = "photo_new"  # as ``NEW`` with a large JPEG
    PHOTO_CACHED_EMBEDDINGS = "photo_cached_embeddings"


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Milliseconds that half of the rounds, and nine in ten, took at most."""

    p50: float
    p90: float


@dataclass(frozen=True, kw_only=True)
class TtftFigures:
    """Over all rounds, by ``Prompt``.

    Attributes:
        parts_ms: medians of what the time is made of; see ``split``.
    """

    ttft_ms: Mapping[str, Quantiles]
    parts_ms: Mapping[str, Mapping[str, float]]


async def measure_ttft(stack: Stack, num_rounds: int, on_round: Callable[[int], None]) -> TtftFigures:
    """Ask ``num_rounds`` times for each ``Prompt``, and some more to become warm; ``on_round`` is told the number.

    Raises:
        grpc.aio.AioRpcError: a request ended badly.
        RuntimeError: something was cached that should not have been, or the other way round.
    """
    before = (await stack.metrics())[ENCODE]
    rng = random.Random(1)
    rounds = []
    async with create_channel(stack.router_address, None) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        for number in range(num_rounds + _NUM_WARM_UP_ROUNDS):
            on_round(number)
            rounds.append(await _round(stub, rng))
    num_encoded = (await stack.metrics())[ENCODE].since(before).total("quartet_encode_batched_items_total")
    if num_encoded != _NUM_NEW_IMAGES * len(rounds):
        raise RuntimeError(f"{num_encoded:.0f} images were encoded in {len(rounds)} rounds, not {_NUM_NEW_IMAGES} each")
    return summarize(rounds[_NUM_WARM_UP_ROUNDS:])


def summarize(rounds: Sequence[Mapping[Prompt, Answered]]) -> TtftFigures:
    """Quantiles and medians of ``rounds``, of which there are at least two."""
    return TtftFigures(
        ttft_ms={prompt: _quantiles([answered[prompt].ttft_ms for answered in rounds]) for prompt in Prompt},
        parts_ms={prompt: median_parts([split(answered[prompt]) for answered in rounds]) for prompt in Prompt},
    )


def split(answered: Answered) -> Mapping[str, float]:
    """The parts of ``ttft_ms``, which they add up to.

    ``media``: that hop, with naming and fetching; ``route``: all else in the router; ``prefill``: that hop, pulling
    embeddings and computing; ``edge``: between client and router.
    """
    media_ms, prefill_ms = answered.media_ms or 0.0, answered.prefill_ms or 0.0
    return {
        "media": media_ms,
        "route": answered.first_token_ms - media_ms - prefill_ms,
        "prefill": prefill_ms,
        "edge": answered.ttft_ms - answered.first_token_ms,
    }


def checked(prompt: Prompt, answered: Answered) -> Answered:
    """``answered``, of a ``prompt`` of which as much was cached as it is there for. Raises ``RuntimeError`` if not."""
    num_cached = NUM_PROMPT_TOKENS - 1 if prompt is Prompt.CACHED_PREFIX else 0
    if (answered.num_prompt_tokens, answered.num_cached_tokens) != (NUM_PROMPT_TOKENS, num_cached):
        raise RuntimeError(
            f"{prompt}: {answered.num_cached_tokens} of {answered.num_prompt_tokens} tokens were cached, not "
            f"{num_cached} of {NUM_PROMPT_TOKENS}"
        )
    return answered


async def _round(stub: router_pb2_grpc.RouterServiceAsyncStub, rng: random.Random) -> Mapping[Prompt, Answered]:
    small, large = (
        _WithImage(router_pb2.MediaPart(data=file), [_IMAGE_TOKEN_ID, *random_prompt(rng, _NUM_TEXT_TOKENS)])
        for file in (noise_image(rng), photo(rng))
    )
    starts = {
        Prompt.NEW: small.start(),
        Prompt.CACHED_EMBEDDINGS: small.start(_OTHER_SALT),
        Prompt.CACHED_PREFIX: small.start(),
        Prompt.TEXT: make_start(random_prompt(rng, NUM_PROMPT_TOKENS)),
        Prompt.PHOTO_NEW: large.start(),
        Prompt.PHOTO_CACHED_EMBEDDINGS: large.start(_OTHER_SALT),
    }
    return {prompt: checked(prompt, await send(stub, start)) for prompt, start in starts.items()}


@dataclass(frozen=True)
class _WithImage:
    part: router_pb2.MediaPart
    token_ids: Sequence[int]

    def start(self, cache_salt: str = "") -> router_pb2.GenerateStart:
        return make_start(self.token_ids, media=[self.part], cache_salt=cache_salt)


def _quantiles(values: Sequence[float]) -> Quantiles:
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Quantiles(p50=statistics.median(values), p90=tenths[-1])

"""What images cost: encoding them, waiting for the first token of a prompt with an image, and moving embeddings.

Real processes run the tiny model (Encode, Prefill, Decode, Router). It is so small that the code around the model costs
as much as the model. No worker has seen an image before: there are small ones of noise, and large smooth ones as a
camera makes them.

*Rate*: how many images a second one Encode worker takes. The client asks it directly, once with one image at a time and
once so that batches are full; both ways alternate. After each turn, off the clock, the client releases what the worker
holds for hand-off. *TTFT*: prompts with an image, one at a time through the Router, show what the caches save. *Pulls*:
the processes of ``benchmarks.transfer`` move the embeddings that LLaVA-1.6 of 7 B makes of its largest image.

    python -m benchmarks.encode --json FILE
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import grpc
import uvloop
from PIL import Image

from benchmarks.disagg_client import Answered, make_start, median_parts, random_prompt, send
from benchmarks.processes import CpuMeter
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.stack import Stack
from benchmarks.transfer import Plan, Run, measure_transfer
from benchmarks.transfer_source import PoolShape
from quartet.config import build
from quartet.discovery.host import host_identity
from quartet.media.items import MediaFile, MediaItem, MediaKind
from quartet.rpc.channels import create_channel
from quartet.streams.convert.messages import from_encoded_item, to_encode_start
from quartet.streams.messages import EncodedItem, EncodeStart, RequestContext
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.puller import TransferPuller
from quartet.v1 import encode_pb2, encode_pb2_grpc, router_pb2, router_pb2_grpc
from services.topology.topology import Topology

_NUM_RATE_ROUNDS = 7
_NUM_TTFT_ROUNDS = 31
# 2,880 tokens of width 4096 in bfloat16, 32 of them a piece.
_PULLS = Plan(PoolShape(90, 256 << 10, holds_embeddings=True), 15)
_TIMEOUT_S = 60.0
_CLIENT = "client"
#: The Encode worker's id.
ENCODE = "encode-0"
_BLOCK_SIZE = 32  # tokens, of KV and of embeddings
_LOG = Path(".run/benchmark-encode.log")
# Of the tiny model: the token `<|image|>`, and how many tokens one image fills.
_IMAGE_TOKEN_ID, _NUM_IMAGE_TOKENS = 7, 64
# All but the prompt's last token lie in full blocks, so all of them can be cached.
_NUM_TEXT_TOKENS = _BLOCK_SIZE + 1
#: Length of every prompt.
NUM_PROMPT_TOKENS = _NUM_IMAGE_TOKENS + _NUM_TEXT_TOKENS
_OTHER_SALT = "another"
_NUM_WARM_UP_ROUNDS = 2
_NUM_NEW_IMAGES = 2  # images a round
_NOISE_SIDE = 96  # the size that the tiny model's tower takes, so that the image is not scaled
_PHOTO_WIDTH, _PHOTO_HEIGHT = 2000, 1500
# The photo has random colours at this many points; between them they change smoothly.
_COLUMNS, _ROWS = 8, 6


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured.

    Attributes:
        num_rate_rounds, num_ttft_rounds: rounds that were counted.
        images_per_s: by ``Load``.
        worker: by ``Load``, everything else seen at the worker.
        ttft_ms, parts_ms: by ``Prompt``.
        pulls: pulls of one image's embeddings.
    """

    num_rate_rounds: int
    num_ttft_rounds: int
    images_per_s: Mapping[str, float]
    worker: Mapping[str, RateFigures]
    ttft_ms: Mapping[str, Quantiles]
    parts_ms: Mapping[str, Mapping[str, float]]
    pulls: Run


def main() -> None:
    """Run the command line."""
    parser = make_parser("encode", __doc__)
    arguments = parser.parse_args()
    report = Report("encode", packages=("torch", "transformers", "pillow"), revision=arguments.commit)
    report.write(uvloop.run(_run()), arguments.json)


def make_stack(discovery_directory: Path, on_progress: Callable[[str], None], *, log: Path = _LOG) -> Stack:
    """A stack, not started yet: workers find each other in that directory, output goes to the file ``log``."""
    quiet = {"log": {"level": "warning"}}
    settings = {
        "namespace": "encode",
        "discovery": {"kind": "file", "file": {"directory": str(discovery_directory)}},
        "engine": {"dtype": "float32", "num_threads": 1, "block_size": _BLOCK_SIZE},
        "router": {"overrides": {**quiet, "policy": {"local_prefill_max_tokens": 0}}},
        "workers": [{"role": role, "overrides": quiet} for role in ("encode", "prefill", "decode")],
        "drain_timeout_s": 0.5,
    }
    return Stack(build(Topology, settings), log, on_progress)


class Load(StrEnum):
    """How the client asks the worker."""

    BATCH_1 = "batch_1"  # a stream with one image after the other
    BATCH_8 = "batch_8"  # several streams with eight images each


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One turn.

    Attributes:
        cpu_s: CPU seconds of the worker's process.
        others_share: cores that everything but worker and client used meanwhile.
        items: what the worker reported of each image.
        num_batches: runs of the tower.
    """

    duration_s: float
    cpu_s: float
    others_share: float
    items: Sequence[EncodedItem]
    num_batches: int


@dataclass(frozen=True, kw_only=True)
class RateFigures:
    """Medians over all turns.

    Attributes:
        cpu_ms_per_image: of the worker's process, all threads.
        mean_batch_size: images in one run of the tower.
        before_tower_ms: from an image's arrival until the tower began with it: decoding, preprocessing, and the tower's
            time for the images before it.
        tower_ms: of one run of the tower.
        others_share: as in ``Sample``.
    """

    images_per_s: float
    cpu_ms_per_image: float
    mean_batch_size: float
    before_tower_ms: float
    tower_ms: float
    others_share: float


async def measure_rate(stack: Stack, rounds: Iterable[int]) -> Mapping[str, RateFigures]:
    """The figures by ``Load``. ``rounds`` are the numbers of the rounds; round 0 warms the worker up.

    Raises:
        grpc.aio.AioRpcError: the worker refused an image.
        RuntimeError: the worker did not encode each image exactly once.
    """
    samples: dict[Load, list[Sample]] = {load: [] for load in Load}
    rng = random.Random(0)
    async with _connected(stack) as client:
        for number in rounds:
            for load in Load:
                sample = await client.take(_TURNS[load], rng)
                if number:
                    samples[load].append(sample)
    return {load: summarize_rate(of_load) for load, of_load in samples.items()}


def summarize_rate(samples: Sequence[Sample]) -> RateFigures:
    """Medians of ``samples``, at least one."""
    items = [item for sample in samples for item in sample.items]
    return RateFigures(
        images_per_s=statistics.median(len(sample.items) / sample.duration_s for sample in samples),
        cpu_ms_per_image=1e3 * statistics.median(sample.cpu_s / len(sample.items) for sample in samples),
        mean_batch_size=statistics.median(len(sample.items) / sample.num_batches for sample in samples),
        before_tower_ms=1e3 * statistics.median(item.queue_s for item in items),
        tower_ms=1e3 * statistics.median(item.compute_s for item in items),
        others_share=statistics.median(sample.others_share for sample in samples),
    )


class Prompt(StrEnum):
    """The kinds of prompt, in the order in which they are sent."""

    NEW = "new"  # an image and a text that no worker has seen
    CACHED_EMBEDDINGS = "cached_embeddings"  # the same with another salt: its KV cannot be shared
    CACHED_PREFIX = "cached_prefix"  # the same with the first salt
    TEXT = "text"  # as many tokens, all of them text that no worker has seen
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
        parts_ms: medians of the parts of the time; see ``split``.
    """

    ttft_ms: Mapping[str, Quantiles]
    parts_ms: Mapping[str, Mapping[str, float]]


async def measure_ttft(stack: Stack, rounds: Iterable[int]) -> TtftFigures:
    """Ask for each ``Prompt`` in each of ``rounds``; the first two rounds warm the workers up.

    Raises:
        grpc.aio.AioRpcError: a request failed.
        RuntimeError: something was cached that should not have been, or something was not cached that should have been.
    """
    before = (await stack.metrics())[ENCODE]
    rng = random.Random(1)
    async with create_channel(stack.router_address, None) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        answered = [await _round(stub, rng) for _ in rounds]
    num_encoded = (await stack.metrics())[ENCODE].since(before).total("quartet_encode_batched_items_total")
    if num_encoded != _NUM_NEW_IMAGES * len(answered):
        raise RuntimeError(
            f"{num_encoded:.0f} images were encoded in {len(answered)} rounds, not {_NUM_NEW_IMAGES} each"
        )
    return summarize_ttft(answered[_NUM_WARM_UP_ROUNDS:])


def summarize_ttft(rounds: Sequence[Mapping[Prompt, Answered]]) -> TtftFigures:
    """Quantiles and medians of ``rounds``, at least two."""
    return TtftFigures(
        ttft_ms={prompt: _quantiles([answered[prompt].ttft_ms for answered in rounds]) for prompt in Prompt},
        parts_ms={prompt: median_parts([split(answered[prompt]) for answered in rounds]) for prompt in Prompt},
    )


def split(answered: Answered) -> Mapping[str, float]:
    """The parts of ``ttft_ms``; they add up to it.

    ``media``: that hop, with naming and fetching; ``route``: all else in the router; ``prefill``: that hop, pulling
    embeddings and computing included; ``api``: between client and router.
    """
    media_ms, prefill_ms = answered.media_ms or 0.0, answered.prefill_ms or 0.0
    return {
        "media": media_ms,
        "route": answered.first_token_ms - media_ms - prefill_ms,
        "prefill": prefill_ms,
        "api": answered.ttft_ms - answered.first_token_ms,
    }


def checked(prompt: Prompt, answered: Answered) -> Answered:
    """Return ``answered``. Raises ``RuntimeError`` if more or less was cached than such a ``prompt`` should find."""
    num_cached = NUM_PROMPT_TOKENS - 1 if prompt is Prompt.CACHED_PREFIX else 0
    if (answered.num_prompt_tokens, answered.num_cached_tokens) != (NUM_PROMPT_TOKENS, num_cached):
        raise RuntimeError(
            f"{prompt}: {answered.num_cached_tokens} of {answered.num_prompt_tokens} tokens were cached, not "
            f"{num_cached} of {NUM_PROMPT_TOKENS}"
        )
    return answered


def noise_image(rng: random.Random) -> bytes:
    """A PNG of 96 by 96 random pixels."""
    pixels = rng.randbytes(3 * _NOISE_SIDE * _NOISE_SIDE)
    return _file(Image.frombytes("RGB", (_NOISE_SIDE, _NOISE_SIDE), pixels), "PNG")


def photo(rng: random.Random) -> bytes:
    """A JPEG of three million pixels, without noise: costly to decode, though the tower gets only a small copy."""
    colours = Image.frombytes("RGB", (_COLUMNS, _ROWS), rng.randbytes(3 * _COLUMNS * _ROWS))
    return _file(colours.resize((_PHOTO_WIDTH, _PHOTO_HEIGHT), Image.Resampling.BICUBIC), "JPEG")


async def _run() -> Results:
    with LiveLine() as line, tempfile.TemporaryDirectory() as directory:
        pulls = await measure_transfer(_PULLS, line)
        async with make_stack(Path(directory), line.say) as stack:
            worker = await measure_rate(stack, line.rounds("images a second", _NUM_RATE_ROUNDS + 1))
            line.say(
                "images a second: " + _describe({load: f"{item.images_per_s:.0f}" for load, item in worker.items()})
            )
            num_ttft_rounds = _NUM_TTFT_ROUNDS + _NUM_WARM_UP_ROUNDS
            ttft = await measure_ttft(stack, line.rounds("time to the first token", num_ttft_rounds))
            line.say("TTFT, p50 ms: " + _describe({prompt: f"{item.p50:.1f}" for prompt, item in ttft.ttft_ms.items()}))
    return Results(
        num_rate_rounds=_NUM_RATE_ROUNDS,
        num_ttft_rounds=_NUM_TTFT_ROUNDS,
        images_per_s={load: figures.images_per_s for load, figures in worker.items()},
        worker=worker,
        pulls=pulls,
        **vars(ttft),
    )


def _describe(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


@dataclass(frozen=True)
class _Turn:
    """The streams of one turn.

    The tower takes the images that are decoded when it is free; one stream after the other would not fill its batches.
    """

    num_streams: int
    num_images_each: int
    num_at_once: int


class _Client:
    """Asks the Encode worker of ``stack``, and releases what it holds."""

    def __init__(self, stack: Stack, channel: grpc.aio.Channel, puller: TransferPuller) -> None:
        self._stack = stack
        self._stub = encode_pb2_grpc.EncodeServiceStub(channel)
        self._puller = puller

    async def take(self, turn: _Turn, rng: random.Random) -> Sample:
        """Run one turn, with images made beforehand."""
        starts = [_make_start(turn.num_images_each, rng) for _ in range(turn.num_streams)]
        before = (await self._stack.metrics())[ENCODE]
        meter = CpuMeter({ENCODE: self._stack.pids[ENCODE], _CLIENT: os.getpid()})
        items = await self._encode_all(starts, turn.num_at_once)
        use = meter.read()
        tower = (await self._stack.metrics())[ENCODE].since(before)
        await asyncio.gather(*(self._puller.claim_for_another(item.hand_off).release() for item in items))
        num_images = turn.num_streams * turn.num_images_each
        if not len(items) == num_images == tower.total("quartet_encode_batched_items_total"):
            raise RuntimeError(f"{len(items)} of {num_images} images came, or not each of them was encoded")
        return Sample(
            duration_s=use.duration_s,
            cpu_s=use.cpu_s[ENCODE],
            others_share=use.others_share,
            items=items,
            num_batches=round(tower.total("quartet_encode_batches_total")),
        )

    async def _encode_all(self, starts: Iterable[encode_pb2.EncodeStart], num_at_once: int) -> list[EncodedItem]:
        left, items = iter(starts), list[EncodedItem]()

        async def take_turns() -> None:
            for start in left:
                requests = iter([encode_pb2.EncodeRequest(start=start)])
                async for response in self._stub.Encode(requests, timeout=_TIMEOUT_S):
                    if response.HasField("encoded"):
                        items.append(from_encoded_item(response.encoded))

        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(take_turns())
        return items


@asynccontextmanager
async def _connected(stack: Stack) -> AsyncIterator[_Client]:
    puller = TransferPuller(
        lambda address: create_channel(address, None), host=host_identity(), config=TransferConfig()
    )
    try:
        async with create_channel(stack.worker_addresses[ENCODE], None) as channel:
            yield _Client(stack, channel, puller)
    finally:
        await puller.close()


def _make_start(num_images: int, rng: random.Random) -> encode_pb2.EncodeStart:
    items = (MediaItem(b"", MediaFile(MediaKind.IMAGE, noise_image(rng))) for _ in range(num_images))
    return to_encode_start(EncodeStart(context=RequestContext(), items=tuple(items)))


async def _round(stub: router_pb2_grpc.RouterServiceAsyncStub, rng: random.Random) -> Mapping[Prompt, Answered]:
    small, large = (
        partial(
            make_start,
            [_IMAGE_TOKEN_ID, *random_prompt(rng, _NUM_TEXT_TOKENS)],
            media=[router_pb2.MediaPart(data=file)],
        )
        for file in (noise_image(rng), photo(rng))
    )
    starts = {
        Prompt.NEW: small(),
        Prompt.CACHED_EMBEDDINGS: small(cache_salt=_OTHER_SALT),
        Prompt.CACHED_PREFIX: small(),
        Prompt.TEXT: make_start(random_prompt(rng, NUM_PROMPT_TOKENS)),
        Prompt.PHOTO_NEW: large(),
        Prompt.PHOTO_CACHED_EMBEDDINGS: large(cache_salt=_OTHER_SALT),
    }
    return {prompt: checked(prompt, await send(stub, start)) for prompt, start in starts.items()}


def _quantiles(values: Sequence[float]) -> Quantiles:
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Quantiles(p50=statistics.median(values), p90=tenths[-1])


def _file(image: Image.Image, format_: str) -> bytes:
    file = io.BytesIO()
    image.save(file, format_, quality=90)
    return file.getvalue()


_TURNS = {Load.BATCH_1: _Turn(16, 1, 1), Load.BATCH_8: _Turn(12, 8, 3)}


if __name__ == "__main__":
    main()

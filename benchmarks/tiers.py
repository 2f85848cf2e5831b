"""Tiers below the embedded engine's pool: what a hit saves, and what tiers cost where nothing is evicted.

The tiny model in one process, on one CPU thread. A hit: a prompt of 2,000 tokens is computed, displaced by others, and
comes again; its first token after both. Cost: the same requests alternately at an engine without tiers and at one with
a host and a disk, whose pools never evict.

    python -m benchmarks.tiers --json FILE [--short]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from quartet.discovery.host import host_identity
from quartet.engine.base import Engine, EngineRequest, Generation, RequestKind, Started
from quartet.engine.catalog import create_engine
from quartet.engine.sampling import Sampling
from quartet.engine.settings import (
    CacheSettings,
    DiskCacheSettings,
    EncoderSettings,
    EngineSettings,
    EngineSpec,
    HostCacheSettings,
)
from quartet.events.kv import Tier
from quartet.kvcache.tiers import OffloadPolicy
from quartet.rpc.channels import create_channel
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.puller import TransferPuller

_MODEL_PATH = "models/tiny/checkpoint"
_TOKEN_IDS = range(8, 2048)
_PROMPT_TOKENS, _BLOCK_SIZE = 2_000, 32
# The pool has room for one such prompt: the next one displaces it.
_POOL_BLOCKS = 70
_ROUNDS, _SHORT_ROUNDS = 5, 2
_ALTERNATIONS, _SHORT_ALTERNATIONS = 10, 3
_TIMEOUT_S = 120.0
_ids = count(1)


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One prompt, computed and then loaded, by seconds to its first token.

    Attributes:
        load_s: of the loaded one, the time until its blocks were there.
        num_loaded_tokens: that were not computed again.
    """

    computed_s: float
    loaded_s: float
    load_s: float
    num_loaded_tokens: int


@dataclass(frozen=True, kw_only=True)
class TierHits:
    """Hits of one tier; ``ratio`` is the median of loaded over computed."""

    ratio: float
    computed_s: float
    loaded_s: float
    gb_per_s: float
    hits: Sequence[Hit]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Output tokens a CPU second, alternately without and with tiers; ``ratio`` is the median of with over without."""

    ratio: float
    without: Sequence[float]
    with_tiers: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Results:
    """All figures."""

    prompt_tokens: int
    block_size_bytes: int
    host: TierHits
    disk: TierHits
    cost: Cost


def main() -> None:
    """Run the command line."""
    arguments = _parse()
    report = Report("tiers", packages=("torch", "transformers"), revision=arguments.commit)
    report.write(asyncio.run(measure(is_short=arguments.short)), arguments.json)


def _parse() -> argparse.Namespace:
    parser = make_parser("tiers", __doc__)
    parser.add_argument("--short", action="store_true", help="fewer rounds")
    return parser.parse_args()


async def measure(*, is_short: bool) -> Results:
    """Measure everything."""
    num_rounds = _SHORT_ROUNDS if is_short else _ROUNDS
    with LiveLine() as line, tempfile.TemporaryDirectory(prefix="quartet-benchmark-") as directory:
        host = await _measure_hits(Tier.HOST, num_rounds, Path(directory), line)
        disk = await _measure_hits(Tier.DISK, num_rounds, Path(directory), line)
        cost = await _measure_cost(_SHORT_ALTERNATIONS if is_short else _ALTERNATIONS, Path(directory), line)
    return Results(prompt_tokens=_PROMPT_TOKENS, block_size_bytes=host[1], host=host[0], disk=disk[0], cost=cost)


class Client:
    """One engine and the reader of its outputs."""

    def __init__(self, num_blocks: int, cache: CacheSettings) -> None:
        """Load nothing before ``start``."""
        settings = EngineSettings(num_blocks=num_blocks, block_size=_BLOCK_SIZE, num_threads=1, cache=cache)
        spec = EngineSpec(model_path=_MODEL_PATH, engine=settings, encoder=EncoderSettings())
        self._puller = TransferPuller(
            lambda address: create_channel(address, None), host=host_identity(), config=TransferConfig()
        )
        self.engine: Engine = create_engine(spec, RequestKind.DECODE, self._puller)

    async def start(self) -> None:
        """Load the model."""
        await self.engine.start()

    async def close(self) -> None:
        """Release it."""
        await self.engine.close()
        await self._puller.close()

    async def first_token(self, prompt: Sequence[int]) -> tuple[float, int, Started]:
        """Seconds to the first token of ``prompt``, that token, and how it started."""
        began = time.perf_counter()
        id = self._submit(prompt, 1)
        async with asyncio.timeout(_TIMEOUT_S):
            async for step in self.engine.outputs():
                for started in step.started:
                    if started.id == id:
                        mine = started
                if id in step.ids:
                    return time.perf_counter() - began, step.token_ids[0], mine
        raise RuntimeError("the engine has ended")

    async def answer(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> int:
        """Answer all ``prompts`` at once; returns the tokens that came."""
        ids = {self._submit(prompt, num_tokens) for prompt in prompts}
        num_came = 0
        async with asyncio.timeout(_TIMEOUT_S):
            async for step in self.engine.outputs():
                num_came += len(step.token_ids)
                ids.difference_update(finished.id for finished in step.finished)
                if not ids:
                    return num_came
        raise RuntimeError("the engine has ended")

    def counts(self, tier: Tier) -> tuple[int, int]:
        """Blocks of that tier that have been stored, and that are on their way there."""
        [found] = [counts for counts in self.engine.stats()[0].tiers if counts.tier is tier]
        return found.num_stored, found.blocks.in_use

    def _submit(self, prompt: Sequence[int], num_tokens: int) -> int:
        id = next(_ids)
        sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        generation = Generation(prompt_token_ids=prompt, sampling=sampling)
        self.engine.submit(EngineRequest(id=id, kind=RequestKind.DECODE, generation=generation))
        return id


async def measure_hit(client: Client, source: random.Random, tier: Tier, *, num_tokens: int = _PROMPT_TOKENS) -> Hit:
    """Compute a prompt, have others displace it, and load it.

    Raises:
        RuntimeError: it was not loaded, or its first token is another one: a wrong block must not win.
    """
    prompt = _prompt(source, num_tokens)
    computed_s, expected, _ = await client.first_token(prompt)
    for _ in range(6 if tier is Tier.DISK else 1):
        await client.first_token(_prompt(source, num_tokens))
        while tier is Tier.DISK and client.counts(tier)[1]:
            await client.first_token([8])  # a step takes in what was written
    loaded_s, token_id, started = await client.first_token(prompt)
    if token_id != expected or started.num_cached_tokens < num_tokens - _BLOCK_SIZE:
        raise RuntimeError(f"token {token_id} for {expected}, {started.num_cached_tokens} tokens were cached")
    return Hit(
        computed_s=computed_s,
        loaded_s=loaded_s,
        load_s=started.onboard_s,
        num_loaded_tokens=started.num_cached_tokens,
    )


async def _measure_hits(tier: Tier, num_rounds: int, directory: Path, line: LiveLine) -> tuple[TierHits, int]:
    is_disk = tier is Tier.DISK
    # The host holds two such prompts, or, for hits of the disk, has forgotten one after five others.
    host = HostCacheSettings(num_blocks=260 if is_disk else 200)
    disk = DiskCacheSettings(num_blocks=4_000, policy=OffloadPolicy.PRESENCE, path=directory / "hits")
    cache = CacheSettings(host=host, disk=disk if is_disk else DiskCacheSettings())
    client, source = Client(_POOL_BLOCKS, cache), random.Random(tier.name)
    try:
        await client.start()
        layout = client.engine.capabilities.layout
        assert layout is not None, "it pages by itself"
        await client.answer([_prompt(source) for _ in range(3)], 8)  # warms up, and learns the steps' times
        hits = [await measure_hit(client, source, tier) for _ in line.rounds(tier.name.lower(), num_rounds)]
    finally:
        await client.close()
    size_bytes = layout.piece_size_bytes
    speeds = [hit.num_loaded_tokens / _BLOCK_SIZE * size_bytes / hit.load_s / 1e9 for hit in hits]
    result = TierHits(
        ratio=median(hit.loaded_s / hit.computed_s for hit in hits),
        computed_s=median(hit.computed_s for hit in hits),
        loaded_s=median(hit.loaded_s for hit in hits),
        gb_per_s=median(speeds),
        hits=hits,
    )
    line.say(
        f"{tier.name.lower()}: {1e3 * result.loaded_s:.1f} ms in place of {1e3 * result.computed_s:.0f} ms: "
        f"{result.ratio:.3f}, at {result.gb_per_s:.2f} GB/s"
    )
    return result, size_bytes


async def _measure_cost(num_alternations: int, directory: Path, line: LiveLine) -> Cost:
    tiers = CacheSettings(
        host=HostCacheSettings(num_blocks=100),
        disk=DiskCacheSettings(num_blocks=100, path=directory / "cost"),
    )
    # Room for all prompts and answers of all rounds.
    sides = [Client(200 * (num_alternations + 2), cache) for cache in (CacheSettings(), tiers)]
    source, rates = random.Random("cost"), ([0.0] * 0, [0.0] * 0)
    try:
        for side in sides:
            await side.start()
            await _rate(side, source)
        for number in line.rounds("cost", num_alternations):
            for index in (0, 1) if number % 2 else (1, 0):
                rates[index].append(await _rate(sides[index], source))
        if sides[1].counts(Tier.HOST)[0]:
            raise RuntimeError("blocks were evicted")
    finally:
        for side in sides:
            await side.close()
    ratio = median(mine / theirs for theirs, mine in zip(*rates, strict=True))
    line.say(f"cost: {median(rates[1]):.0f} tokens a CPU second beside {median(rates[0]):.0f} without: {ratio:.3f}")
    return Cost(ratio=ratio, without=rates[0], with_tiers=rates[1])


async def _rate(client: Client, source: random.Random) -> float:
    """Output tokens a CPU second of one load: 32 requests, 64 tokens in, 32 out."""
    prompts = [[source.choice(_TOKEN_IDS) for _ in range(64)] for _ in range(32)]
    gc.collect()
    began = time.process_time()
    num_tokens = await client.answer(prompts, 32)
    return num_tokens / (time.process_time() - began)


def _prompt(source: random.Random, num_tokens: int = _PROMPT_TOKENS) -> list[int]:
    return [source.choice(_TOKEN_IDS) for _ in range(num_tokens)]


if __name__ == "__main__":
    main()

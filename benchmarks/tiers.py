"""Tiers below the embedded engine's pool: what a hit saves, and what tiers cost where nothing is evicted.

A hit: a prompt is computed, comes again while the pool has it, is displaced by others, and comes once more; its first
token each time. Cost: the same requests alternately at an engine without tiers and at one with a host and a disk, whose
pools never evict.

On a CPU it is the tiny model, on one thread, with prompts of 2,000 tokens. On a GPU it is the shape of Qwen3-8B with
random weights, and a prefix of 8,000 tokens. Loaded and cached prompts compute the same tokens in the same way, so
their first tokens are equal if the blocks are.

    python -m benchmarks.tiers --json FILE [--device cuda] [--short]
"""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

from benchmarks.gpu_rows import gpu_names
from benchmarks.progress import LiveLine
from benchmarks.random_model import QWEN3_8B, RandomModel
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
    LoadFormat,
)
from quartet.events.kv import Tier
from quartet.kvcache.tiers import OffloadPolicy
from quartet.rpc.channels import create_channel
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.puller import TransferPuller

_MODEL_PATH = "models/tiny/checkpoint"
_TOKEN_IDS = range(8, 2048)
_CPU, _CUDA = "cpu", "cuda"
_SHORT_ROUNDS, _SHORT_ALTERNATIONS = 2, 3
# Prompts that displace one from the pool, and from the host too.
_NUM_OTHERS = {Tier.HOST: 1, Tier.DISK: 6}
# Loading a model of 8 billion parameters, and compiling all kernels.
_START_TIMEOUT_S, _TIMEOUT_S = 300.0, 120.0
_ids = count(1)


@dataclass(frozen=True, kw_only=True)
class CostPlan:
    """So many requests at once, of so many tokens in and out."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_alternations: int

    def num_blocks(self, block_size: int) -> int:
        """That hold all of them, of all alternations, and one more to warm up."""
        per_request = -(-(self.num_prompt_tokens + self.num_output_tokens) // block_size) + 1
        return self.num_requests * per_request * (self.num_alternations + 2)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        device: ``cpu``: on one thread, by CPU seconds; ``cuda:N``.
        model: its shape; ``None``: the tiny model's checkpoint.
        prompt_tokens: of each prompt of hits.
        max_step_tokens: of one step; ``None``: the engine's default.
        num_rounds: after ``num_warm_ups`` that do not count.
        must_load: tiers from which the engine has to load, though it may find that computing is quicker.
        wanted_ratio: of first tokens from the host over those that are computed; ``None``: any.
    """

    device: str
    model: RandomModel | None
    block_size: int
    prompt_tokens: int
    max_step_tokens: int | None
    num_rounds: int
    num_warm_ups: int
    must_load: frozenset[Tier]
    wanted_ratio: float | None
    cost: CostPlan

    @property
    def prompt_blocks(self) -> int:
        """Blocks of one prompt of hits and its first token."""
        return self.prompt_tokens // self.block_size + 1

    @property
    def prefix_tokens(self) -> int:
        """Tokens of such a prompt that need not be computed again."""
        return (self.prompt_tokens - 1) // self.block_size * self.block_size

    @property
    def pool_blocks(self) -> int:
        """Room for one such prompt: the next one displaces it."""
        return self.prompt_blocks + 7

    def host_blocks(self, tier: Tier) -> int:
        """Room for three such prompts, or, for hits of the disk, four: it has forgotten one after five others."""
        return (4 if tier is Tier.DISK else 3) * (self.prompt_blocks + 2)

    @property
    def disk_blocks(self) -> int:
        """Room for all prompts of one round."""
        return 10 * self.prompt_blocks


#: By the name of the device.
PLANS: Mapping[str, Plan] = {
    _CPU: Plan(
        device="cpu",
        model=None,
        block_size=32,
        prompt_tokens=2_000,
        max_step_tokens=None,
        num_rounds=5,
        num_warm_ups=0,
        must_load=frozenset({Tier.HOST, Tier.DISK}),
        wanted_ratio=1 / 6,
        cost=CostPlan(num_requests=32, num_prompt_tokens=64, num_output_tokens=32, num_alternations=40),
    ),
    _CUDA: Plan(
        device="cuda:0",
        model=QWEN3_8B,
        block_size=32,
        prompt_tokens=8_016,
        max_step_tokens=8_192,
        num_rounds=5,
        num_warm_ups=1,
        # Files may come more slowly than a GPU computes.
        must_load=frozenset({Tier.HOST}),
        wanted_ratio=1 / 5,
        cost=CostPlan(num_requests=64, num_prompt_tokens=128, num_output_tokens=128, num_alternations=10),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One prompt, computed, then cached in the pool, then loaded, by seconds to its first token.

    Attributes:
        load_s: of the loaded one, the time until its blocks were there.
        num_loaded_tokens: that were not computed again; 0: the engine found that computing all is quicker.
    """

    computed_s: float
    cached_s: float
    loaded_s: float
    load_s: float
    num_loaded_tokens: int


@dataclass(frozen=True, kw_only=True)
class TierHits:
    """Hits of one tier, by medians; ``ratio``: loaded over computed; ``gb_per_s``: 0 if nothing was loaded."""

    ratio: float
    computed_s: float
    cached_s: float
    loaded_s: float
    gb_per_s: float
    hits: Sequence[Hit]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Output tokens a second, alternately without and with tiers; ``ratio`` is the median of with over without.

    Seconds are of the CPU where the model is computed there, else of the clock.
    """

    ratio: float
    without: Sequence[float]
    with_tiers: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Results:
    """All figures; ``gpus``: names of those that computed."""

    device: str
    gpus: Sequence[str]
    prompt_tokens: int
    wanted_ratio: float | None
    block_size_bytes: int
    host: TierHits
    disk: TierHits
    cost: Cost


def main() -> None:
    """Run the command line."""
    parser = make_parser("tiers", __doc__)
    parser.add_argument("--device", choices=PLANS, default=_CPU)
    parser.add_argument("--short", action="store_true", help="fewer rounds")
    arguments = parser.parse_args()
    plan = PLANS[arguments.device]
    if arguments.short:
        cost = replace(plan.cost, num_alternations=_SHORT_ALTERNATIONS)
        plan = replace(plan, num_rounds=_SHORT_ROUNDS, cost=cost)
    report = Report("tiers", packages=("torch", "transformers"), revision=arguments.commit)
    report.write(asyncio.run(measure(plan)), arguments.json)


async def measure(plan: Plan) -> Results:
    """Measure everything. Raises ``ConfigError``: there is no such device."""
    gpus = gpu_names(0 if plan.device == _CPU else 1)
    with LiveLine() as line, tempfile.TemporaryDirectory(prefix="quartet-benchmark-") as directory:
        bench = _Bench(plan, Path(directory), line)
        host, disk = [await bench.measure_hits(tier) for tier in (Tier.HOST, Tier.DISK)]
        cost = await bench.measure_cost()
    return Results(
        device=plan.device,
        gpus=gpus,
        prompt_tokens=plan.prompt_tokens,
        wanted_ratio=plan.wanted_ratio,
        block_size_bytes=bench.block_size_bytes,
        host=host,
        disk=disk,
        cost=cost,
    )


class Client:
    """One engine and the reader of its outputs."""

    def __init__(self, engine: EngineSettings, model_path: Path | str = _MODEL_PATH) -> None:
        """Load nothing before ``start``."""
        spec = EngineSpec(model_path=str(model_path), engine=engine, encoder=EncoderSettings())
        self._puller = TransferPuller(
            lambda address: create_channel(address, None), host=host_identity(), config=TransferConfig()
        )
        self.engine: Engine = create_engine(spec, RequestKind.DECODE, self._puller)

    async def start(self) -> None:
        """Load the model."""
        async with asyncio.timeout(_START_TIMEOUT_S):
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


async def measure_hit(
    client: Client, source: random.Random, tier: Tier, *, num_tokens: int, block_size: int, must_load: bool = True
) -> Hit:
    """Compute a prompt, ask again, have others displace it, and ask for it once more.

    Raises:
        RuntimeError: it was not loaded though it ``must_load``, or its first token is another one than with the blocks
            that the pool had: a wrong block must not win.
    """
    prompt = _prompt(source, num_tokens)
    computed_s, _, _ = await client.first_token(prompt)
    cached_s, expected, cached = await client.first_token(prompt)
    for _ in range(_NUM_OTHERS[tier]):
        await client.first_token(_prompt(source, num_tokens))
        while tier is Tier.DISK and client.counts(tier)[1]:
            await client.first_token([8])  # a step takes in what was written
    loaded_s, token_id, loaded = await client.first_token(prompt)
    is_loaded = loaded.num_cached_tokens == cached.num_cached_tokens >= num_tokens - block_size
    if is_loaded and token_id != expected:
        raise RuntimeError(f"token {token_id} for {expected}")
    if must_load and not is_loaded:
        raise RuntimeError(f"{loaded.num_cached_tokens} tokens were cached")
    return Hit(
        computed_s=computed_s,
        cached_s=cached_s,
        loaded_s=loaded_s,
        load_s=loaded.onboard_s,
        num_loaded_tokens=loaded.num_cached_tokens,
    )


class _Bench:
    """All figures of one plan."""

    def __init__(self, plan: Plan, directory: Path, line: LiveLine) -> None:
        """Files go below ``directory``."""
        self._plan, self._directory, self._line = plan, directory, line
        self._model_path = _MODEL_PATH
        if plan.model is not None:
            self._model_path = str(directory)
            plan.model.write(directory)
        self.block_size_bytes = 0

    async def measure_hits(self, tier: Tier) -> TierHits:
        """Hits of one tier."""
        plan, is_disk = self._plan, tier is Tier.DISK
        disk = self._disk(plan.disk_blocks) if is_disk else DiskCacheSettings()
        cache = CacheSettings(host=HostCacheSettings(num_blocks=plan.host_blocks(tier)), disk=disk)
        client, source = self._client(plan.pool_blocks, cache), random.Random(tier.name)
        ask = partial(
            measure_hit,
            client,
            source,
            tier,
            num_tokens=plan.prompt_tokens,
            block_size=plan.block_size,
            must_load=tier in plan.must_load,
        )
        try:
            await client.start()
            layout = client.engine.capabilities.layout
            assert layout is not None, "it pages by itself"
            self.block_size_bytes = layout.piece_size_bytes
            # Warms up, and learns the steps' times.
            await client.answer([_prompt(source, plan.prompt_tokens) for _ in range(3)], 8)
            for _ in range(plan.num_warm_ups):
                await ask()
            hits = [await ask() for _ in self._line.rounds(tier.name.lower(), plan.num_rounds)]
        finally:
            await client.close()
        return self._summarise(tier, hits)

    def _summarise(self, tier: Tier, hits: Sequence[Hit]) -> TierHits:
        block_size, size_bytes = self._plan.block_size, self.block_size_bytes
        speeds = [
            hit.num_loaded_tokens / block_size * size_bytes / hit.load_s / 1e9 if hit.load_s else 0.0 for hit in hits
        ]
        result = TierHits(
            ratio=median(hit.loaded_s / hit.computed_s for hit in hits),
            computed_s=median(hit.computed_s for hit in hits),
            cached_s=median(hit.cached_s for hit in hits),
            loaded_s=median(hit.loaded_s for hit in hits),
            gb_per_s=median(speeds),
            hits=hits,
        )
        self._line.say(
            f"{tier.name.lower()}: {1e3 * result.loaded_s:.1f} ms in place of {1e3 * result.computed_s:.0f} ms: "
            f"{result.ratio:.3f}, at {result.gb_per_s:.2f} GB/s; {1e3 * result.cached_s:.1f} ms from the pool"
        )
        return result

    async def measure_cost(self) -> Cost:
        """What tiers cost where nothing is evicted."""
        plan = self._plan.cost
        tiers = CacheSettings(host=HostCacheSettings(num_blocks=100), disk=self._disk(100))
        num_blocks = plan.num_blocks(self._plan.block_size)
        sides = [self._client(num_blocks, cache) for cache in (CacheSettings(), tiers)]
        source, rates = random.Random("cost"), ([0.0] * 0, [0.0] * 0)
        try:
            for side in sides:
                await side.start()
                await self._rate(side, source)
            for number in self._line.rounds("cost", plan.num_alternations):
                for index in (0, 1) if number % 2 else (1, 0):
                    rates[index].append(await self._rate(sides[index], source))
            if sides[1].counts(Tier.HOST)[0]:
                raise RuntimeError("blocks were evicted")
        finally:
            for side in sides:
                await side.close()
        ratio = median(mine / theirs for theirs, mine in zip(*rates, strict=True))
        self._line.say(
            f"cost: {median(rates[1]):.0f} tokens a second beside {median(rates[0]):.0f} without: {ratio:.3f}"
        )
        return Cost(ratio=ratio, without=rates[0], with_tiers=rates[1])

    async def _rate(self, client: Client, source: random.Random) -> float:
        """Output tokens a second of one load."""
        plan = self._plan.cost
        prompts = [_prompt(source, plan.num_prompt_tokens) for _ in range(plan.num_requests)]
        gc.collect()
        clock: Callable[[], float] = time.process_time if self._plan.device == _CPU else time.perf_counter
        began = clock()
        num_tokens = await client.answer(prompts, plan.num_output_tokens)
        return num_tokens / (clock() - began)

    def _disk(self, num_blocks: int) -> DiskCacheSettings:
        return DiskCacheSettings(num_blocks=num_blocks, policy=OffloadPolicy.PRESENCE, path=self._directory / "files")

    def _client(self, num_blocks: int, cache: CacheSettings) -> Client:
        plan = self._plan
        engine = EngineSettings(
            device=plan.device,
            num_blocks=num_blocks,
            block_size=plan.block_size,
            num_threads=1 if plan.device == _CPU else None,
            max_num_tokens=plan.max_step_tokens,
            load_format=LoadFormat.AUTO if plan.model is None else LoadFormat.RANDOM,
            cache=cache,
        )
        return Client(engine, self._model_path)


def _prompt(source: random.Random, num_tokens: int) -> list[int]:
    return [source.choice(_TOKEN_IDS) for _ in range(num_tokens)]


if __name__ == "__main__":
    main()

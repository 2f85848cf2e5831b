"""A worker's blocks and another source's as one feed, by real processes and sockets, read by who knows the format."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import yaml

from quartet.client import QuartetClient, Sampling
from quartet.events.vllm import BlockRemoved, BlockStored
from quartet.events.vllm_publisher import VllmPublisher
from services.topology.launch import free_port
from tests import tiny
from tests.e2e.conftest import StartStack
from tests.e2e.fork_server import ForkServer
from tests.e2e.process import ServiceProcess, wait_until
from tests.e2e.stack import LOCAL_PREFILL, START_TIMEOUT_S, StackConfig
from tests.events.vllm_reader import Index, read_maps, replay_of

BLOCK_SIZE, WAIT_S, POLL_S = 32, 60.0, 0.05


async def until_blocks(replay_port: int, *blocks: tuple[int, ...]) -> None:
    """Wait until a reader of all that the feed ever said has exactly these blocks, each with all tokens up to it."""
    async with asyncio.timeout(WAIT_S):
        while True:
            index = Index()
            for _, payload in await replay_of(replay_port, 0):
                index.take(read_maps(payload).events)
            if sorted(index.blocks.values()) == sorted(blocks):
                return
            await asyncio.sleep(POLL_S)


async def test_a_block_is_there_while_any_source_has_it(
    start_stack: StartStack, fork_server: ForkServer, tmp_path: Path
) -> None:
    feed_port, feed_replay_port, output_port, replay_port, http_port = (free_port() for _ in range(5))
    worker = {
        "engine.block_size": BLOCK_SIZE,
        "vllm_events.address": f"127.0.0.1:{feed_port}",
        "vllm_events.replay_port": feed_replay_port,
    }
    stack = start_stack(StackConfig(num_prefill=0, num_decode=1, worker=worker, routers={"router": LOCAL_PREFILL}))
    beyond = VllmPublisher("127.0.0.1", setting="test", replay_port=0)
    settings = {
        "sources": [
            {
                "kind": "quartet",
                "endpoint": f"tcp://127.0.0.1:{feed_port}",
                "replay_endpoint": f"tcp://127.0.0.1:{feed_replay_port}",
            },
            {
                "kind": "kvbm",
                "endpoint": f"tcp://127.0.0.1:{beyond.port}",
                "replay_endpoint": f"tcp://127.0.0.1:{beyond.replay_port}",
            },
        ],
        "output": {"address": f"127.0.0.1:{output_port}", "replay_port": replay_port},
        "http_address": f"127.0.0.1:{http_port}",
    }
    config = tmp_path / "consolidator.yaml"
    config.write_text(yaml.safe_dump(settings))
    consolidator = ServiceProcess(
        "consolidator",
        "services.consolidator",
        config,
        grpc_address="",
        http_address=f"127.0.0.1:{http_port}",
        fork_server=fork_server,
    )

    async def shows(value: float, name: str, **labels: str) -> None:
        """Wait until a metric has this value: one scrape may be a little old."""

        def is_shown() -> bool:
            return consolidator.metrics().value(f"quartet_consolidator_{name}", **labels) == value

        await asyncio.to_thread(wait_until, is_shown, WAIT_S, consolidator.log_tail)

    rng = random.Random(1)
    prompt = [rng.choice(tiny.PLAIN_IDS) for _ in range(3 * BLOCK_SIZE)]
    blocks = [tuple(prompt[: (index + 1) * BLOCK_SIZE]) for index in range(3)]
    try:
        # The worker's first blocks are there before the consolidator is.
        async with QuartetClient(stack.router_address) as client:
            await client.complete(token_ids=prompt, sampling=Sampling(max_tokens=2, ignore_eos=True))
        consolidator.spawn()
        await asyncio.to_thread(consolidator.wait_ready, START_TIMEOUT_S)
        await until_blocks(replay_port, *blocks)

        tokens = prompt[: 2 * BLOCK_SIZE]
        held = BlockStored(
            block_hashes=[b"first", b"second"],
            parent_hash=None,
            token_ids=tokens,
            block_size=BLOCK_SIZE,
            medium="CPU_TIER1",
        )
        beyond.publish([held], 0)
        await shows(2, "source_blocks", source="kvbm")
        await until_blocks(replay_port, *blocks)

        stack.kill("decode-0")
        await until_blocks(replay_port, *blocks[:2])
        await shows(0, "source_up", source="quartet")

        beyond.publish([BlockRemoved(block_hashes=[b"second", b"first", b"never stored"], medium="CPU_TIER1")], 0)
        await until_blocks(replay_port)
        await shows(1, "left_out_total", source="kvbm", reason="unknown_removed")

        consolidator.signal(signal.SIGTERM)
        assert await asyncio.to_thread(consolidator.wait, WAIT_S) == 0
    finally:
        consolidator.kill()
        beyond.close()

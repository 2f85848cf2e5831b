"""The client of ``benchmarks.http_memory``: opens so many streams at each order, and keeps them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import uvloop

from benchmarks.children import answer, argument, orders
from benchmarks.relay_http import open_stream

_PROMPT = "once upon a time " * 20


def main() -> None:
    """Run until the standard input ends."""
    uvloop.run(_run(**argument()))


async def _run(address: str, counts: Sequence[int]) -> None:
    body = json.dumps({"model": "tiny", "prompt": _PROMPT, "max_tokens": 100, "stream": True}).encode()
    kept = []
    turn = iter(counts)
    async for _ in orders():
        began = [asyncio.Event() for _ in range(next(turn))]
        for event in began:
            kept.append(await open_stream(address, "/v1/completions", body, event.set, lambda _count: None))
            await event.wait()
        answer(len(kept))


if __name__ == "__main__":
    main()

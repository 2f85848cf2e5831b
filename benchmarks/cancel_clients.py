"""A process full of clients that vanishes: ``benchmarks.cancel_storm`` kills it while its requests run.

It gets the routers' addresses, a path, the seed of its requests and their number, says that it is ready, and sends them
when it is told to.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from benchmarks.chaos_client import Ask, draw_asks, draw_picture_asks
from benchmarks.children import answer, argument, orders
from quartet.client import QuartetClient, RequestPath
from quartet.client.stream import GenerateStream
from quartet.errors import ServingError

#: Tokens of each answer, which take longer than anybody waits.
ENDLESS = 2_500
TIMEOUT_S = 600.0
_PROMPT_TOKENS = range(400, 1600)


def draw_endless(seed: str, count: int, *, num_pictures: int = 0) -> list[Ask]:
    """Requests for endless answers; the first ``num_pictures`` have a picture each."""
    rng = random.Random(seed)
    asks = draw_asks(rng, count, num_tokens=range(ENDLESS, ENDLESS + 1), num_prompt_tokens=_PROMPT_TOKENS)
    pictures = draw_picture_asks(rng, num_pictures)
    asks[:num_pictures] = [
        Ask(token_ids=with_one.token_ids, media=with_one.media, num_tokens=ask.num_tokens, seed=ask.seed)
        for ask, with_one in zip(asks, pictures, strict=False)
    ]
    return asks


def generate(client: QuartetClient, ask: Ask, path: RequestPath) -> GenerateStream:
    """Prepare to send ``ask``."""
    return client.generate(
        path=path,
        token_ids=ask.token_ids,
        media=ask.media,
        sampling=ask.sampling,
        seed=ask.seed,
        timeout_s=TIMEOUT_S,
        omit_text=True,
    )


async def _run(addresses: Sequence[str], path: RequestPath, seed: str, count: int, num_pictures: int) -> None:
    asks = draw_endless(seed, count, num_pictures=num_pictures)

    async def follow(ask: Ask) -> None:
        try:
            async for _ in generate(client, ask, path):
                pass
        except ServingError as error:
            print(f"{path}: {error!r}", flush=True)

    async with QuartetClient(addresses) as client:
        answer("ready")
        async for _ in orders():
            await asyncio.gather(*map(follow, asks))


if __name__ == "__main__":
    asyncio.run(_run(argument(0), RequestPath(argument(1)), argument(2), argument(3), argument(4)))

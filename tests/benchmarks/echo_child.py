"""A child that answers with what its parent sends."""

from __future__ import annotations

import asyncio

from benchmarks.children import answer, orders


async def main() -> None:
    async for value in orders():
        answer(value)


if __name__ == "__main__":
    asyncio.run(main())

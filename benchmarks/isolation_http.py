"""Attacks of ``benchmarks.isolation_attack`` that come by HTTP; the attacker's key names its tenant."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from enum import StrEnum

import aiohttp

# After a refusal: as an attacker who only asks again and again would spend its time on refusals.
_PAUSE_S = 0.05
_TIMEOUT_S = 60.0
_GIVEN_UP_AFTER_S = 3.0
_FIRST_TOKEN_ID, _END_TOKEN_ID = 16, 2048
_NUM_CONNECTIONS = 2_000


class HttpAttack(StrEnum):
    """What the tenant does."""

    BOMBS = "http_bombs"  # eight clients with a million empty lists each
    TEXTS = "http_texts"  # six prompts of 12 MB, half of it escapes, given up after three seconds
    MALFORMED = "http_malformed"  # 64 clients with 32 KB of lists that never end
    REFUSED = "http_refused"  # 64 clients with a field out of its range
    SMALL = "http_small"  # 64 clients with chats of 4,096 tiny messages
    PROMPTS = "http_prompts"  # 64 clients with prompts of 8,000 token ids
    PRIORITY = "http_priority"  # 64 clients with the highest priority there is
    CANCELS = "http_cancels"  # 64 clients that leave as soon as their stream begins
    CONNECTIONS = "http_connections"  # 2,000 connections with half a head each, opened again when they are closed


class Attacker:
    """Asks again and again."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        """``session`` has the key and the address, ``address`` is ``host:port`` for connections by hand."""
        self._session = session
        self._host, _, port = address.rpartition(":")
        self._port = int(port)

    async def repeat(self, count: int, ask: Callable[[], Awaitable[None]]) -> None:
        """``count`` clients, each of which asks again and again."""

        async def one() -> None:
            while True:
                try:
                    await ask()
                except (aiohttp.ClientError, OSError, TimeoutError):
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(one() for _ in range(count)))

    async def post(self, path: str, body: bytes) -> None:
        """Ask, and read the whole answer."""
        async with self._session.post(path, data=body) as response:
            await response.read()

    async def give_up(self, body: bytes) -> None:
        """Ask for a completion, and leave after three seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_GIVEN_UP_AFTER_S):
                await self.post("/v1/completions", body)

    async def leave(self, body: bytes) -> None:
        """Ask for a stream, and leave at its first event."""
        async with self._session.post("/v1/completions", data=body) as response:
            await response.content.readline()
            response.close()

    async def half_a_head(self) -> None:
        """Open a connection, say half a head, and wait for its end."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nX-Slow: ")
            await reader.read()
        finally:
            writer.close()


async def attack_http(attack: HttpAttack, address: str, key: str) -> None:
    """Attack the server at ``address`` until cancelled."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(
        f"http://{address}",
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
    ) as session:
        await _ATTACKS[attack](Attacker(session, address))


async def _bombs(attacker: Attacker) -> None:
    body = b'{"prompt": [' + b"[]," * 1_000_000 + b"[]]}"
    await attacker.repeat(8, lambda: attacker.post("/v1/completions", body))


async def _texts(attacker: Attacker) -> None:
    body = b'{"prompt": "' + b"\\n" * 3_000_000 + b"once upon a time " * 350_000 + b'"}'
    await attacker.repeat(6, lambda: attacker.give_up(body))


async def _malformed(attacker: Attacker) -> None:
    body = b'{"prompt": [' + b"[]," * 10_000
    await attacker.repeat(64, lambda: attacker.post("/v1/completions", body))


async def _refused(attacker: Attacker) -> None:
    body = json.dumps({"prompt": "hi", "temperature": -1}).encode()
    await attacker.repeat(64, lambda: attacker.post("/v1/completions", body))


async def _small(attacker: Attacker) -> None:
    messages = [{"role": "user", "content": "a"}] * 4096
    body = json.dumps({"messages": messages, "max_tokens": 1, "ignore_eos": True}).encode()
    await attacker.repeat(64, lambda: attacker.post("/v1/chat/completions", body))


async def _prompts(attacker: Attacker) -> None:
    await attacker.repeat(64, lambda: attacker.post("/v1/completions", _completion(8_000, max_tokens=64)))


async def _priority(attacker: Attacker) -> None:
    def ask() -> Awaitable[None]:
        return attacker.post("/v1/completions", _completion(128, max_tokens=256, priority=-(2**31) + 1))

    await attacker.repeat(64, ask)


async def _cancels(attacker: Attacker) -> None:
    await attacker.repeat(64, lambda: attacker.leave(_completion(64, max_tokens=256, stream=True)))


async def _connections(attacker: Attacker) -> None:
    await attacker.repeat(_NUM_CONNECTIONS, attacker.half_a_head)


def _completion(num_prompt_tokens: int, **fields: object) -> bytes:
    prompt = random.choices(range(_FIRST_TOKEN_ID, _END_TOKEN_ID), k=num_prompt_tokens)
    return json.dumps({"prompt": prompt, "ignore_eos": True, **fields}).encode()


_ATTACKS: Mapping[HttpAttack, Callable[[Attacker], Awaitable[None]]] = {
    HttpAttack.BOMBS: _bombs,
    HttpAttack.TEXTS: _texts,
    HttpAttack.MALFORMED: _malformed,
    HttpAttack.REFUSED: _refused,
    HttpAttack.SMALL: _small,
    HttpAttack.PROMPTS: _prompts,
    HttpAttack.PRIORITY: _priority,
    HttpAttack.CANCELS: _cancels,
    HttpAttack.CONNECTIONS: _connections,
}

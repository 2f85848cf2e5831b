"""The HTTP face over a pipeline with fake hops, and a client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from quartet.text.chat_template import ChatTemplate
from quartet.text.model_text import ModelText
from quartet.text.tokenizer import SpecialTokens
from router.http.config import HttpConfig
from router.http.server import HttpServer
from tests.router.fakes import MODEL_TEXT, TIMEOUT_S, Fleet

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)
CHAT_TEXT: ModelText = replace(MODEL_TEXT, chat_template=ChatTemplate(TEMPLATE, SpecialTokens()))
MODEL = "tiny"


async def until(is_met: Callable[[], bool]) -> None:
    """Wait until ``is_met``, which nothing tells."""
    async with asyncio.timeout(TIMEOUT_S):
        while not is_met():  # noqa: ASYNC110 - nothing has an event for it
            await asyncio.sleep(0.005)


@dataclass
class Face:
    """A server, and what it runs on."""

    fleet: Fleet
    server: HttpServer
    session: aiohttp.ClientSession
    port: int
    is_ready: bool = True

    async def post(self, path: str, body: Mapping[str, Any] | bytes, **headers: str) -> tuple[int, Any]:
        """The code and the JSON of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=data, headers=headers) as response:
            return response.status, json.loads(await response.read())

    async def until_nothing_left(self) -> None:
        """Every request has ended and holds nothing."""
        await until(lambda: not self.fleet.pipeline.num_running)
        self.fleet.assert_nothing_left()

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(path, headers=headers) as response:
            return response.status, json.loads(await response.read())

    async def events(self, path: str, body: Mapping[str, Any], **headers: str) -> list[Any]:
        """The events of a streamed answer; the last is ``[DONE]``."""
        async with self.session.post(path, json={**body, "stream": True}, headers=headers) as response:
            text = (await response.read()).decode()
            assert response.status == 200, text
            assert response.content_type == "text/event-stream"
        shown = [event for event in text.split("\n\n") if event and not event.startswith(":")]
        assert shown[-1] == "data: [DONE]" and all(event.startswith("data: ") for event in shown)
        return [json.loads(event.removeprefix("data: ")) for event in shown[:-1]]


@asynccontextmanager
async def open_face(
    *worker_ids: str, config: HttpConfig | None = None, stall_timeout_s: float = 30.0, **fleet_settings: Any
) -> AsyncIterator[Face]:
    """A face with workers of these ids, by default a decode worker."""
    fleet = Fleet(*(worker_ids or ("decode-0",)), **fleet_settings)
    fleet.texts.text = CHAT_TEXT
    face: Face
    server = HttpServer(
        config or HttpConfig(),
        fleet.pipeline,
        fleet.registry,
        namespace="here",
        stall_timeout_s=stall_timeout_s,
        is_ready=lambda: face.is_ready,
    )
    port = await server.start()
    scheme = "http" if config is None or config.tls is None else "https"
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(f"{scheme}://127.0.0.1:{port}", timeout=timeout) as session:
        face = Face(fleet, server, session, port)
        try:
            yield face
        finally:
            await server.drain(0.5)

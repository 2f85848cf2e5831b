"""The text side of models, fetched once for all who ask."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from quartet.errors import ConfigError, ModelFilesError, ServingError, WorkerUnavailableError
from quartet.text.chat_message import ChatMessage
from quartet.text.model_files import TEXT_FILE_NAMES
from router.config import RouterConfig
from router.fleet import FetchedTexts, read_chat_template
from router.process import RouterProcess
from router.workers import PoolKey
from tests.text.builders import byte_level_backend

_POOL = PoolKey("tiny", "ab" * 32)
_FILES = {"tokenizer.json": byte_level_backend().to_str().encode()}
_TIMEOUT_S = 30.0


class Source:
    """Gives files when the gate opens, after the failures planned."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)
        self.files = dict(_FILES)
        self.gate = asyncio.Event()
        self.num_asked = 0

    async def fetch(self, pool: PoolKey, names: Collection[str]) -> Mapping[str, bytes]:
        assert (pool, names) == (_POOL, TEXT_FILE_NAMES)
        self.num_asked += 1
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        return self.files


async def test_several_waiters_share_one_fetch_and_cancelling_one_does_not_cancel_it() -> None:
    source = Source()
    texts = FetchedTexts(source.fetch)
    waiting = [asyncio.create_task(texts.model_text(_POOL)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    source.gate.set()
    async with asyncio.timeout(_TIMEOUT_S):
        first, second = await asyncio.gather(*waiting[1:])
    assert first is second is texts.known(_POOL) is await texts.model_text(_POOL)
    assert source.num_asked == 1


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (WorkerUnavailableError("gone"), WorkerUnavailableError),
        (ServingError("internal"), WorkerUnavailableError),
        (ModelFilesError("nonsense"), ModelFilesError),
        # A channel that is closed under a call cancels it.
        (asyncio.CancelledError(), WorkerUnavailableError),
    ],
)
async def test_a_failed_fetch_is_raised_and_the_next_caller_tries_again(
    failure: BaseException, kind: type[ServingError]
) -> None:
    source = Source(failure)
    source.gate.set()
    texts = FetchedTexts(source.fetch)
    with pytest.raises(kind):
        await texts.model_text(_POOL)
    assert (await texts.model_text(_POOL)).vocab_size > 0


async def test_a_failed_prefetch_raises_nothing_and_the_next_one_tries_again() -> None:
    source = Source(WorkerUnavailableError("gone"))
    source.gate.set()
    texts = FetchedTexts(source.fetch)
    await texts.prefetch(_POOL)
    assert texts.known(_POOL) is None
    await texts.prefetch(_POOL)
    assert texts.known(_POOL) is not None


async def test_the_texts_of_pools_that_are_gone_are_forgotten() -> None:
    source = Source()
    source.gate.set()
    texts = FetchedTexts(source.fetch)
    await texts.model_text(_POOL)
    texts.retain({_POOL})
    assert texts.known(_POOL) is not None
    texts.retain(set())
    assert texts.known(_POOL) is None


async def test_closing_ends_what_is_being_fetched() -> None:
    texts = FetchedTexts(Source().fetch)
    waiting = asyncio.create_task(texts.model_text(_POOL))
    await asyncio.sleep(0)
    async with asyncio.timeout(_TIMEOUT_S):
        await texts.close()
        with pytest.raises(WorkerUnavailableError):
            await waiting


async def test_a_template_of_the_routers_own_replaces_each_models_template(tmp_path: Path) -> None:
    (tmp_path / "short.jinja").write_text("{{ messages[-1].content }} é", encoding="utf-8")
    source = Source()
    source.files["chat_template.jinja"] = b"{{ raise_exception('the model has its own') }}"
    source.gate.set()
    texts = FetchedTexts(source.fetch, chat_template=read_chat_template(tmp_path / "short.jinja"))
    template = (await texts.model_text(_POOL)).chat_template
    assert template is not None
    assert template.render([ChatMessage("user", "fox")]) == "fox é"


@pytest.mark.parametrize("content", [None, b"{% for %}", b"{{ 'x' | nope }}", b"\xff"])
def test_a_template_that_cannot_be_used_stops_the_router_before_it_serves(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "custom.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="custom_chat_template: "):
        RouterProcess(RouterConfig(custom_chat_template=file))

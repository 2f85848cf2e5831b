"""What a worker serves as its model: its text files with the template it was given, its identity, its name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quartet.discovery.base import Role, WorkerRecord
from quartet.engine.base import Generation
from quartet.engine.model_source import Repository
from quartet.engine.sampling import Sampling
from quartet.errors import ConfigError, ModelMismatchError
from quartet.streams.client import DecodeClient, PrefillClient
from quartet.streams.messages import RequestContext, WorkerStart
from quartet.streams.worker_client import WorkerClient
from quartet.text.model_files import CHAT_TEMPLATE, TEXT_FILE_NAMES, read_text_files
from router.workers import PoolKey
from services.workers import model
from services.workers.config import WorkerConfig
from services.workers.model import ServedModel
from services.workers.process import WorkerProcess
from tests import tiny
from tests.services.stream_workers import collect_all, make_start
from tests.services.worker_processes import WAIT_S, RunningWorker, worker_process
from tests.streams.pulled import PullingDecodeClient

OTHER_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
MOCK = {"kind": "mock", "num_blocks": 64, "mock": {"speed_up": 100}}


@asynccontextmanager
async def mock_worker(directory: Path, role: Role, **settings: object) -> AsyncIterator[RunningWorker]:
    _make(directory)
    async with worker_process(directory, role, engine=MOCK, **settings) as worker:  # type: ignore[arg-type]
        yield worker


async def text_files(worker: RunningWorker, fingerprint: str) -> dict[str, bytes]:
    client = WorkerClient(worker.channel)
    return await client.model_files(
        TEXT_FILE_NAMES, model_fingerprint=fingerprint, max_size_bytes=1 << 24, timeout_s=WAIT_S
    )


def pool_of(record: WorkerRecord) -> PoolKey:
    """Where a router puts it."""
    return PoolKey(record.model_name, record.model_fingerprint)


def _make(directory: Path) -> None:
    directory.mkdir(exist_ok=True)


def _write(file: Path, text: str) -> None:
    file.write_text(text)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    file = tmp_path / "chat.jinja"
    file.write_text(OTHER_TEMPLATE)
    return file


async def test_the_custom_template_replaces_the_models_own(tmp_path: Path, template: Path) -> None:
    async with mock_worker(tmp_path, Role.DECODE, custom_jinja_template=str(template)) as worker:
        # What was checked is what is served, whatever becomes of the file.
        _write(template, "{{ another }}")
        files = await text_files(worker, worker.record.model_fingerprint)
    own = read_text_files(tiny.CHECKPOINT)
    assert files == {**own, CHAT_TEMPLATE: OTHER_TEMPLATE.encode()}
    assert own[CHAT_TEMPLATE] != files[CHAT_TEMPLATE]


async def test_workers_with_the_same_template_are_one_pool_and_exchange_blocks(tmp_path: Path, template: Path) -> None:
    async with (
        mock_worker(tmp_path / "a", Role.PREFILL, custom_jinja_template=str(template)) as prefill,
        mock_worker(tmp_path / "b", Role.DECODE, custom_jinja_template=str(template)) as decode,
    ):
        assert pool_of(prefill.record) == pool_of(decode.record)
        start = make_start(range(300, 420), max_tokens=6)
        prefilled = (
            await PrefillClient("prefill", prefill.channel, lambda _: None, lambda _: None).start(start).outcome()
        )
        assert prefilled.hand_off is not None
        rest = WorkerStart(
            context=RequestContext(),
            generation=Generation(
                prompt_token_ids=start.generation.prompt_token_ids,
                generated_token_ids=[prefilled.token_id],
                sampling=Sampling(max_tokens=6),
            ),
            hand_off=prefilled.hand_off,
        )
        decodes = PullingDecodeClient(DecodeClient("decode", decode.channel, lambda _: None))
        decoded = await collect_all(decodes.start(rest))
        assert decoded.started is not None
        assert decoded.started.transfer_bytes > 0, "its blocks were pulled, not computed"
        assert len(decoded.token_ids) == 5


async def test_workers_with_different_templates_are_never_one_pool(tmp_path: Path, template: Path) -> None:
    other = tmp_path / "other.jinja"
    other.write_text(OTHER_TEMPLATE + " ")
    async with (
        mock_worker(tmp_path / "a", Role.PREFILL) as plain,
        mock_worker(tmp_path / "b", Role.DECODE, custom_jinja_template=str(template)) as first,
        mock_worker(tmp_path / "c", Role.DECODE, custom_jinja_template=str(other)) as second,
    ):
        records = [worker.record for worker in (plain, first, second)]
        assert len({record.model_name for record in records}) == 1
        assert len({pool_of(record) for record in records}) == 3
        with pytest.raises(ModelMismatchError):
            await text_files(first, plain.record.model_fingerprint)


@pytest.mark.parametrize("content", [b"{% if %}", b"\xff\xfe", None])
async def test_a_template_that_is_none_is_refused_before_anything_is_loaded(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^custom_jinja_template: "):
        async with worker_process(
            tmp_path, Role.DECODE, model_path=str(tmp_path / "nowhere"), custom_jinja_template=str(file)
        ):
            raise AssertionError("it serves")


async def test_a_repository_is_fetched_and_is_the_models_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Repository, bool]] = []

    def fetch(repository: Repository, *, needs_weights: bool) -> Path:
        asked.append((repository, needs_weights))
        return tiny.CHECKPOINT

    monkeypatch.setattr(model, "fetch_model", fetch)
    async with mock_worker(tmp_path, Role.DECODE, model_path="org/name@v1") as worker:
        assert worker.record.model_name == "org/name"
        assert await text_files(worker, worker.record.model_fingerprint) == read_text_files(tiny.CHECKPOINT)
    assert asked == [(Repository("org/name", "v1"), False)]


async def test_a_repository_that_cannot_be_fetched_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(_repository: Repository, *, needs_weights: bool) -> Path:
        raise ConfigError("model_path: there is none")

    monkeypatch.setattr(model, "fetch_model", fetch)
    with pytest.raises(ConfigError, match=r"^model_path: there is none"):
        async with mock_worker(tmp_path, Role.PREFILL, model_path="org/name"):
            raise AssertionError("it serves")


async def test_a_stop_does_not_wait_for_a_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    fetching, may_end, stop = asyncio.Event(), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def fetch(_repository: Repository, *, needs_weights: bool) -> Path:
        loop.call_soon_threadsafe(fetching.set)
        may_end.wait(WAIT_S)
        return tiny.CHECKPOINT

    monkeypatch.setattr(model, "fetch_model", fetch)
    running = asyncio.create_task(WorkerProcess(WorkerConfig(model_path="org/name"), Role.DECODE).run(stop))
    try:
        async with asyncio.timeout(WAIT_S):
            await fetching.wait()
            stop.set()
            await running
    finally:
        may_end.set()


def test_another_processor_of_pictures_makes_another_model() -> None:
    def fingerprint(**given: Any) -> str:
        return ServedModel(path=Path("m"), name="m", **given).fingerprint("engine's")

    sizes = {"processor_kwargs": {"size": {"height": 3, "width": 4}, "do_pad": True}}
    same = {"processor_kwargs": {"do_pad": True, "size": {"width": 4, "height": 3}}}
    others = [{}, {"processor_kwargs": {"do_pad": True}}, {"template": b"a"}, {**sizes, "template": b"a"}]
    assert fingerprint(**sizes) == fingerprint(**same)
    assert len({fingerprint(**given) for given in (sizes, *others)}) == 1 + len(others)
    assert fingerprint() == "engine's"

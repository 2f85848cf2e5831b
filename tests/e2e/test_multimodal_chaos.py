"""Requests with pictures don't notice what breaks, and leave nothing held anywhere, however they end."""

from __future__ import annotations

import asyncio
import io
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save

from quartet.client import (
    ChoiceFinished,
    FinishReason,
    MediaFile,
    MediaKind,
    MediaUrl,
    QuartetClient,
    Rank,
    RequestPath,
)
from quartet.errors import (
    InvalidMediaError,
    MediaFetchError,
    MediaNotAllowedError,
    MediaTooLargeError,
    RequestTimeoutError,
    ServingError,
)
from tests import tiny
from tests.e2e.conftest import StartStack
from tests.e2e.crowd import Ask, Crowd, decode_of_all
from tests.e2e.picture_asks import NUM_KINDS, mixed_picture_asks, picture, picture_ask, pictures, single_asks
from tests.e2e.picture_site import PictureSite, picture_site
from tests.e2e.process import wait_until
from tests.e2e.stack import REMOTE_PREFILL, Settings, Stack, StackConfig
from tests.engine.torch.vision_checkpoints import Reference
from tests.stopwatch import Stopwatch

# Blocks come back within a hand-off's time to live.
HAND_OFF_TTL_S = 3.0
WAIT_S = 90.0
ENCODES, PREFILLS, DECODES = ("encode-0", "encode-1"), ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
# Room for four pictures.
NUM_EMBEDDING_BLOCKS = 8
FETCH_TIMEOUT_S = 1.5
FILE = picture(1800)
LONG_TEXT = " ".join(f"The number {number} comes before the number {number + 1}." for number in range(60))


@pytest.fixture(scope="module")
def site() -> Iterator[PictureSite]:
    with picture_site(FILE.data) as site:
        yield site


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``allowed``, with a picture and with ways out of it, beside ``forbidden.png``."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "allowed").mkdir()
    for name in ("allowed/picture.png", "forbidden.png"):
        (folder / name).write_bytes(FILE.data)
    (folder / "allowed" / "link.png").symlink_to(folder / "forbidden.png")
    (folder / "allowed" / "up").symlink_to(folder)
    return folder


@pytest.fixture(scope="module")
def picture_stack(start_stack: StartStack, site: PictureSite, folder: Path) -> Stack:
    """Two of each role, with pools of embeddings that are soon full, and a router that follows some URLs."""
    # Workers are killed or frozen here, and none is waited for until it is given up: a busy machine may take its time.
    etcd: Settings = {"discovery.etcd.lease_ttl_s": 60}
    router: Settings = {
        **REMOTE_PREFILL,
        "attempts.encode_timeout_s": 30.0,
        "attempts.prefill_timeout_s": 30.0,
        "attempts.decode_stall_timeout_s": WAIT_S,
        "heartbeat_timeout_s": WAIT_S,
        "media.allowed_local_paths": [str(folder / "allowed")],
        "media.allowed_schemes": ["http"],
        "media.allowed_hosts": [site.host, f"127.0.0.2:{site.server_port}"],
        "media.allowed_private_networks": ["127.0.0.1/32"],
        "media.fetch_timeout_s": FETCH_TIMEOUT_S,
    }
    worker: Settings = {"transfer.hand_off_ttl_s": HAND_OFF_TTL_S, "engine.num_embedding_blocks": NUM_EMBEDDING_BLOCKS}
    encode: Settings = {"engine.num_blocks": NUM_EMBEDDING_BLOCKS}
    config = StackConfig(
        num_encode=2,
        num_prefill=2,
        num_decode=2,
        worker={**worker, **etcd},
        roles={"encode": encode},
        routers={"router": {**router, **etcd}},
    )
    return start_stack(config)


@pytest.fixture
def chaos(picture_stack: Stack) -> Iterator[Stack]:
    """The stack as the test before has left it: a router and at least one worker of each role."""
    yield picture_stack
    picture_stack.thaw(*picture_stack.config.worker_names)
    for process in picture_stack.processes.values():
        assert "never retrieved" not in process.log.read_text(), process.name


@pytest.fixture
def whole(chaos: Stack) -> Stack:
    """The stack, with whatever was broken made whole again."""
    chaos.restart_dead()
    return chaos


@pytest.fixture
async def client(chaos: Stack) -> AsyncIterator[QuartetClient]:
    async with QuartetClient(chaos.router_address) as client:
        yield client


async def returned(stack: Stack) -> None:
    """Nothing is held anywhere, and the pools of embeddings have lost no block."""
    await asyncio.to_thread(stack.wait_blocks_returned, timeout_s=WAIT_S)
    for name in stack.config.worker_names:
        if stack.processes[name].is_running:
            assert stack.embedding_counts(name).total == NUM_EMBEDDING_BLOCKS, name
    metrics = stack.metrics("router")
    assert metrics.value("quartet_router_queued_requests") == 0


async def made_whole(stack: Stack) -> None:
    for name, process in stack.processes.items():
        if not process.is_running:
            stack.spawn(name)
    await asyncio.to_thread(stack.wait_ready)


async def until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    await asyncio.to_thread(wait_until, condition, timeout_s, lambda: what)


async def undisturbed(client: QuartetClient, asks: Sequence[Ask]) -> list[list[int]]:
    async with Crowd(client, asks) as crowd:
        await crowd.finish()
    assert set(crowd.num_attempts) == {1}
    return crowd.token_ids


def num_held(stack: Stack, names: Sequence[str]) -> int:
    return sum(stack.embedding_counts(name).held for name in names)


@pytest.mark.parametrize("path", RequestPath)
@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
async def test_clients_that_vanish_leave_nothing(
    whole: Stack, client: QuartetClient, path: RequestPath, role: str
) -> None:
    frozen = [name for name in whole.config.worker_names if name.startswith(role)]
    first = 300 + 20 * list(RequestPath).index(path) + 100 * len(role)
    whole.freeze(*frozen)
    async with Crowd(client, single_asks(first, 6, num_tokens=200), path=path) as crowd:
        await until(stage(whole, crowd, role), f"requests at {role}")
    whole.thaw(*frozen)
    await returned(whole)


@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
async def test_a_cancelled_request_gets_its_end_and_leaves_nothing(
    whole: Stack, client: QuartetClient, role: str
) -> None:
    frozen = [name for name in whole.config.worker_names if name.startswith(role)]
    asks = single_asks(400 + 100 * len(role), 6, num_tokens=200)
    whole.freeze(*frozen)
    async with Crowd(client, asks) as crowd:
        await until(stage(whole, crowd, role), f"requests at {role}")
        await crowd.cancel()
        await crowd.finish()
    whole.thaw(*frozen)
    assert {ended.reason for ended in ends(crowd)} == {FinishReason.CANCELLED}
    await returned(whole)


def stage(stack: Stack, crowd: Crowd, role: str) -> Callable[[], bool]:
    """Whether the requests got as far as the workers of ``role``, which are frozen."""
    match role:
        case "encode":
            return lambda: stack.metrics("router").value("quartet_router_running_requests") >= len(crowd.answers)
        case "prefill":
            return lambda: num_held(stack, ENCODES) > 0
        case _:
            return lambda: sum(stack.load(name).num_held_blocks for name in PREFILLS) > 0


def ends(crowd: Crowd) -> list[ChoiceFinished]:
    return [choice.finished for answer in crowd.answers for choice in answer.choices if choice.finished is not None]


async def test_short_times_run_out_wherever_a_request_is(whole: Stack, client: QuartetClient) -> None:
    for number, timeout_s in enumerate((0.05, 0.2, 0.6)):
        crowds = [
            Crowd(
                client, single_asks(1000 + 30 * number + 10 * place, 3, num_tokens=3000), path=path, timeout_s=timeout_s
            )
            for place, path in enumerate(RequestPath)
        ]
        async with crowds[0], crowds[1], crowds[2]:
            outcomes = [outcome for crowd in crowds for outcome in await asyncio.wait_for(crowd.outcomes(), WAIT_S)]
        assert all(isinstance(outcome, RequestTimeoutError) for outcome in outcomes), outcomes
    await returned(whole)


async def test_crowds_on_all_paths_get_what_each_gets_alone(whole: Stack, client: QuartetClient) -> None:
    asks = mixed_picture_asks(1200, NUM_KINDS)
    alone = [(await undisturbed(client, [ask]))[0] for ask in asks]
    assert alone[2] != alone[3], "the order of pictures makes no difference"
    crowds = {path: Crowd(client, asks, path=path) for path in RequestPath}
    # Others' pictures are in the way.
    fresh = {path: Crowd(client, single_asks(1300 + 20 * number, 2), path=path) for number, path in enumerate(crowds)}
    async with asyncio.TaskGroup() as group:
        for crowd in (*crowds.values(), *fresh.values()):
            group.create_task(run(crowd))
    for path, crowd in crowds.items():
        for ask, answer, ids in zip(asks, crowd.answers, alone, strict=True):
            assert [choice.token_ids for choice in answer.choices] == [ids] * ask.num_choices, path
    await returned(whole)


async def run(crowd: Crowd) -> None:
    async with crowd:
        await crowd.finish()


async def test_pictures_of_many_requests_that_each_fill_a_pool_wait_for_each_other(
    whole: Stack, client: QuartetClient
) -> None:
    asks = [picture_ask(pictures(1400 + 4 * number, 4), num_tokens=8) for number in range(6)]
    async with Crowd(client, asks) as crowd:
        await asyncio.wait_for(crowd.finish(), WAIT_S)
    await returned(whole)
    assert crowd.token_ids == await undisturbed(client, asks)


async def test_the_cached_prefix_ends_before_another_picture(whole: Stack, client: QuartetClient) -> None:
    before = LONG_TEXT[:600]
    one, other = (picture_ask([file], before=before, num_tokens=2) for file in pictures(1500, 2))
    place = one.token_ids.index(7)

    async def num_cached(ask: Ask) -> int:
        async with Crowd(client, [ask]) as crowd:
            await crowd.finish()
        return ends(crowd)[0].usage.num_cached_tokens

    assert await num_cached(one) == 0
    assert place + 32 < await num_cached(one) <= place + 64
    assert 0 < await num_cached(other) <= place
    await returned(whole)


async def test_a_picture_goes_where_it_was_encoded(whole: Stack, client: QuartetClient) -> None:
    def items(name: str, outcome: str) -> float:
        return whole.metrics(name).value("quartet_encode_items_total", outcome=outcome)

    async def encoded_at(ask: Ask) -> str:
        async with Crowd(client, [ask]) as crowd:
            await crowd.finish()
        place = crowd.answers[0].encode
        assert isinstance(place, Rank)
        return place.worker_id

    file = picture(1600)
    asks = [picture_ask([file], question=f"What is {number}?", num_tokens=2) for number in range(4)]
    home = await encoded_at(asks[0])
    num_encoded = items(home, "encoded")
    assert [await encoded_at(ask) for ask in asks[1:]] == [home] * 3
    assert items(home, "encoded") == num_encoded
    whole.kill(home)
    await made_whole(whole)
    again = picture_ask([file], question="What is 99?", num_tokens=2)
    assert await encoded_at(again) in ENCODES
    assert sum(items(name, "encoded") for name in ENCODES) >= 1
    await returned(whole)


async def test_embeddings_that_a_client_computed_answer_like_their_picture(whole: Stack, client: QuartetClient) -> None:
    rows = Reference(tiny.CHECKPOINT).features(Image.open(io.BytesIO(FILE.data)).convert("RGB"))
    asks = [picture_ask([file]) for file in (FILE, embeddings(rows))]
    for path in RequestPath:
        async with Crowd(client, asks, path=path) as crowd:
            await crowd.finish()
        assert crowd.token_ids[0] == crowd.token_ids[1]
    broken = rows.clone()
    broken[3, 7] = torch.nan
    refused: dict[str, tuple[torch.Tensor, type[ServingError]]] = {
        "NaN": (broken, InvalidMediaError),
        "another width": (rows[:, :-1].contiguous(), InvalidMediaError),
        "another rank": (rows[None], InvalidMediaError),
        "no token": (rows[:0], InvalidMediaError),
        "another dtype": (rows.double(), InvalidMediaError),
        "more than fits": (rows.repeat(100, 1), MediaTooLargeError),
    }
    for name, (tensor, kind) in refused.items():
        ask = picture_ask([FILE, embeddings(tensor)])
        for path in RequestPath:
            error = await refusal(client, ask, path)
            assert (type(error), error.field) == (kind, "media[1].embeddings"), (name, path, error)
    error = await refusal(client, picture_ask([MediaFile(MediaKind.EMBEDDINGS, save({"a": rows})[:-1])]))
    assert (type(error), error.field) == (InvalidMediaError, "media[0].embeddings")
    await returned(whole)


def embeddings(rows: torch.Tensor) -> MediaFile:
    return MediaFile(MediaKind.EMBEDDINGS, save({"embeddings": rows}))


async def refusal(client: QuartetClient, ask: Ask, path: RequestPath = RequestPath.GENERATE) -> ServingError:
    async with Crowd(client, [ask], path=path) as crowd:
        [outcome] = await asyncio.wait_for(crowd.outcomes(), WAIT_S)
    assert isinstance(outcome, ServingError), outcome
    return outcome


async def test_pictures_behind_urls_are_answered_like_the_file(
    whole: Stack, client: QuartetClient, site: PictureSite, folder: Path
) -> None:
    urls = [
        f"file://{folder}/allowed/picture.png",
        f"file://{folder}/allowed/up/allowed/../allowed/picture.png",
        f"http://{site.host}/picture",
        f"data:image/png;base64,{b64encode(FILE.data).decode()}",
    ]
    asks = [picture_ask([FILE]), *(picture_ask([MediaUrl(url)]) for url in urls)]
    for path in RequestPath:
        async with Crowd(client, asks, path=path) as crowd:
            await crowd.finish()
        assert crowd.token_ids == [crowd.token_ids[0]] * len(asks)
    await returned(whole)


async def test_urls_that_lead_out_of_what_is_allowed_are_refused(
    whole: Stack, client: QuartetClient, site: PictureSite, folder: Path
) -> None:
    forbidden = [
        f"file://{folder}/forbidden.png",
        f"file://{folder}/allowed/../forbidden.png",
        f"file://{folder}/allowed/%2e%2e/forbidden.png",
        f"file://{folder}/allowed/link.png",
        f"file://{folder}/allowed/up/forbidden.png",
        "file:///etc/passwd",
        f"http://127.0.0.2:{site.server_port}/picture",
        f"http://{site.host}/elsewhere",
        f"http://localhost:{site.server_port}/picture",
        f"https://{site.host}/picture",
        "http://169.254.169.254/latest",
        f"http://{whole.processes['decode-0'].http_address}/metrics",
    ]
    for url in forbidden:
        for path in RequestPath:
            error = await refusal(client, picture_ask([FILE, MediaUrl(url)]), path)
            assert (type(error), error.field) == (MediaNotAllowedError, "media[1].url"), (url, path, error)
            assert "forbidden" not in error.message and str(site.server_port) not in error.message
    await returned(whole)


async def test_a_site_that_never_answers_is_given_up_after_the_fetch_timeout(
    whole: Stack, client: QuartetClient, site: PictureSite
) -> None:
    ask = picture_ask([FILE, MediaUrl(f"http://{site.host}/never")])
    began, stopwatch = time.monotonic(), Stopwatch()
    errors = await asyncio.gather(*(refusal(client, ask, path) for path in RequestPath))
    assert time.monotonic() - began >= FETCH_TIMEOUT_S
    assert stopwatch.seconds < FETCH_TIMEOUT_S + 3
    assert {(type(error), error.field) for error in errors} == {(MediaFetchError, "media[1].url")}
    assert await left(site, len(errors))
    assert all(site.asked.acquire(blocking=False) for _ in errors)
    # A client that vanishes takes the connection along, long before its time.
    for path in RequestPath:
        async with Crowd(client, [ask], path=path):
            assert await asyncio.to_thread(site.asked.acquire, timeout=WAIT_S)
        assert await left(site, 1)
    await returned(whole)


async def left(site: PictureSite, count: int) -> bool:
    """Whether so many who had asked for what never comes have gone."""
    return all([await asyncio.to_thread(site.left.acquire, timeout=WAIT_S) for _ in range(count)])


async def test_an_encode_worker_that_is_killed_with_pictures_on_their_way(whole: Stack, client: QuartetClient) -> None:
    asks = single_asks(100, 8)
    whole.freeze("encode-0")
    async with Crowd(client, asks) as crowd:

        def are_others_done() -> bool:
            placed = [answer for answer in crowd.answers if answer.placement is not None]
            return len(placed) >= 2 and all(answer.finished is not None for answer in placed)

        await crowd.wait_for(are_others_done)
        assert not all(answer.finished for answer in crowd.answers), "no request was at the worker that was frozen"
        whole.kill("encode-0")
        await crowd.finish()
    await returned(whole)
    assert crowd.token_ids == await undisturbed(client, asks)


async def test_a_prefill_that_is_killed_with_pulled_embeddings(chaos: Stack, client: QuartetClient) -> None:
    # Much work for a prefill worker: nothing of one is cached for another.
    asks = [picture_ask([picture(number)], before=f"{number} {LONG_TEXT}", num_tokens=4) for number in range(200, 204)]
    async with Crowd(client, asks) as crowd:
        await until(lambda: num_held(chaos, ["prefill-0"]) > 0, "embeddings at prefill-0")
        chaos.kill("prefill-0")
        await crowd.finish()
    assert max(crowd.num_attempts) > 1, "no request was on the prefill that was killed"
    await returned(chaos)
    assert crowd.token_ids == await undisturbed(client, asks)


async def test_a_decode_that_is_killed_amid_answers_about_pictures(chaos: Stack, client: QuartetClient) -> None:
    asks = [*single_asks(220, 3, num_tokens=300), picture_ask(pictures(220, 2), num_tokens=300)]
    crowds = {path: Crowd(client, asks, path=path) for path in RequestPath}
    # They begin to decode side by side: none is near its end when one of each path is at work.
    chaos.freeze(*DECODES)
    async with AsyncExitStack() as exits:
        for crowd in crowds.values():
            await exits.enter_async_context(crowd)
        routed = crowds[RequestPath.GENERATE]
        await routed.wait_for(lambda: all(routed.token_ids))  # the first ones, of prefill workers
        chaos.thaw(*DECODES)
        chaos.kill(await decode_of_all(crowds.values(), DECODES))
        for crowd in crowds.values():
            await crowd.finish()
    await returned(chaos)
    expected = await undisturbed(client, asks)
    for path, crowd in crowds.items():
        assert max(crowd.num_attempts) > 1, f"no request was there by {path}"
        assert crowd.token_ids == expected, path


async def test_an_encode_worker_that_is_killed_before_its_embeddings_are_pulled(
    whole: Stack, client: QuartetClient
) -> None:
    asks = single_asks(120, 6)
    whole.freeze(*PREFILLS)
    async with Crowd(client, asks) as crowd:
        await until(lambda: min(num_held(whole, [name]) for name in ENCODES) > 0, "embeddings at both encode workers")
        await crowd.wait_for(lambda: len(crowd.at("encode-1")) > 0)
        whole.kill("encode-1")
        whole.thaw(*PREFILLS)
        await crowd.finish()
    assert max(crowd.num_attempts) > 1, "no request waited for what was lost"
    await returned(whole)
    assert crowd.token_ids == await undisturbed(client, asks)


async def test_all_encode_workers_are_killed_and_requests_wait_until_they_come_back(
    chaos: Stack, client: QuartetClient
) -> None:
    asks, late_asks = [*single_asks(140, 6, num_tokens=48), *mixed_picture_asks(150, 1)], single_asks(160, 3)

    def num_waiting() -> float:
        return chaos.metrics("router").value("quartet_router_queued_requests")

    async with Crowd(client, asks) as crowd:
        await crowd.wait_for(lambda: any(answer.token_ids for answer in crowd.answers))
        for name in ENCODES:
            chaos.kill(name)
        async with Crowd(client, late_asks, timeout_s=2 * WAIT_S) as late:
            async with Crowd(client, single_asks(170, 4)):  # they vanish while they wait
                await until(lambda: num_waiting() >= 3 + 4, "requests that wait for an encode worker")
            await made_whole(chaos)
            await crowd.finish()
            await late.finish()
    # A first pull may still meet the stream that was kept open to who died: then there is a second attempt.
    async with Crowd(client, [*asks, *late_asks]) as again:
        await again.finish()
    assert crowd.token_ids + late.token_ids == again.token_ids
    await returned(chaos)


async def test_a_drained_encode_worker_fails_no_request(whole: Stack, client: QuartetClient) -> None:
    # Each fills a pool: the others that come to its worker wait there for room.
    asks = [picture_ask(pictures(240 + 4 * number, 4)) for number in range(4)]
    whole.freeze(*PREFILLS)
    async with Crowd(client, asks) as crowd:
        await until(lambda: num_held(whole, ["encode-0"]) == NUM_EMBEDDING_BLOCKS, "encode-0 full of embeddings")
        whole.terminate("encode-0")
        whole.thaw(*PREFILLS)
        await crowd.finish()
    assert await asyncio.to_thread(whole.processes["encode-0"].wait, WAIT_S) == 0
    await asyncio.to_thread(whole.wait_ready, WAIT_S)
    await returned(whole)
    assert crowd.token_ids == await undisturbed(client, asks)

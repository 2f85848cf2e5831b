"""From parts of a request to checked items: order, names, limits, and the field that an error names."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import urllib.parse
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from quartet.errors import (
    InvalidMediaError,
    InvalidRequestError,
    MediaNotAllowedError,
    MediaTooLargeError,
    ServingError,
)
from quartet.media.items import MediaFile, MediaKind, MediaPart, MediaUrl
from quartet.media.media_id import media_id
from router.media import data_url as data_url_module
from router.media.config import MediaConfig
from router.media.data_url import read_data_url
from router.media.fetch import FetchSlots, check_parts, to_file
from tests.media.pictures import encode, make_file, make_picture
from tests.router.media.conftest import MakeFetcher
from tests.router.media.site import FINGERPRINT, PNG, Site, fetch_one, loopback_config, num_open_files, settle_to


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def safetensors(header: object, tensors: bytes = bytes(16)) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


EMBEDDINGS = safetensors({"embeddings": {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]}})


async def test_items_come_in_order_whatever_their_source(site: Site, make_fetcher: MakeFetcher) -> None:
    files = [make_file(format, 5 + index) for index, format in enumerate(("PNG", "JPEG", "GIF"))]
    later = asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        await later.wait()
        return web.Response(body=files[0])

    async def fast(request: web.Request) -> web.Response:
        later.set()
        return web.Response(body=files[1])

    parts: list[MediaPart] = [
        MediaUrl(site.serve("/slow", slow)),
        MediaUrl(site.serve("/fast", fast)),
        MediaUrl(data_url(files[2])),
        MediaFile(MediaKind.EMBEDDINGS, EMBEDDINGS),
        MediaFile(MediaKind.IMAGE, PNG),
    ]
    items = await make_fetcher(loopback_config(site)).fetch(parts, ["a", "b", "c", "d", "e"], FINGERPRINT)
    assert [item.file.data for item in items] == [*files, EMBEDDINGS, PNG]
    assert [item.file.kind for item in items] == [MediaKind.IMAGE] * 3 + [MediaKind.EMBEDDINGS, MediaKind.IMAGE]
    assert [item.media_id for item in items] == [media_id(item.file, FINGERPRINT) for item in items]


async def test_a_url_may_lead_to_embeddings_as_to_a_picture(
    site: Site, make_fetcher: MakeFetcher, tmp_path: Path
) -> None:
    file = tmp_path / "rows.safetensors"
    file.write_bytes(EMBEDDINGS)
    # Whatever the server calls it.
    urls = [site.give("/rows", EMBEDDINGS), site.give("/a.png", EMBEDDINGS), file.as_uri(), data_url(EMBEDDINGS, "")]
    fetcher = make_fetcher(replace(loopback_config(site), allowed_local_paths=(tmp_path,)))
    parts = [MediaUrl(url) for url in urls]
    items = await fetcher.fetch(parts, [f"media[{number}].url" for number in range(len(urls))], FINGERPRINT)
    [item] = await fetcher.fetch([MediaFile(MediaKind.EMBEDDINGS, EMBEDDINGS)], ["media[0].embeddings"], FINGERPRINT)
    assert items == (item,) * len(urls)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"max_file_size_mb": (len(EMBEDDINGS) - 1) / 1e6}, MediaTooLargeError),
        ({"allowed_private_networks": ()}, MediaNotAllowedError),
        ({"allowed_hosts": ("images.test",)}, MediaNotAllowedError),
        ({"allowed_schemes": ("https",)}, MediaNotAllowedError),
    ],
)
async def test_urls_of_embeddings_have_the_bounds_of_those_of_pictures(
    config: dict[str, Any], error: type[ServingError], site: Site, make_fetcher: MakeFetcher
) -> None:
    url = site.give("/rows.safetensors", EMBEDDINGS)
    with pytest.raises(error) as caught:
        await fetch_one(make_fetcher(replace(loopback_config(site), **config)), url)
    assert caught.value.field == "media[0].url"


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP"])
def test_no_picture_begins_as_embeddings_do(format: str) -> None:
    assert to_file(make_file(format, 5)).kind is MediaKind.IMAGE
    assert to_file(b"").kind is to_file(EMBEDDINGS[:8]).kind is to_file(b"{" * 99).kind is MediaKind.IMAGE


async def test_no_parts_are_no_items(make_fetcher: MakeFetcher) -> None:
    assert await make_fetcher(MediaConfig()).fetch([], [], FINGERPRINT) == ()


async def test_a_large_file_is_checked_and_named_alike(make_fetcher: MakeFetcher) -> None:
    data = encode(make_picture(400, 300), "PNG", compress_level=0)
    file = MediaFile(MediaKind.IMAGE, data)
    fetcher = make_fetcher(MediaConfig())
    inline, by_url = await fetcher.fetch([file, MediaUrl(data_url(data))], ["a", "b"], FINGERPRINT)
    assert inline == by_url
    assert inline.media_id == media_id(file, FINGERPRINT)


@pytest.mark.parametrize(
    "url",
    [
        data_url(PNG),
        data_url(PNG, ""),
        data_url(PNG, "image/png;charset=utf-8"),
        data_url(PNG).replace("data:", "DATA:").replace("base64", "Base64"),
        data_url(PNG).rstrip("="),
        data_url(PNG).replace("+", "%2B").replace("=", "%3D"),
        data_url(PNG)[:60] + "\r\n " + data_url(PNG)[60:],
        "data:," + urllib.parse.quote(PNG),
        "data:image/png," + "".join(f"%{byte:02x}" for byte in PNG),
    ],
)
async def test_data_urls_of_every_spelling_are_read(url: str, make_fetcher: MakeFetcher) -> None:
    assert await fetch_one(make_fetcher(MediaConfig()), url) == PNG


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:;base64,!!!!", "malformed"),
        ("data:;base64,A", "malformed"),
        ("data:;base64,AA=A", "malformed"),
        ("data:,\u00fc", "not ASCII"),
        ("data:,", "no PNG"),
        ("ftp://images.test/a.png", "begins with"),
        ("pictures/a.png", "begins with"),
        ("", "begins with"),
    ],
)
async def test_malformed_urls_are_refused_by_field(url: str, message: str, make_fetcher: MakeFetcher) -> None:
    with pytest.raises(InvalidMediaError, match=message) as caught:
        await fetch_one(make_fetcher(MediaConfig()), url, "media[7].url")
    assert caught.value.field == "media[7].url"


async def test_more_bytes_than_allowed_are_refused_wherever_they_come_from(make_fetcher: MakeFetcher) -> None:
    exactly, fetcher = (
        make_fetcher(MediaConfig(max_file_size_mb=len(PNG) / 1e6)),
        make_fetcher(MediaConfig(max_file_size_mb=(len(PNG) - 1) / 1e6)),
    )
    urls = [data_url(PNG), data_url(PNG).rstrip("="), "data:," + urllib.parse.quote(PNG)]
    for part in (*map(MediaUrl, urls), MediaFile(MediaKind.IMAGE, PNG)):
        assert await exactly.fetch([part], ["a"], FINGERPRINT)
        with pytest.raises(MediaTooLargeError, match="max_file_size_mb allows") as caught:
            await fetcher.fetch([part], ["media[0]"], FINGERPRINT)
        assert caught.value.field == "media[0]"


@pytest.mark.parametrize("url", ["data:;base64," + "A" * 100, "data:," + "%00" * 71])
def test_a_data_url_of_too_many_bytes_is_refused_before_any_is_decoded(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(data_url_module, "unquote_to_bytes")
    with pytest.raises(MediaTooLargeError):
        read_data_url(url, 70)


async def test_more_pixels_than_allowed_are_refused(make_fetcher: MakeFetcher) -> None:
    with pytest.raises(MediaTooLargeError, match="13 x 7") as caught:
        await fetch_one(make_fetcher(MediaConfig(max_pixels=90)), data_url(PNG))
    assert caught.value.field == "media[0].url"


async def test_more_items_than_allowed_are_refused_by_the_first_that_is_too_many(make_fetcher: MakeFetcher) -> None:
    parts = [MediaFile(MediaKind.IMAGE, PNG)] * 3
    with pytest.raises(InvalidRequestError, match="at most 2") as caught:
        await make_fetcher(MediaConfig(max_items=2)).fetch(parts, ["a", "b", "c"], FINGERPRINT)
    assert caught.value.field == "c"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        PNG,
        EMBEDDINGS[:20],
        struct.pack("<Q", 2**64 - 1) + bytes(100),
        struct.pack("<Q", 3) + b"{}",
        safetensors([1, 2]),
        safetensors("text"),
        struct.pack("<Q", 4) + b"\xff{}\xff",
        struct.pack("<Q", 60_000) + b"[" * 60_000,
        safetensors({"a": "b" * 70_000}),
    ],
)
async def test_embeddings_that_are_no_safetensors_are_refused(data: bytes, make_fetcher: MakeFetcher) -> None:
    with pytest.raises(InvalidMediaError) as caught:
        await make_fetcher(MediaConfig()).fetch([MediaFile(MediaKind.EMBEDDINGS, data)], ["media[0]"], FINGERPRINT)
    assert caught.value.field == "media[0]"


async def test_a_failure_cancels_the_other_fetches_and_is_the_only_error(site: Site, make_fetcher: MakeFetcher) -> None:
    asked = asyncio.Event()

    async def never(request: web.Request) -> web.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def fails_then(request: web.Request) -> web.Response:
        await asked.wait()
        return web.Response(body=b"no picture")

    urls = [site.serve("/never", never), site.serve("/fails", fails_then)]
    fetcher = make_fetcher(loopback_config(site))
    num_files = num_open_files()
    with pytest.raises(InvalidMediaError) as caught:
        await fetcher.fetch([MediaUrl(url) for url in urls], ["media[0].url", "media[1].url"], FINGERPRINT)
    assert caught.value.field == "media[1].url"
    await settle_to(num_files)


async def test_cancelling_closes_open_connections(site: Site, make_fetcher: MakeFetcher) -> None:
    asked = asyncio.Event()

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(PNG[:10])
        asked.set()
        await asyncio.Event().wait()
        return response

    url = site.serve("/half", half)
    fetcher = make_fetcher(loopback_config(site, max_concurrent_fetches=1))
    num_files = num_open_files()
    task = asyncio.create_task(fetch_one(fetcher, url))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle_to(num_files)
    # Its turn is free again too.
    assert await fetch_one(fetcher, site.give("/whole")) == PNG


async def test_no_more_fetches_run_at_once_than_allowed(site: Site, make_fetcher: MakeFetcher) -> None:
    running, most = 0, 0

    async def counting(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        # Turns of the loop in which another would get in, were it let.
        for _ in range(200):
            await asyncio.sleep(0)
        running -= 1
        return web.Response(body=PNG)

    parts = [MediaUrl(site.serve("/count", counting))] * 8
    fetcher = make_fetcher(loopback_config(site, max_concurrent_fetches=2))
    assert len(await fetcher.fetch(parts, [""] * 8, FINGERPRINT)) == 8
    assert most == 2


async def test_a_tenant_with_many_slow_fetches_does_not_keep_another_tenants_waiting(
    site: Site, make_fetcher: MakeFetcher
) -> None:
    num_asked, are_many = 0, asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 5:
            are_many.set()
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")

    slow = [MediaUrl(site.serve("/silent", silent))] * 10
    fetcher = make_fetcher(loopback_config(site, max_concurrent_fetches=8, max_items=10, fetch_timeout_s=60.0))
    crowd = [asyncio.create_task(fetcher.fetch(slow, [""] * 10, FINGERPRINT, "crowd")) for _ in range(3)]
    async with asyncio.timeout(30):
        await are_many.wait()
        quick = [MediaUrl(site.give("/quick"))] * 4
        assert len(await fetcher.fetch(quick, [""] * 4, FINGERPRINT, "other")) == 4
    assert num_asked == 5, "as long as 4 of 8 are free a tenant that has 4 takes another one"
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    assert len(await fetcher.fetch(quick, [""] * 4, FINGERPRINT, "crowd")) == 4


async def test_a_wait_for_a_slot_that_is_cancelled_gives_back_none() -> None:
    slots = FetchSlots(1)
    entered: list[str] = []

    async def fetch(tenant: str) -> None:
        async with slots.taken(tenant):
            entered.append(tenant)
            await asyncio.Event().wait()

    tasks = []
    for tenant in "abc":
        tasks.append(asyncio.create_task(fetch(tenant)))
        await asyncio.sleep(0)
        if tenant == "b":
            tasks[-1].cancel()
            await asyncio.wait(tasks[-1:])
    await asyncio.sleep(0)
    assert entered == ["a"]
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    await asyncio.sleep(0)
    assert entered == ["a", "c"]
    tasks[2].cancel()
    await asyncio.wait(tasks)


@given(steps=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["enter", "leave", "cancel"])), max_size=60))
def test_fetch_slots_are_shared_and_none_is_lost(steps: list[tuple[str, str]]) -> None:
    async def run() -> None:
        num_slots, slots = 6, FetchSlots(6)
        running: Counter[str] = Counter()
        entered: defaultdict[str, list[tuple[asyncio.Task[None], asyncio.Event]]] = defaultdict(list)

        async def fetch(tenant: str, leaves: asyncio.Event) -> None:
            async with slots.taken(tenant):
                running[tenant] += 1
                try:
                    await leaves.wait()
                finally:
                    running[tenant] -= 1

        async def settle() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        for tenant, step in steps:
            if step == "enter":
                leaves = asyncio.Event()
                entered[tenant].append((asyncio.create_task(fetch(tenant, leaves)), leaves))
            elif entered[tenant]:
                task, leaves = entered[tenant].pop(0)
                leaves.set() if step == "leave" else task.cancel()
            await settle()
            num_free = num_slots - running.total()
            assert num_free >= 0
            for name, tasks in entered.items():
                has_waiting = sum(not task.done() for task, _ in tasks) > running[name]
                assert not has_waiting or not num_free or running[name] > num_free, "a slot is free for it"
        for task, _ in (one for tasks in entered.values() for one in tasks):
            task.cancel()
        await settle()
        assert (slots._num_free, slots._num_taken, slots._waiting) == (num_slots, {}, {})

    asyncio.run(run())


async def test_messages_never_hold_the_url_nor_what_is_in_the_file(site: Site, make_fetcher: MakeFetcher) -> None:
    site.give("/secret-path", b"secret-content")
    site.give("/secret-path/gone", status=404)
    fetcher = make_fetcher(loopback_config(site, max_redirects=0))
    urls = [
        site.url("/secret-path?token=secret-token"),
        site.url("/secret-path/gone?token=secret-token"),
        site.url("/", host="secret-user:secret-password@127.0.0.1"),
        site.url("/", host="secret-host.test"),
        "file:///secret-file",
        "data:,secret-data",
        "data:;base64,secret-data!",
        "secret-scheme:secret-rest",
    ]
    for url in urls:
        with pytest.raises(ServingError) as caught:
            await fetch_one(fetcher, url)
        assert "secret" not in caught.value.message


async def test_without_configuration_no_url_is_fetched(site: Site, make_fetcher: MakeFetcher) -> None:
    fetcher = make_fetcher(MediaConfig())
    for url in (site.give("/a.png"), "https://images.test/a.png", "file:///etc/hostname"):
        with pytest.raises(MediaNotAllowedError) as caught:
            await fetch_one(fetcher, url)
        assert caught.value.field == "media[0].url"
        with pytest.raises(MediaNotAllowedError) as at_once:  # before it waits for anything
            check_parts([MediaUrl(url)], ["chat.messages[0].parts[1].media.url"], MediaConfig())
        assert at_once.value.field == "chat.messages[0].parts[1].media.url"
    assert site.asked == []

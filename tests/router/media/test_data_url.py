"""``data:`` URLs, above all long ones: limits come before any work, and work that nobody waits for ends."""

from __future__ import annotations

import asyncio
import base64
import threading
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quartet.errors import InvalidMediaError, MediaTooLargeError, RequestCancelledError
from quartet.media.items import MediaUrl
from router.media import data_url, fetch
from router.media.config import MediaConfig
from router.media.data_url import read_data_url
from router.media.fetch import check_parts
from router.thread_queue import IsWanted, ThreadQueue
from tests.router.media.conftest import MakeFetcher
from tests.router.media.site import FINGERPRINT, PNG

MB = 1 << 20
LONG_BASE64 = "data:image/png;base64," + "A" * MB


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:," + "%41" * MB, "characters"),
        ("data:;base64," + "A " * MB, "characters"),
        ("data:;base64," + "%41" * (MB // 4), "must be base64 without escapes"),
        ("data:," + "%41" * (MB // 4), "must be base64 without escapes"),
        ("data:," + "A" * MB, "must be base64 without escapes"),
        ("data:" + ";" * MB + ",AAAA", "no comma"),
        ("data:;base64,\U0001f469" + "A" * MB, "not ASCII"),
        ("http://a.test/" + "a" * MB, "longer than 8192"),
        ("file:///" + "%41" * MB, "longer than 8192"),
        ("a" * MB, "begins with"),
    ],
)
async def test_long_urls_are_refused_by_field_before_they_are_decoded(
    url: str, message: str, make_fetcher: MakeFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(data_url, "unquote_to_bytes")
    monkeypatch.delattr(fetch, "unquote_to_bytes")
    monkeypatch.delattr(data_url, "base64")
    fetcher = make_fetcher(MediaConfig(max_file_size_mb=MB / 1e6))
    with pytest.raises((InvalidMediaError, MediaTooLargeError), match=message) as caught:
        await fetcher.fetch([MediaUrl(url)], ["media[0].url"], FINGERPRINT, "a")
    assert caught.value.field == "media[0].url"


def test_a_url_that_is_too_long_costs_no_memory() -> None:
    url = MediaUrl("data:," + "%41" * (4 * MB))
    tracemalloc.start()
    try:
        with pytest.raises(MediaTooLargeError):
            check_parts([url], ["media[0].url"], MediaConfig(max_file_size_mb=MB / 1e6))
        assert tracemalloc.get_traced_memory()[1] < MB
    finally:
        tracemalloc.stop()


def test_long_base64_costs_little_more_memory_than_its_file() -> None:
    url = "data:;base64," + base64.b64encode(bytes(12 * MB)).decode()
    tracemalloc.start()
    try:
        assert read_data_url(url, 12 * MB) == bytes(12 * MB)
        assert tracemalloc.get_traced_memory()[1] < 28 * MB
    finally:
        tracemalloc.stop()


@given(
    data=st.binary(max_size=60),
    cuts=st.lists(st.tuples(st.integers(0, 80), st.sampled_from(" \r\n\t")), max_size=5),
    length=st.integers(1, 30),
    is_padded=st.booleans(),
)
def test_base64_in_slices_is_the_base64_of_the_whole(
    data: bytes, cuts: list[tuple[int, str]], length: int, is_padded: bool
) -> None:
    text = base64.b64encode(data).decode()
    if not is_padded:
        text = text.rstrip("=")
    for at, blank in cuts:
        text = text[:at] + blank + text[at:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_url, "_MAX_ESCAPED_LENGTH", 0)
        patch.setattr(data_url, "_SLICE_LENGTH", length)
        assert read_data_url("data:;base64," + text, 60) == data
        if len(data) > 3:
            with pytest.raises(MediaTooLargeError):
                read_data_url("data:;base64," + text, len(data) - 3)


@given(text=st.text("Aa+/=\n !", max_size=24), length=st.integers(1, 9))
@example(text="AA==AAAA", length=4)
@example(text="AAA=\n", length=3)
def test_malformed_base64_is_malformed_however_it_is_cut(text: str, length: int) -> None:
    def read() -> bytes | None:
        try:
            return read_data_url("data:;base64," + text, 100)
        except InvalidMediaError:
            return None

    whole = read()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_url, "_MAX_ESCAPED_LENGTH", 0)
        patch.setattr(data_url, "_SLICE_LENGTH", length)
        assert read() == whole


async def test_a_short_url_of_many_escapes_is_no_work_for_the_event_loop(
    make_fetcher: MakeFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[tuple[str, int]] = []
    run = ThreadQueue.run

    async def note(self: ThreadQueue, tenant: str, size: int, work: Callable[[IsWanted], object]) -> object:
        charged.append((tenant, size))
        return await run(self, tenant, size, work)

    monkeypatch.setattr(ThreadQueue, "run", note)
    fetcher = make_fetcher(MediaConfig())
    plain = "data:;base64," + base64.b64encode(PNG).decode()
    await fetcher.fetch([MediaUrl(plain), MediaUrl(plain.rstrip("=") + "%20" * 9)], ["a", "b"], FINGERPRINT, "t")
    assert not charged
    await fetcher.fetch([MediaUrl(plain.rstrip("=") + "%20" * 9_000)], ["a"], FINGERPRINT, "t")
    [(tenant, size)] = charged
    assert tenant == "t" and size > 900_000


def test_decoding_stops_once_nobody_waits() -> None:
    answers = iter([True, True, False])
    with pytest.raises(RequestCancelledError):
        read_data_url(LONG_BASE64, MB, lambda: next(answers))
    assert next(answers, None) is None


async def test_a_tenants_long_urls_leave_a_thread_to_another_tenant(
    make_fetcher: MakeFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, began = threading.Event(), threading.Semaphore(0)
    seen: list[str] = []

    def read(url: str, max_size_bytes: int, is_wanted: object) -> bytes:
        seen.append(url[-1])
        began.release()
        assert gate.wait(30)
        return b"no picture"

    monkeypatch.setattr(fetch, "read_data_url", read)
    fetcher = make_fetcher(MediaConfig())

    def ask(mark: str, tenant: str) -> asyncio.Task[object]:
        return asyncio.create_task(fetcher.fetch([MediaUrl(LONG_BASE64 + mark)], ["url"], FINGERPRINT, tenant))

    flood = [ask("A", "hog") for _ in range(10)]
    await asyncio.sleep(0)
    other = ask("B", "other")
    for _ in range(4):
        assert await asyncio.to_thread(began.acquire, timeout=30)
    assert sorted(seen) == ["A", "A", "A", "B"]
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    gate.set()
    with pytest.raises(InvalidMediaError):
        await other
    await fetcher.close()
    assert sorted(seen) == ["A", "A", "A", "B"], "what was cancelled never began"

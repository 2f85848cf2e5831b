"""``http:`` and ``https:`` URLs against a real server on loopback: addresses, redirects, bodies, TLS."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from quartet.errors import InvalidMediaError, MediaFetchError, MediaNotAllowedError, MediaTooLargeError, ServingError
from router.media.config import MediaConfig
from router.media.fetch import MediaFetcher
from tests.certificates import CertificateAuthority
from tests.router.media.conftest import MakeFetcher
from tests.router.media.site import LOOPBACK, PNG, Names, Site, fetch_one, loopback_config, num_open_files, settle_to


async def assert_refused(fetcher: MediaFetcher, url: str, error: type[ServingError], match: str | None = None) -> None:
    with pytest.raises(error, match=match) as caught:
        await fetch_one(fetcher, url)
    assert type(caught.value) is error
    assert caught.value.field == "media[0].url"


async def test_a_file_is_fetched_as_it_is(site: Site, make_fetcher: MakeFetcher) -> None:
    url = site.give("/a.png", Set_Cookie="a=b")
    fetcher = make_fetcher(loopback_config(site))
    num_files = num_open_files()
    assert await fetch_one(fetcher, url + "?size=3#top") == PNG
    assert await fetch_one(fetcher, url) == PNG
    assert site.asked == ["/a.png?size=3", "/a.png"]
    assert all(headers["accept-encoding"] == "identity" and "cookie" not in headers for headers in site.headers)
    await settle_to(num_files)


async def test_a_name_is_resolved_once_a_connection_and_the_checked_address_is_dialled(
    site: Site, make_fetcher: MakeFetcher
) -> None:
    url = site.give("/a.png").replace("127.0.0.1", "pictures.test")
    # A fetcher that resolved the name twice would check a good address first, and dial another.
    names = Names(pictures_test=[["127.0.0.1"], ["169.254.169.254"], ["127.0.0.1"]])
    fetcher = make_fetcher(loopback_config(site), names)
    assert await fetch_one(fetcher, url) == PNG
    assert names.num_lookups == 1
    assert site.headers[0]["host"] == f"pictures.test:{site.port}"
    # The next connection is checked anew.
    await assert_refused(fetcher, url, MediaNotAllowedError, "network")
    assert await fetch_one(fetcher, url) == PNG
    assert names.num_lookups == 3


@pytest.mark.parametrize("address", ["10.0.0.1", "169.254.169.254", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "fd00::1"])
async def test_a_name_of_a_private_address_is_refused(address: str, site: Site, make_fetcher: MakeFetcher) -> None:
    fetcher = make_fetcher(loopback_config(site), Names(pictures_test=[[address]]))
    await assert_refused(fetcher, site.url("/", "pictures.test"), MediaNotAllowedError, "network")
    await assert_refused(fetcher, site.url("/", "nowhere.test"), MediaNotAllowedError, "host and port")


async def test_every_address_that_is_tried_is_checked(site: Site, make_fetcher: MakeFetcher) -> None:
    # No server listens at the first address, so the second is tried.
    names = Names(pictures_test=[["127.1.2.3", "10.0.0.1"]])
    await assert_refused(
        make_fetcher(loopback_config(site), names), site.url("/", "pictures.test"), MediaNotAllowedError, "network"
    )
    names = Names(pictures_test=[["127.1.2.3", "127.0.0.1"]])
    url = site.give("/a.png").replace("127.0.0.1", "pictures.test")
    assert await fetch_one(make_fetcher(loopback_config(site), names), url) == PNG


async def test_loopback_is_refused_in_every_spelling_that_the_system_knows(site: Site) -> None:
    site.give("/a.png")
    config = MediaConfig(allowed_schemes=("http",), allowed_hosts=(f"*:{site.port}",))
    dialled = [
        "127.0.0.1",
        "localhost",
        "0x7f000001",
        "0x7f.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::]",
    ]
    never_dialled = ["2130706433", "127.1", "0177.0.0.1", "017700000001", "127.0.0.1."]
    fetcher, open_fetcher = MediaFetcher(config), MediaFetcher(replace(config, allowed_private_networks=LOOPBACK))
    try:
        for host in dialled:
            await assert_refused(fetcher, site.url("/a.png", host), MediaNotAllowedError, "network")
        for host in never_dialled:
            await assert_refused(fetcher, site.url("/a.png", host), MediaFetchError, "cannot be reached")
        assert site.asked == []
        # It is the rule that refuses them: without it they lead there.
        for host in ("127.0.0.1", "localhost", "0x7f.1", "[::ffff:127.0.0.1]"):
            assert await fetch_one(open_fetcher, site.url("/a.png", host)) == PNG
    finally:
        await fetcher.close()
        await open_fetcher.close()


async def test_schemes_hosts_and_ports_that_are_not_named_are_refused(site: Site, make_fetcher: MakeFetcher) -> None:
    fetcher = make_fetcher(loopback_config(site, allowed_hosts=("127.0.0.1", f"other.test:{site.port}")))
    await assert_refused(fetcher, site.url("/"), MediaNotAllowedError, "host and port")
    await assert_refused(fetcher, site.url("/", scheme="https"), MediaNotAllowedError, "scheme")
    await assert_refused(fetcher, site.url("/", host="a:b@127.0.0.1"), InvalidMediaError, "user")


async def test_redirects_are_followed_so_many_times(site: Site, make_fetcher: MakeFetcher) -> None:
    site.give("/3", status=301, Location="2")
    site.give("/2", status=307, Location=site.url("/1"))
    site.give("/1", status=302, Location="/a.png")
    site.give("/a.png")
    assert await fetch_one(make_fetcher(loopback_config(site)), site.url("/3")) == PNG
    two = make_fetcher(loopback_config(site, max_redirects=2))
    num_files = num_open_files()
    await assert_refused(two, site.url("/3"), MediaFetchError, "more than 2 times")
    assert await fetch_one(two, site.url("/2")) == PNG
    await settle_to(num_files)


@pytest.mark.parametrize(
    ("location", "error"),
    [
        ("https://127.0.0.1/", MediaNotAllowedError),
        ("file:///etc/hostname", MediaNotAllowedError),
        ("data:image/png;base64,AAAA", MediaNotAllowedError),
        ("http://evil.test/", MediaNotAllowedError),
        ("http://127.0.0.1:1/", MediaNotAllowedError),
        ("http://a:b@pictures.test:PORT/", InvalidMediaError),
        ("http://inside.test:PORT/", MediaNotAllowedError),
        ("http://[::1", MediaFetchError),
        ("", MediaFetchError),
    ],
)
async def test_each_redirect_is_checked(
    location: str, error: type[ServingError], site: Site, make_fetcher: MakeFetcher
) -> None:
    hosts = tuple(f"{host}:{site.port}" for host in ("127.0.0.1", "pictures.test", "inside.test"))
    fetcher = make_fetcher(loopback_config(site, allowed_hosts=hosts), Names(inside_test=[["169.254.169.254"]]))
    site.give("/b", status=302, Location=location.replace("PORT", str(site.port)))
    num_files = num_open_files()
    await assert_refused(fetcher, site.url("/b"), error)
    assert site.asked == ["/b"]
    await settle_to(num_files)


@pytest.mark.parametrize("status", [204, 206, 304, 400, 401, 404, 500])
async def test_any_status_but_200_is_named_in_the_error(status: int, site: Site, make_fetcher: MakeFetcher) -> None:
    url = site.give("/a.png", b"" if status in (204, 304) else PNG, status)
    await assert_refused(make_fetcher(loopback_config(site)), url, MediaFetchError, str(status))


async def test_a_compressed_body_is_refused(site: Site, make_fetcher: MakeFetcher) -> None:
    url = site.give("/a.png", gzip.compress(PNG), Content_Encoding="gzip")
    await assert_refused(make_fetcher(loopback_config(site)), url, MediaFetchError, "compressed")


async def test_a_file_that_is_no_picture_is_refused(site: Site, make_fetcher: MakeFetcher) -> None:
    url = site.give("/a.png", b"<html>", Content_Type="image/png")
    await assert_refused(make_fetcher(loopback_config(site)), url, InvalidMediaError, "no PNG")


async def test_a_length_above_the_limit_is_refused_before_the_body(site: Site, make_fetcher: MakeFetcher) -> None:
    async def promise(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(PNG) + 1)})
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    fetcher = make_fetcher(loopback_config(site, max_file_size_mb=len(PNG) / 1e6))
    num_files = num_open_files()
    await assert_refused(fetcher, site.serve("/promise", promise), MediaTooLargeError, "max_file_size_mb allows")
    await settle_to(num_files)
    assert await fetch_one(fetcher, site.give("/a.png")) == PNG


async def test_an_endless_body_is_cut_at_the_limit(site: Site, make_fetcher: MakeFetcher) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(10_000))

    fetcher = make_fetcher(loopback_config(site, max_file_size_mb=1.0, fetch_timeout_s=50.0))
    await assert_refused(fetcher, site.serve("/endless", endless), MediaTooLargeError, "max_file_size_mb allows")


async def test_a_body_cut_short_is_no_file(site: Site, make_fetcher: MakeFetcher) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(PNG))})
        await response.prepare(request)
        await response.write(PNG[:10])
        assert request.transport is not None
        request.transport.close()
        return response

    fetcher = make_fetcher(loopback_config(site))
    await assert_refused(fetcher, site.serve("/cut", cut), MediaFetchError, "proper answer")


async def test_a_host_that_sends_slowly_is_given_up_in_time(site: Site, make_fetcher: MakeFetcher) -> None:
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.01)

    fetcher = make_fetcher(loopback_config(site, fetch_timeout_s=0.3))
    num_files = num_open_files()
    await assert_refused(fetcher, site.serve("/drip", drip), MediaFetchError, "within 0.3 s")
    await settle_to(num_files)


async def test_a_name_lookup_that_hangs_is_given_up_in_time(site: Site, make_fetcher: MakeFetcher) -> None:
    class Silent(Names):
        async def resolve(self, *args: object, **kwargs: object) -> list[object]:  # type: ignore[override]
            await asyncio.Event().wait()
            raise AssertionError

    fetcher = make_fetcher(loopback_config(site, fetch_timeout_s=0.1), Silent())
    await assert_refused(fetcher, site.url("/", "pictures.test"), MediaFetchError, "within 0.1 s")


async def test_a_host_that_is_unreachable_or_speaks_no_http_is_an_error(site: Site, make_fetcher: MakeFetcher) -> None:
    fetcher = make_fetcher(loopback_config(site))
    await assert_refused(fetcher, site.url("/", "pictures.test"), MediaFetchError, "cannot be reached")

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0\1\2\3 no http\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        babbling = make_fetcher(loopback_config(site, allowed_hosts=(f"127.0.0.1:{port}",)))
        await assert_refused(babbling, f"http://127.0.0.1:{port}/", MediaFetchError, "proper answer")
    await assert_refused(babbling, f"http://127.0.0.1:{port}/", MediaFetchError, "cannot be reached")


async def test_proxies_of_the_environment_are_not_used(
    site: Site, make_fetcher: MakeFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert await fetch_one(make_fetcher(loopback_config(site)), site.give("/a.png")) == PNG


async def test_servers_are_verified(tmp_path: Path, make_fetcher: MakeFetcher) -> None:
    authority = CertificateAuthority(tmp_path)
    tls = authority.issue("server")
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_context.load_cert_chain(tls.cert_file, tls.key_file)
    trusting = ssl.create_default_context(cafile=str(authority.ca_file))
    async with Site().running(ssl_context=server_context) as site:
        site.give("/a.png")
        names = Names(localhost=[["127.0.0.1"]], pictures_test=[["127.0.0.1"]])
        hosts = tuple(f"{host}:{site.port}" for host in ("localhost", "pictures.test"))
        config = loopback_config(site, allowed_schemes=("https",), allowed_hosts=hosts)
        url = site.url("/a.png", "localhost", "https")
        assert await fetch_one(make_fetcher(config, names, trusting), url) == PNG
        # First signed by an authority that the system does not trust; then for another name.
        await assert_refused(make_fetcher(config, names), url, MediaFetchError, "cannot be reached")
        other = site.url("/a.png", "pictures.test", "https")
        await assert_refused(make_fetcher(config, names, trusting), other, MediaFetchError, "cannot be reached")
        assert site.asked == ["/a.png"]

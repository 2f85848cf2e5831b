"""``http:`` and ``https:`` URLs: files of hosts that are allowed, at addresses that are allowed.

The address is checked when its socket is made, so nothing can change between the check and dialling: no second look-up
of the name, no other spelling of an address, no proxy.
"""

from __future__ import annotations

import socket
import ssl

import aiohttp
from aiohttp.abc import AbstractResolver

from quartet.errors import MediaFetchError
from quartet.media import file_size
from router.media.config import MediaConfig
from router.media.url_rules import AddressRules, UrlRules

_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK_SIZE_BYTES = 64 * 1024
_HEADERS = {
    "Accept": "image/*, application/octet-stream;q=0.9, */*;q=0.1",
    "Accept-Encoding": "identity",
    "User-Agent": "quartet",
}


class HttpFiles:
    """Fetches files, each on a connection of its own. The caller limits how long that takes."""

    def __init__(
        self, config: MediaConfig, resolver: AbstractResolver | None = None, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._config = config
        self._resolver = resolver
        self._ssl_context = ssl_context
        self._urls = UrlRules(config.allowed_schemes, config.allowed_hosts)
        self._addresses = AddressRules(config.allowed_private_networks)
        self._session: aiohttp.ClientSession | None = None

    async def read(self, text: str) -> bytes:
        """The file that the URL ``text`` leads to. Cancelling closes the connection.

        Raises:
            InvalidMediaError: a malformed URL, or one with a user in it.
            MediaFetchError: no answer, or one that is not the plain file; too many redirects.
            MediaNotAllowedError: its scheme, host, port or address, or that of a redirect.
            MediaTooLargeError: more bytes than allowed.
        """
        url = self._urls.parse(text)
        try:
            for _ in range(1 + self._config.max_redirects):
                async with self._open_session().get(url, allow_redirects=False) as response:
                    if response.status not in _REDIRECTS:
                        return await self._body(response)
                    url = self._urls.redirected(url, response.headers.get("Location"))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise MediaFetchError("the URL's host cannot be reached, or gives no proper answer") from error
        raise MediaFetchError(f"the URL redirects more than {self._config.max_redirects} times")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        # Made late, since a session belongs to the running event loop.
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=self._resolver,
                use_dns_cache=False,
                # One address after the other: if they raced, the refused ones would not be seen.
                happy_eyeballs_delay=None,
                socket_factory=self._make_socket,
                ssl=self._ssl_context or True,
                force_close=True,
                limit=0,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=_HEADERS,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    def _make_socket(self, address_info: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, address = address_info
        self._addresses.check(str(address[0]))
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        return made

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        if response.status != 200:
            raise MediaFetchError(f"the URL's host answers with status {response.status}")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise MediaFetchError("the URL's host sends the file compressed, though it was asked not to")
        max_size_bytes = self._config.max_file_size_bytes
        too_large = file_size.too_large(max_size_bytes)
        if (response.content_length or 0) > max_size_bytes:
            raise too_large
        data = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_SIZE_BYTES):
            data += chunk
            if len(data) > max_size_bytes:
                raise too_large
        return bytes(data)

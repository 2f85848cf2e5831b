"""The page's paths: its files, the stream of states, and Explain; and who may have them.

Its files hold no secret, and what the page shows comes by calls that need what every call needs. Where there are no API
keys, every caller on this host is trusted, and nobody else sees the page. Then a web page of someone else, open in a
browser on this host, must not reach it either: by its own name that leads to loopback (DNS rebinding) or by a request
across origins.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from importlib.resources import files
from ipaddress import IPv6Address, ip_address
from typing import Any, TypeAlias

from aiohttp import web

from quartet.api.openai.requests import Caller, read_chat
from router.generate import Pipeline
from router.http.body import Bodies
from router.http.completions import find_adapter
from router.http.connections import Connections
from router.http.errors import HttpError
from router.page.feed import StateFeed
from router.page.state import read_state

_Handler: TypeAlias = Callable[[web.BaseRequest, Caller], Awaitable[web.StreamResponse]]

_SHELL = "index.html"
_TYPES: Mapping[str, str] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

#: Only the page's own files run and are shown, but for pictures that its user attaches; nobody may frame it.
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",  # for browsers that don't know frame-ancestors
    "Cache-Control": "no-cache",  # kept, and asked for again by its tag: another version of the router may serve
}
_LOOPBACK_HOST = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
# A proxy on this host hides where its clients are.
_PROXY_HEADERS = ("Forwarded", "Via", "X-Forwarded-For")
_SAME_SITE = ("", "same-origin", "none")


class Page:
    """The page over a pipeline."""

    def __init__(
        self,
        pipeline: Pipeline,
        bodies: Bodies,
        connections: Connections,
        *,
        namespace: str,
        has_keys: bool,
        is_ready: Callable[[], bool],
        sees_fleet: Callable[[web.BaseRequest], bool],
    ) -> None:
        """Read the files; nothing runs before somebody looks.

        Args:
            pipeline: explains, and has what the page shows.
            bodies: reads those of requests.
            connections: look after streams.
            namespace: the deployment.
            has_keys: callers show API keys.
            is_ready: whether the router is.
            sees_fleet: whether the caller of a request may see workers, by what its headers say now.
        """
        self._pipeline = pipeline
        self._bodies = bodies
        self._has_keys = has_keys
        self._sees_fleet = sees_fleet
        # Of the pipeline's context only this is asked, and only while somebody looks.
        self._feed = StateFeed(
            lambda: read_state(pipeline, namespace, is_ready=is_ready()),
            connections,
            on_begin=self._count_hand_offs,
            on_end=self._count_no_hand_offs,
        )
        self._files = {path: _File(name) for path, name in _paths().items()}

    @property
    def open_paths(self) -> frozenset[str]:
        """Paths that need no key."""
        return frozenset(self._files)

    @property
    def routes(self) -> Mapping[str, tuple[str, _Handler]]:
        """Method and handler of each path."""
        return {
            **dict.fromkeys(self._files, ("GET", self._file)),
            "/page/state": ("GET", self._state),
            "/page/explain": ("POST", self._explain),
        }

    def close(self) -> None:
        """End the streams, which never end by themselves."""
        self._feed.close()

    def _count_hand_offs(self) -> None:
        self._pipeline.context.hand_offs.begin()

    def _count_no_hand_offs(self) -> None:
        self._pipeline.context.hand_offs.end()

    async def _file(self, request: web.BaseRequest, _caller: Caller) -> web.Response:
        self._check_place(request)
        file = self._files[request.rel_url.raw_path]
        headers = {**_HEADERS, "ETag": file.tag, "Content-Type": file.content_type}
        if file.tag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, headers=headers)

    async def _state(self, request: web.BaseRequest, _caller: Caller) -> web.StreamResponse:
        self._check_place(request, is_data=True)
        if not self._sees_fleet(request):
            raise HttpError(403, "the fleet tells of all tenants' requests: http.operators names who may see it here")
        return await self._feed.serve(request, lambda: self._sees_fleet(request))

    async def _explain(self, request: web.BaseRequest, caller: Caller) -> web.Response:
        self._check_place(request, is_data=True)
        async with self._bodies.read_json(request, caller) as body:
            asked = await self._bodies.in_turns(read_chat(body, caller), caller.tenant)
        find_adapter(asked, self._pipeline.context.table)
        [start] = asked.take_starts()
        start.has_entered = True  # it is still the turn in which the last of its body was parsed
        explanation = asdict(await self._pipeline.explain(start))
        for option in explanation["options"]:
            option["rank"] = str(option["rank"])
        return web.Response(body=json.dumps(explanation).encode(), content_type="application/json")

    def _check_place(self, request: web.BaseRequest, *, is_data: bool = False) -> None:
        """Refuse whoever may not see the page from where it is. Raises ``HttpError``."""
        if self._has_keys:
            return
        is_direct = not any(name in request.headers for name in _PROXY_HEADERS)
        if not (is_direct and _is_loopback(request)):
            raise HttpError(403, "without API keys the page is for this host only: set http.keys_file")
        if not _LOOPBACK_HOST.fullmatch(request.headers.get("Host", "")):
            raise HttpError(403, "without API keys the page is served as localhost, 127.0.0.1 or [::1] only")
        if is_data and request.headers.get("Sec-Fetch-Site", "") not in _SAME_SITE:
            raise HttpError(403, "a page of another site may not ask for this")


class _File:
    def __init__(self, name: str) -> None:
        self.body = (files(__package__) / "static" / name).read_bytes()
        self.tag = f'"{hashlib.sha256(self.body).hexdigest()[:24]}"'
        self.content_type = _TYPES[name.rpartition(".")[2]]


def _paths() -> Mapping[str, str]:
    names = [one.name for one in (files(__package__) / "static").iterdir()]
    return {"/" if name == _SHELL else f"/page/{name}": name for name in sorted(names)}


def _is_loopback(request: web.BaseRequest) -> bool:
    peer = None if request.transport is None else request.transport.get_extra_info("peername")
    if not isinstance(peer, tuple) or not peer:
        return False
    address: Any = ip_address(str(peer[0]).partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return bool(address.is_loopback)

"""Takes over what may change in a router's configuration while it runs: tenants, and who may name which."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

from quartet.errors import ConfigError
from quartet.rpc.secret_file import file_signature
from router.config import RouterConfig
from router.tenants import has_domains

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0

ConfigT = TypeVar("ConfigT")


class ConfigFile(Generic[ConfigT]):
    """The file of a router's configuration, which may change while the router runs."""

    def __init__(
        self, path: Path, whole: ConfigT, load: Callable[[], ConfigT], router_of: Callable[[ConfigT], RouterConfig]
    ) -> None:
        """``whole`` is in use, and ``load`` reads it again: on a thread, and raises ``ConfigError``.

        ``router_of`` gives the part of it that all routers have, or it itself.
        """
        self._path = path
        self._config = router_of(whole)
        self._rest = _rest(whole, self._config)
        self._load = load
        self._router_of = router_of
        self._signature = self._seen = file_signature(path)
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Look at the file now: it is complete."""
        self._asked.set()

    async def follow(self, use: Callable[[RouterConfig], None], count: Callable[[bool], None]) -> None:
        """Look at the file once a second until cancelled; see ``poll``."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_INTERVAL_S):
                    await self._asked.wait()
            is_complete = self._asked.is_set()
            self._asked.clear()
            await self.poll(use, count, is_complete=is_complete)

    async def poll(
        self, use: Callable[[RouterConfig], None], count: Callable[[bool], None], *, is_complete: bool = False
    ) -> None:
        """If the file has changed, read it and ``use`` its tenants; ``count`` is told whether it could be used.

        Unless ``is_complete``, it must be as it was at the last poll: an editor may be about to write the rest, and
        half of a file may be one without limits. One that can't be used is logged, once for each content, and changes
        nothing.
        """
        signature, seen = file_signature(self._path), self._seen
        self._seen = signature
        if signature == self._signature or (signature != seen and not is_complete):
            return
        self._signature = signature
        try:
            whole = await asyncio.to_thread(self._load)
            config = self._router_of(whole)
            _check(self._config, config)
        except ConfigError as error:
            logger.warning("a changed configuration is not used: %s", error)
            count(False)
            return
        use(config)
        count(True)
        logger.info("tenants, identity_tenants and trusted_gateways are as in %s now", self._path)
        if _with_tenants_of(config, self._config) != self._config or _rest(whole, config) != self._rest:
            logger.warning("%s: what else has changed there takes a restart", self._path)


def _check(before: RouterConfig, after: RouterConfig) -> None:
    """Raises ``ConfigError``: only a restart can take that over."""
    if has_domains(before.tenants) != has_domains(after.tenants):
        raise ConfigError("tenants: the first trust domain, and the end of the last one, take a restart")
    _with_tenants_of(before, after)  # they must fit how this router serves


def _rest(whole: object, router: RouterConfig) -> dict[str, object]:
    """The settings in ``whole`` beside those of ``router``, which is a part of it, or it itself."""
    return {} if whole is router else {name: value for name, value in vars(whole).items() if value is not router}


def _with_tenants_of(config: RouterConfig, other: RouterConfig) -> RouterConfig:
    return replace(
        config,
        tenants=other.tenants,
        identity_tenants=other.identity_tenants,
        trusted_gateways=other.trusted_gateways,
    )

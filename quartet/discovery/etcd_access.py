"""How a process shows etcd who it is: a TLS certificate, or a user whose password etcd turns into tokens.

A file that goes missing while the process runs is a ``ConfigError`` here, which ``EtcdClient`` turns into a
``DiscoveryError``: discovery tries again, and no task ends by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc
from aetcd import rpc

from quartet.config import read_secret_file
from quartet.errors import ConfigError
from quartet.rpc.channels import read_certificate, read_pem

#: Goes with every call of a user: its token, under the name that etcd reads (api/v3rpc/rpctypes/metadatafields.go).
Metadata: TypeAlias = tuple[tuple[str, str], ...]

#: Asks one endpoint for a token: ``AuthStub.Authenticate``.
Authenticate: TypeAlias = Callable[..., Awaitable["rpc.AuthenticateResponse"]]

_SETTING = "discovery.etcd"
_TOKEN_KEY = "token"
_MAX_PASSWORD_BYTES = 1 << 12

# etcd's words for a token that it does not know (any more), as in client/v3/retry_interceptor.go, shouldRefreshToken.
_TOKEN_REFUSED = ("invalid auth token", "revision of auth store is old", "user name is empty")
_AUTH_IS_OFF = "authentication is not enabled"


@dataclass(frozen=True, kw_only=True)
class EtcdTls:
    """TLS to every endpoint. An empty block, ``tls: {}``, switches it on too.

    Attributes:
        ca_file: PEM certificates that etcd's must lead to; ``None``: the public authorities that gRPC knows.
        cert_file: the own certificate chain, PEM, where etcd asks for one; goes with ``key_file``.
        key_file: the private key of ``cert_file``, PEM.
        server_name: what etcd's certificate must be made out to; ``None``: the host that is dialled.

    Raises:
        ConfigError: naming the field.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            missing = "cert_file" if self.cert_file is None else "key_file"
            raise ConfigError(f"{missing}: is missing; cert_file and key_file go together")

    def credentials(self) -> tuple[grpc.ChannelCredentials, float | None]:
        """Credentials from the files as they are now, and when their certificate ends, in Unix time, if there is one.

        Raises:
            ConfigError: naming the setting that can't be used.
        """
        cert: bytes | None = None
        end: float | None = None
        if self.cert_file is not None:
            cert, end = read_certificate(f"{_SETTING}.tls.cert_file", self.cert_file)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca_file, "ca_file", "-----BEGIN CERTIFICATE-----"),
            private_key=_read(self.key_file, "key_file", "PRIVATE KEY-----"),
            certificate_chain=cert,
        )
        return credentials, end


class EtcdTokens:
    """The token of one user: asked for at the first call, and again when etcd no longer takes it.

    Simple tokens expire when unused for five minutes and end with etcd's process; JWTs expire by the clock.
    """

    def __init__(self, user: str, password_file: Path) -> None:
        """Raises ``ConfigError`` if the file can't be used."""
        self._user = user
        self._password_file = password_file
        self._metadata: Metadata | None = None
        # Several calls that find no token ask for it once: checking a password costs etcd 0.1 s of CPU.
        self._asking = asyncio.Lock()
        _ = self._password()

    async def metadata(self, authenticate: Authenticate, timeout_s: float) -> Metadata:
        """What to send with a call; asks for a token first where there is none.

        Raises:
            ConfigError: the file of the password can't be used.
            grpc.aio.AioRpcError: etcd refused the password, or did not answer within ``timeout_s`` seconds.
        """
        async with self._asking:
            if self._metadata is None:
                self._metadata = await self._log_in(authenticate, timeout_s)
            return self._metadata

    def forget_if_refused(self, reason: str) -> bool:
        """Whether etcd's ``reason`` to refuse a call was its token; then the next call gets another one."""
        is_refused = any(words in reason for words in _TOKEN_REFUSED)
        if is_refused:
            self._metadata = None
        return is_refused

    async def _log_in(self, authenticate: Authenticate, timeout_s: float) -> Metadata:
        request = rpc.AuthenticateRequest(name=self._user, password=self._password())
        try:
            response = await authenticate(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if _AUTH_IS_OFF in str(error.details()):
                return ()  # it takes everybody's calls; once it no longer does, it refuses the missing token
            raise
        return ((_TOKEN_KEY, response.token),)

    def _password(self) -> str:
        setting = f"{_SETTING}.password_file"
        content = read_secret_file(self._password_file, setting, _MAX_PASSWORD_BYTES)
        try:
            password = content.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            # `from None`: what lies beneath quotes the password.
            raise ConfigError(f"{setting}: {self._password_file} must hold UTF-8 text") from None
        if not password:
            raise ConfigError(f"{setting}: {self._password_file} is empty")
        return password


def _read(path: Path | None, name: str, marker: str) -> bytes | None:
    return None if path is None else read_pem(f"{_SETTING}.tls.{name}", path, marker)

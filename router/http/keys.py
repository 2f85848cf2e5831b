"""API keys and certificates, from files that are read again when they change."""

from __future__ import annotations

import hashlib
import logging
import re
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from quartet.api.openai.requests import ApiKey
from quartet.api.request import MAX_NAME_LENGTH
from quartet.errors import ConfigError, UnauthenticatedError
from quartet.rpc.channels import check_pair, read_certificate, read_pem
from quartet.rpc.secret_file import SecretFile, file_signature
from router.http.config import HttpTlsConfig

logger = logging.getLogger(__name__)

_SETTING = "http.keys_file"
_MAX_FILE_BYTES = 4 << 20
_MIN_KEY_LENGTH = 16
_MAX_KEY_LENGTH = 512
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_ID_DIGITS = 12
_LIMITS = ("requests_per_minute", "tokens_per_minute")
_LIMIT = re.compile(r"[1-9][0-9]{0,17}")
_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)


class ApiKeys:
    """The tenants' keys of one file.

    One key a line: ``TENANT KEY``, the key of 16 characters or more, or ``sha256:`` and the hexadecimal SHA-256 of it;
    empty lines and lines that begin with ``#`` are left out. A tenant may have several keys, so one can follow another.
    After the key may stand ``id=NAME``, else the first 12 digits of its SHA-256 name it, and limits that the key has
    besides its tenant's: ``requests_per_minute=N``, ``tokens_per_minute=N``.

    A changed file that can't be used, or is gone, is logged and changes nothing else; one without a key revokes all. No
    message or log ever holds a key.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        count: Callable[[bool], None] = lambda is_used: None,
    ) -> None:
        """Read ``path``; check it for changes once a second of ``clock``, for an unknown key at most 20 times.

        ``count`` is that of ``SecretFile``.

        Raises:
            ConfigError: the file can't be used; the message names the setting and the line, never a key.
        """
        self._file = SecretFile(
            path, _parse_keys, setting=_SETTING, max_bytes=_MAX_FILE_BYTES, clock=clock, count=count
        )
        if not self._file.current():
            raise ConfigError(f"{_SETTING}: {path} holds no key")

    def find(self, authorization: str) -> ApiKey:
        """The key in the ``Authorization`` header. Raises ``UnauthenticatedError``: it holds no key of ours."""
        found = _BEARER.fullmatch(authorization)
        if found is None:
            raise UnauthenticatedError("this server takes an API key: Authorization: Bearer KEY")
        digest = hashlib.sha256(found[1].encode("utf-8", "surrogateescape")).digest()
        for is_unknown in (False, True):
            key = self._file.current(is_unknown=is_unknown).get(digest)
            if key is not None:
                return key
        raise UnauthenticatedError("this server does not know this API key")


class Certificates:
    """A context to serve TLS with, whose files are read again when they have changed."""

    def __init__(self, config: HttpTlsConfig, *, count: Callable[[bool], None] = lambda is_used: None) -> None:
        """Read the files. ``count`` is told of each change of them whether they could be used.

        Raises:
            ConfigError: a file can't be used; names its setting.
        """
        self._config = config
        self._count = count
        self._signatures = self._poll()
        #: Unix time at which the certificate ends that new handshakes use.
        self.end = _check(config)
        #: New handshakes use what was loaded last.
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self.context.load_cert_chain(config.cert_file, config.key_file)

    def refresh(self) -> None:
        """Load the files again if they have changed; while they don't fit each other, nothing changes but the log."""
        signatures = self._poll()
        if signatures == self._signatures:
            return
        try:
            end = _check(self._config)
            if self._poll() != signatures:
                return  # they are being written: what is loaded must be what was checked
            self._signatures = signatures
            self.context.load_cert_chain(self._config.cert_file, self._config.key_file)
            self.end = end
        except (ConfigError, OSError) as error:
            self._signatures = signatures
            logger.warning("HTTP goes on with the certificate of before: %s", error)
            self._count(False)
        else:
            logger.info("HTTP serves with a new certificate")
            self._count(True)

    def _poll(self) -> tuple[object, object]:
        return file_signature(self._config.cert_file), file_signature(self._config.key_file)


def _check(config: HttpTlsConfig) -> float:
    """When the certificate ends. Raises ``ConfigError``: a file can't be used, or they don't belong together."""
    read_pem("http.tls.key_file", config.key_file, "PRIVATE KEY-----")
    _, end = read_certificate("http.tls.cert_file", config.cert_file)
    check_pair("http.tls", config.cert_file, config.key_file)
    return end


def _parse_keys(lines: Iterator[tuple[str, str]]) -> dict[bytes, ApiKey]:
    keys: dict[bytes, ApiKey] = {}
    ids = set[str]()
    for where, line in lines:
        key, digest = _parse_line(line, where)
        if digest in keys:
            raise ConfigError(f"{where}: this key stands twice")
        if key.id in ids:
            raise ConfigError(f"{where}: another key has the id {key.id}")
        ids.add(key.id)
        keys[digest] = key
    return keys


def _parse_line(line: str, where: str) -> tuple[ApiKey, bytes]:
    words = line.split()
    if len(words) < 2:
        raise ConfigError(f"{where}: must be TENANT KEY")
    tenant, key, *options = words
    if len(tenant) > MAX_NAME_LENGTH:
        raise ConfigError(f"{where}: a tenant's name has at most {MAX_NAME_LENGTH} characters")
    digest = _digest(key, where)
    key_id, limits = digest.hex()[:_ID_DIGITS], dict[str, int]()
    for option in options:
        name, _, value = option.partition("=")
        if name == "id" and 0 < len(value) <= MAX_NAME_LENGTH:
            key_id = value
        elif name in _LIMITS and _LIMIT.fullmatch(value) is not None:
            limits[name] = int(value)
        else:  # it may be a part of a key that holds a space
            raise ConfigError(f"{where}: after the key may stand id=NAME and N of {', '.join(_LIMITS)}, without spaces")
    return ApiKey(tenant=tenant, id=key_id, **limits), digest


def _digest(key: str, where: str) -> bytes:
    """The SHA-256 of ``key``, which may stand there as that."""
    hashed = _DIGEST.fullmatch(key)
    if hashed is not None:
        return bytes.fromhex(hashed[1])
    if not _MIN_KEY_LENGTH <= len(key) <= _MAX_KEY_LENGTH:
        raise ConfigError(f"{where}: a key has {_MIN_KEY_LENGTH} to {_MAX_KEY_LENGTH} characters")
    return hashlib.sha256(key.encode()).digest()

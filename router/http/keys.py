"""API keys and certificates, from files that are read again when they change."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import ssl
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from quartet.api.request import MAX_NAME_LENGTH
from quartet.errors import ConfigError, UnauthenticatedError
from quartet.rpc.channels import read_pem
from router.http.config import HttpTlsConfig

logger = logging.getLogger(__name__)

_SETTING = "http.keys_file"
_MAX_FILE_BYTES = 4 << 20
_MIN_KEY_LENGTH = 16
_MAX_KEY_LENGTH = 512
_POLL_INTERVAL_S = 1.0
# The same after an unknown key, which the file may have by now.
_UNKNOWN_POLL_INTERVAL_S = 0.05
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)

# Differs between two contents of a file: time of change, inode, size. ``None``: there is no file.
_Signature: TypeAlias = "tuple[int, int, int] | None"


class ApiKeys:
    """The tenants' keys of one file.

    One key a line: ``TENANT KEY``, the key of 16 characters or more, or ``sha256:`` and the hexadecimal SHA-256 of it;
    empty lines and lines that begin with ``#`` are left out. A tenant may have several keys, so one can follow another.

    A changed file that can't be used, or is gone, is logged and changes nothing else; one without a key revokes all. No
    message or log ever holds a key.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read ``path``; check it for changes once a second of ``clock``, for an unknown key at most 20 times.

        Raises:
            ConfigError: the file can't be used; the message names the setting and the line, never a key.
        """
        self._path = path
        self._clock = clock
        self._polled_at = clock()
        self._signature, self._tenants = _read_keys(path)
        if not self._tenants:
            raise ConfigError(f"{_SETTING}: {path} holds no key")

    def tenant(self, authorization: str) -> str:
        """The tenant of the ``Authorization`` header. Raises ``UnauthenticatedError``: it holds no key of ours."""
        found = _BEARER.fullmatch(authorization)
        if found is None:
            raise UnauthenticatedError("this server takes an API key: Authorization: Bearer KEY")
        digest = hashlib.sha256(found[1].encode("utf-8", "surrogateescape")).digest()
        for interval_s in (_POLL_INTERVAL_S, _UNKNOWN_POLL_INTERVAL_S):
            tenant = self._current(interval_s).get(digest)
            if tenant is not None:
                return tenant
        raise UnauthenticatedError("this server does not know this API key")

    def _current(self, poll_interval_s: float) -> dict[bytes, str]:
        now = self._clock()
        if now - self._polled_at >= poll_interval_s:
            self._polled_at = now
            if (signature := _signature(self._path)) != self._signature:
                self._reread(signature)
        return self._tenants

    def _reread(self, signature: _Signature) -> None:
        try:
            self._signature, self._tenants = _read_keys(self._path)
        except ConfigError as error:
            self._signature = signature  # log once for each content of the file
            logger.warning("the API keys stay as they were: %s", error)
        else:
            logger.info("API keys of %d tenants", len(set(self._tenants.values())))


class Certificates:
    """A context to serve TLS with, whose files are read again when they have changed."""

    def __init__(self, config: HttpTlsConfig) -> None:
        """Read the files. Raises ``ConfigError`` naming the setting whose file can't be used."""
        self._config = config
        self._signatures = self._poll()
        _check_pair(config)
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
        self._signatures = signatures
        try:
            _check_pair(self._config)
            self.context.load_cert_chain(self._config.cert_file, self._config.key_file)
        except (ConfigError, OSError) as error:
            logger.warning("HTTP goes on with the certificate of before: %s", error)
        else:
            logger.info("HTTP serves with a new certificate")

    def _poll(self) -> tuple[_Signature, _Signature]:
        return _signature(self._config.cert_file), _signature(self._config.key_file)


def _check_pair(config: HttpTlsConfig) -> None:
    """Raises ``ConfigError``: a file can't be used, or they don't belong together."""
    read_pem("http.tls.key_file", config.key_file, "PRIVATE KEY-----")
    read_pem("http.tls.cert_file", config.cert_file, "-----BEGIN CERTIFICATE-----")
    try:
        # In a context of its own: a failure may leave half of it loaded.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.cert_file, config.key_file)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"http.tls: the certificate and the key can't be used together: {error}") from error


def _signature(path: Path) -> _Signature:
    try:
        return _signature_of(path.stat())
    except OSError:
        return None


def _signature_of(found: os.stat_result) -> _Signature:
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read_keys(path: Path) -> tuple[_Signature, dict[bytes, str]]:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{_SETTING}: cannot read {path}: {error.strerror}") from error
    if stat.S_IMODE(found.st_mode) & stat.S_IRWXO:
        raise ConfigError(
            f"{_SETTING}: {path} is open to everybody: chmod o-rwx (for a Kubernetes secret, defaultMode)"
        )
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{_SETTING}: {path} is longer than {_MAX_FILE_BYTES} bytes")
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        where = f"{_SETTING}: {path}, line {number}"
        tenant, digest = _parse_line(line, where)
        if digest in tenants:
            raise ConfigError(f"{where}: this key stands twice")
        tenants[digest] = tenant
    return _signature_of(found), tenants


def _parse_line(line: str, where: str) -> tuple[str, bytes]:
    words = line.split()
    if len(words) != 2:
        raise ConfigError(f"{where}: must be TENANT KEY")
    tenant, key = words
    if len(tenant) > MAX_NAME_LENGTH:
        raise ConfigError(f"{where}: a tenant's name has at most {MAX_NAME_LENGTH} characters")
    hashed = _DIGEST.fullmatch(key)
    if hashed is not None:
        return tenant, bytes.fromhex(hashed[1])
    if not _MIN_KEY_LENGTH <= len(key) <= _MAX_KEY_LENGTH:
        raise ConfigError(f"{where}: a key has {_MIN_KEY_LENGTH} to {_MAX_KEY_LENGTH} characters")
    return tenant, hashlib.sha256(key.encode()).digest()

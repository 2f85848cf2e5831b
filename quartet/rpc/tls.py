"""TLS for servers and channels from files; every failure names the setting at fault."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from quartet.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """Files of one process's identity, PEM; the same for what it serves and what it dials.

    Attributes:
        ca_file: certificates that peers' certificates must lead to.
        cert_file: the own certificate chain; its URI SAN says who this process is (see ``quartet.rpc.audience``).
        key_file: the own private key.
        require_client_cert: callers must show a certificate. Without it none is asked for and every caller is a client
            (see ``Audience``): good for a router's edge, useless for a worker, whom only peers call.
        server_name: what a dialled server's certificate must be made out to. ``None``: the host that is dialled.
    """

    ca_file: Path
    cert_file: Path
    key_file: Path
    require_client_cert: bool = True
    server_name: str | None = None


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Credentials to serve with. Raises ``ConfigError`` naming the setting whose file can't be used."""
    key, cert, ca = _read(tls)
    return grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=tls.require_client_cert)


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """Credentials to dial with. Raises ``ConfigError`` naming the setting whose file can't be used."""
    key, cert, ca = _read(tls)
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def _read(tls: TlsConfig) -> tuple[bytes, bytes, bytes]:
    # gRPC notices a wrong file only at the first handshake, and then only in its own log.
    return (
        _read_pem("tls.key_file", tls.key_file, "PRIVATE KEY-----"),
        _read_pem("tls.cert_file", tls.cert_file, "-----BEGIN CERTIFICATE-----"),
        _read_pem("tls.ca_file", tls.ca_file, "-----BEGIN CERTIFICATE-----"),
    )


def _read_pem(setting: str, path: Path, marker: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
    if marker.encode() not in content:
        raise ConfigError(f"{setting}: {path} holds no {marker.strip('-').removeprefix('BEGIN ').lower()} in PEM form")
    return content

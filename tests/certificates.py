"""A certificate authority for tests: makes the files of a ``TlsConfig``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from quartet.rpc.channels import TlsConfig
from services.topology import certificates


class CertificateAuthority:
    """Issues certificates for loopback servers and for identities; its files lie under ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = certificates.CertificateAuthority(directory, "test authority")
        self.ca_file = self._authority.ca_file

    def issue(self, file_stem: str, *uris: str, require_client_cert: bool = True, is_server: bool = True) -> TlsConfig:
        """A certificate for ``uris``, and for 127.0.0.1, ::1 and localhost unless its holder is no server."""
        (self._directory / f"{file_stem}.key").unlink(missing_ok=True)  # of an earlier test
        files = self._authority.issue(file_stem, uris=uris, hosts=certificates.LOOPBACK_NAMES if is_server else ())
        return TlsConfig(**asdict(files), require_client_cert=require_client_cert)

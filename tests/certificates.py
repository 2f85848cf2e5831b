"""A certificate authority for tests: makes the files of a ``TlsConfig``."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from quartet.rpc.channels import TlsConfig
from services.topology import certificates

_YEAR = timedelta(days=365)


class CertificateAuthority:
    """Issues certificates for loopback servers and for identities; its files lie under ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca_file = self._valid_for(_YEAR).ca_file

    def issue(
        self,
        file_stem: str,
        *uris: str,
        require_client_cert: bool = True,
        is_server: bool = True,
        valid: timedelta = _YEAR,
    ) -> TlsConfig:
        """A certificate for ``uris``, and for 127.0.0.1, ::1 and localhost unless its holder is no server."""
        (self._directory / f"{file_stem}.key").unlink(missing_ok=True)  # of an earlier test
        hosts = certificates.LOOPBACK_NAMES if is_server else ()
        files = self._valid_for(valid).issue(file_stem, uris=uris, hosts=hosts)
        return TlsConfig(**asdict(files), require_client_cert=require_client_cert)

    def _valid_for(self, valid: timedelta) -> certificates.CertificateAuthority:
        return certificates.CertificateAuthority(self._directory, "test authority", key=self._key, valid=valid)


def end_of(tls: TlsConfig) -> float:
    """Unix time at which its certificate ends."""
    return x509.load_pem_x509_certificate(tls.cert_file.read_bytes()).not_valid_after_utc.timestamp()

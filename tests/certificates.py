"""A certificate authority for tests: makes the files of a ``TlsConfig``, valid for a day."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from quartet.rpc.channels import TlsConfig


class CertificateAuthority:
    """Issues certificates for loopback servers and for identities; its files lie under ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        builder = self._builder(self._name, self._key).add_extension(constraints, critical=True)
        self.ca_file = directory / "ca.pem"
        self.ca_file.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def issue(self, file_stem: str, *uris: str, require_client_cert: bool = True) -> TlsConfig:
        """A certificate for 127.0.0.1, ::1, localhost and ``uris``, as the configuration of who holds it."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, file_stem)])
        loopback = [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")]
        names = [x509.DNSName("localhost"), *loopback, *map(x509.UniformResourceIdentifier, uris)]
        builder = self._builder(name, key).add_extension(x509.SubjectAlternativeName(names), critical=False)
        cert_file, key_file = self._directory / f"{file_stem}.pem", self._directory / f"{file_stem}.key"
        cert_file.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return TlsConfig(
            ca_file=self.ca_file, cert_file=cert_file, key_file=key_file, require_client_cert=require_client_cert
        )

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)

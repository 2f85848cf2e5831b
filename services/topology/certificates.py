"""A private certificate authority for the processes of one host, as ``quartet up --tls`` uses it.

Its own key exists in memory only: once the files of a run are written, no one can issue another certificate for it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quartet.config import write_secret_file
from quartet.discovery.base import Role
from quartet.discovery.etcd_access import EtcdTls
from quartet.rpc.audience import IdentityKind
from quartet.rpc.channels import TlsConfig

#: Where processes of one host dial each other; no certificate is made out to another host.
LOOPBACK_NAMES = ("127.0.0.1", "::1", "localhost")

# Clocks of one host agree; an hour is for a clock that is set back during the run.
_BEFORE = timedelta(hours=1)
# A run may last long, and nothing renews its certificates: they end with its directory, not by the clock.
_VALID = timedelta(days=3650)


@dataclass(frozen=True, kw_only=True)
class CertificateFiles:
    """The files of one certificate, PEM.

    Attributes:
        ca_file: the authority's own certificate.
        key_file: only its owner can read it.
    """

    ca_file: Path
    cert_file: Path
    key_file: Path


class CertificateAuthority:
    """Issues certificates into one directory; the authority's own key is never written."""

    def __init__(self, directory: Path, name: str) -> None:
        """Make a key and ``DIRECTORY/ca.pem``, made out to ``name``. Raises ``OSError`` if that can't be written."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        own = _builder(self._name, self._name, self._key).add_extension(constraints, critical=True)
        own = own.add_extension(_USAGE_OF_AUTHORITY, critical=True)
        self._own_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self.ca_file = directory / "ca.pem"
        self.ca_file.write_bytes(_sign(own.add_extension(self._own_id, critical=False), self._key))

    def issue(self, file_stem: str, *, uris: Sequence[str] = (), hosts: Sequence[str] = ()) -> CertificateFiles:
        """Write ``STEM.pem`` and ``STEM.key``.

        Args:
            file_stem: also the certificate's common name.
            uris: its URI SANs.
            hosts: host names and IP addresses that its holder may serve under. Without any its holder can only dial.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(file_stem), self._name, key)
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        issuer_id = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._own_id)
        builder = builder.add_extension(issuer_id, critical=False)
        names = [*map(x509.UniformResourceIdentifier, uris), *map(_host, hosts)]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        cert_file = self._directory / f"{file_stem}.pem"
        cert_file.write_bytes(_sign(builder, self._key))
        key_file = write_secret_file(self._directory / f"{file_stem}.key", _pem_of(key))
        return CertificateFiles(ca_file=self.ca_file, cert_file=cert_file, key_file=key_file)


@dataclass(frozen=True, kw_only=True)
class RunCertificates:
    """The certificates of one run.

    Attributes:
        processes: what each process serves and dials with, by its name.
        operator: an identity that may also look at the fleet and drain workers; ``quartet up`` itself uses it.
        client: an identity that may only ask for answers.
        etcd: what etcd serves with, to its clients and its peers.
        etcd_client: what all that use etcd show it.
    """

    processes: Mapping[str, TlsConfig]
    operator: TlsConfig
    client: TlsConfig
    etcd: CertificateFiles
    etcd_client: EtcdTls


def issue_run_certificates(
    directory: Path, namespace: str, roles: Mapping[str, Role], pools: Mapping[str, str] | None = None
) -> RunCertificates:
    """Make an authority for gRPC and another one for etcd below ``directory``, and all that one run needs of both.

    Two, because etcd lets in all certificates of its authority: a client of the router must not write records.

    Args:
        directory: is made, for its owner alone.
        namespace: of all identities but those in ``pools``.
        roles: by the name of each process, what it is.
        pools: by the name of a process, the namespace of its identity.

    Raises:
        OSError: a file can't be written.
    """
    directory.mkdir(mode=0o700)
    grpc = CertificateAuthority(directory / "grpc", f"quartet {namespace}")
    registry = CertificateAuthority(directory / "etcd", f"quartet {namespace} etcd")

    def identity(kind: IdentityKind, name: str, hosts: Sequence[str] = ()) -> TlsConfig:
        own = (pools or {}).get(name, namespace)
        files = grpc.issue(name, uris=[f"quartet://{own}/{kind}/{name}"], hosts=hosts)
        return TlsConfig(ca_file=files.ca_file, cert_file=files.cert_file, key_file=files.key_file)

    of_etcd = registry.issue("client")
    return RunCertificates(
        processes={name: identity(_kind_of(role), name, LOOPBACK_NAMES) for name, role in roles.items()},
        operator=identity(IdentityKind.OPERATOR, "operator"),
        client=identity(IdentityKind.CLIENT, "client"),
        # etcd dials itself with it, too.
        etcd=registry.issue("etcd", hosts=LOOPBACK_NAMES),
        etcd_client=EtcdTls(ca_file=of_etcd.ca_file, cert_file=of_etcd.cert_file, key_file=of_etcd.key_file),
    )


_USAGE_OF_AUTHORITY = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _kind_of(role: Role) -> IdentityKind:
    return IdentityKind.ROUTER if role is Role.ROUTER else IdentityKind.WORKER


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + _VALID)
    )


def _name(text: str) -> x509.Name:
    # A common name has 64 characters at most (RFC 5280, ub-common-name); identities are in URIs.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _sign(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )

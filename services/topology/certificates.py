"""Private certificate authorities: for one run on one host (``quartet up --tls``), and for hosts (``quartet secrets``).

That of a run has its key in memory only: once the files of the run are written, no one can issue another certificate
for it. That of hosts keeps its key in a file, for workers that are added and certificates that end.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes, PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quartet.config import write_secret_file, write_whole_file
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
# Of hosts: a certificate that ends sooner is made anew.
_RENEWED_BEFORE_END = timedelta(days=30)

# Of files that hold nothing secret.
_PUBLIC = 0o644


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
    """Issues certificates into one directory; the authority's own key is not written."""

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        key: ec.EllipticCurvePrivateKey | None = None,
        valid: timedelta = _VALID,
    ) -> None:
        """Write ``DIRECTORY/ca.pem``, made out to ``name``, unless it holds this authority, alone or beside others.

        Raises ``OSError`` if that can't be written.

        Args:
            directory: made for its owner alone.
            name: the authority's.
            key: its own; ``None``: a new one.
            valid: how long its certificates are.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._key = key or ec.generate_private_key(ec.SECP256R1())
        self._valid = valid
        self._own_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self.ca_file = directory / "ca.pem"
        self._own = self._kept() or self._made(_name(name))

    def issue(self, file_stem: str, *, uris: Sequence[str] = (), hosts: Sequence[str] = ()) -> CertificateFiles:
        """Write ``STEM.pem`` and ``STEM.key``.

        Args:
            file_stem: also the certificate's common name.
            uris: its URI SANs.
            hosts: host names and IP addresses that its holder may serve under. Without any its holder can only dial.
        """
        return self._issue(self._directory, file_stem, uris, hosts)

    def _kept(self) -> x509.Certificate | None:
        """Its own certificate in ``ca.pem``."""
        key = _public_bytes(self._key.public_key())
        ours = (it for it in _certificates_in(self.ca_file) if _public_bytes(it.public_key()) == key and _lasts(it))
        return next(ours, None)

    def _made(self, name: x509.Name) -> x509.Certificate:
        """Its own certificate, which is ``ca.pem`` from now on."""
        builder = _builder(name, name, self._key, _VALID)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_USAGE_OF_AUTHORITY, critical=True)
        own = builder.add_extension(self._own_id, critical=False).sign(self._key, hashes.SHA256())
        write_whole_file(self.ca_file, _pem(own), mode=_PUBLIC)
        return own

    def _issue(self, directory: Path, file_stem: str, uris: Sequence[str], hosts: Sequence[str]) -> CertificateFiles:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(file_stem), self._own.subject, key, self._valid)
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        issuer_id = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._own_id)
        builder = builder.add_extension(issuer_id, critical=False)
        if names := _names(uris, hosts):
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = _pem(builder.sign(self._key, hashes.SHA256()))
        cert_file = write_whole_file(directory / f"{file_stem}.pem", certificate, mode=_PUBLIC)
        key_file = write_whole_file(directory / f"{file_stem}.key", _pem_of(key))
        return CertificateFiles(ca_file=self.ca_file, cert_file=cert_file, key_file=key_file)


class KeptAuthority(CertificateAuthority):
    """An authority whose key lies in ``DIRECTORY/ca.key``, so that it is the same one whenever it is opened."""

    def __init__(self, directory: Path, name: str, *, valid: timedelta) -> None:
        """Open it; it is made where there is none. Raises ``OSError``, and ``ValueError`` if the file holds no key."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(directory, name, key=_kept_key(directory / "ca.key"), valid=valid)

    def provide(
        self, directory: Path, file_stem: str, *, uris: Sequence[str] = (), hosts: Sequence[str] = ()
    ) -> Sequence[Path]:
        """Write a certificate as ``issue`` does, but to ``directory``, and ``ca.pem`` beside it.

        A certificate that is there already stays, if it says the same, is that of the key beside it and does not end
        within a month; a ``ca.pem`` if it holds all that this authority's own one does.

        Returns:
            Those of the certificate's file and ``ca.pem`` that are new.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        ca_file, cert_file = directory / "ca.pem", directory / f"{file_stem}.pem"
        new = []
        if not _holds_all(_certificates_in(ca_file), _certificates_in(self.ca_file)):
            new.append(write_whole_file(ca_file, self.ca_file.read_bytes(), mode=_PUBLIC))
        if not self._still_holds(cert_file, directory / f"{file_stem}.key", _names(uris, hosts)):
            new.append(self._issue(directory, file_stem, uris, hosts).cert_file)
        return new

    def _still_holds(self, cert_file: Path, key_file: Path, names: Sequence[x509.GeneralName]) -> bool:
        certificate = next(iter(_certificates_in(cert_file)), None)
        if certificate is None or not _is_key_of(certificate, key_file):
            return False
        try:
            certificate.verify_directly_issued_by(self._own)
        except (ValueError, InvalidSignature):
            return False
        try:
            own = list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
        except x509.ExtensionNotFound:
            own = []
        return own == list(names) and _lasts(certificate)


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
        processes={name: identity(kind_of(role), name, LOOPBACK_NAMES) for name, role in roles.items()},
        operator=identity(IdentityKind.OPERATOR, "operator"),
        client=identity(IdentityKind.CLIENT, "client"),
        # etcd dials itself with it, too.
        etcd=registry.issue("etcd", hosts=LOOPBACK_NAMES),
        etcd_client=EtcdTls(ca_file=of_etcd.ca_file, cert_file=of_etcd.cert_file, key_file=of_etcd.key_file),
    )


def kind_of(role: Role) -> IdentityKind:
    """What the certificate of a process with this role says of it."""
    return IdentityKind.ROUTER if role is Role.ROUTER else IdentityKind.WORKER


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


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, valid: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + valid)
    )


def _name(text: str) -> x509.Name:
    # A common name has 64 characters at most (RFC 5280, ub-common-name); identities are in URIs.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _names(uris: Sequence[str], hosts: Sequence[str]) -> list[x509.GeneralName]:
    return [*map(x509.UniformResourceIdentifier, uris), *map(_host, hosts)]


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _lasts(certificate: x509.Certificate) -> bool:
    return certificate.not_valid_after_utc - datetime.now(UTC) > _RENEWED_BEFORE_END


def _certificates_in(file: Path) -> Sequence[x509.Certificate]:
    """Those in ``file``; none if it is missing, empty or broken."""
    try:
        return x509.load_pem_x509_certificates(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return ()


def _holds_all(found: Sequence[x509.Certificate], wanted: Iterable[x509.Certificate]) -> bool:
    return all(certificate in found for certificate in wanted)


def _is_key_of(certificate: x509.Certificate, key_file: Path) -> bool:
    try:
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
    except (FileNotFoundError, ValueError, TypeError):  # TypeError: it takes a password, which services have not either
        return False
    return _public_bytes(key.public_key()) == _public_bytes(certificate.public_key())


def _kept_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """The authority's key in ``file``, or a new one that is there from now on."""
    if not file.is_file():
        key = ec.generate_private_key(ec.SECP256R1())
        write_secret_file(file, _pem_of(key))
        return key
    try:
        kept = serialization.load_pem_private_key(file.read_bytes(), None)
    except (ValueError, TypeError) as error:
        remedy = "bring it back; without the file, a new authority makes all certificates anew"
        raise ValueError(f"{file} holds no key that can be used: {remedy}") from error
    if not isinstance(kept, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{file} holds another kind of key than ours")
    return kept


def _public_bytes(key: CertificatePublicKeyTypes | PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )

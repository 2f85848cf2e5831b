"""When certificates end: as the package cryptography reads it, for every form that a certificate can have."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from quartet.rpc.certificate_end import certificate_end

KEY = ec.generate_private_key(ec.SECP256R1())
BEGIN = datetime(1951, 1, 1, tzinfo=UTC)


def certificate(end: datetime, *, serial: int = 1, units: int = 1) -> bytes:
    """One in PEM; many ``units`` make its issuer's name long."""
    unit = x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "unit " * 10)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "one"), *[unit] * units])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(KEY.public_key())
    builder = builder.serial_number(serial).not_valid_before(BEGIN).not_valid_after(end)
    return builder.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@given(
    end=st.datetimes(datetime(1951, 1, 2), datetime(9999, 12, 31), timezones=st.just(UTC)),
    serial=st.integers(1, 2**159 - 1),
    units=st.integers(0, 30),
)
def test_any_end_is_read_to_the_second(end: datetime, serial: int, units: int) -> None:
    # Until 2049 it is written with two digits of the year, then with four.
    assert certificate_end(certificate(end, serial=serial, units=units)) == end.replace(microsecond=0).timestamp()


def test_a_chain_ends_with_its_first_certificate_that_does() -> None:
    early, late = datetime(2030, 1, 1, tzinfo=UTC), datetime(2050, 1, 1, tzinfo=UTC)
    for ends in ((early, late), (late, early)):
        chain = b"a comment\n".join(certificate(end) for end in ends)
        assert certificate_end(chain) == early.timestamp()


def test_what_is_no_certificate_or_cut_off_is_an_error() -> None:
    whole = certificate(datetime(2030, 1, 1, tzinfo=UTC)).decode()
    lines = whole.splitlines()
    for wrong in ("", "no certificate", "\n".join([*lines[:3], lines[-1]]), whole.replace("MII", "AII", 1)):
        with pytest.raises(ValueError):
            certificate_end(wrong.encode())

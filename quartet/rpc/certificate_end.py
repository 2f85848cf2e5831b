"""When certificates end, read from PEM: the standard library can't, but for authorities' own certificates."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)

# Tags of DER (X.690), and before the validity in a certificate: serial number, algorithm, issuer (RFC 5280, 4.1).
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_NUM_BEFORE_VALIDITY = 3
_LONG_LENGTH = 0x80


def certificate_end(pem: bytes) -> float:
    """Seconds of Unix time at which the first certificate of a chain in ``pem`` ends, after which none is accepted.

    Raises:
        ValueError: a certificate is malformed, or there is none.
    """
    chain = _PEM.findall(pem.decode("ascii", "replace"))
    if not chain:
        raise ValueError("there is no whole certificate")
    try:
        return min(_end(ssl.PEM_cert_to_DER_cert(one)) for one in chain)
    except IndexError as error:
        raise ValueError("a certificate is cut off") from error


def _end(certificate: bytes) -> float:
    """That of one certificate in DER."""
    [(tag, body), *_] = _elements(certificate)
    [(_, to_be_signed), *_] = _elements(body)
    fields = [field for field in _elements(to_be_signed) if field[0] != _VERSION]
    validity_tag, validity = fields[_NUM_BEFORE_VALIDITY]
    if tag != _SEQUENCE or validity_tag != _SEQUENCE:
        raise ValueError("this is no certificate")
    _begin, (kind, text) = _elements(validity)
    return _time(kind, text.decode("ascii"))


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """The tag and the content of each element. Raises ``IndexError`` if one is cut off."""
    place = 0
    while place < len(der):
        tag, length, begin = der[place], der[place + 1], place + 2
        if length >= _LONG_LENGTH:
            num_digits = length - _LONG_LENGTH
            length, begin = int.from_bytes(der[begin : begin + num_digits]), begin + num_digits
        place = begin + length
        if place > len(der):
            raise IndexError
        yield tag, der[begin:place]


def _time(kind: int, text: str) -> float:
    if kind == _UTC_TIME:
        # Two digits of the year: those from 50 on are of the last century (RFC 5280, 4.1.2.5.1).
        text = ("19" if text >= "50" else "20") + text
    elif kind != _GENERALIZED_TIME:
        raise ValueError("a certificate has no end")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()

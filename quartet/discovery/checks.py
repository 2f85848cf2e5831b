"""What the values of a worker record, and other names of discovery, must be; each check raises ``ValueError``.

A client that may write to a registry chooses a record's values. Readers dial its addresses, log and show its texts and
make objects by its counts. So every value has bounds, which ``WorkerRecord`` checks however it is made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Characters of a text, and names in a list of them.
MAX_TEXT_LENGTH, MAX_NAMES = 256, 1024
#: A router keeps an account for every rank.
MAX_RANKS = 1024
#: Of any other count: it fits a signed 32-bit number, and so every message.
MAX_COUNT = 2**31 - 1

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# A host's name or IPv4 address, or an IPv6 address in brackets, which may name an interface.
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,32})?\]):([0-9]{1,5})")
_EVENTS_SCHEME = "tcp://"


def check_name(field: str, name: str) -> None:
    """Raise unless ``name`` can be part of a key and of a file name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{field} must be 1 to 128 letters, digits, '.', '_' or '-', not {name[:200]!r}")


def check_text(field: str, text: str) -> None:
    """Raise unless every character of ``text`` can be printed: no control character, no half of a surrogate pair."""
    if len(text) > MAX_TEXT_LENGTH or not text.isprintable():
        raise ValueError(f"{field} must be at most {MAX_TEXT_LENGTH} printable characters")


def check_texts(field: str, texts: Sequence[str]) -> None:
    """Raise unless ``texts`` are few enough and ``check_text`` passes each."""
    if len(texts) > MAX_NAMES:
        raise ValueError(f"{field} must have at most {MAX_NAMES} entries")
    for text in texts:
        check_text(field, text)


def is_address(address: str) -> bool:
    """Whether ``address`` is a ``host:port`` that can be dialled; IPv6 in brackets."""
    found = _ADDRESS.fullmatch(address)
    return found is not None and 1 <= int(found[1]) < 2**16


def check_address(field: str, address: str) -> None:
    """Raise unless ``is_address``."""
    if not is_address(address):
        raise ValueError(f"{field} must be host:port, IPv6 in brackets and the port from 1 to 65535")


def check_events_address(field: str, address: str) -> None:
    """Raise unless ``address`` is ``tcp://`` and then what ``check_address`` passes."""
    if not address.startswith(_EVENTS_SCHEME):
        raise ValueError(f"{field} must be {_EVENTS_SCHEME}host:port")
    check_address(field, address.removeprefix(_EVENTS_SCHEME))


def check_count(field: str, count: int, *, least: int = 0, most: int = MAX_COUNT) -> None:
    """Raise unless ``count`` is within both bounds."""
    if not least <= count <= most:
        raise ValueError(f"{field} must be from {least} to {most}")

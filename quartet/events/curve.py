"""CURVE on the events' sockets: one secret, in one file that every worker and router of a deployment has.

Workers serve with the key and accept only peers that dial with it; routers dial with it and accept only workers that
serve with it. So each end proves itself to the other, and discovery need not announce any key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from quartet.config import read_secret_file
from quartet.errors import ConfigError

_SETTING = "events_key_file"
_SECRET_BYTES = 32
_MAX_FILE_BYTES = 1 << 12
# A socket with a domain refuses all peers while no authenticator answers for the domain.
_DOMAIN = "quartet"


@dataclass(frozen=True)
class EventsKey:
    """A key pair in Z85, as ZMQ takes it."""

    public: bytes
    secret: bytes = field(repr=False)

    def serve_with(self, socket: zmq.Socket[bytes]) -> None:
        """Let ``socket`` be a server with this key; it takes ``guard`` on its context too. Before it binds."""
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def dial_with(self, socket: zmq.Socket[bytes]) -> None:
        """Let ``socket`` be a client of servers with this key. Before it connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def guard(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """Begin to let in clients with this key, and no others, at all servers of ``context``. To be stopped."""
        guard = ThreadAuthenticator(context)
        guard.start()
        guard.configure_curve_callback(_DOMAIN, self)
        return guard

    def callback(self, domain: str, key: bytes) -> bool:
        """For ``ThreadAuthenticator``: let in a peer that has proved to hold the secret of the public ``key``."""
        return key == self.public


def read_events_key(path: Path) -> EventsKey:
    """The key of a file that holds a secret of 32 bytes in hexadecimal, as ``openssl rand -hex 32`` draws it.

    Raises:
        ConfigError: the file can't be used, or users beside its owner and group may open it; the message never holds
            the secret.
    """
    content = read_secret_file(path, _SETTING, _MAX_FILE_BYTES)
    try:
        secret = bytes.fromhex(content.decode("ascii"))
    except ValueError:
        # `from None`: what lies beneath may quote the secret.
        raise ConfigError(f"{_SETTING}: {path} must hold hexadecimal digits") from None
    if len(secret) != _SECRET_BYTES:
        raise ConfigError(f"{_SETTING}: {path} must hold {_SECRET_BYTES} bytes in hexadecimal, not {len(secret)}")
    encoded = z85.encode(secret)
    return EventsKey(zmq.curve_public(encoded), encoded)

"""The server of rank 0; with ``--action stop`` it ends the server, and so the other ranks."""

from __future__ import annotations

import os
import selectors
import socket
import sys

_STOP = b"stop"


def address() -> tuple[str, int]:
    """Where the server is."""
    host, _, port = os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"].removeprefix("tcp://").rpartition(":")
    return host, int(port)


def _serve() -> None:
    with socket.create_server(address()) as server, selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        print("the server waits", flush=True)
        # The ranks' connections end with the process.
        while True:
            for key, _ in selector.select():
                if key.fileobj is server:
                    selector.register(server.accept()[0], selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket) and key.fileobj.recv(len(_STOP)) == _STOP:
                    return
                else:
                    selector.unregister(key.fileobj)


def _stop() -> None:
    with socket.create_connection(address()) as connection:
        connection.sendall(_STOP)


if __name__ == "__main__":
    if sys.argv[1:] == ["--action", "stop"]:
        _stop()
    else:
        _serve()

"""A rank other than 0: it waits for work until the server of rank 0 has ended."""

from __future__ import annotations

import socket

from tensorrt_llm.llmapi.mgmn_leader_node import address

if __name__ == "__main__":
    with socket.create_connection(address()) as connection:
        print("a rank waits", flush=True)
        connection.recv(1)

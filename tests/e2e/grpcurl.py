"""grpcurl as a person uses it: the real binary, run as a process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Answer:
    """What one run of grpcurl ended with."""

    code: int
    out: str
    err: str

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the answer, in order."""
        return parse_messages(self.out)

    @property
    def status(self) -> dict[str, Any]:
        """The error as ``-format-error`` shows it."""
        status: dict[str, Any] = json.loads(self.err)
        return status

    @property
    def field(self) -> str | None:
        """The field that BadRequest names."""
        for detail in self.status.get("details", ()):
            for violation in detail.get("fieldViolations", detail.get("field_violations", ())):
                return str(violation["field"])
        return None

    @property
    def reason(self) -> str | None:
        """The reason that ErrorInfo names."""
        return next((detail["reason"] for detail in self.status.get("details", ()) if "reason" in detail), None)


def parse_messages(text: str) -> list[dict[str, Any]]:
    """JSON objects one after the other."""
    decoder, messages, position = json.JSONDecoder(), [], 0
    while position < len(text := text.rstrip()):
        message, position = decoder.raw_decode(text, position)
        messages.append(message)
        position += len(text[position:]) - len(text[position:].lstrip())
    return messages


class Grpcurl:
    """Runs the binary against one address."""

    def __init__(self, binary: Path, address: str) -> None:
        self._binary = binary
        self._address = address

    async def list(self) -> list[str]:
        """The services that reflection lists."""
        answer = await self._run("list")
        assert answer.code == 0, answer.err
        return answer.out.split()

    async def describe(self, symbol: str) -> str:
        """A symbol's definition by reflection."""
        answer = await self._run("describe", symbol)
        assert answer.code == 0, answer.err
        return answer.out

    async def call(self, method: str, *requests: Mapping[str, object]) -> Answer:
        """Call ``method`` with these messages, then half-close, and wait for its end."""
        data = "".join(json.dumps(request) for request in requests)
        return await self._run("call", method, data=data)

    async def open(self, method: str) -> OpenCall:
        """Begin a call whose messages are given one by one."""
        return OpenCall(await self._start(["-format-error", "-d", "@"], [method]))

    async def _run(self, verb: str, symbol: str = "", data: str | None = None) -> Answer:
        if verb == "call":
            process = await self._start(["-format-error", "-d", "@"], [symbol])
        else:
            process = await self._start([], [verb, *([symbol] if symbol else [])])
        async with asyncio.timeout(_TIMEOUT_S):
            out, err = await process.communicate(data.encode() if data is not None else None)
        assert process.returncode is not None
        return Answer(process.returncode, out.decode(), err.decode())

    async def _start(self, options: Sequence[str], words: Sequence[str]) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        command = [str(self._binary), "-plaintext", *options, self._address, *words]
        return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)


class OpenCall:
    """A call that runs; messages go up and come down while it does."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._text = ""

    async def send(self, request: Mapping[str, object]) -> None:
        """Send one message up."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode())
        await self._process.stdin.drain()

    async def receive(self) -> dict[str, Any] | None:
        """The next message down; ``None`` at the end."""
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                try:
                    message, end = json.JSONDecoder().raw_decode(self._text)
                except json.JSONDecodeError:
                    if not await self._read_more():
                        return None
                    continue
                self._text = self._text[end:].lstrip()
                return dict(message)

    def half_close(self) -> None:
        """Say that no more messages go up; a method that takes one message begins only then."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def finish(self) -> Answer:
        """Half-close, and wait for the rest."""
        self.half_close()
        async with asyncio.timeout(_TIMEOUT_S):
            out, err = await self._process.communicate()
        assert self._process.returncode is not None
        return Answer(self._process.returncode, self._text + out.decode(), err.decode())

    async def kill(self) -> None:
        """End grpcurl as ``kill -9`` does, mid-call."""
        self._process.kill()
        await self._process.wait()

    async def _read_more(self) -> bool:
        assert self._process.stdout is not None
        chunk = await self._process.stdout.read(65536)
        self._text = (self._text + chunk.decode()).lstrip()
        return bool(chunk)
